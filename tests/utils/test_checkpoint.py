"""What a run keeps: whole checkpoints, and its code. Nothing in a stranger's file is run."""
import errno
import gc
import json
import os
import pickle
import random
import shutil
import sys
import warnings
import zipfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from algos import ppo
from tests import toy
from tests.helpers import refused, rows, run, same, steps
from utils import play
from utils.errors import UsageError
from utils.run import checkpoint, code
from utils.run.directory import has_changed, read_config, whose_code

PAYLOAD = {"agent": OrderedDict(w=torch.arange(6.0).view(2, 3), n=torch.tensor(7)),
           "step": 3, "settings": {"hidden": (64, 64), "env": "é", "lr": 1e-3, "x": None}}


class Payload:
    """Unpickling it makes a directory, as a stranger's would do worse."""

    def __reduce__(self):
        return os.mkdir, ("it_was_run",)


@pytest.mark.parametrize("protocol", ["zip", "legacy", "pickle"])
def test_a_pickled_payload_is_refused_and_not_run(tmp_path, protocol):
    path, value = tmp_path / "a.pt", {"agent": Payload()}
    if protocol == "pickle":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=protocol == "zip")
    message = refused(checkpoint.load_file, path)                       # and nothing was written
    assert protocol != "zip" or "nothing in it was run" in message
    pickle.loads(pickle.dumps(value))
    assert Path("it_was_run").exists()                                  # the trap itself works


@pytest.mark.parametrize("value", [{"lr": np.float64(1)}, {"mean": np.zeros(3)}])
def test_what_could_not_be_loaded_is_not_saved(value):
    refused(checkpoint.save_file, "a.pt", value, says="a.pt.* no tensor or plain value")


def test_each_flipped_bit_is_refused_or_harmless(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.save_file(path, PAYLOAD)
    whole, refusals, rng = path.read_bytes(), 0, random.Random(1)
    for _ in range(200):
        spoiled = bytearray(whole)
        spoiled[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoiled)
        try:
            assert same(checkpoint.load_file(path), PAYLOAD)            # a gap between the records
        except UsageError:
            refusals += 1
    assert refusals > 50


def test_what_is_no_checkpoint_is_refused():
    Path("text").write_text("hello")
    os.mkdir("folder")
    with zipfile.ZipFile("zip", "w") as archive:
        archive.writestr("a", "b")
    checkpoint.save_file("a.pt", PAYLOAD)
    assert same(checkpoint.load_file("a.pt"), PAYLOAD)
    Path("half").write_bytes(Path("a.pt").read_bytes()[:-100])
    for name, why in {"none": r"\[Errno 2\] No such file", "folder": r"\[Errno 21\] Is a directory",
                      "text": "", "zip": "", "half": "File is not a zip"}.items():
        refused(checkpoint.load_file, name, says=f"^{name} cannot be read as a checkpoint: {why}")


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("module,name", [(os, "fsync"), (torch, "save"), (os, "replace")])
def test_the_old_file_stays_if_saving_fails(tmp_path, monkeypatch, module, name):
    path = tmp_path / "a.pt"
    checkpoint.save_file(path, {"step": 1})
    checkpoint.save_resume(tmp_path, 1, {"step": 1})
    monkeypatch.setattr(module, name, no_space)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_file(path, {"step": 2})
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_resume(tmp_path, 2, {"step": 2})
    monkeypatch.undo()
    assert checkpoint.load_file(path) == {"step": 1}
    assert checkpoint.load_resume(tmp_path) == (1, {"step": 1})
    checkpoint.save_resume(tmp_path, 3, {"step": 3})
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "resume-3"]         # nothing half is left


def test_before_every_call_of_the_system_there_is_a_whole_checkpoint(tmp_path):
    """What a kill at that moment would leave, without the killing."""
    left = set()

    def look(frame, event, arg):
        if event == "c_call" and arg.__module__ in ("posix", "nt"):
            sys.setprofile(None)
            step, saved = checkpoint.load_resume(tmp_path)
            left.add((checkpoint.load_file(tmp_path / "policy.pt")["step"], step))
            assert step == saved["step"]
            sys.setprofile(look)

    def save(step):
        payload = {"step": step, "w": torch.full((10,), float(step))}
        checkpoint.save_file(tmp_path / "policy.pt", payload)
        checkpoint.save_resume(tmp_path, step, payload)

    save(9)
    sys.setprofile(look)
    save(10)
    sys.setprofile(None)
    assert left == {(9, 9), (10, 9), (10, 10)}


@pytest.mark.parametrize("other,message", [
    (torch.nn.Linear(3, 2, bias=False), 'Missing .*: "bias"'),
    (torch.nn.Sequential(torch.nn.Linear(3, 2)), 'Unexpected .*: "0.weight"'),
    (torch.nn.Linear(3, 4), "size mismatch for bias"),
])
def test_another_network_is_refused_by_the_names_that_differ(other, message):
    module = torch.nn.Linear(3, 2)
    refused(checkpoint.load_into, module.load_state_dict, other.state_dict(), "run",
            says=f"^run holds another network: {message}")


# ---- The code that a run keeps

KEPT, CODE = Path("run/algo.py"), Path("toy.py")


@pytest.fixture
def edit(monkeypatch):
    """Let a file stand for that of the toy algorithm. Return the function that rewrites it."""
    monkeypatch.setattr(toy, "__file__", str(CODE.absolute()))
    CODE.write_text("x = 1\n")
    return CODE.write_text


def test_a_config_of_a_notebook_has_no_file(monkeypatch):
    monkeypatch.delattr(toy, "__file__")
    toy.train(toy.Config())
    assert code.file_of(toy.Config) is None
    assert not KEPT.exists() and not has_changed(toy.Config, "run")
    monkeypatch.setattr(toy.Config, "__module__", "__main__")       # as in a cell
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert code.file_of(toy.Config) is None


def test_play_warns_if_the_code_has_changed(monkeypatch):
    ppo.train(ppo.Config("CartPole-v1", num_envs=1, rollout_steps=8, minibatch_size=8, epochs=1,
                         hidden=(8,), total_steps=8, run_dir="run"))
    with warnings.catch_warnings(action="error"):
        play.load_agent("run")
    monkeypatch.setattr(code, "STAGE", code.STAGE | code.HELPERS)    # so ppo.py differs
    with pytest.warns(UserWarning, match="algos.ppo, or a module .* since run was made"):
        play.load_agent("run")
    config = read_config("run")
    older = {name: told for name, told in config.items() if name != "code"}
    gone = config | {"settings": config["settings"] | {"env": "not_here:Robot-v0"}}
    for known in older, gone:           # of an older version, or exported without its environment
        Path("run/config.json").write_text(json.dumps(known))
        assert not has_changed(ppo.Config, "run")               # its algo.py tells
    KEPT.write_text(KEPT.read_text() + "x = 1\n")
    assert has_changed(ppo.Config, "run")


def test_threads_compare_code_at_the_same_time():
    """Python 3.11 raises SystemError if two parse, and one of them collects garbage meanwhile."""
    before = sys.getswitchinterval()
    gc.callbacks.append(lambda *_: sum(range(50)))      # Python code, so that other threads go on
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            text = Path(ppo.__file__).read_bytes()
            assert len({told for told, _ in pool.map(
                code.parsed, [text + b"# %d" % k for k in range(16)])}) == 1
    finally:
        sys.setswitchinterval(before)
        gc.callbacks.pop()


def test_resume_says_that_the_code_has_changed(edit, capsys):
    agent = toy.Agent(3, 2)
    with toy.start(toy.Config(), agent, optimizer=torch.optim.Adam(agent.parameters())) as log:
        log.advance(100)
        before = KEPT.read_text(), Path("run/config.json").read_text()
        edit("x = 1  # meanwhile\n")
        log.advance(100)
        assert before == (KEPT.read_text(), Path("run/config.json").read_text())
    for text, said in (("x = 1\n", 0), ("x = 2\n", 1), ("x = 2\n", 0)):
        edit(text)                                              # from here on it is the run's code
        capsys.readouterr()
        toy.train(toy.Config(total_steps=steps("run")[-1] + 100, resume=True))
        assert capsys.readouterr().out.count("has changed since this run began") == said
    before = whose_code(toy.Config())
    edit("x = 3\n")
    assert whose_code(toy.Config()) != before                   # a rank with it is refused
    edit("x = 2\n")
    assert steps("run") == [100, 200, 300, 400, 500] and KEPT.read_text() == "x = 2\n"
    assert Path("run/algo-until-300.py").read_text() == "x = 1\n"


def test_a_run_that_has_not_reported_takes_the_new_code(edit):
    """A first version that fails at once is mended, and the same command is given again."""
    with pytest.raises(toy.Stop):
        toy.train(toy.Config(), stop_at=0)
    edit("x = 2\n")
    toy.train(toy.Config(resume=True))
    assert KEPT.read_text() == "x = 2\n" and len(rows("run")) == 8


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_a_commit_that_lacks_the_code_is_marked(monkeypatch):
    """And outside of a repository there is none."""
    def git(*args):
        named = "git", "-c", "user.name=A", "-c", "user.email=a@example.org"
        return run([*named, *args], cwd="clone").stdout.strip()

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", os.getcwd())  # a repository above does not count
    file = Path("clone/run.py")
    file.parent.mkdir()
    file.write_text("x = 1\n")
    monkeypatch.setattr(code, "UTILS", file.parent)
    assert code.origin()["git_commit"] == ""              # no repository
    git("init", "-q")
    git("add", "run.py")
    git("commit", "-qm", "All")
    head = git("rev-parse", "HEAD")
    assert code.origin()["git_commit"] == head
    file.write_text("x = 2\n")
    assert code.origin()["git_commit"] == f"{head}-dirty"
