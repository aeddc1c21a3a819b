"""Proximal Policy Optimization (PPO).  Schulman et al. 2017, arXiv:1707.06347.

The problem. A2C takes one gradient step per rollout and then discards it. The
policy gradient is an expectation under the current policy, but after one step
the data come from an older one, pi_old. PPO reuses the rollout. It weights the
advantage A of each action (how much better it was than the policy's average in
that state) by the probability ratio pi / pi_old. At pi = pi_old, the gradient
of mean(ratio A) is the policy gradient. Near pi_old, mean(ratio A) estimates,
up to a factor, how much better pi is. Far from pi_old it is unreliable, because
the states come from pi_old. So PPO's loss removes the incentive to go far.

The algorithm, and where each step is coded:

    repeat until total_steps:
        act for T steps in each of N environments              collect
        log pi_old of these actions, by (3)                    update
        repeat `epochs` times:
            V, advantages A and targets R, by (1) and (2)      compute_targets
            for each minibatch of the shuffled rollout:
                one Adam step on L, (11)                       ppo_loss
        update the statistics of (6) and (7)                   update_stats

PPO's own equations; c is `clip_ratio`. (1) to (8) follow further down.

    ratio   = pi(a | s) / pi_old(a | s)                                    (9)
    L_pi    = -mean min(ratio A, clip(ratio, 1 - c, 1 + c) A)             (10)
    L       = L_pi + vf_coef L_V - ent_coef H                             (11)
    KL      = mean (ratio - 1 - log ratio), estimates KL(pi_old || pi)    (12)

(12) is from Schulman's web page (2020). For one sample, (10) gives

    A > 0, ratio > 1 + c   no gradient: the probability has risen enough
    A < 0, ratio < 1 - c   no gradient: the probability has fallen enough
    all other cases        the full gradient, that of ratio A

Without the minimum, a ratio that moved the wrong way (A > 0, ratio < 1 - c)
would get no gradient either and could not recover. Clipping does not confine
ratios: all samples share one network, so others can push a ratio out of range.

Advantages. V(s) is the critic's estimate of the discounted sum of scaled
rewards from s on. s' follows s: at the end of an episode its last state, not
the first of the next. `terminated` is 1 if s' is terminal, `done` if the
episode ended, also by a time limit. Unless s' is terminal, we bootstrap: V(s')
stands in for later rewards, even at a time limit. (1) and (2), with scaled
rewards r, are generalized advantage estimation (GAE; Schulman et al. 2016,
arXiv:1506.02438). `lam` trades bias for variance: 0 uses one reward and then
V(s'); 1 uses all rewards until the episode or the rollout ends, and then V(s').
The critic fits R. In (6) and (7), mean and var are those of earlier rollouts
(at first 0 and 1).

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t = delta_t + gamma lam (1 - done_t) A_{t+1},  R_t = A_t + V(s_t)    (2)
    log pi  = log softmax(logits)_a, or sum_i log N(a_i; mu_i(s), sigma_i) (3)
    H       = entropy of pi(. | s) before tanh, averaged over the batch    (4)
    L_V     = mean (V(s) - R)^2                                            (5)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}, for raw rewards r,
    rew    <- clip(rew / sqrt(var(G) + 1e-8), -10, 10)                     (7)
    A      <- (A - mean A) / (std A + 1e-8), per minibatch                 (8)

Gaussian actions (means mu(s), the same sigma in all states) are squashed by
tanh and rescaled only for the environment (`env_act`). `act`, (3) and (4) are
about the action before tanh, whose Jacobian cancels in (9).

Departures from the paper. Actions are squashed by tanh; targets and advantages
are recomputed in every epoch (benchmarks/NOTES.md, "Variants on MuJoCo"). These
details, mostly from OpenAI Baselines (Huang et al. 2022), can be switched off:
norm_obs (6), scale_rew (7), norm_adv (8), max_grad_norm, anneal_lr,
orthogonal_init. Only norm_obs clearly helped (benchmarks/README.md, ablation).

Defaults: T = 256, N = 8; 10 epochs of 32 minibatches are 320 gradient steps. In
healthy runs `kl` after the last epoch is 0.0005 to 0.05, and `clip_frac`, the
fraction of ratios out of range, 0.002 to 0.3; with anneal_lr both end near 0.

Read after    algos/a2c.py, then:  diff algos/a2c.py algos/ppo.py
Try           python -m algos.ppo --env CartPole-v1 --total-steps 1e5
Reproduce     python -m algos.ppo    (learning curves: benchmarks/README.md)
"""

import math
from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn

# mpi.Adam          `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One Adam step; its gradient is averaged over processes, clipped if
#                   max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.moments       count, mean and variance along dim 0, over all processes (float64)
# mpi.RunningStats  running mean and var of all rows that `update` got, in all processes
# image_to_float    uint8 pixels -> float32 in [0, 1], channels first
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# nature_cnn        the CNN of Mnih et al. 2015, with 512 outputs after a ReLU
# stack_steps       T dicts -> one dict of [T, N, ...]; bools and floats become float32
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import image_to_float, is_image, make_envs, nature_cnn, stack_steps
from utils.run import Run, RunConfig, check_divides, check_settings, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits (discrete) or k means (continuous)
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds env, seed, run_dir, device, ...: see --help
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 2048  # T x N, samples per rollout: T steps in each of N envs
    minibatch_size: int = 64  # samples per gradient step (32 to 4096)
    epochs: int = 10  # passes over each rollout (3 to 20)
    lr: float = 3e-4  # Adam's initial learning rate (1e-5 to 1e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    clip_ratio: float = 0.2  # c in Eq. (10), epsilon in PPO's paper (0.1 to 0.3)
    target_kl: float = 0.0  # stop the epochs once KL, Eq. (12), exceeds this; 0: off
    vf_coef: float = 0.25  # weight of the value loss, c1 in PPO's paper (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 in PPO's paper (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, for vector observations
    std_init: float = 1.0  # initial sigma of continuous actions, before tanh (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (6)
    scale_rew: bool = True  # divide rewards by the standard deviation of G, Eq. (7)
    norm_adv: bool = True  # normalise advantages per minibatch, Eq. (8)
    orthogonal_init: bool = True  # orthogonal initial weights; else PyTorch's default

    def __post_init__(self):
        check_settings(self, positive="clip_ratio")  # raises UsageError
        check_divides(self, "rollout_steps/num_envs rollout_steps/minibatch_size")


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
class Minibatch:
    obs: Float32[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]
    logp_old: PerSample
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


def normalize_advantages(adv: Float32[Tensor, "M B"]) -> Float32[Tensor, "M B"]:
    """Eq. (8) for all M minibatches at once, over the samples of all processes."""
    _, mean, var = mpi.moments(adv.T)
    return ((adv - mean[:, None]) / (var.sqrt()[:, None] + 1e-8)).float()


def clipped_policy_loss(logp: PerSample, logp_old: PerSample, adv: PerSample,
                        clip_ratio: float) -> Scalar:
    """Eqs. (9), (10). With the minimum, the objective is at most mean(ratio A)."""
    assert logp.shape == logp_old.shape == adv.shape
    ratio = (logp - logp_old).exp()  # Eq. (9)
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.min(ratio * adv, clipped * adv).mean()  # Eq. (10)


def approx_kl(logp: PerSample, logp_old: PerSample) -> PerSample:
    """Eq. (12) before the mean. Unlike -log ratio, it is never negative."""
    log_ratio = logp - logp_old
    return log_ratio.exp() - 1 - log_ratio


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1: `val` is R up to a constant. 0: no better than a constant. Below 0: worse."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= update =======================================
def ppo_loss(agent: Agent, minibatch: Minibatch) -> tuple[Scalar, dict]:
    """Eq. (11). `update` computes advantages and targets without gradients."""
    cfg = agent.cfg
    actor_out, val = agent(minibatch.obs)
    logp = log_prob(actor_out, agent.log_std, minibatch.act)
    pi_loss = clipped_policy_loss(
        logp, minibatch.logp_old, minibatch.adv, cfg.clip_ratio)  # Eq. (10)
    v_loss = value_loss(val, minibatch.ret)
    ent = entropy(actor_out, agent.log_std)
    loss = pi_loss + cfg.vf_coef * v_loss - cfg.ent_coef * ent  # Eq. (11)
    return loss, {"pi_loss": pi_loss, "v_loss": v_loss, "entropy": ent}


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


def policy_change(agent: Agent, obs: Float32[Tensor, "B *obs"],
                  act: Shaped[Tensor, "B *act"], logp_old: PerSample) -> dict:
    """Compare pi with pi_old: KL, Eq. (12), and the share of ratios out of range."""
    logp = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)
    _, kl, _ = mpi.moments(approx_kl(logp, logp_old))  # mean over all processes
    ratio = (logp - logp_old).exp()
    clip_frac = ((ratio - 1).abs() > agent.cfg.clip_ratio).float().mean()
    return {"kl": kl, "clip_frac": clip_frac}


@torch.no_grad()  # `minimize` enables gradients for its loss
def update(agent: Agent, optimizer: mpi.Adam, rollout: Rollout, lr: float) -> dict:
    """Run the epochs on one rollout. Return metrics; `run.report` averages each."""
    cfg = agent.cfg
    rollout = normalize_rollout(agent, rollout)
    obs = rollout.obs.flatten(0, 1)  # [T, N, ...] -> [B, ...]
    act = rollout.act.flatten(0, 1)
    logp_old = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)  # pi_old
    num_minibatches = cfg.rollout_steps // cfg.minibatch_size
    step_metrics = []  # of each gradient step: the losses and the gradient norm
    for epoch in range(cfg.epochs):
        val, adv, ret = compute_targets(agent, rollout)  # by the current critic
        if epoch == 0:  # before the critic has learned from this rollout
            explained = explained_variance(val, ret)
            critic_metrics = {"val": val, "explained_variance": explained}
        minibatches = torch.randperm(len(obs)).view(num_minibatches, -1)  # [M, B]
        advs = adv.flatten()[minibatches]
        if cfg.norm_adv:
            advs = normalize_advantages(advs)
        ret = ret.flatten()  # obs[minibatches] is [M, B, ...]
        for minibatch in map(Minibatch, obs[minibatches], act[minibatches],
                             logp_old[minibatches], advs, ret[minibatches]):  # by row
            step_metrics.append(optimizer.minimize(
                ppo_loss, agent, minibatch, lr=lr, max_grad_norm=cfg.max_grad_norm))
        if cfg.target_kl > 0:
            change = policy_change(agent, obs, act, logp_old)
            if change["kl"] > cfg.target_kl:
                break
    metrics = {}
    for name in step_metrics[0]:
        metrics[name] = torch.stack([step[name] for step in step_metrics])
    metrics |= policy_change(agent, obs, act, logp_old)
    return metrics | {"epochs": epoch + 1, "lr": lr} | critic_metrics


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    """Train until `total_steps`, from the start or from a checkpoint."""
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of the resumed run
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
