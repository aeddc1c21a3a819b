"""Where a run is kept: which directory, whether it is free, which settings it has.

Nothing here writes but `hold`, which makes the directory and locks it, and `write_config`.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import gymnasium as gym
import numpy as np

from utils import checkpoint, files, mpi
from utils.checks import flag
from utils.mpi import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FREE = {"total_steps", "device", "torch_threads", "run_dir", "resume"}  # may differ on --resume
PACKAGES = ["torch", "gymnasium", "numpy", "mujoco", "ale_py", "Box2D", "mpi4py"]


def open_run(cfg):
    """`cfg` with the run directory filled in. Every rank calls it; it writes nothing.

    With --resume the settings are those of the run; one that is finished ends here, with status 0.
    UsageError: a directory that holds a run or cannot be written; --resume of what is no run of
    this algorithm, or with other settings; --init-from what holds no policy.
    """
    algo = module_name(type(cfg)).rpartition(".")[2]
    run_dir = Path(cfg.run_dir or Path("runs", cfg.env.replace("/", "-"), algo, f"seed{cfg.seed}"))
    cfg = replace(cfg, run_dir=str(run_dir))
    if cfg.resume:
        cfg = settings_of_run(cfg, algo)
        if finished(run_dir, cfg.total_steps):
            mpi.say(f"{run_dir} has its {cfg.total_steps:,.0f} steps: nothing to do")
            raise SystemExit(0)
        return cfg
    refuse_taken(run_dir)
    if cfg.init_from:
        checkpoint.load_file(Path(cfg.init_from, "policy.pt"), "agent", "step", flag="--init-from")
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--run-dir is {run_dir}, but {there} is no directory to write in")
    return cfg


def settings_of_run(cfg, algo):
    """The Config of the run to resume; what may differ is taken from `cfg` where given."""
    config = read_config(cfg.run_dir, "--resume: ")
    if config["algo"] != algo:
        raise UsageError(f"--resume: {cfg.run_dir} is a run of {config['algo']}, not of {algo}")
    if has_rows(cfg.run_dir) and not checkpoint.resume_folders(cfg.run_dir):
        raise UsageError(f"--resume: there is no checkpoint in {cfg.run_dir}; delete it to restart")
    settings, defaults = config["settings"], vars(type(cfg)())
    for name, value in vars(cfg).items():
        known = settings.get(name, defaults[name])
        if value != defaults[name] and name in FREE:  # the default counts as not given
            settings[name] = value
        elif value not in (defaults[name], known):
            raise UsageError(f"{flag(name)} is {value}, but {known} in {cfg.run_dir}: "
                             "--resume goes on with what the run has")
    try:
        return type(cfg)(**settings)
    except TypeError as error:
        raise UsageError(f"--resume: {cfg.run_dir} is of another version: {error}") from None


def read_config(run_dir, prefix=""):
    """A run's config.json, such that `Config(**config["settings"])` is its Config."""
    path = Path(run_dir, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        settings, _ = config["settings"].items(), (config["algo"], config["module"])
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{prefix}{run_dir} holds no run: there is no config.json") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{prefix}{path} is damaged: {type(error).__name__} {error}") from None
    # JSON makes lists of tuples, which a frozen dataclass could not hash.
    config["settings"] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings}
    return config


def has_rows(run_dir):
    """A run killed before its first checkpoint has none: nothing is lost if it begins anew."""
    path = Path(run_dir, "progress.csv")
    return path.exists() and path.read_bytes().count(b"\n") > 1  # more than the header


def finished(run_dir, total_steps):
    path = run_dir / "policy.pt"
    return path.exists() and checkpoint.load_file(path, "agent", "step")["step"] >= total_steps


def refuse_taken(run_dir):
    names = ("config.json", "policy.pt", "progress.csv")
    if any(os.path.exists(run_dir / name) for name in names) or checkpoint.resume_folders(run_dir):
        raise UsageError(f"{run_dir} holds a run already: --resume goes on with it, another "
                         "--seed or another --run-dir starts a new one")


def hold(cfg):
    """Make the run directory and lock it, as long as the file returned is open."""
    try:
        Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
        file = open(Path(cfg.run_dir, ".lock"), "w")
    except OSError as error:
        raise UsageError(f"--run-dir is {cfg.run_dir}: {error.strerror}") from None
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"another process is writing the run in {cfg.run_dir}") from None
    except OSError:
        pass  # some network file systems know no locks
    if not cfg.resume:
        refuse_taken(Path(cfg.run_dir))  # it may have begun, and ended, since `open_run` looked
    return file


def module_name(config_class):
    """Return the module of a Config, also if it is the running program: "algos.x"."""
    name, main = config_class.__module__, sys.modules["__main__"]
    if name != "__main__":
        return name
    if main.__spec__:  # python -m
        return main.__spec__.name
    path = Path(getattr(main, "__file__", "notebook")).resolve()
    package = f"{path.parent.name}." if (path.parent / "__init__.py").exists() else ""
    return package + path.stem


def write_config(cfg, step, initial):
    """Write config.json: the settings, and what made the numbers; a resume adds its own to it."""
    if cfg.resume:
        config = read_config(cfg.run_dir)
        before = config["settings"]["total_steps"]
        if before != cfg.total_steps:
            mpi.say(f"--total-steps {cfg.total_steps:,.0f} instead of {before:,.0f}: annealing "
                    "runs to the new end")
        config["resumed"] = [*config.get("resumed", []), {"step": step, **origin()}]
    else:
        module = module_name(type(cfg))
        spec = gym.registry.get(cfg.env.rpartition(":")[2])
        config = {"algo": module.rpartition(".")[2], "module": module, **origin(),
                  "init_from": initial, "env_spec_kwargs": spec.kwargs if spec else {}}
    config["settings"] = plain_settings(cfg)
    files.write_text(Path(cfg.run_dir, "config.json"),
                     json.dumps(config, indent=2, default=str) + "\n")


def plain_settings(cfg):
    """The settings as what JSON and a checkpoint can hold."""
    settings = asdict(cfg) | {"resume": False}
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in settings.items()}


def origin():
    """What produced a run's numbers, beside its settings."""
    used = [sys.modules[name] for name in PACKAGES if sys.modules.get(name)]
    versions = {module.__name__: module.__version__ for module in used}
    git = "git describe --always --dirty --abbrev=40 --exclude=*".split()
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        done = None  # there is no git
    return {"command": shlex.join(sys.orig_argv), "git_commit": done and done.stdout.strip(),
            "versions": {"python": sys.version.split()[0], **versions}}
