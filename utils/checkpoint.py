"""Whole or not at all, on disk and back.

A checkpoint is written by `utils.files.whole` and, before it gets its name, opened again as readers
will open it. It holds tensors and plain values alone, so that `weights_only=True` opens it and a
stranger's file runs no code.

    policy.pt                   weights and statistics: all that is needed to act
    resume-<step>/rank<k>.pt    what else process k needs to go on; one folder is always whole
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
    """Put `payload`, a dict of state dicts and plain values, into the file `path`.

    TypeError names what could not be loaded again (NumPy, a deque); OSError: the disk is full or
    the like. After either, what stood at `path` before stands there still.
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
        raise OSError(f"cannot write {path}: {reason}; the checkpoint before stays") from error


def load_file(path, *keys, flag=""):
    """The dict that `save_file` put into `path`, on the CPU.

    UsageError, for the flag that named the file, says what is wrong with it: one of `keys` is
    missing, a bit was flipped, it holds code, ...
    """
    try:
        return read(path, *keys)
    except ValueError as error:
        raise UsageError(f"{flag}{flag and ': '}{error}") from None


def load_into(module, state, source):
    """Copy a state dict into `module`, in place: a flat vector's views stay views.

    UsageError names the first parameter or buffer whose shape differs or that only one side has.
    """
    own = module.state_dict()
    for name in [*own, *state]:
        here, there = (list(d[name].shape) if name in d else "absent" for d in (own, state))
        if here != there:
            raise UsageError(f"{source} holds another network: its {name} is {there}, not {here}")
    module.load_state_dict(state)


def save_resume(run_dir, step, payload):
    """Save what every rank hands over as the folder resume-<step>; the older ones then go.

    Every rank calls it, at the same step; `run_dir` is one directory for all of them. OSError, on
    every rank, if the disk is full or the like: the checkpoint before stays.
    """
    tmp = Path(run_dir, f"resume-{step}.tmp")
    root = mpi.rank() == 0
    if root:
        for left in tmp.parent.glob("resume-*.tmp"):  # by a killed process
            shutil.rmtree(left)
        tmp.mkdir()
    mpi.barrier()
    try:
        together(save_file, tmp / f"rank{mpi.rank()}.pt", payload)
    except BaseException:
        if root:
            shutil.rmtree(tmp, ignore_errors=True)  # a full disk needs the space
        raise
    if root:
        os.rename(tmp, tmp.with_suffix(""))
        sync_folder(tmp.parent)
        for old, folder in resume_folders(run_dir).items():
            if old != step:
                shutil.rmtree(folder)


def load_resume(run_dir, *keys):
    """The newest checkpoint as (step, what this rank handed over). UsageError, on every rank."""
    step, folder = max(resume_folders(run_dir).items())
    ranks = len(list(folder.glob("rank*.pt")))
    if ranks != mpi.size():
        raise UsageError(f"{folder} was saved by {ranks} processes and needs as many to go on, "
                         f"but --num-procs is {mpi.size()}")
    return step, together(load_file, folder / f"rank{mpi.rank()}.pt", *keys)


def resume_folders(run_dir):
    """The whole checkpoints of a run as {step: folder}: one as a rule, two after a kill."""
    names = glob.glob("resume-*", root_dir=run_dir)
    return {int(name[7:]): Path(run_dir, name) for name in names if name[7:].isdecimal()}


def read(path, *keys, mmap=False):
    """The dict in a file, which must have `keys`. ValueError says what is wrong with the file."""
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
    except pickle.UnpicklingError as error:
        asks = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(f"{path} was refused and nothing in it was run: it holds "
                         f"{asks[1] if asks else 'what is'} no tensor or plain value") from error
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is damaged or no checkpoint: {reason}") from error


def refuse_foreign(value, name):
    """TypeError names what `weights_only=True` would refuse at load, when it is too late."""
    kind, parts = type(value), ()  # not isinstance: np.float64 is a float, and refused at load
    if kind in (dict, OrderedDict):
        parts = value.items()
    elif kind in (list, tuple):
        parts = enumerate(value)
    elif kind not in PLAIN and not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {kind.__module__}.{kind.__qualname__}, but a checkpoint "
                        "holds tensors and plain values alone")
    for key, item in parts:
        refuse_foreign(key, f"a key of {name}")
        refuse_foreign(item, f"{name}.{key}")
