"""Worked answers to the exercises in 5_is_it_better.ipynb."""
from itertools import combinations

import numpy as np


def _means(values):
    return np.array([np.mean(pick) for pick in combinations(values, 3)])


def misleading(a, b):
    gaps = _means(a)[:, None] - _means(b)[None, :]  # every triple of a with every triple of b
    gap = np.mean(a) - np.mean(b)
    return np.mean(gaps * np.sign(gap) < 0)


def claim():
    return 3


def all_worst(n):
    return (1 / n) ** n


def iqm(values):
    cut = int(len(values) / 4)
    return np.sort(values)[cut:len(values) - cut].mean()  # [cut:-cut] would be empty for cut = 0


def improvement(a, b):
    wins = (np.sign(a[:, None] - b[None, :]) + 1) / 2  # 1, 1/2 or 0 for each pair
    return wins.mean()
