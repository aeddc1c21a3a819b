"""Soft Actor-Critic (SAC).  Haarnoja et al. 2018, arXiv:1812.05905,
Algorithm 1.

The problem. DDPG and TD3 learn a deterministic policy and explore with added
noise, whose scale is tuned by hand and is the same in every state. SAC learns
how random to be in each state. In every state it gets a bonus besides the
reward, alpha times the entropy H of its policy there. It maximises

    J = E sum_t gamma^t [r_t + alpha H(pi(. | s_t))],
    H(pi(. | s)) = E [-log pi(a | s)], with a sampled from pi(. | s)

So the policy stays random where randomness costs little reward and becomes
nearly deterministic where it costs a lot. The temperature alpha is the price:
one nat of entropy (measured in natural logarithms) is worth alpha units of
reward. By default SAC adjusts alpha to bring the mean entropy to a target.

The algorithm, and where each step is coded:

    for each environment step:
        sample a by (4), but uniformly at random at first      act, random_act
        step, store (s, a, r, s', terminated) in the buffer    interact
        after the random actions:
            draw a random batch from the buffer                buffer.sample
            one Adam step on the critics' loss (2)             critic_loss
            one Adam step on the actor's loss (7)              actor_loss
            one Adam step on the temperature's loss (8)        alpha_loss
            move the target critics, (3)                       polyak_update

Most transitions in the buffer come from earlier policies. SAC is off-policy, so
it can learn from them: r and s' depend only on s and a, and where a loss needs
an action of the current policy, it samples a new one.

The critics. Q(s, a) is the expected discounted sum of rewards and entropy
bonuses after action a in state s (`act`, `obs` in the code). It leaves out the
bonus in s itself, which does not depend on a. V(s') is the value of the next
state (`next_obs`), with its bonus. Two critics, Q_1 and Q_2, learn Q by
regression on y; `mean` is over the batch. Equations that algos/td3.py has too
keep their numbers, so they are out of order here. gamma, the discount factor,
and tau are settings.

    V(s')   = min(Q_1_targ(s', a'), Q_2_targ(s', a')) - alpha log pi(a' | s'),
              one a' sampled from the current policy                       (6)
    y       = r + gamma (1 - terminated) V(s'), held constant in (2)       (1)
    L(Q)    = mean (Q_1(s, a) - y)^2 + mean (Q_2(s, a) - y)^2              (2)
    w_targ <- w_targ + tau (w - w_targ)                                    (3)

(6) estimates V(s') from a single action. An actor that maximises a learned Q
finds the actions for which Q is too high. So we take the smaller of two
critics. They start from different weights and make different errors, and the
minimum is too high only where both are. More often it is too low, but the actor
does not seek out such errors, so they do not reinforce themselves.
(1) `terminated` is 1 if s' is terminal. If only a time limit ends the episode,
it is 0: rewards would have followed, so we still bootstrap from V(s').
(3) w are the weights of the critics. y uses target networks (`targ`), copies
that follow the critics slowly. If y used the critics themselves, every step on
(2) would also move y, and learning could diverge.

The policy. For each of the d action dimensions, the actor outputs a mean mu(s)
and a log standard deviation log sigma(s). eps is standard normal noise, and
N(u; mu, sigma) the normal density:

    a       = tanh(u),  u = mu(s) + sigma(s) eps                           (4)
    log pi(a | s) = sum_j [log N(u_j; mu_j, sigma_j)
                           - log(1 - tanh(u_j)^2)]                         (5)

(4) tanh keeps actions in [-1, 1]; `env_act` rescales them to the environment's
bounds. All randomness is in eps, so a is a differentiable function of mu and
sigma, and (7) can train the actor through a (the reparameterisation trick).
Evaluation uses tanh(mu(s)).
(5) is the change of variables: the density of u, divided by da/du in every
dimension. Without the second term, we would reward the entropy of u, which
grows with sigma even when a larger sigma only pushes a towards -1 and 1.

The losses of actor and temperature:

    L(pi)   = mean [alpha log pi(a | s) - min(Q_1(s, a), Q_2(s, a))],
              a sampled from the current policy                            (7)
    L(alpha) = -log(alpha) (mean [log pi(a | s)] + target_entropy)         (8)

(7) makes actions of high Q more likely, but rewards entropy too. If pi could be
any density, the minimum would be pi(a | s) proportional to exp(Q(s, a) /
alpha). The gradient passes through the critics to a, but only the actor
changes. (8) changes only alpha: log pi, from the sample of (7), is a constant.
If the entropy, the mean of -log pi, is above target_entropy, alpha falls; if it
is below, alpha rises. We learn log alpha, so that alpha stays positive. The
default target, -1 nat per dimension, is the authors' heuristic. A uniform
distribution has this entropy on an interval of length exp(-1) = 0.37; the full
range [-1, 1] has length 2.

Compared with TD3: the policy is random, so a' needs no added noise; there is no
target actor; the actor uses both critics and learns in every update.

Departures from the paper. (8) has log alpha as its first factor, as in an early
version of the authors' code, where the paper has alpha. Both losses move alpha
in the same direction and are stationary at the same entropy. Adam's learning
rate is 1e-3, not 3e-4, and (2) has no factor 1/2. From the authors' code, not
the paper: log sigma is clamped to [-20, 2], and the first actions are uniform.

Defaults: the first 10,000 actions are uniform, without updates (a tenth of
total_steps if that is less). Then every environment step is followed by one
update on a batch of 256. In a healthy run with learn_alpha, `logp` settles near
-target_entropy, by default d, and `q1` and `q2` stay close together.
`critic_loss` grows with the scale of Q. Once the entropy is near a negative
target, the average bonus is negative, and Q is lower than the rewards alone.

Read after    algos/td3.py, then:  diff algos/td3.py algos/sac.py
Try           python -m algos.sac --env Pendulum-v1 --total-steps 1e4
Reproduce     python -m algos.sac    (learning curves: benchmarks/README.md)
"""

import copy
import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torch.nn.functional import softplus

# mpi.Adam          `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One Adam step; its gradient is averaged over processes, clipped if
#                   max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.Optimizers    named optimizers: `x` reports x_grad_norm, changes only its weights
# check_memory      refuses a buffer that is larger than the machine's memory
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import check_memory, make_envs
from utils.run import Run, RunConfig, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Actions = Float32[Tensor, "B d"]  # in [-1, 1]
ActorOut = Float32[Tensor, "B k"]  # mu and log sigma side by side: k = 2 d
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds env, seed, run_dir, device, ...: see --help
    total_steps: float = 1e6  # environment steps
    num_envs: int = 1  # N, parallel environments
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    start_steps: int | None = None  # random actions; default: total_steps/10, max 1e4
    update_every: int = 1  # environment steps per update
    batch_size: int = 256  # samples per update (usually 64 to 512)
    lr: float = 1e-3  # Adam's learning rate (1e-4 to 1e-3)
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    tau: float = 0.005  # Polyak coefficient of the target networks (0.001 to 0.02)
    alpha: float = 1.0  # temperature (0.05 to 1); with learn_alpha, its initial value
    learn_alpha: bool = True  # adjust the temperature by Eq. (8)
    target_entropy: float | None = None  # in nats; default -d, for d action dimensions
    hidden: tuple[int, ...] = (256, 256)  # hidden layer widths


# ======================================= agent ========================================
def relu_mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])  # no ReLU after the last layer


class Critic(nn.Module):
    """Observations [B, obs_dim], actions [B, act_dim] -> Q(s, a) [B]."""

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
    """Actor, two critics, two target critics and alpha, all saved in the state dict."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector", act="box")
        self.cfg = cfg
        self.obs_dim = obs_space.shape[0]
        self.act_dim = math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        self.actor = relu_mlp(self.obs_dim, *cfg.hidden, 2 * self.act_dim)
        self.critic = TwinCritic(self.obs_dim, self.act_dim, cfg.hidden)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(cfg.alpha)))
        if cfg.target_entropy is None:
            self.target_entropy = -float(self.act_dim)
        else:
            self.target_entropy = cfg.target_entropy

    def alpha(self) -> Scalar:
        """The temperature, detached: critic and actor losses take it as a constant."""
        if not self.cfg.learn_alpha:  # log_alpha may be that of another run: init_from
            return torch.tensor(self.cfg.alpha, device=self.low.device)
        return self.log_alpha.detach().exp()

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Observations -> actions [N, d]: sampled by Eq. (4), or tanh(mu)."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.low.device)
        actor_out = self.actor(obs)
        if deterministic:
            mean, _ = actor_out.chunk(2, dim=-1)
            return mean.tanh()
        act, _ = sample_squashed_gaussian(actor_out)
        return act

    def random_act(self, num_envs: int) -> Tensor:
        """Uniformly random actions [N, d], for the first steps."""
        return 2 * torch.rand(num_envs, self.act_dim, device=self.low.device) - 1

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`: rescaled from [-1, 1] to the action bounds."""
        act = act.view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, act / 2 + 0.5).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray:
        """One observation -> the deterministic action, for use after training."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]


# ======================================== data ========================================
@dataclass(frozen=True)
class Transitions:
    obs: Float32[Tensor, "B obs_dim"]
    act: Actions
    rew: PerSample
    next_obs: Float32[Tensor, "B obs_dim"]  # observations of s'
    terminated: PerSample  # 1 if s' is terminal; 0 otherwise, also at a time limit


class ReplayBuffer:
    """A ring of `capacity` transitions: new ones overwrite the oldest."""

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
            value = transition[name]
            assert value.shape == (num_envs, *column.shape[1:]), name
            column[rows] = value
        self.position = (self.position + num_envs) % self.capacity
        self.num_stored = min(self.num_stored + num_envs, self.capacity)

    def sample(self, batch_size: int) -> Transitions:
        """Uniformly random transitions, with replacement."""
        rows = torch.randint(self.num_stored, (batch_size,)).numpy()
        return Transitions(**self.gather(rows))

    def gather(self, rows: np.ndarray) -> dict[str, Tensor]:
        """Return these rows of every column. `take` is column[rows], but faster."""
        return {name: torch.from_numpy(column.take(rows, axis=0)).to(self.device)
                for name, column in self.columns.items()}

    def state_dict(self) -> dict:
        """Stored rows, for checkpoints, as views: copies would double the memory."""
        rows = {name: torch.from_numpy(column[: self.num_stored])
                for name, column in self.columns.items()}
        return {"columns": rows, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]
        self.num_stored = len(state["columns"]["rew"])
        for name, column in self.columns.items():
            column[: self.num_stored] = state["columns"][name].numpy()


def true_next_obs(new_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Observations of s', [N, ...]: `new_obs`, or "final_obs" if an episode ended."""
    next_obs = new_obs.copy()
    for i in np.flatnonzero(done):
        next_obs[i] = infos["final_obs"][i]
    return next_obs


def interact(agent: Agent, envs: gym.vector.VectorEnv, buffer: ReplayBuffer,
             obs: np.ndarray, act: Tensor) -> np.ndarray:
    """Step all environments, store the transitions, return the obs to act on."""
    new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    next_obs = true_next_obs(new_obs, terminated | truncated, infos)
    buffer.add(obs=obs, act=act.cpu().numpy(), rew=rew, next_obs=next_obs,
               terminated=terminated)
    return new_obs


# ==================================== mathematics =====================================
def td_target(rew: PerSample, terminated: PerSample, next_val: PerSample,
              gamma: float) -> PerSample:
    """Eq. (1): bootstrap unless terminated. A time limit is not a termination."""
    assert rew.shape == terminated.shape == next_val.shape
    return rew + gamma * (1 - terminated) * next_val


def q_loss(q: PerSample, target: PerSample) -> Scalar:
    """Eq. (2) for one critic."""
    assert q.shape == target.shape  # [B] minus [B, 1] would be [B, B]
    return (q - target).square().mean()


@torch.no_grad()
def polyak_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Eq. (3), in place: move the target's weights towards the source's."""
    for w_targ, w in zip(target.parameters(), source.parameters()):
        w_targ.lerp_(w, tau)  # w_targ + tau (w - w_targ)


def sample_squashed_gaussian(actor_out: ActorOut) -> tuple[Actions, PerSample]:
    """Sample actions [B, d]. Return them and their log pi [B]."""
    mean, log_std = actor_out.chunk(2, dim=-1)
    log_std = log_std.clamp(-20, 2)
    eps = torch.randn_like(mean)
    u = mean + log_std.exp() * eps  # Eq. (4)
    # log N(u; mu, sigma), where eps is (u - mu) / sigma.
    logp_u = -0.5 * eps.square() - log_std - 0.5 * math.log(2 * math.pi)
    # This is log(1 - tanh(u)^2), but stays finite for large |u|.
    log_jacobian = 2 * (math.log(2) - u - softplus(-2 * u))
    return u.tanh(), (logp_u - log_jacobian).sum(-1)  # Eq. (5)


def soft_value(q1: PerSample, q2: PerSample, logp: PerSample,
               alpha: Scalar) -> PerSample:
    """Eq. (6): min(Q_1, Q_2) - alpha log pi, for a sampled action."""
    assert q1.shape == q2.shape == logp.shape
    return torch.min(q1, q2) - alpha * logp


# ======================================= update =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (2): both critics learn the same target, which is held constant."""
    with torch.no_grad():
        next_act, next_logp = sample_squashed_gaussian(agent.actor(batch.next_obs))
        next_q1, next_q2 = agent.critic_targ(batch.next_obs, next_act)
        next_val = soft_value(next_q1, next_q2, next_logp, agent.alpha())  # Eq. (6)
        target = td_target(batch.rew, batch.terminated, next_val, agent.cfg.gamma)
    q1, q2 = agent.critic(batch.obs, batch.act)
    loss = q_loss(q1, target) + q_loss(q2, target)
    return loss, {"critic_loss": loss, "q1": q1, "q2": q2}


def actor_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (7). The gradient reaches the actor through `act` and `logp`."""
    act, logp = sample_squashed_gaussian(agent.actor(batch.obs))
    q1, q2 = agent.critic(batch.obs, act)
    loss = (agent.alpha() * logp - torch.min(q1, q2)).mean()
    return loss, {"actor_loss": loss, "logp": logp}


def alpha_loss(agent: Agent, logp: PerSample) -> tuple[Scalar, dict]:
    """Eq. (8). `logp` [B] is log pi of the actions that the actor's loss sampled."""
    loss = -agent.log_alpha * (logp.detach() + agent.target_entropy).mean()
    return loss, {"alpha_loss": loss, "alpha": agent.alpha()}


def update(agent: Agent, optimizers: mpi.Optimizers, batch: Transitions) -> dict:
    """Update critics, actor, alpha (if learned) and target critics. Return metrics."""
    cfg = agent.cfg
    metrics = optimizers.critic.minimize(critic_loss, agent, batch, lr=cfg.lr)
    metrics |= optimizers.actor.minimize(actor_loss, agent, batch, lr=cfg.lr)
    if cfg.learn_alpha:
        logp = metrics["logp"]
        metrics |= optimizers.alpha.minimize(alpha_loss, agent, logp, lr=cfg.lr)
    polyak_update(agent.critic_targ, agent.critic, cfg.tau)  # Eq. (3)
    return metrics


# ======================================= train ========================================
def num_start_steps(cfg: Config) -> int:
    """Number of initial steps with random actions. Updates start after them."""
    if cfg.start_steps is not None:
        return cfg.start_steps
    return min(10_000, int(cfg.total_steps / 10))


def num_updates(step: int, cfg: Config) -> int:
    """Total number of updates due once `step` environment steps have been taken."""
    return max(0, step - num_start_steps(cfg)) // cfg.update_every


def train(cfg: Config) -> Agent:
    """Train until `total_steps`, from the start or from a checkpoint.

    With several processes, `run.num_envs`, `run.buffer_size` and `run.batch_size` are
    this process's shares of the totals in `cfg`.
    """
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of the resumed run
        envs = make_envs(cfg, run.num_envs)
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizers = mpi.Optimizers(
            critic=mpi.Adam(agent.critic), actor=mpi.Adam(agent.actor),
            alpha=mpi.Adam(agent.log_alpha))
        buffer = ReplayBuffer(run.buffer_size, agent.obs_dim, agent.act_dim, run.device)
        # Tells `run` what to evaluate and save. Returns 0, or the saved step.
        step = run.restore(agent, optimizers=optimizers, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            if step < num_start_steps(cfg):
                act = agent.random_act(run.num_envs)
            else:
                act = agent.act(obs)
            obs = interact(agent, envs, buffer, obs, act)
            updates_before = num_updates(step, cfg)
            step += cfg.num_envs  # the environments of all processes
            # By default one update per step, once the random steps are over.
            for _ in range(num_updates(step, cfg) - updates_before):
                batch = buffer.sample(run.batch_size)
                metrics = update(agent, optimizers, batch)
                run.store(**metrics)  # the next report averages them
            run.report(step, envs)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
