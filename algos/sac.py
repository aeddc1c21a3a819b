"""Soft Actor-Critic (SAC).  Haarnoja et al. 2018, arXiv:1812.05905, Algorithm 1.

TD3 explores by noise of one size everywhere, and it has to be chosen. SAC learns where to be random
and how much: reward and the policy's entropy count together, so that the policy stays random
wherever that costs little. The weight of the entropy, the temperature alpha, moves until on average
the policy has the entropy that was asked for.

What it shares with TD3. s' is the true successor of s, also where a time limit cuts the episode,
since what would have followed has a value; "terminated" is a true end. q' is what the targets make
of s'; w is every weight of a network, eps a number for each dimension and sample from N(0, 1).

    y       = r + gamma (1 - terminated) q'                                                (1)
    L(Q)    = mean (Q(s, a) - y)^2,   of each critic, summed                               (2)
    w_targ <- w_targ + tau (w - w_targ),   of the critics                                  (3)

SAC's own, mu and log sigma being the two halves of what the actor's network says of s:

    a       = tanh(u),   u = mu + sigma eps                                                (4)
    log pi  = sum_i -eps_i^2 / 2 - log sigma_i - log(2 pi) / 2 - log(1 - tanh(u_i)^2)      (5)
    q'      = min_i Q_i_targ(s', a') - alpha log pi(a' | s'),   a' by (4) from s'          (6)
    L(pi)   = mean [alpha log pi(a | s) - min_i Q_i(s, a)],   a by (4) from s              (7)
    L(alpha) = -log alpha mean [log pi(a | s) + H],   H = target_entropy d, d dimensions   (8)

Actions are those of a box from -1 to 1: so the policy gives them, so they are stored, and so the
critics see them, and pi is their density. The environment gets them stretched to its own box,
dimension by dimension. Nothing is normalised. Every `update_every` environment steps there is one
step of the critics, one of the actor, one of the temperature and one of the targets; the first
`start_steps` steps take random actions, and nothing is learned.

Departs from the paper: in (8) log alpha stands where the paper has alpha, so that alpha moves in
proportion to itself, to the same fixed point; Adam's step size is 1e-3, not 3e-4; no 1/2 in (2);
log sigma is kept from -20 to 2 and the first actions are random, both as in the authors' code.

Read after    algos/td3.py:  diff algos/td3.py algos/sac.py
Try           python -m algos.sac --env Pendulum-v1 --total-steps 1e4 --start-steps 1000
Reproduce     python -m algos.sac --env HalfCheetah-v4    (benchmarks/README.md: return, seeds)
"""

import copy
import math
import os
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from jaxtyping import Float32, Shaped
from torch import Tensor, nn
from torch.nn.functional import softplus

from utils import mpi
from utils.logger import Logger, check_divides, check_range, check_spaces, env_errors, open_run

Batch = Float32[Tensor, "B"]  # one number a sample: never [B, 1]
Actions = Float32[Tensor, "B d"]  # from -1 to 1, as the policy gives them; or noise


# ============================================ config ============================================
@dataclass(frozen=True)
class Config:
    env: str = "HalfCheetah-v4"  # Gymnasium id; my_package:MyEnv-v0 imports my_package first
    env_kwargs: str = "{}"  # keyword arguments of the environment, a JSON object
    seed: int = 1  # of everything random in the run
    total_steps: float = 1e6  # environment steps; rounded up to whole reports
    num_envs: int = 1  # environments stepped together, over all processes
    num_procs: int = 1  # MPI processes that share the environments, the buffer and each batch
    hidden: tuple[int, ...] = (256, 256)  # widths of the hidden layers
    gamma: float = 0.99  # discount factor
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the CPU, as all input is vectors
    compile: bool = False  # torch.compile losses and gradients: quicker steps, a slower start
    torch_threads: int = 1  # threads of PyTorch in each process
    run_dir: str = ""  # where the run is kept; default runs/<env>/<algo>/seed<k>
    resume: bool = False  # go on from the last checkpoint of the run directory
    init_from: str = ""  # a run whose weights to start from
    eval_every: int = 0  # steps between evaluations, deterministic and at reports; 0: none
    report_every: int = 1000  # environment steps between reports
    buffer_size: int = 1_000_000  # transitions kept, over all processes; the oldest go first
    start_steps: int = 10_000  # environment steps with random actions, before anything is learned
    update_every: int = 1  # environment steps for each update
    batch: int = 256  # samples of an update, over all processes
    lr: float = 1e-3  # Adam's step size
    tau: float = 0.005  # share of the new weights in a target step
    alpha: float = 1.0  # temperature; where it is learned, at the start (or --init-from's)
    learn_alpha: bool = True  # Eq. (8); else alpha stays
    target_entropy: float = -1.0  # of each dimension of the action, in nats

    def __post_init__(self):
        check_range(self, "total_steps num_envs num_procs torch_threads batch", 1)
        check_range(self, "report_every update_every", 1)
        check_range(self, "buffer_size", self.num_envs)  # a step of all environments fits in
        check_range(self, "seed eval_every start_steps", 0)
        check_range(self, "gamma tau", 0, 1)
        check_range(self, "hidden lr alpha", above=0)
        check_range(self, "target_entropy")  # any finite number
        check_divides(self, "num_envs/num_procs batch/num_procs buffer_size/num_procs")


# ============================================ agent =============================================
def relu_mlp(*sizes: int) -> nn.Sequential:
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Critic(nn.Module):
    """Observations [B, k], actions [B, d] -> Q(s, a) [B]."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: tuple[int, ...]):
        super().__init__()
        self.net = relu_mlp(obs_dim + act_dim, *hidden, 1)

    def forward(self, obs: Tensor, act: Tensor) -> Batch:
        return self.net(torch.cat([obs, act], -1)).squeeze(-1)  # [B, 1] -> [B]


class TwinCritic(nn.Module):
    """Two critics with different initial weights: Q_1(s, a), Q_2(s, a), each [B]."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: tuple[int, ...]):
        super().__init__()
        self.q1, self.q2 = (Critic(obs_dim, act_dim, hidden) for _ in range(2))

    def forward(self, obs: Tensor, act: Tensor) -> tuple[Batch, Batch]:
        return self.q1(obs, act), self.q2(obs, act)


class Agent(nn.Module):
    """Policy, temperature, critics and their targets: its state dict is the whole agent."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector", act="box")  # or exit; finite bounds
        self.cfg, self.obs_dim, self.act_dim = cfg, *obs_space.shape, math.prod(act_space.shape)
        self.register_buffer("low", torch.tensor(act_space.low))
        self.register_buffer("high", torch.tensor(act_space.high))
        self.actor = relu_mlp(self.obs_dim, *cfg.hidden, 2 * self.act_dim)
        self.critic = TwinCritic(self.obs_dim, self.act_dim, cfg.hidden)
        self.critic_targ = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(cfg.alpha)))

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, k] -> actions from -1 to 1, [N, d]; in training a sample."""
        out = self.actor(torch.as_tensor(obs, dtype=torch.float32, device=self.low.device))
        mean = out[:, :self.act_dim]
        return mean.tanh() if deterministic else squashed(out, torch.randn_like(mean))[0]

    def random_act(self, num_envs: int) -> Tensor:
        """Actions [N, d] from everywhere in the box, for the start."""
        return 2 * torch.rand(num_envs, self.act_dim, device=self.low.device) - 1

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions from -1 to 1 are stretched to the environment's box, dimension by dimension."""
        share = act.view(-1, *self.low.shape).to(self.low) / 2 + 0.5  # in the box's dtype
        return torch.lerp(self.low, self.high, share).cpu().numpy()  # low + share (high - low)

    def predict(self, obs: np.ndarray) -> np.ndarray:
        """One raw observation -> the deterministic action, for a plain environment's `step`."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]


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
class Transitions:
    obs: Shaped[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]  # as it was taken, exploring or not
    rew: Batch
    next_obs: Shaped[Tensor, "B *obs"]  # where the action led, never the next episode's first
    terminated: Batch  # 1 at a true end; time limits leave no mark


class ReplayBuffer:
    """This rank's last transitions, those of all its environments in one ring."""

    def __init__(self, size: int, num_procs: int, obs: Tensor, act: Tensor):
        """`size` over all ranks; one observation and one action tell shape, dtype and device."""
        number = torch.zeros((), device=obs.device)
        kinds = dict(obs=obs, act=act, rew=number, next_obs=obs, terminated=number)
        self.rows, self.filled, self.next = mpi.share(size, "buffer_size", num_procs), 0, 0
        need = sum(kind.nbytes for kind in kinds.values()) * self.rows * num_procs
        have = math.inf  # Windows does not say
        if obs.is_cuda:
            have = torch.cuda.mem_get_info(obs.device)[0] * num_procs  # as if each had a GPU
        elif hasattr(os, "sysconf"):
            have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        mpi.say(f"replay buffer: {size:,} transitions, {need / 1e9:.2f} GB when full")
        if need > have:
            raise mpi.UsageError(f"--buffer-size is {size}, which takes {need / 1e9:.2f} GB; "
                                 f"there are {have / 1e9:.2f} GB of memory")
        self.columns = {name: kind.new_empty(self.rows, *kind.shape)
                        for name, kind in kinds.items()}

    def add(self, **parts: np.ndarray | Tensor) -> None:
        """One step of N environments: for each column of `Transitions` its rows, [N, ...]."""
        n = len(parts["rew"])
        at = (self.next + torch.arange(n)) % self.rows
        for name, column in self.columns.items():
            rows = torch.as_tensor(parts[name]).to(column)  # floats are stored as float32
            assert rows.shape == (n, *column.shape[1:]), name
            column[at] = rows
        self.next, self.filled = (self.next + n) % self.rows, min(self.filled + n, self.rows)

    def sample(self, batch: int) -> Transitions:
        at = torch.randint(self.filled, (batch,), device=self.columns["rew"].device)
        # index_select takes a quarter of the time of column[at].
        parts = {name: column.index_select(0, at) for name, column in self.columns.items()}
        return Transitions(**parts)

    def state_dict(self) -> dict:
        """Clones, since a slice would be saved with all of the memory that it is a part of."""
        columns = {name: column[:self.filled].clone() for name, column in self.columns.items()}
        return {"columns": columns, "filled": self.filled, "next": self.next}

    def load_state_dict(self, saved: dict) -> None:
        self.filled, self.next = saved["filled"], saved["next"]
        for name, column in self.columns.items():
            column[:self.filled] = saved["columns"][name]


def interact(agent: Agent, envs: gym.vector.VectorEnv, buffer: ReplayBuffer, obs: np.ndarray,
             act: Tensor) -> tuple[np.ndarray, list]:
    """One step of all environments, stored -> next obs, ended episodes (env, ep_ret, ep_len)."""
    next_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
    done = terminated | truncated
    led_to = true_next_obs(next_obs, done, infos)
    if not all(np.isfinite(part).all() for part in (obs, rew, led_to)):  # obs: of resets
        raise FloatingPointError("NaN or infinity from the environment")
    buffer.add(obs=obs, act=act, rew=rew, next_obs=led_to, terminated=terminated)
    stats = infos.get("episode")
    return next_obs, [(i, stats["r"][i], stats["l"][i]) for i in np.flatnonzero(done)]


# ========================================= mathematics ==========================================
def td_target(rew: Batch, terminated: Batch, next_q: Batch, gamma: float) -> Batch:
    """Eq. (1). A terminal state has no future; a time limit ends the episode, not the future."""
    assert rew.shape == terminated.shape == next_q.shape
    return rew + gamma * (1 - terminated) * next_q


def q_loss(q: Batch, target: Batch) -> Float32[Tensor, ""]:
    """Eq. (2)."""
    assert q.shape == target.shape  # [B] against [B, 1] would compare each with all
    return (q - target).square().mean()


@torch.no_grad()
def follow(targ: Float32[Tensor, "W"], flat: Float32[Tensor, "W"], tau: float) -> None:
    """Eq. (3), in place, for all weights of a network at once."""
    targ.lerp_(flat, tau)


def squashed(out: Float32[Tensor, "B k"], eps: Actions) -> tuple[Actions, Batch]:
    """Eqs. (4), (5): mu and log sigma side by side, k = 2 d -> actions and their log pi."""
    mean, log_std = out.chunk(2, -1)
    log_std = log_std.clamp(-20, 2)  # as in the authors' code
    raw = mean + log_std.exp() * eps
    # log(1 - tanh(u)^2), in which for large u nothing would be left of the 1.
    squash = 2 * (math.log(2) - raw - softplus(-2 * raw))
    logp = -0.5 * eps.square() - log_std - 0.5 * math.log(2 * math.pi) - squash
    return raw.tanh(), logp.sum(-1)


def soft_q(q1: Batch, q2: Batch, logp: Batch, alpha: Tensor) -> Batch:
    """The part that Eqs. (6) and (7) share: the lower Q and what entropy adds to it."""
    assert q1.shape == q2.shape == logp.shape
    return torch.min(q1, q2) - alpha * logp


def alpha_gradient(logp: Batch, entropy: float) -> Float32[Tensor, ""]:
    """Of Eq. (8) with respect to log alpha, in which it is linear; H is `entropy`."""
    return -(logp + entropy).mean()


# ============================================ update ============================================
def sac_critic_gradient(agent: Agent, flat: nn.Parameter, obs: Tensor, act: Actions, rew: Batch,
                        next_obs: Tensor, terminated: Batch, eps: Actions) -> tuple[Tensor, ...]:
    """flat.grad becomes the gradient of Eq. (2) with the targets' Eq. (6) -> q_loss, q1, q2."""
    cfg = agent.cfg
    with torch.no_grad():
        next_act, next_logp = squashed(agent.actor(next_obs), eps)
        next_q = soft_q(*agent.critic_targ(next_obs, next_act), next_logp, agent.log_alpha.exp())
        target = td_target(rew, terminated, next_q, cfg.gamma)
    q1, q2 = agent.critic(obs, act)
    loss = q_loss(q1, target) + q_loss(q2, target)
    flat.grad.zero_()
    loss.backward()  # adds to each parameter's .grad, a part of flat.grad
    return loss.detach(), q1.detach(), q2.detach()


def sac_actor_gradient(agent: Agent, flat: nn.Parameter, obs: Tensor,
                       eps: Actions) -> tuple[Tensor, ...]:
    """flat.grad becomes the gradient of Eq. (7) -> pi_loss, logp."""
    act, logp = squashed(agent.actor(obs), eps)
    loss = -soft_q(*agent.critic(obs, act), logp, agent.log_alpha.detach().exp()).mean()  # Eq. (7)
    grads = torch.autograd.grad(loss, list(agent.actor.parameters()))  # none for the critic
    flat.grad.copy_(torch.cat([grad.flatten() for grad in grads]))
    return loss.detach(), logp.detach()


def update(agent: Agent, optimizers: dict, targets: list, batch: Transitions,
           gradients=(sac_critic_gradient, sac_actor_gradient)) -> dict:
    """One step of critics, actor, temperature and `targets`, pairs (target, flat) -> metrics."""
    cfg, actor_opt, critic_opt, alpha_opt = agent.cfg, *optimizers.values()
    critic_gradient, actor_gradient = gradients  # compiled they would draw other noise: drawn here
    loss, q1, q2 = critic_gradient(agent, critic_opt.flat, batch.obs, batch.act, batch.rew,
                                   batch.next_obs, batch.terminated, torch.randn_like(batch.act))
    mpi.average(critic_opt.flat.grad)
    critic_opt.step(cfg.lr)
    pi_loss, logp = actor_gradient(agent, actor_opt.flat, batch.obs, torch.randn_like(batch.act))
    mpi.average(actor_opt.flat.grad)
    actor_opt.step(cfg.lr)
    agent.log_alpha.grad = alpha_gradient(logp, cfg.target_entropy * agent.act_dim)
    mpi.average(agent.log_alpha.grad)
    log_alpha = agent.log_alpha.detach()
    alpha_loss, alpha = log_alpha * agent.log_alpha.grad, log_alpha.exp()  # Eq. (8)
    if cfg.learn_alpha:
        alpha_opt.step(cfg.lr)
    for targ, flat in targets:
        follow(targ, flat, cfg.tau)
    return {"q_loss": loss, "q1": q1, "q2": q2, "pi_loss": pi_loss, "logp": logp,
            "alpha_loss": alpha_loss, "alpha": alpha}


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
def updates_by(step: int, cfg: Config) -> int:
    """How many updates belong to the first `step` steps, however many environments step at once."""
    return max(0, step - cfg.start_steps) // cfg.update_every


def train(cfg: Config) -> Agent:
    """Runs `cfg` to its end, or resumes it, and returns the agent."""
    cfg = open_run(cfg)  # fills in run_dir; with --resume that run's settings; writes nothing yet
    envs = make_envs(cfg, mpi.share(cfg.num_envs, "num_envs", cfg.num_procs))  # one rank's share
    torch.manual_seed(mpi.seed(cfg.seed, 0))  # another on each rank; --resume restores its state
    agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
    device = mpi.choose_device(cfg, images=False)  # and sets --torch-threads
    agent.to(device)
    rows = torch.zeros(agent.obs_dim, device=device), torch.zeros(agent.act_dim, device=device)
    buffer = ReplayBuffer(cfg.buffer_size, cfg.num_procs, *rows)
    mpi.launch(cfg)  # P > 1: errors told, this process becomes P that run it from the top
    # Rank 0's weights, for all. A network's weights and .grad are views of one vector, sent as one.
    actor, critic = mpi.flatten(agent.actor), mpi.flatten(agent.critic)
    targets = [(mpi.flatten(agent.critic_targ), critic)]
    optimizers = {"actor_opt": mpi.Adam(actor), "critic_opt": mpi.Adam(critic)}
    optimizers["alpha_opt"] = mpi.Adam(agent.log_alpha)
    gradients = tuple(mpi.compiled(gradient, cfg.compile)
                      for gradient in (sac_critic_gradient, sac_actor_gradient))
    with Logger(cfg, agent, **optimizers, buffer=buffer) as log:  # loads --resume, --init-from
        if not cfg.learn_alpha:  # nor does it come with --init-from
            agent.log_alpha.data.fill_(math.log(cfg.alpha))
        obs, _ = envs.reset(seed=mpi.seed(cfg.seed, 1, log.step))  # other seeds after a resume
        step, episodes = log.step, []  # log.step stays that of the last report
        while log.step < cfg.total_steps:
            act = agent.act(obs) if step >= cfg.start_steps else agent.random_act(len(obs))
            obs, ended = interact(agent, envs, buffer, obs, act)
            # (t, env, ...): by t, steps of all since the report, the log knows the episode's step.
            episodes += [((step - log.step) // cfg.num_envs, *end) for end in ended]
            for _ in range(updates_by(step, cfg), updates_by(step + cfg.num_envs, cfg)):
                batch = buffer.sample(mpi.share(cfg.batch, "batch"))  # P is known since launch
                log.store(**update(agent, optimizers, targets, batch, gradients))
            step += cfg.num_envs
            if step % cfg.report_every >= cfg.num_envs:  # no multiple of it among the last steps
                continue
            if log.eval_due(step - log.step) and mpi.rank() == 0:  # a multiple of eval_every is due
                log.store(eval_ret=evaluate(agent, cfg, 10, cfg.seed))  # from rank 0 alone
            log.report(step - log.step, episodes)  # t dates them; adds to log.step; saves if due
            episodes = []
    return agent


if __name__ == "__main__":
    train(tyro.cli(Config, description=__doc__))
