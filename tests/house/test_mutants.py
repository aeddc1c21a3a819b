"""The runner of planted bugs tells kills from errors.

`python -m tests.mutants` plants all bugs, and says which of them no longer stand in their file.
"""
import subprocess
import sys

import pytest

from tests.mutants import catalogue
from tests.mutants.catalogue import ROOT, TESTS


def test_entries_are_whole():
    mutants = catalogue.read()
    ids = [mutant.id for mutant in mutants]
    assert len(set(ids)) == len(ids), {name for name in ids if ids.count(name) > 1}
    for mutant in mutants:
        assert mutant.module in TESTS and set(mutant.also) <= TESTS.keys() - {mutant.module}
        assert len(mutant.wrong) > 10 and len(mutant.found) > 3, mutant.id


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sample_is_killed():
    done = subprocess.run([sys.executable, "-m", "tests.mutants", "--sample", "12"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "killed 12 of 12"
