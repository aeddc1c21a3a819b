"""Many runs: algorithms x environments x settings x seeds, each run a process of its own.

    python -m utils.sweep --algos ppo --envs Hopper-v4 Walker2d-v4 --seeds 6 --jobs 2
        --set lr=1e-4,3e-4 total_steps=1e5 --out DIR            (one line; --dry-run lists the runs)
    python -m utils.sweep --collect DIR                         (results of runs started otherwise)
    mpiexec -n 9 python -m mpi4py.futures -m utils.sweep ...    (8 runs at a time, on any machines)

A run stands in DIR/<env>/<algo>/<settings>/seed<k>, its output beside it in seed<k>.log, and its
result in it: result.json, a few kB, is all that is needed to publish it. The same command again
skips runs that are finished and resumes those that were interrupted. Several machines must see
DIR and this project under the same paths; if one of them fails, the sweep ends as a whole.
"""

import ctypes
import difflib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tyro
from tqdm import tqdm

from utils import play, ranks
from utils.collect import HASHES, OURS, collect_all, finished, sources, summary
from utils.inputs import check_range
from utils.mpi import UsageError

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # before any fork


@dataclass(frozen=True)
class Sweep:
    algos: tuple[str, ...] = ()  # files of algos/, without .py
    envs: tuple[str, ...] = ()  # Gymnasium ids
    seeds: int = 1  # how many, from the first seed on
    first_seed: int = 1  # 100 with --seeds 3: 100, 101, 102
    set: tuple[str, ...] = ()  # settings with one value or several: lr=1e-4,3e-4 "hidden=64 64"
    jobs: int = 1  # runs at a time; under mpiexec it is the number of workers
    out: str = "runs/sweep"  # the folder of all runs
    dry_run: bool = False  # only print the commands
    collect: str = ""  # instead of training: write result.json for the runs in this folder

    def __post_init__(self):
        check_range(self, "seeds jobs", 1)
        check_range(self, "first_seed", 0)


class Job(NamedTuple):
    """One run: its directory, its budget in steps, the command that starts it."""

    algo: str
    run_dir: Path
    total_steps: int
    command: list[str]


# ---- What is to be run


def plan(sweep: Sweep) -> list[Job]:
    """All runs, one seed of each before the next; UsageError if any of them would be refused."""
    if not (sweep.algos and sweep.envs):
        raise UsageError("--algos and --envs are needed, or --collect")
    grid = [parse_set(text) for text in sweep.set]
    names = [name for name, _ in grid]
    if len(set(names)) < len(names):
        raise UsageError(f"--set: {max(names, key=names.count)} is given twice")
    runs = []
    for algo, env in itertools.product(sweep.algos, sweep.envs):
        module = play.find_module(algo, f"--algos {algo}")
        for values in itertools.product(*(values for _, values in grid)):
            flags = [flag for given in zip(names, values) for flag in as_flags(module, *given)]
            command = [sys.executable, "-m", module.__name__, "--env", env, *flags]
            cfg = tyro.cli(module.Config, args=command[3:], prog=f"python -m {module.__name__}")
            runs.append((algo, module, cfg, command))
    for module, cfg in {(run[0], run[2].env): run[1:3] for run in runs}.values():
        envs = module.make_envs(cfg, 1)  # refuses what is not there or does not fit
        module.Agent(envs.single_observation_space, envs.single_action_space, cfg)
        envs.close()
    jobs = []
    seeds = range(sweep.first_seed, sweep.first_seed + sweep.seeds)
    for seed, (algo, _, cfg, command) in itertools.product(seeds, runs):
        settings = ",".join(f"{name}={as_text(getattr(cfg, name))}" for name in sorted(names))
        settings = re.sub(r"[^\w.,=+-]+", "-", settings) or "default"  # what a path can hold
        folder = Path(sweep.out, cfg.env.replace("/", "-"), algo, settings, f"seed{seed}")
        place = ["--seed", str(seed), "--run-dir", str(folder)]
        jobs.append(Job(algo, folder, int(cfg.total_steps), [*command, *place]))
    folders = [job.run_dir for job in jobs]
    if len(set(folders)) < len(folders):
        raise UsageError(f"two runs would share {max(folders, key=folders.count)}")
    return jobs


def parse_set(text: str) -> tuple[str, list[str]]:
    """lr=1e-4,3e-4 -> ("lr", ["1e-4", "3e-4"]); a JSON object is one value."""
    name, equals, values = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: it takes name=value or name=value,value")
    return name.replace("-", "_"), [values] if values.startswith("{") else values.split(",")


def as_flags(module, name: str, value: str) -> list[str]:
    """One setting as the algorithm's command line takes it; UsageError if it has none such."""
    defaults = {field.name: field.default for field in fields(module.Config)}
    if name in OURS:
        raise UsageError(f"--set {name}: the sweep gives it itself (--envs, --seeds, --out)")
    if name not in defaults:
        near = ", ".join(difflib.get_close_matches(name, defaults, 3, 0.4))
        raise UsageError(f"--set {name}: {module.__name__} has no such setting; nearest: {near}")
    flag, default = name.replace("_", "-"), defaults[name]
    if not isinstance(default, bool):
        return [f"--{flag}", *(value.split() if isinstance(default, tuple) else [value])]
    if value.lower() not in ("true", "false"):
        raise UsageError(f"--set {name}={value}: it takes True or False")
    return [f"--{flag}" if value.lower() == "true" else f"--no-{flag}"]


def as_text(value) -> str:
    """The same text for the same value, however it was typed: 1e-4 and 0.0001."""
    if isinstance(value, tuple):
        return "-".join(map(as_text, value))
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


# ---- Running


class Crew:
    """The processes that are running; a signal reaches all of them, and no more are started."""

    def __init__(self):
        self.processes, self.signal = set(), 0

    def on_signal(self, number, frame):
        self.signal = number
        for process in list(self.processes):
            process.send_signal(number)

    def call(self, command: list[str], log) -> int:
        """The exit status of a process of its own, which writes to the open file `log`."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                                   stderr=subprocess.STDOUT, env=ranks.clean_env(),
                                   preexec_fn=end_with_parent if LIBC else None)
        self.processes.add(process)
        if self.signal:  # it came while the process was being made
            process.send_signal(self.signal)
        status = process.wait()
        self.processes.discard(process)
        return status


def end_with_parent() -> None:
    """In the new process: where the sweep is killed, it does not train on unseen."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_or_resume(job: Job) -> list[str]:
    """The command for a run that is not finished."""
    begun = (job.run_dir / "config.json").exists()
    return [*job.command, "--resume"] if begun else job.command


def run_job(job: Job, crew: Crew) -> tuple[Job, str, float]:
    """Train, or go on training, then collect: (job, "" or why it failed, seconds)."""
    if crew.signal:
        return job, "stopped", 0.0
    start, command = time.perf_counter(), start_or_resume(job)
    job.run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{job.run_dir}.log", "a" if "--resume" in command else "w") as log:
        print(HASHES + json.dumps(sources(job.algo)), file=log, flush=True)
        status = crew.call(command, log)
        if status == 0:
            command = [sys.executable, "-m", "utils.sweep", "--collect", str(job.run_dir)]
            status = crew.call(command, log)
    trouble = "stopped" if crew.signal else f"exit status {status}"
    return job, trouble if status else "", time.perf_counter() - start


CREW = Crew()  # of a worker that MPI started


def run_on_worker(job: Job) -> tuple[Job, str, float]:
    """`run_job` in a worker, to which mpiexec passes signals on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, CREW.on_signal)
    return run_job(job, CREW)


class Live:
    """On a terminal, a line for each run that is training and one for all with the time left."""

    def __init__(self, jobs: list[Job]):
        self.steps = {job.run_dir: last_step(job.run_dir) for job in jobs}
        self.bar = partial(tqdm, unit=" steps", disable=not sys.stderr.isatty(), leave=False)
        self.bars = {"all": self.bar(desc="all", total=sum(job.total_steps for job in jobs),
                                     initial=sum(self.steps.values()))}

    def show(self, training: list[Job]) -> None:
        for job in training:
            run, step = job.run_dir, last_step(job.run_dir)
            if run not in self.bars:
                self.bars[run] = self.bar(desc=str(run), total=job.total_steps, initial=step)
            self.bars[run].update(step - self.bars[run].n)
            self.bars["all"].update(step - self.steps[run])
            self.steps[run] = step
        for run in set(self.bars) - {job.run_dir for job in training} - {"all"}:
            self.bars.pop(run).close()


def last_step(run: Path) -> int:
    """Where the last line of progress.csv stands; 0 if there is none."""
    try:
        with open(run / "progress.csv", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 10_000))
            return int(file.read().split(b"\n")[-2].split(b",")[0])
    except (OSError, IndexError, ValueError):
        return 0


def say(line: str) -> None:
    tqdm.write(line)  # above the bars
    sys.stdout.flush()


def make_pool(workers: int, crew: Crew):
    """What runs jobs: threads of this process, or the workers that mpiexec started; and how."""
    if ranks.size() == 1:
        return ThreadPoolExecutor(workers), partial(run_job, crew=crew)
    from mpi4py.futures import MPIPoolExecutor

    return MPIPoolExecutor(), run_on_worker


def run_all(jobs: list[Job], workers: int, crew: Crew) -> int:
    """Run what is not finished; one line when a run starts and ends; the exit status."""
    todo = [job for job in jobs if not finished(job.run_dir, job.total_steps)]
    say(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them finished before")
    start, failed, live = time.perf_counter(), [], Live(todo)
    verbs = {job.run_dir: "resume" if "--resume" in start_or_resume(job) else "start "
             for job in todo}
    pool, work = make_pool(workers, crew)
    with pool:
        futures = {pool.submit(work, job): job for job in todo}
        left = set(futures)
        while left:
            ended, left = wait(left, timeout=1, return_when=FIRST_COMPLETED)
            if crew.signal:
                left = {future for future in left if not future.cancel()}
            ended = [future.result() for future in ended if not future.cancelled()]
            training = [futures[future] for future in left if future.running()]
            for job in [job for job, *_ in ended] + training:
                if job.run_dir in verbs:
                    say(f"{verbs.pop(job.run_dir)} {job.run_dir}")
            for job, trouble, seconds in ended:
                if trouble != "stopped":
                    failed += [(job, trouble)] * bool(trouble)
                    say_end(job, trouble, seconds, start, len(todo), len(left))
            live.show(training)
        live.show([])
        live.bars["all"].close()
    for job, trouble in failed:
        lines = Path(f"{job.run_dir}.log").read_text(errors="replace").splitlines()
        print(f"\n{job.run_dir}: {trouble}; the end of {job.run_dir}.log:")
        print("\n".join(f"    {line}" for line in lines[-8:]))
    if crew.signal:
        print("stopped; the same command goes on from here")
    return 128 + crew.signal if crew.signal else int(bool(failed))


def say_end(job: Job, trouble: str, seconds: float, start: float, runs: int, left: int) -> None:
    rest = (time.perf_counter() - start) / (runs - left) * left
    say(f"{'failed' if trouble else 'done  '} {job.run_dir}: {seconds:.0f} s, "
        f"{trouble or summary(job.run_dir)}; {left} to go, {timedelta(seconds=round(rest))} left")


# ---- The command


def main(sweep: Sweep) -> int:
    """The exit status: 1 if a run failed, 130 or 143 if a signal stopped the sweep."""
    if sweep.collect:
        return collect_all(Path(sweep.collect))
    if ranks.size() > 1 and "mpi4py.futures" not in sys.modules:
        raise UsageError("mpiexec would run the sweep several times: mpiexec -n W python -m "
                         "mpi4py.futures -m utils.sweep ...")
    jobs = plan(sweep)
    if sweep.dry_run:
        for job in jobs:
            done = "# finished: " * finished(job.run_dir, job.total_steps)
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
    raise SystemExit(main(tyro.cli(Sweep, description=__doc__)))
