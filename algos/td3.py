"""Twin Delayed DDPG (TD3).  Fujimoto, van Hoof & Meger 2018, arXiv:1802.09477,
Algorithm 1.

The problem. DDPG's actor climbs to the action that the critic rates highest.
That is often an action whose value is too high by mistake, since the maximum
of noisy estimates is biased upwards. The target then bootstraps from this
value, so the mistake spreads to the states before it. TD3 keeps such errors
small in three ways: the lower of two critics gives the target, noise on the
target's action blurs narrow peaks of Q, and the actor moves more rarely than
the critics.

Background, as in algos/ddpg.py. s' is the true next state of s, even at a time
limit, where we still bootstrap; "terminated" marks a true end. All transitions
go into a replay buffer, and every gradient step uses a random batch of them,
collected by old policies: TD3 is off-policy. Targets come from slowly moving
copies of all networks, so that the critics do not chase their own errors.

    y       = r + gamma (1 - terminated) V'                                (1)
    L(Q)    = mean (Q_1(s, a) - y)^2 + mean (Q_2(s, a) - y)^2              (2)
    w_targ <- w_targ + tau (w - w_targ), all weights of all networks       (3)

TD3 itself. sigma, sigma' and c are the settings act_noise, target_noise and
noise_clip, and eps ~ N(0, I) is drawn anew in each line:

    a       = clip(pi(s) + sigma eps, -1, 1),  to explore                  (4)
    a'      = clip(pi_targ(s') + clip(sigma' eps, -c, c), -1, 1)           (5)
    V'      = min_i Q_i_targ(s', a')                                       (6)
    L(pi)   = -mean Q_1(s, pi(s)),
              with (3), only in every `policy_delay`-th gradient step      (7)

Why the pieces are as they are. Both critics learn from the same targets but
start from different weights, so their errors differ: the minimum in (6) is too
high only where both are. It may be too low instead, but the actor avoids
actions of low value, so these errors do not spread. The noise in (5) averages
the target over nearby actions: similar actions should have similar values, and
a narrow peak of Q_targ is probably an error. Clipping it at c keeps a' near
the policy's action. The delay lets the critics settle between two steps of the
actor, which otherwise follows errors that the next critic steps would have
removed. The targets wait too, so y changes slowly. The minimum protects the
targets; for the direction in (7), one critic is enough. Its gradient is
dQ_1/da times dpi/dw by the chain rule, where w are the weights of the actor,
and it only moves the actor. The actor is deterministic, so (4) adds noise
while training. The buffer stores the noisy action, which caused r and s'.

Policy, buffer and critics all use actions in [-1, 1]. The environment gets
them rescaled to its own bounds. Nothing is normalised.

Departures from the paper. Layers have 256 and 256 units and batches 256
samples, as in the authors' later code; the paper has 400 and 300, and 100.
Both actions are clipped to [-1, 1], as in that code. The paper takes 10,000
random steps on HalfCheetah and Ant, but 1,000 elsewhere.

Sizes by default: after 10,000 random steps (at most a tenth of the budget),
each environment step makes one gradient step on a batch of 256 for the
critics. Every second one also moves the actor, and the targets by 0.5%.
Healthy values: HEALTHY

Read after    algos/ddpg.py:  diff algos/ddpg.py algos/td3.py
Try           python -m algos.td3 --env Pendulum-v1 --total-steps 1e4
Reproduce     python -m algos.td3    (curves of all seeds: benchmarks/README.md)
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from utils import mpi
from utils.envs import check_memory, make_envs
from utils.run import Run, RunConfig, check_settings, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample of a batch: never [B, 1]
Actions = Float32[Tensor, "B d"]  # in [-1, 1]
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):
    total_steps: float = 1e6  # environment steps
    num_envs: int = 1  # N, environments stepped together
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    start_steps: int | None = None  # random steps first (default 10,000, at most 10%)
    update_every: int = 1  # environment steps per gradient step
    batch_size: int = 256  # samples per gradient step (64 to 512)
    lr: float = 1e-3  # Adam's learning rate (1e-4 to 1e-3)
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    tau: float = 0.005  # Polyak coefficient of the target networks (0.001 to 0.02)
    act_noise: float = 0.1  # sigma in Eq. (4), exploration noise (0.05 to 0.3)
    target_noise: float = 0.2  # sigma' in Eq. (5), target action noise (0.1 to 0.3)
    noise_clip: float = 0.5  # c in Eq. (5), largest target action noise (0.3 to 0.5)
    policy_delay: int = 2  # critic steps per step of the actor and all targets (1 to 3)
    hidden: tuple[int, ...] = (256, 256)  # hidden layer widths

    def __post_init__(self):
        check_settings(self, nonnegative="act_noise target_noise noise_clip")


# ======================================= agent ========================================
def relu_mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them."""
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Critic(nn.Module):
    """Observations [B, k], actions [B, d] -> Q(s, a) [B]."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: tuple[int, ...]):
        super().__init__()
        self.net = relu_mlp(obs_dim + act_dim, *hidden, 1)

    def forward(self, obs: Tensor, act: Tensor) -> PerSample:
        return self.net(torch.cat([obs, act], dim=-1)).squeeze(-1)  # [B, 1] -> [B]


class TwinCritic(nn.Module):
    """Two critics with different initial weights -> Q_1(s, a), Q_2(s, a), each [B]."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: tuple[int, ...]):
        super().__init__()
        self.q1 = Critic(obs_dim, act_dim, hidden)
        self.q2 = Critic(obs_dim, act_dim, hidden)

    def forward(self, obs: Tensor, act: Tensor) -> tuple[PerSample, PerSample]:
        return self.q1(obs, act), self.q2(obs, act)


class Agent(nn.Module):
    """Actor, critics and targets of all: its state dict is all of them."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector", act="box")
        self.cfg = cfg
        self.obs_dim = math.prod(obs_space.shape)
        self.act_dim = math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        self.actor = relu_mlp(self.obs_dim, *cfg.hidden, self.act_dim).append(nn.Tanh())
        self.critic = TwinCritic(self.obs_dim, self.act_dim, cfg.hidden)
        self.actor_targ = copy.deepcopy(self.actor).requires_grad_(False)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, k] -> actions [N, d] in [-1, 1]."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.low.device)
        act = self.actor(obs)
        if deterministic:
            return act
        return add_noise(act, self.cfg.act_noise)

    def random_act(self, num_envs: int) -> Tensor:
        """Uniformly random actions [N, d], for the warm-up."""
        return 2 * torch.rand(num_envs, self.act_dim, device=self.low.device) - 1

    def env_act(self, act: Tensor) -> np.ndarray:
        """Rescale actions from [-1, 1] to the environment's bounds, per dimension."""
        unit = act.view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, unit / 2 + 0.5).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray:
        """One raw observation -> the deterministic action, ready for `env.step`."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]


# ======================================== data ========================================
@dataclass(frozen=True)
class Transitions:
    """B transitions."""

    obs: Float32[Tensor, "B k"]
    act: Actions  # as taken, exploration noise included
    rew: PerSample
    next_obs: Float32[Tensor, "B k"]  # the true next observation
    terminated: PerSample  # 1 at a true end; a time limit leaves no mark


class ReplayBuffer:
    """The last `size` transitions of all environments, in a ring."""

    def __init__(self, size: int, obs_dim: int, act_dim: int, device: torch.device):
        numbers_per_row = 2 * obs_dim + act_dim + 2
        check_memory("--buffer-size", size, 4 * numbers_per_row * size, device)
        self.size = size
        self.device = device
        self.columns = {
            "obs": torch.empty(size, obs_dim, device=device),
            "act": torch.empty(size, act_dim, device=device),
            "rew": torch.empty(size, device=device),
            "next_obs": torch.empty(size, obs_dim, device=device),
            "terminated": torch.empty(size, device=device),
        }
        self.filled = 0  # rows that hold a transition
        self.next = 0  # the row to write next

    def add(self, **step: np.ndarray | Tensor) -> None:
        """Store one step of N environments: a value [N, ...] for every column."""
        num_envs = len(step["rew"])
        rows = (self.next + torch.arange(num_envs)) % self.size
        for name, column in self.columns.items():
            value = torch.as_tensor(step[name]).to(column)
            assert value.shape == (num_envs, *column.shape[1:]), name
            column[rows] = value
        self.next = (self.next + num_envs) % self.size
        self.filled = min(self.filled + num_envs, self.size)

    def sample(self, batch_size: int) -> Transitions:
        """Uniformly random transitions, with replacement."""
        rows = torch.randint(self.filled, (batch_size,), device=self.device)
        # index_select(0, rows) is column[rows], in a quarter of the time.
        columns = {k: v.index_select(0, rows) for k, v in self.columns.items()}
        return Transitions(**columns)

    def state_dict(self) -> dict:
        """Clones of the filled rows: a view would be saved with the whole memory."""
        columns = {k: v[: self.filled].clone() for k, v in self.columns.items()}
        return {"columns": columns, "filled": self.filled, "next": self.next}

    def load_state_dict(self, state: dict) -> None:
        self.filled = state["filled"]
        self.next = state["next"]
        for name, column in self.columns.items():
            column[: self.filled] = state["columns"][name]


def true_next_obs(next_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Where each action led, [N, ...].

    An environment whose episode ended has restarted already, so its `next_obs` is the
    first observation of the next episode. The last one of the old is in `infos`.
    """
    true_obs = next_obs.copy()
    for i in np.flatnonzero(done):
        true_obs[i] = infos["final_obs"][i]
    return true_obs


def interact(agent: Agent, envs: gym.vector.VectorEnv, buffer: ReplayBuffer,
             obs: np.ndarray, act: Tensor) -> np.ndarray:
    """Step all environments, store the transitions and return the next observations."""
    next_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    true_obs = true_next_obs(next_obs, terminated | truncated, infos)
    buffer.add(obs=obs, act=act, rew=rew, next_obs=true_obs, terminated=terminated)
    return next_obs


# ==================================== mathematics =====================================
def td_target(rew: PerSample, terminated: PerSample, next_val: PerSample,
              gamma: float) -> PerSample:
    """Eq. (1). A true end has no future. A time limit only stops the recording."""
    assert rew.shape == terminated.shape == next_val.shape
    return rew + gamma * (1 - terminated) * next_val


def q_loss(q: PerSample, target: PerSample) -> Scalar:
    """Eq. (2), for one critic."""
    assert q.shape == target.shape  # [B] minus [B, 1] would be [B, B]
    return (q - target).square().mean()


@torch.no_grad()
def polyak_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Eq. (3), in place."""
    for w_targ, w in zip(target.parameters(), source.parameters()):
        w_targ.lerp_(w, tau)


def add_noise(act: Actions, sigma: float) -> Actions:
    """Eq. (4)."""
    return (act + sigma * torch.randn_like(act)).clamp(-1, 1)


def add_clipped_noise(act: Actions, sigma: float, bound: float) -> Actions:
    """Eq. (5). Clipped, so that the action stays near that of the policy."""
    noise = (sigma * torch.randn_like(act)).clamp(-bound, bound)
    return (act + noise).clamp(-1, 1)


# ======================================= update =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eqs. (1), (2): both critics regress on the same target."""
    cfg = agent.cfg
    with torch.no_grad():  # targets are constants
        next_act = agent.actor_targ(batch.next_obs)
        next_act = add_clipped_noise(next_act, cfg.target_noise, cfg.noise_clip)
        q1, q2 = agent.critic_targ(batch.next_obs, next_act)
        next_val = torch.min(q1, q2)  # Eq. (6)
        target = td_target(batch.rew, batch.terminated, next_val, cfg.gamma)
    q1, q2 = agent.critic(batch.obs, batch.act)
    loss = q_loss(q1, target) + q_loss(q2, target)
    return loss, {"q_loss": loss, "q1": q1, "q2": q2}


def actor_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (7). The gradient reaches the actor through its action."""
    act = agent.actor(batch.obs)
    q1 = agent.critic.q1(batch.obs, act)
    loss = -q1.mean()
    return loss, {"pi_loss": loss}


def update(agent: Agent, optimizers: mpi.Optimizers, batch: Transitions,
           count: int) -> dict:
    """One gradient step on the critics, after `count` others; the rest may wait."""
    lr = agent.cfg.lr
    metrics = optimizers.critic.minimize(critic_loss, agent, batch, lr=lr)
    if (count + 1) % agent.cfg.policy_delay == 0:  # actor and targets are delayed
        metrics |= optimizers.actor.minimize(actor_loss, agent, batch, lr=lr)
        polyak_update(agent.actor_targ, agent.actor, agent.cfg.tau)
        polyak_update(agent.critic_targ, agent.critic, agent.cfg.tau)
    return metrics


# ======================================= train ========================================
def warmup_steps(cfg: Config) -> int:
    """Random steps before anything is learned: at most a tenth of a small budget."""
    if cfg.start_steps is not None:
        return cfg.start_steps
    return int(min(10_000, cfg.total_steps // 10))


def updates_due(step: int, cfg: Config) -> int:
    """Total number of updates due after `step` environment steps, for any num_envs."""
    return max(0, step - warmup_steps(cfg)) // cfg.update_every


def train(cfg: Config) -> Agent:
    """Train to the end of the budget, or resume, and return the agent."""
    with Run(cfg) as run:  # refuses bad input before anything is built
        cfg = run.cfg  # with --resume, the settings of that run
        envs = make_envs(cfg, run.num_envs)  # this rank's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizers = mpi.Optimizers(
            critic=mpi.Adam(agent.critic), actor=mpi.Adam(agent.actor))
        buffer = ReplayBuffer(run.buffer_size, agent.obs_dim, agent.act_dim, run.device)
        step = run.restore(agent, optimizers=optimizers, buffer=buffer)  # 0, or resumed
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            if step < warmup_steps(cfg):
                act = agent.random_act(run.num_envs)
            else:
                act = agent.act(obs)
            obs = interact(agent, envs, buffer, obs, act)
            updates_so_far = updates_due(step, cfg)
            step += cfg.num_envs
            for count in range(updates_so_far, updates_due(step, cfg)):
                batch = buffer.sample(run.batch_size)
                run.store(**update(agent, optimizers, batch, count))
            run.report(step, envs)  # writes, evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
