r"""PPO with an LSTM, for partially observable tasks (POMDPs).  PPO: Schulman et
al. 2017.  LSTM: Hochreiter and Schmidhuber 1997; its forget gate: Gers et al.
2000.  LSTM in an actor-critic: Mnih et al. 2016.

The problem. PPO's policy sees one observation at a time, but one frame of a
moving ball does not show its velocity. So the policy needs a memory. An LSTM is
a network that has one: m, a pair of vectors h and c. At every step it computes
a new m from the old one and the observation. Actor and critic see only h, so in
pi(. | s) and V(s), s means h. In "s' is terminal", s' is the task's true state.

The algorithm, and where each step is coded:

    m = 0; repeat until total_steps:
        m0 = m, stored with the rollout                    collect_with_memory
        T times: h, m = LSTM(obs, m); act from h;          act
                 m = 0 where the episode ended             forget
        log pi_old: run the LSTM over the rollout from m0  recurrent_logp
        repeat `epochs` times:                             update
            advantages A and targets R, also from m0       recurrent_targets
            for each minibatch of whole environments:
                run the LSTM over it from m0               unroll
                one Adam step on L, (11)                   recurrent_ppo_loss
        update the statistics of (6) and (7)               update_stats

Four rules follow. Breaking one raises no error; the agent just learns worse.
  - Rule 1. An episode starts with m = 0, both in acting and in training.
  - Rule 2. A minibatch is all T steps of a few environments, not single steps
    drawn at random, because h_t depends on all observations since the reset.
  - Rule 3. A rollout may start within an episode, so training starts from m0.
  - Rule 4. A gradient step changes the LSTM, so every pass recomputes all h, c
    from m0. Only m0 itself stays as it was stored.

The LSTM's equations; PPO's own, (1) to (12), follow further down:

    h_t, c_t = LSTM(obs_t, (1 - done_{t-1}) (h_{t-1}, c_{t-1}))           (13)
    pi(. | s_t), V(s_t) = functions of h_t                                (14)
    V(s'_t) = V(h'),  with h', c' = LSTM(obs of s'_t, (h_t, c_t))         (15)
    LSTM:  i, f, o = sigmoid(linear(x, h)),  g = tanh(linear(x, h)),
           c <- f c + i g,  h <- o tanh(c),  where x = MLP(obs) or CNN(obs)

Gradients flow back through h and c, at most to the start of the episode or
rollout. m is carried into the next rollout, so it can outlast T steps.

s' follows s. Within an episode, V(s'_t) is V(s_{t+1}). Where the episode or the
rollout ends, (15) takes an extra step from the memory before any reset, and we
discard h' and c'. If the episode goes on, the next rollout feeds the LSTM the
same observation.

The rest is algos/ppo.py. V estimates the discounted sum of scaled rewards r
from s on; R is its target. A is how much better an action was than the policy's
average. `terminated` is 1 if s' is terminal, `done` also at a time limit. a is
before tanh; mean and var are of earlier rollouts; c is `clip_ratio`.

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)              (1)
    A_t = delta_t + gamma lam (1 - done_t) A_{t+1},  R_t = A_t + V(s_t)    (2)
    log pi  = log softmax(logits)_a, or sum_i log N(a_i; mu_i(s), sigma_i) (3)
    H       = entropy of pi(. | s) before tanh, averaged over the batch    (4)
    L_V     = mean (V(s) - R)^2                                            (5)
    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1}, for raw rewards r,
    rew    <- clip(rew / sqrt(var(G) + 1e-8), -10, 10)                     (7)
    A      <- (A - mean A) / (std A + 1e-8), per minibatch                 (8)
    ratio   = pi(a | s) / pi_old(a | s)                                    (9)
    L_pi    = -mean min(ratio A, clip(ratio, 1 - c, 1 + c) A)             (10)
    L       = L_pi + vf_coef L_V - ent_coef H                             (11)
    KL      = mean (ratio - 1 - log ratio), estimates KL(pi_old || pi)    (12)

Departures, besides those of algos/ppo.py. m0 comes from older weights and
statistics, and stays fixed for all epochs: common practice, an approximation.
log pi_old is still exact: acting used this m0, these weights and statistics.

Defaults: T = 64, N = 8; 10 epochs of 4 minibatches are 40 gradient steps. In
healthy runs, `kl` is 0.002 to 0.03 and `clip_frac` 0.01 to 0.3.

Read after    algos/ppo.py, then:  diff algos/ppo.py algos/ppo_lstm.py
Try           python -m algos.ppo_lstm --env utils.tasks:CartPoleNoVel-v0 \
                  --total-steps 5e4 --gamma 0.98   (CartPole without velocities)
"""

import math
from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn

# mpi.Adam          `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One Adam step; its gradient is averaged over processes, clipped if
#                   max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.moments       count, mean and variance along dim 0, over all processes (float64)
# mpi.RunningStats  running mean and var of all rows that `update` got, in all processes
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# nature_cnn        the CNN of Mnih et al. 2015, with 512 outputs after a ReLU
# stack_steps       T dicts -> one dict of [T, N, ...]; bools and floats become float32
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.envs import image_to_float, is_image, make_envs, nature_cnn, stack_steps
from utils.run import Run, RunConfig, check_range, check_spaces, main

PerStep = Float32[Tensor, "T N"]  # one number per step and environment
PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits (discrete) or k means (continuous)
Scalar = Float32[Tensor, ""]
Memory = Float32[Tensor, "2 N size"]  # memory[0] is h, memory[1] is c


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds env, seed, run_dir, device, ...: see --help
    total_steps: float = 1e6  # environment steps, rounded up to whole rollouts
    num_envs: int = 8  # N, parallel environments (usually 1 to 64)
    rollout_steps: int = 512  # T x N, samples per rollout: T steps in each of N envs
    minibatch_envs: int = 2  # environments per gradient step, with all T steps (1 to N)
    epochs: int = 10  # passes over each rollout (3 to 20)
    lr: float = 1e-3  # Adam's initial learning rate (1e-5 to 1e-3)
    anneal_lr: bool = True  # anneal the learning rate linearly to zero
    gamma: float = 0.99  # discount factor (0.9 to 0.999)
    lam: float = 0.95  # GAE's lambda (lower: more bias; higher: more variance)
    clip_ratio: float = 0.2  # c in Eq. (10), epsilon in PPO's paper (0.1 to 0.3)
    target_kl: float = 0.0  # stop the epochs once KL, Eq. (12), exceeds this; 0: off
    vf_coef: float = 0.25  # weight of the value loss, c1 in PPO's paper (0.1 to 1)
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 in PPO's paper (0 to 0.05)
    max_grad_norm: float = 0.5  # maximum gradient norm; 0: off
    hidden: tuple[int, ...] = (64,)  # widths, used before (vectors) and after the LSTM
    lstm_size: int = 128  # length of h and of c, the LSTM's hidden size (32 to 512)
    std_init: float = 1.0  # initial sigma of continuous actions, before tanh (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (6)
    scale_rew: bool = True  # divide rewards by the standard deviation of G, Eq. (7)
    norm_adv: bool = True  # normalise advantages per minibatch, Eq. (8)
    orthogonal_init: bool = True  # orthogonal initial weights (LSTM: always PyTorch's)

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "rollout_steps", low=2 * self.num_envs)  # T is at least 2


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
    """Encoder, LSTM, actor, critic, running statistics, and the memory of `act`."""

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
            sizes = (*obs_space.shape, *cfg.hidden)
            self.encoder = nn.Sequential(mlp(*sizes), nn.Tanh())
        self.lstm = nn.LSTM(sizes[-1], cfg.lstm_size)  # shared by actor and critic
        self.actor = mlp(cfg.lstm_size, *cfg.hidden, num_outputs)
        self.critic = mlp(cfg.lstm_size, *cfg.hidden, 1)
        if cfg.orthogonal_init:
            init_orthogonal(self)
        self.obs_stats = mpi.RunningStats(obs_space.shape)
        self.reward_sum_stats = mpi.RunningStats(())  # of G in Eq. (7)
        self.discounted_reward_sum = torch.zeros(())  # G carried over as [N]; not saved
        self.memory = None  # (h, c): every `act` advances it. Evaluation acts by a copy

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> network inputs: pixels in [0, 1] or Eq. (6)."""
        if self.images:
            return image_to_float(obs)
        if not self.cfg.norm_obs:
            return obs.float()
        return standardize(obs.float(), self.obs_stats.mean, self.obs_stats.var)

    def memory_before(self, obs: Tensor | np.ndarray) -> Memory:
        """The memory `act` starts from: zeros after `forget()` or for another N."""
        if self.memory is not None and self.memory.shape[1] == len(obs):
            return self.memory
        device = self.obs_stats.mean.device
        return torch.zeros(2, len(obs), self.cfg.lstm_size, device=device)

    def forget(self, done: np.ndarray | None = None) -> None:
        """Set the memory to zero, or with `done` [N] only where an episode ended."""
        if done is None:
            self.memory = None
        elif self.memory is not None:
            done = torch.as_tensor(done, device=self.memory.device)
            self.memory = clear(self.memory, done.float())

    def remember(self, features: Float32[Tensor, "T N k"],
                 memory: Memory) -> tuple[Float32[Tensor, "T N size"], Memory]:
        """Run the LSTM for T steps with no reset. Return all h and the last memory."""
        h, after = self.lstm(features, (memory[:1], memory[1:]))
        return h, torch.cat(after)

    def unroll(self, obs: Tensor, done: PerStep, memory: Memory) -> tuple[
            Float32[Tensor, "T N size"], Float32[Tensor, "2 T N size"]]:
        """Eq. (13). `memories`, for (15), are right at ends and at T - 1 only. Else as:
            for t in range(T):
                h[t], memory = lstm(features[t], memory)
                memories[t] = memory  # before any reset
                memory = clear(memory, done[t])  # rule 1
        nn.LSTM is faster over many steps, but cannot reset. So where any episode ends,
        we cut all N sequences, and `clear` resets the memory of the ended ones only."""
        features = self.encoder(obs.flatten(0, 1)).unflatten(0, done.shape)
        ends = done[:-1].any(dim=1).nonzero().flatten()  # steps that end any episode
        cuts = (ends + 1).tolist()  # the first step of each piece but the first
        hidden = []
        memories = []  # true only in the last row of a piece; no other is used
        for piece, ended in zip(features.tensor_split(cuts), done.tensor_split(cuts)):
            h, memory = self.remember(piece, memory)
            hidden.append(h)
            memories.append(memory.unsqueeze(1).expand(-1, len(piece), -1, -1))
            memory = clear(memory, ended[-1])  # rule 1
        return torch.cat(hidden), torch.cat(memories, dim=1)

    def forward(self, obs: Tensor, done: PerStep,
                memory: Memory) -> tuple[ActorOut, PerSample]:
        """Normalised sequences [T, N, ...] -> actor's outputs, values. B = T x N."""
        h, _ = self.unroll(obs, done, memory)
        h = h.flatten(0, 1)
        return self.actor(h), self.critic(h).squeeze(-1)  # Eq. (14)

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
        """Actions for `env.step`: continuous ones are squashed and rescaled."""
        if self.discrete:
            return act.cpu().numpy()
        squashed = act.tanh().view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, (squashed + 1) / 2).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw obs -> deterministic action. Call `forget()` before each episode."""
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
    memory: Memory  # m0, before the first step


@dataclass(frozen=True)
class Sequences:
    obs: Float32[Tensor, "T N *obs"]  # N: the environments of a minibatch; B = T x N
    done: PerStep
    memory: Memory  # m0
    act: Shaped[Tensor, "B *act"]
    logp_old: PerSample
    adv: PerSample
    ret: PerSample


def true_next_obs(new_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Observations of s', [N, ...]: `new_obs`, or "final_obs" if an episode ended."""
    next_obs = new_obs.copy()
    for i in np.flatnonzero(done):
        next_obs[i] = infos["final_obs"][i]
    return next_obs


def collect_with_memory(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray,
                        num_steps: int) -> tuple[Rollout, np.ndarray]:
    """Act for T = num_steps steps. Return the rollout and the obs to act on next."""
    memory = agent.memory_before(obs)  # m0, rule 3
    steps = []
    for _ in range(num_steps):
        act = agent.act(obs)
        new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
        done = terminated | truncated
        next_obs = true_next_obs(new_obs, done, infos)
        steps.append({"obs": obs, "act": act.cpu().numpy(), "rew": rew,
                      "next_obs": next_obs, "terminated": terminated, "done": done})
        obs = new_obs  # after a reset, the first of the new episode
        agent.forget(done)  # rule 1
    return Rollout(**stack_steps(steps, act.device), memory=memory), obs


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


def normalize_advantages(adv: Float32[Tensor, "M B"]) -> Float32[Tensor, "M B"]:
    """Eq. (8) for all M minibatches at once, over the samples of all processes."""
    _, mean, var = mpi.moments(adv.T)
    return ((adv - mean[:, None]) / (var.sqrt()[:, None] + 1e-8)).float()


def clipped_policy_loss(logp: PerSample, logp_old: PerSample, adv: PerSample,
                        clip_ratio: float) -> Scalar:
    """Eqs. (9), (10). With the minimum, the objective is at most mean(ratio A)."""
    assert logp.shape == logp_old.shape == adv.shape
    ratio = (logp - logp_old).exp()  # Eq. (9)
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.min(ratio * adv, clipped * adv).mean()  # Eq. (10)


def approx_kl(logp: PerSample, logp_old: PerSample) -> PerSample:
    """Eq. (12) before the mean. Unlike -log ratio, it is never negative."""
    log_ratio = logp - logp_old
    return log_ratio.exp() - 1 - log_ratio


def clear(memory: Memory, done: Float32[Tensor, "N"]) -> Memory:
    """Rule 1: zero where `done`. Eq. (13) resets before step t, we after step t - 1."""
    return memory * (1 - done).unsqueeze(-1)


def explained_variance(val: PerStep, ret: PerStep) -> Scalar:
    """1: `val` is R up to a constant. 0: no better than a constant. Below 0: worse."""
    return 1 - (ret - val).var(correction=0) / (ret.var(correction=0) + 1e-8)


# ======================================= update =======================================
def recurrent_ppo_loss(agent: Agent, minibatch: Sequences) -> tuple[Scalar, dict]:
    """Eq. (11). `update` computes advantages and targets without gradients."""
    cfg = agent.cfg
    actor_out, val = agent(minibatch.obs, minibatch.done, minibatch.memory)  # rule 4
    logp = log_prob(actor_out, agent.log_std, minibatch.act)
    pi_loss = clipped_policy_loss(
        logp, minibatch.logp_old, minibatch.adv, cfg.clip_ratio)  # Eq. (10)
    v_loss = value_loss(val, minibatch.ret)
    ent = entropy(actor_out, agent.log_std)
    loss = pi_loss + cfg.vf_coef * v_loss - cfg.ent_coef * ent  # Eq. (11)
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


def recurrent_targets(agent: Agent,
                      rollout: Rollout) -> tuple[PerStep, PerStep, PerStep]:
    """V, A and R of Eqs. (1), (2), by the current weights, for a normalised rollout."""
    h, memories = agent.unroll(rollout.obs, rollout.done, rollout.memory)
    val = agent.critic(h).squeeze(-1)
    next_val = torch.zeros_like(val)
    next_val[:-1] = val[1:]  # within an episode, s' is the next row's s
    ends = rollout.done.bool()
    ends[-1] = True  # where an episode or the rollout ends, s' is in next_obs
    features = agent.encoder(rollout.next_obs[ends])  # one extra step per end
    h, _ = agent.remember(features[None], memories[:, ends])
    next_val[ends] = agent.critic(h[0]).squeeze(-1)  # Eq. (15)
    cfg = agent.cfg
    adv, ret = compute_advantages(rollout, val, next_val, cfg.gamma, cfg.lam)
    return val, adv, ret


def recurrent_logp(agent: Agent, rollout: Rollout) -> PerSample:
    """log pi of the rollout's actions, by the current weights unrolled from m0."""
    actor_out, _ = agent(rollout.obs, rollout.done, rollout.memory)
    return log_prob(actor_out, agent.log_std, rollout.act.flatten(0, 1))


def recurrent_change(agent: Agent, rollout: Rollout, logp_old: PerSample) -> dict:
    """Compare pi with pi_old: KL, Eq. (12), and the share of ratios out of range."""
    logp = recurrent_logp(agent, rollout)
    _, kl, _ = mpi.moments(approx_kl(logp, logp_old))  # mean over all processes
    ratio = (logp - logp_old).exp()
    clip_frac = ((ratio - 1).abs() > agent.cfg.clip_ratio).float().mean()
    return {"kl": kl, "clip_frac": clip_frac}


@torch.no_grad()  # `minimize` enables gradients for its loss
def update(agent: Agent, optimizer: mpi.Adam, rollout: Rollout, lr: float) -> dict:
    """Run the epochs on one rollout. Return metrics; `run.report` averages each."""
    cfg = agent.cfg
    rollout = normalize_rollout(agent, rollout)
    obs = rollout.obs
    logp_old = recurrent_logp(agent, rollout)  # pi_old, for all epochs
    num_minibatches = cfg.num_envs // cfg.minibatch_envs
    step_metrics = []  # of each gradient step: the losses and the gradient norm
    for epoch in range(cfg.epochs):
        val, adv, ret = recurrent_targets(agent, rollout)  # by the current critic
        if epoch == 0:  # before the critic has learned from this rollout
            explained = explained_variance(val, ret)
            critic_metrics = {"val": val, "explained_variance": explained}
        minibatches = torch.randperm(obs.shape[1]).view(num_minibatches, -1)  # [M, n]
        advs = adv[:, minibatches].transpose(0, 1).flatten(1)  # [T, M, n] -> [M, B]
        if cfg.norm_adv:
            advs = normalize_advantages(advs)
        for m, idx in enumerate(minibatches):
            minibatch = Sequences(  # all T steps of some environments: rules 2, 3
                obs[:, idx], rollout.done[:, idx], rollout.memory[:, idx],
                rollout.act[:, idx].flatten(0, 1),
                logp_old.view_as(ret)[:, idx].flatten(), advs[m], ret[:, idx].flatten())
            step_metrics.append(optimizer.minimize(
                recurrent_ppo_loss, agent, minibatch, lr=lr,
                max_grad_norm=cfg.max_grad_norm))
        if cfg.target_kl > 0:
            change = recurrent_change(agent, rollout, logp_old)
            if change["kl"] > cfg.target_kl:
                break
    metrics = {}
    for name in step_metrics[0]:
        metrics[name] = torch.stack([step[name] for step in step_metrics])
    metrics |= recurrent_change(agent, rollout, logp_old)
    return metrics | {"epochs": epoch + 1, "lr": lr} | critic_metrics


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    """Train until `total_steps`, from the start or from a checkpoint."""
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of the resumed run
        envs = make_envs(cfg, run.num_envs)  # this process's share of cfg.num_envs
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        agent.to(run.device)
        optimizer = mpi.Adam(agent, eps=1e-5)  # OpenAI Baselines' eps
        step = run.restore(agent, optimizer=optimizer)  # 0, or where the run stopped
        obs, _ = envs.reset(seed=run.env_seed)
        while step < cfg.total_steps:
            lr = cfg.lr * (1 - step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            rollout, obs = collect_with_memory(
                agent, envs, obs, cfg.rollout_steps // cfg.num_envs)
            metrics = update(agent, optimizer, rollout, lr)
            agent.update_stats(rollout)
            step += cfg.rollout_steps
            run.report(step, envs, **metrics)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
