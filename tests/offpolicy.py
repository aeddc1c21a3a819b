"""What the tests of off-policy files share: small agents, random batches, and an update."""
import contextlib

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn

from tests import envs as scripted
from tests.helpers import BOX, VECTOR, close, name_of, quick, shaken
from utils.optim import Adam
from utils.spaces import FlatBox

# ---- Continuous actions: ddpg, td3, sac, sac_her

def make_agent(algo, seed=0, space=BOX, obs_space=VECTOR, **settings):
    """Return a small agent whose weights, targets included, differ from the initial ones."""
    torch.manual_seed(seed)
    if name_of(algo) == "sac_her":                              # goals without numbers
        none = Box(0, 1, (0,))
        obs_space = FlatBox(gym.spaces.Dict(achieved_goal=none, desired_goal=none,
                                            observation=obs_space))
    return shaken(algo.Agent(obs_space, space, algo.Config(**{"hidden": (16, 16), **settings})))


def make_batch(algo, size=32, seed=0, dtype=torch.float32):
    """Return random transitions, of which some terminate."""
    torch.manual_seed(seed)
    parts = {"obs": torch.randn(size, 3), "act": 2 * torch.rand(size, 2) - 1,
             "rew": torch.randn(size), "next_obs": torch.randn(size, 3),
             "terminated": (torch.rand(size) < 0.3).float()}
    return algo.Transitions(**{name: part.to(dtype) for name, part in parts.items()})


def make_optimizers(agent):
    """Return {name: optimizer} of what learns, as `train` makes them, in the order of `update`."""
    learns = {"critic": agent.critic, "actor": agent.actor}
    if hasattr(agent, "log_alpha"):
        learns["alpha"] = [agent.log_alpha]
    return {name: Adam(part) for name, part in learns.items()}


def update(algo, agent, optimizers, batch, count=0):
    """Call a file's `update`. TD3's also takes the number of updates so far."""
    delay = [count] if name_of(algo) == "td3" else []
    return algo.update(agent, *optimizers.values(), batch, *delay)


def flat(net):
    """Return a copy of a parameter, or of a network's weights, as one vector."""
    return torch.cat([param.detach().flatten() for param in weights(net)])


def weights(net):
    return [net] if isinstance(net, nn.Parameter) else list(net.parameters())


def through(head, x):
    """Return the outputs of linear layers, by their weights, with ReLU between them."""
    *hidden, last = (layer for layer in head if hasattr(layer, "weight"))
    for layer in hidden:
        x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    return x @ last.weight.T + last.bias


def gradient_in(net, loss_fn, *args):
    """Return a loss, its metrics, and its gradient in the weights of `net` as one vector."""
    loss, metrics, *_ = loss_fn(*args)
    grads = torch.autograd.grad(loss, weights(net))
    return loss.detach(), metrics, torch.cat([grad.flatten() for grad in grads])


def fits(net, expected, loss_fn, *args, rtol=1e-4):
    """Compare a loss and its gradient in the weights of `net`. Return its metrics."""
    grads = torch.autograd.grad(expected, weights(net))
    loss, metrics, grad = gradient_in(net, loss_fn, *args)
    close(loss, expected.detach(), rtol=rtol / 10)
    close(grad, torch.cat([each.flatten() for each in grads]), rtol=rtol, atol=1e-5)
    return metrics


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


# ---- Discrete actions: dqn, dqn_per, dqn_atari

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
    return shaken(algo.Agent(DQN_SPACES[dqn_kind(algo, kind)], Discrete(num_acts), cfg))


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


# ---- stable-baselines3

def as_it_is(obs, *args, **kwargs):
    """Replaces stable-baselines3's preprocessing, which converts observations to float32."""
    return obs


class TheirBuffer:
    """A replay buffer that gives stable-baselines3 prepared batches, one per call."""

    def __init__(self, batches):
        self.left = iter(batches)

    def sample(self, batch_size, env=None):
        batch = next(self.left)
        act = batch.act.view(len(batch.act), -1)                # also of numbers: [B] -> [B, 1]
        return ReplayBufferSamples(batch.obs, act, batch.next_obs,
                                   batch.terminated[:, None], batch.rew[:, None])
