"""What is collected and evaluated, row by row, on scripted environments of known numbers."""
import copy
import json
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from algos import ppo
from tests import envs as scripted
from tests.envs import Counter
from tests.helpers import (
    bare,
    rows,
)
from utils import launch, mpi
from utils.envs import evaluate, make_envs

# Two are cut where an episode of environment 0 ends, one has a single step.


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


def rollouts_of(agent, envs, obs, sizes):
    """Rollouts one after the other, and the ended episodes of each."""
    rollouts, episodes = [], []
    for size in sizes:
        rollout, obs, ended = collect(agent, envs, obs, size)
        rollouts.append(rollout)
        episodes.append(ended)
    return rollouts, episodes, obs


def column(rollouts, name):
    return torch.cat([getattr(rollout, name) for rollout in rollouts])


# ---- The script itself

def test_counter_by_hand():
    env = Counter()
    first, _ = env.reset()
    seen = []
    for _ in range(5):
        obs, *ends, _ = env.step(np.zeros(2))
        assert obs is first                                     # the trap: one array for all
        seen.append((*obs.tolist(), *ends))
        if any(ends[1:]):
            env.reset()
    assert seen == [(0, 0, 1, -0.5, False, False), (0, 0, 2, -1.5, False, False),
                    (0, 0, 3, -2.5, True, False),
                    (0, 1, 1, 9.5, False, False), (0, 1, 2, 8.5, False, False)]
    assert {scripted.end(0, episode) for episode in range(3)} == {"terminated", "truncated", "both"}
    assert [scripted.length(2, episode) for episode in range(4)] == [1, 5, 2, 1]


# ---- The true next observation

@pytest.mark.parametrize("form", ["objects", "dense"])
def test_true_next_obs_in_both_formats(form):
    next_obs, done = np.float32([[0, 1], [2, 3], [4, 5]]), np.array([True, False, True])
    final_obs = np.float32([[10, 11], [99, 99], [14, 15]])      # 99: of one that goes on
    if form == "objects":
        final_obs = np.array([final_obs[0], None, final_obs[2], None], dtype=object)[:3]
    infos, before = {"final_obs": final_obs, "_final_obs": done}, next_obs.copy()
    results = next_obs, np.zeros(3), done, np.zeros(3, bool), infos
    agent = SimpleNamespace(act=lambda obs: torch.zeros(3), env_act=lambda act: act)
    envs = SimpleNamespace(step=lambda act: results)
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
    rollouts, episodes, last = rollouts_of(agent, envs, first, (20, 25))
    obs, next_obs, done = (column(rollouts, name) for name in ("obs", "next_obs", "done"))
    assert obs.dtype == torch.uint8 and obs.shape == (45, 2, 4, 84, 84)
    assert np.array_equal(done, [step[2] | step[3] for step in envs.steps])
    assert 4 <= done.sum() == sum(map(len, episodes)) and not column(rollouts, "terminated").any()
    assert torch.equal(next_obs[:, :, :3], obs[:, :, 1:])
    # Nothing was overwritten later on: these are the frames that came.
    assert np.array_equal(obs, [first, *(step[0] for step in envs.steps[:-1])])
    assert np.array_equal(last, envs.steps[-1][0])
    goes_on = obs[1:] == next_obs[:-1]
    assert goes_on[done[:-1] == 0].all()
    assert not goes_on[done[:-1] == 1].flatten(1).all(1).any()


def test_atari_rewards_are_clipped_and_scores_are_not():
    """A pellet is worth 10 points: 1 to the learner."""
    pytest.importorskip("ale_py")
    agent, envs, first = start("ALE/MsPacman-v5", 2, {"max_num_frames_per_episode": 440}, seed=3)
    rollout, _, episodes = collect(agent, envs, first, 110)
    assert set(rollout.rew.unique().tolist()) == {0, 1} and len(episodes) == 2
    for t, env, ep_ret, ep_len in episodes:
        assert ep_ret >= 10 * rollout.rew[:t + 1, env].sum() > 0 and ep_ret % 10 == 0
    score, _ = evaluate(agent, agent.cfg, 2, seed=1)
    assert (score % 10 == 0).all() and score.max() >= 10        # the score again


def test_a_run_on_atari_reports_scores():
    """Through `train`, whose environments must tell of their episodes."""
    pytest.importorskip("ale_py")
    ppo.train(config("ALE/MsPacman-v5", 2, {"max_num_frames_per_episode": 440}, total_steps=220,
                     rollout_steps=220, minibatch_size=220, epochs=1, run_dir="run"))
    scores = [float(row["ep_ret"]) for row in rows("run", "episodes.csv")]
    assert len(scores) == 2 and max(scores) >= 10 and all(score % 10 == 0 for score in scores)


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


# ---- Evaluation


def test_evaluate_refuses_a_reward_that_is_no_number():
    agent, _, _ = start("tests.envs:Faulty-v0", 2, {"fault": "rew nan", "at": 2})
    with pytest.raises(FloatingPointError, match="vector step 2 "):
        evaluate(agent, agent.cfg, 3, seed=1)


def test_seeds_of_ranks_differ(monkeypatch):
    """Each rank's environments are its own; rank 0 alone evaluates."""
    seeds = []
    for rank in range(4):
        monkeypatch.setattr(launch, "_rank", rank)
        seeds.append(mpi.seed(1, 1))
    assert len(set(seeds)) == 4
