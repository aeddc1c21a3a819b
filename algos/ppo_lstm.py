"""PPO with an LSTM, for partially observable tasks.  PPO: Schulman et al. 2017.  LSTM:
Hochreiter & Schmidhuber 1997; in an actor-critic: Mnih et al. 2016, arXiv:1602.01783.

The problem. PPO's policy sees one observation at a time, but one frame of a moving ball
does not show its velocity.

The idea. Give the policy a memory m, a pair of vectors h and c. At every step, an LSTM
computes the new m from the old m and the observation. Actor and critic see only h, so
pi(a|s) and V(s) are functions of h. An iteration of `train`:

    collect_with_memory    act for T steps in N parallel environments, from memory m0
    update                 `epochs` times:
      recurrent_targets      advantages A and returns R, by the current LSTM and critic
      recurrent_ppo_loss     one Adam step on it for each random group of environments
    update_stats           running statistics that normalise observations and rewards

Breaking one of four rules raises no error; the agent just learns worse.

    1. An episode starts with m = 0, both in acting and in learning.
    2. A minibatch has all T steps of its environments, since h depends on earlier ones.
    3. A rollout may start within an episode, so learning starts from the m0 of acting.
    4. A gradient step changes the LSTM, so every pass computes h and c anew, from m0.

Departures, besides those of ppo.py. m0 comes from older weights and statistics, and
stays fixed for all epochs, as is common. log pi_old is exact: acting used this m0.

Healthy values. `kl` is 0.002 to 0.03 and `clip_frac` 0.01 to 0.3.

Run   python -m algos.ppo_lstm --env utils.tasks:CartPoleNoVel-v0 --gamma 0.98
Diff  diff algos/ppo.py algos/ppo_lstm.py
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
#               first obs; infos["final_obs"] has the last obs of the old one
# stack_steps   T dicts of arrays [N, ...] -> tensors [T, N, ...]; bools become 0 and 1
# mpi.Adam      `step(lr)` averages the gradient over processes, clips it, moves the
#               weights and returns the gradient's norm before clipping
# RunningStats  normalize(x) = clip((x - mean) / std, -10, 10); scale(x) clips x / std
from utils import mpi
from utils.envs import make_envs, stack_steps
from utils.nets import cnn_out, is_image, mlp, nature_cnn
from utils.policy import Policy
from utils.run import Run, RunConfig, main

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits (discrete) or k means (continuous)
Scalar = Float32[Tensor, ""]
Memory = Float32[Tensor, "2 N size"]  # m: memory[0] is h, memory[1] is c


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 512  # T x N, samples per rollout; N has to divide it (T >= 2)
    minibatch_envs: int = 2  # n, environments per gradient step; it has to divide N
    epochs: int = 10  # passes over each rollout (3 to 20)
    lr: float = 1e-3  # Adam's initial learning rate (1e-5 to 1e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    clip_ratio: float = 0.2  # epsilon in PPO's paper, range of the ratio (0.1 to 0.3)
    vf_coef: float = 0.25  # weight of the value loss, c1 in PPO's paper (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 in PPO's paper (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (64,)  # layer widths, before (vectors) and after the LSTM
    lstm_size: int = 128  # length of h and of c (32 to 512)
    std_init: float = 1.0  # initial sigma of continuous actions, before tanh (0.3 to 1)
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
    norm_adv: bool = True  # normalise advantages within each minibatch


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
class Sequences:  # all T steps of a few environments (N is their number; B = T x N)
    obs: Shaped[Tensor, "T N *obs"]  # normalised
    done: PerStep
    memory: Memory  # m0
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
            rollout, obs = collect_with_memory(
                agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            agent.update_stats(rollout)  # last, so that `update` sees what pi_old saw
            step += cfg.rollout_steps
            run.evaluate(step)  # if --eval-every asks for it
            run.log(step, envs, **metrics)
            run.save(step)  # about once a minute
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


def update(agent: Agent, optimizer: mpi.Adam, rollout: Rollout, lr: float) -> dict:
    """Take many gradient steps on one rollout. Return metrics."""
    cfg = agent.cfg
    obs = agent.normalize_obs(rollout.obs)  # [T, N, ...]: h depends on the order
    with torch.no_grad():  # log pi_old(a|s), fixed while pi moves away from pi_old
        features, _ = agent.unroll(obs, rollout.done, rollout.memory)
        act = rollout.act.flatten(0, 1)
        logp_old = log_prob(agent.actor(features), agent.log_std, act)
    step_metrics = []  # one dict per gradient step
    for epoch in range(cfg.epochs):
        val, adv, ret = recurrent_targets(agent, rollout, obs)  # by the current critic
        if epoch == 0:  # before the critic has learned from this rollout
            unexplained = (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)
            before = {"val": val, "explained_variance": 1 - unexplained}
        indices = torch.randperm(obs.shape[1]).view(-1, mpi.share(cfg.minibatch_envs))
        advs = adv[:, indices].transpose(0, 1).flatten(1)  # [T, M, n] -> [M, B]
        if cfg.norm_adv:
            advs = normalize_advantages(advs)
        for envs, adv in zip(indices, advs):  # rule 2
            minibatch = Sequences(
                obs=obs[:, envs], done=rollout.done[:, envs],
                memory=rollout.memory[:, envs], act=rollout.act[:, envs].flatten(0, 1),
                logp_old=logp_old.view_as(ret)[:, envs].flatten(), adv=adv,
                ret=ret[:, envs].flatten())
            loss, metrics = recurrent_ppo_loss(agent, minibatch)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = optimizer.step(lr, max_grad_norm=cfg.max_grad_norm)
            step_metrics.append(metrics | {"grad_norm": grad_norm})
    metrics = {name: torch.stack([one[name] for one in step_metrics])
               for name in step_metrics[0]}  # the log has their means
    with torch.no_grad():  # how far has pi moved from pi_old?
        features, _ = agent.unroll(obs, rollout.done, rollout.memory)
        logp = log_prob(agent.actor(features), agent.log_std, act)
    outside = ((logp - logp_old).exp() - 1).abs() > cfg.clip_ratio
    metrics["kl"] = approx_kl(logp, logp_old).mean()
    metrics["clip_frac"] = outside.float().mean()  # whichever sign A has
    return metrics | before | {"lr": lr}


# ======================================= losses =======================================
@torch.no_grad()
def recurrent_targets(agent: Agent, rollout: Rollout, obs: Shaped[Tensor, "T N *obs"]
                      ) -> tuple[PerStep, PerStep, PerStep]:
    """V(s), A and the lambda-return R = A + V(s); `obs`: the rollout's, normalised."""
    cfg = agent.cfg
    rew = rollout.rew
    if cfg.scale_rew:  # so that one learning rate suits all scales of reward
        rew = agent.reward_sum_stats.scale(rew)
    features, memories = agent.unroll(obs, rollout.done, rollout.memory)
    val = agent.value(features).view_as(rew)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # within an episode, s' is the s of the next step
    ends = rollout.done.bool()
    ends[-1] = True  # where an episode or the rollout ends, s' is only in next_obs
    next_obs = agent.normalize_obs(rollout.next_obs[ends])
    # One more step of the LSTM, from the memory before any reset.
    h, _ = agent.remember(agent.encoder(next_obs)[None], memories[:, ends])
    next_val[ends] = agent.value(h[0])
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


def recurrent_ppo_loss(agent: Agent, batch: Sequences) -> tuple[Scalar, dict]:
    """L = L_pi + vf_coef L_V - ent_coef H, one loss for actor and critic.

        L_pi   makes good actions more likely: see `clipped_policy_loss`
        L_V    = mean (V(s) - R)^2
        H      is the entropy of pi, which keeps it exploring
    """
    cfg = agent.cfg
    features, _ = agent.unroll(batch.obs, batch.done, batch.memory)  # rule 4
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
class Agent(Policy):  # which adds predict(obs)
    """Actor, critic, LSTM and running statistics, and the memory of `act`."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__(obs_space, act_space, obs="vector image", act="discrete box")
        self.cfg = cfg
        self.images = is_image(obs_space)
        self.discrete = isinstance(act_space, gym.spaces.Discrete)
        self.log_std = None
        if self.discrete:
            num_outputs = int(act_space.n)  # one logit per action
        else:
            num_outputs = math.prod(act_space.shape)  # one mean per dimension
            log_std = torch.full((num_outputs,), math.log(cfg.std_init))
            self.log_std = nn.Parameter(log_std)  # the same in all states
            self.register_buffer("low", torch.tensor(act_space.low))
            self.register_buffer("high", torch.tensor(act_space.high))
        sizes = cnn_out(obs_space) if self.images else (*obs_space.shape, *cfg.hidden)
        self.encoder = nature_cnn(obs_space) if self.images else (
            nn.Sequential(mlp(sizes, nn.Tanh), nn.Tanh()))
        self.lstm = nn.LSTM(sizes[-1], cfg.lstm_size)  # PyTorch's initial weights
        self.actor = mlp([cfg.lstm_size, *cfg.hidden, num_outputs], nn.Tanh)
        self.critic = mlp([cfg.lstm_size, *cfg.hidden, 1], nn.Tanh)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))
                nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(self.actor[-1].weight, gain=0.01)  # pi hardly depends on s
        nn.init.orthogonal_(self.critic[-1].weight, gain=1.0)
        self.obs_stats = mpi.RunningStats(obs_space.shape)  # at first mean 0, std 1
        self.reward_sum_stats = mpi.RunningStats(())  # of G: see `update_stats`
        self.reward_sum = torch.zeros(())  # the last G, from then on [N]; not saved
        self.register_buffer("memory", torch.zeros(2, 0, 0), persistent=False)  # m

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take."""
        if self.images:
            return obs  # bytes, which the encoder scales
        return self.obs_stats.normalize(obs.float())

    def value(self, features: Float32[Tensor, "B k"]) -> PerSample:
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

    def remember(self, features: Float32[Tensor, "T N k"], memory: Memory
                 ) -> tuple[Float32[Tensor, "T N size"], Memory]:
        """Take T steps of the LSTM without a reset. Return all h and the last m.

            c <- sigmoid(F) c + sigmoid(I) tanh(G),  h <- sigmoid(O) tanh(c),
            where F, I, G, O are linear functions of the features and the last h
        """
        h, after = self.lstm(features, (memory[:1], memory[1:]))
        return h, torch.cat(after)

    def unroll(self, obs: Shaped[Tensor, "T N *obs"], done: PerStep, memory: Memory
               ) -> tuple[Float32[Tensor, "TN size"], Float32[Tensor, "2 T N size"]]:
        """Return all h, and m after each step that ends an episode or the rollout.

            h_t, c_t = LSTM(features_t, (1 - done_{t-1}) (h_{t-1}, c_{t-1}))

        nn.LSTM takes many steps at once, but cannot reset. So wherever an episode ends,
        the sequences of all N environments are cut.
        """
        features = self.encoder(obs.flatten(0, 1)).unflatten(0, done.shape)
        ends = done[:-1].any(dim=1).nonzero().flatten()  # steps that end any episode
        cuts = (ends + 1).tolist()  # the first step of each piece but the first
        hidden, memories = [], []
        for piece, ended in zip(features.tensor_split(cuts), done.tensor_split(cuts)):
            h, memory = self.remember(piece, memory)
            hidden.append(h)
            # Right only in the last row of the piece; no other is used.
            memories.append(memory.unsqueeze(1).expand(-1, len(piece), -1, -1))
            memory = memory * (1 - ended[-1])[:, None]  # rule 1
        return torch.cat(hidden).flatten(0, 1), torch.cat(memories, dim=1)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> discrete actions [N], or [N, k] before tanh."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        features = self.encoder(self.normalize_obs(obs))
        h, self.memory = self.remember(features[None], self.memory_before(obs))
        actor_out = self.actor(h[0])
        if deterministic:
            return actor_out.argmax(-1) if self.discrete else actor_out
        if self.discrete:
            return actor_out.softmax(-1).multinomial(1).squeeze(-1)
        return actor_out + self.log_std.exp() * torch.randn_like(actor_out)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`: continuous ones squashed by tanh, then rescaled."""
        if self.discrete:
            return act.cpu().numpy()
        squashed = act.tanh().view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, (squashed + 1) / 2).cpu().numpy()

    def update_stats(self, rollout: Rollout) -> None:
        """Update the statistics of observations and of G, which varies as returns do:
        G_t = r_t + gamma (1 - done_{t-1}) G_{t-1}, with raw rewards r."""
        sums = []
        for rew, done in zip(rollout.rew, rollout.done):
            sums.append(rew + self.cfg.gamma * self.reward_sum)
            self.reward_sum = sums[-1] * (1 - done)  # a new episode starts at 0
        self.reward_sum_stats.update(torch.cat(sums))
        if not self.images:
            self.obs_stats.update(rollout.obs.flatten(0, 1))


if __name__ == "__main__":
    main(train, Config, __doc__)
