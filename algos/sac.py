"""Soft Actor-Critic (SAC).  Haarnoja et al. 2018, arXiv:1812.05905, Algorithm 1.

The problem. TD3 explores with noise of one fixed scale, tuned by hand, and
its policy is deterministic, so it commits early to whatever its critics
overestimate. SAC maximises reward plus alpha times entropy,

    J = E sum_t gamma^t [r_t + alpha H(pi(. | s_t))],

so the policy stays random wherever that is cheap and becomes precise where
precision pays. The temperature alpha is tuned automatically until the
policy's mean entropy matches a target. H(pi) = -E log pi is the entropy.

Background, as in algos/td3.py. s' is the true next state of s, even at a time
limit, where we still bootstrap; "terminated" marks a true end. All transitions
go into a replay buffer, and every gradient step uses a random batch of them,
collected by old policies: SAC is off-policy. Targets come from slowly moving
copies of the critics, so that the critics do not chase their own errors.

    y       = r + gamma (1 - terminated) V'                                (1)
    L(Q)    = mean (Q_1(s, a) - y)^2 + mean (Q_2(s, a) - y)^2              (2)
    w_targ <- w_targ + tau (w - w_targ), all weights of both critics       (3)

SAC itself. The actor's network outputs mu(s) and log sigma(s), eps ~ N(0, I):

    a       = tanh(u),  u = mu(s) + sigma(s) eps                           (4)
    log pi  = sum_i log N(u_i; mu_i, sigma_i) - log(1 - tanh(u_i)^2)       (5)
    V'      = min_i Q_i_targ(s', a') - alpha log pi(a' | s'),
              a' sampled by (4) from the current policy in s'              (6)
    L(pi)   = mean [alpha log pi(a | s) - min_i Q_i(s, a)],
              a sampled by (4) from the current policy in s                (7)
    L(alpha) = -log alpha mean [log pi(a | s) + target_entropy d]          (8)

Why the pieces are as they are. In (4) the randomness is in eps, which does
not depend on the weights, so (7) is differentiated through the sampled action
into the actor ("reparameterisation"). (5) is the change of variables: tanh
squeezes volume near the bounds, so the density of a is that of u divided by
the derivative of tanh. The policy also chases errors of the critics; the
minimum of two independently initialised critics keeps overestimates out of
the targets. a' in (6) must come from the current policy, since V' is the
value of what the policy does now, not of what the buffer recorded. In (8),
d is the number of action dimensions: when the entropy -log pi is below the
target, alpha grows, and when it is above, alpha falls. The target -1 per
dimension is the entropy of a uniform action on an interval of width 0.37 out
of the 2 available: a policy that still explores, but purposefully.

Policy, buffer and critics all use actions in [-1, 1]. The environment gets
them rescaled to its own bounds. Nothing is normalised.

Departures from the paper. (8) has log alpha where the paper has alpha: the
same fixed point, with relative steps, as in the authors' code. Adam's
learning rate is 1e-3, not 3e-4. (2) has no factor 1/2. log sigma is clamped
to [-20, 2] and the first actions are uniformly random, as in the authors'
code.

Sizes by default: after 10,000 random steps (at most a tenth of the budget),
each environment step makes one gradient step on a batch of 256 for critics,
actor and alpha, and moves the targets by 0.5%. Healthy values: `q1` and `q2`
grow with the return, `logp` settles at d (the target entropy is -d), `alpha`
falls from 1 to 0.01 to 0.3 within 100,000 steps, `q_loss` stays bounded.

Read after    algos/td3.py:  diff algos/td3.py algos/sac.py
Try           python -m algos.sac --env Pendulum-v1 --total-steps 1e4
Reproduce     python -m algos.sac    (curves of all seeds: benchmarks/README.md)
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
from torch.nn.functional import softplus

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
    alpha: float = 1.0  # temperature, or its initial value if it is learned
    learn_alpha: bool = True  # tune the temperature by Eq. (8)
    target_entropy: float = -1.0  # per action dimension, in nats
    hidden: tuple[int, ...] = (256, 256)  # hidden layer widths

    def __post_init__(self):
        check_settings(self, positive="alpha", any_number="target_entropy")


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
    """Actor, critics, target critics and temperature: its state dict is all of them."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector", act="box")
        self.cfg = cfg
        self.obs_dim = math.prod(obs_space.shape)
        self.act_dim = math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        self.actor = relu_mlp(self.obs_dim, *cfg.hidden, 2 * self.act_dim)
        self.critic = TwinCritic(self.obs_dim, self.act_dim, cfg.hidden)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(cfg.alpha)))

    def alpha(self) -> Scalar:
        """The temperature, a constant to the losses of critics and actor."""
        if not self.cfg.learn_alpha:
            return torch.tensor(self.cfg.alpha, device=self.low.device)
        return self.log_alpha.detach().exp()

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, k] -> actions [N, d] in [-1, 1]."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.low.device)
        out = self.actor(obs)
        if deterministic:
            return out[:, : self.act_dim].tanh()
        act, _ = sample_squashed_gaussian(out)
        return act

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


def sample_squashed_gaussian(out: Float32[Tensor, "B k"]) -> tuple[Actions, PerSample]:
    """Eqs. (4), (5): outputs of the actor, k = 2 d -> sampled actions, their log pi."""
    mean, log_std = out.chunk(2, dim=-1)
    log_std = log_std.clamp(-20, 2)
    eps = torch.randn_like(mean)
    u = mean + log_std.exp() * eps
    log_normal = -0.5 * eps.square() - log_std - 0.5 * math.log(2 * math.pi)
    # Stable form of log(1 - tanh(u)^2), which computed directly is -inf for large u.
    log_jacobian = 2 * (math.log(2) - u - softplus(-2 * u))
    return u.tanh(), (log_normal - log_jacobian).sum(-1)


def soft_value(q1: PerSample, q2: PerSample, logp: PerSample,
               alpha: Scalar) -> PerSample:
    """The lower Q plus what entropy adds to it: part of Eqs. (6) and (7)."""
    assert q1.shape == q2.shape == logp.shape
    return torch.min(q1, q2) - alpha * logp


# ======================================= update =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eqs. (1), (2): both critics regress on the same target."""
    with torch.no_grad():  # targets are constants
        next_act, next_logp = sample_squashed_gaussian(agent.actor(batch.next_obs))
        q1, q2 = agent.critic_targ(batch.next_obs, next_act)
        next_val = soft_value(q1, q2, next_logp, agent.alpha())  # Eq. (6)
        target = td_target(batch.rew, batch.terminated, next_val, agent.cfg.gamma)
    q1, q2 = agent.critic(batch.obs, batch.act)
    loss = q_loss(q1, target) + q_loss(q2, target)
    return loss, {"q_loss": loss, "q1": q1, "q2": q2}


def actor_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (7). The gradient reaches the actor through the sampled action."""
    act, logp = sample_squashed_gaussian(agent.actor(batch.obs))
    q1, q2 = agent.critic(batch.obs, act)
    loss = -soft_value(q1, q2, logp, agent.alpha()).mean()  # Eq. (7)
    return loss, {"pi_loss": loss, "logp": logp}


def alpha_loss(agent: Agent, logp: PerSample) -> tuple[Scalar, dict]:
    """Eq. (8). More random than the target: alpha falls; less random: it rises."""
    target_entropy = agent.cfg.target_entropy * agent.act_dim
    loss = -agent.log_alpha * (logp + target_entropy).mean()
    return loss, {"alpha_loss": loss, "alpha": agent.alpha()}


def update(agent: Agent, optimizers: mpi.Optimizers, batch: Transitions) -> dict:
    """One gradient step on critics, actor and temperature; then move the targets."""
    lr = agent.cfg.lr
    metrics = optimizers.critic.minimize(critic_loss, agent, batch, lr=lr)
    metrics |= optimizers.actor.minimize(actor_loss, agent, batch, lr=lr)
    if agent.cfg.learn_alpha:
        logp = metrics["logp"]
        metrics |= optimizers.alpha.minimize(alpha_loss, agent, logp, lr=lr)
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
            critic=mpi.Adam(agent.critic), actor=mpi.Adam(agent.actor),
            alpha=mpi.Adam(agent.log_alpha))
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
            for _ in range(updates_so_far, updates_due(step, cfg)):
                batch = buffer.sample(run.batch_size)
                run.store(**update(agent, optimizers, batch))
            run.report(step, envs)  # writes, evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
