"""Helpers that several test files share: numbers, small agents and batches, runs, processes.

The title of a section says which tests use it. A helper that only one file needs is in that file.
"""
import contextlib
import copy
import csv
import dataclasses
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from algos import a2c, acktr, gail, ppo, ppo_lstm, ppo_popart, trpo, vpg
from tests import envs as scripted
from tests.envs import HIGH, LOW
from utils import checkpoint, mpi
from utils.envs import FlatDict, make_envs

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


def refuses_columns(function, count, *rest):
    """The function must refuse each of its first `count` arguments as [4, 1] beside others [4]."""
    for at_fault in range(count):
        args = [torch.ones(4, 1) if at == at_fault else torch.ones(4) for at in range(count)]
        with pytest.raises(AssertionError):
            function(*args, *rest)


def copies(agent):
    """Return a copy of an agent's state dict."""
    return {name: param.detach().clone() for name, param in agent.state_dict().items()}


def moved(before, agent):
    """Return the names of tensors that changed since `before`, a result of `copies`."""
    return {name for name, now in agent.state_dict().items() if not torch.equal(before[name], now)}


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


def parameters(agent):
    """Return a copy of all parameters of a module as one vector."""
    return torch.cat([param.detach().flatten().clone() for param in agent.parameters()])


def descend(optimizer, loss, lr):
    """Take a step down the gradient of a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step(lr)


def tiny_agent(algo, mu=0.0, log_std=0.0, val=0.0, **settings):
    """Return an agent of one action dimension that sees nothing: its outputs are biases."""
    agent = algo.Agent(Box(-1, 1, (1,)), Box(-1, 1, (1,)), algo.Config(**settings))
    for param in agent.parameters():
        param.data.zero_()
    agent.actor[-1].bias.data.fill_(mu), agent.critic[-1].bias.data.fill_(val)
    agent.log_std.data.fill_(log_std)
    return agent


def rows_of(call, agent, rollout):
    """Return which rows of the rollout, [T N], stand in a minibatch."""
    rows = agent.normalize_obs(rollout.obs).flatten(0, 1).flatten(1)
    equal = (call.obs.flatten(1)[:, None] == rows).all(-1)
    assert (equal.sum(1) == 1).all()
    return equal.int().argmax(1)


class Descent(mpi.Adam):
    """Gradient descent: with a learning rate of 1, parameters move by minus the gradient."""

    def move(self, lr):
        self.flat -= lr * self.grad


# ---- Demonstrations: bc, gail

def write_demos(file="demos.npz", env="CartPole-v1", env_kwargs="{}", lengths=(3, 5), expert=None,
                without="", **changes):
    """Write demonstrations with random observations, and return their arrays.

    expert     function of an observation: what env.step gets (default: random actions)
    without    the name of an array to leave out
    changes    arrays to replace
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
    np.savez(file, **{name: array for name, array in arrays.items() if name != without})
    return arrays


# ---- On-policy: vpg, a2c, acktr, ppo, ppo_popart, ppo_lstm, gail, trpo

ONPOLICY = {"vpg": vpg, "a2c": a2c, "acktr": acktr, "trpo": trpo, "ppo": ppo,
            "ppo_popart": ppo_popart, "ppo_lstm": ppo_lstm, "gail": gail}
IMAGES = Box(0, 255, (44, 36, 3), np.uint8)                     # height, width, channels
DISCRETE = Discrete(4)
SPACES = {"box": (VECTOR, BOX), "discrete": (VECTOR, DISCRETE), "images": (IMAGES, DISCRETE)}
# Only the settings that the algorithm's Config has are used.
SMALL = {"num_envs": 3, "rollout_steps": 24, "minibatch_size": 24, "epochs": 1, "v_steps": 3,
         "minibatch_envs": 3, "lstm_size": 8, "hidden": (8, 8), "report_every": 1, "device": "cpu"}


def onpolicy_config(algo, **settings):
    """Return a small Config of a module. Settings that it lacks are ignored."""
    known = {field.name for field in dataclasses.fields(algo.Config)}
    if "demos" in known and "env" in settings:                  # it will be trained
        write_demos(**{k: v for k, v in settings.items() if k in ("env", "env_kwargs")})
        settings = {"demos": "demos.npz", "subsample": 1} | settings
    return algo.Config(**{k: v for k, v in (SMALL | settings).items() if k in known})


def onpolicy_agent(algo, kind="box", seed=0, **settings):
    """Return a small agent whose weights and statistics differ from the initial ones."""
    torch.manual_seed(seed)
    agent = algo.Agent(*SPACES[kind], onpolicy_config(algo, **settings))
    for param in agent.parameters():
        param.data += 0.05 * torch.randn_like(param)
    stats = agent.obs_stats
    stats.count.fill_(50), stats.mean.fill_(3.0), stats.var.fill_(4.0)
    if scales_rewards(algo):
        stats = agent.reward_sum_stats
        stats.count.fill_(50), stats.mean.fill_(1.0), stats.var.fill_(9.0)
    else:
        agent.num_rollouts.fill_(5), agent.loc.fill_(2.0), agent.square.fill_(13.0)     # scale 3
    return agent


def scales_rewards(algo):
    """Return whether a file divides rewards by a deviation. PopArt normalises targets instead."""
    return algo is not ppo_popart


def make_rollout(algo, agent, seed=0):
    """Return a random rollout. next_obs is the next row's obs unless the episode ends."""
    torch.manual_seed(seed)
    steps, envs = agent.cfg.rollout_steps // agent.cfg.num_envs, agent.cfg.num_envs
    if agent.images:
        rows = torch.randint(256, (2 * steps + 1, envs, *IMAGES.shape), dtype=torch.uint8)
    else:
        rows = 3 + 2 * torch.randn(2 * steps + 1, envs, *VECTOR.shape)
    obs, successor, final_obs = rows[:steps], rows[1:steps + 1], rows[steps + 1:]
    act = agent.act(obs.flatten(0, 1)).unflatten(0, (steps, envs))
    terminated, truncated = (torch.rand(2, steps, envs) < 0.15).float()
    done = torch.maximum(terminated, truncated)
    ended = done.bool().view(steps, envs, *[1] * (obs.ndim - 2))
    next_obs = torch.where(ended, final_obs, successor)
    rew = 1 + 5 * torch.randn(steps, envs)
    memory = random_memory(algo, envs, agent.cfg)
    return algo.Rollout(obs, act, rew, next_obs, terminated, done, **memory)


def random_memory(algo, envs, cfg):
    """Return what else a rollout of an algorithm with a memory holds."""
    return {"memory": 0.5 * torch.randn(2, envs, cfg.lstm_size)} if algo is ppo_lstm else {}


def onpolicy_optimizers(algo, agent, make=None):
    """Return the optimizers that `update` takes: as `train` makes them, or of class `make`."""
    adam = make or mpi.Adam
    if algo is vpg:
        return [adam(agent.policy_parameters()), adam(agent.critic)]
    if algo is trpo:
        return [adam(agent.critic)]
    if name_of(algo) == "acktr":
        return [algo.KFAC(agent)]
    if algo is a2c:
        return [(fitting(make) if make else mpi.RMSProp)(agent)]
    params = agent.policy_parameters() if algo is gail else agent
    return [make(params) if make else mpi.Adam(params, eps=1e-5)]


def fitting(optimizer):
    """Return the class as a subclass of RMSProp, which the annotations of a2c require."""
    return type(optimizer.__name__, (optimizer, mpi.RMSProp), {})


def learn(algo, agent, rollout, make=None, lr=1e-3):
    """Make a first update. Return the parameters after it, and the metrics."""
    return learn_with(algo, agent, onpolicy_optimizers(algo, agent, make), rollout, lr)


def learn_with(algo, agent, optimizers, rollout, lr=1e-3):
    """Make an update with these optimizers. Return the parameters after it, and the metrics."""
    rest = [rollout] if algo is trpo else [rollout, lr]
    metrics = algo.update(agent, *optimizers, *rest)
    return parameters(agent), metrics


def steps_alone(algo, rew, terminated, done):
    """Return a rollout with these tensors [T, N], and zeros elsewhere."""
    nothing = torch.zeros(*rew.shape, 1)
    memory = random_memory(algo, rew.shape[1], onpolicy_config(algo))
    return algo.Rollout(nothing, nothing, rew, nothing, terminated, done, **memory)


def gae(algo, rew, val, *rest):
    """Call `gae` with tensors [T, N]; return A and R."""
    adv = algo.gae(rew, val, *rest)
    return adv, adv + val


def reward_sums(algo, rew, done, last, gamma):
    """Return G of every step, and the G that `update_stats` carries over to the next rollout."""
    seen = []
    stats = SimpleNamespace(update=seen.append)
    agent = SimpleNamespace(cfg=SimpleNamespace(gamma=gamma), images=True, reward_sum=last,
                            reward_sum_stats=stats)
    algo.Agent.update_stats(agent, steps_alone(algo, rew, torch.zeros_like(rew), done))
    return seen[0].view_as(rew), agent.reward_sum


def values(agent, raw_obs):
    """Return V of raw observations: [T, N, ...] -> [T N]."""
    return agent.value(agent.encoder(agent.normalize_obs(raw_obs).flatten(0, 1)))


def outputs(agent, obs):
    """Return what the actor says and the values, for prepared observations [B, ...]."""
    features = agent.encoder(obs)
    return agent.actor(features), agent.value(features)


def targets(algo, agent, rollout):
    """Return adv and ret, [T N], from the agent's present values."""
    with torch.no_grad():
        val, next_val = (values(agent, obs).view_as(rollout.rew)
                         for obs in (rollout.obs, rollout.next_obs))
    rew = rollout.rew
    if scales_rewards(algo):
        rew = (rew / agent.reward_sum_stats.var.sqrt()).clamp(-10, 10).float()
    cfg, ends = agent.cfg, (rollout.terminated, rollout.done)
    return [x.flatten() for x in gae(algo, rew, val, next_val, *ends, cfg.gamma, cfg.lam)]


def distribution(agent, raw_obs):
    """Return the policy at raw observations [B, ...] as one of PyTorch's distributions, [B].

    If the agent has a memory, each observation is the first one of an episode.
    """
    with torch.no_grad():
        features = agent.encoder(agent.normalize_obs(raw_obs))
        if hasattr(agent, "lstm"):
            features = agent.lstm(features[None])[0][0]
        out = agent.actor(features)
    if agent.discrete:
        return Categorical(logits=out)
    return Independent(Normal(out, agent.log_std.detach().exp()), 1)


# ---- Off-policy with continuous actions: ddpg, td3, sac, sac_her

NETS = {"ddpg": ("actor", "critic"), "td3": ("actor", "critic"), "sac": ("critic",)}  # with targets


def offpolicy_agent(algo, seed=0, space=BOX, obs_space=VECTOR, **settings):
    """Return a small agent whose weights, targets included, differ from the initial ones."""
    torch.manual_seed(seed)
    if name_of(algo) == "sac_her":
        obs_space = without_goals(obs_space)
    agent = algo.Agent(obs_space, space, algo.Config(**{"hidden": (16, 16), **settings}))
    for param in agent.parameters():
        param.data += 0.1 * torch.randn_like(param)
    return agent


def without_goals(box):
    """Return the space of a goal environment whose goals have no numbers, so only `box` is seen."""
    none = Box(0, 1, (0,))
    space = gym.spaces.Dict(achieved_goal=none, desired_goal=none, observation=box)
    return FlatDict(space, box.low, box.high)


def offpolicy_batch(algo, size=32, seed=0, dtype=torch.float32):
    """Return random transitions, of which some terminate."""
    torch.manual_seed(seed)
    parts = {"obs": torch.randn(size, 3), "act": 2 * torch.rand(size, 2) - 1,
             "rew": torch.randn(size), "next_obs": torch.randn(size, 3),
             "terminated": (torch.rand(size) < 0.3).float()}
    return algo.Transitions(**{name: part.to(dtype) for name, part in parts.items()})


def offpolicy_optimizers(agent):
    """Return {name: optimizer} of what learns, as `train` makes them, in the order of `update`."""
    learns = {"critic": agent.critic, "actor": agent.actor}
    if hasattr(agent, "log_alpha"):
        learns["alpha"] = agent.log_alpha
    return {name: mpi.Adam(part) for name, part in learns.items()}


def offpolicy_update(algo, agent, optimizers, batch, count=0):
    """Call a file's `update`. TD3's also takes the number of updates so far."""
    delay = [count] if name_of(algo) == "td3" else []
    return algo.update(agent, *optimizers.values(), batch, *delay)


def flat(net):
    """Return a copy of a parameter, or of a network's weights, as one vector."""
    return torch.cat([param.detach().flatten() for param in weights(net)])


def weights(net):
    return [net] if isinstance(net, nn.Parameter) else list(net.parameters())


def gradient_in(net, loss_fn, *args):
    """Return a loss, its metrics, and its gradient in the weights of `net` as one vector."""
    loss, metrics, *_ = loss_fn(*args)
    grads = torch.autograd.grad(loss, weights(net))
    return loss.detach(), metrics, torch.cat([grad.flatten() for grad in grads])


@contextlib.contextmanager
def noise_is(*draws):
    """Make torch.randn_like return these tensors, one per call. All of them must be used."""
    left, plain = list(draws), torch.randn_like

    def given(like):
        assert left, "more noise is drawn than expected"
        assert left[0].shape == like.shape and left[0].dtype == like.dtype
        return left.pop(0)

    torch.randn_like = given
    try:
        yield
    finally:
        torch.randn_like = plain
    assert not left, "less noise is drawn than expected"


def line(weights, bias):
    """Return a linear layer with one output and these weights."""
    layer = nn.Linear(len(weights), 1)
    layer.weight.data, layer.bias.data = torch.tensor([weights]), torch.tensor([bias])
    return layer


def linear_agent(algo, critics, critic_targs, **settings):
    """Return an agent whose critics are linear, with given (weight of s, weight of a, bias)."""
    one = Box(-1, 1, (1,), np.float32)
    agent = offpolicy_agent(algo, space=one, obs_space=one, hidden=(), **settings)
    for net, lines in ((agent.critic, critics), (agent.critic_targ, critic_targs)):
        nets = [net] if len(lines) == 1 else [net.q1, net.q2]
        for critic, (of_obs, of_act, bias) in zip(nets, lines, strict=True):
            critic.net[0] = line([of_obs, of_act], bias)
    agent.critic_targ.requires_grad_(False)
    return agent


# ---- Off-policy with discrete actions: dqn, dqn_per, dqn_atari

DQN_SPACES = {"vector": VECTOR, "film": Box(0, 255, (4, 36, 40), np.uint8),
              "image": Box(0, 255, scripted.IMAGE, np.uint8)}


def dqn_kind(algo, kind=""):
    """Return `kind`, or by default what the file takes: vectors, or stacks of frames (film)."""
    return kind or ("film" if name_of(algo) == "dqn_atari" else "vector")


def dqn_quick(algo, **settings):
    """Return the Config of a short run, with images for dqn_atari, which takes nothing else."""
    settings = {"env": "CartPole-v1", "update_every": 2} | settings
    if name_of(algo) == "dqn_atari" and settings["env"] == "CartPole-v1":
        settings |= {"env": "tests.envs:Counter-v0",
                     "env_kwargs": '{"obs": "image", "act": "discrete"}'}
    return quick(algo, **settings)


def dqn_agent(algo, kind="", num_acts=4, seed=0, **settings):
    """Return a small agent whose weights, the target's included, differ from the initial ones."""
    torch.manual_seed(seed)
    cfg = quick(algo, **{"hidden": (16, 16)} | settings)
    agent = algo.Agent(DQN_SPACES[dqn_kind(algo, kind)], Discrete(num_acts), cfg)
    for param in agent.parameters():
        param.data += 0.1 * torch.randn_like(param)
    return agent


def dqn_batch(algo, kind="", size=32, seed=0, dtype=torch.float32):
    """Return random transitions, of which some terminate. Those of dqn_per have random weights."""
    torch.manual_seed(seed)
    kind = dqn_kind(algo, kind)
    shape = (size, *DQN_SPACES[kind].shape)
    obs, next_obs = (torch.randn(shape, dtype=dtype) if kind == "vector"
                     else torch.randint(256, shape, dtype=torch.uint8) for _ in range(2))
    rew, ends = torch.randn(size, dtype=dtype), torch.rand(size) < 0.3
    parts = obs, torch.randint(4, (size,)), rew, next_obs, ends.to(dtype)
    if name_of(algo) == "dqn_per":
        parts += np.arange(size), torch.rand(size)
    return algo.Transitions(*parts)


def dqn_loss(algo):
    """Return the loss function of the file."""
    return algo.per_loss if name_of(algo) == "dqn_per" else algo.dqn_loss


# ---- stable-baselines3

class Nowhere(gym.Env):
    """An environment that only has spaces, for libraries that need an environment."""

    def __init__(self, obs_space, act_space):
        self.observation_space, self.action_space = obs_space, act_space


def onpolicy_pairs(agent, policy):
    """Return pairs of our parameters and those of a stable-baselines3 policy."""
    nets = policy.mlp_extractor
    theirs = [*nets.policy_net[::2], policy.action_net, *nets.value_net[::2], policy.value_net]
    layers = zip([*agent.actor[::2], *agent.critic[::2]], theirs, strict=True)
    found = [(getattr(our, name), getattr(their, name))
             for our, their in layers for name in ("weight", "bias")]
    return found + ([] if agent.discrete else [(agent.log_std, policy.log_std)])


def as_it_is(obs, *args, **kwargs):
    """Replaces stable-baselines3's preprocessing, which converts observations to float32."""
    return obs


class TheirBuffer:
    """A replay buffer that gives stable-baselines3 prepared batches, one per call."""

    def __init__(self, batches):
        self.left = iter(batches)

    def sample(self, batch_size, env=None):
        batch = next(self.left)
        return ReplayBufferSamples(batch.obs, batch.act, batch.next_obs,
                                   batch.terminated[:, None], batch.rew[:, None])


# ---- Runs

CLOCK = {"time", "steps_per_second"}


def quick(algo, env="tests.envs:Reach-v0", **settings):
    """Return the Config of a short off-policy run with small networks, if it has `hidden`."""
    settings = {
        "env": env, "device": "cpu", "run_dir": "run", "hidden": (8,), "batch_size": 8,
        "buffer_size": 600, "start_steps": 40, "report_every": 60, "total_steps": 120, **settings}
    if not hasattr(algo.Config, "hidden"):
        del settings["hidden"]
    return algo.Config(**settings)


def rows(run_dir, name="progress.csv"):
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


def refused(function, *args):
    """Return the message of a UsageError. Nothing must have been written."""
    before = snapshot()
    with pytest.raises(mpi.UsageError) as caught:
        function(*args)
    assert snapshot() == before, "something was written"
    return str(caught.value)


# ---- Other processes

def mpiexec():
    """Return the mpiexec beside this Python, or else the first one on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside if beside.exists() else shutil.which("mpiexec") or "mpiexec")


def command(*args):
    """Return the command python -m algos.ppo ARGS."""
    return [sys.executable, "-m", "algos.ppo", *map(str, args)]


def mpirun(*args):
    """Return the same command for two processes."""
    return [mpiexec(), "-n", "2", *command(*args)]


def run(args, code=0, **kwargs):
    """Run a command. Fail with its output unless the exit status is `code`."""
    done = subprocess.run(list(map(str, args)), capture_output=True, text=True, timeout=PATIENCE,
                          **kwargs)
    assert done.returncode == code, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def two_ranks(file, *args):
    """Run a test file as a program in two processes."""
    env = mpi.clean_env() | {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
    run([mpiexec(), "-n", "2", sys.executable, file, *args], env=env)


def wait_for(condition, process=None, every=0.02):
    """Wait until condition() holds. Fail if the process ends first, or after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(every)
    return found


def wait_for_rows(process, run_dir, count):
    """Wait until progress.csv has at least `count` rows."""
    path = Path(run_dir, "progress.csv")
    wait_for(lambda: path.exists() and path.read_text().count("\n") > count, process)


def end(process):
    """Kill a process and its group if it is still running."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


class Spy:
    """A loss that keeps what it was given, and a copy of the agent as it then was."""

    def __init__(self, loss):
        self.loss = loss
        self.calls = []

    def __call__(self, agent, minibatch):
        self.calls.append(SimpleNamespace(agent=copy.deepcopy(agent), **vars(minibatch)))
        return self.loss(agent, minibatch)
