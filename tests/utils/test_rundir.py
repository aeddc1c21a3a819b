"""The directory of a run: which one, when it is refused, and what config.json keeps."""
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from algos import ppo, sac
from tests.helpers import refused, snapshot
from tests.toy import Config, Stop, Toy, rows, start, train
from utils import checks, rundir
from utils.mpi import UsageError
from utils.run import parse
from utils.rundir import open_run, read_config


def test_directory_by_default():
    cfg = open_run(Config(env="ALE/Pong-v5", seed=3, run_dir=""))
    assert Path(cfg.run_dir) == Path("runs/ALE-Pong-v5/toy/seed3")
    assert open_run(cfg) == cfg and not os.listdir(".")
    cfg = open_run(Config(env="my_package:MyEnv-v0", run_dir=""))
    assert cfg.run_dir == str(Path("runs/my_package-MyEnv-v0/toy/seed1"))


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
    assert "a run of other, not of toy" in refused(open_run, Config(resume=True))


@pytest.mark.parametrize("name,value,known", [
    ("seed", 7, "1"), ("lr", 0.5, "0.01"), ("hidden", (4,), r"(8, 8)"), ("num_procs", 2, "1"),
    ("env", "Acrobot-v1", "CartPole-v1")])
def test_resume_with_another_setting_names_both(name, value, known):
    with pytest.raises(Stop):
        train(Config(), stop_at=100)
    message = refused(open_run, Config(resume=True, **{name: value}))
    assert all(part in message for part in (checks.flag(name), str(value), known))


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


def test_what_the_command_line_gives_counts_even_if_it_is_the_default():
    """Config(lr=0.01) and Config() are equal; --lr 0.01 and no --lr are not."""
    cfg = Config(lr=0.5, total_steps=1600, torch_threads=2, num_envs=8)
    with pytest.raises(Stop):
        train(cfg, stop_at=100)

    def typed(*args):
        return open_run(parse(Config, "", ["--resume", *args]))

    assert typed("--total-steps", "800") == replace(cfg, resume=True, total_steps=800)
    assert typed("--torch-threads=1") == replace(cfg, resume=True, torch_threads=1)
    assert typed("--run-dir", "run") == typed("--lr", "0.5") == replace(cfg, resume=True)
    assert "--lr is 0.01, but 0.5 in run" in refused(typed, "--lr", "1e-2")
    assert "--num-envs is 4, but 8 in run" in refused(typed, "--num_envs", "4")


def test_a_run_from_a_machine_with_more_cores_gets_the_threads_of_this_one(monkeypatch):
    cfg = ppo.Config(env="CartPole-v1", num_envs=2, torch_threads=12, run_dir="run")
    os.mkdir("run")
    rundir.write_config(cfg, 0, None)
    assert open_run(replace(cfg, resume=True)).torch_threads == 12
    monkeypatch.setattr(os, "cpu_count", lambda: 3)

    def typed(*args):
        return open_run(parse(ppo.Config, "", ["--resume", "--run-dir", "run", *args]))

    assert typed().torch_threads == read_config("run")["settings"]["torch_threads"] == 3
    assert typed("--torch-threads", "2").torch_threads == 2
    assert "--torch-threads is 12" in refused(typed, "--torch-threads", "12")


@pytest.mark.parametrize("count,end", [
    (0, "no config.json"), (1, "; there is one in runs/0"),
    (2, "; there are 2 in it: runs/0, runs/1"),
    (5, "; there are 5 in it: runs/0, runs/1, runs/2, runs/3, runs/4"),
    (7, "; there are 7 in it, such as runs/0, runs/1, runs/2, runs/3, runs/4")])
def test_a_folder_of_runs_names_up_to_five(count, end):
    os.makedirs("runs")
    for k in range(count):
        os.makedirs(f"runs/{k}")
        Path(f"runs/{k}/config.json").touch()
    assert refused(read_config, "runs").rstrip("\n").endswith(end)


def test_a_part_of_the_settings_is_enough_to_resume():
    """--num-envs of the run, and not its default, is what --num-procs divides."""
    cfg = sac.Config(env="Pendulum-v1", num_envs=2, num_procs=2, run_dir="run", total_steps=40)
    os.mkdir("run")
    rundir.write_config(cfg, 0, None)
    again = parse(sac.Config, "", ["--resume", "--run-dir", "run", "--num-procs", "2"])
    assert open_run(again) == replace(cfg, resume=True)


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
    with start(cfg):
        pass
    config = read_config("run")
    assert Config(**config["settings"]) == cfg and hash(Config(**config["settings"]))
    assert config["algo"] == "toy" and config["module"] == Config.__module__
    assert config["versions"]["torch"] == torch.__version__
    assert {"command", "git_commit", "env_spec_kwargs", "init_from"} <= set(config)


def test_a_second_process_is_refused():
    with start(Config()) as log:
        assert "another process" in refused(train, Config(resume=True))
        log.advance(100)                                            # the first one does not mind


def test_the_lock_goes_with_the_run():
    for stop_at in (100, 200, 300):
        with pytest.raises(Stop):
            train(Config(resume=stop_at > 100), stop_at=stop_at)


def test_a_run_that_began_meanwhile_is_not_overwritten():
    def restore(run):
        run.register(torch.nn.Linear(3, 2))
        run.restore()

    with Toy(Config()) as run:
        train(Config())
        assert "holds a run" in refused(restore, run)
