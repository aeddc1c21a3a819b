"""benchmarks/speed.py: the work is equal, and the ratios are kept."""
import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import ale_py  # noqa: F401  registers its environments
import pytest

from benchmarks import speed
from benchmarks.sb3 import make_peer, peers_own
from tests.registry import module


@pytest.mark.parametrize("env,num_procs,steps,expected", [      # whole rollouts, one update each
    pytest.param("Pendulum-v1", 1, 1200, {"env": 1536, "optimizer": 3}, marks=pytest.mark.slow),
    ("Pendulum-v1", 2, 1200, {"env": 1536, "optimizer": 3}),
    ("ALE/Pong-v5", 1, 160, {"env": 80, "optimizer": 2})])
def test_a_real_run_is_counted(env, num_procs, steps, expected):
    args = argparse.Namespace(algo="a2c", env=env, num_envs=2, bf16=False, num_procs=num_procs)
    took, counts = speed.timed("plainrl", args, 1, steps)
    assert counts == expected and took > 0.1


def test_a_comparison_of_unequal_work_is_refused(monkeypatch):
    counts = {"plainrl": {"env": 8, "optimizer": 4}, "sb3": {"env": 8, "optimizer": 5}}
    monkeypatch.setattr(speed, "timed", lambda library, *_: (1.0, counts[library]))
    args = argparse.Namespace(algo="ppo", num_envs=1, threads=1, pairs=1, steps=8, bf16=False,
                              num_procs=1, peer="sb3")
    with pytest.raises(SystemExit, match="ppo: numbers of steps differ: .*4.*5"):
        speed.compare(args)


def test_the_last_ratios_of_a_command_are_kept(monkeypatch):
    seconds = iter([3.0, 2.0, 2.0, 2.0])                        # the peer's come first
    monkeypatch.setattr(speed, "timed", lambda *_: (next(seconds), {"env": 8}))
    monkeypatch.setattr(speed, "HERE", Path())
    args = argparse.Namespace(algo="ppo", env="Hopper-v4", threads=1, pairs=2, steps=8, peer="sb3")
    assert speed.compare(args) == [1.5, 1.0]
    for ratios in [1.5, 1.0], [2.0, 3.0]:
        speed.keep(args, "--algo ppo", ratios)
    speed.keep(args, "--algo a2c", [4.0])
    rows = [json.loads(line) for line in Path("speed.jsonl").read_text().splitlines()]
    assert [(row["command"], row["ratios"]) for row in rows] == [
        ("--algo a2c", [4.0]), ("--algo ppo", [2.0, 3.0])]


SAME = {"gamma": 0.9, "num_envs": 2}
ON_POLICY = SAME | {"rollout_steps": 128, "lam": 0.8}
PPO = ON_POLICY | {"lr": 0.1, "epochs": 3, "clip_ratio": 0.3, "ent_coef": 0.4, "vf_coef": 0.7,
                   "max_grad_norm": 0.6}
OFF_POLICY = SAME | {"lr": 0.1, "buffer_size": 50, "start_steps": 9, "batch_size": 7,
                     "update_every": 4, "total_steps": 90}
DQN = OFF_POLICY | {"target_every": 30, "eps_steps": 45, "eps_end": 0.2, "anneal_lr": False}
THEIRS = {"num_envs": "n_envs", "lam": "gae_lambda", "minibatch_size": "batch_size", "tau": "tau",
          "epochs": "n_epochs", "clip_ratio": "clip_range", "start_steps": "learning_starts",
          "target_every": "target_update_interval", "eps_end": "exploration_final_eps",
          "v_lr": "learning_rate", "lr": "learning_rate", "cg_steps": "cg_max_steps",
          "max_kl": "target_kl", "backtracks": "line_search_max_iter"}


@pytest.mark.parametrize("algo,env,ours,more", [
    ("a2c", "Pendulum-v1", ON_POLICY | {"lr": 0.1, "ent_coef": 0.4, "max_grad_norm": 0.6},
     {"n_steps": 64}),
    ("ppo", "Pendulum-v1", PPO | {"minibatch_size": 32, "std_init": 0.3}, {"n_steps": 64}),
    ("ppo_lstm", "CartPole-v1", PPO | {"minibatch_envs": 1}, {"n_steps": 64, "batch_size": 64}),
    ("trpo", "Reacher-v4", ON_POLICY | {
        "v_lr": 0.1, "minibatch_size": 32, "cg_steps": 4, "max_kl": 0.5, "damping": 0.6,
        "backtracks": 3, "v_steps": 8}, {"n_steps": 64, "n_critic_updates": 2, "cg_damping": 0.3}),
    ("dqn", "CartPole-v1", DQN, {"exploration_fraction": 0.5, "gradient_steps": 1}),
    ("ddpg", "Pendulum-v1", OFF_POLICY | {"tau": 0.3}, {"gradient_steps": 1}),
    ("td3", "Pendulum-v1", OFF_POLICY | {"tau": 0.3}, {"gradient_steps": 1}),
    ("sac", "Pendulum-v1", OFF_POLICY | {"tau": 0.3, "update_every": 3, "num_envs": 6},
     {"gradient_steps": 2}),
    ("ppo", "ALE/Pong-v5", PPO | {"minibatch_size": 32}, {"n_steps": 64}),
    ("dqn_atari", "ALE/Pong-v5", DQN | {"update_every": 8, "anneal_lr": True},
     {"exploration_fraction": 0.5})])
def test_the_peer_has_our_settings(algo, env, ours, more):
    """Every number differs from the default, so that it has to come from our Config.

    But for returns some peers keep their own settings.
    """
    cfg, default = module(algo).Config.for_env(env, **ours), module(algo).Config.for_env(env)
    assert not [name for name, x in ours.items() if getattr(default, name) == x]
    peer = make_peer(algo, cfg, own=False)
    same = "gamma", "ent_coef", "vf_coef", "max_grad_norm", "batch_size", "buffer_size"
    expected = {THEIRS.get(name, name): x for name, x in ours.items()
                if name in THEIRS or name in same} | more
    for name, x in expected.items():
        had = getattr(peer, name)
        assert (had(0.5) if callable(had) else had) == (
            x / 2 if name == "learning_rate" and getattr(cfg, "anneal_lr", False) else x), name
    if "std_init" in ours:
        assert peer.policy.log_std.exp().detach().tolist() == pytest.approx([ours["std_init"]])
    own, peer = peers_own(algo, cfg), make_peer(algo, cfg)
    assert {name: getattr(peer, name) for name in own} == own


def test_a_peer_may_be_of_another_library():
    other = SimpleNamespace(PPO=lambda *_, **given: "its PPO", DQN=lambda *_, **given: "its DQN")
    for algo, name in ("ppo", "its PPO"), ("dqn_atari", "its DQN"):
        assert make_peer(algo, module(algo).Config.for_env("ALE/Pong-v5"), other) == name
    for algo, more in ("a2c", {"library": "sbx"}), ("trpo", {}):  # its own would be another's time
        with pytest.raises(SystemExit, match=f"no such peer of {algo} on ALE/Pong-v5"):
            make_peer(algo, module(algo).Config.for_env("ALE/Pong-v5"), **more)
