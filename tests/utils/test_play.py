"""`utils.play`: which policy it plays, what it draws, and what it refuses."""
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from ctypes.util import find_library
from pathlib import Path

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d

from algos import ppo
from tests.envs import Ends
from tests.helpers import noted, refused
from utils import film, play
from utils.envs import make_envs
from utils.evaluate import evaluate
from utils.run import checkpoint

SMALL = {"total_steps": 512, "rollout_steps": 256, "minibatch_size": 64, "epochs": 2, "num_envs": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run directory, agent as training left it, Config) of three short runs, by environment."""
    runs = {}
    for env in ("Pendulum-v1", "CartPole-v1", "OddFrames-v0"):
        run = tmp_path_factory.mktemp("runs") / env
        cfg = ppo.Config(env, '{"max_episode_steps": 40}', run_dir=str(run), eval_every=256,
                         hidden=(16,), **SMALL)
        runs[env] = run, ppo.train(cfg), cfg
    return runs


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the Pendulum run, to be damaged."""
    return Path(shutil.copytree(trained["Pendulum-v1"][0], tmp_path / "run"))


def test_what_is_played_is_what_was_asked_for_and_its_step_is_shown(run, capsys):
    """The last policy or the best one: here they are of different steps, and act differently."""
    best = checkpoint.load_file(run / "best.pt")
    best["agent"] = {name: value + 0.3 for name, value in best["agent"].items()}
    best["step"] = 123
    checkpoint.save_file(run / "best.pt", best)
    _, cfg, _ = play.read_run(run)
    for kwargs, step in (({}, "512"), ({"best": True}, "123")):
        shown = play.main(play.Play(str(run), episodes=3, **kwargs))
        assert f"at step {step}, deterministic" in capsys.readouterr().out
        seed = cfg.seed + ("best" in kwargs)    # not the episodes that it was chosen by
        returns = evaluate(play.load_agent(run, **kwargs), cfg, 3, seed)[0]
        assert np.allclose(shown, returns, rtol=1e-5)
    assert not np.allclose(shown, evaluate(play.load_agent(run), cfg, 3, seed)[0])
    (run / "best.pt").unlink()
    refused(play.load_agent, run, best=True, says="--best: .* --eval-every writes one")


def test_a_policy_without_spaces_loads_by_its_environment(run):
    """As in a run of an older version, or of an environment whose spaces cannot be saved."""
    expected = play.load_agent(run).predict(np.ones(3, np.float32))
    policy = checkpoint.load_file(run / "policy.pt")
    assert policy["spaces"]
    for without in (policy | {"spaces": None}, {k: v for k, v in policy.items() if k != "spaces"}):
        checkpoint.save_file(run / "policy.pt", without)
        assert play.load_agent(run).predict(np.ones(3, np.float32)) == expected


# ---- What is refused

def rewrite(run, module=None, **settings):
    config = json.loads((run / "config.json").read_text())
    config["settings"] |= settings
    config["module"] = module or config["module"]
    (run / "config.json").write_text(json.dumps(config))
    Path("evil.py").write_text("open('executed', 'w')")


REFUSED = {
    "missing": (shutil.rmtree, "holds no run: config.json: FileNotFoundError"),
    "both cut off": (lambda run: [os.truncate(run / name, 40) for name in (
        "config.json", "policy.pt")], "holds no run: config.json: "),
    "no policy": (lambda run: (run / "policy.pt").unlink(), "policy.pt .*: .*No such file"),
    "no such setting": (lambda run: rewrite(run, gama=1), "unexpected keyword argument .gama"),
    "other sizes": (lambda run: rewrite(run, hidden=[17]), "size mismatch for [a-z.0-9]+: "),
    "code of theirs": (lambda run: rewrite(run, "evil"), "there is no evil, only algos.a2c, "),
    "code of a known name": (lambda run: rewrite(run, "evil.ppo"), "there is no evil.ppo, only"),
    "hidden code of theirs": (lambda run: rewrite(run, "algos.evil"), "there is no algos.evil"),
}


@pytest.mark.parametrize("damage,message", REFUSED.values(), ids=REFUSED)
def test_refused(run, damage, message, monkeypatch):
    monkeypatch.syspath_prepend(os.getcwd())
    damage(run)
    refused(play.load_agent, run, says=message)                 # and "executed" was not written


@pytest.mark.parametrize("flag, name, said", [
    ("video", "run.avi", "the name must end in .mp4 or .gif"),
    ("record", "run.txt", "the name must end in .npz"),
    ("video", "nowhere/run.mp4", "nowhere is no directory to write in"),
    ("export", "run.pt", "the name must end in .onnx"),
])
def test_refused_file(flag, name, said, monkeypatch):
    for reader in ("read_run", "load_agent"):
        monkeypatch.setattr(play, reader, lambda *args: pytest.fail("it was looked at"))
    assert refused(play.main, play.Play("run", **{flag: name})) == f"--{flag} {name}: {said}"


def test_a_window_needs_a_display(trained, monkeypatch):
    """SDL's dummy driver stands in for one. The first episode is that of an evaluation."""
    run, agent, cfg = trained["CartPole-v1"]
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform == "linux":
        said = refused(play.main, play.Play(run, render=True))
        assert said.startswith("--render needs a display; --video FILE.mp4 draws")
    monkeypatch.setenv("DISPLAY", ":0")
    refused(film.make_window, ppo.Config("ALE/Pong-v5"), says="render_mode")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    returns = play.main(play.Play(run, render=True, episodes=2))
    assert returns.shape == (2,) and returns[0] == evaluate(agent, cfg, 1, cfg.seed)[0][0]
    refused(play.Play, run, render=True, video="a.mp4", says="exclude each other")


# ---- Videos

def frames(file):
    """Return the frames of a video, [T, H, W, 3]."""
    return np.stack([np.asarray(frame) for frame in imageio.get_reader(file)])


@pytest.mark.parametrize("env", ["Pendulum-v1", "CartPole-v1"])
def test_a_video_shows_the_first_evaluated_episode(trained, env, capsys):
    Path("folder").mkdir()
    Path("folder/mine.mp4").write_text("an older one")
    run = str(trained[env][0])
    returns = play.main(play.Play(run, episodes=1, video="folder/mine.mp4", seed=4))
    assert os.listdir("folder") == ["mine.mp4"]     # this name, and nothing left beside it
    said = capsys.readouterr().out
    length = int(re.search(r"in (\d+) steps", said)[1])
    assert f"with return {returns[0]:.2f}" in said and len(frames("folder/mine.mp4")) == length
    assert frames("folder/mine.mp4").shape[1:] == {"Pendulum-v1": (500, 500, 3),
                                                   "CartPole-v1": (400, 600, 3)}[env]


def test_gif_is_small(trained):
    """Pendulum has 30 frames per second of 500 pixels, which is too much for a GIF."""
    play.main(play.Play(str(trained["Pendulum-v1"][0]), 1, video="run.gif"))
    shown = frames("run.gif")
    assert shown.shape == (20, 167, 167, 3)                                 # of 40
    red = (shown[..., 0] > 180) & (shown[..., 1] < 100)                     # the pendulum
    assert 0.005 < red[0].mean() < 0.1 and 0.005 < red[-1].mean() < 0.1
    assert (red[0] != red[-1]).mean() > 0.005                               # it has moved
    assert os.path.getsize("run.gif") < 100_000


class Odd(Ends):
    """An environment that draws what a test asks for."""

    metadata = {"render_modes": ["rgb_array"]}
    frame = None

    def __init__(self, render_mode=None):
        super().__init__()

    def render(self):
        return self.frame


gym.register("OddFrames-v0", Odd, disable_env_checker=True)


@pytest.mark.parametrize("frame", [None, np.full((8, 8, 3), 2.0), np.zeros((8, 8, 2), np.uint8)])
def test_what_cannot_be_drawn_is_refused_before_it_is_played(trained, monkeypatch, frame):
    monkeypatch.setattr(Odd, "frame", frame)
    monkeypatch.setattr(play, "evaluate", lambda *args: pytest.fail("it was played"))
    asked = play.Play(str(trained["OddFrames-v0"][0]), video="run.mp4")
    refused(play.main, asked, says="cannot draw OddFrames-v0 here: render.. returned")


@pytest.mark.parametrize("shape", [(16, 12, 3), (33, 57, 3), (16, 12, 4), (16, 12)])  # RGBA, grey
def test_frames_of_any_size_are_written(trained, monkeypatch, shape, capfd):
    _, agent, cfg = trained["OddFrames-v0"]
    monkeypatch.setattr(Odd, "frame", np.full(shape, 200, np.uint8))
    for name, size in (("run.mp4", (shape[0] + shape[0] % 2, shape[1] + shape[1] % 2)),
                       ("run.gif", shape[:2])):
        _, length = film.write_video(agent, cfg, film.make_drawn(cfg, name), name, seed=1)
        shown = frames(name)
        assert shown.shape[1:] == (*size, 3)                    # of an .mp4 both sides are even
        assert abs(shown.mean() - 200) < 5
    seconds = imageio.get_reader(name).get_meta_data()["duration"] * len(shown) / 1000
    assert seconds == pytest.approx(length / 30, rel=0.15)      # the rate of what tells none
    assert capfd.readouterr().err == ""


def test_who_waits_for_a_policy_without_noise_is_told_of_it(run, capsys):
    for stochastic in (False, True):
        asked = play.Play(str(run), 1, stochastic=stochastic, max_steps=9)
        error = refused(play.main, asked, says="within 9 steps .*--max-steps")
        for told in (capsys.readouterr().out, error):
            assert ("--stochastic" in told) != stochastic


def test_minatar_is_drawn_as_bytes_and_large():
    with warnings.catch_warnings(action="error"):  # Gymnasium's about floats is not for players
        picture = film.draw(film.make_drawn(ppo.Config("MinAtar/Breakout-v1"), "a.gif"))
    assert picture.shape == (160, 160, 3) and picture.dtype == np.uint8 and picture.max() > 100


def test_a_film_of_an_endless_episode_is_cut(trained, capsys):
    """And not evaluated: what a good policy does in ten endless episodes nobody would see."""
    run = str(trained["Pendulum-v1"][0])
    for most, said in (39, "39 steps; the episode goes on"), (
            40, "in 40 steps; now 1 that are not drawn\n1 episodes: "):
        play.main(play.Play(run, 1, video="run.mp4", max_steps=most))
        assert said in capsys.readouterr().out and len(frames("run.mp4")) == most


def test_neither_a_long_gif_nor_many_episodes_fill_memory(trained, monkeypatch):
    run, agent, cfg = trained["Pendulum-v1"]
    monkeypatch.setattr(film, "MOST_FRAMES", 3)
    for name, most in ("run.gif", 3), ("run.mp4", 40):
        assert film.write_video(agent, cfg, film.make_drawn(cfg, name), name, seed=1)[1] == 40
        assert len(frames(name)) == most
    monkeypatch.setattr(play, "MOST_ENVS", 2)
    numbers = noted(monkeypatch, play, "evaluate", lambda agent, cfg, episodes, *_: episodes)
    returns = play.main(play.Play(str(run), 5))
    assert numbers == [2, 2, 1] and len(set(returns)) == 5


def test_a_film_acts_as_asked_and_forgets_where_an_episode_ends(trained, monkeypatch):
    _, agent, cfg = trained["Pendulum-v1"]
    forgot = noted(monkeypatch, type(agent), "forget", lambda self, done=None: done)
    drawn, how = film.make_drawn(cfg, "a.gif"), {"seed": 1, "deterministic": False}
    ways = noted(monkeypatch, type(agent), "act", lambda self, obs, deterministic: deterministic)
    film.write_video(agent, cfg, drawn, "a.gif", **how)
    assert ways == [False] * 40 and forgot[0] is None
    assert np.concatenate(forgot[1:]).tolist() == [False] * 39 + [True]


def test_a_video_that_fails_leaves_nothing(trained, monkeypatch):
    """A disk without space, a package that is not installed. A .gif needs no FFmpeg."""
    run = str(trained["CartPole-v1"][0])
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", shutil.which("false"))
    asked = play.Play(run, 1, video="run.mp4")
    refused(play.main, asked, says="--video run.mp4 cannot be written")
    for package in ("imageio_ffmpeg", "imageio"):
        monkeypatch.setitem(sys.modules, package, None)         # any import of it now fails
        refused(play.main, asked, says=rf"{package}.*A film needs pip install 'imageio")
        if package == "imageio_ffmpeg":
            play.main(play.Play(run, 1, video="run.gif"))
            Path("run.gif").unlink()


def test_an_atari_video_shows_the_game_that_the_agent_plays(monkeypatch):
    kwargs = '{"max_num_frames_per_episode": 120}'
    cfg = ppo.Config("ALE/Pong-v5", kwargs, total_steps=16, num_envs=2, rollout_steps=16,
                     minibatch_size=8, epochs=1, run_dir="run")
    agent = ppo.train(cfg)
    seen = noted(monkeypatch, agent, "act", lambda obs, *how: obs[0].copy())
    drawn = film.make_drawn(cfg, "pong.mp4")
    ret, length = film.write_video(agent, cfg, drawn, "pong.mp4", seed=1)
    assert length == len(seen) == 30 and ret == int(ret)
    shown = frames("pong.mp4")
    assert shown.shape == (30, 210, 160, 3)
    assert np.ptp(shown[..., :2].astype(int), axis=-1).max() > 50       # in colour
    grey = torch.from_numpy(shown @ [0.299, 0.587, 0.114])
    for picture, obs in zip(adaptive_avg_pool2d(grey, 84).numpy(), seen):       # an mp4 is lossy
        assert np.abs(picture - obs[-1]).mean() < 6


def test_the_screen_follows_the_game_frame_by_frame():
    """Its stickiness, the ends of lives and FIRE, too: a small ball elsewhere is easily missed."""
    cfg, acts = ppo.Config("ALE/Breakout-v5", '{"episodic_life": true}'), np.random.default_rng(1)
    game, screen = make_envs(cfg, 1), film.make_drawn(cfg, "a.mp4")
    for envs in (game, screen):
        envs.reset(seed=1)
    for _ in range(300):
        act = acts.integers(4, size=1)
        ends = [envs.step(act)[1:4] for envs in (game, screen)]
        assert ends[0] == ends[1] and game.lives == screen.lives
    assert game.lives < 5


@pytest.mark.parametrize("env, camera, floor", [("HalfCheetah-v5", 0, 4000),
                                                ("InvertedPendulum-v5", -1, None)])
def test_which_camera_draws(env, camera, floor):
    """One that moves with the robot, or Gymnasium's (-1) if there is none. It sees a floor."""
    view = gym.make(env, render_mode="rgb_array")
    film.follow_robot(view.unwrapped)
    assert view.unwrapped.mujoco_renderer.camera_id == camera
    assert floor is None or view.unwrapped.model.geom("floor").size[0] == floor


@pytest.mark.slow
@pytest.mark.skipif(not find_library("EGL"), reason="no EGL here")
def test_mujoco_is_drawn_without_a_display():
    """In a process of its own, since MuJoCo chooses how to draw when it is imported."""
    def draw(file, **env):
        command = [sys.executable, "-m", "utils.play", "run", "--episodes", "1", "--video", file]
        return subprocess.run(command, text=True, capture_output=True, env=shown | env)

    shown = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MUJOCO_GL")}
    kwargs = '{"max_episode_steps": 4}'
    ppo.train(ppo.Config("Hopper-v5", kwargs, run_dir="run", hidden=(16,), **SMALL))
    done = draw("run.mp4")
    assert done.returncode == 0, done.stderr
    assert frames("run.mp4")[0].std() > 10
    failed = draw("other.mp4", MUJOCO_GL="nonsense")
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert "MUJOCO_GL: nonsense" in failed.stderr
    assert sorted(os.listdir()) == ["run", "run.mp4"]
