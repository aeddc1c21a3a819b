"""Environments: making them, and what they returned as tensors.

An environment restarts in the step that ends its episode ("same-step autoreset"): the observation
is then the first one of the next episode, and `infos["final_obs"]` has the old one's last.
"""

import os
from functools import partial

import gymnasium as gym
import numpy as np
import torch

from utils.atari import AtariRules, check_sticky
from utils.env_ids import is_game, refusing_bad_env
from utils.errors import UsageError
from utils.wrappers import EpisodeRecorder, OwnStep, flat_obs, numbered_acts


def make_envs(cfg, num_envs: int, **more) -> gym.vector.VectorEnv:
    """Return `num_envs` copies of `cfg.env`, stepped together, with --async-envs as many processes.

    `more` are keyword arguments beside --env-kwargs, such as `render_mode`.
    Atari games come preprocessed: 4 stacked grey frames of 84 x 84, each action held for 4 frames,
    and by the rules of `AtariRules`. Other environments are wrapped: see `flat_obs`,
    `numbered_acts` and `OwnStep`.
    """
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    kwargs = {"vectorization_mode": "async" if cfg.async_envs and num_envs > 1 else "sync",
              "vector_kwargs": same_step, "wrappers": [
                  flat_obs, partial(numbered_acts, parts=cfg.act_parts),
                  partial(OwnStep, run_pid=os.getpid())]}
    atari = is_game(cfg.env, "ALE/")
    if atari:  # has a vector class of its own, in C++
        if cfg.async_envs:
            raise UsageError("--async-envs: the games of ALE/ have threads of their own")
        kwargs = same_step | {"reward_clipping": False}
    with refusing_bad_env(cfg) as env_kwargs:
        env_kwargs |= more
        if is_game(cfg.env, "MinAtar/"):  # where one may wait forever; ALE's games have this limit
            env_kwargs.setdefault("max_episode_steps", 27_000)
        lives_end = atari and env_kwargs.pop("episodic_life", False)
        envs = gym.make_vec(cfg.env, num_envs, **kwargs, **env_kwargs)
        envs = EpisodeRecorder(envs)
    if atari:
        check_sticky(env_kwargs.get("repeat_action_probability", 0.25), lives_end)
        envs = AtariRules(envs, lives_end)
    return envs


def stack_steps(steps: list[dict], device: torch.device) -> dict[str, torch.Tensor]:
    """T dicts of arrays [N, ...] -> one dict of tensors [T, N, ...].

    Numbers become float32. Observations keep their type: some are equal in float32 and differ in
    float64, such as 1.7e9 and 1.7e9 + 60. Discrete actions stay int64.
    """
    columns = {}
    for name in steps[0]:
        column = torch.as_tensor(np.stack([step[name] for step in steps]), device=device)
        keep = column.dtype in (torch.uint8, torch.int64) or name in ("obs", "next_obs")
        columns[name] = column if keep else column.float()
    return columns
