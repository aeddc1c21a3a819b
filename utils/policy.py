"""The parent of every Agent: which spaces it takes, and what it does with one observation."""

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, iterate
from torch import Tensor, nn

from utils.errors import UsageError
from utils.mpi import say_once
from utils.spaces import (
    KINDS, MOST_ACTS, FlatBox, Numbered, Parts, act_kind, as_array, fits, misfit, num_acts,
    obs_kind, one_line)
from utils.stats import RunningStats
from utils.wrappers import all_finite


class Policy(nn.Module):
    """What every Agent has. It refuses spaces that the algorithm does not take, and predicts.

    takes      the KINDS of spaces that the algorithm takes: {"obs": "vector image", "act": "box"}
    q_value    function of (obs, act) -> Q(s, a) [B], if evaluations are to compare it with returns

    An Agent adds `act`, from raw observations [N, ...] to actions, and `env_act`, which turns these
    into those of `envs.step`. UsageError: a space is of another kind.
    """

    takes: dict[str, str]
    q_value = None

    def __init__(self, obs_space: gym.Space, act_space: gym.Space):
        super().__init__()
        check_spaces(obs_space, act_space, self.takes)
        self.obs_shape = obs_space.shape
        self.spaces = obs_space, act_space

    def forget(self, done: np.ndarray | None = None) -> None:
        """Clear the memory where an episode is `done` [N], or everywhere. Most agents have none."""

    def adopt(self, state: dict[str, Tensor]) -> None:
        """Load the state dict of a run of another task, for --init-from.

        The bounds of actions, `low` and `high`, stay those of this task. RunningStats are the
        other's until their first update replaces them.
        """
        own = self.state_dict()
        self.load_state_dict(state | {name: own[name] for name in ("low", "high") if name in own})
        for part in self.modules():
            if isinstance(part, RunningStats):
                part.count.zero_()

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw observation -> the deterministic action for `env.step`; N of them -> N actions.

        Observations may also be as the environment gave them, before `make_envs` flattened them.
        N dictionaries are one whose parts are [N, ...].
        ValueError: it is of another shape or type, or has NaN or infinity in it.
        """
        obs_space, act_space = self.spaces
        if isinstance(obs_space, FlatBox):
            obs = flattened(obs, obs_space)
        obs = as_array(obs)
        one = obs.shape == self.obs_shape
        if not one and obs.shape[1:] != self.obs_shape:
            raise ValueError(f"an observation has the shape {self.obs_shape}, and N of them have "
                             f"{('N', *self.obs_shape)}; these have {obs.shape}")
        if obs_space.dtype == np.uint8 and obs.dtype == bool:
            obs = obs * np.uint8(255)  # as in `flat_obs`
        if obs.dtype.kind not in "buif" or obs_space.dtype == np.uint8 != obs.dtype:
            raise ValueError(f"an observation is {obs_space.dtype}; this one is {obs.dtype}")
        if not all_finite(obs):
            raise ValueError("the observation has NaN or infinity in it")
        # PyTorch takes no flipped arrays, no foreign byte order, and floats of 4 or 8 bytes.
        kind = f"f{min(max(obs.itemsize, 4), 8)}" if obs.dtype.kind == "f" else obs.dtype
        obs = np.array(obs, kind, order="C")
        act = self.env_act(self.act(obs[None] if one else obs, deterministic=True))
        act = act[0] if one else act
        return act_space.own_act(act) if isinstance(act_space, Numbered | Parts) else act


def flattened(obs, space: FlatBox):
    """Flatten one observation of a FlatBox's own space, or N. ValueError: a dict or tuple is none.

    What is no dict and no tuple may be flat already.
    """
    wrong = misfit(obs, space.own)
    if not wrong:
        return space.flatten(obs)
    if not isinstance(obs, dict | tuple) or not hasattr(space.own, "spaces"):
        return obs
    try:
        some = [*iterate(batch_space(space.own), obs)]
    except (KeyError, TypeError, ValueError):  # it has no parts [N, ...]
        raise ValueError(wrong) from None
    if wrong := next(filter(None, (misfit(each, space.own) for each in some)), ""):
        raise ValueError(wrong)
    return np.stack([space.flatten(each) for each in some])


def check_spaces(obs_space, act_space, takes):
    """UsageError unless both spaces are of a kind that `takes`, of a Policy, names."""
    kinds = obs_kind(obs_space), act_kind(act_space)
    if fits(kinds[0], "mask") and not fits(takes["obs"], "mask"):
        say_once("observations: action_mask is an input here, not obeyed (docs/howto.md)")
    sides = (("observation", obs_space, kinds[0], takes["obs"]),
             ("action", act_space, kinds[1], takes["act"]))
    for side, space, kind, wanted in sides:
        if not fits(kind, wanted):
            help = "docs/howto.md has a table of what each takes, and what helps"
            if side == "action" and num_acts(space) > MOST_ACTS:
                help = f"{num_acts(space):.4g} combinations are more than {MOST_ACTS:,}; {help}"
            space = getattr(space, "own", space)
            raise UsageError(f"--env has the {side} space {one_line(space)}; this algorithm takes "
                             f"{' or '.join(KINDS[name] for name in wanted.split())}; {help}")
