"""algos/vpg.py: its policy gradient, and who moves what."""
import pytest
import torch

from algos import vpg
from tests.helpers import close, noted
from tests.onpolicy import (
    SPACES, Descent, distribution, learn, make_agent, make_rollout, parameters, targets)


@pytest.mark.parametrize("kind", SPACES)
def test_the_step_goes_up_grad_log_pi_times_the_advantage(kind, monkeypatch):
    """On average that is the policy gradient. The advantages are those of the critic that was."""
    agent = make_agent(vpg, kind)
    rollout = make_rollout(vpg, agent)
    adv, _ = targets(vpg, agent, rollout)
    acted = distribution(agent, rollout.obs.flatten(0, 1))
    expected = acted.log_prob(rollout.act.flatten(0, 1)).detach()
    policy = agent.policy(agent.encoder(agent.normalize_obs(rollout.obs).flatten(0, 1)))
    gain = (policy.log_prob(rollout.act.flatten(0, 1)) * adv).mean()
    params = agent.policy_parameters()
    grads, start = torch.autograd.grad(gain, params), [param.detach().clone() for param in params]
    calls = noted(monkeypatch, vpg, "policy_loss")
    learn(vpg, agent, rollout, Descent, lr=0.1)
    for param, old, grad in zip(params, start, grads, strict=True):
        close(param.detach() - old, 0.1 * grad, rtol=1e-4)
    (logp, given), = calls
    close(logp.detach(), expected, rtol=1e-4, atol=1e-5)
    close(given, adv, rtol=1e-4, atol=1e-5)
    assert not given.requires_grad


def test_the_critic_has_a_learning_rate_of_its_own():
    """Adam's first step is that long."""
    agent = make_agent(vpg, v_steps=1, v_lr=1e-3)
    before = parameters(agent.critic)
    learn(vpg, agent, make_rollout(vpg, agent), lr=1e-4)
    close((parameters(agent.critic) - before).abs().max(), 1e-3, rtol=0.02, atol=0)
