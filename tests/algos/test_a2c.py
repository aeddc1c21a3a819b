"""algos/a2c.py: its loss, both rules of RMSProp, and stable-baselines3's step."""
import csv
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from stable_baselines3 import A2C
from stable_baselines3.common.logger import configure
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from algos import a2c
from tests.envs import Counter
from tests.helpers import (
    LOG_2PI,
    SPACES,
    Descent,
    Nowhere,
    bare,
    close,
    fitting,
    gradients,
    learn,
    make_rollout,
    onpolicy_agent as make_agent,
    onpolicy_pairs as pairs,
    script,
    targets,
    vec,
)
from utils import mpi

every_kind = pytest.mark.parametrize("kind", SPACES)


# ---- Equations (8) and (9)


@pytest.mark.eq("a2c", 8)
def test_policy_loss_by_hand():
    loss, by_logp = gradients(lambda x: a2c.policy_loss(x, vec(3, -1, 2)), vec(-1, -2, -0.5))
    close(loss, (3 - 2 + 1) / 3)
    close(by_logp, -vec(3, -1, 2) / 3)


def test_policy_loss_refuses_a_column_for_a_batch():
    with pytest.raises(TypeCheckError):
        a2c.policy_loss(torch.zeros(4), torch.zeros(4, 1))


@pytest.mark.parametrize("at", range(2))
def test_policy_loss_refuses_a_column_without_the_checker_of_shapes_too(at):
    with pytest.raises(AssertionError):
        bare(a2c).policy_loss(*(torch.zeros(4, 1) if i == at else torch.zeros(4) for i in range(2)))


def tiny_agent(mu, log_std, val, **settings):
    """A policy of one action dimension and a value function that see nothing: only biases."""
    space = gym.spaces.Box(-1, 1, (1,), np.float32)
    agent = a2c.Agent(space, space, a2c.Config(hidden=(1,), **settings))
    for param in agent.parameters():
        param.data.zero_()
    for param, value in ((agent.actor[-1].bias, mu), (agent.critic[-1].bias, val),
                         (agent.log_std, log_std)):
        param.data.fill_(value)
    return agent


@pytest.mark.eq("a2c", 9)
def test_whole_loss_by_hand():
    agent = tiny_agent(mu=1, log_std=math.log(2), val=2, vf_coef=0.5, ent_coef=0.1)
    flat, act = mpi.flatten(agent), vec((1,), (5,))  # 0 and 2 deviations off
    batch = vec((3,), (4,)), act, vec(1, -2), vec(5, 1)
    terms = a2c.a2c_gradient(agent, flat, *batch)
    low = -math.log(2) - LOG_2PI / 2  # log pi of the first; that of the second is 2 less
    close(torch.stack(terms), vec(-(low - 2 * (low - 2)) / 2, 5, math.log(2) + LOG_2PI / 2 + 0.5))
    a2c.a2c_gradient(agent, flat, *batch)  # a second time adds nothing
    close(agent.actor[-1].bias.grad, vec(1))  # -mean of A z / sigma
    close(agent.log_std.grad, vec(3.5 - 0.1))  # -mean of A (z^2 - 1), less ent_coef
    close(agent.critic[-1].bias.grad, vec(-1))  # 0.5 mean of 2 (V - R)


def test_entropy_bonus_widens_the_policy():
    agent, zeros = tiny_agent(mu=0, log_std=0, val=0, ent_coef=0.3), torch.zeros(4)
    a2c.a2c_gradient(agent, mpi.flatten(agent), torch.zeros(4, 1), torch.randn(4, 1), zeros, zeros)
    close(agent.log_std.grad, vec(-0.3))


# ---- Equations (10) and (11): both rules of RMSProp

def steps_of(tf, grads, lr=1.0, eps=0.03):
    """What each gradient, of two parameters, subtracts from them."""
    flat = torch.nn.Parameter(vec(5, -5))
    flat.grad = torch.zeros(2)
    optimizer, moves = a2c.RMSProp(flat, eps, tf), []
    for grad in grads:
        flat.grad.copy_(vec(*grad))
        before = flat.detach().clone()
        optimizer.step(lr)
        moves.append(before - flat.detach())
    return torch.stack(moves)


@pytest.mark.eq("a2c", 10)
def test_rmsprop_with_epsilon_under_the_root_by_hand():
    # m: 0.99 + 0.01 * 25 = 1.24, then 1.2276 + 0.01 * 4 = 1.2676; of 0: 0.99, 0.9801
    close(steps_of(True, [(5, 0), (-2, 0)]),
          vec((5 / math.sqrt(1.27), 0), (-2 / math.sqrt(1.2976), 0)))
    close(steps_of(True, [(5, 0)], lr=0.5, eps=0.2), vec((2.5 / 1.2, 0)))  # sqrt(1.24 + 0.2)


@pytest.mark.eq("a2c", 11)
def test_rmsprop_with_epsilon_beside_the_root_by_hand():
    # m: 0.01 * 25 = 0.25, then 0.2475 + 0.01 * 4 = 0.2875
    close(steps_of(False, [(5, 0), (-2, 0)]),
          vec((5 / 0.53, 0), (-2 / (math.sqrt(0.2875) + 0.03), 0)))


def test_the_rules_differ_most_where_gradients_are_small():
    """Beside the root, 1e-5 lets any gradient take ten times lr at once; under it, it does not."""
    for tf, expected in ((True, 1e-4 / math.sqrt(0.99)), (False, 10 / 2)):
        close(steps_of(tf, [(1e-4, 0)], eps=1e-5)[0, 0], expected, rtol=1e-3)


@pytest.mark.parametrize("tf,library", [(True, RMSpropTFLike), (False, torch.optim.RMSprop)])
def test_rmsprop_is_that_of_the_library(tf, library):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(50)) for _ in range(2))
    ours.grad, theirs.grad = torch.zeros(50), torch.zeros(50)
    optimizer, reference = a2c.RMSProp(ours, 1e-5, tf), library([theirs], lr=1e-2, eps=1e-5,
                                                                alpha=0.99)
    for _ in range(200):
        grad = torch.randn(50) * torch.logspace(-5, 1, 50)
        ours.grad.copy_(grad)
        theirs.grad.copy_(grad)
        optimizer.step(1e-2)
        reference.step()
    assert (ours - 1).abs().max() > 0.1
    close(ours.data, theirs.data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["tf", "torch"])
def test_the_flag_chooses_and_the_memory_is_saved(rule, monkeypatch):
    made, plain = [], a2c.RMSProp
    monkeypatch.setattr(a2c, "RMSProp", lambda *args: made.append(plain(*args)) or made[-1])
    a2c.train(a2c.Config("CartPole-v1", num_envs=2, batch=8, total_steps=8, report_every=1,
                         rmsprop=rule, eps=0.5, run_dir="run"))
    assert made[0].tf == (rule == "tf") and made[0].eps == 0.5
    assert (made[0].square > 0.9).all() == (rule == "tf")
    other = plain(torch.nn.Parameter(torch.zeros_like(made[0].flat)), 0.5, rule == "tf")
    other.load_state_dict({k: v.clone() for k, v in made[0].state_dict().items()})
    assert torch.equal(other.square, made[0].square)


# ---- The update

@every_kind
def test_one_step_on_the_whole_batch_down_its_gradient(kind):
    agent = make_agent(a2c, kind, max_grad_norm=0.0)
    rollout, calls = make_rollout(a2c, agent), []
    flat = mpi.flatten(agent)
    start = flat.detach().clone()
    adv, ret = targets(a2c, agent, rollout)

    def gradient(agent, flat, *batch):
        calls.append(batch)
        return a2c.a2c_gradient(agent, flat, *batch)

    metrics = a2c.update(agent, flat, fitting(a2c, Descent)(flat), rollout, 0.1, gradient)
    ((obs, act, given_adv, given_ret),) = calls
    close(obs, agent.normalize(rollout.obs).flatten(0, 1))
    assert torch.equal(act, rollout.act.flatten(0, 1))
    close(given_adv, adv, rtol=1e-4, atol=1e-5)
    close(given_ret, ret, rtol=1e-4, atol=1e-5)
    assert not (given_adv.requires_grad or given_ret.requires_grad)
    close(start - flat.detach(), 0.1 * flat.grad, rtol=1e-3)
    close(metrics["grad_norm"], flat.grad.norm())


@pytest.mark.parametrize("limit", [0.05, 1e9])
def test_a_longer_gradient_is_cut_to_max_grad_norm(limit):
    agent = make_agent(a2c, max_grad_norm=limit)
    start, rollout = mpi.flatten(agent).detach().clone(), make_rollout(a2c, agent)
    flat, metrics = learn(a2c, agent, rollout, [Descent], lr=1.0)
    assert metrics["grad_norm"] > 0.1
    expected = min(limit, float(metrics["grad_norm"]))
    close((flat - start).norm(), expected, rtol=1e-3)


def test_episodes_are_where_they_ended_also_where_a_report_holds_several_rollouts():
    Counter.made.clear()
    a2c.train(a2c.Config("tests.envs:Counter-v0", num_envs=3, batch=12, total_steps=90,
                         report_every=4, eval_every=0, run_dir="run"))
    with open("run/progress.csv") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [48, 96]
    with open("run/episodes.csv") as file:
        got = [(int(row["step"]), int(row["env"]), float(row["ep_ret"]), int(row["ep_len"]))
               for row in csv.DictReader(file)]
    expected = [((t + 1) * 3, env, ep_ret, ep_len) for number in range(3)
                for t, env, ep_ret, ep_len in script(number, 32)[1]]
    assert sorted(got) == sorted(expected)


def test_report_every_changes_nothing_but_the_reports():
    agents = []
    for every in (1, 5):
        agents.append(a2c.train(a2c.Config("CartPole-v1", num_envs=2, batch=8, total_steps=80,
                                           report_every=every, lr=0.1, anneal_lr=False,
                                           run_dir=f"run{every}")))
    first, second = (agent.state_dict() for agent in agents)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_lr_falls_to_zero_from_report_to_report(monkeypatch):
    given, plain = [], a2c.update
    monkeypatch.setattr(a2c, "update", lambda *args: given.append(args[4]) or plain(*args))
    a2c.train(a2c.Config("CartPole-v1", total_steps=64, num_envs=2, batch=8, report_every=2, lr=0.1,
                         run_dir="run"))
    close(given, [0.1, 0.1, 0.075, 0.075, 0.05, 0.05, 0.025, 0.025])


@pytest.mark.parametrize("settings", [{"rmsprop": "adam"}, {"eps": 0.0}, {"report_every": 0},
                                      {"batch": 81}, {"ent_coef": -0.1}])
def test_settings_that_are_refused(settings):
    with pytest.raises((SystemExit, TypeCheckError)):
        a2c.Config(**settings)


# ---- stable-baselines3

@pytest.mark.parametrize("kind", ["box", "discrete"])
@pytest.mark.parametrize("tf,rule", [(True, RMSpropTFLike), (False, torch.optim.RMSprop)])
def test_loss_gradient_and_ten_steps_are_those_of_stable_baselines3(kind, tf, rule):
    agent = make_agent(a2c, kind, num_envs=4, batch=64, ent_coef=0.1, max_grad_norm=0.5)
    policy = {"net_arch": [8, 8], "optimizer_class": rule,
              "optimizer_kwargs": {"alpha": 0.99, "eps": 1e-5}}
    model = A2C("MlpPolicy", Nowhere(*SPACES[kind]), 1e-2, n_steps=64, ent_coef=0.1, vf_coef=0.5,
                max_grad_norm=0.5, policy_kwargs=policy, device="cpu")
    model.set_logger(configure(None, []))
    for our, their in pairs(agent, model.policy):
        their.data.copy_(our.data)
    flat = mpi.flatten(agent)
    start, optimizer, samples = flat.detach().clone(), a2c.RMSProp(flat, 1e-5, tf), []

    def gradient(agent, flat, obs, act, adv, ret):
        samples.append(RolloutBufferSamples(obs, act, torch.zeros(64), torch.zeros(64), adv, ret))
        return a2c.a2c_gradient(agent, flat, obs, act, adv, ret)

    for seed in range(10):
        metrics = a2c.update(agent, flat, optimizer, make_rollout(a2c, agent, seed), 1e-2, gradient)
        model.rollout_buffer.get = lambda batch_size: iter(samples[-1:])
        model.train()
        logged = model.logger.name_to_value
        close(metrics["pi_loss"], logged["train/policy_loss"], rtol=1e-5, atol=1e-5)
        close(metrics["v_loss"], logged["train/value_loss"], rtol=1e-5)
        close(metrics["entropy"], -logged["train/entropy_loss"], rtol=1e-4)
        assert metrics["grad_norm"] > 0.5  # so that the cut is compared too
        for our, their in pairs(agent, model.policy):
            close(our.grad, their.grad, rtol=1e-4, atol=1e-6)
            close(our.data, their.data, rtol=0, atol=2e-6)
    assert (flat.detach() - start).abs().max() > 1e-3
