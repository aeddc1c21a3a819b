"""Ask which published rows are of this code: those of algorithm/environment/settings, or all.

    python -m benchmarks.agree ['ppo/Hopper-v4/*' ...] [--by COMMIT]

A row is, if its commit and HEAD have the same syntax trees where learning is computed (code.py in
utils/run/), or if runs of both agree: same settings and seed, three reports with learning in them,
and 1e-4 in all of progress.csv but times, relative to the largest of a column. Up to three seeds
are tried: robots amplify rounding errors. When the code changes: commit it, ask again, and run
table.py.

Rows of bc and gail need demonstrations in this folder, by the names that they have. Another
processor rounds otherwise, and then a row may not be repeated. With --by COMMIT, rows that agreed
with the code of COMMIT are of this code if HEAD agrees with COMMIT.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.suite import HERE, ROOT, code, flags, settings_of, verdict, verdicts
from utils.files import read_columns, read_lines


@cache
def checkout(commit: str) -> tempfile.TemporaryDirectory:
    """Return a folder with the code of a commit. It is deleted when the program ends."""
    folder = tempfile.TemporaryDirectory()
    files = subprocess.check_output(["git", "archive", commit, ":!benchmarks", ":!notebooks"],
                                    cwd=ROOT)
    subprocess.run(["tar", "-x", "-C", folder.name], input=files, check=True)
    for demos in Path.cwd().glob("*.npz"):      # which rows of bc and gail name
        shutil.copy(demos, folder.name)
    return folder


def start(commit: str, algo: str, *words: str, **files) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", f"algos.{algo}", *words], **files,
                            cwd=checkout(commit).name, env=os.environ | {"OMP_NUM_THREADS": "1"})


@cache
def usage(commit: str, algo: str) -> str:
    return start(commit, algo, "--help", stdout=subprocess.PIPE).communicate()[0].decode()


def reports(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of progress.csv up to the third report with learning in it, or {}."""
    columns = read_columns(path) if path.exists() else {}
    learning = [~np.isnan(x) for name, x in columns.items() if "norm" in name or "loss" in name]
    ends = np.flatnonzero(np.any(learning, axis=0))[:3]
    return {name: x[:ends[-1] + 1] for name, x in columns.items()} if len(ends) == 3 else {}


@cache
def run(commit: str, algo: str, *words: str) -> dict[str, np.ndarray]:
    """Return the `reports` of a run. RuntimeError: it ended before."""
    plain = [word for word in ("--no-compile", "--no-bf16") if word in usage(commit, algo)]
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/said", "w") as said:
        path = Path(folder, "run", "progress.csv")
        with start(commit, algo, *words, *plain, "--torch-threads", "1", "--run-dir", path.parent,
                   stdout=said, stderr=said) as process:
            try:
                while process.poll() is None and not reports(path):
                    time.sleep(0.2)
            finally:                            # also after Ctrl-C or SIGTERM
                process.kill()
        if not (found := reports(path)):
            raise RuntimeError(Path(said.name).read_text().strip().rpartition("\n")[2])
        settings = json.loads((path.parent / "config.json").read_text())["settings"]
    return found | {"total_steps": np.array([settings["total_steps"]])}


def difference(old: dict, new: dict) -> tuple[float, str]:
    """Return the largest difference, relative to its column, and the column."""
    worst = 0.0, "all"
    for name in (old.keys() & new.keys()) - {"time", "steps_per_second"}:
        a, b = old[name], new[name]
        if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
            return 1.0, name
        size = np.nanmax(np.abs([a, b]), initial=0) or 1
        apart = float(np.nanmax(abs(a - b), initial=0) / size)
        worst = (apart, name) if apart > worst[0] else worst
    return worst


def ask(row: dict, seeds: list[int], by: str = "") -> dict:
    """Return the verdict on a row and its other seeds. RuntimeError: a run cannot be made."""
    algo, commits = row["algo"], (by or row["git_commit"], "HEAD")
    best = 0.0, "same syntax trees"
    old, new = (code(algo, row["env"], Path(checkout(commit).name)) for commit in commits)
    row_of = algo, row["env"], settings_of(row), row["git_commit"]
    if by and not verdicts().get((*row_of, old)):
        raise RuntimeError(f"it did not agree with {by}")
    for seed in seeds[:3] if old != new else []:
        words = ["--env", row["env"], "--seed", str(seed), *flags(row["changed"])]
        words += ["--report-every", "200"] * ("--start-steps" in usage("HEAD", algo))   # soon
        best = difference(*(run(commit, algo, *words) for commit in commits))
        if best[0] <= 1e-4:
            break
    return {"algo": algo, "env": row["env"], "settings": settings_of(row), "commit": row_of[-1],
            "code": new, "agrees": best[0] <= 1e-4, "largest": best[0], "where": best[1]
            } | ({"by": by} if by else {})


def main(patterns: list[str], by: str = "") -> None:
    todo = {}
    for row in read_lines(HERE / "results.jsonl"):
        name = f"{row['algo']}/{row['env']}/{settings_of(row)}"
        if "library" not in row and verdict(row) is None and any(
                fnmatch(name, pattern) for pattern in patterns):
            todo.setdefault((name, row["git_commit"]), []).append(row)
    for (name, commit), rows in todo.items():
        try:
            told = ask(rows[0], [row["seed"] for row in rows], by)
            print(name, commit[:8], told["agrees"], told["largest"], told["where"], flush=True)
            with open(HERE / "verdicts.jsonl", "a") as file:
                file.write(json.dumps(told) + "\n")
        except RuntimeError as error:
            print(name, commit[:8], "no verdict:", error, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--by", default="", help="a commit with which these rows agreed")
    main(**vars(parser.parse_args()))
