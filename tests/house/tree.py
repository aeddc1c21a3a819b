"""Which files the rules of the house are about: those of the project, not those of its user.

Somebody who trains, takes notes or copies algos/ppo.py to algos/my_ppo.py in a clone of their own
adds files that no rule is about. Git knows which files are the project's. In a tree without git
the README's table says which algorithms are, and every other file counts.
"""
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "algos utils tests benchmarks notebooks .ci".split()


def tracked(pattern="*", root=ROOT):
    """The project's files, sorted. In a pattern, "algos/*.py", a star also stands for folders."""
    names = by_git(root) or by_hand(root)
    return sorted(root / name for name in names
                  if fnmatch(name, pattern) and (root / name).is_file())


def by_git(root=ROOT):
    """Names of the files that git tracks, from the root; [] in a tree that is not a clone."""
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True)
    except FileNotFoundError:
        return []
    names = done.stdout.decode().split("\0") if done.returncode == 0 else []
    return names if "algos/ppo.py" in names else []     # another repository may lie around the tree


def by_hand(root=ROOT):
    """The same without git: algorithms by the README's table, all other files that are there."""
    paths = [*root.glob("*.*"), *(path for name in FOLDERS for path in (root / name).rglob("*"))]
    names = {path.relative_to(root).as_posix() for path in paths if path.is_file()}
    known = {f"algos/{name}.py" for name in in_readme(root)} | {"algos/__init__.py"}
    return [name for name in names if "__pycache__" not in name and name != ".git"
            and (name in known or not name.startswith("algos/"))]


def in_readme(root=ROOT):
    """Names of the algorithms in the README's table."""
    text = (root / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \[[^\]]+\]\(algos/(\w+)\.py\)", text, re.MULTILINE)


def copy(to):
    """A copy of the project's files, where a test may do what it likes."""
    for path in tracked():
        place = to / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return to
