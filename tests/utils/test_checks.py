"""Which settings and spaces are refused, and what the message says."""
import dataclasses
import os
import re
from dataclasses import dataclass

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text

from algos import a2c, acktr, ddpg, dqn, dqn_atari, dqn_per, ppo, sac, sac_her, td3, trpo, vpg
from tests.helpers import name_of
from tests.toy import Config
from utils import checks
from utils.envs import make_envs
from utils.mpi import UsageError
from utils.run import check_divides, check_range, check_spaces, parse

ALGOS = [vpg, a2c, acktr, ppo, trpo, ddpg, td3, sac, sac_her, dqn, dqn_atari, dqn_per]


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
    check_range(Config(lr=1), "lr", 0.5, 1)
    check_range(Config(lr=1), "lr", 1, 2)
    check_range(Config(), "max_grad_norm", 0)                       # None, where it is declared
    check_range(Config(num_envs=np.int64(3)), "num_envs", 3, 3)


def test_what_does_not_divide():
    check_divides(Config(num_envs=4, width=2), "num_envs/width num_envs/num_procs")
    said = "--num-envs is 4; .* multiple of --width, which is 3: 3, or --width 2$"
    with pytest.raises(UsageError, match=said):
        check_divides(Config(num_envs=4, width=3), "num_envs/num_procs num_envs/width")
    for value, near, divisor in ((2048, 2044, 8), (5, 7, 5)):
        with pytest.raises(UsageError, match=f" which is 7: {near}, or --width {divisor}$"):
            check_divides(Config(num_envs=value, width=7), "num_envs/width")


@dataclass(frozen=True)
class Many(Config):
    """A setting of each kind."""

    gamma: float = 0.9
    clip_ratio: float = 1.0
    act_noise: float = 0.0
    epochs: int = 1
    shift: float = 0.0  # of no kind: any number
    buffer_size: int = 8


@pytest.mark.parametrize("name,good,bad", [
    ("clip_ratio", (1e-9, 7), (0, -1)), ("act_noise", (0, 9), (-1,)), ("epochs", (1, 9), (0, 1.5)),
    ("shift", (-9, 0, 9), (float("nan"), float("inf"), "1")),
    ("gamma", (0, 1), (-0.1, 1.1)), ("lr", (1e-9,), (0,)), ("seed", (0,), (-1, 0.5)),
    ("num_envs", (1,), (0,)), ("total_steps", (1, 1e12), (0, 1.5, 1.1e12, float("inf"))),
    ("hidden", ((1, 2), ()), ((1, 0),)), ("eval_every", (0,), (-1,)),
    ("max_grad_norm", (None, 0), (-1.0,)),
])
def test_check_settings(name, good, bad):
    for value in good:
        Many(**{name: value})
    for value in bad:
        with pytest.raises(UsageError, match=f"{checks.flag(name)} is "):
            Many(**{name: value})


def test_with_resume_the_settings_of_the_run_are_what_divides():
    """Those that are given are a part of them; this algorithm's default has one environment."""
    with pytest.raises(UsageError, match="--num-envs is 1; .* --num-procs, which is 2"):
        sac.Config(num_procs=2)
    sac.Config(num_procs=2, resume=True)
    ppo.Config(num_envs=3, resume=True)
    with pytest.raises(UsageError, match="--gamma is 2"):
        sac.Config(gamma=2.0, resume=True)


@pytest.mark.parametrize("name", ["num_envs", "buffer_size"])
def test_what_ranks_share_divides_by_them(name):
    Many(**{"num_procs": 2, name: 6})
    with pytest.raises(UsageError, match=f"{checks.flag(name)} is 7; .* --num-procs, which is 2"):
        Many(**{"num_procs": 2, name: 7})


@pytest.mark.parametrize("algo", ALGOS, ids=name_of)
def test_more_steps_than_can_be_counted_are_refused(algo):
    algo.Config(total_steps=1e12)
    with pytest.raises(UsageError, match=r"--total-steps is 11\d+.0; .* at most 1e\+12$"):
        algo.Config(total_steps=1.1e12)


@pytest.mark.parametrize("algo", ALGOS, ids=name_of)
def test_no_count_is_without_limit(algo):
    """A slip of the finger such as 10 ** 15 hangs or ends in a traceback of PyTorch."""
    # any; checked against cores, twice; against memory
    left = {"seed", "num_procs", "torch_threads", "buffer_size"}
    for field in dataclasses.fields(algo.Config):
        if "int" in str(field.type) and field.name not in left:
            value = (10**15,) if "tuple" in str(field.type) else 10**15
            with pytest.raises(UsageError, match=f"^{checks.flag(field.name)} is .*; .* at most "):
                algo.Config(**{field.name: value})


def test_goals_are_vectors_too():
    """An algorithm for vectors takes them; one for goals takes nothing else."""
    goals, box = make_envs(Config(env="tests.envs:GoalEnds-v0"), 1), Box(-1, 1, (2,))
    space = goals.single_observation_space
    assert checks.obs_kind(space) == "goal"
    check_spaces(space, box, obs="vector image", act="box")
    check_spaces(space, box, obs="goal", act="box")
    for obs, kinds in ((space, "image"), (Box(-1, 1, (3,)), "goal")):
        with pytest.raises(UsageError):
            check_spaces(obs, box, obs=kinds, act="box")
    fit = checks.fitting_algos("goal", "box")
    assert {"sac", "ppo", "sac_her"} <= set(fit) and "dqn" not in fit
    assert "sac_her" not in checks.fitting_algos("vector", "box")


def test_k_of_hindsight():
    sac_her.Config(her_k=0)
    for her_k, limit in ((-1, "at least 0"), (1001, "at most 1000")):
        with pytest.raises(UsageError, match=f"--her-k is {her_k}; it takes .*{limit}"):
            sac_her.Config(her_k=her_k)


@pytest.mark.parametrize("name,most", [("num_envs", 1e5), ("hidden", 1e5), ("epochs", 1e5),
                                       ("eval_every", 1e12)])
def test_the_limit_is_named(name, most):
    value = int(most) + 1
    message = re.escape(f"at most {most:g}") + "$"
    with pytest.raises(UsageError, match=message):
        ppo.Config(**{name: (64, value) if name == "hidden" else value, "resume": True})
    ppo.Config(**{name: (64, value - 1) if name == "hidden" else value - 1, "resume": True})


@pytest.mark.parametrize("algo", ALGOS, ids=name_of)
@pytest.mark.parametrize("found,cores", [(6, 6), (1, 1), (None, 1)])
def test_more_threads_than_cores_are_refused(algo, found, cores, monkeypatch):
    """They hang. `os.cpu_count` may not know the number of cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: found)
    algo.Config(torch_threads=cores)
    message = f"^--torch-threads is {cores + 1}; this machine's cores take 1 to {cores}$"
    with pytest.raises(UsageError, match=message):
        algo.Config(torch_threads=cores + 1)
    with pytest.raises(UsageError, match=message):
        algo.Config(torch_threads=cores + 1, resume=True)


@pytest.mark.parametrize("env,near", [
    ("Pong", ["ALE/Pong-v5"]), ("PongNoFrameskip-v4", ["ALE/Pong-v5"]),
    ("x/Pong-v5", ["ALE/Pong-v5"]),
    ("CartPole-v7", ["CartPole-v1"]), ("cartpole-v0", ["CartPole-v0"]),
    ("utils.tasks:CartPol", ["utils.tasks:CartPole-v1"]), ("nonsense", []), ("", []),
])
def test_the_environments_that_an_id_may_mean(env, near):
    assert checks.nearest_envs(env)[:1] == near


@pytest.mark.parametrize("module,given,now", [
    (ppo, "--batch", "--rollout-steps"), (ppo, "--minibatch=64", "--minibatch-size"),
    (sac, "--batch", "--batch-size"),
])
def test_a_flag_of_an_earlier_version_names_the_new_one(module, given, now):
    name = given.partition("=")[0]
    with pytest.raises(UsageError, match=f"^{name} is now called {now}$"):
        parse(module.Config, module.__doc__, [given, "64"] if "=" not in given else [given])
    cfg = parse(module.Config, module.__doc__, [now, "64"])
    assert getattr(cfg, now[2:].replace("-", "_")) == 64


def test_a_name_that_is_still_in_use_is_not_renamed():
    assert checks.new_name_of("batch", {"batch", "batch_size"}) is None
    assert checks.new_name_of("lr", {"lr"}) is checks.new_name_of("batch", {"lr"}) is None
    assert checks.new_name_of("batch", {"batch_size"}) == "batch_size"
    assert checks.new_name_of("batch", {"rollout_steps"}) == "rollout_steps"


# ---- Spaces

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
    monkeypatch.setattr(checks, "__file__", str(tmp_path / "utils" / "checks.py"))
    with pytest.raises(UsageError, match="algorithms for this one: three, two$"):
        check_spaces(VECTOR, BOX, obs="vector", act="discrete")
