"""Vanilla Policy Gradient (VPG): the policy gradient with a learned baseline.

The problem. We look for the policy pi with the largest expected return. The
return depends on the environment, whose dynamics are unknown, so we cannot
differentiate through it. The log-derivative trick avoids that. For any
function f, and x drawn from a density p that depends on the weights,

    grad E f(x) = sum_x f(x) grad p(x) = E [f(x) grad log p(x)].

Let x be an episode and f its return. Then log p is a sum of log pi(a_t | s_t)
and of terms of the environment, whose gradient is zero. An action cannot
change earlier rewards, so only the rewards after it count:

    grad E (return) = E sum_t grad log pi(a_t | s_t) (return from t on).

All of this can be sampled: act, look at what follows, and make an action more
likely in proportion. This is REINFORCE (Williams 1992,
doi:10.1007/BF00992696). It is unbiased, but noisy.

The baseline. We subtract V(s), a learned estimate of the return from s on, so
that an action is judged by whether it did better than expected. The mean of
the gradient stays the same, since V(s) does not depend on the action:

    E_a [V(s) grad log pi(a | s)] = V(s) grad sum_a pi(a | s) = V(s) grad 1 = 0.

But most of the noise, which comes from how good the state was, disappears.
What remains is the advantage A: how much better an action was than the policy
does on average in that state. s' is the true next state of s, even at a time
limit, where we still bootstrap from V(s'). "terminated" marks a true end of
an episode, "done" any end, time limits included. V is the critic. lambda
trades bias for variance: lam = 0 trusts V after one step, lam = 1 trusts the
sampled rewards alone. (1) and (2) are GAE (Schulman et al. 2016,
arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t     = delta_t + gamma lam (1 - done_t) A_{t+1}
    R_t     = A_t + V(s_t), the critic's regression target                 (2)
    log pi  = sum_i log N(a_i; mu_i(s), sigma_i), or log softmax           (3)
    H       = entropy of pi(. | s), averaged over the batch                (4)
    L_V     = mean (V(s) - R)^2                                            (5)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    rew    <- clip(rew / sqrt(var(G) + 1e-8), -10, 10),
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}                         (7)
    L_pi    = -mean log pi(a | s) A, A constant                            (8)

Each update takes one step on (8) with the whole rollout, then `v_steps` steps
on (5), each with a random minibatch. The policy gets only one step because
its gradient is valid only for the policy that collected the data. A comes
from the critic before these steps: a critic fitted to R first would explain
away the advantages it is to measure. Advantages are not normalised, since
Adam cancels most of the scale of a gradient. H is only reported. With images,
actor and critic share an encoder, which only the policy step trains.

Departures from theory. A rollout is 64 steps per environment, much shorter
than most episodes, and its last step bootstraps from V. States late in an
episode count in full, instead of gamma^t. (6) and (7) are implementation
details from OpenAI Baselines. sigma is one parameter per action dimension,
independent of s. tanh maps a Gaussian action into the environment's bounds;
its Jacobian does not depend on the weights, so (8) can omit it.

Sizes by default: T = 64 steps of N = 8 environments make 512 samples per
rollout, for one step of the policy and 20 of the critic. A2C instead takes
one joint step of both after only ten steps per environment. Healthy values:
`explained_variance` EVHEALTH, `entropy` falling slowly.

Read next     algos/a2c.py, algos/trpo.py:  diff algos/vpg.py algos/a2c.py
Try           python -m algos.vpg --env CartPole-v1 --total-steps 2e5
Reproduce     python -m algos.vpg    (curves of all seeds: benchmarks/README.md)
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn

from utils import mpi
from utils.envs import image_to_float, is_image, make_envs, nature_cnn, to_tensor
from utils.run import Run, RunConfig, check_divides, check_settings, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample of a batch: never [B, 1]
Outputs = Float32[Tensor, "B k"]  # of the actor: k logits, or the means of k dimensions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, environments stepped together (1 to 64)
    rollout_steps: int = 512  # T x N, steps per rollout over all environments
    minibatch_size: int = 256  # samples per gradient step of the critic (32 to 512)
    v_steps: int = 20  # gradient steps of the critic per rollout (5 to 80)
    lr: float = 3e-3  # learning rate of the policy's Adam at the start (3e-4 to 1e-2)
    v_lr: float = 1e-3  # learning rate of the critic's Adam, constant (3e-4 to 3e-3)
    anneal_lr: bool = True  # decrease the policy's learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.97  # GAE's lambda: bias at 0, variance at 1 (0.9 to 1)
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, for vector observations
    std_init: float = 1.0  # initial sigma of continuous actions (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (6)
    scale_rew: bool = True  # divide rewards by the std of discounted returns, Eq. (7)
    orthogonal_init: bool = True  # orthogonal initial weights, else PyTorch's default

    def __post_init__(self):
        check_settings(self)
        check_divides(self, "rollout_steps/num_envs rollout_steps/minibatch_size")


# ======================================= agent ========================================
def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with tanh between them."""
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def init_orthogonal(agent: nn.Module) -> None:
    """Orthogonal weights, zero biases. At first the policy prefers no action."""
    gains = {agent.actor[-1]: 0.01, agent.critic[-1]: 1.0}
    for layer in agent.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gains.get(layer, math.sqrt(2)))
            nn.init.zeros_(layer.bias)


class RunningStats(nn.Module):
    """Mean and variance of all rows seen so far, over all ranks, in float64."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def update(self, rows: Float32[Tensor, "B *shape"]) -> None:
        """Merge the moments of a batch into those so far (Chan et al. 1979)."""
        count, mean, var = mpi.moments(rows)
        self.count += count
        weight = count / self.count
        delta = mean - self.mean
        spread = weight * (1 - weight) * delta**2  # of the two means
        self.var.copy_((1 - weight) * self.var + weight * var + spread)
        self.mean += weight * delta


class Agent(nn.Module):
    """Actor, critic and running statistics: its state dict is the whole policy."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector image", act="discrete box")
        self.cfg = cfg
        self.images = is_image(obs_space)
        self.discrete = isinstance(act_space, gym.spaces.Discrete)
        if self.discrete:
            num_outputs = int(act_space.n)  # a logit per action
            self.log_std = None
        else:
            num_outputs = math.prod(act_space.shape)  # a mean per dimension
            log_std = torch.full((num_outputs,), math.log(cfg.std_init))
            self.log_std = nn.Parameter(log_std)
            self.register_buffer("low", torch.tensor(act_space.low))
            self.register_buffer("high", torch.tensor(act_space.high))
        self.encoder = nn.Identity()
        sizes = (*obs_space.shape, *cfg.hidden)
        if self.images:
            self.encoder = nature_cnn(obs_space)  # shared by actor and critic
            sizes = (512,)
        self.actor = mlp(*sizes, num_outputs)
        self.critic = mlp(*sizes, 1)
        if cfg.orthogonal_init:
            init_orthogonal(self)
        self.obs_stats = RunningStats(obs_space.shape)
        self.ret_stats = RunningStats(())  # of G in Eq. (7)
        self.discounted_reward_sum = torch.zeros(())  # latest G of (7), [N]; not saved

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations -> network inputs: scaled pixels or Eq. (6), float32."""
        if self.images:
            return image_to_float(obs)
        if not self.cfg.norm_obs:
            return obs.float()
        return standardize(obs.float(), self.obs_stats.mean, self.obs_stats.var)

    def normalize_rollout(self, rollout: "Rollout") -> "Rollout":
        """The rollout as the networks see it, with rewards scaled by Eq. (7)."""
        rew = rollout.rew
        if self.cfg.scale_rew:
            rew = standardize(rew, 0.0, self.ret_stats.var)
        obs = self.normalize(rollout.obs)
        next_obs = self.normalize(rollout.next_obs)
        return replace(rollout, obs=obs, rew=rew, next_obs=next_obs)

    def policy_parameters(self) -> list[nn.Parameter]:
        """All but the critic's. With images, the encoder belongs to the policy."""
        named = self.named_parameters()
        return [param for name, param in named if not name.startswith("critic.")]

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N] or [N, d], not bounded yet."""
        obs = torch.as_tensor(obs, device=self.ret_stats.mean.device)
        out = self.actor(self.encoder(self.normalize(obs)))
        if deterministic:
            return out.argmax(-1) if self.discrete else out
        if self.discrete:
            return out.softmax(-1).multinomial(1).squeeze(-1)
        return out + self.log_std.exp() * torch.randn_like(out)

    def env_act(self, act: Tensor) -> np.ndarray:
        """tanh maps continuous actions into the environment's bounds, per dimension."""
        if self.discrete:
            return act.cpu().numpy()
        unit = act.tanh().view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, unit / 2 + 0.5).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw observation -> the deterministic action, ready for `env.step`."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]

    def update_stats(self, rollout: "Rollout") -> None:
        """Update the running statistics: after learning, which must use the old."""
        last = self.discounted_reward_sum
        sums = discounted_reward_sums(rollout, last, self.cfg.gamma)
        self.discounted_reward_sum = sums[-1] * (1 - rollout.done[-1])
        self.ret_stats.update(sums.flatten())
        if not self.images:
            self.obs_stats.update(rollout.obs.flatten(0, 1))


# ======================================== data ========================================
@dataclass(frozen=True)
class Rollout:
    """T steps of N environments."""

    obs: Shaped[Tensor, "T N *obs"]
    act: Shaped[Tensor, "T N *act"]
    rew: PerStep
    next_obs: Shaped[Tensor, "T N *obs"]  # the true next observations
    terminated: PerStep  # 1 at a true end
    done: PerStep  # 1 at a true end or a time limit


@dataclass(frozen=True)
class Batch:
    """What the loss needs of B samples."""

    obs: Float32[Tensor, "B *obs"]  # normalised
    act: Shaped[Tensor, "B *act"]
    adv: PerSample


def true_next_obs(next_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Where each action led, [N, ...].

    An environment whose episode ended has restarted already, so its `next_obs` is the
    first observation of the next episode. The last one of the old is in `infos`.
    """
    true_obs = next_obs.copy()
    for i in np.flatnonzero(done):
        true_obs[i] = infos["final_obs"][i]
    return true_obs


def collect(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray,
            num_steps: int) -> tuple[Rollout, np.ndarray]:
    """Act for T = num_steps steps from `obs` on -> the rollout and the next obs."""
    steps = []
    for _ in range(num_steps):
        act = agent.act(obs)
        next_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
        done = terminated | truncated
        true_obs = true_next_obs(next_obs, done, infos)
        steps.append((obs, act.cpu().numpy(), rew, true_obs, terminated, done))
        obs = next_obs
    columns = [to_tensor(np.stack(column), act.device) for column in zip(*steps)]
    return Rollout(*columns), obs


# ==================================== mathematics =====================================
def standardize(value: Tensor, mean: Tensor | float, var: Tensor) -> Tensor:
    """Eqs. (6), (7). Clipped: after few samples, a rare value can become huge."""
    return ((value - mean) / torch.sqrt(var + 1e-8)).clamp(-10, 10).float()


def discounted_reward_sums(rollout: Rollout, last: Tensor, gamma: float) -> PerStep:
    """G of Eq. (7). `last` [N] is G of the step before, 0 if an episode ended there."""
    sums = []
    for rew, done in zip(rollout.rew, rollout.done):
        sums.append(rew + gamma * last)
        last = sums[-1] * (1 - done)
    return torch.stack(sums)


def compute_advantages(rollout: Rollout, val: PerStep, next_val: PerStep,
                       gamma: float, lam: float) -> tuple[PerStep, PerStep]:
    """Eqs. (1), (2): GAE -> advantages, value targets.

    A true end has no future value. Any end of an episode stops the recursion.
    """
    delta = rollout.rew + gamma * (1 - rollout.terminated) * next_val - val  # Eq. (1)
    decay = gamma * lam * (1 - rollout.done)
    delta, decay = delta.cpu().numpy(), decay.cpu().numpy()  # faster than PyTorch here
    adv = np.zeros_like(delta)
    last = np.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        last = delta[t] + decay[t] * last  # Eq. (2)
        adv[t] = last
    adv = torch.as_tensor(adv, device=val.device)
    return adv, adv + val


def log_prob(out: Outputs, log_std: Tensor | None, act: Tensor) -> PerSample:
    """Eq. (3), of actions [B, k] before tanh, or of discrete actions [B]."""
    if log_std is None:
        return out.log_softmax(-1).gather(-1, act.unsqueeze(-1)).squeeze(-1)
    z = (act - out) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy(out: Outputs, log_std: Tensor | None) -> Scalar:
    """Eq. (4) in nats; for continuous actions that of the Gaussian, before tanh."""
    if log_std is None:
        return -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean()
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def value_loss(val: PerSample, ret: PerSample) -> Scalar:
    assert val.shape == ret.shape  # [B] minus [B, 1] would be [B, B]
    return (val - ret).square().mean()  # Eq. (5)


def policy_loss(logp: PerSample, adv: PerSample) -> Scalar:
    """Eq. (8). Its gradient is the policy gradient; its value says nothing."""
    assert logp.shape == adv.shape
    return -(logp * adv).mean()  # Eq. (8)


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1 if the critic predicts the targets exactly, 0 if no better than a constant."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= update =======================================
def vpg_policy_loss(agent: Agent, batch: Batch) -> tuple[Scalar, dict]:
    """Eq. (8). Advantages are constants. The entropy is only reported."""
    out = agent.actor(agent.encoder(batch.obs))
    logp = log_prob(out, agent.log_std, batch.act)
    pi_loss = policy_loss(logp, batch.adv)
    return pi_loss, {"pi_loss": pi_loss, "entropy": entropy(out, agent.log_std)}


def critic_value_loss(agent: Agent, features: Float32[Tensor, "B k"],
                      ret: PerSample) -> tuple[Scalar, dict]:
    """Eq. (5). `features` are what the encoder made of the observations."""
    v_loss = value_loss(agent.critic(features).squeeze(-1), ret)  # [B, 1] -> [B]
    return v_loss, {"v_loss": v_loss}


def compute_values(agent: Agent, rollout: Rollout) -> tuple[PerStep, PerStep]:
    """V(s) and V(s') for every step of a normalised rollout, by the current critic."""
    val = agent.critic(agent.encoder(rollout.obs.flatten(0, 1))).view_as(rollout.rew)
    next_val = val.roll(-1, dims=0)  # s' is the next row's s, except where ...
    ends = rollout.done.bool()
    ends[-1] = True  # ... an episode or the rollout ends
    next_val[ends] = agent.critic(agent.encoder(rollout.next_obs[ends])).squeeze(-1)
    return val, next_val


@torch.no_grad()  # `minimize` alone computes gradients
def update(agent: Agent, optimizers: mpi.Optimizers, rollout: Rollout,
           lr: float) -> dict:
    """Learn from one rollout: one step of the policy, then of the critic -> metrics."""
    cfg = agent.cfg
    rollout = agent.normalize_rollout(rollout)
    obs = rollout.obs.flatten(0, 1)  # [B, ...] with B = T x N
    act = rollout.act.flatten(0, 1)
    val, next_val = compute_values(agent, rollout)
    adv, ret = compute_advantages(rollout, val, next_val, cfg.gamma, cfg.lam)
    critic = {"val": val, "explained_variance": explained_variance(val, ret)}

    batch = Batch(obs, act, adv.flatten())
    metrics = optimizers.policy.minimize(vpg_policy_loss, agent, batch, lr=lr)

    features = agent.encoder(obs)  # of the new policy; the value steps do not move it
    ret = ret.flatten()
    num_minibatches = cfg.rollout_steps // cfg.minibatch_size
    steps = []  # metrics of each gradient step of the critic
    for _ in range(cfg.v_steps):
        rows = torch.randperm(len(obs))[: len(obs) // num_minibatches]
        steps.append(optimizers.critic.minimize(
            critic_value_loss, agent, features[rows], ret[rows], lr=cfg.v_lr))
    for name in steps[0]:
        metrics[name] = torch.stack([step[name] for step in steps])
    metrics |= {"lr": lr}
    return metrics | critic


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    """Train to the end of the budget, or resume, and return the agent."""
    with Run(cfg) as run:  # refuses bad input before anything is built
        cfg = run.cfg  # with --resume, the settings of that run
        envs = make_envs(cfg, run.num_envs)  # this rank's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizers = mpi.Optimizers(
            policy=mpi.Adam(agent.policy_parameters()), critic=mpi.Adam(agent.critic))
        step = run.restore(agent, optimizers=optimizers)  # 0, or where the run stopped
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizers, rollout, lr)
            agent.update_stats(rollout)  # after learning, which needs the old ones
            step += cfg.rollout_steps
            run.report(step, envs, **metrics)  # writes, evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
