"""What a setting, a space and an environment may be: one clear message for what is refused.

Algorithm files import these checks through utils/logger.py.
"""

import difflib
import importlib
import json
import math
import numbers
import re
import sys
import warnings
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import gymnasium as gym
import numpy as np

from utils.mpi import UsageError

KINDS = {"vector": "vectors (Box of one dimension)", "discrete": "Discrete from 0",
         "image": "images (Box of uint8, HWC or CHW, at least 36 pixels a side)",
         "box": "Box of floats with finite bounds"}


def flag(name):
    return "--" + name.replace("_", "-")


def check_range(cfg, names, low=-math.inf, high=math.inf, *, above=-math.inf):
    """UsageError unless low <= value <= high and value > above, for each setting in `names`.

    Refused as well: NaN, infinity, what is no number and, where the setting is declared int, what
    is not whole (`total_steps` may be 1e6). Of a tuple each element is checked; None passes where
    it is declared.
    """
    types = {field.name: str(field.type) for field in fields(cfg)}
    limits = ((low, "at least"), (above, "above"), (high, "at most"))
    takes = "".join(f", {word} {limit}" for limit, word in limits if math.isfinite(limit))
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
    """UsageError unless a is a multiple of b for each "a/b" in `pairs`, names of settings."""
    for pair in pairs.split():
        a, b = pair.split("/")
        if getattr(cfg, a) % getattr(cfg, b):
            raise UsageError(f"{flag(a)} is {getattr(cfg, a)}; it takes a multiple of "
                             f"{flag(b)}, which is {getattr(cfg, b)}")


def check_spaces(obs_space, act_space, obs, act):
    """UsageError unless the spaces are of one of the KINDS in `obs` and one of those in `act`."""
    kinds = obs_kind(obs_space), act_kind(act_space)
    sides = ("observation", obs_space, kinds[0], obs), ("action", act_space, kinds[1], act)
    for side, space, kind, takes in sides:
        if kind not in takes.split():
            fit = ", ".join(fitting_algos(*kinds))
            raise UsageError(f"--env has the {side} space {space}; this algorithm takes "
                             f"{' or '.join(KINDS[name] for name in takes.split())}"
                             f"{fit and f'; for this one there is {fit}'}")


def obs_kind(space):
    box, shape = isinstance(space, gym.spaces.Box), space.shape or ()
    sides = sorted(shape)[1:]  # a colour or a stack of frames is the shortest dimension
    if box and len(shape) == 3 and space.dtype == np.uint8 and min(sides) >= 36:
        return "image"
    return "vector" if box and len(shape) == 1 else "other"


def act_kind(space):
    if isinstance(space, gym.spaces.Discrete):
        return "discrete" if space.start == 0 else "other"
    floats = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)
    return "box" if floats and space.is_bounded() else "other"


def fitting_algos(obs, act):
    """The algorithm files that say, in their own call of `check_spaces`, that they take these."""
    call = re.compile(r'check_spaces\(.*obs="(.*)", act="(.*)"\)')
    files = sorted(Path(__file__).parents[1].glob("algos/*.py"))
    says = [(path.stem, call.search(path.read_text(encoding="utf-8"))) for path in files]
    return [name for name, m in says if m and obs in m[1].split() and act in m[2].split()]


@contextmanager
def env_errors(cfg):
    """Around making environments: yields --env-kwargs; UsageError for what it or --env gets wrong.

    Silences the notices about -v4 environments, which the published figures are for, and no other.
    """
    warnings.filterwarnings("ignore", message=".*is out of date", category=DeprecationWarning)
    import mujoco  # a tenth of a second

    mujoco.set_mju_user_warning(mujoco_warning)  # also ends MUJOCO_LOG.TXT
    wrong = f"--env-kwargs is {cfg.env_kwargs}; it takes a JSON object of what {cfg.env} takes"
    atari = cfg.env.startswith("ALE/")
    try:
        env_kwargs = json.loads(cfg.env_kwargs)
        if not isinstance(env_kwargs, dict):
            raise UsageError(wrong)
        if atari:
            gym.register_envs(importlib.import_module("ale_py"))
        yield env_kwargs
    except json.JSONDecodeError as error:
        raise UsageError(f"{wrong}: {error}") from None
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        no_atari = atari and isinstance(error, ModuleNotFoundError)
        extra = "atari" if no_atari else "box2d" if "ox2" in str(error) else ""
        how = f"pip install -e '.[{extra}]'" if extra else error
        raise UsageError(f"--env is {cfg.env}, which is not installed: {how}") from None
    except gym.error.Error as error:
        near = difflib.get_close_matches(cfg.env.rpartition(":")[2], gym.registry, 3)
        hint = f" The nearest: {', '.join(near)}" if near else ""
        raise UsageError(f"--env is {cfg.env}: {error}{hint}") from None
    except TypeError as error:
        if cfg.env_kwargs == "{}":  # then it is the environment's own
            raise
        raise UsageError(f"{wrong}: {error}") from None


def mujoco_warning(text):
    if "deprecated" not in text:
        print(f"MuJoCo: {text}", file=sys.stderr)
