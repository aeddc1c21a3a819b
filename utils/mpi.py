"""Processes that train one agent together: how many there are, and averages over them.

Every process ("rank") runs the same program on its share of the environments. Gradients
(optim.py) and statistics (stats.py) are averaged over ranks, so P ranks with 1/P of each batch
take the same step as one process with the whole batch. A single process never imports MPI.
"""

import functools
import os  # and no torch: `python -m plot` starts quickly

# How many processes there are, by --num-procs or mpiexec. Slurm's PMIx tells the rank alone.
SIZES = ("PLAINRL_PROCS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def launched() -> int:
    """Return how many processes the launcher says that it has started; 0 if it does not say."""
    sizes = [int(os.environ[name]) for name in SIZES if name in os.environ]
    return sizes[0] if sizes else 0 if "PMIX_RANK" in os.environ else 1


@functools.cache
def comm():
    """Return MPI's communicator of all ranks, or None if no launcher has started several."""
    if launched() == 1:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def rank() -> int:
    """Return this process's number, from 0 to size() - 1."""
    return comm().Get_rank() if comm() else 0


def size() -> int:
    """Return how many processes train together."""
    return comm().Get_size() if comm() else 1


def say(line: str) -> None:
    """Print on rank 0, at once."""
    if rank() == 0:
        print(line, flush=True)


say_once = functools.cache(say)  # the same line only once in a process


def share(total: int) -> int:
    """Return this rank's part of a total. ValueError: the ranks cannot divide it equally."""
    if total % size():  # settings.py refuses the usual names before, by their flags
        raise ValueError(f"{size()} processes cannot share {total} equally")
    return total // size()


def average(tensor):
    """Replace a float32 or float64 tensor, in place, by its mean over ranks, and return it."""
    if size() == 1:
        return tensor
    from mpi4py import MPI

    host = tensor.detach().cpu().contiguous()  # MPI reads host memory without gaps
    comm().Allreduce(MPI.IN_PLACE, host.numpy())
    tensor.detach().copy_(host.div_(size()))
    return tensor


def gather(value) -> list:
    """Return every rank's plain object, in the order of ranks, on every rank."""
    return [value] if size() == 1 else comm().allgather(value)
