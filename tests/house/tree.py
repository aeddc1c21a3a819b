"""Find the files that the house rules apply to: the project's own, not those of its users.

Users add files to their clone: runs, notes, a copy algos/my_ppo.py. No rule applies to these. Git
knows which files belong to the project. Without git, the algorithms are those in the README's
table, and all other files count.
"""
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "algos utils tests benchmarks docs notebooks .ci".split()


def tracked(pattern="*", root=ROOT):
    """Return the project's files, sorted. A * in the pattern also matches slashes."""
    names = by_git(root) or by_hand(root)
    return sorted(root / name for name in names
                  if fnmatch(name, pattern) and (root / name).is_file())


def by_git(root=ROOT):
    """Return the paths that git tracks, relative to the root; [] if the tree is not a clone."""
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True)
    except FileNotFoundError:
        return []
    names = done.stdout.decode().split("\0") if done.returncode == 0 else []
    return names if "algos/ppo.py" in names else []     # else another repository's


def by_hand(root=ROOT):
    """Return the same without git: the algorithms of the README's table, and all other files."""
    paths = [*root.glob("*.*"), *(path for name in FOLDERS for path in (root / name).rglob("*"))]
    names = {path.relative_to(root).as_posix() for path in paths if path.is_file()}
    known = {f"algos/{name}.py" for name in in_readme(root)} | {"algos/__init__.py"}
    return [name for name in names if "__pycache__" not in name
            and (name in known or not name.startswith("algos/"))]


def in_readme(root=ROOT):
    """Return the names of the algorithms in the README's table."""
    text = (root / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \[[^\]]+\]\(algos/(\w+)\.py\)", text, re.MULTILINE)
