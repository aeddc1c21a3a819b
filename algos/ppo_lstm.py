"""PPO with an LSTM.  Hochreiter & Schmidhuber 1997; Mnih et al. 2016, arXiv:1602.01783.

The problem. Many tasks are partially observable: PPO's policy sees one observation at a
time, but one frame of a moving ball does not show its velocity.

The idea. Give the policy a memory m, a pair of vectors h and c. At every step, an LSTM
computes the new m from the old m and the observation. Actor and critic see only h, so
pi(a|s) and V(s) are functions of h. All else is PPO.
An iteration of `train`:

    collect_with_memory  act for T steps in N parallel environments, from memory m0
    update               up to `epochs` times:
      recurrent_targets    advantages A and returns R, with the current LSTM and critic
      ppo_loss             one Adam step on it for each random group of environments
    update_stats         running statistics that normalise observations and rewards

Breaking one of four rules raises no error; the agent just learns worse.

    1. An episode starts with m = 0, both in acting and in learning.
    2. A minibatch has all T steps of its environments, since h depends on earlier ones.
    3. A rollout may start within an episode, so learning starts from the m0 of acting.
    4. A gradient step changes the LSTM, so every pass computes h and c anew, from m0.

Departures, besides those of ppo.py. m0 comes from older weights and statistics, and
stays fixed for all epochs, as is common. log pi_old is exact: acting used this m0.

Healthy values. `kl` is 0.002 to 0.03 and `clip_frac` 0.01 to 0.3.

Run   python -m algos.ppo_lstm --env tasks:CartPoleNoVel-v0 --gamma 0.98
Diff  diff algos/ppo.py algos/ppo_lstm.py
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
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
from utils.nets import ObsStats, SquashedGaussian, head_sizes, make_encoder, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Positive, Run, RunConfig, main
from utils.spaces import has_images, is_image
from utils.stats import RunningStats, moments

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Features = Float32[Tensor, "B k"]  # h, all that actor and critic see
Memory = Float32[Tensor, "2 N size"]  # m: memory[0] is h, memory[1] is c
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 512  # T x N samples (64 x 8); N has to divide it (T >= 2)
    minibatch_envs: int = 2  # n, environments per gradient step; it has to divide N
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
    hidden: tuple[int, ...] = (64,)  # layer widths, before (vectors) and after the LSTM
    lstm_size: int = 128  # length of h and of c (32 to 512)
    std_init: Positive = 0.6  # initial sigma before tanh, if continuous (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations by their running statistics
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
    norm_adv: bool = True  # normalise advantages within each minibatch
    recompute_adv: bool = True  # compute A and R anew in every epoch (paper: once)
    bf16: bool = False  # encode images in bfloat16, if the processor has it: faster


# ===================================== data types =====================================
@dataclass(frozen=True)
class Rollout:  # T steps in each of N environments; nothing is normalised
    obs: Shaped[Tensor, "T N *obs"]  # s
    act: Shaped[Tensor, "T N *act"]  # a, before tanh if continuous
    rew: PerStep  # r
    next_obs: Shaped[Tensor, "T N *obs"]  # s', never of the next episode
    terminated: PerStep  # 1 if s' is terminal; 0 otherwise, also at a time limit
    done: PerStep  # 1 if the episode ended, also by a time limit
    memory: Memory  # m0, before the first step


@dataclass(frozen=True)
class Inputs:  # what the networks take: T steps of N environments, B = T x N samples
    obs: Shaped[Tensor, "T N *obs"]  # s, normalised
    done: PerStep
    memory: Memory  # m0

    def __getitem__(self, envs: Int64[Tensor, "n"]) -> Inputs:
        return Inputs(self.obs[:, envs], self.done[:, envs], self.memory[:, envs])


@dataclass(frozen=True)
class Minibatch:  # all T steps of n random environments of a rollout
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
            rollout, obs = collect_with_memory(
                agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            agent.update_stats(rollout)  # last, so that `update` sees what `act` saw
            step += cfg.rollout_steps
            run.store(**metrics)  # the next row of the log averages them
            run.report(step, envs, lr=lr)  # if due: log, evaluate, save
    return agent


def collect_with_memory(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray,
                        num_steps: int) -> tuple[Rollout, np.ndarray]:
    """Act for T = num_steps steps. Return the rollout and the obs to act on next."""
    memory = agent.memory_before(obs)  # m0: rule 3
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
        agent.forget(done)  # rule 1
    return Rollout(**stack_steps(steps, act.device), memory=memory), obs


def update(agent: Agent, optimizer: Adam, rollout: Rollout, lr: float) -> dict:
    """Take many gradient steps on one rollout. Return metrics."""
    cfg = agent.cfg
    obs = Inputs(agent.normalize_obs(rollout.obs), rollout.done, rollout.memory)
    act = rollout.act.flatten(0, 1)
    with torch.no_grad():  # log pi_old(a|s), fixed while pi moves away from pi_old
        logp_old = agent.policy(agent.encoder(obs)).log_prob(act)
    val, adv, ret = recurrent_targets(agent, rollout, obs)
    explained = explained_variance(val, ret)  # before the critic learns from `rollout`
    steps = []  # the metrics of each gradient step
    for epoch in range(cfg.epochs):
        if epoch > 0 and cfg.recompute_adv:  # with the critic as it is now
            _, adv, ret = recurrent_targets(agent, rollout, obs)
        groups = torch.randperm(adv.shape[1]).view(-1, mpi.share(cfg.minibatch_envs))
        grid = torch.arange(adv.numel()).view_as(adv)  # the row of each sample
        indices = grid[:, groups].transpose(0, 1).flatten(1)  # [T, M, n] -> [M, B]
        adv_rows = adv.flatten()[indices]  # [M, B]: one row for each of M minibatches
        if cfg.norm_adv:
            adv_rows = normalize_advantages(adv_rows)
        for envs, rows, adv_row in zip(groups, indices, adv_rows):  # rule 2
            minibatch = Minibatch(obs=obs[envs], act=act[rows], logp_old=logp_old[rows],
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
def recurrent_targets(agent: Agent, rollout: Rollout, obs: Inputs
                      ) -> tuple[PerStep, PerStep, PerStep]:
    """V(s), A and the lambda-return R = A + V(s); `obs`: the rollout's, normalised."""
    cfg = agent.cfg
    rew = rollout.rew
    if cfg.scale_rew:  # so that one learning rate suits all scales of reward
        rew = agent.reward_sum_stats.scale(rew)
    features, memories = agent.unroll(obs)
    val = agent.value(features).view_as(rew)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # within an episode, s' is the s of the next step
    ends = rollout.done.bool()
    ends[-1] = True  # where an episode or the rollout ends, s' is only in next_obs
    next_obs = agent.normalize_obs(rollout.next_obs[ends])
    # One more step of the LSTM, from the memory before any reset.
    h, _ = agent.remember(agent.embed(next_obs)[None], memories[:, ends])
    next_val[ends] = agent.value(h[0])
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
    """Actor, critic, LSTM and running statistics, and the memory of `act`."""

    takes = {"obs": "vector image dict", "act": "discrete box"}  # utils/spaces.py

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
        sizes = head_sizes(obs_space, cfg.hidden)
        self.embed = nn.Sequential(mlp(sizes, nn.Tanh), nn.Tanh())
        if is_image(obs_space):
            self.embed = make_encoder(obs_space, cfg.bf16)
        elif has_images(obs_space):  # of a Dict: encode the images, then join all parts
            self.embed = nn.Sequential(make_encoder(obs_space, cfg.bf16), self.embed)
        self.lstm = nn.LSTM(sizes[-1], cfg.lstm_size)  # PyTorch's initial weights
        self.actor = mlp([cfg.lstm_size, *cfg.hidden, num_outputs], nn.Tanh)
        self.critic = mlp([cfg.lstm_size, *cfg.hidden, 1], nn.Tanh)
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
        self.register_buffer("memory", torch.zeros(2, 0, 0), persistent=False)  # m

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
        return Categorical(logits=out, validate_args=False)

    def value(self, features: Features) -> PerSample:
        return self.critic(features).squeeze(-1)  # [B, 1] -> [B]

    def memory_before(self, obs: Tensor | np.ndarray) -> Memory:
        """m before `act` sees obs [N, ...]: 0 at first and if N changes."""
        if self.memory.shape[1] != len(obs):
            self.memory = self.memory.new_zeros(2, len(obs), self.cfg.lstm_size)
        return self.memory

    def forget(self, done: np.ndarray | None = None) -> None:
        """Set m to 0; with `done` [N], only where an episode ended."""
        kept = torch.as_tensor(0 if done is None else ~done, device=self.memory.device)
        self.memory = self.memory * kept.unsqueeze(-1)

    def remember(self, embedded: Float32[Tensor, "T N k"], memory: Memory
                 ) -> tuple[Float32[Tensor, "T N size"], Memory]:
        """Take T steps of the LSTM without a reset. Return all h and the last m.

            c <- sigmoid(F) c + sigmoid(I) tanh(G),  h <- sigmoid(O) tanh(c),
            where F, I, G, O are linear in the embedded observation and the last h
        """
        h, after = self.lstm(embedded, (memory[:1], memory[1:]))
        return h, torch.cat(after)

    def unroll(self, obs: Inputs) -> tuple[Features, Float32[Tensor, "2 T N size"]]:
        """Return all h, and m after each step that ends an episode or the rollout.

            h_t, c_t = LSTM(s_t, (1 - done_{t-1}) (h_{t-1}, c_{t-1}))

        nn.LSTM takes many steps at once, but cannot reset. So wherever an episode ends,
        the sequences of all N environments are cut.
        """
        embedded = self.embed(obs.obs.flatten(0, 1)).unflatten(0, obs.done.shape)
        ends = obs.done[:-1].any(dim=1).nonzero().flatten()  # steps that end an episode
        cuts = (ends + 1).tolist()  # the first step of each piece but the first
        pieces = zip(embedded.tensor_split(cuts), obs.done.tensor_split(cuts))
        memory, hidden, memories = obs.memory, [], []
        for piece, done in pieces:
            h, memory = self.remember(piece, memory)
            hidden.append(h)
            # Right only in the last row of the piece; no other is used.
            memories.append(memory.unsqueeze(1).expand(-1, len(piece), -1, -1))
            memory = memory * (1 - done[-1])[:, None]  # rule 1
        return torch.cat(hidden).flatten(0, 1), torch.cat(memories, dim=1)

    def encoder(self, obs: Inputs) -> Features:
        """All h, computed anew from m0: rule 4."""
        return self.unroll(obs)[0]

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> discrete actions [N], or [N, k] before tanh."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        embedded = self.embed(self.normalize_obs(obs))
        h, self.memory = self.remember(embedded[None], self.memory_before(obs))
        pi = self.policy(h[0])
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
