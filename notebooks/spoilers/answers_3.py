"""Worked answers to the exercises in 3_where_episodes_end.ipynb."""
import numpy as np


def counter_value(count, period, gamma, ends):
    once = gamma ** (period - 1 - count)  # the next reward, that many steps away
    return once if ends else once / (1 - gamma**period)  # it comes again every `period` steps


def led_to(obs, final_obs, terminated, truncated):
    return np.where(terminated | truncated, final_obs, obs)


def masks(terminated, truncated):
    bootstrap = 1 - terminated.astype(float)  # a time limit is not an end of the task
    continues = 1 - (terminated | truncated).astype(float)
    return bootstrap, continues


def shrunk_gamma(gamma, limit):
    # The next value counts gamma, except in a share 1 / limit of the steps, where it counts 0.
    return gamma * (1 - 1 / limit)


def mean_return(gamma, length):
    left = np.arange(1, length + 1)  # steps that are left, including the current one
    return ((1 - gamma**left) / (1 - gamma)).mean()
