"""`utils.play`: what it loads is the agent that was trained, and what it refuses."""
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from algos import dqn, ppo, sac
from tests.envs import Ends
from tests.helpers import rows
from utils import checkpoint, play, video
from utils.envs import evaluate
from utils.mpi import UsageError

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
SMALL = {"total_steps": 512, "rollout_steps": 256, "minibatch_size": 64, "epochs": 2, "num_envs": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run directory, agent as training left it, Config) of two short runs, by environment."""
    runs = {}
    for env in ("Pendulum-v1", "CartPole-v1"):
        run = tmp_path_factory.mktemp("runs") / env
        cfg = ppo.Config(env, '{"max_episode_steps": 40}', run_dir=str(run), eval_every=256,
                         hidden=(16,), **SMALL)
        runs[env] = run, ppo.train(cfg), cfg
    return runs


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the Pendulum run, to be damaged."""
    return Path(shutil.copytree(trained["Pendulum-v1"][0], tmp_path / "run"))


@pytest.mark.parametrize("env", ["Pendulum-v1", "CartPole-v1"])
def test_loaded_agent_acts_as_the_trained_one(trained, env):
    run, agent, _ = trained[env]
    loaded, plain = play.load_agent(run), gym.make(env)
    rng = np.random.default_rng(0)
    raw = rng.normal(1, 3, (64, *plain.observation_space.shape)).astype(np.float32)
    assert torch.equal(loaded.act(raw, deterministic=True), agent.act(raw, deterministic=True))
    state = agent.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    for name, value in loaded.state_dict().items():
        assert value.dtype == state[name].dtype and torch.equal(value, state[name]), name
    obs, _ = plain.reset(seed=0)
    act = loaded.predict(obs)
    assert plain.action_space.contains(act)
    assert np.array_equal(act, agent.predict(obs))


def test_statistics_are_part_of_what_is_loaded(trained):
    """Weights alone would act otherwise: the run must have statistics for the test above to see."""
    run, agent, cfg = trained["Pendulum-v1"]
    plain = gym.make("Pendulum-v1")
    bare = ppo.Agent(plain.observation_space, plain.action_space, cfg)
    torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(agent.parameters()), bare.parameters())
    raw = np.ones((1, 3), np.float32)
    assert not torch.equal(bare.act(raw, True), play.load_agent(run).act(raw, True))


def test_loaded_agent_samples_as_the_trained_one(trained):
    """A deviation that is lost would be seen here."""
    run, agent, _ = trained["Pendulum-v1"]
    raw = np.ones((8, 3), np.float32)
    samples = []
    for one in (agent, play.load_agent(run)):
        torch.manual_seed(3)
        samples.append(one.act(raw))
    assert torch.equal(*samples)
    assert len(samples[0].unique()) == 8


def test_a_run_in_progress_is_loaded(trained, run):
    """Whatever is half written beside the policy: it is replaced whole."""
    shutil.rmtree(next(run.glob("resume-*")))
    (run / "policy.pt.tmp").write_bytes(b"half")
    (run / "progress.csv").write_text("step,time\n25")
    assert torch.equal(play.load_agent(run).log_std, trained["Pendulum-v1"][1].log_std)


def test_best_is_the_best_evaluation(trained, run):
    best = checkpoint.load_file(run / "best.pt")
    best["agent"]["log_std"] = torch.full_like(best["agent"]["log_std"], -7.0)
    checkpoint.save_file(run / "best.pt", best)
    assert play.load_agent(run, best=True).log_std == -7
    assert play.load_agent(run).log_std != -7


def test_figures_are_those_of_evaluate(trained, capsys):
    run, agent, cfg = trained["Pendulum-v1"]
    returns = play.main(play.Play(str(run), episodes=3))
    expected = evaluate(agent, cfg, 3, cfg.seed)[0]
    assert np.allclose(returns, expected, rtol=1e-5)    # parameters lie elsewhere in memory
    shown = capsys.readouterr().out
    for value in (returns.mean(), returns.std(), returns.min(), returns.max()):
        assert f" {value:.2f}" in shown
    assert "length mean 40.0" in shown
    for seed in (0, 5):
        other = play.main(play.Play(str(run), episodes=3, seed=seed))
        assert np.allclose(other, evaluate(agent, cfg, 3, seed)[0], rtol=1e-5)
        assert not np.allclose(other, expected)


OFF_POLICY = {"total_steps": 200, "report_every": 100, "start_steps": 50, "batch_size": 16,
              "buffer_size": 200}
SETTINGS = [                                        # all that may change how an agent acts
    *[(ppo, env, more) for env in ("Pendulum-v1", "CartPole-v1")
      for more in ({}, {"norm_obs": False}, {"hidden": ()}, {"hidden": (64, 64), "std_init": 0.3},
                   {"std_init": 0.5, "scale_rew": False})],
    *[(sac, "Pendulum-v1", more)
      for more in ({}, {"hidden": (64, 64)}, {"learn_alpha": False}, {"target_entropy": -3.0})],
    *[(dqn, "CartPole-v1", more)
      for more in ({}, {"dueling": False}, {"double": False, "hidden": ()}, {"eps_end": 0.5})],
]


@pytest.mark.parametrize("algo, env, more", SETTINGS,
                         ids=[f"{algo.__name__}-{env}-{more}" for algo, env, more in SETTINGS])
def test_returns_are_those_of_trainings_own_evaluation(algo, env, more):
    """To the bit: the last one, which was made with the weights that were saved."""
    settings = {"hidden": (16,)} | (SMALL if algo is ppo else OFF_POLICY) | more
    algo.train(algo.Config(env=env, env_kwargs='{"max_episode_steps": 60}', run_dir="run",
                           eval_every=1, **settings))
    returns = play.main(play.Play("run"))
    last = rows("run")[-1]
    for name in ("mean", "std", "min", "max"):
        assert float(last[f"eval_ret_{name}"]) == getattr(returns, name)()


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
        returns = evaluate(play.load_agent(run, **kwargs), cfg, 3, cfg.seed)[0]
        assert np.allclose(shown, returns, rtol=1e-5)
    assert not np.allclose(shown, evaluate(play.load_agent(run), cfg, 3, cfg.seed)[0])


def test_stochastic_samples_and_repeats(trained):
    run = str(trained["Pendulum-v1"][0])
    first, again = (play.main(play.Play(run, 2, stochastic=True)) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.allclose(first, play.main(play.Play(run, 2)))


def test_an_episode_that_never_ends_is_refused(trained):
    """Pendulum has no other end than its time limit."""
    run = str(trained["Pendulum-v1"][0])
    play.main(play.Play(run, episodes=2, max_steps=40))
    with pytest.raises(UsageError, match="--max-steps is 39, but 2 of 2 episodes of"):
        play.main(play.Play(run, episodes=2, max_steps=39))


def test_a_run_from_a_machine_with_more_cores(run, monkeypatch):
    rewrite(run, torch_threads=14)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert play.read_run(run)[1].torch_threads == 1
    play.main(play.Play(str(run), episodes=1))
    assert torch.get_num_threads() == 1


# ---- What is refused

def rewrite(run, **settings):
    config = json.loads((run / "config.json").read_text())
    config["settings"] |= settings
    (run / "config.json").write_text(json.dumps(config))


def name_module(run, name):
    config = json.loads((run / "config.json").read_text()) | {"module": name}
    (run / "config.json").write_text(json.dumps(config))
    Path("evil.py").write_text("open('executed', 'w')")


def hide(file):
    """Put a directory in the place of a file. Permissions do not stop root."""
    file.unlink()
    file.mkdir()


def move(run, to):
    kept = run.with_name("kept")
    run.rename(kept)
    to.parent.mkdir(parents=True)
    kept.rename(to)


def flip_bit(run):
    data = bytearray((run / "policy.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (run / "policy.pt").write_bytes(data)


REFUSED = {
    "missing": (shutil.rmtree, "holds no run"),
    "empty": (lambda run: [shutil.rmtree(run), run.mkdir()], "holds no run"),
    "config cut off": (lambda run: os.truncate(run / "config.json", 40), "config.json is damaged"),
    "no policy": (lambda run: (run / "policy.pt").unlink(), "there is no"),
    "policy cut off": (lambda run: os.truncate(run / "policy.pt", 3000), "policy.pt is damaged"),
    "bit flipped": (flip_bit, "policy.pt is damaged"),
    "no such setting": (lambda run: rewrite(run, gama=1), "'gama'"),
    "setting out of range": (lambda run: rewrite(run, gamma=2.0), "--gamma is 2.0"),
    "no directory": (lambda run: [shutil.rmtree(run), run.touch()], "a run is a directory"),
    "runs below": (lambda run: move(run, run / "a/b"), r"there is one in \S*run/a/b"),
    "config unreadable": (lambda run: hide(run / "config.json"), "config.json cannot be read: Is"),
    "policy unreadable": (lambda run: hide(run / "policy.pt"), "policy.pt cannot be read: Is a"),
    "code unreadable": (lambda run: hide(run / "algo.py"), "algo.py cannot be read: Is a"),
    "other sizes": (lambda run: rewrite(run, hidden=[17]), r"actor\.0\.weight is \[16, 3\]"),
    "other algorithm": (lambda run: name_module(run, "algos.nothing"), "no algos/nothing.py"),
    "code of theirs": (lambda run: name_module(run, "evil"), "evil; only files in algos/"),
    "code of a known name": (lambda run: name_module(run, "evil.ppo"), "evil.ppo; only files"),
    "hidden code of theirs": (lambda run: name_module(run, "algos.evil"), "no algos/evil.py"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(run, case, monkeypatch):
    damage, message = REFUSED[case]
    monkeypatch.syspath_prepend(os.getcwd())
    damage(run)
    with pytest.raises(UsageError, match=message) as caught:
        play.load_agent(run)
    assert caught.value.code == 2
    assert not Path("executed").exists()


def test_best_is_refused_where_nothing_was_evaluated(run):
    (run / "best.pt").unlink()
    with pytest.raises(UsageError, match="--eval-every writes one"):
        play.load_agent(run, best=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_where_there_is_none(trained):
    with pytest.raises(UsageError, match="no GPU here"):
        play.load_agent(trained["CartPole-v1"][0], device="cuda")
    assert not next(play.load_agent(trained["CartPole-v1"][0], device="auto").parameters()).is_cuda


@pytest.mark.parametrize("name, message", [
    ("run.avi", r"must end in \.mp4 or \.gif"), ("nowhere/run.mp4", "no directory to write in"),
    ("folder.gif", "this is a directory"),
])
def test_refused_video(trained, name, message):
    Path("folder.gif").mkdir()
    with pytest.raises(UsageError, match=message):
        play.main(play.Play(str(trained["CartPole-v1"][0]), video=name))


def test_video_without_ffmpeg(trained, monkeypatch):
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[video\]'"):
        play.main(play.Play(str(trained["CartPole-v1"][0]), video="run.mp4"))


def command_line(*args, program=("-m", "utils.play"), **env):
    """`python -m utils.play` on a machine without a display.

    It is a process of its own, since MuJoCo chooses how to draw when it is imported.
    """
    shown = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MUJOCO_GL")}
    return subprocess.run([sys.executable, *program, *map(str, args)], text=True,
                          capture_output=True, env=shown | env)


def skip_without_display(done):
    """Skip where nothing can draw. The message must then say what is missing."""
    if done.returncode:
        assert done.returncode == 2 and "apt-get install libegl1" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and not list(Path().glob("*.mp4"))
        pytest.skip("no EGL here")


# ---- Videos

def frames(file):
    """Return the frames of a video, [T, H, W, 3]."""
    reader = imageio_ffmpeg.read_frames(str(file))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


def test_video_is_one_whole_episode(trained, capsys):
    Path("folder").mkdir()
    Path("folder/mine.mp4").write_text("an older one")
    run, _, _ = trained["Pendulum-v1"]
    play.main(play.Play(str(run), episodes=1, video="folder/mine.mp4", seed=4))
    assert os.listdir("folder") == ["mine.mp4"]     # this name, and nothing left beside it
    obs, _ = (env := gym.make("Pendulum-v1", max_episode_steps=40)).reset(seed=4)
    agent, ret, truncated = play.load_agent(run), 0.0, False
    while not truncated:
        obs, rew, _, truncated, _ = env.step(agent.predict(obs))
        ret += rew
    assert f"return {ret:.2f}, 40 steps" in capsys.readouterr().out
    shown = frames("folder/mine.mp4")
    assert shown[0].shape == (500, 500, 3)
    assert len(shown) == 41                         # the first frame is of the reset


def test_gif_is_small_and_of_the_first_seconds(trained, capsys):
    """Pendulum has 30 frames per second of 500 pixels, which is too much for a GIF."""
    play.main(play.Play(str(trained["Pendulum-v1"][0]), 1, video="run.gif", seconds=1.0))
    assert "run.gif: the first 30 steps" in capsys.readouterr().out
    shown = frames("run.gif")
    assert shown.shape[1:] == (240, 240, 3) and len(shown) in (20, 21)      # in 31/30 seconds
    red = (shown[..., 0] > 180) & (shown[..., 1] < 100)                     # the pendulum
    assert 0.005 < red[0].mean() < 0.1 and 0.005 < red[-1].mean() < 0.1
    assert (red[0] != red[-1]).mean() > 0.005                               # it has moved
    assert os.path.getsize("run.gif") < 100_000


def test_seconds_beyond_the_episode_change_nothing(trained, capsys):
    play.main(play.Play(str(trained["CartPole-v1"][0]), 1, video="run.mp4", seconds=99.0))
    assert "run.mp4: return" in capsys.readouterr().out
    assert frames("run.mp4").shape[1:] == (400, 600, 3)


def test_progress_is_on_the_terminal(trained, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    play.main(play.Play(str(trained["Pendulum-v1"][0]), 1, video="run.mp4"))
    assert "run.mp4" in terminal.getvalue() and "/40 " in terminal.getvalue()


def test_what_cannot_be_drawn_is_refused_before_it_is_played(monkeypatch):
    ppo.train(ppo.Config("tests.envs:Ends-v0", run_dir="run", hidden=(16,), **SMALL))
    monkeypatch.setattr(play, "evaluate", lambda *args: pytest.fail("it was played"))
    with pytest.raises(UsageError, match="tests.envs:Ends-v0 cannot be drawn here"):
        play.main(play.Play("run", video="run.mp4"))
    assert os.listdir() == ["run"]


class Odd(Ends):
    """An environment that draws something else than pictures."""

    metadata = {"render_modes": ["rgb_array"]}
    frame = None

    def __init__(self, render_mode):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return self.frame


gym.register("OddFrames-v0", Odd, disable_env_checker=True)


@pytest.mark.parametrize("frame", [None, np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3)),
                                   np.zeros((8, 8, 4), np.uint8), [np.zeros((8, 8, 3), np.uint8)]])
def test_frames_that_are_no_pictures_are_refused(monkeypatch, frame):
    monkeypatch.setattr(Odd, "frame", frame)
    with pytest.raises(UsageError, match="OddFrames-v0 cannot be drawn here: render.. returned"):
        video.make_view(ppo.Config("OddFrames-v0"))


@pytest.mark.parametrize("shape", [(16, 12, 3), (33, 57, 3)])
def test_frames_of_any_size_are_written(monkeypatch, shape):
    monkeypatch.setattr(Odd, "frame", np.full(shape, 200, np.uint8))
    agent = ppo.train(ppo.Config("tests.envs:Ends-v0", run_dir="run", hidden=(16,), **SMALL))
    for name, size in (("run.mp4", (shape[0] + shape[0] % 2, shape[1] + shape[1] % 2)),
                       ("run.gif", shape[:2])):
        video.record(agent, video.make_view(ppo.Config("OddFrames-v0")), name, seed=1)
        shown = frames(name)
        assert shown.shape[1:] == (*size, 3)                    # of an .mp4 both sides are even
        assert abs(shown[:, :shape[0], :shape[1]].mean() - 200) < 5


@pytest.mark.parametrize("name", ["run.mp4", "run.gif"])
def test_a_video_that_cannot_be_written_leaves_nothing(trained, monkeypatch, name):
    """As on a full disk: FFmpeg ends with an error."""
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: shutil.which("false"))
    with pytest.raises(UsageError, match=f"--video {name} cannot be written"):
        play.main(play.Play(str(trained["Pendulum-v1"][0]), 1, video=name))
    assert not os.listdir()


def test_ctrl_c_ends_with_one_line(trained):
    command = [sys.executable, "-u", "-m", "utils.play", str(trained["Pendulum-v1"][0]),
               "--episodes", "100000"]
    env = os.environ | {"PYTHONPATH": str(Path(play.__file__).parents[1])}
    # A script's background jobs ignore Ctrl-C, and so would all that they start.
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, preexec_fn=lambda: signal.signal(signal.SIGINT,
                                                                      signal.SIG_DFL)) as process:
        assert process.stdout.readline().startswith("Pendulum-v1")
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    assert err.splitlines()[-1] == "stopped by Ctrl-C; no file was written"
    assert "Traceback" not in err


def test_a_recorded_episode_has_at_most_max_steps(trained):
    run, agent, cfg = trained["Pendulum-v1"]
    assert video.record(agent, video.make_view(cfg), "run.mp4", 1, max_steps=40)[1] == 40
    with pytest.raises(UsageError, match="--max-steps is 39, but the episode in other.mp4"):
        video.record(agent, video.make_view(cfg), "other.mp4", 1, max_steps=39)
    assert os.listdir() == ["run.mp4"]


DRAW = """
import sys
from types import SimpleNamespace
from utils import video
video.prepare_video("run.mp4")
import gymnasium as gym, numpy as np
from gymnasium.envs.mujoco import MujocoEnv

SMALL = '{"width": 120, "height": 120}'             # quick

class Ball(MujocoEnv):                              # without a camera
    metadata = {"render_modes": ["rgb_array"], "render_fps": 500}

    def __init__(self, **kwargs):
        super().__init__(sys.argv[1] + "/ball.xml", 1, gym.spaces.Box(-1, 1, (7,)), **kwargs)

    def reset_model(self):
        return self.data.qpos.astype(np.float32)

    def step(self, act):
        self.do_simulation(act, self.frame_skip)
        return self.data.qpos.astype(np.float32), 0.0, False, False, {}

class Runner:                                       # carries the robot 30 m away
    def __init__(self, env):
        self.env = env

    def act(self, obs, deterministic):
        self.env.data.qpos[0] = 30
        return np.zeros((1, self.env.model.nu), np.float32)

    def env_act(self, act):
        return act

gym.register("Ball-v0", Ball)
for name, hidden in [(name, hidden) for name in sys.argv[2:] for hidden in (False, True)]:
    view = video.make_view(SimpleNamespace(env=name, env_kwargs=SMALL, seed=1))
    model, fps = view.unwrapped.model, view.metadata["render_fps"]
    if hidden:
        robot = model.geom_bodyid > 0
        model.geom_matid[robot], model.geom_rgba[robot, 3] = -1, 0
    video.record(Runner(view.unwrapped), view, f"{name}-{hidden}.mp4", 1, seconds=1 / fps)
    del view                                        # one graphics context at a time
"""
BALL = """<mujoco><statistic extent="3"/><worldbody><light pos="0 0 9" diffuse="1 1 1"/>
<geom type="plane" size="99 99 1"/><body pos="0 0 1"><freejoint/><geom size="0.5" rgba="1 0 0 1"/>
</body></worldbody></mujoco>"""


def test_the_camera_follows_the_robot():
    """In the last frame is more than the floor: the same without the robot is another picture."""
    Path("ball.xml").write_text(BALL)
    names = "HalfCheetah-v4", "HalfCheetah-v5", "Ant-v5", "Ball-v0"
    done = command_line(os.getcwd(), *names, program=["-c", DRAW])
    skip_without_display(done)
    for name in names:
        last, floor = (frames(f"{name}-{hidden}.mp4")[-1].astype(int) for hidden in (False, True))
        assert (np.abs(last - floor).max(-1) > 40).mean() > 0.01, name


@pytest.mark.parametrize("env, kwargs, camera", [
    ("HalfCheetah-v5", {}, 0), ("Humanoid-v5", {}, 0), ("InvertedPendulum-v5", {}, -1),
    ("Reacher-v5", {}, -1), ("HalfCheetah-v5", {"camera_id": -1}, -1),
    ("HalfCheetah-v5", {"default_camera_config": {"distance": 9.0}}, -1)])
def test_which_camera_draws(env, kwargs, camera):
    """Gymnasium's (-1) if the robot stays where it is, or if the environment was told."""
    view = gym.make(env, render_mode="rgb_array", **kwargs)
    video.follow_robot(view)
    assert view.unwrapped.mujoco_renderer.camera_id == camera


@pytest.mark.slow
def test_mujoco_is_drawn_without_a_display():
    kwargs = '{"max_episode_steps": 4}'
    ppo.train(ppo.Config("Hopper-v5", kwargs, run_dir="run", hidden=(16,), **SMALL))
    done = command_line("run", "--episodes", 1, "--video", "run.mp4")
    skip_without_display(done)
    assert frames("run.mp4")[0].std() > 10
    failed = command_line("run", "--video", "other.mp4", MUJOCO_GL="nonsense")
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert "MUJOCO_GL=nonsense" in failed.stderr and "libegl1" in failed.stderr
    assert sorted(os.listdir()) == ["run", "run.mp4"]


class OneGame:
    """A vector of one like ale-py's: `step` returns the next episode's obs, in the same array."""

    single_observation_space = gym.spaces.Box(0, 255, (4, 36, 36), np.uint8)
    single_action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None):
        self.obs = np.full((1, 4, 36, 36), 10, np.uint8)
        return self.obs, {}

    def step(self, act):
        self.obs[:] = self.obs[0, 0, 0, 0] + 1
        self.obs[:, -1] += 100                      # the newest of the four is brighter
        done = self.obs[0, 0, 0, 0] == 12
        if done:
            self.obs[:] = 10
        one = np.array([done])
        episode = {"r": np.array([7.0]), "l": np.array([2])}
        return self.obs, np.array([1.0]), one, ~one & False, {"episode": episode} if done else {}


def test_atari_view_ends_with_its_own_episode():
    view = video.AgentsView(OneGame())
    first, _ = view.reset(seed=1)
    second, _, terminated, truncated, info = view.step(0)
    assert (first[0, 0, 0], second[0, 0, 0]) == (10, 11) and not (terminated or truncated or info)
    assert view.render().shape == (36, 36, 3) and (view.render() == 111).all()
    *_, terminated, truncated, info = view.step(0)
    assert terminated and not truncated and info["episode"] == {"r": 7.0, "l": 2}
    assert (view.render() == 111).all()             # not the first picture of the next episode


def test_atari_video_shows_what_the_agent_sees():
    pytest.importorskip("ale_py")
    kwargs = '{"max_num_frames_per_episode": 120}'
    cfg = ppo.Config("ALE/Pong-v5", kwargs, total_steps=16, num_envs=2, rollout_steps=16,
                     minibatch_size=8, epochs=1, run_dir="run")
    ppo.train(cfg)
    _, cfg, _ = play.read_run("run")
    agent, seen = play.load_agent("run"), []
    act = agent.act
    agent.act = lambda obs, deterministic: seen.append(obs[0]) or act(obs, deterministic)
    ret, length = video.record(agent, video.make_view(cfg), "pong.mp4", seed=1)
    assert length == len(seen) == 30 and ret == int(ret)
    shown = frames("pong.mp4")
    assert len(shown) == 31 and shown[0].shape == (84, 84, 3)
    for picture, obs in zip(shown, seen):       # an mp4 is lossy
        assert obs.shape == (4, 84, 84)
        assert np.abs(picture.mean(-1) - obs[-1]).mean() < 6
