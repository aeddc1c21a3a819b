"""Generative adversarial imitation learning (GAIL).  Ho & Ermon 2016,
arXiv:1606.03476.

The problem. We are given an expert's observations s and actions a, but no
rewards. In behavioural cloning (algos/bc.py) mistakes compound: each can lead
to states that the expert never visited. GAIL trains the policy until it visits
each pair (s, a) as often as the expert does. Then both have the same mean
return, whatever the rewards: a return sums visits times reward over all pairs.
The discriminator D(s, a) estimates the probability that a pair is the expert's,
not the policy's. PPO trains the policy on a reward that grows with D. The
environment's rewards train nothing; the log has their sum, `ep_ret`.

The algorithm, and where each step is coded:

    repeat until total_steps:
        act for T steps in each of N environments              collect
        `disc_epochs` times, for each minibatch B of pairs:    update_disc
            draw expert pairs E; one Adam step on (13)         disc_loss
        replace all rewards by (14), with the new D            imitation_reward
        `epochs` times: new A, R; Adam on (11) by minibatch    update, ppo_loss
        update the statistics of (6) and (7)                   update_stats

GAIL's own equations. PPO's, (1) to (12), follow further down.

    L_D     = -mean_E log D - mean_B log(1 - D),  D = sigmoid(logit)      (13)
    r       = -log(1 - D(s, a)),  or log D(s, a)                          (14)

Let p_E and p_B be the probabilities (or densities) of a pair under expert and
policy. A pair adds -p_E log D - p_B log(1 - D) to the mean of (13), which is
least at D = p_E / (p_E + p_B). So r is high where the policy visits too rarely.
Use --stochastic to record: D could tell a noiseless expert from a noisy policy.

The sign of r. -log(1 - D) is positive, so long episodes pay even if the policy
imitates badly (survival bias; Kostrikov et al. 2019). Where success ends the
episode (MountainCar, Acrobot), it pays to avoid success. There Ho & Ermon use
log D (`--no-positive-rew`). It is negative, so early ends pay, even failures.

PPO's equations (see algos/ppo.py). r is (14): unscaled in G of (7), scaled by
(7) in (1). In (3), a is before tanh; D gets it after tanh, or one-hot. `done`
is 1 also at a time limit, `terminated` only if s' is terminal. R is V's target.

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t = delta_t + gamma lam (1 - done_t) A_{t+1},  R_t = A_t + V(s_t)    (2)
    log pi  = log softmax(logits)_a, or sum_i log N(a_i; mu_i(s), sigma_i) (3)
    H       = entropy of pi(. | s) before tanh, averaged over the batch    (4)
    L_V     = mean (V(s) - R)^2                                            (5)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}, for raw rewards r,
    rew    <- clip(rew / sqrt(var(G) + 1e-8), -10, 10)                     (7)
    A      <- (A - mean A) / (std A + 1e-8), per minibatch                 (8)
    ratio   = pi(a | s) / pi_old(a | s)                                    (9)
    L_pi    = -mean min(ratio A, clip(ratio, 1 - c, 1 + c) A)             (10)
    L       = L_pi + vf_coef L_V - ent_coef H                             (11)
    KL      = mean (ratio - 1 - log ratio), estimates KL(pi_old || pi)    (12)

Departures, besides PPO's. The paper uses TRPO and one step on D per rollout.
Its D is our 1 - D, so its cost is minus our positive r; its lambda is ent_coef.

Defaults: as in algos/ppo.py; D takes 32 steps per rollout, on 64 pairs of each
kind. `d_expert` and `d_policy`, the mean D of each kind, leave 1/2 as D learns,
then approach it. If the policy's is near 0, so is -log(1 - D): lower `disc_lr`.

Read after    algos/ppo.py, then:  diff algos/ppo.py algos/gail.py
Record and try (quick; benchmarks/README.md, "Imitation", has harder tasks):
    python -m algos.ppo --env CartPole-v1 --total-steps 5e4
    python -m utils.play runs/CartPole-v1/ppo/seed1 --record e.npz --stochastic
    python -m algos.gail --env CartPole-v1 --total-steps 5e4 --demos e.npz
"""

import math
from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus

# mpi.Adam          `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One Adam step; its gradient is averaged over processes, clipped if
#                   max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.Optimizers    named optimizers: `x` reports x_grad_norm, changes only its weights
# mpi.moments       count, mean and variance along dim 0, over all processes (float64)
# mpi.RunningStats  running mean and var of all rows that `update` got, in all processes
# load_demos        pairs of --demos: every `subsample`-th of `num_trajectories`
#                   episodes
# stack_steps       T dicts -> one dict of [T, N, ...]; bools and floats become float32
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.demos import Demos, load_demos
from utils.envs import image_to_float, is_image, make_envs, nature_cnn, stack_steps
from utils.run import Run, RunConfig, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits (discrete) or k means (continuous)
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds env, seed, run_dir, device, ...: see --help
    demos: str = ""  # demonstrations (python -m utils.play RUN --record demos.npz)
    num_trajectories: int = 0  # number of episodes to use, from the first; 0: all
    subsample: int = 20  # keep every n-th pair of an episode, from a random offset
    disc_epochs: int = 1  # the discriminator's passes over each rollout (1 to 5)
    disc_lr: float = 3e-5  # Adam's learning rate for D, constant (1e-5 to 3e-4)
    positive_rew: bool = True  # use -log(1 - D); off: log D, if success ends episodes
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
    max_grad_norm: float = 0.5  # maximum gradient norm (D: never clipped); 0: off
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths (for images, only in D)
    std_init: float = 1.0  # initial sigma of continuous actions, before tanh (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (6)
    scale_rew: bool = True  # divide rewards by the standard deviation of G, Eq. (7)
    norm_adv: bool = True  # normalise advantages per minibatch, Eq. (8)
    orthogonal_init: bool = True  # orthogonal initial weights (D: always PyTorch's)


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


class Discriminator(nn.Module):
    """Maps `Pairs`, normalised observations and encoded actions, to the logit of D."""

    def __init__(self, obs_space: gym.Space, act_size: int, hidden: tuple[int, ...]):
        super().__init__()
        images = is_image(obs_space)
        self.encoder = nature_cnn(obs_space) if images else nn.Identity()
        num_features = 512 if images else obs_space.shape[0]
        self.net = mlp(num_features + act_size, *hidden, 1)

    def forward(self, pairs: "Pairs") -> PerSample:
        return self.net(torch.cat([self.encoder(pairs.obs), pairs.act], -1)).squeeze(-1)


class Agent(nn.Module):
    """Actor, critic, discriminator and running statistics."""

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
        self.disc = Discriminator(obs_space, num_outputs, cfg.hidden)  # PyTorch's init

    def policy_parameters(self) -> list[nn.Parameter]:  # all but the discriminator's
        named = self.named_parameters()
        return [param for name, param in named if not name.startswith("disc.")]

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

    def pairs(self, obs: Tensor, env_act: Tensor) -> "Pairs":
        """Raw observations, and actions as `env.step` takes them -> the inputs of D."""
        if self.discrete:
            act = one_hot(env_act, self.actor[-1].out_features)
        else:
            act = (2 * (env_act - self.low) / (self.high - self.low) - 1).flatten(1)
        return Pairs(self.normalize_obs(obs), act.float())

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


@dataclass(frozen=True)
class Pairs:  # inputs of the discriminator
    obs: Float32[Tensor, "B *obs"]  # normalised by the policy's statistics, Eq. (6)
    act: Float32[Tensor, "B k"]  # one-hot, or rescaled to [-1, 1]


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


def discriminator_loss(expert_logit: Float32[Tensor, "E"],
                       policy_logit: PerSample) -> Scalar:
    """Eq. (13). softplus(-x) is -log D and softplus(x) is -log(1 - D), both stable."""
    return softplus(-expert_logit).mean() + softplus(policy_logit).mean()


def imitation_reward(logit: PerSample, positive: bool) -> PerSample:
    """Eq. (14): -log(1 - D), at least 0, or log D, at most 0."""
    return softplus(logit) if positive else -softplus(-logit)


# ======================================= update =======================================
def disc_loss(disc: Discriminator, expert: Pairs, policy: Pairs) -> tuple[Scalar, dict]:
    expert_logit = disc(expert)
    policy_logit = disc(policy)
    loss = discriminator_loss(expert_logit, policy_logit)  # Eq. (13)
    return loss, {"disc_loss": loss, "d_expert": expert_logit.sigmoid().mean(),
                  "d_policy": policy_logit.sigmoid().mean()}


@torch.no_grad()  # `minimize` enables gradients for its loss
def update_disc(agent: Agent, optimizer: mpi.Adam, rollout: Rollout,
                demos: Demos) -> tuple[Rollout, dict]:
    """Train D. Return the rollout, with Eq. (14) replacing its rewards, and metrics."""
    cfg = agent.cfg
    obs = rollout.obs.flatten(0, 1)  # [T, N, ...] -> [B, ...]
    env_act = agent.env_act(rollout.act.flatten(0, 1))
    env_act = torch.as_tensor(env_act, device=obs.device)  # as `env.step` got them
    num_minibatches = cfg.rollout_steps // cfg.minibatch_size
    metrics = {}
    for _ in range(cfg.disc_epochs):
        for idx in torch.randperm(len(obs)).view(num_minibatches, -1):
            policy_pairs = agent.pairs(obs[idx], env_act[idx])
            shown = demos.take(torch.randint(len(demos.obs), idx.shape))
            expert_pairs = agent.pairs(shown.obs, shown.act)
            step_metrics = optimizer.minimize(
                disc_loss, agent.disc, expert_pairs, policy_pairs, lr=cfg.disc_lr)
            for name, value in step_metrics.items():
                metrics.setdefault(name, []).append(value)
    metrics = {name: torch.stack(values) for name, values in metrics.items()}
    rew = imitation_reward(agent.disc(agent.pairs(obs, env_act)), cfg.positive_rew)
    return replace(rollout, rew=rew.view_as(rollout.rew)), metrics | {"imit_rew": rew}


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
        demos = load_demos(cfg, envs).to(run.device)  # the same in all processes
        agent.to(run.device)
        optimizers = mpi.Optimizers(
            policy=mpi.Adam(agent.policy_parameters(), eps=1e-5),  # Baselines' eps
            disc=mpi.Adam(agent.disc))
        step = run.restore(agent, optimizers=optimizers)  # 0, or where the run stopped
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            rollout, disc_metrics = update_disc(agent, optimizers.disc, rollout, demos)
            metrics = update(agent, optimizers.policy, rollout, lr)
            agent.update_stats(rollout)
            step += cfg.rollout_steps
            run.report(step, envs, **metrics, **disc_metrics)  # logs, evaluates, saves
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
