"""Evaluate the policy of a run, or record a video or demonstrations of it.

    python -m utils.play runs/HalfCheetah-v4/ppo/seed1
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --video cheetah.mp4
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --record demos.npz

If the run is still training, its last checkpoint is used. The weights act
through the present code of the algorithm. A warning says if it has changed
since the run. From Python:

    agent = load_agent("runs/HalfCheetah-v4/ppo/seed1")
    act = agent.predict(obs)    # one raw observation -> an action for env.step
"""

import importlib
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

from utils import checkpoint, source
from utils.checks import check_range
from utils.demos import prepare_record, record_demos
from utils.envs import evaluate, make_envs
from utils.flags import read_command
from utils.mpi import UsageError
from utils.rundir import read_config
from utils.video import make_view, prepare_video, record


@dataclass(frozen=True)
class Play:
    run: tyro.conf.Positional[str]  # a run directory, such as runs/HalfCheetah-v4/ppo/seed1
    episodes: int = 10  # number of episodes to evaluate
    video: str = ""  # also draw one episode into this file, an .mp4 or a small .gif
    seconds: float | None = None  # length of the video (default: an episode)
    record: str = ""  # write the episodes as demonstrations into this .npz file (utils/demos.py)
    overwrite: bool = False  # --record replaces a file that exists
    stochastic: bool = False  # sample actions as in training, instead of the most likely ones
    best: bool = False  # use the policy of the best evaluation (--eval-every), not the last one
    as_trained: bool = False  # run the run's own algo.py, which may do anything; do you trust it?
    seed: int | None = None  # seed of the episodes (default: the run's own)
    max_steps: int = 100_000  # stop with an error if an episode is longer than this
    device: Literal["auto", "cpu", "cuda"] = "cpu"  # where the networks run

    def __post_init__(self):
        check_range(self, "episodes max_steps", 1)
        check_range(self, "seed", 0)
        check_range(self, "seconds", above=0)
        if self.seconds and not self.video:
            raise UsageError("--seconds is the length of a --video")
        if self.overwrite and not self.record:
            raise UsageError("--overwrite is for --record")
        if self.record and self.video:
            raise UsageError("--record and --video exclude each other: a video draws an episode of "
                             "its own, which would not be among the demonstrations")


HINTS = {"run": "the run directory stands alone: python -m utils.play RUN",
         "env": "the run directory says which environment", "deterministic": "it is the default",
         "algo": "the run directory says which algorithm"}  # for flags that do not exist


def find_module(algo: str, asked: str, hint: str = ""):
    """Import algos/<algo>.py. UsageError says what `asked` for it, and ends in a `hint`."""
    folder = importlib.import_module("algos").__path__
    names = [module.name for module in pkgutil.iter_modules(folder)]
    stem = Path(algo).stem
    if algo not in names and stem in names:
        raise UsageError(f"{asked}: name it {stem}{hint}")
    if algo not in names:
        raise UsageError(f"{asked}: there is no algos/{algo}.py, only {', '.join(names)}{hint}")
    return importlib.import_module(f"algos.{algo}")


def read_run(run, best: bool = False, as_trained: bool = False):
    """Return a run's algorithm module, its Config and the contents of its policy.pt (best.pt).

    The module is the code that the run keeps if `as_trained`, else the present file in algos/.
    UsageError: there is no run or no policy, something is damaged, or the algorithm is unknown.
    """
    path = Path(run, "best.pt" if best else "policy.pt")
    config = read_config(run)
    package, _, algo = str(config["module"]).rpartition(".")
    kept = not as_trained and Path(run, source.KEPT).exists()
    hint = "; --as-trained runs the code that the run keeps" if kept else ""
    if as_trained:
        module = source.load(run)
    elif package == "algos":
        module = find_module(algo, str(run), hint)
    else:  # a stranger's run must not name code of theirs to import
        raise UsageError(f"{run} was made by {config['module']}; only files in algos/ are "
                         f"loaded{hint}")
    try:
        cfg = module.Config(**config["settings"])
    except TypeError as error:
        raise UsageError(f"another version made {run}/config.json: {error}{hint}") from None
    if best and not path.exists():
        raise UsageError(f"--best: there is no {path}; training with --eval-every writes one")
    return module, cfg, checkpoint.load_file(path, "agent", "step")


def load_agent(run, best: bool = False, device: str = "cpu", as_trained: bool = False):
    """Return the trained Agent of a run, with its statistics.

    run           the run directory; the run need not be finished
    best          load the policy of the best evaluation instead of the last checkpoint
    device        cpu, cuda, or auto, which takes CUDA if there is one
    as_trained    run the code that the run keeps, instead of the present file in algos/

    A warning is printed if the present code is not that of the run.

    UsageError: as in `read_run`, or the policy has other sizes than the settings say.
    """
    module, cfg, policy = read_run(run, best, as_trained)
    if not as_trained and source.has_changed(module.Config, run):
        print(f"warning: {module.__name__} has changed since {run} was made, so the policy may act "
              "differently; --as-trained plays the code of the run", file=sys.stderr)
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise UsageError("--device is cuda, but PyTorch finds no GPU here; it takes auto or cpu")
    envs = make_envs(cfg, 1)
    agent = module.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    envs.close()
    checkpoint.load_into(agent, policy["agent"], run)
    return agent.to("cuda" if gpu and device != "cpu" else "cpu").eval()


def main(play: Play) -> np.ndarray:
    """Evaluate, print the result, record a video if asked, and return the returns [episodes]."""
    if play.video:
        prepare_video(play.video)
    if play.record:
        prepare_record(play.record, play.overwrite)
    _, cfg, policy = read_run(play.run, play.best, play.as_trained)
    torch.set_num_threads(cfg.torch_threads)
    agent = load_agent(play.run, play.best, play.device, play.as_trained)
    view = make_view(cfg) if play.video else None
    seed = cfg.seed if play.seed is None else play.seed
    if play.stochastic:
        torch.manual_seed(seed)
    kind = "stochastic" if play.stochastic else "deterministic"
    print(f"{cfg.env}, {play.run} at step {policy['step']:,}, {kind}, seed {seed}", flush=True)
    how = play.episodes, seed, not play.stochastic, play.max_steps
    if play.record:
        returns, lengths = record_demos(agent, cfg, play.record, *how)
    else:
        returns, lengths = evaluate(agent, cfg, *how)
    print(f"{play.episodes} episodes: return mean {returns.mean():.2f}  std {returns.std():.2f}  "
          f"min {returns.min():.2f}  max {returns.max():.2f}, length mean {lengths.mean():.1f}")
    if play.record:
        print(f"{play.record}: {lengths.sum():,} steps of {play.episodes} episodes")
    if play.video:
        ret, length = record(agent, view, play.video, seed, not play.stochastic, play.seconds,
                             play.max_steps)
        shown = "the first" if ret is None else f"return {ret:.2f},"
        print(f"{play.video}: {shown} {length} steps")
    return returns


if __name__ == "__main__":
    try:
        main(read_command(Play, __doc__, "python -m utils.play", hint=HINTS.get))
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; no file was written", file=sys.stderr)
        sys.exit(130)
