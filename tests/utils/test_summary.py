"""The last lines of a run: how it went, and commands that work."""
import os
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

from algos import ppo
from tests.helpers import PATIENCE, mpiexec, rows, run, saved
from tests.toy import Config, Stop, start, train
from utils import summary as words
from utils.run import parse
from utils.summary import evaluations, last_returns, rounded, summary


def said(out):
    """Return {title: text} of the summary at the end of what a run printed."""
    lines = out.splitlines()
    first = max(i for i, line in enumerate(lines) if line.startswith(("done ", "stopped ")))
    return {line[:10].strip(): line[10:] for line in lines[first:]}


def write(name, rows):
    with open(name, "w") as file:
        file.write("\n".join([*rows, ""]))
    return name


# ---- Figures

@pytest.mark.parametrize("count", [1, 99, 100, 101, 250])
def test_train100_is_the_mean_of_the_last_hundred_episodes(count):
    returns = np.arange(count) ** 2 / 7
    path = write("episodes.csv", ["step,time,env,ep_ret,ep_len",
                                  *(f"{k},0.5,0,{ret},9" for k, ret in enumerate(returns))])
    last = returns[-100:]
    expected = f"{rounded(last.mean())}, mean return of the last {len(last)} training episodes"
    assert last_returns(path) == expected


def test_a_run_without_an_episode():
    path = write("episodes.csv", ["step,time,env,ep_ret,ep_len"])
    assert last_returns(path).startswith("no episode has ended")


def test_the_last_and_the_best_evaluation():
    path = write("progress.csv", ["step,eval_ret_mean", "1000,5.0", "2000,30.0", "3000,30.0",
                                  "4000,", "5000,-7.0", "6000,"])
    assert evaluations(path).startswith("-7.00 at step 5,000; best 30.0 at step 2,000 ")
    assert evaluations(write("progress.csv", ["step,loss", "1000,5.0"])) == ""
    assert evaluations(write("progress.csv", ["step,eval_ret_mean", "1000,"])) == ""


# ---- When it is printed

def test_the_end_of_a_run(capsys):
    train(Config())
    found = said(capsys.readouterr().out)
    assert list(found) == ["done", "train100", "files", "play", "plot", "resume"]
    assert found["done"].startswith("800 of 800 steps in 0:00:0")
    returns = [float(row["ep_ret"]) for row in rows("run", "episodes.csv")]
    assert len(returns) == 16
    assert found["train100"].startswith(f"{rounded(np.mean(returns))}, mean return of the last 16 ")
    assert found["files"] == "run"
    assert found["resume"].endswith("--run-dir run --resume --total-steps 1600")


def test_a_run_that_was_stopped_or_failed(capsys):
    with pytest.raises(SystemExit) as caught:
        with start(Config()) as log:
            log.advance(100, loss=1.0)
            signal.raise_signal(signal.SIGTERM)
            log.advance(100, loss=1.0)
    assert caught.value.code == 143
    found = said(capsys.readouterr().out)
    assert found["stopped"].startswith("200 of 800 steps in ")
    assert found["train100"].startswith("no episode has ended")
    assert found["resume"] == "python -m tests.toy --run-dir run --resume"
    with pytest.raises(Stop):
        train(Config(run_dir="other"), stop_at=300)
    assert "resume  " not in capsys.readouterr().out


def test_time_goes_on_after_a_resume(capsys):
    with pytest.raises(SystemExit):
        with start(Config()) as log:
            log.started -= 7200                                 # two hours ago
            signal.raise_signal(signal.SIGINT)
            log.advance(100)
    assert said(capsys.readouterr().out)["stopped"].startswith("100 of 800 steps in 2:00:0")
    with start(Config(resume=True)) as log:
        log.advance(700)
    assert said(capsys.readouterr().out)["done"].startswith("800 of 800 steps in 2:00:0")


def test_a_run_that_the_user_started_with_mpiexec(monkeypatch):
    train(Config(run_dir="a run"))
    text = said(summary(Config(run_dir="a run"), "algos.toy", 100, 5.0))
    assert text["resume"] == "python -m algos.toy --run-dir 'a run' --resume"
    assert text["play"] == "python -m utils.play 'a run'" and text["files"] == "a run"
    monkeypatch.setattr(words, "started_by_user", lambda: True)
    monkeypatch.setattr(words.mpi, "size", lambda: 3)
    text = said(summary(Config(run_dir="a run"), "algos.toy", 100, 5.0))
    assert text["resume"] == "mpiexec -n 3 python -m algos.toy --run-dir 'a run' --resume"


# ---- The commands

FLAGS = ("--env CartPole-v1 --num-envs 2 --rollout-steps 512 --minibatch-size 256 --epochs 1 "
         "--hidden 8 --eval-every 2048 --run-dir run").split()


def do(line):
    """Run a printed command with this Python."""
    python, *args = shlex.split(line)
    assert python == "python"
    return run([sys.executable, *args]).stdout


def test_every_command_works():
    out = run([sys.executable, "-m", "algos.ppo", *FLAGS, "--total-steps", "4096"]).stdout
    found = said(out)
    assert list(found) == ["done", "train100", "eval", "files", "play", "plot", "resume"]
    assert "best" in found["eval"] and os.path.exists("run/best.pt")
    scores = [float(row["eval_ret_mean"]) for row in rows("run") if row["eval_ret_mean"]]
    assert found["eval"].startswith(f"{scores[-1]:.1f} at step 4,096; best {max(scores):.1f} at ")
    assert "10 episodes" in do(found["play"])
    assert do(found["plot"]) and os.path.exists("curves.svg")
    out = do(found["resume"])
    assert saved("run")[0] == 8192 and said(out)["done"].startswith("8,192 of 8,192")


@pytest.mark.skipif(os.name != "posix" or os.cpu_count() < 2, reason="no two ranks")
@pytest.mark.parametrize("launcher", [[], [mpiexec(), "-n", "2"]], ids=["num-procs", "mpiexec"])
def test_two_processes_say_it_once(launcher):
    flags = [] if launcher else ["--num-procs", "2"]
    out = run([*launcher, sys.executable, "-m", "algos.ppo", *FLAGS, *flags, "--total-steps",
               "512"]).stdout
    assert out.count("done  ") == out.count("resume  ") == 1
    again = said(out)["resume"]
    assert again.startswith("mpiexec -n 2 python" if launcher else "python -m")
    line = again.replace("mpiexec", mpiexec()).replace("python", sys.executable, 1)
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert saved("run", 1)[0] == 1024


def test_the_command_line_of_a_resume_needs_no_other_setting():
    train(Config())
    resume = said(summary(Config(), "algos.ppo", 1, 1.0))["resume"]
    cfg = parse(ppo.Config, "", shlex.split(resume)[3:])
    assert cfg.given == {"run_dir", "resume"}


@pytest.mark.parametrize("ret,text", [
    (4467.23, "4467.2"), (-137.84, "-137.8"), (-1.6583, "-1.66"), (0.0123, "0.0123"),
    (0, "0.00"), (-7, "-7.00"), (10, "10.0"), (200_000, "200000.0"),
])
def test_small_returns_have_digits_too(ret, text):
    assert rounded(ret) == text
