"""What the notebooks share: quiet runs, published runs, and diffs of algorithm files."""
import contextlib
import difflib
import io
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import algos
from utils.files import read_columns

ROOT = Path(algos.__file__).resolve().parents[1]  # of the code that runs, perhaps installed
CLONE = Path(__file__).resolve().parents[1]
sys.path.append(str(CLONE))                     # benchmarks is not installed

from benchmarks.suite import read_suite  # noqa: E402


def run(algo, **settings):
    """Train the module `algo` quietly -> agent, cfg, progress and episodes.

    progress and episodes are the columns of progress.csv and episodes.csv: name -> array, with NaN
    for an empty cell. The run directory is temporary.
    """
    with tempfile.TemporaryDirectory() as folder:
        cfg = algo.Config(**settings, run_dir=f"{folder}/run")
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            agent = algo.train(cfg)
        progress, episodes = (read_columns(Path(folder, "run", f"{name}.csv"))
                              for name in ("progress", "episodes"))
    return SimpleNamespace(agent=agent, cfg=cfg, progress=progress, episodes=episodes)


def stored(env, algo, suite="results", library="plainrl", commit=""):
    """Return the published runs of an algorithm (by name) on an environment, one dict per seed.

    suite "history" has runs of several commits. `commit` chooses one by the start of its hash.
    `run["curve"]` has rows of (step, mean return), `run["train100"]` is the mean return of the last
    100 training episodes, `run["eval"]` has those of ten with the final policy; `run["seconds"]` is
    the duration.
    """
    runs = [run for run in read_suite(CLONE / f"benchmarks/{suite}.jsonl")
            if (run["env"], run["algo"], run.get("library", "plainrl")) == (env, algo, library)
            and run.get("git_commit", "").startswith(commit)]
    return sorted(runs, key=lambda run: run["seed"])


# ---- The diff of two files

SECTIONS = ["config", "data types", "train", "losses", "agent", "buffer"]


def sections(algo):
    """Return {section: its lines without blank ones} for an algorithm (by name)."""
    parts, name = {}, "docstring and imports"
    for line in (ROOT / "algos" / f"{algo}.py").read_text(encoding="utf-8").split("\n"):
        if line.startswith("# ==="):
            name = line.strip("# =")
        elif line:
            parts.setdefault(name, []).append(line)
    return parts


def difference(parent, child, section):
    """Print the lines that only the parent (-) or only the child (+) has, block by block."""
    lines = ["" if line[:2] == "@@" else line for line in diff(parent, child, section)]
    print("\n".join(lines[1:]) if lines else "no difference")


def count_new(parent, child):
    """Return {section: number of lines that the child adds}."""
    return {name: sum(line[0] == "+" for line in diff(parent, child, name)) for name in SECTIONS}


def diff(parent, child, section):
    """Return the lines of `diff -U0`, without the names of the files."""
    parts = [sections(algo).get(section, []) for algo in (parent, child)]
    return list(difflib.unified_diff(*parts, n=0))[2:]
