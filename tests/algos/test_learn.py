"""What is learned: values and policies that are known, in environments that take seconds."""
import json

import numpy as np
import pytest
import torch

from algos import acer, ddpg, dqn, dqn_atari, ppo, sac, td3
from tests import probe
from utils.envs import evaluate

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


# ---- Larger ones

@pytest.mark.slow
@pytest.mark.parametrize("algo,least,settings", [
    (ppo, 475, {"total_steps": 30 * 1024, "num_envs": 16, "rollout_steps": 1024,
                "minibatch_size": 256, "lr": 3e-3, "gamma": 0.98}),
    (acer, 450, {"total_steps": 25_600, "lr": 2e-3, "seed": 3}),
], ids=["ppo", "acer"])
def test_cartpole(algo, least, settings):
    """It falls after twenty steps at first, and stands nearly all 500 of ten episodes now.

    ACER takes as many steps as PPO; A2C would need several times as many.
    """
    cfg = algo.Config(env="CartPole-v1", **settings, **QUICK)
    assert evaluate(algo.train(cfg), cfg, 10, seed=1)[0].mean() >= least


OFF_POLICY = {"total_steps": 1500, "start_steps": 300, "report_every": 500, "buffer_size": 1500,
              "num_envs": 2, "batch_size": 64, "lr": 5e-3, "tau": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize("algo,settings", [
    (ppo, {"total_steps": 16384, "num_envs": 16, "rollout_steps": 512, "minibatch_size": 128,
           "lr": 3e-3}),
    (ddpg, OFF_POLICY), (td3, OFF_POLICY),
    (sac, OFF_POLICY | {"alpha": 0.01, "learn_alpha": False}),
], ids=["ppo", "ddpg", "td3", "sac"])
def test_reach(algo, settings):
    """Continuous actions, as far as it goes and not beyond: nearly what is possible."""
    cfg = algo.Config(env="tests.envs:Reach-v0", gamma=0.9, hidden=(32,), **settings, **QUICK)
    returns, _ = evaluate(algo.train(cfg), cfg, 50, seed=1)
    far, near = 0.2, 0.4                                        # a step down, a step up
    starts = np.linspace(-1, 1, 1001)
    left = [np.maximum(np.where(starts > 0, starts - t * far, -starts - t * near), 0)
            for t in range(1, 11)]
    assert returns.mean() > -1.3 * np.sum(left, axis=0).mean() - 0.1


DQN = {"num_envs": 8, "total_steps": 600, "start_steps": 64, "update_every": 4, "lr": 1e-3,
       "target_every": 40, "eps_steps": 300, "batch_size": 32, "buffer_size": 600, "gamma": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("algo,settings", [
    (ppo, {"total_steps": 4096, "num_envs": 16, "rollout_steps": 256, "minibatch_size": 64,
           "epochs": 4}),
    (acer, {"total_steps": 2048, "rollout_steps": 128, "buffer_size": 1024, "replay_ratio": 3,
            "lr": 1e-3}),
    (dqn, DQN), (dqn_atari, DQN),
], ids=["ppo", "acer", "dqn", "dqn_atari"])
def test_images(algo, settings):
    """Height and width differ, colours come last, the values are those of uint8."""
    cfg = algo.Config(env="tests.envs:Bright-v0", **settings, **QUICK)
    assert evaluate(algo.train(cfg), cfg, 50, seed=1)[0].mean() >= 0.95
