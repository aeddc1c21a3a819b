"""Rainbow: DQN with six improvements.  Hessel et al. 2018, arXiv:1710.02298.

The problem. DQN was improved in many ways, each published alone. Do they add up?

The idea. Take six at once. On Atari, Rainbow learned faster than each of its parts.

    distribution   the critic learns a histogram of the return; see c51.py
    double DQN     Q chooses the target's action, Q_targ rates it; see dqn.py
    dueling        Q has a part that all actions share; see Critic
    n-step         the target adds up several rewards; see NStepBuffer.add_up
    priorities     replay what fits badly; see NStepBuffer.sample
    noisy layers   random weights explore, not epsilon; see NoisyLinear

One step of `train`:

    agent.act        a = argmax_a Q(s, a) under one draw of the noise
    interact         take a; store (s, a, r, s', terminated, ended) in the buffer
    sample           once per `update_every` steps, draw a batch by the priorities u
    update           take an Adam step on critic_loss
    set_priorities   give this batch new u, from the divergence that critic_loss saw
    (copy)           once per `target_every` steps, critic_targ <- critic

Departures from the paper. b and A share hidden layers. For images, only the last layer
is noisy. Adam's eps is 1e-8, and lr falls to 0. For ALE, take the paper's table 1.

Healthy values. On CartPole `q` rises to between 95 and 100, the end of the support,
`q_loss` falls below 0.1, `weight` from 0.6 to 0.2, `clipped` stays 0.

Run   python -m algos.rainbow --env CartPole-v1
Diff  diff algos/c51.py algos/rainbow.py
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
from torch.nn.functional import linear

# mpi: several processes may share the environments and each batch. Config has totals;
# mpi.share(total) is the part of this process.
from utils import mpi
from utils.buffers import SavedRows, check_memory
from utils.envs import make_envs
from utils.errors import UsageError
from utils.nets import head_sizes, make_encoder
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
    total_steps: float = 1e5  # environment steps
    num_envs: int = 1  # N, parallel environments
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 20_000  # transitions in the replay buffer
    start_steps: Natural = 1000  # environment steps before the updates start
    update_every: int = 2  # environment steps per update
    target_every: int = 200  # environment steps between copies to critic_targ
    batch_size: int = 128  # B, samples per update (usually 32 to 512)
    lr: Positive = 5e-4  # Adam's initial learning rate (1e-5 to 3e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    n_step: int = 3  # h, rewards in a target (1 to 5; 1: as in C51)
    omega: Fraction = 0.5  # exponent of the priorities u (0 to 0.7; 0: uniform replay)
    beta_start: Fraction = 0.4  # initial exponent of the weights w (0.4 to 1)
    sigma_init: float = 0.5  # scale of the noise at first (0.1 to 0.5; 0: learn none)
    num_atoms: int = 51  # n, atoms (21 to 101)
    v_min: Real = -100.0  # z_0; symmetric, so that Q is near 0 at first
    v_max: Real = 100.0  # z_{n-1}; 1 / (1 - gamma) for rewards of 1
    hidden: tuple[int, ...] = (128, 128)  # hidden layer widths, unless obs is an image
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster
    for_games = {  # for MinAtar/ and ALE/, unless a flag says otherwise
        "total_steps": 1e6, "num_envs": 8, "start_steps": 5000, "update_every": 4,
        "target_every": 1000, "batch_size": 32, "buffer_size": 100_000,
        "v_min": -20.0, "v_max": 20.0}
    for_atari = {"v_min": -10.0, "v_max": 10.0}  # for ALE/: clipped rewards

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "num_atoms", low=2, high=1000)  # raises UsageError
        check_range(self, "n_step", low=1, high=1000)
        check_range(self, "v_max", above=self.v_min)


# ===================================== data types =====================================
@dataclass(frozen=True)
class Transitions:
    """B random samples of the buffer. Action a in state s, then others, led to s'."""

    obs: Observations  # s
    act: Choices  # a
    rew: PerSample  # r, the discounted sum of up to h rewards on the way to s'
    discount: PerSample  # d, gamma to the power of their number; 0 if s' is terminal
    next_obs: Observations  # s', up to h steps after s, never of the next episode
    rows: Choices  # where s is in the buffer
    weight: PerSample  # w


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = Adam(agent.critic)  # critic_targ only gets copies
        buffer = NStepBuffer(
            mpi.share(cfg.buffer_size), envs.single_observation_space,
            mpi.share(cfg.num_envs), run.device)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, optimizer=optimizer, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            beta = cfg.beta_start + (1 - cfg.beta_start) * step / cfg.total_steps
            act = agent.act(obs)
            obs = interact(agent, envs, buffer, obs, act)
            updates_before = num_updates(step, cfg)
            step += cfg.num_envs  # the environments of all processes
            for _ in range(updates_before, num_updates(step, cfg)):
                batch = buffer.sample(mpi.share(cfg.batch_size), cfg, beta)
                metrics = update(agent, optimizer, batch, lr)
                buffer.set_priorities(batch.rows, metrics["kl"] ** cfg.omega)
                run.store(**metrics)  # the next row of the log averages them
            if step % cfg.target_every < cfg.num_envs:  # reached or passed a multiple
                agent.critic_targ.load_state_dict(agent.critic.state_dict())
            run.report(step, envs, beta=beta, lr=lr)  # if due: log, evaluate, save
    return agent


def num_updates(step: int, cfg: Config) -> int:
    """Total number of updates due once `step` environment steps have been taken."""
    return max(0, step - cfg.start_steps) // cfg.update_every


def interact(agent: Agent, envs: gym.vector.VectorEnv, buffer: NStepBuffer,
             obs: np.ndarray, act: Tensor) -> np.ndarray:
    """Step all environments, store the transitions, return the obs to act on."""
    new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    next_obs = new_obs.copy()
    for i in np.flatnonzero(terminated | truncated):  # new_obs[i] is the next episode's
        next_obs[i] = infos["final_obs"][i]
    buffer.add(obs=obs, act=act.cpu().numpy(), rew=rew, next_obs=next_obs,
               terminated=terminated, ended=terminated | truncated)
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
    """p(s, a) fits m, the distribution of r plus d times a return from s'.

        a' = argmax_a Q(s', a), where Q is the mean: see `mean_of`
        m  = p_targ(s', a'), moved to r + d z: see `project`
        L  = -mean w sum_i m_i log p_i(s, a), where m is a constant

    r and d are those of up to h steps (`n_step`). All actions after a are old ones from
    the buffer, while Q should tell what today's policy reaches. No weight corrects
    this: worse actions pull Q down until the buffer forgets them.

    `kl` is KL(m || p): the cross-entropy without the entropy of m, which no p can
    lower. It decides the priorities. Where r or s' is random, it never falls to 0: m is
    one outcome, p the mean of all. Such samples are replayed more than they can teach.
    """
    with torch.no_grad():  # the critic moves towards the target, not vice versa
        next_act = mean_of(agent.critic(batch.next_obs), agent.atoms).argmax(-1)  # a'
        next_logp = at_action(agent.critic_targ(batch.next_obs), next_act)
        target, clipped = project(
            batch.rew, batch.discount, next_logp.exp(), agent.atoms)
    logp = at_action(agent.critic(batch.obs), batch.act)
    assert logp.shape == target.shape  # [B, n]
    cross_entropy = -(target * logp).sum(-1)
    assert cross_entropy.shape == batch.weight.shape  # [B]
    loss = (batch.weight * cross_entropy).mean()
    entropy = torch.special.entr(target).sum(-1)  # -sum_i m_i log m_i
    kl = (cross_entropy.detach() - entropy).clamp(min=1e-6)  # rounding may go below 0
    return loss, {"q_loss": loss.detach(), "q": mean_of(logp.detach(), agent.atoms),
                  "kl": kl, "weight": batch.weight, "clipped": clipped}


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
class NoisyLinear(nn.Linear):
    """y = (W + S E) x + b + s e: a linear layer with random weights.

    S E and s e are elementwise products with noise of mean 0. S and s are learned, too:
    the gradient shrinks them where noise makes the critic fit worse (Fortunato et al.
    2018, arXiv:1706.10295). Each call draws new noise, one for all rows.

    Each input and each output has a normal number x and f(x) = sign(x) sqrt|x|. E_ij is
    the product of f of output i and of input j, and e_i is that of output i alone.
    """

    def __init__(self, inputs: int, outputs: int, sigma_init: float):
        super().__init__(inputs, outputs)  # W and b: uniform up to 1 / sqrt(inputs)
        sigma, learn = sigma_init / math.sqrt(inputs), sigma_init > 0
        self.weight_sigma = nn.Parameter(torch.full_like(self.weight, sigma), learn)
        self.bias_sigma = nn.Parameter(torch.full_like(self.bias, sigma), learn)  # s

    def forward(self, x: Float32[Tensor, "B I"], noisy: bool) -> Float32[Tensor, "B O"]:
        if not noisy:
            return super().forward(x)
        noise = torch.randn(self.in_features + self.out_features, device=x.device)
        noise = noise.sign() * noise.abs().sqrt()  # f
        noise_in, noise_out = noise.split([self.in_features, self.out_features])
        weight = self.weight + self.weight_sigma * torch.outer(noise_out, noise_in)
        return linear(x, weight, self.bias + self.bias_sigma * noise_out)


class Critic(nn.Module):
    """Observations [B, ...] -> log p_i(s, a) for k actions and n atoms, [B, k, n].

    Dueling: p(s, a) is the softmax over i of b_i(s) + A_i(s, a) - mean_a A_i(s, a). b
    learns from every sample, whichever action was taken.
    """

    def __init__(self, obs_space: gym.Space, num_acts: int, cfg: Config):
        super().__init__()
        self.shape = (num_acts + 1, cfg.num_atoms)
        self.encoder = make_encoder(obs_space, cfg.bf16)
        sizes = [*head_sizes(obs_space, cfg.hidden), math.prod(self.shape)]
        self.head = nn.ModuleList(NoisyLinear(inputs, outputs, cfg.sigma_init)
                                  for inputs, outputs in zip(sizes, sizes[1:]))

    def forward(self, obs: Observations, noisy: bool = True) -> PerAction:
        out = self.head[0](self.encoder(obs).float(), noisy)
        for layer in self.head[1:]:
            out = layer(out.relu(), noisy)
        out = out.unflatten(-1, self.shape)
        base, adv = out[:, :1], out[:, 1:]  # b and A
        return (base + adv - adv.mean(1, keepdim=True)).log_softmax(-1)


class Agent(Policy):  # which adds predict(obs)
    """The critic, its target network, and what else acting needs."""

    takes = {"obs": "vector image dict", "act": "discrete"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.critic = Critic(obs_space, int(act_space.n), cfg)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        atoms = torch.linspace(cfg.v_min, cfg.v_max, cfg.num_atoms)
        self.register_buffer("atoms", atoms)  # z_0, ..., z_{n-1}

    def adopt(self, state: dict) -> None:
        """UsageError if weights for --init-from were trained with other atoms."""
        atoms = state["atoms"]
        if not torch.equal(atoms.to(self.atoms), self.atoms):
            raise UsageError(f"--init-from: its weights need --num-atoms {len(atoms)} "
                             f"--v-min {atoms[0]:g} --v-max {atoms[-1]:g}")
        sigmas = {name: x for name, x in self.state_dict().items() if "sigma" in name}
        super().adopt(state | sigmas)  # those of sigma_init, so that it explores anew

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N]: argmax_a Q, which noise varies."""
        obs = torch.as_tensor(obs, device=self.atoms.device)
        logp = self.critic(obs, noisy=not deterministic)
        return mean_of(logp, self.atoms).argmax(-1)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`."""
        return act.cpu().numpy()


# ======================================= buffer =======================================
class NStepBuffer(SavedRows):  # which adds its state dict
    """A ring of transitions; num_envs rows on is the next one of an environment."""

    def __init__(self, capacity: int, obs_space: gym.Space, num_envs: int,
                 device: torch.device):
        obs_dtype = np.dtype(np.uint8 if is_image(obs_space) else np.float32)
        obs_shape = (capacity, *obs_space.shape)
        obs_bytes = obs_dtype.itemsize * math.prod(obs_shape)
        check_memory("--buffer-size", capacity, 2 * obs_bytes + 25 * capacity)
        self.capacity, self.num_envs = capacity, num_envs
        self.device = device  # where batches go; the storage stays in CPU memory
        self.columns = {
            "obs": np.empty(obs_shape, obs_dtype),
            "act": np.empty(capacity, np.int64),
            "rew": np.empty(capacity, np.float32),
            "next_obs": np.empty(obs_shape, obs_dtype),
            "terminated": np.empty(capacity, np.float32),
            "ended": np.empty(capacity, bool),  # terminated, or by a time limit
            "priority": np.empty(capacity, np.float64)}  # u
        self.num_stored = 0
        self.position = 0  # the row to write next

    def add(self, **transition: np.ndarray) -> None:
        """Store one transition per environment; every array is [N, ...]."""
        highest = self.columns["priority"][: self.num_stored].max(initial=1.0)
        transition["priority"] = np.full(self.num_envs, highest)  # at least 1
        rows = (self.position + np.arange(self.num_envs)) % self.capacity
        for name, column in self.columns.items():
            assert transition[name].shape == (self.num_envs, *column.shape[1:]), name
            column[rows] = transition[name]
        self.position = (self.position + self.num_envs) % self.capacity
        self.num_stored = min(self.num_stored + self.num_envs, self.capacity)

    def sample(self, batch_size: int, cfg: Config, beta: float) -> Transitions:
        """Draw row i with probability P(i) = u_i / sum_k u_k; dqn_per.py explains w.

            w_i = (min_k P(k) / P(i))^beta, where k is over the batch
        """
        columns = self.columns
        edge = np.cumsum(columns["priority"][: self.num_stored])  # ends of intervals
        offset = torch.rand(batch_size, dtype=torch.float64).numpy()  # in each segment
        point = (np.arange(batch_size) + offset) / batch_size * edge[-1]
        rows = np.searchsorted(edge, point, side="right")
        rows = rows.clip(max=self.num_stored - 1)  # rounding may go beyond the end
        prob = columns["priority"][rows] / edge[-1]
        lowest = min(mpi.gather(prob.min().item()))  # over the batch of all processes
        weight = ((lowest / prob) ** beta).astype(np.float32)
        rew, discount, last = self.add_up(rows, cfg.n_step, cfg.gamma)
        return Transitions(*(torch.from_numpy(array).to(self.device) for array in (
            columns["obs"].take(rows, axis=0), columns["act"][rows], rew, discount,
            columns["next_obs"].take(last, axis=0), rows, weight)))

    def add_up(self, rows: np.ndarray, n_step: int, gamma: float) -> tuple:
        """Rows -> r, d, and the rows that led to s', by up to h = n_step rewards:

            r = r_0 + gamma r_1 + ... + gamma^(h-1) r_{h-1}
            d = gamma^h, or 0 if s', the state after them, is terminal

        h is less if the episode ends before, or if no later row is stored yet. After a
        time limit, critic_targ's estimate of s' replaces the rewards cut off, so d
        stays gamma^h.
        """
        columns, gamma, last = self.columns, np.float32(gamma), rows
        rew, discount = columns["rew"][rows], gamma
        for _ in range(n_step - 1):
            newest = (self.position - 1 - last) % self.capacity < self.num_envs
            more = ~(columns["ended"][last] | newest)
            last = np.where(more, (last + self.num_envs) % self.capacity, last)
            rew = rew + more * discount * columns["rew"][last]
            discount = np.where(more, discount * gamma, discount)
        return rew, discount * (1 - columns["terminated"][last]), last

    def set_priorities(self, rows: Choices, priority: PerSample) -> None:
        """Store the priorities of transitions that were just sampled."""
        self.columns["priority"][rows.cpu().numpy()] = priority.cpu().numpy()

    def load_state_dict(self, state: dict) -> None:
        """Go on after a checkpoint, with new episodes: what is newest ends there."""
        super().load_state_dict(state)
        newest = (self.position - 1 - np.arange(self.num_envs)) % self.capacity
        self.columns["ended"][newest] = True


if __name__ == "__main__":
    main(train, Config, __doc__)
