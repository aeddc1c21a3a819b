"""A file is written whole or not at all, whatever happens meanwhile.

It is filled under another name, flushed to the disk, and only then renamed: renaming is the one
step that a kill cannot cut in half.
"""

import os
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path):
    """An open file to fill; after the block it is `path`, or, if the block failed, nothing."""
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
    with whole(path) as file:
        file.write(text.encode())


def sync_folder(folder):
    """Flush the names in a folder, without which a power cut may undo a renaming."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
