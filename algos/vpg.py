"""Vanilla Policy Gradient (VPG): REINFORCE (Williams 1992, doi:10.1007/BF00992696).

The problem. The weights of a policy pi(a|s) should maximise the expected return, the
sum of an episode's rewards. Its gradient seems to need a model of the environment.

The idea. It does not, since the environment's probabilities do not depend on the
weights: grad E[return] = E[sum_t grad log pi(a_t|s_t) return] (notebooks/1 derives it).
So we sample actions and make each more likely in proportion to the return. That is
noisy. Only rewards after a_t depend on a_t, so the others are left out. A second
network, the critic, learns a baseline: V(s), the discounted sum of rewards to expect
from s. It does not depend on a_t, so subtracting it changes no mean. What is left is
the advantage A: how much better a_t was than the policy's average. And `gae` replaces
late rewards by V, a bias as far as V is wrong: strictly, this is an actor-critic then.
An iteration of `train`:

    collect              act for T steps in N parallel environments
    update
      compute_targets      advantages A and returns R, with the current critic
      vpg_loss             one Adam step of the policy on it with the whole rollout
      value_loss           `v_steps` Adam steps of the critic
    update_stats         running statistics that normalise observations and rewards

Rollouts start and end in the middle of episodes; V replaces the rewards beyond. As in
nearly all implementations, gamma discounts rewards but does not weight states.

Healthy values. On MuJoCo, `explained_variance` rises above 0.8 within 200,000 steps,
`policy_grad_norm` stays between 0.03 and 0.4, and `entropy` falls slowly.

Run   python -m algos.vpg --env CartPole-v1 --total-steps 2e5
Next  diff algos/vpg.py algos/a2c.py, or diff algos/vpg.py algos/trpo.py
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
from utils.nets import ObsStats, SquashedGaussian, head_sizes, make_encoder, mlp
from utils.optim import Adam
from utils.policy import Policy
from utils.run import Fraction, Positive, Run, RunConfig, main
from utils.spaces import has_images
from utils.stats import RunningStats

# Shapes, which the tests check at every call.
PerStep = Float32[Tensor, "T N"]  # one number per time step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
Inputs = Shaped[Tensor, "B *obs"]  # normalised observations: what the networks take
Features = Inputs  # the same here; from a2c.py on, an image has an encoding
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # it adds env, seed, ... (see --help), and checks all values
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 512  # T x N samples (64 x 8); N has to divide it
    minibatch_size: int = 256  # samples per gradient step of the critic (32 to 512)
    v_steps: int = 20  # gradient steps of the critic per rollout (5 to 80)
    lr: Positive = 3e-3  # the policy's initial learning rate (3e-4 to 1e-2)
    v_lr: Positive = 1e-3  # the critic's learning rate, constant (3e-4 to 3e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: Fraction = 0.99  # discount factor (0.9 to 0.999)
    lam: Fraction = 0.97  # GAE's lambda (lower: more bias; higher: more variance)
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, unless obs is an image
    std_init: Positive = 1.0  # initial sigma before tanh, if continuous (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations by their running statistics
    scale_rew: bool = True  # divide rewards by the std of the discounted reward sum
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


@dataclass(frozen=True)
class Batch:  # a whole rollout: B = TN samples
    obs: Inputs  # s, normalised
    act: Shaped[Tensor, "B *act"]  # a
    adv: PerSample  # A: how much better a was than the policy's average action in s
    ret: PerSample  # R: what the critic is to predict in s


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    with Run(cfg) as run:  # directory, seeds, processes
        envs = make_envs(cfg, mpi.share(cfg.num_envs))  # this process's share
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        policy_opt = Adam(agent.policy_parameters())
        critic_opt = Adam(agent.critic)
        # Checkpoints hold these. `step` is 0, or with --resume that of the checkpoint.
        step = run.start(agent, policy=policy_opt, critic=critic_opt)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, policy_opt, critic_opt, rollout, lr)
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


def update(agent: Agent, policy_opt: Adam, critic_opt: Adam, rollout: Rollout,
           lr: float) -> dict:
    """Take one step of the policy, then `v_steps` of the critic. Return metrics."""
    cfg = agent.cfg
    obs = agent.normalize_obs(rollout.obs).flatten(0, 1)  # [T, N, ...] -> [TN, ...]
    act = rollout.act.flatten(0, 1)
    val, adv, ret = compute_targets(agent, rollout, obs)
    explained = explained_variance(val, ret)  # before the critic learns from `rollout`
    batch = Batch(obs=obs, act=act, adv=adv.flatten(), ret=ret.flatten())
    # One step: then the policy is another one, and the data are no longer its own.
    loss, metrics = vpg_loss(agent, batch)
    policy_opt.zero_grad()
    loss.backward()
    policy_opt.average_grads()  # over processes
    grad_norm = policy_opt.grad_norm()
    policy_opt.step(lr)
    # Many steps, with R fixed. They come last, as A needs a V that has not seen R.
    v_losses, v_grad_norms = [], []
    for _ in range(cfg.v_steps):
        rows = torch.randperm(len(obs))[: mpi.share(cfg.minibatch_size)]
        loss = value_loss(agent.value(agent.encoder(obs[rows])), batch.ret[rows])
        critic_opt.zero_grad()
        loss.backward()
        critic_opt.average_grads()  # over processes
        v_losses.append(loss.detach())
        v_grad_norms.append(critic_opt.grad_norm())
        critic_opt.step(cfg.v_lr)
    return metrics | {
        "policy_grad_norm": grad_norm,
        "v_loss": torch.stack(v_losses), "critic_grad_norm": torch.stack(v_grad_norms),
        "val": val, "explained_variance": explained}


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


def vpg_loss(agent: Agent, batch: Batch) -> tuple[Scalar, dict]:
    """L = L_pi, for the actor; the critic has `value_loss`. The entropy is only logged.

        L_pi   makes good actions more likely: see `policy_loss`
    """
    features = agent.encoder(batch.obs)
    pi = agent.policy(features)
    logp = pi.log_prob(batch.act)
    pi_loss = policy_loss(logp, batch.adv)
    ent = pi.entropy().mean()
    return pi_loss, {"pi_loss": pi_loss.detach(), "entropy": ent.detach()}


def policy_loss(logp: PerSample, adv: PerSample) -> Scalar:
    """L_pi = -mean log pi(a|s) A, where A is a constant."""
    # Its negative gradient, mean(grad log pi(a|s) A), estimates the policy gradient: an
    # action that was better than average becomes more likely, a worse one less.
    assert logp.shape == adv.shape
    return -(logp * adv).mean()


def value_loss(val: PerSample, ret: PerSample) -> Scalar:
    """L_V = mean (V(s) - R)^2"""
    assert val.shape == ret.shape  # [B] minus [B, 1] would be [B, B]
    return (val - ret).square().mean()


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1 - var(R - V) / var R. R contains V, which flatters V."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= agent ========================================
class Agent(Policy):  # which adds predict(obs)
    """Actor, critic and running statistics: all that acting needs."""

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
        self.encoder = nn.Identity()
        sizes = head_sizes(obs_space, cfg.hidden)
        self.actor = mlp([*sizes, num_outputs], nn.Tanh)
        self.critic = mlp([*sizes, 1], nn.Tanh)
        if has_images(obs_space):  # one each, so that the critic's steps leave pi alone
            self.actor = nn.Sequential(make_encoder(obs_space, cfg.bf16), *self.actor)
            self.critic = nn.Sequential(make_encoder(obs_space, cfg.bf16), *self.critic)
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

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take. The encoder scales images."""
        return self.obs_stats.normalize(obs) if self.cfg.norm_obs else obs.float()

    def policy_parameters(self) -> list[nn.Parameter]:
        """All parameters but the critic's."""
        named = self.named_parameters()
        return [param for name, param in named if not name.startswith("critic.")]

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
