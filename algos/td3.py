"""Twin Delayed DDPG (TD3).  Fujimoto, van Hoof & Meger 2018, arXiv:1802.09477.

The problem. DDPG trains a critic Q(s, a), the discounted return after action a in state
s, and an actor pi(s) to output the action with the highest Q. The critic makes errors,
and the actor finds the actions whose error is positive. So Q is too high at the actor's
action, on average. The critic's target r + gamma Q(s', pi(s')) contains this Q, and so
the error spreads to earlier states.

The idea. Three changes keep the error small:

    two critics   the target uses the lower of two estimates         critic_loss
    smoothing     noise on the target's action blurs narrow peaks    add_clipped_noise
    delay         every `policy_delay`-th update moves the actor     update

Targets come from target networks (`_targ`), which follow the others slowly, so that no
critic chases its own changes. One step of `train`:

    interact      take a = pi(s) + noise (see `act`); store (s, a, r, s', terminated)
    update        one Adam step on critic_loss; if due, one on actor_loss and the target
                  networks follow

Departures from the paper. As in the authors' later code (github.com/sfujim/TD3): layers
of 256 units (paper: 400, 300), batches of 256 (100), no updates during the random
actions at the start. Ours: start_steps; Q takes actions in [-1, 1], the unit of noise.

Healthy values. With --eval-every, `eval_q`, which is Q_1, ends near `eval_discounted`,
the return that then followed. With DDPG, it often ends above.

Run   python -m algos.td3 --env Pendulum-v1 --total-steps 1e4
Diff  diff algos/ddpg.py algos/td3.py    (next: algos/sac.py)
"""
from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

# mpi        several processes may share the environments and each batch. Config has
#            totals; mpi.share(total) is the part of this process
# make_envs  when an episode ends, the same `step` starts a new one and returns its
#            first obs; infos["final_obs"] has the last obs of the old one
from utils import mpi
from utils.buffers import SavedRows, check_memory
from utils.envs import make_envs
from utils.nets import mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Natural, Positive, Run, RunConfig, main

# Shapes, which the tests check at every call.
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Observations = Float32[Tensor, "B obs_dim"]
Actions = Float32[Tensor, "B act_dim"]  # in [-1, 1]
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    total_steps: float = 1e6  # environment steps
    num_envs: int = 1  # N, parallel environments
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    start_steps: Natural | None = None  # random at first; None: total_steps/10, max 1e4
    update_every: int = 1  # environment steps per update
    batch_size: int = 256  # B, samples per update (usually 64 to 512)
    lr: Positive = 1e-3  # Adam's learning rate (1e-4 to 1e-3)
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    tau: Fraction = 0.005  # Polyak coefficient of the target networks (0.001 to 0.02)
    act_noise: float = 0.1  # std of the noise for exploration (0.05 to 0.3)
    target_noise: float = 0.2  # std of the noise on the target's action (0.1 to 0.3)
    noise_clip: float = 0.5  # bound on the noise on the target's action (0.3 to 0.5)
    policy_delay: int = 2  # critic updates per actor update (1 to 3)
    hidden: tuple[int, ...] = (256, 256)  # hidden layer widths


# ===================================== data types =====================================
@dataclass(frozen=True)
class Transitions:
    """B random samples of the buffer. Action a in state s gave r and led to s'."""

    obs: Observations  # s
    act: Actions  # a, as it was taken
    rew: PerSample  # r
    next_obs: Observations  # s', never of the next episode
    terminated: PerSample  # 1 if s' is terminal; 0 otherwise, also at a time limit


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        critic_opt = Adam(agent.critic)
        actor_opt = Adam(agent.actor)
        buffer = ReplayBuffer(
            mpi.share(cfg.buffer_size), agent.obs_dim, agent.act_dim, run.device)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, critic=critic_opt, actor=actor_opt, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            if step < cfg.start_steps:  # a number; RunConfig replaces None
                act = agent.random_act(envs.num_envs)
            else:
                act = agent.act(obs)
            obs = interact(agent, envs, buffer, obs, act)
            updates_before = num_updates(step, cfg)
            step += cfg.num_envs  # the environments of all processes
            # By default one update per step, once the random actions are over.
            for count in range(updates_before, num_updates(step, cfg)):
                batch = buffer.sample(mpi.share(cfg.batch_size))
                metrics = update(agent, critic_opt, actor_opt, batch, count)
                run.store(**metrics)  # the next row of the log averages them
            run.report(step, envs)  # if due: log, evaluate, save
    return agent


def num_updates(step: int, cfg: Config) -> int:
    """Total number of updates due once `step` environment steps have been taken."""
    return max(0, step - cfg.start_steps) // cfg.update_every


def interact(agent: Agent, envs: gym.vector.VectorEnv, buffer: ReplayBuffer,
             obs: np.ndarray, act: Tensor) -> np.ndarray:
    """Step all environments, store the transitions, return the obs to act on."""
    new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    next_obs = new_obs.copy()
    for i in np.flatnonzero(terminated | truncated):  # new_obs[i] is the next episode's
        next_obs[i] = infos["final_obs"][i]
    buffer.add(obs=obs, act=act.cpu().numpy(), rew=rew, next_obs=next_obs,
               terminated=terminated)
    return new_obs


def update(agent: Agent, critic_opt: Adam, actor_opt: Adam, batch: Transitions,
           count: int) -> dict:
    """Update the critic, the actor and the target networks. Return metrics.

    `count` updates came before this one. Only every `policy_delay`-th moves actor and
    targets, so the critics have time to reduce their errors before the actor follows.
    """
    cfg = agent.cfg
    loss, metrics = critic_loss(agent, batch)
    critic_opt.zero_grad()
    loss.backward()
    critic_opt.average_grads()  # over processes
    metrics["critic_grad_norm"] = critic_opt.grad_norm()
    critic_opt.step(cfg.lr)
    if (count + 1) % cfg.policy_delay > 0:
        return metrics

    loss, actor_metrics = actor_loss(agent, batch)
    actor_opt.zero_grad()
    # The gradient goes through Q, but only the actor's weights receive it.
    loss.backward(inputs=list(agent.actor.parameters()))
    actor_opt.average_grads()
    metrics |= actor_metrics | {"actor_grad_norm": actor_opt.grad_norm()}
    actor_opt.step(cfg.lr)
    polyak_update(agent.actor_targ, agent.actor, cfg.tau)
    polyak_update(agent.critic_targ, agent.critic, cfg.tau)
    return metrics


# ======================================= losses =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """A critic fits y, the reward plus the discounted value of following pi from s'.

        a'    = clip(pi_targ(s') + clipped noise, -1, 1)
        V(s') = min(Q_1_targ(s', a'), Q_2_targ(s', a'))
        y     = r + gamma (1 - terminated) V(s'), a constant
        L     = mean (Q_1(s, a) - y)^2 + mean (Q_2(s, a) - y)^2

    Only terminal states are worth 0: after a time limit, V(s') replaces what was cut.
    r and s' depend on s and a, not on the policy that chose a, so transitions of old
    policies will do. The policy to rate is pi, so a' is not from the buffer.

    An actor seeks the actions that a critic overrates, and their Q enters the targets
    of other states. Two critics start from different weights, so their errors differ,
    and their minimum is too high only where both are. It is too low more often, but
    an underrated action attracts no actor, and so it enters fewer targets.
    """
    cfg = agent.cfg
    with torch.no_grad():  # Q moves towards y, not y towards Q
        next_act = agent.actor_targ(batch.next_obs)
        next_act = add_clipped_noise(next_act, cfg.target_noise, cfg.noise_clip)
        next_q1, next_q2 = agent.critic_targ(batch.next_obs, next_act)
        next_val = torch.min(next_q1, next_q2)
        target = batch.rew + cfg.gamma * (1 - batch.terminated) * next_val
    q1, q2 = agent.critic(batch.obs, batch.act)
    assert q1.shape == q2.shape == target.shape  # [B] minus [B, 1] would be [B, B]
    loss = (q1 - target).square().mean() + (q2 - target).square().mean()
    return loss, {"critic_loss": loss.detach(), "q1": q1.detach(), "q2": q2.detach()}


def add_clipped_noise(act: Actions, sigma: float, limit: float) -> Actions:
    """clip(a + clip(sigma eps, -limit, limit), -1, 1), where eps ~ N(0, I).

    Target policy smoothing. Similar actions should have similar values, so narrow peaks
    of Q are probably errors. Noise averages them out; clipping keeps it local.
    """
    noise = (sigma * torch.randn_like(act)).clamp(-limit, limit)
    return (act + noise).clamp(-1, 1)


def actor_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """L(pi) = -mean Q(s, pi(s)).

    By the chain rule, its gradient in the actor's weights w is -mean dQ/da dpi/dw: a
    step moves each action pi(s) to where Q is higher. This is the deterministic policy
    gradient (Silver et al. 2014), averaged over states of the buffer.

    If the critic moved too, it could lower the loss by overrating the actor's actions.
    Q is Q_1 here. Where it is too high, Q_2 still corrects the target.
    """
    act = agent.actor(batch.obs)
    loss = -agent.critic.q1(torch.cat([batch.obs, act], dim=-1)).mean()
    return loss, {"actor_loss": loss.detach()}


@torch.no_grad()
def polyak_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """w_targ <- w_targ + tau (w - w_targ), in place. They lag by about 1/tau moves."""
    for w_targ, w in zip(target.parameters(), source.parameters()):
        w_targ.lerp_(w, tau)


# ======================================= agent ========================================
class TwinCritic(nn.Module):
    """Two critics with different initial weights."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: tuple[int, ...]):
        super().__init__()
        self.q1 = mlp([obs_dim + act_dim, *hidden, 1], nn.ReLU)
        self.q2 = mlp([obs_dim + act_dim, *hidden, 1], nn.ReLU)

    def forward(self, obs: Observations, act: Actions) -> tuple[PerSample, PerSample]:
        x = torch.cat([obs, act], dim=-1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)  # [B, 1] -> [B]


class Agent(Policy):  # which adds predict(obs)
    """Actor, critic and a target network for each."""

    takes = {"obs": "vector", "act": "box"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.obs_dim = obs_space.shape[0]
        self.act_dim = math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        sizes = [self.obs_dim, *cfg.hidden, self.act_dim]
        self.actor = mlp(sizes, nn.ReLU).append(nn.Tanh())
        self.critic = TwinCritic(self.obs_dim, self.act_dim, cfg.hidden)
        self.actor_targ = copy.deepcopy(self.actor).requires_grad_(False)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """a = clip(pi(s) + act_noise eps, -1, 1), or pi(s). The noise explores."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.low.device)
        act = self.actor(obs)
        if not deterministic:
            act = (act + self.cfg.act_noise * torch.randn_like(act)).clamp(-1, 1)
        return act

    @torch.no_grad()
    def q_value(self, obs: np.ndarray, act: Actions) -> PerSample:
        """Q(s, a). --eval-every logs it beside the discounted return obtained."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.low.device)
        return self.critic(obs, act.to(self.low.device))[0].cpu()

    def random_act(self, num_envs: int) -> Tensor:
        """Uniform in [-1, 1], so the buffer starts with actions of the whole range."""
        return 2 * torch.rand(num_envs, self.act_dim, device=self.low.device) - 1

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`: rescaled from [-1, 1] to the action bounds."""
        act = act.view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, act / 2 + 0.5).cpu().numpy()


# ======================================= buffer =======================================
class ReplayBuffer(SavedRows):  # which adds its state dict
    """A ring of `capacity` transitions: new ones overwrite the oldest. Batches mix old
    and new ones: a network trained on similar ones in a row forgets the rest.
    """

    def __init__(self, capacity: int, obs_dim: int, act_dim: int, device: torch.device):
        num_bytes = 4 * (2 * obs_dim + act_dim + 2) * capacity  # float32
        check_memory("--buffer-size", capacity, num_bytes)  # raises UsageError
        self.capacity = capacity
        self.device = device  # where batches go; the storage stays in CPU memory
        self.columns = {
            "obs": np.empty((capacity, obs_dim), np.float32),
            "act": np.empty((capacity, act_dim), np.float32),
            "rew": np.empty(capacity, np.float32),
            "next_obs": np.empty((capacity, obs_dim), np.float32),
            "terminated": np.empty(capacity, np.float32)}
        self.num_stored = 0
        self.position = 0  # the row to write next

    def add(self, **transition: np.ndarray) -> None:
        """Store one transition per environment; every array is [N, ...]."""
        num_envs = len(transition["rew"])
        rows = (self.position + np.arange(num_envs)) % self.capacity
        for name, column in self.columns.items():
            assert transition[name].shape == (num_envs, *column.shape[1:]), name
            column[rows] = transition[name]
        self.position = (self.position + num_envs) % self.capacity
        self.num_stored = min(self.num_stored + num_envs, self.capacity)

    def sample(self, batch_size: int) -> Transitions:
        """Uniformly random transitions, with replacement."""
        rows = torch.randint(self.num_stored, (batch_size,)).numpy()
        return Transitions(**{  # column.take(rows, axis=0) is column[rows], but faster
            name: torch.from_numpy(column.take(rows, axis=0)).to(self.device)
            for name, column in self.columns.items()})


if __name__ == "__main__":
    main(train, Config, __doc__)
