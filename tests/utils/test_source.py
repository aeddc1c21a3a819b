"""The code that a run keeps: what is stored, what counts as changed, what plays and resumes."""
import ast
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from algos import ppo
from tests import toy
from tests.helpers import refused, rows, same, steps
from utils import play, rundir, source
from utils.envs import evaluate
from utils.rundir import open_run, read_config

SMALL = {"env": "Pendulum-v1", "env_kwargs": '{"max_episode_steps": 20}', "num_envs": 2,
         "rollout_steps": 64, "minibatch_size": 32, "epochs": 2, "hidden": (8,), "run_dir": "run"}
KEPT = Path("run/algo.py")
PPO = Path(ppo.__file__)
TANH, RELU = "nn.Tanh()", "nn.ReLU()"
DOC = '"""Linear layers'


def train(**settings):
    return ppo.train(ppo.Config(**SMALL | {"total_steps": 128} | settings))


@pytest.fixture
def edit(monkeypatch):
    """Let a copy stand for algos/ppo.py, and return a function that edits it after the import."""
    file = Path("ppo.py").absolute()
    shutil.copy(PPO, file)
    monkeypatch.setattr(ppo, "__file__", str(file))

    def replace(old, new):
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    return replace


def edit_kept(old, new):
    assert old in KEPT.read_text()
    KEPT.write_text(KEPT.read_text().replace(old, new))


# ---- What is kept, and what counts as changed

def test_a_run_keeps_the_file_that_made_it():
    train()
    assert KEPT.read_bytes() == PPO.read_bytes()
    assert not source.has_changed(ppo.Config, "run")


def test_a_config_of_a_notebook_has_no_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_notebook", type(sys)("a_notebook"))
    config_class = type("Config", (), {"__module__": "a_notebook"})
    assert source.file_of(config_class) is None
    source.keep(config_class, ".", 0)
    assert not os.listdir() and not source.has_changed(config_class, ".")


def test_only_code_counts_as_changed(edit):
    train()
    for old, new, changed in [
            (DOC, '"""Some linear layers', False), ("# no tanh after", "# none after", False),
            ("\n\n\ndef", "\n\ndef", False), (TANH, RELU, True)]:
        edit(old, new)
        assert source.has_changed(ppo.Config, "run") == changed, old
    KEPT.write_text("def f(:\n")
    assert source.has_changed(ppo.Config, "run")


def test_hash_is_of_the_code_alone():
    code = 'def f(x):\n    """Doc."""\n    return x + 1  # why\n'
    again = '"""Module."""\ndef f(x):\n\n    """Other."""\n    return (x +\n            1)\n'
    assert source.code_hash(code) == source.code_hash(again)
    for old, new in (("+", "-"), ("1", "2"), ("x + 1", "x + 1.0"), ("return", "yield")):
        assert source.code_hash(code) != source.code_hash(code.replace(old, new))
    assert source.code_hash("x = 'a'\n") != source.code_hash("x = 'b'\n")


def test_one_thread_parses_at_a_time(monkeypatch):
    """Runs start in threads; two in ast.parse at once fail now and then, in CPython 3.11."""
    inside, most = [], []

    def slow_parse(text, *args):
        inside.append(text)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return parse(text, *args)

    parse = ast.parse
    monkeypatch.setattr(source.ast, "parse", slow_parse)
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(source.code_hash, ["x = 1\n"] * 8))
    assert len(set(hashes)) == 1 and most == [1] * 8


# ---- play

def test_play_warns_if_the_code_has_changed(edit, capsys):
    train()
    edit(DOC, '"""Some linear layers')
    play.main(play.Play("run", episodes=1))
    assert not capsys.readouterr().err
    edit(TANH, RELU)
    play.main(play.Play("run", episodes=1))
    warned = capsys.readouterr().err
    assert warned.startswith("warning: algos.ppo has changed since run") and warned.count("\n") == 1
    assert "--as-trained" in warned
    play.main(play.Play("run", episodes=1, as_trained=True))
    assert not capsys.readouterr().err


def test_as_trained_plays_the_code_of_the_run():
    """The kept code has ReLU, as if algos/ppo.py had been changed to tanh since."""
    trained = train()
    edit_kept(TANH, RELU)
    present, kept = (play.main(play.Play("run", 3, as_trained=flag)) for flag in (False, True))
    assert not np.allclose(present, kept)
    agents = [play.load_agent("run", as_trained=flag) for flag in (False, True)]
    for agent, returns, layer in zip(agents, (present, kept), ("Tanh", "ReLU")):
        assert np.array_equal(returns, evaluate(agent, ppo.Config(**SMALL), 3, seed=1)[0])
        assert layer in str(agent.actor)
        assert same(dict(agent.state_dict()), dict(trained.state_dict()))
    assert [path.name for path in Path("run").iterdir() if path.is_dir()] == ["resume-128"]


@pytest.mark.parametrize("module, message", [("algos.my_ppo", "there is no algos/my_ppo.py"),
                                             ("mine.ppo", "only files in algos/ are loaded")])
def test_a_run_whose_file_is_gone_plays_if_asked_to(module, message):
    train()
    config = json.loads(Path("run/config.json").read_text())
    Path("run/config.json").write_text(json.dumps(config | {"module": module}))
    said = refused(play.load_agent, "run")
    assert message in said and "--as-trained" in said
    assert play.load_agent("run", as_trained=True).actor
    KEPT.unlink()
    assert "--as-trained" not in refused(play.load_agent, "run")


@pytest.mark.parametrize("text", ["def f(:\n", "from utils.gone import x\n", "", "1 / 0\n"])
def test_kept_code_that_fails_is_refused(text):
    train()
    KEPT.write_text(text)
    assert "run/algo.py" in refused(lambda: play.load_agent("run", as_trained=True))


def test_a_run_of_an_earlier_version_plays_as_before(capsys):
    train()
    KEPT.unlink()
    play.main(play.Play("run", episodes=1))
    assert not capsys.readouterr().err
    assert "keeps no code" in refused(lambda: play.load_agent("run", as_trained=True))


# ---- --resume

def test_resume_refuses_changed_code(edit):
    train()
    edit(DOC, '"""Some linear layers')
    train(total_steps=192, resume=True)
    edit(TANH, RELU)
    again = ppo.Config(resume=True, run_dir="run", total_steps=256)
    message = refused(open_run, again)
    assert "ppo.py has changed" in message and "run/algo.py" in message
    assert "--changed-code" in message
    train(total_steps=256, resume=True, changed_code=True)
    assert steps("run") == [64, 128, 192, 256]
    assert KEPT.read_text() == Path("ppo.py").read_text()
    assert Path("run/algo-until-192.py").read_bytes() == PPO.read_bytes()
    assert read_config("run")["settings"]["changed_code"] is False
    train(total_steps=320, resume=True)                         # from here on it is the run's code
    edit(RELU, TANH)
    assert "--changed-code" in refused(open_run, ppo.Config(resume=True, run_dir="run",
                                                            total_steps=1e3))


def test_changed_code_is_for_resume():
    assert "--changed-code is for --resume" in refused(open_run, ppo.Config(changed_code=True))


def test_a_finished_run_has_nothing_to_do_whatever_the_code(edit):
    train()
    edit(TANH, RELU)
    with pytest.raises(SystemExit) as caught:
        train(resume=True)
    assert not caught.value.code


def test_a_run_that_has_not_reported_takes_the_new_code(monkeypatch):
    """A first version that fails at once is mended, and the same command is given again."""
    monkeypatch.setattr(toy, "__file__", str(Path("toy.py").absolute()))
    Path("toy.py").write_text("x = 1\n")
    with pytest.raises(toy.Stop):
        toy.train(toy.Config(), stop_at=0)
    Path("toy.py").write_text("x = 2\n")
    toy.train(toy.Config(resume=True))
    assert KEPT.read_text() == "x = 2\n" and len(rows("run")) == 8
    assert not list(Path("run").glob("algo-*"))


def test_a_run_of_an_earlier_version_resumes_and_keeps_its_code_from_then_on(edit):
    train()
    KEPT.unlink()
    edit(TANH, RELU)
    train(total_steps=192, resume=True)
    assert KEPT.read_text() == Path("ppo.py").read_text()


# ---- config.json names a commit

@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_a_commit_that_lacks_the_code_is_marked(monkeypatch):
    """A new file that git does not track stands in no commit, and neither does a notebook."""
    def git(*args):
        named = "git", "-c", "user.name=A", "-c", "user.email=a@example.org"
        return subprocess.run([*named, *args], cwd="clone", check=True, capture_output=True,
                              text=True).stdout.strip()

    def commit(name):
        monkeypatch.setattr(toy, "__file__", str(Path("clone/algos", name).absolute()))
        toy.train(toy.Config(run_dir=f"run{len(os.listdir())}", total_steps=100))
        return read_config(f"run{len(os.listdir()) - 1}")["git_commit"]

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", os.getcwd())  # a repository above does not count
    for name in ("algos/toy.py", "algos/my_toy.py", "utils/rundir.py"):
        Path("clone", name).parent.mkdir(parents=True, exist_ok=True)
        Path("clone", name).write_text("x = 1\n")
    monkeypatch.setattr(rundir, "__file__", str(Path("clone/utils/rundir.py").absolute()))
    assert commit("toy.py") == ""                               # no repository
    git("init", "-q")
    git("add", "algos/toy.py", "utils")
    git("commit", "-qm", "All")
    head = git("rev-parse", "HEAD")
    assert commit("toy.py") == head
    assert commit("my_toy.py") == commit("gone.py") == f"{head}-dirty"
    Path("clone/algos/toy.py").write_text("x = 2\n")
    assert commit("toy.py") == f"{head}-dirty"
