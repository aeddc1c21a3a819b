"""The runs of a sweep at work: several at a time, each a process of its own; none stops another."""

import ctypes
import json
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
from utils.results import HASHES, finished, other_code, sources, summary

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # libc; a child must not load it


class Job(NamedTuple):
    """One run: its directory, its budget in steps, the command that starts it."""

    algo: str
    run_dir: Path
    total_steps: int
    command: list[str]


class Crew:
    """The processes that are running; a signal reaches all of them, and no more are started."""

    def __init__(self):
        self.processes, self.signal = set(), 0

    def on_signal(self, number, frame):
        self.signal = number  # Ctrl-C in a terminal reaches the runs already; twice is as once
        for process in list(self.processes):
            process.send_signal(number)

    def call(self, command: list[str], log) -> int:
        """The exit status of a process of its own, which writes to the open file `log`."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                                   stderr=subprocess.STDOUT, env=launch.clean_env(),
                                   preexec_fn=end_with_parent if LIBC else None)
        self.processes.add(process)
        if self.signal:  # it came while the process was being made
            process.send_signal(self.signal)
        status = process.wait()
        self.processes.discard(process)
        return status


def end_with_parent() -> None:
    """In the new process: where the sweep is killed, it does not train on unseen."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the thread ends that waits for it


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
        try:
            print(HASHES + json.dumps(sources(job.algo)), file=log, flush=True)
        except (OSError, SyntaxError, UnicodeError) as error:  # while a file is being edited
            print(f"the code cannot be read: {error!r}", file=log)
            return job, "not started", time.perf_counter() - start
        status = crew.call(command, log)
        if status == 0:
            command = [sys.executable, "-m", "utils.sweep", "--collect", str(job.run_dir)]
            status = crew.call(command, log)
    trouble = "stopped" if crew.signal else f"exit status {status}"
    if not status and not finished(job.run_dir, job.total_steps):
        status, trouble = 1, "it ended before its budget"
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
    if launch.size() == 1:
        return ThreadPoolExecutor(workers), partial(run_job, crew=crew)
    from mpi4py.futures import MPIPoolExecutor

    return MPIPoolExecutor(), run_on_worker


def run_all(jobs: list[Job], workers: int, crew: Crew) -> int:
    """Run what is not finished; one line when a run starts and ends; the exit status."""
    todo = [job for job in jobs if not finished(job.run_dir, job.total_steps)]
    say(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them finished before")
    done = [job for job in jobs if job not in todo]
    now = {algo: sources(algo) for algo in {job.algo for job in done}}      # parsed once
    other = [job.run_dir for job in done if other_code(job.run_dir, now[job.algo])]
    if other:
        say(f"{len(other)} of these were made by code that has changed since, such as {other[0]}; "
            "another --out keeps old and new apart")
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
