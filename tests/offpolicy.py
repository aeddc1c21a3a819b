"""What the tests of the off-policy files share: small agents, batches, and what trains them."""
import csv
import importlib.util
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn

from tests.envs import HIGH, LOW
from utils import mpi

VECTOR = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = gym.spaces.Box(LOW, HIGH)
UNIT = gym.spaces.Box(-1, 1, (2,), np.float32)
NETS = {"ddpg": ("actor", "critic"), "td3": ("actor", "critic"), "sac": ("critic",)}  # with targets


def name_of(algo):
    return algo.__name__.rpartition(".")[2].removeprefix("bare_")


def bare(algo):
    """The module again, without the checks of shapes and types: it takes float64, and mistakes."""
    name = f"bare_{name_of(algo)}"
    if name not in sys.modules:
        path = Path(algo.__file__)
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def refuses_columns(function, count, *rest):
    """Of its first `count` arguments, numbers of 4 samples, none may be [4, 1] among others [4]."""
    for column in range(count):
        args = [torch.ones(4, 1) if at == column else torch.ones(4) for at in range(count)]
        with pytest.raises(AssertionError):
            function(*args, *rest)


def make_agent(algo, seed=0, space=BOX, obs_space=VECTOR, **settings):
    """A small agent whose weights, those of the targets too, are not the first ones."""
    torch.manual_seed(seed)
    agent = algo.Agent(obs_space, space, algo.Config(**{"hidden": (16, 16), **settings}))
    for param in agent.parameters():
        param.data += 0.1 * torch.randn_like(param)
    return agent


def make_batch(algo, size=32, seed=0, dtype=torch.float32):
    """Transitions of random numbers, of which some terminate."""
    torch.manual_seed(seed)
    parts = {"obs": torch.randn(size, 3), "act": 2 * torch.rand(size, 2) - 1,
             "rew": torch.randn(size), "next_obs": torch.randn(size, 3),
             "terminated": (torch.rand(size) < 0.3).float()}
    return algo.Transitions(**{name: part.to(dtype) for name, part in parts.items()})


def learner(agent):
    """(optimizers, targets, flat vectors by name), as `train` makes them."""
    flats = {name: mpi.flatten(net) for name, net in agent.named_children()}
    optimizers = {f"{name}_opt": mpi.Adam(flats[name]) for name in ("actor", "critic")}
    if hasattr(agent, "log_alpha"):
        optimizers["alpha_opt"] = mpi.Adam(agent.log_alpha)
    targets = [(flats[f"{name}_targ"], flats[name]) for name in ("actor", "critic")
               if f"{name}_targ" in flats]
    return optimizers, targets, flats


def gradients_of(algo):
    name = name_of(algo)
    return getattr(algo, f"{name}_critic_gradient"), getattr(algo, f"{name}_actor_gradient")


def critic_gradient(algo, agent, flat, batch, seed=1):
    """One call with all that the file's function takes -> what it returns."""
    torch.manual_seed(seed)
    noise = [] if name_of(algo) == "ddpg" else [torch.randn_like(batch.act)]
    return gradients_of(algo)[0](agent, flat, batch.obs, batch.act, batch.rew, batch.next_obs,
                                 batch.terminated, *noise)


def actor_gradient(algo, agent, flat, batch, seed=2):
    torch.manual_seed(seed)
    noise = [torch.randn_like(batch.act)] if name_of(algo) == "sac" else []
    return gradients_of(algo)[1](agent, flat, batch.obs, *noise)


def line(weights, bias):
    """A layer with one output and these weights."""
    layer = nn.Linear(len(weights), 1)
    layer.weight.data, layer.bias.data = torch.tensor([weights]), torch.tensor([bias])
    return layer


def linear_agent(algo, critics, critic_targs, **settings):
    """One observation, one action, all networks lines: weights (of s, of a, bias), by hand."""
    one = gym.spaces.Box(-1, 1, (1,), np.float32)
    agent = make_agent(algo, space=one, obs_space=one, hidden=(), **settings)
    for net, lines in ((agent.critic, critics), (agent.critic_targ, critic_targs)):
        nets = [net] if len(lines) == 1 else [net.q1, net.q2]
        for critic, (of_obs, of_act, bias) in zip(nets, lines, strict=True):
            critic.net[0] = line([of_obs, of_act], bias)
    agent.critic_targ.requires_grad_(False)
    return agent


def column(*numbers):
    return torch.tensor(numbers)[:, None]


def close(actual, expected, rtol=1e-5, atol=1e-6):
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    torch.testing.assert_close(actual, expected.to(actual), rtol=rtol, atol=atol)


def copies(agent):
    return {name: param.detach().clone() for name, param in agent.state_dict().items()}


def moved(before, agent):
    """Names of what is no longer as it was."""
    return {name for name, now in agent.state_dict().items() if not torch.equal(before[name], now)}


def quick(algo, env="tests.envs:Reach-v0", **settings):
    """A short run of small networks."""
    return algo.Config(**{
        "env": env, "device": "cpu", "run_dir": "run", "hidden": (8,), "batch": 8,
        "buffer_size": 600, "start_steps": 40, "report_every": 60, "total_steps": 120, **settings})


def progress(run_dir, name="progress"):
    """The rows of a run's csv file, the wall clock aside."""
    with open(f"{run_dir}/{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in ("time", "steps_per_second")} for row in rows]


# ---- stable-baselines3

class Nowhere(gym.Env):
    """Spaces alone, for a model that is given its batches."""

    observation_space, action_space = VECTOR, UNIT


def as_it_is(obs, *args, **kwargs):
    """In place of stable-baselines3's preprocessing, which makes float32 of observations."""
    return obs


class TheirBuffer:
    """Hands stable-baselines3 prepared batches, one a call."""

    def __init__(self, batches):
        self.left = iter(batches)

    def sample(self, batch_size, env=None):
        batch = next(self.left)
        return ReplayBufferSamples(batch.obs, batch.act, batch.next_obs,
                                   batch.terminated[:, None], batch.rew[:, None])
