"""Checkpoints: whole or not at all, whatever happens, and nothing in a stranger's file is run."""
import errno
import os
import pickle
import random
import resource
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import (
    PATIENCE,
)
from utils import checkpoint, files, mpi
from utils.mpi import UsageError

PAYLOAD = {"agent": OrderedDict(w=torch.arange(6.0).view(2, 3), n=torch.tensor(7)),
           "step": 3, "settings": {"hidden": (64, 64), "env": "é", "lr": 1e-3, "x": None}}


def same(a, b):
    """Equal, type for type and bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


def refused(path):
    """The message with which a file is refused."""
    with pytest.raises(UsageError) as caught:
        checkpoint.load_file(path)
    assert caught.value.code == 2
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_file_comes_back_equal(tmp_path):
    checkpoint.save_file(tmp_path / "a.pt", PAYLOAD)
    assert same(checkpoint.load_file(tmp_path / "a.pt"), PAYLOAD)
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("value,name", [
    ({"lr": np.float64(1)}, "checkpoint.lr is a numpy.float64"),
    ({"opt": {"groups": [{"lr": np.float32(1)}]}}, "checkpoint.opt.groups.0.lr is a numpy.float32"),
    ({"mean": np.zeros(3)}, "checkpoint.mean is a numpy.ndarray"),
    ({"last": deque([1.0])}, "checkpoint.last is a collections.deque"),
    ({np.str_("key"): 1}, "a key of checkpoint is a numpy.str"),
    ({"rng": np.random.default_rng(1).bit_generator.state}, None),      # plain: integers
    ({"rng": np.random.RandomState(1).get_state()}, "checkpoint.rng.1 is a numpy.ndarray"),
])
def test_what_could_not_be_loaded_is_not_saved(tmp_path, value, name):
    if name is None:
        checkpoint.save_file(tmp_path / "a.pt", value)
        assert same(checkpoint.load_file(tmp_path / "a.pt"), value)
        return
    with pytest.raises(TypeError) as caught:
        checkpoint.save_file(tmp_path / "a.pt", value)
    assert str(caught.value).startswith(name)
    assert not os.listdir(tmp_path)


def test_each_flipped_bit_is_refused_or_harmless(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.save_file(path, PAYLOAD)
    whole, refusals, rng = path.read_bytes(), 0, random.Random(1)
    for _ in range(400):
        spoiled = bytearray(whole)
        spoiled[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoiled)
        try:
            assert same(checkpoint.load_file(path), PAYLOAD)            # a gap between the records
        except UsageError as error:
            assert error.code == 2
            refusals += 1
    assert refusals > 100


def test_a_flipped_weight_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.save_file(path, PAYLOAD)
    whole = path.read_bytes()
    at = whole.index(torch.tensor([1.0, 2.0]).numpy().tobytes())
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    assert not same(torch.load(path, weights_only=True), PAYLOAD)       # torch does not notice
    assert "checksum" in refused(path)


@pytest.mark.parametrize("share", [0, 0.3, 0.7, 0.99])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = tmp_path / "a.pt"
    checkpoint.save_file(path, PAYLOAD)
    path.write_bytes(path.read_bytes()[:int(share * path.stat().st_size)])
    assert "damaged" in refused(path)


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
    message = refused(path)
    assert not Path("it_was_run").exists()
    assert protocol != "zip" or "mkdir" in message and "nothing in it was run" in message
    if protocol == "pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert Path("it_was_run").exists()                                  # the trap itself works


@pytest.mark.parametrize("value", [{"a": np.zeros(2)}, {"a": np.float64(2)}, {"a": deque([1])}])
def test_foreign_values_of_another_program_are_refused(tmp_path, value):
    torch.save(value, tmp_path / "a.pt")
    assert "nothing in it was run" in refused(tmp_path / "a.pt")


def test_what_is_no_checkpoint_is_refused(tmp_path):
    assert "there is no" in refused(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("hello")
    refused(tmp_path / "text.pt")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("a", "b")
    refused(tmp_path / "zip.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    refused(tmp_path / "list.pt")
    (tmp_path / "folder.pt").mkdir()
    refused(tmp_path / "folder.pt")
    checkpoint.save_file(tmp_path / "a.pt", PAYLOAD)
    with pytest.raises(UsageError, match="lacks optimizer"):
        checkpoint.load_file(tmp_path / "a.pt", "step", "optimizer")


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_a_file(payload, file):
    file.write(b"PK" + bytes(100))


@pytest.mark.parametrize("module,name,broken", [
    (os, "fsync", no_space),
    (torch, "save", no_space),
    (torch, "save", half_a_file),                                       # found by opening it again
    (os, "replace", no_space),
])
def test_the_old_file_stays_if_saving_fails(tmp_path, monkeypatch, module, name, broken):
    path = tmp_path / "a.pt"
    checkpoint.save_file(path, {"step": 1})
    checkpoint.save_resume(tmp_path, 1, {"step": 1})
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(OSError, match="cannot write .*a.pt: .*; the old checkpoint is intact"):
        checkpoint.save_file(path, {"step": 2})
    with pytest.raises(OSError, match="cannot write .*rank0.pt"):
        checkpoint.save_resume(tmp_path, 2, {"step": 2})
    monkeypatch.undo()
    assert checkpoint.load_file(path) == {"step": 1}
    assert checkpoint.load_resume(tmp_path) == (1, {"step": 1})
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "resume-1"]         # nothing half is left


def test_a_disk_that_fills_up():
    """A real failure in the middle of a file, by the limit on its size."""
    checkpoint.save_resume(".", 1, {"w": torch.zeros(1000)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot write resume-2.tmp/rank0.pt: File too large"):
            checkpoint.save_resume(".", 2, {"w": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.load_resume(".")[0] == 1
    assert os.listdir(".") == ["resume-1"]


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


def test_what_a_killed_process_left_half_written_goes_with_the_next_checkpoint(tmp_path):
    """Whatever its step: a replay buffer is large."""
    for step in (3, 11):
        (tmp_path / f"resume-{step}.tmp").mkdir()
        (tmp_path / f"resume-{step}.tmp" / "rank0.pt.tmp").write_text("half")
    checkpoint.save_resume(tmp_path, 5, {"a": 5})
    assert os.listdir(tmp_path) == ["resume-5"]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint():
    """Children that do nothing but save, each killed by SIGKILL after a random time."""
    script = """
        import os, random, signal, time, torch
        from utils import checkpoint

        def save(step):
            value = {"w": torch.full((30_000,), float(step)), "step": step}
            checkpoint.save_file("policy.pt", value)
            checkpoint.save_resume(".", step, value)

        os.fsync = lambda descriptor: None      # a kill loses nothing that was written
        save(0)
        began = time.perf_counter()
        save(1)
        patience = 3 * (time.perf_counter() - began)
        step, half = 1, 0
        while step < 15 or half < 10:           # until kills have hit both saves and gaps
            child = os.fork()
            if child == 0:
                while True:
                    step += 1
                    save(step)
            time.sleep(random.uniform(0, patience))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            half += any(name.endswith(".tmp") for name in os.listdir("."))
            before, (step, resume) = step, checkpoint.load_resume(".")
            assert step == resume["step"] >= before and (resume["w"] == step).all()
            policy = checkpoint.load_file("policy.pt")
            assert (policy["w"] == policy["step"]).all() and policy["step"] in (step, step + 1)
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=PATIENCE)


def test_the_newest_whole_folder_counts(tmp_path):
    checkpoint.save_resume(tmp_path, 9, {"a": 9})
    os.rename(tmp_path / "resume-9", tmp_path / "kept")
    checkpoint.save_resume(tmp_path, 10, {"a": 10})
    os.rename(tmp_path / "kept", tmp_path / "resume-9")                 # killed before deleting it
    (tmp_path / "resume-11.tmp").mkdir()                                # killed while writing it
    (tmp_path / "resume-11.tmp" / "rank0.pt").write_text("half")
    assert checkpoint.load_resume(tmp_path) == (10, {"a": 10})
    checkpoint.save_resume(tmp_path, 11, {"a": 11})
    assert os.listdir(tmp_path) == ["resume-11"]


def test_another_number_of_ranks_is_refused(tmp_path):
    checkpoint.save_resume(tmp_path, 5, {"a": 5})
    checkpoint.save_file(tmp_path / "resume-5" / "rank1.pt", {"a": 5})
    with pytest.raises(UsageError, match="saved by 2 processes.*--num-procs is 1"):
        checkpoint.load_resume(tmp_path)


def test_every_rank_gets_back_what_it_handed_over(tmp_path, monkeypatch):
    checkpoint.save_resume(tmp_path, 5, {"of": 0})
    checkpoint.save_file(tmp_path / "resume-5" / "rank1.pt", {"of": 1})
    monkeypatch.setattr(mpi, "size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(mpi, "rank", lambda rank=rank: rank)
        assert checkpoint.load_resume(tmp_path) == (5, {"of": rank})


def test_the_rename_waits_for_every_rank(tmp_path, monkeypatch):
    """Rank 0 of two, the other one having failed: no folder appears, and rank 0 fails as well."""
    checkpoint.save_resume(tmp_path, 1, {"a": 1})
    monkeypatch.setattr(mpi, "barrier", lambda: None)
    monkeypatch.setattr(mpi, "gather", lambda value: [value, (False, "rank 1 has no space")])
    with pytest.raises(OSError, match="rank 1 has no space"):
        checkpoint.save_resume(tmp_path, 2, {"a": 2})
    assert os.listdir(tmp_path) == ["resume-1"]


@pytest.mark.parametrize("other,message", [
    (torch.nn.Linear(3, 4), r"weight is \[4, 3\], not \[2, 3\]"),
    (torch.nn.Linear(3, 2, bias=False), "bias is absent, not"),
    (torch.nn.BatchNorm1d(2), "weight is"),
    (torch.nn.Sequential(torch.nn.Linear(3, 2)), "weight is absent"),
])
def test_other_sizes_name_the_first_parameter(other, message):
    module = torch.nn.Linear(3, 2)
    before = module.weight.clone()
    with pytest.raises(UsageError, match=f"run holds another network: its {message}"):
        checkpoint.load_into(module, other.state_dict(), "run")
    assert torch.equal(module.weight, before)


def test_loading_keeps_the_views_of_an_optimizer():
    module, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = mpi.Adam(module)
    checkpoint.load_into(module, other.state_dict(), "run")
    assert torch.equal(optimizer.flat, torch.nn.utils.parameters_to_vector(other.parameters()))


# ---- Other files

def test_a_file_is_new_whatever_was_left_half_written(tmp_path):
    path = tmp_path / "config.json"
    path.with_name("config.json.tmp").write_text("half of ")
    files.write_text(path, "Übung")
    assert path.read_bytes() == "Übung".encode() and os.listdir(tmp_path) == ["config.json"]


def test_nothing_is_left_of_a_file_that_ctrl_c_cuts_short(tmp_path):
    path = tmp_path / "config.json"
    files.write_text(path, "before")
    with pytest.raises(KeyboardInterrupt), files.whole(path) as file:
        file.write(b"half of")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["config.json"]


def test_a_file_appears_after_it_has_been_flushed(tmp_path, monkeypatch):
    path, fsync, seen = tmp_path / "config.json", os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda number: (seen.append(path.exists()), fsync(number)))
    files.write_text(path, "text")
    assert seen[0] is False and path.read_text() == "text"
