"""Whose code a run has: the file of its algorithm, what of utils/ it learns with, the commit."""

import ast
import contextlib
import hashlib
import json
import shlex
import subprocess
import sys
import threading
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

UTILS = Path(__file__).resolve().parents[1]
# What learning is computed with, as far as an algorithm imports it. If seeds.py or env_ids.py
# changes, or in utils/run/ the default of start_steps or --init-from, ask all published rows again.
ARITHMETIC = "mpi stats optim nets envs".split()  # what all files share of it
HELPERS = {*ARITHMETIC, *"atari buffers demos goals policy spaces wrappers".split()}
PACKAGES = ("torch", "gymnasium", "numpy", "mujoco", "ale_py", "box2d", "mpi4py")
PARSER = threading.Lock()  # Python 3.11 raises SystemError if two threads parse at the same time


def file_of(config_class) -> Path | None:
    """Return the file that defines a Config, or None if it is a notebook's."""
    path = Path(getattr(sys.modules.get(config_class.__module__), "__file__", None) or "")
    return path.resolve() if path.is_file() else None


def module_of(config_class) -> str:
    """Return the module of a Config, such as "algos.x", even if it is the running program."""
    path = file_of(config_class) or Path("notebook")
    package = f"{path.parent.name}." if (path.parent / "__init__.py").exists() else ""
    return package + path.stem


def origin() -> dict:
    """Return the command, git commit ("" outside of a repository) and versions of this process."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.run(command, cwd=UTILS, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = None  # git is not installed
    return {"command": shlex.join(sys.orig_argv), "git_commit": commit,
            "versions": {"python": sys.version.split()[0], **versions}}


# ---- has it changed?


def code(file: Path | None, env: str = "", utils: Path = UTILS) -> str:
    """Return a hash of the code that an algorithm learns with, without comments and docstrings.

    That is its file, what of HELPERS it imports, directly or not, and tasks.py if `env` is one of
    those. "" for a notebook.
    """
    if not file:
        return ""
    todo, found = [file], {}
    todo += [utils.parent / "tasks.py"] if env.startswith("tasks:") else []
    while todo:
        path = todo.pop()
        name = f"algos/{file.name}" if path == file else path.relative_to(utils.parent).as_posix()
        if name not in found and path.exists():
            found[name], names = parsed(path.read_bytes())
            todo += [utils / f"{name}.py" for name in names & HELPERS]
    return digest(sorted(found.items()))


@cache
def parsed(source: bytes) -> tuple[str, set[str]]:
    """Return a hash of a program's syntax tree, and the names of the modules that it imports."""
    try:
        with PARSER:
            tree = ast.parse(source)
    except SyntaxError:  # it is being edited
        return digest([source.hex()]), set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:  # of utils, or of utils.mpi
            names |= {node.module.rpartition(".")[2], *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("utils.") for alias in node.names
                      if alias.name.startswith("utils.")}
    return digest(shape(tree)), names


def digest(lists: list) -> str:
    return hashlib.sha256(json.dumps(lists).encode()).hexdigest()[:12]


def shape(node) -> object:
    """Return a syntax tree as lists, the same in every version of Python, without docstrings."""
    if isinstance(node, list):
        return [shape(part) for part in node if not (
            isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    if not isinstance(node, ast.AST):
        return repr(node)
    return [type(node).__name__, *([name, shape(part)] for name, part in ast.iter_fields(node)
                                   if part is not None and part != [])]
