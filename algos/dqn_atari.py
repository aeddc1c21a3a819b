r"""DQN for Atari games.  Mnih et al. 2015, Nature 518, 529.

The problem. DQN learns to play Atari games from the screen alone, with a replay
buffer of about a million transitions. A frame stands for four screens, in
greyscale, with 84 x 84 pixels. A single frame does not show motion, so an
observation is a stack of the last 4 frames. A million pairs of obs and next_obs
would take 56 GB. But each frame appears in up to 8 stacks: in 4 as part of obs,
and in 4 as part of next_obs. This file stores every frame once, in 7 GB, and
rebuilds the stacks when it samples a batch. The network is a CNN, and the
settings are for Atari. Otherwise this file follows algos/dqn.py, which explains
the algorithm: read that file first.

The algorithm, and where each step is coded:

    for each environment step:
        eps by (6), then choose a by (5)               epsilon, Agent.act
        take the step, store its new frames            step_envs
        after `start_steps`, once per `update_every` steps:
            draw a random batch of live rows           FrameBuffer.sample
                and rebuild its stacks by (7)          FrameBuffer.gather
            y by (1) and (2), then the loss (3)        dqn_loss
            one Adam step on the loss                  update
        every `target_every` steps: Q_targ <- Q        update_target

The frame buffer. Each environment has a ring of rows: after the last row comes
the first again. f_k is the frame in row k. With n frames per stack, the
transition in row k leads from state s to state s':

    s     = (f_{k-n+1}, ..., f_k),    s' = (f_{k-n+2}, ..., f_{k+1})       (7)

Within an episode, s' drops the oldest frame of s and appends a new one, so a
step writes only this frame. The first stack of an episode shares no frame with
the last episode, so all its n frames are written. In this example with n = 4, x
ends one episode. The frames a to d are the first stack of the next episode, and
its two steps add e and f:

    row           11   12   13   14   15   16   17
    frame         x    a    b    c    d    e    f
    transition    -    -    -    -    1st  2nd  -

The first transition leads from (a, b, c, d) to (b, c, d, e). Row 17 holds the
last frame of the episode and no transition. Once the ring is full, a new frame
overwrites the oldest one, in row k. Old transitions used it in rows k - 1 to
k + n - 1. That in row k - 1 was lost when row k - 1 was overwritten; the
other n become invalid now. `live` marks the rows with a transition whose frames
are all still stored. Only these are sampled, so no stack mixes two episodes, or
new frames with old ones.

Atari preprocessing, done in `make_envs`. One environment step is one action,
repeated for 4 screens of the game. They become one frame: the pixelwise maximum
of the last two, since some games draw objects in every second screen only. The
learner gets rewards clipped to [-1, 1], so that one learning rate works across
games; the log shows the true score. In each of the 4 screens the game repeats
the previous action with probability 0.25 instead of the chosen one ("sticky
actions", Machado et al. 2018, arXiv:1709.06009). As in the paper, every episode
starts with a random number of no-op actions. Unlike there, FIRE is then pressed
once, if the game has this button.

From DQN come (1) to (6); algos/dqn.py gives the reasons. Action a in state s
gave reward r and led to s'. U(s') estimates the discounted return from s' on.
Q_targ, an older copy of Q, evaluates s'; if `double`, Q chooses the action.
`terminated` is 1 if s' is terminal; at a time limit it is 0, so y contains
U(s'). h is the Huber loss; V and A are outputs of the network. t counts
environment steps. `mean` is over the batch, mean_a over the actions.

    y     = r + gamma (1 - terminated) U(s'), held constant in (3)         (1)
    U(s') = Q_targ(s', argmax_a Q(s', a))      if `double`,
            max_a Q_targ(s', a)                otherwise                   (2)
    L(Q)  = mean h(Q(s, a) - y),
            h(x) = x^2 / 2 if |x| < 1, else |x| - 1/2                      (3)
    Q     = V(s) + A(s, a) - mean_a A(s, a)    if `dueling`                (4)
    a     = argmax_a Q(s, a), or with probability eps a random action      (5)
    eps   = max(eps_end, 1 - (1 - eps_end) t / eps_steps)                  (6)

Departures from the paper, besides those that algos/dqn.py lists. An episode
ends at game over; the paper treated each lost life as the end of an episode
during training. The numbers are those of shorter runs: 2.5 million steps
(paper: 50 million), eps from 1 to 0.01 in 250,000 of them (to 0.1 in a
million), a copy of Q every 250 updates (10,000), learning after 80,000 steps
(50,000). Sticky actions are newer than the paper. The paper acts at random
until learning starts; here eps falls from step 0, to 0.68 at that time.

Defaults: after the first 80,000 steps, every fourth environment step is
followed by one update on a batch of 32 (605,000 updates in all). Frames stay
in main memory; only batches go to the GPU.

Read after    algos/dqn.py, then:  diff algos/dqn.py algos/dqn_atari.py
Try           python -m algos.dqn_atari --total-steps 1e5 \
                  --start-steps 10000 --eps-steps 50000 --buffer-size 100000
Full run      python -m algos.dqn_atari    (not benchmarked yet)
"""

import copy
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

# mpi.Adam          `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One Adam step; its gradient is averaged over processes, clipped if
#                   max_grad_norm > 0. Returns metrics (detached) and grad_norm
# check_memory      refuses a buffer that is larger than the machine's memory
# image_to_float    uint8 pixels -> float32 in [0, 1], channels first
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# nature_cnn        the CNN of Mnih et al. 2015, with 512 outputs after a ReLU
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import check_memory, image_to_float, make_envs, nature_cnn
from utils.run import Run, RunConfig, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
PerAction = Float32[Tensor, "B k"]  # one number per sample for each of k actions
Choices = Int64[Tensor, "B"]  # indices of actions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds seed, run_dir, device, ...: see --help
    env: str = "ALE/Pong-v5"  # Gymnasium id
    total_steps: float = 2.5e6  # environment steps
    num_envs: int = 1  # N, parallel environments
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 1_000_000  # frames in the replay buffer
    start_steps: int = 80_000  # environment steps before learning starts
    update_every: int = 4  # environment steps per update
    target_every: int = 1000  # environment steps between copies of Q to Q_targ
    batch_size: int = 32  # samples per update (usually 32 to 512)
    lr: float = 1e-4  # Adam's initial learning rate (1e-5 to 1e-3)
    anneal_lr: bool = True  # decrease the learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    eps_end: float = 0.01  # final probability of a random action (0.01 to 0.1)
    eps_steps: int = 250_000  # environment steps over which eps falls from 1 to eps_end
    double: bool = True  # Double DQN, Eq. (2)
    dueling: bool = True  # dueling network, Eq. (4)


# ======================================= agent ========================================
def relu_mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])  # no ReLU after the last layer


class QNetwork(nn.Module):
    """Raw observations [B, ...] -> Q(s, a) for each of k actions, [B, k]."""

    def __init__(self, obs_space: gym.Space, num_acts: int, cfg: Config):
        super().__init__()
        self.dueling = cfg.dueling
        self.encoder = nature_cnn(obs_space)  # 512 features, after a ReLU
        sizes = (512,)
        num_outputs = num_acts + 1 if cfg.dueling else num_acts  # V and k A, or k Q
        self.head = relu_mlp(*sizes, num_outputs)

    def forward(self, obs: Tensor) -> PerAction:
        obs = self.encoder(image_to_float(obs))
        out = self.head(obs.float())
        if not self.dueling:
            return out
        return dueling_q(out[:, :1], out[:, 1:])


class Agent(nn.Module):
    """Q, its target network and eps, all saved in the state dict."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="image", act="discrete")
        self.cfg = cfg
        self.num_acts = int(act_space.n)
        self.critic = QNetwork(obs_space, self.num_acts, cfg)  # Q
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)  # Q_targ
        self.register_buffer("eps", torch.ones(()))  # probability of a random action

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N]: by Eq. (5), or the best."""
        best = self.critic(torch.as_tensor(obs, device=self.eps.device)).argmax(-1)
        if deterministic:
            return best
        return epsilon_greedy(best, self.num_acts, self.eps)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`."""
        return act.cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.integer:
        """One raw observation -> the deterministic action, for use after training."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]

    def update_target(self) -> None:
        """Copy the weights of Q to Q_targ."""
        self.critic_targ.load_state_dict(self.critic.state_dict())


# ======================================== data ========================================
@dataclass(frozen=True)
class Transitions:
    obs: Shaped[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]
    rew: PerSample
    next_obs: Shaped[Tensor, "B *obs"]  # observations of s'
    terminated: PerSample  # 1 if s' is terminal; 0 otherwise, also at a time limit


class FrameBuffer:
    """`capacity` frames, in a ring per environment: new ones overwrite the oldest."""

    def __init__(self, capacity: int, num_envs: int, num_frames: int,
                 obs_shape: tuple[int, ...], device: torch.device):
        """An observation stacks `num_frames` frames along its first axis."""
        self.num_envs = num_envs
        self.num_frames = num_frames  # n
        # Rows per environment; even the smallest ring has room for one transition.
        self.num_rows = max(capacity // num_envs, num_frames + 1)
        self.frame_shape = (obs_shape[0] // num_frames, *obs_shape[1:])
        self.device = device  # where batches go; the storage stays in CPU memory
        num_bytes = (int(np.prod(self.frame_shape)) + 8 + 4 + 4 + 1) * capacity
        check_memory("--buffer-size", capacity, num_bytes)  # raises UsageError
        shape = (self.num_rows, num_envs)
        self.columns = {
            "frame": np.empty((*shape, *self.frame_shape), np.uint8),
            "act": np.empty(shape, np.int64),
            "rew": np.empty(shape, np.float32),
            "terminated": np.empty(shape, np.float32),
            "live": np.zeros(shape, bool)}  # holds a transition with all its frames
        self.num_written = np.zeros(num_envs, np.int64)  # frames, per environment
        # Set after every `add`: does the next obs of an environment start an episode?
        self.starts = np.ones(num_envs, bool)

    def add(self, **transition: np.ndarray) -> None:
        """Store one transition per environment; every array is [N, ...]."""
        for env in range(self.num_envs):
            if self.starts[env]:
                self.write(env, transition["obs"][env])
            # Otherwise the frames of obs are there already.
            row = (self.num_written[env] - 1) % self.num_rows  # obs's newest frame
            for name in ("act", "rew", "terminated"):
                self.columns[name][row, env] = transition[name][env]
            self.columns["live"][row, env] = True
            # Of next_obs only the newest frame is new.
            self.write(env, transition["next_obs"][env][-self.frame_shape[0] :])

    def write(self, env: int, frames: np.ndarray) -> None:
        """Append one frame, or a stack of them, to the ring of an environment."""
        for frame in frames.reshape(-1, *self.frame_shape):
            row = self.num_written[env] % self.num_rows
            self.columns["frame"][row, env] = frame
            # Transitions in this row and the n - 1 rows after it used the old frame.
            # So did the old one in row - 1, but that is overwritten already.
            invalid = (row + np.arange(self.num_frames)) % self.num_rows
            self.columns["live"][invalid, env] = False
            self.num_written[env] += 1

    def sample(self, batch_size: int) -> Transitions:
        """Uniformly random transitions, with replacement."""
        filled = min(int(self.num_written.max()), self.num_rows) * self.num_envs
        picks = torch.randint(filled, (batch_size,)).numpy()
        dead = ~self.columns["live"].take(picks)  # take: an index counts row by row
        while dead.any():  # draw those again
            picks[dead] = torch.randint(filled, (int(dead.sum()),)).numpy()
            dead = ~self.columns["live"].take(picks)
        return self.gather(picks // self.num_envs, picks % self.num_envs)

    def gather(self, rows: np.ndarray, envs: np.ndarray) -> Transitions:
        """The transitions in these rows of these environments."""
        offsets = np.arange(1 - self.num_frames, 2)  # rows k - n + 1, ..., k + 1
        frame_rows = (rows[:, None] + offsets) % self.num_rows  # [B, n + 1]
        # frames: [B, n + 1, C, H, W]
        frames = self.columns["frame"][frame_rows, envs[:, None]]
        frames = torch.from_numpy(frames).to(self.device)
        act, rew, terminated = (
            torch.from_numpy(self.columns[name][rows, envs]).to(self.device)
            for name in ("act", "rew", "terminated"))
        obs = frames[:, :-1].flatten(1, 2)  # Eq. (7); [B, n, C, ...] -> [B, n C, ...]
        next_obs = frames[:, 1:].flatten(1, 2)
        return Transitions(obs, act, rew, next_obs, terminated)

    def state_dict(self) -> dict:
        """Stored rows, for checkpoints, as views: copies would double the memory."""
        filled = min(int(self.num_written.max()), self.num_rows)
        rows = {name: torch.from_numpy(c[:filled]) for name, c in self.columns.items()}
        return {"columns": rows, "num_written": torch.from_numpy(self.num_written)}

    def load_state_dict(self, state: dict) -> None:
        """A resumed run starts new episodes."""
        self.num_written = state["num_written"].numpy().copy()
        self.starts[:] = True
        for name, column in state["columns"].items():
            self.columns[name][: len(column)] = column.numpy()


def true_next_obs(new_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Observations of s', [N, ...]: `new_obs`, or "final_obs" if an episode ended."""
    next_obs = new_obs.copy()
    for i in np.flatnonzero(done):
        next_obs[i] = infos["final_obs"][i]
    return next_obs


def step_envs(agent: Agent, envs: gym.vector.VectorEnv, buffer: FrameBuffer,
              obs: np.ndarray, act: Tensor) -> np.ndarray:
    """Step all environments, store the transitions, return the obs to act on."""
    new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    next_obs = true_next_obs(new_obs, terminated | truncated, infos)
    buffer.add(obs=obs, act=act.cpu().numpy(), rew=rew, next_obs=next_obs,
               terminated=terminated)
    buffer.starts = terminated | truncated  # where new_obs starts an episode
    return new_obs


# ==================================== mathematics =====================================
def td_target(rew: PerSample, terminated: PerSample, next_val: PerSample,
              gamma: float) -> PerSample:
    """Eq. (1): bootstrap unless terminated. A time limit is not a termination."""
    assert rew.shape == terminated.shape == next_val.shape
    return rew + gamma * (1 - terminated) * next_val


def q_of(q: PerAction, act: Choices) -> PerSample:
    """Pick Q(s, a) of one action per sample, for Eqs. (2), (3)."""
    return q.gather(-1, act.unsqueeze(-1)).squeeze(-1)


def greedy_value(next_q_targ: PerAction, next_q: PerAction) -> PerSample:
    """Eq. (2) with `double`: Q chooses the action in s', Q_targ evaluates it."""
    assert next_q_targ.shape == next_q.shape
    return q_of(next_q_targ, next_q.argmax(-1))


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
    """Eq. (6): the probability of a random action after `step` steps."""
    return max(eps_end, 1 - (1 - eps_end) * step / eps_steps)


# ======================================= update =======================================
def dqn_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (3): fit Q(s, a) to the target y, which is held constant."""
    with torch.no_grad():
        next_q_targ = agent.critic_targ(batch.next_obs)
        if agent.cfg.double:
            next_val = greedy_value(next_q_targ, agent.critic(batch.next_obs))
        else:
            next_val = next_q_targ.max(-1).values
        target = td_target(batch.rew, batch.terminated, next_val, agent.cfg.gamma)
    q = q_of(agent.critic(batch.obs), batch.act)
    loss = huber(q, target).mean()
    return loss, {"q_loss": loss, "q": q}


def update(agent: Agent, optimizer: mpi.Adam, batch: Transitions, lr: float) -> dict:
    """Take one Adam step on Eq. (3). Return the metrics."""
    return optimizer.minimize(dqn_loss, agent, batch, lr=lr)


# ======================================= train ========================================
def updates_due(step: int, cfg: Config) -> int:
    """Total number of updates due once `step` environment steps have been taken."""
    return max(0, step - cfg.start_steps) // cfg.update_every


def train(cfg: Config) -> Agent:
    """Train until `total_steps`, from the start or from a checkpoint.

    With several processes, `run.num_envs`, `run.buffer_size` and `run.batch_size` are
    this process's shares of the totals in `cfg`.
    """
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of the resumed run
        envs = make_envs(cfg, run.num_envs)
        obs_space = envs.single_observation_space
        agent = Agent(obs_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = mpi.Adam(agent.critic)  # it changes Q, not Q_targ
        # ALE observations are [frames, height, width]. Elsewhere, axis 0 is no stack.
        num_frames = obs_space.shape[0] if "ALE/" in cfg.env else 1
        buffer = FrameBuffer(
            run.buffer_size, run.num_envs, num_frames, obs_space.shape, run.device)
        # Tells `run` what to evaluate and save. Returns 0, or the saved step.
        step = run.restore(agent, optimizer=optimizer, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            agent.eps.fill_(epsilon(step, cfg.eps_end, cfg.eps_steps))
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            obs = step_envs(agent, envs, buffer, obs, agent.act(obs))
            updates_before = updates_due(step, cfg)
            step += cfg.num_envs  # the environments of all processes
            # As many updates as became due in these num_envs steps: 0, 1 or more.
            for _ in range(updates_due(step, cfg) - updates_before):
                batch = buffer.sample(run.batch_size)
                metrics = update(agent, optimizer, batch, lr)
                run.store(**metrics)  # the next report averages them
            # True once per target_every steps (or in every pass, if num_envs is more).
            if step % cfg.target_every < cfg.num_envs:  # reached or passed a multiple
                agent.update_target()
            run.report(step, envs, eps=agent.eps, lr=lr)  # logs, evaluates, saves
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
