"""The stage of a run: all but the learning.

    settings.py     RunConfig, the settings of every run, types of settings, and the command line
    launch.py       how ranks start and end together
    run.py          Run: from the first check of the settings to the last report
    directory.py    the run directory, its lock, and config.json
    code.py         whose code a run has, and whether it has changed
    signals.py      what SIGINT and SIGTERM do to a run
    saver.py        what a run saves of itself, and when
    checkpoint.py   the files of that, and how spaces are kept in them
"""

from utils.run.run import Run
from utils.run.settings import (
    Fraction, Natural, Positive, Real, RunConfig, check_range, main)

__all__ = ["Fraction", "Natural", "Positive", "Real", "Run", "RunConfig", "check_range",
           "main"]  # for algorithm files
