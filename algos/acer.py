"""Actor-Critic with Experience Replay (ACER).  Wang et al. 2017, arXiv:1611.01224.

The problem. A2C takes one gradient step on a rollout and then throws it away, because
the policy gradient is an expectation under the current policy, pi.

The idea. Keep rollouts in a buffer and learn from them again. Let mu be the earlier
policy that collected one. Weighted by the ratio rho(a) = pi(a|s) / mu(a|s), a mean over
actions from mu becomes one over actions from pi. But ratios can be huge, products of
ratios even more so, and then a few samples dominate the mean. So ACER limits ratios,
and pi's steps away from its own running average. An iteration of `train`:

    collect_with_policy    act for T steps in N environments; keep log mu(a|s)
    update                 on this rollout, then on `replay_ratio` random ones:
      compute_q_targets      targets for Q, with ratios up to 1: see `retrace`
      acer_loss              one RMSProp step on the whole rollout, with ratios up to c:
                             see `policy_gradient`, and `project` for the other limit
      polyak_update          move the average policy
    update_stats           running statistics that normalise observations and rewards

Departures, besides those of a2c.py. In the paper, g, k and z (see `acer_loss`) are
gradients in the probabilities, so our max_slope does not compare with its delta. The
number of replays is fixed, not drawn from a Poisson distribution. Actions are discrete.

Healthy values. On CartPole `projected` is 0 to 0.03, `kl_avg` below 0.3,
`replayed_explained_variance` 0.2 to 0.9 and `replayed_ratio` 0.99 to 1.01 (far from 1,
mu is not that of the data).

Run   python -m algos.acer --total-steps 1e5
Diff  diff algos/a2c.py algos/acer.py
"""
from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical

# mpi           several processes may share the environments and each batch. Config
#               has totals; mpi.share(total) is the part of this process
# make_envs     when an episode ends, the same `step` starts a new one and returns its
#               first obs; infos["final_obs"] has the last obs of the old one
# stack_steps   T dicts of arrays [N, ...] -> tensors [T, N, ...]; bools become 0 and 1
# RunningStats  normalize(x) = clip((x - mean) / std, -10, 10)
#               scale(x)     = clip(x / std, -10, 10)
from utils import mpi
from utils.buffers import check_memory
from utils.envs import make_envs, stack_steps
from utils.nets import ObsStats, head_sizes, make_encoder, mlp
from utils.optim import RMSProp
from utils.policy import Policy
from utils.run import Fraction, Natural, Positive, Run, RunConfig, main
from utils.stats import RunningStats

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
PerAction = Float32[Tensor, "B n"]  # one number per sample for each of n actions
Inputs = Shaped[Tensor, "B *obs"]  # normalised observations: what the networks take
Features = Float32[Tensor, "B k"]  # of an image, its encoding; a vector as it is
Choices = Int64[Tensor, "B"]  # indices of actions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds seed, ... (see --help), and checks all values
    env: str = "CartPole-v1"  # Gymnasium id
    total_steps: float = 5e5  # environment steps, rounded up to whole rollouts
    num_envs: int = 16  # N, parallel environments (8 to 64)
    report_every: int = 4000  # environment steps between rows of the log
    rollout_steps: int = 320  # T x N samples (20 x 16); N has to divide it
    buffer_size: int = 64_000  # environment steps kept: whole rollouts, at least one
    replay_ratio: Natural = 4  # updates on replayed rollouts per new one (0 to 8)
    lr: Positive = 1e-3  # RMSProp's initial learning rate (1e-4 to 3e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    rmsprop_eps: Positive = 1e-5  # RMSProp's epsilon (1e-5 to 1e-3)
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    lam: Fraction = 1.0  # Retrace's lambda (lower: more bias; higher: more variance)
    max_ratio: Positive = 10.0  # c, limit of ratios in the policy gradient (1 to 10)
    max_slope: float = 0.1  # limit of the KL's slope: `project` (0.01 to 0.5); 0: off
    tau: Fraction = 0.01  # Polyak coefficient of the average; 1 - alpha in the paper
    vf_coef: float = 0.5  # weight of the loss of Q (0.1 to 1)
    ent_coef: float = 0.01  # weight of the entropy bonus (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, unless obs is an image
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster
    for_games = {  # for MinAtar/ and ALE/, unless a flag says otherwise
        "total_steps": 1e6, "lr": 3e-3}
    for_atari = {"lr": 1e-3}  # for ALE/, over those


# ===================================== data types =====================================
@dataclass(frozen=True)
class Rollout:  # T steps in each of N environments; nothing is normalised
    obs: Shaped[Tensor, "T N *obs"]  # s
    act: Shaped[Tensor, "T N *act"]  # a
    rew: PerStep  # r
    next_obs: Shaped[Tensor, "T N *obs"]  # s', never of the next episode
    terminated: PerStep  # 1 if s' is terminal; 0 otherwise, also at a time limit
    done: PerStep  # 1 if the episode ended, also by a time limit
    log_mu: Float32[Tensor, "T N n"]  # log mu(a|s) of every action a


@dataclass(frozen=True)
class Batch:  # a whole rollout: B = TN samples
    obs: Inputs  # s, normalised
    act: Choices  # a_t, the action taken
    log_mu: PerAction  # log mu(a|s)
    ret: PerSample  # R: what the critic is to predict for s and a_t


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = RMSProp(agent, cfg.rmsprop_eps)  # without the average
        buffer = ReplayBuffer(
            mpi.share(cfg.buffer_size), envs.single_observation_space, run.device)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, optimizer=optimizer, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect_with_policy(
                agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            buffer.add(rollout)
            for _ in range(cfg.replay_ratio):
                replayed = update(agent, optimizer, buffer.sample(), lr)
                run.store(**{f"replayed_{name}": replayed[name] for name in replayed})
            agent.update_stats(rollout)  # last, so that `update` sees what `act` saw
            step += cfg.rollout_steps
            run.store(**metrics)  # the next row of the log averages them
            run.report(step, envs, lr=lr)  # if due: log, evaluate, save
    return agent


def collect_with_policy(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray,
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
    columns = stack_steps(steps, act.device)
    with torch.no_grad():  # now, while weights and statistics are those that acted
        inputs = agent.normalize_obs(columns["obs"]).flatten(0, 1)
        mu = agent.policy(agent.encoder(inputs))
    log_mu = mu.logits.unflatten(0, (num_steps, -1))
    return Rollout(**columns, log_mu=log_mu), obs


def update(agent: Agent, optimizer: RMSProp, rollout: Rollout, lr: float) -> dict:
    """Take one gradient step on the whole rollout, new or replayed. Return metrics."""
    cfg = agent.cfg
    obs = agent.normalize_obs(rollout.obs).flatten(0, 1)  # [T, N, ...] -> [TN, ...]
    act = rollout.act.flatten(0, 1)
    q, ret = compute_q_targets(agent, rollout, obs)
    explained = explained_variance(q, ret)  # before the critic learns from `rollout`
    batch = Batch(obs=obs, act=act, log_mu=rollout.log_mu.flatten(0, 1),
                  ret=ret.flatten())
    loss, metrics = acer_loss(agent, batch)  # Q again, now with its gradient
    optimizer.zero_grad()
    loss.backward()
    optimizer.average_grads()  # over processes
    grad_norm = optimizer.clip_grads(cfg.max_grad_norm)
    optimizer.step(lr)
    polyak_update(agent.policy_avg, agent.policy_net(), cfg.tau)
    return metrics | {
        "grad_norm": grad_norm, "q": q, "explained_variance": explained}


# ======================================= losses =======================================
@torch.no_grad()
def compute_q_targets(agent: Agent, rollout: Rollout,
                      obs: Shaped[Tensor, "TN *obs"]) -> tuple[PerStep, PerStep]:
    """Q(s, a) of the actions taken and its targets R; `obs` are normalised."""
    cfg = agent.cfg
    rew = rollout.rew
    if cfg.scale_rew:  # so that one learning rate suits all scales of reward
        rew = agent.reward_sum_stats.scale(rew)
    pi, q_all = agent(obs)  # of all actions
    val = state_value(pi, q_all).view_as(rew)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # within an episode, s' is the s of the next step
    ends = rollout.done.bool()
    ends[-1] = True  # where an episode or the rollout ends, s' is only in next_obs
    next_obs = agent.normalize_obs(rollout.next_obs[ends])
    next_val[ends] = state_value(*agent(next_obs))
    act = rollout.act.flatten()
    log_ratio = pi.logits - rollout.log_mu.flatten(0, 1)
    ratio = pick(log_ratio.exp(), act).view_as(rew)
    q = pick(q_all, act).view_as(rew)
    ret = retrace(rew, q, next_val, ratio, rollout.terminated, rollout.done, cfg.gamma,
                  cfg.lam)
    return q, ret


def state_value(pi: Categorical, q: PerAction) -> PerSample:
    """V(s) = sum_a pi(a|s) Q(s, a)."""
    return (pi.probs * q).sum(-1)


def pick(values: PerAction, act: Choices) -> PerSample:
    """The number that belongs to the action taken, for each sample."""
    return values.gather(-1, act.unsqueeze(-1)).squeeze(-1)


def retrace(rew: PerStep, q: PerStep, next_val: PerStep, ratio: PerStep,
            terminated: PerStep, done: PerStep, gamma: float, lam: float) -> PerStep:
    """Retrace (Munos et al. 2016, arXiv:1606.02647): the critic's targets R.

        delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - Q(s_t, a_t)
        E_t     = delta_t + gamma lam (1 - done_t) min(1, rho_{t+1}) E_{t+1}
        R_t     = Q(s_t, a_t) + E_t,  where rho_t = rho(a_t)

    delta needs no ratio: a_t is given, and V is a mean over actions of pi. As in GAE, E
    adds later deltas, so that R relies less on Q. But mu chose the later actions, so
    they need ratios. A product of ratios can be huge; with the min it is at most 1. If
    Q is exact, this adds no bias, because every delta then has mean zero.
    """
    delta = rew + gamma * (1 - terminated) * next_val - q
    decay = (gamma * lam * (1 - done)).cpu().numpy()
    trace = ratio.clamp(max=1).cpu().numpy()
    error = delta.cpu().numpy()  # a loop in NumPy is faster
    for t in reversed(range(len(error) - 1)):  # beyond the rollout, only V is known
        error[t] += decay[t] * (trace[t + 1] * error[t + 1])
    return torch.as_tensor(error, device=q.device) + q


def acer_loss(agent: Agent, batch: Batch) -> tuple[Scalar, dict]:
    """L = L_pi + vf_coef L_Q - ent_coef H, one loss for actor and critic.

        L_pi = -mean sum_a z(a) log pi(a|s), where z is a constant
        L_Q  = mean (Q(s, a_t) - R)^2
        H    is the entropy of pi, which keeps it exploring; `project` does not limit it
        g    the policy gradient, estimated from old data: see `policy_gradient`
        k    = grad KL(avg || pi) = pi - avg, which leads away from avg
        z    is g, but leads away from avg only slowly: see `project`

    z is the direction in which the logits of a sample should move. It sums to 0 over
    the actions, so the gradient of L_pi in these logits is -z / B.

    A few noisy estimates can ruin pi, but a lower learning rate would slow all steps.
    So ACER limits only those away from avg, the average policy, by the slope of KL(avg
    || pi) along z. avg lags about 1/tau updates behind pi: even a slow drift counts.
    """
    cfg = agent.cfg
    pi, q = agent(batch.obs)
    with torch.no_grad():  # z is a constant
        ratio = (pi.logits - batch.log_mu).exp()  # rho of every action
        g = policy_gradient(pi, q, ratio, batch.act, batch.ret, cfg.max_ratio)
        avg = agent.average_policy(batch.obs)
        k = pi.probs - avg.probs
        z = project(g, k, cfg.max_slope) if cfg.max_slope > 0 else g
        kl_avg = (avg.probs * (avg.logits - pi.logits)).sum(-1).mean()
    pi_loss = -(z * pi.logits).sum(-1).mean()
    q_loss = (pick(q, batch.act) - batch.ret).square().mean()
    ent = pi.entropy().mean()
    loss = pi_loss + cfg.vf_coef * q_loss - cfg.ent_coef * ent
    return loss, {"ratio": pick(ratio, batch.act), "kl_avg": kl_avg,
                  "projected": (z != g).any(-1).float().mean(),  # the share of samples
                  "q_loss": q_loss.detach(), "entropy": ent.detach()}


def policy_gradient(pi: Categorical, q: PerAction, ratio: PerAction, act: Choices,
                    ret: PerSample, max_ratio: float) -> PerAction:
    """g, an estimate of the policy gradient in each sample's logits; c = max_ratio.

        u(a) = [a = a_t] min(c, rho(a)) (R - V(s))
               + pi(a|s) max(0, 1 - c / rho(a)) (Q(s, a) - V(s))
        g    = sum_a u(a) grad log pi(a|s),  g(b) = u(b) - pi(b|s) sum_a u(a)

    R - V(s) estimates the advantage of a_t. One huge rho(a_t) could outweigh a whole
    batch, but with the min alone, actions with rho > c count too little. The second
    term adds the rest, with Q, since only a_t has an R. Check, for exact Q: a_t is a
    with probability mu, so the mean weight of a's advantage is mu min(c, pi / mu) +
    max(0, pi - c mu) = pi, as in the policy gradient. States stay those of mu.
    """
    assert pi.probs.shape == q.shape == ratio.shape and act.shape == ret.shape
    val = state_value(pi, q)
    first = pick(ratio, act).clamp(max=max_ratio) * (ret - val)  # for a_t alone
    correction = pi.probs * (1 - max_ratio / ratio).clamp(min=0)  # 0 if rho <= c
    u = correction * (q - val.unsqueeze(-1))
    u = u.scatter_add(-1, act.unsqueeze(-1), first.unsqueeze(-1))
    return u - pi.probs * u.sum(-1, keepdim=True)


def project(g: PerAction, k: PerAction, max_slope: float) -> PerAction:
    """z = g - max(0, (k^T g - max_slope) / k^T k) k, for each sample.

    If the logits move along z, KL(avg || pi) changes at the rate k^T z, its slope. z is
    the vector closest to g whose slope is at most max_slope. Without the max, a g of
    smaller slope would be pushed away from avg.
    """
    # If pi = avg, then k = 0. The quotient is -inf and clamped to 0, so z = g.
    excess = (k * g).sum(-1, keepdim=True) - max_slope
    return g - (excess / k.square().sum(-1, keepdim=True)).clamp(min=0) * k


@torch.no_grad()
def polyak_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """w_targ <- w_targ + tau (w - w_targ), in place."""
    for w_targ, w in zip(target.parameters(), source.parameters()):
        w_targ.lerp_(w, tau)


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1 - var(R - V) / var R. R contains V, which flatters V."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= agent ========================================
class Agent(Policy):  # which adds predict(obs)
    """Actor, average policy, critic and running statistics: all that acting needs."""

    takes = {"obs": "vector image dict", "act": "discrete"}  # utils/spaces.py

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space)
        self.cfg = cfg
        num_outputs = int(act_space.n)  # one logit and one Q per action
        self.encoder = make_encoder(obs_space, cfg.bf16)
        sizes = head_sizes(obs_space, cfg.hidden)
        self.actor = mlp([*sizes, num_outputs], nn.Tanh)
        self.critic = mlp([*sizes, num_outputs], nn.Tanh)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
                nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(self.actor[-1].weight, gain=0.01)  # pi hardly depends on s
        nn.init.orthogonal_(self.critic[-1].weight, gain=1.0)
        self.policy_avg = copy.deepcopy(self.policy_net()).requires_grad_(False)
        # At first mean 0 and std 1, so the first rollout is clipped but not normalised.
        self.obs_stats = ObsStats(obs_space)  # of vectors
        self.reward_sum_stats = RunningStats(())  # of G: see `update_stats`
        self.reward_sum = torch.zeros(())  # the last G, from then on [N]; not saved

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take. The encoder scales images."""
        return self.obs_stats.normalize(obs)

    def policy(self, features: Features) -> Categorical:
        """pi(.|s). Its `logits` are log pi(a|s) for every action a; `probs` are pi."""
        return Categorical(logits=self.actor(features), validate_args=False)

    def average_policy(self, obs: Inputs) -> Categorical:
        """avg(.|s): the average of `policy` has an encoder of its own."""
        return Categorical(logits=self.policy_avg(obs), validate_args=False)

    def policy_net(self) -> nn.Sequential:
        """Encoder and actor, which `policy_avg` follows."""
        return nn.Sequential(self.encoder, self.actor)

    def forward(self, obs: Inputs) -> tuple[Categorical, PerAction]:
        """pi(.|s), and Q(s, a) of every action a."""
        features = self.encoder(obs)
        return self.policy(features), self.critic(features)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N]."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
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
        self.obs_stats.update(rollout.obs.flatten(0, 1))


# ======================================= buffer =======================================
class ReplayBuffer:
    """The latest rollouts, raw: at least one, at most `capacity` environment steps."""

    def __init__(self, capacity: int, obs_space: gym.Space, device: torch.device):
        num_bytes = 2 * capacity * obs_space.sample().nbytes  # of obs and next_obs
        check_memory("--buffer-size", capacity, num_bytes)  # raises UsageError
        self.capacity = capacity
        self.device = device
        self.rollouts = []  # the oldest first

    def add(self, rollout: Rollout) -> None:
        num_rollouts = max(1, self.capacity // rollout.rew.numel())
        self.rollouts = [*self.rollouts, rollout][-num_rollouts:]

    def sample(self) -> Rollout:
        """A uniformly random rollout: T steps of all environments."""
        return self.rollouts[torch.randint(len(self.rollouts), ())]

    def state_dict(self) -> dict:
        return {"rollouts": [vars(rollout) for rollout in self.rollouts]}

    def load_state_dict(self, state: dict) -> None:
        self.rollouts = [
            Rollout(**{name: x.to(self.device) for name, x in columns.items()})
            for columns in state["rollouts"]]


if __name__ == "__main__":
    main(train, Config, __doc__)
