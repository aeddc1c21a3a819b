"""What a run says when it ends: how it went, where its files are, and how to go on."""

import csv
import shlex
from collections import deque
from datetime import timedelta
from pathlib import Path

from utils import mpi
from utils.launch import started_by_user


def summary(cfg, module: str, step: int, seconds: float) -> str:
    """Return the last lines of a run that has ended or was stopped.

    module     of the algorithm, such as "algos.x"
    seconds    of training, those before a resume included
    """
    total, run = cfg.total_steps, shlex.quote(cfg.run_dir)
    duration = timedelta(seconds=round(seconds))
    done = step >= total
    resume = f"python -m {module} --run-dir {run} --resume"
    if started_by_user():
        resume = f"mpiexec -n {mpi.size()} {resume}"
    if done:
        resume += f" --total-steps {2 * total:.0f}"
    lines = {
        "done" if done else "stopped": f"{step:,} of {total:,.0f} steps in {duration}",
        "train100": last_returns(Path(cfg.run_dir, "episodes.csv")),
        "eval": evaluations(Path(cfg.run_dir, "progress.csv")),
        "files": cfg.run_dir,
        "play": f"python -m utils.play {run}",
        "plot": f"python -m plot {run}",
        "resume": resume,
    }
    return "\n".join(f"{name:<10}{text}" for name, text in lines.items() if text)


def last_returns(path: Path) -> str:
    """Return the mean return of the last 100 episodes as text."""
    with open(path, newline="") as file:
        columns = next(file).strip().split(",")
        rows = csv.DictReader(deque(file, maxlen=100), columns)
        returns = [float(row["ep_ret"]) for row in rows]
    if not returns:
        return "no episode has ended; the command for play below shows returns"
    mean = sum(returns) / len(returns)
    return f"{rounded(mean)}, mean return of the last {len(returns)} training episodes"


def evaluations(path: Path) -> str:
    """Return the last and the best evaluation as text, or "" if there is none."""
    with open(path, newline="") as file:
        found = [(float(row["eval_ret_mean"]), int(row["step"])) for row in csv.DictReader(file)
                 if row.get("eval_ret_mean")]
    if not found:
        return ""
    last, step = found[-1]
    best, best_step = max(found, key=lambda pair: pair[0])
    return (f"{rounded(last)} at step {step:,}; best {rounded(best)} at step {best_step:,} "
            "(play it with --best)")


def rounded(ret: float) -> str:
    """Return a mean return as text, with at least three digits and one decimal."""
    return f"{ret:.1f}" if abs(ret) >= 10 else f"{ret:#.3g}"
