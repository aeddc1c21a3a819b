"""A run's numbers, its refusals, and that nothing is lost when it is interrupted."""
import csv
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text

from tests.helpers import (
    CLOCK,
    PATIENCE,
    mpiexec,
    snapshot,
)
from utils import averages, checkpoint, inputs, rundir
from utils.logger import (
    Logger,
    UsageError,
    check_divides,
    check_range,
    check_spaces,
    env_errors,
    open_run,
)
from utils.rundir import read_config


@dataclass(frozen=True)
class Config:
    """The common settings, and some of each kind."""

    env: str = "CartPole-v1"
    env_kwargs: str = "{}"
    seed: int = 1
    total_steps: float = 800
    num_envs: int = 4
    num_procs: int = 1
    hidden: tuple[int, ...] = (8, 8)
    device: str = "auto"
    torch_threads: int = 1
    run_dir: str = "run"
    resume: bool = False
    init_from: str = ""
    eval_every: int = 0
    lr: float = 1e-2
    width: int = 2
    max_grad_norm: float | None = None


class Stop(Exception):
    """Ends a run where a test wants it."""


def make(cfg):
    torch.manual_seed(cfg.seed)
    agent = torch.nn.Linear(3, cfg.width)
    return agent, torch.optim.Adam(agent.parameters(), cfg.lr)


def train(cfg, stop_at=None, always=False):
    """100 steps a report; `always` saves at each; its numbers rest on generator and optimizer."""
    cfg = open_run(cfg)
    agent, optimizer = make(cfg)
    with Logger(cfg, agent, optimizer=optimizer) as log:
        while log.step < cfg.total_steps:
            if log.step == stop_at:
                raise Stop
            noise = torch.randn(8, 3)
            optimizer.zero_grad()
            loss = agent(noise).square().mean()
            loss.backward()
            optimizer.step()
            late = {"late": loss} if log.step >= 300 else {}
            if always:
                log.saved = -1e9
            ends = [(9, 1, loss.item(), 10), (9, 0, 2.0, 5)]
            log.report(100, ends, loss=loss, noise=noise, **late)
    return agent


def rows(name="progress.csv", run="run"):
    with open(Path(run, name), newline="") as file:
        return list(csv.DictReader(file))


def numbers(run="run"):
    """progress.csv as it must be equal for equal seeds: the text, wall-clock columns aside."""
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in rows(run=run)]


def refused(function, *args):
    """The message of a refusal, which must have status 2 and write nothing."""
    before = snapshot()
    with pytest.raises(UsageError) as caught:
        function(*args)
    assert caught.value.code == 2
    assert snapshot() == before, "something was written"
    return str(caught.value)


@pytest.fixture
def log():
    cfg = open_run(Config(total_steps=1e6))
    with Logger(cfg, torch.nn.Linear(3, 2)) as log:
        yield log


# ---- Settings

@pytest.mark.parametrize("field,value,args,message", [
    ("lr", float("nan"), {"above": 0}, "--lr is nan; it takes a number, above 0"),
    ("lr", float("inf"), {"above": 0}, "--lr is inf"),
    ("lr", 0.0, {"above": 0}, "--lr is 0.0"),
    ("lr", "0.1", {"above": 0}, "--lr is 0.1"),
    ("lr", 1.5, {"low": 0, "high": 1}, "--lr is 1.5; it takes a number, at least 0, at most 1"),
    ("lr", -0.1, {"low": 0, "high": 1}, "--lr is -0.1"),
    ("max_grad_norm", -1.0, {"low": 0}, "--max-grad-norm is -1.0"),
    ("num_envs", 0, {"low": 1}, "--num-envs is 0; it takes a whole number, at least 1"),
    ("num_envs", 2.5, {"low": 1}, "--num-envs is 2.5"),
    ("num_envs", True, {"low": 1}, "--num-envs is True"),
    ("num_envs", None, {"low": 1}, "--num-envs is None"),
    ("total_steps", 10.5, {"low": 1}, "--total-steps is 10.5; it takes a whole number"),
    ("hidden", (8, 0), {"above": 0}, r"--hidden is \(8, 0\); it takes a whole number, above 0"),
    ("hidden", (8, 0.5), {"above": 0}, r"--hidden is \(8, 0.5\)"),
])
def test_out_of_range(field, value, args, message):
    with pytest.raises(UsageError, match=message):
        check_range(Config(**{field: value}), f"seed {field}", **args)


def test_in_range():
    check_range(Config(total_steps=1e6), "total_steps hidden num_envs", 1)
    check_range(Config(lr=0), "lr", 0, 1)
    check_range(Config(lr=1), "lr", 0, 1)
    check_range(Config(), "max_grad_norm", 0)                       # None, where it is declared
    check_range(Config(num_envs=np.int64(3)), "num_envs", 3, 3)


def test_what_does_not_divide():
    check_divides(Config(num_envs=4, width=2), "num_envs/width num_envs/num_procs")
    with pytest.raises(UsageError, match="--num-envs is 4; .* multiple of --width, which is 3"):
        check_divides(Config(num_envs=4, width=3), "num_envs/num_procs num_envs/width")


VECTOR, IMAGE = Box(-np.inf, np.inf, (3,)), Box(0, 255, (36, 40, 3), np.uint8)
BOX = Box(np.float32([0, -3]), np.float32([5, 3]))


@pytest.mark.parametrize("obs,act,message", [
    (VECTOR, Discrete(2), None), (IMAGE, BOX, None),
    (Box(0, 255, (4, 84, 84), np.uint8), Discrete(2), None),
    (Box(0, 255, (35, 40, 3), np.uint8), BOX, r"observation space Box\(0, 255, \(35, 4"),
    (Box(0, 1, (64, 64, 3)), BOX, "images .*at least 36 pixels a side"),
    (Box(0, 1, (2, 2)), BOX, "observation space"),
    (Discrete(3), BOX, r"observation space Discrete\(3\); this algorithm takes vectors"),
    (Dict(a=VECTOR), BOX, "observation space"), (Text(3), BOX, "observation space"),
    (VECTOR, MultiDiscrete([2, 2]), "action space MultiDiscrete"),
    (VECTOR, Discrete(2, start=1), "action space"), (VECTOR, VECTOR, "finite bounds"),
    (VECTOR, Box(0, 9, (1,), np.int64), "Box of floats"),
])
def test_spaces(obs, act, message):
    if message is None:
        return check_spaces(obs, act, obs="vector image", act="discrete box")
    with pytest.raises(UsageError, match=message):
        check_spaces(obs, act, obs="vector image", act="discrete box")


def test_a_refused_space_names_the_algorithms_that_take_it(tmp_path, monkeypatch):
    (tmp_path / "algos").mkdir()
    for name, act in [("one", "discrete"), ("two", "box"), ("three", "discrete box")]:
        (tmp_path / "algos" / f"{name}.py").write_text(
            f'    check_spaces(obs_space, act_space, obs="vector", act="{act}")\n')
    monkeypatch.setattr(inputs, "__file__", str(tmp_path / "utils" / "inputs.py"))
    with pytest.raises(UsageError, match="for this one there is three, two$"):
        check_spaces(VECTOR, BOX, obs="vector", act="discrete")


@pytest.mark.parametrize("env,kwargs,message", [
    ("HalfCheeta-v4", "{}", "--env is HalfCheeta-v4: .*HalfCheetah-v4"),
    ("HalfCheetah-v9", "{}", "--env is HalfCheetah-v9"),
    ("no_such_package:Env-v0", "{}", "not installed: .*no_such_package"),
    ("nowhere/Env-v0", "{}", "Namespace nowhere not found"),
    ("a b", "{}", "--env is a b"),
    ("CartPole-v1", "{'a': 1}", "--env-kwargs is .* it takes a JSON object"),
    ("CartPole-v1", "[1]", "--env-kwargs is"),
    ("CartPole-v1", '{"wind": 1}', "--env-kwargs is .*wind"),
])
def test_unusable_environments(env, kwargs, message):
    cfg = Config(env=env, env_kwargs=kwargs)
    with pytest.raises(UsageError, match=message), env_errors(cfg):
        gym.make_vec(cfg.env, 1, vectorization_mode="sync", **json.loads(cfg.env_kwargs))


def test_a_missing_extra_names_the_command():
    no_box2d = gym.error.DependencyNotInstalled("Box2D is not installed")
    for env, error, extra in [("ALE/Pong-v5", ModuleNotFoundError("No ale_py"), "atari"),
                              ("LunarLander-v3", no_box2d, "box2d")]:
        with pytest.raises(UsageError, match=rf"pip install -e '\.\[{extra}\]'"):
            with env_errors(Config(env=env)):
                raise error


def test_a_bug_of_the_environment_is_not_taken_for_a_wrong_flag():
    with pytest.raises(TypeError), env_errors(Config()):
        raise TypeError("in the environment's own code")


def test_known_notices_are_silent_and_others_are_not(capfd):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with env_errors(Config()):
            env = gym.make("HalfCheetah-v4")
            warnings.warn("another notice", DeprecationWarning, stacklevel=1)
        env.reset()
        env.close()
    assert [str(warning.message) for warning in seen] == ["another notice"]
    assert capfd.readouterr() == ("", "")
    assert not Path("MUJOCO_LOG.TXT").exists()
    inputs.mujoco_warning("Nan in QACC")
    assert "Nan in QACC" in capfd.readouterr().err


# ---- The run directory

def test_directory_by_default():
    cfg = open_run(Config(env="ALE/Pong-v5", seed=3, run_dir=""))
    assert Path(cfg.run_dir) == Path("runs/ALE-Pong-v5/test_logger/seed3")
    assert open_run(cfg) == cfg and not os.listdir(".")


def test_a_taken_directory_names_the_ways_out():
    train(Config(total_steps=100))
    message = refused(open_run, Config())
    assert all(way in message for way in ("--resume", "--seed", "--run-dir"))
    for name in ("config.json", "progress.csv", "policy.pt"):       # any of it is a run
        os.rename(f"run/{name}", name)
        assert "holds a run" in refused(open_run, Config())
    os.mkdir("notes")
    open_run(Config(run_dir="notes"))                               # a directory is not yet a run


def test_unwritable_directories():
    Path("file").write_text("")
    assert "--run-dir" in refused(open_run, Config(run_dir="file"))
    assert "--run-dir" in refused(open_run, Config(run_dir="file/run"))
    with pytest.raises(UsageError, match="--run-dir is file/run"):  # had `open_run` overlooked it
        rundir.hold(Config(run_dir="file/run"))


def test_nothing_to_resume():
    assert "no config.json" in refused(open_run, Config(run_dir="nowhere", resume=True))
    os.mkdir("run")
    assert "no config.json" in refused(open_run, Config(resume=True))
    with pytest.raises(Stop):
        train(Config(), stop_at=100)
    config = json.loads(Path("run/config.json").read_text())
    os.rename("run/resume-100", "kept")
    assert "no checkpoint" in refused(open_run, Config(resume=True))
    os.rename("kept", "run/resume-100")
    for broken in ["", "{", "[]", "{}", '{"settings": 3, "algo": "", "module": ""}',
                   json.dumps(config | {"settings": {"gama": 1}})]:
        Path("run/config.json").write_text(broken)
        assert "run" in refused(open_run, Config(resume=True))
    Path("run/config.json").write_text(json.dumps(config | {"algo": "other"}))
    assert "a run of other, not of test_logger" in refused(open_run, Config(resume=True))


@pytest.mark.parametrize("name,value,known", [
    ("seed", 7, "1"), ("lr", 0.5, "0.01"), ("hidden", (4,), r"(8, 8)"), ("num_procs", 2, "1"),
    ("env", "Acrobot-v1", "CartPole-v1")])
def test_resume_with_another_setting_names_both(name, value, known):
    with pytest.raises(Stop):
        train(Config(), stop_at=100)
    message = refused(open_run, Config(resume=True, **{name: value}))
    assert all(part in message for part in (inputs.flag(name), str(value), known))


def test_resume_takes_the_settings_of_the_run():
    cfg = Config(env="Acrobot-v1", hidden=(4,), lr=0.5, max_grad_norm=2.0, total_steps=700,
                 torch_threads=2)
    with pytest.raises(Stop):
        train(cfg, stop_at=100)
    again = replace(cfg, resume=True)
    assert open_run(Config(resume=True)) == again                   # defaults count as not given
    assert open_run(Config(resume=True, lr=0.5)) == again           # equal to the run's
    free = {"total_steps": 900, "device": "cpu", "torch_threads": 3}
    assert open_run(Config(resume=True, **free)) == replace(again, **free)


def test_a_finished_run_has_nothing_to_do(capsys):
    train(Config())
    before = snapshot()
    with pytest.raises(SystemExit) as caught:
        open_run(Config(resume=True))
    assert caught.value.code == 0 and snapshot() == before
    assert "nothing to do" in capsys.readouterr().out


def test_a_new_end_goes_on(capsys):
    train(Config())
    train(Config(resume=True, total_steps=1000))
    assert capsys.readouterr().out.count("annealing runs to the new end") == 1
    assert [int(row["step"]) for row in rows()] == list(range(100, 1001, 100))
    config = read_config("run")
    assert config["settings"]["total_steps"] == 1000
    train(Config(resume=True, total_steps=1200))
    config = read_config("run")
    assert [entry["step"] for entry in config["resumed"]] == [800, 1000]
    assert all(entry["versions"]["torch"] == torch.__version__ for entry in config["resumed"])


def test_config_comes_back():
    cfg = open_run(Config(lr=np.float64(0.1), seed=np.int64(5), hidden=(3, 4)))
    with Logger(cfg, *make(cfg)[:1]):
        pass
    config = read_config("run")
    assert Config(**config["settings"]) == cfg and hash(Config(**config["settings"]))
    assert config["algo"] == "test_logger" and config["module"] == Config.__module__
    assert config["versions"]["torch"] == torch.__version__
    assert {"command", "git_commit", "env_spec_kwargs", "init_from"} <= set(config)


def test_a_second_process_is_refused(log):
    again = Logger(Config(resume=True), torch.nn.Linear(3, 2))
    assert "another process" in refused(again.__enter__)
    log.report(100)                                                 # the first one does not mind


def test_the_lock_goes_with_the_run():
    for stop_at in (100, 200, 300):
        with pytest.raises(Stop):
            train(Config(resume=stop_at > 100), stop_at=stop_at)


def test_a_run_that_began_meanwhile_is_not_overwritten():
    cfg = open_run(Config())
    train(Config())
    assert "holds a run" in refused(Logger(cfg, *make(cfg)[:1]).__enter__)


# ---- Numbers

def test_statistics_are_those_of_numpy(log):
    generator = np.random.default_rng(1)
    parts = [generator.normal(5, 2, shape) for shape in [(7,), (2, 3), (0,), (1, 1, 4)]]
    for part in parts:
        log.store(a=part, b=torch.tensor(part, dtype=torch.float32, requires_grad=True))
    log.store(count=3, loss=torch.tensor(1.0), flag=True)
    log.store(count=np.int64(4), loss=2, half=np.float32(0.1), list=[1, 2])
    log.report(100, none=np.zeros(0))
    row, flat = rows()[-1], np.concatenate([part.ravel() for part in parts])
    for name, value in {"mean": flat.mean(), "std": flat.std(), "min": flat.min(),
                        "max": flat.max()}.items():
        assert float(row[f"a_{name}"]) == pytest.approx(value, rel=1e-12)
        assert float(row[f"b_{name}"]) == pytest.approx(value, rel=1e-6)
    assert [row[name] for name in ("count", "loss", "flag")] == ["3.5", "1.5", "1.0"]
    assert row["half"] == repr(float(np.float32(0.1))) and row["list_mean"] == "1.5"
    assert not any(name.startswith("none") for name in row)


def test_statistics_of_ranks_are_those_of_all():
    generator = np.random.default_rng(1)
    parts = [torch.tensor(generator.normal(1e6, 1e-3, size)) for size in (5, 1, 0, 300)]
    merged = averages.merge("a", [averages.summary([part]) for part in parts])
    flat = np.concatenate(parts)
    assert merged == pytest.approx({"a_mean": flat.mean(), "a_std": flat.std(),
                                    "a_min": flat.min(), "a_max": flat.max()}, rel=1e-9)


def test_statistics_too_large_for_a_float_are_not_finite():
    parts = [averages.summary([torch.full((2,), value, dtype=torch.float64)])
             for value in (1e200, -1e200)]
    assert averages.merge("a", parts)["a_std"] == np.inf


def test_an_array_of_one_rank_makes_a_distribution_of_all():
    parts = [averages.summary([torch.tensor(1.0)]), averages.summary([torch.tensor([2.0, 6.0])])]
    for ranks in (parts, parts[::-1]):
        assert averages.merge("a", ranks) == {
            "a_mean": 3.0, "a_std": pytest.approx(14 ** 0.5 / 3 ** 0.5), "a_min": 1.0, "a_max": 6.0}


def test_stored_buffers_may_be_used_again(log):
    for value in (torch.ones(3), np.ones(3), torch.ones(())):
        log.store(a=value)
        value[...] = 9
    log.report(100)
    assert rows()[0]["a_max"] == "1.0"


def test_each_report_starts_anew(log):
    log.report(100, a=1.0)
    log.report(100, a=3.0)
    log.report(100)
    assert [row["a"] for row in rows()] == ["1.0", "3.0", ""]
    assert [row["step"] for row in rows()] == ["100", "200", "300"]
    assert log.step == 300


def test_episodes(log):
    log.report(100, [(24, 3, 5.0, 9), (0, 1, np.float32(1.5), np.int32(4)), (24, 0, 3.0, 5)])
    log.report(100)
    log.report(100, [(2, 0, 2.0, 1)])
    assert [[row[name] for name in ("step", "env", "ep_ret", "ep_len")]
            for row in rows("episodes.csv")] == [
        ["4", "1", "1.5", "4"], ["100", "0", "3.0", "5"], ["100", "3", "5.0", "9"],
        ["212", "0", "2.0", "1"]]
    first, none, last = rows()
    assert first["ep_ret_mean"] == repr(9.5 / 3) and first["ep_len_max"] == "9.0"
    assert none["ep_ret_mean"] == none["ep_len_std"] == "" and last["ep_ret_std"] == "0.0"


def test_a_late_column_is_empty_before(log):
    log.report(100, a=1.0)
    log.report(100, a=0.1, b=2.0)
    log.report(100, c=torch.ones(2), a=0.3)
    assert [row["b"] for row in rows()] == ["", "2.0", ""]
    assert [row["c_std"] for row in rows()] == ["", "", "0.0"]
    assert [row["a"] for row in rows()] == ["1.0", "0.1", "0.3"]    # the shortest text
    lines = Path("run/progress.csv").read_text().splitlines()
    assert len({line.count(",") for line in lines}) == 1


def test_a_row_is_on_disk_at_once_in_one_call(log, monkeypatch):
    class File:
        def write(self, data):
            calls.append(data)
            return len(data)

        def close(self):
            pass

    calls = []
    log.report(100, a=1.0)
    assert len(rows()) == 1
    monkeypatch.setattr(log.progress, "file", File())
    log.report(100, a=2.0)
    assert len(calls) == 1 and calls[0].startswith(b"200,") and calls[0].endswith(b"2.0\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, float("nan")], -np.inf])
def test_what_is_not_finite_stops_the_run(value):
    cfg = open_run(Config())
    with pytest.raises(FloatingPointError, match="q_loss.* at step 200") as caught:
        with Logger(cfg, *make(cfg)[:1]) as log:
            log.report(100, q_loss=1.0)
            log.report(100, v_loss=1.0, q_loss=value)
    assert caught.value.__notes__ == [
        "In CartPole-v1, after step 200; the checkpoint of step 100 in run stays"]
    assert len(rows()) == 1
    assert checkpoint.load_resume("run")[0] == checkpoint.load_file("run/policy.pt")["step"] == 100


def test_a_return_that_is_not_finite_stops_the_run(log):
    with pytest.raises(FloatingPointError, match="ep_ret_mean is nan"):
        log.report(100, [(0, 0, float("nan"), 3)])


@pytest.mark.parametrize("where", [..., (1, 2)], ids=["all", "one"])
def test_a_policy_with_nan_is_not_saved(where):
    cfg = open_run(Config())
    agent = torch.nn.Linear(3, 2)
    with pytest.raises(FloatingPointError, match="weight of the agent is nan"):
        with Logger(cfg, agent) as log:
            agent.weight.data[where] = float("nan")
            log.report(100)
    assert checkpoint.load_file("run/policy.pt")["step"] == 0


@pytest.mark.parametrize("every,expected", [
    (250, [300, 500, 800, 1000]), (300, [300, 600, 900, 1000]), (2000, [1000])])
def test_evaluation_is_due(every, expected):
    """At the first report that reaches a multiple, and at the end, multiple or not."""
    log = Logger(Config(eval_every=every, total_steps=1000), torch.nn.Linear(3, 2))
    due = []
    for log.step in range(0, 1000, 100):
        due.append(log.eval_due(100))
    assert [100 * (k + 1) for k, is_due in enumerate(due) if is_due] == expected
    assert not Logger(Config(), torch.nn.Linear(3, 2)).eval_due(10**6)


def test_tensorboard_holds_the_same_numbers():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    with pytest.raises(Stop):
        train(Config(), stop_at=300)                                # rows to 300, saved at 100
    train(Config(resume=True))
    board = EventAccumulator("run").Reload()
    for name in ("loss", "noise_std", "ep_ret_mean", "late"):
        points = {event.step: event.value for event in board.Scalars(name)}
        assert points == {int(row["step"]): np.float32(row[name]) for row in rows() if row[name]}
        assert len(board.Scalars(name)) == len(points)


def test_table_on_standard_output(capsys):
    train(Config(total_steps=2500))
    out, err = capsys.readouterr()
    header, first = out.splitlines()[1:3]
    assert header.split()[:4] == ["step", "steps/s", "ep_ret", "ep_len"] and "noise" in header
    assert first.split()[0] == "100" and len(first) <= 100
    assert out.count("ep_ret") == 3                                 # first, a late column, 21st
    assert err == ""


def test_bar_on_a_terminal(monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    train(Config())
    assert "800/800" in terminal.getvalue()
    assert "ep_ret" in capsys.readouterr().out


def test_a_report_is_quick(log):
    metrics = {f"loss_{k}": torch.tensor(1.0) for k in range(10)} | {"val": torch.randn(2048)}
    log.report(100, **metrics)
    times = []
    for _ in range(100):
        start = time.perf_counter()
        log.report(100, [(0, 0, 1.0, 1)], **metrics)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3


# ---- Saving and going on

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
    assert numbers("run") == numbers("whole") and len(numbers("run")) == 8
    ends = [[row["step"], row["ep_ret"]] for row in rows("episodes.csv", "run")]
    assert ends == [[row["step"], row["ep_ret"]] for row in rows("episodes.csv", "whole")]
    times = [float(row["time"]) for row in rows()]
    assert times == sorted(times)


def test_same_seed_same_numbers():
    train(Config(run_dir="a"))
    train(Config(run_dir="b"), always=True)                         # saving changes nothing
    train(Config(run_dir="c", seed=2))
    assert numbers("a") == numbers("b") != numbers("c")


def test_when_it_saves(log):
    def saved():
        return checkpoint.load_resume("run")[0]
    assert saved() == 0                                             # --resume works at once
    log.report(100)
    assert saved() == 100                                           # the first report
    log.report(100)
    assert saved() == 100
    log.saved -= 61
    log.report(100)
    assert saved() == 300                                           # a minute after the last
    log.saved, log.save_seconds = log.saved - 61, 10.0              # a replay buffer: slower
    log.report(100)
    assert saved() == 300
    log.saved -= 140
    log.report(100)
    assert saved() == 500
    log.report(10**6)
    assert saved() == log.step == checkpoint.load_file("run/policy.pt")["step"]     # the end


@pytest.mark.parametrize("killed_by", ["open_files", "save_policy", "save_resume"])
def test_a_run_killed_before_its_first_checkpoint_begins_anew(monkeypatch, killed_by):
    """It has its config.json and nothing to lose."""
    def killed(*args):
        raise Stop

    train(Config(run_dir="whole", seed=3))
    train(Config(run_dir="other", seed=5))
    target = checkpoint if killed_by == "save_resume" else Logger
    for name, more in [("run", {}), ("warm", {"init_from": "other"})]:
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(target, killed_by, killed)
            train(Config(run_dir=name, seed=3, **more))
        assert not checkpoint.resume_folders(name)
    train(Config(run_dir="run", seed=3, resume=True))
    assert numbers("run") == numbers("whole")
    weights = checkpoint.load_file("other/policy.pt")["agent"]["weight"]
    cfg = open_run(Config(run_dir="warm", resume=True))
    agent, optimizer = make(cfg)
    with Logger(cfg, agent, optimizer=optimizer) as log:
        assert log.step == 0 and torch.equal(agent.weight, weights)
    assert read_config("warm")["init_from"] == {"run": "other", "step": 800}


def test_best_policy():
    cfg = open_run(Config())
    agent = torch.nn.Linear(3, 2)
    with Logger(cfg, agent) as log:
        log.report(100)
        assert not Path("run/best.pt").exists()
        for ret, spread in ((-5.0, 0.0), (7.0, 1.0), (6.0, 9.0), (5.0, 0.0)):
            torch.nn.init.constant_(agent.weight, ret)
            log.report(100, eval_ret=[ret - spread, ret + spread])  # the mean decides
        log.saved = -1e9
        log.report(100)
    with Logger(replace(cfg, resume=True), agent) as log:
        log.report(100, eval_ret=[6.5])                             # the best is remembered
    best = checkpoint.load_file("run/best.pt")
    assert best["step"] == 300 and (best["agent"]["weight"] == 7).all()
    assert Config(**best["settings"]) == cfg


def test_damaged_checkpoints_are_refused():
    with pytest.raises(Stop):
        train(Config(), stop_at=200)
    path = Path("run/resume-100/rank0.pt")
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    assert "rank0.pt is damaged" in refused(train, Config(resume=True))
    path.write_bytes(whole)
    torch.save({"step": 100}, path)
    assert "rank0.pt is damaged or no checkpoint: it lacks state" in refused(
        train, Config(resume=True))
    torch.save(torch.load(io.BytesIO(whole)) | {"state": {"agent": {}}}, path)
    assert "its weight is absent" in refused(train, Config(resume=True))
    saved = torch.load(io.BytesIO(whole))
    del saved["state"]["optimizer"]
    torch.save(saved, path)
    assert "no checkpoint of this program: KeyError 'optimizer'" in refused(
        train, Config(resume=True))
    path.write_bytes(whole)
    config = Path("run/config.json").read_text()
    Path("run/config.json").write_text(config.replace('"width": 2', '"width": 5'))
    assert "its weight is [2, 3], not [5, 3]" in refused(train, Config(resume=True))
    Path("run/config.json").write_text(config)
    train(Config(resume=True))


def test_init_from_takes_the_policy_alone():
    other = train(Config(run_dir="other", seed=5))
    cfg = open_run(Config(init_from="other"))
    agent, optimizer = make(cfg)
    with Logger(cfg, agent, optimizer=optimizer) as log:
        assert torch.equal(agent.weight, other.weight)
        assert log.step == 0 and not optimizer.state
        log.report(100)
    assert read_config("run")["init_from"] == {"run": "other", "step": 800}
    with Logger(open_run(Config(resume=True)), agent) as log:       # not taken a second time
        assert log.step == 100


def test_init_from_what_does_not_fit():
    train(Config(run_dir="other"))
    assert "no nowhere/policy.pt" in refused(open_run, Config(init_from="nowhere"))
    cfg = Config(init_from="other", width=4)
    assert "its weight is [2, 3], not [4, 3]" in refused(train, cfg)


@pytest.mark.parametrize("number,status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends(number, status, capfd):
    before = signal.getsignal(number)
    cfg = open_run(Config())
    with pytest.raises(SystemExit) as caught, Logger(cfg, *make(cfg)[:1]) as log:
        log.report(100)
        log.report(100)
        os.kill(os.getpid(), number)
        assert checkpoint.load_resume("run")[0] == 100              # not in the middle of a phase
        log.report(100)
    assert caught.value.code == status
    assert checkpoint.load_resume("run")[0] == checkpoint.load_file("run/policy.pt")["step"] == 300
    assert len(rows()) == 3
    assert signal.getsignal(number) is before
    assert "next report" in capfd.readouterr().err


def test_a_second_ctrl_c_ends_at_once():
    cfg, before = open_run(Config()), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Logger(cfg, *make(cfg)[:1]) as log:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)                         # one Ctrl-C, come by two ways
        log.signal_time -= 1
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second Ctrl-C was not noticed")
    assert signal.getsignal(signal.SIGINT) is before


def test_threads_leave_the_signals_alone():
    done, before = [], signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: done.append(train(Config())))
    thread.start()
    thread.join()
    assert done and signal.getsignal(signal.SIGTERM) is before


def test_a_full_disk(monkeypatch):
    def full(*args):
        raise OSError(28, os.strerror(28))
    cfg = open_run(Config())
    with pytest.raises(OSError, match="cannot write .*policy.pt: No space left"):
        with Logger(cfg, *make(cfg)[:1]) as log:
            log.report(100)
            log.saved = -1e9
            monkeypatch.setattr(torch, "save", full)
            log.report(100)
    assert checkpoint.load_resume("run")[0] == 100
    assert not list(Path("run").rglob("*.tmp"))


@pytest.mark.parametrize("half", [True, False])
def test_a_disk_too_full_for_a_row(log, monkeypatch, half):
    class Full:
        def write(self, data):
            if half:
                return len(data) - 1
            raise OSError(28, os.strerror(28))

        def close(self):
            pass

    monkeypatch.setattr(log.progress, "file", Full())
    with pytest.raises(OSError, match="cannot write .*progress.csv: No space left on device"):
        log.report(100)


def script(text, *command):
    """Runs a script in a process of its own, where `train` and the others above are at hand."""
    # A kill loses nothing that was written; only a power cut needs the slow fsync.
    text = ("from tests.utils.test_logger import *\nos.fsync = lambda descriptor: None\n"
            + textwrap.dedent(text))
    return subprocess.run([*command, sys.executable, "-c", text], capture_output=True, text=True,
                          timeout=PATIENCE)


def test_killed_again_and_again():
    """SIGKILL at random moments, then --resume: in the end the very rows of an undisturbed run.

    Moments are counted in calls of functions, which the load of the machine does not change.
    """
    done = script("""
        import random
        calls, deadly = 0, -1

        def count(frame, event, arg):
            global calls
            calls += 1
            if calls == deadly:
                os.kill(os.getpid(), signal.SIGKILL)

        cfg = Config(total_steps=1200)
        train(replace(cfg, run_dir="whole"))                    # the first one imports more
        sys.setprofile(count)
        train(replace(cfg, run_dir="again"), always=True)
        sys.setprofile(None)
        half = calls // 2
        kills, status = 0, None
        while status != 0:                                      # also of one with nothing to do
            calls, deadly = 0, random.randrange(half)           # each child's own moment
            child = os.fork()
            if child == 0:
                sys.setprofile(count)
                train(replace(cfg, resume=os.path.exists("run/config.json")), always=True)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (0, -signal.SIGKILL), status
            kills += status != 0
        assert numbers("run") == numbers("whole") and len(numbers("run")) == 12
        assert kills >= 2
        """)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


TWO_RANKS = """
    from utils import mpi
    rank, told = mpi.rank(), {}

    def start(name, **kwargs):
        cfg = open_run(Config(run_dir=name, **kwargs))
        return Logger(cfg, *make(cfg)[:1])

    def ending(action, *args):
        try:
            action(*args)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    with start("numbers") as log:           # names that one rank lacks, episodes of both
        both = {"a": torch.arange(3.0) + 10 * rank, "b": rank}
        log.report(100, [(2 - rank, 1, 5.0 + rank, 3)], **both, **({"c": 7} if rank else {}))
        log.report(100, [(0, 0, 1.0, 1)] if rank else [])
        if rank == 1:                       # only one rank is told to stop
            os.kill(os.getpid(), signal.SIGTERM)
        told["signal"] = ending(log.report, 100)

    with start("nan") as log:
        log.report(100, loss=1.0)
        told["nan"] = ending(lambda: log.report(100, loss=float("nan") if rank else 1.0))

    save = torch.save
    with start("full") as log:
        log.report(100)
        log.saved = -1e9
        if rank == 1:
            torch.save = lambda *args: os.close(-1)
        told["full"] = ending(log.report, 100)
        torch.save = save

    for late in (1, 0):                     # the clock of one rank says that a checkpoint is due
        with start(f"late{late}", total_steps=1000) as log:
            log.report(100)
            log.saved = -1e9 if rank == late else log.saved
            log.report(100)
            mpi.barrier()                   # rank 0 has put it in its place
            told[f"late{late}"] = checkpoint.load_resume(f"late{late}")[0]

    with start("whole", total_steps=300) as log:
        for _ in range(3):
            log.report(100, noise=torch.randn(3) * (rank + 1))
    with start("resumed", total_steps=200) as log:
        for _ in range(2):
            log.report(100, noise=torch.randn(3) * (rank + 1))
    with start("resumed", total_steps=300, resume=True) as log:
        log.report(100, noise=torch.randn(3) * (rank + 1))

    Path(f"rank{rank}.json").write_text(json.dumps(told))
    """


def test_two_ranks():
    done = script(TWO_RANKS, mpiexec(), "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(Path(f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank in told:
        assert rank["signal"] == "SystemExit: 143"
        assert "loss is nan at step 200" in rank["nan"]
        assert (rank["late1"], rank["late0"]) == (100, 200)     # rank 0 decides for all
        assert rank["full"].startswith("OSError: cannot write full/resume-200.tmp/rank1.pt")
    first, second, _ = rows(run="numbers")
    assert [first[f"a_{what}"] for what in ("mean", "min", "max")] == ["6.0", "0.0", "12.0"]
    assert float(first["a_std"]) == pytest.approx(np.std([0, 1, 2, 10, 11, 12]))
    assert (first["b"], first["c"], second["c"]) == ("0.5", "7.0", "")
    ends = [[row[name] for name in ("step", "env", "ep_ret")]
            for row in rows("episodes.csv", "numbers")]
    assert ends == [["8", "3", "6.0"], ["12", "1", "5.0"], ["104", "2", "1.0"]]
    assert checkpoint.resume_folders("numbers").keys() == {300}
    assert len(rows(run="nan")) == 1 and checkpoint.resume_folders("nan").keys() == {100}
    assert checkpoint.resume_folders("full").keys() == {100}
    assert sorted(os.listdir("full/resume-100")) == ["rank0.pt", "rank1.pt"]
    assert numbers("whole") == numbers("resumed")
    assert "saved by 2 processes" in refused(checkpoint.load_resume, "full")
