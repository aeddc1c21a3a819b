"""Trust Region Policy Optimization (TRPO).  Schulman et al. 2015, arXiv:1502.05477.

The problem. VPG chooses the length of a step in the space of weights, where
nothing says how much the policy changes. One step that is too long ruins the
policy, and then also the data it collects. TRPO limits the change itself: it
maximises a surrogate S of the return subject to KL(pi_old || pi) <= max_kl,
averaged over the states of the batch. For a small step x of the weights, S is
about g' x and KL is about x' F x / 2, where F is the Fisher matrix, the
second derivative of KL at pi_old. The maximum lies along the natural gradient
F^-1 g, which does not depend on how the network is parametrised. A line
search then checks the true KL and S, because these are only approximations.

Background, as in algos/vpg.py. s' is the true next state of s, even at a time
limit, where we still bootstrap from V(s'). "terminated" marks a true end of
an episode, "done" any end, time limits included. V is the critic. The
advantage A says how much better an action was than the policy does on average
in that state. lambda trades bias for variance: lam = 0 trusts V after one
step, lam = 1 trusts the sampled rewards alone. (1) and (2) are GAE (Schulman
et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t     = delta_t + gamma lam (1 - done_t) A_{t+1}
    R_t     = A_t + V(s_t), the critic's regression target                 (2)
    log pi  = sum_i log N(a_i; mu_i(s), sigma_i), or log softmax           (3)
    H       = entropy of pi(. | s), averaged over the batch                (4)
    L_V     = mean (V(s) - R)^2                                            (5)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    rew    <- clip(rew / sqrt(var(G) + 1e-8), -10, 10),
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}                         (7)

TRPO itself. pi_old is the policy that acted, v any vector of weights:

    S       = mean (pi(a | s) / pi_old(a | s) - 1) A,  g = grad S at pi_old (8)
    KL      = mean over s of KL(pi_old(. | s) || pi(. | s)), in closed form (9)
    F v     = grad (v' grad KL) + damping v, at pi_old                    (10)
    F x     = g, solved for x by the conjugate gradient method            (11)
    step    = 0.8^k sqrt(2 max_kl / (x' F x)) x, for the first k = 0, 1, ...
              with KL <= max_kl and S > 0; if there is none, no step      (12)

F would have as many rows as the policy has weights, so it is never built.
(11) needs only products F v, and (10) computes them by differentiating the
gradient of KL once more, in the direction v. `damping` keeps F invertible. It
also shortens the step, because x' F x includes it. KL sums over the
dimensions of an action; libraries that average over d dimensions allow d
times as much with the same number. The scale of A does not matter, since
max_kl fixes the length of the step, so advantages are not normalised. H is
only reported.

The critic is fitted after the policy, by `v_steps` steps on (5) with random
minibatches. With images, actor and critic share an encoder. The value steps
do not train it, since that would move the policy without regard to max_kl.

Departures from the paper. GAE replaces sampled returns. max_kl is 0.04, not
0.01. (6) and (7) come from OpenAI Baselines; new statistics in (6) move the
policy a little, outside the constraint. sigma is one parameter per action
dimension, independent of s. tanh maps a Gaussian action into the
environment's bounds; its Jacobian is the same in both policies of (8) and (9)
and cancels.

Sizes by default: T = 256 steps of N = 8 environments make 2,048 samples per
rollout, for one step of the policy and 80 of the critic. Healthy values: KLHEALTH

Read after    algos/vpg.py:  diff algos/vpg.py algos/trpo.py
Try           python -m algos.trpo --env CartPole-v1 --total-steps 2e5
Reproduce     python -m algos.trpo    (curves of all seeds: benchmarks/README.md)
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from utils import mpi
from utils.envs import image_to_float, is_image, make_envs, nature_cnn, to_tensor
from utils.run import Run, RunConfig, check_divides, check_settings, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample of a batch: never [B, 1]
Outputs = Float32[Tensor, "B k"]  # of the actor: k logits, or the means of k dimensions
Scalar = Float32[Tensor, ""]
Vector = Float32[Tensor, "P"]  # one number per parameter of the policy


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, environments stepped together (1 to 64)
    rollout_steps: int = 2048  # T x N, steps per rollout over all environments
    minibatch_size: int = 256  # samples per gradient step of the critic (32 to 512)
    v_steps: int = 80  # gradient steps of the critic per rollout (5 to 80)
    v_lr: float = 1e-3  # learning rate of the critic's Adam, constant (3e-4 to 3e-3)
    max_kl: float = 0.04  # largest KL of an update, delta in the paper (0.001 to 0.05)
    cg_steps: int = 15  # conjugate gradient steps at most (10 to 20)
    damping: float = 0.1  # added to the diagonal of the Fisher matrix (0.01 to 0.1)
    backtracks: int = 10  # step lengths that the line search tries (5 to 20)
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.95  # GAE's lambda: bias at 0, variance at 1 (0.9 to 1)
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, for vector observations
    std_init: float = 1.0  # initial sigma of continuous actions (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (6)
    scale_rew: bool = True  # divide rewards by the std of discounted returns, Eq. (7)
    orthogonal_init: bool = True  # orthogonal initial weights, else PyTorch's default

    def __post_init__(self):
        counts = "cg_steps backtracks"
        check_settings(self, positive="max_kl", nonnegative="damping", counts=counts)
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


@dataclass(frozen=True)
class OldPolicy:
    """What the policy that acted says of a batch. Constants."""

    out: Outputs
    log_std: Tensor | None
    logp: PerSample  # of the actions taken


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


def surrogate(logp: PerSample, logp_old: PerSample, adv: PerSample) -> Scalar:
    """The estimated improvement over the old policy."""
    assert logp.shape == logp_old.shape == adv.shape
    ratio = (logp - logp_old).exp()
    return ((ratio - 1) * adv).mean()  # Eq. (8)


def kl_divergence(out_old: Outputs, log_std_old: Tensor | None,
                  out: Outputs, log_std: Tensor | None) -> Scalar:
    """Eq. (9) in nats: of the distributions, not an estimate from sampled actions."""
    if log_std is None:
        log_ratio = out_old.log_softmax(-1) - out.log_softmax(-1)
        return (out_old.softmax(-1) * log_ratio).sum(-1).mean()
    var_ratio = (2 * (log_std_old - log_std)).exp()
    z = (out_old - out) / log_std.exp()
    kl = 0.5 * (var_ratio + z.square() - 1) + log_std - log_std_old
    return kl.sum(-1).mean()


def to_vector(gradients: tuple[Tensor, ...]) -> Vector:
    """Gradients with respect to all parameters -> one vector."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def fisher_product(kl_grad: Vector, params: list[nn.Parameter], damping: float,
                   v: Vector) -> Vector:
    """Eq. (10). `kl_grad` is grad KL, with its graph: it is differentiated again."""
    product = torch.autograd.grad(kl_grad, params, v, retain_graph=True)
    return mpi.average(to_vector(product)) + damping * v  # over all ranks


def conjugate_gradient(product: partial, g: Vector,
                       steps: int) -> tuple[Vector, Scalar]:
    """Eq. (11): solve F x = g, with F v = product(v) -> x, |g - F x| / |g|."""
    x = torch.zeros_like(g)
    r = g  # the residual g - F x
    p = g  # the direction of the next step
    for _ in range(steps):
        if r.norm() <= 1e-6 * g.norm():  # float32 gets no closer
            break
        Fp = product(p)
        step_size = r @ r / (p @ Fp)  # the best one along p
        x = x + step_size * p
        r_old = r
        r = r - step_size * Fp
        p = r + r @ r / (r_old @ r_old) * p  # p' F p_old = 0: no step undoes another
    return x, r.norm() / (g.norm() + 1e-30)  # g may be 0


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1 if the critic predicts the targets exactly, 0 if no better than a constant."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= update =======================================
def surrogate_and_kl(agent: Agent, batch: Batch,
                     old: OldPolicy) -> tuple[Scalar, Scalar]:
    """Eqs. (8), (9), of the current policy against the old one."""
    out = agent.actor(agent.encoder(batch.obs))
    logp = log_prob(out, agent.log_std, batch.act)
    kl = kl_divergence(old.out, old.log_std, out, agent.log_std)
    return surrogate(logp, old.logp, batch.adv), kl


@torch.enable_grad()
def natural_gradient_step(agent: Agent, batch: Batch,
                          old: OldPolicy) -> tuple[Vector, Vector, Scalar]:
    """Return g of Eq. (8), the step of (12) for k = 0, the residual of (11)."""
    cfg = agent.cfg
    params = agent.policy_parameters()
    gain, kl = surrogate_and_kl(agent, batch, old)
    g = to_vector(torch.autograd.grad(gain, params, retain_graph=True))
    g = mpi.average(g)  # over all ranks
    kl_grad = to_vector(torch.autograd.grad(kl, params, create_graph=True))
    product = partial(fisher_product, kl_grad, params, cfg.damping)
    x, residual = conjugate_gradient(product, g, cfg.cg_steps)
    scale = (2 * cfg.max_kl / (x @ product(x) + 1e-30)).sqrt()  # x may be 0
    return g, scale * x, residual


def line_search(agent: Agent, batch: Batch, old: OldPolicy,
                step: Vector) -> tuple[Vector, dict]:
    """Eq. (12): move the policy, or leave it -> the step taken, metrics."""
    params = agent.policy_parameters()
    start = parameters_to_vector(params)
    for k in range(agent.cfg.backtracks):
        vector_to_parameters(start + 0.8**k * step, params)
        gain, kl = mpi.average(torch.stack(surrogate_and_kl(agent, batch, old)))
        if gain > 0 and kl <= agent.cfg.max_kl:
            return 0.8**k * step, {"improvement": gain, "kl": kl, "backtracks": k}
    vector_to_parameters(start, params)
    failed = {"improvement": 0.0, "kl": 0.0, "backtracks": agent.cfg.backtracks}
    return torch.zeros_like(step), failed


def policy_step(agent: Agent, batch: Batch) -> dict:
    """One step of the policy inside the trust region -> metrics."""
    out = agent.actor(agent.encoder(batch.obs))
    log_std = None if agent.discrete else agent.log_std.clone()  # that will move
    old = OldPolicy(out, log_std, log_prob(out, log_std, batch.act))
    g, step, residual = natural_gradient_step(agent, batch, old)
    step, metrics = line_search(agent, batch, old, step)
    return metrics | {"improvement_expected": g @ step, "cg_residual": residual,
                      "policy_grad_norm": g.norm(), "entropy": entropy(out, log_std)}


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
def update(agent: Agent, optimizers: mpi.Optimizers, rollout: Rollout) -> dict:
    """Learn from one rollout: one step of the policy, then of the critic -> metrics."""
    cfg = agent.cfg
    rollout = agent.normalize_rollout(rollout)
    obs = rollout.obs.flatten(0, 1)  # [B, ...] with B = T x N
    act = rollout.act.flatten(0, 1)
    val, next_val = compute_values(agent, rollout)
    adv, ret = compute_advantages(rollout, val, next_val, cfg.gamma, cfg.lam)
    critic = {"val": val, "explained_variance": explained_variance(val, ret)}

    metrics = policy_step(agent, Batch(obs, act, adv.flatten()))

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
    return metrics | critic


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    """Train to the end of the budget, or resume, and return the agent."""
    with Run(cfg) as run:  # refuses bad input before anything is built
        cfg = run.cfg  # with --resume, the settings of that run
        envs = make_envs(cfg, run.num_envs)  # this rank's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizers = mpi.Optimizers(critic=mpi.Adam(agent.critic))
        step = run.restore(agent, optimizers=optimizers)  # 0, or where the run stopped
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizers, rollout)
            agent.update_stats(rollout)  # after learning, which needs the old ones
            step += cfg.rollout_steps
            run.report(step, envs, **metrics)  # writes, evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
