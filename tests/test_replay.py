"""What the off-policy files collect, keep and sample, row by row, on the scripted environments."""
import json

import numpy as np
import pytest
import torch

from algos import ddpg, sac, td3
from tests import envs as scripted
from tests.envs import HIGH, LOW, Counter
from tests.offpolicy import close, quick
from tests.test_collect import script
from utils import mpi
from utils.mpi import UsageError

every_algo = pytest.mark.parametrize("algo", [ddpg, td3, sac], ids=["ddpg", "td3", "sac"])
counters = pytest.mark.parametrize("num_envs", [1, 3])


@pytest.fixture(autouse=True)
def numbered_from_0():
    Counter.made.clear()


def collected(algo, num_envs, steps, size):
    """(agent, buffer, actions [steps, N, d], ended episodes by step) after `steps` of Counter."""
    torch.manual_seed(0)
    cfg = quick(algo, "tests.envs:Counter-v0", num_envs=num_envs)
    envs = algo.make_envs(cfg, num_envs)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    buffer = algo.ReplayBuffer(size, 1, torch.zeros(3), torch.zeros(2))
    obs, acts, ended = envs.reset(seed=7)[0], [], []
    for _ in range(steps):
        acts.append(agent.act(obs))
        obs, ends = algo.interact(agent, envs, buffer, obs, acts[-1])
        ended.append(ends)
    return agent, buffer, torch.stack(acts), ended


def expected_rows(num_envs, steps):
    """obs, rew, next_obs, terminated of each step and environment, in the order they are added."""
    scripts = [script(number, steps)[0] for number in range(num_envs)]
    return [scripts[number][step] for step in range(steps) for number in range(num_envs)]


def check(buffer, rows, acts):
    """The buffer holds the last of `rows` and `acts`, each once, all parts in one row."""
    size = len(buffer.columns["rew"])
    assert buffer.filled == min(len(rows), size)
    index = np.arange(len(rows))[-size:]
    assert buffer.next == len(rows) % size
    for k in index:
        obs, rew, next_obs, terminated, _ = rows[k]
        row = {name: column[k % size] for name, column in buffer.columns.items()}
        assert row["obs"].tolist() == list(obs) and row["next_obs"].tolist() == list(next_obs)
        assert row["rew"] == rew and row["terminated"] == terminated
        assert torch.equal(row["act"], acts[k])


# ---- Rows

@every_algo
@counters
@pytest.mark.parametrize("size", [1000, 20], ids=["part", "wrapped"])
def test_every_row_is_as_scripted(algo, num_envs, size):
    """30 rows of each environment: 20 are wrapped one and a half times, in the midst of a step."""
    _, buffer, acts, _ = collected(algo, num_envs, 30, size)
    rows = expected_rows(num_envs, 30)
    assert {(row[3], row[4]) for row in rows} == {(0, 0), (0, 1), (1, 1)}   # both kinds of ends
    check(buffer, rows, acts.flatten(0, 1))


@every_algo
@counters
def test_a_sample_is_of_rows_that_are_there(algo, num_envs):
    """No row of what was never written, none torn apart; each as often as another."""
    _, buffer, acts, _ = collected(algo, num_envs, 7, 1000)
    rows, acts = expected_rows(num_envs, 7), acts.flatten(0, 1)
    n = 1000 * len(rows)
    sample = buffer.sample(n)
    assert isinstance(sample, algo.Transitions)
    assert sample.obs.shape == sample.next_obs.shape == (n, 3) and sample.act.shape == (n, 2)
    assert sample.rew.shape == sample.terminated.shape == (n,)
    equal = (sample.act[:, None] == acts).all(-1)                   # actions tell rows apart
    assert (equal.sum(1) == 1).all()
    index = equal.int().argmax(1)
    close(sample.obs, torch.tensor([row[0] for row in rows])[index])
    close(sample.rew, torch.tensor([row[1] for row in rows])[index])
    close(sample.next_obs, torch.tensor([row[2] for row in rows])[index])
    close(sample.terminated, torch.tensor([row[3] for row in rows])[index])
    counts = torch.bincount(index, minlength=len(rows))
    assert len(counts) == len(rows) and ((counts - 1000).abs() < 200).all()    # six deviations


@every_algo
def test_a_sample_is_no_view_of_the_buffer(algo):
    _, buffer, _, _ = collected(algo, 1, 5, 5)
    sample = buffer.sample(64)
    before = sample.rew.clone()
    buffer.columns["rew"].fill_(99)
    assert torch.equal(sample.rew, before)


@every_algo
def test_the_stored_action_is_the_policys_and_the_environment_gets_it_in_its_box(algo):
    _, buffer, acts, _ = collected(algo, 3, 30, 90)
    assert acts.abs().max() <= 1 and acts.std(0).min() > 1e-3
    sent = np.stack([env.acts for env in Counter.made], axis=1)
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    close(sent, (low + high) / 2 + (high - low) / 2 * acts, atol=1e-5)
    assert (sent >= LOW).all() and (sent <= HIGH).all()
    assert torch.equal(buffer.columns["act"], acts.flatten(0, 1))
    assert len(buffer.columns["act"].unique(dim=0)) == 90            # each environment its own


@every_algo
def test_ended_episodes(algo):
    _, _, _, ended = collected(algo, 3, 30, 100)
    got = {(t, env, ep_ret, ep_len) for t, ends in enumerate(ended) for env, ep_ret, ep_len in ends}
    assert got == {row for number in range(3) for row in script(number, 30)[1]}


@every_algo
def test_what_is_stored_is_of_the_type_of_the_data(algo):
    """Floats as the networks take them, images and discrete actions as they come."""
    number = torch.zeros((), dtype=torch.int64)
    buffer = algo.ReplayBuffer(6, 1, torch.zeros(2, 4, dtype=torch.uint8), number)
    obs = np.arange(16, dtype=np.uint8).reshape(2, 2, 4)
    buffer.add(obs=obs, act=np.int64([3, 4]), rew=np.float64([1, 2]), next_obs=obs + 1,
               terminated=np.array([True, False]))
    assert {name: x.dtype for name, x in buffer.columns.items()} == {
        "obs": torch.uint8, "act": torch.int64, "rew": torch.float32, "next_obs": torch.uint8,
        "terminated": torch.float32}
    sample = buffer.sample(50)
    assert set(sample.act.tolist()) == {3, 4} and set(sample.terminated.tolist()) == {0, 1}
    assert (sample.next_obs == sample.obs + 1).all()


@every_algo
def test_columns_for_rows_are_refused(algo):
    """Rewards [N, 1] would be a loss [B, B] later."""
    buffer = algo.ReplayBuffer(6, 1, torch.zeros(3), torch.zeros(2))
    good = {"obs": torch.zeros(1, 3), "act": torch.zeros(1, 2), "rew": torch.zeros(1),
            "next_obs": torch.zeros(1, 3), "terminated": torch.zeros(1)}
    buffer.add(**good)
    for name in good:
        with pytest.raises(AssertionError, match=name):
            buffer.add(**good | {name: good[name].unsqueeze(-1)})


@every_algo
@pytest.mark.parametrize("fault", ["obs nan", "rew inf"])
def test_nan_of_the_environment_is_never_stored(algo, fault):
    cfg = quick(algo, "tests.envs:Faulty-v0", env_kwargs=json.dumps({"fault": fault, "at": 5}))
    with pytest.raises(FloatingPointError, match="NaN or infinity from the environment"):
        algo.train(cfg)


# ---- Memory

def test_memory_is_told_and_what_cannot_fit_is_refused(capsys):
    """A row: two observations of 3, an action of 2, two numbers, in float32: 40 bytes."""
    ddpg.ReplayBuffer(1_000_000, 1, torch.zeros(3), torch.zeros(2))
    assert capsys.readouterr().out == "replay buffer: 1,000,000 transitions, 0.04 GB when full\n"
    with pytest.raises(UsageError):
        ddpg.ReplayBuffer(10**12, 1, torch.zeros(3), torch.zeros(2))
    assert "--buffer-size is 1000000000000, which takes 40000.00 GB" in capsys.readouterr().err


@every_algo
def test_a_refused_buffer_leaves_nothing_behind(algo, elsewhere, capsys):
    with pytest.raises(UsageError):
        algo.train(quick(algo, buffer_size=10**13))
    assert list(elsewhere.iterdir()) == []


def test_the_size_is_a_total_over_processes(monkeypatch):
    monkeypatch.setattr(mpi, "_size", 4)
    buffer = ddpg.ReplayBuffer(1000, 4, torch.zeros(3), torch.zeros(2))
    assert len(buffer.columns["rew"]) == 250
    with pytest.raises(UsageError):
        ddpg.ReplayBuffer(1001, 4, torch.zeros(3), torch.zeros(2))


# ---- Saved and resumed

@pytest.mark.parametrize("steps", [4, 30], ids=["part", "wrapped"])
def test_a_loaded_buffer_goes_on_as_the_saved_one(steps):
    """Same rows, same next row to be overwritten, same samples."""
    _, buffer, acts, _ = collected(ddpg, 3, steps, 20)
    other = ddpg.ReplayBuffer(20, 1, torch.zeros(3), torch.zeros(2))
    saved = buffer.state_dict()
    filled = saved["filled"]
    assert all(len(x) == filled and x.untyped_storage().nbytes() == x.nbytes
               for x in saved["columns"].values())                  # no row that is not filled
    torch.save(saved, "buffer.pt")
    other.load_state_dict(torch.load("buffer.pt", weights_only=True))
    check(other, expected_rows(3, steps), acts.flatten(0, 1))
    new = {"obs": torch.full((3, 3), 7.0), "act": torch.ones(3, 2), "rew": torch.ones(3),
           "next_obs": torch.full((3, 3), 8.0), "terminated": torch.ones(3)}
    for each in (buffer, other):
        each.add(**new)
    assert (buffer.filled, buffer.next) == (other.filled, other.next)
    samples = []
    for each in (buffer, other):
        torch.manual_seed(3)
        samples.append(each.sample(200))
    for name in buffer.columns:
        assert torch.equal(getattr(samples[0], name), getattr(samples[1], name))


def test_what_was_saved_does_not_change_with_the_buffer():
    _, buffer, _, _ = collected(ddpg, 1, 5, 20)
    saved = buffer.state_dict()
    before = saved["columns"]["rew"].clone()
    buffer.columns["rew"].fill_(99)
    assert torch.equal(saved["columns"]["rew"], before)


def test_script_has_both_at_once():
    assert "both" in {scripted.end(number, episode) for number in range(3) for episode in range(3)}
