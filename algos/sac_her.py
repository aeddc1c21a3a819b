"""Hindsight experience replay (HER) for SAC.  Andrychowicz et al. 2017,
arXiv:1707.01495.

The problem. A robot arm has to reach a goal that changes from episode to
episode. The simplest reward is sparse: 0 if the goal is reached, and -1
otherwise. Random actions almost never reach it, so almost all rewards are -1,
and SAC has little to learn from. But the arm always ends up somewhere, and if
that place had been the goal, the episode would have been a success. So HER
relabels most of the transitions that it learns from: it replaces the goal by
one that the same episode reached later, and recomputes the reward. The actor
and the critics take the goal as an input, so what they learn from relabelled
goals carries over to the goals that the environment sets.

Relabelling is valid for two reasons. The goal changes the reward, and possibly
the end of the episode, but not where an action leads. And SAC is off-policy: it
may learn from actions that were chosen for another goal. In a stochastic
environment relabelling is biased: it picks the goal after seeing the outcome,
so actions look more reliable than they are.

The algorithm, and where each step is coded:

    for each environment step:
        act and store the transition, as SAC does        act, interact
        add 1 to `later` in its episode's earlier rows   HindsightBuffer.add
        draw a random batch                              HindsightBuffer.sample
            in a part of it, draw j of (9), change goal  future_step
            and compute r, `terminated` anew, by (10)    reward_of_goal
        update all networks and alpha, as SAC does       update

HER's own equations. An observation has three parts: `observation` o,
`desired_goal` g, and `achieved_goal` m(o), the goal that counts as reached at
o. In FetchReach, m(o) is the position of the gripper. The networks see s = (o,
g). An episode visits o_0, o_1, ..., o_T; while it runs, o_T is its latest
observation. For the transition from o_t to o_{t+1}, the new goal g' is

    g' = m(o_{t+1+j}),  j uniform in {0, ..., T - 1 - t}                   (9)

g' replaces g in s and in s'. Then the environment computes r and `terminated`
again, for the new goal:

    r = compute_reward(m(o_{t+1}), g'),
    terminated = compute_terminated(m(o_{t+1}), g')                       (10)

Both take m(o_{t+1}), the goal achieved after the action. With j = 0 it is also
the new goal, so the sparse reward becomes 0. (9) is the paper's "future"
strategy, the best of the four that it compares.

The paper stores k = 4 relabelled copies beside each original transition. Here,
a fraction her_k / (her_k + 1) of every batch is relabelled when it is sampled,
so a transition gets a new goal each time. The other transitions keep their
original goals, because the agent is evaluated on such goals.

In each row of the buffer, `later` is T - 1 - t of (9): the number of steps of
its episode that came after it. Each new step adds 1 to `later` in all earlier
rows of its episode, so running episodes can be relabelled too.

The environment must have `compute_reward`, which takes batches of goals, and
`compute_terminated`, as in gymnasium-robotics. Both get an empty `info`, so r
and `terminated` must depend on m(o_{t+1}) and the goal alone. Do not wrap it in
another reward: they bypass all wrappers. In FetchReach, no state is terminal.

SAC's equations, which algos/sac.py explains: read that file first. s includes
the goal. alpha, the temperature, is the weight of the policy's entropy. V(s')
is the value of the state that follows s, entropy included; `terminated` is 1 if
s' is terminal, and 0 at a time limit. Q_1 and Q_2 are the critics, w their
weights, and `targ` marks the target networks, which follow them slowly. The
actor outputs mu(s) and log sigma(s); eps is standard normal noise.

    y       = r + gamma (1 - terminated) V(s'), held constant in (2)       (1)
    L(Q)    = mean (Q_1(s, a) - y)^2 + mean (Q_2(s, a) - y)^2              (2)
    w_targ <- w_targ + tau (w - w_targ)                                    (3)
    a       = tanh(u),  u = mu(s) + sigma(s) eps                           (4)
    log pi(a | s) = sum_j [log N(u_j; mu_j, sigma_j)
                           - log(1 - tanh(u_j)^2)]                         (5)
    V(s')   = min(Q_1_targ(s', a'), Q_2_targ(s', a')) - alpha log pi(a' | s'),
              one a' sampled from the current policy                       (6)
    L(pi)   = mean [alpha log pi(a | s) - min(Q_1(s, a), Q_2(s, a))],
              a sampled from the current policy                            (7)
    L(alpha) = -log(alpha) (mean [log pi(a | s)] + target_entropy)         (8)

Departures from the paper. SAC, with the networks and settings of algos/sac.py,
replaces DDPG. Observations are not normalised, and targets are not clipped. The
paper makes its updates between episodes and relabels only finished ones; here
one update follows every step, and running episodes are relabelled too.

Defaults: the first tenth of all actions, at most 10,000, is uniform. Then every
environment step is followed by one update on a batch of 256, of which 205 are
relabelled. In a healthy run `success`, the fraction of training episodes that
end at their goal, rises towards 1, and `ep_ret`, their mean return, with it.

BitFlip, in utils/tasks.py, is the task of the paper's section 3.1: flip one of
10 bits per step until they match the goal. The largest entry of the action says
which bit. To see what HER adds, compare with --her-k 0, which is plain SAC.

Read after    algos/sac.py, then:  diff algos/sac.py algos/sac_her.py
Try           python -m algos.sac_her --env utils.tasks:BitFlip-v0
Reproduce     python -m algos.sac_her    (first: pip install -e '.[robotics]')
"""

import copy
import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from torch.nn.functional import softplus

# mpi.Adam          `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One Adam step; its gradient is averaged over processes, clipped if
#                   max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.Optimizers    named optimizers: `x` reports x_grad_norm, changes only its weights
# check_memory      refuses a buffer that is larger than the machine's memory
# goal_env          one environment without wrappers, for its compute_reward
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import check_memory, goal_env, make_envs
from utils.run import Run, RunConfig, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Actions = Float32[Tensor, "B d"]  # in [-1, 1]
ActorOut = Float32[Tensor, "B k"]  # mu and log sigma side by side: k = 2 d
Scalar = Float32[Tensor, ""]
Goals = Float32[Tensor, "B goal_dim"]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds seed, run_dir, device, ...: see --help
    env: str = "FetchReach-v4"  # Gymnasium id of a goal environment
    total_steps: float = 2e4  # environment steps
    num_envs: int = 1  # N, parallel environments
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    start_steps: int | None = None  # random actions; default: total_steps/10, max 1e4
    update_every: int = 1  # environment steps per update
    batch_size: int = 256  # samples per update (usually 64 to 512)
    lr: float = 1e-3  # Adam's learning rate (1e-4 to 1e-3)
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    tau: float = 0.005  # Polyak coefficient of the target networks (0.001 to 0.02)
    her_k: int = 4  # k, relabelled transitions per original one (4 or 8); 0: plain SAC
    alpha: float = 1.0  # temperature (0.05 to 1); with learn_alpha, its initial value
    learn_alpha: bool = True  # adjust the temperature by Eq. (8)
    target_entropy: float | None = None  # in nats; default -d, for d action dimensions
    hidden: tuple[int, ...] = (256, 256)  # hidden layer widths


# ======================================= agent ========================================
def relu_mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])  # no ReLU after the last layer


class Critic(nn.Module):
    """Observations [B, obs_dim], actions [B, act_dim] -> Q(s, a) [B]."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: tuple[int, ...]):
        super().__init__()
        self.net = relu_mlp(obs_dim + act_dim, *hidden, 1)

    def forward(self, obs: Tensor, act: Tensor) -> PerSample:
        return self.net(torch.cat([obs, act], dim=-1)).squeeze(-1)  # [B, 1] -> [B]


class TwinCritic(nn.Module):
    """Two critics with different initial weights -> Q_1(s, a), Q_2(s, a), each [B]."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: tuple[int, ...]):
        super().__init__()
        self.q1 = Critic(obs_dim, act_dim, hidden)
        self.q2 = Critic(obs_dim, act_dim, hidden)

    def forward(self, obs: Tensor, act: Tensor) -> tuple[PerSample, PerSample]:
        return self.q1(obs, act), self.q2(obs, act)


def with_goal(obs: Tensor, parts: dict[str, slice]) -> Tensor:
    """Flattened observations -> s = (o, g), without m(o). `parts`: name -> slice."""
    seen = [obs[..., parts["observation"]], obs[..., parts["desired_goal"]]]
    return torch.cat(seen, dim=-1)


class Agent(nn.Module):
    """Actor, two critics, two target critics and alpha, all saved in the state dict."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="goal", act="box")
        self.cfg = cfg
        # make_envs joins the parts into one vector; `parts`: name -> slice of it.
        self.parts = obs_space.parts
        self.obs_dim = len(with_goal(torch.zeros(obs_space.shape), self.parts))
        self.act_dim = math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        self.actor = relu_mlp(self.obs_dim, *cfg.hidden, 2 * self.act_dim)
        self.critic = TwinCritic(self.obs_dim, self.act_dim, cfg.hidden)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(cfg.alpha)))
        if cfg.target_entropy is None:
            self.target_entropy = -float(self.act_dim)
        else:
            self.target_entropy = cfg.target_entropy

    def alpha(self) -> Scalar:
        """The temperature, detached: critic and actor losses take it as a constant."""
        if not self.cfg.learn_alpha:  # log_alpha may be that of another run: init_from
            return torch.tensor(self.cfg.alpha, device=self.low.device)
        return self.log_alpha.detach().exp()

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Observations -> actions [N, d]: sampled by Eq. (4), or tanh(mu)."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.low.device)
        actor_out = self.actor(with_goal(obs, self.parts))
        if deterministic:
            mean, _ = actor_out.chunk(2, dim=-1)
            return mean.tanh()
        act, _ = sample_squashed_gaussian(actor_out)
        return act

    def random_act(self, num_envs: int) -> Tensor:
        """Uniformly random actions [N, d], for the first steps."""
        return 2 * torch.rand(num_envs, self.act_dim, device=self.low.device) - 1

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`: rescaled from [-1, 1] to the action bounds."""
        act = act.view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, act / 2 + 0.5).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray:
        """One flattened observation -> deterministic action, for use after training."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]


# ======================================== data ========================================
@dataclass(frozen=True)
class Transitions:
    obs: Float32[Tensor, "B obs_dim"]
    act: Actions
    rew: PerSample
    next_obs: Float32[Tensor, "B obs_dim"]  # observations of s'
    terminated: PerSample  # 1 if s' is terminal; 0 otherwise, also at a time limit


class ReplayBuffer:
    """A ring of `capacity` transitions: new ones overwrite the oldest."""

    def __init__(self, capacity: int, obs_dim: int, act_dim: int, device: torch.device):
        num_bytes = 4 * (2 * obs_dim + act_dim + 2) * capacity  # float32
        check_memory("--buffer-size", capacity, num_bytes)  # raises UsageError
        self.capacity = capacity
        self.device = device  # where batches go; the storage stays in CPU memory
        self.columns = {
            "obs": np.empty((capacity, obs_dim), np.float32),
            "act": np.empty((capacity, act_dim), np.float32),
            "rew": np.empty(capacity, np.float32),
            "next_obs": np.empty((capacity, obs_dim), np.float32),
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


class HindsightBuffer(ReplayBuffer):
    """A replay buffer that relabels a fraction of every batch that it samples.

    A step of N environments fills N rows, so successive steps of one environment are N
    rows apart. This also holds across the end of the ring, because the capacity is a
    multiple of N. Example: three steps of N = 2 environments. The second step ended the
    episode of environment 1.

        row            0  1  2  3  4  5
        environment    0  1  0  1  0  1
        later          2  1  1  0  0  0
    """

    def __init__(self, capacity: int, obs_space: gym.Space, act_dim: int,
                 device: torch.device, num_envs: int, env: gym.Env, her_k: int):
        """Round the capacity down to a multiple of N. `env` computes Eq. (10)."""
        capacity = capacity // num_envs * num_envs
        super().__init__(capacity, obs_space.shape[0], act_dim, device)
        self.parts = obs_space.parts
        self.num_envs = num_envs
        self.env = env
        self.relabelled = her_k / (her_k + 1)  # fraction of every batch
        # Per row: how many steps of its episode came after it, T - 1 - t in Eq. (9).
        self.columns["later"] = np.zeros(capacity, np.int64)
        # Steps so far per running episode. Not saved: a resumed run starts new ones.
        self.ep_len = np.zeros(num_envs, np.int64)

    def add(self, **transition: np.ndarray) -> None:
        """Store one transition per environment; every array is [N, ...]."""
        first = self.position  # the row of environment 0
        super().add(**transition, later=np.zeros(self.num_envs, np.int64))
        # Earlier rows of each running episode. The ring keeps at most capacity / N - 1.
        stored = np.minimum(self.ep_len, self.capacity // self.num_envs - 1)
        for i in range(self.num_envs):
            steps_back = np.arange(1, stored[i] + 1)
            rows = (first + i - self.num_envs * steps_back) % self.capacity
            self.columns["later"][rows] += 1  # one more step came after them
        self.ep_len += 1

    def end_episodes(self, done: np.ndarray) -> None:
        """Call after `add`: `done` [N] marks the environments whose episodes ended."""
        self.ep_len[done] = 0

    def sample(self, batch_size: int) -> Transitions:
        """Sample uniformly, with replacement. Relabel a fraction of the transitions."""
        rows = torch.randint(self.num_stored, (batch_size,)).numpy()
        batch = self.gather(rows)
        later = batch.pop("later")
        # Rows are drawn at random, so it does not matter which `num` we relabel.
        num = round(self.relabelled * batch_size)
        ahead = future_step(later[:num]).cpu().numpy()  # j of Eq. (9)
        # The row of o_{t+j}. Its next_obs is o_{t+1+j}, which achieves the new goal.
        future = (rows[:num] + self.num_envs * ahead) % self.capacity
        goal = self.gather(future)["next_obs"][:, self.parts["achieved_goal"]]
        achieved = batch["next_obs"][:num, self.parts["achieved_goal"]]
        rew, terminated = reward_of_goal(self.env, achieved, goal)
        batch["rew"][:num] = rew
        batch["terminated"][:num] = terminated
        for name in ("obs", "next_obs"):
            batch[name][:num, self.parts["desired_goal"]] = goal
            batch[name] = with_goal(batch[name], self.parts)
        return Transitions(**batch)


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
    buffer.end_episodes(terminated | truncated)
    return new_obs


# ==================================== mathematics =====================================
def td_target(rew: PerSample, terminated: PerSample, next_val: PerSample,
              gamma: float) -> PerSample:
    """Eq. (1): bootstrap unless terminated. A time limit is not a termination."""
    assert rew.shape == terminated.shape == next_val.shape
    return rew + gamma * (1 - terminated) * next_val


def future_step(later: Int64[Tensor, "B"]) -> Int64[Tensor, "B"]:
    """Draw j of Eq. (9), uniform in {0, ..., later}, where `later` is T - 1 - t."""
    # rand is in [0, 1), and long() rounds down.
    return (torch.rand(later.shape, device=later.device) * (later + 1)).long()


def reward_of_goal(env: gym.Env, achieved: Goals,
                   goal: Goals) -> tuple[PerSample, PerSample]:
    """Eq. (10): rew and `terminated` for reaching `achieved` if the goal is `goal`."""
    goals = achieved.cpu().numpy(), goal.cpu().numpy()
    rew = torch.as_tensor(env.compute_reward(*goals, {})).to(goal)
    # In gymnasium-robotics compute_reward takes batches, compute_terminated does not.
    ends = [float(env.compute_terminated(*pair, {})) for pair in zip(*goals)]
    terminated = torch.tensor(ends).to(goal)
    assert rew.shape == terminated.shape, "compute_reward does not accept batches"
    return rew, terminated


def q_loss(q: PerSample, target: PerSample) -> Scalar:
    """Eq. (2) for one critic."""
    assert q.shape == target.shape  # [B] minus [B, 1] would be [B, B]
    return (q - target).square().mean()


@torch.no_grad()
def polyak_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Eq. (3), in place: move the target's weights towards the source's."""
    for w_targ, w in zip(target.parameters(), source.parameters()):
        w_targ.lerp_(w, tau)  # w_targ + tau (w - w_targ)


def sample_squashed_gaussian(actor_out: ActorOut) -> tuple[Actions, PerSample]:
    """Sample actions [B, d]. Return them and their log pi [B]."""
    mean, log_std = actor_out.chunk(2, dim=-1)
    log_std = log_std.clamp(-20, 2)
    eps = torch.randn_like(mean)
    u = mean + log_std.exp() * eps  # Eq. (4)
    # log N(u; mu, sigma), where eps is (u - mu) / sigma.
    logp_u = -0.5 * eps.square() - log_std - 0.5 * math.log(2 * math.pi)
    # This is log(1 - tanh(u)^2), but stays finite for large |u|.
    log_jacobian = 2 * (math.log(2) - u - softplus(-2 * u))
    return u.tanh(), (logp_u - log_jacobian).sum(-1)  # Eq. (5)


def soft_value(q1: PerSample, q2: PerSample, logp: PerSample,
               alpha: Scalar) -> PerSample:
    """Eq. (6): min(Q_1, Q_2) - alpha log pi, for a sampled action."""
    assert q1.shape == q2.shape == logp.shape
    return torch.min(q1, q2) - alpha * logp


# ======================================= update =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (2): both critics learn the same target, which is held constant."""
    with torch.no_grad():
        next_act, next_logp = sample_squashed_gaussian(agent.actor(batch.next_obs))
        next_q1, next_q2 = agent.critic_targ(batch.next_obs, next_act)
        next_val = soft_value(next_q1, next_q2, next_logp, agent.alpha())  # Eq. (6)
        target = td_target(batch.rew, batch.terminated, next_val, agent.cfg.gamma)
    q1, q2 = agent.critic(batch.obs, batch.act)
    loss = q_loss(q1, target) + q_loss(q2, target)
    return loss, {"critic_loss": loss, "q1": q1, "q2": q2}


def actor_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """Eq. (7). The gradient reaches the actor through `act` and `logp`."""
    act, logp = sample_squashed_gaussian(agent.actor(batch.obs))
    q1, q2 = agent.critic(batch.obs, act)
    loss = (agent.alpha() * logp - torch.min(q1, q2)).mean()
    return loss, {"actor_loss": loss, "logp": logp}


def alpha_loss(agent: Agent, logp: PerSample) -> tuple[Scalar, dict]:
    """Eq. (8). `logp` [B] is log pi of the actions that the actor's loss sampled."""
    loss = -agent.log_alpha * (logp.detach() + agent.target_entropy).mean()
    return loss, {"alpha_loss": loss, "alpha": agent.alpha()}


def update(agent: Agent, optimizers: mpi.Optimizers, batch: Transitions) -> dict:
    """Update critics, actor, alpha (if learned) and target critics. Return metrics."""
    cfg = agent.cfg
    metrics = optimizers.critic.minimize(critic_loss, agent, batch, lr=cfg.lr)
    metrics |= optimizers.actor.minimize(actor_loss, agent, batch, lr=cfg.lr)
    if cfg.learn_alpha:
        logp = metrics["logp"]
        metrics |= optimizers.alpha.minimize(alpha_loss, agent, logp, lr=cfg.lr)
    polyak_update(agent.critic_targ, agent.critic, cfg.tau)  # Eq. (3)
    return metrics


# ======================================= train ========================================
def num_start_steps(cfg: Config) -> int:
    """Number of initial steps with random actions. Updates start after them."""
    if cfg.start_steps is not None:
        return cfg.start_steps
    return min(10_000, int(cfg.total_steps / 10))


def num_updates(step: int, cfg: Config) -> int:
    """Total number of updates due once `step` environment steps have been taken."""
    return max(0, step - num_start_steps(cfg)) // cfg.update_every


def train(cfg: Config) -> Agent:
    """Train until `total_steps`, from the start or from a checkpoint.

    With several processes, `run.num_envs`, `run.buffer_size` and `run.batch_size` are
    this process's shares of the totals in `cfg`.
    """
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of the resumed run
        envs = make_envs(cfg, run.num_envs)
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizers = mpi.Optimizers(
            critic=mpi.Adam(agent.critic), actor=mpi.Adam(agent.actor),
            alpha=mpi.Adam(agent.log_alpha))
        buffer = HindsightBuffer(
            run.buffer_size, envs.single_observation_space, agent.act_dim, run.device,
            run.num_envs, goal_env(envs), cfg.her_k)
        # Tells `run` what to evaluate and save. Returns 0, or the saved step.
        step = run.restore(agent, optimizers=optimizers, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            if step < num_start_steps(cfg):
                act = agent.random_act(run.num_envs)
            else:
                act = agent.act(obs)
            obs = interact(agent, envs, buffer, obs, act)
            updates_before = num_updates(step, cfg)
            step += cfg.num_envs  # the environments of all processes
            # By default one update per step, once the random steps are over.
            for _ in range(num_updates(step, cfg) - updates_before):
                batch = buffer.sample(run.batch_size)
                metrics = update(agent, optimizers, batch)
                run.store(**metrics)  # the next report averages them
            run.report(step, envs)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
