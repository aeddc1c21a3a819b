"""DQN for Atari games.  Mnih et al. 2015, Nature 518, 529.

The problem. DQN learns Atari games from the screen, with a replay buffer of a million
transitions. One frame does not show motion, so an observation is a stack of the last 4
frames of 84 x 84 grey pixels. A million pairs of obs and next_obs would take 56 GB.

The idea. Each frame is in up to 8 of these stacks: in 4 as part of obs and in 4 as part
of next_obs. FrameBuffer stores it once, in 7 GB, and rebuilds the stacks of a batch.
One step of `train`:

    agent.act   a = argmax_a Q(s, a), or with probability eps a random action
    interact    take a; store (a, r, terminated) and the new frame in the buffer
    update      once per `update_every` steps, one Adam step on critic_loss
    (copy)      once per `target_every` steps, critic_targ <- critic

Preprocessing, in make_envs. A step repeats an action for 4 screens. The frame is the
pixelwise maximum of the last two: some games draw objects in every second one. Rewards
are clipped to [-1, 1], so that one learning rate suits all games; the log has scores.

Departures from the paper, besides those of dqn.py, but the learning rate stays. In each
screen the game repeats the last action with probability 0.25 ("sticky actions", Machado
et al. 2018). Episodes end at game over, not at a lost life. FIRE begins every life. 2.5
million steps (paper: 50); updates begin after 20,000 (50,000); eps falls to 0.01 in
250,000 (0.1 in a million); 250 updates per copy (10,000). Not yet run in full.

Healthy values. On Pong, by the rules of older tables, `q` falls to -1.5 within 200,000
steps and is at 1.1 after a million. The return leaves -20 after 350,000.

Run   python -m algos.dqn_atari --env ALE/Pong-v5
Diff  diff algos/dqn.py algos/dqn_atari.py
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
from utils.nets import ImageEncoder, cnn_out, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Natural, Positive, Run, RunConfig, main

# Shapes, which the tests check at every call.
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
PerAction = Float32[Tensor, "B k"]  # one number per sample for each of k actions
Observations = Shaped[Tensor, "B *obs"]  # as stored: images are uint8, vectors float32
Choices = Int64[Tensor, "B"]  # indices of actions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    env: str = "ALE/Pong-v5"  # Gymnasium id
    total_steps: float = 2.5e6  # environment steps
    num_envs: int = 1  # N, parallel environments
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 1_000_000  # frames in the replay buffer
    start_steps: Natural = 20_000  # environment steps before the updates start
    update_every: int = 4  # environment steps per update
    target_every: int = 1000  # environment steps between copies to critic_targ
    batch_size: int = 32  # B, samples per update (usually 32 to 512)
    lr: Positive = 1e-4  # Adam's initial learning rate (1e-5 to 1e-3)
    anneal_lr: bool = False  # anneal the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    eps_end: Fraction = 0.01  # final probability of a random action (0.01 to 0.1)
    eps_steps: int = 250_000  # environment steps in which eps falls from 1 to eps_end
    double: bool = True  # Double DQN: Q chooses the target's action, Q_targ rates it
    dueling: bool = True  # dueling network: learn what all actions have in common
    huber_delta: Positive = 1.0  # d, the error beyond which h is linear (1 to 100)
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster


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
        # ALE observations are [frames, height, width]. Elsewhere, axis 0 is no stack.
        obs_shape = envs.single_observation_space.shape
        num_frames = obs_shape[0] if "ALE/" in cfg.env else 1
        buffer = FrameBuffer(mpi.share(cfg.buffer_size), mpi.share(cfg.num_envs),
                             num_frames, obs_shape, run.device)
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


def interact(agent: Agent, envs: gym.vector.VectorEnv, buffer: FrameBuffer,
             obs: np.ndarray, act: Tensor) -> np.ndarray:
    """Step all environments, store the transitions, return the obs to act on."""
    new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    next_obs = new_obs.copy()
    for i in np.flatnonzero(terminated | truncated):  # new_obs[i] is the next episode's
        next_obs[i] = infos["final_obs"][i]
    buffer.add(obs=obs, act=act.cpu().numpy(), rew=rew, next_obs=next_obs,
               terminated=terminated, done=terminated | truncated)
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
        self.encoder = ImageEncoder(obs_space, cfg.bf16)
        sizes = cnn_out(obs_space)  # its outputs, (512,) or (128,)
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

    takes = {"obs": "image", "act": "discrete"}  # utils/spaces.py

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
class FrameBuffer(SavedRows):  # which adds its state dict
    """`capacity` frames, in a ring per environment: new ones overwrite the oldest.

    With f_k the frame in row k and n frames per stack, the transition in row k is

        s = (f_{k-n+1}, ..., f_k)  ->  s' = (f_{k-n+2}, ..., f_{k+1})

    A step writes only the newest frame of s', and the first stack of an episode is
    written whole. Here n = 4, x ends an episode, a to d are the first stack of the next
    one, and its two steps add e and f:

        row           11   12   13   14   15   16   17
        frame         x    a    b    c    d    e    f
        transition    -    -    -    -    1st  2nd  -

    `live` marks the rows that hold a transition all of whose frames are still stored.
    Only these are sampled: no stack mixes two episodes, or new frames with old ones.
    """

    def __init__(self, capacity: int, num_envs: int, num_frames: int,
                 obs_shape: tuple[int, ...], device: torch.device):
        self.num_envs = num_envs
        self.num_frames = num_frames  # n, along an observation's first axis
        # Even the smallest ring has room for one transition.
        self.num_rows = max(capacity // num_envs, num_frames + 1)
        self.frame_shape = (obs_shape[0] // num_frames, *obs_shape[1:])
        num_bytes = (math.prod(self.frame_shape) + 8 + 4 + 4 + 1) * capacity
        check_memory("--buffer-size", capacity, num_bytes)  # raises UsageError
        self.device = device  # where batches go; the storage stays in CPU memory
        shape = (self.num_rows, num_envs)
        self.columns = {
            "frame": np.empty((*shape, *self.frame_shape), np.uint8),
            "act": np.empty(shape, np.int64),
            "rew": np.empty(shape, np.float32),
            "terminated": np.empty(shape, np.float32),
            "live": np.zeros(shape, bool)}
        self.num_stored = 0  # rows that have frames
        self.position = np.zeros(num_envs, np.int64)  # frames so far, per environment
        self.starts = np.ones(num_envs, bool)  # whether the next obs starts an episode

    def add(self, **transition: np.ndarray) -> None:
        """Store one transition per environment; every array is [N, ...]."""
        for env in range(self.num_envs):
            if self.starts[env]:  # otherwise the frames of obs are there already
                self.write(env, transition["obs"][env])
            row = (self.position[env] - 1) % self.num_rows  # obs's newest frame
            for name in ("act", "rew", "terminated"):
                self.columns[name][row, env] = transition[name][env]
            self.columns["live"][row, env] = True
            self.write(env, transition["next_obs"][env][-self.frame_shape[0] :])
        self.starts = transition["done"]

    def write(self, env: int, frames: np.ndarray) -> None:
        """Append one frame, or a stack of them, to the ring of an environment."""
        for frame in frames.reshape(-1, *self.frame_shape):
            row = int(self.position[env]) % self.num_rows
            self.columns["frame"][row, env] = frame
            # The old frame was part of the transitions in this row and in the n - 1
            # rows after it (and of that in row - 1, which is overwritten already).
            invalid = (row + np.arange(self.num_frames)) % self.num_rows
            self.columns["live"][invalid, env] = False
            self.position[env] += 1
            self.num_stored = max(self.num_stored, row + 1)

    def sample(self, batch_size: int) -> Transitions:
        """Uniformly random live transitions, with replacement."""
        filled = self.num_stored * self.num_envs
        picks = torch.randint(filled, (batch_size,)).numpy()  # row * num_envs + env
        while (dead := ~self.columns["live"].take(picks)).any():  # draw those again
            picks[dead] = torch.randint(filled, (int(dead.sum()),)).numpy()
        return self.gather(picks // self.num_envs, picks % self.num_envs)

    def gather(self, rows: np.ndarray, envs: np.ndarray) -> Transitions:
        """The transitions in these rows of these environments."""
        offsets = np.arange(1 - self.num_frames, 2)  # rows k - n + 1, ..., k + 1
        frame_rows = (rows[:, None] + offsets) % self.num_rows  # [B, n + 1]
        frames = self.columns["frame"][frame_rows, envs[:, None]]  # [B, n + 1, C, H, W]
        frames = torch.from_numpy(frames).to(self.device)
        others = {name: torch.from_numpy(self.columns[name][rows, envs]).to(self.device)
                  for name in ("act", "rew", "terminated")}
        return Transitions(  # [B, n, C, H, W] -> [B, n C, H, W]
            obs=frames[:, :-1].flatten(1, 2), next_obs=frames[:, 1:].flatten(1, 2),
            **others)

    def state_dict(self) -> dict:
        return super().state_dict() | {"position": torch.from_numpy(self.position)}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state | {"position": state["position"].numpy()})


if __name__ == "__main__":
    main(train, Config, __doc__)
