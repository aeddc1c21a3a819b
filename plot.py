"""Draw learning curves and print a table of many runs, with confidence intervals.

    python plot.py runs                 table here, curves in curves.svg
    python plot.py runs --aggregate iqm --smooth 10 --out curves.png
    python plot.py runs --by lr         one line per value of a setting
    python plot.py runs --compare ppo trpo --anchors
                                        also results published by others

Runs are found at any depth below the folders given. A run is a run directory,
or a result.json written by python -m utils.sweep --results. Each run that is
skipped is named, with the reason.

Each panel of the figure shows one environment. A thin line is one seed. The
thick line is the mean over seeds, or the statistic that --aggregate names. The
title says what the band is. Intervals in tables are 95% percentile bootstraps
over seeds; the seeds of each environment are resampled separately. Columns of
the table:

    train100    mean return of the last 100 training episodes
    eval        mean return of deterministic episodes with the final weights
    4 of 6      mean train100 of the first six seeds, without best and worst
"""
import csv
import dataclasses
import difflib
import importlib.util
import io
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure
from scipy.stats import bootstrap, trim_mean

from utils import results as result_files
from utils.flags import read_command
from utils.mpi import UsageError

ANCHORS = Path(__file__).resolve().parent / "benchmarks" / "anchors.csv"
# Okabe and Ito's palette for colour-blind readers, without its yellow.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLES = ["-", "--", ":", "-."]     # for lines beyond the number of colours
POINTS = 100                        # points per curve
RESAMPLES = 10_000                  # of a bootstrap; a fifth of that at each point of a curve
TAUS = np.linspace(0, 1, 101)       # x-axis of a performance profile
X_AXES = {"steps": "environment steps", "episodes": "episodes", "time": "minutes"}
# Settings that change where or how fast a run went, or when it was evaluated. Runs that differ only
# in these are seeds of the same line.
PLACE = {"env", "seed", "run_dir", "resume", "device", "torch_threads", "num_procs", "compile",
         "eval_every"}
STATISTICS = {"mean": np.mean, "median": np.median,
              # Interquartile mean. It drops whole seeds: none of 3, the best and the worst of 6.
              "iqm": partial(trim_mean, proportiontocut=0.25)}
TRIMMED = partial(trim_mean, proportiontocut=1 / 6)


@dataclass(frozen=True)
class Plot:
    runs: tyro.conf.Positional[tuple[str, ...]]  # run directories, or folders that contain runs
    x: Literal["steps", "episodes", "time"] = "steps"  # the x-axis; time is in minutes
    y: str = "ep_ret"  # the y-axis: a column of episodes.csv or progress.csv
    smooth: Literal[1, 10, 100] = 100  # moving average over this many rows
    by: str = ""  # one line per value of this setting, or per algo or env; empty: all that differ
    aggregate: Literal["mean", "median", "iqm"] = "mean"  # statistic over seeds
    compare: tuple[str, str] = ("", "")  # names of two lines to compare, such as: ppo trpo
    anchors: bool = False  # also print results published by others
    table: Literal["text", "markdown", "csv"] = "text"  # format of the tables
    out: str = "curves.svg"  # file for the figure, .svg or .png

    def __post_init__(self):
        if Path(self.out).suffix not in (".svg", ".png"):
            raise UsageError(f"--out is {self.out}; it takes a name that ends in .svg or .png")


class Run(NamedTuple):
    """One seed: its curve, where the run ends on the x-axis, and its final results."""

    path: Path
    algo: str                       # after the library's name, if it is not plainrl
    env: str
    seed: int
    settings: dict
    x: np.ndarray
    y: np.ndarray
    end: float
    steps: int
    whole: bool                     # finished: it has made all its steps
    train100: float
    eval: float | None
    stored: bool                    # read from a result.json, without the run directory


class Skip(Exception):
    """Raised with the reason why a run is skipped."""


def note(text: str) -> None:
    """Print to standard error, so that standard output holds only tables."""
    print(text, file=sys.stderr)


# ---- Reading

def load(plot: Plot) -> list[Run]:
    """Return all runs that can be read, each once. Print a line for each that is skipped."""
    folders, runs = {}, []
    for given in plot.runs:
        found = sorted(path.parent for path in Path(given).rglob("*.json")
                       if path.name in ("config.json", "result.json"))
        if not found:
            note(f"{given}: there is no run in it; skipped")
        folders |= {folder.resolve(): folder for folder in found}
    for folder in folders.values():
        try:
            full = (folder / "config.json").exists()
            runs.append((read_run if full else read_result)(folder, plot))
        except Skip as reason:
            note(f"{folder}: {reason}; skipped")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            note(f"{folder}: damaged, or not a plainrl run ({error!r}); skipped")
    return runs


def read_run(folder: Path, plot: Plot) -> Run:
    """Return the run in a run directory, with the evaluation from its result.json, if any."""
    config, y = read_json(folder / "config.json"), plot.y
    settings, algo = dict(config["settings"]), str(config["algo"])
    env, seed, budget = str(settings["env"]), int(settings["seed"]), float(settings["total_steps"])
    episodes = read_columns(folder / "episodes.csv", {"step", "time", "ep_ret", y})
    progress = read_columns(folder / "progress.csv", {"step", "time", y})
    rows = episodes if y in episodes else progress
    if y not in rows:
        raise Skip(f"there is no column {y} in episodes.csv or progress.csv")
    there = np.isfinite(rows[y])    # a report may lack some quantities
    if not there.any():
        raise Skip(f"no row has a value of {y}")
    axis = {"steps": lambda of: of["step"], "time": lambda of: of["time"] / 60,
            "episodes": lambda of: np.searchsorted(episodes["step"], of["step"],
                                                   side="right")}[plot.x]
    final, steps = None, int(progress["step"][-1])
    if (folder / "result.json").exists():
        result = read_json(folder / "result.json")
        if result.get("steps", steps) == steps:         # else the run was resumed since
            final = float(np.mean(result["eval"]))
    return Run(folder, algo, env, seed, settings, axis(rows)[there][plot.smooth - 1:],
               smooth(rows[y][there], plot.smooth), float(axis(progress)[-1]), steps,
               steps >= budget, float(episodes["ep_ret"][-100:].mean()), final, False)


def read_result(folder: Path, plot: Plot) -> Run:
    """Return a run from its result.json: final results, and the mean return per 1% of the steps.

    The file holds only the total time, so time is split evenly over the steps.
    """
    result = result_files.read_result(folder / "result.json")
    algo = f"{result.get('library', '')} {result['algo']}".strip()
    if plot.x == "episodes" or plot.y != "ep_ret":
        raise Skip("result.json holds only ep_ret, against steps or time")
    if not result["curve"]:
        raise Skip("no episode ended in this run")
    x, y = np.array(result["curve"], dtype=float).T
    steps = int(result.get("steps", result["total_steps"]))
    unit = 1.0 if plot.x == "steps" else result["seconds"] / 60 / steps     # minutes per step
    return Run(folder, algo, str(result["env"]), int(result["seed"]),
               defaults(algo) | result.get("settings", {}), x * unit, y, steps * unit, steps, True,
               float(result["train100"]), float(np.mean(result["eval"])), True)


@cache
def defaults(algo: str) -> dict:
    """Return the defaults of the present algorithm file; a result.json names only other values."""
    if not (algo.isidentifier() and importlib.util.find_spec(f"algos.{algo}")):
        return {}                   # an algorithm of another library
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
        raise Skip(f"{path.name} has no rows yet")
    if any(len(row) != len(columns) for row in rows):
        raise Skip(f"{path.name} is damaged: its rows differ in length")
    return {name: np.array([float(row[k] or "nan") for row in rows])
            for k, name in enumerate(columns) if name in names}


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Return the means of `window` successive values: window - 1 values fewer than in y."""
    if len(y) < window:
        return np.empty(0)
    return np.lib.stride_tricks.sliding_window_view(y, window).mean(-1)


# ---- Which seeds belong together

Groups = dict[str, dict[str, list[Run]]]        # panel -> line -> its seeds


def group(runs: list[Run], by: str = "") -> Groups:
    """Return one panel per environment, with one line per algorithm and combination of settings.

    By default, all settings that differ tell lines apart. `by` names the only one that does;
    "algo" means none. "env" gives one line per environment in panels of algorithm and settings.
    """
    alike, by = defaultdict(list), by.replace("-", "_")
    known = sorted({"algo", "env"}.union(*(run.settings for run in runs)))
    if runs and by and by not in known:
        near = difflib.get_close_matches(by, known, 3, 0.4)
        raise UsageError(f"--by {by}: no run has such a setting; nearest: {', '.join(near)}")
    for run in sorted(runs, key=lambda run: (run.seed, not run.whole)):     # finished runs first
        alike[run.env, run.algo].append(run)
    groups = defaultdict(lambda: defaultdict(dict))
    for (env, algo), found in sorted(alike.items()):
        differ = differing(found)
        named = {"": differ, "env": differ, "algo": []}.get(by, [by])
        pooled = [name for name in differ if name not in named]
        if pooled:
            note(f"{algo} on {env}: runs that differ in {', '.join(pooled)} are pooled")
        for run in found:
            line = " ".join([algo, *(f"{name}={spell(run, name)}" for name in named)])
            seeds = groups[line][env] if by == "env" else groups[env][line]
            first = seeds.setdefault((run.seed, *(spell(run, name) for name in pooled)), run)
            if first is not run:
                note(f"{run.path}: seed {run.seed} of {line} is also in {first.path}; skipped")
    return {panel: {line: list(lines[line].values()) for line in sorted(lines, key=natural)}
            for panel, lines in sorted(groups.items())}


def natural(text: str) -> list[str | float]:
    """Return a sort key that puts num_envs=2 before num_envs=16."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-\d+)?)", text)     # text and numbers alternate
    return [float(part) if k % 2 else part for k, part in enumerate(parts)]


def flat(groups: Groups) -> list[tuple[str, str, list[Run]]]:
    """Return (panel, line, seeds) of every line."""
    return [(panel, line, runs) for panel, lines in groups.items() for line, runs in lines.items()]


def differing(runs: list[Run]) -> list[str]:
    """Return the settings in which runs differ.

    The result.json of another library names only settings that were changed, so a setting that
    some of these name and others do not counts as different.
    """
    differ = set()
    for name in set().union(*(run.settings for run in runs)) - PLACE:
        values = {spell(run, name) for run in runs if name in run.settings}
        if len(values) > 1 or len({name in run.settings for run in runs if run.stored}) > 1:
            differ.add(name)
    return sorted(differ)


def spell(run: Run, name: str) -> str:
    """Return the value of a setting as text: 64-64 for a list, 1000 for 1000.0."""
    value = run.settings.get(name, "default")
    if isinstance(value, (list, tuple)):
        return "-".join(map(str, value))
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


# ---- Statistics

def interval(samples: list[np.ndarray], statistic) -> tuple[np.ndarray, np.ndarray]:
    """Return the two ends of the 95% bootstrap interval of a statistic of several samples.

    Seeds lie along the last axis and are resampled within each sample separately. Both ends are
    NaN if a sample has only one seed or lacks a value.
    """
    if not all(sample.shape[-1] > 1 and np.isfinite(sample).all() for sample in samples):
        nothing = np.full(samples[0].shape[:-1], np.nan)
        return nothing, nothing
    ends = bootstrap(samples, statistic, vectorized=True, axis=-1, method="percentile",
                     n_resamples=RESAMPLES // 5 if samples[0].ndim > 1 else RESAMPLES,
                     batch=200, rng=np.random.default_rng(0))       # 200 at once, to save memory
    return ends.confidence_interval.low, ends.confidence_interval.high


def at(run: Run, x: np.ndarray) -> np.ndarray:
    """Return a seed's y at each x: the value of the last point up to there."""
    return run.y[np.searchsorted(run.x, x, side="right") - 1]


def band(y: np.ndarray, how: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the thick line and the two ends of its band, each [POINTS], from y [POINTS, seeds]."""
    centre = STATISTICS[how](y, axis=-1)
    if how != "mean":
        return centre, *interval([y], STATISTICS[how])
    sd = y.std(-1, ddof=1) if y.shape[-1] > 1 else np.full(len(y), np.nan)
    return centre, centre - sd, centre + sd


# ---- Tables

def finished(groups: Groups) -> Groups:
    """Return only the finished runs: results after fewer steps are not comparable."""
    done = defaultdict(dict)
    for panel, line, runs in flat(groups):
        for run in runs:
            if not run.whole:
                note(f"{run.path}: at step {run.steps:,} of {spell(run, 'total_steps')}; not in "
                     "the table")
        if any(run.whole for run in runs):
            done[panel][line] = [run for run in runs if run.whole]
    return done


def results(groups: Groups, how: str) -> list[dict]:
    """Return one table row per line. A statistic is a tuple with the two ends of its interval."""
    rows = []
    for panel, line, runs in flat(groups):
        train, final = (np.array([getattr(run, name) for run in runs], dtype=float)
                        for name in ("train100", "eval"))       # a missing eval is NaN
        six = len(runs) >= 6 and len({run.seed for run in runs}) == len(runs)   # no seed twice
        rows.append({
            "environment": runs[0].env,             # with --by env, lines are environments
            "line": panel if line == runs[0].env else line, "steps": min(run.steps for run in runs),
            "seeds": len(runs), "train100": estimate(train, STATISTICS[how]),
            "eval": estimate(final, STATISTICS[how]),
            "4 of 6": estimate(train[:6] if six else np.array([np.nan]), TRIMMED)})
    return rows


def estimate(values: np.ndarray, statistic) -> tuple[float, float, float]:
    """Return the statistic and the two ends of its interval."""
    return float(statistic(values, axis=-1)), *map(float, interval([values], statistic))


def published(groups: Groups, how: str = "mean") -> list[dict]:
    """Return rows of published results for our algorithms, environments and numbers of steps."""
    if not ANCHORS.exists():
        raise UsageError(f"--anchors needs {ANCHORS}, which comes with a clone of the repository")
    anchors = list(csv.DictReader(ANCHORS.read_text(encoding="utf-8").splitlines()))
    rows = []
    for _, line, runs in flat(groups):
        run = runs[0]
        for row in anchors:
            same = row["algo"].lower() == run.algo and row["env"] == run.env.rpartition("-v")[0]
            if same and abs(float(row["budget_steps"]) / run.steps - 1) < 0.1:
                rows.append({
                    "published for": f"{row['env']}-{row['env_version']}", "algorithm": run.algo,
                    "steps": int(row["budget_steps"]), "seeds": row["seeds"],
                    "mean": row["mean"], "spread": row["spread"], "metric": row["metric"],
                    "source": row["source"], "ours": f"{line} on {run.env}",
                    **{name: float(STATISTICS[how](np.array([getattr(run, name) for run in runs],
                                                            dtype=float), axis=-1))
                       for name in ("train100", "eval")}})
    return rows


def cell(value) -> str:
    """Return a value as a cell of a text or Markdown table."""
    if isinstance(value, tuple):
        middle, low, high = map(cell, value)
        return middle if low == "-" else f"{middle} [{low}, {high}]"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def table(rows: list[dict], kind: str) -> str:
    """Return rows, which all have the same keys, as text, Markdown or CSV."""
    if kind == "csv":               # an interval adds two columns
        rows = [{name + end: part for name, value in row.items() for end, part in
                 (zip(("", "_low", "_high"), value) if isinstance(value, tuple) else [("", value)])}
                for row in rows]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([list(rows[0]), *map(dict.values, rows)])
        return text.getvalue().rstrip("\n")
    cells = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    if kind == "markdown":
        cells.insert(1, ["---"] * len(cells[0]))
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


# ---- Two lines compared

def compare(groups: Groups, first: str, second: str, kind: str = "text") -> dict:
    """Print how likely a seed of `first` beats one of `second`; return both performance profiles.

    Only panels with finished runs of both lines count.
    """
    both = {panel: lines for panel, lines in groups.items() if {first, second} <= set(lines)}
    if not both:
        there = ", ".join(sorted({line for _, line, _ in flat(groups)}))
        raise UsageError(f"--compare {first} {second}: no panel has finished runs of both; "
                         f"finished lines: {there or 'none'}")
    ours, theirs = ([np.array([run.train100 for run in lines[name]]) for lines in both.values()]
                    for name in (first, second))
    rows = []
    for panel, samples in [*zip(both, zip(ours, theirs)), ("mean over panels", [*ours, *theirs])]:
        value = float(improvement(*samples)), *map(float, interval(samples, improvement))
        rows.append({f"{first} beats {second}": panel, "probability (train100)": value})
    print("\n" + table(rows, kind))
    ends = [(min(*a, *b), max(*a, *b)) for a, b in zip(ours, theirs)]
    return {first: profile(ours, ends), second: profile(theirs, ends)}


def improvement(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the probability that a seed of A beats a seed of B, averaged over environments.

    A tie counts as one half. The samples are A's, one per environment, then B's in the same order.
    """
    pairs = zip(samples, samples[len(samples) // 2:])       # zip stops after B's last
    signs = [np.sign(a[..., :, None] - b[..., None, :]).mean((-1, -2)) for a, b in pairs]
    return (np.mean(signs, axis=0) + 1) / 2


def profile(samples: list[np.ndarray], ends: list[tuple[float, float]]) -> tuple:
    """Return the fraction of seeds above each of TAUS, and the two ends of its interval.

    Results are scaled in each environment: the worst seed of both lines is 0, the best is 1.
    """
    above = [((sample - low) / max(high - low, 1e-12) > TAUS[:, None]).astype(float)
             for sample, (low, high) in zip(samples, ends)]
    return mean_of_means(*above), *interval(above, mean_of_means)


def mean_of_means(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the mean over seeds, averaged over environments, which all count the same."""
    return np.mean([sample.mean(axis) for sample in samples], axis=0)


# ---- Figures

def draw(groups: Groups, plot: Plot, compared: dict) -> Figure:
    """Return a figure with one panel per environment, and one for the profiles, if any."""
    names = sorted({line for _, line, _ in flat(groups)}, key=natural)
    looks = {name: {"color": COLOURS[k % len(COLOURS)],
                    "linestyle": STYLES[k // len(COLOURS) % len(STYLES)]}
             for k, name in enumerate(names)}                   # the same in every panel
    count = len(groups) + bool(compared)
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.5 * columns, 3 * rows + 0.3), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    label = ""
    for k, (ax, (panel, lines)) in enumerate(zip(axes, groups.items())):
        for line, runs in lines.items():
            draw_line(ax, runs, line, looks[line], plot.aggregate, f"{panel}, {line}")
        ax.set(title=panel, xlabel=X_AXES[plot.x])
        if k % columns == 0 or y_label(lines, plot) != label:   # not again beside the same one
            label = y_label(lines, plot)
            ax.set_ylabel(label)
        if plot.x == "steps":
            ax.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    for name, (share, low, high) in compared.items():
        ax = axes[count - 1]
        ax.plot(TAUS, share, **looks[name], linewidth=2, label=name, gid=f"profile, {name}")
        ax.fill_between(TAUS, low, high, color=looks[name]["color"], alpha=0.15, linewidth=0)
        ax.set(title="performance profile, 95% intervals",
               xlabel="train100, scaled: worst seed 0, best 1", ylabel="fraction of seeds above")
    for k, ax in enumerate(axes):
        ax.grid(alpha=0.25)
        ax.set_axis_on() if k < count else ax.set_axis_off()
        if ax.lines:
            ax.legend(fontsize=8)
    kind = "one standard deviation" if plot.aggregate == "mean" else "its 95% bootstrap interval"
    figure.suptitle(f"thin: a seed; thick: the {plot.aggregate}; band: {kind}", fontsize=9)
    return figure


def draw_line(ax, runs: list[Run], name: str, look: dict, how: str, gid: str) -> None:
    """Draw each seed thin, the statistic over seeds thick, and the band."""
    for run in runs:
        if not len(run.x):
            note(f"{run.path}: fewer rows than --smooth; not in the figure")
    runs = [run for run in runs if len(run.x)]
    if not runs:
        return
    start, end = max(run.x[0] for run in runs), min(run.end for run in runs)
    longest = max(run.end for run in runs)
    if longest > end:
        note(f"{gid}: seeds end between {end:,.6g} and {longest:,.6g}; all are cut at {end:,.6g}")
    if start > end:
        note(f"{gid}: its seeds do not overlap on the x-axis; not in the figure")
        return
    x = np.linspace(start, end, POINTS)
    y = np.stack([at(run, x) for run in runs], -1)              # [POINTS, seeds]
    for run, seed in zip(runs, y.T):
        ax.plot(x, seed, **look, linewidth=0.6, alpha=0.45, gid=f"{gid}, seed {run.seed}")
    centre, low, high = band(y, how)
    label = f"{name} ({len(runs)} seed{'s' * (len(runs) > 1)})"
    ax.plot(x, centre, **look, linewidth=2, label=label, gid=f"{gid}, {how}")
    if not np.isnan(low).any():
        ax.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0,
                        gid=f"{gid}, band")


def y_label(lines: dict[str, list[Run]], plot: Plot) -> str:
    """Return the label of the y-axis: the quantity, and what each point is the mean of."""
    stored = {run.stored for runs in lines.values() for run in runs}
    rows = "episodes" if plot.y in ("ep_ret", "ep_len") else "rows"
    means = [f"last {plot.smooth} {rows}"] * (plot.smooth > 1 and False in stored)
    means += ["1% of the steps"] * (True in stored)
    return plot.y + (f", mean of {' or '.join(means)}" if means else "")


def save(figure: Figure, out: str) -> None:
    """Write the figure. Text in an SVG stays text, and the same data give the same file."""
    svg = out.endswith(".svg")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "plainrl"}):
        try:
            figure.savefig(out, dpi=200, metadata={"Date": None} if svg else None)
        except OSError as error:
            raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None


def main(plot: Plot) -> None:
    """Read runs, print tables, write the figure. UsageError: there is no run, or no curve."""
    groups = group(load(plot), plot.by)
    if not groups:
        raise UsageError(f"no run to plot; folders given: {' '.join(plot.runs) or 'none'}")
    done = finished(groups)
    if done:
        print(table(results(done, plot.aggregate), plot.table))
    compared = compare(done, *plot.compare, plot.table) if any(plot.compare) else {}
    others = published(done, plot.aggregate) if plot.anchors else []
    if others:
        print("\n" + table(others, plot.table))
    elif plot.anchors:
        note("--anchors: no published results for these algorithms, environments and steps")
    if not any(len(run.x) for _, _, runs in flat(groups) for run in runs):
        raise UsageError(f"--smooth {plot.smooth}: no run has that many rows with {plot.y}")
    save(draw(groups, plot, compared), plot.out)
    note(f"{plot.out}: {sum(len(runs) for _, _, runs in flat(groups))} runs")


if __name__ == "__main__":
    main(read_command(Plot, __doc__, "python plot.py"))
