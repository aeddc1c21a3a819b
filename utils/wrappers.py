"""Wrappers: vectors as observations, numbers as actions, copies, and the episodes that end."""

import os
import random

import gymnasium as gym
import numpy as np

from utils.mpi import say_once
from utils.spaces import (
    MOST_ACTS, FlatBox, Numbered, Parts, act_kind, image_layout, is_image, num_acts, numeric,
    one_line, part_sizes, parts_of)


def flat_obs(env: gym.Env) -> gym.Env:
    """Turn observations that are neither vectors nor images into vectors, if Gymnasium can.

    Discrete ones become one-hot. The parts of a Dict or a Tuple are flattened and joined, but for
    texts and the like, which a Dict loses; `make_encoder` takes images out again. Images of bools
    become bytes. Others stay what they are: flattened, they would be learned from badly.
    """
    space = env.observation_space
    box = isinstance(space, gym.spaces.Box)
    if box and space.dtype == bool and image_layout(space.shape):
        space = gym.spaces.Box(0, 255, space.shape, np.uint8)  # as MinAtar's
        env = gym.wrappers.TransformObservation(env, lambda bools: bools * np.uint8(255), space)
    for image in filter(is_image, parts_of(space).values()):
        if not (layout := image_layout(image.shape))[1]:
            say_once(f"images: {list(image.shape)} may be [H, W, C] or [C, H, W]; we take it to "
                     f"have {image.shape[layout[0]]} channels (docs/howto.md, Images)")
    for name, part in parts_of(space).items() if not box else ():
        if isinstance(part, gym.spaces.Box) and part.dtype.kind == "f" and image_layout(part.shape):
            say_once(f"images: {name} has floats, {list(part.shape)}, so it is no image here, but "
                     "numbers; make it uint8 in [0, 255] (docs/howto.md, Images)")
    stays = box and len(space.shape) == 1
    if box and len(space.shape) > 1:  # a picture has two long sides; a board of 5 by 5 is none
        stays = sorted(space.shape)[-2] >= (36 if len(space.shape) == 2 else 5)
    own = None if stays else numeric(space)
    if own is None or gym.spaces.flatdim(own) > 1e6:
        return env
    flat = FlatBox(own)
    size = flat.shape[0]
    left_out = " (what is no number is left out)" * (own != space)
    say_once(f"observations: {one_line(own)}{left_out}, flattened to {size} number"
             + "s" * (size != 1)
             + "; each image has an encoder of its own" * (flat.vectors is not None))
    return gym.wrappers.TransformObservation(env, flat.flatten, flat)


def numbered_acts(env: gym.Env, parts: bool = False) -> gym.Env:
    """Let one number, or with `parts` a vector of them, stand for an action of several parts, and
    one from 0 for a Discrete that begins elsewhere."""
    space = env.action_space
    if parts and len(part_sizes(space)) > 1 and num_acts(space):
        return gym.wrappers.TransformAction(env, Parts(space).own_act, Parts(space))
    if act_kind(space) == "discrete" or not 0 < num_acts(space) <= MOST_ACTS:
        return env
    numbers = Numbered(space)
    say_once(f"actions: {one_line(space)}, numbered as Discrete({numbers.n})")
    return gym.wrappers.TransformAction(env, numbers.own_act, numbers)


class OwnStep(gym.Wrapper):
    """Copy actions and observations, and tell of `info` only whether an episode succeeded.

    Same-step autoreset may overwrite the array that a step returned, and an environment may change
    its action in place, so both are copied. Gymnasium joins the infos of all environments in every
    step, which takes time and fails if arrays differ in size or a number is sometimes None.
    """

    def __init__(self, env, run_pid: int | None = None):
        super().__init__(env)
        self.worker = run_pid not in (None, os.getpid())  # of --async-envs
        if self.worker and hasattr(os, "setpgrp"):  # a Ctrl-C is for the run, which needs this one
            os.setpgrp()

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # an environment may draw by `self.action_space.sample()`
            self.unwrapped.action_space.seed(seed)
            if self.worker:  # else all of them would draw the same
                random.seed(seed), np.random.seed(seed)  # noqa: NPY002
        obs, _ = self.env.reset(seed=seed, options=options)
        return obs, {}

    def step(self, action):
        action = action.copy() if isinstance(action, np.ndarray) else action
        obs, rew, terminated, truncated, info = self.env.step(action)
        told = success(info) if terminated or truncated else {}
        return np.copy(obs), np.asarray(rew).item(), terminated, truncated, told


def success(info: dict) -> dict[str, float]:
    """Return {"success": 1.0 or 0.0} if the last step of an episode told it by a number, or {}."""
    for name in ("is_success", "success"):
        value = np.asarray(info.get(name))
        if value.size == 1 and value.dtype.kind in "buif" and np.isfinite(value).all():
            return {"success": float(value.item())}
    return {}


class EpisodeRecorder(gym.wrappers.vector.RecordEpisodeStatistics):
    """Keep return, length and success of an episode that ends, until `pop_episodes` takes it."""

    def __init__(self, env: gym.vector.VectorEnv):
        super().__init__(env)
        self.vector_steps = 0
        self.ended = []

    def reset(self, **kwargs):
        obs, infos = super().reset(**kwargs)
        self.check_finite(obs, "an observation")
        return obs, infos

    def step(self, actions):
        obs, rew, terminated, truncated, infos = super().step(actions)
        self.vector_steps += 1
        self.check_finite(obs, "an observation")
        self.check_finite(rew, "a reward")
        for i in np.flatnonzero(terminated | truncated):
            self.check_finite(infos["final_obs"][i], "an observation")
            ep_ret, ep_len = float(infos["episode"]["r"][i]), int(infos["episode"]["l"][i])
            told = infos.get("final_info", {})
            end = [float(told["success"][i])] if "success" in told and told["_success"][i] else []
            self.ended.append((self.vector_steps, int(i), ep_ret, ep_len, *end))
        return obs, rew, terminated, truncated, infos

    def check_finite(self, values: np.ndarray, what: str) -> None:
        if not all_finite(values):
            raise FloatingPointError(f"the environment returned NaN or infinity as {what}, in its "
                                     f"vector step {self.vector_steps} since this process started")

    def pop_episodes(self) -> list[tuple]:
        """Return (vector steps since it ended, environment, ep_ret, ep_len) per new episode, and
        success, 1 or 0, if the environment tells it."""
        episodes = [(self.vector_steps - at, *rest) for at, *rest in self.ended]
        self.ended = []
        return episodes


def all_finite(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # 1e39 is infinite in float32, in which we compute
        return values.dtype.kind != "f" or bool(np.isfinite(values.astype("f")).all())
