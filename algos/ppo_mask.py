"""PPO with action masks.  Huang & Ontanon 2022, arXiv:2006.14171.

The problem. In many tasks, most actions are forbidden in most states: a card that is
not in the hand, a column that is full. If they only cost something, PPO has to find out
in every kind of state which ones to avoid. The more there are, the slower it learns.

The idea. The environment knows what is allowed and says so in every observation. The
actor gives forbidden actions the probability 0, and the others the rest: `mask_logits`.
It does so wherever pi or pi_old is computed, with the mask of the state in which the
action was chosen: the mask is part of the observation, and `MaskedActor` applies it. So
ratio, entropy and gradient are those of policies that never do what is forbidden. All
else is PPO. An iteration of `train`:

    collect              act for T steps in N parallel environments with pi_old
    update               `epochs` times:
      compute_targets      advantages A and returns R, by the current critic
      ppo_loss             one Adam step on it for each random minibatch
    update_stats         running statistics that normalise observations and rewards

The environment. Its observations are a Dict: `action_mask` with a 0 for each forbidden
action, and `observation`, which the networks see and which has to say all that matters.

Departures. Those of ppo.py; forbidden logits are lower than the paper's -1e8. Lines
about continuous actions are there for the diff.

Healthy values. `entropy` begins at the mean of log(number of allowed actions). In Tour
that is 1.51, and falls to about 0.85. `kl` is 0.0005 to 0.015, `clip_frac` up to 0.25.

Run   python -m algos.ppo_mask --env utils.tasks:Tour-v0 --total-steps 6e4
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

# make_envs     when an episode ends, the same `step` starts a new one and returns its
#               first obs; infos["final_obs"] has the last obs of the old one. It joins
#               the parts of a Dict; obs_space.parts has a slice for each
# stack_steps   T dicts of arrays [N, ...] -> tensors [T, N, ...]; bools become 0 and 1
# mpi.Adam      `step(lr)` averages the gradient over processes, clips it, moves the
#               weights and returns the gradient's norm before clipping
# RunningStats  normalize(x) = clip((x - mean) / std, -10, 10); scale(x) clips x / std
from utils import mpi
from utils.envs import make_envs, stack_steps
from utils.nets import mlp
from utils.policy import Policy
from utils.run import Run, RunConfig, main

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Inputs = Float32[Tensor, "B inputs"]  # normalised observation, then its mask
ActorOut = Float32[Tensor, "B k"]  # k logits; `actor` gives them after the mask
Masks = Float32[Tensor, "B k"]  # 0 for each forbidden action
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 2048  # T x N, samples per rollout; N and B have to divide it
    minibatch_size: int = 64  # B, samples per gradient step (32 to 4096)
    epochs: int = 10  # passes over each rollout (3 to 20)
    lr: float = 3e-4  # Adam's initial learning rate (1e-5 to 1e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    clip_ratio: float = 0.2  # epsilon in the paper, the range of the ratio (0.1 to 0.3)
    vf_coef: float = 0.25  # weight of the value loss, c1 in the paper (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 in the paper (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths
    norm_obs: bool = True  # normalise observations by their running statistics
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
    norm_adv: bool = True  # normalise advantages within each minibatch


# ===================================== data types =====================================
@dataclass(frozen=True)
class Rollout:  # T steps in each of N environments; nothing is normalised
    obs: Shaped[Tensor, "T N *obs"]  # s and its mask, in the order of the environment
    act: Shaped[Tensor, "T N *act"]  # a
    rew: PerStep  # r
    next_obs: Shaped[Tensor, "T N *obs"]  # s', never of the next episode
    terminated: PerStep  # 1 if s' is terminal; 0 otherwise, also at a time limit
    done: PerStep  # 1 if the episode ended, also by a time limit


@dataclass(frozen=True)
class Minibatch:  # B random samples of a rollout
    obs: Inputs  # s, normalised, and its mask
    act: Shaped[Tensor, "B *act"]  # a
    logp_old: PerSample  # log pi_old(a|s)
    adv: PerSample  # A: how much better a was than the policy's average action in s
    ret: PerSample  # R: what the critic is to predict in s


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        cfg = run.cfg  # with --resume, the settings of the resumed run
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = mpi.Adam(agent, eps=1e-5)  # OpenAI Baselines' eps
        run.register(agent, optimizer=optimizer)  # what checkpoints hold
        step = run.restore()  # 0, or with --resume the step of the checkpoint
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            agent.update_stats(rollout)  # last, so that `update` sees what pi_old saw
            step += cfg.rollout_steps
            run.evaluate(step)  # if --eval-every asks for it
            run.log(step, envs, **metrics)
            run.save(step)  # about once a minute
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


def update(agent: Agent, optimizer: mpi.Adam, rollout: Rollout, lr: float) -> dict:
    """Take many gradient steps on one rollout. Return metrics."""
    cfg = agent.cfg
    obs = agent.normalize_obs(rollout.obs).flatten(0, 1)  # [T, N, ...] -> [TN, ...]
    act = rollout.act.flatten(0, 1)
    with torch.no_grad():  # log pi_old(a|s), fixed while pi moves away from pi_old
        logp_old = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)
    step_metrics = []  # one dict per gradient step
    for epoch in range(cfg.epochs):
        val, adv, ret = compute_targets(agent, rollout, obs)  # by the current critic
        if epoch == 0:  # before the critic has learned from this rollout
            unexplained = (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)
            before = {"val": val, "explained_variance": 1 - unexplained}
        indices = torch.randperm(len(obs)).view(-1, mpi.share(cfg.minibatch_size))
        advs = adv.flatten()[indices]  # [M, B]: one row per minibatch
        if cfg.norm_adv:
            advs = normalize_advantages(advs)
        for rows, normalized in zip(indices, advs):
            minibatch = Minibatch(obs=obs[rows], act=act[rows], logp_old=logp_old[rows],
                                  adv=normalized, ret=ret.flatten()[rows])
            loss, metrics = ppo_loss(agent, minibatch)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = optimizer.step(lr, max_grad_norm=cfg.max_grad_norm)
            step_metrics.append(metrics | {"grad_norm": grad_norm})
    metrics = {name: torch.stack([one[name] for one in step_metrics])
               for name in step_metrics[0]}  # the log has their means
    with torch.no_grad():  # how far has pi moved from pi_old?
        logp = log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)
    outside = ((logp - logp_old).exp() - 1).abs() > cfg.clip_ratio
    metrics["kl"] = approx_kl(logp, logp_old).mean()
    metrics["clip_frac"] = outside.float().mean()  # whichever sign A has
    return metrics | before | {"lr": lr}


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
    """
    delta = rew + gamma * (1 - terminated) * next_val - val
    decay = (gamma * lam * (1 - done)).cpu().numpy()
    adv = delta.cpu().numpy()  # a loop in NumPy is faster
    for t in reversed(range(len(adv) - 1)):  # beyond the rollout, only V is known
        adv[t] += decay[t] * adv[t + 1]
    return torch.as_tensor(adv, device=val.device)


def normalize_advantages(adv: Float32[Tensor, "M B"]) -> Float32[Tensor, "M B"]:
    """A <- (A - mean A) / (std A + 1e-8), for each of M minibatches."""
    _, mean, var = mpi.moments(adv.T)  # [M], over all processes (float64, ddof 0)
    return ((adv - mean[:, None]) / (var.sqrt()[:, None] + 1e-8)).float()


@mpi.compilable  # with --compile
def ppo_loss(agent: Agent, batch: Minibatch) -> tuple[Scalar, dict]:
    """L = L_pi + vf_coef L_V - ent_coef H, one loss for actor and critic.

        L_pi   makes good actions more likely: see `clipped_policy_loss`
        L_V    = mean (V(s) - R)^2
        H      is the entropy of pi, which keeps it exploring
    """
    cfg = agent.cfg
    features = agent.encoder(batch.obs)
    actor_out = agent.actor(features)
    val = agent.value(features)
    logp = log_prob(actor_out, agent.log_std, batch.act)
    pi_loss = clipped_policy_loss(logp, batch.logp_old, batch.adv, cfg.clip_ratio)
    assert val.shape == batch.ret.shape  # [B] minus [B, 1] would be [B, B]
    v_loss = (val - batch.ret).square().mean()
    ent = entropy(actor_out, agent.log_std)
    loss = pi_loss + cfg.vf_coef * v_loss - cfg.ent_coef * ent
    return loss, {"pi_loss": pi_loss.detach(), "v_loss": v_loss.detach(),
                  "entropy": ent.detach()}


def log_prob(actor_out: ActorOut, log_std: Tensor | None,
             act: Shaped[Tensor, "B *act"]) -> PerSample:
    """log pi(a|s): log softmax(logits)_a, or sum_i log N(a_i; mu_i(s), sigma_i)."""
    if log_std is None:  # discrete
        return actor_out.log_softmax(-1).gather(-1, act.unsqueeze(-1)).squeeze(-1)
    z = (act - actor_out) / log_std.exp()  # tanh adds a term that depends on a alone
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def clipped_policy_loss(logp: PerSample, logp_old: PerSample, adv: PerSample,
                        clip_ratio: float) -> Scalar:
    """L_pi = -mean min(ratio A, clip(ratio, 1 - c, 1 + c) A), with c = clip_ratio.

        A > 0 and ratio > 1 + c    no gradient: the action is likely enough
        A < 0 and ratio < 1 - c    no gradient: the action is unlikely enough
        all other cases            the gradient of -ratio A
    """
    assert logp.shape == logp_old.shape == adv.shape
    ratio = (logp - logp_old).exp()
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.min(ratio * adv, clipped * adv).mean()


def entropy(actor_out: ActorOut, log_std: Tensor | None) -> Scalar:
    """H = -E[log pi(a|s)], mean over the batch."""
    if log_std is None:
        return -(actor_out.softmax(-1) * actor_out.log_softmax(-1)).sum(-1).mean()
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1).mean()


def approx_kl(logp: PerSample, logp_old: PerSample) -> PerSample:
    """ratio - 1 - log ratio, never below 0. Its mean estimates KL(pi_old || pi)."""
    log_ratio = logp - logp_old
    return log_ratio.exp() - 1 - log_ratio


# ======================================= agent ========================================
def mask_logits(logits: ActorOut, mask: Masks) -> ActorOut:
    """The logits, where those of forbidden actions (mask 0) are as low as can be.

        pi(a|s) = mask_a exp(logit_a) / sum_b mask_b exp(logit_b)

    That is what a softmax makes of them. A logit that was replaced gets no gradient.
    -inf would give 0 as well, but the entropy has 0 log 0 in it, and 0 (-inf) is NaN.
    """
    assert logits.shape == mask.shape
    return logits.masked_fill(mask == 0, torch.finfo(logits.dtype).min)


class MaskedActor(nn.Module):
    """Observations with their masks -> logits, [B, k]."""

    def __init__(self, *sizes: int):
        super().__init__()
        self.net = mlp(sizes, nn.Tanh)
        self.parts = [sizes[0], sizes[-1]]  # numbers in `observation`, in `action_mask`

    def forward(self, inputs: Inputs) -> ActorOut:
        obs, mask = inputs.split(self.parts, -1)
        # contiguous(), here and below, makes results equal to ppo.py's to the last bit.
        return mask_logits(self.net(obs.contiguous()), mask)


class Agent(Policy):  # which adds predict(obs)
    """Actor, critic and running statistics: all that acting needs."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space, obs="mask", act="discrete")
        self.cfg = cfg
        self.log_std = None  # actions are discrete
        parts, num_acts = obs_space.parts, int(act_space.n)
        self.obs_slice, self.mask_slice = parts["observation"], parts["action_mask"]
        self.obs_dim = self.obs_slice.stop - self.obs_slice.start
        if (given := self.mask_slice.stop - self.mask_slice.start) != num_acts:
            raise mpi.UsageError(f"--env has an action_mask of {given} numbers; it "
                                 f"takes {num_acts}, one for each action")
        self.encoder = nn.Identity()  # of images, in ppo.py
        sizes = (self.obs_dim, *cfg.hidden)
        self.actor = MaskedActor(*sizes, num_acts)
        self.critic = mlp([*sizes, 1], nn.Tanh)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
                nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(self.actor.net[-1].weight, gain=0.01)  # hardly depends on s
        nn.init.orthogonal_(self.critic[-1].weight, gain=1.0)
        self.obs_stats = mpi.RunningStats((self.obs_dim,))  # of `observation` alone
        self.reward_sum_stats = mpi.RunningStats(())  # of G: see `update_stats`
        self.reward_sum = torch.zeros(())  # the last G, from then on [N]; not saved

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take; the mask stays as it is."""
        shown = obs[..., self.obs_slice].float()
        mask = obs[..., self.mask_slice].float()
        if self.cfg.norm_obs:
            shown = self.obs_stats.normalize(shown)
        return torch.cat([shown, mask], -1)

    def value(self, features: Float32[Tensor, "B k"]) -> PerSample:
        obs = features[:, :self.obs_dim].contiguous()
        return self.critic(obs).squeeze(-1)  # [B, 1] -> [B]

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N] that their masks allow."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        masks = obs[:, self.mask_slice]
        wrong = ((masks != 0) & (masks != 1)).any(-1) | ~masks.any(-1)
        if wrong.any():
            raise mpi.UsageError(
                f"--env has the action_mask {masks[wrong][0].tolist()}; it takes 0 and "
                "1, and a 1 before the end of an episode")
        actor_out = self.actor(self.encoder(self.normalize_obs(obs)))
        if deterministic:
            return actor_out.argmax(-1)
        return actor_out.softmax(-1).multinomial(1).squeeze(-1)

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
        self.obs_stats.update(rollout.obs[..., self.obs_slice].flatten(0, 1))


if __name__ == "__main__":
    main(train, Config, __doc__)
