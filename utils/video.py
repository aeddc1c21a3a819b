"""Draw one episode of a policy into an .mp4 or a .gif, frame by frame."""

import ctypes
import importlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
from tqdm import tqdm

from utils.envs import make_envs
from utils.mpi import UsageError

# How FFmpeg is to write. The codec of an .mp4 takes even sizes only. A GIF is small, since it
# compresses badly: at most 240 pixels wide, 20 frames per second, one palette, no dithering.
MP4 = "-pix_fmt yuv420p -vf pad=ceil(iw/2)*2:ceil(ih/2)*2"
GIF = ("-vf fps={fps},scale=min(iw\\,240):-1:flags=area,split[a][b];[a]palettegen[colours];"
       "[b][colours]paletteuse=dither=none")
GIF_FPS = 20
NO_DISPLAY = ("Without a display MuJoCo draws through EGL, a system package: "
              "apt-get install libegl1 libgl1 (Debian, Ubuntu), dnf install mesa-libEGL (Fedora)")


def prepare_video(file: str) -> None:
    """UsageError if no video can be written to `file`. Also choose how MuJoCo draws.

    Call this before MuJoCo is imported: the import reads the choice, and fails if it is wrong.
    """
    folder = Path(file).parent
    if not file.endswith((".mp4", ".gif")):
        raise UsageError(f"--video {file}: the name must end in .mp4 or .gif")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--video {file}: {folder} is no directory to write in")
    if os.path.isdir(file):
        raise UsageError(f"--video {file}: this is a directory; it takes a file")
    if find_spec("imageio_ffmpeg") is None:
        raise UsageError("--video needs imageio-ffmpeg: pip install -e '.[video]'")
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


def make_view(cfg) -> gym.Env:
    """Return one environment that can be drawn: its first frame has been.

    UsageError: the environment cannot be drawn here.
    """
    env = None
    try:
        if "ALE/" in cfg.env:
            env = AgentsView(make_envs(cfg, 1))
        else:
            env = gym.make(cfg.env, **json.loads(cfg.env_kwargs) | {"render_mode": "rgb_array"})
            env = gym.wrappers.RecordEpisodeStatistics(env)
        follow_robot(env)
        env.reset(seed=cfg.seed)
        frame = np.asarray(env.render())
        if frame.dtype != np.uint8 or frame.shape[2:] != (3,):
            raise TypeError(f"render() returned {frame.dtype} {list(frame.shape)}, which is no RGB "
                            "image of uint8 [H, W, 3]")
        return env
    except Exception as error:
        sys.unraisablehook = lambda _: None  # freeing the half-made environment fails too
        hint = f". {NO_DISPLAY}" if hasattr(env and env.unwrapped, "mujoco_renderer") else ""
        raise UsageError(f"--video: {cfg.env} cannot be drawn here: {error}{hint}") from None


def follow_robot(env) -> None:
    """Let the camera of a MuJoCo environment move with its robot.

    Gymnasium's default camera stands still, so a robot that runs leaves the picture. A camera that
    the environment's keyword arguments choose stays as it is.
    """
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer is None or any("camera" in name for name in env.spec.kwargs):
        return
    mujoco = importlib.import_module("mujoco")
    model, config = renderer.model, renderer.default_cam_config or {}
    moving = np.flatnonzero(model.cam_mode != mujoco.mjtCamLight.mjCAMLIGHT_FIXED)
    free = model.jnt_type == mujoco.mjtJoint.mjJNT_FREE
    rails = (model.jnt_type == mujoco.mjtJoint.mjJNT_SLIDE) & (model.jnt_limited == 0)
    robots = [body for body in model.jnt_bodyid[free | rails] if model.body_parentid[body] == 0]
    if len(moving):
        renderer.camera_id = int(moving[0])
    elif robots and "lookat" not in config:
        tracking = {"type": mujoco.mjtCamera.mjCAMERA_TRACKING, "trackbodyid": int(robots[0])}
        renderer.default_cam_config = config | tracking
        renderer.camera_id = None  # Gymnasium would make it a free camera again


def record(agent, view, file: str, seed: int, deterministic: bool = True,
           seconds: float | None = None,
           max_steps: float = np.inf) -> tuple[float | None, int]:
    """Draw one episode in `view`, from `make_view`, into `file`, whole or not at all.

    Return (return, number of steps). A video of so many `seconds` ends before the episode does; its
    return is None. UsageError: the episode exceeds `max_steps`, or the file cannot be written.
    """
    fps = view.metadata.get("render_fps") or 30
    last = np.inf if seconds is None else seconds * fps
    total = min(last, getattr(view.spec, "max_episode_steps", None) or np.inf)
    bar = tqdm(desc=file, total=total, unit=" steps", disable=not sys.stderr.isatty(), leave=False)
    step, ended = 0, False
    with tempfile.TemporaryDirectory(prefix=".video-", dir=Path(file).parent) as folder, bar:
        made = Path(folder, Path(file).name)
        obs, _ = view.reset(seed=seed)
        frame = view.render()
        with ffmpeg(made, frame, fps) as write:
            write(frame)
            while not ended and step < last:
                if step >= max_steps:
                    raise UsageError(f"--max-steps is {max_steps}, but the episode in {file} did "
                                     "not end within it")
                act = agent.env_act(agent.act(np.asarray(obs)[None], deterministic))[0]
                obs, _, terminated, truncated, info = view.step(act)
                write(view.render())
                ended = terminated or truncated
                step += 1
                bar.update()
        view.close()
        os.replace(made, file)
    return float(info["episode"]["r"]) if ended else None, step


@contextmanager
def ffmpeg(file: Path, frame: np.ndarray, fps: float):
    """Yield a function that adds a frame, uint8 [H, W, 3] as the given one, to a video.

    UsageError: FFmpeg fails, for example because the disk is full.
    """
    import imageio_ffmpeg  # an extra

    height, width, _ = frame.shape
    raw = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps} -i -".split()
    how = GIF.format(fps=min(fps, GIF_FPS)) if file.name.endswith(".gif") else MP4
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", *raw, *how.split(), str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield lambda frame: process.stdin.write(np.ascontiguousarray(frame))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended; the reason follows
        reason = process.stderr.read().decode(errors="replace").strip().partition("\n")[0]
        if status := process.wait():
            raise UsageError(f"--video {file.name} cannot be written: "
                             f"{reason or f'FFmpeg ended with status {status}'}")
