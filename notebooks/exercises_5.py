"""Checks of the exercises in 5_is_it_better.ipynb; worked answers are in answers_5.py."""
from itertools import combinations, product

import numpy as np
from checking import close, exercise, true

import plot

RNG = np.random.default_rng(5)


@exercise
def misleading(answer):
    close(answer(np.array([5.0, 6, 7]), np.array([1.0, 2, 3])), 0.0,
          "With three seeds each there is one triple each, which is all seeds: it cannot mislead.")
    close(answer(np.array([5.0, 6, 7, 8]), np.array([1.0, 2, 3, 4])), 0.0,
          "If every seed of one is higher, no choice of seeds misleads.")
    for a, b in [((1.0, 9, 9, 9), (5.0, 6, 7, 8)), ((5.0, 6, 7, 8), (1.0, 9, 9, 9)),
                 ((10.0, 2, 7, 3, 8), (6.0, 6, 5, 4, 7))]:
        means = [[np.mean(pick) for pick in combinations(x, 3)] for x in (a, b)]
        sign = np.sign(np.mean(a) - np.mean(b))
        want = np.mean([(x - y) * sign < -1e-12 for x, y in product(*means)])
        close(answer(np.array(a), np.array(b)), want,
              f"Not for {a} and {b}. Every triple of a meets every triple of b; count the other "
              "sign, whichever of the two is better with all seeds.")


@exercise
def claim(answer):
    got = answer()
    hints = {1: "0 lies inside the interval: the difference may well be none, or the other way.",
             2: "340 lies inside the interval as well. Not seen is not the same as not there.",
             4: "The 95% are about how often such intervals hold the true difference, and 0 lies "
                "inside this one."}
    true(got == 3, hints.get(got, "It takes one of the numbers 1 to 4."))


@exercise
def all_worst(answer):
    close(answer(2), 1 / 4, "Two draws out of two: each gives the worse one with chance 1/2.")
    close(answer(3), 1 / 27, "Three draws out of three, and each has three seeds to choose from.")
    close(answer(6), 6.0**-6, "Not for six.", tol=1e-7)


@exercise
def iqm(answer):
    close(answer(np.array([4.0, 1, 2, 3])), 2.5, "Of 1, 2, 3, 4 the 1 and the 4 are left out.")
    close(answer(np.array([50.0, 1, 2, 3, 4, -60, 9, 0])), 2.5,
          "Of eight values two are left out at each end, once they are sorted.")
    for n in (3, 5, 6, 7, 12):
        values = RNG.normal(size=n)
        close(answer(values.copy()), plot.STATISTICS["iqm"](values),
              f"Not for {n} values: int({n} / 4) = {n // 4} are left out at each end.")


@exercise
def improvement(answer):
    high, low = np.array([2.0, 3]), np.array([0.0, 1])
    close(answer(high, low), 1.0, "For [2, 3] and [0, 1] every seed of a beats every seed of b: "
                                  "all four pairs count 1, and their mean is 1.")
    close(answer(low, high), 0.0, "For [0, 1] and [2, 3] no seed of a beats one of b: all four "
                                  "pairs count 0. A lost pair takes nothing away.")
    close(answer(np.array([1.0, 4, 8]), np.array([2.0, 3, 6])), 5 / 9,
          "For [1, 4, 8] and [2, 3, 6] there are nine pairs, since every seed of a meets every "
          "seed of b: 1 wins none, 4 wins two, 8 wins three. It is 5/9.")
    close(answer(np.array([3.0, 5, 8]), np.array([2.0, 5, 6])), 5.5 / 9,
          "For [3, 5, 8] and [2, 5, 6] 3 wins one pair, 5 wins one and ties one, 8 wins three. The "
          "tie counts one half, so that it is 5.5/9.")
    few, many = RNG.normal(size=3), RNG.normal(size=7)
    close(answer(few, many), plot.improvement(few, many), "Not for 3 seeds against 7.")
