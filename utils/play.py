"""Load a run: evaluate it, record a video.

    python -m utils.play runs/HalfCheetah-v4/ppo/seed1
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --episodes 1 --video cheetah.mp4

A run that is still being trained is shown as its last checkpoint is. From Python:

    agent = load("runs/HalfCheetah-v4/ppo/seed1")
    act = agent.predict(obs)            # of one raw observation, as `env.step` takes it
"""

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

from utils import checkpoint, mpi
from utils.checks import check_range
from utils.mpi import UsageError
from utils.rundir import read_config
from utils.video import prepare_video, record


@dataclass(frozen=True)
class Play:
    run: tyro.conf.Positional[str]  # a run directory, such as runs/HalfCheetah-v4/ppo/seed1
    episodes: int = 10  # how many to evaluate
    video: str = ""  # record one more episode into this file, an .mp4
    stochastic: bool = False  # sample actions as in training; else take the most likely one
    best: bool = False  # the policy of the best evaluation (--eval-every), not the last one
    seed: int | None = None  # of the episodes; default: the run's own
    max_steps: int = 100_000  # of an episode; one that is longer is taken for endless
    device: Literal["auto", "cpu", "cuda"] = "cpu"  # where the networks run

    def __post_init__(self):
        check_range(self, "episodes max_steps", 1)
        check_range(self, "seed", 0)


def find_module(algo: str, asked: str):
    """The module algos/<algo>.py; UsageError begins with `asked`, who wanted it."""
    folder = importlib.import_module("algos").__path__
    names = [module.name for module in pkgutil.iter_modules(folder)]
    if algo not in names:
        raise UsageError(f"{asked}: there is no algos/{algo}.py, there are {', '.join(names)}")
    return importlib.import_module(f"algos.{algo}")


def read_run(run, best: bool = False):
    """A run's algorithm module, its Config, and what its policy.pt (best.pt) holds.

    UsageError: no run, a damaged one, one without a policy, or of an algorithm that is not here.
    """
    path = Path(run, "best.pt" if best else "policy.pt")
    config = read_config(run)
    package, _, algo = str(config["module"]).rpartition(".")
    if package != "algos":  # a stranger's run must not name code of theirs to be imported
        raise UsageError(f"{run} was made by {config['module']}; only files of algos/ are loaded")
    module = find_module(algo, str(run))
    try:
        cfg = module.Config(**config["settings"])
    except TypeError as error:
        raise UsageError(f"{run}/config.json is of another version: {error}") from None
    if best and not path.exists():
        raise UsageError(f"--best: there is no {path}; training with --eval-every writes one")
    return module, cfg, checkpoint.load_file(path, "agent", "step")


def load(run, best: bool = False, device: str = "cpu"):
    """The trained Agent of a run, statistics included; finished or not, whatever it ran on.

    run     the run directory
    best    the policy of the best evaluation instead of the last checkpoint's
    device  cpu, cuda, or auto, which takes CUDA where there is one

    UsageError as `read_run`, and for a policy of other sizes.
    """
    module, cfg, policy = read_run(run, best)
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise UsageError("--device is cuda, but PyTorch finds no GPU here; it takes auto or cpu")
    envs = module.make_envs(cfg, 1)
    agent = module.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    envs.close()
    checkpoint.load_into(agent, policy["agent"], run)
    return agent.to("cuda" if gpu and device != "cpu" else "cpu").eval()


def evaluate(module, cfg, agent, play: Play, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths, [episodes], of the episodes that the file's own `evaluate` plays.

    UsageError where an episode does not end in `play.max_steps`.
    """
    envs = module.make_envs(cfg, play.episodes)
    obs, _ = envs.reset(seed=mpi.seed(seed, 2))
    returns, lengths = np.zeros(play.episodes), np.zeros(play.episodes, int)
    for _ in range(play.max_steps):
        obs, *_, infos = envs.step(agent.env_act(agent.act(obs, not play.stochastic)))
        if "episode" in infos:
            first = infos["_episode"] & (lengths == 0)  # an environment's later ones do not count
            returns[first] = infos["episode"]["r"][first]
            lengths[first] = infos["episode"]["l"][first]
        if lengths.all():
            envs.close()
            return returns, lengths
    raise UsageError(f"--max-steps is {play.max_steps}; in so many steps {sum(lengths == 0)} of "
                     f"{play.episodes} episodes of {cfg.env} have not ended")


def main(play: Play) -> np.ndarray:
    """Print what the policy reaches, record it where asked; its returns, [episodes]."""
    if play.video:
        prepare_video(play.video)
    module, cfg, policy = read_run(play.run, play.best)
    torch.set_num_threads(cfg.torch_threads)
    agent = load(play.run, play.best, play.device)
    seed = cfg.seed if play.seed is None else play.seed
    if play.stochastic:
        torch.manual_seed(seed)
    kind = "stochastic" if play.stochastic else "deterministic"
    print(f"{cfg.env}, {play.run} at step {policy['step']:,}, {kind}, seed {seed}", flush=True)
    returns, lengths = evaluate(module, cfg, agent, play, seed)
    print(f"{play.episodes} episodes: return mean {returns.mean():.2f}  std {returns.std():.2f}  "
          f"min {returns.min():.2f}  max {returns.max():.2f}, length mean {lengths.mean():.1f}")
    if play.video:  # comes last: of an episode that never ends the video would not either
        ret, length = record(module, cfg, agent, play.video, seed, not play.stochastic)
        print(f"{play.video}: return {ret:.2f}, {length} steps")
    return returns


if __name__ == "__main__":
    main(tyro.cli(Play, description=__doc__))
