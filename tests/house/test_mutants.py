"""The runner of planted bugs tells kills from errors.

`python -m tests.mutants` plants all bugs, and says which of them no longer stand in their file.
"""
import subprocess
import sys

import pytest

from tests.mutants import catalogue
from tests.mutants.catalogue import ROOT


def test_ids_are_unique():
    ids = [mutant.id for mutant in catalogue.read()]
    assert len(set(ids)) == len(ids), {name for name in ids if ids.count(name) > 1}


def test_every_bug_stands_in_its_files():
    for planting in catalogue.plantings(catalogue.read()):
        for module in planting.files:
            assert catalogue.planted(planting.mutant, catalogue.file_of(module).read_text())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sample_is_killed():
    done = subprocess.run([sys.executable, "-m", "tests.mutants", "--sample", "12"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "killed 12 of 12"
