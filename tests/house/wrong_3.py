"""Plausible wrong answers to the exercises of notebook 3. The checks must reject each."""
import numpy as np


def in_place(obs, final_obs, terminated, truncated):
    ended = terminated | truncated
    obs[ended] = final_obs[ended]
    return obs


def done_everywhere(terminated, truncated):
    continues = 1 - (terminated | truncated).astype(float)
    return continues, continues


def terminated_everywhere(terminated, truncated):
    bootstrap = 1 - terminated.astype(float)
    return bootstrap, bootstrap


def truncation_wins(terminated, truncated):
    bootstrap = 1.0 - (terminated & ~truncated)
    return bootstrap, 1.0 - (terminated | truncated)


WRONG = {
    "counter_value": [
        lambda count, period, gamma, ends: gamma ** (period - count),
        lambda count, period, gamma, ends: gamma ** (period - 1 - count),
        lambda count, period, gamma, ends: gamma ** (period - 1 - count) / (1 - gamma**period),
        lambda count, period, gamma, ends:
            gamma ** (period - 1 - count) / (1 if ends else 1 - gamma)],
    "led_to": [
        in_place, lambda obs, final_obs, terminated, truncated: obs,
        lambda obs, final_obs, terminated, truncated: np.where(truncated, final_obs, obs),
        lambda obs, final_obs, terminated, truncated: np.where(terminated, final_obs, obs)],
    "masks": [done_everywhere, terminated_everywhere, truncation_wins,
              lambda terminated, truncated: 1.0 - terminated],
    "shrunk_gamma": [lambda gamma, limit: gamma / limit, lambda gamma, limit: gamma,
                     lambda gamma, limit: gamma**limit, lambda gamma, limit: 1 - 1 / limit],
    "mean_return": [lambda gamma, length: (1 - gamma**length) / (1 - gamma),
                    lambda gamma, length: 1 / (1 - gamma),
                    lambda gamma, length: (1 + length) / 2],
}
