"""Actor-Critic with Experience Replay (ACER).  Wang et al. 2017, arXiv:1611.01224.

The problem. A2C takes one gradient step on each rollout and then discards it,
because the policy gradient is an expectation under the current policy, pi. ACER
also learns from old rollouts, kept in a buffer. Let mu be the earlier policy
that collected one. With weights rho(a) = pi(a | s) / mu(a | s), a mean over
actions from mu becomes one over actions from pi. But a ratio can be huge, and a
product of ratios even larger, so a few samples dominate the mean. ACER limits
the ratios in the critic's target (Retrace) and in the policy gradient, whose
bias it corrects. A trust region limits steps away from past policies.

The algorithm, and where each step is coded:

    repeat until total_steps:
        act for T steps in N environments; keep log mu    collect, keep_policy
        update on the new rollout, for which mu is pi     update
        add this rollout to the buffer                    buffer.add
        repeat `replay_ratio` times:
            update on a random rollout of the buffer      buffer.sample, update
        update the statistics of (6) and (7)              update_stats
    each update, one gradient step on a whole rollout:
        V by (4) and the targets R by (1) and (2)         compute_q_targets
        the directions z for the policy, (8) to (11)      policy_direction
        one RMSProp step on L, (13)                       acer_loss
        move the average policy, (3)                      polyak_update

The replay ratio. Replays learn more from the same environment steps. But each
costs time and moves pi further from the stored mu. The paper tries 0, 1, 4 and
8; on CartPole, 1 saved as many steps as 4 (benchmarks/README.md).

The critic. Q(s, a) estimates the discounted sum of scaled rewards after action
a in s if pi acts from then on. s' follows s: at the end of an episode its last
state. `terminated` is 1 if s' is terminal, `done` is 1 if the episode ended,
also by a time limit. Unless s' is terminal, we bootstrap: V(s') stands in for
later rewards, even at a time limit. rho_t is rho(a_t), and R is Q's target.

    V(s)    = sum_a pi(a | s) Q(s, a)                                      (4)
    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - Q(s_t, a_t)         (1)
    E_t     = delta_t + gamma lam (1 - done_t) min(1, rho_{t+1}) E_{t+1},
    R_t     = E_t + Q(s_t, a_t)                                            (2)
    L_Q     = mean (Q(s, a) - R)^2                                         (5)

In (1), a_t is given and V averages over actions of pi, so no ratio is needed.
(2) is Retrace (Munos et al. 2016, arXiv:1606.02647). As in GAE, E_t adds later
deltas, so R relies less on Q. But mu chose the later actions, so errors need
ratios. Without truncation, the error 19 steps later would have 19 of them as
factors: over 500,000 if all are 2. Truncated, they shrink errors after actions
that pi takes less often than mu. If Q is exact, this adds no bias, because
every delta then has mean zero. Else R relies more on Q, as with a lower `lam`.

The policy. Take one state with logits x, so pi = softmax(x); grad is the
gradient in x. [a = a_t] is 1 for the action taken, else 0. c is `max_ratio`.
u(a) is the weight of action a, and g the direction in which x should move:

    u(a)    = [a = a_t] min(c, rho_t) (R_t - V(s))
              + pi(a | s) max(0, 1 - c / rho(a)) (Q(s, a) - V(s))          (8)
    g       = sum_a u(a) grad log pi(a | s);
              component a of g is u(a) - pi(a | s) sum_b u(b)              (9)

In (8), R_t - V(s) estimates the advantage of a_t. Weights rho_t without the min
would be right on average, but one huge rho_t could outweigh a whole batch. With
the min, actions with rho > c count too little. The second term adds the rest,
with Q, since only a_t has an R. Check, for exact Q: a_t is a with probability
mu, so the first term gives a's advantage a mean weight of mu min(c, pi / mu) =
min(c mu, pi). The second gives pi max(0, 1 - c mu / pi) = max(0, pi - c mu).
The sum is pi, as in the policy gradient: 0.1 + 0.4 if c = 10, mu = 0.01 and pi
= 0.5. Without the max it would be less than pi where rho < c. A large c relies
on noisy ratios, a small c on Q. No ratio corrects the states, which mu visited.

The trust region. A noisy estimate can ruin pi in one step, but a lower learning
rate would slow all steps. So ACER limits only steps away from avg, the average
policy: the same network, with weights w_avg that follow pi's weights w.

    w_avg  <- w_avg + tau (w - w_avg)                                      (3)
    k       = grad KL(avg || pi) = pi - avg                               (10)
    z       = g - max(0, (k^T g - max_slope) / k^T k) k                   (11)
    L_pi    = -mean sum_a z(a) log pi(a | s), where z is a constant       (12)
    L       = L_pi + vf_coef L_Q - ent_coef H                             (13)

By (3), avg lags about 1 / tau updates behind, so even a slow drift counts. If x
moves along z, the KL changes at the rate k^T z, its slope. (11) is the vector
closest to g with a slope of at most `max_slope`. Without its max, a g of
smaller slope would be pushed away from avg. At pi = avg, k is 0 and z is g.
As g, k and z sum to 0 over actions, (12) has the gradient -z in x, divided by
the number of samples. H is pi's mean entropy; its bonus keeps pi random longer.
(11) limits neither H's gradient nor, with images, L_Q's in the shared encoder.
As in A2C, mean and var are those of all earlier rollouts (at first 0 and 1):

    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}, for raw rewards r,
    rew    <- clip(rew / sqrt(var(G) + 1e-8), -10, 10)                     (7)

Departures from the paper. There g, k and z are gradients in the probabilities,
so `max_slope` does not compare with the paper's delta = 1. The number of
replays is fixed, not drawn from a Poisson distribution. Actions are discrete:
(4) and (8) sum over all of them.

Defaults: T = 20, N = 16, 4 replays per rollout, a buffer of 200 rollouts. In
healthy runs on CartPole, `projected`, the share of samples changed by (11), is
0 to 0.03, `kl_avg`, the KL in (10), below 0.3, `replayed_explained_variance`
0.2 to 0.9, `replayed_ratio`, the mean of rho, 0.99 to 1.01.

Read after    algos/a2c.py, then:  diff algos/a2c.py algos/acer.py
Try           python -m algos.acer --total-steps 1e5    (also: --replay-ratio 0)
Reproduce     python -m algos.acer    (learning curves: benchmarks/README.md)
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor, nn

# mpi.RMSProp       `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One RMSProp step; its gradient is averaged over processes, clipped
#                   if max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.RunningStats  running mean and var of all rows that `update` got, in all processes
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# stack_steps       T dicts -> one dict of [T, N, ...]; bools and floats become float32
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import (
    check_memory,
    image_to_float,
    is_image,
    make_envs,
    nature_cnn,
    stack_steps,
)
from utils.run import Run, RunConfig, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
PerAction = Float32[Tensor, "B k"]  # one number per sample for each of k actions
Choices = Int64[Tensor, "B"]  # indices of actions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds seed, run_dir, device, ...: see --help
    env: str = "CartPole-v1"  # Gymnasium id
    total_steps: float = 5e5  # environment steps, rounded up to whole rollouts
    num_envs: int = 16  # N, parallel environments (8 to 64); must divide rollout_steps
    report_every: int = 4000  # environment steps between reports
    rollout_steps: int = 320  # T x N, samples per rollout: T steps in each of N envs
    buffer_size: int = 64_000  # environment steps kept: whole rollouts, at least one
    replay_ratio: int = 4  # updates on replayed data per rollout; 0: on-policy (0 to 8)
    lr: float = 1e-3  # RMSProp's initial learning rate (1e-4 to 3e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    rmsprop: Literal["torch", "tf"] = "torch"  # update rule of PyTorch or TensorFlow 1
    rmsprop_eps: float = 1e-5  # RMSProp's epsilon (1e-5 to 1e-3)
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 1.0  # Retrace's lambda (lower: more bias; higher: more variance)
    max_ratio: float = 10.0  # c, the limit of importance ratios in Eq. (8) (1 to 10)
    max_slope: float = 0.1  # limit of the KL's slope, Eq. (11) (0.01 to 0.5); 0: off
    tau: float = 0.01  # Polyak coefficient of avg, Eq. (3); 1 - alpha in the paper
    vf_coef: float = 0.5  # weight of the loss of Q (0.1 to 1)
    ent_coef: float = 0.01  # weight of the entropy bonus (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, for vector observations
    norm_obs: bool = True  # normalise vector observations, Eq. (6)
    scale_rew: bool = True  # divide rewards by the standard deviation of G, Eq. (7)
    orthogonal_init: bool = True  # orthogonal initial weights; else PyTorch's default


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


class Agent(nn.Module):
    """Actor, its running average, critic and running statistics."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector image", act="discrete")
        self.cfg = cfg
        self.images = is_image(obs_space)
        num_outputs = int(act_space.n)  # a logit per action, a Q per action
        if self.images:
            self.encoder = nature_cnn(obs_space)  # shared; 512 features
            sizes = (512,)
        else:
            self.encoder = nn.Identity()
            sizes = (*obs_space.shape, *cfg.hidden)
        self.actor = mlp(*sizes, num_outputs)
        self.critic = mlp(*sizes, num_outputs)
        if cfg.orthogonal_init:
            init_orthogonal(self)
        self.policy_avg = copy.deepcopy(self.policy()).requires_grad_(False)  # avg
        self.obs_stats = mpi.RunningStats(obs_space.shape)
        self.reward_sum_stats = mpi.RunningStats(())  # of G in Eq. (7)
        self.discounted_reward_sum = torch.zeros(())  # G carried over as [N]; not saved

    def policy(self) -> nn.Sequential:
        """Encoder and actor in one: normalised observations -> logits."""
        return nn.Sequential(self.encoder, self.actor)

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> network inputs: pixels in [0, 1] or Eq. (6)."""
        if self.images:
            return image_to_float(obs)
        if not self.cfg.norm_obs:
            return obs.float()
        return standardize(obs.float(), self.obs_stats.mean, self.obs_stats.var)

    def forward(self, obs: Tensor) -> tuple[PerAction, PerAction]:
        """Normalised observations [B, ...] -> logits, Q of every action."""
        features = self.encoder(obs)
        return self.actor(features), self.critic(features)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N]."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        actor_out = self.actor(self.encoder(self.normalize_obs(obs)))
        if deterministic:
            return actor_out.argmax(-1)
        return actor_out.softmax(-1).multinomial(1).squeeze(-1)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`."""
        return act.cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw observation -> the deterministic action, for use after training."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]

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
class ReplayRollout(Rollout):
    logp_old: Float32[Tensor, "T N k"]  # log mu(a | s) of every action


@dataclass(frozen=True)
class QBatch:
    obs: Float32[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]
    logp_old: PerAction  # log mu(a | s)
    ret: PerSample  # R, the target of Q


class ReplayBuffer:
    """The latest `capacity` rollouts, raw: `update` normalises by newer statistics."""

    def __init__(self, capacity: int, device: torch.device):
        self.capacity = capacity
        self.device = device
        self.rollouts = []  # the oldest first

    def add(self, rollout: ReplayRollout) -> None:
        self.rollouts = [*self.rollouts, rollout][-self.capacity :]

    def sample(self) -> ReplayRollout:
        """A uniformly random rollout: T steps of all environments."""
        return self.rollouts[torch.randint(len(self.rollouts), ())]

    def state_dict(self) -> dict:
        return {"rollouts": [vars(rollout) for rollout in self.rollouts]}

    def load_state_dict(self, state: dict) -> None:
        self.rollouts = [
            ReplayRollout(**{name: x.to(self.device) for name, x in columns.items()})
            for columns in state["rollouts"]]


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


@torch.no_grad()
def keep_policy(agent: Agent, rollout: Rollout) -> ReplayRollout:
    """Add log mu of all actions. Call it before weights or statistics of mu change."""
    obs = agent.normalize_obs(rollout.obs).flatten(0, 1)
    logp_old = agent.policy()(obs).log_softmax(-1).unflatten(0, rollout.rew.shape)
    return ReplayRollout(**vars(rollout), logp_old=logp_old)


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


def pick(values: PerAction, act: Choices) -> PerSample:
    """The number that belongs to the action taken, for each sample."""
    return values.gather(-1, act.unsqueeze(-1)).squeeze(-1)


def state_value(actor_out: PerAction, q: PerAction) -> PerSample:
    """Return V(s). `actor_out` is logits or log pi: the softmax of both is pi."""
    return (actor_out.softmax(-1) * q).sum(-1)  # Eq. (4)


def compute_retrace(rollout: Rollout, q: PerStep, next_val: PerStep, ratio: PerStep,
                    gamma: float, lam: float) -> PerStep:
    """Retrace: return R. The recursion does not cross the end of an episode."""
    delta = rollout.rew + gamma * (1 - rollout.terminated) * next_val - q  # Eq. (1)
    decay = gamma * lam * (1 - rollout.done)
    delta, decay = delta.cpu().numpy(), decay.cpu().numpy()  # a loop in NumPy is faster
    trace = ratio.clamp(max=1).cpu().numpy()
    error = np.zeros_like(delta)
    next_error = np.zeros_like(delta[0])  # E is 0 after the rollout's last step
    for t in reversed(range(len(delta))):
        error[t] = delta[t] + decay[t] * next_error  # Eq. (2)
        next_error = trace[t] * error[t]  # min(1, rho_t) E_t, for step t - 1
    return torch.as_tensor(error, device=q.device) + q


def value_loss(val: PerSample, ret: PerSample) -> Scalar:
    assert val.shape == ret.shape  # [B] minus [B, 1] would be [B, B]
    return (val - ret).square().mean()  # Eq. (5)


def action_weights(log_pi: PerAction, q: PerAction, ratio: PerAction, act: Choices,
                   ret: PerSample, max_ratio: float) -> PerAction:
    """Eq. (8): u(a) for every action. Where ratio is 0, 1 - c / 0 = -inf becomes 0."""
    assert log_pi.shape == q.shape == ratio.shape and act.shape == ret.shape
    val = state_value(log_pi, q)
    truncated = pick(ratio, act).clamp(max=max_ratio) * (ret - val)
    correction = log_pi.exp() * (1 - max_ratio / ratio).clamp(min=0)  # 0 if rho <= c
    weight = correction * (q - val.unsqueeze(-1))
    return weight.scatter_add(-1, act.unsqueeze(-1), truncated.unsqueeze(-1))


def logit_gradient(weight: PerAction, log_pi: PerAction) -> PerAction:
    """Eq. (9): the derivative of log pi(a) in logit b is [a = b] - pi(b)."""
    return weight - log_pi.exp() * weight.sum(-1, keepdim=True)


def project(g: PerAction, k: PerAction, max_slope: float) -> PerAction:
    """Eq. (11) for each sample. If k = 0, the quotient is -inf, clamped to 0: z = g."""
    excess = (k * g).sum(-1, keepdim=True) - max_slope
    return g - (excess / k.square().sum(-1, keepdim=True)).clamp(min=0) * k


def weighted_policy_loss(log_pi: PerAction, weight: PerAction) -> Scalar:
    assert log_pi.shape == weight.shape
    return -(weight * log_pi).sum(-1).mean()  # Eq. (12); `weight` (z) sums to zero


@torch.no_grad()
def polyak_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Eq. (3), in place: move the target's weights towards the source's."""
    for w_targ, w in zip(target.parameters(), source.parameters()):
        w_targ.lerp_(w, tau)  # w_targ + tau (w - w_targ)


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1: `val` is R up to a constant. 0: no better than a constant. Below 0: worse."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= update =======================================
@torch.no_grad()
def policy_direction(agent: Agent, batch: QBatch, log_pi: PerAction,
                     q: PerAction) -> tuple[PerAction, dict]:
    """Return z of Eq. (11), a constant, and metrics."""
    cfg = agent.cfg
    ratio = (log_pi - batch.logp_old).exp()  # rho of every action
    weight = action_weights(log_pi, q, ratio, batch.act, batch.ret, cfg.max_ratio)
    g = logit_gradient(weight, log_pi)
    log_avg = agent.policy_avg(batch.obs).log_softmax(-1)
    k = log_pi.exp() - log_avg.exp()  # Eq. (10)
    z = project(g, k, cfg.max_slope) if cfg.max_slope > 0 else g
    kl_avg = (log_avg.exp() * (log_avg - log_pi)).sum(-1).mean()
    projected = (z != g).any(-1).float().mean()  # the share of samples
    ratio = pick(ratio, batch.act)  # rho_t, a metric
    return z, {"ratio": ratio, "kl_avg": kl_avg, "projected": projected}


def acer_loss(agent: Agent, batch: QBatch) -> tuple[Scalar, dict]:
    """Eq. (13). No gradient flows through z or R."""
    cfg = agent.cfg
    actor_out, q = agent(batch.obs)
    log_pi = actor_out.log_softmax(-1)
    z, metrics = policy_direction(agent, batch, log_pi, q)
    pi_loss = weighted_policy_loss(log_pi, z)
    q_loss = value_loss(pick(q, batch.act), batch.ret)
    ent = -(log_pi.exp() * log_pi).sum(-1).mean()
    loss = pi_loss + cfg.vf_coef * q_loss - cfg.ent_coef * ent  # Eq. (13)
    return loss, metrics | {"q_loss": q_loss, "entropy": ent}


def normalize_rollout(agent: Agent, rollout: Rollout) -> Rollout:
    """Return a normalised copy to learn from. `update_stats` needs the raw rollout."""
    obs = agent.normalize_obs(rollout.obs)
    next_obs = agent.normalize_obs(rollout.next_obs)
    rollout = replace(rollout, obs=obs, next_obs=next_obs)
    if agent.cfg.scale_rew:
        rew = standardize(rollout.rew, 0.0, agent.reward_sum_stats.var)  # Eq. (7)
        rollout = replace(rollout, rew=rew)
    return rollout


def compute_q_targets(agent: Agent, rollout: ReplayRollout) -> tuple[PerStep, PerStep]:
    """Return Q(s_t, a_t) and its target R, both from the current networks."""
    act = rollout.act.flatten()
    actor_out, q = agent(rollout.obs.flatten(0, 1))
    log_pi = actor_out.log_softmax(-1)
    val = state_value(actor_out, q).view_as(rollout.rew)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # within an episode, s' is the next row's s
    ends = rollout.done.bool()
    ends[-1] = True  # where an episode or the rollout ends, s' is in next_obs
    next_val[ends] = state_value(*agent(rollout.next_obs[ends]))
    ratio = pick((log_pi - rollout.logp_old.flatten(0, 1)).exp(), act).view_as(val)
    q = pick(q, act).view_as(val)
    cfg = agent.cfg
    return q, compute_retrace(rollout, q, next_val, ratio, cfg.gamma, cfg.lam)


@torch.no_grad()  # `minimize` enables gradients for its loss
def update(agent: Agent, optimizer: mpi.RMSProp, rollout: ReplayRollout,
           lr: float) -> dict:
    """One gradient step on a whole rollout, new or replayed. Return metrics."""
    cfg = agent.cfg
    rollout = normalize_rollout(agent, rollout)
    obs = rollout.obs.flatten(0, 1)  # [T, N, ...] -> [B, ...]
    act = rollout.act.flatten(0, 1)
    q, ret = compute_q_targets(agent, rollout)
    critic_metrics = {"q": q, "explained_variance": explained_variance(q, ret)}
    batch = QBatch(obs, act, rollout.logp_old.flatten(0, 1), ret.flatten())
    metrics = optimizer.minimize(
        acer_loss, agent, batch, lr=lr, max_grad_norm=cfg.max_grad_norm)
    polyak_update(agent.policy_avg, agent.policy(), cfg.tau)
    return metrics | critic_metrics


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    """Train until `total_steps`, from the start or from a checkpoint."""
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of the resumed run
        envs = make_envs(cfg, run.num_envs)  # this process's share of cfg.num_envs
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        tf_style = cfg.rmsprop == "tf"
        trained = [param for param in agent.parameters() if param.requires_grad]
        optimizer = mpi.RMSProp(trained, eps=cfg.rmsprop_eps, tf_style=tf_style)
        # Only obs and next_obs count: with images they are nearly the whole buffer.
        num_bytes = 2 * run.buffer_size * envs.single_observation_space.sample().nbytes
        check_memory("--buffer-size", run.buffer_size, num_bytes)
        buffer = ReplayBuffer(max(1, cfg.buffer_size // cfg.rollout_steps), run.device)
        # Tells `run` what to evaluate and save. Returns 0, or the saved step.
        step = run.restore(agent, optimizer=optimizer, buffer=buffer)
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            rollout = keep_policy(agent, rollout)
            metrics = update(agent, optimizer, rollout, lr)
            buffer.add(rollout)
            for _ in range(cfg.replay_ratio):
                replayed = update(agent, optimizer, buffer.sample(), lr)
                run.store(**{f"replayed_{name}": replayed[name] for name in replayed})
            agent.update_stats(rollout)
            step += cfg.rollout_steps
            run.store(**metrics)  # the next report averages them
            run.report(step, envs, lr=lr)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
