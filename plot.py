"""Draw learning curves of many runs, and print a table of their final returns.

    python -m plot runs                        a table, and curves.svg
    python -m plot runs --x time --smooth 10   minutes, means of 10 episodes
    python -m plot runs --by lr                one line per value of lr
    python -m plot runs --rows num_envs --smooth 1 10 100     a grid of panels
    python -m plot runs --compare my_ppo ppo   does my_ppo beat ppo?
    python -m plot runs --anchors              beside published results

Each environment and each number of total_steps has its own panel. A line is named
after the settings that differ, except for values that two thirds of the runs have.
Unfinished runs are in no table, and in a line only while none of it has finished.
--compare follows Agarwal et al. (2021); its interval needs five seeds of each line.
"""
import json
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from scipy.stats import bootstrap, trim_mean

from utils.errors import UsageError
from utils.files import read_columns, read_table
from utils.returns import curve, ends_at
from utils.roles import PLACE, ROUNDING, WATCH
from utils.command import as_text, program, read_command

ANCHORS = Path(__file__).resolve().parent / "benchmarks" / "anchors.csv"
# Okabe and Ito's palette for colour-blind readers, grey instead of its yellow.
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #888888".split()
STYLE = {"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
         "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25, "pdf.fonttype": 42,
         "svg.fonttype": "none", "svg.hashsalt": "plainrl"}     # text stays text; files reproduce
FEWEST = 5              # training episodes in the last tenth, for a mean at the end
FEW, ENOUGH = 3, 5      # the fewest seeds for the interval of a mean, and of a comparison
AXES = {"steps": "environment steps", "time": "minutes", "ep_ret": "episode return"}
LEGEND = f"""\
train: mean return in the last tenth of the steps, where each hundredth of the steps counts once
eval: mean return of the final policy without exploration noise
-: fewer than {FEWEST} episodes there, or no evaluation: python -m utils.sweep --results FOLDER
[a, b]: 95% percentile bootstrap over seeds; *: fewer than {FEW} seeds, so no interval, no claim"""
STATISTICS = {"mean": np.mean,      # iqm drops whole seeds: none of 3, the best and worst of 6
              "iqm": lambda values, axis=0: trim_mean(values, 0.25, axis)}


@dataclass(frozen=True)
class Plot:
    runs: tuple[str, ...]  # folders that hold runs, at any depth
    x: Literal["steps", "episodes", "time"] = "steps"  # the x-axis; time: minutes of training
    y: str = "ep_ret"  # the y-axis: a column of episodes.csv or progress.csv; val finds val_mean
    smooth: tuple[Literal[1, 10, 100], ...] = (100,)  # moving average: at most a tenth of a run
    rows: str = ""  # a setting, or algo; each of its values has its own panels
    by: str = ""  # the setting that tells lines apart; others get panels; default: all tell them
    aggregate: Literal["mean", "iqm"] = "mean"  # over seeds; iqm: interquartile mean
    compare: tuple[str, str] = ("", "")  # two lines of the table, such as my_ppo ppo
    anchors: bool = False  # tell published training returns after as many steps; draw them dotted
    out: str = ""  # the figure, .svg, .png or .pdf; default: curves.svg, or a new curves-2.svg, ...


# ---- Reading runs

class RunData(NamedTuple):
    """One seed: its curve, where the run ends on the x-axis, and its final results."""
    path: Path
    algo: str           # after the library's name, if it is not plainrl
    env: str
    seed: int
    settings: dict
    x: np.ndarray
    y: np.ndarray
    end: float
    steps: int
    total_steps: float  # that the run was to make
    train: float        # NaN if too few training episodes ended late
    eval: float         # NaN if there is none
    code: str = ""      # a hash of it, if the run has one


def load(plot: Plot) -> list[RunData]:
    """Return all runs below the folders plot.runs. UsageError: there is none that can be read."""
    runs, skipped = [], defaultdict(list)       # reason -> folders
    for folder in map(Path, plot.runs):
        found = sorted(folder.rglob("config.json"))
        if not found:
            skipped["no run in it (no config.json)"].append(str(folder))
        for path in found:
            try:
                runs.append(read_run(path.parent, plot.x, plot.y))
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                reason = error if isinstance(error, UsageError) else "a file is missing or damaged"
                skipped[str(reason)].append(str(path.parent))
    said = [f"{reason}: {', '.join(folders)}" for reason, folders in skipped.items()]
    if not runs:
        raise UsageError(f"no run to plot; {'; '.join(said) or 'name a folder that holds runs'}")
    sys.stderr.writelines(f"skipped; {line}\n" for line in said)
    return runs


def read_run(folder: Path, x: str, y: str) -> RunData:
    """Return the run in a run directory, with its last evaluation, if any."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = config["settings"] | {"algo": config["algo"]}
    progress, episodes = (read_columns(folder / name) for name in ("progress.csv", "episodes.csv"))
    files = {name: columns for columns in (progress, episodes) for name in columns}
    name = y if y in files else f"{y}_mean"
    if name not in files:
        like = [name for name in files if y in name] or get_close_matches(y, files) or files
        raise UsageError(f"--y {y}: no such column, but {', '.join(like)}")
    step, value = files[name]["step"], files[name][name]
    there = np.isfinite(value)          # a report may lack some quantities
    if not there.any() or not len(progress["step"]):
        raise UsageError(f"no value of {name} yet; --y draws other columns of progress.csv")
    steps, ended = int(progress["step"][-1]), episodes["step"]
    axis = {"steps": lambda step: step,
            "episodes": lambda step: np.searchsorted(ended, step, side="right").astype(float),
            # Episodes only know when they were reported. Between reports, time grows with steps.
            "time": lambda step: np.interp(step, [0, *progress["step"]],
                                           [0, *progress["time"] / 60])}[x]
    enough = (ended > 0.9 * steps).sum() >= FEWEST
    train = ends_at(curve(ended, episodes["ep_ret"], steps), steps) if enough else np.nan
    final = progress.get("eval_ret_mean", [np.nan])[-1]     # --eval-every also evaluates at the end
    if (folder / "result.json").exists():
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if result.get("steps", steps) == steps:             # else the run was resumed since
            final = float(np.mean(result["eval"]))
    return RunData(folder, config["algo"], str(settings["env"]), int(settings["seed"]), settings,
                   axis(step[there]), value[there], float(axis(steps)), steps,
                   float(settings["total_steps"]),
                   train, final,
                   config.get("code", "") + "".join(map(str, folder.glob("algo-until-*.py"))))


# ---- Which seeds belong together

def group(runs: list[RunData], by: str = "", rows: str = "") -> dict[str, dict[str, list[RunData]]]:
    """Return {panel: {line: its seeds}}. Lines differ in `by`, or in all settings that differ.

    With `by`, each value of another setting has its own panels: only seeds are averaged.
    """
    known = {""}.union(*(run.settings for run in runs))
    for flag, name in (("--by", by), ("--rows", rows)):
        if name not in known:
            raise UsageError(f"{flag} {name}: no such setting; there are{' '.join(sorted(known))}")
    alike, groups = defaultdict(list), defaultdict(lambda: defaultdict(dict))
    others = defaultdict(set)                   # env -> the settings that differ, but for `by`
    for run in sorted(runs, key=lambda run: (run.seed, run.steps < run.total_steps)):
        alike[run.env, run.algo].append(run)        # of a seed, finished runs first
    for (env, _), found in alike.items() if by else ():
        others[env] |= {*differing(found, found, PLACE | ROUNDING | WATCH)} - {by, "total_steps"}
    for (env, algo), found in alike.items():
        totals = [run.total_steps for run in runs if run.env == env]
        uneven = max(totals) > 1.05 * min(totals)       # some libraries round them up a little
        apart = ({rows, "total_steps"} - {by} if uneven else {rows}) - {""}
        leave = (PLACE | ROUNDING | WATCH | apart) - {by}
        differ = differing(found, [run for run in runs if run.algo == algo], leave)
        apart |= others[env]
        for run in found:
            named = [name for name in sorted(differ)
                     if name == by or not by and spell(run, name) != differ[name]]
            line = " ".join([algo, *(f"{name}={spell(run, name)}" for name in named)])
            panel = ", ".join([env, *(f"{name}={spell(run, name)}" for name in sorted(apart))])
            seed = run.seed, *(spell(run, name) for name in sorted(differ))
            first = groups[panel][line].setdefault(seed, run)
            if first is not run:
                print(f"{run.path}: seed {run.seed} of {line} is also in {first.path}; skipped",
                      file=sys.stderr)
    for panel, lines in groups.items():
        for line, seeds in lines.items():
            if len({run.code for run in seeds.values()} - {""}) > 1:
                print(f"{panel}: the seeds of {line} are of different code", file=sys.stderr)
    return {panel: {line: near([*lines[line].values()]) for line in sorted(lines, key=natural)}
            for panel, lines in sorted(groups.items(), key=lambda item: natural(item[0]))}


def near(runs: list[RunData]) -> list[RunData]:
    """Return the finished seeds; without any, those 90% as far as the furthest. Name the others."""
    kept = ([run for run in runs if run.steps >= run.total_steps]
            or [run for run in runs if run.steps >= 0.9 * max(other.steps for other in runs)])
    for run in runs:
        if run.steps < run.total_steps:
            print(f"{run.path}: unfinished, at step {run.steps:,} of {run.total_steps:,.0f}; "
                  f"{'drawn, but in no table' if run in kept else 'left out'}", file=sys.stderr)
    return kept


def differing(runs: list[RunData], of_algo: list[RunData], leave: set[str]) -> dict[str, str]:
    """Return the settings in which runs differ, each with the value that two thirds have, or ""."""
    differ = {}
    for name in set().union(*(run.settings for run in runs)) - leave:
        value, times = Counter(spell(run, name) for run in of_algo).most_common(1)[0]
        # A run that lacks a setting is of another version, and does not differ in it.
        if len({spell(run, name) for run in runs if name in run.settings}) > 1:
            differ[name] = value if 3 * times >= 2 * len(of_algo) else ""
    return differ


def spell(run: RunData, name: str) -> str:
    """Return the value of a setting as text: 64-64 for a list, 1000 for 1000.0."""
    return as_text(run.settings.get(name, "default"), "-")


def natural(text: str) -> list[str | float]:
    """Return a sort key that puts num_envs=2 before num_envs=16."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-\d+)?)", text)     # text and numbers alternate
    return [float(part) if k % 2 else part for k, part in enumerate(parts)]


def flat(groups: dict) -> list[tuple[str, str, list[RunData]]]:
    """Return (panel, line, seeds) of every line."""
    return [(panel, line, runs) for panel, lines in groups.items() for line, runs in lines.items()]


# ---- Statistics and tables

def interval(samples: list[np.ndarray], statistic, least: int = 2):
    """Return both ends of the 95% bootstrap interval of a statistic of several samples.

    Seeds lie along the last axis. NaN if a sample has fewer than `least` seeds or lacks a value.
    """
    if not all(sample.shape[-1] >= least and np.isfinite(sample).all() for sample in samples):
        return np.full((2, *samples[0].shape[:-1]), np.nan)
    ends = bootstrap(samples, statistic, vectorized=True, axis=-1, method="percentile",
                     n_resamples=2000 if samples[0].ndim > 1 else 10_000,   # fewer for many samples
                     batch=200, rng=np.random.default_rng(0))       # 200 at once, to save memory
    return ends.confidence_interval.low, ends.confidence_interval.high


def estimate(values: np.ndarray, statistic) -> tuple[float, float, float]:
    """Return the statistic and the two ends of its interval, NaN for fewer than FEW values."""
    return float(statistic(values, axis=-1)), *map(float, interval([values], statistic, FEW))


def improvement(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the probability that a seed of A beats a seed of B, averaged over environments.

    The samples are A's, one per environment, then B's in the same order. A tie counts as one half.
    """
    pairs = zip(samples, samples[len(samples) // 2:])       # zip stops after B's last
    signs = [np.sign(a[..., :, None] - b[..., None, :]).mean((-1, -2)) for a, b in pairs]
    return (np.mean(signs, axis=0) + 1) / 2


def results(groups: dict, plot: Plot) -> list[dict]:
    """Return one table row per line. Few seeds are marked, and support no claim."""
    rows = []
    for panel, line, runs in flat(groups):
        row = {"panel": panel, "line": line, "steps": min(run.steps for run in runs),
               "seeds": f"{len(runs)}{'*' * (len(runs) < FEW)}"}
        row |= {name: estimate(np.array([getattr(run, name) for run in runs]),
                               STATISTICS[plot.aggregate]) for name in ("train", "eval")}
        if plot.anchors:
            theirs = published(runs[0].env, runs[0].algo, runs[0].total_steps, training=True)
            row["best in anchors.csv"] = f"{cell(theirs[0][0])} ({theirs[0][1]})" if theirs else "-"
        rows.append(row)
    return rows


def compare(groups: dict, first: str, second: str) -> list[dict]:
    """Return a row per panel that has both lines, and one for all: how probably does first win?"""
    both = [panel for panel, lines in groups.items() if {first, second} <= set(lines)]
    if not both:
        lines = ", ".join(sorted({line for _, line, _ in flat(groups)}))
        raise UsageError(f"--compare {first} {second}: no panel has finished runs of both; {lines}")
    rows = []
    for panels in [[panel] for panel in both] + [both] * (len(both) > 1):
        a, b = ([groups[panel][line] for panel in panels] for line in (first, second))
        where = panels[0] if len(panels) == 1 else f"average over {len(panels)} panels"
        row = {f"P({first} > {second})": where, "seeds": f"{sum(map(len, a))}, {sum(map(len, b))}"}
        for name in ("train", "eval"):
            samples = [np.array([getattr(run, name) for run in runs]) for runs in a + b]
            value = float(improvement(*samples)) if min(map(len, a + b)) >= FEW else np.nan
            row[name] = value, *map(float, interval(samples, improvement, ENOUGH))
        rows.append(row)
    return rows


def cell(value) -> str:
    """Return a value as a cell of a table. An interval of width 0 says nothing."""
    if isinstance(value, tuple):
        middle, low, high = map(cell, value)
        return middle if low == "-" or value[1] == value[2] else f"{middle} [{low}, {high}]"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def table(rows: list[dict]) -> str:
    """Return rows, which all have the same keys, as a Markdown table with straight columns."""
    cells = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells)


def published(env: str, algo: str, steps: float, training: bool) -> list[tuple[float, str, str]]:
    """Return (mean, source, measure) of others' training or evaluation returns, best first."""
    return sorted(((float(row["mean"]), row["source"], row["measure"])
                   for row in read_table(ANCHORS.parent, ANCHORS.name)
                   if (row["algo"].lower(), row["env"]) == (algo, env.rpartition("-v")[0])
                   and row["metric"].startswith("train") == training
                   and abs(float(row["budget_steps"]) / steps - 1) < 0.05), reverse=True)


# ---- Figures

@matplotlib.rc_context(STYLE)
def draw(groups: dict, plot: Plot) -> Figure:
    """Return a figure: one panel per environment, or a row of them with a column per smoothing."""
    n, figure, handles, seeds = len(COLOURS), Figure(layout="constrained"), {}, defaultdict(set)
    for _, line, runs in flat(groups):
        seeds[line].add(str(len(runs)))
    looks = {line: {"color": COLOURS[k % n], "linestyle": ("-", "--", ":", "-.")[k // n % 4],
                    "label": f"{line} (seeds: {' or '.join(sorted(seeds[line]))})"}
             for k, line in enumerate(sorted(seeds, key=natural))}
    one = len({run.env for *_, runs in flat(groups) for run in runs}) == 1      # a common y-axis
    panels = [(panel, smooth) for panel in groups for smooth in plot.smooth]
    columns = len(plot.smooth) if len(plot.smooth) > 1 else {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
    rows = -(-len(panels) // columns)
    for k, (panel, smooth) in enumerate(panels):
        ax = figure.add_subplot(rows, columns, k + 1, sharey=figure.axes[0] if k and one else None)
        draw_panel(ax, panel, groups[panel], looks, plot, smooth)
        ax.set(xlim=(0, None), xlabel=AXES.get(plot.x, plot.x),
               ylabel="" if k % columns else AXES.get(plot.y, plot.y))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))      # 2k, 1.5M
        handles |= {handle.get_label(): handle for handle in ax.get_legend_handles_labels()[0]}
    several = any(len(runs) > 1 for lines in groups.values() for runs in lines.values())
    caption = (f"line: {plot.aggregate} of seeds, to where the first ends; band: standard deviation"
               if several else "line: one seed")
    width, height = (6, 3.6) if len(panels) == 1 else (4 * columns, 2.7 * rows)
    columns = max(1, int(15 * width / max(len(label) + 8 for label in handles)))
    figure.legend(handles=handles.values(), loc="outside lower center", ncols=columns,
                  frameon=False, fontsize=8, title=caption, title_fontsize=8)
    figure.set_size_inches(width, height + 0.4 + 0.18 * -(-len(handles) // columns))
    return figure


def draw_panel(ax, panel: str, lines: dict, looks: dict, plot: Plot, smooth: int) -> None:
    """Draw all lines of a panel, smoothed alike: over at most a tenth of its shortest run."""
    window = max(1, min(smooth, *(len(run.y) // 10 for runs in lines.values() for run in runs)))
    unit = "episodes" if plot.y in ("ep_ret", "ep_len") else "rows"
    short = ", a tenth of the shortest run" * (window < smooth)
    title = panel + f": mean of {window} {unit}{short}" * (window > 1)
    ax.set_title(fill(title, 50, break_on_hyphens=False))       # a panel has room for 56
    for line, runs in lines.items():
        curves = []
        for run in runs:    # a mean stands at the last of its rows; ties would draw a staircase
            means = np.convolve(run.y, np.full(window, 1 / window), "valid")
            x, place = np.unique(run.x[window - 1:], return_inverse=True)
            curves.append((x, np.bincount(place, means) / np.bincount(place)))
        start = max(x[0] for x, _ in curves)
        x = np.linspace(start, max(start, min(run.end for run in runs)), 100)
        y = np.stack([np.interp(x, *curve) for curve in curves], -1)        # [points, seeds]
        colour, centre = looks[line]["color"], STATISTICS[plot.aggregate](y, axis=-1)
        ax.plot(x, centre, **looks[line], linewidth=1.8)
        if len(runs) > 1:
            ends = centre + np.outer([-1, 1], y.std(-1, ddof=1))
            ax.fill_between(x, *ends, color=colour, alpha=0.15, linewidth=0)
        if plot.anchors and plot.y == "ep_ret":
            for mean, *_ in published(runs[0].env, runs[0].algo, runs[0].total_steps, True):
                ax.axhline(mean, color=colour, ls=":", lw=0.8, label=f"{runs[0].algo}, published")


@matplotlib.rc_context(STYLE)
def save(figure: Figure, out: str, command: str = "") -> None:
    """Write the figure. An SVG holds the command that made it."""
    kind = Path(out).suffix[1:]
    about = {"svg": {"Date": None, "Description": command}, "pdf": {"CreationDate": None}}
    try:
        figure.savefig(out, dpi=200, format=kind, metadata=about.get(kind))
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {out} cannot be written: {error}") from None


def main(plot: Plot) -> None:
    """Read runs, print tables, write the figure. UsageError: there is no run, or no curve."""
    if plot.anchors and not ANCHORS.exists():
        raise UsageError("--anchors: benchmarks/anchors.csv is only in a clone of the repository")
    groups = group(load(plot), plot.by, plot.rows)
    done = {panel: {line: runs for line, runs in lines.items()
                    if runs[0].steps >= runs[0].total_steps} for panel, lines in groups.items()}
    if flat(done):
        print(table(results(done, plot)), LEGEND, sep="\n")
    if any(plot.compare):
        print(f"\n{table(compare(done, *plot.compare))}\nAn interval around 0.5 shows no winner.")
    names = ["curves.svg", *(f"curves-{k}.svg" for k in range(2, 1000))]
    out = plot.out or next(name for name in names if not Path(name).is_file() or
                           escape(repr(plot)).encode() in Path(name).read_bytes())
    save(draw(groups, plot), out, repr(plot))
    other = "; curves.svg holds another figure" * (out in names[1:])
    print(f"{out} (runs: {sum(len(runs) for *_, runs in flat(groups))}){other}", file=sys.stderr)


if __name__ == "__main__":
    with program():
        main(read_command(Plot, __doc__, "python -m plot", sys.argv[1:] or ["--help"]))
