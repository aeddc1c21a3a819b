"""Published results: suites of rows, and which rows are of today's code.

A suite is a file of rows, one JSON object per line, and beside it a file of their curves:
results.jsonl and results_curves.jsonl. A row is a result.json (utils/results.py) with an id.
verdicts.jsonl says which rows are of this code; benchmarks/agree.py writes it. history.jsonl has
the rows of results.jsonl that others have replaced.
"""
import json
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from plot import natural
from utils import returns
from utils.files import read_lines, write_lines
from utils.run.code import code as hash_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CURVES = "curve", "eval_curve"                  # they stand in the file of curves


def curves_of(suite: Path) -> Path:
    return suite.with_name(f"{suite.stem}_curves.jsonl")


def read_suite(suite: Path) -> list[dict]:
    """Return the results of a suite with their curves."""
    curves = {line["id"]: line for line in read_lines(curves_of(suite))}
    return [row | curves.get(row["id"], {}) for row in read_lines(suite)]


def write_suite(suite: Path, found: list[dict]) -> None:
    """Write the results of a suite, sorted by id."""
    found = sorted(found, key=lambda result: result["id"])
    rows = [{k: x for k, x in result.items() if k not in CURVES} for result in found]
    curves = [{k: result.get(k, []) for k in ("id", *CURVES)} for result in found]
    write_lines(suite, rows)
    write_lines(curves_of(suite), curves)


def read_runs(folder: Path) -> list[dict]:
    """Return the result.json of every run in a folder; the id names the run within a suite."""
    found = [{"changed": {}, "settings": {}} | json.loads(path.read_text(encoding="utf-8"))
             for path in sorted(folder.rglob("result.json"))]
    return [{"id": "/".join([result.get("library", "plainrl"), result["env"], result["algo"],
                             *(f"{k}={v}" for k, v in sorted(result["changed"].items())),
                             f"seed{result['seed']}"])} | result for result in found]


def read(suite: Path) -> dict[tuple, list[dict]]:
    """Group results by environment, library, algorithm and settings; sort each group by seed.

    Of a group, only rows of this code are kept, if they are at least half of it. Else a few seeds
    of today would stand for all.

    suite    a .jsonl file, or a folder of runs that have a result.json
    """
    groups = defaultdict(list)
    for result in read_suite(suite) if suite.suffix == ".jsonl" else read_runs(suite):
        groups[group_of(result)].append(result)
    for key, results in groups.items():
        today = [result for result in results if "library" not in result and verdict(result)]
        kept = today if len(today) >= len(results) / 2 else results
        groups[key] = sorted(kept, key=lambda result: result["seed"])
    return {key: groups[key] for key in sorted(groups, key=lambda key: [*map(natural, key)])}


def group_of(result: dict) -> tuple[str, str, str, str]:
    """Return what the seeds of a line have in common: env, library, algorithm and settings."""
    return result["env"], result.get("library", "plainrl"), result["algo"], settings_of(result)


def settings_of(result: dict) -> str:
    """Return the settings of a result that are not the default, as text."""
    return ",".join(f"{name}={value}" for name, value in sorted(result["changed"].items()))


def ends_at(result: dict) -> float:
    return returns.ends_at(result["curve"], result.get("steps", result["total_steps"]))


def flags(changed: dict) -> list[str]:
    """Return settings as words of a command line."""
    words = []
    for name, value in changed.items():
        flag, values = name.replace("_", "-"), value if isinstance(value, list) else [value]
        words += ([f"--{'no-' * (not value)}{flag}"] if isinstance(value, bool) else
                  [f"--{flag}", *(f"{x:g}".replace("e+0", "e") if isinstance(x, int | float)
                                  else str(x) for x in values)])
    return words


# ---- Rows of this code

@cache
def code(algo: str, env: str, tree: Path = ROOT) -> str:
    """Return a hash of the code that a row was learned with, in a tree: see utils/run/code.py."""
    return hash_of(tree / "algos" / f"{algo}.py", env, tree / "utils")


@cache
def verdicts() -> dict[tuple, bool]:
    return {tuple(told[name] for name in ("algo", "env", "settings", "commit", "code")):
            told["agrees"] for told in read_lines(HERE / "verdicts.jsonl")}


def verdict(result: dict) -> bool | None:
    """Return whether a row of ours is of this code, None if nobody has asked yet."""
    asked = (result["algo"], result["env"], settings_of(result), result.get("git_commit"),
             code(result["algo"], result["env"]))
    return False if is_dirty(result) else verdicts().get(asked)


def is_dirty(result: dict) -> bool:
    """Return whether the code that made a row had changes that no commit has."""
    return (result.get("git_commit") or "").endswith("-dirty")


# ---- Changing suites

def add(folder: Path, suite: Path) -> None:
    """Add runs to a suite. Rows that they replace go to history.jsonl."""
    known, new = read_suite(suite), {row["id"]: row for row in read_runs(folder)}
    if dirty := [name for name, row in new.items() if is_dirty(row)]:
        sys.exit(f"error: no commit has the code of {' '.join(dirty)}")
    to_history([row for row in known if row["id"] in new])
    write_suite(suite, [*(row for row in known if row["id"] not in new), *new.values()])
    print(f"{suite}: {len(new)} results added or replaced")


def retire(suite: Path) -> None:
    """Move rows of code that no commit has, and rows that others replace, to history.jsonl.

    A row is replaced if it is not of this code, and at least as many with its settings are.
    """
    found = read_suite(suite)
    ours = [row for row in found if "library" not in row]
    count = Counter((group_of(row), verdict(row)) for row in ours if not is_dirty(row))
    old = [row for row in ours if is_dirty(row) or (verdict(row) is False and count[
        group_of(row), True] >= count[group_of(row), False])]
    if old:
        to_history(old)
        write_suite(suite, [row for row in found if row not in old])
        print(f"{len(old)} results went to history.jsonl")


def to_history(old: list[dict]) -> None:
    """Add rows to history.jsonl. Their ids there name the commit."""
    new = [row | {"id": f"{row['id']}@{row.get('git_commit', '')[:8]}"} for row in old]
    path = HERE / "history.jsonl"
    write_suite(path, list({row["id"]: row for row in [*read_suite(path), *new]}.values()))
