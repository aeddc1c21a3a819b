"""Deep Deterministic Policy Gradient (DDPG).  Lillicrap et al. 2016,
arXiv:1509.02971, Algorithm 1.

The problem. Q-learning picks a = argmax_a Q(s, a), where Q(s, a) is the
expected discounted return, E sum_t gamma^t r_t, of taking action a in state s
at t = 0 and acting well from then on. With five discrete actions the argmax
compares five numbers. With continuous actions it is an optimisation problem at
every step. DDPG therefore trains a second network beside the critic Q: the
actor pi(s), which returns the action that Q rates highest. The critic tells
the actor how to improve, since the gradient of Q with respect to a points
towards better actions. Q in turn learns the value of following pi.

Notation. s' is the state that follows s, and V(s') its value. `terminated` is
1 if s' is terminal. If only a time limit ends the episode, it is 0: rewards
would have followed, so we still bootstrap from V(s'). Every transition goes
into a replay buffer, and every update uses a random batch from it. Earlier
policies collected most of these transitions. We may still learn from them
("off-policy"): r and s' depend only on s and a, not on the policy that chose
a, and V(s') in (1) uses the target copy of the present actor. The targets y
use copies of both networks that follow them slowly, Q_targ and pi_targ, so y
changes only a little per update. w stands for a network's weights, and `mean`
is over the batch.

    y       = r + gamma (1 - terminated) V(s'), held constant in (2)       (1)
    L(Q)    = mean (Q(s, a) - y)^2                                         (2)
    w_targ <- w_targ + tau (w - w_targ)                                    (3)

DDPG's actions and losses. sigma is the setting act_noise, and eps is standard
normal noise in as many dimensions as a:

    a       = clip(pi(s) + sigma eps, -1, 1)                               (4)
    a'      = pi_targ(s')                                                  (5)
    V(s')   = Q_targ(s', a')                                               (6)
    L(pi)   = -mean Q(s, pi(s))                                            (7)

Why each piece is there:

(1) This target is valid for any action a: r and s' depend only on s and a, and
a' in (5) comes from the actor, not from the buffer. So old transitions can be
reused, each many times. A random batch also mixes transitions from different
times, so its samples are less correlated than consecutive ones.
(3) Without target networks, an update that raises Q(s, a) often raises Q(s',
a') too, and therefore y, so that errors feed on themselves. With tau = 0.005
the copies lag about 1/tau = 200 updates behind.
(4) A deterministic policy does not explore, so noise is added to its actions
while collecting. The buffer stores the noisy action, because that is the one
that led to r and s'. Evaluation uses no noise.
(5) The target copy of the actor, like that of the critic, keeps y from moving
with every update.
(7) By the chain rule, the gradient of L(pi) with respect to the actor's
weights w is -mean dQ/da dpi/dw, with dQ/da taken at a = pi(s): the
deterministic policy gradient (Silver et al. 2014). This loss updates only the
actor. If it updated the critic too, the critic could lower it by rating all of
the actor's actions highly.

The weak point: the actor seeks out actions that the critic overestimates, and
(6) feeds these errors into the targets. TD3 was designed to reduce this.

The actor ends with tanh, so policy, buffer and critic all use actions in [-1,
1]; `env_act` rescales them to the environment's bounds. Observations and
rewards are not normalised.

Departures from the paper. The noise in (4) is independent across steps, with
sigma = 0.1; the paper uses an Ornstein-Uhlenbeck process with 0.2, in which
the authors of TD3 found no benefit. The action enters the critic at its first
layer (paper: the second). There is no batch normalisation and no weight decay.
Other settings, with the paper's in parentheses: learning rate 1e-3 (1e-4 for
the actor), tau 0.005 (0.001), batches of 256 (64), layers of 256 and 256 units
(400 and 300), PyTorch's initial weights in the last layers (at most 3e-3). The
first actions are uniformly random.

Defaults: actions are random for the first 10,000 steps, or for the first tenth
of total_steps if that is less. Then each environment step is followed by one
update of the critic, the actor and both targets, in that order, on the same
batch of 256. In a healthy run `critic_loss` stays bounded, and `q`, the mean
of Q over sampled transitions, levels off. If `q` keeps growing while the
return does not, the critic overestimates.

Read after    algos/dqn.py, for Q-learning with discrete actions
Try           python -m algos.ddpg --env Pendulum-v1 --total-steps 1e4
Reproduce     python -m algos.ddpg    (learning curves: benchmarks/README.md)
"""

import copy
import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from utils import mpi
from utils.envs import check_memory, make_envs
from utils.run import Run, RunConfig, check_settings, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Actions = Float32[Tensor, "B d"]  # in [-1, 1]
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
    act_noise: float = 0.1  # sigma, the std of the noise in Eq. (4) (0.05 to 0.3)
    hidden: tuple[int, ...] = (256, 256)  # hidden layer widths

    def __post_init__(self):
        check_settings(self, nonnegative="act_noise")


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


class Agent(nn.Module):
    """Actor, critic and the targets of both, all saved in the state dict."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector", act="box")
        self.cfg = cfg
        self.obs_dim = obs_space.shape[0]
        self.act_dim = math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        self.actor = relu_mlp(self.obs_dim, *cfg.hidden, self.act_dim).append(nn.Tanh())
        self.critic = Critic(self.obs_dim, self.act_dim, cfg.hidden)
        self.actor_targ = copy.deepcopy(self.actor).requires_grad_(False)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Observations -> actions [N, d]: with noise by Eq. (4), or pi(obs)."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.low.device)
        act = self.actor(obs)
        if deterministic:
            return act
        return add_noise(act, self.cfg.act_noise)

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
        self.device = device  # where batches go
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
        """These rows of every column. `take` equals column[rows] and is faster."""
        return {name: torch.from_numpy(column.take(rows, axis=0)).to(self.device)
                for name, column in self.columns.items()}

    def state_dict(self) -> dict:
        """The stored rows, for checkpoints. Views: copies would double the memory."""
        rows = {name: torch.from_numpy(column[: self.num_stored])
                for name, column in self.columns.items()}
        return {"columns": rows, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]
        self.num_stored = len(state["columns"]["rew"])
        for name, column in self.columns.items():
            column[: self.num_stored] = state["columns"][name].numpy()


def true_next_obs(new_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Observations of s', [N, ...]. An environment resets itself when its episode ends:
    `new_obs` then begins the next episode, and s' is in `infos["final_obs"]`."""
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


def add_noise(act: Actions, sigma: float) -> Actions:
    """Eq. (4): independent Gaussian noise in every dimension, then clipping."""
    return (act + sigma * torch.randn_like(act)).clamp(-1, 1)


# ======================================= update =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (2): the critic learns the target, which is held constant."""
    with torch.no_grad():
        next_act = agent.actor_targ(batch.next_obs)  # Eq. (5)
        next_val = agent.critic_targ(batch.next_obs, next_act)  # Eq. (6)
        target = td_target(batch.rew, batch.terminated, next_val, agent.cfg.gamma)
    q = agent.critic(batch.obs, batch.act)
    loss = q_loss(q, target)
    return loss, {"critic_loss": loss, "q": q}


def actor_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (7). The gradient reaches the actor through `act`."""
    act = agent.actor(batch.obs)
    loss = -agent.critic(batch.obs, act).mean()
    return loss, {"actor_loss": loss}


def update(agent: Agent, optimizers: mpi.Optimizers, batch: Transitions) -> dict:
    """Update critic, actor and the targets of both once. Return the metrics.

    `minimize` calls the loss, backpropagates to the parameters of this optimizer only,
    averages the gradient over processes and takes one Adam step. It returns the loss's
    metrics, detached; `run.report` averages each.
    """
    cfg = agent.cfg
    metrics = optimizers.critic.minimize(critic_loss, agent, batch, lr=cfg.lr)
    metrics |= optimizers.actor.minimize(actor_loss, agent, batch, lr=cfg.lr)
    polyak_update(agent.actor_targ, agent.actor, cfg.tau)  # Eq. (3)
    polyak_update(agent.critic_targ, agent.critic, cfg.tau)
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
            critic=mpi.Adam(agent.critic), actor=mpi.Adam(agent.actor))
        buffer = ReplayBuffer(run.buffer_size, agent.obs_dim, agent.act_dim, run.device)
        # 0 in a new run; with --resume, the step to continue from.
        step = run.restore(agent, optimizers=optimizers, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            if step < num_start_steps(cfg):
                act = agent.random_act(run.num_envs)
            else:
                act = agent.act(obs)
            obs = interact(agent, envs, buffer, obs, act)
            updates_before = num_updates(step, cfg)
            step += cfg.num_envs
            for _ in range(num_updates(step, cfg) - updates_before):
                batch = buffer.sample(run.batch_size)
                metrics = update(agent, optimizers, batch)
                run.store(**metrics)
            run.report(step, envs)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
