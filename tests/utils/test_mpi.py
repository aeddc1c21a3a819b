"""Averages against NumPy, seeds, and ranks that start, fail and end together."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import PATIENCE, close, mpiexec, not_on_windows, refused, run
from utils import mpi
from utils.seeds import seed_of
from utils.run import launch
from utils.stats import RunningStats

# What an algorithm file looks like to `mpi`; `mode` says how it goes wrong.
TOY = '''
import os, signal, sys, time
import torch
from utils import mpi
from utils.errors import UsageError
from utils.command import program
from utils.run.launch import check_ranks, start_ranks

def train(procs, mode):
    start_ranks(procs)
    check_ranks(procs)
    mpi.say("device: cpu")
    if mode == "refused":
        raise UsageError("--num-envs is 3")
    mpi.say("run: here")
    rank = mpi.rank()
    print(f"rank {rank} of {mpi.size()}", flush=True)
    grad = torch.zeros(8)
    got = []
    if mode == "signal":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: got.append(number))
        mpi.gather(None)
        mpi.say("learning")
    while mode:
        mpi.average(grad)
        if mode == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if any(mpi.gather(got)):
            time.sleep(0.5)     # a checkpoint takes its time
            open(f"saved{rank}", "w").close()
            raise SystemExit(128 + max(map(max, filter(None, mpi.gather(got)))))
        time.sleep(0.01)

if __name__ == "__main__":
    with program():
        train(int(sys.argv[1]), sys.argv[2])
'''

# Data differ from rank to rank.
COLLECTIVES = '''
import contextlib
import json
import platform
import numpy as np, torch
from utils import mpi
from utils.run.launch import from_root, on_host
from utils.run.saver import check_equal
from utils.stats import moments

rank = mpi.rank()
rng = np.random.default_rng(rank)
torch.manual_seed(0)

f64 = torch.from_numpy(rng.standard_normal((5, 4)))
many = torch.arange(200_000.0)
tensors = {"f64": f64, "f32": f64.float(), "strided": f64.clone().t()[::2],
           "kl": torch.tensor(float(rank)), "big": many + rank}
for tensor in tensors.values():
    mpi.average(tensor)
tensors["big"] = (tensors["big"] - many).unique()
out = {name: tensor.tolist() for name, tensor in tensors.items()}
rows = torch.from_numpy(1e6 + rng.standard_normal((rank + 2, 4)))
count, mean, var = moments(rows)
out["moments"] = [count, mean.tolist(), var.tolist()]
out["gather"] = mpi.gather({"rank": rank})
out["share"] = mpi.share(12)
with contextlib.suppress(ValueError):                           # a remainder would be lost
    out["share"] = mpi.share(12 * mpi.size() + 1)

flat = torch.linspace(-1000, 1001, 8)
if rank == 1:
    flat = flat.flip(0)                                         # the same sum, in another order
if rank == 2:
    flat[3] = torch.nextafter(flat[3], flat[4])                 # less than a sum would see
try:
    check_equal(flat)
except RuntimeError as error:
    out["differ"] = str(error)
out["looked"] = []
out["root"] = from_root(lambda: out["looked"].append(rank) or rank)
platform.node = lambda: "ab"[rank % 2]                          # two machines
out["local"] = on_host()
everything = mpi.gather(out)
if rank == 0:
    print(json.dumps(everything))
'''


def run_ranks(count, program, *args, code=0):
    """Run a program in so many processes. Return (stdout, stderr)."""
    Path("toy.py").write_text(program)
    done = run([mpiexec(), "-n", count, sys.executable, "toy.py", *args], code)
    return done.stdout, done.stderr


# ---- One process

@pytest.mark.parametrize("cuts", [[], [100], [1, 2, 3], [10, 50, 51, 190]])
@pytest.mark.parametrize("offset,scale", [(5, 2), (0, 1e-3), (1e6, 1 / 16), (-1e4, 100)])
def test_running_statistics_are_numpys_wherever_the_rows_are_cut(offset, scale, cuts):
    # Whole multiples, since at 1e6 float32 has steps of 1/16.
    rows = offset + scale * np.round(np.random.default_rng(0).normal(0, 3, (200, 2)))
    rows = rows.astype(np.float32)
    stats = RunningStats((2,))
    for part in np.split(rows, cuts):
        stats.update(torch.from_numpy(part))
    rows = rows.astype(np.float64)
    close(stats.count, 200.0)
    close(stats.mean, rows.mean(0), rtol=1e-12, atol=1e-9)
    close(stats.var, rows.var(0), rtol=1e-9, atol=0)
    assert {buffer.dtype for buffer in stats.buffers()} == {torch.float64}


@pytest.mark.parametrize("value,mean,var,normal,scaled", [
    (5, 2, 4, 1.5, 2.5), (1e-4, 0, 0, 1, 1), (21, 0, 4, 10, 10), (-1e9, 1, 4, -10, -10),
    (1e6, 1e6 + 0.2, 0.04, -1, 10)])                            # float32 has no such mean
def test_normalize_and_scale_by_hand(value, mean, var, normal, scaled):
    """The 1e-8 stands in the root, and the difference is taken before it is rounded."""
    stats = RunningStats((1,))
    stats.mean.fill_(mean), stats.var.fill_(var)
    value = torch.tensor([float(value)])
    close(stats.normalize(value), [normal])
    close(stats.scale(value), [scaled])
    assert stats.normalize(value).dtype == stats.scale(value).dtype == torch.float32


def test_seeds_differ_by_run_rank_stream_and_step_and_leave_room_to_count(monkeypatch):
    seeds = []
    for number in (0, 1):
        monkeypatch.setattr(mpi, "rank", lambda number=number: number)
        seeds += [seed_of(run, stream, step) for run in (1, 2) for stream in (0, 1, 2)
                  for step in (0, 2048)]
    # Two environments of one vector are one apart: so near must no other seed be.
    assert len(seeds) == 24 and min(np.diff(sorted(seeds))) > 1000
    assert seed_of(2, 1, 2048) == seeds[21] and max(seeds) + 1000 < 2**32


# ---- The launcher

@pytest.fixture
def started(monkeypatch):
    """The list of what `start_ranks` would start, on two cores and without a launcher."""
    started, _ = [], mpiexec()              # which skips where there is none
    for name in (*mpi.SIZES, "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "execve", lambda *args: started.append(args))
    monkeypatch.setattr(os, "dup2", lambda *args: None)
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "algos.ppo", "--num-procs", "2"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return started


def test_start_ranks_starts_the_same_command_under_mpiexec(started, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "1")  # that of a launcher around the shell
    launch.start_ranks(1)
    launch.start_ranks(2)
    (file, command, env), = started
    assert file == mpiexec()
    assert command == [mpiexec(), "-n", "2", sys.executable, "-m", "algos.ppo", "--num-procs", "2"]
    assert env["PLAINRL_PROCS"] == "2" and "PMI_SIZE" not in env


@pytest.mark.parametrize("env, expected", [
    ({}, 1), ({"PMI_SIZE": "3"}, 3), ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, 4),
    ({"PMIX_RANK": "0"}, 0), ({"PMI_SIZE": "1", "PLAINRL_PROCS": "2"}, 2)], ids=str)
def test_launchers_say_how_many_they_started(started, monkeypatch, env, expected):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert mpi.launched() == expected
    launch.start_ranks(2)
    assert bool(started) == (expected == 1)  # else they are there already


def test_start_ranks_refuses(started, monkeypatch):
    refused(launch.start_ranks, 3, says="--num-procs is 3.* 1 to 2")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    refused(launch.start_ranks, 2, says="--num-procs is 2.* mpiexec")
    assert started == []


@pytest.mark.parametrize("procs, size, launched, message", [
    (2, 1, 1, "--num-procs is 2, but Python runs one process: start python -m algos.NAME"),
    (2, 3, 3, "--num-procs is 2, but the launcher started 3"),
    (1, 1, 3, "3 processes were started, but MPI connects 1"),
    (1, 2, 0, ""), (2, 2, 2, "")])
def test_check_ranks(started, monkeypatch, procs, size, launched, message):
    monkeypatch.setattr(mpi, "size", lambda: size)
    monkeypatch.setattr(mpi, "launched", lambda: launched)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)      # put back afterwards
    if message:
        refused(launch.check_ranks, procs, says=message)
    else:
        launch.check_ranks(procs)
    assert (sys.excepthook is launch.die) == (not message)


# ---- Real ranks

def test_three_ranks_compute_what_numpy_does():
    outs = json.loads(run_ranks(3, COLLECTIVES)[0])
    rngs = [np.random.default_rng(k) for k in range(3)]
    data = np.stack([rng.standard_normal((5, 4)) for rng in rngs])
    rows = np.concatenate([1e6 + rng.standard_normal((k + 2, 4)) for k, rng in enumerate(rngs)])
    assert [(out["root"], out["looked"], out["local"]) for out in outs] == [
        (0, [0], [0, 2]), (0, [], [0, 1]), (0, [], [1, 2])]
    for out in outs:
        np.testing.assert_allclose(out["f64"], data.mean(0), rtol=1e-14)
        np.testing.assert_allclose(out["f32"], data.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out["strided"], data.mean(0).T[::2], rtol=1e-14)
        assert out["kl"] == 1.0 and out["big"] == [1.0]
        count, mean, var = out["moments"]
        assert count == 9
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-14)
        np.testing.assert_allclose(var, rows.var(0), rtol=1e-6)     # of an average of 1e6
        assert out["gather"] == [{"rank": k} for k in range(3)]
        assert out["share"] == 4
        assert out["differ"] == "the parameters of ranks [1, 2] differ from those of rank 0"


def test_a_refusal_by_all_ranks_is_said_once_and_has_status_2():
    """Below it is what mpiexec has to say."""
    out, err = run_ranks(2, TOY, 1, "refused", code=2)
    assert out.startswith("device: cpu\n") and "run: " not in out
    assert err.startswith("error: --num-envs is 3\n") and err.count("error: ") == 1


def test_a_rank_that_is_killed_takes_the_other_with_it():
    """So does one with an error or a refusal of its own, in test_saving.py."""
    run_ranks(2, TOY, 2, "killed", code=9)


@not_on_windows("there is no mpich for Windows")
@pytest.mark.skipif(launch.cores() < 2, reason="--num-procs 2 is refused on one core")
@pytest.mark.parametrize("send, number, expected", [
    # Ctrl-C goes to all in the terminal, `kill PID` to the one process that the user started.
    pytest.param("killpg", signal.SIGINT, 130, marks=pytest.mark.slow),
    ("kill", signal.SIGTERM, 143)])
def test_a_signal_leaves_every_rank_the_time_to_save(send, number, expected):
    Path("toy.py").write_text(TOY)
    with subprocess.Popen([sys.executable, "toy.py", "2", "signal"], stdout=subprocess.PIPE,
                          start_new_session=True, text=True) as process:
        assert any("learning" in line for line in process.stdout)
        getattr(os, send)(process.pid, number)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == expected
    assert sorted(map(str, Path().glob("saved*"))) == ["saved0", "saved1"]
