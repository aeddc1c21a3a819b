"""PPO with random network distillation (RND).  Burda et al. 2018, arXiv:1810.12894.

The problem. PPO learns from rewards that its policy meets by chance. If the first one
is a hundred right steps away, it meets none, and nothing tells it where to look.

The idea. Reward what is new. A network f with random weights, which never change, maps
observations to features. A predictor learns f's features of the observations that the
agent meets. It errs where the agent has rarely been, so its error is an intrinsic
reward i, beside the reward r of the environment.
An iteration of `train`:

    collect              act for T steps in N parallel environments
    add_intrinsic        i for each step: the predictor's error / the std of its sums
    update               up to `epochs` times:
      compute_targets      advantages A and returns R (on games once, before)
      intrinsic_targets    those of i, A_i and R_i, with a critic V_i of its own
      rnd_loss             one Adam step on it for each random minibatch
    update_predictor     one Adam step of the predictor for each random minibatch
    update_stats         running statistics that normalise observations and rewards

Departures, besides those of ppo.py. gamma is 0.99 (paper: 0.999). The first rollout
replaces the paper's random steps. The predictor has its own optimizer, one layer more
than f (two), and all s' with all frames (a quarter of them, with the last frame).

Healthy values. `pred_loss` falls, and rises when new places are found: on Rooms-v0
from 0.8 to 0.2, and to 0.3 before the first reward.

Run   python -m algos.ppo_rnd --env tasks:Rooms-v0 --total-steps 3e5
Diff  diff algos/ppo.py algos/ppo_rnd.py
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
# RunningStats  normalize(x) = clip((x - mean) / std, -10, 10)
#               scale(x)     = clip(x / std, -10, 10)
from utils import mpi
from utils.envs import make_envs, stack_steps
from utils.nets import (
    ObsStats, SquashedGaussian, categoricals, head_sizes, make_encoder, mlp)
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Positive, Run, RunConfig, check_range, main
from utils.spaces import part_sizes
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
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 2048  # T x N samples (256 x 8); N and B have to divide it
    minibatch_size: int = 256  # B, samples per gradient step (32 to 4096)
    epochs: int = 10  # passes over each rollout (3 to 20)
    lr: Positive = 1e-3  # Adam's initial learning rate (1e-5 to 3e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    lam: Fraction = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    ext_coef: float = 2.0  # weight of A among advantages (0: i alone)
    int_coef: float = 1.0  # weight of A_i among advantages (0: PPO but for L_i)
    int_gamma: float = 0.99  # discount factor of i (0.9 to 0.999)
    pred_lr: Positive = 1e-3  # Adam's learning rate for the predictor (1e-4 to 1e-3)
    pred_share: Positive = 1.0  # share of a rollout that it sees (less: i lasts longer)
    clip_ratio: Positive = 0.2  # epsilon in the paper, range of the ratio (0.1 to 0.3)
    target_kl: float = 0.05  # no more epochs if `kl` is above it (0.01 to 0.1); 0: off
    vf_coef: float = 0.25  # weight of the value loss, c1 in the paper (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 in the paper (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, unless obs is an image
    std_init: Positive = 0.6  # initial sigma before tanh, if continuous (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations by their running statistics
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
    norm_adv: bool = True  # normalise advantages within each minibatch
    recompute_adv: bool = True  # compute A and R anew in every epoch (paper: once)
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster
    act_parts = True  # `Agent.policy` takes actions of several parts, as MultiDiscrete
    for_games = {  # for MinAtar/ and ALE/, unless a flag says otherwise
        "rollout_steps": 1024, "minibatch_size": 256, "epochs": 4, "lr": 3e-3,
        "clip_ratio": 0.1, "target_kl": 0.0, "ent_coef": 0.01, "scale_rew": False,
        "recompute_adv": False}
    for_atari = {"lr": 2.5e-4}  # for ALE/; as OpenAI Baselines, but V is not clipped

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "int_gamma", high=0.9999)  # raises UsageError; J would grow
        check_range(self, "pred_share", high=1)


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
class IntrinsicRollout(Rollout):  # with what A_i and R_i need besides
    int_rew: PerStep  # i, in units of std(J): see `Agent.add_intrinsic`
    last_obs: Shaped[Tensor, "1 N *obs"]  # where the agent acts after the rollout


@dataclass(frozen=True)
class Minibatch:  # B random samples of a rollout
    obs: Inputs  # s, normalised
    act: Shaped[Tensor, "B *act"]  # a
    logp_old: PerSample  # log pi_old(a|s)
    adv: PerSample  # ext_coef A + int_coef A_i
    ret: PerSample  # R: what the critic is to predict in s
    int_ret: PerSample  # R_i: what V_i is to predict in s


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = Adam(agent.policy_parameters(), eps=1e-5)  # OpenAI Baselines' eps
        pred_opt = Adam(agent.predictor)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, policy=optimizer, pred=pred_opt)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            rollout = agent.add_intrinsic(rollout, obs)
            metrics = update(agent, optimizer, rollout, lr)
            pred_metrics = update_predictor(agent, pred_opt, rollout)
            agent.update_stats(rollout)  # last, so that `update` sees what `act` saw
            step += cfg.rollout_steps
            run.store(**metrics, **pred_metrics)  # the next row averages them
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


def update(agent: Agent, optimizer: Adam, rollout: IntrinsicRollout, lr: float) -> dict:
    """Take many gradient steps on one rollout. Return metrics."""
    cfg = agent.cfg
    obs = agent.normalize_obs(rollout.obs).flatten(0, 1)  # [T, N, ...] -> [TN, ...]
    act = rollout.act.flatten(0, 1)
    with torch.no_grad():  # log pi_old(a|s), fixed while pi moves away from pi_old
        logp_old = agent.policy(agent.encoder(obs)).log_prob(act)
    val, adv, ret = compute_targets(agent, rollout, obs)
    int_adv, int_ret = intrinsic_targets(agent, rollout, obs)
    explained = explained_variance(val, ret)  # before the critic learns from `rollout`
    steps = []  # the metrics of each gradient step
    for epoch in range(cfg.epochs):
        if epoch > 0 and cfg.recompute_adv:  # with the critic as it is now
            _, adv, ret = compute_targets(agent, rollout, obs)
            int_adv, int_ret = intrinsic_targets(agent, rollout, obs)
        indices = torch.randperm(len(obs)).view(-1, mpi.share(cfg.minibatch_size))
        both = cfg.ext_coef * adv + cfg.int_coef * int_adv
        adv_rows = both.flatten()[indices]  # [M, B]: one row for each of M minibatches
        if cfg.norm_adv:
            adv_rows = normalize_advantages(adv_rows)
        for rows, adv_row in zip(indices, adv_rows):
            minibatch = Minibatch(obs=obs[rows], act=act[rows], logp_old=logp_old[rows],
                                  adv=adv_row, ret=ret.flatten()[rows],
                                  int_ret=int_ret.flatten()[rows])
            loss, metrics = rnd_loss(agent, minibatch)
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
        "int_rew": rollout.int_rew,
        "epochs": epoch + 1, "val": val, "explained_variance": explained}


def update_predictor(agent: Agent, pred_opt: Adam, rollout: IntrinsicRollout) -> dict:
    """Train the predictor on observations s' of the rollout. Return metrics."""
    cfg = agent.cfg
    next_obs = rollout.next_obs.flatten(0, 1)  # [T, N, ...] -> [TN, ...]
    indices = torch.randperm(len(next_obs)).view(-1, mpi.share(cfg.minibatch_size))
    steps = []  # the metrics of each gradient step
    for rows in indices[:math.ceil(cfg.pred_share * len(indices))]:
        loss, metrics = predictor_loss(agent, agent.novelty_inputs(next_obs[rows]))
        pred_opt.zero_grad()
        loss.backward()
        pred_opt.average_grads()  # over processes
        grad_norm = pred_opt.grad_norm()  # never clipped
        pred_opt.step(cfg.pred_lr)
        steps.append(metrics | {"pred_grad_norm": grad_norm})
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


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


@torch.no_grad()
def intrinsic_targets(agent: Agent, rollout: IntrinsicRollout,
                      obs: Shaped[Tensor, "TN *obs"]) -> tuple[PerStep, PerStep]:
    """A_i, and R_i = A_i + V_i(s), by `gae` in which no episode ever ends.

        delta_t = i_t + int_gamma V_i(s_{t+1}) - V_i(s_t)

    s_{t+1} is where the agent acts next. After an episode that is the first state of
    the next one, not s'_t: the search goes on there. So an end costs the way back and
    not the whole future, and the agent dares what may end an episode. i_t is that of
    s'_t, so a new end pays.
    """
    cfg = agent.cfg
    last_obs = agent.normalize_obs(rollout.last_obs).flatten(0, 1)
    val = agent.int_value(agent.encoder(torch.cat([obs, last_obs])))
    val = val.view(-1, len(last_obs))  # [T + 1, N]
    never = torch.zeros_like(rollout.done)
    adv = gae(rollout.int_rew, val[:-1], val[1:], never, never, cfg.int_gamma, cfg.lam)
    return adv, adv + val[:-1]


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


def rnd_loss(agent: Agent, batch: Minibatch) -> tuple[Scalar, dict]:
    """L = L_pi + vf_coef (L_V + L_i) - ent_coef H, one loss for actor and critics.

        L_pi   makes good actions more likely: see `clipped_policy_loss`
        L_V    = mean (V(s) - R)^2
        L_i    = mean (V_i(s) - R_i)^2
        H      the entropy of pi, keeps it exploring: see `Agent.policy`
    """
    cfg = agent.cfg
    features = agent.encoder(batch.obs)
    pi = agent.policy(features)
    val, int_val = agent.value(features), agent.int_value(features)
    logp = pi.log_prob(batch.act)
    pi_loss = clipped_policy_loss(logp, batch.logp_old, batch.adv, cfg.clip_ratio)
    assert val.shape == batch.ret.shape  # [B] minus [B, 1] would be [B, B]
    assert int_val.shape == batch.int_ret.shape
    v_loss = (val - batch.ret).square().mean()
    int_v_loss = (int_val - batch.int_ret).square().mean()
    ent = pi.entropy().mean()
    loss = pi_loss + cfg.vf_coef * (v_loss + int_v_loss) - cfg.ent_coef * ent
    return loss, {"pi_loss": pi_loss.detach(), "v_loss": v_loss.detach(),
                  "int_v_loss": int_v_loss.detach(), "entropy": ent.detach()}


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


def predictor_loss(agent: Agent, inputs: Inputs) -> tuple[Scalar, dict]:
    """L = mean e(s'), where e is the predictor's error: see `Agent.novelty`."""
    loss = agent.novelty(inputs).mean()
    return loss, {"pred_loss": loss.detach()}


# ======================================= agent ========================================
class Agent(Policy):  # which adds predict(obs)
    """Actor, critics, f, its predictor and running statistics."""

    takes = {"obs": "vector image", "act": "discrete parts box"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        self.discrete = not isinstance(act_space, gym.spaces.Box)
        if self.discrete:
            self.sizes = part_sizes(act_space)  # [number of actions], or one per part
            num_outputs = sum(self.sizes)  # one logit per action
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
        self.int_critic = mlp([*sizes, 1], nn.Tanh)
        width = sizes[-1]  # the number of f's features
        self.target = nn.Sequential(  # f
            make_encoder(obs_space, cfg.bf16), mlp([*sizes, width], nn.ReLU))
        self.predictor = nn.Sequential(  # with a layer more, as it has to imitate f
            make_encoder(obs_space, cfg.bf16), mlp([*sizes, width, width], nn.ReLU))
        self.target.requires_grad_(False)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
                nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(self.actor[-1].weight, gain=0.01)  # pi hardly depends on s
        nn.init.orthogonal_(self.critic[-1].weight, gain=1.0)
        nn.init.orthogonal_(self.int_critic[-1].weight, gain=1.0)
        # At first mean 0 and std 1, so the first rollout is clipped but not normalised.
        self.obs_stats = ObsStats(obs_space)  # of vectors
        self.reward_sum_stats = RunningStats(())  # of G: see `update_stats`
        self.reward_sum = torch.zeros(())  # the last G, from then on [N]; not saved
        self.novelty_stats = RunningStats(obs_space.shape)  # of s', also of images
        self.int_sum_stats = RunningStats(())  # of J: see `add_intrinsic`
        self.register_buffer("int_sum", torch.zeros(()))  # the last J, mean of N: saved

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take. The encoder scales images."""
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
        if len(self.sizes) > 1:
            return categoricals(out, self.sizes)
        return Categorical(logits=out, validate_args=False)

    def value(self, features: Features) -> PerSample:
        return self.critic(features).squeeze(-1)  # [B, 1] -> [B]

    def int_value(self, features: Features) -> PerSample:
        return self.int_critic(features).squeeze(-1)

    def policy_parameters(self) -> list[nn.Parameter]:  # all but the predictor's
        named = self.named_parameters()
        return [param for name, param in named if not name.startswith("predictor.")]

    def novelty_inputs(self, obs: Tensor) -> Tensor:
        """Raw observations x -> what f and the predictor take.

        clip((x - mean) / std, -5, 5), also of pixels, as f cannot adapt to their scale.
        """
        inputs = self.novelty_stats.normalize(obs).clamp(-5, 5)
        return inputs * 255 if self.obs_stats.image else inputs  # encoders divide by it

    def novelty(self, inputs: Inputs) -> PerSample:
        """e(s) = mean_j (predictor_j(s) - f_j(s))^2, over all features j."""
        return (self.predictor(inputs) - self.target(inputs)).square().mean(-1)

    @torch.no_grad()
    def add_intrinsic(self, rollout: Rollout, last_obs: np.ndarray) -> IntrinsicRollout:
        """Return the rollout with i, after an update of the statistics that i needs.

            i_t = e(s'_t) / std(J),  where J_t = e(s'_t) + int_gamma J_{t-1}

        J varies as returns of e do, and ends of episodes cut neither. A rollout goes on
        from the mean of the last J of all environments. The mean of e is not
        subtracted, so no i is negative. Before training, the paper measures
        observations by random steps. Here the first rollout is nearly that.
        """
        next_obs = rollout.next_obs.flatten(0, 1)  # [T, N, ...] -> [TN, ...]
        self.novelty_stats.update(next_obs)  # at once: f needs them from the start
        novelty = self.novelty(self.novelty_inputs(next_obs)).view_as(rollout.rew)
        sums = [self.int_sum.expand_as(novelty[0])]
        for row in novelty:
            sums.append(row + self.cfg.int_gamma * sums[-1])
        self.int_sum_stats.update(torch.cat(sums[1:]))
        self.int_sum.copy_(mpi.average(sums[-1].mean()))
        int_rew = (novelty / (self.int_sum_stats.var + 1e-8).sqrt()).float()
        last_obs = torch.as_tensor(last_obs.copy(), device=novelty.device)[None]
        return IntrinsicRollout(**vars(rollout), int_rew=int_rew, last_obs=last_obs)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> discrete actions [N] or, of k parts, [N, k];
        or continuous ones [N, k] before tanh."""
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
