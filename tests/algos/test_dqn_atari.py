"""algos/dqn_atari.py, where it is not algos/dqn.py: the ring of frames, and Atari itself."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from scipy import stats

from algos import dqn_atari
from tests.helpers import (
    DQN_SPACES as SPACES,
    VECTOR,
    copies,
    dqn_quick as quick,
    film_envs,
    film_logs,
    moved,
    rows as rows_of,
)
from utils import checkpoint, mpi
from utils.mpi import UsageError

CPU = torch.device("cpu")
every_kind = pytest.mark.parametrize("kind", ["film", "image"])


def new_buffer(kind, num_envs, rows):
    """With so many rows for each environment; of the colours of an image none is a frame."""
    num_frames = 4 if kind == "film" else 1
    return dqn_atari.FrameBuffer(rows * num_envs, num_envs, num_frames, SPACES[kind].shape, CPU)


def fill(buffer, steps, num_envs, kind="film"):
    buffer.starts[:] = True
    return film_logs(dqn_atari, buffer, steps, num_envs, kind)


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
    for i, log in enumerate(logs):
        own = np.flatnonzero(buffer.columns["live"][:, i])
        age = (own - buffer.num_written[i]) % buffer.num_rows           # the oldest row comes first
        batch = buffer.gather(own[age.argsort()], np.full(len(own), i))
        steps = alive(log, buffer.num_rows, buffer.num_frames)
        assert len(steps) == len(own) > 0
        for k, (obs, act, rew, next_obs, terminated, _) in enumerate(steps):
            assert torch.equal(batch.obs[k], torch.as_tensor(obs))
            assert torch.equal(batch.next_obs[k], torch.as_tensor(next_obs))
            assert (batch.act[k], batch.rew[k], batch.terminated[k]) == (act, rew, terminated)


# ---- The equation

def test_stacks_are_put_together_by_hand():
    """The docstring's example: an episode a to f of two steps, after one that ended with x."""
    buffer = dqn_atari.FrameBuffer(20, 1, 4, (4, 36, 36), CPU)
    x, a, b, c, d, e, f = (np.full((1, 36, 36), number, np.uint8) for number in range(7))
    buffer.num_written[:] = 11
    buffer.write(0, x)
    two_steps = (([a, b, c, d], 1, [b, c, d, e], False), ([b, c, d, e], 2, [c, d, e, f], True))
    for obs, rew, next_obs, terminated in two_steps:
        buffer.add(obs=np.concatenate(obs)[None], act=np.array([rew]), rew=np.array([rew]),
                   next_obs=np.concatenate(next_obs)[None], terminated=np.array([terminated]),
                   done=np.array([terminated]))
    assert np.flatnonzero(buffer.columns["live"][:, 0]).tolist() == [15, 16]
    assert buffer.columns["frame"][11:18, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    batch = buffer.gather(np.array([15, 16]), np.array([0, 0]))
    assert batch.obs[:, :, 0, 0].tolist() == [[1, 2, 3, 4], [2, 3, 4, 5]]
    assert batch.next_obs[:, :, 0, 0].tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert batch.rew.tolist() == batch.act.tolist() == [1, 2]
    assert batch.terminated.tolist() == [0, 1]


# ---- The ring

@pytest.mark.parametrize("kind,black", [("film", True), ("film", False), ("image", True)])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("rows", [100, 20, 5], ids=["part", "wrapped", "least"])
def test_every_transition_is_as_it_was(kind, black, num_envs, rows):
    """Where 20 rows are wrapped one and a half times, and after each step on the way there."""
    buffer = new_buffer(kind, num_envs, rows)
    agent, envs, plain, obs = film_envs(dqn_atari, num_envs, kind, black)
    for _ in range(30):
        obs = dqn_atari.interact(agent, envs, buffer, obs, agent.act(obs))
        check(buffer, [env.log for env in plain])
    assert rows == 100 or buffer.num_written.min() >= 30
    assert {step[4] for env in plain for step in env.log} == {0, 1}


@pytest.mark.parametrize("rows", [100, 20], ids=["part", "wrapped"])
@every_kind
def test_it_goes_on_after_a_resume(kind, rows, tmp_path):
    """In the midst of episodes, which are not gone on with: the next rows are of new ones."""
    buffer = new_buffer(kind, 3, rows)
    before = fill(buffer, 13, 3, kind)
    checkpoint.save_file(tmp_path / "a.pt", buffer.state_dict())
    other = new_buffer(kind, 3, rows)
    other.starts[:] = False                                     # all begin anew, whatever was
    other.load_state_dict(checkpoint.load_file(tmp_path / "a.pt"))
    assert other.starts.all()
    check(other, before)
    after = film_logs(dqn_atari, other, 7, 3, kind)
    check(other, [one + two for one, two in zip(before, after)])
    written = buffer.num_written.copy()
    other.num_written[:] = 0                                        # what was loaded is its own
    assert np.array_equal(buffer.num_written, written)


def test_an_empty_buffer_can_be_saved_and_loaded(tmp_path):
    """As the first checkpoint of a run has it."""
    buffer = new_buffer("film", 3, 20)
    checkpoint.save_file(tmp_path / "a.pt", buffer.state_dict())
    buffer.load_state_dict(checkpoint.load_file(tmp_path / "a.pt"))
    check(buffer, fill(buffer, 5, 3))


def test_a_saved_buffer_takes_the_room_of_its_filled_rows_and_no_copy():
    buffer = new_buffer("film", 3, 1000)
    fill(buffer, 13, 3)
    filled = max(buffer.num_written)
    saved = buffer.state_dict()["columns"]
    assert saved["frame"].untyped_storage().nbytes() == 3 * filled * 36 * 40
    assert saved["frame"].data_ptr() == buffer.columns["frame"].ctypes.data
    assert all(len(column) == filled for column in saved.values())


@every_kind
@pytest.mark.parametrize("resumed", [False, True])
def test_samples_are_live_rows_each_as_often_as_another(kind, resumed):
    buffer = new_buffer(kind, 3, 20)
    fill(buffer, 30, 3, kind)
    if resumed:
        state = buffer.state_dict()
        buffer = new_buffer(kind, 3, 20)
        buffer.load_state_dict(state)
    drawn, gather = [], buffer.gather
    buffer.gather = lambda rows, envs: drawn.append((rows, envs)) or gather(rows[:1], envs[:1])
    buffer.sample(20_000)
    live, counts = buffer.columns["live"], np.zeros((20, 3), int)
    np.add.at(counts, drawn[0], 1)
    assert (counts[~live] == 0).all() and 20 < live.sum() < 60
    assert stats.chisquare(counts[live]).pvalue > 1e-3


@every_kind
def test_samples_are_transitions_that_happened(kind):
    buffer = new_buffer(kind, 3, 20)
    logs = fill(buffer, 30, 3, kind)
    happened = {(obs.tobytes(), int(act), rew, next_obs.tobytes(), terminated)
                for log in logs for obs, act, rew, next_obs, terminated, _ in log}
    batch = buffer.sample(500)
    for k in range(500):
        obs, act, rew, next_obs, terminated = (x[k].numpy() for x in vars(batch).values())
        row = obs.tobytes(), int(act), float(rew), next_obs.tobytes(), float(terminated)
        assert row in happened


def test_a_sample_of_the_first_step_of_all():
    buffer = new_buffer("film", 1, 8)
    logs = fill(buffer, 1, 1)
    batch = buffer.sample(5)
    assert batch.rew.tolist() == [logs[0][0][2]] * 5
    assert batch.obs.shape == batch.next_obs.shape == (5, 4, 36, 40)
    assert (batch.obs.dtype, batch.act.dtype, batch.rew.dtype) == (
        torch.uint8, torch.int64, torch.float32)


def test_a_sample_is_no_view_of_the_buffer():
    buffer = new_buffer("film", 1, 20)
    fill(buffer, 10, 1)
    batch = buffer.sample(64)
    before = batch.obs.clone(), batch.rew.clone()
    buffer.columns["frame"][:] = 99
    buffer.columns["rew"][:] = 99
    assert torch.equal(batch.obs, before[0]) and torch.equal(batch.rew, before[1])


def test_samples_are_on_the_device_of_the_networks_and_rows_in_main_memory():
    """"meta" stands for a GPU: nothing can be read from there."""
    buffer = new_buffer("film", 3, 20)
    buffer.device = torch.device("meta")
    fill(buffer, 13, 3)
    assert {column.device.type for column in vars(buffer.sample(5)).values()} == {"meta"}
    assert all(column.device.type == "cpu" for column in buffer.state_dict()["columns"].values())


def test_a_million_frames_take_less_than_8_gb(capsys):
    """All of it is asked for here; the machine gives a page when something is written there."""
    buffer = dqn_atari.FrameBuffer(1_000_000, 8, 4, (4, 84, 84), CPU)
    size = sum(column.nbytes for column in buffer.columns.values())
    assert buffer.columns["frame"].shape == (125_000, 8, 1, 84, 84)
    assert 7.0e9 < size < 7.1e9
    assert f"1,000,000 transitions, {size / 1e9:.2f} GB" in capsys.readouterr().out


def test_what_cannot_fit_is_refused_before_it_is_asked_for(monkeypatch):
    with pytest.raises(UsageError, match="--buffer-size is 10*, which takes 7"):
        dqn_atari.FrameBuffer(10**12, 1, 4, (4, 84, 84), CPU)
    monkeypatch.setattr(mpi, "_size", 4)                     # each of four has as many
    with pytest.raises(UsageError, match="--buffer-size is 40*, which takes 2"):
        dqn_atari.FrameBuffer(10**11, 1, 4, (4, 84, 84), CPU)


def test_memory_is_that_of_the_machine_whatever_the_gpu_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 100))
    buffer = dqn_atari.FrameBuffer(100, 1, 4, (4, 84, 84), torch.device("cuda"))
    assert buffer.device.type == "cuda"


@every_kind
def test_even_the_smallest_ring_has_room_for_a_transition(kind):
    buffer = new_buffer(kind, 3, 1)
    assert buffer.num_rows == buffer.num_frames + 1
    logs = fill(buffer, 30, 3, kind)
    check(buffer, logs)
    assert buffer.sample(20).rew.shape == (20,)


# ---- Runs

def test_vectors_are_refused():
    with pytest.raises(UsageError):
        dqn_atari.Agent(VECTOR, Discrete(4), dqn_atari.Config())


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "ale_py:ALE/Pong-v5"])
def test_atari_stores_a_frame_once_and_gives_stacks(env, monkeypatch):
    """A row takes 84 x 84 bytes; what is learned from has the four frames that were acted on."""
    saw, batches, acted, update = [], [], dqn_atari.Agent.act, dqn_atari.update
    monkeypatch.setattr(dqn_atari.Agent, "act",
                        lambda self, obs: saw.append(obs) or acted(self, obs))
    monkeypatch.setattr(dqn_atari, "update",
                        lambda *args: batches.append(args[2]) or update(*args))
    dqn_atari.train(quick(dqn_atari, env=env, env_kwargs="{}", start_steps=40, update_every=10))
    saved = torch.load("run/resume-120/rank0.pt")["state"]["buffer"]["columns"]["frame"]
    assert saved.shape[1:] == (1, 1, 84, 84) and len(saved) == 120 + 4
    acted_on = {obs[0].tobytes() for obs in saw}
    assert batches and all(row.numpy().tobytes() in acted_on for b in batches for row in b.obs)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened():
    """Its episodes end where it stops, since environments begin anew: these have one step."""
    same = {"env": "tests.envs:Bright-v0", "env_kwargs": "{}", "num_envs": 2, "anneal_lr": False,
            "eps_steps": 100, "start_steps": 20, "total_steps": 60, "report_every": 30}
    whole = dqn_atari.train(quick(dqn_atari, **same, run_dir="whole"))
    dqn_atari.train(quick(dqn_atari, **same | {"total_steps": 30}))
    state = torch.load("run/resume-30/rank0.pt")["state"]
    assert state["buffer"]["num_written"].tolist() == [30, 30]      # two frames per episode
    parts = dqn_atari.train(quick(dqn_atari, **same, resume=True))
    assert [row["step"] for row in rows_of("run")] == ["30", "60"]
    one, two = (torch.load(f"{run}/resume-60/rank0.pt")["state"] for run in ("whole", "run"))
    for part in (one, two):
        assert part["buffer"]["num_written"].tolist() == [60, 60]
    # Environments draw anew after a resume; what was stored before is the same.
    for name, column in one["buffer"]["columns"].items():
        live = one["buffer"]["columns"]["live"][:30]
        assert torch.equal(column[:30][live], two["buffer"]["columns"][name][:30][live])
    assert two["optimizer"]["steps"] == one["optimizer"]["steps"] == 20
    assert moved(copies(whole), parts)
