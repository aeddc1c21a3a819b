"""Parallelised Q-network (PQN).  Gallici et al. 2024, arXiv:2407.04811.

The problem. DQN needs a replay buffer and a target network to be stable. The buffer
fills the memory, its samples come from old policies, and the target network makes every
new estimate wait for the next copy.

The idea. Do without both. Many parallel environments give a batch that is diverse
enough, as in A2C. LayerNorm replaces the target network: without one, a step that
raises Q(s, a) may raise Q in s' as well, and with it the next target, again and again.
LayerNorm bounds the features in every state, and so how far a step in s moves Q in s'.
The paper proves that learning can then converge, even off-policy. The data come from
the current policy, so the target may hold many rewards in a row: the lambda-return. An
iteration of `train`:

    collect            act for T time steps in N parallel environments, eps-greedily
    update
      compute_targets    lambda-returns G, with the current Q
      pqn_loss           `epochs` times one Adam step for each random minibatch

Departures from the paper. Adam replaces RAdam. One LayerNorm follows an image's encoder
(none in a Dict; the paper: after each layer). A time limit is not taken for an end.

Healthy values. On CartPole `q` rises to 90 to 100. A discounted return is at most
1 / (1 - gamma) = 100, so a much higher `q` means that Q diverges.

Run   python -m algos.pqn --env CartPole-v1
Diff  diff algos/dqn.py algos/pqn.py    (collect and the minibatches: algos/ppo.py)
"""
from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor, nn

# mpi          several processes may share the environments and each batch. Config
#              has totals; mpi.share(total) is the part of this process
# make_envs    when an episode ends, the same `step` starts a new one and returns its
#              first obs; infos["final_obs"] has the last obs of the old one
# stack_steps  T dicts of arrays [N, ...] -> tensors [T, N, ...]; bools become 0 and 1
from utils import mpi
from utils.envs import make_envs, stack_steps
from utils.nets import head_sizes, make_encoder
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Positive, Run, RunConfig, main
from utils.spaces import is_image

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
PerAction = Float32[Tensor, "B k"]  # one number per sample for each of k actions
Observations = Shaped[Tensor, "B *obs"]  # images are uint8, vectors float32
Choices = Int64[Tensor, "B"]  # indices of actions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    env: str = "CartPole-v1"  # Gymnasium id
    total_steps: float = 5e5  # environment steps, rounded up to whole rollouts
    num_envs: int = 16  # N, parallel environments (8 to 128)
    report_every: int = 4000  # environment steps between rows of the log
    rollout_steps: int = 256  # T x N samples (16 x 16); N and B have to divide it
    minibatch_size: int = 64  # B, samples per gradient step (32 to 512)
    epochs: int = 4  # passes over each rollout (1 to 4)
    lr: Positive = 5e-4  # Adam's initial learning rate (1e-4 to 1e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    lam: Fraction = 0.9  # lambda (0: only the next reward; 1: all of the rollout)
    eps_end: Fraction = 0.05  # final probability of a random action (0.01 to 0.1)
    eps_steps: int = 50_000  # environment steps in which eps falls from 1 to eps_end
    max_grad_norm: float = 10.0  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (128, 128)  # hidden layer widths, unless obs is an image
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster


# ===================================== data types =====================================
@dataclass(frozen=True)
class Rollout:  # T time steps in each of N environments
    obs: Shaped[Tensor, "T N *obs"]  # s
    act: Int64[Tensor, "T N"]  # a
    rew: PerStep  # r
    next_obs: Shaped[Tensor, "T N *obs"]  # s', never of the next episode
    terminated: PerStep  # 1 if s' is terminal; 0 otherwise, also at a time limit
    done: PerStep  # 1 if the episode ended, also by a time limit


@dataclass(frozen=True)
class Minibatch:  # B random samples of a rollout
    obs: Observations  # s
    act: Choices  # a
    target: PerSample  # G: what Q is to predict


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = Adam(agent.critic)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, optimizer=optimizer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            # At first Q is no better than a guess, so eps falls from 1.
            eps = max(cfg.eps_end, 1 - (1 - cfg.eps_end) * step / cfg.eps_steps)
            agent.eps.fill_(eps)
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            step += cfg.rollout_steps
            run.store(**metrics)  # the next row of the log averages them
            run.report(step, envs, eps=agent.eps, lr=lr)  # if due: log, evaluate, save
    return agent


def collect(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray,
            num_steps: int) -> tuple[Rollout, np.ndarray]:
    """Act for T = num_steps steps. Return the rollout and the obs to act on next."""
    steps = []
    for _ in range(num_steps):
        act = agent.act(obs)
        new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
        done = terminated | truncated
        next_obs = new_obs.copy()
        for i in np.flatnonzero(done):  # here new_obs[i] is the next episode's first
            next_obs[i] = infos["final_obs"][i]
        steps.append({"obs": obs, "act": act.cpu().numpy(), "rew": rew,
                      "next_obs": next_obs, "terminated": terminated, "done": done})
        obs = new_obs
    return Rollout(**stack_steps(steps, act.device)), obs


def update(agent: Agent, optimizer: Adam, rollout: Rollout, lr: float) -> dict:
    """Take several gradient steps on one rollout. Return metrics."""
    cfg = agent.cfg
    target = compute_targets(agent, rollout).flatten()  # [T, N] -> [TN]
    obs, act = rollout.obs.flatten(0, 1), rollout.act.flatten()
    steps = []  # the metrics of each gradient step
    for _ in range(cfg.epochs):
        for rows in torch.randperm(len(obs)).view(-1, mpi.share(cfg.minibatch_size)):
            minibatch = Minibatch(obs=obs[rows], act=act[rows], target=target[rows])
            loss, metrics = pqn_loss(agent, minibatch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.average_grads()  # over processes
            grad_norm = optimizer.clip_grads(cfg.max_grad_norm)
            optimizer.step(lr)
            steps.append(metrics | {"grad_norm": grad_norm})
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


# ======================================= losses =======================================
@torch.no_grad()
def compute_targets(agent: Agent, rollout: Rollout) -> PerStep:
    """The lambda-returns G of all steps, with the current Q."""
    val = agent.critic(rollout.obs.flatten(0, 1)).amax(-1).view_as(rollout.rew)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # within an episode, s' is the s of the next step
    ends = rollout.done.bool()
    ends[-1] = True  # where an episode or the rollout ends, s' is only in next_obs
    next_val[ends] = agent.critic(rollout.next_obs[ends]).amax(-1)
    return lambda_return(rollout.rew, next_val, rollout.terminated, rollout.done,
                         agent.cfg.gamma, agent.cfg.lam)


def lambda_return(rew: PerStep, next_val: PerStep, terminated: PerStep, done: PerStep,
                  gamma: float, lam: float) -> PerStep:
    """Returns that look far ahead, but less and less: Peng & Williams' Q(lambda), 1996.

        G_t = r_t + gamma ((1 - lam) V(s'_t) + lam G_{t+1}), with V(s) = max_a Q(s, a)

    lam = 0 trusts Q after one reward, as DQN does. lam = 1 uses all rewards of the
    rollout: less bias by errors of Q, more variance. Some of these rewards followed
    random actions, so G is that of a partly random policy. This bias falls with eps.

    Where an episode ends, G_{t+1} belongs to the next one. So lam is 0 there, and only
    V(s'_t) follows r_t; after a time limit, it replaces the rewards cut off. Nothing
    follows if s'_t is terminal.
    """
    discount = gamma * (1 - terminated)
    lam_t = lam * (1 - done)
    ret = torch.zeros_like(rew)
    next_ret = next_val[-1]  # beyond the rollout, only Q is known
    for t in reversed(range(len(rew))):
        following = (1 - lam_t[t]) * next_val[t] + lam_t[t] * next_ret
        ret[t] = next_ret = rew[t] + discount[t] * following
    return ret


def pqn_loss(agent: Agent, batch: Minibatch) -> tuple[Scalar, dict]:
    """L = mean (Q(s, a) - G)^2, where G is a constant."""
    q = at_action(agent.critic(batch.obs), batch.act)
    assert q.shape == batch.target.shape  # [B] minus [B, 1] would be [B, B]
    loss = (q - batch.target).square().mean()
    return loss, {"q_loss": loss.detach(), "q": q.detach().mean()}


def at_action(values: Float32[Tensor, "B k *n"], act: Choices
              ) -> Float32[Tensor, "B *n"]:
    """The values of one action per sample."""
    return values[torch.arange(len(act), device=act.device), act]


# ======================================= agent ========================================
def norm_mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with LayerNorm and ReLU between them.

    LayerNorm shifts and scales the units of a layer, for each sample, to mean 0 and
    variance 1, and then by learned numbers. So no state can make the last layer's
    inputs large.
    """
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-2])  # nothing after the last layer


class NormCritic(nn.Module):
    """Observations [B, ...] -> Q(s, a) for each of k actions, [B, k]."""

    def __init__(self, obs_space: gym.Space, num_acts: int, cfg: Config):
        super().__init__()
        self.encoder = make_encoder(obs_space, cfg.bf16)
        sizes = head_sizes(obs_space, cfg.hidden)
        if is_image(obs_space):
            self.encoder.append(nn.LayerNorm(sizes))
        self.head = norm_mlp(*sizes, num_acts)

    def forward(self, obs: Observations) -> PerAction:
        return self.head(self.encoder(obs).float())


class Agent(Policy):  # which adds predict(obs)
    """The critic and eps."""

    takes = {"obs": "vector image dict", "act": "discrete"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.num_acts = int(act_space.n)
        self.critic = NormCritic(obs_space, self.num_acts, cfg)
        self.register_buffer("eps", torch.ones(()))  # probability of a random action

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N]: any with probability eps, otherwise
        argmax_a Q(s, a). A greedy agent may never notice that it underrates an action.
        """
        best = self.critic(torch.as_tensor(obs, device=self.eps.device)).argmax(-1)
        if deterministic:
            return best
        explore = torch.rand(best.shape, device=best.device) < self.eps
        return torch.where(explore, torch.randint_like(best, self.num_acts), best)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`."""
        return act.cpu().numpy()


if __name__ == "__main__":
    main(train, Config, __doc__)
