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


@pytest.mark.parametrize("command", [speed.compare, speed.table])
def test_a_comparison_of_unequal_work_is_refused(monkeypatch, command):
    counts = {"plainrl": {"env": 8, "optimizer": 4}, "sb3": {"env": 8, "optimizer": 5}}
    parts = dict.fromkeys(speed.PARTS, 0.2)
    monkeypatch.setattr(speed, "timed", lambda library, *_: (1.0, counts[library], parts))
    monkeypatch.setattr(speed, "CASES", {"ppo": ("Pendulum-v1", 1, 2048)})
    args = argparse.Namespace(algo="ppo", num_envs=1, threads=1, pairs=1, steps=8, quick=True,
                              compile=False, num_procs=1, peer="sb3")
    with pytest.raises(SystemExit, match="ppo: numbers of steps differ: .*4.*5"):
        command(args)
