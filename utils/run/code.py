"""Whose code a run has: the file of its algorithm, what of utils/ it learns with, the commit."""

import ast
import contextlib
import hashlib
import inspect
import json
import shlex
import subprocess
import sys
import sysconfig
import threading
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, resolve_name
from pathlib import Path

UTILS = Path(__file__).resolve().parents[1]
ARITHMETIC = "mpi stats optim nets envs".split()  # what learning is computed with in all files
# Modules of utils/ on which training does not depend, as evaluations do. (If env_ids.py changes, or
# in run/ the default of start_steps or --init-from, ask all published rows again.)
STAGE = set("command env_ids errors evaluate export files film load logger play results returns "
            "roles run sweep".split())
HELPERS = {path.stem for path in UTILS.glob("[a-z]*.py")} - STAGE
OURS = "utils algos tasks".split()
# Where Python's own modules are, and those that pip installs.
INSTALLED = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
PACKAGES = ("torch", "gymnasium", "numpy", "mujoco", "ale_py", "box2d", "mpi4py")
PARSER = threading.Lock()  # Python 3.11 raises SystemError if two threads parse at the same time


def file_of(config_class) -> Path | None:
    """Return the file that defines a Config, or None if it is a notebook's."""
    try:
        return Path(inspect.getsourcefile(config_class)).resolve()
    except (OSError, TypeError):
        return None


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

    That is its file, seeds.py, the module before the colon of `env`, and what these import,
    directly or not: modules of utils/ but for STAGE, of algos/, and the user's own. A notebook
    has "".
    """
    if not file:
        return ""
    folder = file.parent.name
    own = f"{folder}.{file.stem}" if folder in OURS else file.stem
    todo, found = ["utils.seeds", env.rpartition(":")[0], own], {}
    while todo:
        name = todo.pop()
        path = find(name, utils) if found else file
        key = name.replace(".", "/") + ".py"
        if path and key not in found:
            found[key], names = parsed(path.read_bytes())
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            todo += [resolve_name(each, package) for each in names if package or each[0] != "."]
    return digest(sorted(found.items()))


def find(module: str, utils: Path) -> Path | None:
    """Return the file of a module, unless it is of STAGE or an installed package's."""
    top, *rest = module.split(".")
    if top in OURS:
        path = Path(utils.parent, *module.split(".")).with_suffix(".py")
        return path if path.is_file() and not (
            top == "utils" and STAGE & set(rest[:1])) else None
    spec = spec_of(top)
    if not spec or not spec.has_location or spec.origin.startswith(INSTALLED):
        return None
    path = Path(spec.origin)
    if rest:
        path = path.parent.joinpath(*rest)
        path = path.with_suffix(".py") if not path.is_dir() else path / "__init__.py"
    return path if path.is_file() else None


def spec_of(package: str):
    """Return the specification of a package or module, or None if it is not here."""
    with contextlib.suppress(ImportError, ValueError):  # an empty name is one
        return find_spec(package)


@cache
def parsed(source: bytes) -> tuple[str, set[str]]:
    """Return a hash of a program's syntax tree, and what it imports, as a.b.c or .b.c."""
    try:
        with PARSER:
            tree = ast.parse(source)
    except SyntaxError:  # it is being edited
        return digest([source.hex()]), set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):  # of a package, perhaps a module
            of = "." * node.level + (node.module or "")
            dot = "." * bool(node.module)
            names |= {f"{of}{dot}{alias.name}" for alias in node.names}
            names |= {of} - {"." * node.level}
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
