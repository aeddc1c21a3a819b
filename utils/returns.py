"""What a run says over its length: a curve, what it ends at, and means over its parts."""

import math

import numpy as np


def curve(steps: np.ndarray, returns: np.ndarray, last: int) -> list[list]:
    """Return at most 100 pairs: a step, and the mean return of the episodes in the 1% before it.

    steps      when each episode ended
    last       the number of steps of the run
    """
    bins = np.ceil(100 * np.asarray(steps) / last).astype(int)
    returns = np.asarray(returns)
    return [[round(k * last / 100), round(float(returns[bins == k].mean()), 3)]
            for k in np.unique(bins)]


def ends_at(curve: list[list], last: int) -> float:
    """Return the mean of a curve's points in the last tenth, ten at most; NaN if there are none.

    The last 100 episodes instead would be all episodes of 100,000 steps of HalfCheetah.
    """
    late = [mean for step, mean in curve if step > 0.905 * last]
    return sum(late) / len(late) if late else math.nan


def parts(steps: np.ndarray, values: np.ndarray, last: int, count: int) -> np.ndarray:
    """Return the mean of the finite `values` in each of `count` parts of a run, NaN where none is.

    steps, last    as in `curve`
    """
    bins, known = np.ceil(count * steps / last).clip(1, count), np.isfinite(values)
    return np.array([values[chosen].mean() if (chosen := known & (bins == k)).any() else np.nan
                     for k in range(1, count + 1)])
