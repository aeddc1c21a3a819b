"""General mutants: does every small change of the mathematics make a test fail?

`python -m tests.mutants --math` calls this module. A function that stands under "mathematics" in
algos/ is changed in all files that contain it at once, and the tests of all these files may catch
the change. The tests are loaded once. For each mutant the process forks, the fork replaces the
function's code, and runs the tests of these files. Tests that name the function run first.

math/equivalent.toml lists the mutants that no test can catch, because they compute the same, and
says why.
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

from tests.mutants.catalogue import HERE, ROOT, TESTS, file_of, sample, test_file
from tests.mutants.changes import functions, mutants, with_
from tests.mutants.smoke import LEFT_OUT, SLOW

BUDGET = 4                                                      # seconds of CPU per mutant
LIMIT = 60                                                      # per test, which takes less
WITHOUT = {"collect", "run", "learn", "bad_input", "replay"}     # train: slow, and catch little
LOADED = []                                                     # functions, before forking


@dataclass(frozen=True)
class Result:
    mutant: object
    outcome: str                                                # killed, survived, error
    by: str = ""
    seconds: float = 0.0


# ---- In each fork

def plant(function, tree):
    """Give a function the code of `tree`, in all loaded modules and in those loaded later."""
    name, codes = function.name.partition(".")[2], {}
    for path in map(str, map(file_of, function.modules)):
        codes[path] = compiled(with_(tree, decorator_list=[]), name, function.tree, path)

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


def compiled(tree, name, true, path):
    """Return the code of a function or, if `name` has a dot, of a method.

    A method that says super() has a hidden variable `__class__`. Code replaces other code only if
    both have the same such variables, so a mutant without super() mentions it where nothing runs.
    """
    if not name.rpartition(".")[0]:
        nodes = [tree]
    else:
        if "super()" in ast.unparse(true):
            tree = with_(tree, body=[*tree.body, *ast.parse("if False: __class__").body])
        nodes = ast.parse("class Class: pass").body
        nodes[0].body = [tree]
    code = compile(ast.fix_missing_locations(ast.Module(nodes, [])), path, "exec")
    for _ in range(len(name.split("."))):
        code = next(part for part in code.co_consts if isinstance(part, CodeType))
    return code


def loaded():
    """Return the functions of algos/ in memory; in a fork, those loaded since gc.freeze()."""
    return [held for held in gc.get_objects() if type(held) is FunctionType
            and Path(held.__code__.co_filename).parent == ROOT / "algos"]


def start(items, folder, planting=None):
    """Fork a process that runs tests until one fails or time is up. Return its pid.

    It writes "red" or "green" to folder/said after each test. SIGPROF ends a test that hangs.
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
    """Wait for fork `pid` (-1: any). Return its entry in `running`, output, status, seconds."""
    pid, status, used = os.wait4(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)                          # left behind by a failed test
    work = running.pop(pid)
    heard = work[-1] / "said"
    said = heard.read_text().split() if heard.exists() else []  # else it failed before the tests
    shutil.rmtree(work[-1])
    return work, said, os.waitstatus_to_exitcode(status), round(used.ru_utime + used.ru_stime, 2)


# ---- In the process that forks

class Forks:
    """A pytest plugin that collects the tests as usual, then runs mutants instead of the tests."""

    def __init__(self, todo, listed, check, jobs, out):
        self.todo, self.listed, self.check, self.jobs, self.out = todo, listed, check, jobs, out
        self.table, self.status = sys.stdout, None

    def pytest_collection_modifyitems(self, items):
        """Remove slow tests, and tests in subprocesses, which would not see a fork's mutant."""
        left_out = (*LEFT_OUT, *SLOW)
        items[:] = [item for item in items if not any(word in item.name for word in left_out)]

    def pytest_runtestloop(self, session):
        if not session.testsfailed:                             # no import failed
            importlib.import_module("torch._dynamo")            # else each fork would load it
            LOADED[:] = loaded()
            gc.freeze()                                         # forks need not copy it
            with redirect_stdout(self.table):
                try:
                    self.status = report(self.results(session.items), self.out)
                except ValueError as error:
                    print(f"error: {error}")
        return True

    def results(self, items):
        """Yield one result per mutant. Only a check runs those that are listed as equivalent."""
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
    """Sort the tests of a function's files: those that name it, those whose helpers do, others."""
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
    """Return (killed, survived or error; the test or the reason)."""
    if "red" in said:
        return "killed", re.sub(r"^tests/\w+/", "", tests[len(said) - 1].nodeid)
    if status == -signal.SIGPROF:
        return "killed", "the time limit"
    if status or not said:
        return "error", f"exit status {status} after {len(said)} of {len(tests)} tests"
    return "survived", ""


def equivalents(every, path=HERE / "math" / "equivalent.toml"):
    """Return the list, key -> reason. SystemExit: an entry is no mutant, or is listed twice."""
    rows = tomllib.loads(path.read_text("utf-8"))["equivalent"]
    listed = {(row["function"], row["old"], row["new"]): row["why"] for row in rows}
    gone = sorted(listed.keys() - {mutant.key for mutant in every})
    if gone or len(listed) < len(rows):
        raise SystemExit("error: not a mutant, or listed twice: "
                         + "; ".join(f"{name}: {old} -> {new}" for name, old, new in gone))
    return listed


def report(results, out):
    """Print results as they come, those not killed last. Return the exit status."""
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


def main(algo=None, names=None, jobs=1, out="", check=False, size=0):
    """Return the exit status. With `check`, run the listed mutants, which must all survive.

    size    run only this many, always the same ones; 0: all
    """
    every = [mutant for function in functions() for mutant in mutants(function)]
    listed = equivalents(every)
    if unknown := set(names or ()) - {mutant.function.name for mutant in every}:
        raise SystemExit(f"error: no such function: {' '.join(sorted(unknown))}")
    todo = [mutant for mutant in every if (mutant.key in listed or not check)
            and (not algo or set(algo) & set(mutant.function.modules))
            and (not names or mutant.function.name in names)]
    if size:
        todo = [mutant for mutant in todo if check or mutant.key not in listed]
        todo = sample(todo, size, lambda mutant: ("".join(mutant.key), mutant.function.modules[0]))
    modules = {module for mutant in todo for module in mutant.function.modules}
    files = dict.fromkeys(name for module in TESTS if module in modules
                          for name in TESTS[module].split() if name not in WITHOUT)
    return run(todo, [test_file(name) for name in files], listed, check, jobs, out)


def run(todo, tests, listed=(), check=False, jobs=1, out=""):
    """Run mutants against test files or single tests. Return the exit status."""
    forks = Forks(todo, listed, check, jobs, out)
    with redirect_stdout(StringIO()) as said:
        pytest.main([f"--rootdir={ROOT}", "-n", "0", "-q", "-s", "--tb=no", "-p",
                     "no:cacheprovider", *(str(ROOT / test) for test in tests)], [forks])
    if forks.status is None:
        print(said.getvalue())
    return 1 if forks.status is None else forks.status
