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

import gymnasium as gym
import numpy as np
import torch

from utils import mpi
from utils.errors import UsageError
from utils.files import atomic_write
from utils.run.launch import from_root
from utils.spaces import FlatBox, Numbered, Parts


def save_file(path, payload):
    """Write a dict of state dicts and plain values to a file, and read it back.

    If that fails, the old file stays. UsageError: it holds what could not be loaded.
    """
    with atomic_write(path) as file:
        torch.save(payload, file)
        file.flush()
        load_file(file.name, mmap=True)


def load_file(path, mmap=False):
    """Return the dict that `save_file` wrote, with tensors on the CPU. UsageError: it cannot."""
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch loads a flipped bit silently
                raise ValueError(f"{damaged} fails its checksum")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):  # which says how to run it all the same
            reason = "it holds what is no tensor or plain value; nothing in it was run"
        raise UsageError(f"{path} cannot be read as a checkpoint: {reason}") from None


def load_into(load, state, source):
    """Call `load` of a module with a state dict. UsageError: it is another network's."""
    try:
        load(state)
    except KeyError as error:
        raise UsageError(f"{source} holds another network: it has no {error}") from None
    except RuntimeError as error:  # a line for each kind of difference
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"{source} holds another network: {reason}") from None


def save_resume(run_dir, step, payload):
    """Save every rank's payload as the folder resume-<step>, then delete older ones.

    Every rank calls this at the same step. All ranks see the same `run_dir`. If one fails, as on
    a full disk, the previous checkpoint is intact.
    """
    tmp = Path(run_dir, f"resume-{step}.tmp")
    root = mpi.rank() == 0
    if root:
        for left in tmp.parent.glob("resume-*.tmp"):  # of a save that a kill or a full disk ended
            shutil.rmtree(left)
        tmp.mkdir()
    mpi.gather(None)  # the folder is there
    save_file(tmp / f"rank{mpi.rank()}.pt", payload)
    mpi.gather(None)  # all have saved
    if root:
        tmp.rename(tmp.with_suffix(""))
        for old, folder in resume_folders(run_dir).items():
            if old != step:
                shutil.rmtree(folder)


def load_resume(run_dir):
    """Return (step, this rank's payload) of the newest checkpoint.

    UsageError: a file is damaged, or another number of processes saved it.
    """
    step, folder = max(from_root(resume_folders, run_dir).items())
    if (ranks := len(list(folder.glob("rank*.pt")))) != mpi.size():
        raise UsageError(f"{folder} was saved by {ranks} processes and needs as many to continue, "
                         f"but --num-procs is {mpi.size()}")
    return step, load_file(folder / f"rank{mpi.rank()}.pt")


def resume_folders(run_dir):
    """Return {step: folder} for a run's whole checkpoints: usually one, after a kill maybe two."""
    folders = Path(run_dir).glob("resume-*")
    return {int(path.name[7:]): path for path in folders if path.name[7:].isdecimal()}


# ---- spaces

# What the spaces that a checkpoint may hold are made from: attributes of the same names.
MADE_FROM = {gym.spaces.Box: "low high dtype", gym.spaces.Discrete: "n start dtype",
             gym.spaces.MultiDiscrete: "nvec start dtype", gym.spaces.MultiBinary: "n",
             gym.spaces.Dict: "spaces", gym.spaces.Tuple: "spaces",
             FlatBox: "own", Numbered: "own", Parts: "own"}


def to_plain(value):
    """Return spaces as plain values and tensors. LookupError, TypeError, ValueError: it cannot."""
    if isinstance(value, gym.Space):  # not of a subclass, whose values may mean something else
        names = MADE_FROM[type(value)].split()
        parts = {name: to_plain(getattr(value, name)) for name in names}
        return {"kind": type(value).__name__} | parts
    if isinstance(value, dict | tuple):  # a Dict made from pairs keeps their order
        return [to_plain(part) for part in (value.items() if isinstance(value, dict) else value)]
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    if not isinstance(value, str | int | np.integer | np.dtype):
        raise TypeError(f"{value!r} is not plain")
    return int(value) if isinstance(value, int | np.integer) else str(value)


def from_plain(value):
    """Return the spaces that `to_plain` had."""
    if isinstance(value, dict):
        kind = next(kind for kind in MADE_FROM if kind.__name__ == value["kind"])
        return kind(**{name: from_plain(value[name]) for name in MADE_FROM[kind].split()})
    if isinstance(value, list):
        return [from_plain(part) for part in value]
    return value.numpy() if isinstance(value, torch.Tensor) else value
