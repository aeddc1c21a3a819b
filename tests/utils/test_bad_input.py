"""What is refused, and how: one message that names the flag, exit status 2, nothing written."""
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from algos import a2c, ppo
from tests import registry, toy
from tests import envs  # noqa: F401  registers its environments, Faulty-v0 among them
from tests.helpers import ROOT, refused, run as run_command, saved, steps
from utils.envs import make_envs
from utils.run import checkpoint
from utils.run.directory import replaced_files
from utils.command import flag
from utils.run.settings import check_settings, parse

TINY = {"env": "CartPole-v1", "num_envs": 2, "rollout_steps": 64, "minibatch_size": 32, "epochs": 1,
        "hidden": (8,), "total_steps": 64}
FLAGS = ("--env CartPole-v1 --num-envs 2 --rollout-steps 64 --minibatch-size 32 --epochs 1 "
         "--hidden 8").split()


def train(*args):
    return ppo.train(parse(ppo.Config, ppo.__doc__, args))


def refusal(*args):
    """Return the message with which a command line is refused."""
    return refused(train, *args)


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


def test_a_directory_that_holds_a_run(run):
    message = refusal(*FLAGS, "--run-dir", "run")
    assert "run holds a run already" in message
    for way_out in ("python -m algos.ppo --run-dir run --resume.", "--overwrite", "--seed 2"):
        assert way_out in message
    for left in ("config.json", "policy.pt"):                   # any part of one
        os.remove(run / left)
        for more in ([], ["--overwrite"]):
            message = refusal(*FLAGS, "--run-dir", "run", *more)
            assert "run holds no run: config.json: FileNotFoundError" in message
    for path in run.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run / "notes").touch()                                     # a directory is not yet a run
    train(*FLAGS, "--run-dir", "run", "--total-steps", "64")


def test_a_run_that_never_reported_is_replaced(run):
    """As after a mistake in the first step of an environment. A later checkpoint is something."""
    (run / "progress.csv").unlink()
    again = ppo.Config(run_dir="run", **TINY)
    refused(ppo.train, again, says="run holds a run already")   # there is resume-64
    os.rename(run / "resume-64", run / "resume-0")
    (run / "notes").touch()
    ppo.train(again)
    assert steps("run") == [64] and (run / "notes").exists() and not (run / "resume-0").exists()


def test_overwrite_deletes_a_run_and_nothing_else(run):
    """Only when all else is right, as late as the run is opened."""
    ours = {path.name for path in run.iterdir()}
    (run / "notes.txt").write_text("mine")
    (run / "inner").mkdir()
    assert "Pendulum" in refusal("--env", "Pendulm-v1", "--run-dir", "run", "--overwrite")
    before = (run / "episodes.csv").read_text()
    assert replaced_files(ppo.Config(overwrite=True, run_dir=str(run)))[-1].name == "config.json"
    again = (*FLAGS, "--run-dir", "run", "--total-steps", "64", "--seed", "5", "--overwrite")
    train(*again)
    now = {path.name for path in run.iterdir()}
    assert len(now) == len(ours) + 2 and {"notes.txt", "inner"} < now
    assert (run / "episodes.csv").read_text() != before
    settings = json.loads((run / "config.json").read_text())["settings"]
    assert settings["seed"] == 5 and settings["overwrite"] is False
    (run / "config.json").write_text('{"name": "a project of somebody else"}')
    assert "holds no run: config.json: KeyError" in refusal(*again)


@pytest.mark.parametrize("run_dir", ["file", "file/run", "/dev/null/run", "/proc/run"])
def test_a_directory_that_cannot_be_written(run_dir):
    Path("file").write_text("mine")
    if not Path(run_dir).parent.exists():
        pytest.skip(f"there is no {Path(run_dir).parent} here")
    assert f"--run-dir is {run_dir}: " in refusal(*FLAGS, "--run-dir", run_dir)


def test_resume_of_half_a_folder(run):
    """Its rank0.pt is gone; policy.pt, on the other hand, is not needed to go on."""
    os.remove(run / "policy.pt")
    os.rename(run / "resume-64/rank0.pt", "kept.pt")
    assert "run/resume-64" in refusal(*RESUME)
    os.rename("kept.pt", run / "resume-64/rank0.pt")
    train(*RESUME)
    assert checkpoint.load_file(run / "policy.pt")["step"] == 128


@pytest.mark.parametrize("old,new,says", [
    ('"settings"', '"s"', "run holds no run: config.json: KeyError"),
    ('"algo": "ppo"', '"algo": "sac"', "a run of sac, not of ppo"),
    ('"gamma": 0.99', '"gamma": 3', "--gamma is 3"),
    ('"gamma"', '"curiosity"', "run is a run of ppo, perhaps of another version: "),
])
def test_resume_with_another_config(run, old, new, says):
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace(old, new))
    assert says in refusal(*RESUME)


# ---- Bad luck

# It runs to its step 100 of 64 a rollout: well in the second one.
@pytest.mark.parametrize("fault,kind,says", [
    ("raise", RuntimeError, "the motor of joint 3 is too hot"),
    ("nan", FloatingPointError, "environment .* vector step 100 "),
])
def test_an_environment_that_goes_wrong_is_named(fault, kind, says):
    """And the checkpoint from before it stays."""
    kwargs = json.dumps({"fault": fault, "at": 100})
    with pytest.raises(kind, match=says) as caught:
        ppo.train(ppo.Config(**TINY | {"env": "Faulty-v0", "env_kwargs": kwargs, "num_envs": 1,
                                       "total_steps": 320, "run_dir": "run"}))
    notes = " ".join(caught.value.__notes__)
    assert "Faulty-v0" in notes and "step 64" in notes and saved("run")[0] == 64


def test_an_algorithm_that_is_not_there_is_named():
    done = run_command([sys.executable, "-m", "algos.pppo"], 1, cwd=ROOT)
    assert done.stderr == "error: there is no algos.pppo; python -m algos lists them\n"


@pytest.mark.parametrize("file", ["utils.py", "utils/__init__.py"])
def test_another_utils_in_front_of_ours_is_named(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    done = run_command([sys.executable, "-m", "algos.ppo"], 1, cwd=tmp_path, env=env)
    assert f"Python found {tmp_path / file}" in done.stderr


@pytest.mark.parametrize("algo,name,value,takes", [
    (ppo, "norm_adv", "False", "True or False"), (ppo, "resume", "False", "True or False"),
    (ppo, "device", "gpu", "auto or cpu or cuda"), (a2c, "rmsprop", "TF", "torch or tf"),
    (ppo, "hidden", 64, "a tuple")])
def test_a_value_of_another_kind_is_refused_from_python(algo, name, value, takes):
    """"False" would be true, "gpu" the CPU, and "TF" the other rule."""
    cfg = algo.Config()
    vars(cfg)[name] = value                                     # beartype would refuse it before
    refused(check_settings, cfg, says=f"{flag(name)} is {value!r}; it takes {takes}")


def test_a_list_becomes_a_tuple():
    """Else --resume would see another value than the run's, and nothing could hash the Config."""
    assert hash(toy.Config(hidden=[8, 8])) == hash(toy.Config())


def test_keyword_arguments_of_the_environment_are_a_text():
    cfg = ppo.Config()
    vars(cfg)["env_kwargs"] = {}
    refused(make_envs, cfg, 1, says="--env-kwargs is {}; it takes a JSON object: ")


def test_a_run_too_short_to_learn_says_so(capsys):
    for total in (24, 25):
        registry.module("dqn").train(registry.config(
            "dqn", start_steps=24, total_steps=total, num_envs=1, run_dir=f"run{total}"))
        assert ("it learns nothing" in capsys.readouterr().out) == (total == 24)
