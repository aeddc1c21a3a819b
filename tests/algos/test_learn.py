"""What is learned: values and policies that are known, in environments that take seconds."""
import dataclasses
import json

import gymnasium as gym
import numpy as np
import pytest
import torch

from algos import acer, ppo
from diagnose import probe
from tests.helpers import refused, rows, write_demos
from tests.registry import ALGOS, module
from utils.evaluate import evaluate

QUICK = {"device": "cpu", "run_dir": "run"}


# ---- What the end of an episode is worth

FOREVER = 1 / (1 - 0.8)                                         # 1 + 0.8 + 0.8^2 + ...
UNTIL_5 = np.mean([(1 - 0.8**left) / (1 - 0.8) for left in range(1, 6)])


@pytest.mark.parametrize("env_kwargs,val", [
    ({"max_episode_steps": 5}, FOREVER),
    ({"length": 5}, UNTIL_5),
    ({"length": 5, "max_episode_steps": 5}, UNTIL_5),
    ({}, FOREVER),
], ids=["truncated", "terminated", "both", "endless"])
def test_a_time_limit_is_not_an_end(env_kwargs, val):
    """One state, reward 1 a step. Rollouts of 20 steps: each ends where an episode does."""
    agent = ppo.train(ppo.Config(
        env="tests.envs:Constant-v0", env_kwargs=json.dumps(env_kwargs), total_steps=4800,
        rollout_steps=160, minibatch_size=80, epochs=4, lr=0.02, hidden=(16,), gamma=0.8, lam=1.0,
        scale_rew=False, **QUICK))
    assert probe.value(agent, torch.zeros(1, 1)) == pytest.approx(val, abs=0.05)


def test_the_probes_take_the_settings_of_their_algorithm_and_those_given():
    assert probe.parse(probe.Command("acktr"))[2] == {"seed": 1, **probe.OWN["acktr"]}
    assert probe.parse(probe.Command("acktr", 2, ("lr=0.1",)))[2] == {
        **probe.OWN["acktr"], "lr": 0.1, "seed": 2}
    refused(probe.parse, probe.Command("ppo", set=("lr=0.1,0.2",)), says="takes one value")
    refused(probe.parse, probe.Command("bc"), says="learns from demonstrations")


# ---- Larger ones

IN_ROLLOUTS = {"total_steps": 8192, "num_envs": 16, "rollout_steps": 128, "minibatch_size": 64,
               "minibatch_envs": 4, "epochs": 2, "v_steps": 3, "lr": 1e-3, "gamma": 0.5}
FROM_A_BUFFER = {"total_steps": 3000, "num_envs": 8, "buffer_size": 3000, "start_steps": 128,
                 "update_every": 4, "target_every": 40, "eps_steps": 1500, "batch_size": 32,
                 "lr": 1e-3, "gamma": 0.5}
OWN = {"trpo": {"total_steps": 4096, "rollout_steps": 256, "max_kl": 0.05},
       "acktr": {"lr": 0.25, "max_kl": 0.01}, "acer": {"buffer_size": 1024},
       "bc": {"total_steps": 500, "subsample": 1, "demos": "demos.npz"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in ALGOS.items() if "image" in row.takes])
@pytest.mark.parametrize("bf16", [False, True])
def test_pixels(name, bf16):
    """Four times as good as by chance, in seconds."""
    algo = module(name)
    known = {each.name for each in dataclasses.fields(algo.Config)}
    settings = FROM_A_BUFFER if "start_steps" in known else IN_ROLLOUTS
    settings = {k: v for k, v in settings.items() if k in known} | OWN.get(name, {}) | QUICK
    if "demos" in settings:
        env = gym.make("tests.envs:Bright-v0").unwrapped
        seen = [(env.reset(seed=k)[0], env.quarter) for k in range(400)]
        obs, act = map(np.array, zip(*seen))
        write_demos(env="tests.envs:Bright-v0", lengths=[1] * 400, obs=obs, act=act)
    cfg = algo.Config(env="tests.envs:Bright-v0", bf16=bf16, **settings)
    assert evaluate(algo.train(cfg), cfg, 100, seed=1)[0].mean() >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name,settings", [
    ("a2c", {"total_steps": 64_000}), ("pqn", {"total_steps": 64_000}),
    ("dqn", {"total_steps": 40_000, "start_steps": 1000, "eps_steps": 8000})])
def test_a_game(name, settings):
    """Some bricks of Breakout, after half a minute to two. By chance it is 0.4."""
    cfg = module(name).Config(env="MinAtar/Breakout-v1", **settings, **QUICK)
    assert evaluate(module(name).train(cfg), cfg, 20, seed=1)[0].mean() >= 2


@pytest.mark.slow
def test_an_atari_game():
    """ACER's return on Breakout rises from 1 within minutes. Pong's takes 250,000 steps."""
    rules = {"repeat_action_probability": 0, "episodic_life": True}
    acer.train(acer.Config(env="ALE/Breakout-v5", env_kwargs=json.dumps(rules),
                           total_steps=60_000, anneal_lr=False, **QUICK))
    returns = [float(row["ep_ret"]) for row in rows("run", "episodes.csv")]
    third = len(returns) // 3
    assert np.mean(returns[:third]) < 2 and np.mean(returns[-third:]) >= 4
