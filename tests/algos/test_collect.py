"""What PPO collects where final observations come as a dense array, as those of Atari do."""
import copy

import numpy as np
import pytest
import torch

from algos import ppo
from utils.envs import make_envs


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
