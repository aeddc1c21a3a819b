"""Behavioural cloning (BC).  Pomerleau 1991, Neural Computation 3(1).

The problem. We have recordings of an expert: states s, each with the action a that the
expert took. There are no rewards, and the expert cannot be asked for more.

The idea. Supervised learning: maximise the likelihood of the expert's actions. The
weakness: a mistake of the clone may lead to a state that the expert never visited.
There it errs more often, so mistakes compound. Say it errs with probability p in the
expert's states, and rewards are between 0 and 1. If an error cost one reward, T steps
would lose p T. But each step may bring the first error, which may cost all later
rewards, so the loss can grow to p T^2 (Ross and Bagnell 2010). DAgger asks the expert
what to do in the clone's states; GAIL lets the clone act while it learns. BC needs
neither, and with many demonstrations it is hard to beat. What `train` does:

    split       hold out a random part of the pairs (s, a)
    prepare     normalise s, and undo the squashing of a
    update      repeat until `total_steps`, which counts gradient steps:
      bc_loss     `check_every` Adam steps, each for a random minibatch of pairs
      bc_loss     of the held-out pairs: if it is the lowest so far, keep the weights

The settings follow Ho and Ermon 2016 (arXiv:1606.03476), who keep every 20th pair: only
when data are scarce do methods differ. For the best clone, set `subsample` to 1.

Healthy values. On CartPole, `bc_loss` falls below 0.02. `held_out_loss` rises above
`best_loss` as the policy overfits. Only returns tell how good it is (--eval-every).

Run   python -m algos.ppo --env CartPole-v1 --total-steps 5e4
      python -m utils.play runs/CartPole-v1/ppo/seed1 --record demos.npz
      python -m algos.bc --env CartPole-v1 --demos demos.npz
"""
from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

# mpi           several processes may share each batch. Config has totals;
#               mpi.share(total) is the part of this process
# load_demos    the raw pairs of --demos; Demos has .obs, .act, .to(device), .take(rows)
# RunningStats  normalize(x) = clip((x - mean) / std, -10, 10)
from utils import mpi
from utils.demos import Demos, load_demos
from utils.envs import make_envs
from utils.errors import UsageError
from utils.nets import ObsStats, SquashedGaussian, head_sizes, make_encoder, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Natural, Positive, Run, RunConfig, check_range, main

# Shapes, which the tests check at every call.
Inputs = Shaped[Tensor, "B *obs"]  # normalised observations: what the networks take
Features = Float32[Tensor, "B k"]  # of an image, its encoding; a vector as it is
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    demos: str = ""  # demonstrations (python -m utils.play RUN --record demos.npz)
    num_trajectories: Natural = 0  # number of episodes to use, from the first; 0: all
    subsample: int = 20  # keep every n-th pair of an episode, from a random offset
    held_out: float = 0.3  # share of the pairs held out for validation (0.1 to 0.3)
    total_steps: float = 1e4  # gradient steps, rounded up to a multiple of check_every
    check_every: int = 100  # gradient steps between checks of the held-out loss
    batch_size: int = 128  # B, pairs per gradient step (32 to 512)
    lr: Positive = 1e-3  # Adam's learning rate, constant (1e-4 to 1e-3)
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, unless obs is an image
    std_init: Positive = 1.0  # initial sigma before tanh, if continuous (0.3 to 1)
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "held_out", above=0, high=0.9)  # raises UsageError


# ===================================== data types =====================================
@dataclass(frozen=True)
class Pairs:  # B pairs of the expert
    obs: Inputs  # s, normalised
    act: Shaped[Tensor, "B *act"]  # a, before tanh if continuous


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, 1)  # never stepped: only for its spaces
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        demos = load_demos(cfg, envs)  # the same in all processes
        pairs, held_out = split(demos, cfg.held_out, cfg.seed)
        agent.obs_stats.update(pairs.obs)  # once: the pairs never change
        agent.to(run.device)
        learner = copy.deepcopy(agent)  # it learns; `agent` has its best weights so far
        optimizer = Adam(learner)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, learner=learner, optimizer=optimizer)
        if step == 0:  # what `start` gave to the agent, perhaps from --init-from
            learner.load_state_dict(agent.state_dict())
        pairs = prepare(agent, pairs.to(run.device))
        held_out = prepare(agent, held_out.to(run.device))
        while step < cfg.total_steps:
            metrics = update(agent, learner, optimizer, pairs, held_out)
            step += cfg.check_every
            run.report(step, envs, **metrics)  # if due: log, evaluate, save
    return agent


def split(demos: Demos, held_out: float, seed: int) -> tuple[Demos, Demos]:
    """Training and held-out pairs, chosen at random. The choice depends on the seed
    alone, so it is the same in all processes and after --resume."""
    count = len(demos.obs)
    if count < 2:
        raise UsageError(f"--demos gives {count} pair; cloning needs at least 2")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    cut = min(max(round(held_out * count), 1), count - 1)  # at least one of each
    return demos.take(order[cut:]), demos.take(order[:cut])


def prepare(agent: Agent, demos: Demos) -> Pairs:
    """Raw pairs -> what `bc_loss` takes."""
    return Pairs(obs=agent.normalize_obs(demos.obs), act=agent.undo_env_act(demos.act))


def update(agent: Agent, learner: Agent, optimizer: Adam, pairs: Pairs,
           held_out: Pairs) -> dict:
    """Take `check_every` gradient steps; keep the weights if they are the best so far.

    The best have the lowest held-out loss, which may rise once the learner overfits. It
    shows this late, since held-out pairs come from the same episodes: there may be only
    one. `best_loss` is the minimum over many checks, so it is biased low.
    """
    cfg = agent.cfg
    steps = []  # the metrics of each gradient step
    for _ in range(cfg.check_every):
        rows = torch.randint(len(pairs.obs), (mpi.share(cfg.batch_size),))
        minibatch = Pairs(obs=pairs.obs[rows], act=pairs.act[rows])
        loss, metrics = bc_loss(learner, minibatch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.average_grads()  # over processes
        grad_norm = optimizer.grad_norm()
        optimizer.step(cfg.lr)
        steps.append(metrics | {"grad_norm": grad_norm})
    with torch.no_grad():
        loss, _ = bc_loss(learner, held_out)
        best_loss, _ = bc_loss(agent, held_out)  # the lowest so far
    improved = loss < best_loss
    if improved:
        agent.load_state_dict(learner.state_dict())
    metrics = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    return metrics | {"held_out_loss": loss, "best_loss": torch.min(loss, best_loss),
                      "improved": improved}


# ======================================= losses =======================================
def bc_loss(agent: Agent, pairs: Pairs) -> tuple[Scalar, dict]:
    """L = -mean log pi(a|s), the negative log-likelihood of the expert's actions.

    For discrete actions, this is the cross-entropy. Its mean on new pairs is at least
    the entropy of the expert's policy. For continuous actions, it is up to a constant

        L = sum_i (mean (a_i - mu_i(s))^2 / (2 sigma_i^2) + log sigma_i)

    The best sigma_i is the root mean square of the errors a_i - mu_i(s), so each error
    counts relative to the usual size in its dimension. As sigma shrinks with the
    errors, L may fall below 0. A Gaussian has one peak: if the expert passes obstacles
    now on the left and now on the right, the clone learns the average and hits them.
    """
    pi = agent.policy(agent.encoder(pairs.obs))
    loss = -pi.log_prob(pairs.act).mean()
    return loss, {"bc_loss": loss.detach()}


# ======================================= agent ========================================
class Agent(Policy):  # which adds predict(obs)
    """Actor and running statistics: all that acting needs."""

    takes = {"obs": "vector image dict", "act": "discrete box"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.discrete = isinstance(act_space, gym.spaces.Discrete)
        if self.discrete:
            num_outputs = int(act_space.n)  # one logit per action
        else:
            num_outputs = math.prod(act_space.shape)  # one mean per dimension
            log_std = torch.full((num_outputs,), math.log(cfg.std_init))
            self.log_std = nn.Parameter(log_std)  # the same in all states
            self.register_buffer("low", torch.tensor(act_space.low))
            self.register_buffer("high", torch.tensor(act_space.high))
        self.encoder = make_encoder(obs_space, cfg.bf16)
        sizes = head_sizes(obs_space, cfg.hidden)
        self.actor = mlp([*sizes, num_outputs], nn.Tanh)
        self.obs_stats = ObsStats(obs_space)  # of vectors

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take. The encoder scales images."""
        return self.obs_stats.normalize(obs)

    def policy(self, features: Features) -> Distribution:
        """pi(.|s): the one place that says what the actor's outputs mean.

        Continuous actions are those before tanh. What tanh would add to log pi(a|s)
        depends on a alone, so its gradient is 0. The entropy is that of tanh(a), by
        quadrature (utils/nets.py).
        """
        out = self.actor(features)  # [B, k]
        if not self.discrete:
            return SquashedGaussian(out, self.log_std)
        return Categorical(logits=out, validate_args=False)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> discrete actions [N], or [N, k] before tanh."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        pi = self.policy(self.encoder(self.normalize_obs(obs)))
        return pi.mode if deterministic else pi.sample()

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`."""
        if not self.discrete:  # squashed by tanh, then rescaled
            squashed = act.tanh().view(-1, *self.low.shape).to(self.low.dtype)
            act = torch.lerp(self.low, self.high, (squashed + 1) / 2)
        return act.cpu().numpy()

    def undo_env_act(self, act: Shaped[Tensor, "B *act"]) -> Shaped[Tensor, "B ..."]:
        """The inverse of `env_act`: atanh(clip(2 (a - low) / (high - low) - 1, -c, c)).

        c = 0.999, since at a bound of the action space the result would be infinite.
        """
        if self.discrete:
            return act
        size = self.high - self.low  # 0 where there is one value
        unit = torch.where(size > 0, 2 * (act - self.low) / size - 1, -1.0)
        return unit.clamp(-0.999, 0.999).atanh().flatten(1).float()


if __name__ == "__main__":
    main(train, Config, __doc__)
