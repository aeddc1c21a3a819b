"""Spaces of observations and actions: their kinds, and those that stand for others.

Gymnasium has more kinds of spaces than algorithms take. A FlatBox makes a vector of a Dict, a Tuple
or a Discrete observation. `Numbered` gives one number to each action of several parts.
"""

import math

import gymnasium as gym
import numpy as np
import torch

from utils.errors import UsageError

MOST_ACTS = 4096  # that `numbered_acts` numbers

KINDS = {"vector": "vectors (Box of one dimension, Discrete, Dict, Tuple, ...)",
         "goal": "goals (Dict of vectors observation, achieved_goal, desired_goal)",
         "mask": "action masks (Dict of observation and action_mask, one number per action)",
         "discrete": "Discrete from 0",
         "image": "images (Box of uint8, HWC or CHW, at least 5 pixels a side)",
         "box": "Box of floats with finite bounds (and high - low finite and not 0)",
         "tokens": "texts (Box of whole numbers, one dimension)"}


def fits(kind, takes):
    """Return whether `kind` is one of those in the text `takes`. Goals and masks are vectors."""
    return kind in takes.split() or (kind in ("goal", "mask") and "vector" in takes.split())


def image_layout(shape: tuple[int, ...]) -> tuple[int, bool] | None:
    """Return (axis of an image's channels, whether that is clear), or None if it is no image.

    The shape alone decides, and only here. An image is [H, W, C] or [C, H, W], with sides of at
    least 5 pixels. If both are possible, channels are last, as usual in Gymnasium, unless H / W is
    twice as near to 1 in [C, H, W]. If it is 1 there, 1.5 times will do: there is [12, 8, 8].
    """
    if len(shape) != 3:
        return None
    last, first = (max(sides) / min(sides) if min(sides) >= 5 else math.inf
                   for sides in (shape[:2], shape[1:]))
    if last == first == math.inf:
        return None
    axis = 0 if last >= (1.5 if first == 1 else 2) * first else 2
    return axis, max(last, first) >= 2 * min(last, first) or last == 1 < first


def is_image(space: gym.Space) -> bool:
    """Return whether observations are images: uint8, at least 5 pixels a side."""
    return (isinstance(space, gym.spaces.Box) and space.dtype == np.uint8
            and image_layout(space.shape) is not None)


def obs_kind(space):
    """Return "image", "goal", "mask", "vector" or "other" for an observation space."""
    if isinstance(space, FlatBox):
        return space.kind
    if is_image(space):
        return "image"
    vector = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    return "vector" if vector else "other"


def act_kind(space):
    """Return "discrete", "box", "tokens" or "other" for an action space."""
    if isinstance(space, gym.spaces.Discrete):
        return "discrete" if space.start == 0 else "other"
    if isinstance(space, gym.spaces.Box) and space.dtype == np.int64 and len(space.shape) == 1:
        return "tokens"
    if not isinstance(space, gym.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return "other"
    with np.errstate(over="ignore", invalid="ignore"):  # ranges in its own type and in ours
        ranges = [space.high - space.low, np.float32(space.high) - np.float32(space.low)]
    # [-1, 1] is rescaled to the bounds. Those at the limits of a type have an infinite range.
    return "box" if np.isfinite(ranges).all() and np.any(ranges[0]) else "other"


def numeric(space: gym.Space) -> gym.Space | None:
    """Return a space without the parts of Dicts that are no numbers; None if nothing is left."""
    if isinstance(space, gym.spaces.Dict):
        parts = [(name, numeric(part)) for name, part in space.items()]
        parts = [(name, part) for name, part in parts if part is not None]
        return gym.spaces.Dict(parts) if parts else None
    if isinstance(space, gym.spaces.Tuple):  # whose parts have no names
        return space if all(part == numeric(part) for part in space) else None
    try:
        return space if space.is_np_flattenable and not isinstance(
            space, gym.spaces.Text) else None
    except NotImplementedError:  # a kind that is not Gymnasium's
        return None


class FlatBox(gym.spaces.Box):
    """The Box of flattened observations.

    own      the space of the environment itself
    parts    if that is a Dict: {name: slice of the flat observation}
    kind     what `obs_kind` returns: "goal", "mask" or "vector"
    """

    def __init__(self, own: gym.Space):
        flat = gym.spaces.flatten_space(own)
        super().__init__(flat.low.astype(np.float32), flat.high.astype(np.float32))
        self.own = own
        parts = own if isinstance(own, gym.spaces.Dict) else {}
        ends = np.cumsum([gym.spaces.flatdim(part) for part in parts.values()], dtype=int).tolist()
        # In the order in which Gymnasium joins them.
        self.parts = dict(zip(parts, map(slice, [0, *ends], ends)))
        # Goals are vectors of one size, so a slice is a goal as the environment knows it.
        three = [parts.get(name) for name in ("observation", "achieved_goal", "desired_goal")]
        vectors = [part for part in three if part and part.shape == (gym.spaces.flatdim(part),)]
        has_goals = len(vectors) == 3 and vectors[1].shape == vectors[2].shape
        has_mask = {"observation", "action_mask"} <= self.parts.keys()
        self.kind = "goal" if has_goals else "mask" if has_mask else "vector"

    def flatten(self, obs) -> np.ndarray:
        if not belongs(obs, self.own):
            raise UsageError(f"the environment returned an observation that is not of its space, "
                             f"{one_line(self.own)}: {one_line(repr(obs))[:80]}")
        return gym.spaces.flatten(self.own, obs).astype(np.float32)


def part_sizes(space: gym.Space) -> np.ndarray:
    """Return how many values each part of an action has, 0 unless they are whole numbers."""
    if isinstance(space, gym.spaces.MultiBinary):
        return np.full(space.shape, 2)
    return np.asarray(getattr(space, "nvec", getattr(space, "n", 0)))


def num_acts(space: gym.Space) -> int:
    return math.prod(part_sizes(space).ravel().tolist())  # as large as it is


class Numbered(gym.spaces.Discrete):
    """The actions of the space `own`, numbered from 0. Their last part varies fastest."""

    def __init__(self, own: gym.Space):
        super().__init__(num_acts(own))
        self.own = own

    def own_act(self, number: np.ndarray | np.integer) -> np.ndarray | np.integer:
        """Numbers [...] -> actions [..., *shape] for the environment itself."""
        parts = np.unravel_index(number, part_sizes(self.own).reshape(-1))
        acts = np.stack(parts, axis=-1).reshape(np.shape(number) + self.own.shape)
        return (acts + getattr(self.own, "start", 0)).astype(self.own.dtype)[()]


def belongs(value, space: gym.Space) -> bool:
    """Return whether a value is of a space. It may leave the bounds of a Box."""
    if isinstance(space, gym.spaces.Dict):
        return isinstance(value, dict) and all(
            name in value and belongs(value[name], part) for name, part in space.items())
    if isinstance(space, gym.spaces.Tuple):
        return isinstance(value, tuple | list) and len(value) == len(space) and all(
            map(belongs, value, space))
    if not isinstance(space, gym.spaces.Box):
        return space.contains(value)
    array = as_array(value)
    fits = array.dtype.kind == space.dtype.kind == "f" or np.can_cast(array.dtype, space.dtype)
    return fits and array.shape == space.shape


def as_array(value) -> np.ndarray:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # lists of different lengths, tensors on a GPU
        return np.empty((), object)


def one_line(text) -> str:
    return " ".join(str(text).split())


# What the spaces that a checkpoint may hold are made from: attributes of the same names.
MADE_FROM = {gym.spaces.Box: "low high dtype", gym.spaces.Discrete: "n start dtype",
             gym.spaces.MultiDiscrete: "nvec start dtype", gym.spaces.MultiBinary: "n",
             gym.spaces.Dict: "spaces", gym.spaces.Tuple: "spaces",
             FlatBox: "own", Numbered: "own"}


def to_plain(value):
    """Return spaces as plain values and tensors. LookupError, TypeError, ValueError: it cannot."""
    if isinstance(value, gym.Space):  # not of a subclass, whose values may mean something else
        names = MADE_FROM[type(value)].split()
        parts = {name: to_plain(getattr(value, name)) for name in names}
        return {"kind": type(value).__name__} | parts
    if isinstance(value, dict | tuple):  # a Dict made from pairs keeps their order
        return [to_plain(part) for part in (value.items() if isinstance(value, dict) else value)]
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    if not isinstance(value, str | int | np.integer | np.dtype):
        raise TypeError(f"{value!r} is not plain")
    return int(value) if isinstance(value, int | np.integer) else str(value)


def from_plain(value):
    """Return the spaces that `to_plain` had."""
    if isinstance(value, dict):
        kind = next(kind for kind in MADE_FROM if kind.__name__ == value["kind"])
        return kind(**{name: from_plain(value[name]) for name in MADE_FROM[kind].split()})
    if isinstance(value, list):
        return [from_plain(part) for part in value]
    return value.numpy() if isinstance(value, torch.Tensor) else value
