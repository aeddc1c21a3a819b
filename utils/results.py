"""result.json: what is published of a finished run, in a few kB.

It names the settings in full, the git commit of the run, and the versions, so it stands as it is
when the code changes.
"""

import json
import math
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from utils.envs import make_envs
from utils.errors import UsageError
from utils.evaluate import evaluate
from utils.files import read_table, write_text
from utils.load import build_agent, read_run
from utils.returns import curve
from utils.roles import PLACE, ROUNDING, WATCH
from utils.run.directory import read_config


def has_result(run_dir: Path, total_steps: int) -> bool:
    """Return whether a run has a result for this many steps."""
    path = run_dir / "result.json"
    return path.exists() and json.loads(path.read_text())["steps"] >= total_steps


def headline(run_dir: Path) -> str:
    """Return the two main figures of a run's result as text."""
    result = json.loads((run_dir / "result.json").read_text())
    return f"train100 {result['train100']}, eval {round(np.mean(result['eval']), 3)}"


def make_result(run: Path) -> dict:
    """Evaluate the final policy of a finished run and return the entries of its result.json.

    train100      mean return of the last 100 training episodes, or of all if there are fewer
    eval          returns of 10 deterministic episodes with the final weights; 100 for classic
                  control
    settings      all that can change the results
    changed       those of them that were not the default
    backend       those that are not the default and change results only by rounding
    curve         at most 100 pairs: a step, and the mean return of the episodes that ended in the
                  1% of training before it
    eval_curve    at most 100 evaluations during training, as pairs of step and mean return
    resumed       where the run was resumed, by which commit; only if it was
    """
    module, cfg, policy = read_run(run)
    config, last = read_config(run), policy["step"]
    episodes, reports = read_table(run, "episodes.csv"), read_table(run, "progress.csv")
    ended = [int(row["step"]) for row in episodes]
    returns = np.array([float(row["ep_ret"]) for row in episodes])
    evals = [[int(row["step"]), round(float(row["eval_ret_mean"]), 3)]
             for row in reports if row.get("eval_ret_mean")]
    every = max(1, math.ceil(len(evals) / 100))
    torch.set_num_threads(cfg.torch_threads)
    with closing(make_envs(cfg, 1)) as envs:
        classic = "classic_control" in str(envs.unwrapped.spec.entry_point)
    agent = build_agent(run, module, cfg, policy)
    final, _ = evaluate(agent, cfg, 100 if classic else 10, cfg.seed)
    settings = {name: x for name, x in vars(cfg).items() if name not in PLACE | WATCH}
    usual = vars(type(cfg).for_env(cfg.env, total_steps=cfg.total_steps))
    usual |= {"total_steps": type(cfg).for_env(cfg.env).total_steps}
    changed = {name: x for name, x in settings.items() if x != usual[name]}
    # The commands may name folders of the machine.
    resumed = [{name: x for name, x in each.items() if name != "command"}
               for each in config.get("resumed", [])]
    return {
        "algo": config["algo"], "env": cfg.env, "seed": cfg.seed,
        "settings": {name: x for name, x in settings.items() if name not in ROUNDING},
        "changed": {name: x for name, x in changed.items() if name not in ROUNDING},
        "backend": {name: x for name, x in changed.items() if name in ROUNDING},
        "total_steps": int(cfg.total_steps), "steps": last, "episodes": len(episodes),
        "train100": round(float(returns[-100:].mean()), 3) if episodes else None,
        "eval": [round(float(ret), 3) for ret in final], "seconds": float(reports[-1]["time"]),
        "curve": curve(ended, returns, last),
        "eval_curve": evals[::-every][::-1],  # with the last one
        "versions": config["versions"], "git_commit": config["git_commit"],
    } | ({"resumed": resumed} if resumed else {})


def make_results(folder: Path) -> int:
    """Write result.json for every finished run that lacks it. Return 1 if one cannot be read."""
    runs = sorted(path.parent for path in folder.rglob("config.json"))
    if not runs:
        raise UsageError(f"--results {folder}: there is no run in it")
    failed = 0
    for run in runs:
        try:
            _, cfg, policy = read_run(run)
            if policy["step"] < cfg.total_steps:
                print(f"{run}: {policy['step']:,} of {cfg.total_steps:,.0f} steps, not finished")
            elif not has_result(run, policy["step"]):
                lines = [f'"{key}": {json.dumps(x)}' for key, x in make_result(run).items()]
                write_text(run / "result.json", "{\n" + ",\n".join(lines) + "\n}\n")
                print(f"{run}: {headline(run)}", flush=True)
        except (OSError, LookupError, ValueError) as error:  # UsageError is one, too
            failed = 1
            print(f"error: {run}: {error}", file=sys.stderr)
    return failed
