"""The directory of a run: its name, its lock, config.json with the settings, and the code.

Only `hold` and `write_config` write anything.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import gymnasium as gym
import numpy as np

from utils import checkpoint, files, mpi, source
from utils.checks import cores, flag
from utils.mpi import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Settings that may differ on --resume.
FREE = {"total_steps", "device", "torch_threads", "run_dir", "resume", "changed_code", "wandb"}
PACKAGES = ["torch", "gymnasium", "numpy", "mujoco", "ale_py", "Box2D", "mpi4py"]


def open_run(cfg):
    """Return `cfg` with the run directory filled in. Every rank calls it; it writes nothing.

    With --resume the settings come from the run. If that run has all its steps, the process ends
    here with status 0. UsageError: the directory holds a run already or cannot be written;
    --resume names no run of this algorithm, other settings or changed code; --init-from names no
    policy.
    """
    algo = module_name(type(cfg)).rpartition(".")[2]
    run_dir = Path(cfg.run_dir or Path("runs", as_folder(cfg.env), algo, f"seed{cfg.seed}"))
    given = cfg.given
    cfg = replace(cfg, run_dir=str(run_dir))
    if cfg.resume:
        cfg = settings_of_run(cfg, algo, given)
        if is_trained(run_dir, cfg.total_steps):
            mpi.say(f"{run_dir} has its {cfg.total_steps:,.0f} steps: nothing to do; "
                    "a larger --total-steps continues it")
            raise SystemExit(0)
        refuse_changed_code(cfg)
        return cfg
    if cfg.changed_code:
        raise UsageError("--changed-code is for --resume")
    refuse_taken(run_dir)
    if cfg.init_from:
        checkpoint.load_file(Path(cfg.init_from, "policy.pt"), "agent", "step", flag="--init-from")
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--run-dir is {run_dir}, but {there} is no directory to write in")
    return cfg


def as_folder(text):
    """Return a text, such as an environment's id, as a name that every file system can hold."""
    return re.sub(r"[^\w.,=+-]+", "-", text)


def settings_of_run(cfg, algo, given):
    """Return the Config of the run to resume. Settings that may differ come from `cfg` if given.

    given    names of the settings on the command line; from Python, the default is not given
    """
    config = read_config(cfg.run_dir, "--resume: ")
    if config["algo"] != algo:
        raise UsageError(f"--resume: {cfg.run_dir} is a run of {config['algo']}, not of {algo}")
    if has_rows(cfg.run_dir) and not checkpoint.resume_folders(cfg.run_dir):
        raise UsageError(f"--resume: there is no checkpoint in {cfg.run_dir}; delete it to restart")
    settings, defaults = config["settings"], vars(type(cfg)())
    for name, value in vars(cfg).items():
        known = settings.get(name, defaults[name])
        if name not in given and value == defaults[name]:
            continue
        if name in FREE:
            settings[name] = value
        elif value != known:
            raise UsageError(f"{flag(name)} is {value}, but {known} in {cfg.run_dir}: "
                             "--resume keeps the settings of the run")
    try:
        return type(cfg)(**settings)
    except TypeError as error:
        raise UsageError(f"--resume: another version made {cfg.run_dir}: {error}") from None


def read_config(run_dir, prefix=""):
    """Return a run's config.json as a dict. `Config(**config["settings"])` is the run's Config.

    A run from a machine with more cores gets at most as many torch_threads as there are cores here.
    """
    path = Path(run_dir, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        settings, _ = config["settings"].items(), (config["algo"], config["module"])
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{prefix}{path.parent} holds no run: there is no config.json"
                         f"{where_a_run_is(path.parent)}") from None
    except OSError as error:
        raise UsageError(f"{prefix}{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{prefix}{path} is damaged: {type(error).__name__} {error}") from None
    # JSON makes lists of tuples, which a frozen dataclass could not hash.
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings}
    if isinstance(settings.get("torch_threads"), int):
        settings["torch_threads"] = min(settings["torch_threads"], cores())
    return config | {"settings": settings}


def where_a_run_is(folder):
    """Return the end of a message about a folder that is no run: what would be one."""
    if folder.is_file():
        return "; a run is a directory"
    levels = ("*/" * depth + "config.json" for depth in range(1, 5))  # runs/<env>/<algo>/seed<k>
    found = [file.parent for level in levels for file in sorted(folder.glob(level))]
    if len(found) < 2:
        return f"; there is one in {found[0]}" if found else ""
    some = ", ".join(map(str, found[:5]))
    return f"; there are {len(found)} in it{', such as' if len(found) > 5 else ':'} {some}"


def has_rows(run_dir):
    """Return whether a run has reported. One that has not loses nothing by starting again."""
    path = Path(run_dir, "progress.csv")
    return path.exists() and path.read_bytes().count(b"\n") > 1  # more than the header


def is_trained(run_dir, total_steps):
    """Return whether a run's policy has seen that many steps."""
    path = run_dir / "policy.pt"
    return path.exists() and checkpoint.load_file(path, "agent", "step")["step"] >= total_steps


def refuse_taken(run_dir):
    """UsageError if a directory holds any part of a run."""
    names = ("config.json", "policy.pt", "progress.csv")
    if any(os.path.exists(run_dir / name) for name in names) or checkpoint.resume_folders(run_dir):
        empty = "" if has_rows(run_dir) else "; it has not reported yet, so you may remove it"
        raise UsageError(f"{run_dir} holds a run already: --resume continues it, another --seed or "
                         f"--run-dir starts a new one{empty}")


def refuse_changed_code(cfg):
    """UsageError if other code made the run so far, unless --changed-code allows it."""
    if cfg.changed_code or not has_rows(cfg.run_dir):
        return
    if source.has_changed(type(cfg), cfg.run_dir):
        kept = Path(cfg.run_dir, source.KEPT)
        raise UsageError(f"--resume: {source.file_of(type(cfg))} has changed since this run, whose "
                         f"code is {kept}; --changed-code continues with the changed file")


def hold(cfg):
    """Make the run directory and lock it. The lock lasts as long as the returned file is open."""
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
        pass  # some network file systems have no locks
    if not cfg.resume:
        refuse_taken(Path(cfg.run_dir))  # another run may have used it since `open_run` looked
    return file


def module_name(config_class):
    """Return the module of a Config, such as "algos.x", even if it is the running program."""
    name, main = config_class.__module__, sys.modules["__main__"]
    if name != "__main__":
        return name
    if main.__spec__:  # python -m
        return main.__spec__.name
    path = Path(getattr(main, "__file__", "notebook")).resolve()
    package = f"{path.parent.name}." if (path.parent / "__init__.py").exists() else ""
    return package + path.stem


def write_config(cfg, step, initial):
    """Write config.json: settings, command, versions and commit. A resume appends its own.

    The algorithm file is kept beside it.
    """
    source.keep(type(cfg), cfg.run_dir, step)
    file = source.file_of(type(cfg))
    if cfg.resume:
        config = read_config(cfg.run_dir)
        before = config["settings"]["total_steps"]
        if before != cfg.total_steps:
            mpi.say(f"--total-steps {cfg.total_steps:,.0f} instead of {before:,.0f}: annealing "
                    "runs to the new end")
        config["resumed"] = [*config.get("resumed", []), {"step": step, **origin(file)}]
    else:
        module = module_name(type(cfg))
        spec = gym.registry.get(cfg.env.rpartition(":")[2])
        config = {"algo": module.rpartition(".")[2], "module": module, **origin(file),
                  "init_from": initial, "env_spec_kwargs": spec.kwargs if spec else {}}
    config["settings"] = plain_settings(cfg)
    files.write_text(Path(cfg.run_dir, "config.json"),
                     json.dumps(config, indent=2, default=str) + "\n")


def plain_settings(cfg):
    """Return the settings as plain values, which JSON and a checkpoint can hold."""
    settings = asdict(cfg) | {"resume": False, "changed_code": False}
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in settings.items()}


def origin(file):
    """Return the command, git commit and package versions of this process.

    "-dirty" ends the commit if it lacks the code that runs: a tracked file has changed, or git does
    not track `file`, which holds the algorithm.
    """
    used = [sys.modules[name] for name in PACKAGES if sys.modules.get(name)]
    versions = {module.__name__: module.__version__ for module in used}
    commit = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    if commit and not commit.endswith("-dirty") and not (file and git("ls-files", file)):
        commit += "-dirty"
    return {"command": shlex.join(sys.orig_argv), "git_commit": commit,
            "versions": {"python": sys.version.split()[0], **versions}}


def git(*args):
    """Return what a git command prints in this project: "" if it fails, None without git."""
    try:
        done = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True,
                              text=True)
    except OSError:
        return None  # git is not installed
    return done.stdout.strip()
