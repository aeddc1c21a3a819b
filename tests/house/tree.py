"""Find the files that the house rules apply to: the project's own, not those of its users.

Users add files to their clone, such as algos/my_ppo.py. Git knows which ones belong to the project.
Without git, all files count.
"""
import subprocess
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked(pattern="*"):
    """Return the project's files, sorted. A * in the pattern also matches slashes."""
    return sorted(ROOT / name for name in by_git() or files()
                  if fnmatch(name, pattern) and (ROOT / name).is_file())


def by_git():
    """Return the paths that git tracks, relative to the root; [] if the tree is not a clone."""
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    except FileNotFoundError:
        return []
    names = done.stdout.decode().split("\0") if done.returncode == 0 else []
    return names if "algos/ppo.py" in names else []     # else another repository's


def files():
    return [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]
