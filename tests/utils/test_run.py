"""A whole run: what it writes, that its seed decides all of it, how it is stopped and goes on."""
import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algos import a2c, acer, c51, dqn, dqn_atari, dqn_per, ppo, ppo_popart, qr_dqn, sac, trpo, vpg
from tests.envs import Ends
from tests.helpers import (
    PATIENCE, ROOT, agent_for, assert_same_run, command, mpiexec, refused, rows, run, same, saved,
    snapshot, steps, wait_for)
from tests.toy import Config, Stop, Toy, start, train as toy_train
from utils import envs, mpi, play, results, run as run_module
from utils.errors import UsageError
from utils.run.directory import find_run_dir, read_config
from utils.run.run import Stopped
from utils.run.settings import parse
from utils.run.summary import rounded, summary

SMALL = {"env": "CartPole-v1", "num_envs": 2, "rollout_steps": 64, "minibatch_size": 32,
         "epochs": 2, "hidden": (8,), "total_steps": 192}
FLAGS = "--num-envs 2 --rollout-steps 64 --minibatch-size 32 --epochs 2 --hidden 8".split()


def train(**settings):
    return ppo.train(ppo.Config(**SMALL | settings))


def assert_no_gap(run_dir, starts=(0,), num_envs=2, batch=64):
    """Every update has its row, every step of every environment is in one episode at most.

    `starts`: the steps at which all environments began anew, at the start or after a resume.
    """
    found = steps(run_dir)
    assert found == list(range(batch, found[-1] + 1, batch))
    last = dict.fromkeys(range(num_envs), 0)
    for episode in rows(run_dir, "episodes.csv"):
        end, env = int(episode["step"]), int(episode["env"])
        begin = end - int(episode["ep_len"]) * num_envs
        cut = max((start for start in starts if start < end), default=0)
        assert begin == max(last[env], cut), f"{episode} does not follow {last[env]}, {starts}"
        last[env] = end
    assert min(last.values()) > starts[-1], "no episode to look at"


# ---- What a run leaves behind

HOPPER = "--env Hopper-v4 --total-steps 1.5e3 --rollout-steps 512 --epochs 2 --seed 3"
RUN_DIR = "runs/Hopper-v4/ppo/seed3"


@pytest.fixture(scope="module")
def hopper(tmp_path_factory):
    """The same command in two directories: what the processes said, and their run directories."""
    homes = [tmp_path_factory.mktemp(name) for name in "ab"]
    done = [run(command(*HOPPER.split()), cwd=home) for home in homes]
    return done, [home / RUN_DIR for home in homes]


def test_start_up_is_clean(hopper):
    (done, _), (run_dir, _) = hopper
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == f"run: {RUN_DIR}, 1,500 steps" and lines[1].startswith("device: cpu")
    assert lines[2].split()[:4] == ["step", "steps/s", "ep_ret", "ep_len"]
    assert [line.split()[0] for line in lines[3:6]] == ["512", "1,024", "1,536"]
    assert lines[6].startswith("done")
    assert os.listdir(run_dir.parents[3]) == ["runs"]           # no MUJOCO_LOG.TXT


def test_same_seed_in_fresh_processes_same_numbers(hopper):
    _, (a, b) = hopper
    assert_same_run(a, b)
    assert len(rows(a, "episodes.csv")) > 3


def test_columns(hopper):
    run_dir = hopper[1][0]
    header, *table = csv.reader((run_dir / "progress.csv").read_text().splitlines())
    assert header[:3] == ["step", "time", "steps_per_second"]
    spread = [f"{name}_{part}" for part in ("mean", "std", "min", "max") for name in
              ("ep_ret", "ep_len", "val", "pi_loss", "v_loss", "entropy", "grad_norm")]
    single = ["kl", "clip_frac", "explained_variance", "lr"]
    assert set(spread + single) <= set(header)
    assert len(set(header)) == len(header) and {len(row) for row in table} == {len(header)}
    clock = [float(row[1]) for row in table]
    assert 0 < clock[0] < clock[1] < clock[2] and steps(run_dir) == [512, 1024, 1536]
    text = (run_dir / "episodes.csv").read_text()
    assert text.startswith("step,time,env,ep_ret,ep_len\n") and text.endswith("\n")


def test_what_a_run_keeps_of_its_origin(hopper):
    config = read_config(hopper[1][0])
    assert config["algo"] == "ppo" and config["module"] == "algos.ppo"
    assert config["settings"] == asdict(ppo.Config(
        env="Hopper-v4", total_steps=1500, rollout_steps=512, epochs=2, seed=3, run_dir=RUN_DIR))
    for package in ("torch", "gymnasium", "numpy", "mujoco"):
        assert config["versions"][package] == metadata.version(package)
    assert config["versions"]["python"] == sys.version.split()[0]
    assert config["command"].endswith(f"-m algos.ppo {HOPPER}")
    assert Path(hopper[1][0], "algo.py").read_bytes() == (ROOT / "algos/ppo.py").read_bytes()


def test_the_environment_is_recorded():
    """Sticky actions belong to the task, and are no setting of ours."""
    train(env="ALE/Pong-v5", env_kwargs='{"noop_max": 3}', rollout_steps=16, minibatch_size=16,
          epochs=1, total_steps=16)
    config = json.loads(Path("runs/ALE-Pong-v5/ppo/seed1/config.json").read_text())
    assert config["env_spec_kwargs"]["repeat_action_probability"] == 0.25


def test_nothing_stays_open(tmp_path):
    """A sweep in one process would run out of files, or wait for ever for TensorBoard's threads."""
    before = set(threading.enumerate())
    train(run_dir="run")
    begun = {thread.name for thread in set(threading.enumerate()) - before}
    assert begun <= {"tqdm_monitor"}                            # which tqdm starts once a process
    if os.path.exists("/proc/self/fd"):
        links = [entry.path for entry in os.scandir("/proc/self/fd")]
        links = [os.readlink(path) for path in links if os.path.islink(path)]
        assert not [path for path in links if path.startswith(str(tmp_path))]


def test_one_process_needs_no_mpi():
    done = run([sys.executable, "-c", textwrap.dedent("""
        import sys
        sys.modules["mpi4py"] = None        # any import of it now fails
        from algos import ppo
        ppo.train(ppo.Config(env="CartPole-v1", num_envs=2, rollout_steps=64, total_steps=64))
        """)])
    assert done.stderr == ""


# ---- Save and resume

def test_a_new_budget_on_resume(capsys):
    """Annealing runs to the new end; the second half of the old schedule is not repeated."""
    train(run_dir="run", total_steps=128)
    assert [float(row["lr"]) for row in rows("run")] == [3e-4, 1.5e-4]
    capsys.readouterr()
    train(run_dir="run", total_steps=512, resume=True)
    said = [line for line in capsys.readouterr().out.splitlines() if "instead of" in line]
    assert len(said) == 1 and "512" in said[0] and "128" in said[0] and "anneal" in said[0]
    assert [float(row["lr"]) for row in rows("run")[2:]] == pytest.approx(
        [3e-4 * (1 - step / 512) for step in range(128, 512, 64)])
    config = read_config("run")
    assert config["settings"]["total_steps"] == 512
    assert [entry["step"] for entry in config["resumed"]] == [128]
    assert config["resumed"][0]["versions"]["torch"] == torch.__version__
    assert_no_gap("run", (0, 128))


def test_a_finished_run_returns_its_agent_and_writes_nothing(capsys):
    trained = train(run_dir="run")
    before = snapshot("run")
    capsys.readouterr()
    agent = train(run_dir="run", resume=True)
    assert same(dict(agent.state_dict()), dict(trained.state_dict()))
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and "run has its 192 steps: nothing to do" in out and not err
    assert snapshot("run") == before
    agent = train(run_dir="run", resume=True, total_steps=128)   # fewer than it has
    assert same(dict(agent.state_dict()), dict(trained.state_dict())) and snapshot("run") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_evaluation_and_the_run_is_saved(number, monkeypatch):
    """CliffWalking has no time limit, and this policy walks into the wall for ever."""
    acts, plain = [], run_module.evaluate

    def act(obs, deterministic):
        acts.append(len(obs))
        if len(acts) == 30:
            signal.raise_signal(number)
        return torch.full((len(obs),), 3)

    monkeypatch.setattr(run_module, "evaluate", lambda agent, *args, **more: plain(
        SimpleNamespace(act=act, env_act=lambda act: act.numpy()), *args, **more))
    with pytest.raises(Stopped) as caught:
        train(env="CliffWalking-v1", eval_every=64, run_dir="run")
    assert caught.value.status == 128 + number and acts == 30 * [10]
    assert saved("run")[0] == 64 and steps("run") == [64]
    assert "eval_ret_mean" not in rows("run")[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_single_process_does_not_wait_for_its_report(number, monkeypatch):
    """Which on images may be a minute away. What was collected since the last one is reported."""
    monkeypatch.setattr(Ends, "then", staticmethod(lambda: signal.raise_signal(number)))
    cfg = dqn.Config(env="tests.envs:Ends-v0", env_kwargs='{"act": "discrete"}', hidden=(4,),
                     report_every=1000, eval_every=1000, buffer_size=100, run_dir="run")
    with pytest.raises(Stopped) as caught:
        dqn.train(cfg)
    assert caught.value.status == 128 + number
    assert saved("run")[0] == 64 and steps("run") == [64] and len(rows("run", "episodes.csv")) == 4


def test_init_from_takes_weights_and_statistics_only():
    """Step, optimizer and generators are the new run's own."""
    old = train(run_dir="old", seed=8).state_dict()
    new = train(run_dir="new", init_from="old", lr=1e-30, total_steps=64).state_dict()
    assert all(same(old[name], new[name]) for name in old if "_stats" not in name)
    assert new["obs_stats.count"].max() == old["obs_stats.count"].max() + 64 == 256
    assert steps("new") == [64]
    assert saved("new")[1]["state"]["optimizer"]["steps"] == 4
    config = json.loads(Path("new/config.json").read_text())
    assert config["init_from"]["run"] == "old" and config["init_from"]["step"] == 192
    shutil.rmtree("old")                                        # is not needed to go on
    train(run_dir="new", resume=True, total_steps=128)
    assert saved("new")[0] == 128


def test_init_from_leaves_the_box_to_the_environment():
    settings = {"env": "tests.envs:Counter-v0", "lr": 1e-30, "total_steps": 64}
    old = train(run_dir="old", env_kwargs='{"scale": 2}', **settings)
    new = train(run_dir="new", init_from="old", **settings)
    assert torch.equal(old.low, 2 * new.low) and torch.equal(old.high, 2 * new.high)
    assert torch.equal(play.load_agent("new").high, new.high)
    assert torch.equal(old.actor[0].weight, new.actor[0].weight)


# ---- Processes that are stopped

def test_a_signal_saves_and_ends_the_process():
    process = subprocess.Popen(
        command("--env", "CartPole-v1", *FLAGS, "--total-steps", "1e9", "--run-dir", "run"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    path = Path("run/progress.csv")
    try:
        wait_for(lambda: path.exists() and path.read_text().count("\n") > 4, process)
        with pytest.raises(UsageError, match="another process"):
            train(run_dir="run", resume=True, total_steps=1e9)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err and err.count("\n") <= 2
    (step, _), found = saved("run"), steps("run")
    assert step == found[-1] and len(found) > 4
    done = run(command("--run-dir", "run", "--resume", "--total-steps", step + 256))
    assert done.stderr == "" and f"{step + 256:,}" in done.stdout
    assert steps("run")[-1] == saved("run")[0] == step + 256
    assert_no_gap("run", (0, step))


# ---- Two processes

@pytest.mark.skipif(os.name != "posix" or mpi.cores() < 2, reason="no two ranks")
def test_two_processes():
    """One run by `--num-procs`, the same one in two halves by mpiexec."""
    flags = ("--env tests.envs:Ends-v0 --num-envs 4 --rollout-steps 128 --minibatch-size 32 "
             "--epochs 2 --hidden 8 --no-anneal-lr --eval-every 128 --run-dir run").split()
    done = run(command(*flags, "--num-procs", 2, "--total-steps", 512))
    assert done.stderr == ""
    assert all(done.stdout.count(said) == 1 for said in ("device: ", "run: ", "done  ", "resume  "))
    assert [line.split()[0] for line in done.stdout.splitlines()[3:7]] == "128 256 384 512".split()
    # Totals: the steps are those of all environments, and every one of these has its episodes.
    assert steps("run") == [128, 256, 384, 512]
    episodes = rows("run", "episodes.csv")
    assert [(int(e["step"]), int(e["env"]), int(e["ep_len"])) for e in episodes] == [
        (step, env, 16) for step in range(64, 513, 64) for env in range(4)]
    assert len({e["ep_ret"] for e in episodes}) == len(episodes), "two ranks do the same"
    assert [float(row["ep_ret_mean"]) for row in rows("run")] == pytest.approx(
        [np.mean([float(e["ep_ret"]) for e in episodes[i:i + 8]]) for i in range(0, 32, 8)])
    # Ranks: the same agent and optimizer, other random numbers.
    (step, first), (_, second) = saved("run", 0), saved("run", 1)
    assert step == 512 and same(first["state"], second["state"])
    assert not same(first["rng"], second["rng"])
    assert first["state"]["agent"]["obs_stats.count"].max() == 512
    assert first["state"]["optimizer"]["steps"] == 4 * 2 * 4
    # The same shape as one process's.
    train(env="tests.envs:Ends-v0", num_envs=4, rollout_steps=128, eval_every=128, run_dir="one")
    assert list(rows("run")[0]) == list(rows("one")[0])
    assert list(episodes[0]) == list(rows("one", "episodes.csv")[0])
    one, both = ({path.name.partition(".")[0] for path in Path(name).iterdir()}
                 for name in ("one", "run"))
    assert one - {"resume-256"} == both - {"resume-512"}
    # In two halves.
    os.rename("run", "whole")
    run([mpiexec(), "-n", 2, *command(*flags, "--total-steps", 256)])
    run([mpiexec(), "-n", 2, *command(*flags, "--total-steps", 512, "--resume")])
    assert_same_run("run", "whole")
    assert same(saved("run", 1), saved("whole", 1))


# ---- The run directory

@pytest.mark.parametrize("env,folder", [("CartPole", "CartPole-v1"), ("ALE/Pong", "ALE-Pong-v5"),
                                        ("tests.envs:Ends", "tests.envs-Ends-v0")])
def test_an_environment_without_version_is_its_newest(env, folder, capsys, monkeypatch):
    """Its runs lie in one folder with those that name the version, and resume like them."""
    monkeypatch.setattr(envs, "say_once", print)
    cfg = Config(env=env, run_dir="", total_steps=800)
    with run_module.Run(cfg) as run:
        assert Path(run.cfg.run_dir) == Path("runs", folder, "toy/seed1")
    assert open_run(run.cfg) == run.cfg
    assert f"environment: {run.cfg.env}, the newest version\n" in capsys.readouterr().out
    if env == "CartPole":
        toy_train(Config(env=env, run_dir="", total_steps=100))
        assert open_run(replace(cfg, resume=True)).env == "CartPole-v1"


def test_resume_takes_the_settings_of_the_run(monkeypatch):
    cfg = Config(env="Acrobot-v1", hidden=(4,), lr=0.5, max_grad_norm=2.0, total_steps=700,
                 torch_threads=2)
    with pytest.raises(Stop):
        toy_train(cfg, stop_at=100)
    again = replace(cfg, resume=True)
    with monkeypatch.context() as patch:        # the default environment may not be installed
        patch.setattr(run_module, "with_version", lambda cfg: 1 / 0)
        assert open_run(Config(resume=True)) == again               # nothing else was given
    assert open_run(again) == again
    os.rename("run", "moved")
    assert open_run(Config(resume=True, run_dir="moved")) == replace(again, run_dir="moved")
    os.rename("moved", "run")
    assert open_run(Config(resume=True, lr=0.5)) == again           # equal to the run's
    free = {"total_steps": 900, "device": "cpu", "torch_threads": 3, "bf16": True, "compile": True}
    assert open_run(Config(resume=True, **free)) == replace(again, **free)


def test_what_the_command_line_gives_counts_even_if_it_is_the_default():
    """--lr 0.01 and no --lr differ, though 0.01 is the default."""
    cfg = Config(lr=0.5, total_steps=1600, torch_threads=2, num_envs=8)
    with pytest.raises(Stop):
        toy_train(cfg, stop_at=100)

    def typed(*args):
        return open_run(parse(Config, "", ["--resume", *args]))

    assert typed("--total-steps", "800") == replace(cfg, resume=True, total_steps=800)
    assert typed("--torch-threads=1") == replace(cfg, resume=True, torch_threads=1)
    assert typed("--run-dir", "run") == typed("--lr", "0.5") == replace(cfg, resume=True)
    assert "--lr is 0.01, but 0.5 in run" in refused(typed, "--lr", "1e-2")
    assert "--num-envs is 4, but 8 in run" in refused(typed, "--num-envs", "4")
    assert "--env is Acrobot-v1, but CartPole-v1 in run" in refused(typed, "--env", "Acrobot-v1")


def test_a_run_from_a_machine_with_more_cores_gets_the_threads_of_this_one(monkeypatch):
    cfg = ppo.Config(env="CartPole-v1", num_envs=2, torch_threads=12, run_dir="run")
    os.mkdir("run")
    run_module.write_config(cfg, 0, None)
    assert open_run(replace(cfg, resume=True)).torch_threads == 12
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)

    def typed(*args):
        return open_run(parse(ppo.Config, "", ["--resume", "--run-dir", "run", *args]))

    assert typed().torch_threads == read_config("run")["settings"]["torch_threads"] == 3
    assert typed("--torch-threads", "2").torch_threads == 2
    assert "--torch-threads is 12" in refused(typed, "--torch-threads", "12")


def test_config_comes_back():
    cfg = open_run(Config(lr=np.float64(0.1), seed=np.int64(5), hidden=(3, 4)))
    with start(cfg):
        pass
    settings = read_config("run")["settings"]
    assert Config(**settings) == cfg and hash(Config(**settings))


def test_a_run_that_began_meanwhile_is_not_overwritten():
    with Toy(Config()) as run:
        toy_train(Config())
        run.register(torch.nn.Linear(3, 2))
        assert "holds a run" in refused(run.restore)


# ---- The last lines

def said(out):
    """Return {title: text} of the summary at the end of what a run printed."""
    lines = out.splitlines()
    first = max(i for i, line in enumerate(lines) if line.startswith(("done ", "stopped ")))
    return {line[:10].strip(): line[10:] for line in lines[first:]}


def test_figures_of_the_summary():
    """The mean return of the last 100 episodes, the last and the best evaluation."""
    toy_train(Config(run_dir="a run"))
    for count in (0, 1, 99, 250):
        lines = [f"{k},0.5,0,{k * k / 7},9" for k in range(count)]
        text = "\n".join(["step,time,env,ep_ret,ep_len", *lines, ""])
        Path("a run/episodes.csv").write_text(text)
        found = said(summary(Config(run_dir="a run"), 100, 7200.0))
        last = [k * k / 7 for k in range(count)][-100:]
        assert found["train100"].startswith(f"{rounded(np.mean(last))}, mean return of the last "
                                            f"{len(last)} " if count else "no episode has ended")
        assert (" --y " in found["plot"]) == (count == 0)
    Path("a run/episodes.csv").write_text("step,time,env,ep_ret,ep_len\n")
    Path("a run/progress.csv").write_text("step,time,steps_per_second,loss,acc\n100,1,1,0.5,0.9\n")
    assert said(summary(Config(run_dir="a run"), 100, 5.0))["plot"].endswith(" --y loss")
    assert "eval" not in found and found["stopped"] == "100 of 800 steps in 2:00:00"
    assert found["resume"] == "python -m tests.toy --run-dir 'a run' --resume"
    assert parse(Config, "", shlex.split(found["resume"])[3:]).given == {"run_dir", "resume"}
    evals = ["step,eval_ret_mean", "1000,5.0", "2000,30.0", "3000,30.0", "4000,", "5000,-7.0", ""]
    Path("a run/progress.csv").write_text("\n".join(evals))
    found = said(summary(Config(run_dir="a run"), 800, 5.0))
    assert found["eval"].startswith("-7.00 at step 5,000, without noise; best 30.0 at step 2,000 ")


def test_a_run_that_was_stopped_or_failed_or_is_done(capsys):
    with pytest.raises(Stopped):
        with start(Config()) as log:
            log.advance(100, loss=1.0)
            signal.raise_signal(signal.SIGTERM)
            log.advance(100, loss=1.0)
    found = said(capsys.readouterr().out)
    assert found["stopped"].startswith("200 of 800 steps in ")
    assert found["resume"] == "python -m tests.toy --run-dir run --resume"
    with pytest.raises(Stop):
        toy_train(Config(run_dir="other"), stop_at=300)
    assert "resume  " not in capsys.readouterr().out
    toy_train(Config(run_dir="third"))
    found = said(capsys.readouterr().out)
    assert list(found) == ["done", "train100", "files", "play", "plot", "resume"]
    assert found["resume"].endswith("--run-dir third --resume --total-steps 1600")


# ---- The commands

def do(line):
    """Run a printed command with this Python."""
    python, *args = shlex.split(line)
    assert python == "python"
    return run([sys.executable, *args]).stdout


def test_every_command_works():
    flags = ("--env CartPole-v1 --num-envs 2 --rollout-steps 512 --minibatch-size 256 --epochs 1 "
             "--hidden 8 --eval-every 2048 --run-dir run --total-steps 4096").split()
    found = said(run(command(*flags)).stdout)
    assert list(found) == ["done", "train100", "eval", "files", "play", "plot", "resume"]
    assert "best" in found["eval"] and os.path.exists("run/best.pt")
    scores = [float(row["eval_ret_mean"]) for row in rows("run") if row["eval_ret_mean"]]
    assert found["eval"].startswith(f"{scores[-1]:.1f} at step 4,096, without noise; best "
                                    f"{max(scores):.1f} at ")
    assert "10 episodes" in do(found["play"])
    assert do(found["plot"]) and os.path.exists("curves.svg")
    out = do(found["resume"])
    assert saved("run")[0] == 8192 and said(out)["done"].startswith("8,192 of 8,192")


def test_atari_and_minatar_bring_settings_of_their_own():
    short = {"total_steps": 3e6, "rollout_steps": 16 * 5}
    for env, own in (("ALE/Pong-v5", short | {"lr": 7e-4, "ent_coef": 0.01}),
                     ("MinAtar/Breakout-v1", {"lr": 3e-3}), ("CartPole-v1", {})):
        assert run_module.for_game(a2c.Config(env=env)) == own
    games, atari = trpo.Config.for_games, {
        "max_kl": 1e-3, "damping": 1e-3, "gamma": 0.98, "lam": 1, "bf16": False}
    assert run_module.for_game(trpo.Config(env="ALE/Pong-v5")) == games | atari
    assert run_module.for_game(trpo.Config(env="MinAtar/Breakout-v1")) == games
    assert not games.keys() & atari.keys()
    assert run_module.for_game(acer.Config(env="ALE/Pong-v5"))["lr"] == acer.Config.lr
    both = ppo.Config.for_games | {"lr": 2.5e-4}
    assert run_module.for_game(ppo.Config(env="ALE/Pong-v5")) == both != ppo.Config.for_games
    assert ppo_popart.Config.for_atari == ppo.Config.for_atari
    q_learning = dqn.Config.for_games
    assert all(algo.Config.for_games == q_learning for algo in (dqn_per, c51, qr_dqn))
    assert run_module.for_game(c51.Config(env="ALE/Pong-v5")) == q_learning | {
        "v_min": -10, "v_max": 10}
    assert ppo_popart.Config.for_games | {"scale_rew": False} == ppo.Config.for_games


@pytest.mark.parametrize("settings, words", [
    ({"num_envs": 6}, "--rollout-steps is 1024; it takes a multiple of --num-envs, which is 6"),
    ({"rollout_steps": 1088}, "--rollout-steps is 1088; it takes a multiple of --minibatch-size, "
                              "which is 256"),
    ({"rollout_steps": 64, "minibatch_size": 64}, "")])
def test_a_game_needs_multiples_of_its_own_settings(settings, words):
    config = ppo.Config(env="ALE/Pong-v5", **settings)
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        run_module.Run(config)


def test_ranks_of_a_launcher_share_a_game_equally(monkeypatch):
    """Without --num-procs, the Config cannot know how many there are."""
    monkeypatch.setattr(mpi, "_size", 3)
    monkeypatch.setattr(run_module, "launch", lambda cfg: None)
    for env in ("MinAtar/Breakout-v1", "CartPole-v1"):
        assert "--num-procs, which is 3" in refused(run_module.Run, ppo.Config(env=env))


def test_games_bring_their_settings_except_where_others_were_given(capsys):
    plain = ppo.Config(env="MinAtar/Breakout-v1", lr=3e-4, run_dir="images")
    with run_module.Run(plain) as images:
        assert images.cfg.lr == 3e-4 and images.cfg.epochs == 4 and images.cfg.clip_ratio == 0.1
    assert " --ent-coef 0.01 --no-scale-rew --no-recompute-adv\n" in capsys.readouterr().out
    with run_module.Run(ppo.Config(env="CartPole-v1", run_dir="vectors")) as vectors:
        assert vectors.cfg.epochs == 10 and vectors.cfg.lr == 3e-4
    other = replace(plain, seed=2, lr=1e-3, run_dir="other")  # which passes all settings on
    with run_module.Run(other) as images:
        assert images.cfg.lr == 1e-3 and images.cfg.epochs == 4 and images.cfg.seed == 2


def test_train_takes_a_config():
    with pytest.raises(TypeError, match="train takes a Config, .* not 'CartPole-v1'"):
        run_module.Run("CartPole-v1")


@pytest.mark.parametrize("env,said", [
    ("ALE/Pnog-v5", "games are called"), ("MinAtar/Brekout-v1", "Breakout"), ("CartPole-v9", "v1"),
    ("ale/pong-v5", "game is called ALE/Pong-v5"),
    ("PongNoFrameskip-v4", "game is called ALE/Pong-v5"), ("ale_py:Pong", "is called ALE/Pong-v5"),
    ("Breakout-ramDeterministic-v4", "called ALE/Breakout-v5 here; --env-kwargs .*sticky"),
    ("..:X", "No module named"), (":X", "doesn't exist"), ("a:b:c", "No module named 'a:b'")])
def test_a_wrong_name_is_refused_before_anything_is_said(env, said, capsys):
    with pytest.raises(UsageError, match=f"^--env is {env}.*{said}"):
        ppo.train(ppo.Config(env=env, total_steps=8, num_envs=1, rollout_steps=8, minibatch_size=8))
    assert capsys.readouterr().out == "" and not os.listdir(".")


def test_a_resumed_game_keeps_its_settings_and_a_result_names_what_was_given():
    given = {"lr": 1e-4, "epochs": 1, "rollout_steps": 64, "minibatch_size": 32, "num_envs": 2}
    cfg = ppo.Config(env="MinAtar/Breakout-v1", run_dir="run", total_steps=64, **given)
    ppo.train(cfg)
    ppo.train(ppo.Config(run_dir="run", resume=True, total_steps=128))
    settings = read_config("run")["settings"]
    assert settings["epochs"] == 1 and settings["clip_ratio"] == 0.1 and steps("run") == [64, 128]
    assert results.make_result(Path("run"))["changed"] == {"total_steps": 128.0, **given}


def test_q_stands_beside_the_discounted_return_of_the_same_state():
    """Episode 0 terminates after 3 steps, episode 1 is cut off after 4, the third plays on."""
    agent = SimpleNamespace(cfg=SimpleNamespace(gamma=0.5))
    steps = [(np.array([t, t + 0.1, t + 0.2]), torch.zeros(3), np.array([1.0, 2.0, 4.0]),
              np.array([t == 2, False, False]), None) for t in range(9)]
    agent.q_value = lambda obs, act: torch.from_numpy(10 * obs) + act
    both = run_module.q_and_return(agent, steps, np.array([3, 4, 9]))
    # Of 9 steps at gamma 0.5, those with at least 7 to go count: 0.5^7 is below 1%.
    np.testing.assert_allclose(both["eval_q"], [0, 2, 10, 12, 20, 22])
    rest = [8 * (1 - 0.5 ** n) for n in (9, 8, 7)]
    np.testing.assert_allclose(both["eval_discounted"], [1.75, rest[0], 1.5, rest[1], 1, rest[2]])


@pytest.mark.parametrize("order, expected", [("import algos.ppo, torch", "3000 AVX2,STRICT"),
                                             ("import torch, algos.ppo", "None None")])
def test_pytorch_is_told_how_to_use_threads_unless_it_came_first(order, expected):
    names = ("GOMP_SPINCOUNT", "MKL_CBWR")
    env = {key: value for key, value in os.environ.items() if key not in names}
    program = f"{order}, os; print(*map(os.environ.get, {names}))"
    assert run([sys.executable, "-c", program], env=env).stdout.strip() == expected


class Clock:
    """A time that the test sets, and a machine whose other processes use `busy` cores."""

    def __init__(self, monkeypatch, cores=2):
        self.now = self.others = 0.0
        monkeypatch.setattr(run_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(run_module, "cores", lambda: cores)
        monkeypatch.setattr(run_module.Threads, "used_by_others", lambda _: self.others)
        monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")

    def threads_after(self, threads, seconds, busy):
        self.now, self.others = self.now + seconds, self.others + seconds * busy
        threads.adapt()
        return torch.get_num_threads()


def test_threads_are_two_while_a_second_core_is_free(monkeypatch):
    clock = Clock(monkeypatch)
    threads = run_module.Threads(0)
    assert torch.get_num_threads() == 1
    assert clock.threads_after(threads, 0.9, 0) == 1  # too early to tell
    assert clock.threads_after(threads, 0.2, 0) == 2
    assert clock.threads_after(threads, 1.1, 0.2) == 2
    assert clock.threads_after(threads, 1.1, 0.3) == 1
    assert clock.threads_after(threads, 9, 0) == 1  # it waits for ten seconds
    assert clock.threads_after(threads, 1.1, 0) == 2
    assert clock.threads_after(threads, 60, 1) == 1
    assert clock.threads_after(threads, 11, 1) == 1
    assert clock.threads_after(threads, 1.1, 0) == 2  # only a step back makes it wait


@pytest.mark.parametrize("number, cores, cbwr, expected", [
    (1, 2, "AVX2,STRICT", 1), (3, 8, "AVX2,STRICT", 3), (0, 1, "AVX2,STRICT", 1),
    (0, 2, "", 1), (0, 2, "AVX2", 1), (0, 8, "AVX512,STRICT", 2)])
def test_threads_adapt_only_to_zero_and_where_bits_do_not_change(monkeypatch, number, cores, cbwr,
                                                                 expected):
    clock = Clock(monkeypatch, cores)
    monkeypatch.setenv("MKL_CBWR", cbwr)
    assert clock.threads_after(run_module.Threads(number), 5, 0) == expected


def test_a_run_adapts_its_threads_and_keeps_freed_memory(monkeypatch):
    clock, kept, load = Clock(monkeypatch), [], run_module.ctypes.CDLL
    monkeypatch.setattr(run_module.ctypes, "CDLL", lambda name, *more: load(name, *more) if name
                        else SimpleNamespace(mallopt=lambda *pair: kept.append(pair)))
    with start(Config(torch_threads=0)) as run:
        clock.now += 2
        run.advance(100)
        assert torch.get_num_threads() == 2
    assert kept == [(-1, 2**30), (-3, 2**30)] * (sys.platform == "linux")


def test_threads_count_the_time_of_others_on_their_own_cores(monkeypatch):
    def write(*ticks):
        rows = [f"cpu{core} {n} {n} {n} 9999 9999 {n} {n} {n} 0 0" for core, n in enumerate(ticks)]
        Path("stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *rows, "intr 1"]))

    monkeypatch.setattr(run_module, "CORES", "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 11})
    monkeypatch.setattr(run_module.time, "process_time", lambda: 5.0)
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    write(*[100] * 12)
    threads = run_module.Threads(0)
    assert threads.used == 2 * 6 * 100 / os.sysconf("SC_CLK_TCK") - 5
    monkeypatch.setattr(run_module.time, "process_time", lambda: 6.0)
    write(200, *[900] * 10, 100)
    assert threads.used_by_others() - threads.used == 600 / os.sysconf("SC_CLK_TCK") - 1


@pytest.mark.parametrize("algo", ["sac", pytest.param("td3", marks=pytest.mark.slow)])
def test_the_number_of_threads_does_not_change_numbers(algo, dynamo_env):
    program = f"""
import utils, torch
from algos import {algo} as algo
from utils.envs import make_envs
finals = []
for counts in ([1], [2], [1, 2]):
    torch.manual_seed(0)
    cfg = algo.Config(run_dir="x")
    envs = make_envs(cfg, 1)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    opts = [algo.mpi.Adam(part) for part in (agent.critic, agent.actor)]
    opts += [algo.mpi.Adam(agent.log_alpha)] if hasattr(agent, "log_alpha") else []
    for k in range(12):
        torch.set_num_threads(counts[k % len(counts)])
        batch = algo.Transitions(torch.randn(256, 17), torch.rand(256, 6), torch.randn(256),
                                 torch.randn(256, 17), torch.zeros(256))
        algo.update(agent, *opts, batch, *([k] if algo.__name__.endswith("td3") else []))
    finals.append(torch.nn.utils.parameters_to_vector(agent.parameters()))
print(*[torch.equal(finals[0], final) for final in finals], finals[0].std() > 0)"""
    done = run([sys.executable, "-c", program], env=dynamo_env)
    assert done.stdout.split()[-4:] == ["True", "True", "True", "tensor(True)"]


@pytest.mark.parametrize("config, compiler, compiles", [
    (sac.Config(total_steps=1e5), "/bin/c++", True), (sac.Config(total_steps=99_999), "c++", False),
    (sac.Config(), None, False), (sac.Config(compile=False), "c++", False),
    (sac.Config(resume=True), "c++", False),
    (ppo.Config(total_steps=5e5), "c++", True), (ppo.Config(total_steps=4e5), "c++", False),
    (a2c.Config(), "c++", False), (Config(), "c++", False)], ids=str)
def test_a_long_run_compiles_unless_told_otherwise(monkeypatch, config, compiler, compiles):
    monkeypatch.setattr(shutil, "which", lambda _: compiler)
    monkeypatch.delenv("CXX", raising=False)
    assert run_module.suit_machine(config, config.given).compile == compiles


@pytest.mark.parametrize("settings, has, expected", [
    ({}, "avx512_bf16", True), ({}, "amx_bf16", True), ({}, "avx512_vnni", False),
    ({"bf16": False}, "amx_bf16", False), ({"env": "MinAtar/Breakout-v1"}, "amx_bf16", False),
    ({"resume": True}, "amx_bf16", False)], ids=str)
def test_atari_takes_bf16_where_the_processor_has_it(monkeypatch, settings, has, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {has: True})
    config = a2c.Config(**{"env": "ALE/Pong-v5"} | settings)
    assert run_module.suit_machine(config, frozenset(settings)).bf16 == expected
    precise = trpo.Config(**{"env": "ALE/Pong-v5"} | settings)  # measures a KL of 0.001
    assert not run_module.suit_machine(precise, frozenset(settings)).bf16


@pytest.mark.parametrize("told, gpu, expected", [
    ({}, False, True), ({}, True, False), ({"bf16": False, "compile": False}, False, False)])
def test_a_run_compiles_and_takes_bf16_by_itself_but_not_beside_a_gpu(monkeypatch, told, gpu,
                                                                      expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setenv("CXX", "c++")
    cfg = run_module.Run(ppo.Config(env="ALE/Pong-v5", run_dir="run", **told)).cfg
    assert (cfg.bf16, cfg.compile) == (expected, expected)


def test_a_run_says_what_it_makes_of_compile_and_bf16(capsys):
    for algo, told in ((ppo, "--compile, which takes up to"), (vpg, "nothing to --compile\n")):
        cfg = algo.Config("CartPole-v1", run_dir=told[:3], compile=True, bf16=True)
        with run_module.Run(cfg) as run:
            run.register(torch.nn.Linear(1, 1))
            run.restore()
        out = capsys.readouterr().out
        assert f"--torch-threads 1, {told}" in out and "--bf16: not used, for it is for" in out


@pytest.mark.parametrize("first,later,more,silent", [
    ([9, 11], [9, 11], {}, False), ([9, 11], [1, 2], {}, False), ([0, 0], [0, 0], {}, False),
    ([9, 11], [9.6, 11.6], {}, True), ([9, 11], [9, 11], {"total_steps": 900}, True),
    ([9, 11], [9, 11], {"init_from": "other"}, True), ([9, 11], [9, 11] * 49 + [9], {}, True)])
def test_a_run_that_has_learned_nothing_says_so(first, later, more, silent):
    """The last 100 episodes against the first 20. Not if it was stopped, is short or a child."""
    toy_train(Config())
    returns = 10 * first + (50 * later if len(later) == 2 else later)
    lines = [f"{k},0.5,0,{ret},9" for k, ret in enumerate(returns)]
    Path("run/episodes.csv").write_text("\n".join(["step,time,env,ep_ret,ep_len", *lines, ""]))
    told = said(summary(Config(**more), 800, 5.0))["train100"]
    assert silent == ("debugging.md" not in told)
    assert silent or f"better than the first 20 ({rounded(np.mean(first))}): train" in told


@pytest.mark.parametrize("algo,env,hinted", [
    (dqn, "MinAtar/Breakout-v1", False), (dqn_per, "ALE/Pong-v5", True),
    (dqn, "CartPole-v1", False), (dqn_atari, "ALE/Pong-v5", False), (ppo, "ALE/Pong-v5", False)])
def test_dqn_on_an_atari_game_names_its_relative(algo, env, hinted, capsys):
    wide = {"hidden": (8,)} if algo in (dqn, dqn_per) else {}
    with run_module.Run(algo.Config(env=env, compile=False, **wide)):
        out = capsys.readouterr().out
        assert ("algos.dqn_atari is made for Atari" in out) == hinted
        assert ("--hidden is not used" in out) == bool(wide and "/" in env)


@pytest.mark.parametrize("algo", [ppo, dqn, dqn_atari])         # their encoders lie elsewhere
@pytest.mark.parametrize("bf16", [True, False])
def test_bf16_reaches_every_network_of_images(algo, bf16, capsys):
    with run_module.Run(algo.Config(env="tests.envs:Bright-v0", bf16=bf16, run_dir="run")) as run:
        run.register(agent := agent_for(algo, run.cfg))
    found = [part.bf16 for part in agent.modules() if isinstance(part, envs.ImageEncoder)]
    assert found == [bf16] * (1 if algo is ppo else 2)
    assert ("--bf16: networks of images" in capsys.readouterr().out) == bf16
