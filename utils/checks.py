"""Refuse settings and spaces that an algorithm cannot handle, each with one clear message.

Algorithm files import these checks through utils/run.py.
"""

import difflib
import importlib
import math
import numbers
import os
import re
from dataclasses import fields
from pathlib import Path

import gymnasium as gym
import numpy as np

from utils.launch import UsageError

# The ranges of settings, by name. Any other number has to be finite.
COUNTS = """total_steps num_envs num_procs torch_threads rollout_steps minibatch_size batch_size
            buffer_size epochs v_steps report_every update_every target_every policy_delay
            minibatch_envs lstm_size cg_steps backtracks inverse_every eps_steps subsample
            check_every disc_epochs"""
NONNEGATIVE = """seed eval_every start_steps vf_coef ent_coef max_grad_norm target_kl
                 act_noise target_noise noise_clip max_step_size damping replay_ratio max_slope
                 num_trajectories her_k"""
FRACTIONS = "gamma lam tau eps_end omega beta_start momentum decay popart_beta"
POSITIVE = """hidden lr v_lr disc_lr std_init clip_ratio rmsprop_eps max_ratio max_kl v_max_kl
              alpha"""
# Ranks get equal parts of these.
SHARED = "num_envs minibatch_size minibatch_envs batch_size buffer_size"
DIVIDES = "rollout_steps/num_envs rollout_steps/minibatch_size num_envs/minibatch_envs"
# More than this cannot be meant, and would hang or crash.
MOST = {"num_envs": 1e5, "hidden": 1e5, "epochs": 1e5, "v_steps": 1e5, "rollout_steps": 1e9,
        "minibatch_size": 1e9, "batch_size": 1e9, "her_k": 1000}
MOST_STEPS = 1e12  # of all other counts

KINDS = {"vector": "vectors (Box of one dimension, Discrete, Dict, Tuple, ...)",
         "goal": "goals (Dict of vectors observation, achieved_goal, desired_goal)",
         "discrete": "Discrete from 0",
         "image": "images (Box of uint8, HWC or CHW, at least 36 pixels a side)",
         "box": "Box of floats with finite bounds"}


def flag(name):
    """num_envs -> --num-envs"""
    return "--" + name.replace("_", "-")


def check_settings(cfg):
    """UsageError names the first setting of `cfg` that is out of range (see COUNTS and others).

    NaN, infinity and text are refused. So is a fraction if the setting is declared int.
    """
    known = [field.name for field in fields(cfg) if re.search("int|float", str(field.type))]
    check_range(cfg, names_in(COUNTS, known), low=1)
    check_range(cfg, names_in(NONNEGATIVE, known), low=0)
    check_range(cfg, names_in(FRACTIONS, known), low=0, high=1)
    check_range(cfg, names_in(POSITIVE, known), above=0)
    check_range(cfg, " ".join(known))
    for name in names_in(f"{COUNTS} eval_every start_steps hidden her_k", known).split():
        check_range(cfg, name, high=MOST.get(name, MOST_STEPS))
    if getattr(cfg, "torch_threads", 1) > cores():  # PyTorch would crawl, or hang
        raise UsageError(f"--torch-threads is {cfg.torch_threads}; this machine's cores take 1 to "
                         f"{cores()}")
    if getattr(cfg, "norm_adv", False):  # normalised, a single advantage would become 0
        check_range(cfg, names_in("minibatch_size", known), low=2)
    if "minibatch_envs" in known:  # T is at least 2, for the same reason
        check_range(cfg, "rollout_steps", low=2 * cfg.num_envs)
    if "buffer_size" in known:  # a step of all environments fits in
        check_range(cfg, "buffer_size", low=cfg.num_envs)
    pairs = [f"{name}/num_procs" for name in SHARED.split()] + DIVIDES.split()
    check_divides(cfg, " ".join(pair for pair in pairs if {*pair.split("/")} <= {*known}))


def cores():
    """Return the number of cores of this machine."""
    return os.cpu_count() or 1


def names_in(names, known):
    return " ".join(name for name in names.split() if name in known)


def check_range(cfg, names, low=-math.inf, high=math.inf, *, above=-math.inf):
    """UsageError unless low <= value <= high and value > above, for each setting in `names`.

    NaN, infinity and anything that is not a number are refused. A setting declared int must be
    whole, and so must `total_steps`, which may be written 1e6. Each element of a tuple is checked.
    None passes if the declaration allows it.
    """
    types = {field.name: str(field.type) for field in fields(cfg)}
    limits = ((low, "at least"), (above, "above"), (high, "at most"))
    takes = "".join(f", {word} {limit:g}" for limit, word in limits if math.isfinite(limit))
    for name in names.split():
        value = getattr(cfg, name)
        kind = numbers.Integral if "int" in types[name] else numbers.Real
        whole = kind is numbers.Integral or name == "total_steps"
        for x in value if isinstance(value, tuple | list) else [value]:
            number = isinstance(x, kind) and not isinstance(x, bool) and math.isfinite(x)
            fits = number and low <= x <= high and x > above and (not whole or x == int(x))
            if not fits and not (x is None and "None" in types[name]):
                what = "a whole number" if whole else "a number"
                raise UsageError(f"{flag(name)} is {value}; it takes {what}{takes}")


def check_divides(cfg, pairs):
    """UsageError unless setting a is a multiple of setting b, for each "a/b" in `pairs`.

    With --resume the settings of the run replace these, and they were checked when it started.
    """
    if cfg.resume:
        return
    for pair in pairs.split():
        a, b = pair.split("/")
        if getattr(cfg, a) % getattr(cfg, b):
            value, unit = getattr(cfg, a), getattr(cfg, b)
            divisors = [each for each in range(1, min(value, 2 * unit) + 1) if value % each == 0]
            near = min(divisors, key=lambda each: abs(each - unit))
            raise UsageError(f"{flag(a)} is {value}; it takes a multiple of {flag(b)}, which is "
                             f"{unit}: {max(1, value // unit) * unit}, or {flag(b)} {near}")


def check_spaces(obs_space, act_space, obs, act):
    """UsageError unless the spaces are of one of the KINDS in `obs` and one of those in `act`."""
    kinds = obs_kind(obs_space), act_kind(act_space)
    sides = ("observation", obs_space, kinds[0], obs), ("action", act_space, kinds[1], act)
    for side, space, kind, takes in sides:
        if not fits(kind, takes):
            fit = ", ".join(fitting_algos(*kinds))
            raise UsageError(f"--env has the {side} space {space}; this algorithm takes "
                             f"{' or '.join(KINDS[name] for name in takes.split())}"
                             f"{fit and f'; algorithms for this one: {fit}'}")


def fits(kind, takes):
    """Return whether `kind` is one of those in the text `takes`. Goals are vectors, too."""
    return kind in takes.split() or (kind == "goal" and "vector" in takes.split())


def obs_kind(space):
    """Return "image", "goal", "vector" or "other" for an observation space."""
    if getattr(space, "has_goals", False):  # see FlatDict in utils/envs.py
        return "goal"
    box, shape = isinstance(space, gym.spaces.Box), space.shape or ()
    sides = sorted(shape)[1:]  # without the shortest dimension: colours or stacked frames
    if box and len(shape) == 3 and space.dtype == np.uint8 and min(sides) >= 36:
        return "image"
    return "vector" if box and len(shape) == 1 else "other"


def act_kind(space):
    """Return "discrete", "box" or "other" for an action space."""
    if isinstance(space, gym.spaces.Discrete):
        return "discrete" if space.start == 0 else "other"
    floats = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)
    return "box" if floats and space.is_bounded() else "other"


def fitting_algos(obs, act):
    """Return the algorithms whose own call of `check_spaces` accepts these kinds of spaces."""
    call = re.compile(r'check_spaces\(.*obs="(.*)", act="(.*)"\)')
    files = sorted(Path(__file__).parents[1].glob("algos/*.py"))
    says = [(path.stem, call.search(path.read_text(encoding="utf-8"))) for path in files]
    return [name for name, m in says if m and fits(obs, m[1]) and fits(act, m[2])]


def nearest_envs(env):
    """Return ids of at most three environments that `env` may mean: the namespace may be missing.

    Of several versions, the one that `env` names counts, or else the latest.
    """
    try:
        importlib.import_module("ale_py")  # registers Atari games, if it is installed
    except ImportError:
        pass
    module, colon, wanted = env.rpartition(":")
    versions = {}  # name in lower case -> {version: id}
    for spec in gym.registry.values():
        raw = "ale_py" in str(spec.entry_point) and spec.namespace != "ALE"  # such as Pong-v4
        if not raw and spec.namespace not in ("phys2d", "tabular"):  # these need JAX
            versions.setdefault(spec.name.lower(), {})[spec.version or 0] = spec.id
    name, _, version = wanted.rpartition("/")[2].partition("-v")
    name = re.sub("noframeskip|deterministic", "", name.lower())  # of Atari's older ids
    near = [name] if name in versions else difflib.get_close_matches(name, versions, 3)
    given = int(version) if version.isdecimal() else -1
    return [module + colon + versions[name].get(given, versions[name][max(versions[name])])
            for name in near]


def unknown_keyword(error):
    """Return the keyword argument that a TypeError calls unexpected, or ""."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if found else ""


# Settings of earlier versions. If an old name meant two things, the setting that exists decides.
RENAMED = {"batch": ("rollout_steps", "batch_size"), "minibatch": ("minibatch_size",),
           "delta": ("max_kl",), "eps": ("rmsprop_eps",), "noise": ("act_noise",)}


def new_name_of(name, known):
    """Return the present name of a setting from an earlier version, or None if it has none.

    known    the names of the algorithm's settings
    """
    if name in known:
        return None
    return next((new for new in RENAMED.get(name, ()) if new in known), None)
