"""DQN with prioritized replay.  Schaul et al. 2016, arXiv:1511.05952, Algorithm 1.

Most of what the memory holds is known already. Here a transition is drawn the more often the
further Q was off when it was last learned from, and a new one soon. What is drawn more often would
count for more than its share; a weight puts that right, wholly so at the end of the run.

What it shares with DQN. s' is the true successor of s, also where a time limit cuts the episode,
since what would have followed has a value; "terminated" is a true end.

    y    = r + gamma (1 - terminated) q'                                                   (1)
    q'   = Q_targ(s', argmax_a Q(s', a)),   or max_a Q_targ(s', a) if not `double`         (2)
    L(Q) = mean w h(Q(s, a) - y),   h(x) = x^2 / 2 if |x| < 1, else |x| - 1/2              (3)
    Q    = V(s) + A(s, a) - mean_a A(s, a),   if `dueling`                                 (4)
    a    = argmax_a Q(s, a), or with probability eps one of all actions                    (5)
    eps  = max(eps_end, 1 - (1 - eps_end) t / eps_steps),   t environment steps so far     (6)

Its own, for the transition i:

    p_i  = (|Q(s, a) - y| + 1e-6)^omega;   the highest so far until it is first drawn      (7)
    P(i) = p_i / sum_k p_k                                                                 (8)
    w_i  = (n P(i))^-beta / max_k (n P(k))^-beta = (min_k P(k) / P(i))^beta                (9)
    beta = min(1, beta_start + (1 - beta_start) t / total_steps)                           (10)

The numbers from 0 to the sum of all p are cut into as many equal pieces as the batch has samples,
and each piece gives one (the paper's stratified sampling). The transition that a number falls on
is found in a tree whose nodes are the sums of their children, in as many steps as it is high. In
(9) n transitions are in memory, but k runs over the batch, whose minimum is at hand: a weight is at
most 1 either way.

Read after    algos/dqn.py:  diff algos/dqn.py algos/dqn_per.py
Departs from the papers as algos/dqn.py does; omega is their alpha, a name that SAC's temperature
has here; the step size stays DQN's, of which they take a quarter.

Try           python -m algos.dqn_per --env LunarLander-v3 --total-steps 3e5 --eps-steps 40000
              --target-every 1000
Reproduce     python -m algos.dqn_per    (benchmarks/README.md: return, seeds)
"""

import copy
import math
import os
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from jaxtyping import Float32, Float64, Int64, Shaped
from torch import Tensor, nn

from utils import mpi
from utils.logger import Logger, check_divides, check_range, check_spaces, env_errors, open_run

Batch = Float32[Tensor, "B"]  # one number a sample: never [B, 1]
Choice = Int64[Tensor, "B"]  # numbers of actions
PerAction = Float32[Tensor, "B k"]  # one number for each of k actions


# ============================================ config ============================================
@dataclass(frozen=True)
class Config:
    env: str = "CartPole-v1"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: str = "{}"  # keyword arguments of the environment, a JSON object
    seed: int = 1  # of everything random in the run
    total_steps: float = 5e4  # environment steps; rounded up to whole reports
    num_envs: int = 1  # environments stepped together, over all processes
    num_procs: int = 1  # MPI processes that share the environments, the buffer and each batch
    hidden: tuple[int, ...] = (128, 128)  # widths of the hidden layers (vector observations)
    gamma: float = 0.99  # discount factor
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA for images if there, else CPU
    compile: bool = False  # torch.compile loss and gradient: quicker steps, a slower start
    torch_threads: int = 1  # threads of PyTorch in each process
    run_dir: str = ""  # where the run is kept; default runs/<env>/<algo>/seed<k>
    resume: bool = False  # go on from the last checkpoint of the run directory
    init_from: str = ""  # a run whose weights to start from
    eval_every: int = 0  # steps between evaluations, deterministic and at reports; 0: none
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 50_000  # rows kept, one a transition and a few an episode, of all processes
    start_steps: int = 1000  # environment steps before anything is learned
    update_every: int = 2  # environment steps for each update
    target_every: int = 250  # environment steps between copies of the network into its target
    batch: int = 128  # samples of an update, over all processes
    lr: float = 1e-3  # Adam's step size at the start
    anneal_lr: bool = True  # linearly to zero at the end of the run
    eps_end: float = 0.04  # share of random actions once it has fallen from 1
    eps_steps: int = 8000  # environment steps in which it falls
    double: bool = True  # Double DQN: the action of Eq. (2) is the network's, not the target's
    dueling: bool = True  # Eq. (4)
    omega: float = 0.6  # Eq. (7): 0 draws all alike
    beta_start: float = 0.4  # Eq. (9) at the start; 1 puts all of the sampling right

    def __post_init__(self):
        check_range(self, "total_steps num_envs num_procs torch_threads batch eps_steps", 1)
        check_range(self, "report_every update_every target_every", 1)
        check_range(self, "buffer_size", 8 * self.num_envs)  # room for a stack of up to 7
        check_range(self, "seed eval_every start_steps", 0)
        check_range(self, "gamma eps_end", 0, 1)
        check_range(self, "omega beta_start", 0, 1)
        check_range(self, "hidden lr", above=0)
        check_divides(self, "num_envs/num_procs batch/num_procs buffer_size/num_procs")


# ============================================ agent =============================================
def relu_mlp(*sizes: int) -> nn.Sequential:
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def nature_cnn(c: int, h: int, w: int) -> nn.Sequential:
    """Images [B, C, H, W] -> features [B, 512]: the network of Mnih et al. 2015 (Nature)."""
    conv = nn.Sequential(nn.Conv2d(c, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                         nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*conv, nn.Linear(conv(torch.zeros(1, c, h, w)).shape[1], 512), nn.ReLU())


class QNetwork(nn.Module):
    """Raw observations [B, ...] -> Q(s, a) of each of k actions, [B, k]."""

    def __init__(self, shape: tuple[int, ...], num_acts: int, cfg: Config):
        super().__init__()
        self.images, self.dueling = len(shape) == 3, cfg.dueling
        self.register_buffer("to_q", dueling_matrix(num_acts), persistent=False)
        self.channels_last = self.images and shape[2] < shape[0]  # fewer channels than rows
        chw = (shape[2], *shape[:2]) if self.channels_last else shape
        self.encoder = nature_cnn(*chw) if self.images else None
        sizes = (512,) if self.images else (*shape, *cfg.hidden)
        self.head = relu_mlp(*sizes, num_acts + cfg.dueling)  # V comes before the advantages

    def forward(self, obs: Tensor) -> Tensor:
        if self.images:
            obs = self.encoder((obs.movedim(-1, -3) if self.channels_last else obs).float() / 255)
        out = self.head(obs)
        return out @ self.to_q if self.dueling else out  # Eq. (4)


class Agent(nn.Module):
    """The network, its target, the share of random actions: its state dict is the whole agent."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector image", act="discrete")
        self.cfg, self.images, self.num_acts = cfg, len(obs_space.shape) == 3, int(act_space.n)
        self.critic = QNetwork(obs_space.shape, self.num_acts, cfg)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        self.register_buffer("eps", torch.ones(()))

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N], the best ones or those of Eq. (5)."""
        best = self.critic(self.as_tensor(obs)).argmax(-1)
        return best if deterministic else epsilon_greedy(best, self.num_acts, self.eps)

    def as_tensor(self, obs: Tensor | np.ndarray) -> Tensor:
        """As it is stored: bytes of an image, other numbers as float32."""
        dtype = torch.uint8 if self.images else torch.float32
        return torch.as_tensor(obs, dtype=dtype, device=self.eps.device)

    def env_act(self, act: Tensor) -> np.ndarray:
        return act.cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.integer:
        """One raw observation -> the deterministic action, for a plain environment's `step`."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]


# ============================================= data =============================================
def make_envs(cfg: Config, num_envs: int) -> gym.vector.VectorEnv:
    """In all files: a last step also resets, perhaps in the array it returned: obs are copied."""
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    copy = [lambda env: gym.wrappers.TransformObservation(env, np.copy, None)]
    kwargs = {"vectorization_mode": "sync", "vector_kwargs": same_step, "wrappers": copy}
    if atari := "ALE/" in cfg.env:  # in C++: 4 frames, 84 x 84, grey; the log shows the true score
        kwargs = same_step | {"reward_clipping": False}
    with env_errors(cfg) as env_kwargs:  # JSON -> dict; registers ALE
        envs = gym.make_vec(cfg.env, num_envs, **kwargs, **env_kwargs)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    return gym.wrappers.vector.ClipReward(envs, -1, 1) if atari else envs


def true_next_obs(next_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Where each action led, [N, ...]: at the end of an episode not the next one's first."""
    return np.stack([infos["final_obs"][i] if end else next_obs[i] for i, end in enumerate(done)])


@dataclass(frozen=True)
class Transitions:
    obs: Shaped[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]  # as it was taken, exploring or not
    rew: Batch
    next_obs: Shaped[Tensor, "B *obs"]  # where the action led, never the next episode's first
    terminated: Batch  # 1 at a true end; time limits leave no mark


class FrameBuffer:
    """The last transitions, each observation once: it is the next_obs of the row before as well.

    Each environment has a ring of rows, in main memory even with a GPU: a million of Atari are 7
    GB. A row holds an observation, of stacked frames the newest, and what the action there brought;
    the next row holds next_obs. An episode begins with its whole first stack and ends with a row
    for where it led. A transition is `live` while all its frames are there; no other is sampled.
    """

    def __init__(self, size: int, num_procs: int, num_envs: int, stack: int, obs: Tensor):
        """`size` rows over all ranks, `num_envs` of this one; an observation of `stack` frames."""
        self.rows, self.num_envs = mpi.share(size, "buffer_size", num_procs) // num_envs, num_envs
        self.stack, self.written, self.begins = stack, [0] * num_envs, [True] * num_envs
        self.device, frame = obs.device, obs.unflatten(0, (stack, -1))[-1].cpu().numpy()
        kinds = {"frame": frame, "act": np.int64(), "rew": np.float32(), "terminated": np.float32()}
        need = sum(kind.nbytes for kind in kinds.values()) * size + size  # live: a byte a row
        have = math.inf  # Windows does not say
        if hasattr(os, "sysconf"):
            have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        mpi.say(f"replay buffer: {size:,} rows, {need / 1e9:.2f} GB when full")
        if need > have:
            raise mpi.UsageError(f"--buffer-size is {size}, which takes {need / 1e9:.2f} GB; "
                                 f"there are {have / 1e9:.2f} GB of memory")
        self.columns = {name: np.empty((self.rows * num_envs, *kind.shape), kind.dtype)
                        for name, kind in kinds.items()}
        self.columns["live"] = np.zeros(self.rows * num_envs, bool)

    def add(self, obs: np.ndarray, act: np.ndarray, rew: np.ndarray, next_obs: np.ndarray,
            terminated: np.ndarray, done: np.ndarray) -> None:
        """One step of each environment, [N, ...]; next_obs is where it led, the last one too."""
        for i, begins in enumerate(self.begins):
            if begins:  # else all but what the step brings is there already
                self.write(i, obs[i])
            row = {"act": act[i], "rew": rew[i], "terminated": terminated[i], "live": True}
            for name, value in row.items():
                self.columns[name][self.newest(i)] = value
            self.write(i, next_obs[i][-(len(next_obs[i]) // self.stack):])  # the newest frame
        self.begins = done.tolist()

    def newest(self, i: int, on: int = 0) -> int:
        """The row that environment i wrote last, or the one `on` rows further."""
        return (self.written[i] - 1 + on) % self.rows * self.num_envs + i

    def write(self, i: int, frames: np.ndarray) -> None:
        for frame in frames.reshape(-1, *self.columns["frame"].shape[1:]):
            self.written[i] += 1
            self.columns["frame"][self.newest(i)] = frame
        # Overwritten: this row's transition and those of the next stack - 1 rows, the oldest, whose
        # first frames stood here. A first stack's other rows died when the last episode ended.
        self.columns["live"][[self.newest(i, on) for on in range(self.stack)]] = False

    def sample(self, batch: int) -> Transitions:
        filled = min(max(self.written), self.rows) * self.num_envs
        at = torch.randint(filled, (batch,)).numpy()
        while (dead := ~self.columns["live"][at]).any():
            at[dead] = torch.randint(filled, (int(dead.sum()),)).numpy()
        return self.gather(at)

    def gather(self, at: Int64[np.ndarray, "B"]) -> Transitions:
        """The transitions in these rows; obs and next_obs share all but their outer frames."""
        around = at[:, None] + self.num_envs * np.arange(1 - self.stack, 2)
        frames = self.columns["frame"].take(around, axis=0, mode="wrap")
        parts = frames, *(self.columns[name][at] for name in ("act", "rew", "terminated"))
        frames, act, rew, terminated = (torch.from_numpy(part).to(self.device) for part in parts)
        obs, next_obs = frames[:, :-1].flatten(1, 2), frames[:, 1:].flatten(1, 2)
        return Transitions(obs, act, rew, next_obs, terminated)

    def state_dict(self) -> dict:
        """Of the filled rows; without a copy, which would take as much memory again."""
        filled = min(max(self.written), self.rows) * self.num_envs
        columns = {name: torch.from_numpy(column[:filled]) for name, column in self.columns.items()}
        return {"columns": columns, "written": list(self.written)}

    def load_state_dict(self, saved: dict) -> None:
        """Environments, when resumed, begin new episodes."""
        self.written, self.begins = list(saved["written"]), [True] * self.num_envs
        for name, column in saved["columns"].items():
            self.columns[name][:len(column)] = column.numpy()


@dataclass(frozen=True)
class Weighted(Transitions):
    at: Int64[np.ndarray, "B"]  # the rows they came from
    weight: Batch


class SumTree:
    """Numbers, the leaves of a binary tree in which every node is the sum of its two children."""

    def __init__(self, size: int):
        self.leaves = 1 << (size - 1).bit_length()  # the next power of two
        self.nodes = np.zeros(2 * self.leaves)  # 1: the root, 2 and 3: its children, ...
        self.left, self.right = self.nodes[::2], self.nodes[1::2]  # views: the children of each

    def set(self, at: np.ndarray, priority: np.ndarray) -> None:
        node = at + self.leaves
        self.nodes[node] = priority
        while node[0] > 1:  # all are of one generation
            node = node // 2
            self.nodes[node] = self.left[node] + self.right[node]

    def find(self, mass: np.ndarray) -> np.ndarray:
        """Numbers from 0 to the total -> the leaves they fall on, as if these lay end to end."""
        node = np.ones(len(mass), np.int64)
        while node[0] < self.leaves:
            left = self.left[node]
            # By rounding mass >= left may hold where the right side is empty: it stays left then.
            right = (mass >= left) & (self.right[node] > 0)
            mass, node = mass - left * right, 2 * node + right
        return node - self.leaves


class PriorityBuffer(FrameBuffer):
    """Draws rows as often as their priorities say; those that are not live have none."""

    def __init__(self, size: int, num_procs: int, num_envs: int, stack: int, obs: Tensor):
        super().__init__(size, num_procs, num_envs, stack, obs)
        self.tree, self.highest = SumTree(self.rows * num_envs), 1.0  # p of the first

    def add(self, *parts: np.ndarray) -> None:
        super().add(*parts)
        at = [self.newest(i, on) for i in range(self.num_envs) for on in range(-1, self.stack)]
        live = self.columns["live"][at]  # the new (on = -1), not those overwritten
        self.tree.set(np.array(at), self.highest * live)

    def sample(self, batch: int, beta: float) -> Weighted:
        piece = (torch.arange(batch) + torch.rand(batch, dtype=torch.float64)) / batch
        at = self.tree.find(piece.numpy() * self.tree.nodes[1])
        prob = self.tree.nodes[at + self.tree.leaves] / self.tree.nodes[1]  # Eq. (8)
        lowest = min(mpi.gather(float(prob.min())))  # one for all ranks: one scale of weights
        weight = importance(torch.from_numpy(prob), lowest, beta).float()
        return Weighted(**vars(self.gather(at)), at=at, weight=weight.to(self.device))

    def rate(self, at: np.ndarray, priority: Batch) -> None:
        """What was just learned from gets its new priority."""
        self.tree.set(at, priority.cpu().numpy())
        self.highest = max(self.highest, priority.max().item())

    def state_dict(self) -> dict:
        saved = super().state_dict()
        leaves = self.tree.nodes[self.tree.leaves:][:len(saved["columns"]["live"])]
        return saved | {"priority": torch.from_numpy(leaves), "highest": self.highest}

    def load_state_dict(self, saved: dict) -> None:
        super().load_state_dict(saved)
        self.tree.set(np.arange(len(saved["priority"])), saved["priority"].numpy())
        self.highest = saved["highest"]


def take_step(agent: Agent, envs: gym.vector.VectorEnv, buffer: FrameBuffer, obs: np.ndarray,
              act: Tensor) -> tuple[np.ndarray, list]:
    """One step of all environments, stored -> next obs, ended episodes (env, ep_ret, ep_len)."""
    next_obs, rew, terminated, truncated, infos = envs.step(act := agent.env_act(act))
    done = terminated | truncated
    led_to = true_next_obs(next_obs, done, infos)
    if not all(np.isfinite(part).all() for part in (obs, rew, led_to)):  # obs: of resets
        raise FloatingPointError("NaN or infinity from the environment")
    buffer.add(obs, act, rew, led_to, terminated, done)
    stats = infos.get("episode")
    return next_obs, [(i, stats["r"][i], stats["l"][i]) for i in np.flatnonzero(done)]


# ========================================= mathematics ==========================================
def td_target(rew: Batch, terminated: Batch, next_q: Batch, gamma: float) -> Batch:
    """Eq. (1). A terminal state has no future; a time limit ends the episode, not the future."""
    assert rew.shape == terminated.shape == next_q.shape
    return rew + gamma * (1 - terminated) * next_q


def best_q(q_targ: PerAction, judge: PerAction) -> Batch:
    """Eq. (2). The target's word on the action that the judge, Q or Q_targ, likes best."""
    assert q_targ.shape == judge.shape
    return q_targ.gather(-1, judge.argmax(-1, keepdim=True)).squeeze(-1)


def huber(q: Batch, target: Batch) -> Batch:
    """Eq. (3), before the mean."""
    assert q.shape == target.shape  # [B] against [B, 1] would compare each with all
    return nn.functional.smooth_l1_loss(q, target, reduction="none")


def dueling_matrix(num_acts: int) -> Float32[Tensor, "m k"]:
    """Eq. (4) as the matrix that takes (V, A_1, ..., A_k) to Q: quicker than term by term."""
    return torch.cat([torch.ones(1, num_acts), torch.eye(num_acts) - 1 / num_acts])


def epsilon_greedy(best: Choice, num_acts: int, eps: Tensor) -> Choice:
    """Eq. (5). Each environment draws for itself; one of all actions may be the best one again."""
    random = torch.rand(best.shape, device=best.device) < eps
    return torch.where(random, torch.randint_like(best, num_acts), best)


def epsilon(step: int, eps_end: float, eps_steps: int) -> float:
    """Eq. (6)."""
    return max(eps_end, 1 - (1 - eps_end) * step / eps_steps)


def priority(error: Batch, omega: float) -> Batch:
    """Eq. (7). Never zero, so that all is drawn again some day."""
    return (error.abs() + 1e-6) ** omega


def importance(prob: Float64[Tensor, "B"], lowest: float, beta: float) -> Float64[Tensor, "B"]:
    """Eq. (9)."""
    return (lowest / prob) ** beta


def anneal_beta(step: int, beta_start: float, total_steps: float) -> float:
    """Eq. (10). The bias moves where Q settles: that matters late, not while all still moves."""
    return min(1.0, beta_start + (1 - beta_start) * step / total_steps)


# ============================================ update ============================================
def per_gradient(agent: Agent, flat: nn.Parameter, obs: Tensor, act: Choice, rew: Batch,
                 next_obs: Tensor, terminated: Batch, weight: Batch) -> tuple[Tensor, ...]:
    """flat.grad becomes the gradient of Eq. (3) over one batch -> q_loss, q, Q(s, a) - y."""
    with torch.no_grad():
        q_targ = agent.critic_targ(next_obs)
        judge = agent.critic(next_obs) if agent.cfg.double else q_targ
        target = td_target(rew, terminated, best_q(q_targ, judge), agent.cfg.gamma)
    q = agent.critic(obs).gather(-1, act.unsqueeze(-1)).squeeze(-1)  # [B, 1] -> [B]
    assert q.shape == weight.shape
    loss = (weight * huber(q, target)).mean()
    flat.grad.zero_()
    loss.backward()  # adds to each parameter's .grad, a part of flat.grad
    return loss.detach(), q.detach(), q.detach() - target


def update(agent: Agent, optimizer: mpi.Adam, batch: Weighted, lr: float,
           gradient=per_gradient) -> dict:
    """One step on one batch -> metrics; the target stays as it is."""
    q_loss, q, error = gradient(agent, optimizer.flat, batch.obs, batch.act, batch.rew,
                                batch.next_obs, batch.terminated, batch.weight)
    mpi.average(optimizer.flat.grad)  # over ranks, in place
    optimizer.step(lr)
    return {"q_loss": q_loss, "q": q, "td_error": error}


# =========================================== evaluate ===========================================
def evaluate(agent: Agent, cfg: Config, episodes: int, seed: int) -> np.ndarray:
    """Deterministic returns, one of each of `episodes` environments; always the same starts."""
    envs = make_envs(cfg, episodes)
    obs, _ = envs.reset(seed=mpi.seed(seed, 2))  # 0 and 1 are training's
    returns, ended = np.zeros(episodes), np.zeros(episodes, bool)
    while not ended.all():
        obs, _, _, _, infos = envs.step(agent.env_act(agent.act(obs, deterministic=True)))
        if "episode" in infos:
            first = infos["_episode"] & ~ended
            returns[first], ended = infos["episode"]["r"][first], ended | first
    envs.close()
    return returns


# ============================================ train =============================================
def updates_by(step: int, cfg: Config) -> int:
    """How many updates belong to the first `step` steps, however many environments step at once."""
    return max(0, step - cfg.start_steps) // cfg.update_every


def train(cfg: Config) -> Agent:
    """Runs `cfg` to its end, or resumes it, and returns the agent."""
    cfg = open_run(cfg)  # fills in run_dir; with --resume that run's settings; writes nothing yet
    envs = make_envs(cfg, mpi.share(cfg.num_envs, "num_envs", cfg.num_procs))  # one rank's share
    torch.manual_seed(mpi.seed(cfg.seed, 0))  # another on each rank; --resume restores its state
    agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
    agent.to(mpi.choose_device(cfg, agent.images))  # and sets --torch-threads
    obs = agent.as_tensor(np.zeros(envs.single_observation_space.shape))
    stack = len(obs) if "ALE/" in cfg.env else 1  # of Atari's frames each is stored once
    buffer = PriorityBuffer(cfg.buffer_size, cfg.num_procs, envs.num_envs, stack, obs)
    mpi.launch(cfg)  # P > 1: errors told, this process becomes P that run it from the top
    flat, targ = mpi.flatten(agent.critic), mpi.flatten(agent.critic_targ)  # as in DQN
    optimizer = mpi.Adam(flat)
    gradient = mpi.compiled(per_gradient, cfg.compile)
    with Logger(cfg, agent, optimizer=optimizer, buffer=buffer) as log:  # may load a run
        obs, _ = envs.reset(seed=mpi.seed(cfg.seed, 1, log.step))  # other seeds after a resume
        step, episodes = log.step, []  # log.step stays that of the last report
        while log.step < cfg.total_steps:
            agent.eps.fill_(epsilon(step, cfg.eps_end, cfg.eps_steps))
            obs, ended = take_step(agent, envs, buffer, obs, agent.act(obs))
            # (t, env, ...): by t, steps of all since the report, the log knows the episode's step.
            episodes += [((step - log.step) // cfg.num_envs, *end) for end in ended]
            left = max(0.0, 1 - step / cfg.total_steps)  # the last report may go beyond the end
            lr = cfg.lr * left if cfg.anneal_lr else cfg.lr
            for _ in range(updates_by(step, cfg), updates_by(step + cfg.num_envs, cfg)):
                beta = anneal_beta(step, cfg.beta_start, cfg.total_steps)
                batch = buffer.sample(mpi.share(cfg.batch, "batch"), beta)  # P known since launch
                metrics = update(agent, optimizer, batch, lr, gradient)
                buffer.rate(batch.at, priority(metrics["td_error"], cfg.omega))
                log.store(**metrics, weight=batch.weight)
            step += cfg.num_envs
            if step % cfg.target_every < cfg.num_envs:  # a multiple of it is among the last steps
                targ.data.copy_(flat.data)
            if step % cfg.report_every >= cfg.num_envs:  # no multiple of it among the last steps
                continue
            if log.eval_due(step - log.step) and mpi.rank() == 0:  # a multiple of eval_every is due
                log.store(eval_ret=evaluate(agent, cfg, 10, cfg.seed))  # from rank 0 alone
            log.report(step - log.step, episodes, eps=agent.eps, lr=lr)  # saves; moves log.step
            episodes = []
    return agent


if __name__ == "__main__":
    train(tyro.cli(Config, description=__doc__))
