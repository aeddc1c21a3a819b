"""DQN with prioritized replay.  Schaul et al. 2016, arXiv:1511.05952, Algorithm 1.

The problem. DQN draws all transitions of its replay buffer equally often, but
most of them are predicted well already and teach nothing. Prioritized replay
draws a transition more often the larger its last error Q(s, a) - y was, and a
new transition soon. Such a sample is no longer representative: frequent
transitions pull Q towards themselves. Importance weights correct this bias,
partly at first and fully at the end of the run.

Background, as in algos/dqn.py. s' is the true next state, even at a time
limit, where we still bootstrap. "terminated" marks a true end. Q_targ is the
target network, V' the estimated value of s', and t counts environment steps.
w is the weight of a sample by (9), the one new letter here.

    y    = r + gamma (1 - terminated) V'                                   (1)
    V'   = Q_targ(s', argmax_a Q(s', a))        if `double`,
           max_a Q_targ(s', a)                  if not                     (2)
    L(Q) = mean w h(Q(s, a) - y),
           h(x) = x^2 / 2 if |x| < 1, else |x| - 1/2                       (3)
    Q    = V(s) + A(s, a) - mean_a A(s, a),     if `dueling`               (4)
    a    = argmax_a Q(s, a), but with probability eps uniformly random     (5)
    eps  = max(eps_end, 1 - (1 - eps_end) t / eps_steps)                   (6)

Prioritized replay itself, for transition i of n in the buffer:

    p_i  = (|Q(s_i, a_i) - y_i| + 1e-6)^omega   when it was last used,
           the highest p so far                 if it is new               (7)
    P(i) = p_i / sum_k p_k                                                 (8)
    w_i  = (n P(i))^-beta / max_k (n P(k))^-beta = (min_k P(k) / P(i))^beta,
           k over the batch                                                (9)
    beta = min(1, beta_start + (1 - beta_start) t / total_steps)          (10)

Why the pieces are as they are. omega in (7) trades focus for diversity: 0
draws uniformly, 1 in proportion to the error. The constant 1e-6 keeps every
transition possible, since its error may have grown again. In (9), a
transition drawn n P(i) times as often as under uniform sampling gets a weight
of 1 / (n P(i)) if beta = 1, so that the expected gradient is that of uniform
sampling. Dividing by the largest weight makes every weight at most 1: weights
only shrink steps. beta grows to 1 in (10) because the bias matters most near
convergence, while early on Q changes quickly anyway.

The sum tree. To draw from (8), lay all p_i end to end on a line and look up
which one a random point falls on. A binary tree in which every node holds the
sum of its two children finds it in log2(n) steps, and changes a p_i in as
many. Each batch is stratified, as in the paper: the line is cut into
`batch_size` equal pieces, and one point is drawn from each.

Departures from the papers. Those of algos/dqn.py. The paper's maximum in (9)
runs over the whole buffer; the batch's is at hand. The paper calls omega
alpha. It divides the learning rate by four; here it stays DQN's.

Sizes by default are those of algos/dqn.py. Healthy values: as there for `q`
and `q_loss`, HEALTHY

Read after    algos/dqn.py:  diff algos/dqn.py algos/dqn_per.py
Try           python -m algos.dqn_per --env LunarLander-v3 --total-steps 3e5
              --eps-steps 40000 --target-every 1000
Reproduce     python -m algos.dqn_per
              (curves of all seeds: benchmarks/README.md)
"""

import copy
from dataclasses import dataclass
from itertools import pairwise

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, Shaped
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from utils import mpi
from utils.envs import check_memory, image_to_float, is_image, make_envs, nature_cnn
from utils.run import Run, RunConfig, check_settings, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample of a batch: never [B, 1]
PerAction = Float32[Tensor, "B k"]  # one number per sample for each of k actions
Choices = Int64[Tensor, "B"]  # indices of actions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):
    env: str = "CartPole-v1"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    total_steps: float = 5e4  # environment steps
    num_envs: int = 1  # N, environments stepped together
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 50_000  # transitions in the replay buffer
    start_steps: int = 1000  # environment steps before learning starts
    update_every: int = 2  # environment steps per gradient step
    target_every: int = 250  # environment steps between copies to the target network
    batch_size: int = 128  # samples per gradient step (32 to 512)
    lr: float = 1e-3  # Adam's learning rate at the start (1e-5 to 1e-3)
    anneal_lr: bool = True  # decrease the learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    eps_end: float = 0.04  # final probability of a random action (0.01 to 0.1)
    eps_steps: int = 8000  # environment steps in which eps falls from 1 to eps_end
    double: bool = True  # Double DQN, Eq. (2)
    dueling: bool = True  # dueling network, Eq. (4)
    omega: float = 0.6  # exponent of priorities, Eq. (7); 0 draws uniformly (0.4 to 0.7)
    beta_start: float = 0.4  # initial exponent of the weights, Eq. (10) (0.4 to 1)
    hidden: tuple[int, ...] = (128, 128)  # hidden layer widths, for vector observations

    def __post_init__(self):
        check_settings(self, fractions="eps_end omega beta_start", counts="eps_steps")


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
        self.images = is_image(obs_space)
        self.encoder = nn.Identity()
        sizes = (*obs_space.shape, *cfg.hidden)
        if self.images:
            self.encoder = nature_cnn(obs_space)
            sizes = (512,)
        num_outputs = num_acts + 1 if cfg.dueling else num_acts  # V and k times A, or Q
        self.head = relu_mlp(*sizes, num_outputs)

    def forward(self, obs: Tensor) -> PerAction:
        if self.images:
            obs = image_to_float(obs)
        out = self.head(self.encoder(obs.float()))
        if not self.dueling:
            return out
        return dueling_q(out[:, :1], out[:, 1:])


class Agent(nn.Module):
    """Network, target network and eps: its state dict is all of them."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector image", act="discrete")
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


class ReplayBuffer:
    """The last `size` transitions of all environments, in a ring."""

    def __init__(self, size: int, obs: Tensor, act: Tensor, device: torch.device):
        """`obs` and `act` are examples: one observation and one action."""
        bytes_per_row = 2 * obs.nbytes + act.nbytes + 8  # rew and terminated take 8
        check_memory("--buffer-size", size, bytes_per_row * size, device)
        self.size = size
        self.device = device
        self.columns = {
            "obs": torch.empty(size, *obs.shape, dtype=obs.dtype, device=device),
            "act": torch.empty(size, *act.shape, dtype=act.dtype, device=device),
            "rew": torch.empty(size, device=device),
            "next_obs": torch.empty(size, *obs.shape, dtype=obs.dtype, device=device),
            "terminated": torch.empty(size, device=device),
        }
        self.filled = 0  # rows that hold a transition
        self.next = 0  # the row to write next

    def add(self, **step: np.ndarray | Tensor) -> None:
        """Store one step of N environments: a value [N, ...] for every column."""
        num_envs = len(step["rew"])
        rows = (self.next + torch.arange(num_envs)) % self.size
        for name, column in self.columns.items():
            value = torch.as_tensor(step[name]).to(column)
            assert value.shape == (num_envs, *column.shape[1:]), name
            column[rows] = value
        self.next = (self.next + num_envs) % self.size
        self.filled = min(self.filled + num_envs, self.size)

    def sample(self, batch_size: int) -> Transitions:
        """Uniformly random transitions, with replacement."""
        rows = torch.randint(self.filled, (batch_size,), device=self.device)
        # index_select(0, rows) is column[rows], in a quarter of the time.
        columns = {k: v.index_select(0, rows) for k, v in self.columns.items()}
        return Transitions(**columns)

    def state_dict(self) -> dict:
        """Clones of the filled rows: a view would be saved with the whole memory."""
        columns = {k: v[: self.filled].clone() for k, v in self.columns.items()}
        return {"columns": columns, "filled": self.filled, "next": self.next}

    def load_state_dict(self, state: dict) -> None:
        self.filled = state["filled"]
        self.next = state["next"]
        for name, column in self.columns.items():
            column[: self.filled] = state["columns"][name]


@dataclass(frozen=True)
class WeightedTransitions(Transitions):
    """B transitions, where they stand in the buffer and how much they count."""

    rows: Int64[Tensor, "B"]
    weight: PerSample  # Eq. (9)


class SumTree:
    """Numbers as the leaves of a binary tree in which each node sums its two children.

    Node 1 is the root, and the children of node k are 2 k and 2 k + 1.
    """

    def __init__(self, size: int):
        self.depth = (size - 1).bit_length()  # levels below the root
        self.num_leaves = 2**self.depth  # at least `size`; those beyond it stay 0
        self.nodes = np.zeros(2 * self.num_leaves)

    def get(self, rows: np.ndarray) -> np.ndarray:
        return self.nodes[self.num_leaves + rows]

    def set(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Change the numbers in these rows, and all sums above them."""
        node = self.num_leaves + rows
        self.nodes[node] = values
        for _ in range(self.depth):
            node = node // 2  # their parents
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, point: np.ndarray) -> np.ndarray:
        """Points from 0 to the total -> the rows that they fall on, laid end to end."""
        node = np.ones(len(point), np.int64)
        for _ in range(self.depth):
            left = self.nodes[2 * node]
            # By rounding, a point can lie beyond the left sum though the right is empty.
            go_right = (point >= left) & (self.nodes[2 * node + 1] > 0)
            point = np.where(go_right, point - left, point)
            node = np.where(go_right, 2 * node + 1, 2 * node)
        return node - self.num_leaves


class PrioritizedBuffer(ReplayBuffer):
    """A replay buffer that draws row i with probability P(i), Eq. (8)."""

    def __init__(self, size: int, obs: Tensor, act: Tensor, device: torch.device):
        super().__init__(size, obs, act, device)
        self.tree = SumTree(size)  # the priorities; an empty row has none
        self.max_priority = 1.0  # so far

    def add(self, **step: np.ndarray | Tensor) -> None:
        """Store one step of N environments, with the highest priority so far."""
        rows = (self.next + np.arange(len(step["rew"]))) % self.size
        super().add(**step)
        self.tree.set(rows, np.full(len(rows), self.max_priority))

    def sample(self, batch_size: int, beta: float) -> WeightedTransitions:
        """Draw one transition from each of `batch_size` equal pieces of Eq. (8)."""
        total = self.tree.nodes[1]
        point = torch.arange(batch_size) + torch.rand(batch_size, dtype=torch.float64)
        rows = self.tree.find(point.numpy() / batch_size * total)
        prob = self.tree.get(rows) / total  # Eq. (8)
        lowest = min(mpi.gather(prob.min().item()))  # one scale of weights for all ranks
        weight = importance_weight(torch.from_numpy(prob), lowest, beta)
        rows = torch.from_numpy(rows).to(self.device)
        columns = {k: v.index_select(0, rows) for k, v in self.columns.items()}
        weight = weight.float().to(self.device)
        return WeightedTransitions(**columns, rows=rows, weight=weight)

    def set_priorities(self, rows: Int64[Tensor, "B"], priority: PerSample) -> None:
        """Give transitions that were just used their new priorities."""
        self.tree.set(rows.cpu().numpy(), priority.cpu().numpy())
        self.max_priority = max(self.max_priority, priority.max().item())

    def state_dict(self) -> dict:
        priority = torch.from_numpy(self.tree.get(np.arange(self.filled)))
        state = {"priority": priority, "max_priority": self.max_priority}
        return super().state_dict() | state

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.tree.set(np.arange(self.filled), state["priority"].numpy())
        self.max_priority = state["max_priority"]


def true_next_obs(next_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Where each action led, [N, ...].

    An environment whose episode ended has restarted already, so its `next_obs` is the
    first observation of the next episode. The last one of the old is in `infos`.
    """
    true_obs = next_obs.copy()
    for i in np.flatnonzero(done):
        true_obs[i] = infos["final_obs"][i]
    return true_obs


def interact(agent: Agent, envs: gym.vector.VectorEnv, buffer: ReplayBuffer,
             obs: np.ndarray, act: Tensor) -> np.ndarray:
    """Step all environments, store the transitions and return the next observations."""
    next_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    true_obs = true_next_obs(next_obs, terminated | truncated, infos)
    buffer.add(obs=obs, act=act, rew=rew, next_obs=true_obs, terminated=terminated)
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


def priority_of(error: PerSample, omega: float) -> PerSample:
    """Eq. (7). Never zero, so that every transition can be drawn again."""
    return (error.abs() + 1e-6) ** omega


def importance_weight(prob: Float64[Tensor, "B"], lowest: float,
                      beta: float) -> Float64[Tensor, "B"]:
    """Eq. (9). `lowest` is the minimum of `prob` over the batch of all ranks."""
    return (lowest / prob) ** beta


def anneal_beta(step: int, beta_start: float, total_steps: float) -> float:
    """Eq. (10)."""
    return min(1.0, beta_start + (1 - beta_start) * step / total_steps)


# ======================================= update =======================================
def per_loss(agent: Agent, batch: WeightedTransitions) -> tuple[Scalar, dict]:
    """Eq. (3): Q(s, a) regresses on the target. Also returns the error for Eq. (7)."""
    with torch.no_grad():  # targets are constants
        q_targ = agent.critic_targ(batch.next_obs)
        q_next = agent.critic(batch.next_obs) if agent.cfg.double else q_targ
        next_val = greedy_value(q_targ, q_next)  # Eq. (2)
        target = td_target(batch.rew, batch.terminated, next_val, agent.cfg.gamma)
    q = q_of(agent.critic(batch.obs), batch.act)
    assert q.shape == batch.weight.shape
    loss = (batch.weight * huber(q, target)).mean()
    return loss, {"q_loss": loss, "q": q, "td_error": q - target}


def update(agent: Agent, optimizer: mpi.Adam, batch: WeightedTransitions,
           lr: float) -> dict:
    """One gradient step on one batch. The target network stays as it is."""
    return optimizer.minimize(per_loss, agent, batch, lr=lr)


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
        obs_dtype = torch.uint8 if is_image(obs_space) else torch.float32
        obs_example = torch.zeros(obs_space.shape, dtype=obs_dtype)
        act_example = torch.zeros((), dtype=torch.int64)
        buffer = PrioritizedBuffer(
            run.buffer_size, obs_example, act_example, run.device)
        step = run.restore(agent, optimizer=optimizer, buffer=buffer)  # 0, or resumed
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            agent.eps.fill_(epsilon(step, cfg.eps_end, cfg.eps_steps))
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            beta = anneal_beta(step, cfg.beta_start, cfg.total_steps)
            obs = interact(agent, envs, buffer, obs, agent.act(obs))
            updates_so_far = num_updates_due(step, cfg)
            step += cfg.num_envs
            for _ in range(updates_so_far, num_updates_due(step, cfg)):
                batch = buffer.sample(run.batch_size, beta)
                metrics = update(agent, optimizer, batch, lr)
                new_priority = priority_of(metrics["td_error"], cfg.omega)
                buffer.set_priorities(batch.rows, new_priority)
                run.store(**metrics, weight=batch.weight)
            if step % cfg.target_every < cfg.num_envs:  # passed a multiple of it
                agent.update_target()
            run.report(step, envs, eps=agent.eps, lr=lr)  # writes and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
