"""Run the processes of a sweep, several at a time. A run that fails does not stop the others."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from utils import launch
from utils.results import has_result, headline

# The C library, loaded here because a new process must not load anything before it starts.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Job(NamedTuple):
    """One run: its algorithm, directory, number of steps, and the command that starts it."""

    algo: str
    run_dir: Path
    total_steps: int
    command: list[str]


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
                                   stderr=subprocess.STDOUT, env=launch.clean_env(),
                                   preexec_fn=end_with_parent if LIBC else None)
        self.processes.add(process)
        if self.signal:  # it came while the process was starting
            process.send_signal(self.signal)
        status = process.wait()
        self.processes.discard(process)
        return status


def end_with_parent() -> None:
    """Called in a new process: make the kernel kill it when the sweep is killed."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, when the thread that waits for it ends


def start_or_resume(job: Job) -> list[str]:
    """Return the command of a run that is not finished, with --resume if it has begun."""
    begun = (job.run_dir / "config.json").exists()
    return [*job.command, "--resume"] if begun else job.command


def run_job(job: Job, crew: Crew) -> tuple[Job, str, float]:
    """Start or resume a run, write its result, and return (job, "" or what failed, seconds)."""
    if crew.signal:
        return job, "stopped", 0.0
    start, command = time.perf_counter(), start_or_resume(job)
    job.run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{job.run_dir}.log", "a" if "--resume" in command else "w") as log:
        status = crew.call(command, log)
        if status == 0:
            command = [sys.executable, "-m", "utils.sweep", "--results", str(job.run_dir)]
            status = crew.call(command, log)
    trouble = "stopped" if crew.signal else f"exit status {status}"
    if not status and not has_result(job.run_dir, job.total_steps):
        status, trouble = 1, "it ended before its last step"
    return job, trouble if status else "", time.perf_counter() - start


CREW = Crew()  # used in workers that MPI started


def run_on_worker(job: Job) -> tuple[Job, str, float]:
    """`run_job` in a worker, which gets signals from mpiexec."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, CREW.on_signal)
    return run_job(job, CREW)


class Live:
    """Progress bars on a terminal: one per run that is training, and one for the whole sweep."""

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
    """Return the step in the last whole line of progress.csv, or 0 if there is none."""
    try:
        with open(run / "progress.csv", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 10_000))
            return int(file.read().split(b"\n")[-2].split(b",")[0])
    except (OSError, IndexError, ValueError):
        return 0


def print_line(line: str) -> None:
    """Print above the progress bars."""
    tqdm.write(line)
    sys.stdout.flush()


def make_pool(workers: int, crew: Crew):
    """Return (pool, function of a job): threads of this process, or workers under mpiexec."""
    if launch.size() == 1:
        return ThreadPoolExecutor(workers), partial(run_job, crew=crew)
    from mpi4py.futures import MPIPoolExecutor

    return MPIPoolExecutor(), run_on_worker


def run_all(jobs: list[Job], workers: int, crew: Crew) -> int:
    """Run the jobs that are not finished, print when each starts and ends; return the status."""
    todo = [job for job in jobs if not has_result(job.run_dir, job.total_steps)]
    print_line(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them finished before")
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
                    print_line(f"{verbs.pop(job.run_dir)} {job.run_dir}")
            for job, trouble, seconds in ended:
                if trouble != "stopped":
                    failed += [(job, trouble)] * bool(trouble)
                    rest = time_left(time.perf_counter() - start, len(todo), len(left),
                                     len(training))
                    print_end(job, trouble, seconds, rest, len(left))
            live.show(training)
        live.show([])
        live.bars["all"].close()
    for job, trouble in failed:
        lines = Path(f"{job.run_dir}.log").read_text(errors="replace").splitlines()
        print(f"\n{job.run_dir}: {trouble}; the end of {job.run_dir}.log:")
        print("\n".join(f"    {line}" for line in lines[-8:]))
    if crew.signal:
        print("stopped; the same command continues from here")
    return 128 + crew.signal if crew.signal else int(bool(failed))


def time_left(elapsed: float, runs: int, left: int, running: int) -> float:
    """Return an estimate in seconds. A run that is under way counts as half done."""
    ahead = left - running / 2
    return elapsed / (runs - ahead) * ahead


def print_end(job: Job, trouble: str, seconds: float, rest: float, left: int) -> None:
    """Print how a run ended, and an estimate of the seconds left."""
    print_line(f"{'failed' if trouble else 'done  '} {job.run_dir}: {seconds:.0f} s, "
               f"{trouble or headline(job.run_dir)}; {left} to go, "
               f"{timedelta(seconds=round(rest))} left")
