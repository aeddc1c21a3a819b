"""Generative adversarial imitation learning (GAIL).  Ho & Ermon 2016, arXiv:1606.03476.

The problem. An expert shows which actions a it takes in states s; there are no rewards.
Behavioural cloning (bc.py) imitates the actions, but its mistakes compound: each can
lead to states that the expert never visited.

The idea. Visit each pair (s, a) as often as the expert does. Then both policies have
the same mean return, whatever the rewards are. A discriminator D(s, a) learns to tell
the expert's pairs from the policy's, and PPO maximises a reward that grows with D. The
environment's own rewards train nothing; `ep_ret` logs them.
An iteration of `train`:

    collect              act for T steps in N parallel environments
    update_disc          for each random minibatch:
      disc_loss            one Adam step of D on it and on as many pairs of the expert
    imitation_reward     replace all rewards of the rollout, by the new D
    update               up to `epochs` times:
      compute_targets      advantages A and returns R, with the current critic
      ppo_loss             one Adam step on it for each random minibatch
    update_stats         running statistics that normalise observations and rewards

Departures, besides those of ppo.py. The paper uses TRPO and one step of D per rollout.

Healthy values. `d_expert` and `d_policy`, the mean D of each kind of pairs, leave 0.5
and approach it again. Where `d_policy` stays near 0, D is too sure: lower disc_lr.

Run   python -m algos.ppo --env CartPole-v1 --total-steps 5e4
      python -m utils.play runs/CartPole-v1/ppo/seed1 --record e.npz --stochastic
      python -m algos.gail --env CartPole-v1 --total-steps 5e4 --demos e.npz
Diff  diff algos/ppo.py algos/gail.py
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torch.nn.functional import one_hot, softplus

# mpi           several processes may share the environments and each batch. Config
#               has totals; mpi.share(total) is the part of this process
# load_demos    the expert's pairs, raw: `obs` and `act`; `take(rows)` selects some
# make_envs     when an episode ends, the same `step` starts a new one and returns its
#               first obs; infos["final_obs"] has the last obs of the old one
# stack_steps   T dicts of arrays [N, ...] -> tensors [T, N, ...]; bools become 0 and 1
# RunningStats  normalize(x) = clip((x - mean) / std, -10, 10)
#               scale(x)     = clip(x / std, -10, 10)
from utils import mpi
from utils.demos import Demos, load_demos
from utils.envs import make_envs, stack_steps
from utils.nets import SquashedGaussian, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Natural, Positive, Run, RunConfig, main
from utils.stats import RunningStats, moments

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Inputs = Shaped[Tensor, "B *obs"]  # normalised observations: what the networks take
Features = Float32[Tensor, "B k"]  # of an image, its encoding; a vector as it is
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    demos: str = ""  # demonstrations (python -m utils.play RUN --record demos.npz)
    num_trajectories: Natural = 0  # number of episodes to use, from the first; 0: all
    subsample: int = 20  # keep every n-th pair of an episode, from a random offset
    disc_lr: Positive = 3e-5  # Adam's learning rate for D, constant (1e-5 to 3e-4)
    positive_rew: bool = True  # use -log(1 - D); off: log D, if success ends episodes
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
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, also D's
    std_init: Positive = 0.6  # initial sigma before tanh, if continuous (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations by their running statistics
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
    norm_adv: bool = True  # normalise advantages within each minibatch
    recompute_adv: bool = True  # compute A and R anew in every epoch (paper: once)


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
class Minibatch:  # B random samples of a rollout
    obs: Inputs  # s, normalised
    act: Shaped[Tensor, "B *act"]  # a
    logp_old: PerSample  # log pi_old(a|s)
    adv: PerSample  # A: how much better a was than the policy's average action in s
    ret: PerSample  # R: what the critic is to predict in s


@dataclass(frozen=True)
class Pairs:  # what the discriminator sees
    obs: Inputs  # s, normalised
    act: Float32[Tensor, "B k"]  # a, one-hot or (after tanh) between -1 and 1


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        demos = load_demos(cfg, envs).to(run.device)  # the same in all processes
        optimizer = Adam(agent.policy_parameters(), eps=1e-5)  # OpenAI Baselines' eps
        disc_opt = Adam(agent.disc)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, policy=optimizer, disc=disc_opt)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            rollout, disc_metrics = update_disc(agent, disc_opt, rollout, demos)
            metrics = update(agent, optimizer, rollout, lr)
            agent.update_stats(rollout)  # last, so that `update` sees what `act` saw
            step += cfg.rollout_steps
            run.store(**metrics, **disc_metrics)  # the next row averages them
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


def update_disc(agent: Agent, disc_opt: Adam, rollout: Rollout,
                demos: Demos) -> tuple[Rollout, dict]:
    """Train D. Return the rollout with rewards by the new D, and metrics."""
    cfg = agent.cfg
    obs = rollout.obs.flatten(0, 1)  # [T, N, ...] -> [TN, ...]
    act = torch.as_tensor(agent.env_act(rollout.act.flatten(0, 1)), device=obs.device)
    pairs = agent.pairs(obs, act)
    steps = []  # the metrics of each gradient step
    for rows in torch.randperm(len(act)).view(-1, mpi.share(cfg.minibatch_size)):
        shown = demos.take(torch.randint(len(demos.obs), rows.shape))
        expert = agent.pairs(shown.obs, shown.act)
        policy = Pairs(pairs.obs[rows], pairs.act[rows])
        loss, metrics = disc_loss(agent, expert, policy)
        disc_opt.zero_grad()
        loss.backward()
        disc_opt.average_grads()  # over processes
        grad_norm = disc_opt.grad_norm()  # never clipped
        disc_opt.step(cfg.disc_lr)
        steps.append(metrics | {"disc_grad_norm": grad_norm})
    metrics = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    with torch.no_grad():
        rew = imitation_reward(agent.disc_logit(pairs), cfg.positive_rew)
    return replace(rollout, rew=rew.view_as(rollout.rew)), metrics | {"imit_rew": rew}


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
            steps.append(metrics | {"policy_grad_norm": grad_norm})
        if cfg.target_kl > 0:  # clipping is no strict limit
            kl = policy_change(agent, obs, act, logp_old)["kl"]
            if mpi.average(kl) > cfg.target_kl:  # over processes
                break
    metrics = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    return metrics | policy_change(agent, obs, act, logp_old) | {
        "epochs": epoch + 1, "val": val, "explained_variance": explained}


# ======================================= losses =======================================
def disc_loss(agent: Agent, expert: Pairs, policy: Pairs) -> tuple[Scalar, dict]:
    """L_D = -mean log D(expert's pairs) - mean log(1 - D(policy's pairs)).

    A pair that the expert visits with probability p_E and the policy with p adds
    -p_E log D - p log(1 - D) to the mean of L_D, which is least at D = p_E / (p_E + p).
    D can tell an expert without noise from any noisy policy: record --stochastic.
    """
    expert_logit = agent.disc_logit(expert)
    policy_logit = agent.disc_logit(policy)
    # softplus(-x) is -log sigmoid(x), and softplus(x) is -log(1 - sigmoid(x)).
    loss = softplus(-expert_logit).mean() + softplus(policy_logit).mean()
    return loss, {"disc_loss": loss.detach(),
                  "d_expert": expert_logit.detach().sigmoid().mean(),
                  "d_policy": policy_logit.detach().sigmoid().mean()}


def imitation_reward(logit: PerSample, positive: bool) -> PerSample:
    """r = -log(1 - D(s, a)), or r = log D(s, a): high where the policy goes too rarely.
    (The paper's D is 1 - ours, so its cost, log D, is minus the first of these.)

    -log(1 - D) > 0 pays for long episodes, however badly they imitate (Kostrikov et al.
    2019, arXiv:1809.02925), and for avoiding a success that ends the episode. There,
    use log D < 0, as Ho & Ermon's code can. It pays for early ends, even failures.
    """
    return softplus(logit) if positive else -softplus(-logit)


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
class Agent(Policy):  # which adds predict(obs)
    """Actor, critic, discriminator and running statistics."""

    takes = {"obs": "vector", "act": "discrete box"}  # utils/spaces.py

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
        self.encoder = nn.Identity()
        sizes = (*obs_space.shape, *cfg.hidden)
        self.actor = mlp([*sizes, num_outputs], nn.Tanh)
        self.critic = mlp([*sizes, 1], nn.Tanh)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
                nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(self.actor[-1].weight, gain=0.01)  # pi hardly depends on s
        nn.init.orthogonal_(self.critic[-1].weight, gain=1.0)
        disc_sizes = [sizes[0] + num_outputs, *cfg.hidden, 1]
        self.disc = mlp(disc_sizes, nn.Tanh)  # shares none; PyTorch's initial weights
        # At first mean 0 and std 1, so the first rollout is clipped but not normalised.
        self.obs_stats = RunningStats(obs_space.shape)
        self.reward_sum_stats = RunningStats(())  # of G: see `update_stats`
        self.reward_sum = torch.zeros(())  # the last G, from then on [N]; not saved

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take."""
        return self.obs_stats.normalize(obs) if self.cfg.norm_obs else obs.float()

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

    def disc_logit(self, pairs: Pairs) -> PerSample:
        """D(s, a) = sigmoid(logit), the probability that a pair is the expert's."""
        return self.disc(torch.cat([pairs.obs, pairs.act], -1)).squeeze(-1)

    def pairs(self, obs: Tensor, env_act: Tensor) -> Pairs:
        """Raw observations, and actions as `env.step` takes them -> what D sees."""
        if self.discrete:
            act = one_hot(env_act, self.actor[-1].out_features)
        else:
            size = self.high - self.low  # 0 where there is one value
            act = torch.where(size > 0, 2 * (env_act - self.low) / size - 1, -1.0)
            act = act.flatten(1)
        return Pairs(self.normalize_obs(obs), act.float())

    def policy_parameters(self) -> list[nn.Parameter]:  # all but the discriminator's
        named = self.named_parameters()
        return [param for name, param in named if not name.startswith("disc.")]

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
