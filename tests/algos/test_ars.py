"""algos/ars.py: the step, what the two returns of a direction are, and what processes share."""
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from sb3_contrib import ARS
from stable_baselines3.common.logger import configure

from algos import ars
from tests.helpers import Nowhere, close, noted, rows, vec
from utils import mpi
from utils.envs import make_envs


class Echo(gym.Env):
    """Observes (1, 2) or, after its first step, (3, 4), plus `start`. Pays 20 times the action.

    Environment 0 has episodes of one step, environment 1 of five.
    """

    observation_space, action_space = Box(-np.inf, np.inf, (2,), float), Box(-1, 1, (1,))
    made, start = [], 0

    def __init__(self):
        self.length, self.acts = 1 + 4 * (len(self.made) % 2), []
        self.made.append(self)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.array([1.0, 2]) + self.start, {}

    def step(self, act):
        self.acts.append(float(act[0]))
        self.time += 1
        ended = self.time == self.length
        return np.array([3.0, 4]) + self.start, 20 * self.acts[-1], ended, False, {}


gym.register("Echo-v0", f"{__name__}:Echo")


def config(**settings):
    return ars.Config(**{"env": "Echo-v0", "num_envs": 2, "directions": 2, "noise": 0.1,
                         "run_dir": "run", "total_steps": 40} | settings)


def make_agent(**settings):
    Echo.made.clear()
    envs = make_envs(config(**settings), 2)
    agent = ars.Agent(envs.single_observation_space, envs.single_action_space, config(**settings))
    agent.actor.weight.data, agent.actor.bias.data = vec((0.05, -0.02)), vec(0.01)
    return agent, envs


# ---- The step

@pytest.mark.parametrize("top,used", [(0.5, 2), (1.0, 4), (0.1, 1)])
def test_update_against_sb3_contrib(top, used):
    """It divides by the deviation with ddof 1. Equal returns give no step."""
    agent, _ = make_agent(directions=4, top=top, lr=0.3)
    other = ARS("LinearPolicy", Nowhere(Echo.observation_space, Echo.action_space), n_delta=4,
                n_top=used, learning_rate=0.3, delta_std=0.1, zero_policy=False, seed=1,
                policy_kwargs={"with_bias": True})
    other.set_logger(configure(None, []))
    before, tried = other.weights.clone(), []

    def returns(weights, *_):
        tried.append(weights)
        return 100 * (5 * weights).sin().sum(-1)

    other.evaluate_candidates, other._current_progress_remaining = returns, 1.0
    other._do_one_update(None, None)
    plus, minus = tried[0].chunk(2)
    agent.actor.weight.data, agent.actor.bias.data = before[None, :2].clone(), before[2:].clone()
    directions = (plus - before) / 0.1
    metrics = ars.update(agent, ars.Rollouts(directions, returns(plus), returns(minus)))
    both = torch.stack([returns(plus), returns(minus)])
    best = both[:, both.amax(0).topk(used).indices]             # by the better side
    close(metrics["ret_std"], best.std(correction=0))
    close(metrics["step_norm"], (agent.weights - before).norm())
    bessel = (2 * used / (2 * used - 1)) ** 0.5
    close(agent.weights - before, bessel * (other.weights - before), rtol=1e-3)
    stepped = agent.weights
    ars.update(agent, ars.Rollouts(directions, torch.ones(4), torch.ones(4)))
    assert torch.equal(agent.weights, stepped)


# ---- Rollouts

def test_each_side_of_each_direction_is_one_episode_and_the_rest_waits():
    agent, envs = make_agent(norm_obs=False)
    directions = vec((1, 0, 0), (0, 1, 1))
    rollouts, num_steps = ars.collect(agent, envs, directions)
    centre = 0.05 * 1 - 0.02 * 2 + 0.01
    plus0, plus1, minus0, minus1 = (centre + shift for shift in (0.1, 0.3, -0.1, -0.3))
    later = 0.05 * 3 + 0.08 * 4 + 0.11
    close(vec(*Echo.made[0].acts), vec(plus0, minus0, minus1, centre, centre))
    close(vec(*Echo.made[1].acts), vec(plus1, *4 * [later]))
    close(rollouts.plus, vec(20 * plus0, 20 * (plus1 + 4 * later)))
    close(rollouts.minus, vec(20 * minus0, 20 * minus1))
    assert torch.equal(rollouts.directions, directions) and num_steps == 10
    assert agent.obs_stats.count == 10                          # of which four saw (3, 4)
    close(agent.obs_stats.mean, vec(1.8, 2.8).double())


def test_every_rollout_starts_with_a_reset():
    """Environment 0 waits in the middle of an episode when the others have ended."""
    agent, envs = make_agent(norm_obs=False)
    Echo.made[0].length, Echo.made[1].length = 5, 6             # twice each, in 12 steps
    for start in (0, 12):
        ars.collect(agent, envs, torch.zeros(2, 3))
        close(vec(*Echo.made[0].acts[start:start + 2]), vec(0.02, 0.08))


def test_statistics_are_fixed_in_an_iteration_and_then_include_all_of_it(monkeypatch):
    counts = noted(monkeypatch, ars.Agent, "act", lambda agent, *_: agent.obs_stats.count.item())
    Echo.made.clear()
    agent = ars.train(config())
    assert counts == [count for count in (0, 10, 20, 30) for _ in range(5)]
    assert agent.obs_stats.count == 40


def test_statistics_tell_apart_what_float32_cannot(monkeypatch):
    monkeypatch.setattr(Echo, "start", 1.7e9)
    agent, envs = make_agent()
    ars.collect(agent, envs, torch.zeros(2, 3))
    close(agent.obs_stats.var, vec(0.96, 0.96).double())        # four of ten rows are 2 higher


def test_the_normalised_observation_times_the_matrix_is_clipped():
    agent, _ = make_agent()
    agent.obs_stats.mean.fill_(1.0), agent.obs_stats.var.fill_(4.0)
    agent.actor.weight.data, agent.actor.bias.data = vec((1.0, 0.5)), vec(0.1)
    obs, own = vec((2, 2), (5, 5)), vec((0, 1, 0.2), (1, 0, -4))
    close(agent.act(obs), vec(0.85, 1.0)[:, None])
    close(agent.act(obs, policies=own), vec(0.7, -1.0)[:, None])


# ---- Whole runs

def test_directions_follow_from_seed_and_step():
    agent, _ = make_agent()
    drawn = [ars.draw_directions(agent, step) for step in (0, 0, 10)]
    other = ars.draw_directions(make_agent(seed=2)[0], 0)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], other)
    many = ars.draw_directions(make_agent(directions=20_000)[0], 0)
    close(torch.stack([many.mean(), many.std()]), vec(0, 1), atol=0.02)


def test_processes_divide_the_directions_that_all_of_them_draw(monkeypatch):
    agent, envs = make_agent(norm_obs=False, directions=4)
    Echo.made[1].length = 1                                     # as that of the other
    agent.obs_stats.update = lambda obs: None
    one, _ = ars.collect(agent, envs, ars.draw_directions(agent, 0))
    told = []
    monkeypatch.setattr(mpi, "size", lambda: 2)
    monkeypatch.setattr(mpi, "gather", lambda mine: told.append(mine) or [told[0], told[-1]])
    for rank in (0, 1):
        monkeypatch.setattr(mpi, "rank", lambda rank=rank: rank)
        both, _ = ars.collect(agent, envs, ars.draw_directions(agent, 0))
    for name, expected in vars(one).items():
        close(getattr(both, name), expected)


def test_it_learns_to_reach():
    ars.train(config(env="tasks:Line-v0", total_steps=20_000, directions=8, num_envs=8))
    returns = [float(row["ep_ret"]) for row in rows("run", "episodes.csv")]
    assert np.mean(returns[-100:]) > 0.5 * np.mean(returns[:100]) > -5
