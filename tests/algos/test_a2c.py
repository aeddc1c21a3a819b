"""algos/a2c.py: its loss, and stable-baselines3's step."""
import math

import pytest
import torch
from stable_baselines3 import A2C
from stable_baselines3.common.logger import configure
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from algos import a2c, acktr, vpg
from tests.helpers import (
    LOG_2PI, Nowhere, bare, close, gradients, name_of, refuses_columns, same, steps, vec)
from tests.onpolicy import (
    SPACES, Descent, learn_with, make_agent, make_optimizers, make_rollout, pairs, parameters,
    targets, tiny_agent)
from utils import mpi

every_kind = pytest.mark.parametrize("kind", SPACES)
and_child = pytest.mark.parametrize("algo", [a2c, acktr], ids=name_of)


# ---- The loss, also of its parent and its child

@pytest.mark.parametrize("algo", [vpg, a2c, acktr], ids=name_of)
def test_policy_loss_by_hand(algo):
    loss, by_logp = gradients(lambda x: algo.policy_loss(x, vec(3, -1, 2)), vec(-1, -2, -0.5))
    close(loss, (3 - 2 + 1) / 3)
    close(by_logp, -vec(3, -1, 2) / 3)  # what did better than expected becomes likelier
    refuses_columns(bare(algo).policy_loss, 2)


@and_child
def test_the_loss_refuses_a_column_of_returns(algo):
    plain = bare(algo)
    batch = plain.Batch(torch.zeros(4, 3), torch.zeros(4, 2), torch.zeros(4), torch.zeros(4, 1))
    with pytest.raises(AssertionError):
        plain.a2c_loss(make_agent(algo), batch)


@and_child
def test_whole_loss_by_hand(algo):
    agent = tiny_agent(algo, mu=1, log_std=math.log(2), val=2, hidden=(1,), vf_coef=0.5,
                       ent_coef=0.1)
    act = vec((1,), (5,))  # 0 and 2 deviations off
    loss, metrics = algo.a2c_loss(agent, algo.Batch(vec((3,), (4,)), act, vec(1, -2), vec(5, 1)))
    names, params = zip(*agent.named_parameters())
    grads = dict(zip(names, torch.autograd.grad(loss, params)))
    low = -math.log(2) - LOG_2PI / 2  # log pi of the first; that of the second is 2 less
    pi_loss, bonus = -(low - 2 * (low - 2)) / 2, math.log(2) + LOG_2PI / 2 + 0.5
    close(metrics["pi_loss"], pi_loss)
    close(metrics["v_loss"], 5)
    close(metrics["entropy"], bonus)
    close(loss.detach(), pi_loss + 0.5 * 5 - 0.1 * bonus)
    close(grads["actor.2.bias"], vec(1))  # -mean of A z / sigma
    close(grads["log_std"], vec(3.5 - 0.1))  # -mean of A (z^2 - 1), less ent_coef
    close(grads["critic.2.bias"], vec(-1))  # 0.5 mean of 2 (V - R)


# ---- The optimizer

@pytest.mark.parametrize("rule", ["tf", "torch"])
def test_the_flag_chooses(rule, monkeypatch):
    made, plain = [], mpi.RMSProp

    class Noted(plain):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(mpi, "RMSProp", Noted)
    a2c.train(a2c.Config("CartPole-v1", num_envs=2, rollout_steps=8, total_steps=8,
                         rmsprop=rule, rmsprop_eps=0.5, run_dir="run"))
    assert made[0].tf_style == (rule == "tf") and made[0].eps == 0.5
    assert (made[0].square > 0.9).all() == (rule == "tf")


# ---- The update

@and_child
@every_kind
def test_one_step_on_the_whole_batch(algo, kind, monkeypatch):
    """Down its gradient, or by the step of the natural gradient."""
    agent = make_agent(algo, kind, max_grad_norm=0.0)
    rollout, calls, plain = make_rollout(algo, agent), [], algo.a2c_loss
    start = parameters(agent)
    adv, ret = targets(algo, agent, rollout)

    def loss(agent, batch):
        calls.append(batch)
        return plain(agent, batch)

    monkeypatch.setattr(algo, "a2c_loss", loss)
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
    else:
        close(start - after, 0.1 * optimizer.grad, rtol=1e-3)
        close(metrics["grad_norm"], optimizer.grad.norm())


def test_report_every_changes_nothing_but_the_reports():
    """Also if a report does not fall on a whole number of rollouts."""
    agents, reports = [], []
    for every in (8, 20, 40):
        agents.append(a2c.train(a2c.Config("CartPole-v1", num_envs=2, rollout_steps=8,
                                           total_steps=80, report_every=every, lr=0.1,
                                           run_dir=f"run{every}")))
        reports.append(steps(f"run{every}"))
    assert reports == [list(range(8, 81, 8)), [24, 40, 64, 80], [40, 80]]
    first, *others = (agent.state_dict() for agent in agents)
    assert all(same(first, other) for other in others)


# ---- stable-baselines3

@pytest.mark.parametrize("kind", ["box", "discrete"])
@pytest.mark.parametrize("tf,rule", [(True, RMSpropTFLike), (False, torch.optim.RMSprop)])
def test_loss_gradient_and_ten_steps_are_those_of_stable_baselines3(kind, tf, rule, monkeypatch):
    agent = make_agent(a2c, kind, num_envs=4, rollout_steps=64, ent_coef=0.1, max_grad_norm=0.5)
    policy = {"net_arch": [8, 8], "optimizer_class": rule,
              "optimizer_kwargs": {"alpha": 0.99, "eps": 0.03}}   # where it stands shows, too
    model = A2C("MlpPolicy", Nowhere(*SPACES[kind]), 1e-2, n_steps=64, ent_coef=0.1, vf_coef=0.5,
                max_grad_norm=0.5, policy_kwargs=policy, device="cpu")
    model.set_logger(configure(None, []))
    for our, their in pairs(agent, model.policy):
        their.data.copy_(our.data)
    start, optimizer, samples = parameters(agent), mpi.RMSProp(agent, 0.03, tf), []
    plain = a2c.a2c_loss

    def loss(agent, batch):
        nothing = torch.zeros(64)
        samples.append(RolloutBufferSamples(batch.obs, batch.act, nothing, nothing, batch.adv,
                                            batch.ret))
        return plain(agent, batch)

    monkeypatch.setattr(a2c, "a2c_loss", loss)
    for seed in range(10):
        metrics = a2c.update(agent, optimizer, make_rollout(a2c, agent, seed), 1e-2)
        model.rollout_buffer.get = lambda batch_size: iter(samples[-1:])
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
