"""Does a run look healthy, and if not, which known bug does it look like?

    python -m diagnose.probe --run RUN            ask about a run directory
    python -m diagnose.doctor learn DIR [...]     write doctor.jsonl from folders of runs
    python -m diagnose.doctor score DIR [...]     write doctor_scores.jsonl: is it right?

Both replace what the files had of the same tasks.
`learn` takes seeds 1 to LEARNED of clean runs and of those of benchmarks/atlas.py, ppo+ID for a
planted bug. `score` takes the others. A run is cut into PARTS. Each metric of progress.csv is
compared with that of clean runs of the same task, in units of their spread:

    z = (x - mean) / spread, within [-LIMIT, LIMIT]

A bug has a signature, the mean z of its runs. A run is unusual if enough of its z are far from
0. The suspects are then the bugs whose signatures are nearest to it, in mean |z - z_bug|. Where no
clean runs of a task are known, healthy is what lies between those of all other tasks, and only
metrics without a unit count.
"""
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from diagnose import catalogue
from utils.command import program, read_command
from utils.errors import UsageError
from utils.files import read_columns, read_lines, write_lines
from utils.returns import parts
from utils.run.directory import has_rows, read_config

HERE = Path(__file__).resolve().parent
DATA, SCORES = HERE / "doctor.jsonl", HERE / "doctor_scores.jsonl"
PARTS, LIMIT, LEARNED = 10, 8, 3
FAR, SHARE = 4, 0.1             # a run is unusual if |z| is above FAR in more than SHARE of its z
UNITLESS = re.compile("kl|clip_frac|explained_variance|ratio|clipped|weight|success|gain|"
                      "cg_")
IGNORED = {"step", "time", "steps_per_second", "lr", "eps", "beta"}


def metrics_of(folder) -> dict[str, np.ndarray]:
    """Return each metric of a run as its means over PARTS, NaN where nothing is known."""
    total = read_config(folder)["settings"]["total_steps"]  # UsageError: it is no run
    if not has_rows(folder):
        raise UsageError(f"{folder} has no row in progress.csv yet, so nothing can be compared")
    columns = read_columns(Path(folder, "progress.csv"))
    return {name: parts(columns["step"], columns[name], total, PARTS)
            for name in columns.keys() - IGNORED}


def task_of(folder) -> tuple[str, str, int]:
    """Return (algorithm, environment, steps) of a run. A planted bug's name follows a +."""
    config = read_config(folder)
    return config["algo"], config["settings"]["env"], int(config["settings"]["total_steps"])


def healthy(runs: list[dict]) -> dict[str, list]:
    """Return {metric: [means, spreads]} of clean runs.

    Few seeds hardly tell a spread: it is at least its mean over all parts, and a twentieth of what
    the metric goes through.
    """
    found = {}
    for name in set.intersection(*(set(run) for run in runs)):
        values = np.stack([run[name] for run in runs])
        if np.isfinite(values).any():
            with np.errstate(all="ignore"):
                std = values.std(0, ddof=1)
                wide = np.nanmax(values) - np.nanmin(values)
                least = max(np.nanmean(std), 0.05 * wide, 1e-9)
                found[name] = [values.mean(0), np.maximum(std, least)]
    return found


def compare(run: dict, clean: dict) -> dict[str, np.ndarray]:
    """Return the z of each metric that both have."""
    return {name: ((run[name] - clean[name][0]) / clean[name][1]).clip(-LIMIT, LIMIT)
            for name in sorted(run.keys() & clean.keys())}


def distance(z: dict, signature: dict) -> float:
    """Return the mean |z - z_bug| over all that both know."""
    gaps = [abs(z[name] - signature[name]) for name in z.keys() & signature.keys()]
    return float(np.nanmean(np.concatenate(gaps))) if gaps else np.inf


def unusual(z: dict) -> float:
    """Return the share of z that are far from 0."""
    values = np.concatenate(list(z.values()))
    return float(np.mean(abs(values[np.isfinite(values)]) > FAR))


# ---- Asking

def load() -> list[dict]:
    """Return what `learn` wrote, with arrays."""
    rows = read_lines(DATA)
    for row in rows:
        row["metrics"] = {name: np.array(x, float) for name, x in row["metrics"].items()}
    return rows


def reference(folder, run: dict, rows: list[dict]) -> tuple[list[dict], dict]:
    """Return the clean rows to compare with, one if it is of the same task, and what is healthy.

    The algorithm is the one with the most similar columns, so a copy of a file needs no name.
    """
    def likeness(row):
        return len(run.keys() & row["metrics"].keys()) / len(run.keys() | row["metrics"].keys())

    clean = [row for row in rows if not row["bug"]]
    algo = max(clean, key=likeness)["algo"]
    clean = [row for row in clean if row["algo"] == algo]
    task = [row for row in clean if (row["env"], row["steps"]) == task_of(folder)[1:]]
    if task:
        return task, task[0]["metrics"]
    pooled = {}
    for name in set.intersection(*(set(row["metrics"]) for row in clean)):
        if UNITLESS.search(name):
            mean, spread = np.stack([row["metrics"][name] for row in clean], 1)
            low, high = (mean - 2 * spread).min(0), (mean + 2 * spread).max(0)
            pooled[name] = np.array([(low + high) / 2, (high - low) / 4])
    return clean, pooled


def examine(folder, rows: list[dict]) -> tuple[list[dict], dict, dict, list[tuple[float, str]]]:
    """Return the clean rows, what is healthy, z, and [(distance, bug)], sorted."""
    run = metrics_of(folder)
    clean, normal = reference(folder, run, rows)
    z = compare(run, normal)
    tasks = {(row["algo"], row["env"], row["steps"]) for row in clean}
    near = {}
    for row in rows:
        if row["bug"] and (row["algo"], row["env"], row["steps"]) in tasks:
            gap = distance(z, row["metrics"])
            near[row["bug"]] = min(gap, near.get(row["bug"], gap))
    return clean, normal, z, sorted((gap, bug) for bug, gap in near.items())


def ask(folder) -> int:
    """Print what is unusual about a run, and the nearest bugs. Return 1 if anything is."""
    clean, normal, z, suspects = examine(folder, load())
    algo, env, steps = task_of(folder)
    seeds, where = sum(row["seeds"] for row in clean), sorted({row["env"] for row in clean})
    same = len(clean) == 1 and (where, clean[0]["steps"]) == ([env], steps)
    print(f"{algo} on {env}, {steps:,} steps, beside {seeds} healthy runs of {clean[0]['algo']}"
          + ("" if same else f" on {', '.join(where)}; only in metrics without a unit"))
    if lengths := [row["steps"] for row in clean if row["env"] == env and not same]:
        known = " or ".join(f"{x:,}" for x in lengths)
        print(f"note      of {env}, only runs of {known} steps are known: --total-steps makes one "
              "that compares")
    if not z:
        print("unknown   every metric of this algorithm has a unit, so nothing can be compared")
        return 0
    sick = unusual(z) > SHARE
    if not sick:
        print("healthy   nothing is out of the ordinary" + (
            "; if it learns too little nevertheless:" if suspects else ""))
    run, far = metrics_of(folder), []
    for name, values in z.items() if sick else ():
        if len(at := np.flatnonzero(abs(values) > FAR)):
            far.append((-len(at), int(at[0]), name))
    for _, first, name in sorted(far)[:3]:
        mean, spread = normal[name][0][first], normal[name][1][first]
        print(f"unusual   {name} from step {first * steps // PARTS:,}: {run[name][first]:.3g}; "
              f"healthy {mean - 2 * spread:.3g} to {mean + 2 * spread:.3g}")
    wrong = {mutant.id: mutant.wrong for mutant in catalogue.read()}
    for _, bug in suspects[:3]:
        print(f"{'suspect' if sick else 'nearest'}   {bug}: {wrong[bug.partition('@')[0]]}")
    print(f"next      python -m diagnose.probe --algo {algo}; docs/debugging.md")
    return int(sick)


# ---- Learning from the runs of the atlas

def find(folders: list[Path]) -> dict[tuple, dict[int, Path]]:
    """Return {(algorithm, bug, environment, steps): {seed: run}} of all whole runs."""
    found = defaultdict(dict)
    for config in sorted(path for folder in folders for path in folder.rglob("config.json")):
        if (config.parent / "result.json").exists():
            name, env, steps = task_of(config.parent)
            algo, _, bug = name.partition("+")
            seed = read_config(config.parent)["settings"]["seed"]
            found[algo, bug, env, steps][seed] = config.parent
    return found


def learn(folders: list[Path]) -> list[dict]:
    """Return the rows of doctor.jsonl."""
    found, rows, ids = find(folders), [], {mutant.id for mutant in catalogue.read()}
    tasks = {key: [metrics_of(run) for seed, run in seeds.items() if seed <= LEARNED]
             for key, seeds in found.items()}
    for (algo, bug, env, steps), runs in sorted(tasks.items()):
        if not runs or not tasks.get((algo, "", env, steps)):
            continue
        clean = healthy(tasks[algo, "", env, steps])
        if not bug:
            metrics = clean
        else:
            each = [compare(run, clean) for run in runs]
            names = set.intersection(*map(set, each))
            metrics = {name: np.mean([z[name] for z in each], 0) for name in sorted(names)}
            full = f"{algo}-{bug}"      # of another file, if it shares the bug
            bug = full if full in ids else next(
                f"{name}@{algo}" for name in ids if name.partition("-")[2] == bug)
        rows.append({"algo": algo, "bug": bug, "env": env, "steps": steps, "seeds": len(runs),
                     "metrics": {name: rounded(x) for name, x in sorted(metrics.items())}})
    return rows


def rounded(x) -> list:
    return [rounded(part) if np.ndim(part) else None if np.isnan(part) else float(f"{part:.3g}")
            for part in x]


def score(folders: list[Path]) -> list[dict]:
    """Return for each run that nothing was learned from how unusual it is, and the bug's place."""
    rows, told = load(), []
    for (algo, bug, env, steps), seeds in sorted(find(folders).items()):
        for seed, run in sorted(seeds.items()):
            if seed > LEARNED:
                *_, z, suspects = examine(run, rows)
                names = [name.partition("@")[0].partition("-")[2] for _, name in suspects]
                told.append({"algo": algo, "bug": bug, "env": env, "steps": steps, "seed": seed,
                             "unusual": round(unusual(z), 3),
                             "place": names.index(bug) + 1 if bug in names else None})
    return told


def summary(told: list[dict]) -> str:
    """Say how often the doctor is right."""
    planted, clean = ([row for row in told if bool(row["bug"]) == bug] for bug in (True, False))
    noticed, alarms = (np.mean([row["unusual"] > SHARE for row in rows])
                       for rows in (planted, clean))
    known = Counter((row["algo"], row["env"], row["steps"]) for row in load() if row["bug"])
    known = [known[row["algo"], row["env"], row["steps"]] for row in planted]
    first, named = (np.mean([row["place"] is not None and row["place"] <= places
                             for row in planted]) for places in (1, 3))
    chance_first, chance = (np.mean([min(1, places / count) for count in known])
                            for places in (1, 3))
    algos, tasks = ({row[name] for row in clean} for name in ("algo", "env"))
    return (f"Of {len(planted)} runs with one of {len({(x['algo'], x['bug']) for x in planted})} "
            f"bugs, it named the right bug first in {first:.0%} (guessing: {chance_first:.0%}), "
            f"and among its three in {named:.0%} (guessing: {chance:.0%}, since few bugs are known "
            f"of a task). It called {noticed:.0%} of these runs unusual, and {alarms:.0%} of "
            f"{len(clean)} healthy runs of {len(algos)} algorithms on {len(tasks)} tasks")


def renew(path: Path, found: list[dict]) -> list[dict]:
    """Write rows to a file in place of those of the same tasks. Return all that it holds."""
    def task(row):
        return row["algo"], row["env"], row["steps"]

    new = {task(row) for row in found}
    rows = [*(row for row in read_lines(path) if task(row) not in new), *found]
    rows.sort(key=lambda row: (row["algo"], row["bug"], row["env"], row["steps"],
                               row.get("seed", 0)))
    write_lines(path, rows)
    return rows


@dataclass(frozen=True)
class Doctor:
    do: Literal["learn", "score"]  # what to write: doctor.jsonl, or doctor_scores.jsonl
    folders: tuple[Path, ...]  # of runs


def main(asked: Doctor) -> None:
    """Write a file. UsageError: there is no finished run."""
    if not find(asked.folders):
        raise UsageError(f"no finished run in {' '.join(map(str, asked.folders)) or 'no folder'}")
    learned = asked.do == "learn"
    found = learn(asked.folders) if learned else score(asked.folders)
    found = renew(DATA if learned else SCORES, found)
    if not learned:
        print(summary(found))


if __name__ == "__main__":
    with program():
        main(read_command(Doctor, __doc__, "python -m diagnose.doctor"))
