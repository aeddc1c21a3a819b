"""Train each algorithm briefly and store the usual range of every logged column.

    python -m docs.healthy --work DIR                all, in about two hours
    python -m docs.healthy --work DIR --seeds 1 sac  only one run of these

The command of an algorithm is that of the README's table. It runs with seeds 1
to 3; finished runs in DIR are not repeated. GAIL and BC imitate the PPO of
seed 1. DQN for Atari is left out: a run that learns takes hours. The ranges go
to docs/healthy.csv: median, 5% and 95% quantile over all reports of the runs.
"""
import argparse
import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from docs.algorithm import ROOT, ideas

STORED = Path(__file__).with_name("healthy.csv")
FIELDS = ["algo", "column", "low", "median", "high", "reports", "runs", "command"]
LEFT_OUT = {"dqn_atari"}
NOT_SHOWN = re.compile(r"^(step|time|steps_per_second|lr)$|_(std|min|max)$")


def train(command: str, folder: Path, demos: Path) -> None:
    """Run a command of the README into a folder, unless a finished run is there."""
    if (folder / "finished").exists():
        return
    words = [str(demos) if word == "demos.npz" else word for word in shlex.split(command)]
    flags = ["--run-dir", str(folder), "--seed", folder.name.removeprefix("seed")]
    subprocess.run([sys.executable, *words[1:], *flags, "--torch-threads", "1"], cwd=ROOT,
                   check=True, stdout=subprocess.DEVNULL)
    (folder / "finished").touch()


def record(run: Path, demos: Path) -> None:
    """Record demonstrations of a trained policy."""
    subprocess.run([sys.executable, "-m", "utils.play", str(run), "--record", str(demos)],
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def ranges(runs: list[Path]) -> dict[str, tuple[float, float, float, int]]:
    """Return column -> (5% quantile, median, 95% quantile, reports) over all rows of the runs."""
    values = {}
    for run in runs:
        with open(run / "progress.csv", newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, cell in row.items():
                    if cell and not NOT_SHOWN.search(name):
                        values.setdefault(name.removesuffix("_mean"), []).append(float(cell))
    return {name: (*np.quantile(found, [0.05, 0.5, 0.95]), len(found))
            for name, found in values.items()}


def read() -> dict[str, list[dict]]:
    """Return the stored rows of each algorithm."""
    found = {}
    if STORED.exists():
        with open(STORED, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found.setdefault(row["algo"], []).append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.healthy", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algos", nargs="*")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs (default: 3)")
    asked = parser.parse_args()
    demos = (asked.work / "demos.npz").resolve()
    known = {algo: line for algo, (*_, line) in ideas().items() if algo not in LEFT_OUT}
    if unknown := sorted({*asked.algos} - known.keys()):
        parser.error(f"no such algorithm: {' '.join(unknown)}; there are: {' '.join(known)}")
    for algo in sorted(asked.algos or known, key=lambda name: name != "ppo"):    # PPO first
        runs = [(asked.work / algo / f"seed{k}").resolve() for k in range(1, asked.seeds + 1)]
        for run in runs:
            train(known[algo], run, demos)
        if algo == "ppo" and not demos.exists():
            record(runs[0], demos)
        stored = read()
        stored[algo] = [
            {"algo": algo, "column": name, "low": f"{low:.3g}", "median": f"{median:.3g}",
             "high": f"{high:.3g}", "reports": reports, "runs": asked.seeds,
             "command": known[algo]}
            for name, (low, median, high, reports) in ranges(runs).items()]
        with open(STORED, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for name in sorted(stored) for row in stored[name])
        print(algo, len(stored[algo]), "columns", flush=True)


if __name__ == "__main__":
    main()
