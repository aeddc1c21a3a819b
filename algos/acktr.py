"""Actor-Critic using Kronecker-Factored Trust Region (ACKTR).  Wu et al. 2017,
arXiv:1708.05144.

The problem. In A2C the learning rate limits how far the weights move. But of
two steps of equal length, one may barely change the policy and the other ruin
it. ACKTR limits KL, the divergence between old and new policy. For a small
change d of the weights, the loss L changes by about d^T grad L, and KL is about
d^T F d / 2. F is the Fisher matrix. Where L falls most for a given KL, the
gradients of both, grad L and F d, are parallel. So the best d is a negative
multiple of F^-1 grad L, the natural gradient. But F is too large to invert.

The algorithm, and where each step is coded:

    repeat until total_steps:
        act for a few steps in N environments            collect
        V, advantages A and targets R, by (1) and (2)    compute_targets
        update each layer's part of F, (10) to (13)      KFAC.measure
        D of each layer, for L in (9), by (14)           LayerFisher.solve
        step size eta and the step, (15), (16)           KFAC.minimize
        update the statistics of (6) and (7)             update_stats

The idea is K-FAC (Martens & Grosse 2015, arXiv:1503.05671). The network
predicts p(y | s), where y is an action and a value. The value is Gaussian, so
that the critic has a KL, too. F, the Hessian of KL at d = 0, is the mean of u
u^T, where u is the gradient of -log p(y | s) for a y sampled from p. A layer
computes W x, where x ends in a constant 1 for the bias. Let e be the gradient
of -log p with respect to W x. The gradient for W is e x^T. With columns stacked
it is x kron e, the Kronecker product, and u u^T is (x x^T) kron (e e^T). K-FAC
treats x and e as independent and sets F to zero between layers. So a layer's
block of F becomes X kron S, where X is the mean of x x^T and S that of e e^T.
Times a stacked matrix Z it is S Z X, stacked. So F^-1 grad L becomes S^-1 (grad
L) X^-1. B is the size of a rollout; k counts updates. A convolution applies W
to P patches x per sample (else P = 1).

    ell     = -sum [log pi(a | s) + log N(v; V, 1)],  a ~ pi, v ~ N(V, 1) (10)
    X_k     = sum x x^T / B, S_k = sum e e^T / (B P), e = d ell / d(W x)  (11)
    X, S   <- (1 - w) (X, S) + w (X_k, S_k), w = max(1 - decay, 1/k)      (12)

(10) samples from p, because F is a mean over p. Gradients of L would not
measure KL: the actor's grow with the advantages, the critic's vanish as V fits
R. The gradient of a convolution is the sum of e x^T over its P patches. If e of
different patches are uncorrelated and alike (KFC, arXiv:1602.01407), F is P
times the mean of x x^T kron that of e e^T. X takes this P: it is a sum.

    X_d     = X + c sqrt(damping) I,  S_d = S + sqrt(damping) / c I,
    c       = sqrt(mean of the diagonal of X / mean of the diagonal of S) (13)
    D       = S_d^-1 (grad L) X_d^-1; log sigma: grad L / (2 + damping)   (14)
    eta     = min(lr, sqrt(2 max_kl / sum(D * grad L)))                   (15)
    M      <- momentum M + (1 - momentum) eta D,  W <- W - M              (16)
    KL      = mean [pi / pi_old - 1 - log(pi / pi_old)], after the step   (17)

Where F is small, F^-1 amplifies noise. So (13) adds at least damping I to X
kron S; c makes both additions equal relative to the mean diagonals. log sigma
is in no layer; its F is exactly 2 I. With the damped F, F D is grad L. So a
step eta D has a KL of about eta^2 sum(D * grad L) / 2 or, as damping counts in
F, less. (15) limits this to max_kl; lr limits eta where grad L is small. The
critic has its own sum and eta, with v_max_kl. (17) is the KL of M, their mean.

The rest is A2C (algos/a2c.py). `done` is 1 if the episode ended, `terminated`
if s' is terminal. In (1), r is scaled by (7). R is V's target, sigma a
deviation.

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t = delta_t + gamma lam (1 - done_t) A_{t+1},  R_t = A_t + V(s_t)    (2)
    log pi  = log softmax(logits)_a, or sum_i log N(a_i; mu_i(s), sigma_i) (3)
    H       = entropy of pi(. | s) before tanh, averaged over the batch    (4)
    L_V     = mean (V(s) - R)^2                                            (5)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}, for raw rewards r,
    rew    <- clip(rew / sqrt(var(G) + 1e-8), -10, 10)                     (7)
    L_pi    = -mean log pi(a | s) A, where A is a constant                 (8)
    L       = L_pi + vf_coef L_V - ent_coef H                              (9)

Departures from the paper: GAE and tanh, as in A2C; with images, a limit of the
critic's own; 1/k in (12), as in K-FAC.

Defaults: N = 16; 320 samples per update. In healthy runs on CartPole
`step_size`, eta, is 0.01 to 0.23, `kl` below 0.0006 (max_kl is 0.001) and
`explained_variance` above 0.6. A `kl` far above max_kl: F is estimated badly.

Read after    algos/a2c.py, then:  diff algos/a2c.py algos/acktr.py
Try           python -m algos.acktr --env CartPole-v1 --damping 0.1
Reproduce     python -m algos.acktr    (learning curves: benchmarks/README.md)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# mpi.RunningStats  running mean and var of all rows that `update` got, in all processes
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import image_to_float, is_image, make_envs, nature_cnn, stack_steps
from utils.run import Run, RunConfig, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits (discrete) or k means (continuous)
Scalar = Float32[Tensor, ""]
Parts = dict[nn.Parameter, Tensor]  # the gradient or step of each parameter


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds env, seed, run_dir, device, ...: see --help
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 16  # N, parallel environments (8 to 64); must divide rollout_steps
    report_every: int = 4000  # environment steps between reports
    rollout_steps: int = 320  # T x N, samples per rollout: T steps in each of N envs
    lr: float = 0.25  # initial upper limit of eta, eta_max in the paper (0.03 to 1)
    anneal_lr: bool = True  # anneal lr linearly to zero
    max_kl: float = 0.001  # limit of the KL that (15) predicts, delta (1e-4 to 0.01)
    v_max_kl: float = 0.01  # max_kl for the critic's Gaussian N(V, 1) (1e-4 to 0.01)
    momentum: float = 0.9  # weight of earlier steps in Eq. (16) (0 to 0.95)
    damping: float = 0.01  # added to the Fisher matrix F, Eq. (13) (0.001 to 0.1)
    decay: float = 0.95  # weight of the old X and S in Eq. (12) (0.9 to 0.99)
    inverse_every: int = 5  # updates between inversions of X_d and S_d (1 to 50)
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    vf_coef: float = 0.5  # weight of the value loss (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus (0 to 0.05)
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

    def forward(self, obs: Tensor) -> tuple[ActorOut, PerSample]:
        """Normalised observations [B, ...] -> outputs of the actor, values."""
        features = self.encoder(obs)
        return self.actor(features), self.critic(features).squeeze(-1)

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
    ret: PerSample


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


def policy_loss(logp: PerSample, adv: PerSample) -> Scalar:
    """Its negative gradient estimates the policy gradient, up to a factor."""
    assert logp.shape == adv.shape
    return -(logp * adv).mean()  # Eq. (8)


def step_size(params: list[nn.Parameter], D: Parts, grads: Parts, lr: float,
              max_kl: float) -> Scalar:
    """Eq. (15), for the parameters that share a trust region."""
    product = sum((D[param] * grads[param]).sum() for param in params)
    return (2 * max_kl / (product + 1e-30)).sqrt().clamp(max=lr)  # product may be 0


class LayerFisher(nn.Module):
    """One layer's block of the Fisher matrix: running X and S, and damped inverses."""

    def __init__(self, weight: Tensor):
        super().__init__()
        num_outputs, num_inputs = weight.flatten(1).shape
        for name, size in (("X", num_inputs + 1), ("S", num_outputs)):
            self.register_buffer(name, weight.new_zeros(size, size))
            self.register_buffer(name + "_inv", weight.new_zeros(size, size))

    def on_forward(self, layer: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        """Hook: keep x [B, P, num_inputs + 1], in the order of `weight.flatten(1)`."""
        x = inputs[0].detach()
        if isinstance(layer, nn.Conv2d):
            x = nn.functional.unfold(x, layer.kernel_size, layer.dilation,
                                     layer.padding, layer.stride).transpose(1, 2)
        else:
            x = x.unsqueeze(1)
        self.x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        out.register_hook(self.on_backward)  # called with the gradient of `out`

    def on_backward(self, grad_out: Tensor) -> None:
        """Hook: keep e [B, P, m]. `grad_out` is [B, m] or [B, m, height, width]."""
        self.e = grad_out.reshape(*grad_out.shape[:2], -1).transpose(1, 2)

    def update(self, w: float) -> None:
        """Eqs. (11), (12). X_k sums over positions, S_k averages over them."""
        B, P, _ = self.x.shape
        X_k = torch.einsum("bpi,bpj->ij", self.x, self.x) / B
        S_k = torch.einsum("bpi,bpj->ij", self.e, self.e) / (B * P)
        self.X.lerp_(mpi.average(X_k), w)  # averaged over processes
        self.S.lerp_(mpi.average(S_k), w)

    def invert(self, damping: float) -> None:
        """Eq. (13), called factored Tikhonov damping, and the inverses for Eq. (14)."""
        size = self.S.diagonal().mean() + 1e-12  # S is 0 if every e is 0
        c = (self.X.diagonal().mean() / size).sqrt()
        root = math.sqrt(damping)
        X_d = self.X + c * root * torch.eye(len(self.X)).to(self.X)
        S_d = self.S + root / c * torch.eye(len(self.S)).to(self.S)
        self.X_inv.copy_(torch.linalg.inv(X_d))
        self.S_inv.copy_(torch.linalg.inv(S_d))

    def solve(self, layer: nn.Module, grads: Parts) -> Parts:
        """Eq. (14): D for the layer's weight and bias."""
        weight, bias = layer.weight, layer.bias
        grad = torch.cat([grads[weight].flatten(1), grads[bias].unsqueeze(1)], 1)
        D = self.S_inv @ grad @ self.X_inv  # (X_d kron S_d)^-1 grad
        return {weight: D[:, :-1].reshape(weight.shape), bias: D[:, -1]}


class KFAC(nn.Module):
    """Natural gradient steps. A module, so that checkpoints save its buffers."""

    def __init__(self, agent: Agent):
        super().__init__()
        self.cfg = agent.cfg
        named = agent.named_parameters()
        self.policy_params = [each for name, each in named if "critic." not in name]
        self.critic_params = list(agent.critic.parameters())
        self.params = self.policy_params + self.critic_params
        self.layers = [each for each in agent.modules() if hasattr(each, "weight")]
        self.fishers = nn.ModuleList(LayerFisher(each.weight) for each in self.layers)
        self.register_buffer("k", torch.zeros(()))  # updates so far, Eq. (12)
        self.register_buffer("M", torch.zeros_like(parameters_to_vector(self.params)))

    @torch.enable_grad()
    def measure(self, agent: Agent, obs: Tensor) -> None:
        """Update X and S of all layers. Hooks catch x and e on the two passes."""
        hooks = [layer.register_forward_hook(fisher.on_forward)
                 for layer, fisher in zip(self.layers, self.fishers)]
        torch.autograd.grad(sampled_nll(agent, obs), self.params)  # only for the hooks
        self.k += 1
        every = self.cfg.inverse_every
        for hook, fisher in zip(hooks, self.fishers):
            hook.remove()
            fisher.update(w=max(1 - self.cfg.decay, 1 / self.k.item()))
            if self.k <= every or self.k % every == 0:  # at first X and S change fast
                fisher.invert(self.cfg.damping)

    @torch.no_grad()
    def minimize(self, loss_fn: Callable, *args, lr: float) -> dict:
        """Take one step down `loss_fn(*args)`. Return its metrics and step sizes."""
        cfg = self.cfg
        with torch.enable_grad():
            loss, metrics = loss_fn(*args)
            grads = torch.autograd.grad(loss, self.params)
        grads = {p: mpi.average(g.contiguous()) for p, g in zip(self.params, grads)}
        D = {param: grad / (2 + cfg.damping) for param, grad in grads.items()}
        for layer, fisher in zip(self.layers, self.fishers):
            D |= fisher.solve(layer, grads)  # replaces all D but log sigma's
        eta = step_size(self.policy_params, D, grads, lr, cfg.max_kl)  # actor, encoder
        v_eta = step_size(self.critic_params, D, grads, lr, cfg.v_max_kl)  # critic
        steps = [eta * D[param] for param in self.policy_params]
        steps += [v_eta * D[param] for param in self.critic_params]
        self.M.lerp_(parameters_to_vector(steps), 1 - cfg.momentum)  # Eq. (16)
        vector_to_parameters(parameters_to_vector(self.params) - self.M, self.params)
        metrics |= {"step_size": eta, "v_step_size": v_eta}
        return {name: metric.detach() for name, metric in metrics.items()}


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1: `val` is R up to a constant. 0: no better than a constant. Below 0: worse."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= update =======================================
def a2c_loss(agent: Agent, batch: Batch) -> tuple[Scalar, dict]:
    """Eq. (9). `update` computes advantages and targets without gradients."""
    cfg = agent.cfg
    actor_out, val = agent(batch.obs)
    logp = log_prob(actor_out, agent.log_std, batch.act)
    pi_loss = policy_loss(logp, batch.adv)
    v_loss = value_loss(val, batch.ret)
    ent = entropy(actor_out, agent.log_std)
    loss = pi_loss + cfg.vf_coef * v_loss - cfg.ent_coef * ent  # Eq. (9)
    return loss, {"pi_loss": pi_loss, "v_loss": v_loss, "entropy": ent}


def sampled_nll(agent: Agent, obs: Float32[Tensor, "B *obs"]) -> Scalar:
    """Eq. (10). A sum, so each row of its gradient for W x is one sample's e."""
    actor_out, val = agent(obs)
    if agent.discrete:
        act = actor_out.softmax(-1).multinomial(1).squeeze(-1)
    else:
        act = actor_out + agent.log_std.exp() * torch.randn_like(actor_out)
    logp = log_prob(actor_out, agent.log_std, act.detach())  # samples are constants
    target = (val + torch.randn_like(val)).detach()
    return (0.5 * (val - target).square() - logp).sum()


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


@torch.no_grad()  # only `measure` and `minimize` compute gradients
def update(agent: Agent, optimizer: KFAC, rollout: Rollout, lr: float) -> dict:
    """One natural gradient step on the whole rollout. Return metrics."""
    rollout = normalize_rollout(agent, rollout)
    obs = rollout.obs.flatten(0, 1)  # [T, N, ...] -> [B, ...]
    act = rollout.act.flatten(0, 1)
    val, adv, ret = compute_targets(agent, rollout)
    critic_metrics = {"val": val, "explained_variance": explained_variance(val, ret)}
    batch = Batch(obs, act, adv.flatten(), ret.flatten())
    logp_old = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)
    optimizer.measure(agent, obs)
    metrics = optimizer.minimize(a2c_loss, agent, batch, lr=lr)
    log_ratio = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act) - logp_old
    kl = (log_ratio.exp() - 1 - log_ratio).mean()  # Eq. (17)
    return metrics | critic_metrics | {"kl": kl}


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    """Train until `total_steps`, from the start or from a checkpoint."""
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of the resumed run
        envs = make_envs(cfg, run.num_envs)  # this process's share of cfg.num_envs
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = KFAC(agent)
        step = run.restore(agent, optimizer=optimizer)  # 0, or where the run stopped
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            agent.update_stats(rollout)
            step += cfg.rollout_steps
            run.store(**metrics)  # the next report averages them
            run.report(step, envs, lr=lr)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
