"""Names of environments: importing what registers them, and what can be wrong with them."""

import contextlib
import importlib.util
import io
import json
import re
import sys
import traceback
import warnings
from types import SimpleNamespace

import gymnasium as gym
from gymnasium.envs.registration import find_highest_version, parse_env_id

from utils.errors import UsageError

# How the names of the environments of gymnasium-robotics begin.
ROBOTICS = ("AdroitHand", "AntMaze", "Fetch", "FrankaKitchen", "HandManipulate", "HandReach",
            "PointMaze")
# What to install for names that begin so.
PACKAGES = {"ale-py": "ALE/", "minatar": "MinAtar/", "gymnasium-robotics": ROBOTICS}
# What may help with a name that Gymnasium does not know.
ADVICE = ("; games are called ALE/Pong-v5 or MinAtar/Breakout-v1; an id of another package needs "
          "its module, as in minigrid:MiniGrid-Empty-5x5-v0 or my_module:MyEnv-v0")


def is_game(env: str, names: str | tuple[str, ...] = ("ALE/", "MinAtar/")) -> bool:
    """Return whether an id, perhaps after a module, is that of a game."""
    return env.rpartition(":")[2].startswith(names)


def read_kwargs(cfg) -> dict:
    """Return --env-kwargs as a dict."""
    try:
        env_kwargs = json.loads(cfg.env_kwargs)
        if isinstance(env_kwargs, dict):
            return env_kwargs
        wrong = "this is another value"
    except (json.JSONDecodeError, TypeError) as error:  # it is no JSON, or no text
        wrong = error
    raise UsageError(f"--env-kwargs is {cfg.env_kwargs}; it takes a JSON object: {wrong}")


@contextlib.contextmanager
def refusing_bad_env(cfg):
    """Yield --env-kwargs as a dict; turn all that goes wrong with it or --env into a UsageError.

    Silences only the deprecation notices of -v4 environments, which the published figures use.
    """
    package, _, name = cfg.env.rpartition(":")
    env_kwargs = read_kwargs(cfg)
    try:
        if is_game(name, "ALE/"):
            gym.register_envs(importlib.import_module("ale_py"))
        if is_game(name, "MinAtar/") and "MinAtar/Breakout-v1" not in gym.registry:
            importlib.import_module("minatar.gym").register_envs()
        # Other packages may build on it.
        if name.startswith(ROBOTICS) or package and importlib.util.find_spec("gymnasium_robotics"):
            mend_robotics()
        if package:
            importlib.import_module(package)
        spec = gym.registry.get(name)
        namespace, base, version = parse_env_id(name)
        if not spec and version is None and (newest := find_highest_version(namespace, base)):
            raise gym.error.UnregisteredEnv(f"no version; the newest is {name}-v{newest}")
        if spec and "ale_py" in str(spec.entry_point) and not is_game(name, "ALE/"):
            raise gym.error.NameNotFound("its pictures are not preprocessed")
        with warnings.catch_warnings(), quiet_mujoco():
            warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
            yield env_kwargs
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"--env is {cfg.env}{what_is_wrong(cfg, error)}") from error


def what_is_wrong(cfg, error: Exception) -> str:
    """Return what follows "--env is ..." in the message about an environment that is not made."""
    said = " ".join(str(error).partition(" was raised from the environment creator")[0].split())
    name = cfg.env.rpartition(":")[2]
    if isinstance(error, gym.error.DependencyNotInstalled | ImportError):
        for missing, begins in PACKAGES.items():
            if name.startswith(begins):
                return f", which is not installed: pip install {missing}"
        box2d = "; pip install 'gymnasium[box2d]'" * ("ox2" in said)
        return f", which cannot be imported: {said}{box2d}"
    if isinstance(error, gym.error.Error):
        version = re.search("(-v[0-9]+)?$", name)[0]
        said = re.sub("(?<=Did you mean: `)[^`]*", lambda like: like[0] + version * (
            like[0] + version in gym.registry), said)
        unknown = isinstance(error, gym.error.NameNotFound | gym.error.NamespaceNotFound)
        return f": {said.rstrip('.')}{ADVICE * unknown}"
    at = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
    return (f" with --env-kwargs {cfg.env_kwargs}; making it raised {type(error).__name__}: "
            f"{said or at.line} ({at.filename}, line {at.lineno})")


def mend_robotics():
    """Let gymnasium-robotics see types of joints as numbers, which since MuJoCo 3.14 they are not.

    It asks whether a number is `in` them.
    """
    import mujoco  # takes a tenth of a second

    with contextlib.redirect_stderr(io.StringIO()):  # it prints notes
        robotics = importlib.import_module("gymnasium_robotics.utils.mujoco_utils")
    joints = {name: int(kind) for name, kind in mujoco.mjtJoint.__members__.items()}
    robotics.mujoco = SimpleNamespace(**vars(mujoco) | {"mjtJoint": SimpleNamespace(**joints)})


@contextlib.contextmanager
def quiet_mujoco():
    """Hide MuJoCo's notices of what is deprecated; for them it would write MUJOCO_LOG.TXT."""
    import mujoco

    with contextlib.ExitStack() as stack:
        stack.callback(mujoco.set_mju_user_warning, mujoco.get_mju_user_warning())
        mujoco.set_mju_user_warning(
            lambda text: "deprecated" in text or print(f"MuJoCo: {text}", file=sys.stderr))
        yield
