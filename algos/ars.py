"""Augmented Random Search (ARS).  Mania, Guy and Recht 2018, arXiv:1803.07055.

The problem. The weights of a policy should maximise the expected return. The policy
gradient needs random actions, whose noise it shares, and derivatives of a network.

The idea. Do without either: an episode measures the return of any weights. Move the
weights a little along a random direction, and as far the other way; the better side
tells where to go. A linear policy has so few weights that few directions suffice. But
it can do less than a network: it cannot swing up a pendulum.

    draw_directions    N random vectors delta in the space of the weights
    collect            an episode with weights + noise delta, one with - noise delta
    update             move along the b best, as far as their two returns differ

Processes divide the directions. Each draws all of them from the same seed, so no
weights and no gradients travel, only two returns per direction (and the moments of the
observations). From them all processes compute the same step.

This is the paper's V2-t. It is V2 with --top 1, V1-t with --no-norm-obs, V1 with both.
Unlike there, the policy has biases, its outputs are clipped to [-1, 1] and scaled
to the bounds of actions, states of idle environments enter the statistics, and Hopper,
Walker2d, Ant and Humanoid keep their reward for survival, which the paper subtracts.

Healthy values. The mean return of the moved policies, `moved_ret`, may pass 300 on
Swimmer within 500,000 steps. On CartPole it nears 500 within 100,000. `ep_ret` has the
episodes of idle environments, too. `step_norm` is near 0.1, and 0 if all returns agree.

Run   python -m algos.ars --env Swimmer-v4 --total-steps 5e5
"""
from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from utils import mpi
from utils.envs import make_envs
from utils.errors import UsageError
from utils.policy import Policy
from utils.run import Fraction, Positive, Run, RunConfig, main
from utils.stats import RunningStats


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    total_steps: float = 2e6  # environment steps, rounded up to whole iterations
    num_envs: int = 8  # environments that are stepped together
    directions: int = 8  # N, random directions per iteration (1 to 256)
    top: Fraction = 0.5  # b / N, share of the directions that are used (0.1 to 1)
    lr: Positive = 0.02  # alpha, the step size (0.01 to 0.1)
    noise: Positive = 0.03  # nu, how far to move along a direction (0.01 to 0.1)
    norm_obs: bool = True  # normalise observations by their running statistics


# ===================================== data types =====================================
@dataclass(frozen=True)
class Rollouts:  # two episodes for each of N directions, from all processes
    directions: Float32[Tensor, "N weights"]  # delta
    plus: Float32[Tensor, "N"]  # r+, the return of the policy weights + noise delta
    minus: Float32[Tensor, "N"]  # r-, that of weights - noise delta


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent)
        envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            directions = draw_directions(agent, step)
            rollouts, num_steps = collect(agent, envs, directions)
            metrics = update(agent, rollouts)
            step += num_steps
            run.report(step, envs, **metrics)  # if due: log, evaluate, save
    return agent


def draw_directions(agent: Agent, step: int) -> Float32[Tensor, "N weights"]:
    """delta ~ N(0, I). They follow from seed and step: the same in all processes."""
    rng = np.random.default_rng([agent.cfg.seed, step])
    deltas = rng.standard_normal((agent.cfg.directions, len(agent.weights)))
    return torch.from_numpy(deltas).to(agent.weights)


def collect(agent: Agent, envs: gym.vector.VectorEnv,
            directions: Float32[Tensor, "N weights"]) -> tuple[Rollouts, int]:
    """Play an episode on either side of each direction; each process plays its share.

    An environment whose episode ends takes the next policy. If none is left, it is idle
    and plays the unmoved weights until the others end; these steps count, too.
    """
    weights, num_directions = agent.weights, mpi.share(agent.cfg.directions)
    mine = directions[mpi.rank() * num_directions:][:num_directions]
    shift = agent.cfg.noise * mine
    policies = torch.cat([weights + shift, weights - shift, weights[None]])
    idle = 2 * num_directions  # the last row of `policies`
    playing = np.minimum(np.arange(envs.num_envs), idle)  # each environment's row
    queue = iter(range(envs.num_envs, idle))
    returns, ended, seen, last_end = np.zeros(idle + 1), 0, [], 0
    obs, _ = envs.reset()  # the idle ones stopped in the middle of an episode
    while ended < idle:
        seen.append(obs)
        act = agent.act(obs, policies=policies[playing])
        obs, rew, terminated, truncated, _ = envs.step(agent.env_act(act))
        np.add.at(returns, playing, rew)  # several may be idle
        for i in np.flatnonzero(terminated | truncated):  # obs[i] is the next episode's
            ended += playing[i] < idle
            playing[i] = next(queue, idle)
            last_end = len(seen)
        if len(seen) - last_end > 100_000:
            raise UsageError(
                "ARS needs whole episodes; none has ended in 100,000 steps: limit them "
                """by --env-kwargs '{"max_episode_steps": N}'""")
    num_steps = len(seen) * envs.num_envs
    plus, minus = returns[:num_directions], returns[num_directions:idle]
    told = mpi.gather((plus, minus, num_steps))
    plus = np.concatenate([r for r, _, _ in told])  # of all processes, in their order
    minus = np.concatenate([r for _, r, _ in told])
    plus, minus = torch.from_numpy(np.stack([plus, minus])).to(weights)
    # Only now: all policies of an iteration have to see the same statistics.
    agent.obs_stats.update(torch.from_numpy(np.concatenate(seen)).to(weights.device))
    return Rollouts(directions, plus, minus), sum(n for _, _, n in told)


# ======================================= losses =======================================
def update(agent: Agent, rollouts: Rollouts) -> dict:
    """weights <- weights + lr / (b sigma) sum_k (r+_k - r-_k) delta_k. Return metrics.

    The sum is over the b directions with the highest max(r+, r-), and sigma is the
    standard deviation of their 2b returns. For small noise, r+ - r- is 2 noise times
    delta . grad r, and the mean of (delta . grad r) delta is grad r. So with b = N the
    step follows the gradient; thanks to sigma, the unit of rewards does not matter.
    """
    plus, minus = rollouts.plus, rollouts.minus
    num_top = max(1, round(agent.cfg.top * len(plus)))
    best = torch.maximum(plus, minus).topk(num_top).indices
    gaps, directions = (plus - minus)[best], rollouts.directions[best]
    ret_std = torch.cat([plus[best], minus[best]]).std(correction=0)
    step = agent.cfg.lr / (num_top * ret_std + 1e-8) * (gaps @ directions)
    nn.utils.vector_to_parameters(agent.weights + step, agent.actor.parameters())
    moved_ret = torch.cat([plus, minus])
    return {"moved_ret": moved_ret, "ret_std": ret_std, "step_norm": step.norm()}


# ======================================= agent ========================================
class Agent(Policy):  # which adds predict(obs)
    """A linear policy and running statistics: all that acting needs."""

    takes = {"obs": "vector", "act": "discrete box"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.discrete = isinstance(act_space, gym.spaces.Discrete)
        num_outputs = act_space.n if self.discrete else np.prod(act_space.shape)
        if not self.discrete:
            self.register_buffer("low", torch.tensor(act_space.low))
            self.register_buffer("high", torch.tensor(act_space.high))
        self.actor = nn.Linear(obs_space.shape[0], int(num_outputs))
        nn.utils.vector_to_parameters(0 * self.weights, self.actor.parameters())
        self.obs_stats = RunningStats(obs_space.shape)  # at first mean 0, std 1

    @property
    def weights(self) -> Float32[Tensor, "weights"]:
        return nn.utils.parameters_to_vector(self.actor.parameters()).detach()

    def act(self, obs: Tensor | np.ndarray, deterministic: bool = True,
            policies: Float32[Tensor, "N weights"] | None = None) -> Tensor:
        """Raw obs [N, obs_dim] -> actions [N] or [N, k] of one or of N policies."""
        obs = torch.as_tensor(obs, device=self.actor.weight.device)
        obs = self.obs_stats.normalize(obs) if self.cfg.norm_obs else obs.float()
        policies = self.weights[None] if policies is None else policies
        k = self.actor.out_features  # the first weights are a matrix, the last k biases
        weight, bias = policies[:, :-k].unflatten(1, (k, -1)), policies[:, -k:]
        out = (weight * obs[:, None]).sum(-1) + bias
        return out.argmax(-1) if self.discrete else out.clamp(-1, 1)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`: continuous ones rescaled to their bounds."""
        if self.discrete:
            return act.cpu().numpy()
        act = act.view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, act / 2 + 0.5).cpu().numpy()


if __name__ == "__main__":
    main(train, Config, __doc__)
