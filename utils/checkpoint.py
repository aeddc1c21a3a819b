"""What a run keeps: checkpoints that survive a kill, and the code that made them.

A file is written under a temporary name, flushed to the disk and then renamed, so a kill or a
power cut leaves it whole or leaves the old one. A checkpoint is also read back before the rename.
It holds only tensors and plain values, so it opens with `weights_only=True` and a stranger's file
runs no code.

    policy.pt                   weights and statistics: all that acting needs
    resume-<step>/rank<k>.pt    what rank k needs to continue; one such folder is always whole
    algo.py                     the algorithm file. A later edit would make the same weights act
                                differently, or continue the run with another algorithm
"""

import ast
import os
import pickle
import shutil
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch

from utils import mpi
from utils.mpi import UsageError, together

# ---- files


@contextmanager
def whole(path):
    """Yield an open file that becomes `path` after the block, or vanishes if the block fails."""
    tmp = Path(f"{path}.tmp")
    try:
        with open(tmp, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        move(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def write_text(path, text):
    """Write text to a file, whole or not at all."""
    with whole(path) as file:
        file.write(text.encode())


def move(old, new):
    """Rename a file or folder. A power cut could undo that until its new name is on the disk."""
    os.replace(old, new)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(old.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def check_target(flag, file, suffixes, overwrite=True):
    """UsageError if no file with one of these suffixes can be written to `file`."""
    folder = Path(file).parent
    if not file.endswith(suffixes):
        raise UsageError(f"{flag} {file}: the name must end in {' or '.join(suffixes)}")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {file}: {folder} is no directory to write in")
    if os.path.exists(file) and not overwrite:
        raise UsageError(f"{flag} {file}: this file exists; --overwrite replaces it")


# ---- checkpoints


def save_file(path, payload):
    """Write `payload`, a dict of state dicts and plain values, to the file `path`.

    OSError: the disk is full, or a value is neither a tensor nor plain, such as a NumPy array.
    """
    try:
        with whole(path) as file:
            torch.save(payload, file)
            file.flush()
            load_file(file.name, mmap=True)
    except (OSError, RuntimeError, ValueError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        reason = getattr(cause, "strerror", None) or str(cause or error).partition("\n")[0]
        raise OSError(f"cannot write {path}: {reason}; the old checkpoint is intact") from error


def load_file(path, *keys, flag="", mmap=False):
    """Return the dict that `save_file` wrote to `path`, with tensors on the CPU.

    UsageError, which begins with the `flag` that named the file, says what is wrong with it.
    """
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
    except OSError as error:
        wrong = f"{path} cannot be read: {error.strerror or error}"
    except pickle.UnpicklingError:  # PyTorch's own message says how to run it all the same
        wrong = f"{path} holds what is no tensor or plain value; nothing in it was run"
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
        wrong = f"{path} is damaged or no checkpoint: {reason}"
    raise UsageError(f"{flag}{flag and ': '}{wrong}")


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
        move(tmp, tmp.with_suffix(""))
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
    folders = Path(run_dir).glob("resume-*")
    return {int(path.name[7:]): path for path in folders if path.name[7:].isdecimal()}


# ---- code


def file_of(config_class) -> Path | None:
    """Return the file that defines a Config, or None if it is a notebook's."""
    path = getattr(sys.modules.get(config_class.__module__), "__file__", None)
    return Path(path) if path and os.path.isfile(path) else None


def has_changed(config_class, run_dir) -> bool:
    """Return whether a Config's file differs from a run's in more than comments and layout."""
    file, kept = file_of(config_class), Path(run_dir, "algo.py")
    if file is None or not kept.exists():
        return False
    try:
        mine, theirs = file.read_text(encoding="utf-8"), kept.read_text(encoding="utf-8")
        return mine != theirs and ast.dump(ast.parse(mine)) != ast.dump(ast.parse(theirs))
    except (SyntaxError, ValueError):  # one of them is damaged
        return True
