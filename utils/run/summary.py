"""The last lines of a run: how it went, and how to go on."""

import math
import shlex
from datetime import timedelta

import numpy as np

from utils.logger import read_table
from utils.run.code import module_of


def summary(cfg, step: int, seconds: float) -> str:
    """Return what a run says when it has ended or was stopped: how it went, how to go on."""
    total, run = cfg.total_steps, shlex.quote(cfg.run_dir)
    episodes = read_table(cfg.run_dir, "episodes.csv")
    returns = [float(row["ep_ret"]) for row in episodes]
    late = [float(row["ep_ret"]) for row in episodes if int(row["step"]) > 0.9 * step][-100:]
    reports = read_table(cfg.run_dir, "progress.csv")
    evals = [(float(row["eval_ret_mean"]), int(row["step"]))
             for row in reports if row.get("eval_ret_mean")]
    columns = [name for name, value in reports[-1].items() if value][3:] if reports else []
    y = "" if returns or not columns else f" --y {columns[0]}"
    lines = {"done" if step >= total else "stopped":
             f"{step:,} of {total:,.0f} steps" + " (whole iterations)" * (step > total) +
             f" in {timedelta(seconds=round(seconds))}"}
    lines["train"] = (f"{len(late)} training episodes ended in the last tenth of the steps, too "
                      "few for a mean; `play` below plays ten")
    if len(late) >= 5:
        lines["train"] = (f"{rounded(np.mean(late))}, mean return of the last {len(late)} training "
                          "episodes, all in the last tenth of the steps")
        lines[""] = "they act with exploration noise; `play` acts without, and may return far more"
        first = returns[:20]
        error = math.sqrt(np.var(late) / len(late) + np.var(first) / 20)
        grown = np.mean(late) - np.mean(first) > 1.5 * error
        if step >= total and len(returns) >= 120 and not grown and not cfg.init_from:
            lines["train"] += (f"; hardly better than the first 20 ({rounded(np.mean(first))}): "
                               "train for longer, or see docs/debugging.md")
    if evals:
        (last, at), (best, best_at) = evals[-1], max(evals, key=lambda pair: pair[0])
        lines["eval"] = (f"{rounded(last)} at step {at:,}, without noise; best {rounded(best)} at "
                         f"step {best_at:,} (play it with --best)")
    resume = f"python -m {module_of(type(cfg))} --run-dir {run} --resume"
    resume += f" --total-steps {2 * total:.0f}" * (step >= total)
    lines |= {"files": cfg.run_dir, "play": f"python -m utils.play {run}",
              "plot": f"python -m plot {run}{y}", "resume": resume}
    return "\n".join(f"{name:<10}{text}" for name, text in lines.items())


def rounded(ret: float) -> str:
    """Return a mean return as text, with at least three digits and one decimal."""
    return f"{ret:.1f}" if abs(ret) >= 10 else f"{ret:#.3g}"
