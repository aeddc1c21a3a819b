"""Files that a kill leaves whole, or leaves as they were; .jsonl and .csv among them."""

import csv
import json
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from utils.errors import UsageError


@contextmanager
def atomic_write(path):
    """Yield an open file that becomes `path` after the block, or vanishes if the block fails.

    It has a temporary name until it is flushed to the disk.
    """
    tmp = Path(f"{path}.tmp")
    try:
        with open(tmp, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def write_text(path, text):
    """Write text to a file, whole or not at all."""
    with atomic_write(path) as file:
        file.write(text.encode())


def read_lines(path):
    """Return the objects of a .jsonl file, none if there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def write_lines(path, objects):
    """Write a .jsonl file: one object a line."""
    write_text(path, "".join(json.dumps(each) + "\n" for each in objects))


def read_table(run_dir, name):
    """Return the rows of a csv file, as dicts of texts."""
    with open(Path(run_dir, name), newline="") as file:
        return list(csv.DictReader(file))


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of numbers of a csv file, but for a last line that is half written."""
    names, *rows = [line.split(",") for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return {name: np.array([float(cell or "nan") for cell in column])
            for name, column in zip(names, columns, strict=True)}


def check_target(flag, file, suffixes):
    """UsageError if no file with one of these suffixes can be written to `file`."""
    folder = Path(file).parent
    if not file.endswith(suffixes):
        raise UsageError(f"{flag} {file}: the name must end in {' or '.join(suffixes)}")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {file}: {folder} is no directory to write in")
