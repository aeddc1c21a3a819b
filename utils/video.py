"""Record one episode of a policy as an .mp4, with Gymnasium's own recorder."""

import ctypes
import importlib
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np

from utils.envs import flat_obs, forget, make_envs
from utils.mpi import UsageError

NO_DISPLAY = ("Without a display MuJoCo draws through EGL, a system package: "
              "apt-get install libegl1 libgl1 (Debian, Ubuntu), dnf install mesa-libEGL (Fedora)")


def prepare_video(file: str) -> None:
    """UsageError if no video can be written to `file`. Also choose how MuJoCo draws.

    Call this before MuJoCo is imported: the import reads the choice, and fails if it is wrong.
    """
    folder = Path(file).parent
    if not file.endswith(".mp4"):
        raise UsageError(f"--video {file}: the name must end in .mp4")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--video {file}: {folder} is no directory to write in")
    if find_spec("moviepy") is None:
        raise UsageError("--video needs moviepy: pip install -e '.[video]'")
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame complains on stderr
        try:
            ctypes.CDLL("libEGL.so.1")
            os.environ.setdefault("MUJOCO_GL", "egl")
        except OSError:
            pass  # only MuJoCo's environments need it
    try:
        importlib.import_module("mujoco")
    except Exception as error:  # a graphics library can fail in any way
        raise UsageError(f"--video: MuJoCo cannot be loaded with MUJOCO_GL="
                         f"{os.environ.get('MUJOCO_GL')}: {error}. {NO_DISPLAY}") from None


class AgentsView(gym.Env):
    """One Atari game as a plain environment that draws the newest frame the agent sees."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # every fourth of 60 per second
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
        done = terminated[0] or truncated[0]  # then `obs` belongs to the next episode
        self.obs = self.obs if done else obs[0].copy()
        info = {"episode": {key: infos["episode"][key][0] for key in "rl"}} if done else {}
        return self.obs, rew[0], terminated[0], truncated[0], info

    def render(self):
        newest = self.obs[-1]  # of the stacked frames, [84, 84]
        return np.broadcast_to(newest[..., None], (*newest.shape, 3))

    def close(self):
        self.envs.close()


def record(agent, cfg, file: str, seed: int, deterministic: bool = True) -> tuple[float, int]:
    """Play one episode, write it to `file`, whole or not at all, and return (return, length).

    UsageError: the environment cannot be drawn.
    """
    with tempfile.TemporaryDirectory(prefix=".video-", dir=Path(file).parent) as folder:
        env = None
        try:
            if "ALE/" in cfg.env:
                env = AgentsView(make_envs(cfg, 1))
            else:
                env = gym.make(cfg.env, **json.loads(cfg.env_kwargs) | {"render_mode": "rgb_array"})
                env = gym.wrappers.RecordEpisodeStatistics(flat_obs(env))
            env = gym.wrappers.RecordVideo(env, f"{folder}/video", lambda episode: episode == 0)
            obs, _ = env.reset(seed=seed)  # draws the first frame
        except Exception as error:
            sys.unraisablehook = lambda _: None  # freeing the half-made environment fails too
            hint = f". {NO_DISPLAY}" if hasattr(env and env.unwrapped, "mujoco_renderer") else ""
            raise UsageError(f"--video: {cfg.env} cannot be drawn here: {error}{hint}") from None
        terminated = truncated = False
        forget(agent)
        while not (terminated or truncated):
            act = agent.env_act(agent.act(np.asarray(obs)[None], deterministic))[0]
            obs, _, terminated, truncated, info = env.step(act)
        env.close()  # writes the video
        os.replace(next(Path(folder, "video").glob("*.mp4")), file)
    return float(info["episode"]["r"]), int(info["episode"]["l"])
