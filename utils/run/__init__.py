"""The stage of a run: all but the learning."""

from utils.run.run import Run
from utils.run.settings import (
    Fraction, Natural, Positive, Real, RunConfig, check_range, main)

__all__ = ["Fraction", "Natural", "Positive", "Real", "Run", "RunConfig", "check_range",
           "main"]  # for algorithm files
