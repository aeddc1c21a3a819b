"""Check whether published runs of an earlier version hold for the present code.

    python benchmarks/show.py [--steps 12288] [--algos sac ...]

A result names the commit that made it, and hashes of the code behind it. If
that code has changed, the result counts as made by an earlier version. Such
results form groups with the same algorithm, environment, settings and commit.
For each group this script starts one seed twice, with the code of that commit
and with the present code, and stops both after --steps steps. Both get the
settings of the published run, its total_steps included. If progress.csv is
equal to the bit, apart from wall-clock columns, an entry in
benchmarks/shown.json says so: these results hold for exactly the code whose
hashes the entry names. Otherwise they need a new run. Only columns of the same
name are compared, and at least one of them must come from learning. A
difference that appears only later in a run is missed. Runs of the folder
imitation/ need the demonstrations of their setting `demos` in the root folder.
"""
import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import RESULTS, SHOWN, changed, read_shown
from utils import files, results
from utils.jobs import last_step
from utils.logger import PROGRESS

ROOT = RESULTS.parents[1]
CLOCKS = ("time", "steps_per_second")
CHILD = """
import json, sys
from importlib import import_module
algo, settings = sys.argv[1], json.loads(sys.argv[2])
module = import_module("algos." + algo)
settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
module.train(module.Config(**settings))
"""


def rows_of(code: Path, algo: str, settings: dict, folder: Path, steps: int) -> list[dict]:
    """Run the code in a folder for `steps` steps; return its rows, without wall-clock columns."""
    command = [sys.executable, "-c", CHILD, algo, json.dumps(settings | {"run_dir": str(folder)})]
    log = Path(f"{folder}.log")
    with open(log, "w") as output:
        process = subprocess.Popen(command, cwd=code, stdout=output, stderr=output)
    while process.poll() is None and last_step(folder) < steps:
        time.sleep(0.1)
    process.kill()
    if process.wait() > 0:
        sys.exit(f"{algo} in {code} failed:\n{log.read_text()[-1000:]}")
    with open(folder / "progress.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) <= steps]
    return [{name: x for name, x in row.items() if name not in CLOCKS} for row in rows]


def equal(old: list[dict], new: list[dict]) -> bool:
    """Return whether two runs are equal to the bit, in all columns that both have."""
    shared = {name for row in old for name in row} & {name for row in new for name in row}
    learned = {name for name in shared - {*PROGRESS} if any(row.get(name) for row in old)}
    cut = [[{name: row.get(name) for name in shared} for row in rows] for rows in (old, new)]
    return bool(learned) and cut[0] == cut[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/show.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12288,
                        help="environment steps to compare (6144 to 12288); more than any warm-up")
    parser.add_argument("--algos", nargs="*", help="only these algorithms (default: all)")
    args = parser.parse_args()
    groups, failed = defaultdict(list), 0
    imitation = RESULTS.parent / "imitation"
    for path in sorted([*RESULTS.rglob("result.json"), *imitation.rglob("result.json")]):
        result = results.read_result(path)
        wanted = result["algo"] in (args.algos or [result["algo"]])
        if "library" not in result and wanted and changed(result):
            key = result["git_commit"], result["algo"], result["env"]
            groups[*key, json.dumps(result["settings"])].append(path)
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
                if (ROOT / "demos").exists():
                    (old / "demos").symlink_to(ROOT / "demos")
            first = json.loads(found[0].read_text(encoding="utf-8"))  # old names of settings
            place = {"env": env, "seed": first["seed"]}
            one, two = (rows_of(code, algo, of | place, Path(temp, f"{number}{name}"), args.steps)
                        for name, code, of in (("old", old, first["settings"]),
                                               ("new", ROOT, json.loads(settings))))
            same = equal(one, two)
            print(f"{algo} {env} {settings} of {commit[:8]}, {len(one)} reports: "
                  f"{'the same' if same else 'NOT the same'}", flush=True)
            failed += not same
            if same:
                write_shown({"algo": algo, "env": env, "settings": json.loads(settings),
                             "git_commit": commit, "steps": args.steps,
                             "sources": results.sources(algo)})
    return int(failed > 0)


def write_shown(entry: dict) -> None:
    """Add an entry to shown.json. It replaces an older one for the same results."""
    what = ("algo", "env", "settings", "git_commit")
    others = [other for other in read_shown() if any(other[k] != entry[k] for k in what)]
    lines = sorted(map(json.dumps, [*others, entry]))
    files.write_text(SHOWN, "[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    sys.exit(main())
