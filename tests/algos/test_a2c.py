"""algos/a2c.py: its update, and stable-baselines3's step."""
import copy

import pytest
import torch
from stable_baselines3 import A2C
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from algos import a2c, acktr
from tests.algos.test_contract import build
from tests.helpers import Nowhere, close, give, name_of
from tests.onpolicy import (
    SPACES, Descent, distribution, learn_with, losses, make_agent, make_optimizers, make_rollout,
    pairs, parameters, targets, use_the_entropy_before_tanh)
from tests.registry import config
from utils.optim import RMSProp

and_child = pytest.mark.parametrize("algo", [a2c, acktr], ids=name_of)


@pytest.mark.parametrize("rule", ["tf", "torch"])
def test_the_flag_chooses(rule):
    optimizer = build("a2c", config("a2c", rmsprop=rule, rmsprop_eps=0.5))["optimizer"]
    assert optimizer.tf_style == (rule == "tf") and optimizer.eps == 0.5
    assert (optimizer.square > 0.9).all() == (rule == "tf")


@and_child
@pytest.mark.parametrize("kind", SPACES)
def test_one_step_on_the_whole_batch(algo, kind, monkeypatch):
    """Down its gradient, or by the step of the natural gradient."""
    agent = make_agent(algo, kind, max_grad_norm=0.0)
    rollout = make_rollout(algo, agent)
    start, before = parameters(agent), copy.deepcopy(agent)
    adv, ret = targets(algo, agent, rollout)
    calls = losses(monkeypatch, algo, "a2c_loss")
    [optimizer] = make_optimizers(algo, agent, Descent)
    after, metrics = learn_with(algo, agent, [optimizer], rollout, lr=0.1)
    (batch,) = calls
    close(batch.obs, agent.normalize_obs(rollout.obs).flatten(0, 1))
    assert torch.equal(batch.act, rollout.act.flatten(0, 1))
    close(batch.adv, adv, rtol=1e-4, atol=1e-5)
    close(batch.ret, ret, rtol=1e-4, atol=1e-5)
    assert not (batch.adv.requires_grad or batch.ret.requires_grad)
    if algo is acktr:
        close(start - after, optimizer.M, rtol=1e-3)
        assert metrics["step_size"] <= 0.1 and metrics["v_step_size"] <= 0.1
        old, new = (distribution(each, rollout.obs.flatten(0, 1)).log_prob(batch.act)
                    for each in (before, agent))
        close(metrics["kl"], ((new - old).exp() - 1 - (new - old)).mean(), rtol=1e-3, atol=1e-6)
    else:
        close(start - after, 0.1 * optimizer.grad, rtol=1e-3)
        close(metrics["grad_norm"], optimizer.grad.norm())


@pytest.mark.parametrize("kind", ["box", "discrete"])
@pytest.mark.parametrize("tf,rule", [(True, RMSpropTFLike), (False, torch.optim.RMSprop)])
def test_loss_gradient_and_ten_steps_are_those_of_stable_baselines3(kind, tf, rule, monkeypatch):
    use_the_entropy_before_tanh(monkeypatch)
    agent = make_agent(a2c, kind, num_envs=4, rollout_steps=64, ent_coef=0.1, max_grad_norm=0.5)
    policy = {"net_arch": [8, 8], "optimizer_class": rule,
              "optimizer_kwargs": {"alpha": 0.99, "eps": 0.03}}   # where it stands shows, too
    model = A2C("MlpPolicy", Nowhere(*SPACES[kind]), 1e-2, n_steps=64, ent_coef=0.1, vf_coef=0.5,
                max_grad_norm=0.5, policy_kwargs=policy, device="cpu")
    give(model, pairs(agent, model.policy))
    start, optimizer = parameters(agent), RMSProp(agent, 0.03, tf)
    calls = losses(monkeypatch, a2c, "a2c_loss")
    for seed in range(10):
        metrics = a2c.update(agent, optimizer, make_rollout(a2c, agent, seed), 1e-2)
        batch, nothing = calls[-1], torch.zeros(64)
        sample = RolloutBufferSamples(batch.obs, batch.act, nothing, nothing, batch.adv, batch.ret)
        model.rollout_buffer.get = lambda batch_size, sample=sample: iter([sample])
        model.train()
        logged = model.logger.name_to_value
        close(metrics["pi_loss"], logged["train/policy_loss"], rtol=1e-5, atol=1e-5)
        close(metrics["v_loss"], logged["train/value_loss"], rtol=1e-5)
        close(metrics["entropy"], -logged["train/entropy_loss"], rtol=1e-4)
        assert metrics["grad_norm"] > 0.5  # so that clipping is compared too
        for our, their in pairs(agent, model.policy):
            close(our.grad, their.grad, rtol=1e-4, atol=1e-6)
            close(our.data, their.data, rtol=0, atol=2e-6)
    assert (parameters(agent) - start).abs().max() > 1e-3
