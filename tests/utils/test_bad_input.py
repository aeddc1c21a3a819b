"""What is refused, and how: one message that names the flag, exit status 2, nothing written.

And what goes wrong later: a loss or an environment that turns NaN is named with its step.
"""
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from algos import ppo
from tests import envs  # noqa: F401  registers its environments, Faulty-v0 among them
from tests.helpers import (
    PATIENCE,
    ROOT,
    mpirun,
    snapshot,
)
from utils import checkpoint
from utils.mpi import UsageError
from utils.run import parse

TINY = {"env": "CartPole-v1", "num_envs": 2, "rollout_steps": 64, "minibatch_size": 32, "epochs": 1,
        "hidden": (8,), "total_steps": 64}
FLAGS = ("--env CartPole-v1 --num-envs 2 --rollout-steps 64 --minibatch-size 32 --epochs 1 "
         "--hidden 8").split()


@pytest.fixture(autouse=True)
def stay_here(monkeypatch):
    """What should have been refused must not turn the test process into mpiexec."""
    def refuse(*args):
        raise AssertionError(f"would run {args}")
    monkeypatch.setattr(os, "execve", refuse)


@pytest.fixture
def refusal(capfd):
    """Call it with command-line flags, or with a Config: the message with which it is refused."""
    def refuse(*args):
        before = snapshot(".")
        with pytest.raises(SystemExit) as caught:
            if args and dataclasses.is_dataclass(args[0]):
                ppo.train(*args)
            else:
                ppo.train(parse(ppo.Config, ppo.__doc__, args))
        message = plain(capfd.readouterr().err)
        assert caught.value.code == 2, message
        assert snapshot(".") == before, "something was written"
        assert_is_one_message(message)
        if isinstance(caught.value, UsageError):
            assert message == f"error: {caught.value}"
        return message
    return refuse


def plain(text):
    """Without colours, frames and the breaking of lines that a terminal gets."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[─-╿]|-{9,}", " ", text).split())


def assert_is_one_message(message):
    assert message and len(message) < 600, message
    assert message.count("error: ") <= 1
    for word in ("Traceback", "File \"", "Warning", "<class"):
        assert word not in message


def program(*args, **env):
    """`python -m algos.ppo ARGS`, in a process of its own."""
    return subprocess.run([sys.executable, "-m", "algos.ppo", *map(str, args)],
                          capture_output=True, text=True, timeout=PATIENCE, env=os.environ | env)


# ---- Flags

@pytest.mark.parametrize("flags,flag,takes", [
    ("--gamma 1.5", "--gamma is 1.5", "at least 0, at most 1"),
    ("--gamma -0.1", "--gamma is -0.1", "at least 0, at most 1"),
    ("--gamma nan", "--gamma is nan", "at least 0, at most 1"),
    ("--lam 1.01", "--lam is 1.01", "at least 0, at most 1"),
    ("--lam nan", "--lam is nan", "at least 0, at most 1"),
    ("--lam inf", "--lam is inf", "at least 0, at most 1"),
    ("--total-steps 0", "--total-steps is 0", "a whole number, at least 1"),
    ("--total-steps -1e6", "--total-steps is -1000000", "a whole number, at least 1"),
    ("--total-steps inf", "--total-steps is inf", "a whole number, at least 1"),
    ("--total-steps nan", "--total-steps is nan", "a whole number, at least 1"),
    ("--total-steps 1e400", "--total-steps is inf", "a whole number, at least 1"),
    ("--total-steps 1000.5", "--total-steps is 1000.5", "a whole number"),
    ("--hidden 64 0", "--hidden is (64, 0)", "a whole number, above 0"),
    ("--hidden -1", "--hidden is (-1,)", "a whole number, above 0"),
    *((f"--{name} {value}", f"--{name} is {value}", "a whole number, at least 1")
      for name in ("num-envs", "num-procs", "torch-threads", "rollout-steps", "epochs")
      for value in (0, -8)),
    ("--minibatch-size 1", "--minibatch-size is 1", "a whole number, at least 2"),
    ("--minibatch-size 0 --no-norm-adv", "--minibatch-size is 0", "a whole number, at least 1"),
    *((f"--{name} -1", f"--{name} is -1", "at least 0")
      for name in ("seed", "eval-every", "vf-coef", "ent-coef", "max-grad-norm", "target-kl")),
    *((f"--{name} {value}", f"--{name} is {value}", "above 0")
      for name in ("lr", "clip-ratio") for value in ("0", "-0.1", "inf", "nan")),
    *((f"--{name} {value}", f"--{name} is {value}", "at least 0")
      for name in ("vf-coef", "ent-coef", "max-grad-norm", "target-kl")
      for value in ("inf", "nan")),
])
def test_a_number_out_of_range(refusal, flags, flag, takes):
    message = refusal(*flags.split())
    assert flag in message and takes in message


@pytest.mark.parametrize("flags,of,by", [
    ("--rollout-steps 2047", "--rollout-steps is 2047", "--num-envs, which is 8"),
    ("--rollout-steps 96 --minibatch-size 64", "--rollout-steps is 96",
     "--minibatch-size, which is 64"),
    ("--rollout-steps 16 --minibatch-size 64", "--rollout-steps is 16",
     "--minibatch-size, which is 64"),
    ("--num-procs 3", "--num-envs is 8", "--num-procs, which is 3"),
    ("--num-procs 2 --num-envs 5 --rollout-steps 320", "--num-envs is 5",
     "--num-procs, which is 2"),
    ("--num-procs 3 --num-envs 3 --rollout-steps 96 --minibatch-size 32", "--minibatch-size is 32",
     "--num-procs, which is 3"),
])
def test_a_batch_that_does_not_divide(refusal, flags, of, by):
    message = refusal(*flags.split())
    assert of in message and "a multiple of" in message and by in message


@pytest.mark.parametrize("flags,said", [
    ("--num-envs eight", "--num-envs is eight; it takes a whole number"),
    ("--num-envs 8.5", "--num-envs is 8.5; it takes a whole number"),
    ("--rollout-steps 1e-3", "--rollout-steps is 1e-3; it takes a whole number"),
    ("--seed 1.5", "--seed is 1.5; it takes a whole number"),
    ("--lr fast", "--lr is fast; it takes a number, such as"),
    ("--total-steps 1M", "--total-steps is 1M; it takes a number, such as 0.01 or 1e6"),
    ("--gamma 0,99", "--gamma is 0,99; it takes a number"),
    ("--hidden 64 x", "--hidden is x; it takes a whole number"),
    ("--hidden 64,64", "--hidden is 64,64; it takes a whole number, or several with spaces"),
    ("--device tpu", "--device is tpu; it takes auto, cpu or cuda"),
    ("--seed", "--seed needs a value"),
    ("--seed 1 2", "--seed takes 1 value, but got 1 2"),
    ("--norm-obs False", "--norm-obs takes no value, but got False: --norm-obs is on, "
                         "--no-norm-obs off"),
    ("--resume runs/x", "--resume takes no value; --run-dir runs/x names the run"),
    ("CartPole-v1", "CartPole-v1 stands without a flag; did you mean --env CartPole-v1?"),
])
def test_a_value_of_another_kind(refusal, flags, said):
    assert f"error: {said}" in refusal(*flags.split())


@pytest.mark.parametrize("flags,wrong,nearest", [
    ("--totalsteps 5", "--totalsteps", "--total-steps"),
    ("--gama 0.9", "--gama", "--gamma"),
    ("--num-env 8", "--num-env", "--num-envs"),
    ("--mini-batch-size 8", "--mini-batch-size", "--minibatch-size"),
    ("--learning_rate=1", "--learning_rate", "--lr"),
])
def test_an_unknown_flag_and_the_nearest(refusal, flags, wrong, nearest):
    unknown, _, perhaps = refusal(*flags.split()).partition("; did you mean ")
    assert unknown == f"error: there is no {wrong}"
    assert perhaps.startswith(nearest)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(refusal):
    message = refusal(*FLAGS, "--device", "cuda")
    assert "--device" in message and "cuda" in message and "auto" in message and "cpu" in message


def test_several_processes_from_python(refusal):
    message = refusal(ppo.Config(num_procs=2))
    assert "num_procs is 2" in message and "command line" in message


# ---- Environments

@pytest.mark.parametrize("env,named", [
    ("CartPol-v1", "CartPole-v1"),
    ("cartpole-v1", "CartPole-v1"),
    ("CartPole-v7", "CartPole-v1"),
    ("HalfCheeta-v4", "HalfCheetah-v4"),
    ("LunarLander-v2", "LunarLander-v3"),
    ("ALE/Pnog-v5", "ALE/Pong-v5"),
    ("pong", "mean ALE/Pong-v5?"),
    ("halfcheeta-v4", "mean HalfCheetah-v4?"),
    ("halfcheeta", "mean HalfCheetah-v5?"),
    ("nonsense", "nonsense"),
    ("", "ID"),
    ("no_such_package:Env-v0", "No module named 'no_such_package'"),
    ("tests.envs:Conter-v0", "mean tests.envs:Counter-v0"),
])
def test_an_unknown_environment_and_the_nearest(refusal, env, named):
    message = refusal("--env", env)
    assert f"--env is {env}" in message and named in message
    assert message.count("Did you mean") <= 1


def test_an_unknown_atari_game_without_the_extra(refusal, monkeypatch):
    forget(monkeypatch, "ale_py")
    monkeypatch.setitem(sys.modules, "ale_py", None)  # any import of it now fails
    assert "`pong` doesn't exist" in refusal("--env", "pong")


def forget(monkeypatch, package):
    """As if nothing had imported it, or registered its environments, so far."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in gym.registry if name.startswith("ALE/")]:
        monkeypatch.delitem(gym.registry, name)


@pytest.mark.parametrize("env,module,extra", [
    ("ALE/Pong-v5", "ale_py", "atari"),
    ("LunarLander-v3", "Box2D", "box2d"),
    ("CarRacing-v3", "Box2D", "box2d"),
])
def test_an_environment_whose_extra_is_not_installed(refusal, monkeypatch, env, module, extra):
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    forget(monkeypatch, "ale_py")
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)            # any import of it now fails
    message = refusal("--env", env)
    assert f"--env is {env}" in message and f"pip install -e '.[{extra}]'" in message


def test_an_extra_that_is_installed_and_broken(refusal, monkeypatch):
    """As where a library that it needs is missing: its own message helps."""
    Path("ale_py.py").write_text("raise ImportError('libSDL2.so: no such file')")
    monkeypatch.syspath_prepend(".")
    forget(monkeypatch, "ale_py")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert "--env is ALE/Pong-v5" in refusal("--env", "ALE/Pong-v5")


BOX = spaces.Box(-1, 1, (3,))
IMAGE = (64, 64, 3)
OBS = {
    "sequence": (spaces.Sequence(BOX), "Sequence"),
    "sequence in a dict": (spaces.Dict(a=spaces.Sequence(BOX)), "Sequence"),
    "graph": (spaces.Graph(BOX, None), "Graph"),
    "scalar": (spaces.Box(-1, 1, ()), "()"),
    "matrix": (spaces.Box(-1, 1, (4, 5)), "(4, 5)"),
    "grey image": (spaces.Box(0, 255, (84, 84), np.uint8), "(84, 84)"),
    "stacked images": (spaces.Box(0, 255, (4, *IMAGE), np.uint8), "(4, 64, 64, 3)"),
    "float image": (spaces.Box(0, 1, IMAGE), "(64, 64, 3), float32"),
    "int image": (spaces.Box(0, 255, IMAGE, np.int32), "(64, 64, 3), int32"),
    "low image": (spaces.Box(0, 255, (35, 64, 3), np.uint8), "(35, 64, 3)"),
    "narrow image": (spaces.Box(0, 255, (3, 64, 35), np.uint8), "(3, 64, 35)"),
}
ACT = {
    "multi discrete": (spaces.MultiDiscrete([2, 3]), "MultiDiscrete([2 3])"),
    "multi binary": (spaces.MultiBinary(4), "MultiBinary(4)"),
    "dict": (spaces.Dict(a=BOX), "Dict"),
    "tuple": (spaces.Tuple([BOX, BOX]), "Tuple"),
    "text": (spaces.Text(5), "Text"),
    "from one": (spaces.Discrete(3, start=1), "Discrete(3, start=1)"),
    "whole numbers": (spaces.Box(0, 9, (2,), np.int64), "int64"),
    "no bounds": (spaces.Box(-np.inf, np.inf, (2,)), "inf"),
    "half a bound": (spaces.Box(np.float32([0, 0]), np.float32([1, np.inf])), "inf"),
}


class Odd(gym.Env):
    """An environment with one space that is out of the ordinary."""

    def __init__(self, obs="", act=""):
        self.observation_space = OBS[obs][0] if obs else BOX
        self.action_space = ACT[act][0] if act else spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, act):
        return self.observation_space.sample(), 0.0, False, False, {}


gym.register("Odd-v0", Odd)


@pytest.mark.parametrize("kind,spaces", [("obs", OBS), ("act", ACT)])
def test_spaces_that_the_algorithm_cannot_handle(refusal, kind, spaces):
    for name, (_, shown) in spaces.items():
        message = refusal("--env", "Odd-v0", "--env-kwargs", json.dumps({kind: name}))
        assert "--env" in message and shown in message, name
        assert {"obs": "observation", "act": "action"}[kind] in message.partition(";")[0], name
        for fits in {"obs": ("vector", "image", "36"), "act": ("iscrete", "Box")}[kind]:
            assert fits in message.partition(";")[2], name


@pytest.mark.parametrize("kwargs,why", [
    ("{", "line 1"),
    ("gravity=3", "line 1"),
    ("", "line 1"),
    ("[1]", "object"),
    ("3", "object"),
    ("null", "object"),
    ('"a"', "object"),
    ('{"num_envs": 3}', "num_envs"),
])
@pytest.mark.parametrize("env", ["CartPole-v1", "HalfCheetah-v4", "ALE/Pong-v5"])
def test_keyword_arguments_of_no_use(refusal, env, kwargs, why):
    message = refusal("--env", env, "--env-kwargs", kwargs)
    assert f"--env-kwargs is {kwargs}" in message and "JSON object" in message and env in message
    assert why in message


@pytest.mark.parametrize("env", ["CartPole-v1", "HalfCheetah-v4", "ALE/Pong-v5"])
def test_an_unknown_keyword_argument_is_named_in_one_clause(refusal, env):
    assert refusal("--env", env, "--env-kwargs", '{"wind": 1}') == (
        f'error: --env-kwargs is {{"wind": 1}}; {env} has no keyword argument wind')


def test_a_keyword_argument_of_another_kind_is_told_by_the_environment(refusal):
    message = refusal("--env", "Hopper-v4", "--env-kwargs", '{"frame_skip": 1}')
    assert "frame_skip" in message and "raised from" not in message


class Crooked(Odd):
    """Its observations have one number more than its space says."""

    def reset(self, seed=None, options=None):
        return np.zeros(BOX.shape[0] + 1, np.float32), {}


def test_a_wrong_shape_is_explained():
    gym.register("Crooked-v0", Crooked, disable_env_checker=True)
    with pytest.raises(ValueError) as caught:
        ppo.train(ppo.Config(env="Crooked-v0", total_steps=100, run_dir="run", device="cpu"))
    assert "another shape than its observation_space" in caught.value.__notes__[-1]


def test_a_bug_in_an_environment_is_not_blamed_on_the_flags():
    """Its traceback is what helps."""
    class Broken(Odd):
        def __init__(self):
            raise TypeError("a bug")

    gym.register("Broken-v0", Broken)
    with pytest.raises(TypeError, match="a bug"):
        ppo.train(ppo.Config(**TINY | {"env": "Broken-v0"}))
    assert not os.listdir(".")


# ---- Directories and checkpoints

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 64 steps, which --total-steps 128 makes unfinished."""
    run = tmp_path_factory.mktemp("runs") / "run"
    ppo.train(ppo.Config(run_dir=str(run), **TINY))
    return run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, `run` in the current directory."""
    return shutil.copytree(finished, tmp_path / "run")


RESUME = (*FLAGS, "--run-dir", "run", "--total-steps", "128", "--resume")


def test_what_the_tests_below_damage_can_be_resumed(run):
    ppo.train(parse(ppo.Config, ppo.__doc__, RESUME))
    assert (run / "resume-128").exists()


def test_a_directory_that_holds_a_run(refusal, run):
    for left in ("config.json", "policy.pt", "progress.csv", "resume-64"):
        message = refusal(*FLAGS, "--run-dir", "run")
        assert "run holds a run already" in message
        for way_out in ("--resume", "--seed", "--run-dir"):
            assert way_out in message
        assert ("you may remove it" in message) == (not (run / "progress.csv").exists())
        path = run / left
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    ppo.train(parse(ppo.Config, ppo.__doc__, (*FLAGS, "--run-dir", "run", "--total-steps", "64")))


@pytest.mark.parametrize("run_dir", ["file", "file/run", "/dev/null/run", "/proc/run", "a" * 300])
def test_a_directory_that_cannot_be_written(refusal, run_dir):
    if run_dir == "/proc/run" and not os.path.exists("/proc"):
        pytest.skip("no /proc here")
    Path("file").write_text("mine")
    message = refusal(*FLAGS, "--run-dir", run_dir)
    assert f"--run-dir is {run_dir}" in message


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission(refusal):
    os.mkdir("closed", mode=0o500)
    assert "--run-dir is closed/run" in refusal(*FLAGS, "--run-dir", "closed/run")


@pytest.mark.parametrize("state", ["missing", "empty", "foreign", "a file", "of another program"])
def test_resume_of_what_is_no_run(refusal, state):
    run = Path("run")
    if state == "a file":
        run.write_text("mine")
    elif state != "missing":
        run.mkdir()
    if state == "foreign":
        (run / "thesis.tex").write_text("mine")
    if state == "of another program":
        (run / "config.json").write_text('{"name": "eslint"}')
    message = refusal(*RESUME)
    assert "--resume" in message and "run" in message
    assert state == "of another program" or "no config.json" in message


def change_config(run, **changes):
    """Change entries of config.json, or of the settings in it."""
    config = json.loads((run / "config.json").read_text())
    for name, value in changes.items():
        (config["settings"] if name in config["settings"] else config)[name] = value
    (run / "config.json").write_text(json.dumps(config))


def test_resume_of_another_algorithm(refusal, run):
    change_config(run, algo="sac", module="algos.sac")
    message = refusal(*RESUME)
    assert "--resume" in message and "a run of sac, not of ppo" in message


@pytest.mark.parametrize("flags,named", [
    ("--seed 2", ("--seed is 2", "1")),
    ("--lr 0.1", ("--lr is 0.1", "0.0003")),
    ("--hidden 16", ("--hidden is (16,)", "(8,)")),
    ("--env Acrobot-v1", ("--env is Acrobot-v1", "CartPole-v1")),
    ("--no-norm-obs", ("--norm-obs is False", "True")),
])
def test_resume_with_another_setting(refusal, run, flags, named):
    message = refusal("--resume", "--run-dir", "run", "--total-steps", "128", *flags.split())
    for word in named:
        assert word in message


def test_resume_of_a_run_without_a_checkpoint(refusal, run):
    shutil.rmtree(run / "resume-64")
    message = refusal(*RESUME)
    assert "--resume" in message and "no checkpoint in run" in message


class Payload:
    """Unpickling it makes a directory, as a stranger's would do worse."""

    def __reduce__(self):
        return os.mkdir, ("it_was_run",)


def flip(path):
    """One bit of a weight: torch loads that without a word."""
    whole, state = path.read_bytes(), torch.load(path, weights_only=True)
    state = state.get("state", state)["agent"]
    at = whole.index(state["actor.0.weight"].numpy().tobytes())
    path.write_bytes(whole[:at + 2] + bytes([whole[at + 2] ^ 4]) + whole[at + 3:])
    torch.load(path, weights_only=True)


def truncate(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def scribble(path):
    path.write_text("not a checkpoint")


def poison(path):
    torch.save(torch.load(path, weights_only=True) | {"extra": Payload()}, path)


def swap(path):
    torch.save({"some": "other", "dict": 3}, path)


@pytest.mark.parametrize("damage", [flip, truncate, empty, scribble, poison, swap])
@pytest.mark.parametrize("name", ["policy.pt", "resume-64/rank0.pt"])
def test_resume_of_a_damaged_checkpoint(refusal, run, name, damage):
    damage(run / name)
    message = refusal(*RESUME)
    assert f"run/{name}" in message
    assert not Path("it_was_run").exists()
    if damage is poison:
        assert "mkdir" in message and "nothing in it was run" in message


def test_resume_of_half_a_folder(refusal, run):
    """Its rank0.pt is gone; policy.pt, on the other hand, is not needed to go on."""
    os.remove(run / "policy.pt")
    os.rename(run / "resume-64/rank0.pt", "kept.pt")
    assert "run/resume-64" in refusal(*RESUME)
    os.rename("kept.pt", run / "resume-64/rank0.pt")
    ppo.train(parse(ppo.Config, ppo.__doc__, RESUME))
    assert checkpoint.load_file(run / "policy.pt")["step"] == 128


def test_the_poison_works(run):
    poison(run / "policy.pt")
    torch.load(run / "policy.pt", weights_only=False)
    assert Path("it_was_run").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', '{"algo": "ppo"}', "\0\1"])
def test_resume_with_a_damaged_config(refusal, run, text):
    (run / "config.json").write_text(text)
    assert "run/config.json is damaged" in refusal(*RESUME)


def test_resume_with_settings_out_of_range(refusal, run):
    change_config(run, gamma=3)
    assert "--gamma is 3" in refusal(*RESUME)


def test_resume_with_an_unknown_setting(refusal, run):
    """As of a version to come."""
    config = json.loads((run / "config.json").read_text())
    config["settings"]["curiosity"] = 3
    (run / "config.json").write_text(json.dumps(config))
    message = refusal(*RESUME)
    assert "run" in message and "version" in message and "curiosity" in message


def test_resume_of_other_network_sizes(refusal, run):
    change_config(run, hidden=[9])
    message = refusal("--resume", "--run-dir", "run", "--total-steps", "128")
    assert "run" in message and "actor.0.weight is [8, 4], not [9, 4]" in message


def test_resume_of_a_checkpoint_of_another_algorithm(refusal, run):
    """Its config.json fits, as if the folder had been copied there from another run."""
    path = run / "resume-64/rank0.pt"
    saved = torch.load(path, weights_only=True)
    saved["state"]["agent"] = {f"q.{key}": x for key, x in saved["state"]["agent"].items()}
    torch.save(saved, path)
    assert "absent" in refusal(*RESUME)
    del saved["state"]
    torch.save(saved, path)
    assert "run" in refusal(*RESUME)


def test_resume_of_a_run_of_two_processes(refusal, run):
    shutil.copy(run / "resume-64/rank0.pt", run / "resume-64/rank1.pt")
    message = refusal(*RESUME)
    assert "2 processes" in message and "--num-procs is 1" in message


@pytest.mark.parametrize("damage", [flip, truncate, empty, scribble, poison, swap, os.remove])
def test_init_from_what_holds_no_policy(refusal, run, damage):
    damage(run / "policy.pt")
    message = refusal(*FLAGS, "--init-from", "run", "--run-dir", "new")
    assert "--init-from" in message and "run/policy.pt" in message
    assert not Path("it_was_run").exists()


def test_init_from_other_sizes(refusal, run):
    message = refusal(*FLAGS, "--init-from", "run", "--hidden", "9", "--run-dir", "new")
    assert "run/policy.pt" in message and "actor.0.weight is [8, 4], not [9, 4]" in message
    message = refusal(*FLAGS, "--init-from", "run", "--env", "Acrobot-v1")
    assert "run/policy.pt" in message and "[8, 4], not [8, 6]" in message


# ---- A real process of each kind

@pytest.mark.parametrize("flags,named", [
    ("--gamma 1.5", "error: --gamma is 1.5; it takes a number, at least 0, at most 1"),
    ("--gama 0.9", "did you mean --gamma?"),
    ("--env CartPol-v1", "CartPole-v1"),
    ("--env tests.envs:Graph-v0", "Graph"),
    ("--resume --run-dir none", "none"),
    ("--num-procs 5000 --num-envs 5000 --minibatch-size 5000 --rollout-steps 5000",
     "--num-procs is 5000"),
])
def test_a_process_is_refused(flags, named):
    done = program(*flags.split())
    assert done.returncode == 2, done
    message = plain(done.stderr)
    assert_is_one_message(message)
    assert named in message
    assert not done.stdout or done.stdout.startswith("device: ")
    assert not os.listdir(".")


def test_an_extra_is_not_installed_in_a_process():
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text("import sys; sys.modules['ale_py'] = None")
    done = program("--env", "ALE/Pong-v5",
                   PYTHONPATH=os.pathsep.join(["site", os.environ["PYTHONPATH"]]),
                   PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 2, done
    assert done.stderr == ("error: --env is ALE/Pong-v5, which is not installed: "
                           "pip install -e '.[atari]'\n")
    assert os.listdir(".") == ["site"]


def test_processes_without_mpiexec(tmp_path, monkeypatch):
    """A Python that stands alone in its directory, which is all of PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    done = program(*FLAGS, "--num-procs", 2, PATH=str(tmp_path / "bin"),
                   PYTHONPATH=os.pathsep.join([str(ROOT), *packages]))
    assert done.returncode == 2, done
    assert_is_one_message(done.stderr)
    assert "--num-procs is 2" in done.stderr and "no mpiexec" in done.stderr
    assert "pip install mpich" in done.stderr
    assert os.listdir(".") == ["bin"]


def test_what_only_python_can_say():
    """Where types are not checked on the way in, as they are in the tests: from a notebook."""
    script = """
        from algos import ppo
        for name, value in dict(lr="3e-4", num_envs="8", hidden=("64",), seed=1.0, gamma=None,
                                total_steps="1e6", epochs=2.5, rollout_steps=True).items():
            try:
                ppo.Config(**{name: value})
            except SystemExit as error:
                print(name, error.code, str(error))
            else:
                print(name, "was taken")
        try:
            ppo.train(ppo.Config(env="CartPole-v1", num_procs=2))
        except SystemExit as error:
            print("num_procs", error.code, str(error))
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)],
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("device: ")]
    assert len(lines) == 9, lines
    for line in lines:
        name, code, message = line.split(" ", 2)
        assert code == "2" and name.replace("_", "-") in message.replace("_", "-"), line
    assert done.stderr.count("error: ") == 9 and "Traceback" not in done.stderr
    assert not os.listdir(".")


@pytest.mark.skipif(os.name != "posix", reason="no MPI")
def test_only_one_rank_speaks():
    done = subprocess.run(mpirun("--env", "CartPole-v1", "--num-envs", 3, "--rollout-steps", 96,
                                 "--minibatch-size", 96),
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: --num-envs is 3; it takes a multiple of the 2 processes")
    assert done.stderr.count("\n") == 1
    assert not os.listdir(".")


# ---- Bad luck

class Generous(Odd):
    """Pays 1e30 in its step `at`: finite, but not its square."""

    def __init__(self, at=70, rew=1e30):
        super().__init__()
        self.time, self.at, self.rew = 0, at, rew

    def step(self, act):
        self.time += 1
        rew = self.rew if self.time == self.at else 1.0
        return self.observation_space.sample(), rew, False, self.time % 8 == 0, {}


gym.register("Generous-v0", Generous)


def last_good(run):
    """The step of the one checkpoint of a run, in which every number is finite."""
    (step, _), = checkpoint.resume_folders(run).items()
    at, saved = checkpoint.load_resume(run)
    policy = checkpoint.load_file(run / "policy.pt")
    assert at == step == policy["step"]
    for state in (saved["state"]["agent"], policy["agent"]):
        assert all(value.isfinite().all() for value in state.values())
    assert not list(run.glob("*.tmp"))
    return step


def test_a_loss_that_turns_infinite_stops_the_run():
    """One environment: its steps 1 to 64, 65 to 128, the third update has none."""
    cfg = ppo.Config(**TINY | {"env": "Generous-v0", "env_kwargs": '{"at": 70}', "num_envs": 1,
                               "total_steps": 320, "scale_rew": False, "norm_adv": False,
                               "run_dir": "run"})
    with pytest.raises(FloatingPointError, match="loss_mean is (inf|nan) at step 128") as caught:
        ppo.train(cfg)
    notes = " ".join(caught.value.__notes__)
    assert "Generous-v0" in notes and "step 128" in notes and "run" in notes
    assert last_good(Path("run")) == 64
    rows = Path("run/progress.csv").read_text().splitlines()
    assert len(rows) == 2 and "nan" not in rows[1] and "inf" not in rows[1]
    # What was good goes on, once the cause is gone; the csv files too.
    ppo.train(dataclasses.replace(cfg, resume=True, total_steps=128))
    assert [row.split(",")[0] for row in Path("run/progress.csv").read_text().splitlines()] == [
        "step", "64", "128"]


def test_a_loss_that_turns_nan_ends_the_process():
    done = program(*FLAGS, "--total-steps", 640, "--lr", "1e38", "--run-dir", "run")
    assert done.returncode == 1, done
    last = done.stderr.strip().splitlines()[-2:]
    assert re.match(r"FloatingPointError: \w+ (is|of the agent is) (nan|inf) at step 64", last[0])
    assert "CartPole-v1" in last[1] and "step 64" in last[1] and "run" in last[1]
    assert last_good(Path("run")) == 0


# It runs to its step 100 of 64 a rollout: well in the second one.
@pytest.mark.parametrize("fault,kind,says", [
    ("raise", RuntimeError, "the motor of joint 3 is too hot"),
    ("obs nan", FloatingPointError, "environment"),
    ("obs inf", FloatingPointError, "environment"),
    ("rew nan", FloatingPointError, "environment"),
    ("rew -inf", FloatingPointError, "environment"),
])
def test_an_environment_that_goes_wrong_is_named(fault, kind, says):
    kwargs = {"fault": fault, "at": 100}
    cfg = ppo.Config(**TINY | {"env": "Faulty-v0", "env_kwargs": json.dumps(kwargs), "num_envs": 1,
                               "total_steps": 320, "run_dir": "run"})
    with pytest.raises(kind, match=says) as caught:
        ppo.train(cfg)
    notes = " ".join(caught.value.__notes__)
    assert "Faulty-v0" in notes and "step 64" in notes
    if kind is FloatingPointError:
        assert "vector step 100 " in str(caught.value)
    assert last_good(Path("run")) == 64


class Lost(Odd):
    """Its second episode begins nowhere; with `at_once` its first."""

    def __init__(self, at_once=False):
        super().__init__()
        self.episode, self.at_once = 0, at_once

    def reset(self, seed=None, options=None):
        self.episode += 1
        obs, info = super().reset(seed=seed)
        return obs * (np.nan if self.episode == 2 - self.at_once else 1), info

    def step(self, act):
        obs = self.observation_space.sample()
        return obs, 1.0, True, False, {}


gym.register("Lost-v0", Lost)


@pytest.mark.parametrize("at_once", ["true", "false"])
def test_an_environment_that_begins_with_nan_is_named(at_once):
    """Its own fault, and not that of a loss some steps later."""
    cfg = ppo.Config(**TINY | {"env": "Lost-v0", "env_kwargs": f'{{"at_once": {at_once}}}'})
    with pytest.raises(FloatingPointError, match="environment") as caught:
        ppo.train(cfg)
    assert "Lost-v0" in " ".join(caught.value.__notes__)


class Bleak(Odd):
    """Returns NaN, but to the third of its kind and those made later: when it is evaluated."""

    made = 0

    def __init__(self):
        super().__init__()
        Bleak.made += 1
        self.rew, self.time = (1.0 if Bleak.made < 3 else np.nan), 0

    def step(self, act):
        self.time += 1
        assert self.time < 500, "it was stepped for ever"
        return self.observation_space.sample(), self.rew, self.time % 4 == 0, False, {}


gym.register("Bleak-v0", Bleak)


def test_an_environment_that_returns_nan_to_evaluation():
    cfg = ppo.Config(**TINY | {"env": "Bleak-v0", "eval_every": 64, "run_dir": "run"})
    with pytest.raises(FloatingPointError, match="eval_ret|environment") as caught:
        ppo.train(cfg)
    assert "Bleak-v0" in " ".join(caught.value.__notes__)
    assert last_good(Path("run")) == 0


def test_an_environment_that_raises_ends_the_process():
    done = program(*FLAGS, "--env", "tests.envs:Faulty-v0", "--env-kwargs", '{"at": 100}',
                   "--num-envs", 1, "--total-steps", 320, "--run-dir", "run")
    assert done.returncode == 1, done
    assert "RuntimeError: the motor of joint 3 is too hot\nIn tests.envs:Faulty-v0, after step 64" \
        in done.stderr
    assert last_good(Path("run")) == 64
