"""The code that made a run: its directory keeps a copy of the algorithm file, algo.py.

A later edit of the algorithm would otherwise make the same weights act differently, or continue the
run with another algorithm, and nobody would notice. Code is compared without its comments,
docstrings and layout. Helpers in utils/ are not kept; config.json names their git commit.
"""

import ast
import hashlib
import os
import sys
import threading
import types
from pathlib import Path

from utils import files
from utils.mpi import UsageError

KEPT = "algo.py"
PARSING = threading.Lock()  # in Python 3.11 ast.parse can fail if two threads call it at once


def file_of(config_class) -> Path | None:
    """Return the file that defines a Config, or None if it is a notebook's."""
    path = getattr(sys.modules.get(config_class.__module__), "__file__", None)
    return Path(path) if path and os.path.isfile(path) else None


def keep(config_class, run_dir, step: int) -> None:
    """Copy the algorithm file into a run that starts or continues at `step`.

    Other code that the run had until now is renamed, to algo-until-<step>.py.
    """
    file, kept = file_of(config_class), Path(run_dir, KEPT)
    if file is None or (kept.exists() and not has_changed(config_class, run_dir)):
        return
    if kept.exists() and step > 0:
        os.replace(kept, kept.with_name(f"algo-until-{step}.py"))
    with files.whole(kept) as copy:
        copy.write(file.read_bytes())


def has_changed(config_class, run_dir) -> bool:
    """Return whether a run keeps other code than the file of `config_class` has now.

    False for a run that keeps no code, as those of earlier versions. UsageError: it is unreadable.
    """
    file, kept = file_of(config_class), Path(run_dir, KEPT)
    if file is None or not kept.exists():
        return False
    try:
        old, new = kept.read_bytes(), file.read_bytes()
        return old != new and code_hash(old.decode()) != code_hash(new.decode())
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError):  # one of them is damaged
        return True


def load(run_dir) -> types.ModuleType:
    """Run the code that a run keeps, and return it as a module.

    UsageError: the run keeps no code, or the code fails.
    """
    kept = Path(run_dir, KEPT)
    if not kept.exists():
        raise UsageError(f"--as-trained: {run_dir} keeps no code: there is no {kept}")
    module = types.ModuleType(f"{KEPT} of {run_dir}")
    sys.modules[module.__name__] = module  # dataclasses look it up
    try:
        exec(compile(kept.read_bytes(), kept, "exec"), vars(module))
        _ = module.Config, module.Agent  # every algorithm has them
    except Exception as error:  # code of another version can fail in any way
        raise UsageError(f"--as-trained: {kept} fails: {type(error).__name__} {error}") from None
    return module


def code_hash(text: str) -> str:
    """Return the SHA-256 of a program without its comments, docstrings and layout."""
    with PARSING:
        tree = ast.parse(text)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    # ast.dump differs between versions of Python, ast.unparse does not.
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()
