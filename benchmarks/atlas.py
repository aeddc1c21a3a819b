"""What do silent bugs cost? Train files with a planted bug beside clean ones, and compare.

    python -m benchmarks.atlas train --out DIR [--bugs ppo-time-limit-is-an-end ...] [--jobs 2]
    python -m benchmarks.atlas collect --out DIR    write atlas.jsonl and figures/atlas.svg
    python -m benchmarks.atlas catch [--bugs ...]   note in atlas.jsonl which test fails first

With --seeds 5, rows have five seeds; the same command without it adds the others.

BUGS says which bugs of diagnose/bugs/ are trained on what. A bug, and any other edit of a file in
algos/, becomes an algorithm of its own in a clone of this repository: there algos/ppo+ID.py is
algos/ppo.py with the edit, and `python -m utils.sweep --algos ppo ppo+ID ...` trains both with the
same seeds. So each run keeps the edited code, `train` resumes what was interrupted, and one row is
repeated by naming its bug. A row of atlas.jsonl has

    clean, planted   of each seed, the mean return of the training episodes in the last tenth of the
                     steps; null where the bug ended the run
    difference       planted - clean, with its 95% bootstrap interval over seeds
    lost             -difference / (clean - the clean runs' first 2%): 1 if nothing is learned
    steps_to         when the mean curve first makes 80% of the clean gain, clean and planted
    metric, step,    the first metric of progress.csv that tells the two apart, when, and whether
    above            the bug raises it: all seeds of one lie above all of the other in three
                     successive twentieths of the run
    curves           means over seeds for each twentieth of the run
    caught           the first test that fails with the bug; absent if no test did, or none ran

`catch` runs `python -m tests.mutants` for the rows that have no `caught`, or for --bugs.
"""
import argparse
import json
import re
import signal
import subprocess
import sys
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

import plot
from benchmarks.suite import HERE, ROOT
from diagnose import catalogue
from utils.errors import UsageError
from utils.files import read_columns, read_lines, write_lines
from utils.returns import parts
from utils.run.directory import as_folder

BUGS = HERE / "atlas.toml"
BINS = 20               # parts of a run
NO_METRICS = {"time", "steps_per_second", "step", "episodes", "lr"}


class Row(NamedTuple):
    """A bug, by its id, or id@module for another file that shares it, and where it is trained."""
    bug: str
    env: str
    set: tuple[str, ...] = ()       # settings, as `utils.sweep --set` takes them
    seeds: int = 10

    @property
    def mutant(self) -> catalogue.Mutant:
        return next(each for each in catalogue.read() if each.id == self.bug.partition("@")[0])

    @property
    def algo(self) -> str:
        return self.bug.partition("@")[2] or self.mutant.module

    @property
    def folder(self) -> str:
        """Return the folder of its runs: rows with other settings lie apart."""
        return f"runs/{as_folder(' '.join(self.set)) or 'default'}"

    @property
    def planted(self) -> str:
        return f"{self.algo}+{self.bug.partition('@')[0].removeprefix(f'{self.mutant.module}-')}"


def read_rows(bugs: list[str]) -> list[Row]:
    """Return the rows of BUGS, or those of some bugs. KeyError: a bug has no row."""
    rows = [Row(bug, task["env"], tuple(task.get("set", ())), task.get("seeds", 10))
            for task in tomllib.loads(BUGS.read_text(encoding="utf-8"))["task"]
            for bug in task["bugs"].split()]
    if unknown := set(bugs) - {row.bug for row in rows}:
        raise KeyError(f"no row of {BUGS.name} has {', '.join(sorted(unknown))}")
    return [row for row in rows if not bugs or row.bug in bugs]


# ---- Training

def train(rows: list[Row], out: Path, jobs: int) -> int:
    """Train rows in a clone of this commit, which out/tree keeps. Return 1 if a run failed."""
    algos = clone(out) / "algos"
    sweeps = defaultdict(list)
    for row in rows:
        text = catalogue.planted(row.mutant, (algos / f"{row.algo}.py").read_text("utf-8"))
        (algos / f"{row.planted}.py").write_text(text, "utf-8")
        sweeps[row.algo, row.env, row.set, row.folder, row.seeds].append(row.planted)
    return max(sweep(out, folder, [algo, *planted], [env], given, seeds, jobs)
               for (algo, env, given, folder, seeds), planted in sweeps.items())


def clone(out: Path) -> Path:
    tree = out.resolve() / "tree"
    if not tree.exists():
        subprocess.run(["git", "clone", "-q", ROOT, tree], check=True)
    return tree


def sweep(out: Path, folder: str, algos: list[str], envs: list[str], settings: Iterable[str],
          seeds: int, jobs: int) -> int:
    """Train algorithms of the clone; their runs lie in out/folder. Return 1 if a run failed."""
    words = ["--algos", *algos, "--envs", *envs, "--seeds", str(seeds), "--jobs", str(jobs),
             "--out", out.resolve() / folder, *(["--set", *settings] if settings else [])]
    process = subprocess.Popen([sys.executable, "-m", "utils.sweep", *words],
                               cwd=out.resolve() / "tree")
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # it saves its runs
    status = process.wait()
    signal.signal(signal.SIGTERM, before)
    if status not in (0, 1):                # it was stopped, or refuses
        sys.exit(status if status > 0 else 128 - status)
    return status


# ---- Comparing

class Seed(NamedTuple):
    """What a run is compared by; each curve has BINS means over its parts, NaN where none is."""
    end: float
    curve: np.ndarray
    metrics: dict[str, np.ndarray]
    total_steps: int


def read_seed(folder: Path) -> Seed:
    try:
        run = plot.read_run(folder, "steps", "ep_ret")
    except UsageError:      # it ended before an episode did
        return Seed(np.nan, np.full(BINS, np.nan), {}, 0)
    total, progress = int(run.total_steps), read_columns(folder / "progress.csv")
    return Seed(run.train if run.steps >= total else np.nan, parts(run.x, run.y, total, BINS),
                {name: parts(progress["step"], x, total, BINS) for name, x in progress.items()
                 if name not in NO_METRICS and not name.startswith("ep_")}, total)


def separating(clean: list[Seed], planted: list[Seed]) -> tuple:
    """Return the first metric that tells the two apart, after how many steps, and whether the
    planted file's is above; None for all three if there is none."""
    clean, planted = ([seed for seed in seeds if seed.metrics] for seeds in (clean, planted))
    if not (clean and planted):
        return None, None, None
    firsts = []
    for name in clean[0].metrics.keys() & planted[0].metrics.keys():
        a, b = (np.stack([seed.metrics[name] for seed in seeds]) for seeds in (clean, planted))
        known = np.flatnonzero(np.isfinite(np.concatenate([a, b])).all(0))      # with a report
        a, b = a[:, known], b[:, known]
        apart = (a.min(0) > b.max(0)) | (b.min(0) > a.max(0))
        held = np.flatnonzero(apart[:-2] & apart[1:-1] & apart[2:])
        if len(held):
            firsts.append((int(known[held[0]]), name, bool(b[0, held[0]] > a[0, held[0]])))
    if not firsts:
        return None, None, None
    first, name, above = min(firsts)
    return name, (first + 1) * clean[0].total_steps // BINS, above


def steps_to(level: float, curve: np.ndarray, total: int) -> int | None:
    reached = np.flatnonzero(curve >= level)
    return int(reached[0] + 1) * total // BINS if len(reached) else None


def compare(row: Row, out: Path) -> dict | None:
    """Return the row of atlas.jsonl, or None if runs are missing."""
    folders = [[*(out / row.folder / as_folder(row.env) / algo).glob("*/seed*/config.json")]
               for algo in (row.algo, row.planted)]
    clean, planted = ([read_seed(path.parent) for path in sorted(paths)] for paths in folders)
    if min(len(clean), len(planted)) < row.seeds:
        return None
    config = json.loads(folders[1][0].read_text())
    ends = [np.array([seed.end for seed in seeds]) for seeds in (clean, planted)]
    with warnings.catch_warnings(action="ignore"):      # where no seed has an episode
        curves = [np.nanmean([seed.curve for seed in seeds], 0) for seeds in (clean, planted)]
    total, start = clean[0].total_steps, float(curves[0][np.isfinite(curves[0])][0])
    gain = ends[0].mean() - start

    def difference(a, b, axis=-1):
        return np.mean(b, axis) - np.mean(a, axis)

    metric, step, above = separating(clean, planted)
    middle, (low, high) = difference(*ends), plot.interval(ends, difference, plot.FEW)
    return {"bug": row.bug, "env": row.env, "settings": " ".join(row.set), "steps": total,
            "commit": config["git_commit"], "clean": ends[0].tolist(), "planted": ends[1].tolist(),
            "difference": [float(middle), float(low), float(high)],
            "lost": [float(-x / gain) for x in (middle, high, low)],
            "steps_to": [steps_to(start + 0.8 * gain, curve, total) for curve in curves],
            "metric": metric, "step": step, "above": above,
            "curves": [[None if np.isnan(x) else round(float(x), 3) for x in curve]
                       for curve in curves]}


def draw(rows: list[dict]) -> Figure:
    """Draw what each bug loses, with its interval, the costliest first."""
    rows = sorted(rows, key=lambda row: row["lost"][0])
    figure = Figure(figsize=(7.2, 0.6 + 0.17 * len(rows)), layout="constrained")
    ax = figure.subplots()
    for y, row in enumerate(rows):
        middle, low, high = np.clip(row["lost"], -0.5, 1.5)
        ax.plot([low, high], [y, y], color=plot.COLOURS[0])
        ax.plot(middle, y, "o", color=plot.COLOURS[1], markersize=4)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(rows)), [f"{row['bug']}, {row['env']}" for row in rows], fontsize=7)
    ax.set_xlabel("share of the clean file's gain that is lost, 95% intervals")
    ax.set_xlim(-0.5, 1.5)
    return figure


def collect(rows: list[Row], out: Path, path: Path = HERE / "atlas.jsonl") -> list[dict]:
    """Write the rows whose runs are there to atlas.jsonl, over older ones, and draw all."""
    found = {(row["bug"], row["env"]): row for row in read_lines(path)}
    new = [told for row in rows if (told := compare(row, out))]
    for row in new:
        told = json.loads(json.dumps(row).replace("NaN", "null"))
        found[row["bug"], row["env"]] = found.get((row["bug"], row["env"]), {}) | told
    write_rows([*found.values()], path)
    with plot.matplotlib.rc_context(plot.STYLE):
        plot.save(draw([row for row in read_lines(path) if None not in row["lost"]]),
                  str(path.parent / "figures" / "atlas.svg"))
    return new


def write_rows(rows: list[dict], path: Path) -> None:
    write_lines(path, sorted(rows, key=lambda row: (row["bug"], row["env"])))


# ---- Testing

def catch(bugs: list[str], path: Path = HERE / "atlas.jsonl") -> int:
    """Note the test that fails first, bug by bug. Return 1 if one survives. KeyError: no row."""
    rows = read_lines(path)
    if unknown := set(bugs) - {row["bug"] for row in rows}:
        raise KeyError(f"no row of {path.name} has {', '.join(sorted(unknown))}")
    chosen = set(bugs) or {row["bug"] for row in rows if "caught" not in row}
    todo = [each.id for each in catalogue.plantings(catalogue.read()) if each.id in chosen]
    with subprocess.Popen([sys.executable, "-m", "tests.mutants", "--id", *todo], cwd=ROOT,
                          stdout=subprocess.PIPE, text=True) as runner:
        for line in runner.stdout:
            print(line, end="", flush=True)
            note(line, path)
    return runner.returncode


def note(line: str, path: Path) -> None:
    """Write into the rows of a bug what a line of the runner says: bug, seconds, test."""
    if told := re.match(r"(\S+) +[\d.]+  (.*)", line):
        rows = read_lines(path)         # anew: `collect` may have added some
        for row in (row for row in rows if row["bug"] == told[1]):
            row.pop("caught", None)
            if told[2].startswith("tests/"):
                row["caught"] = told[2]
        write_rows(rows, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.atlas", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["train", "collect", "catch"])
    parser.add_argument("--out", type=Path, help="the folder of all runs")
    parser.add_argument("--bugs", nargs="*", default=[], help="only these; default: all of BUGS")
    parser.add_argument("--seeds", type=int, default=10, help="seeds of a row, at most")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    if args.do == "catch":
        sys.exit(catch(args.bugs))
    if not args.out:
        parser.error(f"{args.do} needs --out")
    chosen = [row._replace(seeds=min(row.seeds, args.seeds)) for row in read_rows(args.bugs)]
    if args.do == "train":
        sys.exit(train(chosen, args.out, args.jobs))
    for told in collect(chosen, args.out):
        print(told["bug"], told["env"], *(f"{x:.2f}" for x in told["lost"]), told["metric"],
              told["step"], told["steps_to"])
