"""Deep Deterministic Policy Gradient (DDPG).  Lillicrap et al. 2016,
arXiv:1509.02971, Algorithm 1.

The problem. In Q-learning, Q(s, a) is the expected discounted return of taking
action a in state s and acting optimally from then on. The policy takes
argmax_a Q(s, a). With a few discrete actions, the argmax compares a few
numbers. With continuous actions, it is an optimisation problem at every step.
DDPG therefore trains two networks. The actor pi(s) learns to output the action
that the critic Q(s, a) rates highest: it follows the gradient of Q with
respect to a, which points towards actions with a higher Q. The critic learns
the expected discounted return of taking a in s and following pi from then on.
(Once pi is optimal, the two meanings of Q agree.) The critic is trained towards
a target y: the reward plus the discounted Q of the actor's action in the next
state.

The algorithm, and where each step is coded:

    for each environment step:
        act by (4), but uniformly at random at first           act, random_act
        store (s, a, r, s', terminated) in the buffer          interact
        after the random actions:
            draw a random batch from the buffer                buffer.sample
            a' by (5), V(s') by (6), y by (1)                  critic_loss
            one Adam step on the critic's loss (2)             critic_loss
            one Adam step on the actor's loss (7)              actor_loss
            move both target networks, (3)                     polyak_update

Notation. In state s (`obs` in the code), action a (`act`) gave reward r (`rew`)
and led to state s' (`next_obs`). V(s') (`next_val`) estimates the discounted
return from s' on, if the agent takes action a' (`next_act`) there.
`terminated` is 1 if s' is terminal. Unless it is, we bootstrap: V(s') stands in
for later rewards, even at a time limit, which does not end the task. `targ`
marks a target network: a copy that follows its network slowly, by (3). `mean`
is over the batch. gamma (the discount factor) and tau are settings.

The critic. It learns Q by regression on y (`target`):

    a'      = pi_targ(s')                                                  (5)
    V(s')   = Q_targ(s', a')                                               (6)
    y       = r + gamma (1 - terminated) V(s'), held constant in (2)       (1)
    L(Q)    = mean (Q(s, a) - y)^2                                         (2)

(6) The value of following pi from s' on is Q(s', pi(s')). (5) and (6) compute
it with the target networks, for the reason given at (3).
(1) Earlier policies collected most transitions in the buffer. We may still
learn from them ("off-policy"): (1) takes only r, s' and `terminated` from the
buffer. These depend on s and a, but not on the policy that chose a. And a' is
not from the buffer: the current target actor computes it anew in every update.
So each transition can be used many times.
(2) Q moves towards y, not y towards Q, because no gradient flows through y.
Consecutive transitions are correlated: a network trained on them in order fits
the latest ones and forgets the rest. A random batch mixes old and new ones.

Target networks. w stands for a network's weights, w_targ for its copy's:

    w_targ <- w_targ + tau (w - w_targ)                                    (3)

(3) If Q itself computed y, every gradient step would also move its own target.
For example, s and s' are often similar, so a step that raises Q(s, a) often
raises Q(s', a') too. That would raise y. Errors could reinforce themselves, and
learning could diverge. So y is computed with copies of both networks. (3) moves
their weights only a fraction tau of the way to w (Polyak averaging), so the
copies change slowly. With tau = 0.005 they lag by about 1/tau = 200 such moves.

The actor. It learns actions with a high Q:

    L(pi)   = -mean Q(s, pi(s))                                            (7)

(7) By the chain rule, the gradient of L(pi) with respect to the actor's
weights w is -mean dQ/da dpi/dw, with dQ/da taken at a = pi(s). Its negative is
the deterministic policy gradient (Silver et al. 2014), here averaged over
states from the buffer. So a step on (7) moves pi(s) towards actions with a
higher Q. Only the actor changes. If the critic changed too, it could lower the
loss by overrating the actor's actions.

Exploration. sigma is the setting act_noise, and eps is a standard normal sample
with as many dimensions as a, drawn anew each time:

    a       = clip(pi(s) + sigma eps, -1, 1)                               (4)

(4) A deterministic policy does not explore, so noise is added to its actions
while collecting data. The buffer stores the noisy action, because that is the
one that led to r and s'. Evaluation uses no noise.

Policy, buffer and critic use actions in [-1, 1], the range of the actor's
tanh; `env_act` rescales them to the environment's bounds. Observations and
rewards are not normalised.

DDPG's weak point is overestimation: the actor seeks out actions for which Q is
too high, and (6) carries these errors into the targets. TD3 (algos/td3.py) was
designed to reduce this.

Departures from the paper. The noise in (4) is independent across steps, with
sigma = 0.1. The paper's noise, an Ornstein-Uhlenbeck process with sigma = 0.2,
is correlated across steps; the authors of TD3 found no benefit in it. The
action enters the critic at its first layer (paper: the second). There is no
batch normalisation and no weight decay (the paper has both). The learning rate
is 1e-3 for both networks (paper: 1e-4 for the actor), tau is 0.005 (0.001),
batches have 256 samples (64), and layers have 256 and 256 units (400 and 300).
The last layers start with PyTorch's default weights, which are larger than the
paper's (at most 3e-3 in size). Three details are not in the paper's Algorithm
1: the factor 1 - terminated in (1), the clipping in (4), and the random actions
at the start, during which there are no updates.

Defaults: the first 10,000 actions are random, or the first tenth of total_steps
if that is less. They put actions from the whole range into the buffer. Then
every environment step is followed by one update on a batch of 256. In a healthy
run `q`, the mean of Q over sampled transitions, grows with the return. If `q`
keeps growing while the return does not, the critic probably overestimates. For
example, if no reward exceeds 1, no discounted return exceeds 1 / (1 - gamma) =
100, so a higher `q` is wrong. `critic_loss` grows with the scale of Q, so it
need not fall.

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
    """Actor, critic and a target network for each, all saved in the state dict."""

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
    """Eq. (7). The gradient passes through Q and `act` to the actor.

    `minimize` changes only the actor's parameters, not those of the critic.
    """
    act = agent.actor(batch.obs)
    loss = -agent.critic(batch.obs, act).mean()
    return loss, {"actor_loss": loss}


def update(agent: Agent, optimizers: mpi.Optimizers, batch: Transitions) -> dict:
    """Take one step on each loss, then move the target networks. Return metrics."""
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
            # By default: no update until the random actions end, then one per step.
            for _ in range(num_updates(step, cfg) - updates_before):
                batch = buffer.sample(run.batch_size)
                metrics = update(agent, optimizers, batch)
                run.store(**metrics)  # the next report averages them
            run.report(step, envs)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
