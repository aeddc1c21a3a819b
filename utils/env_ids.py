"""Names of environments: importing what registers them, and what can be wrong with them."""

import contextlib
import importlib.util
import io
import json
import re
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym

from utils.errors import UsageError

# How the names of the environments of gymnasium-robotics begin.
ROBOTICS = ("AdroitHand", "AntMaze", "Fetch", "FrankaKitchen", "HandManipulate", "HandReach",
            "PointMaze")


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
    except json.JSONDecodeError as error:
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
        # Other packages may build on it, and `mujoco_of_today` mends it.
        if name.startswith(ROBOTICS) or package and importlib.util.find_spec("gymnasium_robotics"):
            with contextlib.redirect_stderr(io.StringIO()):  # it prints notes
                importlib.import_module("gymnasium_robotics")
        if package:
            importlib.import_module(package)
        with warnings.catch_warnings(), mujoco_of_today():
            warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
            yield env_kwargs
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"--env is {cfg.env}{what_is_wrong(cfg, error)}") from error


def what_is_wrong(cfg, error: Exception) -> str:
    """Return what follows "--env is ..." in the message about an environment that is not made."""
    said = " ".join(str(error).partition(" was raised from the environment creator")[0].split())
    package, _, name = cfg.env.rpartition(":")
    ending = re.search("(-v[0-9]+)?$", name)[0]  # of what was typed, for a name that is like it
    said = re.sub("(?<=Did you mean: `)[^`]*", lambda like: like[0] + ending * (
        like[0] + ending in gym.registry), said)
    given = f"; --env-kwargs is {cfg.env_kwargs}" * (cfg.env_kwargs != "{}")
    if isinstance(error, gym.error.DependencyNotInstalled | ImportError):
        for missing, begins in {"ale-py": "ALE/", "minatar": "MinAtar/",
                                "gymnasium-robotics": ROBOTICS,
                                "'gymnasium[box2d]'": name if "ox2" in said else ()}.items():
            if name.startswith(begins):
                return f", which is not installed: pip install {missing}"
        new = f"{cfg.env[:-1]}4"
        if re.search("have been moved|mujoco_py", said) and new in gym.registry:
            return f", which is not installed: {new} is the same robot with the MuJoCo of today"
        other = "; it is made for another version of Gymnasium" * ("'gymnasium." in said)
        return f", which cannot be imported: {said}{other or advice(package)}"
    if isinstance(error, gym.error.Error):
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # registers its games
        game = re.sub("(?i)^(ALE/)?|(NoFrameskip|Deterministic|-ram|-v[0-9]).*", "", name)
        known = {each.lower(): each for each in gym.registry}
        if game := known.get(f"ale/{game}-v5".lower()):
            return (f": this game is called {game} here; --env-kwargs "
                    """'{"repeat_action_probability": 0}' plays it without sticky actions. """
                    "MinAtar's are MinAtar/Breakout-v1, ...")
        unknown = isinstance(error, gym.error.NameNotFound | gym.error.NamespaceNotFound)
        return f": {said}{advice(package) if unknown else ''}"
    if needs := re.search("missing .* required .*argument.*?: (.*)", said):
        return (f", which needs {needs[1]}: say it in --env-kwargs, or, if it is no JSON, in an id "
                "of your own (docs/howto.md, Environments of other packages)")
    at = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
    other = "; it may need another version of MuJoCo" * ("'Mj" in said)
    return (f"{given}; making it raised {type(error).__name__}: {said or at.line} ({at.filename}, "
            f"line {at.lineno}){other}")


def advice(package: str) -> str:
    """Return what may help if the module `package` of an id does not do what it should, or ""."""
    top = package.partition(".")[0]
    if not package:
        return ("; an id of another package needs its module, as in minigrid:MiniGrid-Empty-5x5-v0 "
                "or my_module:MyEnv-v0; games are called ALE/Pong-v5 or MinAtar/Breakout-v1")
    if "-" in top:
        return f"; a module has underscores: {top.replace('-', '_')}"
    spec = importlib.util.find_spec(top) if top else None
    folder = Path(*(spec and spec.submodule_search_locations or ["/nowhere"])[:1])
    texts = {path.relative_to(folder): path.read_text(errors="replace")
             for path in folder.rglob("*.py")}
    code = "\n".join(texts.values())
    if "gymnasium" not in code and re.search(r"^\s*(import|from) gym\b", code, re.M):
        return "; this package is made for Gym, and plainrl needs one for Gymnasium 1"
    modules = {".".join((top, *path.with_suffix("").parts)).removesuffix(".__init__")
               for path, text in texts.items() if re.search(r"\bregister\(\s*(id|f?['\"])", text)}
    modules = ", ".join(sorted(modules - {package})[:3])
    unknown = package in sys.modules and modules  # the package is there, the name is not
    return f"; these modules register environments: {modules}" if unknown else ""


@contextlib.contextmanager
def mujoco_of_today():
    """Hide MuJoCo's notices of what is deprecated, for which it would write a file, MUJOCO_LOG.TXT.

    And let gymnasium-robotics, which asks whether a number is `in` types of joints, see these as
    numbers, too: since MuJoCo 3.14 they are not.
    """
    try:
        import mujoco  # takes a tenth of a second
    except RuntimeError as error:  # it does not know the MUJOCO_GL that is set
        raise UsageError(f"MuJoCo: {error}") from None
    if robotics := sys.modules.get("gymnasium_robotics.utils.mujoco_utils"):
        joints = {name: int(kind) for name, kind in mujoco.mjtJoint.__members__.items()}
        robotics.mujoco = SimpleNamespace(**vars(mujoco) | {"mjtJoint": SimpleNamespace(**joints)})
    with contextlib.ExitStack() as stack:
        stack.callback(mujoco.set_mju_user_warning, mujoco.get_mju_user_warning())
        mujoco.set_mju_user_warning(
            lambda text: "deprecated" in text or print(f"MuJoCo: {text}", file=sys.stderr))
        yield
