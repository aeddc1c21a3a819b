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
ARITHMETIC = "mpi stats optim nets envs".split()  # what learning is computed with in all files
# In utils/, no code of theirs moves a number. (If seeds.py or env_ids.py changes, or in run/ the
# default of start_steps or --init-from, ask all published rows again.)
STAGE = set("command env_ids errors evaluate export files film load logger play results roles run "
            "seeds sweep".split())
HELPERS = {path.stem for path in UTILS.glob("[a-z]*.py")} - STAGE
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

    That is its file, the module before the colon of `env`, and what these import, directly or not,
    as far as it is a module beside `utils` or in the working directory, or in `utils` and not of
    STAGE. "" for a notebook.
    """
    if not file:
        return ""
    folders = [utils.parent, *[Path.cwd()] * (utils == UTILS)]
    todo, found = [env.rpartition(":")[0], f"algos.{file.stem}"], {}
    while todo:
        name = todo.pop()
        path = find(name, folders) if found else file
        key = name.replace(".", "/") + ".py"
        if path and key not in found:
            found[key], names = parsed(path.read_bytes())
            todo += names
    return digest(sorted(found.items()))


def find(module: str, folders: list[Path]) -> Path | None:
    """Return the file of a module in one of these folders, if there is one and it is not STAGE."""
    parts = module.split(".")
    if not module or parts[0] == "utils" and STAGE & set(parts[1:2]):
        return None
    paths = (Path(folder, *parts[:-1], f"{parts[-1]}.py") for folder in folders)
    return next(filter(Path.exists, paths), None)


@cache
def parsed(source: bytes) -> tuple[str, set[str]]:
    """Return a hash of a program's syntax tree, and the names of what it imports, as a.b.c."""
    try:
        with PARSER:
            tree = ast.parse(source)
    except SyntaxError:  # it is being edited
        return digest([source.hex()]), set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:  # of a package, perhaps a module
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
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
