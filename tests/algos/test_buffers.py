"""Every replay buffer, as random sequences of calls, against a plain list of what was stored.

Each transition has a number of its own, from which all its parts follow. So one look at a row, or
at a sample, tells whether it is whole, whether it is still there, and which one it is.
"""
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from hypothesis import given, settings as how, strategies as st
from scipy import stats

from algos import (
    c51, ddpg, dqn, dqn_atari, dqn_per, qr_dqn, rainbow, sac, sac_discrete, sac_her, td3)
from tests.helpers import VECTOR, close, name_of, noted, refused
from tests.offpolicy import dqn_quick as quick
from utils import buffers, mpi
from utils.run import checkpoint
from utils.spaces import FlatBox

CPU = torch.device("cpu")
IMAGE = Box(0, 255, (2, 36, 36), np.uint8)
few = how(max_examples=25, deadline=None, derandomize=True, database=None)
rings = pytest.mark.parametrize("algo,kind", [
    (ddpg, "vector"), (td3, "vector"), (sac, "vector"), (dqn, "vector"), (dqn, "image"),
    (dqn_per, "vector"), (dqn_per, "image"), (c51, "vector"), (c51, "image"),
    (qr_dqn, "vector"), (qr_dqn, "image"), (sac_discrete, "vector"), (sac_discrete, "image")],
    ids=lambda x: x if type(x) is str else name_of(x))
# How many steps are stored, then whether the buffer is saved and loaded into another one.
calls = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=5)


def make(algo, capacity, kind="vector", device=CPU):
    space = IMAGE if kind == "image" else VECTOR
    if algo is rainbow:                                         # which is filled by one step
        return algo.NStepBuffer(capacity, space, capacity, device)
    if algo in (ddpg, td3, sac):
        return algo.ReplayBuffer(capacity, 3, 2, device)
    names = {dqn_per: "PrioritizedBuffer", sac_discrete: "DiscreteBuffer"}
    return getattr(algo, names.get(algo, "ReplayBuffer"))(capacity, space, device)


def transitions(algo, numbers, kind="vector"):
    """The parts of the transitions with these numbers, as the environments give them."""
    numbers = np.array(numbers)
    shape = IMAGE.shape if kind == "image" else (3,)
    obs = np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (len(numbers), *shape))
    obs = obs.astype(np.uint8 if kind == "image" else np.float64)
    box = np.stack([numbers / 1e3, -numbers / 1e3], 1).astype(np.float32)
    discrete = algo in (c51, dqn, dqn_atari, dqn_per, qr_dqn, rainbow, sac_discrete)
    more = {"ended": numbers % 3 == 0} if algo is rainbow else {}
    return {"obs": obs, "act": numbers % 4 if discrete else box, "rew": numbers.astype(np.float64),
            "next_obs": obs + obs.dtype.type(1), "terminated": numbers % 3 == 0, **more}


def reloaded(buffer, other):
    """What another buffer is after a checkpoint of this one."""
    checkpoint.save_file("buffer.pt", buffer.state_dict())
    other.load_state_dict(checkpoint.load_file("buffer.pt"))
    return other


# ---- Rings

@rings
def test_ring_holds_the_latest_transitions_and_samples_them_whole(algo, kind):
    @few
    @given(st.integers(1, 12), st.integers(1, 3), calls)
    def check(capacity, num_envs, calls):
        capacity = max(capacity, num_envs)
        buffer, stored = make(algo, capacity, kind), []
        for steps, reload in calls:
            for _ in range(steps):
                numbers = range(len(stored), len(stored) + num_envs)
                stored += numbers
                buffer.add(**transitions(algo, numbers, kind))
            if reload:
                buffer = reloaded(buffer, make(algo, capacity, kind))
            rest = (0.5,) if algo is dqn_per else ()
            alive = stored[-capacity:]
            assert (buffer.num_stored, buffer.position) == (len(alive), len(stored) % capacity)
            batch = buffer.sample(30, *rest)
            numbers = batch.rew.int().tolist()
            assert set(numbers) <= set(alive)
            for name, part in transitions(algo, numbers, kind).items():
                assert np.array_equal(getattr(batch, name), part)
            rows = np.array(alive) % capacity                   # also those that were not drawn
            for name, part in transitions(algo, alive, kind).items():
                assert np.array_equal(buffer.columns[name][rows], part)

    check()


@rings
def test_ring_samples_every_transition_as_often_and_gives_copies(algo, kind):
    buffer = make(algo, 20, kind)
    for step in range(15):
        buffer.add(**transitions(algo, [2 * step, 2 * step + 1], kind))
        saved = buffer.state_dict()["columns"]                  # without the rows to come
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in saved.values())
    batch = buffer.sample(8000, *(0.5,) if algo is dqn_per else ())
    assert stats.chisquare(np.bincount(batch.rew.int())[10:]).pvalue > 1e-3
    assert batch.obs.dtype == (torch.uint8 if kind == "image" else torch.float32)
    before = batch.rew.clone()
    buffer.columns["rew"][:] = 99
    assert torch.equal(batch.rew, before)
    buffer.device = torch.device("meta")                        # stands for a GPU
    batch = buffer.sample(8, *(0.5,) if algo is dqn_per else ())
    assert batch.obs.device.type == batch.rew.device.type == "meta"


@rings
def test_ring_refuses_columns_for_rows(algo, kind):
    """Rewards [N, 1] would be a loss [B, B] later."""
    buffer = make(algo, 6, kind)
    good = transitions(algo, [1], kind)
    buffer.add(**good)
    for name in good:
        with pytest.raises(AssertionError, match=name):
            buffer.add(**good | {name: good[name][..., None]})


@rings
def test_ring_tells_its_memory_and_refuses_what_cannot_fit(algo, kind, capsys):
    obs = 2 * 36 * 36 if kind == "image" else 3 * 4
    need = 2 * obs + 8 + 4 + 4 + 8 * (algo is dqn_per)          # an index, or two numbers; p
    buffer = make(algo, 1_000_000, kind)
    arrays = [*buffer.columns.values(), getattr(buffer, "priority", np.empty(0))]
    assert sum(array.nbytes for array in arrays) == need * 1_000_000
    size = f"{need / 1e3:.2f} GB" if kind == "image" else f"{need} MB"
    said = f"replay buffer: 1,000,000 transitions, {size} when full\n"
    assert capsys.readouterr().out == said
    said = f"--buffer-size is {10**12}, which takes {need * 1e3:.2f} GB"
    refused(make, algo, 10**12, kind, says=said)


def test_memory_is_that_of_the_ranks_on_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(mpi, "size", lambda: 8)
    monkeypatch.setattr("utils.buffers.on_host", lambda: (1, 2))
    monkeypatch.setattr(buffers, "memory", lambda: 2e9)
    buffers.check_memory("--buffer-size", 10, 10**9)
    assert capsys.readouterr().out == "replay buffer: 80 transitions, 8.00 GB when full\n"
    refused(buffers.check_memory, "--buffer-size", 10, 10**9 + 10**8,
            says="--buffer-size is 80, which takes 2.20 GB; there are 2.00 GB of memory")


# ---- Priorities

def test_priorities_are_those_that_were_set_and_new_rows_have_the_highest():
    @few
    @given(st.integers(3, 20), calls, st.integers(0, 99))
    def check(capacity, calls, seed):
        rng, count = np.random.default_rng(seed), 0
        buffer = reloaded(make(dqn_per, capacity), make(dqn_per, capacity))     # while it is empty
        plain, highest = np.zeros(capacity), 1.0
        for steps, reload in calls:
            for _ in range(steps):
                rows = np.arange(count, count + 3) % capacity
                buffer.add(**transitions(dqn_per, range(count, count + 3)))
                plain[rows], count = highest, count + 3
            rows = rng.integers(min(count, capacity), size=5)
            values = rng.uniform(0.1, 2, capacity).astype(np.float32)[rows]
            buffer.set_priorities(rows, torch.tensor(values))
            plain[rows], highest = values, max(highest, values.max())
            if reload:
                buffer = reloaded(buffer, make(dqn_per, capacity))
            assert np.array_equal(buffer.priority, plain) and buffer.max_priority == highest
            beta = float(rng.uniform())
            batch = buffer.sample(16, beta)
            weight = (min(count, capacity) * plain[batch.rows] / plain.sum()) ** -beta
            close(batch.weight, torch.tensor(weight / weight.max()), rtol=1e-4)
            assert (buffer.columns["rew"][batch.rows] == batch.rew.numpy()).all()

    check()


prioritized = pytest.mark.parametrize("algo", [dqn_per, rainbow], ids=name_of)


@prioritized
def test_two_ranks_weigh_by_the_smallest_of_both(algo, monkeypatch):
    buffer, told = make(algo, 20), (rainbow.Config(), 1.0) if algo is rainbow else (1.0,)
    buffer.add(**transitions(algo, range(20)))
    buffer.set_priorities(buffer.sample(64, *told).rows, torch.rand(64) + 0.1)
    torch.manual_seed(5)
    alone = buffer.sample(64, *told)
    monkeypatch.setattr(mpi, "gather", lambda mine: [mine, mine / 4])
    torch.manual_seed(5)
    close(buffer.sample(64, *told).weight, alone.weight / 4)


@prioritized
def test_every_update_rates_what_it_learned_from(algo, monkeypatch):
    """At once, by the error or the divergence from before its step, without weights."""
    kind = rainbow.NStepBuffer if algo is rainbow else dqn_per.PrioritizedBuffer
    learned, rated, update, rating = [], [], algo.update, kind.set_priorities
    at_once = noted(monkeypatch, kind, "sample", lambda *_: len(rated) == len(learned))

    def noting_update(agent, optimizer, batch, lr):
        state = torch.get_rng_state()                           # rainbow's noise is then the same
        plain = replace(batch, weight=torch.ones_like(batch.weight))
        metrics = algo.critic_loss(agent, plain)[1]
        size = metrics["kl"] if algo is rainbow else metrics["td_error"].abs() + 1e-6
        learned.append([batch.rows, size ** 0.4])
        torch.set_rng_state(state)
        return update(agent, optimizer, batch, lr)

    def noting_rate(buffer, rows, values):
        assert np.array_equal(rows, learned[-1][0])
        close(values, learned[-1][1])
        rated.append(rows)
        rating(buffer, rows, values)
        last = dict(zip(rows.tolist(), values.tolist()))        # of a row that was drawn twice
        stored = buffer.columns["priority"] if algo is rainbow else buffer.priority
        close(stored[list(last)], torch.tensor(list(last.values())))

    monkeypatch.setattr(kind, "set_priorities", noting_rate)
    monkeypatch.setattr(algo, "update", noting_update)
    algo.train(quick(algo, update_every=4, num_envs=2, omega=0.4))
    assert len(rated) == len(learned) == len(at_once) == 20 and all(at_once)


# ---- Frames that are stored once

def test_frame_ring_holds_every_transition_whose_frames_are_all_there():
    @few
    @given(st.sampled_from((1, 4)), st.integers(1, 3), st.integers(1, 25), calls,
           st.integers(0, 99), st.booleans())
    def check(stack, num_envs, rows, calls, seed, black):
        rng, shape = np.random.default_rng(seed), (stack, 2, 3)

        def fresh():
            return dqn_atari.FrameBuffer(rows * num_envs, num_envs, stack, shape, CPU)

        buffer, logs, shown = fresh(), [[] for _ in range(num_envs)], [None] * num_envs
        for steps, reload in calls:
            for _ in range(steps):
                step = []
                for env in range(num_envs):
                    begins = shown[env] is None
                    if begins:
                        first = rng.integers(256, size=(1, 2, 3), dtype=np.uint8)
                        pad = np.zeros_like(first) if black else first
                        shown[env] = np.concatenate([*[pad] * (stack - 1), first])
                    new = rng.integers(256, size=(1, 2, 3), dtype=np.uint8)
                    after = np.concatenate([shown[env][1:], new])
                    terminated, truncated = rng.random(2) < 0.15
                    row = (shown[env], rng.integers(9), rng.integers(99), after, terminated)
                    logs[env].append((*row, begins))
                    step.append((*row, terminated or truncated))
                    shown[env] = None if step[-1][-1] else after
                names = "obs", "act", "rew", "next_obs", "terminated", "done"
                buffer.add(**dict(zip(names, map(np.array, zip(*step)))))
            if reload:                                          # new episodes begin
                buffer, shown = reloaded(buffer, fresh()), [None] * num_envs
            check_live(buffer, logs)

    check()


def check_live(buffer, logs):
    """The live rows are the steps whose frames are all among the last ones written."""
    for env, log in enumerate(logs):
        written, at = 0, []
        for *_, begins in log:
            written += buffer.num_frames if begins else 0
            at.append(written - 1)
            written += 1
        alive = [step for step, newest in zip(log, at)
                 if newest - buffer.num_frames + 1 >= written - buffer.num_rows]
        own = np.flatnonzero(buffer.columns["live"][:, env])
        own = own[((own - written) % buffer.num_rows).argsort()]    # the oldest row comes first
        batch = buffer.gather(own, np.full(len(own), env))
        assert len(alive) == len(own) > 0
        for k, (obs, act, rew, next_obs, terminated, _) in enumerate(alive):
            assert np.array_equal(batch.obs[k], obs) and np.array_equal(batch.next_obs[k], next_obs)
            assert (batch.act[k], batch.rew[k], batch.terminated[k]) == (act, rew, terminated)


@pytest.fixture
def frames():
    """A ring of 20 rows for each of three environments that has wrapped.

    Episodes have 2, 4 and 4 steps, so that the first environment has fewer live rows.
    """
    buffer, count = dqn_atari.FrameBuffer(60, 3, 4, (4, 36, 40), CPU), np.zeros(3, int)
    for step in range(30):
        stacks = np.arange(5) + (np.arange(3) + count)[:, None]
        stacks = np.broadcast_to(stacks[..., None, None], (3, 5, 36, 40)).astype(np.uint8)
        end = (step + 1) % np.array([2, 4, 4]) == 0
        count += np.where(end, 5, 1)
        buffer.add(obs=stacks[:, :4], next_obs=stacks[:, 1:], act=np.full(3, step),
                   rew=np.full(3, step), terminated=end, done=end)
    return buffer


def test_frame_ring_samples_live_rows_each_as_often(frames):
    drawn, gather = [], frames.gather
    frames.gather = lambda rows, envs: drawn.append((rows, envs)) or gather(rows[:1], envs[:1])
    frames.sample(20_000)
    live, counts = frames.columns["live"], np.zeros((20, 3), int)
    np.add.at(counts, drawn[0], 1)
    assert (counts[~live] == 0).all() and 20 < live.sum() < 60
    assert stats.chisquare(counts[live]).pvalue > 1e-3


def test_frame_ring_saves_its_filled_rows_alone_and_samples_copies(frames):
    batch = frames.sample(64)
    before = batch.obs.clone()
    frames.columns["frame"][:] = 99
    assert torch.equal(batch.obs, before) and batch.obs.dtype == torch.uint8
    saved = frames.state_dict()["columns"]
    assert saved["frame"].data_ptr() == frames.columns["frame"].ctypes.data
    assert saved["frame"].untyped_storage().nbytes() == 20 * 3 * 36 * 40
    frames.device = torch.device("meta")                        # stands for a GPU
    assert {column.device.type for column in vars(frames.sample(5)).values()} == {"meta"}
    empty = dqn_atari.FrameBuffer(1, 1, 4, (4, 36, 40), CPU)
    assert empty.num_rows == 5                                  # room for a transition


def test_frame_ring_of_a_million_takes_7_gb_and_what_cannot_fit_is_refused(capsys):
    """All of it is asked for here; the machine gives a page when something is written there."""
    buffer = dqn_atari.FrameBuffer(1_000_000, 8, 4, (4, 84, 84), CPU)
    assert buffer.columns["frame"].shape == (125_000, 8, 1, 84, 84)
    assert 7.0e9 < sum(column.nbytes for column in buffer.columns.values()) < 7.1e9
    assert "1,000,000 transitions, 7.0" in capsys.readouterr().out
    refused(dqn_atari.FrameBuffer, 10**11, 1, 4, (4, 84, 84), CPU,
            says="--buffer-size is 100000000000, which takes 7")


# ---- Goals that are given afterwards

class Goals(gym.Env):
    """Its functions tell every pair of numbers apart."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return (achieved_goal - 1000 * desired_goal)[..., 0]

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return bool(achieved_goal == desired_goal)


ONE = Box(-np.inf, np.inf, (1,))
GOALS = FlatBox(gym.spaces.Dict(achieved_goal=ONE, desired_goal=ONE, observation=ONE))
PARTS = [GOALS.parts[name].start for name in ("observation", "achieved_goal", "desired_goal")]


def vector(step, env, episode):
    """It observes env and step, as it has achieved both; a goal names the episode."""
    obs = np.zeros(3, np.float32)
    obs[PARTS] = 100 * step + env, step + 0.5 + env / 8, -episode
    return obs


def test_hindsight_gives_goals_of_the_same_episodes_future():
    """After any sequence of steps, ends and resumes: which rows, which goals, which rewards."""
    @few
    @given(st.integers(1, 3), st.integers(1, 9), calls, st.integers(0, 99))
    def check(num_envs, rows, calls, seed):
        rng, step, episode, log = np.random.default_rng(seed), 0, [0] * num_envs, []

        def fresh():
            return sac_her.HindsightBuffer(rows * num_envs + num_envs - 1, GOALS, 1, CPU, num_envs,
                                           Goals(), her_k=4)

        buffer = fresh()
        for steps, reload in calls:
            for _ in range(steps):
                done = rng.random(num_envs) < 0.25
                buffer.add(done=done, **{name: np.array(x) for name, x in {
                    "obs": [vector(step, env, episode[env]) for env in range(num_envs)],
                    "next_obs": [vector(step + 1, env, episode[env]) for env in range(num_envs)],
                    "act": np.zeros((num_envs, 1)), "rew": [7.0 + step] * num_envs,
                    "terminated": done}.items()})
                log.append((list(episode), done))
                episode = [each + 1000 * bool(end) for each, end in zip(episode, done)]
                step += 1
            if reload:                                          # the running episodes are over
                buffer = reloaded(buffer, fresh())
                episode = [each + 1000 for each in episode]
            first, batch = max(0, step - rows), buffer.sample(50)
            for k in range(50):
                obs, goal = batch.obs[k].tolist()
                at, env = int(obs // 100), int(obs % 100)
                now, ends = log[at][0][env], log[at][1][env]
                assert first <= at < step and batch.next_obs[k, 0] == obs + 100
                assert batch.next_obs[k, 1] == goal
                if k >= 40:                                     # as it was
                    wanted = -now, 7.0 + at, float(ends)
                else:
                    reached = {later: later + 1.5 + env / 8 for later in range(at, step)
                               if log[later][0][env] == now}
                    assert goal in reached.values()
                    wanted = goal, reached[at] - 1000 * goal, float(goal == reached[at])
                assert (goal, batch.rew[k].item(), batch.terminated[k].item()) == pytest.approx(
                    wanted, rel=1e-6)

    check()
