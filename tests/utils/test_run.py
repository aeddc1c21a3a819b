"""A whole run: what it writes, that its seed decides all of it, how it is stopped and goes on."""
import ast
import csv
import gc
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import mujoco
import numpy as np
import pytest
import torch

from algos import ppo
from tests.helpers import (
    PATIENCE, ROOT, assert_same_run, command, mpiexec, not_on_windows, noted, refused, rows,
    run, same, saved, snapshot, steps, wait_for)
from tests.toy import Config, Stop, Toy, start, train as toy_train
from utils import mpi, play, results
from utils.envs import make_envs
from utils.errors import UsageError
from utils.evaluate import q_and_return
from utils.run import directory, run as run_module, settings
from utils.run.directory import default_dir, find_run_dir, read_config
from utils.run.launch import cores
from utils.run.run import Run, choose_device
from utils.run.signals import Stopped
from utils.run.settings import parse

SMALL = {"env": "CartPole-v1", "num_envs": 2, "rollout_steps": 64, "minibatch_size": 32,
         "epochs": 2, "hidden": (8,), "total_steps": 192}
FLAGS = "--num-envs 2 --rollout-steps 64 --minibatch-size 32 --epochs 2 --hidden 8".split()


def train(**settings):
    return ppo.train(ppo.Config(**SMALL | settings))


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


def outer():
    """What a run changes outside of itself while it goes on, or might."""
    return (torch.get_num_threads(), warnings.filters[:], mujoco.get_mju_user_warning(),
            mujoco.mjtJoint.__eq__, signal.getsignal(signal.SIGINT), sys.excepthook,
            signal.getsignal(signal.SIGTERM), dict(os.environ), flushes())


def flushes():
    """Whether numbers below 1e-38 become 0 here: else Adam gets slow when gradients stay away."""
    return (torch.tensor(1e-40) / 2).item() == 0


@pytest.mark.parametrize("env", ["Hopper-v4", "tests.envs:Faulty-v0"])      # the second one fails
def test_nothing_outlasts_a_run(env, tmp_path):
    """A sweep in one process would run out of files, or wait for ever for TensorBoard's threads."""
    gc.collect()                                                # environments of other tests
    mujoco.set_mju_user_warning(None)
    make_envs(Config(env=env), 1).close()       # packages set variables when they are imported
    before, threads = outer(), set(threading.enumerate())
    for chosen in True, False:                                  # the caller's choice stays
        torch.set_flush_denormal(chosen)
        with Run(Config(run_dir="other")):
            assert flushes()
        assert flushes() == chosen
    with nullcontext() if env == "Hopper-v4" else pytest.raises(RuntimeError, match="too hot"):
        train(env=env, run_dir="run", torch_threads=2, rollout_steps=4, minibatch_size=4,
              total_steps=12)
    assert outer() == before
    begun = {thread.name for thread in set(threading.enumerate()) - threads}
    assert begun <= {"tqdm_monitor"}                            # which tqdm starts once a process
    if os.path.exists("/proc/self/fd"):
        links = [entry.path for entry in os.scandir("/proc/self/fd")]
        links = [os.readlink(path) for path in links if os.path.islink(path)]
        assert not [path for path in links if path.startswith(str(tmp_path))]


def test_importing_changes_no_setting_of_pytorch_in_any_order():
    told, code = [], ("import os, torch; print(torch.__config__.parallel_info(), "
                      "torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(), "
                      "torch.get_default_dtype(), {**os.environ, 'GOMP_SPINCOUNT': 0})")
    for order in ("torch", "algos.ppo", "torch, utils.run, algos.ppo"):
        told.append(run([sys.executable, "-c", f"import {order}; {code}"]).stdout)
    assert len(set(told)) == 1
    (doc,) = ast.parse((ROOT / "utils/__init__.py").read_text()).body       # and nothing to run
    assert isinstance(doc.value, ast.Constant)


def test_one_process_needs_no_mpi():
    done = run([sys.executable, "-c", textwrap.dedent("""
        import sys
        sys.modules["mpi4py"] = None        # any import of it now fails
        from algos import ppo
        ppo.train(ppo.Config(env="CartPole-v1", num_envs=2, rollout_steps=64, total_steps=64,
                             minibatch_size=64))
        """)])
    assert done.stderr == ""


# ---- Save and resume

def test_a_new_budget_on_resume():
    """Annealing runs to the new end; the second half of the old schedule is not repeated."""
    train(run_dir="run", total_steps=128)
    assert [float(row["lr"]) for row in rows("run")] == [1e-3, 5e-4]
    train(run_dir="run", total_steps=512, resume=True)
    assert [float(row["lr"]) for row in rows("run")[2:]] == pytest.approx(
        [1e-3 * (1 - step / 512) for step in range(128, 512, 64)])
    config = read_config("run")
    assert config["settings"]["total_steps"] == 512
    assert [entry["step"] for entry in config["resumed"]] == [128]
    assert config["resumed"][0]["versions"]["torch"] == metadata.version("torch")
    assert steps("run") == [*range(64, 513, 64)]


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
        SimpleNamespace(act=act, env_act=lambda act: act.numpy(), forget=lambda *_: None), *args,
        **more))
    with pytest.raises(Stopped) as caught:
        train(env="CliffWalking-v1", eval_every=64, run_dir="run")
    assert caught.value.status == 128 + number and acts == 30 * [10]
    assert saved("run")[0] == 64 and steps("run") == [64]
    assert rows("run")[0]["eval_ret_mean"] == ""


def test_init_from_takes_weights_and_statistics_only():
    """Step, optimizer and generators are the new run's own, and so is the box of its actions."""
    env = {"env": "tests.envs:Counter-v0"}
    old = train(run_dir="old", seed=8, env_kwargs='{"scale": 2}', **env).state_dict()
    new = train(run_dir="new", init_from="old", lr=1e-30, total_steps=64, **env).state_dict()
    for name in (name for name in old if "_stats" not in name):
        assert same(old[name], (2 if name in ("low", "high") else 1) * new[name]), name
    assert torch.equal(play.load_agent("new").high, new["high"])
    assert new["obs_stats.count"] == 64 and old["obs_stats.count"] == 192  # of its own task
    assert steps("new") == [64]
    assert saved("new")[1]["state"]["optimizer"]["steps"] == 4
    config = json.loads(Path("new/config.json").read_text())
    assert config["init_from"]["run"] == "old" and config["init_from"]["step"] == 192
    shutil.rmtree("old")                                        # is not needed to go on
    ppo.train(ppo.Config.of_run("new", resume=True, total_steps=128))
    assert saved("new")[0] == 128
    assert Config(init_from=Path("old")).init_from == "old"     # a checkpoint holds texts alone


# ---- Processes

@not_on_windows("a process there gets no SIGINT from another one, and runs are not locked")
def test_a_signal_saves_and_ends_the_process():
    process = subprocess.Popen(
        command("--env", "CartPole-v1", *FLAGS, "--total-steps", "1e9", "--run-dir", "run"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    path = Path("run/progress.csv")
    try:
        wait_for(lambda: path.exists() and path.read_text().count("\n") > 4, process)
        with pytest.raises(UsageError, match="another process is writing the run in run"):
            train(run_dir="run", resume=True, total_steps=1e9)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err and err.count("\n") <= 2
    assert "saving and stopping at the end of this step or rollout; Ctrl-C again" in err
    (step, _), found = saved("run"), steps("run")
    assert step == found[-1] and len(found) > 4
    done = run(command("--run-dir", "run", "--resume", "--total-steps", step + 256))
    assert done.stderr == "" and f"{step + 256:,}" in done.stdout
    assert saved("run")[0] == step + 256 and steps("run") == [*range(64, step + 257, 64)]


@pytest.mark.skipif(os.name != "posix" or cores() < 2, reason="no two ranks")
def test_two_processes():
    """One run by `--num-procs`, the same one in two halves by mpiexec."""
    flags = ("--env tests.envs:Ends-v0 --num-envs 4 --rollout-steps 128 --minibatch-size 32 "
             "--epochs 2 --hidden 8 --no-anneal-lr --eval-every 128 --run-dir run").split()
    done = run(command(*flags, "--num-procs", 2, "--total-steps", 512),
               env=os.environ | {"PMI_SIZE": "1"})              # of a launcher around the shell
    assert done.stderr == ""
    assert all(done.stdout.count(said) == 1 for said in ("device: ", "run: ", "done  ", "resume  "))
    assert [line.split()[0] for line in done.stdout.splitlines()[3:7]] == "128 256 384 512".split()
    # Totals: the steps are those of all environments, and every one of these has its episodes.
    assert steps("run") == [128, 256, 384, 512]
    episodes = rows("run", "episodes.csv")
    assert [(int(e["step"]), int(e["env"]), int(e["ep_len"])) for e in episodes] == [
        (step, env, 16) for step in range(64, 513, 64) for env in range(4)]
    assert len({e["ep_ret"] for e in episodes}) == len(episodes), "two ranks do the same"
    # Ranks: the same agent and optimizer, other random numbers.
    (step, first), (_, second) = saved("run", 0), saved("run", 1)
    assert step == 512 and same(first["state"], second["state"])
    assert not same(first["rng"], second["rng"])
    # In two halves.
    os.rename("run", "whole")
    run([mpiexec(), "-n", 2, *command(*flags, "--total-steps", 256)])
    run([mpiexec(), "-n", 2, *command(*flags, "--total-steps", 512, "--resume")])
    assert_same_run("run", "whole")
    assert same(saved("run", 1), saved("whole", 1))


# ---- The run directory

@pytest.mark.parametrize("kwargs,folder", [
    ('{"max_episode_steps": 9, "a": 1.0}', r"a=1,max_episode_steps=9"),
    ('{"a":1, "max_episode_steps":9}', r"a=1,max_episode_steps=9"),         # typed in another way
    ('{"a": [2, 3], "b": {"c/d": "e f\\"*"}, "g": true}', r"a=2-3,b=-c-d-e-f-,g=True"),
    ('{"a": "%s"}' % ("x" * 300), "a=x{198}"), ("{ }", "")])
def test_runs_by_other_rules_lie_apart(kwargs, folder):
    """By default, in a folder that tells the rules and that every file system can hold."""
    run_dir = default_dir(Config(env_kwargs=kwargs))
    middle = run_dir.relative_to("runs/CartPole-v1/toy").parent
    assert re.fullmatch(folder or r"\.", str(middle)) and run_dir.name == "seed1"
    said = "--env-kwargs is {a}; it takes a JSON object: "
    assert said in refused(find_run_dir, Config(run_dir="", env_kwargs="{a}"))


def test_a_run_by_other_rules_resumes():
    rules = {"run_dir": "", "env_kwargs": '{"max_episode_steps": 9}'}
    toy_train(Config(run_dir="", total_steps=100))
    toy_train(Config(**rules, total_steps=100))     # it is not refused for the run before
    typed = parse(Config, "", ["--run-dir=", "--env-kwargs", rules["env_kwargs"], "--resume",
                               "--total-steps", "200"])
    toy_train(typed)
    folder = Path("runs/CartPole-v1/toy")
    assert [len(rows(folder / name)) for name in ("seed1", "max_episode_steps=9/seed1")] == [1, 2]


def typed(*args, of=Config):
    """Return the Config of a run that the command line continues."""
    return find_run_dir(parse(of, "", ["--resume", *args]))


def test_resume_takes_the_settings_of_the_run_and_refuses_others():
    cfg = Config(env="Acrobot-v1", hidden=(4,), lr=0.5, max_grad_norm=np.float64(2),
                 total_steps=700, torch_threads=2, num_envs=np.int64(8))
    with pytest.raises(Stop):
        toy_train(cfg, stop_at=100)
    again = replace(cfg, resume=True)
    assert Config.of_run("run", resume=True) == find_run_dir(again) == again == typed()
    assert typed("--lr", "0.5", "--run-dir", "run") == again        # equal to the run's
    free = {"total_steps": 900, "device": "cpu", "torch_threads": 1}
    assert find_run_dir(Config.of_run("run", resume=True, **free)) == replace(again, **free)
    assert typed("--total-steps=900", "--device", "cpu", "--torch-threads", "1") == replace(
        again, **free)
    for name, value in {"lr": 0.01, "num_envs": 4, "env": "CartPole-v1"}.items():  # the defaults
        words = f"--{name.replace('_', '-')}", str(value)
        message = f"{words[0]} is {value}, but {getattr(cfg, name)} in run: --resume keeps the"
        assert message in refused(typed, *words)
        assert message in refused(find_run_dir, replace(again, **{name: value}))
    os.rename("run", "moved")
    assert Config.of_run("moved", resume=True) == replace(again, run_dir="moved")
    assert typed("--run-dir", "moved").run_dir == "moved"


def test_a_run_from_a_machine_with_more_cores_gets_the_threads_of_this_one(monkeypatch):
    cfg = ppo.Config(env="CartPole-v1", num_envs=2, torch_threads=12, run_dir="run")
    os.mkdir("run")
    directory.write_config(cfg, 0, None)
    assert find_run_dir(replace(cfg, resume=True)).torch_threads == 12
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    again = partial(typed, "--run-dir", "run", of=ppo.Config)
    assert again().torch_threads == read_config("run")["settings"]["torch_threads"] == 3
    assert again("--torch-threads", "2").torch_threads == 2
    assert "--torch-threads is 12" in refused(again, "--torch-threads", "12")


def test_a_run_that_began_meanwhile_is_not_overwritten():
    with Toy(Config()) as run:
        toy_train(Config())
        assert "holds a run" in refused(run.start, torch.nn.Linear(3, 2))


# ---- The last lines

def said(out):
    """Return {title: text} of the lines at the end of what a run printed."""
    lines = out.splitlines()
    first = max(i for i, line in enumerate(lines) if line.startswith(("done ", "stopped ")))
    return {line[:10].strip(): line[10:] for line in lines[first:]}


def test_what_is_said_once_is_said_again_in_the_next_run(capsys):
    for _ in range(2):
        with start(Config(overwrite=True)):
            mpi.say_once("flattened"), mpi.say_once("flattened")
        assert capsys.readouterr().out.count("flattened") == 1


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
    assert list(found) == ["done", "play", "plot", "resume"]
    assert found["done"].startswith("800 of 800 steps in 0:0")
    assert found["resume"].endswith("--run-dir third --resume --total-steps 1600")


def do(line):
    """Run a printed command with this Python."""
    python, *args = shlex.split(line)
    assert python == "python"
    return run([sys.executable, *args]).stdout


def test_every_command_works():
    flags = ("--env CartPole-v1 --num-envs 2 --rollout-steps 512 --minibatch-size 256 --epochs 1 "
             "--hidden 8 --total-steps 4096 --run-dir").split()
    found = said(run(command(*flags, "a run")).stdout)
    assert "10 episodes" in do(found["play"])
    assert do(found["plot"]) and os.path.exists("curves.svg")
    out = do(found["resume"])
    assert saved("a run")[0] == 8192 and said(out)["done"].startswith("8,192 of 8,192")


# ---- Games

def test_a_config_is_literal_and_for_env_brings_what_suits_a_game():
    plain, usual = ppo.Config(env="ALE/Pong-v5", lr=3e-4), vars(ppo.Config())
    assert vars(plain) == usual | {"env": "ALE/Pong-v5", "lr": 3e-4}
    game = replace(ppo.Config.for_env("ALE/Pong-v5", lr=3e-4), seed=2)
    assert vars(game) == vars(plain) | ppo.Config.for_games | {"lr": 3e-4, "seed": 2}
    assert ppo.Config.for_env("CartPole-v1") == ppo.Config(env="CartPole-v1")
    assert ppo.Config.suited_to("ALE/Pong") == ppo.Config.for_games | {"lr": 2.5e-4}
    assert ppo.Config.suited_to("minatar.gym:MinAtar/Breakout-v1") == ppo.Config.for_games


def test_the_command_line_brings_what_suits_a_game_and_prints_it(monkeypatch, capsys):
    monkeypatch.setattr(settings, "program", lambda *_: nullcontext())
    trained, suits = [], ("--rollout-steps 1024 --minibatch-size 256 --epochs 4{} --clip-ratio 0.1 "
                          "--target-kl 0 --ent-coef 0.01 --no-scale-rew "
                          "--no-recompute-adv\n").format
    for args, env, given, said in (
            ("--lr 3e-4 --env ALE/Pong-v5", "ALE/Pong-v5", {"lr": 3e-4}, suits("")),
            ("--env=MinAtar/Breakout-v1 --seed 7", "MinAtar/Breakout-v1", {"seed": 7},
             suits(" --lr 0.003")), ("--env CartPole-v1", "CartPole-v1", {}, "")):
        monkeypatch.setattr(sys, "argv", ["ppo.py", *args.split()])
        settings.main(trained.append, ppo.Config, ppo.__doc__)
        assert trained.pop() == ppo.Config.for_env(env, **given)
        assert capsys.readouterr().out == (said and f"settings that suit {env}: {said}")


def test_a_game_with_the_settings_of_robots_says_so(capsys, monkeypatch):
    monkeypatch.setattr(ppo.Config, "for_games", ppo.Config.for_games | {"total_steps": 256})
    for env, said in ("MinAtar/Breakout-v1", 1), ("CartPole-v1", 0):
        agent = ppo.train(ppo.Config(env=env, total_steps=256, num_envs=1, rollout_steps=256,
                                     epochs=1))
        out = capsys.readouterr().out
        assert out.count(f"none that suits games; Config.for_env('{env}') has them") == said
        assert Path(agent.cfg.run_dir, "policy.pt").exists()   # in the usual place


def test_a_resumed_game_keeps_its_settings_and_a_result_names_what_was_given(capsys):
    given = {"lr": 1e-4, "epochs": 1, "rollout_steps": 64, "minibatch_size": 32, "num_envs": 2}
    ppo.train(ppo.Config.for_env("MinAtar/Breakout-v1", run_dir="run", total_steps=64, **given))
    ppo.train(ppo.Config.of_run("run", resume=True, total_steps=128))
    kept = read_config("run")["settings"]
    assert kept["epochs"] == 1 and kept["clip_ratio"] == 0.1 and steps("run") == [64, 128]
    assert "none that suits games" not in capsys.readouterr().out
    result = results.make_result(Path("run"))
    assert result["changed"] == {"total_steps": 128.0, **given}
    (resumed,) = result["resumed"]
    assert resumed["step"] == 64 and resumed.keys() == {"step", "git_commit", "versions"}


def test_q_stands_beside_the_discounted_return_of_the_same_state():
    """Episode 0 terminates after 3 steps, episode 1 is cut off after 4, the third plays on."""
    agent = SimpleNamespace(cfg=SimpleNamespace(gamma=0.5))
    steps = [(np.array([t, t + 0.1, t + 0.2]), torch.zeros(3), np.array([1.0, 2.0, 4.0]),
              np.array([t == 2, False, False]), None) for t in range(9)]
    agent.q_value = lambda obs, act: torch.from_numpy(10 * obs) + act
    both = q_and_return(agent, steps, np.array([3, 4, 9]))
    # Of 9 steps at gamma 0.5, those with at least 7 to go count: 0.5^7 is below 1%.
    np.testing.assert_allclose(both["eval_q"], [0, 2, 10, 12, 20, 22])
    rest = [8 * (1 - 0.5 ** n) for n in (9, 8, 7)]
    np.testing.assert_allclose(both["eval_discounted"], [1.75, rest[0], 1.5, rest[1], 1, rest[2]])
    last = q_and_return(agent, deque(steps, 8), np.array([3, 4, 9]))    # of an evaluation too long
    assert all(np.array_equal(last[name], both[name][2:]) for name in both)
    assert q_and_return(agent, deque(steps, 3), np.array([3, 4, 9])) == {}


def test_layers_with_a_mode_train_in_one_and_act_in_the_other(monkeypatch):
    modes = noted(monkeypatch, ppo.Agent, "act", lambda agent, *_: agent.training)
    agent = train(eval_every=192)
    assert modes[:96] == [True] * 96 and {*modes[96:]} == {False} and not agent.training


@pytest.mark.parametrize("name, env, gpus, rank, expected", [
    ("auto", "CartPole-v1", 2, 0, "cpu"), ("auto", "tests.envs:Bright-v0", 0, 0, "cpu"),
    ("auto", "tests.envs:Bright-v0", 2, 3, "cuda:1"), ("cuda", "CartPole-v1", 2, 2, "cuda:0"),
    ("cpu", "tests.envs:Bright-v0", 2, 0, "cpu"),
])
def test_choose_device(monkeypatch, name, env, gpus, rank, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("utils.run.run.on_host", lambda: (rank, 8))
    assert choose_device(Config(env=env, device=name)) == torch.device(expected)
