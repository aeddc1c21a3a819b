"""Files that users add to their clone do not make the tests of the rules fail."""
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers import PATIENCE
from tests.house import tree

NAMED = "git", "-c", "user.name=A", "-c", "user.email=a@example.org"


@pytest.fixture
def clone(tmp_path):
    """Return a copy of the project, committed to a new git repository."""
    copied = tree.copy(tmp_path / "clone")
    for args in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "All"]):
        subprocess.run([*NAMED, *args], cwd=copied, check=True, capture_output=True)
    return copied


def write_own_files(root):
    """Write an algorithm that breaks rules, a test of it, notes and a run."""
    text = (root / "algos/ppo.py").read_text(encoding="utf-8")
    changed = text.replace("import torch\n", "import torch, os\n", 1) + "# " + "long " * 40 + "\n"
    assert changed.count("\n") == text.count("\n") + 1 and "torch, os" in changed
    (root / "algos/my_ppo.py").write_text(changed, encoding="utf-8")
    (root / "notes.md").write_text("It lies in /" + "home/me/plainrl.\n")
    mine = "import pytest\n\n\n@pytest.mark.eq('my_ppo', 1)\ndef test_mine(): pass\n"
    (root / "tests/algos/test_my_ppo.py").write_text(mine)
    (root / "runs").mkdir()
    (root / "runs/progress.csv").write_text("step\n1\n")


def red(root):
    """Return the names of the rules that fail in that tree."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "--tb=no",
         "tests/house/test_rules.py"], cwd=root, capture_output=True, text=True, timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": str(root)})
    assert done.returncode in (0, 1) and " passed" in done.stdout, done.stdout + done.stderr
    return set(re.findall(r"^FAILED \S*::(\S+)", done.stdout, re.MULTILINE))


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_files_of_ones_own_break_no_rule(clone):
    before = red(clone)                 # none, unless someone is editing the project
    write_own_files(clone)
    assert red(clone) == before
    # Once git tracks the file, the rules apply to it.
    subprocess.run(["git", "add", "algos/my_ppo.py"], cwd=clone, check=True)
    assert {"test_ruff", "test_every_file_is_in_the_readmes_table"} <= red(clone)


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_git_ignores_what_the_readmes_commands_write(clone):
    text = (clone / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"--(?:out|video) (\S+)", text)
    ignored = subprocess.run(["git", "check-ignore", *names], cwd=clone, capture_output=True,
                             text=True).stdout
    assert ignored.split() == names and {"curves.svg", "idea.svg", "cheetah.mp4"} <= set(names)


def test_without_git_the_readme_says_which_algorithms_count(tmp_path):
    copied = tree.copy(tmp_path / "copy")
    write_own_files(copied)
    found = [path.stem for path in tree.tracked("algos/*.py", root=copied)]
    assert sorted(found) == sorted(["__init__", *tree.in_readme()]) and "my_ppo" not in found


def test_patterns_and_copies(tmp_path):
    names = [path.relative_to(tree.ROOT).as_posix() for path in tree.tracked("tests/*.py")]
    assert {"tests/conftest.py", "tests/house/tree.py"} <= set(names) and names == sorted(names)
    copied = tree.copy(tmp_path / "copy")
    assert {path.name for path in tree.tracked("utils/*", root=copied)} == {
        path.name for path in tree.tracked("utils/*")}
