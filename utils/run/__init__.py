"""The stage of a run: all but the learning.

    settings.py     RunConfig, the settings of every run, types of settings, and the command line
    launch.py       how ranks start and end together
    run.py          Run: seeds, signals, reports, checkpoints
    directory.py    the run directory, its lock, config.json, and whose code a run has
    checkpoint.py   policy.pt, best.pt and what --resume needs
"""

from utils.run.run import Run
from utils.run.settings import (
    Fraction, Natural, Positive, Real, RunConfig, check_range, main)

__all__ = ["Fraction", "Natural", "Positive", "Real", "Run", "RunConfig", "check_range",
           "main"]  # for algorithm files
