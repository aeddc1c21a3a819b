"""Spaces in a checkpoint: what is rebuilt is what was saved."""
import enum

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple

from utils.run import checkpoint
from utils.run.checkpoint import from_plain, to_plain
from utils.spaces import FlatBox, Numbered, Parts

PAIRS = Dict([("b", Box(0, 1, (2,))), ("a", Tuple((Discrete(3, start=1), MultiBinary(2))))])
MASKED = Dict(observation=Box(-1, 1, (3,), np.float64), action_mask=Box(0, 1, (2,), np.int8))
GOALS = Dict({name: Box(-9, 9, (2,)) for name in ("observation", "achieved_goal", "desired_goal")})
SPACES = [Box(np.float32([-np.inf, 0, -3]), np.float32([1, np.inf, 4])), Box(0, 1, (2, 3), bool),
          Box(0, 255, (4, 5, 3), np.uint8), Box(-1, 1, (), np.float64),
          Box(-5, 2**40, (2,), np.int64), Box(0, 60_000, (2,), np.uint16), Discrete(4, start=-2),
          Discrete(3, dtype=np.int32), MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
          MultiDiscrete([2], dtype=np.int32), MultiBinary(4), MultiBinary([2, 3]), PAIRS,
          Dict({1: Discrete(2)}), FlatBox(PAIRS),
          FlatBox(Dict(see=Box(0, 255, (5, 6, 3), np.uint8), at=Box(-1, 1, (2,)))),
          Parts(MultiDiscrete([2, 3], start=[1, 1])), Parts(PAIRS["a"]), Parts(Dict(b=Discrete(2))),
          FlatBox(MASKED), FlatBox(GOALS), FlatBox(Discrete(3)), Numbered(Discrete(3, start=5)),
          Numbered(MultiDiscrete([2, 3], start=[1, 1])), Numbered(MultiBinary([2, 2]))]


class Own(Box):
    pass


class Colour(enum.Enum):
    RED = 1


def saved(space):
    checkpoint.save_file("file", {"space": to_plain(space)})
    return from_plain(checkpoint.load_file("file")["space"])


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_is_rebuilt_exactly(space):
    rebuilt = saved(space)
    assert type(rebuilt) is type(space) and rebuilt == space and rebuilt.dtype == space.dtype
    assert repr(rebuilt) == repr(space)                         # the order of a Dict, too
    if isinstance(space, FlatBox):
        assert (rebuilt.parts, rebuilt.kind) == (space.parts, space.kind)
        assert rebuilt.own == space.own and repr(rebuilt.own) == repr(space.own)
    if isinstance(space, Numbered):
        assert np.array_equal(rebuilt.own_act(np.arange(3)), space.own_act(np.arange(3)))
    if isinstance(space, Parts):
        assert repr(rebuilt.own_act(space.nvec - 1)) == repr(space.own_act(space.nvec - 1))


@pytest.mark.parametrize("space", [
    Text(3), Sequence(Discrete(2)), Own(0, 1, (2,)), Dict({Colour.RED: Discrete(2)}),
    Box(0, 1, (2,), np.longdouble), Box(0, 1, (2,), ">f4")], ids=str)
def test_what_cannot_be_rebuilt_is_not_saved(space):
    with pytest.raises((LookupError, TypeError, ValueError)):
        to_plain((FlatBox(space), Discrete(2)) if isinstance(space, Dict) else space)
