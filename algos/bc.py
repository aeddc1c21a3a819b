"""Behavioural cloning (BC).  Pomerleau 1991, Neural Computation 3(1).

The problem. We are given recordings of an expert: observations s, each with
the action a that the expert took. There are no rewards, and the expert cannot
be asked for more. Behavioural cloning treats these pairs (s, a) as data for
supervised learning: it trains a policy pi(a | s), the clone, to maximise the
likelihood of the expert's actions given the observations.

The weakness. The clone's own actions determine which states it sees next. A
mistake can lead to a state that the expert never visited. There the clone has
no training data, so it errs more often: mistakes compound. Suppose that in the
expert's states it errs with probability p, and that rewards are between 0 and
1. If an error cost only the reward of its own step, T steps would lose at most
p T. But each of the T steps may bring the first error, and that error may cost
all later rewards, up to T. So the loss can grow to p T^2 (Ross & Bagnell 2010).

Two remedies need more than recordings. DAgger (Ross et al. 2011) asks the
expert what to do in the states that the clone visits. GAIL (algos/gail.py) lets
the policy act in the environment while it learns. BC needs neither, so it is
the baseline for both. With many demonstrations it is hard to beat.

The algorithm, and where each step is coded:

    hold out a random part of the pairs for validation         split
    normalise s by (1), and map actions to u by (2)            as_batch
    repeat until total_steps:                                  update
        repeat `check_every` times:
            one Adam step on (4), for a random minibatch       bc_loss
        compute (4) on the held-out pairs
        if it is the lowest so far, copy the weights to `best`
    act with the weights in `best`                             Agent.act

From here on a step is a gradient step, not one of an environment: also in
`total_steps`, in --eval-every and on the x-axis of curves.

The policy is that of algos/ppo.py. For discrete actions the network outputs
logits. For continuous actions it outputs the means mu(s) of a Gaussian, whose
standard deviations sigma are learned parameters, the same in all states. A
sample u of the Gaussian is squashed by tanh and rescaled to the action bounds
low and high. The equations, with c = 0.999:

    obs    <- clip((obs - mean) / sqrt(var + 1e-8), -10, 10)               (1)
    u       = atanh(clip(2 (a - low) / (high - low) - 1, -c, c))           (2)
    log pi  = log softmax(logits)_a, or sum_i log N(u_i; mu_i(s), sigma_i) (3)
    L       = -mean log pi                                                 (4)

(1) Mean and var are those of the training pairs. Only --init-from, which starts
from another run's weights, keeps that run's mean and var. Clipping guards
against dimensions that hardly vary in the demonstrations. Images are only
scaled to [0, 1].
(2) This undoes the squashing: u is the sample that gives the expert's action a.
At a bound u would be infinite, so we clip first; a bound becomes 3.8 or -3.8.
(3) For continuous actions, this is the log-density of u. That of a has one more
term, from tanh and rescaling. That term does not depend on the weights, so the
gradient is the same.
(4) For discrete actions, L is the cross-entropy. For continuous actions, L is,
up to a constant, a squared error that is scaled by the learned sigma_i:

    L = sum_i (mean (u_i - mu_i(s))^2 / (2 sigma_i^2) + log sigma_i)

The best sigma_i is the root mean square of the error u_i - mu_i(s), so errors
count relative to their usual size in that dimension. A Gaussian has one peak:
if the expert passes an obstacle sometimes on the left and sometimes on the
right, the clone learns the average and hits it.

The best weights. L on the held-out pairs falls at first. It may rise once the
policy overfits the training pairs. So the agent acts, and is evaluated, with
the weights that had the lowest held-out loss so far, `best_loss`. Training goes
on with the latest weights. `improved` is 1 if a check found new best weights.

Do not trust these losses too far. `best_loss` is a minimum over many checks, so
it is biased low. Held-out and training pairs come from the same episodes,
because there may be only one, so overfitting shows late. And no loss in the
expert's states tells how well the clone does elsewhere. Only its return does:
use utils.play, or --eval-every and then `python -m plot RUN --y eval_ret`. Both
act deterministically by default, like the expert that utils.play records.

The settings follow Ho & Ermon 2016 (arXiv:1606.03476) and their code: held-out
share, learning rate, minibatch size, and `subsample`, which keeps only every
20th pair, as they do on MuJoCo. This makes data scarce on purpose, because with
all pairs BC can match the expert (benchmarks/README.md, "Imitation"). For the
best clone, set it to 1.

Defaults: 10,000 gradient steps on minibatches of 128, with a check after every
100. 70% of the pairs are training pairs. `bc_loss`, L on the minibatches,
should fall and level off; on CartPole it falls below 0.02. `held_out_loss`,
0.04 to 0.5 there, rises above `best_loss` as the policy overfits. How low can L
get? For discrete actions, its mean on new pairs is at least the entropy of the
expert's policy, which is 0 if the expert is deterministic. Only on training
pairs can overfitting bring L below that. For continuous actions of a
deterministic expert, L has no lower bound: sigma shrinks with the error, so log
sigma, and L with it, falls below 0.

Read after    algos/ppo.py
Record and try (utils.play records 10 episodes of deterministic actions):
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

# mpi.Adam          `minimize(f, *args, lr, max_grad_norm=0)`: f gives (loss, metrics).
#                   One Adam step; its gradient is averaged over processes, clipped if
#                   max_grad_norm > 0. Returns metrics (detached) and grad_norm
# mpi.RunningStats  running mean and var of all rows that `update` got, in all processes
# load_demos        pairs of --demos: every `subsample`-th of `num_trajectories`
#                   episodes
# image_to_float    uint8 pixels -> float32 in [0, 1], channels first
# make_envs         parallel environments. When an episode ends, `step` starts the next
#                   and leaves the last observation in infos["final_obs"]
# nature_cnn        the CNN of Mnih et al. 2015, with 512 outputs after a ReLU
# check_settings    refuses bad values, as the other checks do; you can skip them
from utils import mpi
from utils.demos import Demos, load_demos
from utils.envs import image_to_float, is_image, make_envs, nature_cnn
from utils.run import Run, RunConfig, check_range, check_spaces, main

PerSample = Float32[Tensor, "B"]  # one number per sample: [B], never [B, 1]
ActorOut = Float32[Tensor, "B k"]  # k logits (discrete) or k means (continuous)
Scalar = Float32[Tensor, ""]


# ======================================= config =======================================
@dataclass(frozen=True)
class Config(RunConfig):  # RunConfig adds env, seed, run_dir, device, ...: see --help
    demos: str = ""  # demonstrations (python -m utils.play RUN --record demos.npz)
    num_trajectories: int = 0  # number of episodes to use, from the first; 0: all
    subsample: int = 20  # keep every n-th pair of an episode, from a random offset
    held_out: float = 0.3  # share of the pairs held out for validation (0.1 to 0.3)
    total_steps: float = 1e4  # gradient steps, rounded up to a multiple of check_every
    check_every: int = 100  # gradient steps between checks of the held-out loss
    batch_size: int = 128  # pairs per gradient step (32 to 512)
    lr: float = 1e-3  # Adam's learning rate, constant (1e-4 to 1e-3)
    hidden: tuple[int, ...] = (64, 64)  # hidden layer widths, for vector observations
    std_init: float = 1.0  # initial sigma of continuous actions, before tanh (0.3 to 1)
    norm_obs: bool = True  # normalise vector observations, Eq. (1)

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "held_out", above=0, high=0.9)  # raises UsageError


# ======================================= agent ========================================
def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with tanh between them."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])  # no tanh after the last layer


class Policy(nn.Module):
    """Normalised observations [B, ...] -> logits, or the means mu before tanh."""

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, cfg: Config):
        super().__init__()
        if isinstance(act_space, gym.spaces.Discrete):
            num_outputs = int(act_space.n)  # a logit per action
            self.log_std = None
        else:
            num_outputs = math.prod(act_space.shape)  # a mean per dimension
            log_std = torch.full((num_outputs,), math.log(cfg.std_init))
            self.log_std = nn.Parameter(log_std)  # log sigma, the same in all states
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
    """`policy` learns. `best` is a copy with the best weights so far, and acts."""

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
        self.best = copy.deepcopy(self.policy).requires_grad_(False)  # see `update`
        self.obs_stats = mpi.RunningStats(obs_space.shape)  # for Eq. (1)

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Raw observations -> network inputs: pixels in [0, 1] or Eq. (1)."""
        if self.images:
            return image_to_float(obs)
        if not self.cfg.norm_obs:
            return obs.float()
        return standardize(obs.float(), self.obs_stats.mean, self.obs_stats.var)

    @torch.no_grad()
    def act(self, obs: Tensor | np.ndarray, deterministic: bool = False) -> Tensor:
        """Raw observations [N, ...] -> discrete actions [N], or [N, k] before tanh."""
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
    """Return training and held-out pairs, chosen at random. The choice depends only on
    the seed, so it is the same in all processes and after --resume."""
    count = len(demos.obs)
    if count < 2:
        raise mpi.UsageError(f"--demos gives {count} pair; cloning needs at least 2")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    cut = min(max(round(held_out * count), 1), count - 1)  # at least one of each
    return demos.take(order[cut:]), demos.take(order[:cut])


def as_batch(agent: Agent, demos: Demos) -> Batch:
    """Raw pairs -> what `bc_loss` takes: normalised observations, and discrete actions
    [B] or u [B, k], Eq. (2)."""
    act = demos.act
    if not agent.discrete:
        act = invert_squashing(act, agent.low, agent.high)
    return Batch(agent.normalize_obs(demos.obs), act)


# ==================================== mathematics =====================================
def standardize(value: Tensor, mean: Tensor | float, var: Tensor) -> Tensor:
    return ((value - mean) / torch.sqrt(var + 1e-8)).clamp(-10, 10).float()


def invert_squashing(act: Shaped[Tensor, "B *act"], low: Shaped[Tensor, "*act"],
                     high: Shaped[Tensor, "*act"]) -> Float32[Tensor, "B k"]:
    """Eq. (2): actions a, as `env.step` takes them -> u, the actions before tanh."""
    unit = 2 * (act - low) / (high - low) - 1
    return unit.clamp(-0.999, 0.999).atanh().flatten(1).float()


def log_prob(actor_out: ActorOut, log_std: Tensor | None, act: Tensor) -> PerSample:
    """Eq. (3). Actions: discrete [B] if log_std is None, else before tanh [B, k]."""
    if log_std is None:
        return actor_out.log_softmax(-1).gather(-1, act.unsqueeze(-1)).squeeze(-1)
    z = (act - actor_out) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


# ======================================= update =======================================
def bc_loss(policy: Policy, batch: Batch) -> tuple[Scalar, dict]:
    """Eq. (4), the negative log-likelihood of the demonstrated actions."""
    loss = -log_prob(policy(batch.obs), policy.log_std, batch.act).mean()
    return loss, {"bc_loss": loss}


@torch.no_grad()  # `minimize` enables gradients for its loss
def update(agent: Agent, optimizer: mpi.Adam, pairs: Batch, held_out: Batch,
           batch_size: int) -> dict:
    """Take `check_every` gradient steps on the training pairs. Then check: compute the
    held-out loss, and copy the weights to `best` if it is the lowest so far. Return
    metrics, those of gradient steps as [check_every]; `run.report` averages each."""
    step_metrics = []  # of each gradient step: the loss and the gradient norm
    for _ in range(agent.cfg.check_every):
        idx = torch.randint(len(pairs.obs), (batch_size,))  # with replacement
        batch = Batch(pairs.obs[idx], pairs.act[idx])
        step_metrics.append(
            optimizer.minimize(bc_loss, agent.policy, batch, lr=agent.cfg.lr))
    loss, _ = bc_loss(agent.policy, held_out)
    best_loss, _ = bc_loss(agent.best, held_out)  # before this check
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
        envs = make_envs(cfg, 1)  # never stepped: only for its spaces
        agent = Agent(envs.single_observation_space, envs.single_action_space, cfg)
        demos = load_demos(cfg, envs)  # subsampled; the same in all processes
        pairs, held_out = split(demos, cfg.held_out, cfg.seed)
        # The data are fixed, so mean and var of Eq. (1) are computed once, here.
        if not agent.images:
            agent.obs_stats.update(pairs.obs.float())
        agent.to(run.device)
        optimizer = mpi.Adam(agent.policy)
        step = run.restore(agent, optimizer=optimizer)  # 0, or where the run stopped
        # After `restore`: --init-from replaces the statistics.
        pairs = as_batch(agent, pairs.to(run.device))
        held_out = as_batch(agent, held_out.to(run.device))
        while step < cfg.total_steps:  # run.batch_size: this process's share
            metrics = update(agent, optimizer, pairs, held_out, run.batch_size)
            step += cfg.check_every
            run.report(step, envs, **metrics)  # logs; evaluates and saves when due
    return agent


if __name__ == "__main__":
    main(train, Config, __doc__)
