"""algos/dqn.py: its equations by hand, its memory row by row, its loop by count.

Run as a program, this file is one of the processes that a test at its end starts.
"""
import copy
import json
import os
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from jaxtyping import TypeCheckError
from scipy import stats
from stable_baselines3 import DQN
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from algos import dqn, dqn_per
from tests import envs as scripted, probe
from tests.helpers import (
    DQN_SPACES as SPACES,
    VECTOR,
    Nowhere,
    bare,
    close,
    copies,
    dqn_agent as make_agent,
    dqn_batch as make_batch,
    moved,
    refuses_columns,
    rows,
    run,
    two_ranks,
    vec,
)
from utils import checkpoint, mpi
from utils.mpi import UsageError

QUICK = {"device": "cpu", "run_dir": "run", "hidden": (8,), "batch": 8, "buffer_size": 600,
         "start_steps": 40, "report_every": 60, "total_steps": 120}

both = pytest.mark.parametrize("algo", [dqn, dqn_per], ids=["dqn", "dqn_per"])
every_kind = pytest.mark.parametrize("kind", SPACES)


def weigh(batch):
    """Of DQN-PER with the weights that its update takes; any other as it is."""
    kind = getattr(sys.modules[type(batch).__module__], "Weighted", None)
    size = len(batch.rew)
    return kind(**vars(batch), at=np.arange(size), weight=torch.rand(size)) if kind else batch


def part(batch, rows):
    return type(batch)(*(column[rows] for column in vars(batch).values()))


def gradient(agent, batch, algo=dqn):
    """Of the loss, [W], as a new vector; what else the file's function returns."""
    flat = mpi.flatten(agent.critic)
    flat.grad.fill_(123)                                        # nothing is left of an earlier one
    loss, q = algo.dqn_gradient(agent, flat, batch.obs, batch.act, batch.rew, batch.next_obs,
                                batch.terminated)
    return flat.grad.clone(), loss, q


# ---- Equations

@pytest.mark.eq("dqn", 1)
@pytest.mark.eq("dqn_per", 1)
@both
def test_target_by_hand(algo):
    """A step on the way; a time limit, which is stored as that; a death; both at once: a death."""
    rew, terminated, next_q = vec(1, 1, 1, -2), vec(0, 0, 1, 1), vec(10, 10, 10, 10)
    close(algo.td_target(rew, terminated, next_q, 0.5), vec(6, 6, 1, -2))


@pytest.mark.eq("dqn", 2)
@pytest.mark.eq("dqn_per", 2)
@both
def test_best_q_by_hand(algo):
    q_targ, judge = vec((1, 5, 2), (4, 3, 6)), vec((9, 0, 3), (0, 7, 1))
    close(algo.best_q(q_targ, judge), vec(1, 3))
    close(algo.best_q(q_targ, q_targ), vec(5, 6))
    close(algo.best_q(q_targ[:1], judge[:1]), vec(1))


@pytest.mark.eq("dqn", 3)
@pytest.mark.eq("dqn_per", 3)
@both
@pytest.mark.parametrize("error,loss,slope", [
    (0.5, 0.125, 0.5), (-0.5, 0.125, -0.5), (1, 0.5, 1), (3, 2.5, 1), (-3, 2.5, -1), (0, 0, 0)])
def test_huber_by_hand(algo, error, loss, slope):
    q = vec(7 + error, 7).requires_grad_()
    losses = algo.huber(q, vec(7, 7))
    close(losses, vec(loss, 0))
    losses.sum().backward()
    close(q.grad, vec(slope, 0))


@pytest.mark.parametrize("algo", [dqn, bare(dqn)], ids=["hooked", "plain"])
def test_a_column_against_a_vector_is_no_loss(algo):
    with pytest.raises((TypeCheckError, AssertionError)):
        algo.huber(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises((TypeCheckError, AssertionError)):
        algo.td_target(torch.zeros(3), torch.zeros(3), torch.zeros(3, 1), 0.9)


@both
def test_what_has_another_shape_is_refused_without_the_checker_too(algo):
    algo = bare(algo)
    refuses_columns(algo.td_target, 3, 0.9)
    refuses_columns(algo.huber, 2)
    for wide, narrow in ((4, 2), (2, 4)):
        with pytest.raises(AssertionError):
            algo.best_q(torch.zeros(3, wide), torch.zeros(3, narrow))


@pytest.mark.eq("dqn", 4)
@pytest.mark.eq("dqn_per", 4)
@both
def test_dueling_by_hand(algo):
    q = vec((10, 1, 2, 6), (20, 0, 0, 3)) @ algo.dueling_matrix(3)
    close(q, vec((8, 9, 13), (19, 19, 22)))
    close(q.mean(-1), vec(10, 20))                              # V is the mean of Q
    close(vec((10, 6, 7, 11), (20, 5, 5, 8)) @ algo.dueling_matrix(3), q)


@pytest.mark.parametrize("dueling,outputs", [(True, 5), (False, 4)])
def test_the_network_has_a_stream_for_the_value(dueling, outputs):
    agent = make_agent(dueling=dueling)
    obs = torch.randn(6, 3)
    out = agent.critic.head(obs)
    assert out.shape == (6, outputs)
    expected = out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True) if dueling else out
    close(agent.critic(obs), expected)


@pytest.mark.eq("dqn", 5)
@pytest.mark.eq("dqn_per", 5)
@both
@pytest.mark.parametrize("eps", [0.0, 0.3, 1.0])
def test_an_action_is_random_with_probability_eps(algo, eps):
    """Any of four then, the best one too: 1 - eps + eps / 4 for that one, eps / 4 for another."""
    n = 20_000
    act = algo.epsilon_greedy(torch.full((n,), 2), 4, torch.tensor(eps))
    counts, share = torch.bincount(act, minlength=4).numpy(), np.full(4, eps / 4)
    share[2] += 1 - eps
    assert (counts[share == 0] == 0).all()
    assert eps == 0 or stats.chisquare(counts, n * share).pvalue > 1e-3


@both
@pytest.mark.parametrize("drawn,eps,kinds", [(0.0, 0.0, 1), (1 - 2**-24, 1.0, 8)])
def test_eps_0_is_never_at_random_and_1_always_whatever_is_drawn(algo, drawn, eps, kinds,
                                                                 monkeypatch):
    """The least and the greatest of the numbers that there are from 0 to 1 without 1."""
    monkeypatch.setattr(torch, "rand", lambda shape, **device: torch.full(shape, drawn))
    act = algo.epsilon_greedy(torch.full((2000,), 7), 8, torch.tensor(eps))
    assert len(act.unique()) == kinds


@both
def test_actions_are_drawn_on_the_device_of_the_networks(algo):
    """"meta" is a device on every machine, and no other one mixes with it."""
    best, eps = torch.zeros(3, dtype=torch.int64, device="meta"), torch.tensor(0.5, device="meta")
    assert algo.epsilon_greedy(best, 4, eps).device.type == "meta"


@both
def test_each_environment_draws_for_itself(algo):
    """Of two environments both act at random as often as chance has it, not always together.

    And not alike where they do.
    """
    pairs = torch.stack([algo.epsilon_greedy(torch.zeros(2, dtype=torch.int64), 1000,
                                             torch.tensor(0.5)) for _ in range(2000)])
    first, second = (pairs > 0).long().T
    assert stats.chisquare(torch.bincount(2 * first + second, minlength=4)).pvalue > 1e-3
    alike = pairs[:, 0] == pairs[:, 1]
    assert alike[(pairs > 0).all(1)].float().mean() < 0.05


@pytest.mark.eq("dqn", 6)
@pytest.mark.eq("dqn_per", 6)
@both
def test_epsilon_by_hand(algo):
    at = [algo.epsilon(step, 0.2, 100) for step in (0, 25, 50, 100, 101, 10**6)]
    assert at == pytest.approx([1, 0.8, 0.6, 0.2, 0.2, 0.2])


# ---- The agent

@both
def test_the_target_starts_equal_and_is_another_object(algo):
    agent = algo.Agent(VECTOR, Discrete(4), algo.Config())
    own, targ = agent.critic.state_dict(), agent.critic_targ.state_dict()
    assert list(own) == list(targ) and all(torch.equal(own[name], targ[name]) for name in own)
    addresses = {param.data_ptr() for param in agent.parameters()}
    assert len(addresses) == len(own) + len(targ)
    assert not any(param.requires_grad for param in agent.critic_targ.parameters())


@both
def test_acting_is_the_networks_own_not_its_targets(algo):
    agent, obs = make_agent(algo), torch.randn(50, 3)
    before = agent.act(obs, deterministic=True)
    assert len(before.unique()) > 1
    for param in agent.critic_targ.parameters():
        param.data.normal_()
    assert torch.equal(agent.act(obs, deterministic=True), before)
    close(before, agent.critic(obs).argmax(-1))


@both
@pytest.mark.parametrize("loaded", [False, True])
def test_the_flat_vector_is_what_acts(algo, loaded):
    agent, obs = make_agent(algo), torch.randn(50, 3)
    flat, targ = mpi.flatten(agent.critic), mpi.flatten(agent.critic_targ)
    if loaded:
        agent.load_state_dict(make_agent(algo, seed=1).state_dict())
    before, q_targ = agent.act(obs, deterministic=True), agent.critic_targ(obs)
    flat.data.neg_()
    assert not torch.equal(agent.act(obs, deterministic=True), before)
    assert torch.equal(agent.critic_targ(obs), q_targ)
    targ.data.copy_(flat.data)                                  # as `train` does
    assert torch.equal(agent.critic_targ(obs), agent.critic(obs))


@both
@every_kind
def test_actions_are_the_best_ones_but_for_eps(algo, kind):
    agent, obs = make_agent(algo, kind), make_batch(kind=kind, size=200).obs
    best, state = agent.act(obs, deterministic=True), torch.get_rng_state()
    assert best.shape == (200,) and best.dtype == torch.int64
    agent.eps.fill_(0.0)
    assert torch.equal(agent.act(obs), best)
    agent.eps.fill_(0.4)
    assert 0.15 < (agent.act(obs) != best).float().mean() < 0.45         # 0.3: a quarter are best
    torch.set_rng_state(state)
    agent.act(obs, deterministic=True)
    assert torch.equal(torch.get_rng_state(), state)
    act = agent.predict(obs[0].numpy())
    assert act == best[0] and Discrete(4).contains(act)


def test_observations_may_be_of_either_precision():
    agent, obs = make_agent(), np.random.default_rng(0).normal(size=(5, 3))
    assert torch.equal(agent.act(obs, True), agent.act(torch.tensor(obs).float(), True))


@both
def test_channels_may_stand_first_or_last(algo):
    last = make_agent(algo, "image", seed=3)
    first = algo.Agent(Box(0, 255, (3, 36, 40), np.uint8), Discrete(4), last.cfg)
    first.load_state_dict(last.state_dict())
    obs = make_batch(kind="image").obs
    close(first.critic(obs.movedim(-1, 1)), last.critic(obs))
    scaled = obs.movedim(-1, 1).float() / 255
    out = last.critic.head(last.critic.encoder(scaled))
    close(out @ algo.dueling_matrix(4), last.critic(obs))


@pytest.mark.parametrize("space", [Box(-1, 1, (2,)), Discrete(3, start=1),
                                   gym.spaces.MultiDiscrete([2, 2])])
def test_other_actions_are_refused(space):
    with pytest.raises(UsageError, match="takes Discrete from 0"):
        dqn.Agent(VECTOR, space, dqn.Config())


@pytest.mark.parametrize("settings", [
    {"eps_end": 1.1}, {"eps_end": -0.1}, {"eps_steps": 0}, {"target_every": 0}, {"gamma": 1.5},
    {"update_every": 0}, {"lr": 0.0}, {"num_envs": 3, "num_procs": 2}, {"buffer_size": 7},
    {"batch": 63, "num_procs": 2, "num_envs": 2}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(UsageError):
        dqn.Config(**settings)


# ---- The gradient

@pytest.mark.parametrize("double,target", [(True, 1 + 0.5 * 1), (False, 1 + 0.5 * 5)])
def test_the_action_of_the_target_is_the_networks(double, target):
    """One layer by hand: the network likes action 0 best, its target action 1."""
    agent = make_agent(num_acts=2, hidden=(), double=double, dueling=False, gamma=0.5)
    for net, bias in ((agent.critic, (3, 2)), (agent.critic_targ, (1, 5))):
        net.head[0].weight.data.zero_(), net.head[0].bias.data.copy_(vec(*bias))
    obs = torch.zeros(2, 3)
    batch = dqn.Transitions(obs, torch.tensor([1, 1]), vec(1, 1), obs, vec(0, 1))
    grad, loss, q = gradient(agent, batch)
    close(q, vec(2, 2))
    errors = vec(2 - target, 2 - 1)                             # of the second a death is the end
    close(loss, torch.where(errors.abs() < 1, errors**2 / 2, errors.abs() - 0.5).mean())
    close(grad[-2:], vec(0, errors.clamp(-1, 1).mean()))        # of the biases: action 1 was taken


@every_kind
def test_every_weight_learns_and_the_target_does_not(kind):
    agent = make_agent(kind=kind)
    mpi.flatten(agent.critic_targ)
    grad, _, q = gradient(agent, make_batch(kind=kind))
    assert q.shape == (32,)
    for name, param in agent.critic.named_parameters():
        assert param.grad.abs().sum() > 0, name
    assert all(param.grad.abs().sum() == 0 for param in agent.critic_targ.parameters())
    parts = [gradient(agent, part(make_batch(kind=kind), half))[0]
             for half in (slice(16), slice(16, 32))]
    close(grad, (parts[0] + parts[1]) / 2, rtol=1e-4)


@both
@pytest.mark.parametrize("double", [True, False])
def test_the_loss_is_that_of_a_loop_over_samples(algo, double):
    """And its gradient that of a regression to numbers: none reaches the network by the target."""
    agent, batch = make_agent(algo, double=double, gamma=0.7), weigh(make_batch(algo))
    flat, losses, errors = mpi.flatten(agent.critic), [], []
    with torch.no_grad():
        q_next, q_targ = agent.critic(batch.next_obs), agent.critic_targ(batch.next_obs)
    for k, judge in enumerate(q_next if double else q_targ):
        best = max(range(4), key=judge.tolist().__getitem__)
        target = batch.rew[k] + 0.7 * (1 - batch.terminated[k]) * q_targ[k][best]
        errors.append(agent.critic(batch.obs[k:k + 1])[0, batch.act[k]] - target)
        size = errors[-1].abs()
        loss = size**2 / 2 if size < 1 else size - 0.5
        losses.append(loss * getattr(batch, "weight", torch.ones(32))[k])
    expected = torch.stack(losses).mean()
    grads = torch.autograd.grad(expected, list(agent.critic.parameters()))
    optimizer = mpi.Adam(flat)
    metrics = algo.update(agent, optimizer, batch, 1e-3)
    close(metrics["q_loss"], expected.detach())
    close(optimizer.flat.grad, torch.cat([grad.flatten() for grad in grads]))
    if algo is dqn_per:
        close(metrics["td_error"], torch.stack(errors).detach())


@both
def test_update_moves_the_network_alone(algo):
    agent, batch = make_agent(algo), weigh(make_batch(algo))
    optimizer, before = mpi.Adam(mpi.flatten(agent.critic)), copies(agent)
    metrics = algo.update(agent, optimizer, batch, 3e-3)
    names = moved(before, agent)
    assert names == {f"critic.{name}" for name in agent.critic.state_dict()}
    step = max((agent.state_dict()[name] - before[name]).abs().max() for name in names)
    assert step == pytest.approx(3e-3, rel=0.02)                # Adam's first step is lr long
    assert metrics["q"].shape == (32,) and metrics["q_loss"].shape == ()


@pytest.mark.parametrize("num_steps", [1, 10])
def test_loss_gradient_and_steps_are_those_of_stable_baselines3(num_steps):
    """In float64, on the same batches; their DQN is neither double nor dueling."""
    algo = bare(dqn)
    agent = make_agent(algo, double=False, dueling=False).double()
    theirs = DQN("MlpPolicy", Nowhere(VECTOR, Discrete(4)), 1e-3, gamma=0.99,
                 max_grad_norm=float("inf"), buffer_size=10, device="cpu",
                 policy_kwargs={"net_arch": [16, 16]})
    theirs.set_logger(configure(None, []))
    theirs.policy.double()
    nets = (agent.critic, theirs.q_net), (agent.critic_targ, theirs.q_net_target)
    for our, their in nets:
        their.q_net.load_state_dict(our.head.state_dict())
        their.extract_features = lambda obs, extractor: obs     # it would make them float32
    optimizer = mpi.Adam(mpi.flatten(agent.critic))
    for k in range(num_steps):
        batch = make_batch(algo, seed=k, dtype=torch.float64)
        obs, act, rew, next_obs, terminated = vars(batch).values()
        sample = ReplayBufferSamples(obs, act[:, None], next_obs, terminated[:, None], rew[:, None])
        theirs.replay_buffer.sample = lambda *args, sample=sample, **kwargs: sample
        theirs.train(1, 32)
        metrics = algo.update(agent, optimizer, batch, 1e-3)
        close(metrics["q_loss"], theirs.logger.name_to_value["train/loss"], rtol=1e-9)
    for our, their in zip(*(net.parameters() for net in nets[0]), strict=True):
        close(our.grad, their.grad, rtol=1e-7, atol=1e-10)
        close(our.data, their.data, rtol=0, atol=1e-9)
    for our, their in zip(*(net.parameters() for net in nets[1]), strict=True):
        assert torch.equal(our, their)


# ---- The memory

class Film(gym.Env):
    """The script of tests/envs.py, seen as vectors, images or stacks of frames; it keeps a log.

    No two frames are equal. A stack begins with black frames, or with the first one repeated. One
    array serves for all that is shown, as with Counter.
    """

    def __init__(self, kind="film", black=True):
        self.observation_space, self.action_space = SPACES[kind], Discrete(4)
        self.kind, self.black, self.episode, self.log = kind, black, -1, []
        self.shown = np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def frame(self):
        numbers = self.number, self.episode, self.time + 1
        if self.kind != "film":
            return np.broadcast_to(numbers, SPACES[self.kind].shape).astype(SPACES[self.kind].dtype)
        frame = np.full(SPACES["film"].shape[1:], 9, np.uint8)
        frame[0, :3] = numbers
        return frame

    def show(self):
        self.shown[...] = self.obs
        return self.shown

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        frame = self.frame()
        pad = np.zeros_like(frame) if self.black else frame
        self.obs = np.stack([pad, pad, pad, frame]) if self.kind == "film" else frame
        return self.show(), {}

    def step(self, act):
        self.time += 1
        before, frame = self.obs, self.frame()
        self.obs = np.stack([*self.obs[1:], frame]) if self.kind == "film" else frame
        ended = self.time == scripted.length(self.number, self.episode)
        how = scripted.end(self.number, self.episode) if ended else ""
        rew = scripted.reward(self.number, self.episode, self.time)
        terminated, truncated = how in ("terminated", "both"), how in ("truncated", "both")
        self.log.append((before, act, rew, self.obs, float(terminated), self.time == 1))
        return self.show(), rew, terminated, truncated, {}


gym.register("Film-v0", Film, disable_env_checker=True)


def start(num_envs, kind="film", black=True, algo=dqn):
    """(agent, environments, the same without wrappers, first observations)."""
    cfg = algo.Config(env="Film-v0", env_kwargs=json.dumps({"kind": kind, "black": black}))
    envs = algo.make_envs(cfg, num_envs)
    plain = [env.unwrapped for env in envs.unwrapped.envs]
    for i, env in enumerate(plain):
        env.number = i
    return make_agent(algo, kind), envs, plain, envs.reset(seed=1)[0]


@both
def test_a_run_learns_from_whole_images_of_one_step(algo, monkeypatch):
    """Colours are no frames of a stack: those of tests/envs.py tell environment, episode, time."""
    seen, plain = [], algo.update

    def note(agent, optimizer, batch, *rest):
        seen.append((batch.obs[:, 7, 9].float(), batch.next_obs[:, 7, 9].float()))
        return plain(agent, optimizer, batch, *rest)

    monkeypatch.setattr(algo, "update", note)
    algo.train(algo.Config(**QUICK | {
        "env": "tests.envs:Counter-v0", "num_envs": 2, "start_steps": 40, "total_steps": 60,
        "env_kwargs": json.dumps({"obs": "image", "act": "discrete"})}))
    obs, next_obs = map(torch.cat, zip(*seen))
    assert len(obs) > 20 and obs[:, 1].unique().numel() > 2
    close(next_obs - obs, torch.tensor([0.0, 0.0, 1.0]).expand_as(obs))


def new_buffer(kind, num_envs, rows):
    obs = torch.zeros(SPACES[kind].shape, dtype=torch.float32 if kind == "vector" else torch.uint8)
    return dqn.FrameBuffer(rows * num_envs, 1, num_envs, 4 if kind == "film" else 1, obs)


def fill(buffer, steps, *args):
    """So many steps of new environments -> what each of them did."""
    algo = sys.modules[type(buffer).__module__]
    agent, envs, plain, obs = start(*args, algo=algo)
    for _ in range(steps):
        obs, _ = algo.take_step(agent, envs, buffer, obs, agent.act(obs))
    return [env.log for env in plain]


def alive(log, rows, stack):
    """Brute force: the steps of which all frames are among the last `rows` that were written."""
    written, at = 0, []
    for *_, begins in log:
        written += stack if begins else 0
        at.append(written - 1)
        written += 1
    return [step for step, newest in zip(log, at) if newest - stack + 1 >= written - rows]


def check(buffer, logs):
    """The buffer's live rows are the steps that should be, in their order, whole and unmixed."""
    n, live = buffer.num_envs, np.flatnonzero(buffer.columns["live"])
    for i, log in enumerate(logs):
        own = live[live % n == i]
        age = (own // n - buffer.written[i]) % buffer.rows      # the oldest row comes first
        rows = buffer.gather(own[age.argsort()])
        steps = alive(log, buffer.rows, buffer.stack)
        assert len(steps) == len(own) > 0
        for k, (obs, act, rew, next_obs, terminated, _) in enumerate(steps):
            assert torch.equal(rows.obs[k], torch.as_tensor(obs))
            assert torch.equal(rows.next_obs[k], torch.as_tensor(next_obs))
            assert (rows.act[k], rows.rew[k], rows.terminated[k]) == (act, rew, terminated)


@pytest.mark.parametrize("kind,black", [("film", True), ("film", False), ("image", True),
                                        ("vector", True)])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("rows", [100, 20], ids=["part", "wrapped"])
def test_every_transition_is_as_it_was(kind, black, num_envs, rows):
    """Where 20 rows are wrapped one and a half times, and after each step on the way there."""
    buffer, steps = new_buffer(kind, num_envs, rows), 30
    agent, envs, plain, obs = start(num_envs, kind, black)
    for t in range(steps):
        obs, _ = dqn.take_step(agent, envs, buffer, obs, agent.act(obs))
        if t > 18 or t < 4:
            check(buffer, [env.log for env in plain])
    assert rows == 100 or min(buffer.written) >= 30
    ends = {(step[4], len(step)) for env in plain for step in env.log}
    assert len(ends) == 2


@pytest.mark.parametrize("rows", [100, 20], ids=["part", "wrapped"])
@pytest.mark.parametrize("kind", ["film", "vector"])
def test_it_goes_on_after_a_resume(kind, rows, tmp_path):
    """In the midst of episodes, which are not gone on with: the next rows are of new ones."""
    buffer = new_buffer(kind, 3, rows)
    before = fill(buffer, 13, 3, kind)
    checkpoint.save_file(tmp_path / "a.pt", buffer.state_dict())
    other = new_buffer(kind, 3, rows)
    other.load_state_dict(checkpoint.load_file(tmp_path / "a.pt"))
    check(other, before)
    after = fill(other, 7, 3, kind)
    check(other, [one + two for one, two in zip(before, after)])


def test_a_saved_buffer_takes_the_room_of_its_filled_rows_and_no_copy():
    buffer = new_buffer("film", 3, 1000)
    fill(buffer, 13, 3)
    filled = 3 * max(buffer.written)
    saved = buffer.state_dict()["columns"]
    assert saved["frame"].untyped_storage().nbytes() == filled * 36 * 40
    assert saved["frame"].data_ptr() == buffer.columns["frame"].ctypes.data
    assert all(len(column) == filled for column in saved.values())


@every_kind
def test_samples_are_live_rows_each_as_often_as_another(kind):
    buffer = new_buffer(kind, 3, 20)
    fill(buffer, 30, 3, kind)
    drawn, gather = [], buffer.gather
    buffer.gather = lambda at: drawn.append(at) or gather(at[:1])
    buffer.sample(20_000)
    live = buffer.columns["live"]
    counts = np.bincount(drawn[0], minlength=len(live))
    assert (counts[~live] == 0).all() and 20 < live.sum() < 60
    assert stats.chisquare(counts[live]).pvalue > 1e-3


def test_a_sample_of_the_first_step_of_all():
    buffer = new_buffer("film", 1, 8)
    logs = fill(buffer, 1, 1)
    sample = buffer.sample(5)
    assert sample.rew.tolist() == [logs[0][0][2]] * 5
    assert sample.obs.shape == sample.next_obs.shape == (5, 4, 36, 40)


def test_samples_are_on_the_device_of_the_networks_and_rows_in_main_memory():
    """"meta" stands for a GPU: nothing can be read from there."""
    buffer = new_buffer("film", 3, 20)
    buffer.device = torch.device("meta")
    fill(buffer, 13, 3)
    assert {column.device.type for column in vars(buffer.sample(5)).values()} == {"meta"}
    assert all(column.device.type == "cpu" for column in buffer.state_dict()["columns"].values())


def test_a_million_frames_take_less_than_8_gb(capsys):
    """All of it is asked for here; the machine gives a page when something is written there."""
    buffer = dqn.FrameBuffer(1_000_000, 1, 8, 4, torch.zeros(4, 84, 84, dtype=torch.uint8))
    size = sum(column.nbytes for column in buffer.columns.values())
    assert buffer.columns["frame"].shape == (1_000_000, 1, 84, 84)
    assert 7.0e9 < size < 7.1e9
    assert f"1,000,000 rows, {size / 1e9:.2f} GB" in capsys.readouterr().out


def test_what_cannot_fit_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="--buffer-size is 1000000000000, which takes 7"):
        dqn.FrameBuffer(10**12, 1, 1, 4, torch.zeros(4, 84, 84, dtype=torch.uint8))
    monkeypatch.delattr(os, "sysconf")                          # as on Windows
    dqn.FrameBuffer(100, 1, 1, 4, torch.zeros(4, 84, 84, dtype=torch.uint8))


# ---- The loop

@both
@pytest.mark.parametrize("env", ["ALE/Pong-v5", "ale_py:ALE/Pong-v5"])
def test_atari_stores_a_frame_once_and_gives_stacks(algo, env, monkeypatch):
    """A row takes 84 x 84 bytes; what is learned from has the four frames that were acted on."""
    saw, batches, acted, update = [], [], algo.Agent.act, algo.update
    monkeypatch.setattr(algo.Agent, "act", lambda self, obs: saw.append(obs) or acted(self, obs))
    monkeypatch.setattr(algo, "update", lambda *args: batches.append(args[2]) or update(*args))
    algo.train(algo.Config(**QUICK | {"env": env, "start_steps": 40, "update_every": 10}))
    saved = torch.load("run/resume-120/rank0.pt")["state"]["buffer"]["columns"]["frame"]
    assert saved.shape[1:] == (1, 84, 84)
    acted_on = {obs[0].tobytes() for obs in saw}
    assert batches and all(row.numpy().tobytes() in acted_on for b in batches for row in b.obs)


def counted(algo, monkeypatch, **settings):
    """A short run -> (environment steps at each update, at each copy into the target, agent)."""
    updates, copied, last = [], [], {}
    update, take_step = algo.update, algo.take_step

    def noting_update(agent, *args):
        updates.append(last["step"])
        return update(agent, *args)

    def noting_step(agent, envs, *args):
        targ = torch.cat([param.flatten() for param in agent.critic_targ.parameters()])
        if "targ" in last and not torch.equal(targ, last["targ"]):
            copied.append(last["step"])
        last.update(targ=targ, step=last.get("step", 0) + envs.num_envs)
        return take_step(agent, envs, *args)

    monkeypatch.setattr(algo, "update", noting_update)
    monkeypatch.setattr(algo, "take_step", noting_step)
    agent = algo.train(algo.Config(**QUICK | {"env": "CartPole-v1"} | settings))
    return updates, copied, agent


@both
@pytest.mark.parametrize("num_envs", [1, 2, 7])
@pytest.mark.parametrize("every", [1, 4])
def test_updates_and_copies_keep_their_intervals_whatever_num_envs(
        algo, num_envs, every, monkeypatch):
    updates, copied, _ = counted(algo, monkeypatch, num_envs=num_envs, update_every=every,
                                 target_every=24, anneal_lr=False)
    total = -(-120 // num_envs) * num_envs                      # whole steps of all
    due = range(40 + every, total + 1, every)                   # the k-th belongs to its step ...
    assert len(updates) == len(due) == (total - 40) // every
    assert all(0 <= at - step < num_envs for step, at in zip(due, updates))     # ... or right after
    # At 24 nothing was learned, after 120 comes the end.
    assert copied == [-(-at // num_envs) * num_envs for at in (48, 72, 96)]


@both
def test_the_target_is_a_copy_at_its_intervals(algo, monkeypatch):
    _, _, agent = counted(algo, monkeypatch, target_every=120)
    for own, targ in zip(agent.critic.parameters(), agent.critic_targ.parameters()):
        assert torch.equal(own, targ) and own.data_ptr() != targ.data_ptr()


@both
def test_eps_and_lr_follow_the_steps(algo, monkeypatch):
    """And are what the log says they are."""
    seen, rates, step, update = [], [], algo.take_step, algo.update
    monkeypatch.setattr(algo, "take_step", lambda agent, *rest: (
        seen.append(agent.eps.item()), step(agent, *rest))[1])
    monkeypatch.setattr(algo, "update", lambda agent, optimizer, batch, lr, gradient: (
        rates.append(lr), update(agent, optimizer, batch, lr, gradient))[1])
    algo.train(algo.Config(**QUICK | {
        "env": "CartPole-v1", "num_envs": 2, "eps_steps": 50, "lr": 0.1, "eps_end": 0.1,
        "total_steps": 100, "update_every": 2}))
    close(seen, [max(0.1, 1 - 0.9 * t / 50) for t in range(0, 120, 2)])
    # Reports are every 60 steps, so that the run is 20 longer: no step goes uphill there.
    close(rates, [0.1 * max(0, 1 - t / 100) for t in range(40, 120, 2)])
    for row, step in zip(rows("run"), (60, 120), strict=True):
        assert float(row["lr"]) == pytest.approx(rates[(step - 40) // 2 - 1])
        assert float(row["eps"]) == pytest.approx(seen[step // 2 - 1])


def test_a_resumed_run_goes_on_as_if_nothing_had_happened():
    """Episodes of 10 steps end where it stops, since environments begin anew."""
    same = QUICK | {"env": "tests.envs:Constant-v0", "env_kwargs": '{"length": 10}', "num_envs": 2,
                    "anneal_lr": False, "eps_steps": 100}
    whole = dqn.train(dqn.Config(**same | {"run_dir": "whole"}))
    dqn.train(dqn.Config(**same | {"total_steps": 60}))
    parts = dqn.train(dqn.Config(**same | {"resume": True}))
    assert not moved(copies(whole), parts)
    one, two = (torch.load(f"{run}/resume-120/rank0.pt")["state"] for run in ("whole", "run"))
    assert one["buffer"]["written"] == two["buffer"]["written"] == [60 + 6] * 2
    live = one["buffer"]["columns"]["live"]
    for name, column in one["buffer"]["columns"].items():
        assert torch.equal(column[live], two["buffer"]["columns"][name][live])
    for name, part in one["optimizer"].items():
        assert torch.equal(part, two["optimizer"][name])


# ---- What is learned

FOREVER = 1 / (1 - 0.8)                                         # 1 + 0.8 + 0.8^2 + ...
PROBE = {"gamma": 0.5, "num_envs": 8, "total_steps": 2000, "start_steps": 64, "update_every": 4,
         "target_every": 40, "eps_steps": 1000, "batch": 64, "hidden": (32,), "lr": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize("case", probe.CASES, ids=lambda case: case.env)
def test_probe(case, monkeypatch):
    monkeypatch.setattr(probe, "value", lambda agent, obs: agent.critic(obs).max().item())
    rows = probe.probe(dqn, case, False, **PROBE)
    assert probe.passed(rows), f"look at {case.hint}: {rows}"


@pytest.mark.parametrize("env_kwargs,q", [
    ({"max_episode_steps": 5}, FOREVER),
    ({"length": 1}, 1),
    ({"length": 1, "max_episode_steps": 1}, 1),
], ids=["truncated", "terminated", "both"])
def test_a_time_limit_is_not_an_end(env_kwargs, q):
    agent = dqn.train(dqn.Config(**QUICK | PROBE | {
        "env": "tests.envs:Constant-v0", "env_kwargs": json.dumps(env_kwargs), "gamma": 0.8}))
    close(agent.critic(torch.zeros(1, 1)), torch.full((1, 2), q), atol=0.05, rtol=0)


def test_images_are_learned():
    cfg = dqn.Config(**QUICK | PROBE | {"env": "tests.envs:Bright-v0", "lr": 1e-3, "batch": 32,
                                        "total_steps": 600, "eps_steps": 300})
    assert dqn.evaluate(dqn.train(cfg), cfg, 30, seed=1).mean() >= 0.95


# ---- Other processes

def learn_share(folder):
    """Two updates with this rank's part of each batch, all of it if it is alone."""
    agent = make_agent(seed=mpi.rank())                         # rank 0's weights are taken
    mpi.flatten(agent.critic_targ)
    optimizer = mpi.Adam(mpi.flatten(agent.critic))
    for k in range(2):
        rows = torch.arange(32).chunk(mpi.size())[mpi.rank()]
        dqn.update(agent, optimizer, part(make_batch(seed=k), rows), 1e-2)
    torch.save(copy.deepcopy(agent.state_dict()), folder / f"rank{mpi.rank()}of{mpi.size()}.pt")
    return agent.state_dict()


def test_two_ranks_equal_one(tmp_path):
    two_ranks(__file__, "share", tmp_path)
    one = learn_share(tmp_path)
    first, second = (torch.load(tmp_path / f"rank{k}of2.pt") for k in (0, 1))
    for name in one:
        assert torch.equal(first[name], second[name])
        close(first[name], one[name])


def learn_compiled(folder):
    """The same ten updates with the gradient as it is and compiled."""
    compiled = mpi.compiled(dqn.dqn_gradient, True)
    for name, function in (("eager", dqn.dqn_gradient), ("compiled", compiled)):
        agent = make_agent()
        optimizer = mpi.Adam(mpi.flatten(agent.critic))
        metrics = [dqn.update(agent, optimizer, make_batch(seed=k), 1e-2, function)
                   for k in range(10)]
        torch.save((dict(agent.state_dict()), metrics), folder / f"{name}.pt")
    assert compiled.fast is not compiled.plain, "nothing was compiled"


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_equals_eager(tmp_path, dynamo_env):
    command = [sys.executable, __file__, "compiled", tmp_path]
    run(command, env=dynamo_env)
    (weights, metrics), (expected, eager) = (torch.load(tmp_path / f"{name}.pt")
                                             for name in ("compiled", "eager"))
    for name in expected:
        close(weights[name], expected[name], rtol=1e-4, atol=1e-5)
    for one, two in zip(metrics, eager, strict=True):
        close(one["q_loss"], two["q_loss"], rtol=1e-4)


if __name__ == "__main__":
    {"share": learn_share, "compiled": learn_compiled}[sys.argv[1]](Path(sys.argv[2]))
