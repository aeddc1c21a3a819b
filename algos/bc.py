"""Behavioural cloning (BC).  Pomerleau 1991, Neural Computation 3(1).

The problem. We are given recordings of an expert: observations s, each with
the action that the expert took. There are no rewards, and the expert cannot be
asked for more. Behavioural cloning treats this as supervised learning: it
maximises the probability of the expert's actions in the recorded states.

This ignores the fact that actions decide which states come next. A small
mistake leads to a state that the expert never visited. The clone has no data
there, so it errs more often, and mistakes compound: if it errs with
probability e in the expert's states, and rewards are between 0 and 1, the
return of an episode of T steps can be lower by T^2 e (Ross & Bagnell 2010).
DAgger (Ross et al. 2011) asks the expert again in the clone's states.
algos/gail.py compares how often expert and policy visit each pair, which takes
steps in the environment. BC takes none, so it is the baseline that every
imitation algorithm has to beat. With many demonstrations it is hard to beat.

    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (1)
    u       = atanh(clip(2 (a - low) / (high - low) - 1, -c, c))           (2)
    log pi  = log softmax(logits)_a, or sum_i log N(u_i; mu_i(s), sigma_i) (3)
    L       = -mean log pi                                                 (4)

mean and var come from the training pairs. The policy is that of algos/ppo.py:
for continuous actions a Gaussian, squashed by tanh. (2) maps a demonstrated
action a in [low, high] back to u before tanh. A bound would map to infinity,
so actions are first clipped to c = 0.999 of the range. For discrete actions
(4) is the cross-entropy.

Why the log-likelihood, and not the squared error of mu? It is one loss for
both kinds of actions. For continuous ones it weights the squared error of each
dimension by 1 / (2 sigma^2), and sigma is learned: it converges to the root
mean square of the remaining error. The log-likelihood of a differs from that
of u by a term that does not depend on the weights, the Jacobian of tanh. A
Gaussian has one peak: if the expert steers left or right around an obstacle,
the clone learns the average.

The best weights. A share of the pairs is held out. L on these pairs falls at
first, and may rise once the policy overfits the others. Training runs to the
end, but the agent acts and is evaluated with the weights that had the lowest
held-out loss; `improved` is 1 where that changes. `best_loss` is a minimum
over many checks, so it is too optimistic. And training and held-out pairs come
from the same episodes, so overfitting shows late. No loss on the expert's
states tells how the clone does elsewhere. Only its return does (--eval-every,
or utils.play).

A step of this file is a gradient step: in `total_steps`, in --eval-every and
on the x-axis. episodes.csv stays empty. To see curves, use TensorBoard, or
python -m plot RUN --y eval_ret.

Held-out share, learning rate and minibatch size follow Ho & Ermon 2016
(arXiv:1606.03476) and their code. So does `subsample`: neighbouring pairs of
an episode are nearly the same, and keeping every 20th makes data scarce, as in
their benchmark. With demonstrations of your own, set it to 1.

Defaults: 70% of the pairs train; 10,000 gradient steps with minibatches of
128; the held-out loss is computed every 100 steps. `bc_loss` should fall and
level off, at the entropy of the expert's policy if it could be copied exactly.

Read after    algos/ppo.py
Record and try:
    python -m algos.ppo --env CartPole-v1 --total-steps 5e4
    python -m utils.play runs/CartPole-v1/ppo/seed1 --record demos.npz
    python -m algos.bc --env CartPole-v1 --demos demos.npz
"""

import copy
import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn

from utils import mpi
from utils.demos import Demos, load_demos
from utils.envs import image_to_float, is_image, make_envs, nature_cnn
from utils.run import Run, RunConfig, check_range, check_settings, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits, or the means of k action dimensions
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds env, seed, run_dir, device, ...: see --help
    demos: str = ""  # demonstrations (python -m utils.play RUN --record demos.npz)
    num_trajectories: int = 0  # use only the first n episodes; 0: all
    subsample: int = 20  # keep one pair in n, from a random offset per episode
    held_out: float = 0.3  # share of the pairs that do not train
    total_steps: float = 1e4  # gradient steps, rounded up to whole checks
    check_every: int = 100  # gradient steps between checks of the held-out loss
    batch_size: int = 128  # pairs per gradient step (32 to 512)
    lr: float = 1e-3  # Adam's learning rate, constant (1e-4 to 1e-3)
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, for vector observations
    std_init: float = 1.0  # initial sigma of continuous actions, before tanh (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (1)

    def __post_init__(self):
        check_settings(self, nonnegative="num_trajectories",
                       counts="subsample check_every")  # raises UsageError
        check_range(self, "held_out", above=0, high=0.9)


# ======================================= agent ========================================
def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with tanh between them."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])  # no tanh after the last layer


class RunningStats(nn.Module):
    """Running mean and variance of all samples seen so far, by all processes."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def update(self, rows: Float32[Tensor, "B *shape"]) -> None:
        """Merge a batch's moments into the running ones (Chan et al. 1979)."""
        count, mean, var = mpi.moments(rows)  # over the rows of all processes
        self.count += count
        new = count / self.count  # the weight of this batch
        delta = mean - self.mean
        self.var.copy_((1 - new) * self.var + new * var + new * (1 - new) * delta**2)
        self.mean += new * delta


class Policy(nn.Module):
    """Normalised observations [B, ...] -> logits, or means before tanh."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        if isinstance(act_space, gym.spaces.Discrete):
            num_outputs = int(act_space.n)  # a logit per action
            self.log_std = None
        else:
            num_outputs = math.prod(act_space.shape)  # a mean per dimension
            log_std = torch.full((num_outputs,), math.log(cfg.std_init))
            self.log_std = nn.Parameter(log_std)
        if is_image(obs_space):
            self.encoder = nature_cnn(obs_space)  # 512 features
            sizes = (512,)
        else:
            self.encoder = nn.Identity()
            sizes = (*obs_space.shape, *cfg.hidden)
        self.actor = mlp(*sizes, num_outputs)

    def forward(self, obs: Tensor) -> ActorOut:
        return self.actor(self.encoder(obs))


class Agent(nn.Module):
    """The policy that learns, the best one so far, which acts, and the statistics."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        check_spaces(obs_space, act_space, obs="vector image", act="discrete box")
        self.cfg = cfg
        self.images = is_image(obs_space)
        self.discrete = isinstance(act_space, gym.spaces.Discrete)
        if not self.discrete:
            self.register_buffer("low", torch.tensor(act_space.low))
            self.register_buffer("high", torch.tensor(act_space.high))
        self.policy = Policy(obs_space, act_space, cfg)
        self.best = copy.deepcopy(self.policy).requires_grad_(False)
        self.obs_stats = RunningStats(obs_space.shape)

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> network inputs: pixels in [0, 1] or Eq. (1)."""
        if self.images:
            return image_to_float(obs)
        if not self.cfg.norm_obs:
            return obs.float()
        return standardize(obs.float(), self.obs_stats.mean, self.obs_stats.var)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> actions [N], or [N, d] before tanh."""
        obs = torch.as_tensor(obs, device=self.obs_stats.mean.device)
        actor_out = self.best(self.normalize_obs(obs))
        if deterministic:
            return actor_out.argmax(-1) if self.discrete else actor_out
        if self.discrete:
            return actor_out.softmax(-1).multinomial(1).squeeze(-1)
        return actor_out + self.best.log_std.exp() * torch.randn_like(actor_out)

    def env_act(self, act: Tensor) -> np.ndarray:
        """Actions for `env.step`: continuous ones are squashed and rescaled."""
        if self.discrete:
            return act.cpu().numpy()
        squashed = act.tanh().view(-1, *self.low.shape).to(self.low.dtype)
        return torch.lerp(self.low, self.high, (squashed + 1) / 2).cpu().numpy()

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw observation -> the deterministic action, for use after training."""
        return self.env_act(self.act(np.asarray(obs)[None], deterministic=True))[0]


# ======================================== data ========================================
@dataclass(frozen=True)
class Batch:
    obs: Float32[Tensor, "B *obs"]
    act: Shaped[Tensor, "B *act"]


def split(demos: Demos, held_out: float, seed: int) -> tuple[Demos, Demos]:
    """Return training and held-out pairs, the same for the same seed."""
    count = len(demos.obs)
    if count < 2:
        raise mpi.UsageError(f"--demos gives {count} pair; cloning needs at least 2")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    cut = min(max(round(held_out * count), 1), count - 1)  # at least one of each
    return demos.take(order[cut:]), demos.take(order[:cut])


def as_batch(agent: Agent, demos: Demos) -> Batch:
    """Return pairs as the policy has them: normalised obs, act [B] or before tanh."""
    act = demos.act
    if not agent.discrete:
        act = invert_squashing(act, agent.low, agent.high)
    return Batch(agent.normalize_obs(demos.obs), act)


# ==================================== mathematics =====================================
def standardize(value: Tensor, mean: Tensor | float, var: Tensor) -> Tensor:
    return ((value - mean) / torch.sqrt(var + 1e-8)).clamp(-10, 10).float()


def invert_squashing(act: Shaped[Tensor, "B *act"], low: Shaped[Tensor, "*act"],
                     high: Shaped[Tensor, "*act"]) -> Float32[Tensor, "B k"]:
    """Eq. (2): actions of the environment -> actions before tanh."""
    unit = 2 * (act - low) / (high - low) - 1
    return unit.clamp(-0.999, 0.999).atanh().flatten(1).float()


def log_prob(actor_out: ActorOut, log_std: Tensor | None, act: Tensor) -> PerSample:
    """Eq. (3) for discrete actions [B], or for continuous ones [B, k] before tanh."""
    if log_std is None:
        return actor_out.log_softmax(-1).gather(-1, act.unsqueeze(-1)).squeeze(-1)
    z = (act - actor_out) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


# ======================================= update =======================================
def bc_loss(policy: Policy, batch: Batch) -> tuple[Scalar, dict]:
    """Eq. (4), the negative log-likelihood of the demonstrated actions."""
    loss = -log_prob(policy(batch.obs), policy.log_std, batch.act).mean()
    return loss, {"bc_loss": loss}


@torch.no_grad()  # only `minimize` computes gradients
def update(agent: Agent, optimizer: mpi.Adam, pairs: Batch, held_out: Batch,
           batch_size: int) -> dict:
    """Take gradient steps up to the next check of the held-out loss. Then keep the
    weights if they are the best so far. Return metrics."""
    step_metrics = []  # of each gradient step: the loss and the gradient norm
    for _ in range(agent.cfg.check_every):
        idx = torch.randint(len(pairs.obs), (batch_size,))
        batch = Batch(pairs.obs[idx], pairs.act[idx])
        step_metrics.append(
            optimizer.minimize(bc_loss, agent.policy, batch, lr=agent.cfg.lr))
    loss, _ = bc_loss(agent.policy, held_out)
    best_loss, _ = bc_loss(agent.best, held_out)
    improved = loss < best_loss
    if improved:
        agent.best.load_state_dict(agent.policy.state_dict())
    metrics = {"held_out_loss": loss, "best_loss": torch.minimum(loss, best_loss),
               "improved": improved}
    for name in step_metrics[0]:
        metrics[name] = torch.stack([each[name] for each in step_metrics])
    return metrics


# ======================================= train ========================================
def train(cfg: Config) -> Agent:
    """Train until `total_steps`, from the start or from a checkpoint."""
    with Run(cfg) as run:  # directory, seeds, processes, checkpoints
        cfg = run.cfg  # with --resume, the settings of the resumed run
        envs = make_envs(cfg, 1)  # for its spaces: training takes no steps in it
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        demos = load_demos(cfg, envs)  # the same in all processes
        pairs, held_out = split(demos, cfg.held_out, cfg.seed)
        if not agent.images:
            agent.obs_stats.update(pairs.obs.float())  # the only time
        agent.to(run.device)
        optimizer = mpi.Adam(agent.policy)
        step = run.restore(agent, optimizer=optimizer)  # 0, or where the run stopped
        pairs = as_batch(agent, pairs.to(run.device))  # by --init-from's statistics
        held_out = as_batch(agent, held_out.to(run.device))
        while step < cfg.total_steps:
            metrics = update(agent, optimizer, pairs, held_out, run.batch_size)
            step += cfg.check_every
            run.report(step, envs, **metrics)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
