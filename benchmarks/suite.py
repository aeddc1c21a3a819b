"""Suites of published results, such as results.jsonl.

A suite is a file of rows, one JSON object per line, and beside it a file of their curves:
results.jsonl and results_curves.jsonl. A row is a result.json (utils/results.py) with an id.
"""
import json
from pathlib import Path

from utils.files import write_text

CURVES = "curve", "eval_curve"                  # they stand in the file of curves


def curves_of(suite: Path) -> Path:
    return suite.with_name(f"{suite.stem}_curves.jsonl")


def read_suite(suite: Path) -> list[dict]:
    """Return the results of a suite with their curves."""
    curves = {}
    if curves_of(suite).exists():
        lines = map(json.loads, curves_of(suite).read_text(encoding="utf-8").splitlines())
        curves = {line["id"]: line for line in lines}
    rows = map(json.loads, suite.read_text(encoding="utf-8").splitlines())
    return [row | curves.get(row["id"], {}) for row in rows]


def write_suite(suite: Path, found: list[dict]) -> None:
    """Write the results of a suite, sorted by id."""
    found = sorted(found, key=lambda result: result["id"])
    rows = [{k: x for k, x in result.items() if k not in CURVES} for result in found]
    curves = [{k: result.get(k, []) for k in ("id", *CURVES)} for result in found]
    for path, lines in ((suite, rows), (curves_of(suite), curves)):
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
