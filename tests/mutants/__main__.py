"""Do the tests see what a learning curve does not?  Plants known bugs and waits for a red test.

    python -m tests.mutants                             the whole catalogue
    python -m tests.mutants --algo ppo logger --jobs 2  of these modules, two at a time
    python -m tests.mutants --id ppo-time-limit@a2c     this one
    python -m tests.mutants --second                    bugs of someone who had not seen the tests
    python -m tests.mutants --check --algo ppo          no bug at all: nothing may turn red

Each bug is planted in a copy of the tree, where first a short training has to run and then the
file's behaviour tests, until one fails. Exit status 1 if a bug survives them, if one no longer
applies or if it crashes by itself. tests/mutants/catalogue.py says what an entry holds.
"""
import argparse
import csv
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tests.mutants.catalogue import ROOT, TESTS, Planting, file_of, planted, plantings, read, sample

COPIED = ("algos", "utils", "tests")                            # what is no file is linked
LIMIT = 1200                                                    # seconds of all tests together


@dataclass(frozen=True)
class Result:
    id: str
    outcome: str                                                # killed, survived or error
    by: str                                                     # the red test, or what is wrong
    seconds: float


def copy_tree(to):
    """A tree to plant in."""
    skip = shutil.ignore_patterns("__pycache__")
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, to / path.name, ignore=skip)
        elif path.is_file():
            shutil.copy(path, to)
        elif not path.name.startswith((".", "__")):
            os.symlink(path, to / path.name)
    return to


def attempt(planting, trees):
    """Plant it in a tree that is free, run the tests, take it out again."""
    tree, start, kept = trees.get(), time.monotonic(), {}
    try:
        for module in planting.files:
            path = file_of(module, tree)
            text = path.read_text(encoding="utf-8")
            path.write_text(planted(planting.mutant, text), encoding="utf-8")
            kept[path] = text
        outcome = verdict(*run_tests(planting.module, tree), planting.mutant)
    except ValueError as error:
        outcome = "error", f"{path.name}: {error}"
    finally:
        for path, text in kept.items():
            path.write_text(text, encoding="utf-8")
        trees.put(tree)
    return Result(planting.id, *outcome, round(time.monotonic() - start, 1))


def run_tests(module, tree):
    """(exit status of pytest or None if it took too long, what it said)."""
    for folder in (tree, tree / "algos", tree / "utils"):       # a .pyc may look newer than it is
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    files = [f"tests/test_{name}.py" for name in TESTS[module].split()]
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.smoke", "--of", module,
               "-n", "0", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider",
               "tests/mutants/smoke.py", *files]
    env = os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "400"}
    process = subprocess.Popen(command, cwd=tree, env=env, text=True, errors="replace",
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        return process.communicate(timeout=LIMIT)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], None


def verdict(said, status, mutant=None):
    """(killed, survived or error; by which test or why), from what pytest said."""
    if status is None:
        return "killed", "the time limit"
    if status == 0:
        return "survived", ""
    red = re.search(r"^(?:FAILED|ERROR) (\S*?::.*?)(?: - (.*))?$", said, re.MULTILINE)
    if status != 1 or not red:                                  # no test has begun, or none ended
        return "error", f"exit status {status} of pytest: {said[-300:]}"
    test, why = red[1].removeprefix("tests/"), red[2] or ""
    if not test.startswith("mutants/smoke.py"):
        return "killed", test
    if why.startswith("Failed: Timeout"):
        return "killed", "the time limit"
    if mutant and mutant.crashes and why.startswith("AssertionError"):
        return "killed", "an assertion in the file"
    return "error", f"crashes by itself: {why}"


def chosen(args):
    """What the command line asks for, in the order of the catalogue."""
    found = list(plantings(read(args.second)))
    if args.check:
        found = [Planting(name, name, (), None) for name in dict.fromkeys(p.module for p in found)]
    found = [p for p in found if not args.algo or p.module in args.algo]
    if args.id:
        if unknown := set(args.id) - {p.id for p in found}:
            raise SystemExit(f"error: no such bug: {' '.join(sorted(unknown))}")
        found = [p for p in found if p.id in args.id]
    return sample(found, args.sample) if args.sample else found


def run_all(todo, jobs):
    """Results as they come, each of the jobs in a tree of its own."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees = queue.Queue()
        for number in range(jobs):
            Path(folder, str(number)).mkdir()
            trees.put(copy_tree(Path(folder, str(number))))
        futures = [pool.submit(attempt, planting, trees) for planting in todo]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def report(results, out):
    """The table as it grows, what was not killed at its end -> the exit status."""
    done, columns = [], [field.name for field in fields(Result)]
    with open(out or os.devnull, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for result in results:
            done.append(result)
            writer.writerow(asdict(result))
            file.flush()
            if result.outcome == "killed":
                print(f"{result.id:<48} {result.seconds:>6.1f}  {result.by}", flush=True)
    bad = sorted((r for r in done if r.outcome != "killed"), key=lambda r: (r.outcome, r.id))
    for result in bad:
        print(f"{result.id:<48} {result.seconds:>6.1f}  {result.outcome.upper()} {result.by}")
    print(f"killed {len(done) - len(bad)} of {len(done)}")
    return int(bool(bad))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", nargs="*", choices=TESTS, metavar="MODULE",
                        help=f"only bugs whose tests are those of {', '.join(TESTS)}")
    parser.add_argument("--id", nargs="*", help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--sample", type=int, default=0, help="only so many, always the same")
    parser.add_argument("--second", action="store_true", help="the second catalogue")
    parser.add_argument("--check", action="store_true", help="plant nothing: the tests must pass")
    parser.add_argument("--out", default="", help="a .csv file for the table")
    args = parser.parse_args(argv)
    results = run_all(chosen(args), args.jobs)
    if args.check:
        red = [result for result in results if result.outcome != "survived"]
        for result in red:
            print(f"{result.id}: {result.by}")
        return int(bool(red))
    return report(results, args.out)


if __name__ == "__main__":
    sys.exit(main())
