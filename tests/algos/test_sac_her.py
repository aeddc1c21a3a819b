"""algos/sac_her.py, where it is not algos/sac.py: which goals are given afterwards, and to what.

On scripted goal environments (tests/envs.py) every relabelled row is compared with brute force.
"""
from collections import Counter as count

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy import stats

from algos import sac, sac_her
from tests.envs import GoalCounter
from tests.helpers import bare, quick, rows, same, script, vec
from utils.envs import evaluate, goal_env, make_envs
from utils.mpi import UsageError

CPU = torch.device("cpu")
COUNTER = "tests.envs:GoalCounter-v0"
ENDS = "tests.envs:GoalEnds-v0"
counters = pytest.mark.parametrize("num_envs", [1, 2, 3])
# Rows per environment: more than are filled; a ring that wraps within the longest episode, of 7
# steps; the smallest ring.
sizes = pytest.mark.parametrize("size", [100, 5, 1], ids=["part", "wrapped", "least"])


def empty(rows, num_envs, her_k=4):
    """A buffer for GoalCounters."""
    envs = make_envs(quick(sac_her, COUNTER), num_envs)
    return sac_her.HindsightBuffer(rows, envs.single_observation_space, 2, CPU, num_envs,
                                   goal_env(envs), her_k)


def collecting(num_envs, steps, size, her_k=4, buffer=None):
    """Yield the buffer after each step of the GoalCounters. It has `size` rows for each of them."""
    buffer = buffer or empty(size * num_envs, num_envs, her_k)
    GoalCounter.made.clear()
    envs = make_envs(cfg := quick(sac_her, COUNTER), num_envs)
    agent = sac_her.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    obs, _ = envs.reset(seed=7)
    for _ in range(steps):
        obs = sac_her.interact(agent, envs, buffer, obs, agent.act(obs))
        yield buffer


def collected(*args, **kwargs):
    """Return the buffer after all steps."""
    return list(collecting(*args, **kwargs))[-1]


def episodes(num_envs, steps):
    """(environment, episode) -> the number of its steps within so many of its environment."""
    return count(row[0][:2] for number in range(num_envs) for row in script(number, steps)[0])


def stored(num_envs, steps, size):
    """Brute force: the last `size` steps of every environment as (number, episode, time)."""
    return {tuple(row[0]) for number in range(num_envs) for row in script(number, steps)[0][-size:]}


def achieved(number, episode, time):
    """The goal that is achieved after `time` steps."""
    return tuple(-1.0 - np.float32([number, episode, time]))


# ---- By hand

def test_a_future_step_by_hand(monkeypatch):
    """With two later steps, thirds of the random numbers give the own step, the next, the last."""
    draws = vec(0.0, 0.999, 0.0, 0.33, 0.34, 0.67, 0.999)
    monkeypatch.setattr(torch, "rand", lambda *shape, device: draws)
    later = torch.tensor([0, 0, 2, 2, 2, 2, 2])
    assert sac_her.future_step(later).tolist() == [0, 0, 0, 0, 1, 2, 2]


def test_rewards_and_ends_by_hand():
    env = gym.make("utils.tasks:BitFlip-v0", bits=2).unwrapped
    reached, goal = vec((0, 1), (0, 1), (1, 1)), vec((0, 1), (1, 0), (1, 0))
    rew, terminated = sac_her.reward_of_goal(env, reached, goal)
    assert rew.tolist() == [0, -1, -1] and terminated.tolist() == [1, 0, 0]
    assert rew.dtype == terminated.dtype == torch.float32


def test_functions_that_take_no_batches():
    """A reward of all goals at once is refused; whether an end is one is asked for every pair."""
    env = gym.Env()
    env.compute_reward = lambda *goals: np.float64(1)
    env.compute_terminated = lambda *goals: True
    with pytest.raises(AssertionError, match="does not accept batches"):
        bare(sac_her).reward_of_goal(env, torch.zeros(3, 2), torch.zeros(3, 2))


def test_the_networks_see_the_observation_and_the_goal():
    parts = {"desired_goal": slice(0, 1), "more": slice(1, 2), "observation": slice(2, 4),
             "achieved_goal": slice(4, 5)}
    obs = vec((1, 2, 3, 4, 5), (6, 7, 8, 9, 0))
    assert sac_her.with_goal(obs, parts).tolist() == [[3, 4, 1], [8, 9, 6]]
    assert sac_her.with_goal(obs[0], parts).tolist() == [3, 4, 1]


def test_the_policy_heeds_both_and_not_what_is_achieved():
    envs = make_envs(cfg := quick(sac_her, COUNTER), 1)
    space = envs.single_observation_space
    agent = sac_her.Agent(space, envs.single_action_space, cfg)
    obs = np.zeros((1, 9), np.float32)
    best = agent.act(obs, deterministic=True)
    for name, part in space.parts.items():
        other = obs.copy()
        other[0, part] = [1, -2, 3]
        now = agent.act(other, deterministic=True)
        assert torch.equal(now, best) == (name == "achieved_goal"), name
        assert np.array_equal(agent.predict(other[0]), agent.env_act(now)[0])


# ---- The buffer

@counters
@sizes
def test_relabelled_rows_are_those_of_brute_force(num_envs, size):
    """Every pair of a stored step and a goal of its own future is drawn, as often as it should be:
    each step alike, and each of its goals alike. Nothing else is drawn."""
    buffer = collected(num_envs, 33, size)
    lengths, steps = episodes(num_envs, 33), stored(num_envs, 33, size)
    assert size == 100 or buffer.position == 33 % size * num_envs    # not 0, unless size is 1
    chance = {}
    for number, episode, time in steps:
        future = range(time + 1, lengths[number, episode] + 1)
        for at in future:
            pair = (number, episode, time), achieved(number, episode, at)
            chance[pair] = 1 / len(steps) / len(future)
    torch.manual_seed(3)
    batch = buffer.sample(6250)
    n = 5000
    assert batch.obs.shape == batch.next_obs.shape == (6250, 6)
    obs, goal = batch.obs[:n].split(3, dim=-1)
    next_obs, next_goal = batch.next_obs[:n].split(3, dim=-1)
    assert torch.equal(goal, next_goal)
    assert torch.equal(next_obs, obs + torch.tensor([0, 0, 1]))     # the true successor
    drawn = count((tuple(int(x) for x in row), tuple(g))
                  for row, g in zip(obs.tolist(), goal.tolist()))
    assert drawn.keys() == chance.keys()
    pairs = list(chance)
    expected = n * np.array([chance[pair] for pair in pairs])
    assert len(pairs) == 1 or stats.chisquare([drawn[pair] for pair in pairs],
                                              expected).pvalue > 1e-3


# ---- Runs

def test_without_hindsight_it_is_sac_to_the_bit():
    """SAC on the same environment, whose observations are joined as the networks see them."""
    settings = {"env": ENDS, "num_envs": 2, "start_steps": 32, "total_steps": 160}
    ours = sac_her.train(quick(sac_her, run_dir="ours", her_k=0, **settings))
    theirs = sac.train(quick(sac, run_dir="theirs", env_kwargs='{"joined": true}', **settings))
    assert same(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert rows("ours") == rows("theirs") and len(rows("ours")) == 3
    assert rows("ours", "episodes.csv") == rows("theirs", "episodes.csv")
    other = sac_her.train(quick(sac_her, run_dir="other", **settings))
    assert not same(dict(other.state_dict()), dict(ours.state_dict()))


def test_success_is_reported_per_episode_and_as_a_mean():
    """Of GoalCounter's first six episodes of 3 steps, every other one succeeds."""
    sac_her.train(quick(sac_her, COUNTER, total_steps=18, report_every=9, start_steps=100))
    told = [float(row["success"]) for row in rows("run", "episodes.csv")]
    assert told == [1, 0, 1, 0, 1, 0]
    assert [float(row["success"]) for row in rows("run")] == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize("env,kwargs,says", [
    ("Pendulum-v1", "{}", "the observation space Box.*this algorithm takes goals .Dict of vectors "
                          "observation, achieved_goal, desired_goal.*: .*ddpg.*sac"),
    ("tests.envs:Parts-v0", "{}", "this algorithm takes goals"),
    (ENDS, '{"joined": true}', "this algorithm takes goals"),
    ("tests.envs:NoRewards-v0", "{}", "NoRewards-v0, which has no compute_reward"),
])
def test_environments_without_goals_are_refused(env, kwargs, says, elsewhere):
    with pytest.raises(UsageError, match=says) as caught:
        sac_her.train(sac_her.Config(env=env, env_kwargs=kwargs))
    assert "sac_her" not in str(caught.value) and list(elsewhere.iterdir()) == []


# ---- Learned in seconds

@pytest.mark.slow
def test_hindsight_learns_what_sac_does_not_see():
    success = []
    for her_k in (4, 0):
        cfg = quick(sac_her, "utils.tasks:BitFlip-v0", env_kwargs='{"bits": 6}', her_k=her_k,
                    total_steps=1500, start_steps=300, report_every=500, buffer_size=1500,
                    batch_size=64, hidden=(64,), lr=5e-3, gamma=0.9, tau=0.05, alpha=0.05,
                    learn_alpha=False, run_dir=f"k{her_k}")
        returns, lengths = evaluate(sac_her.train(cfg), cfg, 100, seed=1)
        success.append((returns > -lengths).mean())
    assert success[0] > 0.9 and success[1] < 0.5
