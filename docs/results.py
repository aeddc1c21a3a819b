"""Published runs for the site: curves as data for curves.js, tables, commands and anchors."""
import json
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks import table

FOLDERS = ("results", "ablation", "imitation", "scaled")
DIGITS = 4      # of a stored return


@cache
def groups() -> dict[tuple, list[dict]]:
    """Return (folder, environment, library, algorithm, settings) -> results of all seeds."""
    return {(folder, *key): found for folder in FOLDERS
            for key, found in table.read(table.HERE / f"{folder}.jsonl").items()}


def short(number: float) -> float:
    """Return a number with few digits, to keep the site small."""
    rounded = float(f"{number:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def anchors(key: tuple, results: list[dict]) -> list[list]:
    """Return [mean, source, what was measured, whether in training] of others' results, best first.
    """
    _, _, library, _, settings = key
    if library != "plainrl" or not table.PLAIN.fullmatch(settings):
        return []
    return sorted(([*row, training] for training in (True, False) for row in
                   table.published(results[0], training)), reverse=True)


def line(key: tuple, results: list[dict]) -> dict:
    """Return everything that the page shows of a line, as JSON."""
    folder, env, library, _, settings = key
    ends = [float(end) for end in table.returns(results, "ends at")]
    seeds = [{"seed": result["seed"], "ends": None if np.isnan(end) else short(end),
              "eval": short(np.mean(result["eval"])), "seconds": round(result["seconds"]),
              "x": [x for x, _ in result["curve"]], "y": [short(y) for _, y in result["curve"]]}
             for result, end in zip(results, ends)]
    return {"env": env.rpartition(":")[2], "library": library, "settings": settings or "default",
            "folder": folder, "steps": results[0].get("steps", results[0]["total_steps"]),
            "code": table.code(results),
            "command": f"{table.command(results[0])} --seed {results[0]['seed']}",
            "anchors": anchors(key, results), "seeds": seeds}


def write_curves(algo: str, folder: Path) -> None:
    """Write the curves of an algorithm as a script, which a browser also reads from a file."""
    lines = [line(key, results) for key, results in groups().items() if key[3] == algo]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(lines, separators=(",", ":"))
    (folder / f"{algo}.js").write_text(f"(window.CURVES ??= {{}}).{algo} = {text};\n",
                                       encoding="utf-8")


def markdown(algo: str) -> str:
    """Return the table of an algorithm's published runs."""
    parts = []
    for folder in FOLDERS:
        found = {key[1:]: results for key, results in groups().items()
                 if key[0] == folder and key[3] == algo}
        if found:
            parts.append(f"Runs in `benchmarks/{folder}.jsonl`:\n\n{table.settings(found)}")
    return "\n\n".join(parts) or "No run of this algorithm has been published yet."
