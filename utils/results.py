"""What a finished run leaves to be published: result.json, a few kB, and the code behind it."""

import ast
import csv
import hashlib
import json
import sys
import threading
from dataclasses import fields
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from utils import files, play
from utils.mpi import UsageError
from utils.rundir import read_config

ROOT = Path(__file__).resolve().parent.parent
OURS = {"env", "seed", "run_dir", "resume"}  # settings that a sweep gives
HASHES = "# sources "  # begins the line of a log that holds them
PARSING = threading.Lock()  # ast.parse fails now and then if two threads of Python 3.11 call it


def finished(run_dir: Path, total_steps: int) -> bool:
    """Whether the result of this budget is there."""
    path = run_dir / "result.json"
    return path.exists() and json.loads(path.read_text())["steps"] >= total_steps


def other_code(run_dir: Path, now: dict[str, str]) -> bool:
    """Whether a finished run names code that is not what is here now (`sources`)."""
    made = json.loads((run_dir / "result.json").read_text()).get("sources")
    return bool(made) and made != now


def summary(run_dir: Path) -> str:
    """The two figures of a finished run."""
    result = json.loads((run_dir / "result.json").read_text())
    return f"train100 {result['train100']}, eval {np.mean(result['eval']):.1f}"


def collect(run: Path) -> dict:
    """Evaluate the final policy of a finished run; what result.json is to hold.

    train100    mean return of the last 100 training episodes (of all, if there are fewer)
    eval        returns of deterministic episodes with the final weights: 10, classic control 100
    curve       at most 100 pairs: a step, mean return of the episodes that ended in the 1% before
    sources     hashes of the code that trained it, where that is known
    """
    module, cfg, policy = play.read_run(run)
    config = read_config(run)
    with open(run / "episodes.csv", newline="") as file:
        rows = [(int(row["step"]), float(row["ep_ret"])) for row in csv.DictReader(file)]
    with open(run / "progress.csv", newline="") as file:
        seconds = float(list(csv.DictReader(file))[-1]["time"])
    steps, returns = np.array(rows, dtype=float).reshape(-1, 2).T
    bins = np.ceil(100 * steps / policy["step"]).astype(int)
    torch.set_num_threads(cfg.torch_threads)
    agent = play.load(run)
    spec = gym.spec(cfg.env.rpartition(":")[2])
    episodes = 100 if "classic_control" in str(spec.entry_point) else 10
    evaluation = module.evaluate(agent, cfg, episodes, cfg.seed)
    changed = {field.name: getattr(cfg, field.name) for field in fields(cfg)
               if field.name not in OURS and getattr(cfg, field.name) != field.default}
    return {
        "algo": config["algo"], "env": cfg.env, "seed": cfg.seed, "settings": changed,
        "total_steps": int(cfg.total_steps), "steps": policy["step"], "episodes": len(rows),
        "train100": round(float(returns[-100:].mean()), 3) if rows else None,
        "eval": [round(float(ret), 3) for ret in evaluation], "seconds": seconds,
        "curve": [[round(k * policy["step"] / 100), round(float(returns[bins == k].mean()), 3)]
                  for k in np.unique(bins)],
        "env_spec_kwargs": config["env_spec_kwargs"], "versions": config["versions"],
        "git_commit": config["git_commit"], "sources": sources_of(run, config),
    }


def collect_all(folder: Path) -> int:
    """Write result.json into every finished run that lacks it; 1 if a run cannot be read."""
    runs = sorted(path.parent for path in folder.rglob("config.json"))
    if not runs:
        raise UsageError(f"--collect {folder}: there is no run in it")
    failed = 0
    for run in runs:
        try:
            _, cfg, policy = play.read_run(run)
            if policy["step"] < cfg.total_steps:
                print(f"{run}: {policy['step']:,} of {cfg.total_steps:,.0f} steps, not finished")
            elif not finished(run, policy["step"]):
                write_result(run, collect(run))
                print(f"{run}: {summary(run)}", flush=True)
        except UsageError:  # its message was printed where it was raised
            failed = 1
        except (OSError, LookupError, ValueError) as error:
            failed = 1
            print(f"error: {run} is damaged: {error!r}", file=sys.stderr)
    return failed


def write_result(run: Path, result: dict) -> None:
    """One line for each entry; whole or not at all."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
    files.write_text(run / "result.json", "{\n" + ",\n".join(lines) + "\n}\n")


def source_files(algo: str) -> list[Path]:
    """What a run executes of this project."""
    train_nothing = ("play", "video", "sweep", "crew", "collect", "__init__")
    helpers = [path for path in (ROOT / "utils").glob("*.py") if path.stem not in train_nothing]
    return [ROOT / "algos" / f"{algo}.py", *sorted(helpers)]


def sources(algo: str) -> dict[str, str]:
    """A hash of the code of the algorithm file and of each helper."""
    return {path.relative_to(ROOT).as_posix(): code_hash(path.read_text(encoding="utf-8"))
            for path in source_files(algo)}


def code_hash(text: str) -> str:
    """SHA-256 of a program, comments, docstrings and layout aside."""
    with PARSING:
        tree = ast.parse(text)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    # Not ast.dump, which differs between versions of Python.
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def sources_of(run: Path, config: dict) -> dict[str, str]:
    """Hashes of the code that a run executed: those in its log, where a sweep started it.

    Else of the code here, unless some of it is newer than the run. {} if it is not known.
    """
    log, begun = Path(f"{run}.log"), (run / "config.json").stat().st_mtime
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    found, resumed = [line for line in lines if line.startswith(HASHES)], config.get("resumed", [])
    if found:
        by_hand, differ = len(found) <= len(resumed), len(set(found)) > 1
        return {} if by_hand or differ else json.loads(found[0].removeprefix(HASHES))
    newer = any(path.stat().st_mtime > begun for path in source_files(config["algo"]))
    return {} if newer or resumed else sources(config["algo"])
