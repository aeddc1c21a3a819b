"""Quantile regression DQN (QR-DQN).  Dabney et al. 2018, arXiv:1710.10044.

The problem. The return after action a in state s is random; Q(s, a) is only its mean.
C51 learns its distribution as the probabilities of fixed values. Somebody has to know
the range of the returns, and every target has to be projected onto these values.

The idea. Fix the probabilities and learn the values: critic(s, a) is n equally likely
returns theta_1, ..., theta_n. They come nearest to the true distribution, in the
1-Wasserstein distance, if theta_i is a quantile: the return is below it with
probability tau_i = (i - 1/2) / n. The loss `quantile_huber` finds that place. The mean
of theta is Q(s, a). Double DQN and the dueling network are left out.
One step of `train`:

    agent.act   a = argmax_a Q(s, a), or with probability eps a random action
    interact    take a; store (s, a, r, s', terminated) in the buffer
    update      once per `update_every` steps, one Adam step on critic_loss
    (copy)      once per `target_every` steps, critic_targ <- critic

Departures from the paper. Adam's eps is 1e-8 (paper: 3e-4), and n is 25 (paper: 200).
The learning rate falls to 0, `target_every` counts environment steps, not updates, and
eps falls from the first step on. The settings are for CartPole and MinAtar.

Healthy values. On CartPole `q` rises above 90. `q_loss` is 2 to 9 at first, and below 1
in the end; it grows with n. `spread`, the standard deviation of theta, is 0.5 to 1.5 on
average, then falls below 0.5. While Q learns it is above 10 where the pole may fall:
states that look alike to the network have other returns.

Run   python -m algos.qr_dqn --env CartPole-v1
Diff  diff algos/dqn.py algos/qr_dqn.py, or diff algos/c51.py algos/qr_dqn.py
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
PerAction = Float32[Tensor, "B k n"]  # n quantiles per sample for each of k actions
PerQuantile = Float32[Tensor, "B n"]  # those of one action
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
    buffer_size: int = 50_000  # transitions in the replay buffer
    start_steps: Natural = 1000  # environment steps before the updates start
    update_every: int = 2  # environment steps per update
    target_every: int = 500  # environment steps between copies to critic_targ
    batch_size: int = 128  # B, samples per update (usually 32 to 512)
    lr: Positive = 2.5e-4  # Adam's initial learning rate (1e-5 to 3e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    eps_end: Fraction = 0.04  # final probability of a random action (0.01 to 0.1)
    eps_steps: int = 20_000  # environment steps in which eps falls from 1 to eps_end
    num_quantiles: int = 25  # n, quantiles (10 to 200)
    hidden: tuple[int, ...] = (128, 128)  # hidden layer widths, unless obs is an image
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster
    for_games = {  # for MinAtar/ and ALE/, unless a flag says otherwise
        "total_steps": 1e6, "num_envs": 8, "start_steps": 5000, "update_every": 4,
        "target_every": 1000, "batch_size": 32, "lr": 1e-3, "eps_end": 0.01,
        "eps_steps": 100_000}


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
    """theta(s, a) fits the quantiles of y, for the action a' that looks best in s'.

        a' = argmax_a Q_targ(s', a), where Q is the mean of theta
        y  = r + gamma (1 - terminated) theta_targ(s', a'), n constants
        L  = mean quantile_huber(theta(s, a), y)

    Only a terminal state is worth 0: after a time limit, critic_targ's estimate of s'
    replaces the rewards cut off. r and s' depend on s and a, not on the policy that
    chose a, so old transitions will do.

    r and s' are random, so y differs from sample to sample. theta_i nears the quantile
    of all y that belong to s and a, not that of the y in one sample.
    """
    with torch.no_grad():  # the critic moves towards the target, not vice versa
        next_targ = agent.critic_targ(batch.next_obs)
        next_quantiles = at_action(next_targ, next_targ.mean(-1).argmax(-1))  # of a'
        discount = agent.cfg.gamma * (1 - batch.terminated)
        target = batch.rew[:, None] + discount[:, None] * next_quantiles
    quantiles = at_action(agent.critic(batch.obs), batch.act)
    loss = quantile_huber(quantiles, target, agent.taus).mean()
    return loss, {"q_loss": loss.detach(), "q": quantiles.detach().mean(-1),
                  "spread": quantiles.detach().std(-1, correction=0)}


def quantile_huber(quantiles: PerQuantile, target: PerQuantile,
                   taus: Float32[Tensor, "n"]) -> PerSample:
    """sum_i mean_j |tau_i - [x_ij < 0]| h(x_ij), for the errors x_ij = y_j - theta_i.

        h(x) = x^2 / 2 if |x| < 1, else |x| - 1/2  (Huber loss; the paper: kappa = 1)

    [x < 0] is 1 if x < 0, else 0. A target far above theta_i pulls it up by tau_i, one
    far below pulls it down by 1 - tau_i. The pulls balance where a fraction tau_i of
    the targets is below: at the quantile. Targets within 1 of theta_i pull less, so
    that steps get shorter there. The price: the balance is within 1 of the quantile.
    """
    assert quantiles.shape == target.shape  # [B, 1] would pass through the lines below
    error = target[:, None, :] - quantiles[:, :, None]  # x_ij, [B, n, n]
    huber = huber_loss(error, torch.zeros_like(error), reduction="none")  # h
    weight = (taus[:, None] - (error < 0).float()).abs()
    return (weight * huber).mean(-1).sum(-1)


def at_action(values: Float32[Tensor, "B k *n"], act: Choices
              ) -> Float32[Tensor, "B *n"]:
    """The values of one action per sample."""
    return values[torch.arange(len(act), device=act.device), act]


# ======================================= agent ========================================
class Critic(nn.Module):
    """Observations [B, ...] -> theta_i(s, a) for k actions, [B, k, n]."""

    def __init__(self, obs_space: gym.Space, num_acts: int, cfg: Config):
        super().__init__()
        self.shape = (num_acts, cfg.num_quantiles)
        self.encoder = make_encoder(obs_space, cfg.bf16)
        sizes = head_sizes(obs_space, cfg.hidden)
        num_outputs = math.prod(self.shape)
        self.head = mlp([*sizes, num_outputs], nn.ReLU)

    def forward(self, obs: Observations) -> PerAction:
        out = self.head(self.encoder(obs).float())
        return out.unflatten(-1, self.shape)


class Agent(Policy):  # which adds predict(obs)
    """The critic, its target network, and what else acting needs."""

    takes = {"obs": "vector image dict", "act": "discrete"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.num_acts = int(act_space.n)
        self.critic = Critic(obs_space, self.num_acts, cfg)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        taus = (torch.arange(cfg.num_quantiles) + 0.5) / cfg.num_quantiles
        self.register_buffer("taus", taus)  # 1/(2n), 3/(2n), ..., 1 - 1/(2n)
        self.register_buffer("eps", torch.ones(()))  # probability of a random action

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N]: any with probability eps, otherwise
        argmax_a Q(s, a). A greedy agent may never notice that it underrates an action.
        """
        obs = torch.as_tensor(obs, device=self.eps.device)
        best = self.critic(obs).mean(-1).argmax(-1)
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
