"""What PPO collects where final observations come as a dense array, as those of Atari do."""
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algos import ppo
from tests.helpers import bare
from utils.envs import make_envs


def test_true_next_obs_of_a_dense_array():
    """As ale-py gives it, with garbage for those that go on. The contract suite has the other."""
    next_obs, done = np.float32([[0, 1], [2, 3], [4, 5]]), np.array([True, False, True])
    infos = {"final_obs": np.float32([[10, 11], [99, 99], [14, 15]]), "_final_obs": done}
    results = next_obs, np.zeros(3), done, np.zeros(3, bool), infos
    agent = SimpleNamespace(act=lambda obs: torch.zeros(3), env_act=lambda act: act)
    envs, before = SimpleNamespace(step=lambda act: results), next_obs.copy()
    rollout, obs = bare(ppo).collect(agent, envs, np.zeros((3, 2), np.float32), 1)
    assert rollout.next_obs[0].tolist() == [[10, 11], [2, 3], [14, 15]]
    assert np.array_equal(obs, before)                          # it goes on from there


def test_true_next_obs_of_the_atari_vector():
    """Four frames are stacked, so the true successor begins with the last three of before."""
    pytest.importorskip("ale_py")
    cfg = ppo.Config(env="ALE/Pong-v5", env_kwargs='{"max_num_frames_per_episode": 60}',
                     num_envs=2, device="cpu")
    envs, kept = make_envs(cfg, 2), []
    step = envs.step

    def keeping(act):
        results = step(act)
        kept.append(copy.deepcopy(results))                     # as it is at this moment
        return results

    envs.step = keeping
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    first, _ = envs.reset(seed=7)
    one, between = ppo.collect(agent, envs, first, 20)
    two, last = ppo.collect(agent, envs, between, 25)
    obs, next_obs, done, terminated = (
        torch.cat([getattr(rollout, name) for rollout in (one, two)])
        for name in ("obs", "next_obs", "done", "terminated"))
    assert obs.dtype == torch.uint8 and obs.shape == (45, 2, 4, 84, 84)
    assert np.array_equal(done, [step[2] | step[3] for step in kept])
    assert 4 <= done.sum() == len(envs.pop_episodes()) and not terminated.any()
    assert torch.equal(next_obs[:, :, :3], obs[:, :, 1:])
    # Nothing was overwritten later on: these are the frames that came.
    assert np.array_equal(obs, [first, *(step[0] for step in kept[:-1])])
    assert np.array_equal(last, kept[-1][0])
    goes_on = obs[1:] == next_obs[:-1]
    assert goes_on[done[:-1] == 0].all()
    assert not goes_on[done[:-1] == 1].flatten(1).all(1).any()
