"""The agent and `update` of algos/ppo.py: what they change, and who agrees with them.

Run as a program, this file is one of the processes that two tests at its end start.
"""
import copy
import math
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from algos import ppo
from tests import helpers
from tests.helpers import (
    BOX,
    DISCRETE,
    IMAGES,
    SPACES,
    VECTOR,
    Descent,
    Nowhere,
    close,
    descend,
    distribution,
    noted,
    onpolicy_agent,
    onpolicy_pairs as pairs,
    outputs,
    parameters,
    reward_sums,
    run,
    same,
    statistics,
    two_ranks,
)
from utils import mpi
from utils.envs import evaluate

SMALL = {"num_envs": 3, "rollout_steps": 24, "minibatch_size": 24, "epochs": 1, "hidden": (8, 8)}
make_agent = partial(onpolicy_agent, ppo)
make_rollout = partial(helpers.make_rollout, ppo)
targets = partial(helpers.targets, ppo)

every_kind = pytest.mark.parametrize("kind", SPACES)
vectors = pytest.mark.parametrize("kind", ["box", "discrete"])


PLAIN_LOSS = ppo.ppo_loss


def learn(agent, rollout, loss=PLAIN_LOSS, lr=1e-3, make=None):
    """One update -> the agent's parameters after it, and the metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "ppo_loss", loss)
        return helpers.learn(ppo, agent, rollout, make, lr)


class Spy:
    """A loss that keeps what it was given, and a copy of the agent as it then was."""

    def __init__(self):
        self.calls = []

    def __call__(self, agent, minibatch):
        self.calls.append(SimpleNamespace(agent=copy.deepcopy(agent), **vars(minibatch)))
        return PLAIN_LOSS(agent, minibatch)


def gradient_of(agent, obs, act, logp_old, adv, ret):
    """Of one minibatch: the gradients by name, and the terms of the loss [3]."""
    loss, metrics = PLAIN_LOSS(agent, ppo.Minibatch(obs, act, logp_old, adv, ret))
    names, params = zip(*agent.named_parameters())
    grads = torch.autograd.grad(loss, params)
    terms = [metrics[name].detach() for name in ("pi_loss", "v_loss", "entropy")]
    return dict(zip(names, grads)), torch.stack(terms)


def rows_of(call, agent, rollout):
    """Which rows of the rollout, [T N], stand in a minibatch."""
    rows = agent.normalize_obs(rollout.obs).flatten(0, 1).flatten(1)
    equal = (call.obs.flatten(1)[:, None] == rows).all(-1)
    assert (equal.sum(1) == 1).all()
    return equal.int().argmax(1)


# ---- Networks

LAYERS = {  # layer: its gain
    "box": [("actor.0", math.sqrt(2)), ("actor.2", math.sqrt(2)), ("actor.4", 0.01),
            ("critic.0", math.sqrt(2)), ("critic.2", math.sqrt(2)), ("critic.4", 1)],
    "images": [("encoder.0", math.sqrt(2)), ("encoder.2", math.sqrt(2)),
               ("encoder.4", math.sqrt(2)), ("encoder.7", math.sqrt(2)), ("actor.0", 0.01),
               ("critic.0", 1)],
}


@pytest.mark.parametrize("kind,name,gain", [(k, *pair) for k in LAYERS for pair in LAYERS[k]])
def test_initial_weights_are_orthogonal(kind, name, gain):
    layer = ppo.Agent(*SPACES[kind], ppo.Config()).get_submodule(name)
    weight = layer.weight.detach().flatten(1)
    weight = weight if len(weight) <= weight.shape[1] else weight.T
    close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-4 * gain**2)
    assert not layer.bias.any()


def test_every_layer_is_listed_with_its_gain():
    for kind, layers in LAYERS.items():
        agent = ppo.Agent(*SPACES[kind], ppo.Config())
        names = {name.removesuffix(".weight") for name in agent.state_dict() if "weight" in name}
        assert names == {name for name, _ in layers}


def test_the_policy_starts_with_deviations_of_std_init():
    agent = ppo.Agent(VECTOR, BOX, ppo.Config(std_init=0.2))
    close(agent.log_std.exp(), [0.2, 0.2])
    close(distribution(agent, torch.ones(1, 3)).stddev, [[0.2, 0.2]])
    assert ppo.Agent(VECTOR, DISCRETE, agent.cfg).log_std is None


@every_kind
@pytest.mark.parametrize("num_rows", [1, 5])
def test_values_are_a_vector_never_a_column(kind, num_rows):
    agent = make_agent(kind)
    obs = torch.zeros(num_rows, *SPACES[kind][0].shape)
    out, val = outputs(agent, agent.normalize_obs(obs))
    assert out.shape == (num_rows, 2 if kind == "box" else 4) and val.shape == (num_rows,)


def test_channels_may_stand_first_or_last():
    last = make_agent("images")
    first_space = gym.spaces.Box(0, 255, (3, 44, 36), np.uint8)
    first = ppo.Agent(first_space, DISCRETE, last.cfg)
    names = dict(last.named_parameters())
    first.load_state_dict({name: names.get(name, x) for name, x in first.state_dict().items()})
    obs = torch.randint(256, (5, *IMAGES.shape), dtype=torch.uint8)
    for actual, expected in zip(outputs(first, first.normalize_obs(obs.permute(0, 3, 1, 2))),
                                outputs(last, last.normalize_obs(obs))):
        close(actual, expected)


def test_images_are_between_0_and_1_and_keep_their_rows():
    agent, obs = make_agent("images"), torch.zeros(2, 3, *IMAGES.shape, dtype=torch.uint8)
    obs[1, 2, 43, 5, 1] = 255  # row 43, column 5, second channel
    actual = agent.normalize_obs(obs)
    assert actual.dtype == torch.float32 and actual.shape == (2, 3, 3, 44, 36)
    assert actual[1, 2, 1, 43, 5] == 1 and actual.sum() == 1


def test_observations_are_normalized_by_the_running_statistics():
    obs = 3 + 2 * torch.tensor([[-1.0, 0, 1], [2, 3, 1e6]])
    close(make_agent().normalize_obs(obs), [[-1, 0, 1], [2, 3, 10]])
    close(make_agent(norm_obs=False).normalize_obs(obs), obs)


@every_kind
def test_every_parameter_gets_a_gradient(kind):
    agent, spy = make_agent(kind, ent_coef=0.01), Spy()
    learn(agent, make_rollout(agent), spy)
    grads, _ = gradient_of(*vars(spy.calls[0]).values())
    for name, grad in grads.items():
        assert grad.any(), f"{name} learns nothing"


@vectors
@pytest.mark.parametrize("settings,adv,learns,rests", [
    ({"vf_coef": 0.0}, 1.0, "actor", "critic"), ({}, 0.0, "critic", "actor"),
])
def test_policy_and_value_function_do_not_pull_at_each_other(kind, settings, adv, learns, rests):
    agent, spy = make_agent(kind, norm_adv=False, **settings), Spy()
    learn(agent, make_rollout(agent), spy)
    call = spy.calls[0]
    grads, _ = gradient_of(agent, call.obs, call.act, call.logp_old, adv * call.adv, call.ret)
    assert all(grad.any() for name, grad in grads.items() if name.startswith(learns))
    assert not any(grad.any() for name, grad in grads.items() if name.startswith(rests))


@vectors
def test_gradient_of_a_batch_is_the_mean_over_its_parts(kind):
    agent, spy = make_agent(kind, ent_coef=0.1), Spy()
    learn(agent, make_rollout(agent), spy)
    call = spy.calls[0]
    batch = (call.obs, call.act, call.logp_old, call.adv, call.ret)
    whole, quarter, rest = (gradient_of(agent, *(x[at] for x in batch))[0]
                            for at in (slice(24), slice(6), slice(6, 24)))
    for name in whole:
        close(whole[name], quarter[name] / 4 + rest[name] * 3 / 4, rtol=1e-4)


# ---- Acting

@every_kind
def test_deterministic_actions_are_the_best_and_use_no_randomness(kind):
    agent = make_agent(kind)
    obs = make_rollout(agent).obs[0]
    before = torch.get_rng_state()
    act = agent.act(obs, deterministic=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(act, distribution(agent, obs).mode)
    assert not torch.equal(agent.act(obs.repeat_interleave(9, 0)), act.repeat_interleave(9, 0))


@vectors
def test_actions_are_drawn_from_the_policy(kind):
    agent = make_agent(kind)
    agent.actor[-1].weight.data *= 10
    if kind == "box":
        agent.log_std.data = torch.tensor([-1.0, 0.5])
    obs = torch.tensor([[2.0, 4, 5], [3.0, -1, 2]])
    act = agent.act(obs.repeat(40000, 1)).unflatten(0, (-1, 2))
    policy = distribution(agent, obs)
    if kind == "discrete":
        shares = torch.stack([(act == k).float().mean(0) for k in range(4)], -1)
        assert policy.probs.std() > 0.02  # not as good as uniform
        close(shares, policy.probs, atol=0.01)
    else:
        close(act.mean(0), policy.mean, atol=0.03)
        close(act.std(0), policy.stddev, rtol=0.02)
        assert torch.corrcoef(act.flatten(1).T).triu(1).abs().max() < 0.02  # noise of each its own


@pytest.mark.parametrize("kind,shape,dtype", [("box", (5, 2), torch.float32),
                                              ("discrete", (5,), torch.int64),
                                              ("images", (5,), torch.int64)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_actions_have_one_row_an_environment(kind, shape, dtype, deterministic):
    agent = make_agent(kind)
    act = agent.act(SPACES[kind][0].sample()[None].repeat(5, 0), deterministic)
    assert act.shape == shape and act.dtype == dtype and not act.requires_grad


def test_an_observation_may_come_as_numpy_or_torch_in_either_precision():
    agent, obs = make_agent(), np.random.default_rng(0).normal(3, 2, (6, 3)).astype(np.float32)
    expected = agent.act(torch.from_numpy(obs), deterministic=True)
    for other in (obs, obs.astype(np.float64), torch.from_numpy(obs).double()):
        assert torch.equal(agent.act(other, deterministic=True), expected)


HALF = math.atanh(0.5)
SYMMETRIC = gym.spaces.Box(-0.4, 0.4, (2,), np.float32)
BLOCK = gym.spaces.Box(np.float32([[0, -3, 1]] * 2), np.float32([[5, 3, 1.5]] * 2))
DOUBLE = gym.spaces.Box(np.array([0.1, -3]), np.array([0.7, 3]), dtype=np.float64)


@pytest.mark.parametrize("space,act,env_act", [
    (BOX, (-99, -20), (0, -3)), (BOX, (20, 99), (5, 3)), (BOX, (0, 0), (2.5, 0)),
    (BOX, (HALF, -HALF), (3.75, -1.5)), (BOX, (-HALF, math.inf), (1.25, 3)),
    (SYMMETRIC, (-20, 20), (-0.4, 0.4)), (SYMMETRIC, (HALF, -math.inf), (0.2, -0.4)),
    (BLOCK, (-20, -20, -20, 20, 20, 20), ((0, -3, 1), (5, 3, 1.5))),
    (DOUBLE, (-20, 20), (0.1, 3)), (DOUBLE, (20, -20), (0.7, -3)),
])
def test_actions_are_bounded_by_tanh_and_stretched_to_the_box(space, act, env_act):
    agent = ppo.Agent(VECTOR, space, ppo.Config())
    actual = agent.env_act(torch.tensor([act, act], dtype=torch.float32))
    expected = np.array([env_act, env_act], dtype=space.dtype)
    assert actual.shape == expected.shape and all(one in space for one in actual)
    at_an_end = (expected == space.low) | (expected == space.high)
    assert (actual[at_an_end] == expected[at_an_end]).all()  # to the bit
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_loaded_box_leaves_the_space_alone():
    agent = make_agent()
    agent.load_state_dict(agent.state_dict() | {"low": torch.tensor([-9.0, -9])})
    assert BOX.low.tolist() == [0, -3]


def test_clipping_for_the_environment_leaves_the_action_alone():
    agent, act = make_agent(), torch.tensor([[3.0, -2.0]])
    agent.env_act(act)
    assert act.tolist() == [[3, -2]]


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0"])
def test_predict_gives_what_a_plain_environment_takes(name):
    with gym.make(name) as env:
        agent = ppo.Agent(env.observation_space, env.action_space, ppo.Config())
        obs, _ = env.reset(seed=0)
        act = agent.predict(obs)
        assert env.action_space.contains(act)
        env.step(act)


@every_kind
def test_predict_is_the_deterministic_action_for_the_environment(kind):
    agent, (obs_space, act_space) = make_agent(kind), SPACES[kind]
    obs_space.seed(0)
    obs = np.stack([obs_space.sample() for _ in range(4)])
    expected = agent.env_act(agent.act(obs, deterministic=True))
    for row, env_act in zip(obs, expected):
        actual = agent.predict(row)
        assert act_space.contains(actual)
        np.testing.assert_allclose(actual, env_act, rtol=1e-5, atol=1e-6)


@every_kind
def test_a_state_dict_is_the_whole_policy(kind, tmp_path):
    agent = make_agent(kind)
    obs = make_rollout(agent).obs.flatten(0, 1)
    torch.save(agent.state_dict(), tmp_path / "agent.pt")
    other = ppo.Agent(*SPACES[kind], agent.cfg)
    mpi.Adam(other)
    other.load_state_dict(torch.load(tmp_path / "agent.pt", weights_only=True))
    assert torch.equal(other.act(obs, True), agent.act(obs, True))
    torch.manual_seed(5)
    act = agent.act(obs)
    torch.manual_seed(5)
    assert torch.equal(other.act(obs), act)


@pytest.mark.parametrize("loaded", [False, True])
def test_the_optimizer_moves_what_acts(loaded):
    agent, obs = make_agent(), torch.ones(1, 3)
    optimizer = mpi.Adam(agent)
    if loaded:
        agent.load_state_dict(make_agent(seed=1).state_dict())
    before = agent.act(obs, deterministic=True)
    descend(optimizer, agent.actor(obs).sum(), 0.1)
    assert not torch.equal(agent.act(obs, deterministic=True), before)


# ---- Statistics

@every_kind
def test_acting_and_update_leave_statistics_alone_and_parameters_move(kind):
    agent = make_agent(kind, ent_coef=0.01, epochs=2)
    kept, before = statistics(agent), copy.deepcopy(agent)
    learn(agent, make_rollout(agent))
    assert same(statistics(agent), kept)
    for (name, param), old in zip(agent.named_parameters(), before.parameters()):
        assert not torch.equal(param, old), f"{name} did not move"


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_evaluate_changes_nothing(name):
    cfg = ppo.Config(env=name)
    torch.manual_seed(0)                # with some weights all episodes are equally long
    with gym.make(name) as env:
        agent = ppo.Agent(env.observation_space, env.action_space, cfg)
    kept, before = statistics(agent), copy.deepcopy(agent.state_dict())
    torch_state = torch.get_rng_state()
    returns, _ = evaluate(agent, cfg, 2, seed=0)
    assert same(statistics(agent), kept) and same(agent.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert returns.shape == (2,) and returns[0] != returns[1]
    assert (evaluate(agent, cfg, 2, seed=0)[0] == returns).all()


@every_kind
def test_observe_takes_each_observation_and_running_return_once(kind):
    agent = ppo.Agent(*SPACES[kind], ppo.Config(gamma=0.9, **SMALL))
    rollouts = [make_rollout(agent, seed) for seed in range(3)]
    for rollout in rollouts:
        agent.update_stats(rollout)
    obs, rew, done = (torch.cat([getattr(x, name) for x in rollouts])
                      for name in ("obs", "rew", "done"))
    ret, last = reward_sums(ppo, rew, done, torch.zeros(3), 0.9)
    close(agent.reward_sum, last)
    expected = [(agent.reward_sum_stats, ret.flatten().double())]
    if kind != "images":
        expected.append((agent.obs_stats, obs.flatten(0, 1).double()))
    else:
        assert not agent.obs_stats.count.any()  # images are divided by 255, and no more
    for stats, rows in expected:
        close(stats.count, 72.0)
        close(stats.mean, rows.mean(0))
        close(stats.var, rows.var(0, correction=0))


def test_training_observes_after_it_has_learned_and_before_it_collects_again(monkeypatch):
    calls = []
    for owner, name in ((ppo, "collect"), (ppo, "update"), (ppo.Agent, "update_stats")):
        monkeypatch.setattr(owner, name, noted(calls, getattr(owner, name)))
    ppo.train(ppo.Config(env="CartPole-v1", total_steps=72, **SMALL))
    assert calls == ["collect", "update", "update_stats"] * 3


# ---- What the loss is given

@every_kind
def test_ratio_is_1_at_first_with_the_probabilities_of_acting(kind):
    agent, spy = make_agent(kind, minibatch_size=8), Spy()
    rollout = make_rollout(agent)
    acting = distribution(agent, rollout.obs.flatten(0, 1))
    logp = acting.log_prob(rollout.act.flatten(0, 1))
    if kind == "box":
        assert (rollout.act.abs() > 1).any()  # what the environment clips, the policy does not
    learn(agent, rollout, spy)
    for call in spy.calls:
        rows = rows_of(call, agent, rollout)
        assert torch.equal(call.act, rollout.act.flatten(0, 1)[rows])
        close(call.logp_old, logp[rows], atol=1e-5)
    first = spy.calls[0]
    with torch.no_grad():
        out, _ = outputs(first.agent, first.obs)
        ratio = (ppo.log_prob(out, first.agent.log_std, first.act) - first.logp_old).exp()
    close(ratio, torch.ones(8), rtol=1e-4)


@vectors
def test_every_sample_is_taken_once_an_epoch_and_in_a_new_order(kind):
    agent, spy = make_agent(kind, minibatch_size=4, epochs=3), Spy()
    rollout = make_rollout(agent)
    learn(agent, rollout, spy)
    orders = torch.stack([rows_of(call, agent, rollout) for call in spy.calls]).view(3, 24)
    assert torch.equal(orders.sort(1).values, torch.arange(24).expand(3, 24))
    assert len({tuple(order) for order in [range(24), *orders.tolist()]}) == 4


@every_kind
def test_targets_follow_the_critic_from_epoch_to_epoch_but_logp_old_does_not(kind):
    agent, spy = make_agent(kind, epochs=3, norm_adv=False, gamma=0.9, lam=0.8), Spy()
    rollout = make_rollout(agent)
    learn(agent, rollout, spy, lr=1e-2)
    rows = [rows_of(call, agent, rollout) for call in spy.calls]
    for call, order in zip(spy.calls, rows):
        adv, ret = targets(call.agent, rollout)
        close(call.adv, adv[order], rtol=1e-4, atol=1e-5)
        close(call.ret, ret[order], rtol=1e-4, atol=1e-5)
        assert not (call.adv.requires_grad or call.ret.requires_grad or call.logp_old.requires_grad)
    first, *_, last = (call.ret[order.argsort()] for call, order in zip(spy.calls, rows))
    assert (first - last).abs().max() > 0.01
    first, *_, last = (call.logp_old[order.argsort()] for call, order in zip(spy.calls, rows))
    assert torch.equal(first, last)


def test_targets_within_an_epoch_are_those_of_its_start():
    agent, spy = make_agent(minibatch_size=4, norm_adv=False), Spy()
    rollout = make_rollout(agent)
    adv, ret = targets(agent, rollout)
    learn(agent, rollout, spy, lr=1e-2)
    for call in spy.calls:
        close(call.ret, ret[rows_of(call, agent, rollout)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("minibatch", [24, 8])
def test_norm_adv_normalizes_each_minibatch(minibatch):
    agent, spy = make_agent(minibatch_size=minibatch), Spy()
    rollout = make_rollout(agent)
    adv, _ = targets(agent, rollout)
    learn(agent, rollout, spy, lr=0.0)
    for call in spy.calls:
        own = adv[rows_of(call, agent, rollout)]
        close(call.adv, (own - own.mean()) / own.std(correction=0), rtol=1e-4, atol=1e-5)


def test_minibatches_of_one_sample():
    """Normalised, its advantage would be 0, or NaN: nothing would be learned, in silence."""
    with pytest.raises(mpi.UsageError):
        make_agent(minibatch_size=1)
    agent = make_agent(minibatch_size=1, norm_adv=False)
    flat, metrics = learn(agent, make_rollout(agent))
    assert flat.isfinite().all() and metrics["pi_loss"].all()


@pytest.mark.parametrize("settings,expected", [
    ({"scale_rew": True}, lambda rew: (rew / 3).clamp(-10, 10)),
    ({"scale_rew": False}, lambda rew: rew),
])
def test_scale_rew_divides_by_the_deviation_of_returns(settings, expected):
    agent, spy = make_agent(gamma=0.0, **settings), Spy()  # so that the return is the reward
    rollout = make_rollout(agent)
    rollout.rew[2, 1] = -500
    learn(agent, rollout, spy)
    close(spy.calls[0].ret, expected(rollout.rew).flatten()[rows_of(spy.calls[0], agent, rollout)],
          rtol=1e-4)


def test_the_unit_of_rewards_does_not_matter():
    results = []
    for unit in (1, 1000):
        agent = make_agent(minibatch_size=8, epochs=2)
        rollout = make_rollout(agent)
        rollout.rew.mul_(unit)
        agent.update_stats(rollout)
        agent.reward_sum_stats.mean *= 0  # never read: rewards are not centred
        torch.manual_seed(1)
        agent.reward_sum_stats.var.copy_(unit**2 * torch.tensor(7.0))
        results.append(learn(agent, rollout)[0])
    close(*results)


def test_the_order_of_environments_does_not_matter():
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        agent = make_agent()
        rollout = make_rollout(agent)
        columns = {name: x[:, order] for name, x in vars(rollout).items()}
        results.append(learn(agent, ppo.Rollout(**columns), make=Descent)[0])
    close(*results)


# ---- Steps and metrics

@pytest.mark.parametrize("limit", [0.05, 0.0, 1e9])
def test_a_longer_gradient_is_cut_to_max_grad_norm(limit):
    free = make_agent(max_grad_norm=1e9)
    start, rollout = parameters(free), make_rollout(free)
    gradient = start - learn(free, rollout, lr=1.0, make=Descent)[0]
    assert gradient.norm() > 0.1
    flat, metrics = learn(make_agent(max_grad_norm=limit), rollout, lr=1.0, make=Descent)
    close(metrics["grad_norm"], gradient.norm()[None], rtol=1e-4)  # as it was before the cut
    share = 0.05 / gradient.norm() if limit == 0.05 else 1
    close(start - flat, share * gradient, rtol=1e-3)


def test_each_minibatch_is_one_step_down_its_own_gradient():
    agent, spy = make_agent(minibatch_size=8, max_grad_norm=0.0), Spy()
    expected = parameters(agent)
    flat, metrics = learn(agent, make_rollout(agent), spy, lr=0.1, make=Descent)
    for call in spy.calls:
        grads, _ = gradient_of(*vars(call).values())
        expected -= 0.1 * torch.cat([grad.flatten() for grad in grads.values()])
    close(flat, expected, rtol=1e-4)
    assert metrics["grad_norm"].shape == (3,)


def test_lr_is_the_step_size():
    results = []
    for lr in (0.0, 1e-4, 2e-4):
        agent = make_agent()
        start = parameters(agent)
        flat, metrics = learn(agent, make_rollout(agent), lr=lr)
        results.append((flat - start).abs().max())
        assert metrics["lr"] == lr
    assert results[0] == 0
    close(torch.stack(results[1:]), [1e-4, 2e-4], rtol=0.01)  # Adam's first step is of length lr


@pytest.mark.parametrize("target_kl,epochs", [(0.0, 4), (1e-9, 1), (1e9, 4)])
def test_target_kl_stops_after_the_epoch_that_exceeds_it(target_kl, epochs):
    agent, spy = make_agent(epochs=4, target_kl=target_kl), Spy()
    metrics = learn(agent, make_rollout(agent), spy)[1]
    assert metrics["epochs"] == len(spy.calls) == epochs


def test_target_kl_is_compared_with_the_policy_that_acted():
    agent = make_agent(epochs=3)
    rollout = make_rollout(agent)
    kls = [learn(make_agent(epochs=k), rollout)[1]["kl"] for k in (1, 2, 3)]
    assert kls[0] < kls[1] < kls[2]
    for limit, epochs in ((kls[0] * 0.9, 1), (kls[0] * 1.1, 2), (kls[1] * 1.1, 3)):
        metrics = learn(make_agent(epochs=9, target_kl=float(limit)), rollout)[1]
        assert metrics["epochs"] == epochs
        close(metrics["kl"], kls[epochs - 1], rtol=1e-4)


@every_kind
def test_metrics_say_what_happened(kind):
    agent, spy = make_agent(kind, minibatch_size=8, epochs=4, clip_ratio=0.05), Spy()
    rollout, before = make_rollout(agent), copy.deepcopy(agent)
    metrics = learn(agent, rollout, spy, lr=1e-3 if kind == "images" else 1e-2)[1]
    obs, act = rollout.obs.flatten(0, 1), rollout.act.flatten(0, 1)
    old, new = (distribution(x, obs).log_prob(act) for x in (before, agent))
    ratio = (new - old).exp()
    outside = (ratio - 1).abs() > 0.05
    assert 0 < outside.sum() < 24
    close(metrics["clip_frac"], outside.float().mean())
    close(metrics["kl"], (ratio - 1 - ratio.log()).mean(), rtol=1e-3)
    with torch.no_grad():
        _, val = outputs(before, before.normalize_obs(obs))
    terms = torch.stack([gradient_of(*vars(call).values())[1] for call in spy.calls])
    _, ret = targets(before, rollout)
    close(metrics["val"].flatten(), val)
    explained = 1 - np.var((ret - val).numpy()) / np.var(ret.numpy())
    close(metrics["explained_variance"], explained, rtol=1e-4)
    for name, term in zip(("pi_loss", "v_loss", "entropy"), terms.T):
        close(metrics[name], term, rtol=1e-4)
    assert metrics["epochs"] == 4 and metrics["grad_norm"].shape == (12,)
    assert all(torch.as_tensor(x).isfinite().all() for x in metrics.values())
    assert not any(x.requires_grad for x in metrics.values() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("weight,explained", [(1.0, 1.0), (0.0, 0.0), (2.0, 0.0), (-1.0, -3.0)])
def test_explained_variance_by_hand(weight, explained):
    agent = make_agent(gamma=0.0, scale_rew=False, hidden=())  # the return is the reward
    agent.critic[-1].weight.data = torch.tensor([[weight, 0, 0]])
    agent.critic[-1].bias.data.fill_(7)  # a constant explains nothing, and spoils nothing
    rollout = make_rollout(agent)
    rollout.rew.copy_(agent.normalize_obs(rollout.obs)[..., 0])
    close(learn(agent, rollout)[1]["explained_variance"], explained, atol=1e-4)


def test_metrics_of_a_batch_of_one_are_finite():
    agent = make_agent(num_envs=1, rollout_steps=1, minibatch_size=1, norm_adv=False)
    metrics = learn(agent, make_rollout(agent))[1]
    assert all(torch.as_tensor(x).isfinite().all() for x in metrics.values())


# ---- stable-baselines3

def their_ppo(agent, lr):
    """Their PPO with our settings and weights; advantages come normalised from us."""
    cfg = agent.cfg
    nets = {"net_arch": [*cfg.hidden], "optimizer_kwargs": {"eps": 1e-5}}
    model = PPO("MlpPolicy", Nowhere(*SPACES["discrete" if agent.discrete else "box"]), lr,
                n_steps=64, n_epochs=1, clip_range=cfg.clip_ratio, normalize_advantage=False,
                ent_coef=cfg.ent_coef, vf_coef=cfg.vf_coef, max_grad_norm=cfg.max_grad_norm,
                policy_kwargs=nets, device="cpu")
    model.set_logger(configure(None, []))
    for our, their in pairs(agent, model.policy):
        their.data.copy_(our.data)
    return model


class Drifted(Spy):
    """A spy whose old policy is another one, so that ratios leave the range at once."""

    def __call__(self, agent, minibatch):
        noise = torch.linspace(-0.5, 0.5, len(minibatch.ret))  # of shuffled samples
        return super().__call__(agent, replace(minibatch, logp_old=minibatch.logp_old + noise))


def clipped_shares(call):
    """Shares of a minibatch beyond the range, by side and sign: (+ +), (+ -), (- +), (- -)."""
    with torch.no_grad():
        out, _ = outputs(call.agent, call.obs)
        ratio = (ppo.log_prob(out, call.agent.log_std, call.act) - call.logp_old).exp()
    clip = call.agent.cfg.clip_ratio
    return [(side & sign).float().mean() for side in (ratio > 1 + clip, ratio < 1 - clip)
            for sign in (call.adv > 0, call.adv < 0)]


@vectors
@pytest.mark.parametrize("num_steps", [1, 10])
def test_loss_gradient_and_step_are_those_of_stable_baselines3(kind, num_steps):
    agent = make_agent(kind, num_envs=4, rollout_steps=64 * num_steps, minibatch_size=64,
                       ent_coef=0.01, max_grad_norm=0.2)
    start, model = parameters(agent), their_ppo(agent, lr=1e-3)
    spy = Drifted()
    flat, metrics = learn(agent, make_rollout(agent), spy, lr=1e-3)
    assert len(spy.calls) == num_steps
    assert min(min(clipped_shares(call)) for call in spy.calls) > 0.03

    samples = [RolloutBufferSamples(call.obs, call.act, torch.zeros(64), call.logp_old, call.adv,
                                    call.ret) for call in spy.calls]
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


def test_training_steps_as_the_optimizer_of_stable_baselines3(monkeypatch):
    """With all that it leaves at their defaults, which show where gradients are tiny."""
    given, plain = [], ppo.update

    def keep(agent, optimizer, *rest):
        given.append(optimizer)
        return plain(agent, optimizer, *rest)

    monkeypatch.setattr(ppo, "update", keep)
    ppo.train(ppo.Config(env="CartPole-v1", total_steps=24, **SMALL))
    theirs = PPO("MlpPolicy", Nowhere(*SPACES["discrete"]), device="cpu")
    [ours], their = given, theirs.policy.optimizer
    start = torch.nn.Parameter(torch.zeros(300))
    flat, slope = torch.zeros(300).requires_grad_(), torch.logspace(-9, 0, 300)
    theirs = type(their)([flat], **their.defaults | {"lr": 0.1})
    ours = type(ours)(start, eps=ours.eps)
    for _ in range(3):
        descend(ours, (start * slope).sum(), 0.1)
        flat.grad = slope.clone()
        theirs.step()
    close(start.detach(), flat, rtol=1e-4)


# ---- Other processes

def learn_share(folder):
    """One learning phase with this rank's environments, all of them if it is alone."""
    agent = make_agent(num_envs=4, rollout_steps=64, minibatch_size=64)
    columns = vars(make_rollout(agent))
    columns["rew"] *= torch.tensor([1.0, 2.0, 5.0, 9.0])  # what a rank sees alone would mislead it
    columns["obs"] += torch.tensor([0.0, 0.1, 0.5, 1.0]).view(4, 1)
    envs = torch.arange(4).chunk(mpi.size())[mpi.rank()]
    rollout = ppo.Rollout(**{name: x[:, envs] for name, x in columns.items()})
    flat, metrics = learn(agent, rollout)
    agent.update_stats(rollout)
    result = {"flat": flat, "kl": metrics["kl"], "grad_norm": metrics["grad_norm"],
              **statistics(agent), "adv": ppo.normalize_advantages(rollout.rew)}
    torch.save(result, folder / f"rank{mpi.rank()}of{mpi.size()}.pt")
    return result


def test_two_ranks_equal_one(tmp_path):
    two_ranks(__file__, "share", tmp_path)
    one = learn_share(tmp_path)
    first, second = (torch.load(tmp_path / f"rank{k}of2.pt") for k in (0, 1))
    assert torch.equal(first["flat"], second["flat"])
    for saved in (first, second):
        for name in set(one) - {"adv", "reward_sum"}:
            close(saved[name], one[name], rtol=1e-5, atol=1e-6)
    for name in ("adv", "reward_sum"):  # of each rank's own environments
        close(torch.cat([first[name], second[name]], -1), one[name])


def learn_compiled(folder):
    """The same update, eager and compiled."""
    for name, compiled in (("eager", False), ("compiled", True)):
        mpi.COMPILE = compiled
        agent = make_agent(minibatch_size=8, epochs=2, ent_coef=0.01)
        optimizer = mpi.Adam(agent, eps=1e-5)
        result = helpers.learn_with(ppo, agent, optimizer, make_rollout(agent))
        torch.save(result, folder / f"{name}.pt")
    fast = optimizer.compiled[ppo.ppo_loss]
    assert hasattr(fast, "_torchdynamo_orig_callable"), "nothing was compiled"


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_equals_eager(tmp_path, dynamo_env):
    command = [sys.executable, __file__, "compiled", tmp_path]
    run(command, env=dynamo_env)
    (flat, metrics), (expected, eager) = (torch.load(tmp_path / f"{name}.pt")
                                          for name in ("compiled", "eager"))
    close(flat, expected)
    for name in eager:
        close(metrics[name], eager[name], rtol=1e-4)


if __name__ == "__main__":
    {"share": learn_share, "compiled": learn_compiled}[sys.argv[1]](Path(sys.argv[2]))
