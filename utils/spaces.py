"""Spaces of observations and actions: their kinds, and those that stand for others.

Gymnasium has more kinds of spaces than algorithms take. A FlatBox makes a vector of a Dict, a Tuple
or a Discrete observation. `Parts` makes a vector of whole numbers of a MultiDiscrete action and the
like, and `Numbered` one number.
"""

import math

import gymnasium as gym
import numpy as np

from utils.errors import UsageError

MOST_ACTS = 4096  # that `numbered_acts` numbers

KINDS = {"vector": "vectors (Box of one dimension, Discrete, Dict without images, Tuple, ...)",
         "dict": "Dicts with images",
         "goal": "goals (Dict of vectors observation, achieved_goal, desired_goal)",
         "mask": "action masks (Dict with an action_mask, one number per action)",
         "discrete": "Discrete from 0",
         "parts": "MultiDiscrete, MultiBinary, Tuple or Dict of Discrete",
         "image": "images (Box of uint8, HWC or CHW, at least 5 pixels a side)",
         "box": "Box of floats with finite bounds (and high - low finite and not 0)",
         "tokens": "texts (Box of whole numbers, one dimension)"}


def fits(kinds, takes):
    """Return whether one of `kinds` is among those that an algorithm takes; both are texts."""
    return not set(kinds.split()).isdisjoint(takes.split())


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


def has_images(space: gym.Space) -> bool:
    """Return whether observations are images, or Dicts with images."""
    return fits(obs_kind(space), "image dict")


def obs_kind(space):
    """Return the KINDS of an observation space, such as "vector goal", or "other"."""
    if isinstance(space, FlatBox):
        return space.kind
    if is_image(space):
        return "image"
    vector = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    return "vector" if vector else "other"


def act_kind(space):
    """Return "discrete", "parts", "box", "tokens" or "other" for an action space."""
    if isinstance(space, Parts):
        return "parts"
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


def parts_of(space: gym.Space, prefix: str = "") -> dict[str, gym.Space]:
    """Return {name: space} for the parts of an observation, in the order of a FlatBox."""
    inner = getattr(space, "spaces", None)  # of a Dict or a Tuple
    if inner is None:
        return {prefix or "obs": space}
    parts = {}
    for name, part in inner.items() if isinstance(inner, dict) else enumerate(inner):
        parts |= parts_of(part, f"{prefix}.{name}".strip("."))
    return parts


class FlatBox(gym.spaces.Box):
    """The Box of flattened observations, float32. So an image in it takes 4 times its memory.

    own      the space of the environment itself
    parts    if that is a Dict: {name: slice of the flat observation}
    leaves   the spaces of all parts, also of parts of parts
    vectors  the indices of all numbers but pixels; None if there are no images
    kind     what `obs_kind` returns
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
        self.leaves = list(parts_of(own).values())
        pixels = [np.full(gym.spaces.flatdim(leaf), is_image(leaf)) for leaf in self.leaves]
        pixels = np.concatenate([np.zeros(0, bool), *pixels])
        self.vectors = np.flatnonzero(~pixels) if pixels.any() else None
        self.kind = "vector" if self.vectors is None else "dict"
        self.kind += " goal" * has_goals + " mask" * ({"action_mask"} < self.parts.keys())

    def without(self, name: str) -> "FlatBox":
        """Return the FlatBox of all parts but one."""
        return FlatBox(gym.spaces.Dict([pair for pair in self.own.items() if pair[0] != name]))

    def flatten(self, obs) -> np.ndarray:
        if wrong := misfit(obs, self.own):
            raise UsageError("the environment returned an observation that is not of its space, "
                             f"{one_line(self.own)}: {wrong}")
        return gym.spaces.flatten(self.own, obs).astype(np.float32)


def part_sizes(space: gym.Space) -> list[int]:
    """Return how many values each part of an action has, 0 unless they are whole numbers."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return [size for part in parts_of(space).values() for size in part_sizes(part)]
    if isinstance(space, gym.spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return np.ravel(getattr(space, "nvec", getattr(space, "n", 0))).tolist()


def num_acts(space: gym.Space) -> int:
    return math.prod(part_sizes(space))  # as large as it is


def own_act(space: gym.Space, parts: np.ndarray):
    """Parts from 0 [..., k] -> actions [..., *shape] of `space`; a Dict or Tuple has arrays."""
    if isinstance(space, gym.spaces.Dict):
        return dict(zip(space, own_act(gym.spaces.Tuple(space.values()), parts)))
    if isinstance(space, gym.spaces.Tuple):
        ends = np.cumsum([len(part_sizes(part)) for part in space])[:-1]
        return tuple(map(own_act, space, np.split(parts, ends, axis=-1)))
    acts = parts.reshape(parts.shape[:-1] + space.shape) + getattr(space, "start", 0)
    return acts.astype(space.dtype)[()]


class Numbered(gym.spaces.Discrete):
    """The actions of the space `own`, numbered from 0. Their last part varies fastest."""

    def __init__(self, own: gym.Space):
        super().__init__(num_acts(own))
        self.own = own

    def own_act(self, number: np.ndarray | np.integer):
        """Numbers [...] -> actions for the environment itself."""
        return own_act(self.own, np.stack(np.unravel_index(number, part_sizes(self.own)), axis=-1))


class Parts(gym.spaces.MultiDiscrete):
    """The actions of the space `own`, each a vector [k] of whole numbers from 0."""

    def __init__(self, own: gym.Space):
        super().__init__(part_sizes(own))
        self.own = own

    def own_act(self, parts: np.ndarray):
        return own_act(self.own, parts)


def misfit(value, space: gym.Space, name: str = "observation") -> str:
    """Return "" if a value is of a space, or which part is not. It may leave a Box's bounds."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        named = isinstance(space, gym.spaces.Dict)
        if not isinstance(value, dict if named else tuple | list):
            return f"{name} is {one_line(repr(value))[:80]}, no {'dict' if named else 'tuple'}"
        if not named and len(value) != len(space):
            return f"{name} has {len(value)} parts, not {len(space)}"
        for key, part in space.items() if named else enumerate(space):
            if named and key not in value:
                return f"{name} has no {key!r}"
            if wrong := misfit(value[key], part, f"{name}[{key!r}]"):
                return wrong
        return ""
    if not isinstance(space, gym.spaces.Box):
        fits, told = space.contains(value), one_line(repr(value))[:80]
        return "" if fits else f"{name} is {told}, not of {one_line(space)}"
    array = as_array(value)
    fits = array.dtype.kind == space.dtype.kind == "f" or np.can_cast(array.dtype, space.dtype)
    if fits and array.shape == space.shape:
        return ""
    return f"{name} is {array.dtype} {list(array.shape)}, not {space.dtype} {list(space.shape)}"


def as_array(value) -> np.ndarray:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # lists of different lengths, tensors on a GPU
        return np.empty((), object)


def one_line(text) -> str:
    return " ".join(str(text).split())
