"""What the off-policy files collect, keep and sample, row by row, on the scripted environments.

And what holds for the loops of all seven.
"""
import json

import gymnasium as gym
import numpy as np
import pytest
import torch

import utils.run
from algos import ddpg, dqn, dqn_atari, dqn_per, sac, sac_her, td3
from tests import envs as scripted
from tests.envs import HIGH, LOW, Counter, GoalCounter
from tests.helpers import (
    close,
    name_of,
    quick,
    rows,
    script,
)
from utils import checkpoint, mpi
from utils.envs import evaluate, make_envs
from utils.mpi import UsageError
from utils.run import Run

every_algo = pytest.mark.parametrize("algo", [ddpg, td3, sac], ids=["ddpg", "td3", "sac"])
all_seven = pytest.mark.parametrize(
    "algo", [dqn, dqn_per, dqn_atari, ddpg, td3, sac, sac_her], ids=name_of)
CPU = torch.device("cpu")
counters = pytest.mark.parametrize("num_envs", [1, 3])


def collected(algo, num_envs, steps, size):
    """`steps` of Counter -> agent, buffer, actions [steps, N, d], {(step, env, ep_ret, ep_len)}."""
    torch.manual_seed(0)
    cfg = quick(algo, "tests.envs:Counter-v0", num_envs=num_envs)
    envs = make_envs(cfg, num_envs)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    buffer = algo.ReplayBuffer(size, 3, 2, CPU)
    obs, acts = envs.reset(seed=7)[0], []
    for _ in range(steps):
        acts.append(agent.act(obs))
        obs = algo.interact(agent, envs, buffer, obs, acts[-1])
    ended = {(steps - 1 - ago, *rest) for ago, *rest in envs.pop_episodes()}
    return agent, buffer, torch.stack(acts), ended


def expected_rows(num_envs, steps):
    """obs, rew, next_obs, terminated of each step and environment, in the order they are added."""
    scripts = [script(number, steps)[0] for number in range(num_envs)]
    return [scripts[number][step] for step in range(steps) for number in range(num_envs)]


def check(buffer, rows, acts):
    """The buffer holds the last of `rows` and `acts`, each once, all parts in one row."""
    size = len(buffer.columns["rew"])
    assert buffer.num_stored == min(len(rows), size)
    index = np.arange(len(rows))[-size:]
    assert buffer.position == len(rows) % size
    for k in index:
        obs, rew, next_obs, terminated, _ = rows[k]
        row = {name: column[k % size] for name, column in buffer.columns.items()}
        assert row["obs"].tolist() == list(obs) and row["next_obs"].tolist() == list(next_obs)
        assert row["rew"] == rew and row["terminated"] == terminated
        assert row["act"].tolist() == acts[k].tolist()


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
    buffer.columns["rew"][:] = 99
    assert torch.equal(sample.rew, before)


@every_algo
def test_the_stored_action_is_the_policys_and_the_environment_gets_it_in_its_box(algo):
    _, buffer, acts, _ = collected(algo, 3, 30, 90)
    assert acts.abs().max() <= 1 and acts.std(0).min() > 1e-3
    sent = np.stack([env.acts for env in Counter.made], axis=1)
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    close(sent, (low + high) / 2 + (high - low) / 2 * acts, atol=1e-5)
    assert (sent >= LOW).all() and (sent <= HIGH).all()
    assert np.array_equal(buffer.columns["act"], acts.flatten(0, 1))
    assert len(np.unique(buffer.columns["act"], axis=0)) == 90       # each environment its own


@every_algo
def test_ended_episodes(algo):
    _, _, _, ended = collected(algo, 3, 30, 100)
    assert ended == {row for number in range(3) for row in script(number, 30)[1]}


@every_algo
def test_what_is_stored_is_float32_as_the_networks_take_it(algo):
    """Whatever the environment's own types are; an end is 1."""
    buffer = algo.ReplayBuffer(6, 4, 1, CPU)
    obs = np.arange(8, dtype=np.float64).reshape(2, 4)
    buffer.add(obs=obs, act=np.float32([[0.25], [0.5]]), rew=np.float64([1, 2]),
               next_obs=(obs + 1).astype(np.float32), terminated=np.array([True, False]))
    assert {column.dtype for column in buffer.columns.values()} == {np.dtype(np.float32)}
    sample = buffer.sample(50)
    assert set(sample.act.flatten().tolist()) == {0.25, 0.5}
    assert set(sample.terminated.tolist()) == {0, 1}
    assert ((sample.terminated == 1) == (sample.rew == 1)).all()
    assert (sample.next_obs == sample.obs + 1).all()


@every_algo
def test_columns_for_rows_are_refused(algo):
    """Rewards [N, 1] would be a loss [B, B] later."""
    buffer = algo.ReplayBuffer(6, 3, 2, CPU)
    good = {"obs": np.zeros((1, 3)), "act": np.zeros((1, 2)), "rew": np.zeros(1),
            "next_obs": np.zeros((1, 3)), "terminated": np.zeros(1)}
    buffer.add(**good)
    for name in good:
        with pytest.raises(AssertionError, match=name):
            buffer.add(**good | {name: good[name][..., None]})


@every_algo
@pytest.mark.parametrize("fault", ["obs nan", "rew inf"])
def test_nan_of_the_environment_is_never_stored(algo, fault):
    cfg = quick(algo, "tests.envs:Faulty-v0", env_kwargs=json.dumps({"fault": fault, "at": 5}))
    with pytest.raises(FloatingPointError, match="the environment returned NaN or infinity"):
        algo.train(cfg)


# ---- Memory

@every_algo
def test_memory_is_told_and_what_cannot_fit_is_refused(algo, capsys):
    """A row: two observations of 3, an action of 2, two numbers, in float32: 40 bytes."""
    algo.ReplayBuffer(1_000_000, 3, 2, CPU)
    assert capsys.readouterr().out == "replay buffer: 1,000,000 transitions, 0.04 GB when full\n"
    with pytest.raises(UsageError, match="--buffer-size is 10*, which takes 40000.00 GB"):
        algo.ReplayBuffer(10**12, 3, 2, CPU)


@every_algo
def test_a_refused_buffer_leaves_nothing_behind(algo, elsewhere, capsys):
    with pytest.raises(UsageError):
        algo.train(quick(algo, buffer_size=10**13))
    assert list(elsewhere.iterdir()) == []


@every_algo
def test_the_size_is_a_total_over_processes(algo, monkeypatch):
    monkeypatch.setattr(mpi, "_size", 4)
    monkeypatch.setattr(utils.run, "launch", lambda cfg: None, raising=False)   # no others start
    made = []

    def note(capacity, *rest):
        made.append(capacity)
        raise KeyboardInterrupt                                 # no process would answer

    monkeypatch.setattr(algo, "ReplayBuffer", note)
    with pytest.raises(KeyboardInterrupt):
        algo.train(quick(algo, buffer_size=1000, num_envs=4, batch_size=8))
    assert made == [250]
    with pytest.raises(UsageError):
        Run(quick(algo, buffer_size=1001, num_envs=4))


# ---- Saved and resumed

@every_algo
@pytest.mark.parametrize("steps", [4, 30], ids=["part", "wrapped"])
def test_a_loaded_buffer_goes_on_as_the_saved_one(algo, steps):
    """Same rows, same next row to be overwritten, same samples."""
    _, buffer, acts, _ = collected(algo, 3, steps, 20)
    other = algo.ReplayBuffer(20, 3, 2, CPU)
    saved = buffer.state_dict()
    assert all(len(x) == buffer.num_stored and x.untyped_storage().nbytes() == x.nbytes
               for x in saved["columns"].values())                  # no row that is not filled
    torch.save(saved, "buffer.pt")
    other.load_state_dict(torch.load("buffer.pt", weights_only=True))
    check(other, expected_rows(3, steps), acts.flatten(0, 1))
    new = {"obs": np.full((3, 3), 7.0), "act": np.ones((3, 2)), "rew": np.ones(3),
           "next_obs": np.full((3, 3), 8.0), "terminated": np.ones(3)}
    for each in (buffer, other):
        each.add(**new)
    assert (buffer.num_stored, buffer.position) == (other.num_stored, other.position)
    samples = []
    for each in (buffer, other):
        torch.manual_seed(3)
        samples.append(each.sample(200))
    for name in buffer.columns:
        assert torch.equal(getattr(samples[0], name), getattr(samples[1], name))


def test_script_has_both_at_once():
    assert "both" in {scripted.end(number, episode) for number in range(3) for episode in range(3)}


# ---- All seven loops

def discrete(algo):
    return name_of(algo).startswith("dqn")


def counting(algo, **settings):
    """A short run on Counter, with the actions that the algorithm takes."""
    kwargs = {"act": "discrete" if discrete(algo) else "box",
              "obs": "image" if algo is dqn_atari else "vector"}
    env = "GoalCounter" if algo is sac_her else "Counter"
    return quick(algo, f"tests.envs:{env}-v0", env_kwargs=json.dumps(kwargs), **settings)


def kept(run_dir):
    """The rows of a run's buffer that are transitions."""
    columns = checkpoint.load_resume(run_dir)[1]["state"]["buffer"]["columns"]
    live = columns.get("live", torch.ones(len(columns["rew"]), dtype=torch.bool))
    return {name: column[live] for name, column in columns.items()}


@all_seven
def test_evaluation_is_the_first_episode_of_each_environment_by_the_best_actions(algo):
    """Short episodes, of 1 and of 3 steps, do not crowd out those of 7; nothing is drawn."""
    envs = make_envs(cfg := counting(algo), 1)
    torch.manual_seed(0)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    Counter.made.clear()
    state = torch.get_rng_state()
    returns, lengths = evaluate(agent, cfg, 8, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert returns.tolist() == [script(number, 8)[1][0][2] for number in range(8)]
    assert lengths.tolist() == [script(number, 8)[1][0][3] for number in range(8)]
    for env in Counter.made:
        seen = np.float32([row[0] for row in script(env.number, len(env.acts))[0]])
        if algo is dqn_atari:                                       # numbers are its colours
            seen = np.broadcast_to(seen[:, None, None], (len(seen), *scripted.IMAGE))
            seen = seen.astype(np.uint8)
        if algo is sac_her:
            goals = [GoalCounter.goal(*obs[:2]) for obs in seen]
            seen = np.concatenate([seen, GoalCounter.achieved(seen), goals], axis=1)
        best = agent.env_act(agent.act(seen, deterministic=True))
        np.testing.assert_allclose(env.acts, best, atol=1e-5)


@all_seven
def test_no_two_environments_share_a_seed_and_none_gets_it_twice(algo):
    """Those of training, of evaluation and of what is resumed, in runs of two seeds."""
    seeds, evaluated = [], []
    for seed in (1, 2):
        for total in (120, 180):
            Counter.made.clear()
            algo.train(counting(algo, num_envs=2, seed=seed, eval_every=120, start_steps=1000,
                                total_steps=total, run_dir=f"run{seed}", resume=total > 120))
            assert len(Counter.made) == 2 + 10
            assert all(env.seeds[0] is not None for env in Counter.made)
            assert all(set(env.seeds[1:]) <= {None} for env in Counter.made)
            assert all(len(env.seeds) > 3 for env in Counter.made[:2])
            seeds += [env.seeds[0] for env in Counter.made[:2]]
            evaluated.append([env.seeds[0] for env in Counter.made[2:]])
    assert evaluated[0] == evaluated[1] and evaluated[2] == evaluated[3]
    seeds += evaluated[0] + evaluated[2]
    assert len(set(seeds)) == len(seeds) == 2 * (2 * 2 + 10)


@all_seven
@pytest.mark.parametrize("num_envs", [3, 7])
def test_every_episode_is_reported_once_and_at_its_step(algo, num_envs):
    """Where a report is due within a step of all environments it comes after that step."""
    algo.train(counting(algo, num_envs=num_envs, start_steps=1000))
    ends = [-(-60 // num_envs) * num_envs, -(-120 // num_envs) * num_envs]
    steps = ends[1] // num_envs
    expected = [((t + 1) * num_envs, number, ep_ret, ep_len) for number in range(num_envs)
                for t, _, ep_ret, ep_len in script(number, steps)[1]]
    names = "step", "env", "ep_ret", "ep_len"
    got = [tuple(float(row[name]) for name in names) for row in rows("run", "episodes.csv")]
    assert sorted(got) == sorted(expected)
    reports = rows("run")
    assert [int(row["step"]) for row in reports] == ends
    for row, since, until in zip(reports, [0, ends[0]], ends):
        own = [ep_ret for step, _, ep_ret, _ in expected if since < step <= until]
        assert float(row["ep_ret_mean"]) == pytest.approx(np.mean(own))


@all_seven
def test_every_process_takes_its_share_of_each_count(algo, monkeypatch):
    """Counts are totals: one of two has half of the environments, of the rows, of each batch."""
    made, batches = [], []
    update = algo.update

    def noting(*args, **kwargs):
        batches.extend(len(arg.rew) for arg in args if isinstance(arg, algo.Transitions))
        return update(*args, **kwargs)

    monkeypatch.setattr(mpi, "share", lambda total: total // 2)
    monkeypatch.setattr(algo, "make_envs", lambda cfg, n: made.append(n) or make_envs(cfg, n))
    monkeypatch.setattr(algo, "update", noting)
    algo.train(counting(algo, num_envs=4, buffer_size=40, batch_size=6))
    assert made == [2] and set(batches) == {3}
    rewards = checkpoint.load_resume("run")[1]["state"]["buffer"]["columns"]["rew"]
    assert rewards.numel() == 20


@all_seven
def test_ranks_draw_apart_and_a_run_draws_the_same_again(algo, monkeypatch):
    """First weights, random actions, first observations; all of it decided by seed and rank."""
    def seed_of(rank, *args):
        with monkeypatch.context() as patch:
            patch.setattr(mpi, "_rank", rank)
            return seed(*args)

    seed, runs = mpi.seed, []
    env = "CartPole-v1" if discrete(algo) else "tests.envs:Reach-v0"
    env = "tests.envs:Bright-v0" if algo is dqn_atari else env
    env = "utils.tasks:BitFlip-v0" if algo is sac_her else env
    for rank in (0, 1, 0):
        monkeypatch.setattr(mpi, "seed", lambda *args, rank=rank: seed_of(rank, *args))
        agent = algo.train(quick(algo, env, run_dir=f"run{len(runs)}", start_steps=1000,
                                 num_envs=2))
        weights = torch.nn.utils.parameters_to_vector(agent.parameters())
        runs.append(kept(f"run{len(runs)}") | {"weights": weights})
    for name in ({"frame", "obs"} & runs[0].keys()) | {"act", "weights"}:
        assert not torch.equal(runs[0][name], runs[1][name]), name
    for name, column in runs[0].items():
        assert torch.equal(column, runs[2][name]), name


@all_seven
def test_atari_rewards_are_clipped_and_scores_are_not(algo, monkeypatch):
    """Of any vector environment that is made in Atari's name; no other's rewards are touched."""
    def fake(env, num_envs, reward_clipping=True, autoreset_mode=None):
        assert not reward_clipping and autoreset_mode == gym.vector.AutoresetMode.SAME_STEP
        return gym.vector.SyncVectorEnv(num_envs * [Counter], autoreset_mode=autoreset_mode)

    plain = make_envs(counting(algo), 2)
    monkeypatch.setattr(gym, "make_vec", fake)
    atari = make_envs(quick(algo, "ALE/Any-v5"), 2)
    for envs, number in ((plain, 0), (atari, 2)):
        scripts, ended = [script(number + i, 10) for i in range(2)], []
        envs.reset(seed=1)
        for t in range(10):
            _, rew, _, _, infos = envs.step(np.zeros((2, 2)))
            raw = [rows[t][1] for rows, _ in scripts]
            assert rew.tolist() == (raw if envs is plain else np.clip(raw, -1, 1).tolist())
            ended += [(t, number + i, infos["episode"]["r"][i], infos["episode"]["l"][i])
                      for i in np.flatnonzero(infos.get("_episode", False))]
        assert set(ended) == {end for _, ends in scripts for end in ends}
