"""SAC for discrete actions (SAC-Discrete).  Christodoulou 2019, arXiv:1910.07207.

The problem. SAC draws an action a and moves it along the gradient of Q(s, a) in a. If a
is one of k separate actions, there is no such gradient.

The idea. Any mean over k actions is a sum of k terms, so no action needs to be drawn.
The actor gives log pi(a|s), and each critic Q(s, a), for all k actions at once.

    V(s)           sum_a pi(a|s) [min(Q_1(s, a), Q_2(s, a)) - alpha log pi(a|s)]
    critic_loss    Q_1 and Q_2 fit r + gamma V(s')
    actor_loss     pi maximises V(s), with Q held fixed
    alpha_loss     alpha falls while the entropy is above its target, else it rises
    interact       take a ~ pi(.|s) (see `act`); store (s, a, r, s', terminated)
    update         one Adam step on each loss; the target critics follow

Where it fails. The paper's target entropy is 0.98 log k: for k = 2, probabilities of
0.58 and 0.42. Where one action is clearly best, that is too random: alpha grows without
end, and Q with it. Then lower --target-entropy-ratio (here 0.2), or fix alpha, as in
--no-learn-alpha --alpha 0.05. If alpha is tiny, pi may settle before Q knows all a.

Departures from the paper. A lower target entropy. The target critics follow in small
steps, as in SAC; the paper copies them now and then. The settings are for CartPole;
those for games were not tried.

Healthy values. On CartPole, `entropy` falls to its target, 0.2 log 2 = 0.14, in 12,000
steps, and `alpha` from 1 to less than 0.2. `q1` and `q2` stay close together. From step
25,000 on, nearly all episodes last 500 steps.

Run   python -m algos.sac_discrete --env CartPole-v1
Diff  diff algos/sac.py algos/sac_discrete.py
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
from utils.nets import head_sizes, make_encoder, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Natural, Positive, Run, RunConfig, check_range, main
from utils.spaces import is_image

# Shapes, which the tests check at every call.
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
PerAction = Float32[Tensor, "B k"]  # one number per sample for each of k actions
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
    buffer_size: int = 100_000  # transitions in the replay buffer
    start_steps: Natural = 1000  # environment steps with random actions before updates
    update_every: int = 1  # environment steps per update
    batch_size: int = 128  # B, samples per update (usually 64 to 512)
    lr: Positive = 5e-4  # Adam's learning rate (1e-4 to 1e-3)
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    tau: Fraction = 0.01  # Polyak coefficient of the target networks (0.001 to 0.02)
    alpha: float = 1.0  # temperature, at first if learned; a fixed one is usually 0.2
    learn_alpha: bool = True  # tune alpha until the entropy is H_0
    target_entropy_ratio: float = 0.2  # H_0 / log k, below 1 (0.2 to 0.9; paper: 0.98)
    hidden: tuple[int, ...] = (128, 128)  # hidden layer widths, unless obs is an image
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster
    for_games = {  # for MinAtar/ and ALE/, unless a flag says otherwise
        "total_steps": 1e6, "num_envs": 8, "start_steps": 5000, "update_every": 4,
        "batch_size": 64, "lr": 3e-4, "buffer_size": 50_000}

    def __post_init__(self):
        super().__post_init__()
        if self.learn_alpha:  # by way of log alpha
            check_range(self, "alpha", above=0)  # raises UsageError
        check_range(self, "target_entropy_ratio", low=0, high=0.99)


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
        critic_opt = Adam(agent.critic)
        actor_opt = Adam(agent.actor)
        alpha_opt = Adam([agent.log_alpha])
        buffer = DiscreteBuffer(
            mpi.share(cfg.buffer_size), envs.single_observation_space, run.device)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(
            agent, critic=critic_opt, actor=actor_opt, alpha=alpha_opt, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            if step < cfg.start_steps:
                act = agent.random_act(envs.num_envs)
            else:
                act = agent.act(obs)
            obs = interact(agent, envs, buffer, obs, act)
            updates_before = num_updates(step, cfg)
            step += cfg.num_envs  # the environments of all processes
            # As many as became due in these num_envs steps: 0, 1 or more.
            for _ in range(updates_before, num_updates(step, cfg)):
                batch = buffer.sample(mpi.share(cfg.batch_size))
                metrics = update(agent, critic_opt, actor_opt, alpha_opt, batch)
                run.store(**metrics)  # the next row of the log averages them
            run.report(step, envs)  # if due: log, evaluate, save
    return agent


def num_updates(step: int, cfg: Config) -> int:
    """Total number of updates due once `step` environment steps have been taken."""
    return max(0, step - cfg.start_steps) // cfg.update_every


def interact(agent: Agent, envs: gym.vector.VectorEnv, buffer: DiscreteBuffer,
             obs: np.ndarray, act: Tensor) -> np.ndarray:
    """Step all environments, store the transitions, return the obs to act on."""
    new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    next_obs = new_obs.copy()
    for i in np.flatnonzero(terminated | truncated):  # new_obs[i] is the next episode's
        next_obs[i] = infos["final_obs"][i]
    buffer.add(obs=obs, act=act.cpu().numpy(), rew=rew, next_obs=next_obs,
               terminated=terminated)
    return new_obs


def update(agent: Agent, critic_opt: Adam, actor_opt: Adam, alpha_opt: Adam,
           batch: Transitions) -> dict:
    """Update the critics, the actor, alpha and the target critics. Return metrics."""
    cfg = agent.cfg
    loss, metrics = critic_loss(agent, batch)
    critic_opt.zero_grad()
    loss.backward()
    critic_opt.average_grads()  # over processes
    metrics["critic_grad_norm"] = critic_opt.grad_norm()
    critic_opt.step(cfg.lr)

    loss, actor_metrics = actor_loss(agent, batch)
    actor_opt.zero_grad()
    loss.backward()
    actor_opt.average_grads()
    metrics |= actor_metrics | {"actor_grad_norm": actor_opt.grad_norm()}
    actor_opt.step(cfg.lr)

    if cfg.learn_alpha:
        loss, alpha_metrics = alpha_loss(agent, -actor_metrics["entropy"])
        alpha_opt.zero_grad()
        loss.backward()
        alpha_opt.average_grads()
        metrics |= alpha_metrics | {"alpha_grad_norm": alpha_opt.grad_norm()}
        alpha_opt.step(cfg.lr)
    polyak_update(agent.critic_targ, agent.critic, cfg.tau)
    return metrics


# ======================================= losses =======================================
def critic_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """A critic fits y, the reward plus the discounted value of following pi from s'.

        V(s') = sum_a' pi(a'|s') [q(a') - alpha log pi(a'|s')]
        q(a') = min(Q_1_targ(s', a'), Q_2_targ(s', a'))
        y     = r + gamma (1 - terminated) V(s'), a constant
        L     = mean (Q_1(s, a) - y)^2 + mean (Q_2(s, a) - y)^2

    Only terminal states are worth 0: after a time limit, V(s') replaces what was cut.
    r and s' depend on s and a, not on the policy that chose a, so transitions of old
    policies will do. The policy to rate is pi, so the sum has its probabilities.

    An actor seeks the actions that a critic overrates, and their Q enters the targets
    of other states. Two critics start from different weights, so their errors differ,
    and their minimum is too high only where both are. It is too low more often, but
    an underrated action attracts no actor, and so it enters fewer targets.

    The mean of -log pi is the entropy, so the last term of V(s') is the bonus in s'.
    Q(s, a) leaves out the bonus in s itself, which does not depend on a.
    """
    cfg = agent.cfg
    with torch.no_grad():  # Q moves towards y, not y towards Q
        next_logp = agent.actor(batch.next_obs)
        next_q1, next_q2 = agent.critic_targ(batch.next_obs)
        next_q = torch.min(next_q1, next_q2)
        next_val = expectation(next_logp, next_q - agent.alpha() * next_logp)
        target = batch.rew + cfg.gamma * (1 - batch.terminated) * next_val
    q1, q2 = (at_action(q, batch.act) for q in agent.critic(batch.obs))
    assert q1.shape == q2.shape == target.shape  # [B] minus [B, 1] would be [B, B]
    loss = (q1 - target).square().mean() + (q2 - target).square().mean()
    return loss, {"critic_loss": loss.detach(), "q1": q1.detach(), "q2": q2.detach()}


def expectation(logp: PerAction, values: PerAction) -> PerSample:
    """E[x(a)] = sum_a pi(a|s) x(a), where a ~ pi(.|s), for `values` x(a) of each a.

    SAC draws one a instead, so its losses are noisy, and the gradient has to go through
    a. This sum is exact, and its gradient goes through pi(a|s).
    """
    assert logp.shape == values.shape
    return (logp.exp() * values).sum(-1)


def at_action(values: Float32[Tensor, "B k *n"], act: Choices
              ) -> Float32[Tensor, "B *n"]:
    """The values of one action per sample."""
    return values[torch.arange(len(act), device=act.device), act]


def actor_loss(agent: Agent, batch: Transitions) -> tuple[Scalar, dict]:
    """L(pi) = mean sum_a pi(a|s) [alpha log pi(a|s) - min(Q_1(s, a), Q_2(s, a))].

    That is -mean V(s), by the critics, not their targets. `alpha_loss` needs `entropy`,
    H(s) = -sum_a pi(a|s) log pi(a|s), which SAC estimates by one sample.
    The gradient reaches the actor through pi(a|s) and log pi; Q is a constant. All k
    actions count, not only the one in the buffer, which an old policy took. The best
    pi is a softmax, proportional to exp(min(Q_1(s, a), Q_2(s, a)) / alpha).
    """
    logp = agent.actor(batch.obs)
    with torch.no_grad():
        q1, q2 = agent.critic(batch.obs)
    assert q1.shape == q2.shape == logp.shape
    loss = expectation(logp, agent.alpha() * logp - torch.min(q1, q2)).mean()
    entropy = -expectation(logp, logp).detach()
    return loss, {"actor_loss": loss.detach(), "entropy": entropy}


def alpha_loss(agent: Agent, logp: PerSample) -> tuple[Scalar, dict]:
    """L(alpha) = log(alpha) (H - H_0), with H = -mean log pi and H_0 = target_entropy.

        problem       maximise the return over pi, subject to H >= H_0
        Lagrangian    max over pi, min over alpha >= 0, of return + alpha (H - H_0)
        so            alpha H is the bonus of pi; alpha falls if H > H_0, else it rises

    The step moves log_alpha, so alpha stays positive. The derivative of L in log_alpha
    is H - H_0. In the paper L is alpha (H - H_0), and the step moves alpha itself.
    """
    loss = -agent.log_alpha * (logp + agent.target_entropy).mean()
    return loss, {"alpha_loss": loss.detach(), "alpha": agent.alpha()}


@torch.no_grad()
def polyak_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """w_targ <- w_targ + tau (w - w_targ), in place. They lag by about 1/tau moves."""
    for w_targ, w in zip(target.parameters(), source.parameters()):
        w_targ.lerp_(w, tau)


# ======================================= agent ========================================
class Net(nn.Module):
    """Observations [B, ...] -> one number for each of k actions, [B, k]."""

    def __init__(self, obs_space: gym.Space, num_acts: int, cfg: Config):
        super().__init__()
        self.encoder = make_encoder(obs_space, cfg.bf16)
        self.head = mlp([*head_sizes(obs_space, cfg.hidden), num_acts], nn.ReLU)

    def forward(self, obs: Observations) -> PerAction:
        return self.head(self.encoder(obs))


class Actor(Net):
    """Observations [B, ...] -> log pi(a|s) for each of k actions, [B, k]."""

    def forward(self, obs: Observations) -> PerAction:
        # The logarithm of a softmax would be -inf where a probability rounds to 0.
        return super().forward(obs).log_softmax(-1)


class TwinQ(nn.Module):
    """Two critics with different initial weights, each for all k actions."""

    def __init__(self, obs_space: gym.Space, num_acts: int, cfg: Config):
        super().__init__()
        self.q1 = Net(obs_space, num_acts, cfg)
        self.q2 = Net(obs_space, num_acts, cfg)

    def forward(self, obs: Observations) -> tuple[PerAction, PerAction]:
        return self.q1(obs), self.q2(obs)


class Agent(Policy):  # which adds predict(obs)
    """Actor, critic with its target network, and the temperature alpha."""

    takes = {"obs": "vector image dict", "act": "discrete"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.num_acts = int(act_space.n)
        self.actor = Actor(obs_space, self.num_acts, cfg)
        self.critic = TwinQ(obs_space, self.num_acts, cfg)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        log_alpha = math.log(cfg.alpha) if cfg.alpha > 0 else 0.0  # alpha 0 is fixed
        self.log_alpha = nn.Parameter(torch.tensor(log_alpha))  # what alpha_loss moves
        # log k is the entropy of k equally likely actions. None is higher.
        self.target_entropy = cfg.target_entropy_ratio * math.log(self.num_acts)

    def alpha(self) -> Scalar:
        """The temperature, a constant to the losses: exp(log_alpha) if it is learned.

        Otherwise cfg.alpha, even where --init-from has loaded another log_alpha.
        """
        if self.cfg.learn_alpha:
            return self.log_alpha.detach().exp()
        return torch.tensor(self.cfg.alpha, device=self.log_alpha.device)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N]: a ~ pi(.|s), or the likeliest a."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.log_alpha.device)
        logp = self.actor(obs)
        if deterministic:
            return logp.argmax(-1)
        return logp.exp().multinomial(1).squeeze(-1)  # [N, 1] -> [N]

    def random_act(self, num_envs: int) -> Tensor:
        """All actions equally often, so the buffer starts with some of each."""
        return torch.randint(self.num_acts, (num_envs,), device=self.log_alpha.device)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`."""
        return act.cpu().numpy()


# ======================================= buffer =======================================
class DiscreteBuffer(SavedRows):  # which adds its state dict
    """A ring of `capacity` transitions: new ones overwrite the oldest. Batches mix old
    and new ones: a network trained on similar ones in a row forgets the rest.
    """

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
