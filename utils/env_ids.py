"""Names of environments: importing what registers them, and what can be wrong with them."""

import contextlib
import importlib
import io
import json
import re
import sys
import warnings
from dataclasses import replace

import gymnasium as gym
from gymnasium.envs.registration import find_highest_version, parse_env_id

from utils.errors import UsageError
from utils.mpi import say_once

# How the names of the environments of gymnasium-robotics begin.
ROBOTICS = ("AdroitHand", "AntMaze", "Fetch", "FrankaKitchen", "HandManipulate", "HandReach",
            "PointMaze")


def is_game(env: str, names: str | tuple[str, ...] = ("ALE/", "MinAtar/")) -> bool:
    """Return whether an id, perhaps after a module, is that of a game."""
    return env.rpartition(":")[2].startswith(names)


def with_version(cfg):
    """Return `cfg` with the newest version, if --env names none. UsageError: it is unknown."""
    package, _, name = cfg.env.rpartition(":")
    with refusing_bad_env(cfg):
        if package.startswith("."):  # which `import_module` takes for a part of a package
            raise ImportError(f"No module named {package!r}")
        if package:
            importlib.import_module(package)
        namespace, base, version = parse_env_id(name)
        newest = find_highest_version(namespace, base) if version is None else None
        spec = gym.spec(name if newest is None else f"{name}-v{newest}")
        if "ale_py" in str(spec.entry_point) and not is_game(name, "ALE/"):
            raise gym.error.DeprecatedEnv("its pictures are not preprocessed")
    if newest is None:
        return cfg
    say_once(f"environment: {cfg.env}-v{newest}, the newest version")
    return replace(cfg, env=f"{cfg.env}-v{newest}")


@contextlib.contextmanager
def refusing_bad_env(cfg):
    """Yield --env-kwargs as a dict; turn what goes wrong with it or --env into a UsageError.

    Silences only the deprecation notices of -v4 environments, which the published figures use.
    """
    wrong = f"--env-kwargs is {cfg.env_kwargs}; it takes a JSON object of what {cfg.env} takes"
    robotics = cfg.env.removeprefix("gymnasium_robotics:").startswith(ROBOTICS)
    extra = ("atari" if is_game(cfg.env, "ALE/") else "minatar" if is_game(cfg.env, "MinAtar/")
             else "robotics" * robotics)
    try:
        env_kwargs = json.loads(cfg.env_kwargs)
        if not isinstance(env_kwargs, dict):
            raise UsageError(wrong)
        if extra == "atari":
            gym.register_envs(importlib.import_module("ale_py"))
        if extra == "robotics":
            with contextlib.redirect_stderr(io.StringIO()):  # it prints notes
                importlib.import_module("gymnasium_robotics")
        if extra == "minatar" and "MinAtar/Breakout-v1" not in gym.registry:
            importlib.import_module("minatar.gym").register_envs()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
            yield env_kwargs
    except json.JSONDecodeError as error:
        raise UsageError(f"{wrong}: {error}") from None
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        extra = extra or "box2d" * ("ox2" in str(error))
        how = f"pip install -e '.[{extra}]'" if extra else error
        new = f"{cfg.env[:-1]}4"
        if re.search("have been moved|mujoco_py", str(error)) and new in gym.registry:
            how = f"{new} is the same robot with the MuJoCo of today"
        raise UsageError(f"--env is {cfg.env}, which is not installed: {how}") from None
    except gym.error.Error as error:
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # registers its games
        game = re.sub("(?i)^(.*:)?(ALE/)?|(NoFrameskip|Deterministic|-ram|-v[0-9]).*", "", cfg.env)
        known = {name.lower(): name for name in gym.registry}
        if name := known.get(f"ale/{game}-v5".lower()):
            raise UsageError(f"--env is {cfg.env}: this game is called {name} here; "
                             """--env-kwargs '{"repeat_action_probability": 0}' plays it without """
                             "sticky actions. MinAtar's are MinAtar/Breakout-v1, ...") from None
        raise UsageError(f"--env is {cfg.env}: {error} (games are called ALE/Pong-v5 or "
                         "MinAtar/Breakout-v1, your own my_module:MyEnv-v0)") from None
    except (TypeError, ValueError, AssertionError) as error:
        if cfg.env_kwargs == "{}" or isinstance(error, UsageError):  # the environment's own
            raise
        fact = str(error).partition(" was raised from the environment creator")[0]
        raise UsageError(f"{wrong}; it raised {type(error).__name__}: {fact}") from error


BEFORE = []  # what `mujoco_of_today` has replaced, once for each context that is open


@contextlib.contextmanager
def mujoco_of_today():
    """Change two things of MuJoCo until the last of these contexts ends, in any order.

    It prints a warning instead of writing a file, MUJOCO_LOG.TXT. And a joint's type equals the
    number of it in a model, which the Fetch and Hand environments compare it with, as it did until
    MuJoCo 3.14.
    """
    try:
        import mujoco  # takes a tenth of a second
    except RuntimeError as error:  # it does not know the MUJOCO_GL that is set
        raise UsageError(f"MuJoCo: {error}") from None
    joint = mujoco.mjtJoint
    BEFORE.append(BEFORE[0] if BEFORE else (mujoco.get_mju_user_warning(), joint.__eq__))
    mujoco.set_mju_user_warning(print_mujoco_warning)
    joint.__eq__ = lambda one, other: int(one) == other
    try:
        yield
    finally:
        warn, equal = BEFORE.pop()
        if not BEFORE:
            mujoco.set_mju_user_warning(warn)
            joint.__eq__ = equal


def print_mujoco_warning(text):
    if "deprecated" not in text:
        print(f"MuJoCo: {text}", file=sys.stderr)
