"""General mutants: does any small change of the mathematics turn a test red?

`python -m tests.mutants --math` calls it. Each function that stands under "mathematics" in algos/
is changed in all files that hold it at once, and the tests of all of these may see it. They are
loaded once; each mutant gets a fork of that process, in which its code takes the place of the true
one, and meets the tests of these files, those that name the function first.

math/equivalent.toml lists what no test can see, since nothing that counts changes, and why.
"""
import ast
import csv
import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from io import StringIO
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tests.mutants.catalogue import HERE, ROOT, TESTS, file_of, test_file
from tests.mutants.changes import functions, mutants, with_
from tests.mutants.smoke import LEFT_OUT, SLOW

BUDGET = 4                                                      # seconds of CPU for tests a mutant
LIMIT = 60                                                      # more than a test takes by itself
WITHOUT = {"collect", "run", "learn", "bad_input", "replay"}     # whole trainings: slow, and blunt
LOADED = []                                                     # functions, before any fork


@dataclass(frozen=True)
class Result:
    mutant: object
    outcome: str                                                # killed, survived, error
    by: str = ""
    seconds: float = 0.0


# ---- In a fork

def plant(function, tree):
    """Its code becomes that of `tree` wherever the function is held, and where it is loaded yet."""
    name, codes = function.name.partition(".")[2], {}
    for path in map(str, map(file_of, function.modules)):
        module = ast.Module([with_(tree, decorator_list=[])], [])
        parts = compile(ast.fix_missing_locations(module), path, "exec").co_consts
        codes[path] = next(part for part in parts
                           if isinstance(part, CodeType) and part.co_name == tree.name)

    def replace(among):
        for held in among:
            if held.__code__.co_qualname == name:
                held.__code__ = codes.get(held.__code__.co_filename, held.__code__)

    def execute(loader, module, plain=SourceFileLoader.exec_module):
        plain(loader, module)
        if loader.path in codes:
            replace(loaded())

    SourceFileLoader.exec_module = execute
    replace(LOADED)


def loaded():
    """The functions of algos/ that there are; of a fork those of its own."""
    return [held for held in gc.get_objects() if type(held) is FunctionType
            and Path(held.__code__.co_filename).parent == ROOT / "algos"]


def start(items, folder, planting=None):
    """A process that runs tests until one is red or time is up -> pid; folder/said: red or green.

    A line for each test, when it has ended. SIGPROF ends a test that hangs.
    """
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1), os.dup2(nothing, 2)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
        if planting:
            plant(planting.function, planting.tree)
        with open(folder / "said", "w", buffering=1) as said:
            for item, after in zip(items, [*items[1:], None]):
                signal.setitimer(signal.ITIMER_PROF, LIMIT)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                said.write("red\n" if item.session.testsfailed else "green\n")
                if item.session.testsfailed or (planting and time.process_time() > BUDGET):
                    break
        os._exit(0)
    finally:
        os._exit(99)


def finished(pid, running):
    """Of the next fork that ends, or this one: its entry in `running`, reds, status, seconds."""
    pid, status, used = os.wait4(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)                          # what a failed test left behind
    work = running.pop(pid)
    said = (work[-1] / "said").read_text().split()
    shutil.rmtree(work[-1])
    return work, said, os.waitstatus_to_exitcode(status), round(used.ru_utime + used.ru_stime, 2)


# ---- The process that forks

class Forks:
    """A pytest plugin: runs mutants in place of the collected tests."""

    def __init__(self, todo, listed, check, jobs, out):
        self.todo, self.listed, self.check, self.jobs, self.out = todo, listed, check, jobs, out
        self.table, self.status = sys.stdout, None

    def pytest_collection_modifyitems(self, items):
        """Those that start processes of their own would see nothing of a fork."""
        left_out = (*LEFT_OUT, *SLOW)
        items[:] = [item for item in items if not any(word in item.name for word in left_out)]

    def pytest_runtestloop(self, session):
        if not session.testsfailed:                             # all could be loaded
            importlib.import_module("torch._dynamo")            # loaded when first used
            LOADED[:] = loaded()
            gc.freeze()                                         # forks leave it where it is
            with redirect_stdout(self.table):
                try:
                    self.status = report(self.results(session.items), self.out)
                except ValueError as error:
                    print(f"error: {error}")
        return True

    def results(self, items):
        """One a mutant, as they come. What is listed as equivalent is run by a check alone."""
        todo, running, killers = list(reversed(self.todo)), {}, {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                while todo or running:
                    if todo and not self.check and todo[-1].key in self.listed:
                        mutant = todo.pop()
                        yield Result(mutant, "equivalent", self.listed[mutant.key])
                    elif todo and len(running) < self.jobs:
                        mutant, own = todo.pop(), Path(tempfile.mkdtemp(dir=folder))
                        tests = in_order(mutant.function, items)
                        running[start(tests, own, mutant)] = mutant, tests, own
                    else:
                        (mutant, tests, _), said, status, seconds = finished(-1, running)
                        outcome, by = verdict(said, tests, status)
                        if outcome == "killed" and said:
                            killers[tests[len(said) - 1]] = None
                        if self.check:
                            outcome = "error" if outcome == "killed" else "equivalent"
                        yield Result(mutant, outcome, by, seconds)
                own = Path(tempfile.mkdtemp(dir=folder))
                running[start(list(killers), own)] = (own,)
                _, said, status, _ = finished(-1, running)
                if status or len(said) < len(killers) or "red" in said:
                    raise ValueError(f"red without a mutant: {list(killers)[len(said) - 1].nodeid}")
            finally:
                for pid in running:
                    os.killpg(pid, signal.SIGKILL)


def in_order(function, items):
    """The tests of its files: those that name it, those whose helpers do, others."""
    name = function.name.split(".")[1]
    files = {f"test_{each}.py" for module in function.modules for each in TESTS[module].split()}

    def distance(item):
        direct = names_in(item.function.__code__) | set(item.name.split("[")[-1].split("-"))
        return 0 if name in direct else 1 if name in names_by_helpers(item.function) else 2

    return sorted((item for item in items if item.path.name in files), key=distance)


@cache
def names_by_helpers(function):
    found, todo = set(), [function]
    while todo:
        function = todo.pop()
        for name in names_in(function.__code__) - found:
            found.add(name)
            held = function.__globals__.get(name)
            if isinstance(held, FunctionType) and "test" in held.__module__:
                todo.append(held)
    return found


def names_in(code):
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def verdict(said, tests, status):
    """(killed, survived or error; by which test or why)"""
    if "red" in said:
        return "killed", re.sub(r"^tests/\w+/", "", tests[len(said) - 1].nodeid)
    if status == -signal.SIGPROF:
        return "killed", "the time limit"
    if status or not said:
        return "error", f"exit status {status} after {len(said)} of {len(tests)} tests"
    return "survived", ""


def equivalents(every, path=HERE / "math" / "equivalent.toml"):
    """(function, old, new): why, of what is listed; SystemExit if one is no mutant any more."""
    rows = tomllib.loads(path.read_text("utf-8"))["equivalent"]
    listed = {(row["function"], row["old"], row["new"]): row["why"] for row in rows}
    gone = sorted(listed.keys() - {mutant.key for mutant in every})
    if gone or len(listed) < len(rows):
        raise SystemExit("error: no mutant, or listed twice: "
                         + "; ".join(f"{name}: {old} -> {new}" for name, old, new in gone))
    return listed


def report(results, out):
    """The table as it grows, what was not killed at its end -> the exit status."""
    done = []
    with open(out or os.devnull, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["function", "line", "old", "new", "outcome", "by", "seconds"])
        for result in results:
            done.append(result)
            mutant = result.mutant
            writer.writerow([mutant.function.name, mutant.line, mutant.old, mutant.new,
                             result.outcome, result.by, result.seconds])
            file.flush()
            if result.outcome == "killed":
                print(line(result, result.by), flush=True)
    for result in (result for result in done if result.outcome == "equivalent"):
        print(line(result, "equivalent"))
    bad = [result for result in done if result.outcome in ("survived", "error")]
    for result in bad:
        print(line(result, f"{result.outcome.upper()} {result.by}"))
    equal = sum(result.outcome == "equivalent" for result in done)
    print(f"killed {len(done) - len(bad) - equal} of {len(done)}, {equal} equivalent")
    return int(bool(bad))


def line(result, by):
    mutant = result.mutant
    return (f"{mutant.function.name:<22}{mutant.line:>5}{result.seconds:>7.1f}  {by:<70}"
            f"  {' '.join(mutant.old.split())} -> {' '.join(mutant.new.split())}")


def main(algo=None, names=None, jobs=1, out="", check=False):
    """The exit status; a check runs what is listed, and all of it must survive."""
    every = [mutant for function in functions() for mutant in mutants(function)]
    listed = equivalents(every)
    if unknown := set(names or ()) - {mutant.function.name for mutant in every}:
        raise SystemExit(f"error: no such function: {' '.join(sorted(unknown))}")
    todo = [mutant for mutant in every if (mutant.key in listed or not check)
            and (not algo or set(algo) & set(mutant.function.modules))
            and (not names or mutant.function.name in names)]
    modules = {module for mutant in todo for module in mutant.function.modules}
    files = dict.fromkeys(name for module in TESTS if module in modules
                          for name in TESTS[module].split() if name not in WITHOUT)
    return run(todo, [test_file(name) for name in files], listed, check, jobs, out)


def run(todo, tests, listed=(), check=False, jobs=1, out=""):
    """The exit status of these mutants, by these files or single tests."""
    forks = Forks(todo, listed, check, jobs, out)
    with redirect_stdout(StringIO()) as said:
        pytest.main([f"--rootdir={ROOT}", "-n", "0", "-q", "-s", "--tb=no", "-p",
                     "no:cacheprovider", *(str(ROOT / test) for test in tests)], [forks])
    if forks.status is None:
        print(said.getvalue())
    return 1 if forks.status is None else forks.status
