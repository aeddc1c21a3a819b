"""What Atari games show a learner, beyond the preprocessing of ale-py."""

import gymnasium as gym
import numpy as np

from utils.errors import UsageError
from utils.mpi import say_once


def check_sticky(probability: float, lives_end: bool) -> None:
    """Say by which rules the game is played. UsageError: ale-py would take what is impossible."""
    if not 0 <= probability <= 1:
        raise UsageError("--env-kwargs: repeat_action_probability is "
                         f"{probability}, no probability")
    lives = "; to the learner, a lost life ends an episode, but not in the log" * lives_end
    say_once(f"Atari: sticky actions {probability:g}{lives}")


class AtariRules(gym.vector.VectorWrapper):
    """Change what the learner sees of a game; the episodes that `env` has recorded are whole.

    Rewards are clipped to [-1, 1]. FIRE is the first action of every life, whatever the learner
    wants, as in OpenAI Baselines: in some games it serves the ball, which a policy may never do.
    Baselines presses it out of the learner's sight, but ale-py only steps all games at once. So
    the learner's own action is stored; docs/games.md says how often, and why that misleads nobody.

    lives_end       tell the learner that a lost life is terminal, while the game goes on
    clip_rewards    may be set to False, to see the game's own rewards
    """

    def __init__(self, env: gym.vector.VectorEnv, lives_end: bool = False):
        super().__init__(env)
        self.lives_end = lives_end
        self.clip_rewards = True
        buttons = isinstance(env.single_action_space, gym.spaces.Discrete)
        acts = [act.name for act in env.unwrapped.ale.get_action_set()] if buttons else []
        self.fire = acts.index("FIRE") if "FIRE" in acts else None
        self.pop_episodes = env.pop_episodes

    def reset(self, **kwargs):
        obs, infos = self.env.reset(**kwargs)
        self.lives = infos["lives"]
        self.begins = np.ones(self.num_envs, bool)  # with the next action, a life
        return obs, infos

    def step(self, actions):
        if self.fire is not None:
            actions = np.where(self.begins, self.fire, actions)
        obs, rew, terminated, truncated, infos = self.env.step(actions)
        lost = (infos["lives"] < self.lives) & ~(terminated | truncated)
        # ale-py's own press at a reset lasts one frame; sticky actions lose a quarter of them
        self.lives, self.begins = infos["lives"], lost | terminated | truncated
        if self.lives_end and lost.any():
            final_obs = infos.setdefault("final_obs", obs.copy())
            final_obs[lost] = obs[lost]
            terminated = terminated | lost
        rew = np.clip(rew, -1, 1) if self.clip_rewards else rew
        return obs, rew, terminated, truncated, infos
