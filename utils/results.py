"""result.json: what is published of a finished run, in a few kB, and the code behind it.

A published figure stands for the code that made it: the algorithm file, and the helpers that its
arithmetic uses. A result names the git commit of its run and a hash of each of these files. The
logger, checkpoints and the like may change without making a result stale.
"""

import ast
import csv
import json
import math
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from utils import files, play
from utils.checks import new_name_of
from utils.envs import evaluate
from utils.mpi import UsageError
from utils.rundir import read_config
from utils.source import PARSING, code_hash
from utils.summary import rounded

ROOT = Path(__file__).resolve().parent.parent
ARITHMETIC = ("utils/mpi.py", "utils/envs.py")  # helpers that take part in the numbers of a run
OURS = {"env", "seed", "run_dir", "resume"}  # settings that a sweep gives
BACKEND = {"compile", "device", "torch_threads"}  # they change numbers only by rounding
NO_NUMBERS = {"eval_every", "wandb"}  # they change no number of training
HASHES = "# sources "  # begins the line of a log that holds the hashes


# ---- reading and writing result.json


def has_result(run_dir: Path, total_steps: int) -> bool:
    """Return whether a run has a result for this many steps."""
    path = run_dir / "result.json"
    return path.exists() and json.loads(path.read_text())["steps"] >= total_steps


def read_result(path: Path) -> dict:
    """Return a result. Settings of earlier versions get their present names."""
    result = json.loads(path.read_text(encoding="utf-8"))
    settings = result.get("settings", {})
    if "library" not in result:  # the settings of other libraries are their own
        known = setting_names(result["algo"])
        settings = {new_name_of(name, known) or name: x for name, x in settings.items()}
    return result | {"settings": settings}


@cache
def setting_names(algo: str) -> tuple[str, ...]:
    """Return the settings that an algorithm file defines, without running it."""
    path = ROOT / "algos" / f"{algo}.py"
    if not path.exists():
        return ()
    with PARSING:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    configs = [node for node in tree.body if isinstance(node, ast.ClassDef)
               and node.name == "Config"]
    return tuple(line.target.id for config in configs for line in config.body
                 if isinstance(line, ast.AnnAssign))


def write_result(run: Path, result: dict) -> None:
    """Write result.json with one line per entry, whole or not at all."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
    files.write_text(run / "result.json", "{\n" + ",\n".join(lines) + "\n}\n")


def headline(run_dir: Path) -> str:
    """Return the two main figures of a run's result as text."""
    result = json.loads((run_dir / "result.json").read_text())
    return f"train100 {result['train100']}, eval {rounded(np.mean(result['eval']))}"


# ---- making it


def make_result(run: Path) -> dict:
    """Evaluate the final policy of a finished run and return the entries of its result.json.

    train100      mean return of the last 100 training episodes, or of all if there are fewer
    eval          returns of 10 deterministic episodes with the final weights; 100 for classic
                  control
    settings      those that are not the default and can change the results
    backend       those that are not the default and change results only by rounding
    curve         at most 100 pairs: a step, and the mean return of the episodes that ended in the
                  1% of training before it
    eval_curve    the same of the evaluations during training, at the steps where they were made
    git_commit    the commit that the run started from
    sources       hashes of the code behind the result, or {} if they are not known
    """
    _, cfg, policy = play.read_run(run)
    config = read_config(run)
    with open(run / "episodes.csv", newline="") as file:
        rows = [(int(row["step"]), float(row["ep_ret"])) for row in csv.DictReader(file)]
    with open(run / "progress.csv", newline="") as file:
        reports = list(csv.DictReader(file))
    steps, returns = np.array(rows, dtype=float).reshape(-1, 2).T
    bins = np.ceil(100 * steps / policy["step"]).astype(int)
    torch.set_num_threads(cfg.torch_threads)
    agent = play.load_agent(run)
    spec = gym.spec(cfg.env.rpartition(":")[2])
    episodes = 100 if "classic_control" in str(spec.entry_point) else 10
    evaluation, _ = evaluate(agent, cfg, episodes, cfg.seed)
    evals = [[int(row["step"]), round(float(row["eval_ret_mean"]), 3)]
             for row in reports if row.get("eval_ret_mean")]
    every = max(1, math.ceil(len(evals) / 100))
    changed = {field.name: getattr(cfg, field.name) for field in fields(cfg)
               if field.name not in OURS | NO_NUMBERS
               and getattr(cfg, field.name) != field.default}
    return {
        "algo": config["algo"], "env": cfg.env, "seed": cfg.seed,
        "settings": {name: x for name, x in changed.items() if name not in BACKEND},
        "backend": {name: x for name, x in changed.items() if name in BACKEND},
        "total_steps": int(cfg.total_steps), "steps": policy["step"], "episodes": len(rows),
        "train100": round(float(returns[-100:].mean()), 3) if rows else None,
        "eval": [round(float(ret), 3) for ret in evaluation], "seconds": float(reports[-1]["time"]),
        "curve": [[round(k * policy["step"] / 100), round(float(returns[bins == k].mean()), 3)]
                  for k in np.unique(bins)],
        "eval_curve": evals[::-every][::-1],  # with the last one
        "env_spec_kwargs": config["env_spec_kwargs"], "versions": config["versions"],
        "git_commit": config["git_commit"], "sources": sources_of(run, config),
    }


def make_results(folder: Path) -> int:
    """Write result.json for every finished run in a folder that lacks it.

    Return the exit status: 1 if a run cannot be read.
    """
    runs = sorted(path.parent for path in folder.rglob("config.json"))
    if not runs:
        raise UsageError(f"--results {folder}: there is no run in it")
    failed = 0
    for run in runs:
        try:
            _, cfg, policy = play.read_run(run)
            if policy["step"] < cfg.total_steps:
                print(f"{run}: {policy['step']:,} of {cfg.total_steps:,.0f} steps, not finished")
            elif not has_result(run, policy["step"]):
                write_result(run, make_result(run))
                print(f"{run}: {headline(run)}", flush=True)
        except UsageError:  # it has printed its message already
            failed = 1
        except (OSError, LookupError, ValueError) as error:
            failed = 1
            print(f"error: {run} is damaged: {error!r}", file=sys.stderr)
    return failed


# ---- the code behind it


def source_files(algo: str) -> list[Path]:
    """Return the files that decide the numbers of a run: the algorithm, and its arithmetic."""
    return [ROOT / "algos" / f"{algo}.py", *(ROOT / name for name in ARITHMETIC)]


def sources(algo: str) -> dict[str, str]:
    """Return file -> hash for the present code behind an algorithm's results."""
    return {path.relative_to(ROOT).as_posix(): code_hash(path.read_text(encoding="utf-8"))
            for path in source_files(algo)}


def changed_sources(made: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the files in `now`, from `sources`, that differ from those behind a result.

    Results of earlier versions also name helpers without any arithmetic. Those do not count.
    """
    return [name for name in now if made.get(name) != now[name]]


def sources_of(run: Path, config: dict) -> dict[str, str]:
    """Return hashes of the code that a run executed, or {} if they are not known.

    A sweep writes them into the log of each run it starts. A run without such a log counts as made
    by the present code, unless it was resumed or some of that code is newer than the run.
    """
    log, begun = Path(f"{run}.log"), (run / "config.json").stat().st_mtime
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    found, resumed = [line for line in lines if line.startswith(HASHES)], config.get("resumed", [])
    if found:
        by_hand, differ = len(found) <= len(resumed), len(set(found)) > 1
        return {} if by_hand or differ else json.loads(found[0].removeprefix(HASHES))
    newer = any(path.stat().st_mtime > begun for path in source_files(config["algo"]))
    return {} if newer or resumed else sources(config["algo"])
