"""`utils.sweep`: which runs there are, that each ends in its result, whatever happens to them."""
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from algos import ppo
from tests.helpers import not_on_windows, refused, wait_for
from utils import play, results, sweep
from utils.files import read_table
from utils.run import code

ENV = "CartPole-v1"
FLAKY = {"algos": ("ppo",), "envs": ("tests.envs:Flaky-v0",)}
SMALL = ("rollout_steps=128", "minibatch_size=64", "epochs=1", "num_envs=2", "hidden=8")


# ---- What is to be run

def test_dry_run_lists_the_exact_commands(capsys):
    asked = sweep.Sweep(algos=("ppo",), envs=("CartPole-v1", "Acrobot-v1"), seeds=2, out="out",
                        set=("lr=1e-4,3e-4", "total_steps=1e5"), dry_run=True)
    assert sweep.main(asked) == 0
    listed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    expected = [
        [sys.executable, "-m", "algos.ppo", "--env", env, "--lr", lr, "--total-steps", "1e5",
         "--seed", seed, "--run-dir",
         str(Path("out", env, f"ppo/lr={value},total_steps=100000/seed{seed}"))]
        for seed in "12" for env in ("CartPole-v1", "Acrobot-v1")
        for lr, value in (("1e-4", "0.0001"), ("3e-4", "0.0003"))]
    assert listed == expected
    assert os.listdir() == []


def folders(*settings, **more):
    asked = sweep.Sweep(algos=("ppo",), envs=("CartPole-v1",), set=settings, out="out", **more)
    return [job.run_dir.relative_to("out/CartPole-v1/ppo").as_posix() for job in sweep.plan(asked)]


def test_shards_divide_the_runs():
    parts = [folders(seeds=5, shard=f"{k}/3") for k in (1, 2, 3)]
    assert [len(part) for part in parts] == [2, 2, 1] and sorted(sum(parts, [])) == folders(seeds=5)
    for wrong in ("0/2", "3/2", "2", "a/b"):
        refused(sweep.Sweep, shard=wrong, says="--shard is")


def test_a_run_keeps_its_directory_however_it_is_typed():
    """Else the same command, typed a little differently, trains everything again."""
    assert folders(seeds=2, first_seed=100) == ["default/seed100", "default/seed101"]
    assert folders("lr=1e-3", "gamma=0.9") == folders("gamma=.90", "lr=0.001")
    assert folders("lr=1e-3", "gamma=0.9") == ["gamma=0.9,lr=0.001/seed1"]
    assert folders("lr=1e-3,0.001") == ["lr=0.001/seed1"]  # and not twice in one directory
    assert folders("lr=1e-3", "lr=1e-4") == folders("lr=1e-3,1e-4")
    assert folders("hidden=64 64,32") == ["hidden=64-64/seed1", "hidden=32/seed1"]
    assert folders("anneal-lr=true,False") == ["anneal_lr=True/seed1", "anneal_lr=False/seed1"]
    (name,) = folders('env_kwargs={"sutton_barto_reward": true, "max_episode_steps": 9}')
    assert name.startswith("env_kwargs=") and name.count("/") == 1


def test_runs_of_code_that_has_changed_are_neither_skipped_nor_mixed():
    (run,) = folders()
    kept, today = Path("out/CartPole-v1/ppo", run), code.code(Path(ppo.__file__))
    kept.mkdir(parents=True)
    shutil.copy(ppo.__file__, kept / "algo.py")

    def of(told):
        config = {"algo": "ppo", "module": "algos.ppo", "settings": {"env": ENV}, **told}
        Path(kept, "config.json").write_text(json.dumps(config))

    for told in ({"code": today}, {}):                          # older versions did not keep it
        of(told)
        assert folders() == [run]
    of({"code": "another"})
    refused(folders, seeds=3, says=f"1 of these runs are of code that has changed since .*such as "
                                   f"{kept}; .*--any-code")
    assert folders(any_code=True) == [run]
    of({"code": today})
    Path(kept, "algo-until-128.py").touch()
    refused(folders, says="1 of these runs")                    # it is of both
    Path(kept, "config.json").write_text("damaged")
    assert folders() == [run]                                   # it alone will not start
    job = sweep.Job(kept, 1, [], ENV, Path(ppo.__file__), "another program")
    assert "not started, since ppo.py, or a module" in sweep.run(job, 0, set())


@pytest.mark.parametrize("changed, message", [
    ({"algos": ("pp",)}, "--algos pp: there is no algos.pp, only .*algos.ppo"),
    ({"envs": ()}, "--envs are needed"),
    ({"set": ("lr=1e-4,",)}, "--set lr=1e-4,: it takes name=value or name=value,value"),
    ({"set": ("gamma=0.9,2",)}, "--gamma is 2.0"),
    ({"set": ("anneal_lr=yes",)}, "takes True or False"),
    ({"set": ("seed=1,2",)}, "the sweep gives it itself"),
    ({"out": f"{__file__}/runs"}, "--out .*/runs: "),
    ({"set": ('env_kwargs={"a": "x y"}', 'env_kwargs={"a": "x/y"}')},
     "two of these runs have the same folder, out/CartPole-v1/ppo/env_kwargs="),
    ({"seeds": 10**12}, "--seeds is 1000000000000; it takes .* at most 100000"),
])
def test_refused_before_anything_starts(changed, message):
    asked = {"algos": ("ppo",), "envs": ("CartPole-v1",), "out": "out"} | changed
    refused(lambda: sweep.main(sweep.Sweep(**asked)), says=message)


# ---- Running

@not_on_windows("there is no SIGKILL")
def test_a_killed_run_is_listed_then_resumed_and_finished_ones_are_skipped(capsys):
    asked = sweep.Sweep(**FLAKY, seeds=2, set=("total_steps=640", *SMALL), out="out")
    Path("kill").touch()
    assert sweep.main(asked) == 1
    first, second = (job.run_dir for job in sweep.plan(asked))
    out = capsys.readouterr().out
    assert out.count(f"{first}: exit status -9, no result; see {first}.log\n") == 2
    assert not (first / "result.json").exists()
    result = (second / "result.json").read_text()

    sweep.main(sweep.Sweep(**vars(asked) | {"dry_run": True}))
    commands = capsys.readouterr().out.splitlines()
    assert commands[0].endswith("seed1 --resume") and commands[1].startswith("# finished: ")

    assert sweep.main(asked) == 0
    out = capsys.readouterr().out
    assert "2 runs, 1 of them finished before" in out and f"{first}: train100" in out
    assert out.splitlines()[-1] == "table and curves: python -m plot out"
    assert str(second) not in out and (second / "result.json").read_text() == result
    for run in (first, second):
        ends, reports = ([int(row["step"]) for row in read_table(run, name)]
                         for name in ("episodes.csv", "progress.csv"))
        assert reports == [128, 256, 384, 512, 640] and ends == sorted(ends) and len(ends) == 40
    one, two = (json.loads((run / "result.json").read_text()) for run in (first, second))
    assert one["git_commit"] == two["git_commit"] and one["settings"] == two["settings"]
    assert one["steps"] == 640 and len(one["eval"]) == 10


@not_on_windows("a process there gets no signal from another one")
@pytest.mark.parametrize("number,status,said", [
    (signal.SIGINT, 130, "stopped by Ctrl-C; the same command continues from here\n"),
    (signal.SIGTERM, 143, "")])
def test_signal_stops_the_runs_and_they_save(number, status, said):
    command = [sys.executable, "-m", "utils.sweep", "--algos", "ppo", "--envs", FLAKY["envs"][0],
               "--seeds", "2", "--set", "total_steps=1e6", *SMALL, "--out", "out"]
    # In a session of its own, so that the signal reaches the sweep alone, not what it started.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    try:
        found = wait_for(lambda: list(Path("out").rglob("resume-[1-9]*[0-9]")), process)
    finally:
        process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == status and err == said
    run = found[0].parent
    (saved,) = run.glob("resume-*")
    assert saved.name == f"resume-{read_table(run, 'progress.csv')[-1]['step']}"
    assert [path.name for path in run.parent.iterdir() if path.is_dir()] == ["seed1"]


def test_a_crash_does_not_stop_the_rest(capsys, monkeypatch):
    commands = []

    def call(command, log, running):
        """Run nothing: seed 2 fails, seed 5 leaves no result, the others do."""
        commands.append(command)
        run = Path(command[-1])
        if run.name in ("seed2", "seed5"):
            return 3 * (run.name == "seed2")
        run.mkdir(exist_ok=True)
        if "--results" in command:
            (run / "result.json").write_text('{"steps": 1000, "train100": 12.5, "eval": [1, 2]}')
        return 0

    monkeypatch.setattr(sweep, "call", call)
    asked = sweep.Sweep(("ppo",), ("CartPole-v1",), seeds=5, set=("total_steps=1e3",), out="out")
    jobs = sweep.plan(asked)
    assert sweep.run_all(jobs, 2) == 1
    out = capsys.readouterr().out
    assert out.count("train100 12.5, eval 1.5") == 3
    assert out.count("seed2: exit status 3, no result; see ") == 2
    assert "seed5: exit status 0, no result" in out
    for k, job in enumerate(jobs):
        assert out.count(f"{job.run_dir}: starts, {4 - k} left to start\n") == 1
    told = len(commands)
    assert sweep.run_all(jobs, 2) == 1
    assert (told, len(commands)) == (9, 12)         # nothing to collect of the one that failed
    # A larger budget in the same directory is not finished.
    assert sweep.run_all([job._replace(total_steps=2000) for job in jobs], 1) == 1
    assert len(commands) == 21


# ---- Results

@pytest.fixture
def run():
    ppo.train(ppo.Config("CartPole-v1", '{"max_episode_steps": 30}', seed=3, total_steps=512,
                         rollout_steps=256, minibatch_size=64, epochs=1, num_envs=2, hidden=(8,),
                         run_dir="runs/mine"))
    return Path("runs/mine")


def test_result(run, capsys):
    # 150 episodes, one each 3 steps; returns 0, 1, ..., 149.
    lines = [f"{3 * (k + 1)},0.5,0,{float(k)},9" for k in range(150)]
    (run / "episodes.csv").write_text("\n".join(["step,time,env,ep_ret,ep_len", *lines, ""]))
    config = json.loads((run / "config.json").read_text())
    config["settings"] |= {"eval_every": 128, "bf16": True, "device": "cpu", "total_steps": 500}
    (run / "config.json").write_text(json.dumps(config))
    assert sweep.main(sweep.Sweep(results="runs")) == 0
    path = run / "result.json"
    text = path.read_text()
    result = json.loads(text)
    assert len(text) < 5000 and str(Path.cwd()) not in text
    assert (result["algo"], result["env"], result["seed"]) == ("ppo", "CartPole-v1", 3)
    assert result["settings"].items() >= result["changed"].items()
    assert result["settings"]["gamma"] == 0.99
    assert not {"seed", "env", "eval_every", "run_dir"} & set(result["settings"])
    assert result["backend"] == {"bf16": True, "device": "cpu"}
    assert result["changed"] == {
        "env_kwargs": '{"max_episode_steps": 30}', "total_steps": 500, "rollout_steps": 256,
        "minibatch_size": 64, "epochs": 1, "num_envs": 2, "hidden": [8]}
    assert (result["steps"], result["total_steps"], result["episodes"]) == (512, 500, 150)
    assert result["train100"] == np.mean(np.arange(50, 150))
    assert result["seconds"] == float(read_table(run, "progress.csv")[-1]["time"])
    # 5.12 steps a bin: (0, 5.12] holds the episode that ended at 3, (5.12, 10.24] those at 6, 9.
    assert result["curve"][:2] == [[5, 0.0], [10, 1.5]] and len(result["curve"]) == 88
    assert result["curve"][-1] == [451, 148.5]      # those that ended at 447 and 450
    assert result["versions"]["gymnasium"] and "git_commit" in result and "resumed" not in result
    # Anybody can make the same figures of the run: same episodes, final weights.
    assert len(result["eval"]) == 100
    again = play.main(play.Play(str(run), episodes=100))
    assert result["eval"] == again.round(3).tolist()
    # A second call leaves it alone.
    path.write_text(text.replace('"episodes": 150', '"episodes": 151'))
    assert sweep.main(sweep.Sweep(results="runs")) == 0
    assert '"episodes": 151' in path.read_text()
    # One of a run that has gone on since then is made anew.
    path.write_text(json.dumps(result | {"steps": 256, "total_steps": 256, "train100": -1.0}))
    assert sweep.main(sweep.Sweep(results="runs")) == 0
    assert json.loads(path.read_text()) == result


def test_a_result_has_at_most_100_evaluations_and_the_last(run):
    assert results.make_result(run)["eval_curve"] == []
    # 150 evaluations at every second report; every second of them is kept, counted from the end.
    lines = [f"{10 * k},{k},{-k if k % 2 == 0 else ''}" for k in range(1, 301)]
    (run / "progress.csv").write_text("\n".join(["step,time,eval_ret_mean", *lines, ""]))
    result = results.make_result(run)
    assert result["eval_curve"] == [[10 * k, -k] for k in range(4, 301, 4)]
    assert result["seconds"] == 300


def test_results_pass_over_what_is_not_finished_and_names_what_is_damaged(run, capsys):
    for name in ("short", "broken", "torn"):
        shutil.copytree(run, run.parent / name)
    config = json.loads((run / "config.json").read_text())
    config["settings"]["total_steps"] = 1024
    (run.parent / "short/config.json").write_text(json.dumps(config))
    (run.parent / "broken/policy.pt").write_bytes(b"PK")
    (run.parent / "torn/episodes.csv").write_text("step,ep_ret\n12,\n")
    assert sweep.main(sweep.Sweep(results="runs")) == 1
    out, err = capsys.readouterr()
    assert "512 of 1,024 steps, not finished" in out
    assert "broken" in err and "torn: could not convert" in err
    assert [path.parent.name for path in Path("runs").rglob("result.json")] == ["mine"]
    refused(sweep.main, sweep.Sweep(results="elsewhere"), says="there is no run in it")
