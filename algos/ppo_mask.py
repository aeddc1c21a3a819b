"""PPO with action masks.  Huang & Ontanon 2022, arXiv:2006.14171.

The problem. In many tasks, most actions are forbidden in most states: a card that is
not in the hand, a column that is full. If they only cost something, PPO has to find out
in every kind of state which ones to avoid. The more there are, the slower it learns.

The idea. The environment knows what is allowed and says so in every observation, a Dict
of what the networks see and of `action_mask`, with a 0 for each forbidden action, or,
of several parts, for each forbidden value of a part. `mask_logits` gives these the
probability 0. It does so wherever pi or pi_old is computed, with the mask of the state
in which the action was chosen. So ratio, entropy and gradient are those of policies
that never do what is forbidden.
An iteration of `train`:

    collect              act for T steps in N parallel environments
    update               up to `epochs` times:
      compute_targets      advantages A and returns R, with the current critic
      ppo_loss             one Adam step on it for each random minibatch
    update_stats         running statistics that normalise observations and rewards

Departures, besides those of ppo.py. Forbidden logits are below the paper's -1e8.

Healthy values. On Tour `kl` is below 0.02 and `clip_frac` from 0.003 to 0.31. Towards
the end of a run, both fall to 0. `entropy` begins at the mean log of the number of
allowed actions.

Run   python -m algos.ppo_mask --env tasks:Tour-v0 --total-steps 6e4
Diff  diff algos/ppo.py algos/ppo_mask.py
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
#               an obs is a vector; obs_space.parts has a slice for each part of a Dict,
#               and obs_space.without(name) is the space of the other parts
# stack_steps   T dicts of arrays [N, ...] -> tensors [T, N, ...]; bools become 0 and 1
# RunningStats  normalize(x) = clip((x - mean) / std, -10, 10)
#               scale(x)     = clip(x / std, -10, 10)
from utils import mpi
from utils.envs import make_envs, stack_steps
from utils.errors import UsageError
from utils.nets import ObsStats, categoricals, head_sizes, make_encoder, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Positive, Run, RunConfig, main
from utils.spaces import part_sizes
from utils.stats import RunningStats, moments

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Inputs = Shaped[Tensor, "B *obs"]  # normalised observations: what the networks take
Features = Float32[Tensor, "B k"]  # of an image, its encoding; a vector as it is
Logits = Float32[Tensor, "B k"]  # one number for each action
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 2048  # T x N samples (256 x 8); N and B have to divide it
    minibatch_size: int = 256  # B, samples per gradient step (32 to 4096)
    epochs: int = 10  # passes over each rollout (3 to 20)
    lr: Positive = 1e-3  # Adam's initial learning rate (1e-5 to 3e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    lam: Fraction = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    clip_ratio: Positive = 0.2  # epsilon in the paper, range of the ratio (0.1 to 0.3)
    target_kl: float = 0.05  # no more epochs if `kl` is above it (0.01 to 0.1); 0: off
    vf_coef: float = 0.25  # weight of the value loss, c1 in the paper (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 in the paper (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, unless obs is an image
    norm_obs: bool = True  # normalise vector observations by their running statistics
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
    norm_adv: bool = True  # normalise advantages within each minibatch
    recompute_adv: bool = True  # compute A and R anew in every epoch (paper: once)
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster
    act_parts = True  # `Agent.policy` takes actions of several parts, as MultiDiscrete


# ===================================== data types =====================================
@dataclass(frozen=True)
class Rollout:  # T steps in each of N environments; nothing is normalised
    obs: Shaped[Tensor, "T N *obs"]  # s
    act: Shaped[Tensor, "T N *act"]  # a
    rew: PerStep  # r
    next_obs: Shaped[Tensor, "T N *obs"]  # s', never of the next episode
    terminated: PerStep  # 1 if s' is terminal; 0 otherwise, also at a time limit
    done: PerStep  # 1 if the episode ended, also by a time limit


@dataclass(frozen=True)
class Minibatch:  # B random samples of a rollout
    obs: Inputs  # s, normalised
    act: Shaped[Tensor, "B *act"]  # a
    logp_old: PerSample  # log pi_old(a|s)
    adv: PerSample  # A: how much better a was than the policy's average action in s
    ret: PerSample  # R: what the critic is to predict in s


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = Adam(agent, eps=1e-5)  # OpenAI Baselines' eps
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


def update(agent: Agent, optimizer: Adam, rollout: Rollout, lr: float) -> dict:
    """Take many gradient steps on one rollout. Return metrics."""
    cfg = agent.cfg
    obs = agent.normalize_obs(rollout.obs).flatten(0, 1)  # [T, N, ...] -> [TN, ...]
    act = rollout.act.flatten(0, 1)
    with torch.no_grad():  # log pi_old(a|s), fixed while pi moves away from pi_old
        logp_old = agent.policy(agent.encoder(obs)).log_prob(act)
    val, adv, ret = compute_targets(agent, rollout, obs)
    explained = explained_variance(val, ret)  # before the critic learns from `rollout`
    steps = []  # the metrics of each gradient step
    for epoch in range(cfg.epochs):
        if epoch > 0 and cfg.recompute_adv:  # with the critic as it is now
            _, adv, ret = compute_targets(agent, rollout, obs)
        indices = torch.randperm(len(obs)).view(-1, mpi.share(cfg.minibatch_size))
        adv_rows = adv.flatten()[indices]  # [M, B]: one row for each of M minibatches
        if cfg.norm_adv:
            adv_rows = normalize_advantages(adv_rows)
        for rows, adv_row in zip(indices, adv_rows):
            minibatch = Minibatch(obs=obs[rows], act=act[rows], logp_old=logp_old[rows],
                                  adv=adv_row, ret=ret.flatten()[rows])
            loss, metrics = ppo_loss(agent, minibatch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.average_grads()  # over processes
            grad_norm = optimizer.clip_grads(cfg.max_grad_norm)
            optimizer.step(lr)
            steps.append(metrics | {"grad_norm": grad_norm})
        if cfg.target_kl > 0:  # clipping is no strict limit
            kl = policy_change(agent, obs, act, logp_old)["kl"]
            if mpi.average(kl) > cfg.target_kl:  # over processes
                break
    metrics = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    return metrics | policy_change(agent, obs, act, logp_old) | {
        "epochs": epoch + 1, "val": val, "explained_variance": explained}


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


def normalize_advantages(adv: Float32[Tensor, "M B"]) -> Float32[Tensor, "M B"]:
    """A <- (A - mean A) / (std A + 1e-8), for each of M minibatches."""
    _, mean, var = moments(adv.T)  # [M], over all processes (float64, ddof 0)
    return ((adv - mean[:, None]) / (var.sqrt()[:, None] + 1e-8)).float()


def ppo_loss(agent: Agent, batch: Minibatch) -> tuple[Scalar, dict]:
    """L = L_pi + vf_coef L_V - ent_coef H, one loss for actor and critic.

        L_pi   makes good actions more likely: see `clipped_policy_loss`
        L_V    = mean (V(s) - R)^2
        H      the entropy of pi, keeps it exploring: see `Agent.policy`
    """
    cfg = agent.cfg
    features = agent.encoder(batch.obs)
    pi = agent.policy(features)
    val = agent.value(features)
    logp = pi.log_prob(batch.act)
    pi_loss = clipped_policy_loss(logp, batch.logp_old, batch.adv, cfg.clip_ratio)
    assert val.shape == batch.ret.shape  # [B] minus [B, 1] would be [B, B]
    v_loss = (val - batch.ret).square().mean()
    ent = pi.entropy().mean()
    loss = pi_loss + cfg.vf_coef * v_loss - cfg.ent_coef * ent
    return loss, {"pi_loss": pi_loss.detach(), "v_loss": v_loss.detach(),
                  "entropy": ent.detach()}


def clipped_policy_loss(logp: PerSample, logp_old: PerSample, adv: PerSample,
                        clip_ratio: float) -> Scalar:
    """L_pi = -mean min(ratio A, clip(ratio, 1 - c, 1 + c) A), with c = clip_ratio.

        A > 0 and ratio > 1 + c    no gradient: the action is likely enough
        A < 0 and ratio < 1 - c    no gradient: the action is unlikely enough
        all other cases            the gradient of -ratio A

    The minimum matters where the ratio went the wrong way, as for A > 0 and ratio <
    1 - c. The clipped term is constant there; the other one lets the ratio recover.
    In the first step of an update, all ratios are 1 and the gradient is that of A2C.
    """
    assert logp.shape == logp_old.shape == adv.shape
    ratio = (logp - logp_old).exp()
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.min(ratio * adv, clipped * adv).mean()


@torch.no_grad()
def policy_change(agent: Agent, obs: Inputs, act: Shaped[Tensor, "B *act"],
                  logp_old: PerSample) -> dict:
    """How far pi has moved from pi_old.

        kl           mean(ratio - 1 - log ratio), which estimates KL(pi_old || pi)
        clip_frac    the share of samples whose ratio is out of range
    """
    log_ratio = agent.policy(agent.encoder(obs)).log_prob(act) - logp_old
    ratio = log_ratio.exp()
    outside = (ratio - 1).abs() > agent.cfg.clip_ratio
    return {"kl": (ratio - 1 - log_ratio).mean(), "clip_frac": outside.float().mean()}


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1 - var(R - V) / var R. R contains V, which flatters V."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= agent ========================================
def mask_logits(logits: Logits, mask: Logits) -> Logits:
    """The logits, where those of forbidden actions (mask 0) are as low as can be.

        pi(a|s) = mask_a exp(logit_a) / sum_b mask_b exp(logit_b)

    That is what a softmax makes of them. A logit that was replaced gets no gradient.
    -inf would give 0 as well, but -sum p log p then has 0 (-inf) in it, a NaN unless a
    library guards against it.
    """
    assert logits.shape == mask.shape
    return logits.masked_fill(mask == 0, torch.finfo(logits.dtype).min)


class Agent(Policy):  # which adds predict(obs)
    """Actor, critic and running statistics: all that acting needs."""

    takes = {"obs": "mask", "act": "discrete parts"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.sizes = part_sizes(act_space)  # [number of actions], or one per part
        self.num_outputs = num_outputs = sum(self.sizes)  # one logit per action
        self.mask = obs_space.parts["action_mask"]  # a slice
        if (width := self.mask.stop - self.mask.start) != num_outputs:
            raise UsageError(f"--env has an action_mask of {width} numbers; it takes "
                             f"{num_outputs}, one for each action or value of a part")
        obs_space = obs_space.without("action_mask")
        self.embed = make_encoder(obs_space, cfg.bf16)
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

    def split(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Raw observations -> what the networks see, and the mask."""
        before, mask, after = obs.tensor_split([self.mask.start, self.mask.stop], -1)
        return torch.cat([before, after], -1), mask

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take. The encoder scales images."""
        seen, mask = self.split(obs.float())
        seen = self.obs_stats.normalize(seen) if self.cfg.norm_obs else seen
        return torch.cat([seen, mask], -1)  # the mask as it is

    def encoder(self, obs: Inputs) -> Features:
        """Encode what is seen. The mask stays behind it."""
        seen, mask = obs.tensor_split([-self.num_outputs], -1)
        return torch.cat([self.embed(seen), mask], -1)

    def policy(self, features: Features) -> Distribution:
        """pi(.|s): the one place that says what the actor's outputs mean.

        So it is also the one place that masks them.
        """
        seen, mask = features.tensor_split([-self.num_outputs], -1)
        # contiguous(), here and below, makes results equal to ppo.py's to the last bit.
        out = mask_logits(self.actor(seen.contiguous()), mask)  # [B, k]
        if len(self.sizes) > 1:
            return categoricals(out, self.sizes)
        return Categorical(logits=out, validate_args=False)

    def value(self, features: Features) -> PerSample:
        seen, _ = features.tensor_split([-self.num_outputs], -1)
        return self.critic(seen.contiguous()).squeeze(-1)  # [B, 1] -> [B]

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N] or [N, k] that their masks allow."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        _, mask = self.split(obs)
        wrong = ((mask != 0) & (mask != 1)).any(-1)
        for part in mask.split(self.sizes, -1):
            wrong = wrong | ~part.any(-1)
        if wrong.any():
            raise UsageError("the observation has action_mask "
                             f"{mask[wrong][0].tolist()}; it takes 0 and 1, and a 1 "
                             "before the end of an episode")
        pi = self.policy(self.encoder(self.normalize_obs(obs)))
        return pi.mode if deterministic else pi.sample()

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`."""
        return act.cpu().numpy()

    def update_stats(self, rollout: Rollout) -> None:
        """Update the statistics of observations and of G, which varies as returns do:
        G_t = r_t + gamma (1 - done_{t-1}) G_{t-1}, with raw rewards r."""
        sums = []
        for rew, done in zip(rollout.rew, rollout.done):
            sums.append(rew + self.cfg.gamma * self.reward_sum)
            self.reward_sum = sums[-1] * (1 - done)  # a new episode starts at 0
        self.reward_sum_stats.update(torch.cat(sums))
        seen, _ = self.split(rollout.obs)
        self.obs_stats.update(seen.flatten(0, 1))


if __name__ == "__main__":
    main(train, Config, __doc__)
