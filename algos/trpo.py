"""Trust Region Policy Optimization (TRPO). Schulman et al. 2015, arXiv:1502.05477.

The problem. In the vanilla policy gradient the learning rate limits how far the
weights move. But of two steps of equal length, one may barely change the policy
and the other ruin it. TRPO limits the change of the policy itself: KL, the
divergence between the old policy pi_old and the new one, pi, is at most max_kl.
Within this limit it approximately maximises S, which estimates, up to a factor,
how much pi's expected return exceeds pi_old's. Let A(s, a), the advantage, be
how much better action a is in state s than pi_old's average. This excess is the
expected discounted sum of A(s, a), with states and actions from pi (Kakade and
Langford 2002). Our samples are from pi_old. The ratio pi / pi_old corrects for
the actions, nothing for the states. So S is accurate only near pi_old: another
reason for the limit.

The algorithm, and where each step is coded:

    repeat until total_steps:
        act for T steps in each of N environments        collect
        V, advantages A and targets R, by (1) and (2)    compute_targets
        g by (8), D v by (10), the first trial m x       natural_gradient_step
        with x, the natural gradient, by (11)            conjugate_gradient
        shorten it until S > 0 and KL <= max_kl, (12)    line_search
        `v_steps` Adam steps of the critic on L_V, (5)   critic_value_loss
        update the statistics of (6) and (7)             update_stats

TRPO's own equations; (1) to (7) follow further down. Under pi_old the mean of A
is zero, so the -1 adds no bias. It makes S zero at pi_old, so S > 0 predicts an
improvement. (8) weights all steps equally: it drops gamma^t, as VPG does.

    S       = mean [(pi(a | s) / pi_old(a | s) - 1) A],  g = grad S        (8)
    KL      = mean over s of KL(pi_old(. | s) || pi(. | s))                (9)

Let d be a small change of pi_old's weights. Then S is about g^T d, where g is
the policy gradient. KL and its gradient are zero at d = 0, so KL is about
d^T F d / 2. F, its Hessian there, is the Fisher matrix. At the maximum of g^T d
subject to d^T F d / 2 = max_kl, the gradients of both, g and F d, are parallel.
So d = m x, where F x = g. Inserting d into the limit, m^2 x^T F x / 2 = max_kl,
gives the root in (12). x is the natural gradient. It goes further than g in
directions that barely change the policy, and less far in sensitive ones. F may
not be invertible, so D = F + damping I replaces it. v is any vector:

    D v     = grad (v^T grad KL) + damping v                              (10)
    D x     = g, solved by conjugate gradients; residual r = g - D x      (11)
    m       = sqrt(2 max_kl / (x^T D x)), at most max_step_size if that is > 0,
    step    = 0.8^k m x, where k < `backtracks` is the smallest for which
              S > 0 and KL <= max_kl; if there is none, step = 0          (12)

For a CNN, F is too large to store. But conjugate gradients need only products D
v, and (10) gets F v by differentiating the number v^T grad KL. They minimise
q(x) = x^T D x / 2 - g^T x. Its gradient is -r, so D x = g at the minimum. Each
step minimises q along a direction p, r plus a multiple of the last p, such that
p^T D p_last = 0. So a step does not undo earlier ones. A few steps may not
solve (11). But q is 0 at x = 0, the start, and falls in every step. So g^T x >
x^T D x / 2 > 0, and a small enough step along x raises S. The root sets (m x)^T
D (m x) / 2, the estimate of KL plus damping |m x|^2 / 2, to max_kl. So damping
shortens m x, and its KL is usually below max_kl. The line search measures it.

`max_step_size` (off by default; from ACKTR, Wu et al. 2017) limits m. Without
it, m x has the same estimated KL for every g: m grows as g shrinks. On a solved
pendulum advantages are small, and g is only noise. A full step along noise may
ruin the policy. A limit of 2 mostly prevents it but can slow learning
(benchmarks/NOTES.md, "InvertedPendulum"). Advantages are not normalised: F does
not contain them, so their scale cancels in m x, unless the limit acts on m.

As in VPG, V(s) is the critic's estimate of the discounted sum of scaled rewards
from s on. `done` is 1 if the episode ended, `terminated` only if s' is
terminal. Unless it is, V(s') stands in for later rewards, even at a time limit.
(1), (2) are GAE (arXiv:1506.02438).

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t = delta_t + gamma lam (1 - done_t) A_{t+1},  R_t = A_t + V(s_t)    (2)
    log pi  = log softmax(logits)_a, or sum_i log N(a_i; mu_i(s), sigma_i) (3)
    H       = entropy of pi(. | s) before tanh, averaged over the batch    (4)
    L_V     = mean (V(s) - R)^2                                            (5)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}, for raw rewards r,
    rew    <- clip(rew / sqrt(var(G) + 1e-8), -10, 10)                     (7)

mean and var are those of all earlier rollouts. (7) makes returns of order 1, so
`v_lr` need not fit the unit of rewards. Critic steps do not train a shared
encoder (images), because they ignore the limit on KL. Gaussian actions are
squashed by tanh only for the environment; its Jacobian cancels in (8) and (9).

Departures from the paper. GAE replaces sums of rewards. The paper has max_kl
0.01, 50,000 or more samples per batch, 10 `cg_steps`, and no damping.

Defaults: T = 256, N = 8. In a healthy run `kl` is 0.25 to 0.97 times max_kl.
The metric `backtracks` is k, mostly 0; `step_size` is m. On MuJoCo
`cg_residual`, |r| / |g|, grows from 0.01 to about 0.5 (it can exceed 1, while x
stays usable), and `explained_variance` rises above 0.9.

Read after    algos/vpg.py, then:  diff algos/vpg.py algos/trpo.py
Try           python -m algos.trpo --env CartPole-v1 --total-steps 2e5
Reproduce     python -m algos.trpo    (learning curves: benchmarks/README.md)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# mpi.Adam          `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One Adam step; its gradient is averaged over processes, clipped if
#                   max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.Optimizers    named optimizers: `x` reports x_grad_norm, changes only its weights
# mpi.RunningStats  running mean and var of all rows that `update` got, in all processes
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# stack_steps       T dicts -> one dict of [T, N, ...]; bools and floats become float32
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import image_to_float, is_image, make_envs, nature_cnn, stack_steps
from utils.run import Run, RunConfig, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits (discrete) or k means (continuous)
Scalar = Float32[Tensor, ""]
Vector = Float32[Tensor, "P"]  # one number per parameter of the policy


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds env, seed, run_dir, device, ...: see --help
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 2048  # T x N, samples per rollout: T steps in each of N envs
    minibatch_size: int = 256  # samples per gradient step of the critic (32 to 512)
    v_steps: int = 80  # gradient steps of the critic per rollout (5 to 80)
    v_lr: float = 1e-3  # the critic's learning rate, constant (3e-4 to 3e-3)
    max_kl: float = 0.04  # maximum KL per update, delta in the paper (0.001 to 0.05)
    max_step_size: float = 0.0  # maximum of m in Eq. (12) (1 to 5); 0: off
    cg_steps: int = 15  # maximum number of conjugate gradient steps (10 to 20)
    damping: float = 0.1  # added to the diagonal of the Fisher matrix F (0.01 to 0.1)
    backtracks: int = 10  # step lengths that the line search tries at most (5 to 20)
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, for vector observations
    std_init: float = 1.0  # initial sigma of continuous actions, before tanh (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (6)
    scale_rew: bool = True  # divide rewards by the standard deviation of G, Eq. (7)
    orthogonal_init: bool = True  # orthogonal initial weights; else PyTorch's default


# ======================================= agent ========================================
def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with tanh between them."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])  # no tanh after the last layer


def init_orthogonal(agent: nn.Module) -> None:
    """Orthogonal weights (OpenAI Baselines' gains). At first pi hardly depends on s."""
    for layer in agent.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
            nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(agent.actor[-1].weight, gain=0.01)
    nn.init.orthogonal_(agent.critic[-1].weight, gain=1.0)


class Agent(nn.Module):
    """Actor, critic and running statistics."""

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
        if self.images:
            self.encoder = nature_cnn(obs_space)  # shared; 512 features
            sizes = (512,)
        else:
            self.encoder = nn.Identity()
            sizes = (*obs_space.shape, *cfg.hidden)
        self.actor = mlp(*sizes, num_outputs)
        self.critic = mlp(*sizes, 1)
        if cfg.orthogonal_init:
            init_orthogonal(self)
        self.obs_stats = mpi.RunningStats(obs_space.shape)
        self.reward_sum_stats = mpi.RunningStats(())  # of G in Eq. (7)
        self.discounted_reward_sum = torch.zeros(())  # G carried over as [N]; not saved

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> network inputs: pixels in [0, 1] or Eq. (6)."""
        if self.images:
            return image_to_float(obs)
        if not self.cfg.norm_obs:
            return obs.float()
        return standardize(obs.float(), self.obs_stats.mean, self.obs_stats.var)

    def policy_parameters(self) -> list[nn.Parameter]:
        """All parameters but the critic's. An image encoder belongs to the policy."""
        named = self.named_parameters()
        return [param for name, param in named if not name.startswith("critic.")]

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> discrete actions [N], or [N, k] before tanh."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        actor_out = self.actor(self.encoder(self.normalize_obs(obs)))
        if deterministic:
            return actor_out.argmax(-1) if self.discrete else actor_out
        if self.discrete:
            return actor_out.softmax(-1).multinomial(1).squeeze(-1)
        return actor_out + self.log_std.exp() * torch.randn_like(actor_out)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`: continuous ones are squashed and rescaled."""
        if self.discrete:
            return act.cpu().numpy()
        squashed = act.tanh().view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, (squashed + 1) / 2).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw observation -> the deterministic action, for use after training."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]

    def update_stats(self, rollout: "Rollout") -> None:
        """Update the statistics. Called after `update`, which needs the old ones."""
        sums, self.discounted_reward_sum = discounted_reward_sums(
            rollout, self.discounted_reward_sum, self.cfg.gamma)
        self.reward_sum_stats.update(sums.flatten())
        if not self.images:
            self.obs_stats.update(rollout.obs.flatten(0, 1))


# ======================================== data ========================================
@dataclass(frozen=True)
class Rollout:
    obs: Shaped[Tensor, "T N *obs"]
    act: Shaped[Tensor, "T N *act"]
    rew: PerStep
    next_obs: Shaped[Tensor, "T N *obs"]  # observations of s'
    terminated: PerStep  # 1 or 0
    done: PerStep  # 1 or 0


@dataclass(frozen=True)
class Batch:
    obs: Float32[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]
    adv: PerSample


@dataclass(frozen=True)
class OldPolicy:  # what Eqs. (8), (9) need of pi_old
    actor_out: ActorOut
    log_std: Tensor | None  # None: discrete actions
    logp: PerSample


def true_next_obs(new_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Observations of s', [N, ...]: `new_obs`, or "final_obs" if an episode ended."""
    next_obs = new_obs.copy()
    for i in np.flatnonzero(done):
        next_obs[i] = infos["final_obs"][i]
    return next_obs


def collect(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray,
            num_steps: int) -> tuple[Rollout, np.ndarray]:
    """Act for T = num_steps steps. Return the rollout and the obs to act on next."""
    steps = []
    for _ in range(num_steps):
        act = agent.act(obs)
        new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
        done = terminated | truncated
        next_obs = true_next_obs(new_obs, done, infos)
        steps.append({"obs": obs, "act": act.cpu().numpy(), "rew": rew,
                      "next_obs": next_obs, "terminated": terminated, "done": done})
        obs = new_obs  # after a reset, the first of the new episode
    return Rollout(**stack_steps(steps, act.device)), obs


# ==================================== mathematics =====================================
def standardize(value: Tensor, mean: Tensor | float, var: Tensor) -> Tensor:
    """Eqs. (6), (7). Clipping limits outliers, above all in the first rollouts."""
    return ((value - mean) / torch.sqrt(var + 1e-8)).clamp(-10, 10).float()


def discounted_reward_sums(rollout: Rollout, g: Tensor,
                           gamma: float) -> tuple[PerStep, Tensor]:
    """Eq. (7): from the G carried over [N], return G at every step and the new one."""
    sums = []
    for rew, done in zip(rollout.rew, rollout.done):
        g = rew + gamma * g
        sums.append(g)
        g = g * (1 - done)
    return torch.stack(sums), g


def compute_advantages(rollout: Rollout, val: PerStep, next_val: PerStep,
                       gamma: float, lam: float) -> tuple[PerStep, PerStep]:
    """GAE: return A and R. The recursion does not cross the end of an episode."""
    delta = rollout.rew + gamma * (1 - rollout.terminated) * next_val - val  # Eq. (1)
    decay = gamma * lam * (1 - rollout.done)
    delta, decay = delta.cpu().numpy(), decay.cpu().numpy()  # a loop in NumPy is faster
    adv = np.zeros_like(delta)
    next_adv = np.zeros_like(delta[0])  # A is 0 after the rollout's last step
    for t in reversed(range(len(delta))):
        adv[t] = delta[t] + decay[t] * next_adv  # Eq. (2)
        next_adv = adv[t]
    adv = torch.as_tensor(adv, device=val.device)
    return adv, adv + val


def log_prob(actor_out: ActorOut, log_std: Tensor | None, act: Tensor) -> PerSample:
    """Eq. (3). Actions: discrete [B] if log_std is None, else before tanh [B, k]."""
    if log_std is None:
        return actor_out.log_softmax(-1).gather(-1, act.unsqueeze(-1)).squeeze(-1)
    z = (act - actor_out) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy(actor_out: ActorOut, log_std: Tensor | None) -> Scalar:
    """Eq. (4) in nats; for continuous actions, of the Gaussian before tanh."""
    if log_std is None:
        return -(actor_out.softmax(-1) * actor_out.log_softmax(-1)).sum(-1).mean()
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def value_loss(val: PerSample, ret: PerSample) -> Scalar:
    assert val.shape == ret.shape  # [B] minus [B, 1] would be [B, B]
    return (val - ret).square().mean()  # Eq. (5)


def surrogate(logp: PerSample, logp_old: PerSample, adv: PerSample) -> Scalar:
    """S, the estimated improvement over the old policy."""
    assert logp.shape == logp_old.shape == adv.shape
    ratio = (logp - logp_old).exp()
    return ((ratio - 1) * adv).mean()  # Eq. (8)


def kl_divergence(old_out: ActorOut, old_log_std: Tensor | None,
                  actor_out: ActorOut, log_std: Tensor | None) -> Scalar:
    """Eq. (9) in nats, computed from the distributions, not from sampled actions."""
    if log_std is None:
        log_ratio = old_out.log_softmax(-1) - actor_out.log_softmax(-1)
        return (old_out.softmax(-1) * log_ratio).sum(-1).mean()
    var_ratio = (2 * (old_log_std - log_std)).exp()
    z = (old_out - actor_out) / log_std.exp()
    kl = 0.5 * (var_ratio + z.square() - 1) + log_std - old_log_std
    return kl.sum(-1).mean()


def to_vector(gradients: tuple[Tensor, ...]) -> Vector:
    """One gradient per parameter tensor -> one vector, for Eqs. (8), (10)."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def fisher_product(kl_grad: Vector, params: list[nn.Parameter], damping: float,
                   v: Vector) -> Vector:
    """Eq. (10). `kl_grad` is grad KL with its graph; each call differentiates it."""
    product = torch.autograd.grad(v @ kl_grad, params, retain_graph=True)
    return mpi.average(to_vector(product)) + damping * v  # mean over processes


def conjugate_gradient(product: Callable[[Vector], Vector], g: Vector,
                       steps: int) -> tuple[Vector, Scalar]:
    """Eq. (11), with D v = product(v). Return x and the relative residual |r| / |g|."""
    x = torch.zeros_like(g)
    r = g  # the residual g - D x
    p = g  # the next search direction
    for _ in range(steps):
        if r.norm() <= 1e-6 * g.norm():  # solved to about float32's precision
            break
        Dp = product(p)
        step_size = r @ r / (p @ Dp)  # minimises x^T D x / 2 - g^T x along p
        x = x + step_size * p
        old_r = r
        r = r - step_size * Dp
        p = r + r @ r / (old_r @ old_r) * p  # p^T D old_p = 0: keeps earlier gains
    return x, r.norm() / (g.norm() + 1e-30)  # g may be 0


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1: `val` is R up to a constant. 0: no better than a constant. Below 0: worse."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= update =======================================
def surrogate_and_kl(agent: Agent, batch: Batch,
                     old: OldPolicy) -> tuple[Scalar, Scalar]:
    """Eqs. (8), (9): S and KL of the current policy relative to the old one."""
    actor_out = agent.actor(agent.encoder(batch.obs))
    logp = log_prob(actor_out, agent.log_std, batch.act)
    kl = kl_divergence(old.actor_out, old.log_std, actor_out, agent.log_std)
    return surrogate(logp, old.logp, batch.adv), kl


@torch.enable_grad()  # its caller, `policy_step`, disables gradients
def natural_gradient_step(agent: Agent, batch: Batch,
                          old: OldPolicy) -> tuple[Vector, Vector, dict]:
    """Return g of Eq. (8), the full step m x of (12), and m and |r| / |g|."""
    cfg = agent.cfg
    params = agent.policy_parameters()
    gain, kl = surrogate_and_kl(agent, batch, old)
    g = to_vector(torch.autograd.grad(gain, params, retain_graph=True))
    g = mpi.average(g)  # over processes
    kl_grad = to_vector(torch.autograd.grad(kl, params, create_graph=True))
    product = partial(fisher_product, kl_grad, params, cfg.damping)
    x, residual = conjugate_gradient(product, g, cfg.cg_steps)
    m = (2 * cfg.max_kl / (x @ product(x) + 1e-30)).sqrt()  # x may be 0
    if cfg.max_step_size > 0:
        m = m.clamp(max=cfg.max_step_size)
    return g, m * x, {"step_size": m, "cg_residual": residual}


def line_search(agent: Agent, batch: Batch, old: OldPolicy,
                step: Vector) -> tuple[Vector, dict]:
    """Eq. (12): take the longest trial allowed, or none. Return it, and metrics."""
    params = agent.policy_parameters()
    start = parameters_to_vector(params)
    for k in range(agent.cfg.backtracks):
        vector_to_parameters(start + 0.8**k * step, params)  # overwrites the weights
        gain, kl = mpi.average(torch.stack(surrogate_and_kl(agent, batch, old)))
        if gain > 0 and kl <= agent.cfg.max_kl:
            return 0.8**k * step, {"improvement": gain, "kl": kl, "backtracks": k}
    vector_to_parameters(start, params)
    failed = {"improvement": 0.0, "kl": 0.0, "backtracks": agent.cfg.backtracks}
    return torch.zeros_like(step), failed  # the old weights are restored


@torch.no_grad()  # `line_search` needs none; `natural_gradient_step` enables gradients
def policy_step(agent: Agent, batch: Batch) -> dict:
    """Take one step of the policy. Return metrics; `entropy` is that of pi_old."""
    actor_out = agent.actor(agent.encoder(batch.obs))
    log_std = None if agent.discrete else agent.log_std.clone()  # line_search alters it
    old = OldPolicy(actor_out, log_std, log_prob(actor_out, log_std, batch.act))
    g, step, step_metrics = natural_gradient_step(agent, batch, old)
    step, metrics = line_search(agent, batch, old, step)
    metrics |= {"improvement_expected": g @ step, "policy_grad_norm": g.norm()}
    return metrics | step_metrics | {"entropy": entropy(actor_out, log_std)}


def critic_value_loss(agent: Agent, features: Float32[Tensor, "B k"],
                      ret: PerSample) -> tuple[Scalar, dict]:
    """Eq. (5). `features` are the encoder's outputs; for vectors, the observations."""
    v_loss = value_loss(agent.critic(features).squeeze(-1), ret)
    return v_loss, {"v_loss": v_loss}


def normalize_rollout(agent: Agent, rollout: Rollout) -> Rollout:
    """Return a normalised copy to learn from. `update_stats` needs the raw rollout."""
    obs = agent.normalize_obs(rollout.obs)
    next_obs = agent.normalize_obs(rollout.next_obs)
    rollout = replace(rollout, obs=obs, next_obs=next_obs)
    if agent.cfg.scale_rew:
        rew = standardize(rollout.rew, 0.0, agent.reward_sum_stats.var)  # Eq. (7)
        rollout = replace(rollout, rew=rew)
    return rollout


def compute_targets(agent: Agent, rollout: Rollout) -> tuple[PerStep, PerStep, PerStep]:
    """V, A and R of Eqs. (1), (2), by the current critic, for a normalised rollout."""
    val = agent.critic(agent.encoder(rollout.obs.flatten(0, 1))).view_as(rollout.rew)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # within an episode, s' is the next row's s
    ends = rollout.done.bool()
    ends[-1] = True  # where an episode or the rollout ends, s' is in next_obs
    next_val[ends] = agent.critic(agent.encoder(rollout.next_obs[ends])).squeeze(-1)
    cfg = agent.cfg
    adv, ret = compute_advantages(rollout, val, next_val, cfg.gamma, cfg.lam)
    return val, adv, ret


@torch.no_grad()  # `minimize` and `natural_gradient_step` enable gradients
def update(agent: Agent, optimizers: mpi.Optimizers, rollout: Rollout) -> dict:
    """One step of the policy, then `v_steps` of the critic. Return metrics."""
    cfg = agent.cfg
    rollout = normalize_rollout(agent, rollout)
    obs = rollout.obs.flatten(0, 1)  # [T, N, ...] -> [B, ...]
    act = rollout.act.flatten(0, 1)
    val, adv, ret = compute_targets(agent, rollout)
    critic_metrics = {"val": val, "explained_variance": explained_variance(val, ret)}

    batch = Batch(obs, act, adv.flatten())
    metrics = policy_step(agent, batch)

    features = agent.encoder(obs)  # the policy step changed the encoder, now fixed
    ret = ret.flatten()
    size = len(obs) * cfg.minibatch_size // cfg.rollout_steps  # this process's share
    step_metrics = []  # of each gradient step: the loss and the gradient norm
    for _ in range(cfg.v_steps):
        idx = torch.randperm(len(obs))[:size]  # a new random minibatch, not an epoch
        step_metrics.append(optimizers.critic.minimize(
            critic_value_loss, agent, features[idx], ret[idx], lr=cfg.v_lr))
    for name in step_metrics[0]:
        metrics[name] = torch.stack([step[name] for step in step_metrics])
    return metrics | critic_metrics


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    """Train until `total_steps`, from the start or from a checkpoint."""
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of the resumed run
        envs = make_envs(cfg, run.num_envs)  # this process's share of cfg.num_envs
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        # The policy has no optimizer: `line_search` sets its weights.
        optimizers = mpi.Optimizers(critic=mpi.Adam(agent.critic))
        step = run.restore(agent, optimizers=optimizers)  # 0, or where the run stopped
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizers, rollout)
            agent.update_stats(rollout)
            step += cfg.rollout_steps
            run.report(step, envs, **metrics)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
