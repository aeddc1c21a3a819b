"""Twin Delayed DDPG (TD3).  Fujimoto, van Hoof & Meger 2018, arXiv:1802.09477,
Algorithm 1.

The problem. DDPG (Deep Deterministic Policy Gradient) trains two networks. The
critic Q(s, a) learns the expected discounted return of taking action a in
state s and following the actor from then on. The actor pi(s) learns to output
the action that the critic rates highest. But the critic's estimates have
errors, and the highest estimate often belongs to an action whose error is
positive. So Q at the actor's action is, on average, too high. The critic is
trained towards a target y: the reward plus the discounted Q of the actor's
action in the next state. So y is too high as well, and the error spreads to
earlier states.

TD3 makes three changes. It trains two critics, Q_1 and Q_2, and uses the lower
value in y (clipped double Q-learning). It adds noise to the action in y (target
policy smoothing). It updates the actor less often than the critics (delayed
policy updates).

The algorithm, and where each step is coded:

    for each environment step:
        act by (4), but uniformly at random at first           act, random_act
        store (s, a, r, s', terminated) in the buffer          interact
        after the random actions:
            draw a random batch from the buffer                buffer.sample
            a' by (5), V(s') by (6), y by (1)                  critic_loss
            one Adam step on the critics' loss (2)             critic_loss
            every `policy_delay`-th time:                      update
                one Adam step on the actor's loss (7)          actor_loss
                move all target networks, (3)                  polyak_update

Notation. In state s (`obs` in the code), action a (`act`) gave reward r (`rew`)
and led to state s' (`next_obs`). V(s') (`next_val`) estimates the discounted
return from s' on, if the agent takes action a' (`next_act`) there.
`terminated` is 1 if s' is terminal. Unless it is, we bootstrap: V(s') stands in
for later rewards, even at a time limit, which does not end the task. `targ`
marks a target network: a copy that follows its network slowly, by (3). `mean`
is over the batch. gamma (the discount factor) and tau are settings. The numbers
of equations are out of order: each keeps that of its counterpart in ddpg.py.

The critics. They learn Q by regression on y (`target`). sigma_targ and c are
the settings target_noise and noise_clip. eps is a standard normal sample with
as many dimensions as a, drawn anew each time:

    a'      = clip(pi_targ(s') + clip(sigma_targ eps, -c, c), -1, 1)       (5)
    V(s')   = min(Q_1_targ(s', a'), Q_2_targ(s', a'))                      (6)
    y       = r + gamma (1 - terminated) V(s'), held constant in (2)       (1)
    L(Q)    = mean (Q_1(s, a) - y)^2 + mean (Q_2(s, a) - y)^2              (2)

(5) Similar actions should have similar values. If Q is much higher at one
action than at the actions around it, this narrow peak is probably an error.
Over many updates, the noise averages y over actions near pi_targ(s'), so a
narrow peak counts little. Clipping the noise to [-c, c] excludes actions that
are far away.
(6) Both critics learn the same y, but their initial weights differ, and so do
their errors. The minimum is too high only where both are. More often it is too
low, and y passes this error on too. But the actor does not amplify it: it seeks
actions that are rated too high, and so puts their values into more targets. It
avoids actions that are rated too low relative to others. An error that is equal
for all actions does not change which of them is best.
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

(3) If the critics themselves computed y, every gradient step would also move
its own target. For example, s and s' are often similar, so a step that raises
both critics at (s, a) often raises both at (s', a') too. That would raise y.
Errors could reinforce themselves, and learning could diverge. So y is computed
with copies of all three networks. (3) moves their weights only a fraction tau
of the way to w (Polyak averaging), so the copies change slowly. With tau =
0.005 they lag by about 1/tau = 200 such moves.

The actor. It learns actions with a high Q_1:

    L(pi)   = -mean Q_1(s, pi(s))                                          (7)

(7) By the chain rule, the gradient of L(pi) with respect to the actor's
weights w is -mean dQ_1/da dpi/dw, with dQ_1/da taken at a = pi(s). So a step
on (7) moves pi(s) towards actions with a higher Q_1. Only the actor changes. If
Q_1 changed too, it could lower the loss by overrating the actor's actions.
The actor needs only a direction in which to improve, so one critic is enough;
the paper uses Q_1. Q_2 has other errors, so in (6) it can correct the value of
an action that Q_1 overrates. The delay gives the critics `policy_delay` updates
to reduce their errors before the actor and the target networks follow them.

Exploration. sigma is the setting act_noise, and eps is as in (5):

    a       = clip(pi(s) + sigma eps, -1, 1)                               (4)

(4) A deterministic policy does not explore, so noise is added to its actions
while collecting data. The buffer stores the noisy action, because that is the
one that led to r and s'. Evaluation uses no noise.

Policy, buffer and critics use actions in [-1, 1], the range of the actor's
tanh; `env_act` rescales them to the environment's bounds. Observations and
rewards are not normalised.

Compared with DDPG: (1), (3) and (4) are as in algos/ddpg.py. To get DDPG back,
set policy_delay = 1 and target_noise = 0, and in `critic_loss` use `next_q1` in
place of the minimum. Then Q_2 still learns, but y and the actor ignore it.

Departures from the paper. Layers have 256 and 256 units (paper: 400 and 300),
batches have 256 samples (100), and the actions in (4) and (5) are clipped to
[-1, 1]: all three as in the authors' later code (github.com/sfujim/TD3). So is
the unit of the noise, half the action range. The number of random steps at the
start depends on total_steps, not on the environment (paper: 10,000 on
HalfCheetah and Ant, 1,000 elsewhere). Updates start after these steps, as in
the later code; in Algorithm 1 every step is followed by an update.

Defaults: the first 10,000 actions are random, or the first tenth of total_steps
if that is less. They put actions from the whole range into the buffer. Then
every environment step is followed by one update on a batch of 256. Every second
update includes the actor and the target networks. In a healthy run `q1` and
`q2` start near 0 and stay close together. With rewards of at most r per step
they should not exceed r / (1 - gamma). If they do, or if they grow on and on
while the return does not, the critics probably overestimate. `critic_loss`
grows with the scale of Q, so it need not fall.

Read after    algos/ddpg.py, then:  diff algos/ddpg.py algos/td3.py
Try           python -m algos.td3 --env Pendulum-v1 --total-steps 1e4
Reproduce     python -m algos.td3    (learning curves: benchmarks/README.md)
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
    target_noise: float = 0.2  # sigma_targ, the noise std in Eq. (5) (0.1 to 0.3)
    noise_clip: float = 0.5  # c, the bound on the noise in Eq. (5) (0.3 to 0.5)
    policy_delay: int = 2  # critic updates per actor update (1 to 3)
    hidden: tuple[int, ...] = (256, 256)  # hidden layer widths

    def __post_init__(self):
        check_settings(self, nonnegative="act_noise target_noise noise_clip")


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
    """Actor, two critics and a target network for each, all saved in the state dict."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector", act="box")
        self.cfg = cfg
        self.obs_dim = obs_space.shape[0]
        self.act_dim = math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        self.actor = relu_mlp(self.obs_dim, *cfg.hidden, self.act_dim).append(nn.Tanh())
        self.critic = TwinCritic(self.obs_dim, self.act_dim, cfg.hidden)
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


def add_clipped_noise(act: Actions, sigma: float, limit: float) -> Actions:
    """Eq. (5): like `add_noise`, but first the noise is clipped as well."""
    noise = (sigma * torch.randn_like(act)).clamp(-limit, limit)
    return (act + noise).clamp(-1, 1)


# ======================================= update =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (2): both critics learn the same target, which is held constant."""
    cfg = agent.cfg
    with torch.no_grad():
        next_act = agent.actor_targ(batch.next_obs)  # Eq. (5)
        next_act = add_clipped_noise(next_act, cfg.target_noise, cfg.noise_clip)
        next_q1, next_q2 = agent.critic_targ(batch.next_obs, next_act)
        next_val = torch.min(next_q1, next_q2)  # Eq. (6)
        target = td_target(batch.rew, batch.terminated, next_val, cfg.gamma)
    q1, q2 = agent.critic(batch.obs, batch.act)
    loss = q_loss(q1, target) + q_loss(q2, target)
    return loss, {"critic_loss": loss, "q1": q1, "q2": q2}


def actor_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (7). The gradient passes through Q_1 and `act` to the actor.

    `minimize` changes only the actor's parameters, not those of the critic.
    """
    act = agent.actor(batch.obs)
    loss = -agent.critic.q1(batch.obs, act).mean()
    return loss, {"actor_loss": loss}


def update(agent: Agent, optimizers: mpi.Optimizers, batch: Transitions,
           count: int) -> dict:
    """Update the critics and, if due, actor and target networks. Return the metrics.

    `count` is the number of updates before this one. Every `policy_delay`-th update
    includes the actor and the target networks."""
    cfg = agent.cfg
    metrics = optimizers.critic.minimize(critic_loss, agent, batch, lr=cfg.lr)
    if (count + 1) % cfg.policy_delay == 0:
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
            # `count` follows from `step` alone, so it is right after --resume too.
            for count in range(updates_before, num_updates(step, cfg)):
                batch = buffer.sample(run.batch_size)
                metrics = update(agent, optimizers, batch, count)
                run.store(**metrics)  # the next report averages them
            run.report(step, envs)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
