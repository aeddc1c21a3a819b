"""Checks for 5_is_it_better.ipynb. Answers: spoilers/answers_5.py."""
from itertools import combinations, product

import numpy as np
from checking import close, exercise, true

import plot

RNG = np.random.default_rng(5)


@exercise
def misleading(answer):
    close(answer(np.array([5.0, 6, 7]), np.array([1.0, 2, 3])), 0.0,
          "With three seeds each there is only one triple, which is all seeds. It cannot mislead.")
    close(answer(np.array([5.0, 6, 7, 8]), np.array([1.0, 2, 3, 4])), 0.0,
          "If every seed of one is higher than every seed of the other, no triples mislead.")
    for a, b in [((1.0, 9, 9, 9), (5.0, 6, 7, 8)), ((5.0, 6, 7, 8), (1.0, 9, 9, 9)),
                 ((10.0, 2, 7, 3, 8), (6.0, 6, 5, 4, 7))]:
        means = [[np.mean(pick) for pick in combinations(x, 3)] for x in (a, b)]
        sign = np.sign(np.mean(a) - np.mean(b))
        want = np.mean([(x - y) * sign < -1e-12 for x, y in product(*means)])
        close(answer(np.array(a), np.array(b)), want,
              f"Wrong for {a} and {b}. Compare every triple of a with every triple of b, and count "
              "the sign opposite to the difference over all seeds.")


@exercise
def claim(answer):
    got = answer()
    hints = {1: "0 is inside the interval: there may be no difference, or the opposite one.",
             2: "340 is inside the interval as well. Not seen is not the same as not there.",
             4: "The 95% say how often such intervals contain the true difference, and this one "
                "contains 0."}
    true(got == 3, hints.get(got, "Return one of the numbers 1 to 4."))


@exercise
def all_worst(answer):
    close(answer(2), 1 / 4, "Two draws from two: each gives the worse one with probability 1/2.")
    close(answer(3), 1 / 27, "Three draws from three seeds: each gives the worst one with "
                              "probability 1/3.")
    close(answer(6), 6.0**-6, "Wrong for six.", tol=1e-7)


@exercise
def iqm(answer):
    close(answer(np.array([4.0, 1, 2, 3])), 2.5, "Of 1, 2, 3, 4, leave out the 1 and the 4.")
    close(answer(np.array([50.0, 1, 2, 3, 4, -60, 9, 0])), 2.5,
          "Sort first. Of eight values, leave out two at each end.")
    for n in (3, 5, 6, 7, 12):
        values = RNG.normal(size=n)
        close(answer(values.copy()), plot.STATISTICS["iqm"](values),
              f"Wrong for {n} values: leave out int({n} / 4) = {n // 4} at each end.")


@exercise
def improvement(answer):
    high, low = np.array([2.0, 3]), np.array([0.0, 1])
    close(answer(high, low), 1.0, "For [2, 3] and [0, 1], every seed of a beats every seed of b: "
                                  "all four pairs count 1, and their mean is 1.")
    close(answer(low, high), 0.0, "For [0, 1] and [2, 3], no seed of a beats one of b: all four "
                                  "pairs count 0. A lost pair does not count negatively.")
    close(answer(np.array([1.0, 4, 8]), np.array([2.0, 3, 6])), 5 / 9,
          "For [1, 4, 8] and [2, 3, 6] there are nine pairs: 1 wins none, 4 wins two, 8 wins "
          "three. So it is 5/9.")
    close(answer(np.array([3.0, 5, 8]), np.array([2.0, 5, 6])), 5.5 / 9,
          "For [3, 5, 8] and [2, 5, 6], 3 wins one pair, 5 wins one and ties one, 8 wins three. "
          "The tie counts one half, so it is 5.5/9.")
    few, many = RNG.normal(size=3), RNG.normal(size=7)
    close(answer(few, many), plot.improvement(few, many), "Wrong for 3 seeds against 7.")
