"""Write a file whole or not at all.

The text goes to a temporary name and is flushed to the disk before the file is renamed. A kill
cannot cut a rename in half.
"""

import os
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path):
    """Yield an open file that becomes `path` after the block, or vanishes if the block fails."""
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
    sync_folder(tmp.parent)


def write_text(path, text):
    """Write text to a file, whole or not at all."""
    with whole(path) as file:
        file.write(text.encode())


def sync_folder(folder):
    """Flush a folder's names to the disk. Otherwise a power cut may undo a rename."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
