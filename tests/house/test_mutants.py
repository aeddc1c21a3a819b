"""A sample of the planted bugs is found. No test of the default run reads the catalogue."""
import subprocess
import sys

import pytest

from tests.mutants.catalogue import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sample_is_killed():
    done = subprocess.run([sys.executable, "-m", "tests.mutants", "--sample", "12"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "killed 12 of 12"
