"""How the processes ("ranks") of one run start, and how they end together.

Every rank runs the same program. `--num-procs P` starts it again, P times, under mpiexec. On a
cluster the user calls mpiexec, which does the same. mpi4py is imported only if a launcher says
that there are other ranks.
"""

import atexit
import functools
import os
import shutil
import sys
import time
import traceback

# --num-procs comes first: MPI must connect as many ranks as it promised.
_SIZES = ("PLAINRL_PROCS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
_LAUNCHERS = ("PLAINRL_", "PMI_", "PMIX_", "OMPI_", "MPI_", "MPIEXEC_", "HYDRA_", "HYDI_")

_size = next((int(os.environ[name]) for name in _SIZES if name in os.environ), 1)
_rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)


class UsageError(SystemExit):
    """Bad input. Prints `error: <message>` on rank 0; uncaught, it exits with status 2."""

    def __init__(self, message: str):
        super().__init__(message)
        self.code = 2  # Python would print a message put here, on every rank
        if _rank == 0:
            print(f"error: {message}", file=sys.stderr, flush=True)
        if _size > 1:
            atexit.unregister(_leave)
            atexit.register(_leave, f"error: {message}", self.code)


def rank() -> int:
    """Return this process's number, from 0 to size() - 1."""
    return _rank


def size() -> int:
    """Return how many processes train together."""
    return _size


@functools.cache
def comm():
    """Return MPI's communicator of all ranks. UsageError: it connects fewer than were started."""
    global _size
    from mpi4py import MPI

    expected, found = _size, MPI.COMM_WORLD.Get_size()
    if found != expected:
        _size = 1  # there is nobody to wait for at the end
        raise UsageError(f"{expected} processes were started, but MPI connects {found}: this "
                         "mpiexec belongs to another MPI than mpi4py. Use the one beside "
                         f"{sys.executable}, or --num-procs")
    return MPI.COMM_WORLD


def started_by_user() -> bool:
    """Return whether the user called mpiexec, instead of --num-procs."""
    return _size > 1 and "PLAINRL_PROCS" not in os.environ


def bar_file():
    """Return the stream for a progress bar, or None without a terminal.

    A rank writes into a pipe, so --num-procs tells it which stream ends at a terminal.
    """
    terminal = os.environ.get("PLAINRL_TERMINAL")
    if terminal:
        return getattr(sys, terminal)
    return sys.stderr if sys.stderr.isatty() else None


def clean_env() -> dict[str, str]:
    """Return the environment without a launcher's variables, for a program that is not a rank."""
    return {key: val for key, val in os.environ.items() if not key.startswith(_LAUNCHERS)}


def find_mpiexec() -> str | None:
    """Return the path of mpiexec, of the one beside this Python if there is one, or None."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=path)


def launch(cfg) -> None:
    """Start this program again as `cfg.num_procs` ranks. Ranks and single processes return.

    This process becomes mpiexec, which passes SIGINT and SIGTERM on to the ranks and ends with
    their exit status. UsageError: more processes than cores, no mpiexec, a call from a notebook,
    or a number that differs from the launcher's.
    """
    procs = cfg.num_procs
    if _size > 1:
        comm()
    if procs in (1, _size):
        return
    if any(name in os.environ for name in _SIZES):
        raise UsageError(f"--num-procs is {procs}, but the launcher started {_size}")
    if type(cfg).__module__ != "__main__" or not hasattr(sys.modules["__main__"], "__file__"):
        raise UsageError(f"num_procs is {procs}, which would start the running program again: use "
                         f"--num-procs {procs} on the command line, or num_procs=1 from Python")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if procs > cores:
        raise UsageError(f"--num-procs is {procs}; this machine's cores take 1 to {cores}")
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise UsageError(f"--num-procs is {procs}, but there is no mpiexec here: pip install mpich")
    command = [mpiexec, "-n", str(procs), sys.executable, *sys.orig_argv[1:]]
    # Inside a Slurm job mpiexec would ask Slurm for machines; fork means this machine.
    env = {"PLAINRL_PROCS": str(procs), "HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
    if sys.stderr.isatty():
        # On one terminal, the table and the bar need one pipe, or they would overtake each other.
        env["PLAINRL_TERMINAL"] = "stdout" if sys.stdout.isatty() else "stderr"
        env["TQDM_NCOLS"] = str(shutil.get_terminal_size().columns - 1)  # tqdm cannot ask a pipe
    sys.stdout.flush()
    # A terminal stops a background job that reads from it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execve(mpiexec, command, clean_env() | env)


def say(line: str) -> None:
    """Print on rank 0, at once."""
    if _rank == 0:
        print(line, flush=True)


def _leave(text: str, code: int) -> None:
    """End in order with ranks that fail too; abort those that go on.

    They would wait for the next message of this rank for ever.
    """
    world, tag = comm(), 2**14
    others = set(range(_size)) - {_rank}
    notes = [world.isend(None, other, tag) for other in others]
    deadline = time.monotonic() + 3
    while others and time.monotonic() < deadline:
        time.sleep(0.01)
        others = {other for other in others if not world.iprobe(other, tag)}
    if others:
        if _rank > 0:  # rank 0 has printed it already
            print(f"rank {_rank} of {_size}: {text}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # mpiexec loses output that it has not passed on when it ends
        world.Abort(code)
    del notes  # MPI reads them until here


def _die(kind, error, trace) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    if _rank == 0:
        print(text, file=sys.stderr, flush=True)
    if kind is KeyboardInterrupt:
        comm().Abort(130)
    _leave(text, 1)


if _size > 1:
    sys.excepthook = _die
