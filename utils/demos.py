"""Demonstrations: episodes of a trained policy, in a file that imitation learning reads.

    python -m utils.play RUN --record demos.npz --episodes 10

The file holds plain arrays, so `np.load(file, allow_pickle=False)` opens it and it can run no code.
n counts the steps of all episodes, one episode after the other:

    obs [n, ...]              what the agent saw, not normalised
    act [n, ...]              what the agent chose; Atari plays FIRE instead where a life begins
    rew [n]                   the environment's reward for the step
    terminated, truncated [n] how the step ended the episode; False where it went on
    ret [episodes]            the return of each episode
    env, env_kwargs           the environment's id and its keyword arguments (JSON), two texts
"""

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch

from utils import mpi
from utils.atari import AtariRules
from utils.envs import make_envs
from utils.errors import UsageError
from utils.evaluate import close, evaluate
from utils.files import atomic_write

PER_STEP = ("obs", "act", "rew", "terminated", "truncated")
ARRAYS = (*PER_STEP, "ret", "env", "env_kwargs")


@dataclass(frozen=True)
class Demos:
    """Pairs that an expert showed. Discrete actions are int64, others float32."""

    obs: torch.Tensor  # raw, as recorded, [n, ...]
    act: torch.Tensor  # as `env.step` takes them, [n, ...]

    def to(self, device: torch.device) -> "Demos":
        return Demos(self.obs.to(device), self.act.to(device))

    def take(self, rows: torch.Tensor) -> "Demos":
        return Demos(self.obs[rows], self.act[rows])


def record_demos(agent, cfg, file: str, episodes: int, seed: int, deterministic: bool = True,
                 max_steps: int = 100_000) -> tuple[np.ndarray, np.ndarray]:
    """Call `evaluate`, write the episodes to `file`, and return (returns, lengths)."""
    envs = make_envs(cfg, episodes)
    if isinstance(envs, AtariRules):  # which are for a learner
        envs.clip_rewards = envs.lives_end = False
    steps = []
    returns, lengths = evaluate(agent, cfg, episodes, seed, deterministic, max_steps=max_steps,
                                envs=envs, steps=steps)
    close(envs)
    steps = [(obs, agent.env_act(act), *rest) for obs, act, *rest in steps]
    columns = dict(zip(PER_STEP, map(np.stack, zip(*steps))))  # [steps, episodes, ...]
    arrays = {name: np.concatenate([column[:length, i] for i, length in enumerate(lengths)])
              for name, column in columns.items()}
    with atomic_write(file) as target:
        np.savez_compressed(target, **arrays, ret=returns, env=cfg.env, env_kwargs=cfg.env_kwargs)
    return returns, lengths


def load_demos(cfg, envs: gym.vector.VectorEnv) -> Demos:
    """Return the pairs of `cfg.demos` that a run learns from; `envs` are its environments.

    They are those of the first `cfg.num_trajectories` episodes, or of all if it is 0. Of each
    episode every `cfg.subsample`-th pair is kept, from a random offset (Ho & Ermon 2016). The
    same seed keeps the same pairs, in all processes. UsageError says what is wrong with the file.
    """
    arrays = read_demos(cfg.demos)
    check_space(cfg, "obs", arrays["obs"], envs.single_observation_space)
    check_space(cfg, "act", arrays["act"], envs.single_action_space)
    ends = np.flatnonzero(arrays["terminated"] | arrays["truncated"]) + 1  # a time limit too
    wanted = cfg.num_trajectories or len(ends)
    if wanted > len(ends):
        raise UsageError(f"--num-trajectories is {wanted}, but {cfg.demos} has {len(ends)}")
    rng = np.random.default_rng(cfg.seed)
    kept = []
    for start, end in zip([0, *ends], ends[:wanted]):
        offset = rng.integers(min(cfg.subsample, end - start))  # at least one pair per episode
        kept.append(np.arange(start + offset, end, cfg.subsample))
    rows = np.concatenate(kept)
    part = f" of {end:,} (--subsample {cfg.subsample})" * (cfg.subsample > 1)
    mpi.say(f"demonstrations: {len(rows):,} pairs{part} from {wanted} episodes of {arrays['env']} "
            f"with mean return {arrays['ret'][:wanted].mean():.1f}")
    obs, act = (torch.from_numpy(arrays[name][rows]) for name in ("obs", "act"))
    return Demos(obs, act.float() if act.is_floating_point() else act.long())


def read_demos(file: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file. UsageError: it is not what `record_demos` writes."""
    try:
        with np.load(file, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in ARRAYS}
        ends = np.count_nonzero(arrays["terminated"] | arrays["truncated"])
        if len({len(arrays[name]) for name in PER_STEP}) > 1 or not ends == len(arrays["ret"]) > 0:
            raise ValueError("its arrays do not fit together")
        return arrays
    except Exception as error:  # a damaged file can fail in any way; so does one that holds code
        raise UsageError(f"--demos {file} cannot be read, or is not what python -m utils.play RUN "
                         f"--record demos.npz writes: {error}") from None


def check_space(cfg, name: str, rows: np.ndarray, space: gym.Space) -> None:
    """UsageError unless the rows [n, ...] of an array lie in a space of the environment."""
    fits = rows.shape[1:] == space.shape and np.can_cast(rows.dtype, space.dtype)
    # Environments may break the bounds of their own observations.
    if not fits or name == "act" and not all(map(space.contains, rows)):
        raise UsageError(f"--demos {cfg.demos}: {name}, {rows.dtype} {list(rows.shape)}, is not of "
                         f"the space of --env {cfg.env}: {space}")
