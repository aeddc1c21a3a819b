"""Load a run: evaluate it, record a video.

    python -m utils.play runs/HalfCheetah-v4/ppo/seed1
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --episodes 1 --video cheetah.mp4

A run that is still being trained is shown as its last checkpoint is. From Python:

    agent = load("runs/HalfCheetah-v4/ppo/seed1")
    act = agent.predict(obs)            # of one raw observation, as `env.step` takes it
"""
import ctypes
import importlib
import json
import os
import pkgutil
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro

from utils import checkpoint
from utils.logger import check_range, read_config
from utils.mpi import UsageError

NO_DISPLAY = ("MuJoCo draws without a display through EGL, a system package: "
              "apt-get install libegl1 libgl1 (Debian, Ubuntu), dnf install mesa-libEGL (Fedora)")


@dataclass(frozen=True)
class Play:
    run: tyro.conf.Positional[str]  # a run directory, such as runs/HalfCheetah-v4/ppo/seed1
    episodes: int = 10  # how many to evaluate
    video: str = ""  # record one more episode into this file, an .mp4
    stochastic: bool = False  # sample actions as in training; else take the most likely one
    best: bool = False  # the policy of the best evaluation (--eval-every), not the last one
    seed: int | None = None  # of the episodes; default: the run's own
    device: Literal["auto", "cpu", "cuda"] = "cpu"  # where the networks run

    def __post_init__(self):
        check_range(self, "episodes", 1)
        check_range(self, "seed", 0)


# ---- Load

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
    if package != "algos":      # a stranger's run must not name code of theirs to be imported
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


# ---- Video

def prepare_video(file: str) -> None:
    """UsageError unless videos can be written, and into `file`; chooses how MuJoCo draws.

    Comes first: MuJoCo chooses when it is imported, and cannot be imported if that fails.
    """
    folder = Path(file).parent
    if not file.endswith(".mp4"):
        raise UsageError(f"--video {file}: the name must end in .mp4")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--video {file}: {folder} is no directory that one can write in")
    if find_spec("moviepy") is None:
        raise UsageError("--video needs moviepy: pip install -e '.[video]'")
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")   # else pygame complains on stderr
        try:
            ctypes.CDLL("libEGL.so.1")
            os.environ.setdefault("MUJOCO_GL", "egl")
        except OSError:
            pass                                # needed by MuJoCo's environments alone
    try:
        importlib.import_module("mujoco")
    except Exception as error:                  # a graphics library can fail in any way
        raise UsageError(f"--video: MuJoCo cannot be loaded with MUJOCO_GL="
                         f"{os.environ.get('MUJOCO_GL')}: {error}. {NO_DISPLAY}") from None


class AgentsView(gym.Env):
    """A vector of one Atari game as a plain environment that shows what the agent sees of it."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}    # 60 a second, every fourth
    render_mode = "rgb_array"

    def __init__(self, envs):
        self.envs, self.obs = envs, None
        self.observation_space = envs.single_observation_space
        self.action_space = envs.single_action_space

    def reset(self, *, seed=None, options=None):
        self.obs = self.envs.reset(seed=seed)[0][0].copy()
        return self.obs, {}

    def step(self, action):
        obs, rew, terminated, truncated, infos = self.envs.step(np.array([action]))
        done = terminated[0] or truncated[0]    # then `obs` is of the next episode already
        self.obs = self.obs if done else obs[0].copy()
        info = {"episode": {key: infos["episode"][key][0] for key in "rl"}} if done else {}
        return self.obs, rew[0], terminated[0], truncated[0], info

    def render(self):
        newest = self.obs[-1]                   # of the stacked frames, [84, 84]
        return np.broadcast_to(newest[..., None], (*newest.shape, 3))

    def close(self):
        self.envs.close()


def record(module, cfg, agent, file: str, seed: int) -> tuple[float, int]:
    """Play one episode and write it to `file`, whole or not at all; its return and length.

    UsageError where the environment cannot be drawn.
    """
    with tempfile.TemporaryDirectory(prefix=".video-", dir=Path(file).parent) as folder:
        env = None
        try:
            if cfg.env.startswith("ALE/"):
                env = AgentsView(module.make_envs(cfg, 1))
            else:
                env = gym.make(cfg.env, **json.loads(cfg.env_kwargs) | {"render_mode": "rgb_array"})
                env = gym.wrappers.RecordEpisodeStatistics(env)
            env = gym.wrappers.RecordVideo(env, f"{folder}/video", lambda episode: episode == 0)
            obs, _ = env.reset(seed=seed)       # draws the first frame
        except Exception as error:
            sys.unraisablehook = lambda _: None     # what was half made cannot be freed either
            hint = f". {NO_DISPLAY}" if hasattr(env and env.unwrapped, "mujoco_renderer") else ""
            raise UsageError(f"--video: {cfg.env} cannot be drawn here: {error}{hint}") from None
        terminated = truncated = False
        while not (terminated or truncated):
            obs, _, terminated, truncated, info = env.step(agent.predict(obs))
        env.close()                             # writes the video
        os.replace(next(Path(folder, "video").glob("*.mp4")), file)
    return float(info["episode"]["r"]), int(info["episode"]["l"])


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
        sample = agent.act      # whoever asks for the best action gets a sample
        agent.act = lambda obs, deterministic=False: sample(obs)
    kind = "stochastic" if play.stochastic else "deterministic"
    print(f"{cfg.env}, {play.run} at step {policy['step']:,}, {kind}, seed {seed}", flush=True)
    if play.video:
        ret, length = record(module, cfg, agent, play.video, seed)
        print(f"{play.video}: return {ret:.2f}, {length} steps", flush=True)
    returns = module.evaluate(agent, cfg, play.episodes, seed)
    print(f"{play.episodes} episodes: return mean {returns.mean():.2f}  std {returns.std():.2f}  "
          f"min {returns.min():.2f}  max {returns.max():.2f}")
    return returns


if __name__ == "__main__":
    main(tyro.cli(Play, description=__doc__))
