"""progress.csv and episodes.csv: whole rows, whatever happens, from the first step to the last."""

import errno
import os

from utils import files


class Table:
    """A csv file; each write is one call with whole rows, so that a kill leaves whole rows."""

    def __init__(self, path, columns, step):
        """Goes on with a file's rows up to `step`, if there is one."""
        self.path, text = path, path.read_bytes().decode(errors="replace") if path.exists() else ""
        header, *rows = text.split("\n")[:-1] or [",".join(columns)]  # half a line has no "\n"
        self.columns, cells = header.split(","), [row.split(",") for row in rows]
        self.rewrite([row for row in cells if len(row) == len(self.columns)
                      and row[0].isdecimal() and int(row[0]) <= step])

    def rewrite(self, rows):
        text = "".join(",".join(row) + "\n" for row in [self.columns, *rows])
        files.write_text(self.path, text)
        self.file = open(self.path, "ab", buffering=0)

    def write(self, rows):
        """Append dicts. A column that comes late is empty in the rows before."""
        new = list(dict.fromkeys(name for row in rows for name in row if name not in self.columns))
        if new:
            self.file.close()
            old = [row.split(",") + [""] * len(new) for row in self.path.read_text().split("\n")]
            self.columns += new
            self.rewrite(old[1:-1])
        # repr is the shortest text that reads back as the same float.
        cells = [[repr(row[name]) if name in row else "" for name in self.columns] for row in rows]
        data = "".join(",".join(row) + "\n" for row in cells).encode()
        try:
            if self.file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self):
        self.file.close()
