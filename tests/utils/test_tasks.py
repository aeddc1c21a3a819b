"""Environments for experiments: what differs from the environment they are made of."""
import pytest

from tests.toy import Config
from utils.envs import make_envs
from utils.mpi import UsageError

SCALED = "utils.tasks:Scaled-v0"


def test_scaled_multiplies_rewards_and_nothing_else():
    plain = make_envs(Config(env="Pendulum-v1", env_kwargs='{"g": 5}'), 2)
    kwargs = '{"env": "Pendulum-v1", "factor": 0.001, "g": 5}'
    scaled = make_envs(Config(env=SCALED, env_kwargs=kwargs), 2)
    assert scaled.single_action_space == plain.single_action_space
    assert (scaled.reset(seed=3)[0] == plain.reset(seed=3)[0]).all()
    for _ in range(201):                        # beyond the time limit
        act = plain.action_space.sample()
        (obs, rew, *ends, _), (same_obs, scaled_rew, *same_ends, _) = (
            envs.step(act) for envs in (plain, scaled))
        assert (obs == same_obs).all()
        assert scaled_rew == pytest.approx(0.001 * rew) and rew.all()
        for end, same_end in zip(ends, same_ends, strict=True):
            assert (end == same_end).all()
    for one, other in zip(plain.pop_episodes(), scaled.pop_episodes(), strict=True):
        assert other == (*one[:2], pytest.approx(0.001 * one[2]), one[3])


def test_an_unknown_environment_inside_is_named():
    with pytest.raises(UsageError, match="Nowhere"):
        make_envs(Config(env=SCALED, env_kwargs='{"env": "Nowhere-v0", "factor": 2}'), 1)
