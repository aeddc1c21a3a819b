"""Environments: making them, and recording the episodes that end in them.

An environment restarts in the step that ends its episode ("same-step autoreset"): the observation
is then the first one of the next episode, and `infos["final_obs"]` has the old one's last.
"""

import gymnasium as gym
import numpy as np
import torch

from utils.atari import AtariRules, check_sticky
from utils.env_ids import is_game, refusing_bad_env
from utils.errors import NotFinite
from utils.wrappers import OwnStep, flat_obs, numbered_acts


def make_envs(cfg, num_envs: int, **more) -> gym.vector.VectorEnv:
    """Return `num_envs` copies of `cfg.env`, stepped together in this process.

    `more` are keyword arguments beside --env-kwargs, such as `render_mode`.
    Atari games come preprocessed: 4 stacked grey frames of 84 x 84, each action held for 4 frames,
    and by the rules of `AtariRules`. Other environments are wrapped: see `flat_obs`,
    `numbered_acts` and `OwnStep`.
    """
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    kwargs = {"vectorization_mode": "sync", "vector_kwargs": same_step,
              "wrappers": [flat_obs, numbered_acts, OwnStep]}
    atari = is_game(cfg.env, "ALE/")
    if atari:  # has a vector class of its own, in C++
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


class EpisodeRecorder(gym.wrappers.vector.RecordEpisodeStatistics):
    """Keep return, length and success of an episode that ends, until `pop_episodes` takes it."""

    def __init__(self, env: gym.vector.VectorEnv):
        super().__init__(env)
        self.vector_steps = 0
        self.success_ends = False  # whether the last success has terminated its episode
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
            if end == [1]:
                self.success_ends = bool(terminated[i])
            self.ended.append((self.vector_steps, int(i), ep_ret, ep_len, *end))
        return obs, rew, terminated, truncated, infos

    def check_finite(self, values: np.ndarray, what: str) -> None:
        if not all_finite(values):
            raise NotFinite(f"the environment returned NaN or infinity as {what}, in its vector "
                            f"step {self.vector_steps} since this process started")

    def pop_episodes(self) -> list[tuple]:
        """Return (vector steps since it ended, environment, ep_ret, ep_len) per new episode, and
        success, 1 or 0, if the environment tells it."""
        episodes = [(self.vector_steps - at, *rest) for at, *rest in self.ended]
        self.ended = []
        return episodes


def all_finite(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # 1e39 is infinite in float32, in which we compute
        return values.dtype.kind != "f" or bool(np.isfinite(values.astype("f")).all())


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
