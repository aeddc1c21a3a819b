"""The runner of planted bugs tells kills from errors.

`python -m tests.mutants` plants all bugs, and says which of them no longer stand in their file.
"""
import signal
import subprocess
import sys

import pytest

from tests.mutants import __main__ as runner, catalogue
from tests.mutants.catalogue import ROOT, TESTS, Mutant


def one(**changes):
    """Return an entry that applies to any file with one "import math"."""
    fields = {"id": "ppo-x", "module": "ppo", "old": "import math\n", "new": "import math as m\n",
              "wrong": "All of it.", "found": "Nowhere."}
    return Mutant(**fields | changes)


def test_entries_are_whole():
    mutants = catalogue.read()
    ids = [mutant.id for mutant in mutants]
    assert len(set(ids)) == len(ids), {name for name in ids if ids.count(name) > 1}
    for mutant in mutants:
        assert mutant.module in TESTS and set(mutant.also) <= TESTS.keys() - {mutant.module}
        assert len(mutant.wrong) > 10 and len(mutant.found) > 3, mutant.id


@pytest.mark.parametrize("said,status,crashes,expected", [
    ("2 passed", 0, False, ("survived", "")),
    ("..F\nFAILED tests/algos/test_a.py::test_b[no gain-box] - assert 1 == 2\n1 failed", 1, False,
     ("killed", "test_a.py::test_b[no gain-box]")),
    ("ERROR tests/algos/test_a.py::test_b - a fixture", 1, False, ("killed", "test_a.py::test_b")),
    ("FAILED tests/mutants/smoke.py::test_it_runs - AssertionError", 1, False,
     ("error", "crashes by itself: AssertionError")),
    ("FAILED tests/mutants/smoke.py::test_it_runs - AssertionError", 1, True,
     ("killed", "an error in the file")),
    ("FAILED tests/mutants/smoke.py::test_it_runs - TypeError: x", 1, True,
     ("error", "crashes by itself: TypeError: x")),
    ("FAILED tests/mutants/smoke.py::test_it_runs - Failed: Timeout (>300.0s) from", 1, False,
     ("killed", "the time limit")),
    ("ERROR tests/algos/test_a.py - SyntaxError", 1, False, ("error", None)),
    ("ERROR tests/algos/test_a.py - SyntaxError", 2, False, ("error", None)),
    ("Segmentation fault", -11, False, ("error", None)),
    ("....", -signal.SIGXCPU, False, ("killed", "the time limit")),
])
def test_verdict(said, status, crashes, expected):
    outcome, by = runner.verdict(said, status, one(crashes=crashes))
    assert outcome == expected[0] and expected[1] in (by, None)


def test_a_bug_is_planted_in_all_its_files_or_in_none(tmp_path):
    """It is an error if `old` is missing from a file, or stands there several times."""
    (tmp_path / "algos").mkdir()
    files = {name: tmp_path / f"algos/{name}.py" for name in ("ppo", "a2c")}
    every = list(catalogue.plantings([one(also=["a2c"])]))[-1]
    for text in ("import cmath\n", "import math\n" * 2, "import math\n"):
        files["ppo"].write_text("import math\n")
        files["a2c"].write_text(text)
        if text != "import math\n":
            with pytest.raises(ValueError, match="[02] times"):
                runner.plant(every, tmp_path)
            assert files["ppo"].read_text() == "import math\n"
    assert runner.plant(every, tmp_path) == dict.fromkeys(files.values(), text)
    assert {path.read_text() for path in files.values()} == {"import math as m\n"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sample_is_killed():
    done = subprocess.run([sys.executable, "-m", "tests.mutants", "--sample", "12"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "killed 12 of 12"
