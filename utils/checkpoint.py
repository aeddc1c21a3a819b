"""Save checkpoints that survive a kill, a power cut or a full disk, and load them safely.

A checkpoint is written under a temporary name (utils/files.py) and read back before it gets its
own. It holds only tensors and plain values, so it opens with `weights_only=True` and a stranger's
file runs no code.

    policy.pt                   weights and statistics: all that acting needs
    resume-<step>/rank<k>.pt    what rank k needs to continue; one such folder is always whole
"""

import glob
import os
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch

from utils import mpi
from utils.files import sync_folder, whole
from utils.mpi import UsageError, together

PLAIN = (int, float, bool, str, bytes, type(None))


def save_file(path, payload):
    """Write `payload`, a dict of state dicts and plain values, to the file `path`.

    TypeError names a value that could not be loaded again, such as a NumPy array or a deque.
    OSError: for example, the disk is full. After either error an older file at `path` is intact.
    """
    refuse_foreign(payload, "checkpoint")
    try:
        with whole(path) as file:
            torch.save(payload, file)
            file.flush()
            read(file.name, mmap=True)
    except (OSError, RuntimeError, ValueError) as error:
        cause = error.__context__ or error  # torch hides that the disk is full
        reason = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
        raise OSError(f"cannot write {path}: {reason}; the old checkpoint is intact") from error


def load_file(path, *keys, flag=""):
    """Return the dict that `save_file` wrote to `path`, with tensors on the CPU.

    flag    the flag that named the file, to begin the message of a UsageError

    UsageError says what is wrong: one of `keys` is missing, a bit was flipped, it holds code, ...
    """
    try:
        return read(path, *keys)
    except ValueError as error:
        raise UsageError(f"{flag}{flag and ': '}{error}") from None


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
        for left in tmp.parent.glob("resume-*.tmp"):  # from a killed process
            shutil.rmtree(left)
        tmp.mkdir()
    mpi.barrier()
    try:
        together(save_file, tmp / f"rank{mpi.rank()}.pt", payload)
    except BaseException:
        if root:
            shutil.rmtree(tmp, ignore_errors=True)  # the disk may be full
        raise
    if root:
        os.rename(tmp, tmp.with_suffix(""))
        sync_folder(tmp.parent)
        for old, folder in resume_folders(run_dir).items():
            if old != step:
                shutil.rmtree(folder)


def load_resume(run_dir, *keys):
    """Return (step, this rank's payload) of the newest checkpoint.

    UsageError on every rank: a file is damaged, or another number of processes saved it.
    """
    step, folder = max(resume_folders(run_dir).items())
    ranks = len(list(folder.glob("rank*.pt")))
    if ranks != mpi.size():
        raise UsageError(f"{folder} was saved by {ranks} processes and needs as many to continue, "
                         f"but --num-procs is {mpi.size()}")
    return step, together(load_file, folder / f"rank{mpi.rank()}.pt", *keys)


def resume_folders(run_dir):
    """Return {step: folder} for a run's whole checkpoints: usually one, after a kill maybe two."""
    names = glob.glob("resume-*", root_dir=run_dir)
    return {int(name[7:]): Path(run_dir, name) for name in names if name[7:].isdecimal()}


def read(path, *keys, mmap=False):
    """Return the dict in a file, which must have `keys`. ValueError says what is wrong."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch loads a flipped bit silently
        if damaged:
            raise ValueError(f"{damaged} fails its checksum")
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        missing = [key for key in keys if key not in payload]
        if missing or not isinstance(payload, dict):
            raise ValueError(f"it lacks {', '.join(missing)}")
        return payload
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        asks = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(f"{path} was refused and nothing in it was run: it holds "
                         f"{asks[1] if asks else 'something'}, which is no tensor or plain value"
                         ) from error
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is damaged or no checkpoint: {reason}") from error


def refuse_foreign(value, name):
    """TypeError names a value that `weights_only=True` would refuse to load: too late by then."""
    kind, parts = type(value), ()  # not isinstance: np.float64 is a float, and refused at load
    if kind in (dict, OrderedDict):
        parts = value.items()
    elif kind in (list, tuple):
        parts = enumerate(value)
    elif kind not in PLAIN and not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {kind.__module__}.{kind.__qualname__}, but a checkpoint "
                        "may hold only tensors and plain values")
    for key, item in parts:
        refuse_foreign(key, f"a key of {name}")
        refuse_foreign(item, f"{name}.{key}")
