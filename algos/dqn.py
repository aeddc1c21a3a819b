"""Deep Q-learning (DQN).  Mnih et al. 2015, Nature 518, 529.

The problem. Q(s, a) is the expected discounted return of taking action a in state s and
acting optimally from then on. It equals the mean of r + gamma max_a' Q(s', a'), with
reward r and next state s' (Bellman's equation). Q-learning moves Q(s, a) towards this
target. With a neural network, this often fails: it fits the latest transitions, which
are alike, and forgets the rest. Each step also moves the target, so errors can grow.

The idea. A remedy for each. A replay buffer gives random batches, which mix old and new
transitions. A target network Q_targ, an older copy of Q that is frozen between copies,
computes the target. The code calls them critic and critic_targ.
One step of `train`:

    agent.act   a = argmax_a Q(s, a), or with probability eps a random action
    interact    take a; store (s, a, r, s', terminated) in the buffer
    update      once per `update_every` steps, one Adam step on critic_loss
    (copy)      once per `target_every` steps, critic_targ <- critic

Departures from the paper. Double DQN (see critic_loss) and the dueling network (see
dueling_q) came later; --no-double --no-dueling turn them off. Adam replaces RMSProp.
The learning rate falls to 0, `target_every` counts environment steps, not updates, and
eps falls from the first step on. The settings are for CartPole and MinAtar.

Healthy values. On CartPole a discounted return is at most 1 / (1 - gamma) = 100. `q`
rises to 75 in 25,000 steps and ends between 95 and 115, since some bias remains; if it
goes on rising, Q diverges. `q_loss` is 2 to 5 at first and near 1 in the end. From step
80,000 on, most episodes last all 500 steps.

Run   python -m algos.dqn --env CartPole-v1
Next  diff algos/dqn.py algos/dqn_per.py    (or dqn_atari.py, c51.py, qr_dqn.py)
"""
from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor, nn
from torch.nn.functional import huber_loss

# mpi        several processes may share the environments and each batch. Config has
#            totals; mpi.share(total) is the part of this process
# make_envs  when an episode ends, the same `step` starts a new one and returns its
#            first obs; infos["final_obs"] has the last obs of the old one
from utils import mpi
from utils.buffers import SavedRows, check_memory
from utils.envs import make_envs
from utils.nets import head_sizes, make_encoder, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Natural, Positive, Run, RunConfig, main
from utils.spaces import is_image

# Shapes, which the tests check at every call.
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
PerAction = Float32[Tensor, "B k"]  # one number per sample for each of k actions
Observations = Shaped[Tensor, "B *obs"]  # as stored: images are uint8, vectors float32
Choices = Int64[Tensor, "B"]  # indices of actions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    env: str = "CartPole-v1"  # Gymnasium id
    total_steps: float = 1.5e5  # environment steps
    num_envs: int = 1  # N, parallel environments
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 150_000  # transitions in the replay buffer (CartPole: whole run)
    start_steps: Natural = 1000  # environment steps before the updates start
    update_every: int = 2  # environment steps per update
    target_every: int = 200  # environment steps between copies to critic_targ
    batch_size: int = 128  # B, samples per update (usually 32 to 512)
    lr: Positive = 5e-4  # Adam's initial learning rate (1e-5 to 3e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    eps_end: Fraction = 0.04  # final probability of a random action (0.01 to 0.1)
    eps_steps: int = 20_000  # environment steps in which eps falls from 1 to eps_end
    double: bool = True  # Double DQN: Q chooses the target's action, Q_targ rates it
    dueling: bool = True  # dueling network: learn what all actions have in common
    huber_delta: Positive = 100.0  # d, the error beyond which h is linear (1 to 100)
    hidden: tuple[int, ...] = (128, 128)  # hidden layer widths, unless obs is an image
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster
    for_games = {  # for MinAtar/ and ALE/, unless a flag says otherwise
        "total_steps": 1e6, "num_envs": 8, "start_steps": 5000, "update_every": 4,
        "target_every": 1000, "batch_size": 32, "lr": 1e-3, "eps_end": 0.01,
        "eps_steps": 100_000, "buffer_size": 50_000, "huber_delta": 1.0}


# ===================================== data types =====================================
@dataclass(frozen=True)
class Transitions:
    """B random samples of the buffer. Action a in state s gave r and led to s'."""

    obs: Observations  # s
    act: Choices  # a
    rew: PerSample  # r
    next_obs: Observations  # s', never of the next episode
    terminated: PerSample  # 1 if s' is terminal; 0 otherwise, also at a time limit


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = Adam(agent.critic)  # critic_targ only gets copies
        buffer = ReplayBuffer(
            mpi.share(cfg.buffer_size), envs.single_observation_space, run.device)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, optimizer=optimizer, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            # At first Q is no better than a guess, so eps falls from 1.
            eps = max(cfg.eps_end, 1 - (1 - cfg.eps_end) * step / cfg.eps_steps)
            agent.eps.fill_(eps)
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            act = agent.act(obs)
            obs = interact(agent, envs, buffer, obs, act)
            updates_before = num_updates(step, cfg)
            step += cfg.num_envs  # the environments of all processes
            # As many as became due in these num_envs steps: 0, 1 or more.
            for _ in range(updates_before, num_updates(step, cfg)):
                batch = buffer.sample(mpi.share(cfg.batch_size))
                metrics = update(agent, optimizer, batch, lr)
                run.store(**metrics)  # the next row of the log averages them
            if step % cfg.target_every < cfg.num_envs:  # reached or passed a multiple
                agent.critic_targ.load_state_dict(agent.critic.state_dict())
            run.report(step, envs, eps=agent.eps, lr=lr)  # if due: log, evaluate, save
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


def update(agent: Agent, optimizer: Adam, batch: Transitions, lr: float) -> dict:
    """Take one gradient step on a batch. Return metrics."""
    loss, metrics = critic_loss(agent, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.average_grads()  # over processes
    optimizer.step(lr)
    return metrics | {"grad_norm": optimizer.grad_norm()}


# ======================================= losses =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Q(s, a) fits y, which continues with the action a' that looks best in s'.

        a' = argmax_a Q(s', a) if `double`, else argmax_a Q_targ(s', a)
        y  = r + gamma (1 - terminated) Q_targ(s', a'), a constant
        L  = mean h(Q(s, a) - y), with h(x) = x^2 / 2 if |x| < d, else d (|x| - d/2)

    h is the Huber loss: no error pulls harder than one of d = huber_delta. Say y is 100
    in nine samples of ten and 0 in one. L should be least at their mean, 90, and is for
    large d. With d = 1, nine pull up and one pulls down, all by 1, and Q ends near 100,
    as if the one did not exist. So d should be above most errors: by default 100 for
    CartPole, and 1, as in the paper, for games, whose rewards are about 1.

    Only a terminal state is worth 0: after a time limit, critic_targ's estimate of s'
    replaces the rewards cut off. r and s' depend on s and a, not on the policy that
    chose a, so old transitions will do.

    If Q_targ also chooses a', y has the maximum of noisy estimates. It is too high on
    average, because it favours actions whose errors are positive. In Double DQN (van
    Hasselt et al. 2016, arXiv:1509.06461), Q chooses. Some bias remains: Q_targ is an
    older copy of Q, so both often overrate the same action.
    """
    with torch.no_grad():  # the critic moves towards the target, not vice versa
        next_targ = agent.critic_targ(batch.next_obs)
        next_q = agent.critic(batch.next_obs) if agent.cfg.double else next_targ
        next_val = at_action(next_targ, next_q.argmax(-1))  # of a'
        target = batch.rew + agent.cfg.gamma * (1 - batch.terminated) * next_val
    q = at_action(agent.critic(batch.obs), batch.act)
    assert q.shape == target.shape  # [B] minus [B, 1] would be [B, B]
    loss = huber_loss(q, target, delta=agent.cfg.huber_delta)  # h, averaged
    return loss, {"q_loss": loss.detach(), "q": q.detach()}


def at_action(values: Float32[Tensor, "B k *n"], act: Choices
              ) -> Float32[Tensor, "B *n"]:
    """The values of one action per sample."""
    return values[torch.arange(len(act), device=act.device), act]


# ======================================= agent ========================================
class Critic(nn.Module):
    """Observations [B, ...] -> Q(s, a) for each of k actions, [B, k]."""

    def __init__(self, obs_space: gym.Space, num_acts: int, cfg: Config):
        super().__init__()
        self.dueling = cfg.dueling
        self.encoder = make_encoder(obs_space, cfg.bf16)
        sizes = head_sizes(obs_space, cfg.hidden)
        num_outputs = num_acts + 1 if cfg.dueling else num_acts
        self.head = mlp([*sizes, num_outputs], nn.ReLU)

    def forward(self, obs: Observations) -> PerAction:
        out = self.head(self.encoder(obs).float())
        return dueling_q(out[:, :1], out[:, 1:]) if self.dueling else out


def dueling_q(base: Float32[Tensor, "B 1"], adv: PerAction) -> PerAction:
    """Q(s, a) = b(s) + A(s, a) - mean_a A(s, a)  (Wang et al. 2016, arXiv:1511.06581).

    In many states all actions are worth nearly the same. b is this common part, and it
    learns from every sample, whichever action was taken. The paper calls b V, but it is
    the mean of Q. Without the mean of A, a constant could move from A to b and leave Q
    as it is. The paper gives b and A separate hidden layers; here they share all.
    """
    return base + adv - adv.mean(-1, keepdim=True)


class Agent(Policy):  # which adds predict(obs)
    """The critic, its target network, and what else acting needs."""

    takes = {"obs": "vector image dict", "act": "discrete"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.num_acts = int(act_space.n)
        self.critic = Critic(obs_space, self.num_acts, cfg)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        self.register_buffer("eps", torch.ones(()))  # probability of a random action

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N]: any with probability eps, otherwise
        argmax_a Q(s, a). A greedy agent may never notice that it underrates an action.
        """
        obs = torch.as_tensor(obs, device=self.eps.device)
        best = self.critic(obs).argmax(-1)
        if deterministic:
            return best
        explore = torch.rand(best.shape, device=best.device) < self.eps
        return torch.where(explore, torch.randint_like(best, self.num_acts), best)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`."""
        return act.cpu().numpy()


# ======================================= buffer =======================================
class ReplayBuffer(SavedRows):  # which adds its state dict
    """A ring of `capacity` transitions: new ones overwrite the oldest."""

    def __init__(self, capacity: int, obs_space: gym.Space, device: torch.device):
        # Images stay uint8, a quarter of the memory. dqn_atari.py saves more.
        obs_dtype = np.dtype(np.uint8 if is_image(obs_space) else np.float32)
        obs_shape = (capacity, *obs_space.shape)
        obs_bytes = obs_dtype.itemsize * math.prod(obs_shape)
        check_memory("--buffer-size", capacity, 2 * obs_bytes + (8 + 4 + 4) * capacity)
        self.capacity = capacity
        self.device = device  # where batches go; the storage stays in CPU memory
        self.columns = {
            "obs": np.empty(obs_shape, obs_dtype),
            "act": np.empty(capacity, np.int64),
            "rew": np.empty(capacity, np.float32),
            "next_obs": np.empty(obs_shape, obs_dtype),
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
