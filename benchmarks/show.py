"""Check whether stale published runs still hold for the present code.

    python benchmarks/show.py [--steps 6144] [--algos ppo ...]

A result names the commit that made it. Stale results form groups with the same algorithm,
environment, settings and commit. For each group this script runs one seed for `--steps` steps,
with the code of that commit and with the present code. If progress.csv is equal to the bit, apart
from wall-clock columns, the result files of the group are marked as valid for the present code.
If not, they stay stale and need a new run. A difference that appears only later in a run is missed.
"""
import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import RESULTS, changed
from utils import collect

ROOT = RESULTS.parents[1]
CHILD = """
import json, sys
from importlib import import_module
algo, settings = sys.argv[1], json.loads(sys.argv[2])
module = import_module("algos." + algo)
settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
module.train(module.Config(**settings))
"""


def rows_of(code: Path, algo: str, settings: dict, folder: Path) -> list[dict]:
    """Run the code in a folder; return the rows of progress.csv without wall-clock columns."""
    done = subprocess.run([sys.executable, "-c", CHILD, algo,
                           json.dumps(settings | {"run_dir": str(folder)})],
                          cwd=code, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{algo} in {code} failed:\n{done.stderr[-1000:]}")
    with open(folder / "progress.csv", newline="") as file:
        clocks = ("time", "steps_per_second")
        return [{k: v for k, v in row.items() if k not in clocks} for row in csv.DictReader(file)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6144,
                        help="length of each run in environment steps (6144 to 12288)")
    parser.add_argument("--algos", nargs="*", help="only these algorithms (default: all)")
    args = parser.parse_args()
    groups, failed = defaultdict(list), 0
    for path in sorted(RESULTS.rglob("result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        wanted = result["algo"] in (args.algos or [result["algo"]])
        if "library" not in result and wanted and changed(result):
            key = result["git_commit"], result["algo"], result["env"]
            groups[*key, json.dumps(result["settings"])].append((path, result))
    with tempfile.TemporaryDirectory() as temp:
        for number, ((commit, algo, env, settings), found) in enumerate(groups.items()):
            if commit.endswith("-dirty"):
                print(f"{algo} {env}: made by files that were never committed")
                failed += 1
                continue
            old = Path(temp, commit)
            if not old.exists():
                old.mkdir()
                packed = subprocess.run(["git", "archive", commit],
                                        cwd=ROOT, check=True, capture_output=True).stdout
                subprocess.run(["tar", "-x"], cwd=old, input=packed, check=True)
            run = json.loads(settings) | {"env": env, "seed": found[0][1]["seed"]}
            run["total_steps"] = args.steps
            one, two = (rows_of(code, algo, run, Path(temp, f"{number}{name}"))
                        for name, code in (("old", old), ("new", ROOT)))
            same = one == two != []
            print(f"{algo} {env} {settings} of {commit[:8]}, {len(one)} reports: "
                  f"{'the same' if same else 'NOT the same'}", flush=True)
            failed += not same
            for path, result in found if same else ():
                result["sources"] = collect.sources(algo)
                result["sources_shown"] = ("bit-equal to the code that ran, in a run of "
                                           f"{args.steps:,} steps")
                collect.write_result(path.parent, result)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
