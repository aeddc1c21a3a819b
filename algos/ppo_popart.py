"""PPO with normalised value targets (PopArt).  PopArt: van Hasselt et al. 2016,
arXiv:1602.07714; in actor-critics: Hessel et al. 2019, arXiv:1809.04474.

The problem. The critic's targets R may be near 0.01 in one task and 10,000 in
another. Networks learn best from targets with mean 0 and standard deviation 1.
So algos/ppo.py divides rewards by a running standard deviation. When it
changes, all values learned so far are off by a factor. PopArt normalises R
instead, by its running mean and standard deviation (Art: adaptively rescaling
targets). When these change, it adapts the last layer to keep V(s) in all states
(Pop: preserving outputs precisely). So rewards may have any unit.

The algorithm, and where each step is coded:

    repeat: act for T steps in each of N environments      collect
        repeat `epochs` times:                             update
            V, advantages A and targets R, by (1) and (2)  compute_targets
            in the first epoch, (13) and then (14)         critic.update_stats
            A by (15), in `update`; R normalised as in (5) critic.normalize
            for each minibatch of a random partition:
                one Adam step on L, (11)                   ppo_loss
        update the statistics of (6)                       agent.update_stats

PopArt's own equations. n(s) = w . h(s) + b, where h is the last hidden layer:

    V(s)    = loc + scale n(s)                                             (7)
    L_V     = mean (n(s) - (R - loc) / scale)^2                            (5)
    loc    <- (1 - u) loc + u mean R,  square <- (1 - u) square + u mean R^2,
    scale  <- sqrt(square - loc^2), at least 1e-6                         (13)
    w      <- w scale_old / scale,
    b      <- (scale_old b + loc_old - loc) / scale                       (14)
    A      <- A / scale, before (8)                                       (15)

(14) keeps loc + scale b and scale w, and so V. Rollout k has weight u =
max(popart_beta, 1/k), so the average of all rollouts turns into a moving one,
which forgets old policies. (15) removes the unit of rewards from A. With
norm_adv on, (8) does so too.

The rest is algos/ppo.py without reward scaling: r is raw. `terminated` is 1 if
the next state s' is terminal, `done` also at a time limit. pi_old is the policy
that acted. mean and var are those of earlier rollouts; c is `clip_ratio`.

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t = delta_t + gamma lam (1 - done_t) A_{t+1},  R_t = A_t + V(s_t)    (2)
    log pi  = log softmax(logits)_a, or sum_i log N(a_i; mu_i(s), sigma_i) (3)
    H       = entropy of pi(. | s) before tanh, averaged over the batch    (4)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    A      <- (A - mean A) / (std A + 1e-8), per minibatch                 (8)
    ratio   = pi(a | s) / pi_old(a | s)                                    (9)
    L_pi    = -mean min(ratio A, clip(ratio, 1 - c, 1 + c) A)             (10)
    L       = L_pi + vf_coef L_V - ent_coef H                             (11)
    KL      = mean (ratio - 1 - log ratio), estimates KL(pi_old || pi)    (12)

Departures, besides those of algos/ppo.py. loc and scale change per rollout (by
the R of its first epoch), not per gradient step. The first change skips (14).

Defaults: as in algos/ppo.py. `v_loss` is mostly below 1, but may reach 1 / u.

Read after    algos/ppo.py, then:  diff algos/ppo.py algos/ppo_popart.py
Try           python -m algos.ppo_popart --env CartPole-v1 --total-steps 1e5
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
    popart_beta: float = 0.1  # least weight u in Eq. (13); 0: equal weights (0 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (6)
    norm_adv: bool = True  # normalise advantages per minibatch, Eq. (8)
    orthogonal_init: bool = True  # orthogonal initial weights (critic's last layer: 0)


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


class PopArtCritic(nn.Module):
    """The critic: calling it returns V(s), `net` returns n(s). Holds loc and scale."""

    def __init__(self, sizes: tuple[int, ...], beta: float):
        super().__init__()
        self.net = mlp(*sizes, 1)
        self.beta = beta
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))  # rollouts
        self.register_buffer("loc", torch.zeros((), dtype=torch.float64))  # mean of R
        self.register_buffer("square", torch.ones((), dtype=torch.float64))  # of R^2

    def forward(self, features: Tensor) -> Float32[Tensor, "B 1"]:
        """V in units of reward, Eq. (7)."""
        return self.loc + self.scale() * self.net(features)

    def scale(self) -> Tensor:
        return (self.square - self.loc**2).clamp(min=1e-12).sqrt()  # at least 1e-6

    def normalize(self, ret: PerSample) -> PerSample:
        """R -> the targets of n(s), Eq. (5)."""
        return (ret - self.loc) / self.scale()

    def update_stats(self, ret: PerSample) -> None:
        """Update loc and scale. After the first call, rescale the last layer too."""
        loc_old = self.loc.clone()  # a copy: copy_ overwrites self.loc in place
        scale_old = self.scale()
        _, mean, var = mpi.moments(ret)  # over all processes
        self.count += 1
        u = (1 / self.count).clamp(min=self.beta)  # count is k
        self.loc.copy_((1 - u) * self.loc + u * mean)  # Eq. (13)
        self.square.copy_((1 - u) * self.square + u * (var + mean**2))  # mean R^2
        if self.count > 1:  # the initial V = 0 is not worth preserving
            w, b = self.net[-1].weight, self.net[-1].bias
            w.copy_(w * scale_old / self.scale())  # Eq. (14), under no_grad
            b.copy_((scale_old * b + (loc_old - self.loc)) / self.scale())


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
        self.critic = PopArtCritic(sizes, cfg.popart_beta)
        if cfg.orthogonal_init:
            init_orthogonal(self)
        for param in self.critic.net[-1].parameters():
            nn.init.zeros_(param)  # V = 0 at first, whatever the scale of rewards
        self.obs_stats = mpi.RunningStats(obs_space.shape)

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> network inputs: pixels in [0, 1] or Eq. (6)."""
        if self.images:
            return image_to_float(obs)
        if not self.cfg.norm_obs:
            return obs.float()
        return standardize(obs.float(), self.obs_stats.mean, self.obs_stats.var)

    def forward(self, obs: Tensor) -> tuple[ActorOut, PerSample]:
        """Normalised observations [B, ...] -> actor's outputs, n(s) (not V(s))."""
        features = self.encoder(obs)
        return self.actor(features), self.critic.net(features).squeeze(-1)

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
        """Update the statistics of (6), once `update` no longer needs the old ones."""
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
    return ((value - mean) / torch.sqrt(var + 1e-8)).clamp(-10, 10).float()


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
            agent.critic.update_stats(ret.flatten())  # Eqs. (13), (14)
            critic_metrics["val_scale"] = agent.critic.scale()
        minibatches = torch.randperm(len(obs)).view(num_minibatches, -1)  # [M, B]
        advs = adv.flatten()[minibatches] / agent.critic.scale()  # Eq. (15)
        if cfg.norm_adv:
            advs = normalize_advantages(advs)
        ret = agent.critic.normalize(ret.flatten())
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
