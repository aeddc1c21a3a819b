"""Read runs for plot.py: their curves, final results, and the settings in which they differ.

A run is a run directory with config.json, progress.csv and episodes.csv, or a row of a suite of
results (see utils/results.py). What cannot be read is named on standard error, with the reason,
and skipped.
"""

import dataclasses
import difflib
import importlib.util
import json
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils import results

# Settings that change where or how fast a run went, or when it was evaluated. Runs that differ only
# in these are seeds of the same line.
PLACE = {"env", "seed", "run_dir", "resume", "device", "torch_threads", "num_procs", "compile",
         "eval_every"}


class RunData(NamedTuple):
    """One seed: its curve, where the run ends on the x-axis, and its final results."""

    path: Path
    algo: str  # after the library's name, if it is not plainrl
    env: str
    seed: int
    settings: dict
    x: np.ndarray  # of the rows of a CSV file that have a value
    y: np.ndarray
    end: float
    steps: int
    whole: bool  # finished: it has made all its steps
    train100: float
    eval: float | None
    stored: bool  # read from a suite, without the run directory
    changed: int  # settings that were not the default

    @property
    def budget(self) -> float:
        """The steps that the run has made, or will have made once it is finished."""
        return self.steps if self.whole else float(self.settings["total_steps"])


class Skip(Exception):
    """Raised with the reason why a run is skipped."""


class NoRows(Skip):
    """Raised for a CSV file that holds only its header."""


# ---- reading


def note(text: str) -> None:
    """Print to standard error, so that standard output holds only tables."""
    print(text, file=sys.stderr)


def load(asked) -> list[RunData]:
    """Return all runs below the folders asked.runs that can be read, each once.

    asked is a plot.Plot: asked.x is steps, episodes or time, and asked.y is a column of
    episodes.csv or progress.csv.
    """
    found, runs, skipped = {}, [], defaultdict(list)
    for folder in map(Path, asked.runs):
        if folder.suffix == ".jsonl":
            here = {Path(result["id"]): result for result in results.read_suite(folder)}
        else:
            here = {path.parent: None for path in sorted(folder.rglob("config.json"))}
        if not here:
            note(f"{folder}: there is no run in it; skipped")
        found |= {run.resolve(): (run, result) for run, result in here.items()}
    for run, result in found.values():
        try:
            runs.append(read_run(run, asked.x, asked.y) if result is None
                        else of_result(result, asked.x, asked.y))
        except Skip as reason:
            skipped[str(reason)].append(run)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            skipped[f"damaged, or not a plainrl run ({error!r})"].append(run)
    for reason, (first, *others) in skipped.items():
        note(f"{first}{f' and {len(others)} more' * bool(others)}: {reason}; skipped")
    return runs


def read_run(folder: Path, x: str, y: str) -> RunData:
    """Return the run in a run directory, with the evaluation from its result.json, if any."""
    config = read_json(folder / "config.json")
    settings, algo = dict(config["settings"]), str(config["algo"])
    env, seed, budget = str(settings["env"]), int(settings["seed"]), float(settings["total_steps"])
    names = {"step", "time", "ep_ret", y, f"{y}_mean"}
    progress = read_columns(folder / "progress.csv", names)
    try:
        episodes = read_columns(folder / "episodes.csv", names)
    except NoRows as reason:  # as behaviour cloning, which trains without episodes
        if y == "ep_ret":
            raise Skip(f"{reason}; --y draws a column of progress.csv, such as eval_ret") from None
        episodes = {"step": np.array([]), "ep_ret": np.array([np.nan])}
    rows, column = find_column(y, folder, episodes, progress)
    there = np.isfinite(rows[column])  # a report may lack some quantities
    if not there.any():
        raise Skip(f"no row has a value of {column}")
    axis = {"steps": lambda of: of["step"], "time": lambda of: of["time"] / 60,
            "episodes": lambda of: np.searchsorted(episodes["step"], of["step"],
                                                   side="right")}[x]
    final, steps = None, int(progress["step"][-1])
    if (folder / "result.json").exists():
        result = read_json(folder / "result.json")
        if result.get("steps", steps) == steps:  # else the run was resumed since
            final = float(np.mean(result["eval"]))
    return RunData(folder, algo, env, seed, settings, axis(rows)[there], rows[column][there],
                   float(axis(progress)[-1]), steps, steps >= budget,
                   float(episodes["ep_ret"][-100:].mean()), final, False,
                   changed(algo, settings))


def find_column(y: str, folder: Path, episodes: dict, progress: dict) -> tuple[dict, str]:
    """Return the file that has a column y, or else y_mean, and the name of the column."""
    for name in (y, f"{y}_mean"):
        for rows in (episodes, progress):
            if name in rows:
                return rows, name
    known = [name for file in ("episodes.csv", "progress.csv")
             for name in (folder / file).read_text(encoding="utf-8").split("\n")[0].split(",")]
    near = ", ".join(difflib.get_close_matches(y, known, 3, 0.4)) or "none"
    raise Skip(f"there is no column {y} in episodes.csv or progress.csv; nearest: {near}")


def of_result(result: dict, x: str, y: str) -> RunData:
    """Return a run of a suite: its final results, and the mean return per 1% of the steps.

    A suite holds only the total time, so time is split evenly over the steps.
    """
    algo = f"{result.get('library', '')} {result['algo']}".strip()
    if x == "episodes" or y not in ("ep_ret", "eval_ret"):
        raise Skip("a suite holds only ep_ret and eval_ret, against steps or time")
    curve = result["curve"] if y == "ep_ret" else result.get("eval_curve")
    if not curve:
        raise Skip("no episode ended in this run" if y == "ep_ret" else
                   "this run was not evaluated during training")
    step, ret = np.array(curve, dtype=float).T
    steps = int(result.get("steps", result["total_steps"]))
    unit = 1.0 if x == "steps" else result["seconds"] / 60 / steps  # minutes per step
    return RunData(Path(result["id"]), algo, str(result["env"]), int(result["seed"]),
                   result["settings"], step * unit, ret, steps * unit, steps, True,
                   float(result["train100"]), float(np.mean(result["eval"])), True,
                   len(result["changed"].keys() - {"total_steps"}))


@cache
def defaults(algo: str) -> dict:
    """Return the defaults of the present algorithm file, or {} if there is none."""
    if not (algo.isidentifier() and importlib.util.find_spec(f"algos.{algo}")):
        return {}
    config = importlib.import_module(f"algos.{algo}").Config
    return {field.name: field.default for field in dataclasses.fields(config)
            if field.default is not dataclasses.MISSING}


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def read_columns(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """Return those of the named columns that a CSV file has. An empty cell is NaN.

    A half-written last line is skipped, since the run may still be writing it.
    """
    whole, _, rest = path.read_text(encoding="utf-8").rpartition("\n")
    if rest:
        note(f"{path}: the half-written last line is skipped")
    columns, *rows = [line.split(",") for line in whole.split("\n")]
    if not rows:
        raise NoRows(f"{path.name} has no rows yet")
    if any(len(row) != len(columns) for row in rows):
        raise Skip(f"{path.name} is damaged: its rows differ in length")
    return {name: np.array([float(row[k] or "nan") for row in rows])
            for k, name in enumerate(columns) if name in names}


# ---- settings


def differing(runs: list[RunData]) -> list[str]:
    """Return the settings in which runs differ.

    A result of another library names only settings that were changed, so a setting that some of
    these name and others do not counts as different.
    """
    differ = set()
    for name in set().union(*(run.settings for run in runs)) - PLACE:
        values = {spell(run, name) for run in runs if name in run.settings}
        if len(values) > 1 or len({name in run.settings for run in runs if run.stored}) > 1:
            differ.add(name)
    return sorted(differ)


def spell(run: RunData, name: str) -> str:
    """Return the value of a setting as text: 64-64 for a list, 1000 for 1000.0."""
    return spell_value(run.settings.get(name, "default"))


def spell_value(value) -> str:
    if isinstance(value, (list, tuple)):
        return "-".join(map(str, value))
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def changed(algo: str, settings: dict) -> int:
    """Return how many settings differ from the defaults of the algorithm file."""
    usual = defaults(algo)
    names = settings.keys() & usual.keys() - PLACE - {"total_steps"}
    return sum(spell_value(settings[name]) != spell_value(usual[name]) for name in names)
