"""What ranks have stored since the last report -> the columns of one row."""

import math

import numpy as np
import torch


def summary(values):
    """Is it a distribution, n, mean, sum of squared deviations, min, max of tensors of any shape.

    These five numbers, unlike the values themselves, make a small message; `merge` joins them.
    """
    flat = torch.cat([value.reshape(-1).to(values[0].device) for value in values])
    flat, spread = flat.double().cpu().numpy(), any(value.ndim for value in values)
    if not flat.size:
        return spread, 0, 0.0, 0.0, math.inf, -math.inf
    with np.errstate(all="ignore"):  # what is not finite is refused by name, later
        mean = flat.mean()
        squares = np.square(flat - mean).sum()
    return spread, flat.size, *map(float, (mean, squares, flat.min(), flat.max()))


def merge(name, parts):
    """The columns of one quantity, of the summaries of those ranks that have it."""
    spread, counts, means, squares, lows, highs = zip(*parts)
    n = sum(counts)
    if n == 0:
        return {}
    mean = sum(count * own for count, own in zip(counts, means)) / n
    if not any(spread):
        return {name: mean}
    # Around the common mean: what a rank has around its own, and its own around the common one.
    gaps = [own - mean for own in means]
    around = sum(squares) + sum(count * gap * gap for count, gap in zip(counts, gaps))
    return {f"{name}_mean": mean, f"{name}_std": math.sqrt(around / n),
            f"{name}_min": min(lows), f"{name}_max": max(highs)}
