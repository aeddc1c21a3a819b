"""algos/td3.py by hand and against stable-baselines3."""
import math

import torch
from stable_baselines3 import TD3
from stable_baselines3.common.logger import configure

from algos import td3
from tests import helpers, offpolicy
from tests.helpers import bare, close, column
from tests.offpolicy import (
    THREE, gradient_in, linear_agent, make_agent, make_batch, make_optimizers, noise_is, update)


# ---- Hand values

def test_critic_loss_and_gradient_by_hand():
    """Q_targ are 9 and 13.5 at s' = 3, a' = 0.5; 43 and 30.5 at 20: in each row another is lower.

    The third is an end: y = 5.5, 13.25, 1; Q_1 = s + a is 1.5, 1, 2 and Q_2 = 2 s is 2, 4, 6.
    """
    agent = linear_agent(td3, [(1.0, 1.0, 0.0), (2.0, 0.0, 0.0)],
                         [(2.0, 4.0, 1.0), (1.0, 1.0, 10.0)], gamma=0.5)
    agent.actor_targ[0] = offpolicy.line([0.0], math.atanh(0.5)).requires_grad_(False)
    with noise_is(torch.zeros(3, 1)):
        loss, metrics, grad = gradient_in(agent.critic, td3.critic_loss, agent,
                                          td3.Transitions(**THREE))
    close(metrics["q1"], [1.5, 1, 2])
    close(metrics["q2"], [2.0, 4, 6])
    first, second = (-4.0, -12.25, 1), (-3.5, -9.25, 5)             # Q - y
    close(loss, sum(x * x for x in first) / 3 + sum(x * x for x in second) / 3)
    close(metrics["critic_loss"], loss)
    # Of s, of a, of the bias: the mean of 2 (Q - y) times what the weight stands at.
    close(1.5 * grad, [-4 - 24.5 + 3, -2 + 12.25 - 1, -15.25,
                       -3.5 - 18.5 + 15, -1.75 + 9.25 - 5, -7.75])


def test_noise_on_the_targets_action_by_hand():
    act, eps = column(0.5, 0.5, -0.8, 0.1, 0.1), column(1.0, 10, -3, 2.5, -2.6)
    with noise_is(eps, eps):
        close(td3.add_clipped_noise(act, 0.2, 0.5), column(0.7, 1.0, -1.0, 0.6, -0.4))
        close(td3.add_clipped_noise(act, 0.0, 0.5), act)


# ---- stable-baselines3

def pairs(agent, policy):
    """Our parameter and theirs, all of them."""
    theirs = policy.actor.mu, policy.actor_target.mu, *policy.critic.q_networks, \
        *policy.critic_target.q_networks
    ours = agent.actor, agent.actor_targ, agent.critic.q1, agent.critic.q2, agent.critic_targ.q1, \
        agent.critic_targ.q2
    return [pair for a, b in zip(ours, theirs, strict=True)
            for pair in zip(a.parameters(), b.parameters(), strict=True)]


def test_losses_and_ten_updates_are_those_of_stable_baselines3(monkeypatch):
    """In float64, on one noise for both."""
    algo = bare(td3)
    settings = {"tau": 0.05, "gamma": 0.9, "policy_delay": 3}
    agent = make_agent(algo, space=helpers.UNIT, lr=1e-3, act_noise=0.3, target_noise=0.25,
                       noise_clip=0.4, **settings).double()
    spaces = helpers.Nowhere(helpers.VECTOR, helpers.UNIT)
    model = TD3("MlpPolicy", spaces, 1e-3, target_policy_noise=0.25, target_noise_clip=0.4,
                device="cpu", buffer_size=1, policy_kwargs={"net_arch": [16, 16]}, **settings)
    model.set_logger(configure(None, []))
    model.policy.double()
    for our, their in pairs(agent, model.policy):
        their.data.copy_(our.data)
    optimizers = make_optimizers(agent)
    batches = [make_batch(algo, seed=k, dtype=torch.float64) for k in range(10)]
    noise = [torch.randn(32, 2, dtype=torch.float64) for _ in batches]
    model.replay_buffer = offpolicy.TheirBuffer(batches)
    with monkeypatch.context() as patch:
        left = iter(noise)
        patch.setattr(torch.Tensor, "normal_", lambda self, mean, std: self.copy_(std * next(left)))
        patch.setattr("stable_baselines3.common.policies.preprocess_obs", offpolicy.as_it_is)
        model.train(10, 32)
        assert next(left, None) is None
    with noise_is(*noise):
        metrics = [update(algo, agent, optimizers, batch, count=k)
                   for k, batch in enumerate(batches)]
    theirs = model.logger.name_to_value
    for name, count in (("critic_loss", 10), ("actor_loss", 3)):
        losses = [each[name] for each in metrics if name in each]
        assert len(losses) == count
        close(torch.stack(losses).mean(), theirs[f"train/{name}"], rtol=1e-10)
    for our, their in pairs(agent, model.policy):
        close(our, their, rtol=1e-9, atol=1e-12)
