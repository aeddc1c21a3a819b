"""Draw learning curves and print a table of many runs, with confidence intervals.

    python plot.py runs                           a table, and curves.svg
    python plot.py runs --aggregate iqm --smooth 10 --out curves.pdf
    python plot.py runs --by lr --table markdown  one line per value of lr
    python plot.py runs --against lr              final return against lr
    python plot.py runs --compare ppo trpo        which of the two is better?
    python plot.py runs --anchors                 beside results of others
    python plot.py runs --title "PPO on MuJoCo" --names ppo=PPO --size 8 3

Runs are found at any depth below the folders given: run directories, and files
result.json, which python -m utils.sweep --results writes. Skipped runs are
named, with the reason. Each panel of the figure shows one environment; runs
more than five times as long as others have a panel of their own. A line is
named after the settings that differ between lines; values that most lines have
are left out. Intervals are 95% percentile bootstraps over seeds, which are
resampled in each environment separately. Columns of the table:

    train100    mean return of the last 100 training episodes
    eval        mean return of deterministic episodes with the final weights
    4 of 6      mean train100 of the first six seeds, without the best and worst

--compare estimates the probability that a seed of the first line beats a seed
of the second, averaged over environments (Agarwal et al. 2021), if neither
made more than twice as many steps as the other. --anchors ranks
train100 among published training returns and eval among published evaluations,
if the numbers of steps differ by less than 10%. If there are more than ten
lines, the figure then shows one per algorithm, that nearest to the defaults.
"""
import csv
import difflib
import io
import re
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, ScalarFormatter
from scipy.stats import bootstrap, trim_mean

from utils.cli import program, read_command
from utils.curves import RunData, differing, load, note, spell
from utils.mpi import UsageError

ANCHORS = Path(__file__).resolve().parent / "benchmarks" / "anchors.csv"
SUFFIXES = (".svg", ".png", ".pdf")
# Okabe and Ito's palette for colour-blind readers, without its yellow, and three more.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
           "#882255", "#999933", "#888888"]
# Solid, dashed, dotted, then a dash with one dot, two dots, ...
DASHES = ["-", "--", ":", *((0, (5, 1.5, *(1, 1.5) * dots)) for dots in range(1, 100))]
STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.grid": True,
         "axes.spines.right": False, "grid.alpha": 0.25, "axes.axisbelow": True}
COLUMNS = {1: 1, 2: 2, 4: 2, 7: 4, 8: 4, 10: 5}     # number of panels -> columns of the figure
PANEL = {1: (6, 3.8), 2: (4.2, 3)}  # columns of the figure -> size of a panel in inches
CROWDED = 6                         # a panel with more lines than this shows no single seeds
LONG = 32                           # longest setting in a legend, in characters
FEW = 5                             # seeds on each side that a comparison needs
UNEVEN = 5                          # longest over shortest run that share a panel
STORED = 5                          # points of a stored curve that are averaged
POINTS = 100                        # points per curve
RESAMPLES = 10_000                  # of a bootstrap; a fifth of that at each point of a curve
TAUS = np.linspace(0, 1, 101)       # x-axis of a performance profile
X_AXES = {"steps": "environment steps", "episodes": "episodes", "time": "minutes"}
Y_AXES = {"ep_ret": "episode return", "ep_len": "episode length"}
PUBLISHED = "published training return"
STATISTICS = {"mean": np.mean, "median": np.median,
              # Interquartile mean. It drops whole seeds: none of 3, the best and the worst of 6.
              "iqm": partial(trim_mean, proportiontocut=0.25)}
TRIMMED = partial(trim_mean, proportiontocut=1 / 6)


@dataclass(frozen=True)
class Plot:
    # run directories, or folders that contain runs
    runs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="FOLDER ...")]]
    x: Literal["steps", "episodes", "time"] = "steps"  # the x-axis; time is in minutes
    y: str = "ep_ret"  # the y-axis: a column of episodes.csv or progress.csv; val finds val_mean
    smooth: Literal[1, 10, 100] = 100  # moving average over this many rows; fewer in short runs
    by: str = ""  # one line per value of this setting, or per algo or env; empty: all that differ
    against: str = ""  # instead of curves: final return (train100) against this setting, e.g. lr
    aggregate: Literal["mean", "median", "iqm"] = "mean"  # statistic over seeds
    compare: tuple[str, str] = ("", "")  # two lines, such as ppo trpo; it takes five seeds of each
    anchors: bool = False  # also print results published by others, and mark them in the figure
    names: tuple[str, ...] = ()  # names in the legend: ppo=PPO "ppo lr=0.1=fast", or all in order
    title: str = ""  # title of the figure
    size: tuple[float, float] = (0.0, 0.0)  # width and height in inches; 0 0: as large as needed
    table: Literal["text", "markdown", "csv"] = "text"  # format of the tables
    out: str = "curves.svg"  # file for the figure, .svg, .png or .pdf

    def __post_init__(self):
        if not self.out.endswith(SUFFIXES):
            raise UsageError(f"--out is {self.out}; it takes a name ending in {' '.join(SUFFIXES)}")
        if any(self.size) and not all(1 <= side <= 100 for side in self.size):
            raise UsageError(f"--size is {self.size[0]:g} {self.size[1]:g}; each takes 1 to 100")
        if self.against and (self.x, self.y) != ("steps", "ep_ret"):
            raise UsageError("--against draws final returns; leave out --x and --y")
        taken = next((name for name in self.names if Path(name).is_dir()), "")
        if taken and not self.runs:     # --names takes all words that follow
            raise UsageError(f"--names took the folder {taken} for a name: write folders first, as "
                             f"in plot.py {taken} --names ppo=PPO")


# ---- Which seeds belong together

Groups = dict[str, dict[str, list[RunData]]]        # panel -> line -> its seeds


def group(runs: list[RunData], by: str = "") -> Groups:
    """Return one panel per environment, with one line per algorithm and combination of settings.

    By default, all settings that differ tell lines apart. `by` names the only one that does, for
    algorithms that have it; "algo" means none. "env" gives one line per environment in panels of
    algorithm and settings.
    """
    alike, by = defaultdict(list), by.replace("-", "_")
    check_setting("--by", by, runs, "algo", "env")
    for run in sorted(runs, key=lambda run: (run.seed, not run.whole)):     # finished runs first
        alike[run.env, run.algo].append(run)
    differ = {key: differing(found) for key, found in alike.items()}
    usual = usual_values(alike, differ) if by in ("", "env") else {}
    groups = defaultdict(lambda: defaultdict(dict))
    for (env, algo), found in sorted(alike.items()):
        known = [by] if any(by in run.settings for run in found) else []
        named = {"": differ[env, algo], "env": differ[env, algo], "algo": []}.get(by, known)
        pooled = [name for name in differ[env, algo] if name not in named]
        if pooled:
            note(f"{algo} on {env}: runs that differ in {', '.join(pooled)} are pooled")
        for run in found:
            shown = [name for name in named if spell(run, name) != usual.get((algo, name))]
            line = " ".join([algo, *(f"{name}={spell(run, name)}" for name in shown)])
            seeds = groups[line][env] if by == "env" else groups[env][line]
            first = seeds.setdefault((run.seed, *(spell(run, name) for name in pooled)), run)
            if first is not run:
                note(f"{run.path}: seed {run.seed} of {line} is also in {first.path}; skipped")
    return {panel: {line: list(lines[line].values()) for line in sorted(lines, key=natural)}
            for panel, lines in sorted(groups.items())}


def check_setting(flag: str, name: str, runs: list[RunData], *more: str) -> None:
    """UsageError: no run has the setting that a flag names."""
    known = sorted(set(more).union(*(run.settings for run in runs)))
    if runs and name and name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, 3, 0.4)) or "none"
        raise UsageError(f"{flag} {name}: no run has such a setting; nearest: {near}; "
                         f"there are: {', '.join(known)}")


def usual_values(alike: dict, differ: dict) -> dict[tuple[str, str], str]:
    """Return {(algorithm, setting): value} for the values that the names of lines leave out.

    At least twice as many lines have such a value as any other. So the lines of an ablation have
    short names, and those of a grid have whole ones.
    """
    counts = defaultdict(Counter)
    for (_, algo), found in alike.items():
        names = sorted(set().union(*(differ[key] for key in alike if key[1] == algo)))
        for values in {tuple(spell(run, name) for name in names) for run in found}:
            for name, value in zip(names, values):
                counts[algo, name][value] += 1
    top = {key: count.most_common(2) for key, count in counts.items()}
    return {key: first[0] for key, (first, *others) in top.items()
            if all(first[1] >= 2 * other[1] for other in others)}


def merge(groups: Groups, name: str) -> Groups:
    """Return the groups with one line for all values of a setting."""
    merged = defaultdict(lambda: defaultdict(list))
    for panel, line, runs in flat(groups):
        setting = f" {name}={spell(runs[0], name)}"
        merged[panel.replace(setting, "")][line.replace(setting, "")] += runs
    return merged


def by_budget(groups: Groups) -> Groups:
    """Return the groups with short and long runs of an environment in panels of their own."""
    split = {}
    for panel, lines in groups.items():
        budget = {line: max(run.budget for run in runs) for line, runs in lines.items()}
        parts = []              # of lines that share a panel, the shortest runs first
        for line in sorted(budget, key=budget.get):
            if not parts or budget[line] > UNEVEN * budget[parts[-1][0]]:
                parts.append([])
            parts[-1].append(line)
        for part in parts:
            steps = EngFormatter(sep="")(float(f"{budget[part[-1]]:.2g}"))      # 1M
            name = panel if len(parts) == 1 else f"{panel}, {steps} steps"
            split[name] = {line: runs for line, runs in lines.items() if line in part}
    return split


def nearest_default(groups: Groups) -> Groups:
    """Return the groups with one line per algorithm in each panel: the nearest to the defaults.

    Of lines that are equally near, the one with most seeds is kept.
    """
    kept = []
    for lines in by_budget(groups).values():
        nearest = {}
        for seeds in sorted(lines.values(), key=lambda runs: (runs[0].changed, -len(runs))):
            nearest.setdefault(seeds[0].algo, seeds)
        kept += [run for seeds in nearest.values() for run in seeds]
    note(f"the figure shows {len(kept)} runs: one line per algorithm, nearest to the defaults")
    return group(kept)


def natural(text: str) -> list[str | float]:
    """Return a sort key that puts num_envs=2 before num_envs=16."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-\d+)?)", text)     # text and numbers alternate
    return [float(part) if k % 2 else part for k, part in enumerate(parts)]


def flat(groups: Groups) -> list[tuple[str, str, list[RunData]]]:
    """Return (panel, line, seeds) of every line."""
    return [(panel, line, runs) for panel, lines in groups.items() for line, runs in lines.items()]


# ---- Statistics

def interval(samples: list[np.ndarray], statistic, least: int = 2) -> tuple:
    """Return the two ends of the 95% bootstrap interval of a statistic of several samples.

    Seeds lie along the last axis and are resampled within each sample separately. Both ends are
    NaN if a sample has fewer than `least` seeds or lacks a value.
    """
    if not all(sample.shape[-1] >= least and np.isfinite(sample).all() for sample in samples):
        nothing = np.full(samples[0].shape[:-1], np.nan)
        return nothing, nothing
    ends = bootstrap(samples, statistic, vectorized=True, axis=-1, method="percentile",
                     n_resamples=RESAMPLES // 5 if samples[0].ndim > 1 else RESAMPLES,
                     batch=200, rng=np.random.default_rng(0))       # 200 at once, to save memory
    return ends.confidence_interval.low, ends.confidence_interval.high


def at(run: RunData, x: np.ndarray) -> np.ndarray:
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
    done, unfinished = defaultdict(dict), []
    for panel, line, runs in flat(groups):
        unfinished += [run for run in runs if not run.whole]
        if any(run.whole for run in runs):
            done[panel][line] = [run for run in runs if run.whole]
    if unfinished:
        first, more = unfinished[0], len(unfinished) - 1
        note(f"{first.path}: at step {first.steps:,} of {spell(first, 'total_steps')}"
             f"{f', and {more} more unfinished' * bool(more)}; not in the table")
    return done


def note_short_runs(groups: Groups, plot: Plot) -> None:
    """Say where train100 is the mean over most of a run, rather than what it ended with."""
    short = [run for _, _, runs in flat(groups) for run in runs
             if not run.stored and len(run.x) and run.x[-100:][0] < run.end / 2]
    if plot.y == "ep_ret" and short:
        note(f"{short[0].path}: the last 100 episodes are more than half of the run"
             f"{f', as of {len(short) - 1} more' * (len(short) > 1)}; train100 lags behind the "
             "end of such a curve")


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
    """Return the statistic and the two ends of its interval, NaN for fewer than three values."""
    return float(statistic(values, axis=-1)), *map(float, interval([values], statistic, 3))


def published(groups: Groups) -> list[tuple[str, str, list[RunData], list[dict]]]:
    """Return (panel, line, its seeds, rows of anchors.csv) for each line with published results.

    Their algorithm and environment are ours, and their number of steps within 10%.
    """
    if not ANCHORS.exists():
        raise UsageError(f"--anchors needs {ANCHORS}, which comes with a clone of the repository")
    anchors = list(csv.DictReader(ANCHORS.read_text(encoding="utf-8").splitlines()))
    found = []
    for panel, line, (run, *_) in flat(groups):
        rows = [row for row in anchors if row["algo"].lower() == run.algo
                and row["env"] == run.env.rpartition("-v")[0]
                and abs(float(row["budget_steps"]) / run.steps - 1) < 0.1]
        if rows:
            found.append((panel, line, groups[panel][line], rows))
    return found


def of_training(anchor: dict) -> bool:
    """Return whether a published result is of training episodes; else it is of evaluations."""
    return anchor["metric"].startswith("train")


def ranked(runs: list[RunData], anchors: list[dict], how: str) -> list[dict]:
    """Return table rows: train100 among published returns, eval among evaluations, best first."""
    rows = []
    for kind, name in (("train", "train100"), ("eval", "eval")):
        theirs = [row for row in anchors if of_training(row) == (kind == "train")]
        ours = np.array([getattr(run, name) for run in runs], dtype=float)
        here = [{"measure": f"{kind}: {row['measure']}", "mean": float(row["mean"]),
                 "spread": float(row["spread"] or "nan"), "seeds": row["seeds"] or "-",
                 "steps": int(row["budget_steps"]), "env": row["env_version"],
                 "source": row["source"]} for row in theirs]
        here.append({"measure": name, "mean": float(STATISTICS[how](ours, axis=-1)),
                     "spread": float(ours.std(ddof=1)) if len(ours) > 1 else np.nan,
                     "seeds": str(len(ours)), "steps": min(run.steps for run in runs),
                     "env": "v" + runs[0].env.rpartition("-v")[2],
                     "source": "ours" if how == "mean" else f"ours ({how})"})
        rows += sorted(here, key=lambda row: -row["mean"]) if theirs else []   # a NaN stays last
    return rows


def print_anchors(found: list, how: str, kind: str) -> None:
    """Print published results and ours: in text, one table per line, of at most 120 columns."""
    tables = {(panel if line == runs[0].env else line, runs[0].env): ranked(runs, rows, how)
              for panel, line, runs, rows in found}
    if kind == "text":
        for (line, env), rows in tables.items():
            print(f"\n{line} on {env}, ours and published\n{table(rows, kind, 120)}")
    else:
        print("\n" + table([{"environment": env, "line": line} | row
                            for (line, env), rows in tables.items() for row in rows], kind))


def cell(value) -> str:
    """Return a value as a cell of a text or Markdown table."""
    if isinstance(value, tuple):
        middle, low, high = map(cell, value)
        return middle if low == "-" else f"{middle} [{low}, {high}]"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def table(rows: list[dict], kind: str, most: int = 10_000) -> str:
    """Return rows, which all have the same keys, as text, Markdown or CSV.

    In text of more than `most` columns, the widest cells are cut.
    """
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
    while sum(widths) + 2 * len(widths) - 2 > most:
        widths[widths.index(max(widths))] -= 1
    cells = [[text if len(text) <= width else text[:width - 3] + "..."
              for text, width in zip(row, widths)] for row in cells]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


# ---- Two lines compared

def compare(groups: Groups, first: str, second: str, kind: str = "text") -> dict:
    """Print how likely `first` beats `second` in panels that have both; return their profiles."""
    both = {panel: lines for panel, lines in groups.items() if {first, second} <= set(lines)}
    for panel, lines in list(both.items()):
        steps = {name: min(run.steps for run in lines[name]) for name in (first, second)}
        if max(steps.values()) > 2 * min(steps.values()):
            note(f"{panel}: not compared, since {first} has {steps[first]:,} steps and {second} "
                 f"{steps[second]:,}")
            del both[panel]
    if not both:
        there = ", ".join(sorted({line for _, line, _ in flat(groups)}))
        raise UsageError(f"--compare {first} {second}: no panel has comparable runs of both; "
                         f"finished lines: {there or 'none'}")
    ours, theirs = ([np.array([run.train100 for run in lines[name]]) for lines in both.values()]
                    for name in (first, second))
    rows = [compare_row(panel, [a], [b], first, second) for panel, a, b in zip(both, ours, theirs)]
    if len(both) > 1:
        rows.append(compare_row("mean over panels", ours, theirs, first, second))
    print("\n" + table(rows, kind))
    ends = [(min(*a, *b), max(*a, *b)) for a, b in zip(ours, theirs)]
    return {first: profile(ours, ends), second: profile(theirs, ends)}


def compare_row(panel: str, ours: list, theirs: list, first: str, second: str) -> dict:
    """Return one row: the probability that `first` is better, its interval, and what follows.

    There is no interval for fewer than FEW seeds, nor for samples that do not overlap, of which
    every resample gives 0 or 1.
    """
    few = {name: FEW - min(map(len, side)) for name, side in ((first, ours), (second, theirs))}
    missing = [f"{count} more of {name}" for name, count in few.items() if count > 0]
    low, high = map(float, interval([*ours, *theirs], improvement, FEW))
    better = first if low > 0.5 else second if high < 0.5 else "no difference shown"
    low, high = (low, high) if low < high else (np.nan, np.nan)
    return {f"{first} beats {second}": panel,
            "probability (train100)": (float(improvement(*ours, *theirs)), low, high),
            "seeds": " ".join(f"{len(a)}+{len(b)}" for a, b in zip(ours, theirs)),
            "better": f"too few seeds: needs {' and '.join(missing)}" if missing else better}


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
    return mean_of_means(*above), *interval(above, mean_of_means, FEW)


def mean_of_means(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the mean over seeds, averaged over environments, which all count the same."""
    return np.mean([sample.mean(axis) for sample in samples], axis=0)


# ---- Figures

@matplotlib.rc_context(STYLE)
def draw(groups: Groups, plot: Plot, compared: dict, others: list = ()) -> Figure:
    """Return a figure: one panel per environment, one for the profiles if any, one legend.

    `others` is what `published` returned. Training returns among it are marked.
    """
    groups = merge(groups, plot.against) if plot.against else groups
    looks, count = looks_of(groups), len(groups) + bool(compared)
    columns = COLUMNS.get(count, 3 if count < 10 else 4)
    width, height = PANEL.get(columns, (3.2, 2.5))
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, k + 1) for k in range(count)]
    windows = {}                # panel -> number of rows over which its curves are smoothed
    for k, (ax, (panel, lines)) in enumerate(zip(axes, groups.items())):
        if plot.against:
            draw_against(ax, lines, looks, plot, panel)
        else:
            windows[panel] = draw_curves(ax, lines, looks, plot, panel)
            mark_published(ax, lines, looks, plot, others)
        in_thousands(ax)
        ax.set_title(textwrap.fill(label(panel), int(11 * width)))
        if k % columns:                 # the panel to its left has the same
            ax.set_ylabel("")
        if k + columns < len(groups):   # the panel below has the same
            ax.set_xlabel("")
    if compared:
        draw_profiles(axes[-1], compared, looks)
    add_legend(figure, groups, looks, plot, explain(groups, plot, windows))
    return figure


def looks_of(groups: Groups) -> dict[str, dict]:
    """Return a colour and dashes for each line, the same in every panel. No two lines share both.

    Each line has its own colour. But colours stand for algorithms and dashes for their lines if
    there are too many lines, or two lines for most algorithms: ours and a peer's.
    """
    algos = {line: line if line == runs[0].env else runs[0].algo.split()[-1]
             for _, line, runs in flat(groups)}
    families = defaultdict(list)
    for line in sorted(algos, key=lambda line: (line.split()[0] != algos[line], natural(line))):
        families[algos[line]].append(line)      # the plain one is first
    n = len(COLOURS)
    pairs = max(map(len, families.values())) == 2 and len(algos) > 1.5 * len(families)
    if 1 < len(families) <= n and (pairs or len(algos) > n):
        places = {line: (k, j) for k, algo in enumerate(sorted(families))
                  for j, line in enumerate(families[algo])}
    else:
        places = {line: (k % n, k // n) for k, line in enumerate(sorted(algos, key=natural))}
    return {line: {"color": COLOURS[k], "linestyle": DASHES[j]} for line, (k, j) in places.items()}


def label(text: str) -> str:
    """Return the name of a line or panel as the figure shows it: 100k for 100000, and shorter."""
    text = re.sub(r"\b[\w.]+:(?=\w+-v\d)", "", text)                # the module of an environment
    text = re.sub(r"{([^{}]+)}", r"\1", text.replace('"', ""))      # of a JSON object
    text = re.sub(r"(?<=\d)000\b", "k", re.sub(r"(?<=\d)000000\b", "M", text))
    return " ".join(word if len(word) <= LONG else f"{word[:LONG // 2]}...{word[3 - LONG // 2:]}"
                    for word in text.split())


def draw_curves(ax, lines: dict, looks: dict, plot: Plot, panel: str) -> int:
    """Draw all lines of a panel. Return the number of rows over which they are smoothed.

    That is --smooth, or 10 or 1 if a run has fewer than four times as many rows. It is 0 if all
    runs are stored ones, which have one row per 1% of the steps.
    """
    lengths = [len(run.y) for runs in lines.values() for run in runs if not run.stored]
    window = max([1, *(w for w in (10, plot.smooth) if 4 * w <= min(lengths, default=0)
                       and w <= plot.smooth)])
    for line, runs in lines.items():
        runs = [smoothed(run, stored_window(plot) if run.stored else window) for run in runs]
        draw_line(ax, runs, line, looks[line], plot.aggregate, f"{panel}, {line}",
                  len(lines) > CROWDED)
    ax.set(xlabel=X_AXES[plot.x], ylabel=Y_AXES.get(plot.y, plot.y), xlim=(0, None))
    return window if lengths else 0


def smoothed(run: RunData, window: int) -> RunData:
    """Return the run with means of `window` successive values. Each stands at the last of them."""
    window = min(window, len(run.y))
    means = np.lib.stride_tricks.sliding_window_view(run.y, window).mean(-1)
    return run._replace(x=run.x[window - 1:], y=means)


def stored_window(plot: Plot) -> int:
    """Return the number of points of a stored curve that are averaged."""
    return STORED if plot.smooth > 1 else 1


def in_thousands(ax) -> None:
    """Write ticks as 2k or 1.5M on each axis that reaches 1,000, unless its ticks are set."""
    for axis in (ax.xaxis, ax.yaxis):
        reach = max(map(abs, axis.get_view_interval()))
        if reach >= 1000 and isinstance(axis.get_major_formatter(), ScalarFormatter):
            axis.set_major_formatter(EngFormatter(sep=""))


def draw_line(ax, runs: list, name: str, look: dict, how: str, gid: str, crowded: bool) -> None:
    """Draw each seed thin, unless the panel is crowded, the statistic thick, and the band."""
    start, end = max(run.x[0] for run in runs), min(run.end for run in runs)
    longest = max(run.end for run in runs)
    if longest > end:
        note(f"{gid}: seeds end between {end:,.6g} and {longest:,.6g}; all are cut at {end:,.6g}")
    if start > end:
        note(f"{gid}: its seeds do not overlap on the x-axis; not in the figure")
        return
    x = np.linspace(start, end, POINTS)
    y = np.stack([at(run, x) for run in runs], -1)      # [POINTS, seeds]
    for run, seed in zip(runs, y.T):
        if not crowded:
            ax.plot(x, seed, **look, linewidth=0.6, alpha=0.4, gid=f"{gid}, seed {run.seed}")
    centre, low, high = band(y, how)
    ax.plot(x, centre, **look, linewidth=1.8, label=name, gid=f"{gid}, {how}")
    if not np.isnan(low).any():
        seen = ax.dataLim.frozen()
        ax.fill_between(x, low, high, color=look["color"], alpha=0.08 if crowded else 0.15,
                        linewidth=0, gid=f"{gid}, band")
        ax.dataLim.set(seen)    # where a band goes beyond all seeds, it does not stretch the axis
        ax.update_datalim([(start, max(low.min(), y.min())), (end, min(high.max(), y.max()))])


def mark_published(ax, lines: dict, looks: dict, plot: Plot, others: list) -> None:
    """Mark published training returns at their number of steps, in the colour of our line."""
    line_of = {run.path: line for line, runs in lines.items() for run in runs}
    for _, _, runs, rows in others:
        rows = [row for row in rows if of_training(row)]
        line = line_of.get(runs[0].path)
        if rows and line and (plot.x, plot.y) == ("steps", "ep_ret"):
            ax.plot([float(row["budget_steps"]) for row in rows],
                    [float(row["mean"]) for row in rows], "D", markersize=4, alpha=0.8,
                    color=looks[line]["color"], markerfacecolor="none", label=PUBLISHED)


def draw_against(ax, lines: dict, looks: dict, plot: Plot, panel: str) -> None:
    """Draw train100 against the values of a setting: a dot for each seed, a bar for the interval.

    Positive numbers stand on an axis, a logarithmic one over a factor of 10. Other values are
    evenly spaced.
    """
    values = sorted({spell(run, plot.against) for runs in lines.values() for run in runs},
                    key=natural)
    try:
        places = {value: float(value) for value in values}
    except ValueError:
        places = {}
    numbers = min(places.values(), default=0) > 0
    if not numbers:
        places = {value: k for k, value in enumerate(values)}
    elif max(places.values()) >= 10 * min(places.values()):
        ax.set_xscale("log")
    for k, (line, runs) in enumerate(lines.items()):
        aside, rows = 0 if numbers else 0.08 * (k - (len(lines) - 1) / 2), []    # side by side
        for value, x in places.items():
            seeds = np.array([run.train100 for run in runs if spell(run, plot.against) == value])
            if len(seeds):
                ax.plot(np.full(len(seeds), x + aside), seeds, ".", color=looks[line]["color"],
                        alpha=0.4, markersize=5)
                rows.append((x + aside, *estimate(seeds, STATISTICS[plot.aggregate])))
        x, middle, low, high = np.array(rows).T
        bars = np.clip([middle - low, high - middle], 0, None)      # not below 0 by rounding
        ax.errorbar(x, middle, bars, **looks[line], linewidth=1.8, elinewidth=1, capsize=2,
                    marker="o", markersize=4, label=line, gid=f"{panel}, {line}, {plot.aggregate}")
    ax.set_xticks(list(places.values()), [label(value.replace("e-0", "e-")) for value in values],
                  rotation=30 * (sum(map(len, values)) > 35))
    ax.minorticks_off()
    ax.margins(x=0.1)
    ax.set(xlabel=plot.against, ylabel="final return (train100)")


def draw_profiles(ax, compared: dict, looks: dict) -> None:
    """Draw the performance profiles of two lines."""
    for name, (share, low, high) in compared.items():
        ax.plot(TAUS, share, **looks[name], linewidth=1.8, label=name, gid=f"profile, {name}")
        ax.fill_between(TAUS, low, high, color=looks[name]["color"], alpha=0.15, linewidth=0)
    bands = any(np.isfinite(low).all() for _, low, _ in compared.values())
    ax.set(title=f"performance profile{', 95% intervals' * bands}",
           xlabel="train100, scaled: worst seed 0, best 1", ylabel="fraction of seeds above")


def explain(groups: Groups, plot: Plot, windows: dict[str, int]) -> str:
    """Return the text above the legend: what lines and bands are, and what each point is."""
    if plot.against:
        return (f"dot: a seed; circle: the {plot.aggregate}; bar: its 95% bootstrap interval, for "
                "three seeds or more")
    parts = []
    if any(len(runs) > 1 for _, _, runs in flat(groups)):
        parts += ["thin: a seed"] * any(len(lines) <= CROWDED for lines in groups.values())
        parts += [f"thick: the {plot.aggregate}", "band: one standard deviation"
                  if plot.aggregate == "mean" else "band: its 95% bootstrap interval"]
    row, points = "episode" if plot.y in ("ep_ret", "ep_len") else "row", []
    for window in sorted(set(windows.values()) - {0}) if plot.smooth > 1 else []:
        there = [panel for panel in windows if windows[panel] == window]
        where = f" in {', '.join(there)}" if len(there) < len(windows) else ""
        few = f" (too few for {plot.smooth}{where})" if window < plot.smooth else ""
        points.append((f"mean of {window} {row}s" if window > 1 else f"one {row}") + few)
    if any(run.stored for _, _, runs in flat(groups) for run in runs):
        points.append(f"mean of {stored_window(plot)}% of the steps")
    parts += [f"each point: {' or '.join(points)}"] * bool(points)
    return "; ".join(parts)


def add_legend(figure: Figure, groups: Groups, looks: dict, plot: Plot, text: str) -> None:
    """Put one legend below the panels, or to the right of a single one, and make room for it."""
    width, height = plot.size if any(plot.size) else figure.get_size_inches()
    right = len(figure.axes) == 1 and len(looks) > CROWDED and not any(plot.size)
    room = 70 if right else int(16 * width)     # in characters
    handles = handles_of(figure, groups, looks, plot, room - 10)
    lines = [line for handle in handles for line in handle.get_label().split("\n")]
    widest = max(map(len, lines), default=0) + 10
    columns = 1 if right else max(1, min(len(handles), room // widest))
    rows = -(-len(lines) // columns)
    text = textwrap.fill(text, widest if right else room)
    legend = figure.legend(handles=handles, loc=f"outside {'right' if right else 'lower'} center",
                           ncols=columns, fontsize=8, frameon=False, handlelength=3, title=text,
                           title_fontsize=8)
    legend.get_title().set_multialignment("center")
    if plot.title:
        figure.suptitle(plot.title, fontsize=12)
    if not any(plot.size):
        tall = 0.17 * (rows + text.count("\n") + 1) + 0.2       # inches
        width += widest / 16 if right else 0
        height = (max(height, tall) if right else height + tall) + 0.3 * bool(plot.title)
    figure.set_size_inches(width, height)


def handles_of(figure: Figure, groups: Groups, looks: dict, plot: Plot, room: int) -> list[Line2D]:
    """Return the entries of the legend: all lines that are drawn, with their numbers of seeds."""
    seeds, names = defaultdict(set), legend_names(list(looks), plot.names)
    for _, line, runs in flat(groups):      # with --against, the seeds of each value
        seeds[line] |= set(Counter(spell(run, plot.against) for run in runs).values())
    drawn = {name for ax in figure.axes for name in ax.get_legend_handles_labels()[1]}
    handles = []
    for line in filter(drawn.__contains__, looks):
        count = " to ".join(map(str, sorted({min(seeds[line]), max(seeds[line])})))
        name = f"{names[line]} ({count}\xa0seed{'s' * (count != '1')})"     # no break before seeds
        name = textwrap.fill(name, room).replace("\xa0", " ")
        handles.append(Line2D([], [], **looks[line], linewidth=1.8, label=name))
    if PUBLISHED in drawn:
        handles.append(Line2D([], [], marker="D", markersize=4, color="#888888", linestyle="none",
                              markerfacecolor="none", label=PUBLISHED))
    return handles


def legend_names(lines: list[str], names: tuple[str, ...]) -> dict[str, str]:
    """Return {line: its name in the legend}. --names holds old=new, or a name for each line."""
    short = Counter(map(label, lines))
    shown = {line: label(line) if short[label(line)] == 1 else line for line in lines}
    pairs = {old: new for old, _, new in (text.rpartition("=") for text in names)}
    if pairs.keys() <= set(lines):
        return shown | pairs
    if len(names) == len(lines) and not pairs.keys() & set(lines):
        return dict(zip(lines, names))
    raise UsageError(f"--names {' '.join(names)}: it takes old=new, or a name for each of the "
                     f"{len(lines)} lines: {', '.join(lines)}")


def save(figure: Figure, out: str) -> None:
    """Write the figure. Text in an SVG stays text, and the same data give the same file."""
    date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(out).suffix)
    fonts = {"svg.fonttype": "none", "svg.hashsalt": "plainrl", "pdf.fonttype": 42}
    with matplotlib.rc_context(fonts), warnings.catch_warnings():
        warnings.filterwarnings("error", "constrained_layout not applied")
        try:
            figure.savefig(out, dpi=200, metadata=date)
        except OSError as error:
            raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None
        except UserWarning:
            raise UsageError("--size is too small for these panels and their legend") from None


def main(plot: Plot) -> None:
    """Read runs, print tables, write the figure. UsageError: there is no run, or no curve."""
    plot = replace(plot, against=plot.against.replace("-", "_"))
    runs = load(plot)
    check_setting("--against", plot.against, runs)
    groups = group(runs, plot.by)
    if not groups:
        raise UsageError(f"no run to plot; folders given: {' '.join(plot.runs) or 'none'}")
    done = finished(groups)
    if plot.against and len({spell(run, plot.against) for _, _, runs in flat(done)
                             for run in runs}) < 2:
        raise UsageError(f"--against {plot.against}: finished runs have no two values of it")
    if done:
        print(table(results(done, plot.aggregate), plot.table))
        note_short_runs(done, plot)
    compared = compare(done, *plot.compare, plot.table) if any(plot.compare) else {}
    others = published(done) if plot.anchors else []
    if others:
        print_anchors(others, plot.aggregate, plot.table)
    elif plot.anchors:
        note("--anchors: no published results for these algorithms, environments and steps")
    if plot.against:
        groups, compared = done, {}
    elif plot.x == "steps":
        many = len({line for _, line, _ in flat(groups)}) > len(COLOURS)
        few = others and many and not (plot.by or compared)
        groups = by_budget(nearest_default(groups) if few else groups)
    save(draw(groups, plot, compared, others), plot.out)
    count = sum(len(runs) for _, _, runs in flat(groups))
    note(f"{plot.out}: {count} run{'s' * (count != 1)}")


def parse(args: list[str]) -> Plot:
    """Return the Plot of a command line. Without any arguments, print the help."""
    return read_command(Plot, __doc__, "python plot.py", args or ["--help"])


if __name__ == "__main__":
    with program():
        main(parse(sys.argv[1:]))
