"""benchmarks/speed.py: the work is equal, and the shares of a run's time add up."""
import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import speed
from tests.helpers import ROOT
from tests.house.tree import in_readme


def test_the_table_has_every_file_that_needs_no_demonstrations():
    assert set(speed.CASES) == set(in_readme()) - {"bc", "gail"}
    assert set(speed.TABLE_PEERS) <= set(speed.CASES)
    assert set(speed.OURS) | set(speed.PEER) | set(speed.TABLE_ONLY) <= set(speed.CASES)


def test_parts_of_a_run_are_clocked_where_they_happen(monkeypatch):
    """The clock is counted here: every call takes one second."""
    ticks = iter(range(1000))
    monkeypatch.setattr(speed.time, "perf_counter", lambda: float(next(ticks)))
    envs = SimpleNamespace(step=lambda action: "stepped")
    module = SimpleNamespace(
        make_envs=lambda cfg, num_envs: envs, update=lambda agent: "updated",
        Agent=type("Agent", (), {"act": lambda self, obs: "acted"}))
    seconds = speed.clock_parts(module)
    assert module.make_envs(None, 3).step(0) == "stepped" and envs.step(0) == "stepped"
    assert module.Agent().act(0) == "acted" and module.update(None) == "updated"
    assert seconds == {"environment": 2.0, "acting": 1.0, "learning": 1.0}


@pytest.mark.parametrize("num_procs", [1, 2])
def test_a_real_run_is_counted_and_its_parts_are_the_whole(num_procs):
    args = argparse.Namespace(algo="a2c", env="Pendulum-v1", num_envs=2, compile=False,
                              num_procs=num_procs)
    took, counts, parts = speed.timed("plainrl", args, 1, 400)
    assert counts == {"env": 480, "optimizer": 3}  # three whole rollouts, one gradient step each
    assert set(parts) == set(speed.PARTS) and min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(took)


def told_by(monkeypatch, counts, seconds):
    """Let `timed` find these counts and seconds, by library, instead of starting processes."""
    def timed(library, args, threads, steps):
        parts = dict(zip(speed.PARTS, (0.1, 0.2, 0.3, 0.25, 0.15)))
        return seconds[library], counts[library], {k: v * seconds[library]
                                                   for k, v in parts.items()}

    monkeypatch.setattr(speed, "timed", timed)


@pytest.mark.parametrize("command", [speed.compare, speed.table])
def test_a_comparison_of_unequal_work_is_refused(monkeypatch, command):
    counts = {"plainrl": {"env": 8, "optimizer": 4}, "sb3": {"env": 8, "optimizer": 5}}
    told_by(monkeypatch, counts, {"plainrl": 1.0, "sb3": 2.0})
    monkeypatch.setattr(speed, "CASES", {"ppo": ("Pendulum-v1", 1, 2048)})
    args = argparse.Namespace(algo="ppo", num_envs=1, threads=1, pairs=1, steps=8, quick=True,
                              compile=False, num_procs=1)
    with pytest.raises(SystemExit, match="ppo: numbers of steps differ: .*4.*5"):
        command(args)


def test_a_row_of_the_table_by_hand(monkeypatch, capsys):
    counts = dict.fromkeys(("plainrl", "sb3"), {"env": 2048, "optimizer": 4})
    told_by(monkeypatch, counts, {"plainrl": 4.0, "sb3": 6.0})
    monkeypatch.setattr(speed, "CASES", {"ppo": ("Pendulum-v1", 8, 6000), "sac": ("Hopper", 1, 8),
                                         "sac_her": ("FetchReach-v4", 1, 800)})
    monkeypatch.setattr(speed, "bare_rate", lambda env: 5120.0)
    speed.table(argparse.Namespace(pairs=2, quick=False, compile=False, num_procs=1))
    head, _, ppo, sac, her = (line.strip("| ").split(" | ")
                              for line in capsys.readouterr().out.splitlines())
    assert head[3:6] == ["steps/s", "bound", "over the peer"] and head[6:] == list(speed.PARTS)
    shares = ["10%", "20%", "30%", "25%", "15%"]
    # 6000 steps are three whole rollouts of 2048, in 4 seconds.
    assert ppo == ["ppo", "Pendulum-v1", "8", "1,536", "3.3", "1.50 1.50", *shares]
    assert sac == ["sac", "Hopper", "1", "2", "2560.0", "1.50 1.50", *shares]
    assert her == ["sac_her", "FetchReach-v4", "1", "200", "25.6", "no peer", *shares]


def test_a_rate_is_taken_from_the_first_report_on(monkeypatch):
    def run(command, **_):
        assert command[1:6] == ["-m", "algos.a2c", "--env", "Pendulum-v1", "--run-dir"]
        assert command[7:] == ["--num-envs", "2"]
        Path(command[6]).mkdir()
        Path(command[6], "progress.csv").write_text("step,time\n100,9.5\n200,10\n300,11.5\n")

    monkeypatch.setattr(speed.subprocess, "run", run)
    assert speed.rate_of("a2c", "Pendulum-v1", "--num-envs", 2) == (300 - 100) / (11.5 - 9.5)


@pytest.mark.parametrize("library, first", [("sb3", "True"), ("plainrl", "False")])
def test_the_peer_imports_pytorch_as_its_users_do(library, first):
    """Not after `utils`, which makes that import faster."""
    code = f"""
import sys
from benchmarks import speed
sys.modules["utils"] = None  # its import fails
try:
    speed.child("{library}", None)
except ImportError:
    print("torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.strip() == first, out.stderr


def test_scaling_gives_two_processes_twice_the_work_and_then_the_same(monkeypatch, capsys):
    asked = []
    rates = iter([1000, 1800, 1100, 2000, 3400, 2000, 10, 15, 9, 10, 16, 8])

    def rate_of(algo, env, *flags):
        asked.append((algo, env, *flags))
        return next(rates)

    monkeypatch.setattr(speed, "rate_of", rate_of)
    monkeypatch.setattr(speed, "SCALED", {"ppo": ("Pendulum-v1", {"--num-envs": 8}),
                                          "dqn": ("CartPole-v1", {"--batch-size": 64})})
    speed.scaling(argparse.Namespace(pairs=2))
    ppo = [("ppo", "Pendulum-v1", "--num-procs", procs, "--num-envs", num_envs)
           for procs, num_envs in [(1, 8), (2, 16), (2, 8)]]
    assert asked[:6] == ppo * 2
    assert asked[7] == ("dqn", "CartPole-v1", "--num-procs", 2, "--batch-size", 128)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| ppo | 1,000 2,000 | 1,800 3,400 | 1.80 1.70 | 1,100 2,000 | 1.10 1.00 |",
        "| dqn | 10 10 | 15 16 | 1.50 1.60 | 9 8 | 0.90 0.80 |"]


@pytest.mark.parametrize("library", ["plainrl", "sb3"])
def test_only_ours_is_compiled_and_gets_processes(monkeypatch, library):
    asked = []

    def run(command, **settings):
        asked.append(command)
        return SimpleNamespace(stdout='{"counts": {}, "seconds": {}}')

    monkeypatch.setattr(speed.subprocess, "run", run)
    args = argparse.Namespace(algo="a2c", env="Pendulum-v1", num_envs=2, compile=True, num_procs=2)
    speed.timed(library, args, 3, 400)
    [command] = asked
    assert command[command.index("--threads") + 1] == "3"
    assert ("--compile" in command) == (library == "plainrl")
    assert ("mpiexec" in command[0]) == (library == "plainrl")


def test_ours_trains_with_what_was_asked_for(monkeypatch):
    given = {}
    module = SimpleNamespace(Config=given.update, train=lambda cfg: None)
    monkeypatch.setattr(speed.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(speed, "count_steps", lambda library, env: {"env": 8, "optimizer": 1})
    monkeypatch.setattr(speed, "clock_parts", lambda module: {})
    speed.child("plainrl", argparse.Namespace(algo="ppo", env="Pendulum-v1", steps=8, num_envs=2,
                                              num_procs=1, threads=3, compile=True))
    assert given.pop("run_dir").endswith("run")
    assert given == {"env": "Pendulum-v1", "total_steps": 8, "num_envs": 2, "num_procs": 1,
                     "torch_threads": 3, "compile": True}
