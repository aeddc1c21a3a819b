"""What does each detail of an algorithm cost? Train with it changed, and compare.

    python -m benchmarks.details train --out DIR [--details raw-rewards ...] [--envs Hopper-v4]
    python -m benchmarks.details collect --out DIR        write details.jsonl
    python -m benchmarks.details show --details as-openai-baselines > algos/my_ppo.py

`show` prints an algorithm with a detail changed and its settings as defaults: a file to fork.
DETAILS has two studies, of PPO's implementation details and of Rainbow's parts. Each detail is
changed alone, by settings or by edits of the file; some name others. The edited file becomes the
algorithm ppo+NAME of a clone of this repository, so each run keeps its code and `train` resumes
what was interrupted. A detail is compared with runs of the same seeds in which nothing is changed:
PPO's are the published ones in results.jsonl, Rainbow's the detail `rainbow`.
"""
import argparse
import re
import sys
import tomllib
from pathlib import Path

import numpy as np

import plot
from benchmarks import atlas
from benchmarks.suite import HERE, ROOT, ends_at, read
from diagnose.catalogue import edited
from utils.files import read_lines, write_lines

DETAILS = HERE / "details.toml"


def read_details(names: list[str]) -> list[dict]:
    """Return the details of these names, or all. KeyError: there is none of a name.

    algo, envs, plain    of the study: its file, tasks, and the detail that changes nothing, or ""
    published            sources in anchors.csv to show beside it
    """
    found = {}
    for study in tomllib.loads(DETAILS.read_text(encoding="utf-8"))["study"]:
        about = {name: study.get(name, []) for name in ("algo", "envs", "plain", "published")}
        for each in study["detail"]:
            detail = {"edits": [], "set": [], "also": []} | each | about
            parts = [*(found[name] for name in detail["also"]), detail]  # those before it
            for key in "set", "edits":
                detail[key] = [value for part in parts for value in part[key]]
            found[detail["name"]] = detail
    return [found[name] for name in names or found]


def show(detail: dict) -> str:
    """Return the text of the algorithm with a detail, its settings as defaults."""
    text = edited((ROOT / "algos" / f"{detail['algo']}.py").read_text("utf-8"), detail["edits"])
    for name, value in (pair.split("=") for pair in detail["set"]):
        text, count = re.subn(rf"^(    {name}: \w+ =) \S+", rf"\1 {value}", text, flags=re.M)
        assert count == 1, name
    return text


def train(details: list[dict], envs: list[str], seeds: int, out: Path, jobs: int) -> int:
    """Train in a clone of this commit, which out/tree keeps. Return 1 if a run failed."""
    algos, status = atlas.clone(out) / "algos", 0
    for detail in details:
        algo = detail["algo"]
        text = edited((algos / f"{algo}.py").read_text("utf-8"), detail["edits"])
        name = f"{algo}+{detail['name']}" if detail["edits"] else algo
        (algos / f"{name}.py").write_text(text, "utf-8")
        status |= atlas.sweep(out, detail["name"], [name], envs or detail["envs"], detail["set"],
                              seeds, jobs)
    return status


def collect(details: list[dict], seeds: int, out: Path) -> list[dict]:
    """Write a row for each detail and environment that has all its seeds; others stay."""
    path = HERE / "details.jsonl"
    rows = {(row["detail"], row["env"]): row for row in read_lines(path)}
    for detail in details:
        for results in read(out / detail["name"]).values():
            if len(results) >= seeds:
                env = results[0]["env"]
                rows[detail["name"], env] = {
                    "detail": detail["name"], "env": env, "steps": results[0]["total_steps"],
                    "commit": results[0]["git_commit"],
                    "seeds": [each["seed"] for each in results],
                    "ends_at": [round(ends_at(each), 2) for each in results]}
    order = [each["name"] for each in read_details([])]
    rows = sorted(rows.values(), key=lambda row: (order.index(row["detail"]), row["env"]))
    write_lines(path, rows)
    return rows


def ratio(*returns: np.ndarray, axis: int = -1) -> np.ndarray:
    """The geometric mean over environments of mean(changed) / mean(unchanged), two arrays each."""
    means = [np.mean(each, axis) for each in returns]
    return np.exp(np.mean([np.log(changed / plain)
                           for plain, changed in zip(means[::2], means[1::2])], axis=0))


def unchanged(detail: dict, rows: list[dict], published: dict) -> dict[str, dict[int, float]]:
    """Return {env: {seed: what it ends at}} of the runs to compare a detail with."""
    if detail["plain"]:
        return {row["env"]: dict(zip(row["seeds"], row["ends_at"]))
                for row in rows if row["detail"] == detail["plain"]}
    found = {env: published.get((env, "plainrl", detail["algo"], ""), []) for env in detail["envs"]}
    return {env: {each["seed"]: ends_at(each) for each in runs} for env, runs in found.items()}


def compared() -> list[tuple[dict, dict[str, list], tuple | None]]:
    """Return each detail with {env: its returns} and the ratio with its interval, if all are there.

    The ratio is to the runs with the same seeds in which nothing is changed.
    """
    table, rows, published = [], read_lines(HERE / "details.jsonl"), read(HERE / "results.jsonl")
    for detail in read_details([]):
        mine = {row["env"]: row for row in rows if row["detail"] == detail["name"]}
        plain, pairs = unchanged(detail, rows, published), []
        for env in detail["envs"] if mine.keys() >= {*detail["envs"]} <= plain.keys() else ():
            row = mine[env]
            pairs += [np.array([plain[env][seed] for seed in row["seeds"]]),
                      np.array(row["ends_at"])]
        told = (float(ratio(*pairs)), *plot.interval(pairs, ratio, plot.FEW)) if pairs else None
        table.append((detail, {env: row["ends_at"] for env, row in mine.items()}, told))
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.details", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["train", "collect", "show"])
    parser.add_argument("--out", type=Path, default=Path("runs/details"), help="of all runs")
    parser.add_argument("--details", nargs="*", default=[], help="only these; default: all")
    parser.add_argument("--envs", nargs="*", default=[], help="train only on these")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    chosen = read_details(args.details)
    if args.do == "show":
        print(*map(show, chosen), sep="\n", end="")
        sys.exit()
    if args.do == "train":
        sys.exit(train(chosen, args.envs, args.seeds, args.out, args.jobs))
    print(len(collect(chosen, args.seeds, args.out)), "rows")
    for detail, returns, told in compared():
        print(detail["name"], *(f"{env} {np.mean(x):.1f}" for env, x in returns.items()), told)
