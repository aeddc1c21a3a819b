"""Checkpoints: whole, read back before they replace the last one, and free of code.

They hold only tensors and plain values, so they open with `weights_only=True` and a stranger's file
runs no code.

    policy.pt                   weights, statistics and spaces: all that acting needs
    resume-<step>/rank<k>.pt    what rank k needs to continue; one such folder is always whole
"""

import pickle
import shutil
import zipfile
from pathlib import Path

import torch

from utils import mpi
from utils.errors import UsageError
from utils.files import atomic_write
from utils.run.launch import from_root, together


def save_file(path, payload):
    """Write `payload`, a dict of state dicts and plain values, to the file `path`.

    OSError: the disk is full, or a value is neither a tensor nor plain, such as a NumPy array.
    """
    try:
        with atomic_write(path) as file:
            torch.save(payload, file)
            file.flush()
            load_file(file.name, mmap=True)
    except (OSError, RuntimeError, UsageError) as error:
        cause = error.__context__ or error  # PyTorch hides a full disk behind a RuntimeError
        reason = getattr(cause, "strerror", None) or str(error).partition("\n")[0]
        raise OSError(f"cannot write {path}: {reason}; the old checkpoint is intact") from error


def load_file(path, *keys, flag="", mmap=False):
    """Return the dict that `save_file` wrote to `path`, with tensors on the CPU.

    UsageError, which begins with `flag`, says what is wrong with it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch loads a flipped bit silently
        if damaged:
            raise ValueError(f"{damaged} fails its checksum")
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if missing := [key for key in keys if key not in payload]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return payload
    except Exception as error:  # a damaged file can fail in any way
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):  # which says how to run it all the same
            reason = "it holds what is no tensor or plain value; nothing in it was run"
        raise UsageError(f"{flag}{path} cannot be read as a checkpoint: {reason}") from None


def load_into(module, state, source):
    """Copy a state dict into `module`, in place, so an optimizer keeps its parameters.

    UsageError names the first parameter or buffer that differs in shape or that one side lacks.
    """
    own = module.state_dict()
    for name in [*own, *state]:
        here, there = (list(d[name].shape) if name in d else "absent" for d in (own, state))
        if here != there:
            raise UsageError(f"{source} holds another network: its {name} is {there}, not {here}")
    module.load_state_dict(state)


def save_resume(run_dir, step, payload):
    """Save every rank's payload as the folder resume-<step>, then delete older ones.

    Every rank calls this at the same step. All ranks see the same `run_dir`. OSError on every
    rank: for example, the disk is full. The previous checkpoint is then intact.
    """
    tmp = Path(run_dir, f"resume-{step}.tmp")
    root = mpi.rank() == 0
    if root:
        for left in tmp.parent.glob("resume-*.tmp"):  # of a save that a kill or a full disk ended
            shutil.rmtree(left)
        tmp.mkdir()
    together(None)  # the folder is there
    together(save_file, tmp / f"rank{mpi.rank()}.pt", payload)
    if root:
        tmp.rename(tmp.with_suffix(""))
        for old, folder in resume_folders(run_dir).items():
            if old != step:
                shutil.rmtree(folder)


def load_resume(run_dir, *keys):
    """Return (step, this rank's payload) of the newest checkpoint.

    UsageError on every rank: a file is damaged, or another number of processes saved it.
    """
    step, folder, ranks = from_root(newest, run_dir)
    if ranks != mpi.size():
        raise UsageError(f"{folder} was saved by {ranks} processes and needs as many to continue, "
                         f"but --num-procs is {mpi.size()}")
    return step, together(load_file, folder / f"rank{mpi.rank()}.pt", *keys)


def newest(run_dir):
    """Return the step, the folder and the number of ranks of the newest checkpoint."""
    step, folder = max(resume_folders(run_dir).items())
    return step, folder, len(list(folder.glob("rank*.pt")))


def resume_folders(run_dir):
    """Return {step: folder} for a run's whole checkpoints: usually one, after a kill maybe two."""
    folders = Path(run_dir).glob("resume-*")
    return {int(path.name[7:]): path for path in folders if path.name[7:].isdecimal()}
