"""Five environments of one or two steps, whose right values and right actions are known.

    python -m algos.ppo --env diagnose.envs:ProbeAct-v0 --env-kwargs '{"box": true}'
"""
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Probe(gym.Env):
    """An episode of one step that leaves out everything that is not tested.

    By default the observation is 0 and the reward 1. The flags change that:

    sees    the observation is -1 or 1 at random, and the reward equals it
    late    the reward comes one step later, after an observation of 1, and depends on the first
            action
    acts    the reward is 1 for the right action and falls with the squared distance from it. The
            right action is 1 after observation -1, and 3 otherwise
    box     actions are continuous, from -1 to 4, instead of the numbers 0 to 3
    """

    def __init__(self, sees=False, late=False, acts=False, box=False):
        self.observation_space = Box(-1, 1, (1,))
        self.action_space = Box(-1, 4, (1,)) if box else Discrete(4)
        self.sees, self.late, self.acts = sees, late, acts

    @staticmethod
    def right(seen):
        return 3 if seen >= 0 else 1

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = int(self.np_random.choice([-1, 1])) if self.sees else 0
        self.rew = None
        return np.float32([self.seen]), {}

    def step(self, act):
        if self.rew is not None:                                # the second step
            return np.float32([1]), self.rew, True, False, {}
        wrong = float(np.square(act - self.right(self.seen)).sum())
        rew = 1 - wrong if self.acts else self.seen if self.sees else 1
        self.rew = float(rew)
        return np.float32([1]), 0.0 if self.late else self.rew, not self.late, False, {}


for name, flags in {"Value": {}, "Obs": {"sees": True}, "Late": {"late": True},
                    "Act": {"acts": True}, "Policy": {"sees": True, "acts": True}}.items():
    gym.register(f"Probe{name}-v0", f"{__name__}:Probe", kwargs=flags)
