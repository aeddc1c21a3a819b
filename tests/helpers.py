"""Helpers that tests of any kind share: numbers, modules, demonstrations, runs, processes.

Small agents and batches are in onpolicy.py and offpolicy.py. A helper that only one file needs is
in that file.
"""
import csv
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from stable_baselines3.common.logger import configure

from algos import ppo
from tests import envs as scripted
from tests.envs import HIGH, LOW
from utils.demos import Demos
from utils.envs import make_envs
from utils.errors import UsageError
from utils.run import checkpoint

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 600                          # seconds to wait for another process
LOG_2PI = math.log(2 * math.pi)
VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
BOX = Box(LOW, HIGH)
UNIT = Box(-1, 1, (2,), np.float32)


# ---- Numbers

def vec(*numbers):
    """Return a tensor [B] of numbers, or [B, k] of tuples."""
    return torch.tensor(numbers, dtype=torch.float32)


def column(*numbers):
    """Return numbers as [T, 1]: steps of one environment, or samples of one dimension."""
    return vec(*numbers)[:, None]


def close(actual, expected, rtol=1e-5, atol=1e-6):
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    torch.testing.assert_close(actual, expected.to(actual), rtol=rtol, atol=atol)


def same(a, b):
    """Return whether two tensors, or nested dicts and lists of tensors, are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


def gradients(function, *inputs):
    """Return a function's value and its gradient with respect to each input."""
    inputs = [value.clone().requires_grad_() for value in inputs]
    value = function(*inputs)
    return value.detach(), *torch.autograd.grad(value, inputs)


# ---- Modules and agents of any algorithm

def agent_for(algo, cfg):
    """Return a new agent for the environments of a Config."""
    envs = make_envs(cfg, 1)
    return algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)


def name_of(algo):
    return algo.__name__.rpartition(".")[2].removeprefix("bare_")


def bare(algo):
    """Load a module again without shape and type checks, for float64 and for wrong shapes."""
    name = f"bare_{name_of(algo)}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(algo.__file__))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def shaken(agent, size=0.1):
    """Return the agent after small random changes of all its parameters."""
    for param in agent.parameters():
        param.data += size * torch.randn_like(param)
    return agent


def copies(agent):
    """Return a copy of an agent's state dict."""
    return {name: param.detach().clone() for name, param in agent.state_dict().items()}


def moved(before, agent):
    """Return the names of tensors that changed since `before`, a result of `copies`."""
    return {name for name, now in agent.state_dict().items() if not torch.equal(before[name], now)}


def noted(patch, owner, name, see=lambda *args: args):
    """Let a function note what `see` makes of its arguments. Return the list of these notes."""
    notes, plain = [], getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: (
        notes.append(see(*args, *kwargs.values())), plain(*args, **kwargs))[1])
    return notes


def script(number, steps):
    """Return what Counter `number` does: rows of a rollout, and (step, env, ep_ret, ep_len)."""
    rows, ended, episode, time, ep_ret = [], [], 0, 0, 0.0
    for step in range(steps):
        time += 1
        rew = scripted.reward(number, episode, time)
        ep_ret += rew
        how = scripted.end(number, episode) if time == scripted.length(number, episode) else ""
        rows.append(((number, episode, time - 1), rew, (number, episode, time),
                     float(how in ("terminated", "both")), float(how != "")))
        if how:
            ended.append((step, number, ep_ret, time))
            episode, time, ep_ret = episode + 1, 0, 0.0
    return rows, ended


# ---- Demonstrations: bc, gail

def write_demos(file="demos.npz", env="CartPole-v1", env_kwargs="{}", lengths=(3, 5), expert=None,
                **changes):
    """Write demonstrations with random observations, and return their arrays.

    expert     function of an observation: what env.step gets (default: random actions)
    changes    arrays to replace, or None to leave one out
    """
    made = len(scripted.Counter.made)
    envs = make_envs(ppo.Config(env=env, env_kwargs=env_kwargs), 1)
    del scripted.Counter.made[made:]                            # so that they keep their numbers
    obs_space, act_space = envs.single_observation_space, envs.single_action_space
    rng, count = np.random.default_rng(0), sum(lengths)
    act_space.seed(0)
    images = obs_space.dtype == np.uint8
    draw = rng.integers(256, size=(count, *obs_space.shape)) if images else (
        rng.normal(size=(count, *obs_space.shape)))
    obs, ends = draw.astype(obs_space.dtype), np.cumsum(lengths) - 1
    act = [expert(each) if expert else act_space.sample() for each in obs]
    done = np.isin(np.arange(count), ends)
    cut = np.isin(np.arange(count), ends[1::2])                 # every other by a time limit
    arrays = {"obs": obs, "act": np.array(act, dtype=act_space.dtype),
              "rew": rng.normal(size=count), "terminated": done & ~cut, "truncated": cut,
              "ret": rng.normal(size=len(lengths)), "env": env, "env_kwargs": env_kwargs} | changes
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def make_demos(kind="box", count=40, seed=0):
    """Return pairs in which the action follows from the observation: one of BOX, or of 0, 1, 2."""
    torch.manual_seed(seed)
    obs = 3 + 2 * torch.randn(count, 3)
    if kind == "discrete":
        return Demos(obs, obs.argmax(1))
    unit = torch.tanh((obs[:, :2] - 3) / 2)
    return Demos(obs, torch.lerp(torch.tensor(LOW), torch.tensor(HIGH), (unit + 1) / 2))


# ---- stable-baselines3

class Nowhere(gym.Env):
    """An environment that only has spaces, for libraries that need an environment."""

    def __init__(self, obs_space, act_space):
        self.observation_space, self.action_space = obs_space, act_space


def give(model, pairs):
    """Give a model of stable-baselines3 our parameters, by (our, their) pairs, and no logger."""
    model.set_logger(configure(None, []))
    for our, their in pairs:
        their.data.copy_(our.data)


# ---- Runs

CLOCK = {"time", "steps_per_second"}


def quick(algo, env="tasks:Line-v0", **settings):
    """Return the Config of a short off-policy run with small networks, if it has `hidden`."""
    settings = {
        "env": env, "device": "cpu", "run_dir": "run", "hidden": (8,), "batch_size": 8,
        "buffer_size": 600, "start_steps": 40, "report_every": 60, "total_steps": 120, **settings}
    if not hasattr(algo.Config, "hidden"):
        del settings["hidden"]
    return algo.Config(**settings)


def rows(run_dir="run", name="progress.csv"):
    """Return the rows of a run's CSV file without wall-clock columns."""
    with open(Path(run_dir, name), newline="") as file:
        return [{key: cell for key, cell in row.items() if key not in CLOCK}
                for row in csv.DictReader(file)]


def steps(run_dir):
    return [int(row["step"]) for row in rows(run_dir)]


def saved(run_dir, rank=0):
    """Return the step of a run's only checkpoint, and what a rank saved in it except the time."""
    (step, folder), = checkpoint.resume_folders(run_dir).items()
    policy = checkpoint.load_file(Path(run_dir, "policy.pt"))
    payload = checkpoint.load_file(folder / f"rank{rank}.pt")
    assert policy["step"] == step and same(policy["agent"], payload["state"]["agent"])
    assert not list(Path(run_dir).glob("*.tmp"))
    return step, {key: value for key, value in payload.items() if key != "seconds"}


def assert_same_run(a, b):
    assert rows(a) == rows(b)
    assert rows(a, "episodes.csv") == rows(b, "episodes.csv")
    assert same(saved(a), saved(b))


def snapshot(folder="."):
    """Return path -> contents for every file below a folder, and None for every folder."""
    return {str(path): path.read_bytes() if path.is_file() else None
            for path in sorted(Path(folder).rglob("*"))}


def refused(function, *args, says="", **kwargs):
    """Return the message of a UsageError, its paths with /, in which `says` is found. Nothing must
    be written."""
    before = snapshot()
    with pytest.raises(UsageError) as caught:
        function(*args, **kwargs)
    said = str(caught.value).replace(os.sep, "/")
    assert snapshot() == before, "something was written"
    assert re.search(says, said), said
    assert len(said) < 600 and "\n" not in said, said
    return said


# ---- Other processes

def not_on_windows(reason):
    return pytest.mark.skipif(sys.platform == "win32", reason=reason)


def mpiexec():
    """Return the mpiexec beside this Python, or else the first one on the path."""
    if sys.platform == "win32":
        pytest.skip("there is no mpich for Windows")
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside if beside.exists() else shutil.which("mpiexec") or "mpiexec")


def command(*args):
    """Return the command python -m algos.ppo ARGS."""
    return [sys.executable, "-m", "algos.ppo", *map(str, args)]


def run(args, code=0, **kwargs):
    """Run a command. Fail with its output unless the exit status is `code`."""
    done = subprocess.run(list(map(str, args)), capture_output=True, text=True, timeout=PATIENCE,
                          **kwargs)
    assert done.returncode == code, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def wait_for(condition, process=None, every=0.02):
    """Wait until condition() holds. Fail if the process ends first, or after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(every)
    return found
