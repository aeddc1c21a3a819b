"""`--async-envs`: the same run, an error with its traceback, and no worker that outlives it."""
import os
import random
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from algos import dqn, ppo, sac_her
from tests.helpers import not_on_windows, refused, rows
from utils.envs import make_envs


class Drawn(gym.Env):
    """Its numbers come from every generator."""

    observation_space = Box(-9, 9, (4,))
    action_space = Discrete(1000)

    def observe(self):
        own, of_act = self.np_random.random(), self.action_space.sample()
        return np.float32([own, of_act, random.random(), np.random.random()])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, act):
        end = self.np_random.random() < 0.1
        return self.observe(), float(act), end, False, {"is_success": end and act == 1}


gym.register("Drawn-v0", Drawn, max_episode_steps=12)


def config(run_dir="run", env="CartPole-v1", **settings):
    return ppo.Config(**{"env": env, "run_dir": run_dir, "num_envs": 3, "rollout_steps": 96,
                         "minibatch_size": 32, "epochs": 1, "total_steps": 192, "hidden": (4,),
                         "async_envs": True} | settings)


@pytest.mark.parametrize("env", ["CartPole-v1", "tests.envs:Parts-v0"])
def test_a_run_is_the_same_to_the_bit(env):
    for run_dir, workers in (("here", False), ("workers", True)):
        ppo.train(config(run_dir, env, async_envs=workers))
    for name in ("progress.csv", "episodes.csv"):
        assert rows("here", name) == rows("workers", name) and rows("here", name)


@not_on_windows("there are no process groups")
def test_workers_draw_by_their_own_seeds_and_are_not_stopped_by_ctrl_c():
    """Also from generators that an environment should leave alone. Ctrl-C goes to a group."""
    drawn = []
    for _ in range(2):
        envs = make_envs(config(env="Drawn-v0"), 3)
        workers = envs.unwrapped.processes
        assert len({os.getpgid(0), *(os.getpgid(each.pid) for each in workers)}) == 4
        drawn.append(envs.reset(seed=1)[0])
        envs.close()
        assert not any(each.is_alive() for each in workers)
    assert np.array_equal(*drawn)
    assert all(len(set(column)) == 3 for column in drawn[0].T[[0, 2, 3]])


def test_an_error_of_a_worker_has_its_traceback():
    with pytest.raises(RuntimeError, match="too hot"), warnings.catch_warnings(
            record=True, action="always") as said:
        ppo.train(config(env="tests.envs:Faulty-v0"))
    assert any('raise RuntimeError("the motor' in str(each.message) for each in said)


def test_what_needs_an_environment_here_refuses_it():
    said = refused(make_envs, config(env="ALE/Pong-v5"), 2)
    assert said == "--async-envs: the games of ALE/ have threads of their own"
    cfg = sac_her.Config(env="tasks:BitFlip-v0", run_dir="her", num_envs=2, async_envs=True)
    assert refused(sac_her.train, cfg).startswith("--async-envs: hindsight needs an environment")
    refused(dqn.train, dqn.Config(async_envs=True), says="takes --num-envs 2 or more")
