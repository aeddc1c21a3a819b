"""Actor-Critic using Kronecker-Factored Trust Region (ACKTR).  Wu et al. 2017,
arXiv:1708.05144.

The problem. In A2C the learning rate limits how far the weights move. But of two steps
of equal length, one may barely change the policy and the other ruin it.

The idea. Limit the KL divergence between old and new policy instead. For a small change
d of the weights, it is about d^T F d / 2, where F is the Fisher matrix. For a given KL,
the loss L falls most along -F^-1 grad L, the natural gradient. F is too large to
invert. K-FAC (Martens & Grosse 2015, arXiv:1503.05671) treats every layer on its own,
and its part of F as a product of two small matrices.
An iteration of `train`:

    collect              act for T steps in N parallel environments
    update
      compute_targets      advantages A and returns R, with the current critic
      KFAC.measure         update the two matrices of each layer
      a2c_loss             its gradient
      KFAC.step            one step along F^-1 grad L, with a limit on its KL
    update_stats         running statistics that normalise observations and rewards

Departures, besides those of a2c.py. With images, where actor and critic share an
encoder, the critic has its own limit. The matrices start as plain means, as in K-FAC.

Healthy values. On CartPole `step_size` is 0.01 to 0.23 and at the end falls with lr,
`kl` is mostly below 0.0006 (max_kl: 0.001), `explained_variance` above 0.6 after 15,000
steps. If `kl` is far above max_kl, F is estimated badly.

Run   python -m algos.acktr --env CartPole-v1 --total-steps 1e5
Diff  diff algos/a2c.py algos/acktr.py
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

# mpi           several processes may share the environments and each batch. Config
#               has totals; mpi.share(total) is the part of this process
# make_envs     when an episode ends, the same `step` starts a new one and returns its
#               first obs; infos["final_obs"] has the last obs of the old one
# stack_steps   T dicts of arrays [N, ...] -> tensors [T, N, ...]; bools become 0 and 1
# Optimizer     makes weights views of one vector, `flat`, and gradients of `grad`
# RunningStats  normalize(x) = clip((x - mean) / std, -10, 10)
#               scale(x)     = clip(x / std, -10, 10)
from utils import mpi
from utils.envs import make_envs, stack_steps
from utils.nets import ObsStats, SquashedGaussian, head_sizes, make_encoder, mlp
from utils.optim import Optimizer
from utils.policy import Policy
from utils.run import Fraction, Positive, Run, RunConfig, main
from utils.stats import RunningStats

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Inputs = Shaped[Tensor, "B *obs"]  # normalised observations: what the networks take
Features = Float32[Tensor, "B k"]  # of an image, its encoding; a vector as it is
Scalar = Float32[Tensor, ""]
Parts = dict[nn.Parameter, Tensor]  # the gradient or the step of each parameter


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 16  # N, parallel environments (8 to 64)
    report_every: int = 4000  # environment steps between rows of the log
    rollout_steps: int = 320  # T x N samples (20 x 16); N has to divide it
    lr: Positive = 0.25  # initial upper limit of eta, eta_max in the paper (0.03 to 1)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    max_kl: Positive = 0.001  # limit of a step's predicted KL, delta (1e-4 to 0.01)
    v_max_kl: Positive = 0.01  # max_kl for the critic's Gaussian N(V, 1) (1e-4 to 0.01)
    momentum: Fraction = 0.9  # weight of earlier steps in the mean step (0 to 0.95)
    damping: Positive | None = None  # lambda, added to F; default 0.01, if discrete 0.1
    decay: Fraction = 0.95  # weight of the old X and S in their averages (0.9 to 0.99)
    inverse_every: int = 5  # updates between inversions of X_d and S_d (1 to 50)
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    lam: Fraction = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    vf_coef: float = 0.5  # weight of the value loss (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus, beta in the paper (0 to 0.05)
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, unless obs is an image
    std_init: Positive = 0.6  # initial sigma before tanh, if continuous (0.3 to 1)
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster


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


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = KFAC(agent)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, optimizer=optimizer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            agent.update_stats(rollout)  # last, so that `update` sees what `act` saw
            step += cfg.rollout_steps
            run.store(**metrics)  # the next row of the log averages them
            run.report(step, envs, lr=lr)  # if due: log, evaluate, save
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


def update(agent: Agent, optimizer: KFAC, rollout: Rollout, lr: float) -> dict:
    """Take one natural gradient step on the whole rollout. Return metrics."""
    obs = agent.normalize_obs(rollout.obs).flatten(0, 1)  # [T, N, ...] -> [TN, ...]
    act = rollout.act.flatten(0, 1)
    with torch.no_grad():  # log pi_old(a|s), fixed while pi moves away from pi_old
        logp_old = agent.policy(agent.encoder(obs)).log_prob(act)
    val, adv, ret = compute_targets(agent, rollout, obs)
    explained = explained_variance(val, ret)  # before the critic learns from `rollout`
    batch = Batch(obs=obs, act=act, adv=adv.flatten(), ret=ret.flatten())
    optimizer.measure(agent, obs)  # F, by samples of the current policy
    loss, metrics = a2c_loss(agent, batch)  # V again, now with its gradient
    optimizer.zero_grad()
    loss.backward()
    optimizer.average_grads()  # over processes
    step_sizes = optimizer.step(lr)
    kl = approx_kl(agent, obs, act, logp_old)
    return metrics | step_sizes | {
        "kl": kl, "val": val, "explained_variance": explained}


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


def a2c_loss(agent: Agent, batch: Batch) -> tuple[Scalar, dict]:
    """L = L_pi + vf_coef L_V - ent_coef H, one loss for actor and critic.

        L_pi   makes good actions more likely: see `policy_loss`
        L_V    = mean (V(s) - R)^2
        H      the entropy of pi, keeps it exploring: see `Agent.policy`
    """
    cfg = agent.cfg
    features = agent.encoder(batch.obs)
    pi = agent.policy(features)
    val = agent.value(features)
    logp = pi.log_prob(batch.act)
    pi_loss = policy_loss(logp, batch.adv)
    assert val.shape == batch.ret.shape  # [B] minus [B, 1] would be [B, B]
    v_loss = (val - batch.ret).square().mean()
    ent = pi.entropy().mean()
    loss = pi_loss + cfg.vf_coef * v_loss - cfg.ent_coef * ent
    return loss, {"pi_loss": pi_loss.detach(), "v_loss": v_loss.detach(),
                  "entropy": ent.detach()}


def policy_loss(logp: PerSample, adv: PerSample) -> Scalar:
    """L_pi = -mean log pi(a|s) A, where A is a constant."""
    # Its negative gradient, mean(grad log pi(a|s) A), estimates the policy gradient: an
    # action that was better than average becomes more likely, a worse one less.
    assert logp.shape == adv.shape
    return -(logp * adv).mean()


@torch.no_grad()
def approx_kl(agent: Agent, obs: Inputs, act: Shaped[Tensor, "B *act"],
              logp_old: PerSample) -> Scalar:
    """mean(ratio - 1 - log ratio), which estimates KL(pi_old || pi)."""
    log_ratio = agent.policy(agent.encoder(obs)).log_prob(act) - logp_old
    return (log_ratio.exp() - 1 - log_ratio).mean()


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1 - var(R - V) / var R. R contains V, which flatters V."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================== kfac ========================================
class KFAC(Optimizer):
    """Steps along the natural gradient F^-1 grad L.

    The network predicts p(y|s), where y is an action and a value. Let u be the gradient
    of -log p(y|s) in the weights, for a y sampled from p. F, the mean of u u^T, is the
    Hessian of the KL. K-FAC sets F to zero between layers: see `LayerFisher`.
    """

    def __init__(self, agent: Agent):
        super().__init__(agent)
        self.cfg = agent.cfg
        # F of a softmax nearly vanishes where pi is sure of its action, so that F^-1
        # amplifies noise more. F of a Gaussian, about 1 / sigma^2, does not vanish.
        self.damping = agent.cfg.damping or (0.1 if agent.discrete else 0.01)
        self.critic_params = list(agent.critic.parameters())  # the last of `params`
        self.policy_params = self.params[:-len(self.critic_params)]  # and the encoder's
        self.layers = [layer for layer in agent.modules()
                       if isinstance(layer, nn.Linear | nn.Conv2d)]
        self.fishers = nn.ModuleList(LayerFisher(layer.weight) for layer in self.layers)
        self.register_buffer("k", torch.zeros(()))  # updates so far
        self.register_buffer("M", torch.zeros_like(self.flat))  # the mean step

    def measure(self, agent: Agent, obs: Inputs) -> None:
        """Update all LayerFishers. Hooks keep the inputs and the outputs of layers."""
        hooks = [layer.register_forward_hook(fisher.on_forward)
                 for layer, fisher in zip(self.layers, self.fishers)]
        nll = sampled_nll(agent, obs)
        grads = torch.autograd.grad(nll, [fisher.out for fisher in self.fishers])
        self.k += 1
        every = self.cfg.inverse_every  # at first X and S change fast
        for hook, fisher, grad in zip(hooks, self.fishers, grads):
            hook.remove()
            fisher.out = None  # which holds the graph
            fisher.update(grad, w=max(1 - self.cfg.decay, 1 / self.k.item()))
            if self.k <= every or self.k % every == 0:
                fisher.invert(self.damping)

    @torch.no_grad()
    def step(self, lr: float) -> dict:
        """w <- w - M, where M <- momentum M + (1 - momentum) eta D. Return each eta.

        D is F^-1 grad L, layer by layer. log sigma is in no layer; its F is 2 I.
        """
        self.check_views()
        cfg = self.cfg
        D = {param: param.grad / (2 + self.damping) for param in self.params}
        for layer, fisher in zip(self.layers, self.fishers):
            D |= fisher.solve(layer)  # replaces all D but log sigma's
        eta = step_size(self.policy_params, D, lr, cfg.max_kl)
        v_eta = step_size(self.critic_params, D, lr, cfg.v_max_kl)
        steps = [eta * D[param] for param in self.policy_params]
        steps += [v_eta * D[param] for param in self.critic_params]
        self.M.lerp_(nn.utils.parameters_to_vector(steps), 1 - cfg.momentum)
        self.flat.sub_(self.M)
        return {"step_size": eta, "v_step_size": v_eta}


def sampled_nll(agent: Agent, obs: Inputs) -> Scalar:
    """-sum [log pi(a|s) + log N(v; V(s), 1)], where a ~ pi and v ~ N(V(s), 1).

    The critic predicts a Gaussian, so that it has a KL, too. F is a mean over p, so a
    and v are samples. Gradients of L would not measure KL: the actor's grow with the
    advantages, and the critic's vanish as V fits R.
    """
    features = agent.encoder(obs)
    pi = agent.policy(features)
    val = agent.value(features)
    logp = pi.log_prob(pi.sample())
    target = (val + torch.randn_like(val)).detach()  # samples are constants
    return (0.5 * (val - target).square() - logp).sum()  # no mean: e has no 1 / B


class LayerFisher(nn.Module):
    """The part of F that belongs to one layer, X kron S, and its damped inverse.

    The layer computes W x, where x ends in a constant 1 for the bias. Let e be the
    gradient of -log p(y|s) in W x. Its gradient in W is e x^T or, with columns stacked,
    u = x kron e, the Kronecker product. So u u^T is (x x^T) kron (e e^T). K-FAC treats
    x and e as independent. Then F is X kron S, where X is the mean of x x^T and S that
    of e e^T. A convolution applies W to P patches x per sample; otherwise P is 1.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        num_outputs, num_inputs = weight.flatten(1).shape
        for name, size in (("X", num_inputs + 1), ("S", num_outputs)):
            self.register_buffer(name, weight.new_zeros(size, size))
            self.register_buffer(name + "_inv", weight.new_zeros(size, size))

    def on_forward(self, layer: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        """Hook: keep x [B, P, num_inputs + 1], in the order of `weight.flatten(1)`."""
        x = inputs[0].detach().float()  # from bfloat16, with --bf16
        if isinstance(layer, nn.Conv2d):
            x = nn.functional.unfold(x, layer.kernel_size, layer.dilation,
                                     layer.padding, layer.stride)
        x = x.reshape(*x.shape[:2], -1).transpose(1, 2)  # [B, P, num_inputs]
        self.x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        self.out = out  # W x, [B, m] or [B, m, height, width]

    def update(self, grad_out: Tensor, w: float) -> None:
        """X <- (1 - w) X + w sum x x^T / B,  S <- (1 - w) S + w sum e e^T / (B P).

        A convolution's gradient is the sum of e x^T over its patches. If e of different
        patches are uncorrelated and alike (KFC, arXiv:1602.01407), F has a factor P,
        which X takes: its sum is not divided by P.
        """
        self.e = grad_out.float().reshape(*grad_out.shape[:2], -1).transpose(1, 2)
        B, P, _ = self.x.shape
        X_k = torch.einsum("bpi,bpj->ij", self.x, self.x) / B
        S_k = torch.einsum("bpi,bpj->ij", self.e, self.e) / (B * P)
        self.X.lerp_(mpi.average(X_k), w)  # over processes
        self.S.lerp_(mpi.average(S_k), w)

    def invert(self, damping: float) -> None:
        """Invert X_d = X + c sqrt(damping) I and S_d = S + sqrt(damping) / c I.

        Where F is small, F^-1 amplifies noise. So X_d kron S_d has at least damping I
        more than X kron S. c makes both additions equal relative to the mean diagonals.
        """
        size = self.S.diagonal().mean() + 1e-12  # S is 0 if every e is 0
        c = (self.X.diagonal().mean() / size).sqrt()
        root = math.sqrt(damping)
        X_d = self.X + c * root * torch.eye(len(self.X)).to(self.X)
        S_d = self.S + root / c * torch.eye(len(self.S)).to(self.S)
        self.X_inv.copy_(torch.linalg.inv(X_d))
        self.S_inv.copy_(torch.linalg.inv(S_d))

    def solve(self, layer: nn.Module) -> Parts:
        """D = S_d^-1 (grad L) X_d^-1: with columns stacked (X_d kron S_d)^-1 grad L.

        For (X kron S) G is S G X, and its inverse is X^-1 kron S^-1. Two inverses of
        about 64 x 64 replace one of 4160 x 4160, F of 64 x 65 weights and biases.
        """
        weight, bias = layer.weight, layer.bias
        grad = torch.cat([weight.grad.flatten(1), bias.grad.unsqueeze(1)], 1)
        D = self.S_inv @ grad @ self.X_inv
        return {weight: D[:, :-1].reshape(weight.shape), bias: D[:, -1]}


def step_size(params: list[nn.Parameter], D: Parts, lr: float, max_kl: float) -> Scalar:
    """eta = min(lr, sqrt(2 max_kl / sum(D * grad L))), for one trust region.

    With the damped F, F D is grad L. So a step eta D has a KL of about eta^2 sum(D *
    grad L) / 2 or, since damping counts in F, less. lr limits it where grad L is small.
    """
    product = sum((D[param] * param.grad).sum() for param in params)
    return (2 * max_kl / (product + 1e-30)).sqrt().clamp(max=lr)  # product may be 0


# ======================================= agent ========================================
class Agent(Policy):  # which adds predict(obs)
    """Actor, critic and running statistics: all that acting needs."""

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
        self.critic = mlp([*sizes, 1], nn.Tanh)
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
