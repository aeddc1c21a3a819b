"""Train many runs: algorithms x environments x settings x seeds.

    python -m utils.sweep --algos ppo --envs Hopper-v4 Walker2d-v4 --seeds 6
        --jobs 2 --set lr=1e-4,3e-4 total_steps=1e5 --out DIR   (on one line)
    python -m utils.sweep --results DIR         (for runs started by hand)

--dry-run lists the runs. Each is a process of its own. It gets the directory
DIR/<env>/<algo>/<settings>/seed<k>, with its output beside it in seed<k>.log.
When it ends, result.json in that directory holds all that is needed to publish
it, in a few kB. The same command again skips finished runs and resumes
interrupted ones. On several machines, give each its own --first-seed or --shard.
"""

import itertools
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from utils.errors import UsageError
from utils.load import find_module
from utils.results import has_result, headline, make_results
from utils.roles import PLACE
from utils.command import as_flags, as_text, program, read_command
from utils.run.code import code, file_of
from utils.run.directory import as_folder, has_changed
from utils.run.settings import check_range, parse


@dataclass(frozen=True)
class Sweep:
    algos: tuple[str, ...] = ()  # files in algos/, without .py
    envs: tuple[str, ...] = ()  # Gymnasium ids
    seeds: int = 1  # number of seeds, counted from the first
    first_seed: int = 1  # the first seed; 100 with --seeds 3 gives 100, 101, 102
    set: tuple[str, ...] = ()  # settings, each with one or more values: lr=1e-4,3e-4 "hidden=64 64"
    jobs: int = 1  # runs at a time
    shard: str = "1/1"  # which of the runs: 2/5 trains the second of five parts
    out: str = "runs/sweep"  # the folder for all runs
    dry_run: bool = False  # only print the commands
    any_code: bool = False  # keep and resume runs of code that has changed since
    results: str = ""  # instead of training: write result.json for the runs in this folder

    def __post_init__(self):
        check_range(self, "seeds jobs", 1, 1e5)
        check_range(self, "first_seed", 0)
        part, _, parts = self.shard.partition("/")
        if not (part.isdecimal() and parts.isdecimal() and 0 < int(part) <= int(parts)):
            raise UsageError(f"--shard is {self.shard}; it takes 1/N to N/N, such as 2/5")


# ---- which runs


class Job(NamedTuple):
    """One run: its directory, number of steps, the command that starts or resumes it, its code."""

    run_dir: Path
    total_steps: int
    command: list[str]
    env: str
    file: Path  # of the algorithm, and its code when the sweep began
    code: str


def plan(sweep: Sweep) -> list[Job]:
    """Return all runs: first one seed of each, then the next seed of each."""
    if not (sweep.algos and sweep.envs):
        raise UsageError("--algos and --envs are needed, or --results")
    grid = {}
    for name, values in map(parse_set, sweep.set):
        grid[name] = grid.get(name, []) + values
    runs = {}  # a value that is given twice makes one run
    for algo, env, *values in itertools.product(sweep.algos, sweep.envs, *grid.values()):
        module = find_module(f"algos.{algo}", f"--algos {algo}")
        flags = [word for given in zip(grid, values) for word in set_flags(module, *given)]
        flags = ["--env", env, *flags]
        cfg = parse(module.Config, module.__doc__, flags)
        settings = ",".join(f"{name}={as_text(getattr(cfg, name), '-')}" for name in sorted(grid))
        folder = Path(sweep.out, as_folder(cfg.env), algo, as_folder(settings) or "default")
        known, _ = runs.setdefault(folder, (cfg, [sys.executable, "-m", module.__name__, *flags]))
        if known != cfg:
            raise UsageError(f"two of these runs have the same folder, {folder}")
    jobs, other = [], []
    seeds = range(sweep.first_seed, sweep.first_seed + sweep.seeds)
    for seed, (folder, (cfg, command)) in itertools.product(seeds, runs.items()):
        run_dir = folder / f"seed{seed}"
        command = [*command, "--seed", str(seed), "--run-dir", str(run_dir)]
        command += ["--resume"] * (run_dir / "config.json").exists()
        file = file_of(type(cfg))
        jobs.append(Job(run_dir, int(cfg.total_steps), command, cfg.env, file, code(file, cfg.env)))
        with suppress(UsageError):  # a damaged config.json: that run refuses to start
            if has_changed(type(cfg), run_dir) or any(run_dir.glob("algo-until-*.py")):
                other.append(run_dir)
    if other and not sweep.any_code:
        raise UsageError(f"{len(other)} of these runs are of code that has changed since (the "
                         f"algorithm, its environment or a module), such as {other[0]}; to train "
                         "anew, delete them or give another --out; to keep them and resume "
                         "unfinished ones, give --any-code")
    part, _, parts = sweep.shard.partition("/")
    return jobs[int(part) - 1::int(parts)]


def parse_set(text: str) -> tuple[str, list[str]]:
    """lr=1e-4,3e-4 -> ("lr", ["1e-4", "3e-4"]). A JSON object is one value."""
    name, _, values = text.partition("=")
    values = [values] if values.startswith("{") else values.split(",")
    if "" in values:
        raise UsageError(f"--set {text}: it takes name=value or name=value,value")
    return name.replace("-", "_"), values


def set_flags(module, name: str, value: str) -> list[str]:
    """Return one setting as flags of the algorithm, which refuses what it does not have."""
    if name in PLACE:
        raise UsageError(f"--set {name}: the sweep gives it itself (--envs, --seeds, --out)")
    default = getattr(module.Config, name, None)
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise UsageError(f"--set {name}={value}: it takes True or False")
        return as_flags(name, value.lower() == "true")
    return as_flags(name, value.split() if isinstance(default, tuple) else value)


# ---- running them


def call(command: list[str], log, running: set[subprocess.Popen]) -> int:
    """Run a command, with its output in the open file `log`, and return its exit status."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                               stderr=subprocess.STDOUT)
    running.add(process)
    status = process.wait()
    running.remove(process)
    return status


def run(job: Job, left: int, running: set[subprocess.Popen]) -> str:
    """Do a job, write and print its result, and return "" or a line on what went wrong."""
    if code(job.file, job.env) != job.code:
        return (f"{job.run_dir}: not started, since {job.file.name}, or a module that it imports, "
                "has changed during this sweep")
    print(f"{job.run_dir}: starts, {left} left to start", flush=True)
    job.run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{job.run_dir}.log", "a" if "--resume" in job.command else "w") as log:
        collect = [sys.executable, "-m", "utils.sweep", "--results", str(job.run_dir)]
        status = call(job.command, log, running) or call(collect, log, running)
    done = status == 0 and has_result(job.run_dir, job.total_steps)
    said = headline(job.run_dir) if done else f"exit status {status}, no result; see {log.name}"
    print(f"{job.run_dir}: {said}", flush=True)
    return "" if done else f"{job.run_dir}: {said}"


def run_all(jobs: list[Job], workers: int) -> int:
    """Run the jobs that are not finished. Return 1 if any failed; the others run all the same."""
    todo = [job for job in jobs if not has_result(job.run_dir, job.total_steps)]
    print(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them finished before", flush=True)
    running, left = set(), range(len(todo) - 1, -1, -1)
    with ThreadPoolExecutor(workers) as pool:
        try:
            troubles = list(pool.map(run, todo, left, itertools.repeat(running)))
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C or SIGTERM: see `program`
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()  # after Ctrl-C it was told twice, which is harmless
            raise
    for trouble in filter(None, troubles):
        print(trouble)
    return int(any(troubles))


# ---- the command


def main(sweep: Sweep) -> int:
    """Return the exit status: 1 if a run failed."""
    if sweep.results:
        return make_results(Path(sweep.results))
    jobs = plan(sweep)
    if not sweep.dry_run:
        try:
            Path(sweep.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {sweep.out}: {error.strerror}") from None
        status = run_all(jobs, sweep.jobs)
        print(f"table and curves: python -m plot {shlex.quote(sweep.out)}")
        return status
    for job in jobs:
        done = "# finished: " * has_result(job.run_dir, job.total_steps)
        print(done + shlex.join(job.command))
    return 0


if __name__ == "__main__":
    with program("the same command continues from here"):
        sys.exit(main(read_command(Sweep, __doc__, "python -m utils.sweep")))
