r"""Deep Q-learning (DQN).  Mnih et al. 2015, Nature 518, 529.

The problem. Q(s, a) is the expected discounted return of taking action a in
state s and acting optimally from then on. The best action in s is the one with
the highest Q, so it is enough to learn Q. By Bellman's optimality equation,
Q(s, a) is the expected value of r + gamma max_a' Q(s', a'). Here r is the
reward, s' is the next state, and gamma is the discount factor. Q-learning
evaluates r + gamma max_a' Q(s', a') for the r and s' that it observed, with its
current estimate of Q. It moves Q(s, a) towards the result, the target.

If Q is a table, the estimates converge to the true Q, provided that every
action is tried again and again in every state and that the step size shrinks
suitably. If Q is a neural network, learning often fails, for two reasons.
First, consecutive transitions are correlated, so a network trained on them in
order fits the latest ones and forgets the rest. Second, the network that is
being trained also computes the target. So every gradient step moves the target
too, and errors can reinforce themselves. DQN adds one remedy for each:

- A replay buffer stores many past transitions. Every update uses a random
  batch from it, which mixes old and new transitions.
- A target network Q_targ, an older copy of Q, estimates the value of s' in the
  target. It is frozen, except that every `target_every` environment steps the
  weights of Q are copied into it.

DQN may learn from old transitions (it is off-policy), because r and s' depend
on s and a, but not on the policy that chose a. And the target uses the action
that looks best in s', not the one that the agent took there.

The algorithm, and where each step is coded:

    for each environment step:
        eps by (6), then choose a by (5)               epsilon, Agent.act
        take the step, store the transition            interact
        after `start_steps`, once per `update_every` steps:
            draw a random batch                        ReplayBuffer.sample
            y by (1) and (2), then the loss (3)        dqn_loss
            one Adam step on the loss                  update
        every `target_every` steps: Q_targ <- Q        update_target

Notation. In state s (`obs` in the code), action a (`act`) gave reward r (`rew`)
and led to state s' (`next_obs`). `terminated` is 1 if s' is terminal. t counts
environment steps. `mean` is over the batch, mean_a over the actions.

The target y (`target`) contains U(s') (`next_val`), an estimate of the
discounted return from s' on:

    y     = r + gamma (1 - terminated) U(s'), held constant in (3)         (1)
    U(s') = Q_targ(s', argmax_a Q(s', a))      if `double`,
            max_a Q_targ(s', a)                otherwise                   (2)

(1) If s' is terminal, nothing follows, so y = r. Otherwise we bootstrap: U(s')
stands in for the rewards to come. A time limit stops an episode in a state that
is not terminal, so `terminated` is 0 and U(s') is used. y is a constant label
for Q(s, a), computed without gradients. So the loss moves Q(s, a) to y, and not
y to Q(s, a).
(2) The maximum of noisy estimates is too high on average, because it favours
actions whose errors are positive. In Double DQN (van Hasselt et al. 2016,
arXiv:1509.06461), Q chooses the action, and Q_targ only evaluates it. So U(s')
is never above max_a Q_targ(s', a), and it is below if Q chooses another action
than the one that Q_targ rates highest. This reduces the bias. The bias does not
vanish: Q_targ is an older copy of Q, so both often overrate the same action.

The loss compares Q(s, a) with y:

    L(Q)  = mean h(Q(s, a) - y),
            h(x) = x^2 / 2 if |x| < 1, else |x| - 1/2                      (3)

(3) The Huber loss h is quadratic for small errors and linear for large ones.
Its slope stays between -1 and 1, so a large error pulls no harder than an error
of 1.

The network has one output per action, Q(s, a). If `dueling`, it has the outputs
V(s) and, per action, A(s, a), and computes Q from them:

    Q     = V(s) + A(s, a) - mean_a A(s, a)    if `dueling`                (4)

(4) In many states all actions are worth nearly the same. In the dueling network
(Wang et al. 2016, arXiv:1511.06581), V is this common part, and it learns from
every sample, whichever action was taken. It is the mean of Q over the actions,
not the value of the greedy policy. If the mean of A were not subtracted, V
would not be unique: adding a constant to V and subtracting it from A would not
change Q. A still is not unique; only its differences between actions count.

Exploration, with a probability eps that falls:

    a     = argmax_a Q(s, a), or with probability eps a random action      (5)
    eps   = max(eps_end, 1 - (1 - eps_end) t / eps_steps)                  (6)

(5) A purely greedy agent may never find out that it underestimates an action.
So with probability eps it draws one uniformly from all actions.
(6) At first Q is no better than a guess, so eps starts at 1. Then it falls
linearly, so that more and more of the data comes from states that a good policy
visits.

Departures from the papers. The original DQN uses neither Double DQN nor the
dueling network; --no-double --no-dueling turns both off. Adam, with a learning
rate that falls linearly to zero, replaces RMSProp. Wang et al. give V and A
separate hidden layers, in two streams, and rescale the sum of the streams'
gradients. Here V and A share all hidden layers, so both are linear in the same
features. With `dueling` or without, the network can represent the same
functions Q; (4) only changes how they are learned. `target_every` counts
environment steps, not updates. eps falls from the first step on, even before
learning starts. The papers' settings are for Atari; ours are for CartPole.

Defaults: learning starts after 1,000 steps. From then on there is one update,
on a batch of 128, for every two environment steps: 24,500 updates in all, and
125 between successive copies of Q. The buffer has room for all 50,000
transitions of a run, so none is overwritten. With --num-envs 4, every pass of
the training loop takes four environment steps and makes two updates; the
totals stay the same.

Most runs on CartPole reach a return of 500, the maximum, in training episodes
after 20,000 to 50,000 steps, although 4% of the actions are still random. The
others do not get there in time, and some runs get worse again
(benchmarks/NOTES.md, "DQN"). `q`, the mean of Q(s, a) over sampled transitions,
rises from about 0 and ends near 70 to 85. With a reward of 1 per step, no
discounted return exceeds 1 / (1 - gamma) = 100; a much higher `q` means that Q
diverges. Q rises slowly: while Q_targ is frozen at a value x, Q can rise only
to about 1 + gamma x. After n copies it is at most about 100 (1 - gamma^n),
which is 86 for the 196 copies after learning starts. `q_loss` is typically 0.1
to 0.5. It does not fall to zero, partly because every copy changes the targets.

Image environments work here too, with a CNN. For Atari, whose observations are
stacks of 4 frames, use algos/dqn_atari.py: it stores every frame once, but this
buffer up to 8 times, because it stores each stack as `obs` and as `next_obs`.

Try           python -m algos.dqn --env LunarLander-v3 --total-steps 3e5 \
                  --eps-steps 40000 --target-every 1000
Reproduce     python -m algos.dqn --num-envs 4
              (also with one environment; results: benchmarks/README.md)
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
        obs_dtype = np.uint8 if is_image(obs_space) else np.float32
        obs_example = np.zeros(obs_space.shape, obs_dtype)
        act_example = np.zeros((), np.int64)
        buffer = ReplayBuffer(run.buffer_size, obs_example, act_example, run.device)
        # Tells `run` what to evaluate and save. Returns 0, or the saved step.
        step = run.restore(agent, optimizer=optimizer, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            agent.eps.fill_(epsilon(step, cfg.eps_end, cfg.eps_steps))
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            obs = interact(agent, envs, buffer, obs, agent.act(obs))
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
