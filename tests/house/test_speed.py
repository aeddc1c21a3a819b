"""benchmarks/speed.py: the work is equal, and the shares of a run's time add up."""
import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import speed
from tests.registry import module


@pytest.mark.parametrize("env,num_procs,steps,expected", [      # whole rollouts, one update each
    pytest.param("Pendulum-v1", 1, 400, {"env": 480, "optimizer": 3}, marks=pytest.mark.slow),
    ("Pendulum-v1", 2, 400, {"env": 480, "optimizer": 3}),
    ("ALE/Pong-v5", 1, 160, {"env": 80, "optimizer": 2})])
def test_a_real_run_is_counted_and_its_parts_are_the_whole(env, num_procs, steps, expected):
    args = argparse.Namespace(algo="a2c", env=env, num_envs=2, bf16=False, num_procs=num_procs)
    took, counts, parts = speed.timed("plainrl", args, 1, steps)
    assert counts == expected
    assert set(parts) == set(speed.PARTS) and min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(took)


@pytest.mark.parametrize("command", [speed.compare, speed.table])
def test_a_comparison_of_unequal_work_is_refused(monkeypatch, command):
    counts = {"plainrl": {"env": 8, "optimizer": 4}, "sb3": {"env": 8, "optimizer": 5}}
    parts = dict.fromkeys(speed.PARTS, 0.2)
    monkeypatch.setattr(speed, "timed", lambda library, *_: (1.0, counts[library], parts))
    monkeypatch.setattr(speed, "CASES", {"ppo": ("Pendulum-v1", 1, 2048)})
    args = argparse.Namespace(algo="ppo", num_envs=1, threads=1, pairs=1, steps=8, quick=True,
                              bf16=False, num_procs=1, peer="sb3")
    with pytest.raises(SystemExit, match="ppo: numbers of steps differ: .*4.*5"):
        command(args)


def test_a_flag_of_ours_reaches_it_and_no_peer(monkeypatch):
    def run(command, **_):
        commands.append(set(command))
        raise ZeroDivisionError

    commands = []
    monkeypatch.setattr(speed.subprocess, "run", run)
    args = argparse.Namespace(algo="ppo", env="ALE/Pong-v5", num_envs=8, bf16=True, num_procs=1)
    for library in ("plainrl", "sb3"):
        with pytest.raises(ZeroDivisionError):
            speed.timed(library, args, 1, 8)
    assert ["--bf16" in command for command in commands] == [True, False]


def test_the_peer_of_a_game_has_our_settings():
    for name in ("ale_py", "stable_baselines3"):
        pytest.importorskip(name)
    from benchmarks.sb3 import make_game_peer, make_peer

    peer, own = make_game_peer("ppo", "ALE/Pong-v5", 8), module("ppo").Config
    assert own.for_games | own.for_atari == {
        "lr": peer.learning_rate(1.0), "minibatch_size": peer.batch_size, "epochs": peer.n_epochs,
        "clip_ratio": peer.clip_range(1.0), "ent_coef": peer.ent_coef,
        "rollout_steps": 8 * peer.n_steps, "scale_rew": False, "recompute_adv": False}
    peer, own = make_game_peer("a2c", "ALE/Pong-v5", 16), module("a2c").Config
    assert own.for_atari == {"total_steps": 3e6, "rollout_steps": 16 * peer.n_steps,
                             "lr": peer.learning_rate(1.0), "ent_coef": peer.ent_coef}
    assert (own.lam, own.gamma) == (peer.gae_lambda, peer.gamma)
    assert speed.OURS["dqn_atari"] == {"double": False, "dueling": False}  # which the peer is not
    other = SimpleNamespace(PPO=lambda *_, **given: "its PPO", DQN=lambda *_, **given: "its DQN")
    assert make_peer("ppo", "ALE/Pong-v5", 1, 8, library=other) == "its PPO"
    assert make_peer("dqn_atari", "ALE/Pong-v5", 1, 1, library=other) == "its DQN"
    for algo, more in ("a2c", {"library": "sbx"}), ("trpo", {}):  # its own would be another's time
        with pytest.raises(SystemExit, match=f"no such peer of {algo} on ALE/Pong-v5"):
            make_peer(algo, "ALE/Pong-v5", 1, **more)


def test_a_rate_leaves_out_what_precedes_the_first_report(monkeypatch):
    def run(command, **_):
        folder = Path(command[command.index("--run-dir") + 1])
        folder.mkdir()
        (folder / "progress.csv").write_text("step,time\n1000,30\n2000,31\n3000,32\n")

    monkeypatch.setattr(speed.subprocess, "run", run)
    assert speed.rate_of("ppo", "Hopper-v4") == 1000
