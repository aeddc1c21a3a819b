"""DQN for Atari games.  Mnih et al. 2015, Nature 518, 529.

The problem. DQN learns Atari games from the screen alone, but it needs a
replay buffer of a million transitions. An observation is a stack of the last
4 grey frames of 84 x 84 pixels, since one frame does not show which way the
ball flies. Stored as they come, a million pairs of obs and next_obs take 56
GB. But each frame is part of up to 8 of these stacks. This file stores every
frame once, in 7 GB, and puts the stacks together again when it draws a batch.
The algorithm is that of algos/dqn.py; only the buffer and the settings differ.

Background, as in algos/dqn.py. s' is the true next state, even at a time
limit, where we still bootstrap. "terminated" marks a true end. Q_targ is the
target network, V' the estimated value of s', and t counts environment steps.

    y    = r + gamma (1 - terminated) V'                                   (1)
    V'   = Q_targ(s', argmax_a Q(s', a))        if `double`,
           max_a Q_targ(s', a)                  if not                     (2)
    L(Q) = mean h(Q(s, a) - y),
           h(x) = x^2 / 2 if |x| < 1, else |x| - 1/2                       (3)
    Q    = V(s) + A(s, a) - mean_a A(s, a),     if `dueling`               (4)
    a    = argmax_a Q(s, a), but with probability eps uniformly random     (5)
    eps  = max(eps_end, 1 - (1 - eps_end) t / eps_steps)                   (6)

The frame buffer itself, with n frames per stack. f_k is the frame in row k of
the ring of one environment, and row k holds the transition that starts there:

    s = (f_{k-n+1}, ..., f_k),    s' = (f_{k-n+2}, ..., f_{k+1})           (7)

Why it works. Within an episode, next_obs drops the oldest frame of obs and
appends a new one, so a step adds one frame. At the start of an episode all n
frames of the first stack are new. An example with n = 4, where an episode of
two steps follows another, a to e are its frames, and x belongs to the one
before:

    row      11   12   13   14   15   16   17
    frame     x    a    b    c    d    e    f
    holds     -    -    -    -    1st  2nd  -

Row 15 holds the first transition, from (a, b, c, d) to (b, c, d, e), and row
16 the second. Row 17 has the last frame of the episode, f, and no transition.
The next write overwrites the oldest row, and with it a frame of the n - 1 rows
after it. `live` marks the rows whose n + 1 frames are all there. Only these
are drawn, so a stack never mixes two episodes or new frames with old ones.

Atari's other details. Each action is held for 4 frames of the game. Rewards
are clipped to [-1, 1] for the learner, so that one learning rate fits all
games; the log shows the true score. Pixels are divided by 255.

Departures from the papers, besides those of algos/dqn.py. An episode ends
with the game, not with the loss of a life. The environment repeats the last
action with probability 0.25 ("sticky actions", Machado et al. 2018,
arXiv:1709.06009) instead of starting with a random number of idle steps.

Sizes by default: learning starts after 80,000 steps. From then on every
fourth environment step makes one gradient step on a batch of 32, which is
605,000 in all, and the target network is renewed after every 250 of them. eps
falls from 1 to 0.01 within 250,000 steps. Frames stay in main memory; batches
go to the device of the network.

Read after    algos/dqn.py:  diff algos/dqn.py algos/dqn_atari.py
Try           python -m algos.dqn_atari --total-steps 1e5 --start-steps 10000
              --eps-steps 50000
Reproduce     python -m algos.dqn_atari    (benchmarks/README.md)
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from utils import mpi
from utils.envs import check_memory, image_to_float, make_envs, nature_cnn
from utils.run import Run, RunConfig, check_range, check_settings, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample of a batch: never [B, 1]
PerAction = Float32[Tensor, "B k"]  # one number per sample for each of k actions
Choices = Int64[Tensor, "B"]  # indices of actions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):
    env: str = "ALE/Pong-v5"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    total_steps: float = 2.5e6  # environment steps
    num_envs: int = 1  # N, environments stepped together
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 1_000_000  # frames in the replay buffer
    start_steps: int = 80_000  # environment steps before learning starts
    update_every: int = 4  # environment steps per gradient step
    target_every: int = 1000  # environment steps between copies to the target network
    batch_size: int = 32  # samples per gradient step (32 to 512)
    lr: float = 1e-4  # Adam's learning rate at the start (1e-5 to 1e-3)
    anneal_lr: bool = True  # decrease the learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    eps_end: float = 0.01  # final probability of a random action (0.01 to 0.1)
    eps_steps: int = 250_000  # environment steps in which eps falls from 1 to eps_end
    double: bool = True  # Double DQN, Eq. (2)
    dueling: bool = True  # dueling network, Eq. (4)

    def __post_init__(self):
        check_settings(self, fractions="eps_end", counts="eps_steps")
        check_range(self, "buffer_size", low=8 * self.num_envs)  # some stacks of each


# ======================================= agent ========================================
def relu_mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them."""
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class QNetwork(nn.Module):
    """Raw observations [B, ...] -> Q(s, a) for each of k actions, [B, k]."""

    def __init__(self, obs_space: gym.Space, num_acts: int, cfg: Config):
        super().__init__()
        self.dueling = cfg.dueling
        self.encoder = nature_cnn(obs_space)
        sizes = (512,)
        num_outputs = num_acts + 1 if cfg.dueling else num_acts  # V and k times A, or Q
        self.head = relu_mlp(*sizes, num_outputs)

    def forward(self, obs: Tensor) -> PerAction:
        obs = image_to_float(obs)
        out = self.head(self.encoder(obs.float()))
        if not self.dueling:
            return out
        return dueling_q(out[:, :1], out[:, 1:])


class Agent(nn.Module):
    """Network, target network and eps: its state dict is all of them."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="image", act="discrete")
        self.cfg = cfg
        self.num_acts = int(act_space.n)
        self.critic = QNetwork(obs_space, self.num_acts, cfg)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        self.register_buffer("eps", torch.ones(()))  # probability of a random action

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N], by Eq. (5) or the best ones."""
        best = self.critic(torch.as_tensor(obs, device=self.eps.device)).argmax(-1)
        if deterministic:
            return best
        return epsilon_greedy(best, self.num_acts, self.eps)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions as the environment takes them."""
        return act.cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.integer:
        """One raw observation -> the deterministic action, ready for `env.step`."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]

    def update_target(self) -> None:
        """Copy the weights of the network to the target network."""
        self.critic_targ.load_state_dict(self.critic.state_dict())


# ======================================== data ========================================
@dataclass(frozen=True)
class Transitions:
    """B transitions."""

    obs: Shaped[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]  # as taken, exploration included
    rew: PerSample
    next_obs: Shaped[Tensor, "B *obs"]  # the true next observation
    terminated: PerSample  # 1 at a true end; a time limit leaves no mark


class FrameBuffer:
    """The last `size` frames of all environments, each once, with one ring for each."""

    def __init__(self, size: int, num_envs: int, num_frames: int,
                 obs_shape: tuple[int, ...], device: torch.device):
        """An observation is a stack of `num_frames` frames along its first axis."""
        self.num_envs = num_envs
        self.num_frames = num_frames  # n
        self.rows = size // num_envs  # per environment
        self.frame_shape = (obs_shape[0] // num_frames, *obs_shape[1:])
        self.device = device  # of batches
        bytes_per_row = math.prod(self.frame_shape) + 17  # 17 for the other columns
        check_memory("--buffer-size", size, bytes_per_row * size, torch.device("cpu"))
        shape = (self.rows, num_envs)
        self.columns = {
            "frame": np.empty((*shape, *self.frame_shape), np.uint8),
            "act": np.empty(shape, np.int64),
            "rew": np.empty(shape, np.float32),
            "terminated": np.empty(shape, np.float32),
            "live": np.zeros(shape, bool),  # it holds a transition, with all its frames
        }
        self.written = np.zeros(num_envs, np.int64)  # frames written so far, per ring
        self.starts = np.ones(num_envs, bool)  # whether the next step starts an episode

    def add(self, obs: np.ndarray, act: Tensor, rew: np.ndarray, next_obs: np.ndarray,
            terminated: np.ndarray) -> None:
        """Store one step of N environments, each value [N, ...]."""
        new = {"act": act.cpu().numpy(), "rew": rew, "terminated": terminated}
        for env in range(self.num_envs):
            if self.starts[env]:
                self.write(env, obs[env])  # else its frames are in the ring already
            row = (self.written[env] - 1) % self.rows  # of the newest frame of obs
            for name, value in new.items():
                self.columns[name][row, env] = value[env]
            self.columns["live"][row, env] = True
            num_channels = self.frame_shape[0]
            self.write(env, next_obs[env][-num_channels:])  # the newest frame
        self.starts[:] = False

    def end_episodes(self, done: np.ndarray) -> None:
        """Tell which environments start a new episode with their next step."""
        self.starts = done.copy()

    def write(self, env: int, frames: np.ndarray) -> None:
        """Append one frame, or a stack of them, to the ring of an environment."""
        for frame in frames.reshape(-1, *self.frame_shape):
            row = self.written[env] % self.rows
            self.columns["frame"][row, env] = frame
            # The frame overwritten here belonged to this row and the n - 1 after it.
            spoiled = (row + np.arange(self.num_frames)) % self.rows
            self.columns["live"][spoiled, env] = False
            self.written[env] += 1

    def sample(self, batch_size: int) -> Transitions:
        """Uniformly random transitions, with replacement."""
        filled = min(int(self.written.max()), self.rows) * self.num_envs
        live = self.columns["live"].reshape(-1)  # row 0 of all environments comes first
        picks = torch.randint(filled, (batch_size,)).numpy()
        while not live[picks].all():
            dead = ~live[picks]
            picks[dead] = torch.randint(filled, (int(dead.sum()),)).numpy()
        return self.gather(picks // self.num_envs, picks % self.num_envs)

    def gather(self, rows: Int64[np.ndarray, "B"],
               envs: Int64[np.ndarray, "B"]) -> Transitions:
        """Eq. (7): the transitions in these rows of these environments."""
        steps = np.arange(1 - self.num_frames, 2)  # 1 - n, ..., 0, 1
        around = (rows[:, None] + steps) % self.rows
        frames = torch.from_numpy(self.columns["frame"][around, envs[:, None]])
        frames = frames.to(self.device)  # [B, n + 1, ...]
        columns = {name: torch.from_numpy(self.columns[name][rows, envs]).to(self.device)
                   for name in ("act", "rew", "terminated")}
        return Transitions(obs=frames[:, :-1].flatten(1, 2),
                           next_obs=frames[:, 1:].flatten(1, 2), **columns)

    def state_dict(self) -> dict:
        """Views of the filled rows: a copy would take as much memory again."""
        filled = min(int(self.written.max()), self.rows)
        columns = {k: torch.from_numpy(v[:filled]) for k, v in self.columns.items()}
        return {"columns": columns, "written": torch.from_numpy(self.written.copy())}

    def load_state_dict(self, state: dict) -> None:
        """A resumed run starts new episodes."""
        self.written = state["written"].numpy().copy()
        self.starts[:] = True
        for name, column in state["columns"].items():
            self.columns[name][: len(column)] = column.numpy()


def true_next_obs(next_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Where each action led, [N, ...].

    An environment whose episode ended has restarted already, so its `next_obs` is the
    first observation of the next episode. The last one of the old is in `infos`.
    """
    true_obs = next_obs.copy()
    for i in np.flatnonzero(done):
        true_obs[i] = infos["final_obs"][i]
    return true_obs


def interact(agent: Agent, envs: gym.vector.VectorEnv, buffer: FrameBuffer,
             obs: np.ndarray, act: Tensor) -> np.ndarray:
    """Step all environments, store the transitions and return the next observations."""
    next_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    true_obs = true_next_obs(next_obs, terminated | truncated, infos)
    buffer.add(obs=obs, act=act, rew=rew, next_obs=true_obs, terminated=terminated)
    buffer.end_episodes(terminated | truncated)
    return next_obs


# ==================================== mathematics =====================================
def td_target(rew: PerSample, terminated: PerSample, next_val: PerSample,
              gamma: float) -> PerSample:
    """Eq. (1). A true end has no future. A time limit only stops the recording."""
    assert rew.shape == terminated.shape == next_val.shape
    return rew + gamma * (1 - terminated) * next_val


def q_of(q: PerAction, act: Choices) -> PerSample:
    """Q(s, a) of one action per sample, for Eqs. (2), (3)."""
    return q.gather(-1, act.unsqueeze(-1)).squeeze(-1)


def greedy_value(q_targ: PerAction, q: PerAction) -> PerSample:
    """Eq. (2): `q` chooses the action, `q_targ` says what it is worth."""
    assert q_targ.shape == q.shape
    return q_of(q_targ, q.argmax(-1))


def huber(q: PerSample, target: PerSample) -> PerSample:
    """Eq. (3), before the mean."""
    assert q.shape == target.shape  # [B] minus [B, 1] would be [B, B]
    return smooth_l1_loss(q, target, reduction="none")


def dueling_q(val: Float32[Tensor, "B 1"], adv: PerAction) -> PerAction:
    """Eq. (4). The mean of Q over actions is V."""
    return val + adv - adv.mean(-1, keepdim=True)


def epsilon_greedy(best: Choices, num_acts: int, eps: Scalar) -> Choices:
    """Eq. (5), independently per environment. A random action can be the best one."""
    explore = torch.rand(best.shape, device=best.device) < eps
    return torch.where(explore, torch.randint_like(best, num_acts), best)


def epsilon(step: int, eps_end: float, eps_steps: int) -> float:
    """Eq. (6)."""
    return max(eps_end, 1 - (1 - eps_end) * step / eps_steps)


# ======================================= update =======================================
def dqn_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (3): Q(s, a) regresses on the target."""
    with torch.no_grad():  # targets are constants
        q_targ = agent.critic_targ(batch.next_obs)
        q_next = agent.critic(batch.next_obs) if agent.cfg.double else q_targ
        next_val = greedy_value(q_targ, q_next)  # Eq. (2)
        target = td_target(batch.rew, batch.terminated, next_val, agent.cfg.gamma)
    q = q_of(agent.critic(batch.obs), batch.act)
    loss = huber(q, target).mean()
    return loss, {"q_loss": loss, "q": q}


def update(agent: Agent, optimizer: mpi.Adam, batch: Transitions, lr: float) -> dict:
    """One gradient step on one batch. The target network stays as it is."""
    return optimizer.minimize(dqn_loss, agent, batch, lr=lr)


# ======================================= train ========================================
def num_updates_due(step: int, cfg: Config) -> int:
    """Total number of updates due after `step` environment steps, for any num_envs."""
    return max(0, step - cfg.start_steps) // cfg.update_every


def train(cfg: Config) -> Agent:
    """Train to the end of the budget, or resume, and return the agent."""
    with Run(cfg) as run:  # refuses bad input before anything is built
        cfg = run.cfg  # with --resume, the settings of that run
        envs = make_envs(cfg, run.num_envs)  # this rank's share
        obs_space = envs.single_observation_space
        agent = Agent(obs_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = mpi.Adam(agent.critic)
        num_frames = obs_space.shape[0] if "ALE/" in cfg.env else 1  # in one stack
        buffer = FrameBuffer(
            run.buffer_size, run.num_envs, num_frames, obs_space.shape, run.device)
        step = run.restore(agent, optimizer=optimizer, buffer=buffer)  # 0, or resumed
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            agent.eps.fill_(epsilon(step, cfg.eps_end, cfg.eps_steps))
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            obs = interact(agent, envs, buffer, obs, agent.act(obs))
            updates_so_far = num_updates_due(step, cfg)
            step += cfg.num_envs
            for _ in range(updates_so_far, num_updates_due(step, cfg)):
                batch = buffer.sample(run.batch_size)
                run.store(**update(agent, optimizer, batch, lr))
            if step % cfg.target_every < cfg.num_envs:  # passed a multiple of it
                agent.update_target()
            run.report(step, envs, eps=agent.eps, lr=lr)  # writes and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
