"""The directory of a run: where it is, who may write in it, and config.json."""

import json
import platform
import re
import shlex
import shutil
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from utils import mpi
from utils.env_ids import read_kwargs
from utils.errors import UsageError
from utils.files import atomic_write, write_text
from utils.roles import ROUNDING, WATCH
from utils.run import checkpoint
from utils.run.code import code, file_of, module_of, origin, parsed, spec_of
from utils.run.launch import cores
from utils.command import as_text, flag

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FREE = ROUNDING | WATCH | {"total_steps", "run_dir", "resume"}  # they may differ on --resume
# The files of a run, with config.json, which names it as one, at the end.
PARTS = ("algo*.py", "progress.csv", "episodes.csv", "events.out.tfevents.*",
         "policy.pt", "best.pt", "resume-*", "result.json", "config.json")


# ---- which directory


def as_folder(text):
    """Return a text, such as an environment's id, as a name that every file system can hold."""
    return re.sub(r"[^\w.,=+-]+", "-", text)


def default_dir(cfg) -> Path:
    """Return runs/<env>/<algo>/seed<k>, or runs/<env>/<algo>/bits=6/seed<k> for {"bits": 6}.

    So runs by other rules lie apart.
    """
    algo = module_of(type(cfg)).rpartition(".")[2]
    given = sorted(read_kwargs(cfg).items())
    rules = ",".join(f"{name}={as_text(value, '-')}" for name, value in given)
    return Path("runs", as_folder(cfg.env), algo, as_folder(rules)[:200], f"seed{cfg.seed}")


def find_run_dir(cfg):
    """Return `cfg` with its run directory.

    Every rank calls it; it writes nothing. UsageError: something is not there, or would be lost.
    """
    cfg = replace(cfg, run_dir=str(cfg.run_dir or default_dir(cfg)))
    if cfg.resume:
        check_resume(cfg)
    else:
        replaced_files(cfg)  # refuses if there are any to lose
    return cfg


def check_resume(cfg):
    """UsageError unless `cfg`, apart from FREE, is that of the run to resume."""
    run_dir, config = cfg.run_dir, read_config(cfg.run_dir)
    algo = module_of(type(cfg)).rpartition(".")[2]
    if config["algo"] != algo:
        raise UsageError(f"--resume: {run_dir} is a run of {config['algo']}, not of {algo}")
    if has_rows(run_dir) and not checkpoint.resume_folders(run_dir):
        raise UsageError(f"--resume: there is no checkpoint in {run_dir}; delete it to restart")
    for name, value in plain_settings(cfg).items():
        known = config["settings"].get(name, value)  # an older version may lack it
        if name not in FREE and value != known:
            raise UsageError(f"{flag(name)} is {value}, but {known} in {run_dir}: --resume keeps "
                             f"the settings of the run (from Python: Config.of_run)")


# ---- what is in it


def read_config(run_dir):
    """Return a run's config.json as a dict. `Config(**config["settings"])` is the run's Config."""
    path = Path(run_dir, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        settings, _ = config["settings"].items(), (config["algo"], config["module"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{run_dir} holds no run: {path.name}: {error!r}") from None
    # JSON makes lists of tuples, which a frozen dataclass could not hash.
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings}
    if isinstance(settings.get("torch_threads"), int):  # perhaps of a machine with more cores
        settings["torch_threads"] = min(settings["torch_threads"], cores())
    return config | {"settings": settings}


def has_changed(config_class, run_dir) -> bool:
    """Return whether a run was made, or last resumed, with other code than today's."""
    file, kept = file_of(config_class), Path(run_dir, "algo.py")
    if not file or not kept.exists():
        return False
    config = read_config(run_dir)
    env = config["settings"]["env"]
    package = env.rpartition(":")[0].partition(".")[0]
    if "code" not in config or package and not spec_of(package):  # an older version's, or no env
        return parsed(kept.read_bytes())[0] != parsed(file.read_bytes())[0]
    return config["code"] != code(file, env)


def has_rows(run_dir):
    """Return whether a run has reported. One that has not loses nothing by starting again."""
    path = Path(run_dir, "progress.csv")
    return path.exists() and path.read_bytes().count(b"\n") > 1  # more than the header


def replaced_files(cfg):
    """Return the files of an earlier run that this one replaces, config.json last.

    UsageError: they hold a report or a later checkpoint, and --overwrite is not given.
    """
    run_dir = cfg.run_dir
    files = [path for pattern in PARTS for path in Path(run_dir).glob(pattern)]
    if files:
        read_config(run_dir)  # refuses what is somebody else's
    reported = has_rows(run_dir) or any(checkpoint.resume_folders(run_dir))  # after step 0
    if reported and not cfg.overwrite:
        command = f"python -m {module_of(type(cfg))} --run-dir {shlex.quote(run_dir)}"
        raise UsageError(f"{run_dir} holds a run already. To continue it: {command} --resume. To "
                         f"replace it, add --overwrite. To keep it, add --seed {cfg.seed + 1} or "
                         "another --run-dir")
    return files


def lock_and_empty(cfg, stack):
    """Make, lock and empty the run directory."""
    try:
        Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(open(Path(cfg.run_dir, ".lock"), "w"))
    except OSError as error:
        raise UsageError(f"--run-dir is {cfg.run_dir}: {error.strerror}") from None
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another process is writing the run in {cfg.run_dir}") from None
    except OSError:
        pass  # some network file systems have no locks
    # Another run may have used the directory since `find_run_dir` looked.
    for path in [] if cfg.resume else replaced_files(cfg):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def whose_code(cfg):
    """Return what has to be the same on all ranks."""
    return code(file_of(type(cfg)), cfg.env), version("torch")


def check_shared(cfg, root_code):
    """UsageError unless this rank sees the locked directory and has rank 0's code."""
    where = f"rank {mpi.rank()} on {platform.node()}"
    if not Path(cfg.run_dir, ".lock").exists():
        raise UsageError(f"{where} does not see --run-dir {cfg.run_dir}, which all ranks share")
    if root_code != whose_code(cfg):
        raise UsageError(f"{where} has another {module_of(type(cfg))} or PyTorch than rank 0")


def write_config(cfg, step, initial):
    """Write config.json and, beside it, the algorithm file. A resume appends its own origin."""
    module, kept = module_of(type(cfg)), Path(cfg.run_dir, "algo.py")
    now = origin()
    if cfg.resume:
        config = read_config(cfg.run_dir)
        if has_changed(type(cfg), cfg.run_dir):
            old = kept.rename(kept.with_name(f"algo-until-{step}.py")).name
            mpi.say(f"{module}, or a module that it imports, has changed since this run began; "
                    f"{old} is the old file")
        config["resumed"] = [*config.get("resumed", []), {"step": step} | now]
    else:
        config = {"algo": module.rpartition(".")[2], "module": module, **now, "init_from": initial}
    config |= {"code": code(file_of(type(cfg)), cfg.env), "settings": plain_settings(cfg)}
    write_text(Path(cfg.run_dir, "config.json"), json.dumps(config, indent=2, default=str) + "\n")
    if file := file_of(type(cfg)):  # a kill before this leaves what config.json explains
        with atomic_write(kept) as copy:
            copy.write(file.read_bytes())


def plain_settings(cfg):
    """Return the settings as plain values, which JSON and a checkpoint can hold."""
    settings = asdict(cfg) | {"resume": False, "overwrite": False}
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in settings.items()}
