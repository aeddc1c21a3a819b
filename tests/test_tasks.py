"""Environments for experiments: what differs from the environment they are made of."""
import gymnasium as gym
import numpy as np
import pytest

from tests.toy import Config
from utils.envs import make_envs


def test_scaled_multiplies_rewards_and_nothing_else():
    plain = make_envs(Config(env="Pendulum-v1", env_kwargs='{"g": 5}'), 2)
    kwargs = '{"env": "Pendulum-v1", "factor": 0.001, "g": 5}'
    scaled = make_envs(Config(env="tasks:Scaled-v0", env_kwargs=kwargs), 2)
    assert scaled.single_action_space == plain.single_action_space
    assert (scaled.reset(seed=3)[0] == plain.reset(seed=3)[0]).all()
    for _ in range(201):                        # beyond the time limit
        act = plain.action_space.sample()
        (obs, rew, *ends, _), (same_obs, scaled_rew, *same_ends, _) = (
            envs.step(act) for envs in (plain, scaled))
        assert (obs == same_obs).all()
        assert scaled_rew == pytest.approx(0.001 * rew) and rew.all()
        for end, same_end in zip(ends, same_ends, strict=True):
            assert (end == same_end).all()
    for one, other in zip(plain.pop_episodes(), scaled.pop_episodes(), strict=True):
        assert other == (*one[:2], pytest.approx(0.001 * one[2]), one[3])


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_recall_pays_for_the_first_observation_at_the_end(delay):
    env = gym.make("tasks:Recall-v0", delay=delay)
    signs = set()
    for seed in range(8):
        obs, _ = env.reset(seed=seed)
        signs.add(sign := int(obs[0]))
        for time in range(delay + 1):
            act = (sign > 0) == (seed % 2)              # right in every second episode
            obs, rew, terminated, truncated, _ = env.step(int(act))
            assert obs == 0 and terminated == (time == delay) and not truncated
            assert rew == (0 if time < delay else 1 if seed % 2 else -1)
    assert signs == {-1, 1}


def test_rooms_pay_at_the_end_of_the_way_through_all_doors():
    """Three rooms of two columns: doors are above, then below. Any other way ends at a wall."""
    env = gym.make("tasks:Rooms-v0", rooms=3, size=2)
    up, down, left, right = range(4)
    obs, _ = env.reset(seed=1)
    seen = [obs]
    way = [(right, 1), (right, 0), (up, 1), (up, 0), (right, 1), (down, 0), (right, 1), (right, 1),
           (right, 0), (down, 1), (right, 1), (up, 0), (right, 1), (right, 1), (up, 1)]
    for act, moves in way:
        obs, rew, terminated, truncated, _ = env.step(act)
        assert (obs != seen[-1]).any() == moves and not truncated
        at_goal = obs[[7, 8]].all()                             # the last column, the top row
        assert rew == terminated == at_goal
        seen.append(obs)
    assert at_goal and (np.sum(seen, 1) == 2).all() and all(obs in env.observation_space
                                                            for obs in seen)


def test_rooms_end_after_300_steps_without_a_reward():
    env = gym.make("tasks:Rooms-v0")
    obs, _ = env.reset(seed=1)
    assert obs.shape == (6 * 10 - 1 + 9,) and obs[[0, 59 + 8]].all()
    ends = [env.step(env.action_space.sample())[1:4] for _ in range(300)]
    assert ends == 299 * [(0, False, False)] + [(0, False, True)]


def test_bit_flip_flips_the_bit_of_the_largest_number():
    env = gym.make("tasks:BitFlip-v0", bits=4)
    obs, info = env.reset(seed=1)
    assert set(np.unique(obs["observation"])) <= {0, 1} and "is_success" not in info
    assert (obs["achieved_goal"] == obs["observation"]).all()
    wrong = np.flatnonzero(obs["observation"] != obs["desired_goal"])
    for left in range(len(wrong) - 1, -1, -1):
        act = np.full(4, -0.5, np.float32)
        act[wrong[left]] = -0.4
        before, (obs, rew, terminated, truncated, info) = obs, env.step(act)
        changed = np.flatnonzero(obs["observation"] != before["observation"])
        assert changed.tolist() == [wrong[left]] and not truncated
        assert (obs["desired_goal"] == before["desired_goal"]).all()
        assert (obs["achieved_goal"] == obs["observation"]).all()
        assert (rew, terminated, info["is_success"]) == ((0, True, 1) if left == 0 else
                                                        (-1, False, 0))


def test_bit_flip_gives_up_after_as_many_steps_as_bits():
    """And no episode starts at its goal, not even with one bit. Goals and starts vary."""
    env = gym.make("tasks:BitFlip-v0", bits=6)
    seen = set()
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        seen.add((*obs["observation"], *obs["desired_goal"]))
        i = np.flatnonzero(obs["observation"] == obs["desired_goal"])[:1]
        act = np.zeros(6, np.float32)
        act[i] = 1                                  # there and back
        ends = [env.step(act)[1:4] for _ in range(6)] if len(i) else []
        assert ends == [(-1, False, time == 6) for time in range(1, 7)] or not len(i)
    assert len(seen) == 20
    one = gym.make("tasks:BitFlip-v0", bits=1)
    starts = [one.reset(seed=seed)[0] for seed in range(9)]
    assert all(obs["observation"] != obs["desired_goal"] for obs in starts)
