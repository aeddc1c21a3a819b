r"""DQN with prioritized replay (PER).  Schaul et al. 2016, arXiv:1511.05952.

The problem. DQN moves Q(s, a) towards a target y, on batches that are sampled
uniformly from a replay buffer. On most transitions the error Q(s, a) - y is
small, so they teach little. PER gives each transition a priority, which grows
with |Q(s, a) - y|, and samples it with a probability proportional to that. A
new transition has no error yet, so it gets the highest priority so far.

Such batches are no longer uniform samples of the buffer, which biases the
gradient. Importance-sampling weights correct for this: partly at first, and
almost fully by the end of training. Another weakness remains. A large error may
be noise, from random rewards or transitions. Then it stays large, and PER
replays the transition again and again without gain.

The algorithm, and where each step is coded:

    for each environment step:
        eps by (6), beta by (10), choose a by (5)      epsilon, anneal_beta, act
        take the step (interact), store at highest p   PrioritizedBuffer.add
        after `start_steps`, once per `update_every` steps:
            batch by (8), weights w by (9)             PrioritizedBuffer.sample
            y by (1) and (2), error Q - y, loss (3)    per_loss
            one Adam step on the loss                  update
            new priorities for the batch by (7), with  priority_of,
                the errors from before the Adam step   set_priorities
        every `target_every` steps: Q_targ <- Q        update_target

(1) to (6) come from DQN, except w in (3), which is (9). Action a in state s
gave reward r and led to s'. U(s') estimates the discounted return from s' on.
Q_targ, an older copy of Q, evaluates s'; if `double`, Q chooses the action.
`terminated` is 1 if s' is terminal; at a time limit it is 0, so y contains
U(s'). h is the Huber loss; V and A are outputs of the network. t counts
environment steps. `mean` is over the batch, mean_a over the actions.

    y     = r + gamma (1 - terminated) U(s'), held constant in (3)         (1)
    U(s') = Q_targ(s', argmax_a Q(s', a))      if `double`,
            max_a Q_targ(s', a)                otherwise                   (2)
    L(Q)  = mean w h(Q(s, a) - y),
            h(x) = x^2 / 2 if |x| < 1, else |x| - 1/2                      (3)
    Q     = V(s) + A(s, a) - mean_a A(s, a)    if `dueling`                (4)
    a     = argmax_a Q(s, a), or with probability eps a random action      (5)
    eps   = max(eps_end, 1 - (1 - eps_end) t / eps_steps)                  (6)

Sampling. The buffer holds n transitions, indexed by i and k. We write omega for
the paper's alpha, and p_i for what the paper writes as p_i^alpha. (This is its
proportional variant; its other variant uses the rank of the error.)

    p_i   = (|Q(s_i, a_i) - y_i| + 1e-6)^omega  if i has been sampled,
            the highest p so far                if i is new                (7)
    P(i)  = p_i / sum_k p_k, the probability of sampling i                 (8)

(7) The error is the one that i had when it was last sampled. Renewing all
errors would cost too much, so many priorities are out of date. omega balances
diversity and focus: at 0 all P(i) are equal, and at 1 they are proportional to
the errors. 1e-6 keeps every p positive, so a transition without error can be
sampled again. The highest p starts at 1 and never decreases.
(8) To sample, lay intervals of length p_i end to end and find the one that
contains a random point. With a binary tree of sums, this takes only about
log2(buffer_size) steps, and so does changing one p_i (`SumTree`). As in the
paper, the total length is divided into `batch_size` equal segments, and one
point is drawn from each. Batches become more varied than with independent
draws, but i still gets batch_size P(i) draws on average, which is all that (9)
needs.

The weights w multiply the samples' losses in (3):

    w_i   = (n P(i))^-beta / max_k (n P(k))^-beta = (min_k P(k) / P(i))^beta,
            k over the batch                                               (9)
    beta  = min(1, beta_start + (1 - beta_start) t / total_steps)         (10)

(9) Transition i is sampled n P(i) times as often as in uniform replay. The
numerator, at beta = 1, is 1 / (n P(i)) and cancels this factor. With the
numerator alone, the expected gradient would be that of uniform replay. The
denominator makes every weight at most 1, so no weight enlarges its sample's
gradient. This also shrinks the gradient as a whole: on CartPole the mean
`weight` falls to about 0.1. Adam's step hardly depends on this scale if it
changes slowly. But the denominator also differs from batch to batch: one with a
very unlikely transition is scaled down as a whole. So some bias remains.
(10) beta < 1 corrects only part of the bias. Early on the bias does little
harm, because Q and y change fast. Near convergence it matters, so beta rises.

Departures from the paper. As in algos/dqn.py, Adam with a learning rate that
falls to zero replaces RMSProp, `target_every` counts environment steps, and eps
falls from the first step on. The dueling network is not part of the paper
(--no-dueling). The paper divides DQN's learning rate by four; we do not. It
clips rewards and errors to [-1, 1]. Here (3) limits only the gradient, as if
errors were clipped; rewards and the errors in (7) are not. The paper leaves
open whether the maximum in (9) is over the batch, as here, or the buffer.

Defaults are as in algos/dqn.py: after 1,000 steps, one update on a batch of 128
for every two steps. omega and beta_start are the paper's. In our runs PER was
not clearly better than DQN (benchmarks/README.md). In a healthy run on CartPole
`q`, the mean of Q(s, a), ends above 65. The mean of `td_error`, Q - y (others
define it as y - Q), ends between 0.5 and 5. A likely reason why it is positive:
where the pole falls and Q did not foresee it, y is only the last reward, 1, but
Q expected many more. `q_loss` ends near 0.03, since large errors, though
frequent in prioritized batches, have the smallest weights, and (9) scales all
down.

Read after    algos/dqn.py, then:  diff algos/dqn.py algos/dqn_per.py
Try           python -m algos.dqn_per --env LunarLander-v3 --total-steps 3e5 \
                  --eps-steps 40000 --target-every 1000
Reproduce     python -m algos.dqn_per
              (results: benchmarks/README.md)
"""

import copy
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, Shaped
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

# mpi.Adam          `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One Adam step; its gradient is averaged over processes, clipped if
#                   max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.gather        a list of what each process has
# check_memory      refuses a buffer that is larger than the machine's memory
# image_to_float    uint8 pixels -> float32 in [0, 1], channels first
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# nature_cnn        the CNN of Mnih et al. 2015, with 512 outputs after a ReLU
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import check_memory, image_to_float, is_image, make_envs, nature_cnn
from utils.run import Run, RunConfig, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
PerAction = Float32[Tensor, "B k"]  # one number per sample for each of k actions
Choices = Int64[Tensor, "B"]  # indices of actions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds seed, run_dir, device, ...: see --help
    env: str = "CartPole-v1"  # Gymnasium id
    total_steps: float = 5e4  # environment steps
    num_envs: int = 1  # N, parallel environments
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 50_000  # transitions in the replay buffer
    start_steps: int = 1000  # environment steps before learning starts
    update_every: int = 2  # environment steps per update
    target_every: int = 250  # environment steps between copies of Q to Q_targ
    batch_size: int = 128  # samples per update (usually 32 to 512)
    lr: float = 1e-3  # Adam's initial learning rate (1e-5 to 1e-3)
    anneal_lr: bool = True  # decrease the learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    eps_end: float = 0.04  # final probability of a random action (0.01 to 0.1)
    eps_steps: int = 8000  # environment steps over which eps falls from 1 to eps_end
    double: bool = True  # Double DQN, Eq. (2)
    dueling: bool = True  # dueling network, Eq. (4)
    omega: float = 0.6  # priority exponent, the paper's alpha; 0: all equal (0 to 0.7)
    beta_start: float = 0.4  # initial importance-weight exponent, Eq. (10) (0.4 to 1)
    hidden: tuple[int, ...] = (128, 128)  # hidden layer widths, for vector observations


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
        self.images = is_image(obs_space)
        if self.images:
            self.encoder = nature_cnn(obs_space)  # 512 features, after a ReLU
            sizes = (512,)
        else:
            sizes = (*obs_space.shape, *cfg.hidden)  # `head` is the whole network
        num_outputs = num_acts + 1 if cfg.dueling else num_acts  # V and k A, or k Q
        self.head = relu_mlp(*sizes, num_outputs)

    def forward(self, obs: Tensor) -> PerAction:
        if self.images:
            obs = self.encoder(image_to_float(obs))
        out = self.head(obs.float())
        if not self.dueling:
            return out
        return dueling_q(out[:, :1], out[:, 1:])


class Agent(nn.Module):
    """Q, its target network and eps, all saved in the state dict."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector image", act="discrete")
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


class ReplayBuffer:
    """A ring of `capacity` transitions: new ones overwrite the oldest."""

    def __init__(self, capacity: int, obs: np.ndarray, act: np.ndarray,
                 device: torch.device):
        """`obs` and `act` are examples: only their shapes and dtypes are used."""
        num_bytes = (2 * obs.nbytes + act.nbytes + 4 + 4) * capacity
        check_memory("--buffer-size", capacity, num_bytes)  # raises UsageError
        self.capacity = capacity
        self.device = device  # where batches go; the storage stays in CPU memory
        self.columns = {
            "obs": np.empty((capacity, *obs.shape), obs.dtype),
            "act": np.empty((capacity, *act.shape), act.dtype),
            "rew": np.empty(capacity, np.float32),
            "next_obs": np.empty((capacity, *obs.shape), obs.dtype),
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


@dataclass(frozen=True)
class WeightedTransitions(Transitions):
    rows: Int64[np.ndarray, "B"]  # their rows in the buffer
    weight: PerSample  # importance-sampling weights w, Eq. (9)


class SumTree:
    """A binary tree. Its leaves hold one number per row of the buffer; every other node
    holds the sum of its two children.

    Node 1 is the root. The children of node k are 2 k and 2 k + 1. An example: leaves
    1, 0, 3, 4 have the sums 1 and 7 above them, and 8 at the root. To find the row of
    the point 2.5, compare it with the left sum, 1. It is larger, so go right with
    2.5 - 1 = 1.5. Now the left number, 3, is larger, so go left. This is row 2.
    """

    def __init__(self, size: int):
        self.depth = (size - 1).bit_length()  # log2(size), rounded up
        self.num_leaves = 2**self.depth  # at least `size`; the rest stay 0
        self.nodes = np.zeros(2 * self.num_leaves)  # the second half are the leaves

    def get(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers in these rows."""
        return self.nodes[self.num_leaves + rows]

    def set(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Change the numbers in these rows, then recompute the sums above them.

        Adding differences instead would be wrong if a row occurs twice.
        """
        node = self.num_leaves + rows
        self.nodes[node] = values
        for _ in range(self.depth):
            node = node // 2  # their parents
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, point: np.ndarray) -> np.ndarray:
        """Points between 0 and the total -> the rows whose intervals contain them."""
        node = np.ones(len(point), np.int64)  # every point starts at the root
        for _ in range(self.depth):
            left = self.nodes[2 * node]
            # Rounding can push a point past the left sum even if the right one is 0.
            go_right = (point >= left) & (self.nodes[2 * node + 1] > 0)
            point = np.where(go_right, point - left, point)  # within the child
            node = np.where(go_right, 2 * node + 1, 2 * node)
        return node - self.num_leaves


class PrioritizedBuffer(ReplayBuffer):
    """A replay buffer that draws row i with probability P(i), Eq. (8)."""

    def __init__(self, capacity: int, obs: np.ndarray, act: np.ndarray,
                 device: torch.device):
        super().__init__(capacity, obs, act, device)
        self.tree = SumTree(capacity)  # the priorities p; 0 for an empty row
        self.max_priority = 1.0  # the highest p so far; each process has its own

    def add(self, **transition: np.ndarray) -> None:
        """Store transitions like ReplayBuffer.add, with the highest priority so far."""
        rows = (self.position + np.arange(len(transition["rew"]))) % self.capacity
        super().add(**transition)
        self.tree.set(rows, np.full(len(rows), self.max_priority))

    def sample(self, batch_size: int, beta: float) -> WeightedTransitions:
        """Draw by Eq. (8), instead of uniformly like ReplayBuffer.sample.

        The total priority is divided into `batch_size` equal segments, and one point is
        drawn from each. With several processes, each draws its share of the batch from
        its own buffer. These hold equally many transitions, so their P are comparable.
        """
        total = self.tree.nodes[1]  # the root holds the sum of all p
        offset = torch.rand(batch_size, dtype=torch.float64).numpy()  # in each segment
        point = (np.arange(batch_size) + offset) / batch_size * total
        rows = self.tree.find(point)
        prob = self.tree.get(rows) / total  # Eq. (8)
        lowest = min(mpi.gather(prob.min().item()))  # over the batch of all processes
        weight = importance_weight(torch.from_numpy(prob), lowest, beta)
        weight = weight.float().to(self.device)
        return WeightedTransitions(**self.gather(rows), rows=rows, weight=weight)

    def set_priorities(self, rows: np.ndarray, priority: PerSample) -> None:
        """Store the priorities, Eq. (7), of transitions that were just sampled."""
        self.tree.set(rows, priority.cpu().numpy())
        self.max_priority = max(self.max_priority, priority.max().item())

    def state_dict(self) -> dict:
        priority = torch.from_numpy(self.tree.get(np.arange(self.num_stored)))
        state = {"priority": priority, "max_priority": self.max_priority}
        return super().state_dict() | state

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.tree.set(np.arange(self.num_stored), state["priority"].numpy())
        self.max_priority = state["max_priority"]


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


def priority_of(error: PerSample, omega: float) -> PerSample:
    """Eq. (7), for transitions that were just sampled. `error` is Q - y."""
    return (error.abs() + 1e-6) ** omega


def importance_weight(prob: Float64[Tensor, "B"], lowest: float,
                      beta: float) -> Float64[Tensor, "B"]:
    """Eq. (9). `lowest` is the minimum of P over the batch of all processes."""
    return (lowest / prob) ** beta


def anneal_beta(step: int, beta_start: float, total_steps: float) -> float:
    """Eq. (10)."""
    return min(1.0, beta_start + (1 - beta_start) * step / total_steps)


# ======================================= update =======================================
def per_loss(agent: Agent, batch: WeightedTransitions) -> tuple[Scalar, dict]:
    """The loss of PER, Eq. (3): fit Q(s, a) to the target y, which is held constant.

    The metric `td_error` is Q - y, one number per sample, for Eq. (7).
    """
    with torch.no_grad():
        next_q_targ = agent.critic_targ(batch.next_obs)
        if agent.cfg.double:
            next_val = greedy_value(next_q_targ, agent.critic(batch.next_obs))
        else:
            next_val = next_q_targ.max(-1).values
        target = td_target(batch.rew, batch.terminated, next_val, agent.cfg.gamma)
    q = q_of(agent.critic(batch.obs), batch.act)
    assert q.shape == batch.weight.shape
    loss = (batch.weight * huber(q, target)).mean()
    return loss, {"q_loss": loss, "q": q, "td_error": q - target}


def update(agent: Agent, optimizer: mpi.Adam, batch: WeightedTransitions,
           lr: float) -> dict:
    """Take one Adam step on Eq. (3). Return metrics; `td_error` is [B], not a mean."""
    return optimizer.minimize(per_loss, agent, batch, lr=lr)


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
        obs_dtype = np.uint8 if is_image(obs_space) else np.float32
        obs_example = np.zeros(obs_space.shape, obs_dtype)
        act_example = np.zeros((), np.int64)
        buffer = PrioritizedBuffer(
            run.buffer_size, obs_example, act_example, run.device)
        # Tells `run` what to evaluate and save. Returns 0, or the saved step.
        step = run.restore(agent, optimizer=optimizer, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            agent.eps.fill_(epsilon(step, cfg.eps_end, cfg.eps_steps))
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            beta = anneal_beta(step, cfg.beta_start, cfg.total_steps)
            obs = interact(agent, envs, buffer, obs, agent.act(obs))
            updates_before = updates_due(step, cfg)
            step += cfg.num_envs  # the environments of all processes
            # As many updates as became due in these num_envs steps: 0, 1 or more.
            for _ in range(updates_due(step, cfg) - updates_before):
                batch = buffer.sample(run.batch_size, beta)
                metrics = update(agent, optimizer, batch, lr)
                # Errors [B] from before the Adam step; new ones would cost a pass.
                new_priority = priority_of(metrics["td_error"], cfg.omega)
                buffer.set_priorities(batch.rows, new_priority)
                run.store(**metrics, weight=batch.weight)
            # True once per target_every steps (or in every pass, if num_envs is more).
            if step % cfg.target_every < cfg.num_envs:  # reached or passed a multiple
                agent.update_target()
            run.report(  # logs, evaluates, saves
                step, envs, beta=beta, eps=agent.eps, lr=lr)
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
