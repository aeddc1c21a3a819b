"""The tables of benchmarks/README.md, from the result files kept in benchmarks/results.

    python benchmarks/table.py [RESULTS]      prints Markdown: every seed, mean and 95% interval

A result file is what `python -m utils.sweep --collect` writes for a run; the peer's are written by
benchmarks/sb3_ppo.py. The interval of a mean is a percentile bootstrap over seeds.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

HERE = Path(__file__).resolve().parent


def read(folder: Path) -> dict[tuple, list[dict]]:
    """Result dicts by (env, library, algo, settings), each list sorted by seed."""
    groups = defaultdict(list)
    for path in folder.rglob("result*.json"):
        result = json.loads(path.read_text())
        settings = ",".join(f"{k}={v}" for k, v in sorted(result.get("settings", {}).items()))
        key = result["env"], result.get("library", "plainrl"), result["algo"], settings
        groups[key].append(result)
    return {key: sorted(groups[key], key=lambda result: result["seed"]) for key in sorted(groups)}


def interval(values: list[float]) -> str:
    """The mean, and its 95% bootstrap interval where there are seeds enough to speak of one."""
    mean = f"{np.mean(values):.0f}"
    if len(values) < 3 or np.ptp(values) == 0:
        return mean
    ends = bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(0))
    return f"{mean} [{ends.confidence_interval.low:.0f}, {ends.confidence_interval.high:.0f}]"


def table(groups: dict[tuple, list[dict]]) -> str:
    """One row a group: train100 and eval of each seed, and their means."""
    rows = ["| environment | library | settings | steps | seeds | train100 of each seed | mean "
            "| eval of each seed | mean |", "|---|---|---|---:|---|---|---|---|---|"]
    for (env, library, _, settings), results in groups.items():
        train = [result["train100"] for result in results]
        final = [float(np.mean(result["eval"])) for result in results]
        cells = [env, library, settings or "default", f"{results[0]['total_steps']:,}",
                 " ".join(str(result["seed"]) for result in results),
                 " ".join(f"{value:.0f}" for value in train), interval(train),
                 " ".join(f"{value:.0f}" for value in final), interval(final)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def difference(groups: dict[tuple, list[dict]]) -> str:
    """Ours minus the peer's train100 at equal seeds, and the geometric mean of the ratios."""
    lines, ratios = [], []
    for (env, library, algo, settings), results in groups.items():
        peer = next((v for k, v in groups.items() if k[0] == env and k[1] != library), None)
        if library != "plainrl" or settings or peer is None:
            continue
        seeds = {result["seed"] for result in results} & {result["seed"] for result in peer}
        ours, theirs = ([result["train100"] for result in each if result["seed"] in seeds]
                        for each in (results, peer))
        ratios.append(np.mean(ours) / np.mean(theirs))
        ends = bootstrap((ours, theirs), lambda a, b, axis: a.mean(axis) - b.mean(axis),
                         method="percentile", rng=np.random.default_rng(0), vectorized=True)
        low, high = ends.confidence_interval
        lines.append(f"{env}, seeds {sorted(seeds)}: ratio of means {ratios[-1]:.2f}, difference "
                     f"{np.mean(ours) - np.mean(theirs):.0f} [{low:.0f}, {high:.0f}]")
    if ratios:
        lines.append(f"geometric mean of the ratios: {np.exp(np.mean(np.log(ratios))):.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    found = read(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results")
    print(table(found) + "\n\n" + difference(found))
