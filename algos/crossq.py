"""CrossQ: SAC without target networks.  Bhatt et al. 2024, arXiv:1902.05605.

The problem. SAC's critics learn from target critics, which lag behind them by some 200
updates. The lag keeps learning stable, but it also makes it slow: what the critics
learn about s' reaches s only when the target critics have it.

The idea. Batch normalisation keeps the critics stable without target critics, if it
treats both sides of the loss alike. But a comes from old policies and a' from the
current one: as two batches, (s, a) and (s', a') would be normalised differently. So
they go through the critics as one batch of 2B rows; the second half gives the target.

    critic_loss    Q_1 and Q_2 fit r + gamma V(s'), in one pass for (s, a) and (s', a')
    actor_loss     pi maximises V(s), with Q held fixed
    alpha_loss     alpha falls while the entropy is above its target, else it rises
    BatchRenorm    normalises the input of each layer, in the actor too

One step of `train`:

    interact       take a ~ pi(.|s) (see `act`); store (s, a, r, s', terminated)
    update         one Adam step of the critics; every `policy_delay`-th time one of the
                   actor and one of alpha

Departures from the paper. Critics have 256 units per layer, which a CPU can train (the
paper: --critic-hidden 2048 2048). As in SAC: no factor 1/2 in `critic_loss`, log alpha
in `alpha_loss`, up to 10,000 random actions (the authors' code: 5,000).

Healthy values. `logp` settles near -target_entropy; `q1` and `q2` stay close together.

Run   python -m algos.crossq --env Pendulum-v1 --total-steps 1e4
Diff  diff algos/sac.py algos/crossq.py
"""
from __future__ import annotations

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
from utils.errors import UsageError
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Natural, Positive, Run, RunConfig, check_range, main

# Shapes, which the tests check at every call.
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Observations = Float32[Tensor, "B obs_dim"]
Actions = Float32[Tensor, "B act_dim"]  # in [-1, 1]
Units = Float32[Tensor, "B _"]  # the input or output of a layer
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
    alpha: float = 1.0  # temperature, at first if learned; a fixed one is usually 0.2
    learn_alpha: bool = True  # tune alpha until the entropy is -1 per action dimension
    policy_delay: int = 3  # critic updates per update of actor and alpha (1 to 3)
    warm_up: Natural = 100_000  # updates before a network renormalises: see BatchRenorm
    critic_hidden: tuple[int, ...] = (256, 256)  # hidden layer widths of the critics
    hidden: tuple[int, ...] = (256, 256)  # hidden layer widths of the actor

    def __post_init__(self):
        if self.num_procs != 1:  # Run asks again with the number that mpiexec started
            raise UsageError(f"--num-procs is {self.num_procs}; it takes 1 here, since "
                             "the rows of a batch share their statistics")
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
        critic_opt = Adam(agent.critic, beta1=0.5)  # as in the paper
        actor_opt = Adam(agent.actor, beta1=0.5)
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
            for count in range(updates_before, num_updates(step, cfg)):
                batch = buffer.sample(mpi.share(cfg.batch_size))
                metrics = update(agent, critic_opt, actor_opt, alpha_opt, batch, count)
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
           batch: Transitions, count: int) -> dict:
    """Update the critics, the actor and alpha. Return metrics.

    `count` updates came before this one. Only every `policy_delay`-th moves actor and
    alpha.
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

    if cfg.learn_alpha:
        loss, alpha_metrics = alpha_loss(agent, actor_metrics["logp"])
        alpha_opt.zero_grad()
        loss.backward()
        alpha_opt.average_grads()
        metrics |= alpha_metrics | {"alpha_grad_norm": alpha_opt.grad_norm()}
        alpha_opt.step(cfg.lr)
    return metrics


# ======================================= losses =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """A critic fits y, the reward plus the discounted value of following pi from s'.

        a'    ~ pi(.|s')
        V(s') = min(Q_1(s', a'), Q_2(s', a')) - alpha log pi(a'|s')
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

    (s, a) and (s', a') are one batch of 2B rows, so mean and variance in each layer are
    those of both. This pass, and no other, moves the critics' running statistics.
    """
    cfg = agent.cfg
    with torch.no_grad():
        next_act, next_logp = sample_squashed_gaussian(agent.actor(batch.next_obs))
    obs = torch.cat([batch.obs, batch.next_obs])  # [2B, obs_dim]
    act = torch.cat([batch.act, next_act])  # [2B, act_dim]
    both_q1, both_q2 = agent.critic(obs, act, train=True)  # [2B] each
    (q1, next_q1), (q2, next_q2) = both_q1.chunk(2), both_q2.chunk(2)
    with torch.no_grad():  # Q moves towards y, not y towards Q
        next_val = torch.min(next_q1, next_q2) - agent.alpha() * next_logp
        target = batch.rew + cfg.gamma * (1 - batch.terminated) * next_val
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

    That is -mean V(s). `alpha_loss` takes `logp`.
    The gradient reaches the actor through a and log pi. If pi could be any density, the
    best one would be proportional to exp(min(Q_1(s, a), Q_2(s, a)) / alpha).

    If the critic moved too, it could lower the loss by overrating the actor's actions.

    This pass, and no other, moves the actor's running statistics. The critics use
    theirs, which are of old actions and new ones together.
    """
    act, logp = sample_squashed_gaussian(agent.actor(batch.obs, train=True))
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


# ======================================= agent ========================================
class BatchRenorm(nn.Module):
    """Batch renormalisation of each unit.  Ioffe 2017, arXiv:1702.03275."""

    def __init__(self, width: int, warm_up: int):
        super().__init__()
        self.warm_up = warm_up
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("count", torch.tensor(0))  # batches so far

    def forward(self, x: Units, train: bool) -> Units:
        """To train: r (x - mu_B) / sigma_B + d. Otherwise: (x - mu) / sigma.

            r = clip(sigma_B / sigma, 1/3, 3), a constant
            d = clip((mu_B - mu) / sigma, -5, 5), a constant

        The result is then scaled and shifted by learned numbers. mu_B and sigma_B are
        of this batch, and the gradient passes through them. mu and sigma^2 are running
        averages. Unless clipped, r and d make both lines equal, so the network acts as
        it was trained. In its first `warm_up` batches, r = 1 and d = 0, which is batch
        normalisation: mu and sigma are not right yet. (The actor has a third of the
        critics' updates. With the default, runs of 100,000 steps stay within it.)
        """
        run_std = (self.var + 1e-3).sqrt()
        if not train:
            return self.scale * (x - self.mean) / run_std + self.shift
        mean = x.mean(0)
        var = (x - mean).square().mean(0)
        std = (var + 1e-3).sqrt()
        with torch.no_grad():
            warm = self.count >= self.warm_up
            r = torch.where(warm, (std / run_std).clamp(1 / 3, 3), 1)
            d = torch.where(warm, ((mean - self.mean) / run_std).clamp(-5, 5), 0)
            self.mean.lerp_(mean, 0.01)
            self.var.lerp_(var, 0.01)
            self.count += 1
        return self.scale * ((x - mean) / std * r + d) + self.shift


class RenormMLP(nn.Module):
    """Linear layers of these sizes with ReLU between them, each after a BatchRenorm."""

    def __init__(self, sizes: list[int], warm_up: int):
        super().__init__()
        self.norms = nn.ModuleList(BatchRenorm(width, warm_up) for width in sizes[:-1])
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: Units, train: bool = False) -> Units:
        x = self.layers[0](self.norms[0](x, train))
        for norm, layer in zip(self.norms[1:], self.layers[1:]):
            x = layer(norm(x.relu(), train))
        return x


class TwinRenormCritic(nn.Module):
    """Two critics with different initial weights."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: tuple[int, ...],
                 warm_up: int):
        super().__init__()
        self.q1 = RenormMLP([obs_dim + act_dim, *hidden, 1], warm_up)
        self.q2 = RenormMLP([obs_dim + act_dim, *hidden, 1], warm_up)

    def forward(self, obs: Observations, act: Actions, train: bool = False
                ) -> tuple[PerSample, PerSample]:
        x = torch.cat([obs, act], dim=-1)
        return self.q1(x, train).squeeze(-1), self.q2(x, train).squeeze(-1)  # [B]


class Agent(Policy):  # which adds predict(obs)
    """Actor, critic without target network, and the temperature alpha."""

    takes = {"obs": "vector", "act": "box"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.obs_dim = obs_space.shape[0]
        self.act_dim = math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        sizes = [self.obs_dim, *cfg.hidden, 2 * self.act_dim]
        self.actor = RenormMLP(sizes, cfg.warm_up)
        self.critic = TwinRenormCritic(
            self.obs_dim, self.act_dim, cfg.critic_hidden, cfg.warm_up)
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
