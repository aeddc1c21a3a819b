"""Learning curves and tables of many runs, with intervals.

    python plot.py runs                                 the table here, the curves in curves.svg
    python plot.py runs --aggregate iqm --smooth 10 --out curves.png
    python plot.py runs --by lr --table markdown        a line for each value of a setting
    python plot.py runs --compare ppo trpo --anchors    and what others have published

Runs are found by the files in them, run directories as well as the result.json files that
`python -m utils.sweep --results` leaves; what is skipped is named. A panel is an environment, a
thin line a seed, the thick one all seeds; the band is named above the panels. An interval is a 95%
percentile bootstrap over seeds, those of each environment drawn on their own. Columns of the table:

    train100    mean return of the last 100 training episodes
    eval        mean return of deterministic episodes with the final weights
    4 of 6      train100 of the first six seeds without the best and the worst of them
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
from utils.mpi import UsageError

ANCHORS = Path(__file__).resolve().parent / "benchmarks" / "anchors.csv"
# Okabe & Ito's colours, which the colour-blind tell apart, without their yellow.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLES = ["-", "--", ":", "-."]     # where there are more lines than colours
POINTS = 100                        # of a curve
RESAMPLES = 10_000                  # of a bootstrap; at each point of a curve a fifth
TAUS = np.linspace(0, 1, 101)       # of a performance profile
X_AXES = {"steps": "environment steps", "episodes": "episodes", "time": "minutes"}
# Settings that say where, how fast and on how many processes a run went, not what it was.
PLACE = {"env", "seed", "run_dir", "resume", "device", "torch_threads", "num_procs", "compile",
         "eval_every"}
STATISTICS = {"mean": np.mean, "median": np.median,
              # Mean of the middle half; whole seeds are cut: of 3 none, of 6 best and worst.
              "iqm": partial(trim_mean, proportiontocut=0.25)}
TRIMMED = partial(trim_mean, proportiontocut=1 / 6)


@dataclass(frozen=True)
class Plot:
    runs: tyro.conf.Positional[tuple[str, ...]]  # run directories, or folders with runs in them
    x: Literal["steps", "episodes", "time"] = "steps"  # time in minutes
    y: str = "ep_ret"  # a column of episodes.csv or of progress.csv
    smooth: Literal[1, 10, 100] = 100  # how many rows of y a point is the mean of
    by: str = ""  # a line for each algo, env or value of a setting; default: whatever differs
    aggregate: Literal["mean", "median", "iqm"] = "mean"  # the thick line, and the table's figure
    compare: tuple[str, str] = ("", "")  # two lines by their names, such as: ppo trpo
    anchors: bool = False  # a second table: published figures beside these
    table: Literal["text", "markdown", "csv"] = "text"  # how tables are printed
    out: str = "curves.svg"  # .svg or .png

    def __post_init__(self):
        if Path(self.out).suffix not in (".svg", ".png"):
            raise UsageError(f"--out is {self.out}; it takes a name that ends in .svg or .png")


class Run(NamedTuple):
    """One seed: its curve, where that ends on the x-axis, and its final figures."""

    path: Path
    algo: str                       # with the library before it, where that is not this one
    env: str
    seed: int
    settings: dict
    x: np.ndarray
    y: np.ndarray
    end: float
    steps: int
    whole: bool                     # its budget is used up
    train100: float
    eval: float | None
    stored: bool                    # read from a result.json alone


class Skip(Exception):
    """Why something is left out."""


def note(text: str) -> None:
    """To standard error, so that a table can be redirected."""
    print(text, file=sys.stderr)


# ---- Reading

def load(plot: Plot) -> list[Run]:
    """All runs that can be read, each once; a line for whatever is skipped."""
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
            note(f"{folder} is damaged, or no run of this project ({error!r}); skipped")
    return runs


def read_run(folder: Path, plot: Plot) -> Run:
    """A run from its directory; its result.json, if there is one, knows the evaluation."""
    config, y = read_json(folder / "config.json"), plot.y
    settings, algo = dict(config["settings"]), str(config["algo"])
    env, seed, budget = str(settings["env"]), int(settings["seed"]), float(settings["total_steps"])
    episodes = read_columns(folder / "episodes.csv", {"step", "time", "ep_ret", y})
    progress = read_columns(folder / "progress.csv", {"step", "time", y})
    rows = episodes if y in episodes else progress
    if y not in rows:
        raise Skip(f"there is no column {y} in episodes.csv or progress.csv")
    there = np.isfinite(rows[y])    # a report need not have every quantity
    if not there.any():
        raise Skip(f"no row has {y}")
    axis = {"steps": lambda of: of["step"], "time": lambda of: of["time"] / 60,
            "episodes": lambda of: np.searchsorted(episodes["step"], of["step"],
                                                   side="right")}[plot.x]
    final, steps = None, int(progress["step"][-1])
    if (folder / "result.json").exists():
        result = read_json(folder / "result.json")
        if result.get("steps", steps) == steps:         # not of before it was resumed
            final = float(np.mean(result["eval"]))
    return Run(folder, algo, env, seed, settings, axis(rows)[there][plot.smooth - 1:],
               smooth(rows[y][there], plot.smooth), float(axis(progress)[-1]), steps,
               steps >= budget, float(episodes["ep_ret"][-100:].mean()), final, False)


def read_result(folder: Path, plot: Plot) -> Run:
    """A run from its result.json: final figures, and the mean return of each 1% of the steps.

    It knows how long the run took, and no more of time: every step counts the same.
    """
    result = result_files.read_result(folder / "result.json")
    algo = f"{result.get('library', '')} {result['algo']}".strip()
    if plot.x == "episodes" or plot.y != "ep_ret":
        raise Skip("result.json knows ep_ret against steps or time, nothing else")
    if not result["curve"]:
        raise Skip("not one episode ended in it")
    x, y = np.array(result["curve"], dtype=float).T
    steps = int(result.get("steps", result["total_steps"]))
    unit = 1.0 if plot.x == "steps" else result["seconds"] / 60 / steps     # all at one rate
    return Run(folder, algo, str(result["env"]), int(result["seed"]),
               defaults(algo) | result.get("settings", {}), x * unit, y, steps * unit, steps, True,
               float(result["train100"]), float(np.mean(result["eval"])), True)


@cache
def defaults(algo: str) -> dict:
    """Settings that a result.json does not name: those of the algorithm's file as it is here."""
    if not (algo.isidentifier() and importlib.util.find_spec(f"algos.{algo}")):
        return {}                   # of another library
    config = importlib.import_module(f"algos.{algo}").Config
    return {field.name: field.default for field in dataclasses.fields(config)
            if field.default is not dataclasses.MISSING}


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def read_columns(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """Those columns of a CSV file that it has; an empty cell is NaN.

    A half-written last line is left out.
    """
    whole, _, rest = path.read_text(encoding="utf-8").rpartition("\n")
    if rest:
        note(f"{path}: its last line is half-written; skipped")
    columns, *rows = [line.split(",") for line in whole.split("\n")]
    if not rows:
        raise Skip(f"{path.name} has no rows yet")
    if any(len(row) != len(columns) for row in rows):
        raise Skip(f"{path.name} is damaged: its rows are not equally long")
    return {name: np.array([float(row[k] or "nan") for row in rows])
            for k, name in enumerate(columns) if name in names}


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Means of the last `window` values, from where there are that many."""
    if len(y) < window:
        return np.empty(0)
    return np.lib.stride_tricks.sliding_window_view(y, window).mean(-1)


# ---- Which seeds belong together

Groups = dict[str, dict[str, list[Run]]]        # panel -> line -> its seeds


def group(runs: list[Run], by: str = "") -> Groups:
    """A panel an environment, a line whatever `by` tells apart; `env`: the other way round."""
    alike, by = defaultdict(list), by.replace("-", "_")
    known = sorted({"algo", "env"}.union(*(run.settings for run in runs)))
    if runs and by and by not in known:
        near = difflib.get_close_matches(by, known, 3, 0.4)
        raise UsageError(f"--by {by}: no run has such a setting; nearest: {', '.join(near)}")
    for run in sorted(runs, key=lambda run: (run.seed, not run.whole)):     # of two the whole one
        alike[run.env, run.algo].append(run)
    groups = defaultdict(lambda: defaultdict(dict))
    for (env, algo), found in sorted(alike.items()):
        differ = differing(found)
        named = {"": differ, "env": differ, "algo": []}.get(by, [by])
        pooled = [name for name in differ if name not in named]
        if pooled:
            note(f"{algo} on {env}: runs that differ in {', '.join(pooled)} are taken together")
        for run in found:
            line = " ".join([algo, *(f"{name}={spell(run, name)}" for name in named)])
            seeds = groups[line][env] if by == "env" else groups[env][line]
            first = seeds.setdefault((run.seed, *(spell(run, name) for name in pooled)), run)
            if first is not run:
                note(f"{run.path}: {first.path} is seed {run.seed} of {line} already; skipped")
    return {panel: {line: list(lines[line].values()) for line in sorted(lines, key=natural)}
            for panel, lines in sorted(groups.items())}


def natural(text: str) -> list[str | float]:
    """What to sort by: num_envs=2 comes before num_envs=16."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-\d+)?)", text)     # text and numbers in turn
    return [float(part) if k % 2 else part for k, part in enumerate(parts)]


def flat(groups: Groups) -> list[tuple[str, str, list[Run]]]:
    """Panel, line and seeds of every line."""
    return [(panel, line, runs) for panel, lines in groups.items() for line, runs in lines.items()]


def differing(runs: list[Run]) -> list[str]:
    """Settings in which runs differ; a peer's result.json names only those that were chosen."""
    differ = set()
    for name in set().union(*(run.settings for run in runs)) - PLACE:
        values = {spell(run, name) for run in runs if name in run.settings}
        if len(values) > 1 or len({name in run.settings for run in runs if run.stored}) > 1:
            differ.add(name)
    return sorted(differ)


def spell(run: Run, name: str) -> str:
    value = run.settings.get(name, "default")
    if isinstance(value, (list, tuple)):
        return "-".join(map(str, value))
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


# ---- Statistics

def interval(samples: list[np.ndarray], statistic) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95% bootstrap interval; seeds are drawn within each sample, along its last axis.

    NaN where a sample has a single seed, or one without a value.
    """
    if not all(sample.shape[-1] > 1 and np.isfinite(sample).all() for sample in samples):
        nothing = np.full(samples[0].shape[:-1], np.nan)
        return nothing, nothing
    ends = bootstrap(samples, statistic, vectorized=True, axis=-1, method="percentile",
                     n_resamples=RESAMPLES // 5 if samples[0].ndim > 1 else RESAMPLES,
                     batch=200, rng=np.random.default_rng(0))       # 200 at a time, for memory
    return ends.confidence_interval.low, ends.confidence_interval.high


def at(run: Run, x: np.ndarray) -> np.ndarray:
    """A seed's y at each x; the last known value holds."""
    return run.y[np.searchsorted(run.x, x, side="right") - 1]


def band(y: np.ndarray, how: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The thick line of [POINTS, seeds] and the ends of its band, each [POINTS]."""
    centre = STATISTICS[how](y, axis=-1)
    if how != "mean":
        return centre, *interval([y], STATISTICS[how])
    sd = y.std(-1, ddof=1) if y.shape[-1] > 1 else np.full(len(y), np.nan)
    return centre, centre - sd, centre + sd


# ---- Tables

def finished(groups: Groups) -> Groups:
    """Without the runs that have not used up their budget: their figures are of something else."""
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
    """A row a line; a figure with the ends of its interval is a tuple of three."""
    rows = []
    for panel, line, runs in flat(groups):
        train, final = (np.array([getattr(run, name) for run in runs], dtype=float)
                        for name in ("train100", "eval"))       # NaN, if one eval is not there
        six = len(runs) >= 6 and len({run.seed for run in runs}) == len(runs)   # of one setting
        rows.append({
            "environment": runs[0].env,             # --by env: it is the line
            "line": panel if line == runs[0].env else line, "steps": min(run.steps for run in runs),
            "seeds": len(runs), "train100": estimate(train, STATISTICS[how]),
            "eval": estimate(final, STATISTICS[how]),
            "4 of 6": estimate(train[:6] if six else np.array([np.nan]), TRIMMED)})
    return rows


def estimate(values: np.ndarray, statistic) -> tuple[float, float, float]:
    """The statistic and its interval."""
    return float(statistic(values, axis=-1)), *map(float, interval([values], statistic))


def published(groups: Groups, how: str = "mean") -> list[dict]:
    """Figures of others for the same algorithm, environment and budget, beside ours."""
    if not ANCHORS.exists():
        raise UsageError(f"--anchors: there is no {ANCHORS}; it is part of a checkout")
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
    """A cell of a text or Markdown table."""
    if isinstance(value, tuple):
        middle, low, high = map(cell, value)
        return middle if low == "-" else f"{middle} [{low}, {high}]"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def table(rows: list[dict], kind: str) -> str:
    """Rows with the same keys as text, Markdown or CSV."""
    if kind == "csv":               # an interval takes two cells more
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
    """Print the probability of improvement; the profiles of both, over what both have run."""
    both = {panel: lines for panel, lines in groups.items() if {first, second} <= set(lines)}
    if not both:
        there = ", ".join(sorted({line for _, line, _ in flat(groups)}))
        raise UsageError(f"--compare {first} {second}: no panel has finished runs of both; "
                         f"there are: {there or 'none'}")
    ours, theirs = ([np.array([run.train100 for run in lines[name]]) for lines in both.values()]
                    for name in (first, second))
    rows = []
    for panel, samples in [*zip(both, zip(ours, theirs)), ("all of these", [*ours, *theirs])]:
        value = float(improvement(*samples)), *map(float, interval(samples, improvement))
        rows.append({f"{first} beats {second}": panel, "probability (train100)": value})
    print("\n" + table(rows, kind))
    ends = [(min(*a, *b), max(*a, *b)) for a, b in zip(ours, theirs)]
    return {first: profile(ours, ends), second: profile(theirs, ends)}


def improvement(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """How often a seed of A beats one of B, a tie half; the mean over environments.

    The samples are A's in each environment, then B's in the same order.
    """
    pairs = zip(samples, samples[len(samples) // 2:])       # ends with B's
    signs = [np.sign(a[..., :, None] - b[..., None, :]).mean((-1, -2)) for a, b in pairs]
    return (np.mean(signs, axis=0) + 1) / 2


def profile(samples: list[np.ndarray], ends: list[tuple[float, float]]) -> tuple:
    """The share of seeds above each of TAUS, and its interval.

    0 is the worst seed of both lines in an environment, 1 the best.
    """
    above = [((sample - low) / max(high - low, 1e-12) > TAUS[:, None]).astype(float)
             for sample, (low, high) in zip(samples, ends)]
    return mean_of_means(*above), *interval(above, mean_of_means)


def mean_of_means(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Every environment counts the same, however many seeds it has."""
    return np.mean([sample.mean(axis) for sample in samples], axis=0)


# ---- Figures

def draw(groups: Groups, plot: Plot, compared: dict) -> Figure:
    """A panel for each environment and, where two lines are compared, one of their profiles."""
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
               xlabel="train100: 0 the worst seed, 1 the best", ylabel="share of seeds above")
    for k, ax in enumerate(axes):
        ax.grid(alpha=0.25)
        ax.set_axis_on() if k < count else ax.set_axis_off()
        if ax.lines:
            ax.legend(fontsize=8)
    kind = "one standard deviation" if plot.aggregate == "mean" else "its 95% bootstrap interval"
    figure.suptitle(f"thin: a seed; thick: the {plot.aggregate}; band: {kind}", fontsize=9)
    return figure


def draw_line(ax, runs: list[Run], name: str, look: dict, how: str, gid: str) -> None:
    """Every seed thin, all of them thick, and the band."""
    for run in runs:
        if not len(run.x):
            note(f"{run.path}: fewer rows than --smooth; not in the figure")
    runs = [run for run in runs if len(run.x)]
    if not runs:
        return
    start, end = max(run.x[0] for run in runs), min(run.end for run in runs)
    longest = max(run.end for run in runs)
    if longest > end:
        note(f"{gid}: seeds end between {end:,.6g} and {longest:,.6g}; cut to what all have")
    if start > end:
        note(f"{gid}: its seeds have no stretch in common; skipped")
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
    """What a point is the mean of."""
    stored = {run.stored for runs in lines.values() for run in runs}
    rows = "episodes" if plot.y in ("ep_ret", "ep_len") else "rows"
    means = [f"last {plot.smooth} {rows}"] * (plot.smooth > 1 and False in stored)
    means += ["1% of the steps"] * (True in stored)
    return plot.y + (f", mean of {' or '.join(means)}" if means else "")


def save(figure: Figure, out: str) -> None:
    """Text in an SVG stays text, and the same data give the same file."""
    svg = out.endswith(".svg")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "plainrl"}):
        try:
            figure.savefig(out, dpi=200, metadata={"Date": None} if svg else None)
        except OSError as error:
            raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None


def main(plot: Plot) -> None:
    """UsageError if there is nothing at all."""
    groups = group(load(plot), plot.by)
    if not groups:
        raise UsageError(f"nothing to plot in {' '.join(plot.runs) or 'no folder'}")
    done = finished(groups)
    if done:
        print(table(results(done, plot.aggregate), plot.table))
    compared = compare(done, *plot.compare, plot.table) if any(plot.compare) else {}
    others = published(done, plot.aggregate) if plot.anchors else []
    if others:
        print("\n" + table(others, plot.table))
    elif plot.anchors:
        note("--anchors: nothing is published for these runs' algorithms, environments, budgets")
    if not any(len(run.x) for _, _, runs in flat(groups) for run in runs):
        raise UsageError(f"no run has --smooth {plot.smooth} rows with {plot.y}: no figure")
    save(draw(groups, plot, compared), plot.out)
    note(f"{plot.out}: {sum(len(runs) for _, _, runs in flat(groups))} runs")


if __name__ == "__main__":
    main(tyro.cli(Plot, description=__doc__))
