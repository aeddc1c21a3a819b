"""Categorical DQN (C51).  Bellemare, Dabney & Munos 2017, arXiv:1707.06887.

The problem. The return after action a in state s is random. Q(s, a) is only its mean: a
sure return of 50 and an even gamble between 0 and 100 have the same Q.

The idea. Let the critic learn the distribution of the return, a histogram: fixed values
z_0, ..., z_{n-1}, called atoms, with probabilities p_i(s, a). Bellman's equation holds
for distributions, too: a return from s is r plus gamma times a return from s'. So the
target moves each z_i to r + gamma z_i and splits p_i between the two atoms next to it.
Only the mean, Q(s, a), chooses actions; why learning more helps is not well understood.
One step of `train`:

    agent.act   a = argmax_a Q(s, a), or with probability eps a random action
    interact    take a; store (s, a, r, s', terminated) in the buffer
    update      once per `update_every` steps, one Adam step on critic_loss
    (copy)      once per `target_every` steps, critic_targ <- critic (see dqn.py)

The support. No discounted return is larger than max |r| / (1 - gamma). Those beyond
v_min and v_max look alike: if `clipped`, their share, stays above 0.05, widen it.

Departures from the paper. Double DQN (see critic_loss) and the dueling network (see
dueling_logits) are not in it; --no-double --no-dueling turn them off. Its projection
loses probability (see project). The learning rate falls to 0, `target_every` counts
environment steps, and eps falls from the first step on.

Healthy values. On CartPole `q` is above 60 from step 30,000 on and ends between 90 and
95, `q_loss` falls from log n = 3.9 to below 0.4. From step 80,000 on, nearly all
episodes last all 500 steps.

Run   python -m algos.c51 --env CartPole-v1
Diff  diff algos/dqn.py algos/c51.py
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

# mpi        several processes may share the environments and each batch. Config has
#            totals; mpi.share(total) is the part of this process
# make_envs  when an episode ends, the same `step` starts a new one and returns its
#            first obs; infos["final_obs"] has the last obs of the old one
from utils import mpi
from utils.buffers import SavedRows, check_memory
from utils.envs import make_envs
from utils.errors import UsageError
from utils.nets import head_sizes, make_encoder, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import (
    Fraction, Natural, Positive, Real, Run, RunConfig, check_range, main)
from utils.spaces import is_image

# Shapes, which the tests check at every call.
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
PerAction = Float32[Tensor, "B k n"]  # n log-probabilities for each of k actions
PerAtom = Float32[Tensor, "B n"]  # those, or the probabilities, of one action
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
    num_atoms: int = 51  # n, atoms (21 to 101)
    v_min: Real = -100.0  # z_0; symmetric, so that Q is near 0 at first
    v_max: Real = 100.0  # z_{n-1}; 1 / (1 - gamma) for rewards of 1
    hidden: tuple[int, ...] = (128, 128)  # hidden layer widths, unless obs is an image
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster
    for_games = {  # for MinAtar/ and ALE/, unless a flag says otherwise
        "total_steps": 1e6, "num_envs": 8, "start_steps": 5000, "update_every": 4,
        "target_every": 1000, "batch_size": 32, "eps_end": 0.01, "eps_steps": 100_000,
        "buffer_size": 50_000, "v_min": -20.0, "v_max": 20.0}
    for_atari = {"v_min": -10.0, "v_max": 10.0}  # for ALE/: clipped rewards

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "num_atoms", low=2, high=1000)  # raises UsageError
        check_range(self, "v_max", above=self.v_min)


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
        # The paper's eps: a small gradient makes a small step. With 1e-8, steps stay
        # large when little is left to learn, and the return drops again and again.
        optimizer = Adam(agent.critic, eps=3e-4)  # critic_targ only gets copies
        buffer = ReplayBuffer(
            mpi.share(cfg.buffer_size), envs.single_observation_space, run.device)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, optimizer=optimizer, buffer=buffer)
        mpi.say(f"returns: from --v-min {cfg.v_min:g} to --v-max {cfg.v_max:g}")
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
    if metrics["clipped"].mean() > 0.05:
        mpi.say_once("returns lie beyond --v-min or --v-max and look alike: widen them")
    return metrics | {"grad_norm": optimizer.grad_norm()}


# ======================================= losses =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """p(s, a) fits m, the distribution of r plus gamma times a return from s'.

        Q  = sum_i p_i z_i, the mean: see `mean_of`
        a' = argmax_a Q(s', a) if `double`, else argmax_a Q_targ(s', a)
        d  = gamma (1 - terminated)
        m  = p_targ(s', a'), moved to r + d z: see `project`
        L  = -mean sum_i m_i log p_i(s, a), the cross-entropy; m is a constant

    Only a terminal state is worth 0: after a time limit, critic_targ's estimate of s'
    replaces the rewards cut off. r and s' depend on s and a, not on the policy that
    chose a, so old transitions will do.

    r and s' are random, so m differs from sample to sample. L is least where p is the
    mean of these m. It is the entropy of p there, so it does not fall to 0.

    If Q_targ also chooses a', the mean of m is too high on average, because it favours
    actions whose errors are positive. In Double DQN (van Hasselt et al. 2016,
    arXiv:1509.06461), Q chooses. Some bias remains: Q_targ is an older copy of Q, so
    both often overrate the same action.
    """
    with torch.no_grad():  # the critic moves towards the target, not vice versa
        next_targ = agent.critic_targ(batch.next_obs)
        next_logp = agent.critic(batch.next_obs) if agent.cfg.double else next_targ
        next_act = mean_of(next_logp, agent.atoms).argmax(-1)  # a'
        target, clipped = project(batch.rew, agent.cfg.gamma * (1 - batch.terminated),
                                  at_action(next_targ, next_act).exp(), agent.atoms)
    logp = at_action(agent.critic(batch.obs), batch.act)
    assert logp.shape == target.shape  # [B, n]
    loss = -(target * logp).sum(-1).mean()
    return loss, {"q_loss": loss.detach(), "q": mean_of(logp.detach(), agent.atoms),
                  "clipped": clipped}


def at_action(values: Float32[Tensor, "B k *n"], act: Choices
              ) -> Float32[Tensor, "B *n"]:
    """The values of one action per sample."""
    return values[torch.arange(len(act), device=act.device), act]


def mean_of(logp: Float32[Tensor, "B *k n"], atoms: Float32[Tensor, "n"]
            ) -> Float32[Tensor, "B *k"]:
    """Q(s, a) = sum_i p_i(s, a) z_i, the mean of the return."""
    return logp.exp() @ atoms


def project(rew: PerSample, discount: PerSample, next_prob: PerAtom,
            atoms: Float32[Tensor, "n"]) -> tuple[PerAtom, PerSample]:
    """m, the distribution of r + d z on the fixed atoms, where d is the discount.

    The probability p_i of z_i moves to x_i = r + d z_i, or to the end of the support if
    x_i lies outside. If s' is terminal, d is 0, and all of it moves to r. The atoms
    next to x_i share it: with x_i at index l + f, l an integer and 0 <= f < 1,

        m_l     += (1 - f) p_i
        m_{l+1} += f p_i

    `clipped` is the probability that atoms beyond the ends would get, if there were
    any. Where it is 0, the mean of m is r + d Q_targ(s', a').

    An example with d = 0.75, r = 1 and three atoms:

        z_i    p_i    x_i
        0      0.2    1        0.2 to m_1
        1      0.4    1.75     0.1 to m_1 and 0.3 to m_2
        2      0.4    2.5      0.4 to m_2, the end; 0.2 would go to an atom at 3

    So m is (0, 0.3, 0.7), and `clipped` is 0.2.

    A trap: Algorithm 1 of the paper takes the floor and ceiling of the index. If it is
    an integer, as for z_0 here, these are equal, and both shares are 0: p_i is lost.
    """
    assert rew.shape == discount.shape == next_prob.shape[:1]
    last = len(atoms) - 1  # index of the highest atom
    moved = rew[:, None] + discount[:, None] * atoms  # x, [B, n]
    free_index = (moved - atoms[0]) / (atoms[-1] - atoms[0]) * last
    index = free_index.clamp(0, last)  # l + f
    beyond = (free_index - index).abs().clamp(max=1)  # share of p for atoms out there
    clipped = (beyond * next_prob).sum(-1)
    below = index.floor()  # l
    prob_above = (index - below) * next_prob  # f p
    prob_below = next_prob - prob_above  # (1 - f) p
    below = below.long()
    above = (below + 1).clamp(max=last)  # if l is the last atom, f is 0
    target = torch.zeros_like(next_prob).scatter_add(-1, below, prob_below)
    return target.scatter_add(-1, above, prob_above), clipped


# ======================================= agent ========================================
class Critic(nn.Module):
    """Observations [B, ...] -> log p_i(s, a) for k actions and n atoms, [B, k, n]."""

    def __init__(self, obs_space: gym.Space, num_acts: int, cfg: Config):
        super().__init__()
        self.dueling, self.num_atoms = cfg.dueling, cfg.num_atoms
        self.encoder = make_encoder(obs_space, cfg.bf16)
        sizes = head_sizes(obs_space, cfg.hidden)
        num_outputs = num_acts + 1 if cfg.dueling else num_acts
        self.head = mlp([*sizes, num_outputs * cfg.num_atoms], nn.ReLU)

    def forward(self, obs: Observations) -> PerAction:
        out = self.head(self.encoder(obs).float()).unflatten(-1, (-1, self.num_atoms))
        out = dueling_logits(out[:, :1], out[:, 1:]) if self.dueling else out
        return out.log_softmax(-1)  # finite, unlike log(0)


def dueling_logits(base: Float32[Tensor, "B 1 n"], adv: PerAction) -> PerAction:
    """The logits of p(s, a), one for each atom: b(s) + A(s, a) - mean_a A(s, a).

    In many states all actions are worth nearly the same. b is this common part, and it
    learns from every sample, whichever action was taken. Without the mean of A, a
    constant could move from A to b and leave p as it is. Wang et al. 2016
    (arXiv:1511.06581) add up Q so, and give b and A separate hidden layers.
    """
    return base + adv - adv.mean(1, keepdim=True)


class Agent(Policy):  # which adds predict(obs)
    """The critic, its target network, and what else acting needs."""

    takes = {"obs": "vector image dict", "act": "discrete"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.num_acts = int(act_space.n)
        self.critic = Critic(obs_space, self.num_acts, cfg)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        atoms = torch.linspace(cfg.v_min, cfg.v_max, cfg.num_atoms)
        self.register_buffer("atoms", atoms)  # z_0, ..., z_{n-1}
        self.register_buffer("eps", torch.ones(()))  # probability of a random action

    def adopt(self, state: dict) -> None:
        """UsageError if weights for --init-from were trained with other atoms."""
        atoms = state["atoms"]
        if not torch.equal(atoms.to(self.atoms), self.atoms):
            raise UsageError(f"--init-from: its weights need --num-atoms {len(atoms)} "
                             f"--v-min {atoms[0]:g} --v-max {atoms[-1]:g}")
        super().adopt(state)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N]: any with probability eps, otherwise
        argmax_a Q(s, a). A greedy agent may never notice that it underrates an action.
        """
        obs = torch.as_tensor(obs, device=self.eps.device)
        best = mean_of(self.critic(obs), self.atoms).argmax(-1)
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
