"""algos/ppo.py: what `update` gives to its loss, and stable-baselines3's step."""
import copy
import math
from functools import partial
from itertools import product

import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from algos import ppo
from tests import onpolicy
from tests.algos.test_contract import build
from tests.helpers import Nowhere, close, give, vec
from tests.onpolicy import (
    SPACES, distribution, every_kind, pairs, parameters, rows_of, use_the_entropy_before_tanh)
from tests.registry import config
from utils.optim import Adam

make_agent = partial(onpolicy.make_agent, ppo)
make_rollout = partial(onpolicy.make_rollout, ppo)
targets = partial(onpolicy.targets, ppo)
learn = partial(onpolicy.spied, ppo, "ppo_loss")

vectors = pytest.mark.parametrize("kind", ["box", "discrete"])


def test_normalize_adv_by_hand():
    adv = vec((1, 2, 3), (10, 30, 20), (5, 5, 5))  # three minibatches, each by its own statistics
    high = math.sqrt(1.5)  # 1 / sqrt(2/3): the variance divides by n
    close(ppo.normalize_advantages(adv), vec((-high, 0, high), (-high, high, 0), (0, 0, 0)))
    close(ppo.normalize_advantages(vec((0, 2e-8))), vec((-0.5, 0.5)))  # epsilon outside the root
    close(ppo.normalize_advantages(vec((3,), (-7,))), vec((0,), (0,)))


# ---- What the loss is given

@every_kind
def test_the_old_probabilities_are_those_of_acting(kind):
    agent = make_agent(kind, minibatch_size=8)
    rollout = make_rollout(agent)
    acting = distribution(agent, rollout.obs.flatten(0, 1))
    logp = acting.log_prob(rollout.act.flatten(0, 1))
    if kind == "box":
        assert (rollout.act.abs() > 1).any()  # what the environment clips, the policy does not
    for call in learn(agent, rollout)[0]:
        rows = rows_of(call, agent, rollout)
        assert torch.equal(call.act, rollout.act.flatten(0, 1)[rows])
        close(call.logp_old, logp[rows], atol=1e-5)


@vectors
def test_every_sample_is_taken_once_an_epoch_and_in_a_new_order(kind):
    agent = make_agent(kind, minibatch_size=4, epochs=3)
    rollout = make_rollout(agent)
    calls, *_ = learn(agent, rollout)
    orders = torch.stack([rows_of(call, agent, rollout) for call in calls]).view(3, 24)
    assert torch.equal(orders.sort(1).values, torch.arange(24).expand(3, 24))
    assert len({tuple(order) for order in [range(24), *orders.tolist()]}) == 4


@every_kind
@pytest.mark.parametrize("anew", [True, False])
def test_targets_follow_the_critic_from_epoch_to_epoch_but_logp_old_does_not(kind, anew):
    agent = make_agent(kind, epochs=3, norm_adv=False, gamma=0.9, lam=0.8, recompute_adv=anew)
    rollout, before = make_rollout(agent), copy.deepcopy(agent)
    calls, *_ = learn(agent, rollout, lr=1e-2)
    rows = [rows_of(call, agent, rollout) for call in calls]
    for call, order in zip(calls, rows):
        adv, ret = targets(call.agent if anew else before, rollout)
        close(call.adv, adv[order], rtol=1e-4, atol=1e-5)
        close(call.ret, ret[order], rtol=1e-4, atol=1e-5)
        assert not (call.adv.requires_grad or call.ret.requires_grad or call.logp_old.requires_grad)
    first, *_, last = (call.ret[order.argsort()] for call, order in zip(calls, rows))
    assert ((first - last).abs().max() > 0.01) == anew
    first, *_, last = (call.logp_old[order.argsort()] for call, order in zip(calls, rows))
    assert torch.equal(first, last)


@pytest.mark.parametrize("minibatch", [24, 8])
def test_norm_adv_normalizes_each_minibatch(minibatch):
    agent = make_agent(minibatch_size=minibatch)
    rollout = make_rollout(agent)
    adv, _ = targets(agent, rollout)
    for call in learn(agent, rollout, lr=0.0)[0]:
        own = adv[rows_of(call, agent, rollout)]
        close(call.adv, (own - own.mean()) / own.std(correction=0), rtol=1e-4, atol=1e-5)


# ---- Steps and metrics, also against stable-baselines3

@every_kind
def test_metrics_say_what_happened(kind):
    agent = make_agent(kind, minibatch_size=8, epochs=4, clip_ratio=0.05)
    rollout, before = make_rollout(agent), copy.deepcopy(agent)
    calls, _, metrics = learn(agent, rollout, lr=1e-3 if kind == "images" else 1e-2)
    obs, act = rollout.obs.flatten(0, 1), rollout.act.flatten(0, 1)
    old, new = (distribution(x, obs).log_prob(act) for x in (before, agent))
    ratio = (new - old).exp()
    outside = (ratio - 1).abs() > 0.05
    assert 0 < outside.sum() < 24
    close(metrics["clip_frac"], outside.float().mean())
    close(metrics["kl"], (ratio - 1 - ratio.log()).mean(), rtol=1e-3)
    told = []
    for then, *columns in (vars(call).values() for call in calls):
        loss, found = ppo.ppo_loss(then, ppo.Minibatch(*columns))
        grads = torch.autograd.grad(loss, list(then.parameters()))
        told.append(found | {"grad_norm": torch.nn.utils.get_total_norm(grads)})
    assert len(told) == 12
    for name in told[0]:
        close(metrics[name], torch.stack([each[name] for each in told]).detach(), rtol=1e-4)


def drifted(batch):
    """Return a minibatch of another old policy, so that ratios leave the range at once."""
    noise = torch.linspace(-0.5, 0.5, len(batch.ret))  # of shuffled samples
    return type(batch)(**vars(batch) | {"logp_old": batch.logp_old + noise})


@vectors
@pytest.mark.parametrize("num_steps", [1, 10])
def test_loss_gradient_and_step_are_those_of_stable_baselines3(kind, num_steps, monkeypatch):
    """Advantages come normalised from us."""
    use_the_entropy_before_tanh(monkeypatch)
    shared = {"ent_coef": 0.01, "vf_coef": 0.25, "max_grad_norm": 0.2}
    agent = make_agent(kind, num_envs=4, rollout_steps=64 * num_steps, minibatch_size=64,
                       clip_ratio=0.15, **shared)
    model = PPO("MlpPolicy", Nowhere(*SPACES[kind]), 1e-3, n_steps=64, n_epochs=1, clip_range=0.15,
                normalize_advantage=False, device="cpu", **shared,
                policy_kwargs={"net_arch": [8, 8], "optimizer_kwargs": {"eps": 1e-5}})
    give(model, pairs(agent, model.policy))
    start, plain = parameters(agent), ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda agent, batch: plain(agent, drifted(batch)))
    calls, flat, metrics = learn(agent, make_rollout(agent))
    calls = [drifted(call) for call in calls]
    assert len(calls) == num_steps
    for call in calls:                                          # ratios leave on both sides
        policy = call.agent.policy(call.agent.encoder(call.obs))
        ratio = (policy.log_prob(call.act) - call.logp_old).exp()
        for side, sign in product((ratio > 1.15, ratio < 0.85), (call.adv > 0, call.adv < 0)):
            assert (side & sign).float().mean() > 0.03

    samples = [RolloutBufferSamples(call.obs, call.act, torch.zeros(64), call.logp_old, call.adv,
                                    call.ret) for call in calls]
    model.rollout_buffer.get = lambda batch_size: iter(samples)
    model.train()
    logged = model.logger.name_to_value
    close(metrics["pi_loss"].mean(), logged["train/policy_gradient_loss"], rtol=1e-4, atol=1e-6)
    close(metrics["v_loss"].mean(), logged["train/value_loss"], rtol=1e-4)
    close(metrics["entropy"].mean(), -logged["train/entropy_loss"], rtol=1e-4)
    assert metrics["grad_norm"].min() > agent.cfg.max_grad_norm  # so that the cut is compared too
    assert (flat - start).abs().max() > 9e-4 * num_steps**0.5
    for our, their in pairs(agent, model.policy):
        close(our.grad, their.grad, rtol=1e-3, atol=1e-6 * num_steps)
        close(our.data, their.data, rtol=0, atol=1e-6 * num_steps)


def test_training_has_the_optimizer_of_stable_baselines3():
    """Adam (utils/optim.py is compared with PyTorch's) with an epsilon, and nothing else is set."""
    ours = build("ppo", config("ppo"))["optimizer"]
    theirs = PPO("MlpPolicy", Nowhere(*SPACES["discrete"]), device="cpu").policy.optimizer
    assert type(ours) is Adam and type(theirs) is torch.optim.Adam
    assert theirs.defaults == torch.optim.Adam(
        [torch.zeros(1)], lr=theirs.defaults["lr"], eps=ours.eps).defaults
