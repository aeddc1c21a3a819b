"""What the tests of on-policy files share: small agents, random rollouts, and an update."""
import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch.distributions import Categorical, Independent, Normal

from algos import a2c, acktr, gail, ppo, ppo_lstm, ppo_popart, ppo_rnd, trpo, vpg
from tests.helpers import BOX, VECTOR, name_of, noted, shaken, write_demos
from utils.nets import SquashedGaussian
from utils.optim import Adam, RMSProp

ONPOLICY = {"vpg": vpg, "a2c": a2c, "acktr": acktr, "trpo": trpo, "ppo": ppo,
            "ppo_popart": ppo_popart, "ppo_lstm": ppo_lstm, "ppo_rnd": ppo_rnd, "gail": gail}
IMAGES = Box(0, 255, (44, 36, 3), np.uint8)                     # height, width, channels
DISCRETE = Discrete(4)
SPACES = {"box": (VECTOR, BOX), "discrete": (VECTOR, DISCRETE), "images": (IMAGES, DISCRETE)}
every_kind = pytest.mark.parametrize("kind", SPACES)
# Only the settings that the algorithm's Config has are used.
SMALL = {"num_envs": 3, "rollout_steps": 24, "minibatch_size": 24, "epochs": 1, "v_steps": 3,
         "target_kl": 0.0,
         "minibatch_envs": 3, "lstm_size": 8, "hidden": (8, 8), "report_every": 1, "device": "cpu"}


def make_config(algo, **settings):
    """Return a small Config of a module. Settings that it lacks are ignored."""
    known = {field.name for field in dataclasses.fields(algo.Config)}
    if "demos" in known and "env" in settings:                  # it will be trained
        write_demos(**{k: v for k, v in settings.items() if k in ("env", "env_kwargs")})
        settings = {"demos": "demos.npz", "subsample": 1} | settings
    return algo.Config(**{k: v for k, v in (SMALL | settings).items() if k in known})


def make_agent(algo, kind="box", seed=0, **settings):
    """Return a small agent whose weights and statistics differ from the initial ones."""
    torch.manual_seed(seed)
    agent = shaken(algo.Agent(*SPACES[kind], make_config(algo, **settings)), 0.05)
    stats = agent.obs_stats
    stats.count.fill_(50), stats.mean.fill_(3.0), stats.var.fill_(4.0)
    if hasattr(agent, "reward_sum_stats"):
        stats = agent.reward_sum_stats
        stats.count.fill_(50), stats.mean.fill_(1.0), stats.var.fill_(9.0)
    else:                                                       # PopArt normalises targets instead
        agent.num_rollouts.fill_(5), agent.loc.fill_(2.0), agent.square.fill_(13.0)     # scale 3
    return agent


def make_rollout(algo, agent, seed=0):
    """Return a random rollout. next_obs is the next row's obs unless the episode ends."""
    torch.manual_seed(seed)
    steps, envs = agent.cfg.rollout_steps // agent.cfg.num_envs, agent.cfg.num_envs
    if getattr(getattr(agent, "obs_stats", None), "image", False):
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
    more = [0.5 * torch.randn(2, envs, agent.cfg.lstm_size)] if algo is ppo_lstm else []
    if name_of(algo) == "acer":
        with torch.no_grad():
            logits = agent.actor(agent.encoder(agent.normalize_obs(obs).flatten(0, 1)))
        more = [logits.log_softmax(-1).unflatten(0, (steps, envs))]
    if algo is ppo_rnd:                                         # new: where the agent acts next
        more = [torch.rand(steps, envs), successor[-1:].clone()]
        return ppo_rnd.IntrinsicRollout(obs, act, rew, next_obs, terminated, done, *more)
    return algo.Rollout(obs, act, rew, next_obs, terminated, done, *more)


def make_optimizers(algo, agent, make=None):
    """Return the optimizers that `update` takes: as `train` makes them, or of class `make`."""
    adam = make or Adam
    if algo is vpg:
        return [adam(agent.policy_parameters()), adam(agent.critic)]
    if algo is trpo:
        return [adam(agent.critic)]
    if name_of(algo) == "acktr":
        return [algo.KFAC(agent)]
    if name_of(algo) in ("a2c", "acer"):
        made = type("Made", (make, RMSProp), {}) if make else RMSProp   # as annotations require
        return [made(agent)]
    params = agent.policy_parameters() if algo in (gail, ppo_rnd) else agent
    return [make(params) if make else Adam(params, eps=1e-5)]


class Descent(Adam):
    """Gradient descent: with a learning rate of 1, parameters move by minus the gradient."""

    def step(self, lr):
        self.flat -= lr * self.grad


class Still(Adam):
    """Takes no step."""

    def step(self, lr):
        pass


def parameters(agent):
    """Return a copy of all parameters of a module as one vector."""
    return torch.cat([param.detach().flatten().clone() for param in agent.parameters()])


def learn(algo, agent, rollout, make=None, lr=1e-3):
    """Make a first update. Return the parameters after it, and the metrics."""
    return learn_with(algo, agent, make_optimizers(algo, agent, make), rollout, lr)


def learn_with(algo, agent, optimizers, rollout, lr=1e-3):
    """Make an update with these optimizers. Return the parameters after it, and the metrics."""
    rest = [rollout] if algo is trpo else [rollout, lr]
    metrics = algo.update(agent, *optimizers, *rest)
    return parameters(agent), metrics


def two_updates(algo, kind, changed=lambda agent, rollout: rollout, **settings):
    """Return a new agent after updates with two random rollouts, which `changed` may change."""
    torch.manual_seed(0)
    agent = algo.Agent(*SPACES[kind], make_config(algo, minibatch_size=8, epochs=2, **settings))
    optimizers = make_optimizers(algo, agent)
    for seed in range(2):
        rollout = changed(agent, make_rollout(algo, agent, seed))
        torch.manual_seed(seed)
        learn_with(algo, agent, optimizers, rollout)
        agent.update_stats(rollout)
    return agent


def values(agent, raw_obs):
    """Return V of raw observations: [T, N, ...] -> [T N]."""
    return agent.value(agent.encoder(agent.normalize_obs(raw_obs).flatten(0, 1)))


def targets(algo, agent, rollout):
    """Return adv and ret, [T N], from the agent's present values."""
    with torch.no_grad():
        val, next_val = (values(agent, obs).view_as(rollout.rew)
                         for obs in (rollout.obs, rollout.next_obs))
    rew = rollout.rew
    if hasattr(agent, "reward_sum_stats"):
        rew = (rew / agent.reward_sum_stats.var.sqrt()).clamp(-10, 10).float()
    cfg, ends = agent.cfg, (rollout.terminated, rollout.done)
    adv = algo.gae(rew, val, next_val, *ends, cfg.gamma, cfg.lam)
    return adv.flatten(), (adv + val).flatten()


def distribution(agent, raw_obs):
    """Return the policy at raw observations [B, ...] as one of PyTorch's distributions, [B].

    If the agent has a memory, each observation is the first one of an episode.
    """
    with torch.no_grad():
        obs = agent.normalize_obs(raw_obs)
        memory = hasattr(agent, "lstm")
        out = agent.actor(agent.lstm(agent.embed(obs)[None])[0][0] if memory else
                          agent.encoder(obs))
    if agent.discrete:
        return Categorical(logits=out)
    return SquashedGaussian(out, agent.log_std.detach())


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


def losses(patch, algo, name):
    """Note what a loss is given, and a copy of the agent as it then is. Return the list of it."""
    return noted(patch, algo, name, lambda agent, minibatch: SimpleNamespace(
        agent=copy.deepcopy(agent), **vars(minibatch)))


def spied(algo, name, agent, rollout, lr=1e-3):
    """Make an update. Return the calls of the loss of this name, new parameters and metrics."""
    with pytest.MonkeyPatch.context() as patch:
        return losses(patch, algo, name), *learn(algo, agent, rollout, lr=lr)


# ---- stable-baselines3

def pairs(agent, policy):
    """Return pairs of our parameters and those of a stable-baselines3 policy."""
    nets = policy.mlp_extractor
    theirs = [*nets.policy_net[::2], policy.action_net, *nets.value_net[::2], policy.value_net]
    layers = zip([*agent.actor[::2], *agent.critic[::2]], theirs, strict=True)
    found = [(getattr(our, name), getattr(their, name))
             for our, their in layers for name in ("weight", "bias")]
    return found + ([] if agent.discrete else [(agent.log_std, policy.log_std)])


def use_the_entropy_before_tanh(monkeypatch):
    """As stable-baselines3 does; all else of a loss can then be compared with its own."""
    monkeypatch.setattr(SquashedGaussian, "entropy", lambda self: Independent(
        Normal(self.loc, self.log_std.exp()), 1).entropy())
