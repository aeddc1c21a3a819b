"""algos/vpg.py: the policy gradient against one that is known, and who moves what."""
import copy
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch

from algos import vpg
from tests.helpers import close, noted, vec
from tests.onpolicy import (
    SPACES, Still, distribution, learn, make_agent, make_optimizers, make_rollout, parameters,
    targets)


# ---- A chain of two states, whose policy gradient is known

# In state 0 action 1 pays 1 and leads to state 1, where action 1 pays 3; the others pay nothing
# and lead nowhere. An episode has two steps. With p = pi(1 | 0) and q = pi(1 | 1) its return is
# p (1 + 3 q) + (1 - p) p.
SEEN = torch.eye(2)


def closed_form(logits):
    """The gradient of the expected return in the logits, by hand."""
    p, q = logits.softmax(-1)[:, 1]
    by_p, by_q = (2 + 3 * q - 2 * p) * p * (1 - p), 3 * p * q * (1 - q)
    return torch.stack([torch.stack([-by_p, by_p]), torch.stack([-by_q, by_q])])


def chain_agent(val):
    """Linear in what it sees, so that the weights' gradient is that of the logits."""
    space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    cfg = vpg.Config(hidden=(), gamma=1.0, lam=1.0, rollout_steps=2, minibatch_size=1, num_envs=1,
                     v_steps=1, norm_obs=False, scale_rew=False)
    agent = vpg.Agent(space, gym.spaces.Discrete(2), cfg)
    agent.actor[-1].weight.data = vec((0.3, -0.4), (0.9, 0.2))  # [action, state]
    agent.critic[-1].weight.data = vec(val)
    agent.critic[-1].bias.data.zero_()
    return agent


def chain_rollout(first, second):
    """Whole episodes in which these actions, [N], were taken."""
    where, none, one = first, torch.zeros(len(first)), torch.ones(len(first))
    rew = torch.stack([first.float(), second * torch.where(where == 1, 3.0, 1.0)])
    obs = torch.stack([SEEN[torch.zeros_like(first)], SEEN[where]])
    ends = torch.stack([none, one])
    return vpg.Rollout(obs, torch.stack([first, second]), rew, obs.roll(-1, 0), ends, ends)


def exact_expectation(agent):
    """The mean of `update`'s estimate over the four courses of an episode, by their probabilities.

    It is the gradient of the expected return [state, action].
    """
    probs, total = agent.actor[-1].weight.detach().T.softmax(-1), torch.zeros(2, 2)
    for first, second in itertools.product(range(2), repeat=2):
        twin, acts = copy.deepcopy(agent), (torch.tensor([first]), torch.tensor([second]))
        vpg.update(twin, *make_optimizers(vpg, twin, Still), chain_rollout(*acts), 0.0)
        gain = -2 * twin.actor[-1].weight.grad.T  # the loss is a mean over two steps
        total += probs[0, first] * probs[first, second] * gain
    return total


@pytest.mark.parametrize("val", [(0.0, 0.0), (2.0, -5.0)], ids=["no baseline", "a wrong one"])
def test_the_estimate_has_the_gradient_as_its_mean_whatever_the_baseline(val):
    agent = chain_agent(val)
    close(exact_expectation(agent), closed_form(agent.actor[-1].weight.detach().T), rtol=1e-4)


# ---- Who moves what

@pytest.mark.parametrize("kind", SPACES)
def test_the_policys_loss_is_given_the_advantages_of_the_critic_that_was(kind, monkeypatch):
    agent = make_agent(vpg, kind)
    rollout = make_rollout(vpg, agent)
    adv, _ = targets(vpg, agent, rollout)
    acted = distribution(agent, rollout.obs.flatten(0, 1))
    expected = acted.log_prob(rollout.act.flatten(0, 1)).detach()
    calls = noted(monkeypatch, vpg, "policy_loss")
    learn(vpg, agent, rollout, lr=1e-2)
    (logp, given), = calls
    close(logp.detach(), expected, rtol=1e-4, atol=1e-5)
    close(given, adv, rtol=1e-4, atol=1e-5)
    assert not given.requires_grad


def test_learning_rates():
    results = []
    for lr, v_lr in ((1e-4, 1e-3), (2e-4, 1e-3)):
        agent = make_agent(vpg, v_steps=1, v_lr=v_lr)
        before = copy.deepcopy(agent)
        _, metrics = learn(vpg, agent, make_rollout(vpg, agent), lr=lr)
        assert metrics["lr"] == lr
        for part, size in (("actor", lr), ("critic", v_lr)):  # Adam's first step is of length lr
            old, new = (parameters(getattr(x, part)) for x in (before, agent))
            results.append(((new - old).abs().max() / size).item())
    close(results, [1.0] * 4, rtol=0.02)
