"""Evaluate the policy of a run, watch it, or record a video or demonstrations of it.

    python -m utils.play runs/HalfCheetah-v4/ppo/seed1
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --render
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --video cheetah.mp4
    python -m utils.play runs/HalfCheetah-v4/ppo/seed1 --record demos.npz

Of a text task, it prints the first ten prompts and answers. If the run is
still training, its last checkpoint is used. The weights act through the
present code of the algorithm. A warning says if it has changed since the run.
From Python:

    agent = load_agent("runs/HalfCheetah-v4/ppo/seed1")
    act = agent.predict(obs)    # one raw observation -> an action for env.step
"""

import ctypes
import importlib
import itertools
import json
import os
import pkgutil
import sys
import tempfile
import warnings
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch

from utils.run import checkpoint
from utils.files import check_target
from utils.run.command import program, read_command
from utils.run.ranges import check_range
from utils.demos import record_demos
from utils.env_ids import is_game
from utils.envs import make_envs
from utils.evaluate import evaluate
from utils.spaces import act_kind, one_line
from utils.errors import UsageError
from utils.run.directory import read_config
from utils.run.run import choose_device


@dataclass(frozen=True)
class Play:
    run: str  # a run directory, such as runs/HalfCheetah-v4/ppo/seed1
    episodes: int = 10  # number of episodes to evaluate
    render: bool = False  # play the episodes one by one in a window
    video: str = ""  # also draw one episode into this file, an .mp4 or a small .gif
    seconds: float | None = None  # length of the video (default: one episode)
    record: str = ""  # write the episodes as demonstrations into this .npz file (utils/demos.py)
    overwrite: bool = False  # --record replaces a file that exists
    stochastic: bool = False  # sample actions as in training, instead of the most likely ones
    best: bool = False  # use the policy of the best evaluation (--eval-every), not the last one
    seed: int | None = None  # seed of the episodes (default: the run's own)
    max_steps: int = 100_000  # stop with an error if an episode is longer than this
    device: Literal["auto", "cpu", "cuda"] = "cpu"  # where the networks run

    def __post_init__(self):
        check_range(self, "episodes", 1, 1e5)  # each has an environment of its own
        check_range(self, "max_steps", 1)
        check_range(self, "seed", 0)
        check_range(self, "seconds", above=0)
        if bool(self.record) + bool(self.video) + self.render > 1:
            raise UsageError("--record, --video and --render exclude each other")


def find_module(algo: str, asked: str):
    """Import algos/<algo>.py. UsageError says what `asked` for it."""
    folder = importlib.import_module("algos").__path__
    names = [each.name for each in pkgutil.iter_modules(folder) if each.name[0] != "_"]
    if algo not in names:
        raise UsageError(f"{asked}: there is no algos/{algo}.py, only {', '.join(names)}")
    return importlib.import_module(f"algos.{algo}")


def read_run(run, best: bool = False):
    """Return a run's algorithm module, its Config and the contents of its policy.pt (best.pt)."""
    path = Path(run, "best.pt" if best else "policy.pt")
    config = read_config(run)
    package, _, algo = str(config["module"]).rpartition(".")
    if package != "algos":  # a stranger's run must not name code of theirs to import
        raise UsageError(f"{run} was made by {config['module']}; only files in algos/ are loaded")
    module = find_module(algo, str(run))
    cfg = module.Config.of_run(run)
    if best and not path.exists():
        raise UsageError(f"--best: there is no {path}; training with --eval-every writes one")
    return module, cfg, checkpoint.load_file(path, "agent", "step")


def load_agent(run, best: bool = False, device: str = "cpu"):
    """Return the trained Agent of a run, with its statistics.

    run       the run directory; the run need not be finished
    best      load the policy of the best evaluation instead of the last checkpoint
    device    cpu, cuda, or auto, which takes CUDA for images, if there is one

    Warns if the present code is not that of the run.
    """
    module, cfg, policy = read_run(run, best)
    if has_changed(module.Config, run):
        warnings.warn(f"{module.__name__} has changed since {run} was made, so the policy may act "
                      f"differently; {run}/algo.py is the code of the run", stacklevel=2)
    device = choose_device(replace(cfg, device=device))
    envs = make_envs(cfg, 1)
    agent = module.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    envs.close()
    checkpoint.load_into(agent, policy["agent"], run)
    return agent.to(device).eval()


# ---- videos


class Film(gym.vector.VectorWrapper):
    """Write the frames of one environment, without the last of its episode, into an .mp4 or .gif.

    envs       one environment, from `make_envs`
    screen     of an Atari game: the same game, played alike, whose observations are its screen
    seconds    the film ends after so many, or with the episode
    """

    def __init__(self, envs: gym.vector.VectorEnv, screen: gym.vector.VectorEnv | None = None):
        super().__init__(envs)
        self.screen = screen
        self.fps = 15 if screen else envs.unwrapped.envs[0].metadata.get("render_fps") or 30
        self.writer = None
        self.frames, self.every = 0, 1  # of every so many frames, the first is drawn

    def open(self, file: Path, seconds: float | None) -> None:
        import imageio.v2 as imageio  # an extra

        self.left = np.inf if seconds is None else seconds * self.fps
        self.frames, self.small = 0, 1
        if file.suffix == ".gif":  # it compresses badly: 20 frames per second, 240 pixels wide
            self.every = int(np.ceil(self.fps / 20))
            self.small = int(np.ceil(self.shape[1] / 240))
            self.writer = imageio.get_writer(file, duration=1000 * self.every / self.fps, loop=0)
        else:  # the codec takes even sizes only
            self.writer = imageio.get_writer(file, fps=self.fps, macro_block_size=2,
                                             ffmpeg_log_level="error")

    def draw(self, shown: tuple | None) -> None:
        self.frames += 1
        if (self.frames - 1) % self.every:  # it is not shown, and drawing takes long
            return
        with warnings.catch_warnings(action="ignore"):  # MinAtar's frames are floats, see below
            frame = shown[0][0, 0] if shown else np.asarray(self.env.render()[0])
        if frame.dtype.kind == "f" and frame.size and 0 <= frame.min() <= frame.max() <= 1:
            large = max(1, 160 // len(frame))  # MinAtar's has 10 x 10 pixels
            frame = np.uint8(255 * frame).repeat(large, 0).repeat(large, 1)
        if frame.dtype != np.uint8 or frame.shape[2:] != (3,):
            raise UsageError(f"render() returned {frame.dtype} {list(frame.shape)}, which is no "
                             "RGB image of uint8 [H, W, 3]")
        self.shape = frame.shape
        if self.writer:
            self.writer.append_data(frame[::self.small, ::self.small])

    def reset(self, **kwargs):
        returned = self.env.reset(**kwargs)
        self.draw(self.screen and self.screen.reset(**kwargs))
        return returned

    def step(self, act):
        returned = self.env.step(act)
        shown = self.screen and self.screen.step(act)
        if "episode" not in returned[-1]:  # else a new one has begun
            self.draw(shown)
        return returned

    def close(self, **kwargs):
        for each in (self.env, self.screen, self.writer):  # last, for it may fail
            if each is not None:
                each.close()


def choose_renderer(file: str) -> None:
    """Choose how MuJoCo and pygame draw without a display. MuJoCo reads the choice when it is
    imported. UsageError: a package that writes `file` is missing."""
    for name in ["imageio"] + ["imageio_ffmpeg"] * file.endswith(".mp4"):  # Gymnasium has the first
        if find_spec(name) is None:
            raise UsageError(f"--video {file} needs {name}: pip install -e '.[video]'")
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame complains on stderr
        with suppress(OSError):  # only MuJoCo's environments need it
            ctypes.CDLL("libEGL.so.1")
            os.environ.setdefault("MUJOCO_GL", "egl")


def make_with(cfg, **more):
    """Return one environment, made with more keyword arguments."""
    kwargs = json.loads(cfg.env_kwargs) | more
    return make_envs(replace(cfg, env_kwargs=json.dumps(kwargs)), 1)


def make_film(cfg) -> Film:
    """Return an environment that can be drawn. UsageError: it cannot be drawn here."""
    try:
        if is_game(cfg.env, "ALE/"):
            film = Film(make_envs(cfg, 1), make_with(cfg, grayscale=False, img_height=210,
                                                     img_width=160, stack_num=1))
        else:
            film = Film(make_with(cfg, render_mode="rgb_array"))
            follow_robot(film.unwrapped.envs[0])
        film.reset(seed=cfg.seed)
        return film
    except Exception as error:
        spec = gym.registry.get(cfg.env.rpartition(":")[2])
        hint = (". Without a display MuJoCo draws through EGL, a system package: apt-get install "
                "libegl1 libgl1 (Debian, Ubuntu), dnf install mesa-libEGL (Fedora)"
                if spec and "mujoco" in str(spec.entry_point) else "")
        raise UsageError(f"--video: {cfg.env} cannot be drawn here: {one_line(error)}{hint}"
                         ) from None


def make_window(cfg) -> gym.vector.VectorEnv:
    """Return an environment in a window. UsageError: there can be none; it names --video."""
    try:
        if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
            raise OSError("there is no display")
        if is_game(cfg.env, "ALE/"):
            raise OSError("Atari games have none")
        envs = make_with(cfg, render_mode="human")
        envs.reset(seed=cfg.seed)
        return envs
    except Exception as error:
        raise UsageError(f"--render cannot open a window for {cfg.env} here: {one_line(error)}. "
                         "--video FILE.mp4 draws an episode into a file") from None


def follow_robot(env) -> None:
    """Let a camera of a MuJoCo model that moves with its robot draw, if there is one.

    Gymnasium's default camera stands still, so a robot that runs leaves the picture.
    """
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer and not any("camera" in name for name in env.spec.kwargs):
        moving = np.flatnonzero(renderer.model.cam_mode)  # 0: it is fixed
        renderer.camera_id = int(moving[0]) if len(moving) else renderer.camera_id


def write_video(agent, cfg, film: Film, file: str, seed: int, deterministic: bool = True,
                seconds: float | None = None, max_steps: int = 100_000) -> tuple[float, int]:
    """Play in `film` and write it to `file`, whole or not at all.

    seconds    its length, over several episodes if they are short (default: one episode)

    Return (return, number of steps) of the last episode; without `seconds`, it is the only one.
    """
    with tempfile.TemporaryDirectory(prefix=".video-", dir=Path(file).parent) as folder:
        made = Path(folder, Path(file).name)
        try:
            with closing(film):
                film.open(made, seconds)
                for k in itertools.count():  # episodes, until the seconds are full
                    returns, lengths = evaluate(agent, cfg, 1, seed + k, deterministic,
                                                lambda: film.frames >= film.left, max_steps, film)
                    if seconds is None or film.frames >= film.left:
                        break
            os.replace(made, file)
        except OSError as error:  # the rest of the message is FFmpeg's command
            raise UsageError(f"--video {file} cannot be written: "
                             f"{str(error).splitlines()[0]}") from None
    return float(returns[0]), int(lengths[0])


# ---- the command


def main(play: Play) -> np.ndarray:
    """Evaluate, print the result, write what is asked for, and return the returns [episodes]."""
    if play.video:
        check_target("--video", play.video, (".mp4", ".gif"))
        choose_renderer(play.video)
    if play.record:
        check_target("--record", play.record, (".npz",), play.overwrite)
    run, video, record = map(os.path.abspath, (play.run, play.video, play.record))
    _, cfg, policy = read_run(run, play.best)
    torch.set_num_threads(max(1, cfg.torch_threads))
    film = make_film(cfg) if play.video else None
    agent = load_agent(run, play.best, play.device)
    window = make_window(cfg) if play.render else None
    seed = cfg.seed if play.seed is None else play.seed
    if play.stochastic:
        torch.manual_seed(seed)
    kind = "stochastic" if play.stochastic else "deterministic (if it gets stuck: --stochastic)"
    print(f"{cfg.env}, {play.run} at step {policy['step']:,}, {kind}, seed {seed}", flush=True)
    if play.record:
        returns, lengths = record_demos(agent, cfg, record, play.episodes, seed,
                                        not play.stochastic, play.max_steps)
    elif window:
        shown = [evaluate(agent, cfg, 1, seed + k, not play.stochastic,
                          max_steps=play.max_steps, envs=window) for k in range(play.episodes)]
        returns, lengths = (np.concatenate(column) for column in zip(*shown))
        window.close()
    else:
        envs = make_envs(cfg, play.episodes)
        is_text = act_kind(envs.single_action_space) == "tokens"
        read = is_text and getattr(envs.unwrapped.envs[0].unwrapped, "read", None)
        steps = [] if read else None
        returns, lengths = evaluate(agent, cfg, play.episodes, seed, not play.stochastic,
                                    max_steps=play.max_steps, envs=envs, steps=steps)
        envs.close()
        for prompt, answer, rew in list(zip(*steps[0][:3]))[:10] if steps else []:
            print(f"    {read(prompt).strip()} {read(answer).strip()}    reward {rew:g}")
    print(f"{play.episodes} episodes: return mean {returns.mean():.2f}  std {returns.std():.2f}  "
          f"min {returns.min():.2f}  max {returns.max():.2f}, length mean {lengths.mean():.1f}")
    if play.record:
        print(f"{play.record}: {lengths.sum():,} steps of {play.episodes} episodes")
    if film:
        print(f"drawing an episode of about {lengths[0]:,} steps", flush=True)
        ret, length = write_video(agent, cfg, film, video, seed, not play.stochastic,
                                  play.seconds, play.max_steps)
        print(f"{play.video}: " + (f"{play.seconds:g} seconds" if play.seconds else
                                   f"an episode with return {ret:.2f} in {length} steps"))
    return returns


if __name__ == "__main__":
    with program():
        main(read_command(Play, __doc__, "python -m utils.play"))
