"""What PPO collects, row by row, where the contract suite does not look: real environments."""
import copy
import json
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from algos import ppo
from tests.helpers import bare
from utils.envs import make_envs


def config(env="tests.envs:Counter-v0", num_envs=3, env_kwargs=None, **settings):
    """A short run: four updates from six steps of each environment."""
    return ppo.Config(**{
        "env": env, "env_kwargs": json.dumps(env_kwargs or {}), "num_envs": num_envs,
        "total_steps": 24 * num_envs, "rollout_steps": 6 * num_envs,
        "minibatch_size": 6 * num_envs, "epochs": 2, "hidden": (8,),
        "std_init": 1.0, "device": "cpu", **settings})


def start(*args, **kwargs):
    """Environments, an agent, and first observations from a fixed seed."""
    cfg = config(*args, **kwargs)
    torch.manual_seed(0)
    envs = make_envs(cfg, cfg.num_envs)
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    return agent, envs, envs.reset(seed=7)[0]


def collect(agent, envs, obs, size):
    """A rollout, the next obs, and the episodes that ended in it: (t, env, ep_ret, ep_len)."""
    rollout, obs = ppo.collect(agent, envs, obs, size)
    ended = [(size - 1 - ago, *rest) for ago, *rest in envs.pop_episodes()]
    assert not envs.pop_episodes()                              # each is told once
    return rollout, obs, ended


# ---- The true next observation

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


class Kept(gym.vector.VectorWrapper):
    """Keeps a copy of all that passes, as it was at that moment."""

    def __init__(self, envs):
        super().__init__(envs)
        self.steps = []
        self.pop_episodes = envs.pop_episodes

    def step(self, actions):
        results = self.env.step(actions)
        self.steps.append(copy.deepcopy(results))
        return results


def test_true_next_obs_of_the_atari_vector():
    """Four frames are stacked, so the true successor begins with the last three of before."""
    pytest.importorskip("ale_py")
    agent, envs, first = start("ALE/Pong-v5", 2, {"max_num_frames_per_episode": 60})
    envs = Kept(envs)
    one, between, ended = collect(agent, envs, first, 20)
    two, last, more = collect(agent, envs, between, 25)
    obs, next_obs, done, terminated = (
        torch.cat([getattr(rollout, name) for rollout in (one, two)])
        for name in ("obs", "next_obs", "done", "terminated"))
    assert obs.dtype == torch.uint8 and obs.shape == (45, 2, 4, 84, 84)
    assert np.array_equal(done, [step[2] | step[3] for step in envs.steps])
    assert 4 <= done.sum() == len(ended + more) and not terminated.any()
    assert torch.equal(next_obs[:, :, :3], obs[:, :, 1:])
    # Nothing was overwritten later on: these are the frames that came.
    assert np.array_equal(obs, [first, *(step[0] for step in envs.steps[:-1])])
    assert np.array_equal(last, envs.steps[-1][0])
    goes_on = obs[1:] == next_obs[:-1]
    assert goes_on[done[:-1] == 0].all()
    assert not goes_on[done[:-1] == 1].flatten(1).all(1).any()


@pytest.mark.parametrize("name,limit", [("CartPole-v1", 20), ("HalfCheetah-v4", 7),
                                        ("Hopper-v4", 15)])
def test_a_vector_is_as_many_plain_environments(name, limit):
    """The same actions in environments made by gym.make, which know of no vector and no wrapper."""
    agent, envs, obs = start(name, 3, {"max_episode_steps": limit})
    rollout, _, episodes = collect(agent, envs, obs, 3 * limit)
    sent = [agent.env_act(act) for act in rollout.act]
    ended = []
    for i in range(3):
        with gym.make(name, max_episode_steps=limit) as env:
            obs, ep_ret, ep_len = env.reset(seed=7 + i)[0], 0.0, 0
            for t, act in enumerate(sent):
                next_obs, rew, terminated, truncated, _ = env.step(act[i])
                expected = (obs, rew, next_obs, terminated, terminated or truncated)
                for key, value in zip(("obs", "rew", "next_obs", "terminated", "done"), expected):
                    got = getattr(rollout, key)[t, i].numpy()
                    assert np.array_equal(got, np.float32(value)), (key, t, i)
                ep_ret, ep_len, obs = ep_ret + rew, ep_len + 1, next_obs
                if expected[-1]:
                    ended.append((t, i, ep_ret, ep_len))
                    obs, ep_ret, ep_len = env.reset()[0], 0.0, 0
    assert [end[:2] for end in episodes] == [end[:2] for end in sorted(ended)]
    np.testing.assert_allclose(np.float64(episodes), sorted(ended), rtol=1e-6)
    cut = rollout.done.bool() & ~rollout.terminated.bool()
    assert cut.any() and (name == "HalfCheetah-v4" or rollout.terminated.any())
