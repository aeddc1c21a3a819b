"""Proximal Policy Optimization (PPO).  Schulman et al. 2017, arXiv:1707.06347.

A policy gradient holds for the policy that collected the data, so that one step a batch is all it
allows. PPO takes hundreds: its loss pays nothing for making an action more than 1 + c times as
likely as it was, or less than 1 - c times, so that no epoch gains anything by going further.

What it shares with other policy gradients. s' is the true successor of s, also where a time limit
cuts the episode, since what would have followed has a value; "terminated" is a true end, "done" an
end of any kind. (1) and (2) are GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)                              (1)
    A_t     = delta_t + gamma lam (1 - done_t) A_{t+1},   R_t = A_t + V(s_t)               (2)
    log pi  = -sum_i (((a_i - mu_i(s)) / sigma_i)^2 / 2 + log sigma_i + log(2 pi) / 2)     (3)
    H       = sum_i (log sigma_i + log(2 pi e) / 2),  or  -mean sum_a pi(a|s) log pi(a|s)  (4)
    L_V     = mean (V(s) - R)^2                                                            (5)
    x      <- clip((x - mean) / sqrt(var + 1e-8), -10, 10),   of observations              (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1};   r <- clip(r / sd(G), -10, 10)        (7)
    A      <- (A - mean A) / (deviation of A + 1e-8),   in each minibatch                  (8)

PPO's own, pi_old being the policy that acted:

    ratio   = pi(a | s) / pi_old(a | s)                                                    (9)
    L_pi    = -mean min(ratio A, clip(ratio, 1 - c, 1 + c) A),   c = clip_ratio            (10)
    L       = L_pi + vf_coef L_V - ent_coef H                                              (11)
    KL      = mean (ratio - 1 - log ratio),   an estimate of KL(pi_old, pi)                (12)

The details that the results rest on, each with the setting that switches it off:
orthogonal weights (orthogonal_init), (6) (norm_obs), (7) (scale_rew), (8) (norm_adv), a gradient of
limited length (max_grad_norm), a step size annealed to zero (anneal_lr). Statistics and the policy
change only between rollouts, so that the policy that acted is the policy whose ratio is taken.

Departs from the paper: advantages and targets are computed anew every epoch, since the critic has
moved; tanh takes an action a to the bounds of the environment (tanh's Jacobian, which (3) lacks, is
the same in both policies of (9), and cancels; H knows nothing of it).

Decided by measurement (mean return of the last 100 training episodes of HalfCheetah, Hopper,
Walker2d, of a million steps; one seed where nothing is said, every run is in benchmarks/README.md).
Actions clipped: advantages anew every epoch 4798, 3300, 4050, once an update 1517, 1582, 2837;
anew, but normalised over the batch and not the minibatch, 1649, 2665, 3319. Anew, means of two
seeds: actions clipped 3285, 3063, 3694 (HalfCheetah once on its back), by tanh 4357, 3070, 3749.
With sigma 0.6 and actions clipped, the value loss clipped as well 3118, 2268, 4041, not clipped
4113, 2590, 3880.

Read after    algos/a2c.py:  diff algos/a2c.py algos/ppo.py
Try           python -m algos.ppo --env CartPole-v1 --total-steps 1e5
Reproduce     python -m algos.ppo --env HalfCheetah-v4    (benchmarks/README.md: return, seeds)
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from jaxtyping import Float32, Shaped
from torch import Tensor, nn

from utils import mpi
from utils.logger import Logger, check_divides, check_range, check_spaces, env_errors, open_run

Steps = Float32[Tensor, "T N"]  # one number for each of T steps of N environments
Batch = Float32[Tensor, "B"]  # one number a sample: never [B, 1]


# ============================================ config ============================================
@dataclass(frozen=True)
class Config:
    env: str = "HalfCheetah-v4"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: str = "{}"  # keyword arguments of the environment, a JSON object
    seed: int = 1  # of everything random in the run
    total_steps: float = 1e6  # environment steps; rounded up to whole rollouts
    num_envs: int = 8  # environments stepped together, over all processes
    num_procs: int = 1  # MPI processes that share the environments and each minibatch
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers (vector observations)
    gamma: float = 0.99  # discount factor
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA for images if there, else CPU
    compile: bool = False  # torch.compile loss and gradient: quicker steps, a slower start
    torch_threads: int = 1  # threads of PyTorch in each process
    run_dir: str = ""  # where the run is kept; default runs/<env>/<algo>/seed<k>
    resume: bool = False  # go on from the last checkpoint of the run directory
    init_from: str = ""  # a run whose weights and statistics to start from; all else begins anew
    eval_every: int = 0  # steps between evaluations, deterministic and at reports; 0: none
    batch: int = 2048  # steps collected for each update, over all environments
    minibatch: int = 64  # samples of a gradient step, over all processes
    epochs: int = 10  # passes over the batch
    lr: float = 3e-4  # Adam's step size at the start
    anneal_lr: bool = True  # linearly to zero at the end of the run
    lam: float = 0.95  # GAE: from most bias (0) to most variance (1)
    clip_ratio: float = 0.2  # c in Eq. (10)
    target_kl: float = 0.0  # no further epoch once Eq. (12) exceeds this; 0: all epochs
    vf_coef: float = 0.25  # weight of the value loss, as in Tianshou's best published curve
    ent_coef: float = 0.0  # weight of the entropy bonus
    std_init: float = 1.0  # sigma at the start
    max_grad_norm: float = 0.5  # length to which a longer gradient is cut; 0: any
    norm_adv: bool = True  # advantages of a minibatch to mean 0, standard deviation 1
    norm_obs: bool = True  # vector observations likewise, by running statistics
    scale_rew: bool = True  # divide rewards by the running deviation of discounted returns
    orthogonal_init: bool = True  # else PyTorch's default

    def __post_init__(self):
        check_range(self, "total_steps num_envs num_procs torch_threads batch epochs", 1)
        check_range(self, "minibatch", 2 if self.norm_adv else 1)  # one sample's deviation is 0
        check_range(self, "seed eval_every vf_coef ent_coef max_grad_norm target_kl", 0)
        check_range(self, "gamma lam", 0, 1)
        check_range(self, "hidden lr clip_ratio std_init", above=0)
        check_divides(self, "batch/num_envs batch/minibatch num_envs/num_procs minibatch/num_procs")


# ============================================ agent =============================================
def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def nature_cnn(c: int, h: int, w: int) -> nn.Sequential:
    """Images [B, C, H, W] -> features [B, 512]: the network of Mnih et al. 2015 (Nature)."""
    conv = nn.Sequential(nn.Conv2d(c, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                         nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*conv, nn.Linear(conv(torch.zeros(1, c, h, w)).shape[1], 512), nn.ReLU())


class RunningStats(nn.Module):
    """Mean and variance of all rows so far, on all ranks, merged group by group in float64."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        for name, start in (("count", 0.0), ("mean", 0.0), ("var", 1.0)):  # count shaped as mean
            self.register_buffer(name, torch.full(shape, start, dtype=torch.float64))

    def update(self, rows: Float32[Tensor, "B *shape"]) -> None:
        count, mean, var = mpi.moments(rows)  # of all ranks together; var with ddof 0
        share, delta = count / self.count.add_(count), mean - self.mean
        self.var.copy_((1 - share) * self.var + share * var + share * (1 - share) * delta**2)
        self.mean += share * delta


class Agent(nn.Module):
    """Policy, value function and the statistics they rest on: its state dict is the whole agent."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector image", act="discrete box")  # finite box
        shape, self.cfg, self.log_std = obs_space.shape, cfg, None
        self.images, self.discrete = len(shape) == 3, isinstance(act_space, gym.spaces.Discrete)
        self.channels_last = self.images and shape[2] < shape[0]  # fewer channels than rows
        num_outputs = int(act_space.n) if self.discrete else math.prod(act_space.shape)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((num_outputs,), math.log(cfg.std_init)))
            self.register_buffer("low", torch.tensor(act_space.low))
            self.register_buffer("high", torch.tensor(act_space.high))
        chw = (shape[2], *shape[:2]) if self.channels_last else shape
        self.encoder = nature_cnn(*chw) if self.images else nn.Identity()
        sizes = (512,) if self.images else (*shape, *cfg.hidden)
        self.actor, self.critic = mlp(*sizes, num_outputs), mlp(*sizes, 1)
        gains = {self.actor[-1]: 0.01, self.critic[-1]: 1.0}  # at first no action is preferred
        for layer in self.modules() if cfg.orthogonal_init else ():
            if isinstance(layer, nn.Linear | nn.Conv2d):  # sqrt(2): for ReLU; with tanh a custom
                nn.init.orthogonal_(layer.weight, gains.get(layer, math.sqrt(2)))
                nn.init.zeros_(layer.bias)
        self.obs_stats, self.ret_stats = RunningStats(shape), RunningStats(())
        self.ret_sum = torch.zeros(())  # G of Eq. (7), [N]; not saved: environments begin anew

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take, float32: vectors or [..., C, H, W]."""
        if self.images:
            return (obs.movedim(-1, -3) if self.channels_last else obs).float() / 255
        mean, var = self.obs_stats.mean, self.obs_stats.var
        return standardize(obs.float(), mean, var) if self.cfg.norm_obs else obs.float()

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised observations [B, ...] -> outputs of the actor [B, k], values [B]."""
        features = self.encoder(obs)
        return self.actor(features), self.critic(features).squeeze(-1)  # [B, 1] -> [B]

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions of the policy, [N] or [N, d], not yet bounded."""
        obs = torch.as_tensor(obs, device=self.ret_stats.mean.device)
        out = self.actor(self.encoder(self.normalize(obs)))
        if self.discrete:  # the largest of logits + Gumbel noise is a sample of their softmax
            gumbel = 0 if deterministic else -torch.empty_like(out).exponential_().log()
            return (out + gumbel).argmax(-1)
        return out if deterministic else out + self.log_std.exp() * torch.randn_like(out)

    def env_act(self, act: Tensor) -> np.ndarray:
        """tanh takes actions to [-1, 1], which is stretched to the box, dimension by dimension."""
        if self.discrete:
            return act.cpu().numpy()
        share = act.tanh().view(-1, *self.low.shape).to(self.low) / 2 + 0.5  # in the box's dtype
        return torch.lerp(self.low, self.high, share).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw observation -> the deterministic action, for a plain environment's `step`."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]

    def observe(self, rollout: "Rollout") -> None:
        """The one place where statistics change: after learning, which needs those that acted."""
        ret, self.ret_sum = running_returns(rollout.rew, rollout.done, self.ret_sum, self.cfg.gamma)
        self.ret_stats.update(ret.flatten())
        if not self.images:
            self.obs_stats.update(rollout.obs.flatten(0, 1))


# ============================================= data =============================================
def make_envs(cfg: Config, num_envs: int) -> gym.vector.VectorEnv:
    """In all files: a last step also resets, perhaps in the array it returned: obs are copied."""
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    copy = [lambda env: gym.wrappers.TransformObservation(env, np.copy, None)]
    kwargs = {"vectorization_mode": "sync", "vector_kwargs": same_step, "wrappers": copy}
    if atari := "ALE/" in cfg.env:  # in C++: 4 frames, 84 x 84, grey; the log shows the true score
        kwargs = same_step | {"reward_clipping": False}
    with env_errors(cfg) as env_kwargs:  # JSON -> dict; registers ALE
        envs = gym.make_vec(cfg.env, num_envs, **kwargs, **env_kwargs)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    return gym.wrappers.vector.ClipReward(envs, -1, 1) if atari else envs


def true_next_obs(next_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Where each action led, [N, ...]: at the end of an episode not the next one's first."""
    return np.stack([infos["final_obs"][i] if end else next_obs[i] for i, end in enumerate(done)])


@dataclass(frozen=True)
class Rollout:
    obs: Shaped[Tensor, "T N *obs"]
    act: Shaped[Tensor, "T N *act"]
    rew: Steps  # unscaled (ALE: clipped); `update` scales a copy
    next_obs: Shaped[Tensor, "T N *obs"]
    terminated: Steps
    done: Steps


def collect(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray, steps: int) -> tuple:
    """T = `steps` from `obs` on -> rollout, next obs, ended episodes (t, env, ep_ret, ep_len)."""
    rows, episodes = [], []
    for t in range(steps):
        act = agent.act(obs)
        next_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
        done = terminated | truncated
        rows.append((obs, act.cpu(), rew, true_next_obs(next_obs, done, infos), terminated, done))
        if not all(np.isfinite(part).all() for part in (obs, rew, rows[-1][3])):
            raise FloatingPointError(f"NaN or infinity from the environment, step {t} of a rollout")
        for i in np.flatnonzero(done):
            episodes.append((t, i, infos["episode"]["r"][i], infos["episode"]["l"][i]))
        obs = next_obs
    columns = [torch.as_tensor(np.stack(column), device=act.device) for column in zip(*rows)]
    as_is = (torch.uint8, torch.int64)  # images, discrete actions
    return Rollout(*(c if c.dtype in as_is else c.float() for c in columns)), obs, episodes


# ========================================= mathematics ==========================================
def standardize(value: Tensor, mean: Tensor | float, var: Tensor) -> Tensor:
    """Eq. (6), and (7) with mean 0. Cut, since while statistics are young a rare value is huge."""
    return ((value - mean) / torch.sqrt(var + 1e-8)).clamp(-10, 10).float()


def running_returns(rew: Steps, done: Steps, last: Tensor, gamma: float) -> tuple[Steps, Tensor]:
    """Eq. (7) from `last` on, [N], and what goes on into the next rollout, [N]."""
    sums = []
    for rew_t, done_t in zip(rew, done, strict=True):
        sums.append(rew_t + gamma * last)
        last = sums[-1] * (1 - done_t)
    return torch.stack(sums), last


def gae(rew: Steps, val: Steps, next_val: Steps, terminated: Steps, done: Steps,
        gamma: float, lam: float) -> tuple[Steps, Steps]:
    """Eqs. (1), (2). A terminal state has no future; any end of an episode ends the sum."""
    delta = rew + gamma * (1 - terminated) * next_val - val  # Eq. (1)
    adv, last = [], torch.zeros_like(rew[0])
    for delta_t, decay_t in zip(delta.flip(0), (gamma * lam * (1 - done)).flip(0), strict=True):
        last = torch.addcmul(delta_t, decay_t, last)  # Eq. (2), fused: delta_t + decay_t * last
        adv.append(last)
    adv = torch.stack(adv).flip(0)
    return adv, adv + val


def log_prob(out: Float32[Tensor, "B k"], log_std: Tensor | None, act: Tensor) -> Batch:
    """Eq. (3) of actions as they were drawn, [B, k]; without deviations logits, actions [B]."""
    if log_std is None:
        return out.log_softmax(-1).gather(-1, act.unsqueeze(-1)).squeeze(-1)
    z = (act - out) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy(out: Float32[Tensor, "B k"], log_std: Tensor | None) -> Float32[Tensor, ""]:
    """Eq. (4) in nats; of the normal distribution, before tanh."""
    if log_std is None:
        return -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean()
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def value_loss(val: Batch, ret: Batch) -> Float32[Tensor, ""]:
    assert val.shape == ret.shape  # [B] against [B, 1] would compare each with all
    return (val - ret).square().mean()  # Eq. (5)


def normalize_adv(adv: Float32[Tensor, "M B"]) -> Float32[Tensor, "M B"]:
    """Eq. (8). Over each of M minibatches on all ranks: the size of rewards does not matter."""
    _, mean, var = mpi.moments(adv.T)
    return ((adv.T - mean) / (var.sqrt() + 1e-8)).T.float()


def ppo_clip_loss(logp: Batch, logp_old: Batch, adv: Batch, clip: float) -> Float32[Tensor, ""]:
    """Eqs. (9), (10). The worse of two: no gain from leaving the range, but all of a loss."""
    assert logp.shape == logp_old.shape == adv.shape
    ratio = (logp - logp_old).exp()  # Eq. (9)
    return -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()  # Eq. (10)


def approx_kl(logp: Batch, logp_old: Batch) -> Float32[Tensor, ""]:
    """Eq. (12) estimates KL(pi_old, pi) and, unlike the mean of -log ratio, is never negative."""
    return ((logp - logp_old).expm1() - (logp - logp_old)).mean()


# ============================================ update ============================================
def ppo_gradient(agent: Agent, flat: nn.Parameter, obs: Tensor, act: Tensor, logp_old: Batch,
                 adv: Batch, ret: Batch) -> tuple[Float32[Tensor, ""], ...]:
    """flat.grad becomes the gradient of Eq. (11) over a rank's rows -> pi_loss, v_loss, entropy."""
    cfg, (out, val) = agent.cfg, agent(obs)
    logp, bonus = log_prob(out, agent.log_std, act), entropy(out, agent.log_std)
    pi_loss, v_loss = ppo_clip_loss(logp, logp_old, adv, cfg.clip_ratio), value_loss(val, ret)
    bonus_term = cfg.ent_coef * bonus if cfg.ent_coef else 0  # 0: reported, no backward
    loss = pi_loss + cfg.vf_coef * v_loss - bonus_term  # Eq. (11)
    flat.grad.zero_()
    loss.backward()  # adds to each parameter's .grad, a part of flat.grad
    return pi_loss.detach(), v_loss.detach(), bonus.detach()


def estimate(agent: Agent, data: Rollout) -> tuple[Steps, Steps, Steps]:
    """val, adv and ret of normalised data, by the critic as it is now."""
    cfg, val = agent.cfg, agent.critic(agent.encoder(data.obs.flatten(0, 1))).view_as(data.rew)
    ends, next_val = data.done > 0, val.roll(-1, 0)  # the value of the next row, ...
    ends[-1] = True  # ... but where an episode or the rollout ends that of the true successor
    next_val[ends] = agent.critic(agent.encoder(data.next_obs[ends])).squeeze(-1)
    return val, *gae(data.rew, val, next_val, data.terminated, data.done, cfg.gamma, cfg.lam)


@torch.no_grad()  # all but the loss, which takes advantages and targets as constants
def update(agent: Agent, flat: nn.Parameter, optimizer: mpi.Adam, rollout: Rollout,
           lr: float, gradient=ppo_gradient) -> dict:
    """One learning phase on one rollout -> metrics; of arrays the log adds std, min, max."""
    cfg, terms = agent.cfg, []
    rew = standardize(rollout.rew, 0.0, agent.ret_stats.var) if cfg.scale_rew else rollout.rew
    obs, next_obs = agent.normalize(rollout.obs), agent.normalize(rollout.next_obs)
    data = replace(rollout, obs=obs, rew=rew, next_obs=next_obs)
    obs, act = obs.flatten(0, 1), rollout.act.flatten(0, 1)  # [B, ...], B = T N
    logp_old = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)  # pi has not moved
    val, adv, ret = estimate(agent, data)
    ev = 1 - adv.var(correction=0) / (ret.var(correction=0) + 1e-8)  # share of ret in val
    for epoch in range(cfg.epochs):
        adv, ret = estimate(agent, data)[1:] if epoch > 0 else (adv, ret)  # the critic has moved
        order = torch.randperm(len(obs)).view(-1, mpi.share(cfg.minibatch, "minibatch"))
        adv, ret = adv.flatten()[order], ret.flatten()[order]  # [M, B']: M minibatches
        adv = normalize_adv(adv) if cfg.norm_adv else adv
        for minibatch in zip(obs[order], act[order], logp_old[order], adv, ret):
            with torch.enable_grad():
                parts = gradient(agent, flat, *minibatch)
            mpi.average(flat.grad)  # over ranks, in place
            norm = torch.linalg.vector_norm(flat.grad)
            flat.grad.mul_(((cfg.max_grad_norm or math.inf) / (norm + 1e-6)).clamp(max=1))
            optimizer.step(lr)
            terms.append((*parts, norm))
        if cfg.target_kl or epoch == cfg.epochs - 1:
            logp = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)
            kl = mpi.average(approx_kl(logp, logp_old))
            if 0 < cfg.target_kl < kl:
                break
    clip_frac = (logp - logp_old).expm1().abs().gt(cfg.clip_ratio).float().mean()
    pi_loss, v_loss, bonus, norms = map(torch.stack, zip(*terms))
    return {"pi_loss": pi_loss.mean(), "v_loss": v_loss.mean(), "entropy": bonus.mean(), "kl": kl,
            "clip_frac": clip_frac, "grad_norm": norms, "val": val, "explained_variance": ev,
            "epochs": epoch + 1, "lr": lr}


# =========================================== evaluate ===========================================
def evaluate(agent: Agent, cfg: Config, episodes: int, seed: int) -> np.ndarray:
    """Deterministic returns, one of each of `episodes` environments; always the same starts."""
    envs = make_envs(cfg, episodes)
    obs, _ = envs.reset(seed=mpi.seed(seed, 2))  # 0 and 1 are training's
    returns, ended = np.zeros(episodes), np.zeros(episodes, bool)
    while not ended.all():
        obs, _, _, _, infos = envs.step(agent.env_act(agent.act(obs, deterministic=True)))
        if "episode" in infos:
            first = infos["_episode"] & ~ended
            returns[first], ended = infos["episode"]["r"][first], ended | first
    envs.close()
    return returns


# ============================================ train =============================================
def train(cfg: Config) -> Agent:
    """Runs `cfg` to its end, or resumes it, and returns the agent."""
    cfg = open_run(cfg)  # fills in run_dir; with --resume that run's settings; writes nothing yet
    envs = make_envs(cfg, mpi.share(cfg.num_envs, "num_envs", cfg.num_procs))  # one rank's share
    torch.manual_seed(mpi.seed(cfg.seed, 0))  # another on each rank; --resume restores its state
    agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
    agent.to(mpi.choose_device(cfg, agent.images))  # and sets --torch-threads
    mpi.launch(cfg)  # P > 1: errors told, this process becomes P that run it from the top
    flat = mpi.flatten(agent)  # rank 0's weights, on all ranks; parameters and .grad are its views
    optimizer = mpi.Adam(flat, eps=1e-5)  # eps as in OpenAI Baselines
    gradient = mpi.compiled(ppo_gradient, cfg.compile)  # loss and backward in one
    with Logger(cfg, agent, optimizer=optimizer) as log:  # loads --resume, --init-from, in place
        obs, _ = envs.reset(seed=mpi.seed(cfg.seed, 1, log.step))  # other seeds after a resume
        while log.step < cfg.total_steps:
            rollout, obs, episodes = collect(agent, envs, obs, cfg.batch // cfg.num_envs)
            lr = cfg.lr * (1 - log.step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            metrics = update(agent, flat, optimizer, rollout, lr, gradient)
            agent.observe(rollout)
            if log.eval_due(cfg.batch) and mpi.rank() == 0:  # a multiple of eval_every is due
                log.store(eval_ret=evaluate(agent, cfg, 10, cfg.seed))  # from rank 0 alone
            log.report(cfg.batch, episodes, **metrics)  # over ranks; adds to log.step; saves
    return agent


if __name__ == "__main__":
    train(tyro.cli(Config, description=__doc__))
