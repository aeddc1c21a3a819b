"""Environments: what is refused, what becomes of their spaces, and what is recorded."""
import json
import math
import re
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Tuple

from algos import ppo, ppo_mask
from tasks import BitFlip
from tests.envs import Counter, Idle
from tests.helpers import agent_for, refused
from tests.toy import Config
from tests.utils.test_workers import Drawn
from utils import buffers, env_ids, mpi
from utils.atari import AtariRules
from utils.envs import EpisodeRecorder, make_envs
from utils.errors import UsageError
from utils.evaluate import evaluate
from utils.goals import NO_INFO, goal_env
from utils.nets import ImageEncoder
from utils.run import Run
from utils.spaces import FlatBox, obs_kind
from utils.wrappers import OwnStep, success as success_of

# ---- What can be wrong with --env and --env-kwargs

@pytest.mark.parametrize("env,kwargs,message", [
    ("HalfCheeta-v4", "{}", "--env is HalfCheeta-v4: .*Did you mean: `HalfCheetah-v4`"),
    ("no_such_package:Env-v0", "{}", "imported: No module .*no_such_package"),
    ("a b", "{}", "--env is a b"), ("pong", "{}", "games are called ALE/Pong-v5 or MinAtar/Br"),
    ("CartPole-v1", "{'a': 1}", "--env-kwargs is .* it takes a JSON object"),
    ("CartPole-v1", "[1]", "--env-kwargs is"), ("ALE/Pong-v5", "null", "--env-kwargs is"),
    ("ALE/Pong-v5", '{"repeat_action_probability": 2}', "repeat_action_probability is 2, no prob"),
    ("CartPole-v1", '{"num_envs": 3}', "num_envs"), ("Hopper", "{}", "newest is Hopper-v[0-9]$"),
    ("LunarLander-v2", "{}", "LunarLander-v3"), ("Hopper-v3", "{}", "imported: .*newer version"),
    *((env, "{}", f"^--env is {env}.*{said}") for env, said in (
        ("ALE/Pnog-v5", "games are called"), ("MinAtar/Brekout-v1", "Breakout"),
        ("CartPole-v9", "v1"), ("ale/pong-v5", "games are called ALE/Pong-v5"),
        ("ale_py:PongNoFrameskip-v4", "pictures are not preprocessed; games are called ALE/"),
        ("..:X", "relative import"), (":X", "Empty module name"),
        ("a:b:c", "No module named 'a:b'"))),
    *((env, '{"wind": 1}', "--env-kwargs {.* raised TypeError: .* 'wind' ") for env in (
        "CartPole-v1", "ALE/Pong-v5")),
    ("tasks:Scaled-v0", '{"env": "Nowhere-v0", "factor": 2}', "Nowhere"),
    ("CartPole-v1", '{"max_episode_steps": 0}', "--env-kwargs {.* raised ValueError: .*positive"),
])
def test_unusable_environments(env, kwargs, message, capsys):
    """Before anything is said."""
    refused(make_envs, Config(env=env, env_kwargs=kwargs), 1, says=message)
    assert capsys.readouterr().out == ""


def test_a_missing_package_is_named_with_the_command():
    no_box2d = gym.error.DependencyNotInstalled("Box2D is not installed")
    for env, error, extra in [("ALE/Pong-v5", ModuleNotFoundError("No ale_py"), "ale-py"),
                              ("FetchPush-v4", ModuleNotFoundError("gym..."), "gymnasium-robotics"),
                              ("LunarLander-v3", no_box2d, r"'gymnasium\[box2d\]'")]:
        with pytest.raises(UsageError, match=f"pip install {extra}$"):
            with env_ids.refusing_bad_env(Config(env=env)):
                raise error


def test_known_notices_are_silent_and_others_are_not(capfd):
    with warnings.catch_warnings(record=True, action="always") as seen:
        with env_ids.refusing_bad_env(Config()):
            env = gym.make("HalfCheetah-v4")
            mujoco.get_mju_user_warning()("Nan in QACC")
            warnings.warn("another notice", DeprecationWarning, stacklevel=1)
        env.reset()
        env.close()
    assert [str(warning.message) for warning in seen] == ["another notice"]
    assert capfd.readouterr() == ("", "MuJoCo: Nan in QACC\n")
    assert not Path("MUJOCO_LOG.TXT").exists()


# ---- Observations that are no Box

def test_a_dict_is_one_hot_and_joined():
    """As Gymnasium does, not by name; what ends an episode is flattened like all observations."""
    vector = make_envs(Config(env="tests.envs:Parts-v0"), 2)
    space = vector.single_observation_space
    assert space == Box(np.float32([-np.inf, -np.inf, 0, 0, 0]),
                        np.float32([np.inf, np.inf, 1, 1, 1]))
    assert space.parts == {"place": slice(0, 2), "kind": slice(2, 5)}
    obs, _ = vector.reset(seed=1)
    rows = [obs]
    for _ in range(4):
        obs, _, _, _, infos = vector.step(np.zeros(2, int))
        rows.append(obs)
    assert obs.dtype == np.float32
    first = [[0, 0, 0, 0, 1], [1, -1, 1, 0, 0], [2, -2, 0, 1, 0], [3, -3, 0, 0, 1], [0, 0, 0, 0, 1]]
    np.testing.assert_array_equal([row[0] for row in rows], first)
    np.testing.assert_array_equal(np.stack(infos["final_obs"]), 2 * [[4, -4, 1, 0, 0]])


TWO, THREE = Box(-1, 1, (2,)), Box(-1, 1, (3,))


@pytest.mark.parametrize("observation,achieved,desired,found", [
    (THREE, TWO, TWO, True), (THREE, MultiBinary(4), MultiBinary(4), True),
    (THREE, TWO, THREE, False), (THREE, Discrete(2), Discrete(2), False),
    (THREE, None, TWO, False), (None, TWO, TWO, False), (Box(-1, 1, (2, 2)), TWO, TWO, False),
])
def test_goals_are_vectors_of_one_size(observation, achieved, desired, found):
    """Others would be flattened, and the environment's own functions do not take them."""
    parts = {"observation": observation, "achieved_goal": achieved, "desired_goal": desired}
    space = Dict({name: part for name, part in parts.items() if part is not None})
    assert obs_kind(FlatBox(space)) == "vector" + " goal" * found


class Dear(gym.Wrapper):
    """It changes rewards, and says those of other goals by the same rule."""

    def step(self, act):
        obs, rew, *rest = super().step(act)
        return obs, 100 * rew, *rest

    def compute_reward(self, *args):
        return 100 * self.env.unwrapped.compute_reward(*args)

    def compute_terminated(self, *args):
        return self.env.unwrapped.compute_terminated(*args)


class Pays(BitFlip):
    def __init__(self, function):
        super().__init__(bits=3)
        self.compute_reward = function


@pytest.mark.parametrize("make,message", [
    (lambda: gym.wrappers.TransformReward(BitFlip(), abs), "wrapper TransformReward may change"),
    (lambda: gym.wrappers.NormalizeReward(BitFlip()), "wrapper NormalizeReward may change"),
    (lambda: Idle(BitFlip()), "wrapper Idle may change rewards or goals; .* define it"),
    (lambda: gym.wrappers.TransformObservation(BitFlip(), dict, BitFlip().observation_space),
     "wrapper TransformObservation"),
    (lambda: Idle(Dear(BitFlip())), "wrapper Idle"), (lambda: Dear(BitFlip()), None),
    (lambda: gym.wrappers.TransformAction(BitFlip(), abs, Box(-1, 1, (10,))), None),
    *((partial(Pays, reads), "reads its info") for reads in (
        lambda a, d, info: info["cost"] + a[:, 0], lambda a, d, info: a[:, 0] - info.get("cost", 1),
        lambda a, d, info: a[:, 0] if "cost" in info else d[:, 0],
        lambda a, d, info: np.array([each for each in info]))),
    (partial(Pays, lambda a, d, info: 0.0), r"returns \[\] for 2 pairs of goals"),
])
def test_one_scale_of_rewards(make, message):
    """The buffer holds rewards of steps and of `compute_reward`; no wrapper may come between."""
    gym.registry.pop("Goals-v0", None)
    gym.register("Goals-v0", make, disable_env_checker=True)
    vector = make_envs(Config(env="Goals-v0"), 2)
    if message:
        refused(goal_env, vector, says=message)
        return
    env = goal_env(vector)
    goal, other = np.zeros((2, 10), np.float32), np.ones((2, 10), np.float32)
    vector.reset(seed=1)
    rew = vector.step(vector.action_space.sample())[1]
    assert set(rew) <= {*env.compute_reward(goal, other, NO_INFO), 0.0}


@pytest.mark.parametrize("env,size", [
    ("FetchReach-v4", 3), ("gymnasium_robotics:FetchReach-v4", 3), ("PointMaze_UMaze-v3", 2)])
def test_robots_have_goals_and_tell_success(env, size, capfd):
    vector = make_envs(Config(env=env, env_kwargs='{"max_episode_steps": 2}'), 2)
    space = vector.single_observation_space
    goal = range(*space.parts["desired_goal"].indices(99))
    assert space.kind == "vector goal" and len(goal) == size
    goals = np.zeros((4, size))
    assert goal_env(vector).compute_reward(goals, goals + 9, {}).shape == (4,)
    vector.reset(seed=1)
    for _ in range(2):
        vector.step(vector.action_space.sample())
    assert [len(end) for end in vector.pop_episodes()] == [5, 5]
    assert capfd.readouterr().err == ""


# ---- Spaces that become others

SQUARE, BOX_2 = Box(-1, 1, (5, 5)), Box(-1, 1, (2, 1))


def uneven(obs, act):
    """Return the Config of an environment with these spaces."""
    gym.spec("Uneven-v0").kwargs.update(obs=obs, act=act)
    return ppo.Config(env="tests.envs:Uneven-v0", hidden=(4,))


@pytest.mark.parametrize("space,size,act", [
    (SQUARE, 25, Discrete(3)), (Box(-1, 1, ()), 1, Discrete(3, start=1)),
    (Box(-1, 1, (1, 3)), 3, Discrete(3)),
    (Box(0, 9, (2, 3), np.int64), 6, MultiDiscrete([3, 2])),
    (Box(0, 1, (3, 3, 3)), 27, MultiDiscrete([[2, 2], [1, 3]])),
    (Box(0, 1, (4, 4, 16), np.uint8), 256, Discrete(3)), (Box(0, 9, (8, 8), np.uint8), 64, BOX_2),
    (MultiDiscrete([3, 2]), 5, MultiDiscrete([2, 2], start=[1, -1])),
    (gym.spaces.Tuple((Discrete(3), SQUARE)), 28, Discrete(3)),
    (MultiBinary([2, 3]), 6, MultiBinary(3)), (Discrete(3, start=2), 3, MultiBinary((2, 2))),
    (Dict(a=SQUARE, b=Discrete(2)), 27, BOX_2)])
def test_uneven_spaces_are_played_predicted_and_shown(space, size, act, capsys):
    cfg = uneven(space, act)
    vector = make_envs(cfg, 2)
    obs_space, act_space = vector.single_observation_space, vector.single_action_space
    assert obs_space.shape == (size,) and obs_space.dtype == np.float32
    agent = ppo.Agent(obs_space, act_space, cfg)
    evaluate(agent, cfg, 2, seed=1)
    said = capsys.readouterr().out
    assert said.count(f"flattened to {size} number") == 1       # though evaluate makes others
    assert ("numbered as Discrete" in said) == (act == Discrete(3, start=1))
    assert vector.unwrapped.envs[0].unwrapped.action_space == act
    seen = space.sample()
    flat = gym.spaces.flatten(space, seen)
    one, same, two = (agent.predict(obs) for obs in (seen, flat, np.stack([flat, flat])))
    assert one in act and np.array_equal(one, same)
    assert np.allclose(two, [one, one], atol=1e-6) and two.dtype == one.dtype


PAIR = Tuple((Discrete(3), Dict(image=Box(0, 255, (6, 6, 1), np.uint8), speed=TWO)))


def test_n_dicts_or_tuples_are_predicted_as_one_of_arrays():
    agent = agent_for(ppo, uneven(PAIR, Discrete(9)))
    seen = [PAIR.sample() for _ in range(20)]
    joined = (np.array([one for one, _ in seen]),
              {name: np.stack([rest[name] for _, rest in seen]) for name in ("image", "speed")})
    acts = agent.predict(joined)
    assert np.array_equal(acts, [agent.predict(one) for one in seen]) and len(set(acts)) > 1
    assert np.array_equal(agent.predict((joined[0][:1], {k: v[:1] for k, v in joined[1].items()})),
                          acts[:1])


@pytest.mark.parametrize("first,image,speed,says", [
    (1, np.zeros((6, 6, 1)), np.ones(2), r"observation\[1\]\['image'\] is float64 \[6, 6, 1\], not "
     r"uint8 \[6, 6, 1\]"),
    ([1, 1], np.zeros((2, 6, 6, 1)), np.ones((2, 2)), r"\['image'\] is float64 \[6, 6, 1\], not"),
    ([1, 3], np.zeros((2, 6, 6, 1), np.uint8), np.ones((2, 2)), r"\[0\] is .*3.*, not of Discrete"),
    ([1, 1], np.zeros((2, 6, 6, 1), np.uint8), np.ones((3, 2)), r"observation\[0\] is \[1, 1\]"),
    (1, np.zeros((6, 6, 1), np.uint8), None, r"observation\[1\] has no 'speed'")])
def test_the_part_that_is_not_of_the_space_is_named(first, image, speed, says):
    rest = {"image": image} | ({} if speed is None else {"speed": speed})
    with pytest.raises(ValueError, match=says) as caught:
        agent_for(ppo, uneven(PAIR, Discrete(2))).predict((first, rest))
    assert str(caught.value).startswith("observation[")         # no environment returned it
    some = {"image": image, "speed": None}
    refused(FlatBox(PAIR).flatten, (1, some), says=r"\['(image|speed)'\]")
    refused(FlatBox(PAIR).flatten, (1, image), says=r"observation\[1\] is .*, no dict$")
    refused(FlatBox(PAIR).flatten, (1,), says="observation has 1 parts, not 2$")


def test_what_a_dict_may_not_mean_is_said(capsys):
    """Floats are no image, and a mask binds only who obeys it."""
    space = Dict(camera=Box(0, 1, (6, 6, 3)), action_mask=MultiBinary(3))
    agent_for(ppo, uneven(space, Discrete(3)))
    said = capsys.readouterr().out
    assert "images: camera has floats, [6, 6, 3], so it is no image here" in said
    assert "action_mask is an input here, not obeyed" in said
    mpi.say_once.cache_clear()
    both = Dict(observation=SQUARE, action_mask=MultiBinary(3))
    agent_for(ppo_mask, ppo_mask.Config(env=uneven(both, Discrete(3)).env))
    agent_for(ppo, uneven(Dict(a=SQUARE, b=PAIR[1]), Discrete(3)))
    assert not re.search("obey|floats", capsys.readouterr().out)


@pytest.mark.parametrize("obs,act", [
    (TWO, Dict(a=TWO, b=Discrete(2))), (TWO, Tuple((TWO, TWO))), (Box(0, 1, (84, 84)), TWO),
    (Box(0, 255, (3, 84, 84), np.int64), TWO), (Discrete(10**8), TWO), (Graph(TWO, None), TWO),
    (Box(0, 255, (4, 64, 64, 3), np.uint8), TWO), (TWO, Box(0, 9, (1,), np.int64))])
def test_what_cannot_become_another_space_is_refused(obs, act):
    refused(agent_for, ppo, uneven(obs, act), says="space .*; docs/howto.md has a table of what ")


# ---- What is recorded

def test_success_is_that_of_the_last_step():
    """Not of the steps before it, and not of the reset that follows. Others tell nothing."""
    vector = make_envs(Config(env="tests.envs:GoalCounter-v0"), 3)
    assert vector.reset(seed=1)[1] == {}
    for _ in range(14):
        act = vector.action_space.sample()
        vector.step(given := act.copy())
        assert np.array_equal(act, given)                       # the environment changes a copy
    told = {env: [] for env in range(3)}
    for _, env, _, _, success in vector.pop_episodes():
        told[env].append(success)
    assert told == {0: [1, 0, 1, 0], 1: [1, 0], 2: [1, 0, 1, 0, 1]}


@pytest.mark.parametrize("info,told", [
    ({"is_success": True}, 1.0), ({"success": np.bool_(0)}, 0.0), ({"success": np.ones(1)}, 1.0),
    ({"is_success": 0, "success": 1}, 0.0), ({"is_success": None, "success": 1}, 1.0),
    *(({"is_success": value}, None) for value in (None, "no", np.ones(2), math.nan, {}, [])),
    ({}, None)])
def test_success_by_either_name_and_only_by_a_number(info, told):
    assert success_of(info) == ({} if told is None else {"success": told})


class Vector(gym.vector.VectorEnv):
    """Two environments that return what a test asks for, one step at a time."""

    single_observation_space, single_action_space = Box(-9, 9, (1,)), Discrete(2)
    buttons = [SimpleNamespace(name="NOOP"), SimpleNamespace(name="FIRE")]
    ale = SimpleNamespace(get_action_set=lambda: Vector.buttons)
    num_envs, metadata = 2, {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self, obs=0.0, rew=0.0, final_obs=0.0, at=3, lives=(), cut=False):
        self.given, self.at, self.cut = (obs, rew, final_obs), at, cut
        self.lives, self.pressed = [[3, 3], *lives], []

    def told(self):
        return {"lives": np.array(self.lives[self.time])} if self.lives[1:] else {}

    def reset(self, seed=None, options=None):
        self.time = 0
        return np.array([[0.0], [0.0 if self.at else self.given[0]]]), self.told()

    def step(self, actions):
        self.pressed.append(actions.tolist())
        self.time += 1
        obs, rew, final_obs = self.given if self.time == self.at else (0.0,) * 3
        ended = np.array([False, self.time == self.at])
        final = {"final_obs": np.array([[-7.0], [final_obs]]), "_final_obs": ended}
        obs = np.array([[float(self.time)], [obs]])
        return (obs, np.array([0.0, rew]), ended & (not self.cut), ended & self.cut,
                self.told() | (final if ended.any() else {}))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])  # too large for float32
@pytest.mark.parametrize("where,at", [("obs", 3), ("rew", 3), ("final_obs", 3), ("obs", 0)])
def test_what_is_not_finite_is_refused_with_its_step(where, at, value):
    vector = EpisodeRecorder(Vector(**{where: value}, at=at))
    with pytest.raises(FloatingPointError, match=f"the environment returned NaN .* step {at} "):
        vector.reset()
        for _ in range(3):
            vector.step(np.zeros(2))


# ---- Memory

@pytest.mark.skipif(buffers.os.name != "posix", reason="unknown on Windows")
@pytest.mark.parametrize("limit,expected", [(None, 8e9), ("max", 8e9), ("3000000000", 3e9)])
def test_memory_is_the_less_of_machine_and_container(limit, expected, monkeypatch):
    if limit:
        Path("memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(buffers, "Path", lambda name: Path("memory.max"))
    sizes = {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 8_000_000}
    monkeypatch.setattr(buffers.os, "sysconf", sizes.__getitem__)
    assert buffers.memory() == expected


# ---- What an agent is shown

def test_a_seed_also_fixes_what_an_environment_draws_elsewhere():
    def drawn(seed):
        cfg = SimpleNamespace(seed=seed, torch_threads=1)
        Run.__enter__(SimpleNamespace(cfg=cfg, stack=ExitStack()))
        within = gym.wrappers.TransformAction(Drawn(), int, Discrete(2))  # its space is another
        one = OwnStep(within)
        return [one.reset(seed=seed)[0].tolist()] + [one.step(0)[0].tolist() for _ in range(5)]

    first = drawn(1)
    assert drawn(1) == first and not any(a == b for a, b in zip(sum(drawn(2), []), sum(first, [])))


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_predict_of_one_is_one_of_a_batch_a_batch_and_of_else_an_error(env):
    agent = agent_for(ppo, ppo.Config(env=env))
    obs = np.random.default_rng(0).normal(size=(3, *agent.obs_shape)).astype(np.float32)
    one = agent.predict(obs[0])
    for n in (1, 3):
        assert agent.predict(obs[:n]).shape == (n, *np.shape(one))
    np.testing.assert_allclose(agent.predict(obs)[0], one, rtol=1e-5)
    for bad in (np.nan, np.inf, 1e39):
        with pytest.raises(ValueError, match="the observation has NaN or infinity"):
            agent.predict(np.append(obs[0, :-1].astype(float), bad))
    for wrong in (obs[0][:-1], obs[:, :-1], obs[None], obs[0, 0]):
        with pytest.raises(ValueError, match="an observation has the shape"):
            agent.predict(wrong)


@pytest.mark.parametrize("change", [
    lambda obs: obs[::-1].copy()[::-1], lambda obs: obs.astype(">f8"),
    lambda obs: obs.astype(np.longdouble), lambda obs: np.broadcast_to(obs, obs.shape)])
def test_predict_takes_arrays_that_pytorch_does_not(change):
    """Such as a flipped image, which has negative strides."""
    agent = agent_for(ppo, ppo.Config(env="CartPole-v1"))
    obs = np.float32([[1, 2, 3, 4], [4, 3, 2, 1]])
    assert np.array_equal(agent.predict(change(obs)), agent.predict(obs))
    assert agent.predict(change(obs[0])) == agent.predict(obs[0])


# ---- games

def play_breakout(steps, serve=False, **kwargs):
    """Return what `steps` steps of two games returned, and the episodes. `serve`: by ourselves."""
    kwargs = json.dumps({"repeat_action_probability": 0, "num_threads": 1, **kwargs})
    games = make_envs(Config(env="ALE/Breakout-v5", env_kwargs=kwargs), 2)
    lives, rng, seen = [5, games.reset(seed=1)[1]["lives"]], np.random.default_rng(1), []
    for _ in range(steps):
        act = rng.integers(4, size=2)
        seen.append(games.step(np.where(lives[-1] < lives[-2], 1, act) if serve else act))
        lives.append(seen[-1][-1]["lives"])
    episodes = games.pop_episodes()
    games.close()
    return seen, episodes


def test_a_lost_life_ends_the_learners_episode_and_not_the_game():
    games, episodes = play_breakout(250, serve=True)
    lives, same_episodes = play_breakout(250, episodic_life=True)
    assert episodes == same_episodes == play_breakout(250)[1] and len(episodes) > 0
    left, lost = np.array([5, 5]), 0
    for (obs, rew, end, cut, infos), (obs_2, rew_2, end_2, cut_2, infos_2) in zip(games, lives):
        assert np.array_equal(obs, obs_2) and np.array_equal(rew, rew_2)
        assert np.array_equal(end_2, end | (infos["lives"] < left)) and not (cut | cut_2).any()
        for i in np.flatnonzero(end_2):
            final_obs = infos["final_obs"] if end[i] else obs
            assert np.array_equal(infos_2["final_obs"][i], final_obs[i])
        lost += (end_2 & ~end).sum()
        left = infos["lives"]
    assert lost == 4 * len(episodes) + (5 - left).sum()  # the fifth life ends the game


def test_the_last_frames_of_a_game_are_in_final_obs():
    """Four frames are stacked, so a true successor begins with the last three of before."""
    kwargs = '{"max_num_frames_per_episode": 60, "num_threads": 1}'
    games = make_envs(Config(env="ALE/Pong-v5", env_kwargs=kwargs), 2)
    (obs, _), ended = games.reset(seed=7), 0
    assert obs.dtype == np.uint8 and obs.shape == (2, 4, 84, 84)
    for _ in range(45):
        after, _, terminated, truncated, infos = games.step(games.action_space.sample())
        for i in range(2):
            last = infos["final_obs"][i] if truncated[i] else after[i]
            assert np.array_equal(last[:3], obs[i, 1:]) and not terminated[i]
            assert truncated[i] != np.array_equal(last, after[i])
        obs, ended = after, ended + truncated.sum()
    assert ended >= 4
    games.close()


def test_what_has_no_button_to_fire_is_not_served():
    assert make_envs(Config(env="ALE/Freeway-v5"), 1).fire is None  # it has up and down
    games = make_envs(Config(env="ALE/Breakout-v5", env_kwargs='{"continuous": true}'), 2)
    games.reset(seed=1)
    assert games.fire is None and games.step(games.action_space.sample())[0].shape[0] == 2
    games.close()


@pytest.mark.parametrize("cut", [False, True])                  # by a time limit
def test_fire_begins_each_life_once(cut):
    vector = Vector(lives=[[2, 3], [2, 3], [2, 5]], cut=cut)
    games = AtariRules(EpisodeRecorder(vector))
    games.reset()
    for _ in range(3):
        games.step(np.zeros(2, int))
    assert vector.pressed == [[1, 1], [1, 0], [0, 0]]
    assert games.begins.tolist() == [False, True]               # the second game has ended


def test_a_run_says_by_which_rules_it_plays(capsys):
    for kwargs, said in (("{}", "0.25"), ('{"repeat_action_probability": 0}', "0"), (
            '{"episodic_life": true}',
            "0.25; to the learner, a lost life ends an episode, but not in the log")):
        make_envs(Config(env="ALE/Pong-v5", env_kwargs=kwargs), 1)
        assert capsys.readouterr().out == f"Atari: sticky actions {said}\n"


def test_encoders_are_those_of_the_papers():
    """Mnih et al. 2015; Young & Tian 2019."""
    small = ImageEncoder(Box(0, 255, (10, 10, 4), np.uint8))
    large = ImageEncoder(Box(0, 255, (4, 84, 84), np.uint8))
    for net, shapes in ((small, [(16, 4, 3, 3), (128, 16 * 8 * 8)]), (large, [
            (32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 64 * 7 * 7)])):
        layers = [layer for layer in net if not isinstance(layer, torch.nn.Flatten)]
        assert [tuple(layer.weight.shape) for layer in layers[::2]] == shapes
        assert all(isinstance(layer, torch.nn.ReLU) for layer in layers[1::2])


@pytest.mark.parametrize("rew,seen", [(-7.5, -1), (0.5, 0.5), (3, 1)])
def test_the_learner_gets_clipped_rewards_and_log_and_evaluation_true_ones(rew, seen):
    for clips in (True, False):
        games = AtariRules(EpisodeRecorder(Vector(rew=rew, at=1, lives=[[3, 3]])))
        games.clip_rewards = games.clip_rewards and clips
        games.reset()
        _, rewards, *_, infos = games.step(np.zeros(2, int))
        assert rewards.tolist() == [0, seen if clips else rew] and infos["episode"]["r"][1] == rew
        assert games.pop_episodes() == [(0, 1, rew, 1)]


@pytest.mark.parametrize("lives,cut", [([2, 5], False), ([3, 2], True)])
def test_a_lost_life_keeps_its_own_last_observation_and_a_time_limit_is_none(lives, cut):
    """In the same step the other game ends, so final_obs is there, with garbage in this row. At a
    time limit, ale-py tells the lives of the next game, the most there are."""
    games = AtariRules(EpisodeRecorder(Vector(final_obs=6.0, at=1, lives=[lives], cut=cut)), True)
    games.reset()
    obs, _, terminated, truncated, infos = games.step(np.zeros(2, int))
    assert terminated.tolist() == 2 * [not cut] and truncated.tolist() == [False, cut]
    assert infos["final_obs"][1] == [6.0] and (cut or infos["final_obs"][0] == obs[0])


@pytest.mark.parametrize("game", ["Breakout", "Seaquest"])      # of 4 and 10 channels
def test_minatar_has_bytes_and_its_channels_last(game):
    games = make_envs(Config(env=f"MinAtar/{game}-v1"), 2)
    obs, _ = games.reset(seed=1)
    assert obs.dtype == np.uint8 and set(np.unique(obs)) == {0, 255}
    assert not isinstance(games, AtariRules)                    # which would clip rewards
    assert games.unwrapped.envs[0].spec.max_episode_steps == 27_000  # MinAtar has no limit
    games = make_envs(Config(env=f"MinAtar/{game}-v1", env_kwargs='{"max_episode_steps": 9}'), 2)
    assert games.unwrapped.envs[0].spec.max_episode_steps == 9
    encoder = ImageEncoder(games.single_observation_space)
    features = encoder(torch.as_tensor(obs))
    encoder.bf16 = True
    short = encoder(torch.as_tensor(obs))
    assert short.shape == (2, 128) and short.dtype == torch.float32
    assert 1e-5 < (short - features).abs().max() < 0.02 * features.abs().max()


def test_a_game_may_be_predicted_as_it_comes():
    """MinAtar's own observations are bools, which `make_envs` turns into 0 and 255."""
    agent = agent_for(ppo, ppo.Config(env="MinAtar/Breakout-v1"))
    raw, seen = np.random.default_rng(0).random((4, *agent.obs_shape)) < 0.2, []
    agent.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    agent.predict(raw), agent.predict(raw[0])
    assert [x.dtype for x in seen] == [torch.uint8] * 2
    assert torch.equal(seen[0], torch.as_tensor(255 * raw.astype(np.uint8)))
    assert torch.equal(seen[1], seen[0][:1])


def test_an_environment_that_does_not_close_ends_no_run(monkeypatch):
    """Neither in an evaluation nor at the end."""
    def close(self):
        raise OSError("the simulator does not answer")

    monkeypatch.setattr(Counter, "close", close)
    cfg = ppo.Config(env="tests.envs:Counter-v0", total_steps=32, rollout_steps=32, num_envs=2,
                     minibatch_size=16, eval_every=32, run_dir="run")
    with pytest.warns(UserWarning, match="could not be closed: .*the simulator does not answer"):
        ppo.train(cfg)
    assert Path("run/policy.pt").exists()
