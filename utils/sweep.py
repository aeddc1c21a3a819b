"""Train many runs: algorithms x environments x settings x seeds.

    python -m utils.sweep --algos ppo --envs Hopper-v4 Walker2d-v4 --seeds 6
        --jobs 2 --set lr=1e-4,3e-4 total_steps=1e5 --out DIR   (on one line)
    python -m utils.sweep --results DIR         (for runs started by hand)

--dry-run lists the runs. Each is a process of its own. It gets the directory
DIR/<env>/<algo>/<settings>/seed<k>, with its output beside it in seed<k>.log.
When it ends, result.json in that directory holds all that is needed to publish
it, in a few kB. The same command again skips finished runs and resumes
interrupted ones. On several machines, give each its own --first-seed.
"""

import itertools
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from utils import mpi, play
from utils.run.command import program, read_command
from utils.run.ranges import as_text, check_range, flag
from utils.env_ids import with_version
from utils.envs import make_envs
from utils.errors import UsageError
from utils.results import OURS, has_result, headline, make_results
from utils.run.directory import as_folder
from utils.run.settings import parse

HINT = "--set {}=... gives a setting to the runs".format  # about a flag that a sweep does not have


@dataclass(frozen=True)
class Sweep:
    algos: tuple[str, ...] = ()  # files in algos/, without .py
    envs: tuple[str, ...] = ()  # Gymnasium ids
    seeds: int = 1  # number of seeds, counted from the first
    first_seed: int = 1  # the first seed; 100 with --seeds 3 gives 100, 101, 102
    set: tuple[str, ...] = ()  # settings, each with one or more values: lr=1e-4,3e-4 "hidden=64 64"
    jobs: int = 1  # runs at a time
    out: str = "runs/sweep"  # the folder for all runs
    dry_run: bool = False  # only print the commands
    results: str = ""  # instead of training: write result.json for the runs in this folder

    def __post_init__(self):
        check_range(self, "seeds jobs", 1, 1e5)
        check_range(self, "first_seed", 0)


# ---- which runs


class Job(NamedTuple):
    """One run: its directory, number of steps, and the command that starts it."""

    run_dir: Path
    total_steps: int
    command: list[str]


def plan(sweep: Sweep) -> list[Job]:
    """Return all runs: first one seed of each, then the next seed of each."""
    if not (sweep.algos and sweep.envs):
        raise UsageError("--algos and --envs are needed, or --results")
    grid = [parse_set(text) for text in sweep.set]
    names = [name for name, _ in grid]
    if len(names) > len(set(names)):
        raise UsageError(f"--set {' '.join(sweep.set)}: it takes each setting once")
    runs = []
    for algo, env in itertools.product(sweep.algos, sweep.envs):
        module = play.find_module(algo, f"--algos {algo}")
        for values in itertools.product(*(values for _, values in grid)):
            flags = [word for given in zip(names, values) for word in as_flags(module, *given)]
            flags = ["--env", env, *flags]
            cfg = with_version(parse(module.Config, module.__doc__, flags))
            runs.append((algo, module, cfg, flags))
    for module, cfg in {(run[0], run[2].env): run[1:3] for run in runs}.values():
        try:
            envs = make_envs(cfg, 1)
            module.Agent(envs.single_observation_space, envs.single_action_space, cfg)
            envs.close()
        except UsageError as error:  # the algorithm cannot handle the environment
            raise UsageError(f"{module.__name__} on {cfg.env}: {error}") from None
    jobs = {}  # a value that is given twice makes one run
    seeds = range(sweep.first_seed, sweep.first_seed + sweep.seeds)
    for seed, (algo, module, cfg, flags) in itertools.product(seeds, runs):
        settings = ",".join(f"{name}={as_text(getattr(cfg, name), '-')}" for name in sorted(names))
        settings = as_folder(settings) or "default"
        folder = Path(sweep.out, as_folder(cfg.env), algo, settings, f"seed{seed}")
        place = ["--seed", str(seed), "--run-dir", str(folder)]
        command = [sys.executable, "-m", module.__name__, *flags, *place]
        jobs[folder] = Job(folder, int(cfg.total_steps), command)
    return list(jobs.values())


def parse_set(text: str) -> tuple[str, list[str]]:
    """lr=1e-4,3e-4 -> ("lr", ["1e-4", "3e-4"]). A JSON object is one value."""
    name, _, values = text.partition("=")
    values = [values] if values.startswith("{") else values.split(",")
    if "" in values:
        raise UsageError(f"--set {text}: it takes name=value or name=value,value")
    return name.replace("-", "_"), values


def as_flags(module, name: str, value: str) -> list[str]:
    """Return one setting as flags of the algorithm, which refuses what it does not have."""
    if name in OURS:
        raise UsageError(f"--set {name}: the sweep gives it itself (--envs, --seeds, --out)")
    default = getattr(module.Config, name, None)
    if not isinstance(default, bool):
        return [flag(name), *(value.split() if isinstance(default, tuple) else [value])]
    if value.lower() not in ("true", "false"):
        raise UsageError(f"--set {name}={value}: it takes True or False")
    return [flag(name) if value.lower() == "true" else flag(f"no_{name}")]


# ---- running them


class Crew:
    """The processes that are running. A signal reaches all of them, and no more are started."""

    def __init__(self):
        self.processes, self.signal = set(), 0

    def on_signal(self, number, frame):
        self.signal = number  # after Ctrl-C in a terminal, runs get it twice, which is harmless
        for process in list(self.processes):
            process.send_signal(number)

    def call(self, command: list[str], log) -> int:
        """Run a command, with its output in the open file `log`, and return its exit status."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                                   stderr=subprocess.STDOUT)
        self.processes.add(process)
        if self.signal:  # it came while the process was starting
            process.send_signal(self.signal)
        status = process.wait()
        self.processes.discard(process)
        return status

    def run(self, job: Job) -> tuple[Job, str, float]:
        """Start or resume a run, write its result, and return (job, "" or what failed, seconds)."""
        if self.signal:
            return job, "stopped", 0.0
        start, command = time.perf_counter(), start_or_resume(job)
        job.run_dir.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{job.run_dir}.log", "a" if "--resume" in command else "w") as log:
            status = self.call(command, log)
            if status == 0:
                command = [sys.executable, "-m", "utils.sweep", "--results", str(job.run_dir)]
                status = self.call(command, log)
        trouble = f"exit status {status}" if status else ""
        if not trouble and not has_result(job.run_dir, job.total_steps):
            trouble = "it ended before its last step"
        return job, "stopped" if trouble and self.signal else trouble, time.perf_counter() - start


def start_or_resume(job: Job) -> list[str]:
    """Return the command of a run that is not finished, with --resume if it has begun."""
    begun = (job.run_dir / "config.json").exists()
    return [*job.command, "--resume"] if begun else job.command


def run_all(jobs: list[Job], workers: int, crew: Crew) -> int:
    """Run the jobs that are not finished, and return the exit status. A failure stops no other."""
    todo = [job for job in jobs if not has_result(job.run_dir, job.total_steps)]
    mpi.say(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them finished before")
    failed = []
    with ThreadPoolExecutor(workers) as pool:
        ended = as_completed([pool.submit(crew.run, job) for job in todo])
        for count, (job, trouble, seconds) in enumerate((one.result() for one in ended), 1):
            if trouble != "stopped":
                failed += [(job, trouble)] * bool(trouble)
                mpi.say(f"{'failed' if trouble else 'done  '} {job.run_dir}: {seconds:.0f} s, "
                        f"{trouble or headline(job.run_dir)}; {len(todo) - count} to go")
    for job, trouble in failed:
        lines = Path(f"{job.run_dir}.log").read_text(errors="replace").splitlines()
        print(f"\n{job.run_dir}: {trouble}; the end of {job.run_dir}.log:")
        print("\n".join(f"    {line}" for line in lines[-8:]))
    if crew.signal:
        print("stopped; the same command continues from here")
    return 128 + crew.signal if crew.signal else int(bool(failed))


# ---- the command


def main(sweep: Sweep) -> int:
    """Return the exit status: 1 if a run failed, 130 or 143 if a signal stopped the sweep."""
    if sweep.results:
        return make_results(Path(sweep.results))
    jobs = plan(sweep)
    if sweep.dry_run:
        for job in jobs:
            done = "# finished: " * has_result(job.run_dir, job.total_steps)
            print(done + shlex.join(start_or_resume(job)))
        return 0
    try:
        Path(sweep.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {sweep.out} cannot be made: {error.strerror}") from None
    crew = Crew()
    before = {number: signal.signal(number, crew.on_signal)
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return run_all(jobs, sweep.jobs, crew)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    with program():
        sys.exit(main(read_command(Sweep, __doc__, "python -m utils.sweep", hint=HINT)))
