"""Dicts with images, and actions of several parts: what networks and environments make of them."""
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from algos import ppo, sac
from tests import registry
from tests.envs import Uneven
from tests.helpers import close, refused
from utils.envs import make_envs
from utils.nets import (
    ImageEncoder, ObsStats, categoricals, cnn_out, head_sizes, make_encoder)
from utils.play import Play, load_agent, main as play
from utils.spaces import FlatBox, Numbered, Parts, num_acts, obs_kind
from utils.stats import RunningStats

SMALL, LARGE = Box(0, 255, (3, 9, 8), np.uint8), Box(0, 255, (36, 40, 1), np.uint8)
TWO, BITS = Box(-9, 9, (2,)), Box(0, 255, (2,), np.uint8)
SEEN = Dict([("to", TWO), ("eyes", Tuple((SMALL, LARGE))), ("kind", Discrete(3)), ("bits", BITS)])
CHOICES = Dict([("x", Tuple((Discrete(3, start=-1), MultiBinary(2)))),
                ("go", MultiDiscrete([2, 4]))])            # not in the order of their names


def config(name, obs, act, **settings):
    gym.registry.pop("Anything-v0", None)
    gym.register("Anything-v0", Uneven, kwargs={"obs": obs, "act": act}, disable_env_checker=True)
    kinds = registry.ALGOS[name].takes.split()
    return registry.config(name, dict.fromkeys(kinds, "Anything-v0"), env_kwargs="{}", **settings)


def some(space=SEEN, count=5):
    """Return the FlatBox, and random observations: as the environment has them, and flat."""
    space.seed(0)
    flat, own = FlatBox(space), [space.sample() for _ in range(count)]
    return flat, own, torch.from_numpy(np.stack([flat.flatten(obs) for obs in own]))


# ---- Dicts with images

def test_each_image_of_a_dict_has_an_encoder_of_its_own():
    """As it has alone, also if it lies deeper; and all else stays, in its place."""
    flat, own, obs = some()
    assert obs_kind(flat) == "dict" and obs_kind(FlatBox(Dict(to=TWO, bits=BITS))) == "vector"
    net = make_encoder(flat)
    before, features, _ = obs.clone(), net(obs), net(obs[:1])
    assert torch.equal(obs, before)                             # also where it is not copied
    small, large = (torch.from_numpy(np.stack([seen["eyes"][i] for seen in own])) for i in (0, 1))
    alone = [ImageEncoder(SMALL), ImageEncoder(LARGE)]
    alone[0].load_state_dict(net[1][1].state_dict())
    alone[1].load_state_dict(net[2][1].state_dict())
    close(features, torch.cat([obs[:, :2], alone[0](small), alone[1](large), obs[:, -5:]], 1))
    assert head_sizes(flat, (7, 6)) == (features.shape[1], 7, 6) == (2 + 128 + 512 + 5, 7, 6)
    assert head_sizes(LARGE, (7,)) == cnn_out(LARGE) and head_sizes(TWO, (7,)) == (2, 7)
    assert make_encoder(flat, bf16=True)[1][1].bf16


def test_statistics_are_those_of_all_that_is_no_image():
    flat, _, obs = some(count=50)
    assert flat.vectors.tolist() == [0, 1, *range(len(obs[0]) - 5, len(obs[0]))]
    stats, plain, rest = ObsStats(flat), RunningStats((7,)), obs[:, flat.vectors]
    for each, rows in ((stats, obs), (plain, rest)):
        each.update(rows)
    assert torch.equal(stats.mean, plain.mean) and torch.equal(stats.var, plain.var)
    before, seen = obs.clone(), stats.normalize(obs.view(5, 10, -1)).flatten(0, 1)
    assert torch.equal(seen[:, flat.vectors], plain.normalize(rest))
    assert torch.equal(seen[:, 2:-5], obs[:, 2:-5]) and seen[:, 2:-5].max() == 255
    assert torch.equal(obs, before)                             # a rollout keeps raw ones


TAKE = [name for name in registry.ALGOS if "dict" in registry.module(name).Agent.takes["obs"]]


@pytest.mark.parametrize("name", TAKE)
def test_an_algorithm_with_an_encoder_takes_a_dict_with_images(name):
    """It trains, its policy loads without the environment, and its action depends on all parts."""
    cfg = config(name, SEEN, Discrete(3))
    registry.module(name).train(cfg)
    gym.registry.pop("Anything-v0")
    agent = load_agent("run")
    assert agent.predict(SEEN.sample()) in (0, 1, 2)
    _, _, obs = some()
    obs.requires_grad_()
    net = getattr(agent, "actor", None) or agent.critic
    if name == "ppo_lstm":
        features = agent.embed(obs)
    else:
        features = net(getattr(agent, "encoder", torch.nn.Identity())(obs))
    grad, = torch.autograd.grad(features.square().sum(), obs)
    assert (grad != 0).any(0)[[0, 20, 1000, -1]].all()


def test_an_algorithm_without_one_refuses_it_before_a_folder_exists():
    assert {"ppo", "a2c", "vpg", "trpo", "acktr", "acer", "dqn", "c51", "qr_dqn", "pqn"} <= {*TAKE}
    said = refused(sac.train, config("sac", Dict(eye=SMALL, to=TWO), TWO))
    assert said.startswith("--env has the observation space Dict('eye': Box(0, 255, (3, 9, 8), ")
    assert "this algorithm takes vectors (Box of one dimension, " in said


# ---- Actions of several parts

def test_a_distribution_of_parts_is_that_of_independent_choices():
    """By all 6 combinations of 2 and 3 values: their probabilities, entropy, and the best one."""
    logits = torch.randn(4, 5)
    pi = categoricals(logits, [2, 3])
    acts = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    first, second = logits[:, :2].softmax(1), logits[:, 2:].softmax(1)
    joint = (first[:, :, None] * second[:, None]).flatten(1)
    logp = torch.stack([pi.log_prob(act.expand(4, 2)) for act in acts], 1)
    close(logp.exp(), joint)
    close(pi.entropy(), -(joint * joint.log()).sum(1))
    assert torch.equal(pi.mode, acts[joint.argmax(1)])
    drawn = torch.stack([pi.sample() for _ in range(4000)])
    often = [(drawn == act).all(-1).float().mean(0) for act in acts]
    close(torch.stack(often, 1), joint, rtol=0, atol=0.04)


@pytest.mark.parametrize("own,first", [
    (CHOICES, {"x": (-1, np.int8([0, 0])), "go": np.array([0, 0])}),
    (MultiDiscrete([[2, 3]], start=[[5, 0]]), np.array([[5, 0]])),
    (MultiBinary([2, 2]), np.zeros((2, 2), np.int8)), (Tuple((Discrete(2), Discrete(3))), (0, 0)),
    (Discrete(3, start=-1), -1)])
def test_parts_and_numbers_stand_for_the_actions_of_the_environment(own, first):
    parts = Parts(own)
    every = np.stack(np.unravel_index(np.arange(num_acts(own)), parts.nvec), -1)
    acts = [parts.own_act(each) for each in every]
    assert all(act in own for act in acts) and len({repr(act) for act in acts}) == num_acts(own)
    assert repr([Numbered(own).own_act(k) for k in range(num_acts(own))]) == repr(acts)
    assert first in own and repr(gym.spaces.flatten(own, acts[0])) == repr(
        gym.spaces.flatten(own, first))


@pytest.mark.parametrize("name,own,size", [
    ("ppo", MultiDiscrete([50] * 12), 600), ("ppo", MultiBinary(100), 200), ("ppo", CHOICES, 13),
    ("ppo", Discrete(5, start=3), 5), ("ppo_popart", CHOICES, 13)])
def test_ppo_takes_them_without_a_number_for_every_combination(name, own, size):
    agent = registry.module(name).train(config(name, TWO, own, hidden=(4,)))
    assert agent.actor[-1].out_features == size
    assert load_agent("run").predict(TWO.sample()) in own
    assert len(play(Play("run", episodes=2))) == 2


def test_others_number_them_and_refuse_too_many():
    vector = make_envs(config("a2c", TWO, MultiDiscrete([2, 3])), 1)
    assert vector.single_action_space == Discrete(6)
    train = registry.module("a2c").train
    said = refused(train, config("a2c", TWO, MultiDiscrete([65, 64])))
    assert "4160 combinations are more than 4,096; docs/howto.md has a table" in said
    for own in (Dict(a=TWO, b=Discrete(2)), Tuple((Discrete(2), TWO))):
        said = refused(ppo.train, config("ppo", TWO, own))
        assert "4,096" not in said
