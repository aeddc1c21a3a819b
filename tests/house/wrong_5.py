"""Plausible wrong answers to the exercises of notebook 5. The checks must reject each."""
from itertools import combinations

import numpy as np


def means(values):
    return np.array([np.mean(pick) for pick in combinations(values, 3)])


def only_one_way(a, b):
    return np.mean(means(a)[:, None] < means(b)[None, :])


def same_seeds(a, b):
    return np.mean((means(a) - means(b)) * (np.mean(a) - np.mean(b)) < 0)


def how_often_right(a, b):
    return np.mean((means(a)[:, None] - means(b)) * (np.mean(a) - np.mean(b)) > 0)


def empty_middle(values):
    cut = len(values) // 4
    return np.sort(values)[cut:len(values) - cut - 1].mean()


WRONG = {
    "misleading": [only_one_way, same_seeds, how_often_right],
    "claim": [lambda: 1, lambda: 2, lambda: 4, lambda: "3."],
    "all_worst": [lambda n: 1 / n, lambda n: 1 / n**2, lambda n: 3.0**-n,
                  lambda n: 1 / np.prod(np.arange(1.0, n + 1))],
    "iqm": [np.mean, np.median, empty_middle,
            lambda values: values[len(values) // 4:len(values) - len(values) // 4].mean(),
            lambda values: np.mean(np.percentile(values, [25, 75]))],
    "improvement": [lambda a, b: np.mean(a[:, None] > b[None, :]),
                    lambda a, b: np.mean(a[:, None] >= b[None, :]),
                    lambda a, b: np.mean(np.sign(a[:, None] - b[None, :])),
                    lambda a, b: np.mean(a > b) if len(a) == len(b) else 0.0,
                    lambda a, b: np.sum(a[:, None] > b[None, :]),
                    lambda a, b: float(a.mean() > b.mean())],
}
