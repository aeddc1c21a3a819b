"""Worked answers to the exercises in 3_where_episodes_end.ipynb."""
import numpy as np


def counter_value(count, period, gamma, ends):
    once = gamma ** (period - 1 - count)  # the first reward, that many steps away
    return once if ends else once / (1 - gamma**period)  # it comes again every `period` steps


def led_to(obs, final_obs, terminated, truncated):
    return np.where(terminated | truncated, final_obs, obs)


def masks(terminated, truncated):
    bootstrap = 1 - terminated.astype(float)  # a limit is no end: `truncated` plays no part
    goes_on = 1 - (terminated | truncated).astype(float)
    return bootstrap, goes_on


def shrunk_gamma(gamma, limit):
    # The next value counts gamma in all steps but a share of 1 / limit, where it counts nothing.
    return gamma * (1 - 1 / limit)


def mean_return(gamma, length):
    left = np.arange(1, length + 1)  # steps that are left, with the present one
    return ((1 - gamma**left) / (1 - gamma)).mean()
