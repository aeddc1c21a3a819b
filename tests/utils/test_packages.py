"""Environments of other packages: what is refused with advice, and what becomes of the others."""
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Space, Text, Tuple

from algos import ppo, sac, sac_her
from tests.envs import Ends, GoalEnds
from tests.helpers import agent_for, quick, refused
from tests.toy import Config
from tests.utils.test_envs import uneven
from utils.envs import make_envs
from utils.goals import goal_env
from utils.nets import ImageEncoder
from utils.spaces import act_kind, image_layout


# ---- What is refused, before anything is written

class Needs(Ends):
    def __init__(self, df):
        super().__init__()


class Breaks(Ends):
    def __init__(self):
        raise KeyError("SIM_HOME")


class Vectors(Ends):
    """Its rewards have two parts, as in MO-Gymnasium, unless a test says something else."""

    rew = np.array([1.0, -1.0])

    def step(self, act):
        obs, _, *rest = super().step(act)
        return obs, self.rew, *rest


@pytest.mark.parametrize("env,says", [
    ("Needs-v0", "; making it raised TypeError: .* missing 1 required positional argument: 'df' "),
    ("Breaks-v0", r"; making it raised KeyError: 'SIM_HOME' \(.*test_packages.py, line \d+\)$"),
    ("MiniGrid-Empty-5x5-v0", "needs its module, as in minigrid:MiniGrid-Empty-5x5-v0"),
    ("Space/Ship-v0", "needs its module, as in minigrid"), ("CartPole-v7", "^((?!module).)*$"),
])
def test_what_cannot_be_made_is_refused_with_advice(env, says):
    refused(ppo.train, ppo.Config(env=env), says=says)


def test_a_reward_is_one_number(monkeypatch):
    vector = make_envs(Config(env="Vectors-v0"), 1)
    vector.reset(seed=1)
    monkeypatch.setattr(Vectors, "rew", np.float32([0.5]))
    assert vector.step(vector.action_space.sample())[1].tolist() == [0.5]
    for rew in (None, np.ones(2)):
        monkeypatch.setattr(Vectors, "rew", rew)
        with pytest.raises((ValueError, FloatingPointError)):
            vector.step(vector.action_space.sample())


# ---- Spaces

class Mission(Space):
    """A kind that Gymnasium does not know, as minigrid's."""

    def sample(self, mask=None, probability=None):
        return "get a key"

    def contains(self, x):
        return isinstance(x, str)


MISSION, TWO = Mission(None, str), Box(-1, 1, (2,))


def test_a_dict_with_a_text_is_played_without_it(capsys):
    seen = Dict([("z", TWO), ("mission", MISSION), ("a", Dict(said=Text(5), at=TWO))])
    vector = make_envs(cfg := uneven(seen, TWO), 2)
    assert vector.single_observation_space.parts == {"z": slice(0, 2), "a": slice(2, 4)}
    assert "what is no number is left out" in capsys.readouterr().out
    vector.reset(seed=1)
    assert vector.step(vector.action_space.sample())[0].shape == (2, 4)
    zeros = np.zeros(2, np.float32)
    raw = {"z": zeros, "mission": "get a key", "a": {"said": "no", "at": zeros}}
    assert agent_for(ppo, cfg).predict(raw).shape == (2,)
    for nothing in (MISSION, Dict(a=Text(5)), Tuple((TWO, MISSION))):
        refused(agent_for, ppo, uneven(nothing, TWO), says="observation space")


MOST, HALF = np.finfo(np.float32).max, np.finfo(np.float16).max


@pytest.mark.parametrize("box,fits", [
    (TWO, True), (Box(-1e30, 1e30, (2,), np.float64), True), (Box(-MOST, MOST, (2,)), False),
    (Box(-1e300, 1e300, (2,), np.float64), False), (Box(-HALF, HALF, (2,), np.float16), False),
    (Box(0, np.inf, (2,)), False), (Box(0, 0, (2,)), False), (Box(0, 9, (1, 1), np.int64), False),
    (Box(np.float32([0, 2]), np.float32([1, 2])), True)])
def test_actions_are_rescaled_to_bounds_only_if_these_have_a_finite_range(box, fits):
    assert act_kind(box) == ("box" if fits else "other")
    if fits:
        for algo in (ppo, sac):
            agent = algo.Agent(TWO, box, algo.Config(hidden=(4,)))
            acts = agent.env_act(torch.tensor([[-1.0, 1.0], [-0.5, 0.5]]))
            assert np.isfinite(acts).all() and all(act in box for act in acts)


@pytest.mark.parametrize("shape,axis,clear", [
    ((8, 8, 19), 2, True), ((8, 8, 111), 2, True), ((9, 9, 17), 2, True), ((6, 7, 2), 2, True),
    ((5, 5, 9), 2, True), ((7, 6, 119), 2, True), ((84, 84, 4), 2, True), ((210, 160, 3), 2, True),
    ((120, 160, 12), 2, True), ((4, 84, 84), 0, True), ((3, 210, 160), 0, True),
    ((12, 120, 160), 0, True), ((19, 8, 8), 0, True), ((12, 8, 8), 0, False),
    ((10, 9, 14), 2, False), ((20, 10, 8), 2, False), ((6, 7, 7), 2, False), ((8, 8, 8), 2, False)])
def test_the_shape_tells_which_axis_has_the_channels(shape, axis, clear, capsys):
    assert image_layout(shape) == (axis, clear)
    assert not any(map(image_layout, [(4, 40, 3), (84, 3, 84), (4, 4, 16), (84, 84)]))
    space = Box(0, 255, shape, np.uint8)
    image = torch.randint(256, (2, *shape), dtype=torch.uint8)
    net = ImageEncoder(space)
    conv = next(layer for layer in net if isinstance(layer, torch.nn.Conv2d))
    assert conv.in_channels == shape[axis]
    seen = []
    conv.register_forward_pre_hook(lambda _, inputs: seen.append(*inputs))
    first = image if axis == 0 else image.permute(0, 3, 1, 2)
    assert net(image).shape[0] == 2 and torch.allclose(seen[0], first / 255)
    make_envs(uneven(space, TWO), 1)
    assert ("may be [H, W, C] or [C, H, W]" in capsys.readouterr().out) != clear


# ---- Goals

class Parking(GoalEnds):
    """As in highway-env: an episode ends by a crash, here at its step 5."""

    def step(self, act):
        obs, rew, *_ = super().step(act)
        return obs, rew, self.time == 5, False, {}


for kind in (Needs, Breaks, Vectors, Parking):
    gym.register(f"{kind.__name__}-v0", kind, disable_env_checker=True)


@pytest.mark.parametrize("name", ["compute_reward", "compute_terminated"])
def test_hindsight_refuses_an_environment_that_lacks_a_function(name, monkeypatch):
    monkeypatch.setattr(Parking, name, property())              # as if there were none
    says = f"which has no {name}.*wrapper" + ".*returns False" * (name == "compute_terminated")
    refused(sac_her.train, quick(sac_her, "Parking-v0"), says=says)


def test_a_crash_stays_an_end_whatever_the_goal():
    envs = make_envs(cfg := quick(sac_her, "Parking-v0", her_k=1000), 1)
    space = envs.single_observation_space
    agent = sac_her.Agent(space, envs.single_action_space, cfg)
    buffer = sac_her.HindsightBuffer(50, space, 1, torch.device("cpu"), 1, goal_env(envs), 1000)
    obs, _ = envs.reset(seed=1)
    for _ in range(25):
        obs = sac_her.interact(agent, envs, buffer, obs, agent.act(obs))
    assert 0.1 < buffer.sample(2000).terminated.mean() < 0.3    # one of five
