"""A run is saved, resumed, stopped and killed, and nothing is lost. With a toy algorithm."""
import json
import multiprocessing
import math
import os
import random
import re
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.helpers import mpiexec, noted, not_on_windows, refused, rows, run, saved
from tests.toy import Agent, Config, Rare, Stop, start, train
from utils.files import read_table
from utils.logger import Logger, Table
from utils.run import checkpoint, directory, run as run_module, saver
from utils.run.directory import read_config
from utils.run.signals import Stopped


def test_resumed_equals_uninterrupted():
    train(Config(run_dir="whole"))
    for stop_at in (200, 500, 700):
        with pytest.raises(Stop):
            train(Config(resume=stop_at > 200), stop_at=stop_at, always=True)
    with open("run/progress.csv", "a") as file:                     # a kill after the checkpoint
        file.write(rows()[-1]["step"].replace("7", "8") + ",1.0" + ",9" * 18 + "\n900,2")
    with open("run/episodes.csv", "a") as file:
        file.write("740,3.0,1,5.0,3\n7")
    train(Config(resume=True))
    assert rows("run") == rows("whole") and len(rows("run")) == 8
    ends = [[row["step"], row["ep_ret"]] for row in rows(name="episodes.csv")]
    assert ends == [[row["step"], row["ep_ret"]] for row in rows("whole", "episodes.csv")]
    times = [float(row["time"]) for row in read_table("run", "progress.csv")]
    assert times == sorted(times)


def test_what_an_environment_draws_by_global_generators_goes_on(capsys):
    """And the run says at which step it goes on."""
    with start(Config()) as log:
        random.random(), np.random.rand()
        log.advance(100)
        expected = [random.random(), *np.random.rand(3)]
    with start(Config(resume=True)):
        assert [random.random(), *np.random.rand(3)] == expected
    assert "run: run from step 100" in capsys.readouterr().out


def test_a_resumed_run_that_fails_names_its_checkpoint():
    with start(Config()) as log:
        log.advance(100)
    with pytest.raises(Stop) as caught, start(Config(resume=True)):
        raise Stop
    assert "the checkpoint of step 100 in run stays" in caught.value.__notes__[0]


def test_when_it_saves():
    with start(Config(total_steps=1e6)) as log:
        assert saved("run")[0] == 0                                 # --resume works at once
        for steps, seconds, took, step in (
                (100, 0, 0, 100),                                   # the first report
                (100, 0, 0, 100), (100, 61, 0, 300),                # a minute after the last
                (100, 61, 10, 300), (100, 201, 10, 500),            # a replay buffer: slower
                (10**6, 0, 0, 10**6 + 500)):                        # the end
            log.saver.time, log.saver.took = time.perf_counter() - seconds, took
            log.advance(steps)
            assert saved("run")[0] == step


@pytest.mark.parametrize("killed_by", ["open", "save_policy", "save_resume"])
def test_a_run_killed_before_its_first_checkpoint_begins_anew(monkeypatch, killed_by):
    """It has its config.json and nothing to lose."""
    def killed(*args, **kwargs):
        raise Stop

    train(Config(run_dir="whole", seed=3))
    train(Config(run_dir="other", seed=5))
    target = {"open": Logger, "save_policy": saver.Saver, "save_resume": checkpoint}[killed_by]
    for name, more in [("run", {}), ("warm", {"init_from": "other"})]:
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(target, killed_by, killed)
            train(Config(run_dir=name, seed=3, **more))
        assert not checkpoint.resume_folders(name)
    train(Config(run_dir="run", seed=3, resume=True))
    assert rows("run") == rows("whole")
    weights = checkpoint.load_file("other/policy.pt")["agent"]["weight"]
    agent = Agent(3, 2)
    with start(Config(run_dir="warm", seed=3, init_from="other", resume=True), agent) as log:
        assert log.step == 0 and torch.equal(agent.weight, weights)
    assert read_config("warm")["init_from"] == {"run": "other", "step": 800}


def test_best_policy(monkeypatch):
    agent = torch.nn.Linear(3, 2)
    written = noted(monkeypatch, checkpoint, "save_file", lambda path, _: Path(path).name)
    with start(Config(), agent) as log:
        log.advance(100)
        assert not Path("run/best.pt").exists()
        for ret, spread in ((-5.0, 0.0), (7.0, 1.0), (6.0, 9.0), (5.0, 0.0)):
            torch.nn.init.constant_(agent.weight, ret)
            log.saver.time = -1e9
            log.advance(100, eval_ret=[ret - spread, ret + spread])  # the mean decides
        assert written[-7:-4] == ["best.pt", "policy.pt", "rank0.pt"]
        log.saver.time = -1e9
        log.advance(100)
    with start(Config(resume=True), agent) as log:
        log.advance(100, eval_ret=[6.5])                             # the best is remembered
    best = checkpoint.load_file("run/best.pt")
    assert best["step"] == 300 and (best["agent"]["weight"] == 7).all()
    assert Config(**best["settings"]) == Config(torch_threads=1)
    for step, ret in (700, 90.0), (800, 50.0):                  # after 90, it is killed
        with start(Config(resume=True, total_steps=2000, eval_every=9999), agent) as log:
            assert log.step == step
            log.advance(100)
            log.saver.time = math.inf
            log.advance(100, eval_ret=[ret])
        assert checkpoint.load_file("run/best.pt")["best"] == 90
    Path("run/best.pt").write_bytes(b"damaged")
    with start(Config(resume=True, total_steps=2000), agent) as log:
        log.advance(100, eval_ret=[1.0])
    assert checkpoint.load_file("run/best.pt")["best"] == 1


def test_reports_are_due_at_multiples_of_report_every_and_at_the_end():
    """What is stored in between waits for the next report; `metrics` count only where it is due."""
    with start(Rare(total_steps=700)) as log:
        for number in range(1, 8):
            log.store(stored=number)
            log.advance(100, passed=number)
    assert [row["step"] for row in rows()] == ["300", "500", "700"]
    assert [row["stored"] for row in rows()] == ["2.0", "4.5", "6.5"]
    assert [row["passed"] for row in rows()] == ["3.0", "5.0", "7.0"]


def test_environments_are_closed_even_before_the_first_report():
    closed = []
    with pytest.raises(Stop), start(Rare()) as log:
        log.report(100, SimpleNamespace(close=lambda: closed.append("once")))
        raise Stop
    assert closed == ["once"] and not rows()


@pytest.mark.parametrize("every,report_every,expected", [
    (250, 1, [300, 500, 800, 1000]), (300, 1, [300, 600, 900, 1000]), (2000, 1, [1000]),
    (100, 1, [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]),
    (100, 400, [400, 800, 1000]), (500, 400, [800, 1000]), (0, 1, [])])
def test_evaluation_is_due(every, report_every, expected, monkeypatch):
    """At the first report that reaches a multiple, and at the end, multiple or not."""
    calls = []

    def evaluate(agent, cfg, episodes, seed, *rest, **more):
        calls.append((agent.weight.tolist(), cfg.env, episodes, seed))
        return np.array([1.0, 3.0]), np.ones(2)

    monkeypatch.setattr(run_module, "evaluate", evaluate)
    agent = Agent(3, 2)
    cfg = Rare(eval_every=every, total_steps=1000, report_every=report_every, seed=5)
    with start(cfg, agent) as log:
        for _ in range(10):
            log.advance(100)
    due = [int(row["step"]) for row in rows() if row.get("eval_ret_mean")]
    assert due == expected
    assert calls == [(agent.weight.tolist(), "CartPole-v1", 10, 5)] * len(expected)
    assert not expected or rows()[-1]["eval_ret_max"] == "3.0"


def test_a_run_that_restarts_at_0_hides_what_tensorboard_got_before():
    """Killed after its first report, while the checkpoint of step 0 was its only one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    with start(Config()) as log:
        log.logger.lines = 1                                    # no checkpoint at the first one
        log.advance(100, loss=1.0)
        log.advance(50, loss=2.0)
    assert checkpoint.resume_folders("run").keys() == {0}
    with start(Config(resume=True)) as log:
        assert log.step == 0
        log.advance(100, loss=3.0)
    board = EventAccumulator("run").Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(100, 3.0)]


def test_a_checkpoint_of_another_network_is_refused():
    """What is damaged in the file itself is in tests/utils/test_checkpoint.py."""
    with pytest.raises(Stop):
        train(Config(), stop_at=200)
    config = Path("run/config.json")
    text = config.read_text()
    config.write_text(text.replace('"width": 2', '"width": 5'))
    refused(train, Config(resume=True, width=5), says="^run holds another network: size mismatch")
    config.write_text(text)
    train(Config(resume=True))
    said = "^--init-from: run/policy.pt holds another network: size mismatch for bias"
    refused(train, Config(run_dir="other", init_from="run", width=4), says=said)
    said = "^nowhere/policy.pt cannot be read as a checkpoint: .* No such"
    refused(train, Config(run_dir="other", init_from="nowhere"), says=said)


def test_a_signal_to_a_single_process_does_not_wait_for_the_report():
    """Which on images may be a minute away. What was collected since the last one is reported."""
    with pytest.raises(Stopped), start(Rare(eval_every=250)) as log:
        log.advance(100, passed=1)
        log.store(stored=1)
        signal.raise_signal(signal.SIGTERM)
        log.advance(50, passed=2)
    (row,) = rows()
    assert (row["step"], row["stored"], row["passed"]) == ("150", "1.0", "2.0")
    assert saved("run")[0] == 150


def test_a_second_ctrl_c_ends_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught, start(Config()) as log:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)                         # one Ctrl-C, come by two ways
        log.signals.time -= 1
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second Ctrl-C was not noticed")
    assert "the checkpoint of step 0 in run stays; --resume" in caught.value.__notes__[0]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("module, where", [
    (run_module, "lock_and_empty"), (directory, "origin"), (run_module, "write_config")])
def test_ctrl_c_while_the_run_is_set_up_waits_for_what_can_be_resumed(module, where, monkeypatch):
    """Half a directory could be neither resumed nor replaced."""
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        noted(patch, module, where, lambda *_: signal.raise_signal(signal.SIGINT))
        train(Config())
    train(Config(resume=True))
    assert len(rows()) == 8


@not_on_windows("Windows does not fork")
def test_processes_of_an_environment_end_when_they_are_told_to():
    """Forked from a run, they have its handlers. A Ctrl-C reaches them, too, but is for the run."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with start(Config()):
        child.start()
        os.kill(child.pid, signal.SIGINT)
        child.join(0.3)
        assert child.is_alive()
        child.terminate()
        child.join(10)
    ended = child.exitcode
    child.kill()
    assert ended == 128 + signal.SIGTERM


def test_threads_leave_the_signals_alone():
    done, before = [], signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: done.append(train(Config())))
    thread.start()
    thread.join()
    assert done and signal.getsignal(signal.SIGTERM) is before


def test_a_table_that_ctrl_c_keeps_from_being_written_anew_stays(monkeypatch, tmp_path):
    table = Table(tmp_path / "a.csv", ["step", "x"], 9)
    table.write([{"step": 1, "x": 2.0}])
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        table.write([{"step": 2, "late": 3.0}])                     # a new column
    assert (tmp_path / "a.csv").read_text() == "step,x\n1,2.0\n"
    assert os.listdir(tmp_path) == ["a.csv"]


def script(text, *command, code=0):
    """Runs a script in a process of its own, where `train` and the others above are at hand."""
    # A kill loses nothing that was written; only a power cut needs the slow fsync.
    text = ("from tests.utils.test_saving import *\nos.fsync = lambda descriptor: None\n"
            + textwrap.dedent(text))
    return run([*command, sys.executable, "-c", text], code).stderr


TWO_RANKS = """
    from utils import mpi
    from utils.optim import Adam
    rank, told = mpi.rank(), {}

    def begin(name, **kwargs):
        return start(Config(run_dir=name, **kwargs))

    def ending(action, *args):
        try:
            action(*args)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    with begin("numbers") as log:           # names that one rank lacks, episodes of both
        both = {"a": torch.arange(3.0) + 10 * rank, "b": rank}
        log.advance(100, (22 + rank, 1, 5.0 + rank, 3), **both, **({"c": 7} if rank else {}))
        log.advance(100, *[(24, 0, 1.0, 1)] * rank)
        if rank == 1:                       # only one rank is told to stop
            os.kill(os.getpid(), signal.SIGTERM)
        told["signal"] = ending(log.advance, 100)

    with start(Rare(run_dir="rare")) as log:
        if rank == 1:                       # the others report at step 300 alone
            os.kill(os.getpid(), signal.SIGTERM)
        log.advance(100)
        told["rare"] = ending(log.advance, 200)

    torch.manual_seed(rank)                 # the agent of rank 0 is everybody's from the start
    agent = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    agent[1].running_mean += rank + 1
    kept = agent[0].weight.detach().clone()
    optimizer = Adam(agent)
    with start(Config(run_dir="equal"), agent, optimizer=optimizer) as log:
        told["kept"] = torch.equal(agent[0].weight, kept)
        told["state"] = {name: x.tolist() for name, x in agent.state_dict().items()}
        optimizer.flat.zero_()                  # still views of the optimizer's vector
        told["views"] = agent[0].weight.abs().sum().item() == 0

    with begin("nan") as log:
        log.advance(100, loss=1.0)
        told["nan"] = ending(lambda: log.advance(100, loss=float("nan") if rank else 1.0))

    for late in (1, 0):                     # the clock of one rank says that a checkpoint is due
        with begin(f"late{late}", total_steps=1000) as log:
            log.advance(100)
            log.saver.time = -1e9 if rank == late else log.saver.time
            log.advance(100)
            mpi.gather(None)                # rank 0 has put it in its place
            told[f"late{late}"] = checkpoint.load_resume(f"late{late}")[0]

    Path(f"rank{rank}.json").write_text(json.dumps(told))
    """


def test_two_ranks():
    script(TWO_RANKS, mpiexec(), "-n", "2")
    told = [json.loads(Path(f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank in told:
        assert rank["signal"].startswith("Stopped: signal 15") and rank["rare"] == rank["signal"]
        assert "loss is nan at step 200" in rank["nan"]
        assert (rank["late1"], rank["late0"]) == (100, 200)     # rank 0 decides for all
    assert [rank["kept"] for rank in told] == [True, False] and all(r["views"] for r in told)
    assert told[0]["state"] == told[1]["state"] and told[0]["state"]["1.running_mean"] == [1, 1]
    first, second, _ = rows("numbers")
    assert [first[f"a_{what}"] for what in ("mean", "min", "max")] == ["6.0", "0.0", "12.0"]
    assert float(first["a_std"]) == pytest.approx(np.std([0, 1, 2, 10, 11, 12]))
    assert (first["b"], first["c"], second["c"]) == ("0.5", "7.0", "")
    ends = [[row[name] for name in ("step", "env", "ep_ret")]
            for row in rows("numbers", "episodes.csv")]
    assert ends == [["8", "6", "6.0"], ["12", "1", "5.0"], ["104", "5", "1.0"]]
    assert checkpoint.resume_folders("numbers").keys() == {300}
    assert len(rows("nan")) == 1 and checkpoint.resume_folders("nan").keys() == {100}


FULL = """
    from utils import mpi
    with start(Config()) as log:
        log.advance(100)
        log.saver.time = -1e9
        if mpi.rank() == 1:
            torch.save = lambda *args: os.close(-1)
        log.advance(100)
    """


def test_a_rank_whose_disk_is_full_ends_the_other_and_the_checkpoint_stays():
    said = script(FULL, mpiexec(), "-n", "2", code=1)
    assert said.count("rank 1 of 2: Traceback") == 1 and "OSError: " in said
    assert checkpoint.resume_folders("run").keys() == {100}
    assert sorted(os.listdir("run/resume-100")) == ["rank0.pt", "rank1.pt"]
    said = refused(checkpoint.load_resume, "run")
    assert re.search("saved by 2 processes.*--num-procs is 1", said)


OTHER_HOST = """
    from utils import mpi
    from utils.command import program
    if mpi.rank() == 1:
        {}
    with program(), start(Config()):
        raise Stop
    """


@pytest.mark.parametrize("differs,refusal", [
    ("os.chdir('/')", "does not see --run-dir run"),
    ("directory.whose_code = lambda cfg: ('another', 'PyTorch')", "has another tests.toy or PyT")])
def test_a_rank_on_a_host_that_differs_is_refused(differs, refusal):
    said = script(OTHER_HOST.format(differs), mpiexec(), "-n", "2", code=2)
    assert re.search(f"rank 1 of 2: error: rank 1 on .* {refusal}", said)
