"""Soft Actor-Critic (SAC).  Haarnoja et al. 2018, arXiv:1812.05905.

The problem. In TD3 a critic learns Q(s, a), the discounted return after action a in
state s, and an actor learns the action with the highest Q. It explores by noise of one
fixed scale, whether a wrong action is harmless in this state or costs the episode.

The idea. The policy pi(a|s) is random and learns how random to be in each state: its
entropy H(s) is a bonus to the reward, and so it stays random where that costs little.

    objective      E[sum over t of gamma^t (r_t + alpha H(s_t))], H(s) = E[-log pi(a|s)]
    V(s)           E[min(Q_1(s, a), Q_2(s, a)) - alpha log pi(a|s)], where a ~ pi(.|s)
    critic_loss    Q_1 and Q_2 fit r + gamma V(s')
    actor_loss     pi maximises V(s), with Q held fixed
    alpha_loss     alpha falls while the entropy is above its target, else it rises

Targets come from target networks (`_targ`), which follow the others slowly, so that no
critic chases its own changes. One step of `train`:

    interact       take a ~ pi(.|s) (see `act`); store (s, a, r, s', terminated)
    update         one Adam step on each loss; the target critics follow

Departures from the paper. As in the authors' early code: log alpha in `alpha_loss`, log
sigma in [-20, 2], uniform actions at first. Learning rate 1e-3 (paper: 3e-4), no factor
1/2 in `critic_loss`.

Healthy values. With learn_alpha, `logp` settles near -target_entropy.

Run   python -m algos.sac --env Pendulum-v1 --total-steps 1e4
Diff  diff algos/td3.py algos/sac.py    (next: crossq.py, sac_discrete.py)
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
from torch.nn.functional import softplus

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
from utils.run import Fraction, Natural, Positive, Run, RunConfig, check_range, main

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
    alpha: float = 1.0  # temperature, at first if learned; a fixed one is usually 0.2
    learn_alpha: bool = True  # tune alpha until the entropy is -1 per action dimension
    hidden: tuple[int, ...] = (256, 256)  # hidden layer widths

    def __post_init__(self):
        super().__post_init__()
        if self.learn_alpha:  # by way of log alpha
            check_range(self, "alpha", above=0)  # raises UsageError


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
        alpha_opt = Adam([agent.log_alpha])
        buffer = ReplayBuffer(
            mpi.share(cfg.buffer_size), agent.obs_dim, agent.act_dim, run.device)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(
            agent, critic=critic_opt, actor=actor_opt, alpha=alpha_opt, buffer=buffer)
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
            for _ in range(updates_before, num_updates(step, cfg)):
                batch = buffer.sample(mpi.share(cfg.batch_size))
                metrics = update(agent, critic_opt, actor_opt, alpha_opt, batch)
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


def update(agent: Agent, critic_opt: Adam, actor_opt: Adam, alpha_opt: Adam,
           batch: Transitions) -> dict:
    """Update the critics, the actor, alpha and the target critics. Return metrics."""
    cfg = agent.cfg
    loss, metrics = critic_loss(agent, batch)
    critic_opt.zero_grad()
    loss.backward()
    critic_opt.average_grads()  # over processes
    metrics["critic_grad_norm"] = critic_opt.grad_norm()
    critic_opt.step(cfg.lr)

    loss, actor_metrics = actor_loss(agent, batch)
    actor_opt.zero_grad()
    # The gradient goes through Q, but only the actor's weights receive it.
    loss.backward(inputs=list(agent.actor.parameters()))
    actor_opt.average_grads()
    metrics |= actor_metrics | {"actor_grad_norm": actor_opt.grad_norm()}
    actor_opt.step(cfg.lr)

    if cfg.learn_alpha:
        loss, alpha_metrics = alpha_loss(agent, actor_metrics["logp"])
        alpha_opt.zero_grad()
        loss.backward()
        alpha_opt.average_grads()
        metrics |= alpha_metrics | {"alpha_grad_norm": alpha_opt.grad_norm()}
        alpha_opt.step(cfg.lr)
    polyak_update(agent.critic_targ, agent.critic, cfg.tau)
    return metrics


# ======================================= losses =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """A critic fits y, the reward plus the discounted value of following pi from s'.

        a'    ~ pi(.|s')
        V(s') = min(Q_1_targ(s', a'), Q_2_targ(s', a')) - alpha log pi(a'|s')
        y     = r + gamma (1 - terminated) V(s'), a constant
        L     = mean (Q_1(s, a) - y)^2 + mean (Q_2(s, a) - y)^2

    Only terminal states are worth 0: after a time limit, V(s') replaces what was cut.
    r and s' depend on s and a, not on the policy that chose a, so transitions of old
    policies will do. The policy to rate is pi, so a' is not from the buffer.

    An actor seeks the actions that a critic overrates, and their Q enters the targets
    of other states. Two critics start from different weights, so their errors differ,
    and their minimum is too high only where both are. It is too low more often, but
    an underrated action attracts no actor, and so it enters fewer targets.

    The mean of -log pi is the entropy, so the last term of V(s') is the bonus in s'.
    Q(s, a) leaves out the bonus in s itself, which does not depend on a.
    """
    cfg = agent.cfg
    with torch.no_grad():  # Q moves towards y, not y towards Q
        next_act, next_logp = sample_squashed_gaussian(agent.actor(batch.next_obs))
        next_q1, next_q2 = agent.critic_targ(batch.next_obs, next_act)
        next_val = torch.min(next_q1, next_q2) - agent.alpha() * next_logp
        target = batch.rew + cfg.gamma * (1 - batch.terminated) * next_val
    q1, q2 = agent.critic(batch.obs, batch.act)
    assert q1.shape == q2.shape == target.shape  # [B] minus [B, 1] would be [B, B]
    loss = (q1 - target).square().mean() + (q2 - target).square().mean()
    return loss, {"critic_loss": loss.detach(), "q1": q1.detach(), "q2": q2.detach()}


def sample_squashed_gaussian(out: Float32[Tensor, "B k"], deterministic: bool = False
                             ) -> tuple[Actions, PerSample]:
    """Draw a ~ pi(.|s), or take eps = 0 if `deterministic`. Return a and log pi(a|s).

        a           = tanh(u),  u = mu(s) + sigma(s) eps,  eps ~ N(0, I)
        log pi(a|s) = sum_i [log N(u_i; mu_i, sigma_i) - log(1 - tanh(u_i)^2)]

    This is the one place that says what the actor's outputs mean: first all of mu(s),
    then all of log sigma(s).

    All randomness is in eps, so a has a gradient in mu and sigma (reparameterisation).
    The second logarithm is that of da/du, by the change of variables. Without it, the
    bonus would pay for large sigma, even where that only pushes a towards -1 and 1.
    """
    mean, log_std = out.chunk(2, dim=-1)
    log_std = log_std.clamp(-20, 2)
    eps = torch.zeros_like(mean) if deterministic else torch.randn_like(mean)
    u = mean + log_std.exp() * eps
    logp_u = -0.5 * eps.square() - log_std - 0.5 * math.log(2 * math.pi)
    # This is log(1 - tanh(u)^2), but stays finite for large |u|.
    log_jacobian = 2 * (math.log(2) - u - softplus(-2 * u))
    return u.tanh(), (logp_u - log_jacobian).sum(-1)


def actor_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """L(pi) = mean [alpha log pi(a|s) - min(Q_1(s, a), Q_2(s, a))], where a ~ pi(.|s).

    That is -mean V(s), by the critics, not their targets. `alpha_loss` takes `logp`.
    The gradient reaches the actor through a and log pi. If pi could be any density, the
    best one would be proportional to exp(min(Q_1(s, a), Q_2(s, a)) / alpha).

    If the critic moved too, it could lower the loss by overrating the actor's actions.
    """
    act, logp = sample_squashed_gaussian(agent.actor(batch.obs))
    q1, q2 = agent.critic(batch.obs, act)
    assert q1.shape == q2.shape == logp.shape
    loss = (agent.alpha() * logp - torch.min(q1, q2)).mean()
    return loss, {"actor_loss": loss.detach(), "logp": logp.detach()}


def alpha_loss(agent: Agent, logp: PerSample) -> tuple[Scalar, dict]:
    """L(alpha) = log(alpha) (H - H_0), with H = -mean log pi and H_0 = target_entropy.

        problem       maximise the return over pi, subject to H >= H_0
        Lagrangian    max over pi, min over alpha >= 0, of return + alpha (H - H_0)
        so            alpha H is the bonus of pi; alpha falls if H > H_0, else it rises

    The step moves log_alpha, so alpha stays positive. The derivative of L in log_alpha
    is H - H_0. In the paper L is alpha (H - H_0), and the step moves alpha itself.

    H is the entropy of a density and may be negative. H_0 is -1 per action dimension:
    that of a uniform distribution over an interval of length exp(-1) = 0.37.
    """
    loss = -agent.log_alpha * (logp + agent.target_entropy).mean()
    return loss, {"alpha_loss": loss.detach(), "alpha": agent.alpha()}


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
    """Actor, critic with its target network, and the temperature alpha."""

    takes = {"obs": "vector", "act": "box"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.obs_dim = obs_space.shape[0]
        self.act_dim = math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        self.actor = mlp([self.obs_dim, *cfg.hidden, 2 * self.act_dim], nn.ReLU)
        self.critic = TwinCritic(self.obs_dim, self.act_dim, cfg.hidden)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        log_alpha = math.log(cfg.alpha) if cfg.alpha > 0 else 0.0  # alpha 0 is fixed
        self.log_alpha = nn.Parameter(torch.tensor(log_alpha))  # what alpha_loss moves
        self.target_entropy = -float(self.act_dim)  # the authors' heuristic

    def alpha(self) -> Scalar:
        """The temperature, a constant to the losses: exp(log_alpha) if it is learned.

        Otherwise cfg.alpha, even where --init-from has loaded another log_alpha.
        """
        if self.cfg.learn_alpha:
            return self.log_alpha.detach().exp()
        return torch.tensor(self.cfg.alpha, device=self.low.device)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """a ~ pi(.|s), or tanh(mu(s))."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.low.device)
        act, _ = sample_squashed_gaussian(self.actor(obs), deterministic)
        return act

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
