"""Advantage Actor-Critic (A2C).  Mnih et al. 2016, arXiv:1602.01783: A3C, in step.

VPG collects 64 steps of each environment for one step of its policy, A2C ten. Since the states of
one short rollout are much alike, many environments make the batch; one step on one loss moves
policy, value function and, of images, their encoder. What it gives up is accuracy: a rollout of ten
steps sees little of what follows, and V has to tell the rest.

What it shares with other policy gradients. s' is the true successor of s, also where a time limit
cuts the episode, since what would have followed has a value; "terminated" is a true end, "done" an
end of any kind. (1) and (2) are GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)                              (1)
    A_t     = delta_t + gamma lam (1 - done_t) A_{t+1},   R_t = A_t + V(s_t)               (2)
    log pi  = -sum_i (((a_i - mu_i(s)) / sigma_i)^2 / 2 + log sigma_i + log(2 pi) / 2)     (3)
    H       = sum_i (log sigma_i + log(2 pi e) / 2),  or  -mean sum_a pi(a|s) log pi(a|s)  (4)
    L_V     = mean (V(s) - R)^2                                                            (5)
    x      <- clip((x - mean) / sqrt(var + 1e-8), -10, 10),   of observations              (6)
    G_t     = r_t + gamma (1 - done_{t-1}) G_{t-1};   r <- clip(r / sd(G), -10, 10)        (7)
    L_pi    = -mean log pi(a | s) A,   in which A is a constant                            (8)

A2C's own. The entropy's bonus keeps the policy trying (default: none); RMSProp divides the gradient
g of each parameter by how large it has lately been, whose square m remembers:

    L       = L_pi + vf_coef L_V - ent_coef H                                              (9)
    m      <- 0.99 m + 0.01 g^2,   m = 1 at first;   step  lr g / sqrt(m + eps)           (10)
    m      <- 0.99 m + 0.01 g^2,   m = 0 at first;   step  lr g / (sqrt(m) + eps)         (11)

(10) is TensorFlow 1's rule, behind OpenAI Baselines' results; (11), that of torch.optim.RMSprop, is
another algorithm for the same numbers. Where gradients are small, 1e-5 under the root is a floor
of 3e-3, beside it one of 1e-5: the step is up to 300 times as long. And m = 0 at first makes the
first step of each parameter lr / sqrt(0.01), ten times what is meant, in whichever direction noise
pointed, where m = 1 begins gently. Some who ported A2C with the number but without the rule found
it unstable at 1e-5 and needed 1e-3. `rmsprop` chooses. Here, with ten steps of 16 environments and
normalised rewards, (11) is stable with 1e-5 as well, and (10) no better (mean return after 1M steps
on HalfCheetah, Hopper, Walker2d: 1099, 1331, 1467, two seeds; (10) at its best, with --rmsprop tf
--batch 256 --lr 2e-3, 1069, 981, 1002, one seed).

Departs from the paper: rollouts are taken in step, not by threads that overwrite each other; (11);
(6), (7), orthogonal weights, gradients of limited length; sigma does not depend on s; the network
of images is that of 2015; GAE (the paper has lam = 1); tanh takes an action a to the bounds of the
environment (tanh's Jacobian, which (3) then lacks, does not depend on the parameters, and leaves
the gradient of (8) as it is).

Read after    algos/vpg.py:  diff algos/vpg.py algos/a2c.py
Try           python -m algos.a2c --env CartPole-v1 --total-steps 2e5 --ent-coef 0.01
Reproduce     python -m algos.a2c --env HalfCheetah-v4    (benchmarks/README.md: return, seeds)
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from jaxtyping import Float32, Shaped
from torch import Tensor, nn

from utils import mpi
from utils.logger import Logger, check_divides, check_range, check_spaces, env_errors, open_run

Steps = Float32[Tensor, "T N"]  # one number for each of T steps of N environments
Batch = Float32[Tensor, "B"]  # one number a sample: never [B, 1]


# ============================================ config ============================================
@dataclass(frozen=True)
class Config:
    env: str = "HalfCheetah-v4"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: str = "{}"  # keyword arguments of the environment, a JSON object
    seed: int = 1  # of everything random in the run
    total_steps: float = 1e6  # environment steps; rounded up to whole reports
    num_envs: int = 16  # environments stepped together, over all processes
    num_procs: int = 1  # MPI processes that share the environments and each batch
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers (vector observations)
    gamma: float = 0.99  # discount factor
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA for images if there, else CPU
    compile: bool = False  # torch.compile loss and gradient: quicker steps, a slower start
    torch_threads: int = 1  # threads of PyTorch in each process
    run_dir: str = ""  # where the run is kept; default runs/<env>/<algo>/seed<k>
    resume: bool = False  # go on from the last checkpoint of the run directory
    init_from: str = ""  # a run whose weights and statistics to start from; all else begins anew
    eval_every: int = 0  # steps between evaluations, deterministic and at reports; 0: none
    batch: int = 160  # steps collected for each update, over all environments
    report_every: int = 25  # updates between reports; step size, evaluation, checkpoints wait
    lr: float = 1e-3  # RMSProp's step size at the start
    anneal_lr: bool = True  # linearly to zero at the end of the run
    lam: float = 0.95  # GAE: from most bias (0) to most variance (1)
    vf_coef: float = 0.5  # weight of the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus
    rmsprop: Literal["torch", "tf"] = "torch"  # Eq. (11) or Eq. (10)
    eps: float = 1e-5  # of RMSProp
    std_init: float = 1.0  # sigma at the start
    max_grad_norm: float = 0.5  # length to which a longer gradient is cut; 0: any
    norm_obs: bool = True  # vector observations to mean 0, deviation 1, by running statistics
    scale_rew: bool = True  # divide rewards by the running deviation of discounted returns
    orthogonal_init: bool = True  # else PyTorch's default

    def __post_init__(self):
        check_range(self, "total_steps num_envs num_procs torch_threads batch report_every", 1)
        check_range(self, "seed eval_every vf_coef ent_coef max_grad_norm", 0)
        check_range(self, "gamma lam", 0, 1)
        check_range(self, "hidden lr eps std_init", above=0)
        check_divides(self, "batch/num_envs num_envs/num_procs")


# ============================================ agent =============================================
def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def nature_cnn(c: int, h: int, w: int) -> nn.Sequential:
    """Images [B, C, H, W] -> features [B, 512]: the network of Mnih et al. 2015 (Nature)."""
    conv = nn.Sequential(nn.Conv2d(c, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                         nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*conv, nn.Linear(conv(torch.zeros(1, c, h, w)).shape[1], 512), nn.ReLU())


class RunningStats(nn.Module):
    """Mean and variance of all rows so far, on all ranks, merged group by group in float64."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        for name, start in (("count", 0.0), ("mean", 0.0), ("var", 1.0)):  # count shaped as mean
            self.register_buffer(name, torch.full(shape, start, dtype=torch.float64))

    def update(self, rows: Float32[Tensor, "B *shape"]) -> None:
        count, mean, var = mpi.moments(rows)  # of all ranks together; var with ddof 0
        share, delta = count / self.count.add_(count), mean - self.mean
        self.var.copy_((1 - share) * self.var + share * var + share * (1 - share) * delta**2)
        self.mean += share * delta


class Agent(nn.Module):
    """Policy, value function and the statistics they rest on: its state dict is the whole agent."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector image", act="discrete box")  # finite box
        shape, self.cfg, self.log_std = obs_space.shape, cfg, None
        self.images, self.discrete = len(shape) == 3, isinstance(act_space, gym.spaces.Discrete)
        self.channels_last = self.images and shape[2] < shape[0]  # fewer channels than rows
        num_outputs = int(act_space.n) if self.discrete else math.prod(act_space.shape)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((num_outputs,), math.log(cfg.std_init)))
            self.register_buffer("low", torch.tensor(act_space.low))
            self.register_buffer("high", torch.tensor(act_space.high))
        chw = (shape[2], *shape[:2]) if self.channels_last else shape
        self.encoder = nature_cnn(*chw) if self.images else nn.Identity()
        sizes = (512,) if self.images else (*shape, *cfg.hidden)
        self.actor, self.critic = mlp(*sizes, num_outputs), mlp(*sizes, 1)
        gains = {self.actor[-1]: 0.01, self.critic[-1]: 1.0}  # at first no action is preferred
        for layer in self.modules() if cfg.orthogonal_init else ():
            if isinstance(layer, nn.Linear | nn.Conv2d):  # sqrt(2): for ReLU; with tanh a custom
                nn.init.orthogonal_(layer.weight, gains.get(layer, math.sqrt(2)))
                nn.init.zeros_(layer.bias)
        self.obs_stats, self.ret_stats = RunningStats(shape), RunningStats(())
        self.ret_sum = torch.zeros(())  # G of Eq. (7), [N]; not saved: environments begin anew

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations -> what the networks take, float32: vectors or [..., C, H, W]."""
        if self.images:
            return (obs.movedim(-1, -3) if self.channels_last else obs).float() / 255
        mean, var = self.obs_stats.mean, self.obs_stats.var
        return standardize(obs.float(), mean, var) if self.cfg.norm_obs else obs.float()

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised observations [B, ...] -> outputs of the actor [B, k], values [B]."""
        features = self.encoder(obs)
        return self.actor(features), self.critic(features).squeeze(-1)  # [B, 1] -> [B]

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions of the policy, [N] or [N, d], not yet bounded."""
        obs = torch.as_tensor(obs, device=self.ret_stats.mean.device)
        out = self.actor(self.encoder(self.normalize(obs)))
        if self.discrete:  # the largest of logits + Gumbel noise is a sample of their softmax
            gumbel = 0 if deterministic else -torch.empty_like(out).exponential_().log()
            return (out + gumbel).argmax(-1)
        return out if deterministic else out + self.log_std.exp() * torch.randn_like(out)

    def env_act(self, act: Tensor) -> np.ndarray:
        """tanh takes actions to [-1, 1], which is stretched to the box, dimension by dimension."""
        if self.discrete:
            return act.cpu().numpy()
        share = act.tanh().view(-1, *self.low.shape).to(self.low) / 2 + 0.5  # in the box's dtype
        return torch.lerp(self.low, self.high, share).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw observation -> the deterministic action, for a plain environment's `step`."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]

    def observe(self, rollout: "Rollout") -> None:
        """The one place where statistics change: after learning, which needs those that acted."""
        ret, self.ret_sum = running_returns(rollout.rew, rollout.done, self.ret_sum, self.cfg.gamma)
        self.ret_stats.update(ret.flatten())
        if not self.images:
            self.obs_stats.update(rollout.obs.flatten(0, 1))


# ============================================= data =============================================
def make_envs(cfg: Config, num_envs: int) -> gym.vector.VectorEnv:
    """In all files: a last step also resets, perhaps in the array it returned: obs are copied."""
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    copy = [lambda env: gym.wrappers.TransformObservation(env, np.copy, None)]
    kwargs = {"vectorization_mode": "sync", "vector_kwargs": same_step, "wrappers": copy}
    if atari := "ALE/" in cfg.env:  # in C++: 4 frames, 84 x 84, grey; the log shows the true score
        kwargs = same_step | {"reward_clipping": False}
    with env_errors(cfg) as env_kwargs:  # JSON -> dict; registers ALE
        envs = gym.make_vec(cfg.env, num_envs, **kwargs, **env_kwargs)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    return gym.wrappers.vector.ClipReward(envs, -1, 1) if atari else envs


def true_next_obs(next_obs: np.ndarray, done: np.ndarray, infos: dict) -> np.ndarray:
    """Where each action led, [N, ...]: at the end of an episode not the next one's first."""
    return np.stack([infos["final_obs"][i] if end else next_obs[i] for i, end in enumerate(done)])


@dataclass(frozen=True)
class Rollout:
    obs: Shaped[Tensor, "T N *obs"]
    act: Shaped[Tensor, "T N *act"]
    rew: Steps  # unscaled (ALE: clipped); `update` scales a copy
    next_obs: Shaped[Tensor, "T N *obs"]
    terminated: Steps
    done: Steps


def collect(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray, steps: int) -> tuple:
    """T = `steps` from `obs` on -> rollout, next obs, ended episodes (t, env, ep_ret, ep_len)."""
    rows, episodes = [], []
    for t in range(steps):
        act = agent.act(obs)
        next_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
        done = terminated | truncated
        rows.append((obs, act.cpu(), rew, true_next_obs(next_obs, done, infos), terminated, done))
        if not all(np.isfinite(part).all() for part in (obs, rew, rows[-1][3])):
            raise FloatingPointError(f"NaN or infinity from the environment, step {t} of a rollout")
        for i in np.flatnonzero(done):
            episodes.append((t, i, infos["episode"]["r"][i], infos["episode"]["l"][i]))
        obs = next_obs
    columns = [torch.as_tensor(np.stack(column), device=act.device) for column in zip(*rows)]
    as_is = (torch.uint8, torch.int64)  # images, discrete actions
    return Rollout(*(c if c.dtype in as_is else c.float() for c in columns)), obs, episodes


# ========================================= mathematics ==========================================
def standardize(value: Tensor, mean: Tensor | float, var: Tensor) -> Tensor:
    """Eq. (6), and (7) with mean 0. Cut, since while statistics are young a rare value is huge."""
    return ((value - mean) / torch.sqrt(var + 1e-8)).clamp(-10, 10).float()


def running_returns(rew: Steps, done: Steps, last: Tensor, gamma: float) -> tuple[Steps, Tensor]:
    """Eq. (7) from `last` on, [N], and what goes on into the next rollout, [N]."""
    sums = []
    for rew_t, done_t in zip(rew, done, strict=True):
        sums.append(rew_t + gamma * last)
        last = sums[-1] * (1 - done_t)
    return torch.stack(sums), last


def gae(rew: Steps, val: Steps, next_val: Steps, terminated: Steps, done: Steps,
        gamma: float, lam: float) -> tuple[Steps, Steps]:
    """Eqs. (1), (2). A terminal state has no future; any end of an episode ends the sum."""
    delta = rew + gamma * (1 - terminated) * next_val - val  # Eq. (1)
    adv, last = [], torch.zeros_like(rew[0])
    for delta_t, decay_t in zip(delta.flip(0), (gamma * lam * (1 - done)).flip(0), strict=True):
        last = torch.addcmul(delta_t, decay_t, last)  # Eq. (2), fused: delta_t + decay_t * last
        adv.append(last)
    adv = torch.stack(adv).flip(0)
    return adv, adv + val


def log_prob(out: Float32[Tensor, "B k"], log_std: Tensor | None, act: Tensor) -> Batch:
    """Eq. (3) of actions as they were drawn, [B, k]; without deviations logits, actions [B]."""
    if log_std is None:
        return out.log_softmax(-1).gather(-1, act.unsqueeze(-1)).squeeze(-1)
    z = (act - out) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy(out: Float32[Tensor, "B k"], log_std: Tensor | None) -> Float32[Tensor, ""]:
    """Eq. (4) in nats; of the normal distribution, before tanh."""
    if log_std is None:
        return -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean()
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def value_loss(val: Batch, ret: Batch) -> Float32[Tensor, ""]:
    assert val.shape == ret.shape  # [B] against [B, 1] would compare each with all
    return (val - ret).square().mean()  # Eq. (5)


def policy_loss(logp: Batch, adv: Batch) -> Float32[Tensor, ""]:
    """Eq. (8). Its gradient counts, not its value, which no training brings down."""
    assert logp.shape == adv.shape
    return -(logp * adv).mean()  # Eq. (8)


class RMSProp:
    """Eq. (10) or, if not `tf`, Eq. (11), on the vector of `mpi.flatten`."""

    def __init__(self, flat: nn.Parameter, eps: float, tf: bool):
        self.flat, self.eps, self.tf = flat, eps, tf
        self.square = torch.full_like(flat.data, float(tf))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Moves `flat` against `flat.grad`."""
        self.square.lerp_(self.flat.grad.square(), 0.01)
        root = (self.square + self.eps).sqrt() if self.tf else self.square.sqrt() + self.eps
        self.flat.addcdiv_(self.flat.grad, root, value=-lr)

    def state_dict(self) -> dict[str, Tensor]:
        return {"square": self.square}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        self.square.copy_(saved["square"])


# ============================================ update ============================================
def a2c_gradient(agent: Agent, flat: nn.Parameter, obs: Tensor, act: Tensor,
                 adv: Batch, ret: Batch) -> tuple[Float32[Tensor, ""], ...]:
    """flat.grad becomes the gradient of Eq. (9) over the batch -> pi_loss, v_loss, entropy."""
    cfg, (out, val) = agent.cfg, agent(obs)
    logp, bonus = log_prob(out, agent.log_std, act), entropy(out, agent.log_std)
    pi_loss, v_loss = policy_loss(logp, adv), value_loss(val, ret)
    loss = pi_loss + cfg.vf_coef * v_loss - (cfg.ent_coef * bonus if cfg.ent_coef else 0)  # faster
    flat.grad.zero_()
    loss.backward()  # adds to each parameter's .grad, a part of flat.grad
    return pi_loss.detach(), v_loss.detach(), bonus.detach()


def estimate(agent: Agent, data: Rollout) -> tuple[Steps, Steps, Steps]:
    """val, adv and ret of normalised data, by the critic as it is now."""
    cfg, val = agent.cfg, agent.critic(agent.encoder(data.obs.flatten(0, 1))).view_as(data.rew)
    ends, next_val = data.done > 0, val.roll(-1, 0)  # the value of the next row, ...
    ends[-1] = True  # ... but where an episode or the rollout ends that of the true successor
    next_val[ends] = agent.critic(agent.encoder(data.next_obs[ends])).squeeze(-1)
    return val, *gae(data.rew, val, next_val, data.terminated, data.done, cfg.gamma, cfg.lam)


@torch.no_grad()  # all but the loss, which takes advantages and targets as constants
def update(agent: Agent, flat: nn.Parameter, optimizer: RMSProp, rollout: Rollout,
           lr: float, gradient=a2c_gradient) -> dict:
    """One learning phase on one rollout -> metrics; of arrays the log adds std, min, max."""
    cfg = agent.cfg
    rew = standardize(rollout.rew, 0.0, agent.ret_stats.var) if cfg.scale_rew else rollout.rew
    obs, next_obs = agent.normalize(rollout.obs), agent.normalize(rollout.next_obs)
    data = replace(rollout, obs=obs, rew=rew, next_obs=next_obs)
    obs, act = obs.flatten(0, 1), rollout.act.flatten(0, 1)  # [B, ...], B = T N
    val, adv, ret = estimate(agent, data)
    ev = 1 - adv.var(correction=0) / (ret.var(correction=0) + 1e-8)  # adv is ret - val
    with torch.enable_grad():
        pi_loss, v_loss, bonus = gradient(agent, flat, obs, act, adv.flatten(), ret.flatten())
    mpi.average(flat.grad)  # over ranks, in place
    norm = torch.linalg.vector_norm(flat.grad)
    flat.grad.mul_(((cfg.max_grad_norm or math.inf) / (norm + 1e-6)).clamp(max=1))
    optimizer.step(lr)
    return {"pi_loss": pi_loss, "v_loss": v_loss, "entropy": bonus,
            "grad_norm": norm, "val": val, "explained_variance": ev, "lr": lr}


# =========================================== evaluate ===========================================
def evaluate(agent: Agent, cfg: Config, episodes: int, seed: int) -> np.ndarray:
    """Deterministic returns, one of each of `episodes` environments; always the same starts."""
    envs = make_envs(cfg, episodes)
    obs, _ = envs.reset(seed=mpi.seed(seed, 2))  # 0 and 1 are training's
    returns, ended = np.zeros(episodes), np.zeros(episodes, bool)
    while not ended.all():
        obs, _, _, _, infos = envs.step(agent.env_act(agent.act(obs, deterministic=True)))
        if "episode" in infos:
            first = infos["_episode"] & ~ended
            returns[first], ended = infos["episode"]["r"][first], ended | first
    envs.close()
    return returns


# ============================================ train =============================================
def train(cfg: Config) -> Agent:
    """Runs `cfg` to its end, or resumes it, and returns the agent."""
    cfg = open_run(cfg)  # fills in run_dir; with --resume that run's settings; writes nothing yet
    envs = make_envs(cfg, mpi.share(cfg.num_envs, "num_envs", cfg.num_procs))  # one rank's share
    torch.manual_seed(mpi.seed(cfg.seed, 0))  # another on each rank; --resume restores its state
    agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
    agent.to(mpi.choose_device(cfg, agent.images))  # and sets --torch-threads
    mpi.launch(cfg)  # P > 1: errors told, this process becomes P that run it from the top
    flat = mpi.flatten(agent)  # rank 0's weights, on all ranks; parameters and .grad are its views
    optimizer = RMSProp(flat, cfg.eps, cfg.rmsprop == "tf")
    gradient = mpi.compiled(a2c_gradient, cfg.compile)
    steps = cfg.batch // cfg.num_envs
    with Logger(cfg, agent, optimizer=optimizer) as log:  # loads --resume, --init-from, in place
        obs, _ = envs.reset(seed=mpi.seed(cfg.seed, 1, log.step))  # other seeds after a resume
        while log.step < cfg.total_steps:
            lr = cfg.lr * (1 - log.step / cfg.total_steps) if cfg.anneal_lr else cfg.lr
            episodes = []
            for phase in range(cfg.report_every):
                rollout, obs, ended = collect(agent, envs, obs, steps)
                log.store(**update(agent, flat, optimizer, rollout, lr, gradient))
                agent.observe(rollout)
                episodes += [(phase * steps + t, *rest) for t, *rest in ended]  # t in this report
            if log.eval_due(cfg.batch * cfg.report_every) and mpi.rank() == 0:  # within these
                log.store(eval_ret=evaluate(agent, cfg, 10, cfg.seed))  # from rank 0 alone
            log.report(cfg.batch * cfg.report_every, episodes)  # means; adds to log.step; saves
    return agent


if __name__ == "__main__":
    train(tyro.cli(Config, description=__doc__))
