"""Environments: making them, recording their episodes, evaluating a policy in them.

Algorithm files get vector environments from `make_envs`. Every one of them restarts an environment
in the same step in which its episode ends ("same-step autoreset"), so `next_obs` then holds the
first observation of the next episode, and `infos["final_obs"]` the last one of the old. Every one
also records its episodes, with the environment's own rewards, for `Run.log`.
"""

import contextlib
import contextvars
import copy
import functools
import importlib
import io
import json
import math
import os
import re
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import find_highest_version, parse_env_id
from torch import nn

from utils import mpi
from utils.mpi import UsageError

# How the names of the environments of gymnasium-robotics begin.
ROBOTICS = ("AdroitHand", "AntMaze", "Fetch", "FrankaKitchen", "HandManipulate", "HandReach",
            "PointMaze")
MOST_ACTS = 4096  # that `numbered_acts` numbers
MOST_NUMBERS = 10**6  # that `flat_obs` makes of an observation
say_once = functools.cache(mpi.say)
# What `make_envs` made. A run has a set of its own: see `closing_envs`.
MADE = contextvars.ContextVar("made", default=weakref.WeakSet())  # noqa: B039  it is to be shared


def make_envs(cfg, num_envs: int) -> gym.vector.VectorEnv:
    """Return `num_envs` copies of `cfg.env`, stepped together in this process.

    Atari games come preprocessed: 4 stacked grey frames of 84 x 84, each action held for 4 frames,
    rewards clipped to [-1, 1] for the learner. The recorded returns are the true scores. FIRE
    is the first action of every life. docs/howto.md says what older figures did otherwise.
    Other environments are wrapped: see `flat_obs`, `numbered_acts` and `OwnStep`.
    UsageError: the environment is unknown, is not installed, or does not take --env-kwargs.
    """
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    kwargs = {"vectorization_mode": "sync", "vector_kwargs": same_step,
              "wrappers": [flat_obs, numbered_acts, OwnStep]}
    atari = is_game(cfg.env, "ALE/")
    if atari:  # has a vector class of its own, in C++
        kwargs = same_step | {"reward_clipping": False}
    with refusing_bad_env(cfg) as env_kwargs:
        if is_game(cfg.env, "MinAtar/"):  # where one may wait forever; ALE's games have this limit
            env_kwargs.setdefault("max_episode_steps", 27_000)
        lives_end = atari and env_kwargs.pop("episodic_life", False)
        envs = gym.make_vec(cfg.env, num_envs, **kwargs, **env_kwargs)
    if atari:
        sticky = env_kwargs.get("repeat_action_probability", 0.25)
        if not 0 <= sticky <= 1:  # which ale-py does not see
            raise UsageError(f"--env-kwargs: repeat_action_probability is {sticky}, no probability")
        lives = "; to the learner, a lost life ends an episode, but not in the log" * lives_end
        say_once(f"Atari: sticky actions {sticky:g}{lives}")
    buttons = atari and isinstance(envs.single_action_space, gym.spaces.Discrete)
    acts = [act.name for act in envs.unwrapped.ale.get_action_set()] if buttons else []
    fire = acts.index("FIRE") if "FIRE" in acts else None
    envs = EpisodeRecorder(envs, clip_rewards=atari, lives_end=lives_end, fire=fire)
    MADE.get().add(envs)
    return envs


@contextlib.contextmanager
def closing_envs():
    """At the end, close what `make_envs` has made meanwhile."""
    token = MADE.set(weakref.WeakSet())
    try:
        yield
    finally:
        for envs in list(MADE.get()):
            envs.close()
        MADE.reset(token)


def with_version(cfg):
    """Return `cfg` with the newest version, if --env names none. UsageError: it is unknown."""
    package, _, name = cfg.env.rpartition(":")
    with refusing_bad_env(cfg):
        if package.startswith("."):  # which `import_module` takes for a part of a package
            raise ImportError(f"No module named {package!r}")
        if package:
            importlib.import_module(package)
        namespace, base, version = parse_env_id(name)
        newest = find_highest_version(namespace, base) if version is None else None
        spec = gym.spec(name if newest is None else f"{name}-v{newest}")
        if "ale_py" in str(spec.entry_point) and not is_game(name, "ALE/"):
            raise gym.error.DeprecatedEnv("its pictures are not preprocessed")
    if newest is None:
        return cfg
    new = replace(cfg, env=f"{cfg.env}-v{newest}")
    object.__setattr__(new, "given", cfg.given)  # `replace` cannot know it
    say_once(f"environment: {new.env}, the newest version")
    return new


def is_game(env: str, names: str | tuple[str, ...] = ("ALE/", "MinAtar/")) -> bool:
    """Return whether an id, perhaps after a module, is that of a game."""
    return env.rpartition(":")[2].startswith(names)


def belongs(value, space: gym.Space) -> bool:
    """Return whether a value is of a space. It may leave the bounds of a Box."""
    if isinstance(space, gym.spaces.Dict):
        return isinstance(value, dict) and all(
            name in value and belongs(value[name], part) for name, part in space.items())
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


def flat_obs(env: gym.Env) -> gym.Env:
    """Turn observations that are neither vectors nor images into vectors, if Gymnasium can.

    Discrete ones become one-hot. The parts of a Dict or a Tuple are flattened and joined. Images of
    bools become bytes. Others stay what they are: flattened, they would be learned from badly.
    """
    space = env.observation_space
    box = isinstance(space, gym.spaces.Box)
    if box and space.dtype == bool and len(space.shape) == 3:
        images = gym.spaces.Box(0, 255, space.shape, np.uint8)  # as MinAtar's
        return gym.wrappers.TransformObservation(
            env, lambda bools: np.multiply(bools, np.uint8(255)), images)
    stays = len(space.shape) == 1 if box else not space.is_np_flattenable
    if box and len(space.shape) > 1:  # a picture, of whatever type: bytes, or two long sides
        long = 36 if len(space.shape) == 2 else 5  # a matrix of 5 by 5 is none
        stays = space.dtype == np.uint8 or sorted(space.shape)[-2] >= long
    if stays or gym.spaces.flatdim(space) > MOST_NUMBERS:
        return env
    flat = FlatBox(space)
    size = flat.shape[0]
    say_once(f"observations: {one_line(space)}, flattened to {size} number{'s' * (size != 1)}")
    return gym.wrappers.TransformObservation(env, flat.flatten, flat)


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


def numbered_acts(env: gym.Env) -> gym.Env:
    """Let one number stand for a MultiDiscrete or MultiBinary action, or a Discrete not from 0."""
    space = env.action_space
    if act_kind(space) == "discrete" or not 0 < num_acts(space) <= MOST_ACTS:
        return env
    numbers = Numbered(space)
    say_once(f"actions: {one_line(space)}, numbered as Discrete({numbers.n})")
    return gym.wrappers.TransformAction(env, numbers.own_act, numbers)


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


class OwnStep(gym.Wrapper):
    """Copy actions and observations, and tell of `info` only whether an episode succeeded.

    Same-step autoreset may overwrite the array that a step returned, and an environment may change
    its action in place, so both are copied. Gymnasium joins the infos of all environments in every
    step, which takes time and fails if arrays differ in size or a number is sometimes None.
    """

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # an environment may draw by `self.action_space.sample()`
            self.unwrapped.action_space.seed(seed)
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {}

    def step(self, action):
        action = action.copy() if isinstance(action, np.ndarray) else action
        obs, rew, terminated, truncated, info = self.env.step(action)
        told = success(info) if terminated or truncated else {}
        return np.copy(obs), rew, terminated, truncated, told

    def close(self):
        try:
            super().close()
        except Exception as error:  # what was learned in it is not lost by that
            warnings.warn(f"{self.unwrapped} could not be closed: {error!r}", stacklevel=2)


def goal_env(envs: gym.vector.VectorEnv) -> gym.Env:
    """Return the part of the first environment that has `compute_reward`, for other goals' rewards.

    That is the environment without its wrappers, or the outermost wrapper that has one. Give these
    functions NO_INFO. UsageError: there is none, it does not take batches, or a wrapper around it
    may change what it computes.
    """
    env = envs.unwrapped.envs[0]
    wrong = f"--env is {env.spec.id}, "
    harmless = (gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker, gym.wrappers.TimeLimit,
                gym.wrappers.HumanRendering, gym.wrappers.RenderCollection)
    while isinstance(env.observation_space, FlatBox):
        env = env.env
    while isinstance(env, gym.Wrapper) and not hasattr(env, "compute_reward"):
        if type(env) not in harmless and type(env).step not in (
                gym.Wrapper.step, gym.ActionWrapper.step):
            raise UsageError(f"{wrong}whose wrapper {type(env).__name__} may change rewards or "
                             "goals; hindsight needs a compute_reward that returns the rewards of "
                             "the wrapped environment: define it in the wrapper")
        env = env.env
    for name in ("compute_reward", "compute_terminated"):
        if not hasattr(env, name):
            raise UsageError(f"{wrong}which has no {name}(achieved_goal, desired_goal, info); "
                             "hindsight needs it")
    with contextlib.suppress(AttributeError):  # perhaps of what the first reset makes
        goals = np.stack([env.observation_space["desired_goal"].sample() for _ in range(2)])
        env.compute_terminated(goals[0], goals[1], NO_INFO)
        if (shape := np.shape(env.compute_reward(goals, goals, NO_INFO))) != (2,):
            raise UsageError(f"{wrong}whose compute_reward returns {list(shape)} for 2 pairs of "
                             "goals; hindsight needs one that takes batches and returns [2]")
    return env


class NoInfo(dict):
    """The `info` of a step that was never taken. UsageError: somebody reads it."""

    def refuse(self, *args):
        raise UsageError("--env has a compute_reward or compute_terminated that reads its info; "
                         "hindsight has none, since nobody took a step towards the new goal")

    __getitem__ = __contains__ = __iter__ = get = keys = values = items = pop = refuse


NO_INFO = NoInfo()


class NotFinite(UsageError, FloatingPointError):
    """The environment returned NaN or infinity. A diverged policy may have made it do so."""


class EpisodeRecorder(gym.wrappers.vector.RecordEpisodeStatistics):
    """Keep return, length and success of every episode that ends, until `pop_episodes` takes them.

    clip_rewards    clip what the learner gets to [-1, 1]; returns stay those of the environment
    lives_end       tell the learner that a lost life is terminal, while the game goes on
    fire            the action that begins the next life, whatever the learner wants, as in OpenAI
                    Baselines: in some games it serves the ball, which a policy may never do
    """

    def __init__(self, env: gym.vector.VectorEnv, clip_rewards: bool = False,
                 lives_end: bool = False, fire: int | None = None):
        super().__init__(env)
        self.clip_rewards = clip_rewards
        self.lives_end = lives_end
        self.fire = fire
        self.vector_steps = 0
        self.ended = []

    def reset(self, **kwargs):
        obs, infos = super().reset(**kwargs)
        self.check_finite(obs, "an observation")
        self.lives = infos.get("lives")
        self.begins = np.ones(self.num_envs, bool)  # with the next action, a life
        return obs, infos

    def step(self, actions):
        if self.fire is not None:
            actions = np.where(self.begins, self.fire, actions)
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
        if self.clip_rewards:
            rew = np.clip(rew, -1, 1)
        if self.lives_end or self.fire is not None:
            lost = (infos["lives"] < self.lives) & ~(terminated | truncated)
            # ale-py's own press at a reset lasts one frame; sticky actions lose a quarter of them
            self.lives, self.begins = infos["lives"], lost | terminated | truncated
            if self.lives_end and lost.any():
                final_obs = infos.setdefault("final_obs", obs.copy())
                final_obs[lost] = obs[lost]
                terminated = terminated | lost
        return obs, rew, terminated, truncated, infos

    def check_finite(self, values: np.ndarray, what: str) -> None:
        if not all_finite(values):
            raise NotFinite(f"the environment returned NaN or infinity as {what}, in its vector "
                            f"step {self.vector_steps} since this process started")

    def pop_episodes(self) -> list[tuple]:
        """Return (vector steps since it ended, environment, ep_ret, ep_len) per new episode.

        A fifth number, 1 or 0, tells success or failure if the environment does.
        """
        episodes = [(self.vector_steps - at, *rest) for at, *rest in self.ended]
        self.ended = []
        return episodes


def all_finite(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # 1e39 is infinite in float32, in which we compute
        return values.dtype.kind != "f" or bool(np.isfinite(values.astype("f")).all())


def success(info: dict) -> dict[str, float]:
    """Return {"success": 1.0 or 0.0} if the last step of an episode told it by a number, or {}."""
    for name in ("is_success", "success"):
        value = as_array(info.get(name))
        if value.size == 1 and value.dtype.kind in "buif" and np.isfinite(value).all():
            return {"success": float(value.item())}
    return {}


def evaluate(agent, cfg, episodes: int, seed: int, deterministic: bool = True,
             stop=lambda: False, max_steps: int = 100_000,
             envs: gym.vector.VectorEnv | None = None, steps: list | None = None
             ) -> tuple[np.ndarray, np.ndarray]:
    """Return (returns, lengths), each [episodes]: the first episode of as many new environments.

    stop    asked before every step: whether to end at once, with lengths of 0 where it did
    envs    the environments to play in, which stay open (default: new ones, by `make_envs`)
    steps   a list that gets (obs, act, rew, terminated, truncated) of every step

    The same seed gives the same initial states. A copy of the agent acts. So a memory of the
    training environments stays as it is, and `play` gets the same returns (in float32), since
    rounding depends on how the weights lie in memory.
    """
    agent = copy.deepcopy(agent)
    forget(agent)
    mine, envs = envs is None, envs or make_envs(cfg, episodes)
    obs, _ = envs.reset(seed=mpi.seed(seed, 2))  # streams 0 and 1 belong to training
    returns = np.zeros(episodes)
    lengths = np.zeros(episodes, int)
    step = 0
    while not (lengths.all() or stop()):
        if step >= max_steps:
            raise UsageError(f"{sum(lengths == 0)} of {episodes} evaluated episodes of {cfg.env} "
                             f"did not end within {max_steps:,} steps (play: --max-steps"
                             + ", or act as in training, --stochastic" * deterministic
                             + """; train: --env-kwargs '{"max_episode_steps": N}')""")
        act = agent.act(obs, deterministic)
        new_obs, rew, terminated, truncated, infos = envs.step(agent.env_act(act))
        if steps is not None:
            steps.append((obs, act, rew, terminated, truncated))
        obs = new_obs
        forget(agent, terminated | truncated)
        if "episode" in infos:
            first = infos["_episode"] & (lengths == 0)  # later episodes do not count
            returns[first] = infos["episode"]["r"][first]
            lengths[first] = infos["episode"]["l"][first]
        step += 1
    if mine:
        envs.close()
    return returns, lengths


def forget(agent, done: np.ndarray | None = None) -> None:
    """Clear an agent's memory, if it has one, where an episode is `done` [N], or everywhere."""
    if hasattr(agent, "forget"):
        agent.forget(done)


class Policy(nn.Module):
    """What every Agent has. It refuses spaces that the algorithm does not take, and predicts.

    obs, act    the KINDS of spaces that the algorithm takes, as in "vector image"

    An Agent adds `act`, from raw observations [N, ...] to actions, and `env_act`, which turns these
    into those of `envs.step`. UsageError: a space is of another kind.
    """

    def __init__(self, obs_space: gym.Space, act_space: gym.Space, obs: str, act: str):
        super().__init__()
        check_spaces(obs_space, act_space, obs=obs, act=act)
        self.obs_shape = obs_space.shape
        self.spaces = obs_space, act_space

    def predict(self, obs: np.ndarray) -> np.ndarray | np.integer:
        """One raw observation -> the deterministic action for `env.step`; N of them -> N actions.

        One observation may also be as the environment gave it, before `make_envs` flattened it.
        ValueError: it is of another shape or type, or has NaN or infinity in it.
        """
        obs_space, act_space = self.spaces
        if isinstance(obs_space, FlatBox) and belongs(obs, obs_space.own):
            obs = obs_space.flatten(obs)
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
        # PyTorch takes no flipped arrays and no foreign byte order; it computes in float32 anyway.
        obs = np.array(obs, np.float32 if obs.dtype.kind == "f" else obs.dtype, order="C")
        act = self.env_act(self.act(obs[None] if one else obs, deterministic=True))
        act = act_space.own_act(act) if isinstance(act_space, Numbered) else act
        return act[0] if one else act


def is_image(space: gym.Space) -> bool:
    """Return whether observations are images: uint8, at least 5 pixels a side."""
    return obs_kind(space) == "image"


def mlp(sizes, activation: type[nn.Module]) -> nn.Sequential:
    """Return linear layers of these sizes, with the activation between them, not after the last."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def cnn_out(space: gym.Space) -> tuple[int]:
    """Return the shape of what `nature_cnn` makes of an image of this space: (512,) or (128,)."""
    return (128,) if is_small(space) else (512,)


def is_small(space: gym.Space) -> bool:
    return sorted(space.shape)[1] < 36  # of an image's three numbers, the least is the colours'


def nature_cnn(space: gym.Space) -> nn.Sequential:
    """Return a network from images of this space, uint8 [B, C, H, W] or [B, H, W, C], to features.

    It is that of Mnih et al. 2015 (Nature 518, 529), to [B, 512], or, for images with a side under
    36 pixels, that of Young & Tian 2019 (arXiv:1903.03176) for MinAtar, to [B, 128].
    """
    shape = space.shape
    channels, height, width = (shape[2], *shape[:2]) if channels_last(shape) else shape
    if is_small(space):
        conv = nn.Sequential(nn.Conv2d(channels, 16, kernel_size=3), nn.ReLU(), nn.Flatten())
    else:
        conv = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3), nn.ReLU(), nn.Flatten())
    num_features = conv(torch.zeros(1, channels, height, width)).shape[1]
    linear = nn.Linear(num_features, *cnn_out(space))
    return ImageEncoder(ImageToFloat(), *conv, linear, nn.ReLU())


class ImageEncoder(nn.Sequential):
    """The layers of `nature_cnn`, in bfloat16 with --bf16. Weights and outputs are float32."""

    bf16 = False  # `Run.register` sets it

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return super().forward(images).float()


class ImageToFloat(nn.Module):
    """Images, uint8 [B, C, H, W] or [B, H, W, C] -> floats in [0, 1], [B, C, H, W].

    The colours of a pixel lie side by side in memory: a gradient then takes 0.8 of the time.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if channels_last(images.shape[1:]):
            images = images.movedim(-1, 1)
        images = images.contiguous(memory_format=torch.channels_last)
        bf16 = torch.is_autocast_enabled(images.device.type)  # which would convert float32 again
        return images.to(torch.bfloat16 if bf16 else torch.float32).div_(255)


def stack_steps(steps: list[dict], device: torch.device) -> dict[str, torch.Tensor]:
    """T dicts of arrays [N, ...] -> one dict of tensors [T, N, ...].

    Numbers become float32; images stay uint8 and discrete actions int64.
    """
    columns = {}
    for name in steps[0]:
        column = torch.as_tensor(np.stack([step[name] for step in steps]), device=device)
        keep = column.dtype in (torch.uint8, torch.int64)
        columns[name] = column if keep else column.float()
    return columns


def channels_last(shape: tuple[int, ...]) -> bool:
    return shape[2] <= shape[0]  # there are hardly more channels than rows of pixels


class SavedRows:
    """The state dict of a replay buffer: its first `num_stored` rows, and where the next goes.

    columns    the stored arrays, [capacity, ...] each, by name

    The rows are views, since copies would double the memory.
    """

    def state_dict(self) -> dict:
        rows = {name: torch.from_numpy(column[: self.num_stored])
                for name, column in self.columns.items()}
        return {"columns": rows, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]
        for name, column in state["columns"].items():
            self.num_stored = len(column)
            self.columns[name][: len(column)] = column.numpy()


def check_memory(setting: str, count: int, num_bytes: int) -> None:
    """UsageError if this rank's `num_bytes` for `count` samples cannot fit into memory.

    setting    the flag that decides the size, such as "--buffer-size"
    """
    need, have = num_bytes * mpi.size(), memory()
    total = count * mpi.size()
    mpi.say(f"replay buffer: {total:,} transitions, {need / 1e9:.2f} GB when full")
    if need > have:
        raise UsageError(f"{setting} is {total}, which takes {need / 1e9:.2f} GB; "
                         f"there are {have / 1e9:.2f} GB of memory")


def memory() -> float:
    """Return how many bytes the ranks may use: of the machine, or of their cgroup (version 2)."""
    if os.name != "posix":
        return math.inf  # unknown on Windows
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else []:
        if line.startswith("0::"):
            group = Path("/sys/fs/cgroup") / line[3:].strip("/")
            files = [folder / "memory.max" for folder in (group, *group.parents)]
            texts = [file.read_text().strip() for file in files if file.exists()]
            limits += [int(text) for text in texts if text.isdecimal()]  # else it is "max"
    return min(limits)


# ---- spaces

KINDS = {"vector": "vectors (Box of one dimension, Discrete, Dict, Tuple, ...)",
         "goal": "goals (Dict of vectors observation, achieved_goal, desired_goal)",
         "mask": "action masks (Dict of observation and action_mask, one number per action)",
         "discrete": "Discrete from 0",
         "image": "images (Box of uint8, HWC or CHW, at least 5 pixels a side)",
         "box": "Box of floats with finite bounds",
         "tokens": "texts (Box of whole numbers, one dimension)"}


def check_spaces(obs_space, act_space, obs, act):
    """UsageError unless the spaces are of one of the KINDS in `obs` and one of those in `act`."""
    kinds = obs_kind(obs_space), act_kind(act_space)
    sides = ("observation", obs_space, kinds[0], obs), ("action", act_space, kinds[1], act)
    for side, space, kind, takes in sides:
        if not fits(kind, takes):
            fit = ", ".join(fitting_algos(*kinds))
            help = f"algorithms for this one: {fit}" if fit else "docs/howto.md says what to do"
            if side == "action" and num_acts(space) > MOST_ACTS:
                help = f"{num_acts(space):.4g} combinations are more than {MOST_ACTS:,}; {help}"
            raise UsageError(f"--env has the {side} space {one_line(space)}; this algorithm takes "
                             f"{' or '.join(KINDS[name] for name in takes.split())}; {help}")


def fits(kind, takes):
    """Return whether `kind` is one of those in the text `takes`. Goals and masks are vectors."""
    return kind in takes.split() or (kind in ("goal", "mask") and "vector" in takes.split())


def obs_kind(space):
    """Return "image", "goal", "mask", "vector" or "other" for an observation space."""
    if isinstance(space, FlatBox):
        return space.kind
    box, shape = isinstance(space, gym.spaces.Box), space.shape or ()
    sides = sorted(shape)[1:]  # without the shortest dimension: colours or stacked frames
    if box and len(shape) == 3 and space.dtype == np.uint8 and min(sides) >= 5:
        return "image"
    return "vector" if box and len(shape) == 1 else "other"


def act_kind(space):
    """Return "discrete", "box", "tokens" or "other" for an action space."""
    if isinstance(space, gym.spaces.Discrete):
        return "discrete" if space.start == 0 else "other"
    if isinstance(space, gym.spaces.Box) and space.dtype == np.int64 and len(space.shape) == 1:
        return "tokens"
    floats = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)
    return "box" if floats and space.is_bounded() else "other"


def fitting_algos(obs, act):
    """Return the algorithms whose own Agent accepts these kinds of spaces."""
    call = re.compile(r'__init__\(obs_space.*obs="(.*)", act="(.*)"\)')
    files = sorted(Path(__file__).parents[1].glob("algos/*.py"))
    says = [(path.stem, call.search(path.read_text(encoding="utf-8"))) for path in files]
    return [name for name, m in says if m and fits(obs, m[1]) and fits(act, m[2])]


# ---- what can be wrong with --env and --env-kwargs


@contextlib.contextmanager
def refusing_bad_env(cfg):
    """Yield --env-kwargs as a dict; turn what goes wrong with it or --env into a UsageError.

    Silences only the deprecation notices of -v4 environments, which the published figures use.
    """
    warnings.filterwarnings("ignore", message=".*is out of date", category=DeprecationWarning)
    try:
        import mujoco  # takes a tenth of a second
    except RuntimeError as error:  # it does not know the MUJOCO_GL that is set
        raise UsageError(f"MuJoCo: {error}") from None
    mujoco.set_mju_user_warning(print_mujoco_warning)  # also ends MUJOCO_LOG.TXT
    wrong = f"--env-kwargs is {cfg.env_kwargs}; it takes a JSON object of what {cfg.env} takes"
    robotics = cfg.env.removeprefix("gymnasium_robotics:").startswith(ROBOTICS)
    extra = ("atari" if is_game(cfg.env, "ALE/") else "minatar" if is_game(cfg.env, "MinAtar/")
             else "robotics" * robotics)
    try:
        env_kwargs = json.loads(cfg.env_kwargs)
        if not isinstance(env_kwargs, dict):
            raise UsageError(wrong)
        if extra == "atari":
            gym.register_envs(importlib.import_module("ale_py"))
        if extra == "robotics":
            with contextlib.redirect_stderr(io.StringIO()):  # it prints notes
                importlib.import_module("gymnasium_robotics")
            # From MuJoCo 3.14 on, a joint type no longer equals the NumPy integer of a model,
            # which the Fetch and Hand environments compare it with.
            mujoco.mjtJoint.__eq__ = lambda joint, other: int(joint) == other
        if extra == "minatar" and "MinAtar/Breakout-v1" not in gym.registry:
            importlib.import_module("minatar.gym").register_envs()
        yield env_kwargs
    except json.JSONDecodeError as error:
        raise UsageError(f"{wrong}: {error}") from None
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        extra = extra or "box2d" * ("ox2" in str(error))
        how = f"pip install -e '.[{extra}]'" if extra else error
        new = f"{cfg.env[:-1]}4"
        if re.search("have been moved|mujoco_py", str(error)) and new in gym.registry:
            how = f"{new} is the same robot with the MuJoCo of today"
        raise UsageError(f"--env is {cfg.env}, which is not installed: {how}") from None
    except gym.error.Error as error:
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # registers its games
        game = re.sub("(?i)^(.*:)?(ALE/)?|(NoFrameskip|Deterministic|-ram|-v[0-9]).*", "", cfg.env)
        known = {name.lower(): name for name in gym.registry}
        if name := known.get(f"ale/{game}-v5".lower()):
            raise UsageError(f"--env is {cfg.env}: this game is called {name} here; "
                             """--env-kwargs '{"repeat_action_probability": 0}' plays it without """
                             "sticky actions. MinAtar's are MinAtar/Breakout-v1, ...") from None
        raise UsageError(f"--env is {cfg.env}: {error} (games are called ALE/Pong-v5 or "
                         "MinAtar/Breakout-v1, your own my_module:MyEnv-v0)") from None
    except (TypeError, ValueError, AssertionError) as error:
        if cfg.env_kwargs == "{}" or isinstance(error, UsageError):  # the environment's own
            raise
        fact = str(error).partition(" was raised from the environment creator")[0]
        raise UsageError(f"{wrong}; it raised {type(error).__name__}: {fact}") from error


def print_mujoco_warning(text):
    if "deprecated" not in text:
        print(f"MuJoCo: {text}", file=sys.stderr)
