"""Advantage Actor-Critic (A2C).  Mnih et al. 2016, arXiv:1602.01783.

The problem. The policy gradient makes an action more probable the better it
turned out. Let pi(a | s) be the probability of action a in state s, and grad
the gradient with respect to the weights of pi's network, the actor. Then the
policy gradient averages grad log pi(a | s) times the return, the sum of the
rewards from s on. The return is noisy: in a good state, most actions are
followed by a high return. So a second network, the critic, learns V(s), the
return to expect from s, and we subtract it. The difference estimates the
advantage A: how much better the action was than the policy's average in that
state. This difference is less noisy. Because V(s) does not depend on the
action, the mean of the gradient stays the same (algos/vpg.py derives all this).

Discounting reduces the noise further, but adds bias. A reward k steps after a_t
is weighted by gamma^k: the later it comes, the more it depends on other actions
and on chance. From here on, returns and V are discounted. gamma < 1 also keeps
V finite if a task has no end. (The gradient of the discounted return would also
weight step t by gamma^t. Like nearly all implementations, we leave that out.)

A rollout is a window of T steps in each of N environments, which may start and
end in mid-episode. VPG (algos/vpg.py) takes one policy step per 512 samples
(T = 64, N = 8). A2C takes one per 160 samples (T = 10, N = 16), so the same
data give more steps, but each gradient is noisier. Consecutive states resemble
each other, so more environments keep the small batch diverse. The price of
short rollouts is bias: A uses at most 10 rewards, fewer near the end of the
rollout, and V replaces all later ones. VPG trains actor and critic in separate
steps. A2C trains both, and with images a shared encoder, in one step on a joint
loss.

The algorithm, and where each step is coded:

    repeat until total_steps:
        act for T steps in each of N environments              collect
        learn from this rollout:                               update
            normalise it, by (6) and (7)                       normalize_rollout
            V, advantages A and targets R, by (1) and (2)      compute_targets
            one RMSProp step on L, (9)                         a2c_loss
        update the statistics of (6) and (7)                   update_stats

Advantages. V(s) is the critic's estimate of the discounted sum of scaled
rewards from s on. s' follows s: at the end of an episode its last state, not
the first of the next. `terminated` is 1 if s' is terminal, `done` if the
episode ended, also by a time limit. Unless s' is terminal, we bootstrap: V(s')
stands in for later rewards, even at a time limit, which does not end the task.
(1) and (2), with scaled rewards r, are generalized advantage estimation (GAE;
Schulman et al. 2016, arXiv:1506.02438). R is the critic's target.

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t = delta_t + gamma lam (1 - done_t) A_{t+1},  R_t = A_t + V(s_t)    (2)

delta_t is itself an estimate of the advantage, from one reward. The sum delta_t
+ gamma delta_{t+1} uses two, because V(s_{t+1}) cancels. More deltas mean less
bias but more variance. GAE averages the estimates from n = 1, 2, 3, ... rewards
with weights (1 - lam) lam^(n-1). If the episode or rollout ends after K steps,
the longest estimate gets all the remaining weight, lam^(K-1). The result is
A_t = sum over k < K of (gamma lam)^k delta_{t+k}, which (2) computes backwards.
lam = 0 uses one reward and then V(s'); lam = 1 uses all, and V(s') at the end.

Actions. The actor outputs logits of discrete actions, or the means mu of a
Gaussian, whose standard deviations sigma are learned but do not depend on s.
Gaussian actions are squashed by tanh and rescaled to the action bounds only for
the environment (`env_act`). The Jacobian of tanh depends only on the action and
drops out of grad log pi. So `act` and (3) are before tanh; (4) is by choice.

    log pi  = log softmax(logits)_a, or sum_i log N(a_i; mu_i(s), sigma_i) (3)
    H       = entropy of pi(. | s) before tanh, averaged over the batch    (4)
    L_V     = mean (V(s) - R)^2                                            (5)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}, for raw rewards r,
    rew    <- clip(rew / sqrt(var(G) + 1e-8), -10, 10)                     (7)

(6) and (7) give inputs and targets a moderate size. mean and var are those of
all earlier rollouts (at first 0 and 1). They stay fixed until the update ends:
otherwise the networks would get other inputs than when they acted. G sums past
rewards; its standard deviation estimates the scale of returns. Rewards are not
centred, because this could change whether long episodes pay.

A2C's loss is a weighted sum of the policy loss, the value loss (5) and the
entropy (4):

    L_pi    = -mean log pi(a | s) A, where A is a constant                 (8)
    L       = L_pi + vf_coef L_V - ent_coef H                              (9)

No gradient flows through A, so the negative gradient of (8) is the mean of grad
log pi(a | s) A. The entropy bonus (off by default; the paper uses 0.01 on
Atari) keeps the policy from becoming deterministic too early. With continuous
actions a large bonus makes sigma grow without limit, because H is taken before
tanh. Then tanh maps most actions close to their bounds.

The optimizer is RMSProp. With g the gradient of a weight w:

    m <- 0.99 m + 0.01 g^2
    w <- w - lr g / (sqrt(m) + eps),  m = 0 at first   (--rmsprop torch)
    w <- w - lr g / sqrt(m + eps),    m = 1 at first   (--rmsprop tf)

The second is the paper's, but m = 1 is TensorFlow 1's. Where gradients are
small, the first, our default, takes much larger steps. In our runs the second
did no better (benchmarks/NOTES.md, "The rule of RMSProp"). The first nearly
ignores the scale of a gradient. So with vector observations, where actor and
critic share no weights, and without an entropy bonus, vf_coef and the scale of
A matter little, and A is not normalised (V roughly centres it). max_grad_norm
limits both gradients together. With images, the shared encoder gets a mix that
vf_coef sets.

Departures from the paper. A2C is the synchronous form of the paper's A3C. There
parallel threads do not wait for each other, so a gradient may be computed with
weights that other threads have changed since. GAE replaces n-step returns,
which are the case lam = 1. A rollout has 10 steps (paper: 5 on Atari). sigma is
a learned parameter (paper: an output of the network), and actions are squashed
by tanh. Images are encoded by the larger network of Mnih et al. 2015. norm_obs
(6), scale_rew (7), max_grad_norm and orthogonal_init, mostly from OpenAI
Baselines, can be switched off; so can anneal_lr, which is the paper's.

Defaults: T = 10, N = 16, so a million environment steps give 6,250 gradient
steps. If you change `num_envs`, scale `rollout_steps` with it to keep T = 10.
In a healthy run on MuJoCo `grad_norm` is 0.05 to 0.5, so clipping is rare;
`explained_variance` (of R, which contains V itself; noisy with so few samples)
rises above 0.5; and `entropy` falls.

Read after    algos/vpg.py, then:  diff algos/vpg.py algos/a2c.py
Try           python -m algos.a2c --env CartPole-v1 --total-steps 2e5
Reproduce     python -m algos.a2c    (learning curves: benchmarks/README.md)
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn

# mpi.RMSProp       `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One RMSProp step; its gradient is averaged over processes, clipped
#                   if max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.RunningStats  running mean and var of all rows that `update` got, in all processes
# image_to_float    uint8 pixels -> float32 in [0, 1], channels first
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# nature_cnn        the CNN of Mnih et al. 2015, with 512 outputs after a ReLU
# stack_steps       T dicts -> one dict of [T, N, ...]; bools and floats become float32
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import image_to_float, is_image, make_envs, nature_cnn, stack_steps
from utils.run import Run, RunConfig, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits (discrete) or k means (continuous)
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds env, seed, run_dir, device, ...: see --help
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 16  # N, parallel environments (8 to 64); must divide rollout_steps
    report_every: int = 4000  # environment steps between reports
    rollout_steps: int = 160  # T x N, samples per rollout: T steps in each of N envs
    lr: float = 1e-3  # RMSProp's initial learning rate (1e-4 to 3e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    rmsprop: Literal["torch", "tf"] = "torch"  # update rule of PyTorch or TensorFlow 1
    rmsprop_eps: float = 1e-5  # RMSProp's epsilon (1e-5 to 1e-3)
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    vf_coef: float = 0.5  # weight of the value loss (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus, beta in the paper (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, for vector observations
    std_init: float = 1.0  # initial sigma of continuous actions, before tanh (0.3 to 1)
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
    """Actor, critic and running statistics."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector image", act="discrete box")
        self.cfg = cfg
        self.images = is_image(obs_space)
        self.discrete = isinstance(act_space, gym.spaces.Discrete)
        if self.discrete:
            num_outputs = int(act_space.n)  # a logit per action
            self.log_std = None
        else:
            num_outputs = math.prod(act_space.shape)  # a mean per dimension
            log_std = torch.full((num_outputs,), math.log(cfg.std_init))
            self.log_std = nn.Parameter(log_std)
            self.register_buffer("low", torch.tensor(act_space.low))
            self.register_buffer("high", torch.tensor(act_space.high))
        if self.images:
            self.encoder = nature_cnn(obs_space)  # shared; 512 features
            sizes = (512,)
        else:
            self.encoder = nn.Identity()
            sizes = (*obs_space.shape, *cfg.hidden)
        self.actor = mlp(*sizes, num_outputs)
        self.critic = mlp(*sizes, 1)
        if cfg.orthogonal_init:
            init_orthogonal(self)
        self.obs_stats = mpi.RunningStats(obs_space.shape)
        self.reward_sum_stats = mpi.RunningStats(())  # of G in Eq. (7)
        self.discounted_reward_sum = torch.zeros(())  # G carried over as [N]; not saved

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> network inputs: pixels in [0, 1] or Eq. (6)."""
        if self.images:
            return image_to_float(obs)
        if not self.cfg.norm_obs:
            return obs.float()
        return standardize(obs.float(), self.obs_stats.mean, self.obs_stats.var)

    def forward(self, obs: Tensor) -> tuple[ActorOut, PerSample]:
        """Normalised observations [B, ...] -> outputs of the actor, values."""
        features = self.encoder(obs)
        return self.actor(features), self.critic(features).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> discrete actions [N], or [N, k] before tanh."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        actor_out = self.actor(self.encoder(self.normalize_obs(obs)))
        if deterministic:
            return actor_out.argmax(-1) if self.discrete else actor_out
        if self.discrete:
            return actor_out.softmax(-1).multinomial(1).squeeze(-1)
        return actor_out + self.log_std.exp() * torch.randn_like(actor_out)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`: continuous ones are squashed and rescaled."""
        if self.discrete:
            return act.cpu().numpy()
        squashed = act.tanh().view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, (squashed + 1) / 2).cpu().numpy()

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
class Batch:
    obs: Float32[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]
    adv: PerSample
    ret: PerSample


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


def compute_advantages(rollout: Rollout, val: PerStep, next_val: PerStep,
                       gamma: float, lam: float) -> tuple[PerStep, PerStep]:
    """GAE: return A and R. The recursion does not cross the end of an episode."""
    delta = rollout.rew + gamma * (1 - rollout.terminated) * next_val - val  # Eq. (1)
    decay = gamma * lam * (1 - rollout.done)
    delta, decay = delta.cpu().numpy(), decay.cpu().numpy()  # a loop in NumPy is faster
    adv = np.zeros_like(delta)
    next_adv = np.zeros_like(delta[0])  # A is 0 after the rollout's last step
    for t in reversed(range(len(delta))):
        adv[t] = delta[t] + decay[t] * next_adv  # Eq. (2)
        next_adv = adv[t]
    adv = torch.as_tensor(adv, device=val.device)
    return adv, adv + val


def log_prob(actor_out: ActorOut, log_std: Tensor | None, act: Tensor) -> PerSample:
    """Eq. (3). Actions: discrete [B] if log_std is None, else before tanh [B, k]."""
    if log_std is None:
        return actor_out.log_softmax(-1).gather(-1, act.unsqueeze(-1)).squeeze(-1)
    z = (act - actor_out) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy(actor_out: ActorOut, log_std: Tensor | None) -> Scalar:
    """Eq. (4) in nats; for continuous actions, of the Gaussian before tanh."""
    if log_std is None:
        return -(actor_out.softmax(-1) * actor_out.log_softmax(-1)).sum(-1).mean()
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def value_loss(val: PerSample, ret: PerSample) -> Scalar:
    assert val.shape == ret.shape  # [B] minus [B, 1] would be [B, B]
    return (val - ret).square().mean()  # Eq. (5)


def policy_loss(logp: PerSample, adv: PerSample) -> Scalar:
    """Its negative gradient estimates the policy gradient, up to a factor."""
    assert logp.shape == adv.shape
    return -(logp * adv).mean()  # Eq. (8)


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1: `val` is R up to a constant. 0: no better than a constant. Below 0: worse."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= update =======================================
def a2c_loss(agent: Agent, batch: Batch) -> tuple[Scalar, dict]:
    """Eq. (9). `update` computes advantages and targets without gradients."""
    cfg = agent.cfg
    actor_out, val = agent(batch.obs)
    logp = log_prob(actor_out, agent.log_std, batch.act)
    pi_loss = policy_loss(logp, batch.adv)
    v_loss = value_loss(val, batch.ret)
    ent = entropy(actor_out, agent.log_std)
    loss = pi_loss + cfg.vf_coef * v_loss - cfg.ent_coef * ent  # Eq. (9)
    return loss, {"pi_loss": pi_loss, "v_loss": v_loss, "entropy": ent}


def normalize_rollout(agent: Agent, rollout: Rollout) -> Rollout:
    """Return a normalised copy to learn from. `update_stats` needs the raw rollout."""
    obs = agent.normalize_obs(rollout.obs)
    next_obs = agent.normalize_obs(rollout.next_obs)
    rollout = replace(rollout, obs=obs, next_obs=next_obs)
    if agent.cfg.scale_rew:
        rew = standardize(rollout.rew, 0.0, agent.reward_sum_stats.var)  # Eq. (7)
        rollout = replace(rollout, rew=rew)
    return rollout


def compute_targets(agent: Agent, rollout: Rollout) -> tuple[PerStep, PerStep, PerStep]:
    """V, A and R of Eqs. (1), (2), by the current critic, for a normalised rollout."""
    val = agent.critic(agent.encoder(rollout.obs.flatten(0, 1))).view_as(rollout.rew)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # within an episode, s' is the next row's s
    ends = rollout.done.bool()
    ends[-1] = True  # where an episode or the rollout ends, s' is in next_obs
    next_val[ends] = agent.critic(agent.encoder(rollout.next_obs[ends])).squeeze(-1)
    cfg = agent.cfg
    adv, ret = compute_advantages(rollout, val, next_val, cfg.gamma, cfg.lam)
    return val, adv, ret


@torch.no_grad()  # `minimize` enables gradients for its loss
def update(agent: Agent, optimizer: mpi.RMSProp, rollout: Rollout, lr: float) -> dict:
    """One gradient step on the whole rollout. Return metrics."""
    cfg = agent.cfg
    rollout = normalize_rollout(agent, rollout)
    obs = rollout.obs.flatten(0, 1)  # [T, N, ...] -> [B, ...]
    act = rollout.act.flatten(0, 1)
    val, adv, ret = compute_targets(agent, rollout)
    critic_metrics = {"val": val, "explained_variance": explained_variance(val, ret)}
    batch = Batch(obs, act, adv.flatten(), ret.flatten())
    metrics = optimizer.minimize(
        a2c_loss, agent, batch, lr=lr, max_grad_norm=cfg.max_grad_norm)
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
        optimizer = mpi.RMSProp(agent, eps=cfg.rmsprop_eps, tf_style=tf_style)
        step = run.restore(agent, optimizer=optimizer)  # 0, or where the run stopped
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect(agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            agent.update_stats(rollout)
            step += cfg.rollout_steps
            run.store(**metrics)  # the next report averages them
            run.report(step, envs, lr=lr)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
