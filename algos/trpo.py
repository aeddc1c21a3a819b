"""Trust Region Policy Optimization (TRPO).  Schulman et al. 2015, arXiv:1502.05477.

The problem. VPG's learning rate limits how far the weights move. But of two steps of
equal length, one may barely change the policy pi and the other ruin it.

The idea. Limit the change of the policy itself: maximise S, an estimate of the gain in
return, subject to a limit on KL, the divergence between the old policy, pi_old, and pi.
For a small step d of the weights, S is about g^T d and KL about d^T F d / 2. The best d
is along x = F^-1 g, the natural gradient: far in directions that barely change pi.
An iteration of `train`:

    collect              act for T steps in N parallel environments
    update
      compute_targets      advantages A and returns R, with the current critic
      step_fraction        1, or less where all returns are nearly equal
      policy_step
        surrogate, mean_kl   S and its gradient g, and KL
        conjugate_gradient   the natural gradient x, by products with the Fisher matrix
        line_search          shorten the step along x until S > 0 and KL <= kl_limit
      value_loss           `v_steps` Adam steps of the critic
    update_stats         running statistics that normalise observations and rewards

Departures. GAE, tanh, orthogonal weights, running statistics (which move pi further),
damping, 2,048 samples (paper: 50,000+). Ours: `step_fraction`, std_init, and max_kl per
dimension.

Healthy values. While pi improves, `step_fraction` is 1 and `kl` close below its limit.
Once a task is solved, both fall. `backtracks` is mostly 0.

Run   python -m algos.trpo --env CartPole-v1 --total-steps 2e5
Diff  diff algos/vpg.py algos/trpo.py
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torch.distributions.kl import kl_divergence, register_kl
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# mpi           several processes may share the environments and each batch. Config
#               has totals; mpi.share(total) is the part of this process
# make_envs     when an episode ends, the same `step` starts a new one and returns its
#               first obs; infos["final_obs"] has the last obs of the old one
# stack_steps   T dicts of arrays [N, ...] -> tensors [T, N, ...]; bools become 0 and 1
# RunningStats  normalize(x) = clip((x - mean) / std, -10, 10)
#               scale(x)     = clip(x / std, -10, 10)
from utils import mpi
from utils.envs import make_envs, stack_steps
from utils.nets import ObsStats, SquashedGaussian, head_sizes, make_encoder, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Positive, Run, RunConfig, main
from utils.spaces import has_images
from utils.stats import RunningStats, moments

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Inputs = Shaped[Tensor, "B *obs"]  # normalised observations: what the networks take
Features = Inputs  # the same here; from a2c.py on, an image has an encoding
Scalar = Float32[Tensor, ""]
Vector = Float32[Tensor, "P"]  # one number per weight of the policy


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 2048  # T x N samples (256 x 8); N has to divide it
    minibatch_size: int = 256  # samples per gradient step of the critic (32 to 512)
    v_steps: int = 80  # gradient steps of the critic per rollout (5 to 80)
    v_lr: Positive = 1e-3  # the critic's learning rate at the start of an update
    max_kl: Positive = 0.01  # maximum KL, mean over action dimensions (0.001 to 0.05)
    cg_steps: int = 15  # maximum number of conjugate gradient steps (10 to 20)
    damping: float = 0.1  # added to the diagonal of the Fisher matrix (0.001 to 0.1)
    fisher_every: int = 1  # the Fisher matrix is that of one sample in k (1 to 5)
    backtracks: int = 10  # step lengths that the line search tries at most (5 to 20)
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    lam: Fraction = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, unless obs is an image
    std_init: Positive = 0.6  # initial sigma before tanh, if continuous (0.3 to 1)
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
    for_games = {  # for MinAtar/ and ALE/, unless a flag says otherwise
        "fisher_every": 5, "v_steps": 24}
    for_atari = {"max_kl": 1e-3, "damping": 1e-3, "gamma": 0.98, "lam": 1.0}


# ===================================== data types =====================================
@dataclass(frozen=True)
class Rollout:  # T steps in each of N environments; nothing is normalised
    obs: Shaped[Tensor, "T N *obs"]  # s
    act: Shaped[Tensor, "T N *act"]  # a, before tanh if continuous
    rew: PerStep  # r
    next_obs: Shaped[Tensor, "T N *obs"]  # s', never of the next episode
    terminated: PerStep  # 1 if s' is terminal; 0 otherwise, also at a time limit
    done: PerStep  # 1 if the episode ended, also by a time limit


@dataclass(frozen=True)
class Batch:  # a whole rollout: B = TN samples
    obs: Inputs  # s, normalised
    act: Shaped[Tensor, "B *act"]  # a
    adv: PerSample  # A: how much better a was than the policy's average action in s
    ret: PerSample  # R: what the critic is to predict in s
    pi_old: Distribution  # pi_old(.|s), a constant


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        critic_opt = Adam(agent.critic)  # `update` sets the policy's weights itself
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, critic=critic_opt)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, critic_opt, rollout)
            agent.update_stats(rollout)  # last, so that `update` sees what `act` saw
            step += cfg.rollout_steps
            run.store(**metrics)  # the next row of the log averages them
            run.report(step, envs)  # if due: log, evaluate, save
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


def update(agent: Agent, critic_opt: Adam, rollout: Rollout) -> dict:
    """Take one step of the policy, then `v_steps` of the critic. Return metrics."""
    cfg = agent.cfg
    obs = agent.normalize_obs(rollout.obs).flatten(0, 1)  # [T, N, ...] -> [TN, ...]
    act = rollout.act.flatten(0, 1)
    val, adv, ret = compute_targets(agent, rollout, obs)
    explained = explained_variance(val, ret)  # before the critic learns from `rollout`
    batch = Batch(obs=obs, act=act, adv=adv.flatten(), ret=ret.flatten(),
                  pi_old=policy_now(agent, obs))
    metrics = policy_step(agent, batch, step_fraction(agent, ret))
    # Many steps, with R fixed. They come last, as A needs a V that has not seen R.
    # They shrink, so that the last minibatches do not decide V.
    v_losses, v_grad_norms = [], []
    for i in range(cfg.v_steps):
        rows = torch.randperm(len(obs))[: mpi.share(cfg.minibatch_size)]
        loss = value_loss(agent.value(agent.encoder(obs[rows])), batch.ret[rows])
        critic_opt.zero_grad()
        loss.backward()
        critic_opt.average_grads()  # over processes
        v_losses.append(loss.detach())
        v_grad_norms.append(critic_opt.grad_norm())
        critic_opt.step(cfg.v_lr * (1 - i / cfg.v_steps))
    return metrics | {
        "v_loss": torch.stack(v_losses), "critic_grad_norm": torch.stack(v_grad_norms),
        "val": val, "explained_variance": explained}


def policy_step(agent: Agent, batch: Batch, fraction: Scalar) -> dict:
    """Move the policy along the natural gradient, at most as far as kl_limit allows."""
    cfg = agent.cfg
    params = agent.policy_parameters()
    obs, pi_old = batch.obs, batch.pi_old
    if cfg.fisher_every > 1:  # few samples do for the curvature of KL
        obs = obs[torch.randperm(len(obs))[::cfg.fisher_every]]
        pi_old = policy_now(agent, obs)  # pi has not moved yet
    kl = mean_kl(agent, obs, pi_old)

    # If the weights change by a small d, S is about g^T d, with g the policy gradient.
    # KL and grad KL are 0 at pi_old, so KL is about d^T F d / 2. F, the second
    # derivative of KL, is the Fisher matrix.
    g = mpi.average(flat_grad(surrogate(agent, batch), params))  # over processes
    kl_grad = flat_grad(kl, params, create_graph=True)  # with its graph, for `product`

    # F may be too large to store, but F v is the gradient of the number v^T grad KL.
    # F may not be invertible, but D = F + damping I is. It also shortens the step.
    def product(v: Vector) -> Vector:  # D v
        return mpi.average(flat_grad(v @ kl_grad, params)) + cfg.damping * v

    # Maximise g^T d subject to d^T D d / 2 = kl_limit. With the multiplier 1 / m,
    # g - D d / m = 0, so d = m x, where D x = g; m^2 x^T D x / 2 = kl_limit gives m.
    x, residual = conjugate_gradient(product, g, cfg.cg_steps)
    m = fraction * (2 * agent.kl_limit / (x @ product(x) + 1e-30)).sqrt()  # x may be 0
    # All this holds for small d, and m x may not be small. So measure S and KL.
    step, metrics = line_search(agent, batch, m * x)
    return metrics | {
        "step_size": m, "step_fraction": fraction, "gain_expected": g @ step,
        "policy_grad_norm": g.norm(), "cg_residual": residual,
        "entropy": batch.pi_old.entropy().mean()}


# ======================================= losses =======================================
@torch.no_grad()
def compute_targets(agent: Agent, rollout: Rollout, obs: Shaped[Tensor, "TN *obs"]
                    ) -> tuple[PerStep, PerStep, PerStep]:
    """V(s), A and the lambda-return R = A + V(s); `obs`: the rollout's, normalised."""
    cfg = agent.cfg
    rew = rollout.rew
    if cfg.scale_rew:  # so that one learning rate suits all scales of reward
        rew = agent.reward_sum_stats.scale(rew)
    val = agent.value(agent.encoder(obs)).view_as(rew)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # within an episode, s' is the s of the next step
    ends = rollout.done.bool()
    ends[-1] = True  # where an episode or the rollout ends, s' is only in next_obs
    next_obs = agent.normalize_obs(rollout.next_obs[ends])
    next_val[ends] = agent.value(agent.encoder(next_obs))
    adv = gae(rew, val, next_val, rollout.terminated, rollout.done, cfg.gamma, cfg.lam)
    return val, adv, adv + val


def gae(rew: PerStep, val: PerStep, next_val: PerStep, terminated: PerStep,
        done: PerStep, gamma: float, lam: float) -> PerStep:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

        delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)
        A_t     = delta_t + gamma lam (1 - done_t) A_{t+1}

    delta says how much better one step went than the critic expected. lam = 0 trusts
    V(s') after one reward (bias); lam = 1 uses all of the rollout (variance). Only a
    terminal state is worth 0: after a time limit, V(s') replaces the rewards cut off.
    """
    delta = rew + gamma * (1 - terminated) * next_val - val
    decay = (gamma * lam * (1 - done)).cpu().numpy()
    adv = delta.cpu().numpy()  # a loop in NumPy is faster
    for t in reversed(range(len(adv) - 1)):  # beyond the rollout, only V is known
        adv[t] += decay[t] * adv[t + 1]
    return torch.as_tensor(adv, device=val.device)


@torch.no_grad()
def step_fraction(agent: Agent, ret: PerStep) -> Scalar:
    """min(1, 2 std R), in units of the running std of discounted reward sums.

    A step of full length has the same KL whether A is large or small. Once a task is
    solved, all returns are nearly equal, and A is mostly the critic's error. Full steps
    would then ruin the policy. The price: steps are short, too, where every episode
    fails in the same way.
    """
    if not agent.cfg.scale_rew:
        ret = ret / (agent.reward_sum_stats.var + 1e-8).sqrt()
    _, _, var = moments(ret.flatten())  # over all processes
    return (2 * var.sqrt()).clamp(max=1).float()


@torch.no_grad()
def policy_now(agent: Agent, obs: Inputs) -> Distribution:
    """pi(.|s) as it is now; it stays so when the weights move."""
    return agent.policy(agent.encoder(obs))


def surrogate(agent: Agent, batch: Batch) -> Scalar:
    """S = mean (pi(a|s) / pi_old(a|s) - 1) A, which is 0 at pi_old.

    Up to a factor, S estimates how much pi's expected return exceeds pi_old's. The
    ratio corrects for the actions, which are pi_old's. Nothing corrects for the states,
    so S is accurate only near pi_old. The -1, a constant, makes S the difference.
    """
    pi = agent.policy(agent.encoder(batch.obs))
    ratio = (pi.log_prob(batch.act) - batch.pi_old.log_prob(batch.act)).exp()
    assert ratio.shape == batch.adv.shape
    return ((ratio - 1) * batch.adv).mean()


def mean_kl(agent: Agent, obs: Inputs, pi_old: Distribution) -> Scalar:
    """KL(pi_old(.|s) || pi(.|s)), averaged over s; if continuous, the sum over i of

        ((sigma_old^2 + (mu_old - mu)^2) / sigma^2 - 1) / 2 + log(sigma / sigma_old)
    """
    pi = agent.policy(agent.encoder(obs))
    return kl_divergence(pi_old, pi).mean()


@register_kl(SquashedGaussian, SquashedGaussian)
def kl_of_gaussians(old: SquashedGaussian, new: SquashedGaussian) -> Tensor:
    """The sum over i in `mean_kl`, for each state. Tanh on both sides changes no KL."""
    var_ratio = (2 * (old.log_std - new.log_std)).exp()
    z = (old.loc - new.loc) / new.log_std.exp()
    return (0.5 * (var_ratio + z.square() - 1) + new.log_std - old.log_std).sum(-1)


def flat_grad(f: Scalar, params: list[nn.Parameter], create_graph=False) -> Vector:
    """The gradient of f with respect to all weights, as one vector."""
    grads = torch.autograd.grad(f, params, retain_graph=True, create_graph=create_graph)
    return torch.cat([grad.flatten() for grad in grads])


def conjugate_gradient(product: Callable[[Vector], Vector], g: Vector,
                       steps: int) -> tuple[Vector, Scalar]:
    """Solve D x = g, where D v = product(v). Return x and |r| / |g|, where r = g - D x.

    Each step goes to the minimum of q(x) = x^T D x / 2 - g^T x, whose gradient is -r,
    along a direction p. It does not undo earlier steps, since p^T D p_last = 0. A few
    steps may not solve D x = g, but each lowers q, which is 0 at the start, x = 0. So
    g^T x > x^T D x / 2 > 0, and a small enough step along x raises S.
    """
    x = torch.zeros_like(g)
    r = p = g
    for _ in range(steps):
        if r.norm() <= 1e-6 * g.norm():  # solved to about float32's precision
            break
        Dp = product(p)
        step_size = r @ r / (p @ Dp)
        x = x + step_size * p
        old_r = r
        r = r - step_size * Dp
        p = r + r @ r / (old_r @ old_r) * p
    return x, r.norm() / (g.norm() + 1e-30)  # g may be 0


@torch.no_grad()
def line_search(agent: Agent, batch: Batch, step: Vector) -> tuple[Vector, dict]:
    """Take the longest of step, 0.8 step, 0.64 step, ... with S > 0 and KL <= kl_limit.

    Return it, and metrics. If the first `backtracks` of them fail, take no step.
    """
    params = agent.policy_parameters()
    start = parameters_to_vector(params)
    for k in range(agent.cfg.backtracks):
        vector_to_parameters(start + 0.8**k * step, params)  # overwrites the weights
        kl = mean_kl(agent, batch.obs, batch.pi_old)
        gain, kl = mpi.average(torch.stack([surrogate(agent, batch), kl]))
        if gain > 0 and kl <= agent.kl_limit:
            return 0.8**k * step, {"gain": gain, "kl": kl, "backtracks": k}
    vector_to_parameters(start, params)
    return torch.zeros_like(step), {"gain": 0.0, "kl": 0.0, "backtracks": k + 1}


def value_loss(val: PerSample, ret: PerSample) -> Scalar:
    """L_V = mean (V(s) - R)^2"""
    assert val.shape == ret.shape  # [B] minus [B, 1] would be [B, B]
    return (val - ret).square().mean()


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1 - var(R - V) / var R. R contains V, which flatters V."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= agent ========================================
class Agent(Policy):  # which adds predict(obs)
    """Actor, critic and running statistics: all that acting needs."""

    takes = {"obs": "vector image dict", "act": "discrete box"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.discrete = isinstance(act_space, gym.spaces.Discrete)
        self.kl_limit = cfg.max_kl
        if self.discrete:
            num_outputs = int(act_space.n)  # one logit per action
        else:
            num_outputs = math.prod(act_space.shape)  # one mean per dimension
            self.kl_limit *= num_outputs  # KL is a sum over the dimensions
            log_std = torch.full((num_outputs,), math.log(cfg.std_init))
            self.log_std = nn.Parameter(log_std)  # the same in all states
            self.register_buffer("low", torch.tensor(act_space.low))
            self.register_buffer("high", torch.tensor(act_space.high))
        self.encoder = nn.Identity()
        sizes = head_sizes(obs_space, cfg.hidden)
        self.actor = mlp([*sizes, num_outputs], nn.Tanh)
        self.critic = mlp([*sizes, 1], nn.Tanh)
        if has_images(obs_space):  # one each, so that the critic's steps leave pi alone
            # No bfloat16, because its rounding alone has a KL of up to 0.002.
            self.actor = nn.Sequential(make_encoder(obs_space), *self.actor)
            self.critic = nn.Sequential(make_encoder(obs_space), *self.critic)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
                nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(self.actor[-1].weight, gain=0.01)  # pi hardly depends on s
        nn.init.orthogonal_(self.critic[-1].weight, gain=1.0)
        # At first mean 0 and std 1, so the first rollout is clipped but not normalised.
        self.obs_stats = ObsStats(obs_space)  # of vectors
        self.reward_sum_stats = RunningStats(())  # of G: see `update_stats`
        self.reward_sum = torch.zeros(())  # the last G, from then on [N]; not saved

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take. The encoder scales images."""
        return self.obs_stats.normalize(obs)

    def policy_parameters(self) -> list[nn.Parameter]:
        """All parameters but the critic's."""
        named = self.named_parameters()
        return [param for name, param in named if not name.startswith("critic.")]

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

    def value(self, features: Features) -> PerSample:
        return self.critic(features).squeeze(-1)  # [B, 1] -> [B]

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

    def update_stats(self, rollout: Rollout) -> None:
        """Update the statistics of observations and of G, which varies as returns do:
        G_t = r_t + gamma (1 - done_{t-1}) G_{t-1}, with raw rewards r."""
        sums = []
        for rew, done in zip(rollout.rew, rollout.done):
            sums.append(rew + self.cfg.gamma * self.reward_sum)
            self.reward_sum = sums[-1] * (1 - done)  # a new episode starts at 0
        self.reward_sum_stats.update(torch.cat(sums))
        self.obs_stats.update(rollout.obs.flatten(0, 1))


if __name__ == "__main__":
    main(train, Config, __doc__)
