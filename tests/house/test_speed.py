"""benchmarks/speed.py: the work is equal, and the shares of a run's time add up."""
import argparse
from types import SimpleNamespace

import pytest

from benchmarks import speed


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
                              compile=False, num_procs=1, peer="sb3")
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
