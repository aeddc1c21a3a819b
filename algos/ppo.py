"""Proximal Policy Optimization (PPO).  Schulman et al. 2017, arXiv:1707.06347.

The problem. The policy gradient is an expectation under the current policy,
so strictly a batch of data is good for one gradient step. PPO takes many. Its
loss compares the new policy with the one that collected the data, and stops
rewarding a change of an action's probability once the change is large enough.

Notation, as in algos/vpg.py. V is the critic. s' is the state that the action
led to, never the first state of the next episode. `terminated` means that the
task has ended, `done` that the episode has, by termination or a time limit.
At a time limit we bootstrap from V(s'). The advantage A says how much better
an action was than the policy's average in that state. lambda trades bias for
variance: lam = 0 uses one reward and then V, lam = 1 all rewards of the
rollout. (1), (2) are GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t = delta_t + gamma lam (1 - done_t) A_{t+1},  R_t = A_t + V(s_t)    (2)
    log pi  = log softmax, or the sum of log N(a_i; mu_i(s), sigma_i)      (3)
    H       = entropy of pi(. | s), averaged over the batch                (4)
    L_V     = mean (V(s) - R)^2                                            (5)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}, a sum of past rewards;
              rew <- clip(rew / sqrt(var(G) + 1e-8), -10, 10)              (7)
    A      <- (A - mean A) / (std A + 1e-8), per minibatch                 (8)

PPO itself. pi_old is the policy that acted, c is `clip_ratio`:

    ratio   = pi(a | s) / pi_old(a | s)                                    (9)
    L_pi    = -mean min(ratio A, clip(ratio, 1 - c, 1 + c) A)             (10)
    L       = L_pi + vf_coef L_V - ent_coef H                             (11)
    KL      = mean (ratio - 1 - log ratio), estimates KL(pi_old || pi)    (12)

ratio A is importance sampling: its gradient at pi = pi_old is the policy
gradient, and its mean estimates how much better pi is than pi_old. The
estimate fails far from pi_old, hence the clipping. Its effect on a sample:

    A > 0, ratio > 1 + c   already much likelier: no gradient
    A < 0, ratio < 1 - c   already much less likely: no gradient
    A > 0, ratio < 1 - c   moved the wrong way: not clipped
    A < 0, ratio > 1 + c   moved the wrong way: not clipped

So clipping removes the incentive to leave [1 - c, 1 + c]. It does not prevent
leaving: all samples share one network, so the gradients of other samples can
push a clipped one further. Neither ratio nor KL is bounded. Watch `kl` and
`clip_frac`, the share of samples outside, or set `target_kl`.

The first ratio must be exactly 1, so the statistics of (6) and (7) stay
frozen until the update ends. G sets only a scale: it keeps value targets near
1 in every environment. A mean is not subtracted, since that would change which
rewards are good. On vector observations actor and critic share no weights, and
Adam is nearly invariant to gradient scale, so `vf_coef` matters almost only
through the joint clipping of the gradient norm.

Details that matter can each be switched off: norm_obs (6), scale_rew (7),
norm_adv (8), max_grad_norm, anneal_lr, orthogonal_init. Most come from OpenAI
Baselines, not from the paper. Engstrom et al. 2020 (arXiv:2005.12729),
Andrychowicz et al. 2021 (arXiv:2006.05990) and "The 37 Implementation Details
of PPO" (Huang et al. 2022) study them. (12) is due to Schulman (2020).

Departures from the paper. Advantages and value targets are recomputed every
epoch with the current critic, as Andrychowicz et al. advise (see "Variants on
MuJoCo" in benchmarks/NOTES.md). tanh maps a Gaussian action into the bounds
of the environment. Its Jacobian is the same for both policies and cancels in
(9). The entropy is that of the Gaussian. The value loss is not clipped.

Default sizes: 256 steps in each of 8 environments give 2,048 samples; 10
epochs of 32 minibatches of 64 are 320 gradient steps. In a healthy run `kl`
is 0.005 to 0.05 and `clip_frac` 0.05 to 0.3 at the end of an update,
`explained_variance` rises towards 1 and `entropy` falls.

Read after    algos/a2c.py:  diff algos/a2c.py algos/ppo.py
Try           python -m algos.ppo --env CartPole-v1 --total-steps 1e5
Reproduce     python -m algos.ppo    (learning curves: benchmarks/README.md)
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
from utils.envs import image_to_float, is_image, make_envs, nature_cnn, stack_steps
from utils.run import Run, RunConfig, check_divides, check_settings, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits, or the means of k action dimensions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # which adds env, seed, run_dir, device, ...: see --help
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 2048  # T x N, samples per rollout over all environments
    minibatch_size: int = 64  # samples per gradient step (32 to 4096)
    epochs: int = 10  # passes over each rollout (3 to 20)
    lr: float = 3e-4  # Adam's learning rate at the start (1e-5 to 1e-3)
    anneal_lr: bool = True  # decrease the learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.95  # GAE's lambda: low is biased, high is noisy (0.9 to 1)
    clip_ratio: float = 0.2  # clipping range, epsilon in the paper (0.1 to 0.3)
    target_kl: float = 0.0  # stop after an epoch with more KL, Eq. (12); 0 disables
    vf_coef: float = 0.25  # weight of the value loss, c1 in the paper (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 in the paper (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0 disables clipping
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, for vector observations
    std_init: float = 1.0  # initial sigma of continuous actions, before tanh (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (6)
    scale_rew: bool = True  # divide rewards by the standard deviation of G, Eq. (7)
    norm_adv: bool = True  # normalise advantages per minibatch, Eq. (8)
    orthogonal_init: bool = True  # orthogonal initial weights, else PyTorch's default

    def __post_init__(self):
        check_settings(self, positive="clip_ratio")  # refuses values out of range
        check_divides(self, "rollout_steps/num_envs rollout_steps/minibatch_size")


# ======================================= agent ========================================
def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with tanh between them, and none at the end."""
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def init_orthogonal(agent: nn.Module) -> None:
    """The actor's small last layer makes the first policy similar in all states."""
    for layer in agent.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
            nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(agent.actor[-1].weight, gain=0.01)
    nn.init.orthogonal_(agent.critic[-1].weight, gain=1.0)


class RunningStats(nn.Module):
    """Mean and variance of all rows so far, over all processes, in float64."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def update(self, rows: Float32[Tensor, "B *shape"]) -> None:
        """Merge the moments of new rows into those so far (Chan et al. 1979)."""
        count, mean, var = mpi.moments(rows)  # of the rows of all processes
        self.count += count
        weight = count / self.count
        delta = mean - self.mean
        between_var = weight * (1 - weight) * delta**2
        self.var.copy_((1 - weight) * self.var + weight * var + between_var)
        self.mean += weight * delta


class Agent(nn.Module):
    """Actor, critic and running statistics. The state dict holds all of them."""

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
            self.encoder = nature_cnn(obs_space)  # shared; it has 512 features
            sizes = (512,)
        else:
            self.encoder = nn.Identity()
            sizes = (*obs_space.shape, *cfg.hidden)
        self.actor = mlp(*sizes, num_outputs)
        self.critic = mlp(*sizes, 1)
        if cfg.orthogonal_init:
            init_orthogonal(self)
        self.obs_stats = RunningStats(obs_space.shape)
        self.reward_sum_stats = RunningStats(())
        self.discounted_reward_sum = torch.zeros(())  # last G, [N] once it is known

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
        """Raw observations [N, ...] -> actions [N] or [N, d], before tanh."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        actor_out = self.actor(self.encoder(self.normalize_obs(obs)))
        if deterministic:
            return actor_out.argmax(-1) if self.discrete else actor_out
        if self.discrete:
            return actor_out.softmax(-1).multinomial(1).squeeze(-1)
        return actor_out + self.log_std.exp() * torch.randn_like(actor_out)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`: continuous ones by tanh, then to the bounds."""
        if self.discrete:
            return act.cpu().numpy()
        squashed = act.tanh().view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, (squashed + 1) / 2).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw observation -> the deterministic action, for use after training."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]

    def update_stats(self, rollout: "Rollout") -> None:
        """Update the running statistics. Called after `update`, which needs the old."""
        last = self.discounted_reward_sum
        sums = discounted_reward_sums(rollout, last, self.cfg.gamma)
        self.discounted_reward_sum = sums[-1] * (1 - rollout.done[-1])
        self.reward_sum_stats.update(sums.flatten())
        if not self.images:
            self.obs_stats.update(rollout.obs.flatten(0, 1))


# ======================================== data ========================================
@dataclass(frozen=True)
class Rollout:
    obs: Shaped[Tensor, "T N *obs"]
    act: Shaped[Tensor, "T N *act"]
    rew: PerStep
    next_obs: Shaped[Tensor, "T N *obs"]  # of s', where the action led
    terminated: PerStep  # 1 or 0
    done: PerStep  # 1 or 0


@dataclass(frozen=True)
class Minibatch:
    obs: Float32[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]
    logp_old: PerSample
    adv: PerSample
    ret: PerSample


def true_next_obs(next_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Observations of s', [N, ...].

    `make_envs` restarts an environment in the step that ends its episode. `next_obs`
    then belongs to the next episode, and `infos` has the last one of this episode.
    """
    next_obs = next_obs.copy()
    for i in np.flatnonzero(done):
        next_obs[i] = infos["final_obs"][i]
    return next_obs


def collect(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray,
            num_steps: int) -> tuple[Rollout, np.ndarray]:
    """Act for T = num_steps steps from `obs` on -> the rollout and the next obs."""
    steps = []
    for _ in range(num_steps):
        act = agent.act(obs)
        next_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
        done = terminated | truncated
        steps.append({
            "obs": obs, "act": act.cpu().numpy(), "rew": rew,
            "next_obs": true_next_obs(next_obs, done, infos),
            "terminated": terminated, "done": done})
        obs = next_obs
    return Rollout(**stack_steps(steps, act.device)), obs


# ==================================== mathematics =====================================
def standardize(value: Tensor, mean: Tensor | float, var: Tensor) -> Tensor:
    """Eqs. (6), (7). Clipped, since a variance of few samples can be far too small."""
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
    """GAE -> advantages A, value targets R. Any end of an episode stops the sum."""
    delta = rollout.rew + gamma * (1 - rollout.terminated) * next_val - val  # Eq. (1)
    decay = gamma * lam * (1 - rollout.done)
    delta, decay = delta.cpu().numpy(), decay.cpu().numpy()  # a loop in NumPy is faster
    adv = np.zeros_like(delta)
    next_adv = np.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        adv[t] = delta[t] + decay[t] * next_adv  # Eq. (2)
        next_adv = adv[t]
    adv = torch.as_tensor(adv, device=val.device)
    return adv, adv + val


def log_prob(actor_out: ActorOut, log_std: Tensor | None, act: Tensor) -> PerSample:
    """Eq. (3), of discrete actions [B] or of continuous ones [B, k] before tanh."""
    if log_std is None:
        return actor_out.log_softmax(-1).gather(-1, act.unsqueeze(-1)).squeeze(-1)
    z = (act - actor_out) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy(actor_out: ActorOut, log_std: Tensor | None) -> Scalar:
    """Eq. (4) in nats; of continuous actions before tanh."""
    if log_std is None:
        return -(actor_out.softmax(-1) * actor_out.log_softmax(-1)).sum(-1).mean()
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def value_loss(val: PerSample, ret: PerSample) -> Scalar:
    assert val.shape == ret.shape  # [B] minus [B, 1] would be [B, B]
    return nn.functional.mse_loss(val, ret)  # Eq. (5)


def normalize_advantages(adv: Float32[Tensor, "M B"]) -> Float32[Tensor, "M B"]:
    """Eq. (8) for M minibatches, each with its share of samples in other processes."""
    _, mean, var = mpi.moments(adv.T)
    return ((adv - mean[:, None]) / (var.sqrt()[:, None] + 1e-8)).float()


def clipped_policy_loss(logp: PerSample, logp_old: PerSample, adv: PerSample,
                        clip_ratio: float) -> Scalar:
    """Eqs. (9), (10). The minimum can cap a gain but never hides a loss."""
    assert logp.shape == logp_old.shape == adv.shape
    ratio = (logp - logp_old).exp()  # Eq. (9)
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.min(ratio * adv, clipped * adv).mean()  # Eq. (10)


def approx_kl(logp: PerSample, logp_old: PerSample) -> PerSample:
    """Eq. (12) before the mean. Unlike -log ratio, it is never negative."""
    log_ratio = logp - logp_old
    return log_ratio.exp() - 1 - log_ratio


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1 if V predicts its targets up to a constant, 0 or less if V is of no use."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= update =======================================
def ppo_loss(agent: Agent, minibatch: Minibatch) -> tuple[Scalar, dict]:
    """Eq. (11). No gradient flows through advantages and value targets."""
    cfg = agent.cfg
    actor_out, val = agent(minibatch.obs)
    logp = log_prob(actor_out, agent.log_std, minibatch.act)
    pi_loss = clipped_policy_loss(
        logp, minibatch.logp_old, minibatch.adv, cfg.clip_ratio)
    v_loss = value_loss(val, minibatch.ret)
    bonus = entropy(actor_out, agent.log_std)
    loss = pi_loss + cfg.vf_coef * v_loss
    if cfg.ent_coef > 0:
        loss = loss - cfg.ent_coef * bonus  # Eq. (11)
    return loss, {"pi_loss": pi_loss, "v_loss": v_loss, "entropy": bonus}


def compute_targets(agent: Agent, rollout: Rollout) -> tuple[PerStep, PerStep, PerStep]:
    """Values, advantages and value targets by the current critic."""
    val = agent.critic(agent.encoder(rollout.obs.flatten(0, 1))).view_as(rollout.rew)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # s' is the next row's s, ...
    ends = rollout.done.bool()
    ends[-1] = True  # ... unless the episode or the rollout ends
    next_val[ends] = agent.critic(agent.encoder(rollout.next_obs[ends])).squeeze(-1)
    cfg = agent.cfg
    return val, *compute_advantages(rollout, val, next_val, cfg.gamma, cfg.lam)


@torch.no_grad()  # gradients are computed inside `minimize` only
def update(agent: Agent, optimizer: mpi.Adam, rollout: Rollout, lr: float) -> dict:
    """Learn from one rollout -> metrics, which the report averages.

    `minimize` computes the gradient of a loss, averages it over processes, clips its
    norm and takes one Adam step.
    """
    cfg = agent.cfg
    rew = rollout.rew
    if cfg.scale_rew:
        rew = standardize(rew, 0.0, agent.reward_sum_stats.var)  # Eq. (7)
    obs = agent.normalize_obs(rollout.obs)
    next_obs = agent.normalize_obs(rollout.next_obs)
    rollout = replace(rollout, obs=obs, rew=rew, next_obs=next_obs)
    obs = obs.flatten(0, 1)  # [T, N, ...] -> [B, ...]
    act = rollout.act.flatten(0, 1)
    # pi_old is still the current policy, and one batch is cheaper than step by step.
    logp_old = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)
    val, adv, ret = compute_targets(agent, rollout)
    critic_metrics = {"val": val, "explained_variance": explained_variance(val, ret)}
    num_minibatches = cfg.rollout_steps // cfg.minibatch_size
    steps = []  # metrics of each gradient step: the losses and the gradient norm
    for epoch in range(cfg.epochs):
        indices = torch.randperm(len(obs)).view(num_minibatches, -1)
        adv = adv.flatten()[indices]
        ret = ret.flatten()[indices]
        if cfg.norm_adv:
            adv = normalize_advantages(adv)
        for m, rows in enumerate(indices):
            minibatch = Minibatch(obs[rows], act[rows], logp_old[rows], adv[m], ret[m])
            steps.append(optimizer.minimize(
                ppo_loss, agent, minibatch, lr=lr, max_grad_norm=cfg.max_grad_norm))
        if cfg.target_kl > 0 or epoch == cfg.epochs - 1:  # costs a pass over the batch
            logp = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)
            _, kl, _ = mpi.moments(approx_kl(logp, logp_old))  # over all processes
            if cfg.target_kl > 0 and kl > cfg.target_kl:
                break
        _, adv, ret = compute_targets(agent, rollout)  # the critic has moved
    metrics = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    ratio = (logp - logp_old).exp()
    clip_frac = ((ratio - 1).abs() > cfg.clip_ratio).float().mean()
    metrics |= {"kl": kl, "clip_frac": clip_frac, "epochs": epoch + 1, "lr": lr}
    return metrics | critic_metrics


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    """Train until `total_steps`, or resume, and return the agent."""
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of that run
        envs = make_envs(cfg, run.num_envs)  # this process's share of cfg.num_envs
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = mpi.Adam(agent, eps=1e-5)  # OpenAI Baselines' eps
        step = run.restore(agent, optimizer=optimizer)  # 0, or where the run stopped
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            agent.update_stats(rollout)
            step += cfg.rollout_steps
            run.report(step, envs, **metrics)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
