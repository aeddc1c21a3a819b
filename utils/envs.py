"""Environments: making them, and recording the episodes that end in them.

Algorithm files get vector environments from `make_envs`. Every one of them restarts an environment
in the same step in which its episode ends ("same-step autoreset"), so `new_obs` then holds the
first observation of the next episode, and `infos["final_obs"]` the last one of the old. Every one
also records its episodes, with the environment's own rewards, for `Run.log`.
"""

import contextlib
import contextvars
import weakref

import gymnasium as gym
import numpy as np
import torch

from utils.env_ids import is_game, mujoco_of_today, refusing_bad_env
from utils.errors import NotFinite, UsageError
from utils.mpi import say_once
from utils.wrappers import OwnStep, flat_obs, numbered_acts

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
    with contextlib.ExitStack() as stack, refusing_bad_env(cfg) as env_kwargs:
        stack.enter_context(mujoco_of_today())
        if is_game(cfg.env, "MinAtar/"):  # where one may wait forever; ALE's games have this limit
            env_kwargs.setdefault("max_episode_steps", 27_000)
        lives_end = atari and env_kwargs.pop("episodic_life", False)
        envs = gym.make_vec(cfg.env, num_envs, **kwargs, **env_kwargs)
        undo = stack.pop_all()  # until the environments are closed
    if atari:
        sticky = env_kwargs.get("repeat_action_probability", 0.25)
        if not 0 <= sticky <= 1:  # which ale-py does not see
            raise UsageError(f"--env-kwargs: repeat_action_probability is {sticky}, no probability")
        lives = "; to the learner, a lost life ends an episode, but not in the log" * lives_end
        say_once(f"Atari: sticky actions {sticky:g}{lives}")
    buttons = atari and isinstance(envs.single_action_space, gym.spaces.Discrete)
    acts = [act.name for act in envs.unwrapped.ale.get_action_set()] if buttons else []
    fire = acts.index("FIRE") if "FIRE" in acts else None
    envs = EpisodeRecorder(envs, undo, clip_rewards=atari, lives_end=lives_end, fire=fire)
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


class EpisodeRecorder(gym.wrappers.vector.RecordEpisodeStatistics):
    """Keep return, length and success of every episode that ends, until `pop_episodes` takes them.

    undo            an ExitStack to close with the environments
    clip_rewards    clip what the learner gets to [-1, 1]; returns stay those of the environment
    lives_end       tell the learner that a lost life is terminal, while the game goes on
    fire            the action that begins the next life, whatever the learner wants, as in OpenAI
                    Baselines: in some games it serves the ball, which a policy may never do
    """

    def __init__(self, env: gym.vector.VectorEnv, undo: contextlib.ExitStack,
                 clip_rewards: bool = False, lives_end: bool = False, fire: int | None = None):
        super().__init__(env)
        self.undo = undo
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

    def close(self, **kwargs):
        super().close(**kwargs)
        self.undo.close()

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
