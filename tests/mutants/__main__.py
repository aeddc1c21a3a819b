"""Do the tests catch bugs that a learning curve hides? Plant bugs and look.

    python -m tests.mutants                           the whole catalogue
    python -m tests.mutants --algo ppo mpi            only these modules
    python -m tests.mutants --sample 20 --jobs 2      20 bugs, two at a time
    python -m tests.mutants --id ppo-time-limit@a2c   only this bug
    python -m tests.mutants --stands                  only list the bugs whose text
                                                      is gone from their files

Each bug is planted in a copy of the tree. There a short training has to run;
then the module's tests run until one fails. The exit status is 1 if a bug
survives, no longer applies or crashes by itself. Seconds are CPU time.
diagnose/catalogue.py explains the entries.
"""
import argparse
import gc
import hashlib
import importlib
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diagnose.catalogue import ROOT, file_of, planted, plantings, read
from tests.registry import ALGOS

COPIED = ("algos", "utils", "tests")                            # other folders are linked
OURS = (*COPIED, "benchmarks", "diagnose", "plot")              # imported anew in the copy
CHECKS = "AssertionError|KeyError|ValueError|FloatingPointError"  # of ours
LIMIT = 600                                                     # seconds of CPU for all tests
# Imported once, before forking, because the imports take longer than most tests.
WARM = ("pytest torch torch.testing "
        "gymnasium scipy.stats tqdm matplotlib.figure jaxtyping beartype "
        "stable_baselines3 sb3_contrib pytest_timeout xdist.plugin "
        "mujoco gymnasium.envs.mujoco").split()
# Test files that may catch bugs of a module, besides those that `tests_of` finds.
MORE = {"ppo": "run learn bad_input", "gail": "demos", "bc": "demos", "vpg": "a2c"}
OF_UTILS = {"mpi": "mpi a2c", "optim": "optim mpi a2c contract",
            "stats": "mpi a2c saving onpolicy ddpg contract run",
            "nets": "envs onpolicy dqn", "atari": "envs", "buffers": "buffers envs",
            "seeds": "mpi run saving"}


def tests_of(module):
    """Return the test files that may catch a module's bugs, the quickest to catch one first.

    They are its own, its ancestors', those that its family shares, and the contract suite. House
    rules are not among them: they see that two files differ, not that a result is wrong.
    """
    if module in OF_UTILS:
        return OF_UTILS[module].split()
    found, ancestor = [], module
    while ancestor:
        found.append(ancestor)
        ancestor = ALGOS[ancestor].parent
    shared = {"vpg": "onpolicy", "ddpg": "offpolicy buffers",
              "dqn": "offpolicy buffers"}.get(found[-1], "")
    return list(dict.fromkeys([*found[:2], *shared.split(), "contract",
                               *MORE.get(module, "").split(), *found[2:]]))


TESTS = {module: tests_of(module) for module in (*ALGOS, *OF_UTILS)}


@dataclass(frozen=True)
class Result:
    id: str
    outcome: str                                                # killed, survived or error
    by: str                                                     # the test that failed, or the error
    seconds: float


def copy_tree(to):
    """Copy the project to a folder in which bugs can be planted."""
    skip = shutil.ignore_patterns("__pycache__")
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, to / path.name, ignore=skip)
        elif path.is_file():
            shutil.copy(path, to)
        elif not path.name.startswith((".", "__")):
            os.symlink(path, to / path.name)
    return to


def plant(planting, tree):
    """Plant a bug. Return path -> original text of its files. ValueError: it does not apply."""
    texts = {file_of(name, tree): file_of(name, tree).read_text("utf-8") for name in planting.files}
    write({path: planted(planting.mutant, text) for path, text in texts.items()})
    return texts


def write(texts):
    for path, text in texts.items():
        path.write_text(text, "utf-8")
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # bytecode may look current


def start_tests(module, tree):
    """Fork a process that runs a module's tests, writes to tree/said and exits as pytest does.

    Return its pid.
    """
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 10))
        said = os.open(tree / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1), os.dup2(said, 2)
        os.chdir(tree)
        os.environ["COLUMNS"] = "400"
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() != ROOT)]
        files = [str(next(Path("tests").glob(f"*/test_{name}.py"))) for name in TESTS[module]]
        status = sys.modules["pytest"].main(
            ["-p", "tests.mutants.smoke", "--of", module, "-n", "0", "-x", "-q", "-rfE", "--tb=no",
             "-m", "not slow and not notebooks", "--assert=plain", "--basetemp=scratch",
             "--timeout=300", "-p", "no:cacheprovider", "tests/mutants/smoke.py", *files])
        sys.stdout.flush()
        os._exit(status)
    finally:
        os._exit(99)


def run_all(todo, jobs):
    """Yield results as they come. `jobs` plantings run at a time, each in its own tree."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as tests/conftest.py does
    for name in WARM:
        importlib.import_module(name)
    gc.freeze()                                                 # forks need not copy it
    todo, running = list(reversed(todo)), {}
    with tempfile.TemporaryDirectory() as folder:
        free = [Path(folder, str(number)) for number in range(jobs)]
        for tree in free:
            tree.mkdir()
            copy_tree(tree)
        try:
            while todo or running:
                if todo and free:
                    planting, tree = todo.pop(), free.pop()
                    try:
                        texts = plant(planting, tree)
                        pid = start_tests(planting.module, tree)
                        running[pid] = planting, tree, texts
                    except ValueError as error:
                        free.append(tree)
                        yield Result(planting.id, "error", str(error), 0.0)
                    continue
                pid, status, used = os.wait4(-1, 0)
                planting, tree, texts = running.pop(pid)
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)              # left behind by a failed test
                write(texts)
                free.append(tree)
                said = (tree / "said").read_text("utf-8", errors="replace")
                outcome = verdict(said, os.waitstatus_to_exitcode(status), planting.mutant)
                yield Result(planting.id, *outcome, round(used.ru_utime + used.ru_stime, 1))
        finally:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)


def verdict(said, status, mutant):
    """Return (killed, survived or error; the test or the reason) from the output of pytest."""
    if status == -signal.SIGXCPU:
        return "killed", "the time limit"
    if status == 0:
        return "survived", ""
    red = re.search(r"^(?:FAILED|ERROR) (\S*?::.*?)(?: - (.*))?$", said, re.MULTILINE)
    if status != 1 or not red:                                  # pytest did not run to its end
        return "error", f"exit status {status} of pytest: {said[-300:]}"
    test, why = red[1], red[2] or ""
    if not test.startswith("tests/mutants/smoke.py"):
        return "killed", test
    if why.startswith("Failed: Timeout"):
        return "killed", "the time limit"
    if mutant.crashes and re.match(CHECKS, why):
        return "killed", "an error in the file"
    return "error", f"crashes by itself: {why}"


def sample(bugs, size):
    """Return `size` of them, the same at every call, spread evenly over the modules."""
    def drawn(text):
        return hashlib.sha256(text.encode()).hexdigest()

    rounds, seen = [], {}
    for bug in sorted(bugs, key=lambda bug: drawn(bug.id)):
        seen[bug.module] = seen.get(bug.module, 0) + 1
        rounds.append((seen[bug.module], drawn(bug.module), bug))
    return [bug for *_, bug in sorted(rounds, key=lambda row: row[:2])[:size]]


def chosen(args):
    """Return the plantings that the command line asks for, in the catalogue's order."""
    try:
        found = list(plantings(read()))
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    found = [p for p in found if not args.algo or p.module in args.algo]
    if args.id is not None:
        if unknown := set(args.id) - {p.id for p in found}:
            raise SystemExit(f"error: no such bug: {' '.join(sorted(unknown))}")
        found = [p for p in found if p.id in args.id]
    return sample(found, args.sample) if args.sample else found


def report_gone(todo):
    """Print the bugs that no longer apply to one of their files. Return the exit status."""
    gone = {}
    for planting in todo:
        for name in planting.files:
            try:
                planted(planting.mutant, file_of(name).read_text("utf-8"))
            except ValueError as error:
                gone[planting.mutant.id, name] = error
    for (ident, name), error in gone.items():
        print(f"{ident:<48} {name}: {error}")
    print(f"{len(gone)} texts are gone")
    return int(bool(gone))


def report(results):
    """Print results as they come, those not killed last. Return the exit status."""
    done = []
    for result in results:
        done.append(result)
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
                        help=f"only bugs of these modules: {', '.join(TESTS)}")
    parser.add_argument("--id", nargs="*", help="only these bugs")
    parser.add_argument("--jobs", type=int, default=1, help="how many bugs at a time")
    parser.add_argument("--sample", type=int, default=0,
                        help="only this many, always the same ones; 0: all")
    parser.add_argument("--stands", action="store_true",
                        help="run nothing: list the bugs whose text is gone from their files")
    args = parser.parse_args(argv)
    if args.stands:
        return report_gone(chosen(args))
    return report(run_all(chosen(args), args.jobs))


if __name__ == "__main__":
    sys.exit(main())
