"""algos/sac_discrete.py against loops over samples and actions."""
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from scipy import stats

from algos import sac_discrete
from tests.helpers import VECTOR, bare, close, vec
from tests.offpolicy import dqn_agent, dqn_batch, fits, gradient_in, make_optimizers, update

each_kind = pytest.mark.parametrize("kind", ["vector", "film", "image"])


def make_agent(kind="vector", algo=sac_discrete, **settings):
    agent = dqn_agent(algo, kind, **settings)
    agent.log_alpha.data.fill_(-0.5)
    return agent


def make_batch(kind="vector", algo=sac_discrete, **given):
    return dqn_batch(algo, kind, **given)


def value(logits, q1, q2, alpha):
    """V(s) of one state, action by action."""
    pi = [math.exp(x) / sum(map(math.exp, logits.tolist())) for x in logits.tolist()]
    return sum(p * (min(a, b) - alpha * math.log(p))
               for p, a, b in zip(pi, q1.tolist(), q2.tolist(), strict=True))


# ---- The losses

@each_kind
def test_critics_fit_rewards_and_values_that_are_sums_over_actions(kind):
    """The gradient is that of a regression to numbers, of the action in the batch alone."""
    agent, batch = make_agent(kind, gamma=0.7), make_batch(kind)
    with torch.no_grad():
        logits = super(sac_discrete.Actor, agent.actor).forward(batch.next_obs)
        next_q = [q(batch.next_obs) for q in agent.critic_targ.children()]
    target = vec(*(value(*row, math.exp(-0.5)) for row in zip(logits, *next_q)))
    target = batch.rew + 0.7 * (1 - batch.terminated) * target
    ends = batch.terminated == 1
    assert ends.any() and torch.equal(target[ends], batch.rew[ends])
    qs = [torch.stack([q(batch.obs)[k, a] for k, a in enumerate(batch.act)])
          for q in agent.critic.children()]
    loss = sum(((q - target) ** 2).mean() for q in qs)
    metrics = fits(agent.critic, loss, sac_discrete.critic_loss, agent, batch, rtol=1e-3)
    close(metrics["critic_loss"], loss.detach(), rtol=1e-4)
    for name, q in zip(("q1", "q2"), qs):
        close(metrics[name], q.detach(), rtol=1e-4, atol=1e-5)


@each_kind
def test_the_actor_maximises_the_value_by_the_critics(kind):
    agent, batch = make_agent(kind), make_batch(kind)
    logits = super(sac_discrete.Actor, agent.actor).forward(batch.obs)
    q1, q2 = (q(batch.obs).detach() for q in agent.critic.children())
    values = [value(*row, math.exp(-0.5)) for row in zip(logits.detach(), q1, q2)]
    pi = logits.exp() / logits.exp().sum(-1, keepdim=True)
    loss = (pi * (math.exp(-0.5) * pi.log() - torch.min(q1, q2))).sum(-1).mean()
    close(loss.detach(), -np.mean(values), rtol=1e-4)
    metrics = fits(agent.actor, loss, sac_discrete.actor_loss, agent, batch, rtol=1e-3)
    close(metrics["actor_loss"], loss.detach(), rtol=1e-4)
    entropy = stats.entropy(pi.detach().numpy(), axis=1)        # of each state
    close(metrics["entropy"], entropy, rtol=1e-4)
    assert not metrics["entropy"].requires_grad
    sac_discrete.actor_loss(agent, batch)[0].backward()
    assert all(param.grad is None for param in agent.critic.parameters())   # Q is a constant


def test_an_action_of_probability_0_leaves_all_finite():
    """log pi is -300, which the logarithm of a probability in float32 cannot say."""
    agent = make_agent(hidden=(), num_acts=3)
    agent.actor.head[0].weight.data.zero_()
    agent.actor.head[0].bias.data = vec(0, -300, 0)
    batch = make_batch(size=3)
    logp = agent.actor(batch.obs)
    close(logp, vec((-math.log(2), -300 - math.log(2), -math.log(2))).expand(3, 3))
    loss, metrics, grad = gradient_in(agent.actor, sac_discrete.actor_loss, agent, batch)
    close(metrics["entropy"], torch.full((3,), math.log(2)))
    assert loss.isfinite() and grad.isfinite().all()


# ---- The temperature, and updates

@pytest.mark.parametrize("ratio,entropy,derivative", [
    (0.5, math.log(4), 0.5 * math.log(4)), (0.5, 0.0, -0.5 * math.log(4)),
    (0.98, math.log(2), -0.48 * math.log(4)), (0.0, 0.3, 0.3)])
def test_the_temperature_moves_towards_a_share_of_the_highest_entropy(ratio, entropy, derivative):
    """It falls where its derivative is positive. The highest of 4 actions is log 4."""
    agent = make_agent(target_entropy_ratio=ratio)
    loss, metrics, grad = gradient_in(agent.log_alpha, sac_discrete.alpha_loss, agent,
                                      torch.full((5,), -entropy))
    close(grad, [derivative])
    close(loss, -0.5 * derivative)
    close(metrics["alpha"], math.exp(-0.5))


def test_a_fixed_temperature_stays_and_may_be_0():
    """Without the bonus, the values are those of Q alone."""
    agent, batch = make_agent(alpha=0.0, learn_alpha=False), make_batch()
    loss = sac_discrete.actor_loss(agent, batch)[0].detach()
    pi, q = agent.actor(batch.obs).exp(), torch.min(*agent.critic(batch.obs))
    close(loss, -(pi * q).sum(-1).mean().detach())
    optimizers = make_optimizers(agent)
    metrics = update(sac_discrete, agent, optimizers, batch)
    assert not {"alpha", "alpha_loss", "alpha_grad_norm"} & set(metrics)
    assert agent.alpha() == 0 and agent.log_alpha == -0.5 and optimizers["alpha"].steps == 0


def test_five_updates_are_those_of_torchs_adam():
    """In float64: critics first, then the actor by them, then alpha; last, the targets follow."""
    algo = bare(sac_discrete)
    settings = {"lr": 1e-2, "tau": 0.05, "gamma": 0.9, "target_entropy_ratio": 0.5}
    ours, theirs = (make_agent(algo=algo, **settings).double() for _ in range(2))
    parts = [list(theirs.critic.parameters()), list(theirs.actor.parameters()), [theirs.log_alpha]]
    steps = [torch.optim.Adam(part, 1e-2) for part in parts]
    optimizers = make_optimizers(ours)
    for k in range(5):
        batch = make_batch(algo=algo, seed=k, dtype=torch.float64)
        update(algo, ours, optimizers, batch)
        for part, step in zip(parts, steps):
            if step is steps[0]:
                loss = algo.critic_loss(theirs, batch)[0]
            elif step is steps[1]:
                loss, metrics = algo.actor_loss(theirs, batch)
            else:                                               # pi is that of before its step
                loss = -theirs.log_alpha * (0.5 * math.log(4) - metrics["entropy"].mean())
            for param, grad in zip(part, torch.autograd.grad(loss, part)):
                param.grad = grad
            step.step()
        for slow, fast in zip(theirs.critic_targ.parameters(), theirs.critic.parameters()):
            slow.data = 0.95 * slow.data + 0.05 * fast.data
    for name, param in theirs.named_parameters():
        close(dict(ours.named_parameters())[name], param, rtol=1e-9, atol=1e-12)


# ---- Acting

def test_actions_are_drawn_as_often_as_the_policy_says_and_the_best_is_the_likeliest():
    agent, obs = make_agent(), torch.randn(1, 3)
    pi = agent.actor(obs)[0].exp().detach().double()
    acts = agent.act(obs.expand(20_000, 3))
    assert acts.shape == (20_000,) and acts.dtype == torch.int64
    counts = torch.bincount(acts, minlength=4).numpy()
    assert stats.chisquare(counts, (20_000 * pi / pi.sum()).numpy()).pvalue > 1e-3
    many = 3 * torch.randn(50, 3)
    best = [max(range(4), key=row.__getitem__) for row in agent.actor(many).tolist()]
    assert agent.act(many, deterministic=True).tolist() == best and len(set(best)) > 1
    counts = torch.bincount(agent.random_act(20_000), minlength=4)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_networks_share_nothing_and_one_action_is_no_choice():
    agent = make_agent("image")
    nets = agent.actor, agent.critic.q1, agent.critic.q2
    params = [param for net in nets for param in net.parameters()]
    assert len({param.data_ptr() for param in params}) == len(params) == 3 * 10
    only = sac_discrete.Agent(VECTOR, Discrete(1), sac_discrete.Config())
    assert only.target_entropy == 0 and only.act(torch.ones(2, 3)).tolist() == [0, 0]
