"""What an episode looks like: in a window, or drawn into an .mp4 or a small .gif."""

import copy
import ctypes
import importlib
import math
import os
import sys
import tempfile
import warnings
from contextlib import closing, suppress
from pathlib import Path

import gymnasium as gym
import numpy as np

from utils.env_ids import is_game, refusing_bad_env
from utils.envs import make_envs
from utils.errors import UsageError
from utils.seeds import seed_of
from utils.spaces import one_line


MOST_FRAMES = 300  # of a .gif


def has_display() -> bool:
    return sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


def make_window(cfg) -> gym.vector.VectorEnv:
    """Return one environment in a window. UsageError: there can be none."""
    if not has_display():
        raise UsageError("--render needs a display; --video FILE.mp4 draws an episode into a file")
    with refusing_bad_env(cfg):
        envs = make_envs(cfg, 1, render_mode="human")
        envs.reset(seed=cfg.seed)
    return envs


def make_drawn(cfg, file: str) -> gym.vector.VectorEnv:
    """Return one environment for `write_video`. UsageError: it cannot be drawn here."""
    if not has_display():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame complains on stderr
        with suppress(OSError):  # MuJoCo reads the choice when it is imported
            ctypes.CDLL("libEGL.so.1")
            os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        for package in ("imageio", "imageio_ffmpeg")[: 1 if file.endswith(".gif") else 2]:
            importlib.import_module(package)
        if is_game(cfg.env, "ALE/"):  # it has no `render`, but may observe its screen
            return make_envs(cfg, 1, grayscale=False, img_height=210, img_width=160, stack_num=1)
        envs = make_envs(cfg, 1, render_mode="rgb_array")
        follow_robot(envs.unwrapped.envs[0].unwrapped)
        envs.reset(seed=cfg.seed)
        draw(envs)
        return envs
    except Exception as error:
        raise UsageError(f"--video cannot draw {cfg.env} here: {one_line(error)}. A film "
                         "needs pip install 'imageio[ffmpeg]' pygame-ce and, of MuJoCo without a "
                         "display, apt-get install libegl1 libgl1") from None


def follow_robot(env: gym.Env) -> None:
    """Draw a robot by the camera of its model that moves with it, on a floor that does not end."""
    renderer = getattr(env, "mujoco_renderer", None)
    if renderer:  # the size of a plane is only drawn, with so many repeats of a pattern
        model = renderer.model
        planes = model.geom_type == 0
        model.geom_size[planes, :2] *= 100
        model.mat_texrepeat[np.unique(model.geom_matid[planes & (model.geom_matid >= 0)])] *= 100
    if renderer and renderer.model.cam_mode.any():  # 0: the camera is fixed
        renderer.camera_id = int(np.flatnonzero(renderer.model.cam_mode)[0])


def draw(envs: gym.vector.VectorEnv) -> np.ndarray:
    """Return the picture of one environment, uint8 [H, W, 3], or [H, W] if it is grey."""
    with warnings.catch_warnings(action="ignore"):  # Gymnasium's about MinAtar's picture
        frame = np.asarray(envs.render()[0])
    if frame.shape == (10, 10, 3):  # MinAtar's, floats from 0 to 1
        frame = np.uint8(255 * frame).repeat(16, 0).repeat(16, 1)
    if frame.dtype != np.uint8 or frame.ndim != 2 and frame.shape[2:] not in ((3,), (4,)):
        raise UsageError(f"render() returned {frame.dtype} {list(frame.shape)}, no RGB image")
    return frame if frame.ndim == 2 else frame[..., :3]  # without RGBA's opacity


def write_video(agent, cfg, envs: gym.vector.VectorEnv, file: str, seed: int,
                deterministic: bool = True, max_steps: int = 10_000) -> tuple[float, int]:
    """Draw an episode in `envs`, from `make_drawn`, and write it to `file`, whole or not at all.

    Return (return, number of steps) of the episode, or (0, 0) if the film ends after `max_steps`.
    """
    import imageio.v2 as imageio  # an extra

    game, small = is_game(cfg.env, "ALE/"), file.endswith(".gif")
    fps, every = 15 if game else envs.metadata.get("render_fps") or 30, 1
    options = {"fps": fps, "codec": "libx264", "macro_block_size": 2,  # even sides
               "ffmpeg_log_level": "error"}
    if small:  # it compresses badly: MOST_FRAMES, at most 20 per second, 240 pixels wide
        every = math.ceil(fps / 20)
        options = {"duration": 1000 * every / fps, "loop": 0}
    drawn = range(0, MOST_FRAMES * every if small else max_steps, every)
    played = make_envs(cfg, 1) if game else envs  # an Atari game is played twice, alike
    agent = copy.deepcopy(agent)
    agent.forget()
    with tempfile.TemporaryDirectory(prefix=".video-", dir=Path(file).parent) as folder:
        made = Path(folder, Path(file).name)
        try:
            with closing(envs), closing(played), imageio.get_writer(made, **options) as writer:
                obs, _ = played.reset(seed=seed_of(seed, 2))  # as in `evaluate`
                if game:
                    shown, _ = envs.reset(seed=seed_of(seed, 2))
                for step in range(max_steps):
                    if step in drawn:
                        frame = shown[0, 0] if game else draw(envs)
                        stride = math.ceil(frame.shape[1] / 240) if small else 1
                        writer.append_data(frame[::stride, ::stride])
                    act = agent.env_act(agent.act(obs, deterministic))
                    obs, _, terminated, truncated, infos = played.step(act)
                    agent.forget(terminated | truncated)  # a life's end, of a game, is one
                    if game:
                        shown, *_ = envs.step(act)
                    if "episode" in infos:
                        end = float(infos["episode"]["r"][0]), int(infos["episode"]["l"][0])
                        break
                else:
                    end = 0.0, 0
            os.replace(made, file)
        except OSError as error:  # the rest of the message is FFmpeg's command
            reason = str(error).splitlines()[0]
            raise UsageError(f"--video {file} cannot be written: {reason}") from None
    return end
