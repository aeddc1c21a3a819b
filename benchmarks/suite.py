"""Published results: suites of rows, and which rows are of today's code.

A suite is a file of rows, one JSON object per line, and beside it a file of their curves:
results.jsonl and results_curves.jsonl. A row is a result.json (utils/results.py) with an id.
verdicts.jsonl says which rows are of this code; benchmarks/agree.py writes it. history.jsonl has
the rows of results.jsonl that others have replaced.
"""
import ast
import hashlib
import json
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from plot import natural
from utils.files import read_lines, write_lines

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CURVES = "curve", "eval_curve"                  # they stand in the file of curves
# What learning is computed with, as far as an algorithm imports it. Of utils/run/ and seeds.py,
# the default of start_steps, --init-from and the seeds count too: after a change there, ask again.
ARITHMETIC = "mpi stats optim nets envs".split()            # what all files share of it
HELPERS = {*ARITHMETIC, *"atari buffers demos goals policy spaces wrappers".split()}


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
def code(algo: str, tree: Path = ROOT) -> str:
    """Return a hash of the code that an algorithm learns with, without comments and docstrings.

    That is its file in a tree, and what of HELPERS it imports, directly or not.
    """
    todo, found = [tree / "algos" / f"{algo}.py"], {}
    while todo:
        path = todo.pop()
        name = f"{path.parent.name}/{path.name}"
        if name not in found and path.exists():
            found[name], names = parsed(path.read_bytes())
            todo += [tree / "utils" / f"{name}.py" for name in names & HELPERS]
    return digest(sorted(found.items()))


@cache
def parsed(source: bytes) -> tuple[str, set[str]]:
    """Return a hash of a program's syntax tree, and the names of the modules that it imports."""
    tree, names = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:  # of utils, or of utils.mpi
            names |= {node.module.rpartition(".")[2], *(alias.name for alias in node.names)}
    return digest(shape(tree)), names


def digest(lists: list) -> str:
    return hashlib.sha256(json.dumps(lists).encode()).hexdigest()[:12]


def shape(node) -> object:
    """Return a syntax tree as lists, the same in every version of Python, without docstrings."""
    if isinstance(node, list):
        return [shape(part) for part in node if not (
            isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    if not isinstance(node, ast.AST):
        return repr(node)
    return [type(node).__name__, *([name, shape(part)] for name, part in ast.iter_fields(node)
                                   if part is not None and part != [])]


@cache
def verdicts() -> dict[tuple, bool]:
    return {tuple(told[name] for name in ("algo", "env", "settings", "commit", "code")):
            told["agrees"] for told in read_lines(HERE / "verdicts.jsonl")}


def verdict(result: dict) -> bool | None:
    """Return whether a row of ours is of this code, None if nobody has asked yet."""
    asked = (result["algo"], result["env"], settings_of(result), result.get("git_commit"),
             code(result["algo"]))
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
