"""algos/td3.py: its noise by hand, its two critics. test_ddpg.py compares its updates."""
import pytest
import torch

from algos import sac, td3
from tests import helpers
from tests.helpers import close, column, name_of
from tests.offpolicy import noise_is


def test_noise_on_the_targets_action_by_hand():
    act, eps = column(0.5, 0.5, -0.8, 0.1, 0.1), column(1.0, 10, -3, 2.5, -2.6)
    with noise_is(eps, eps):
        close(td3.add_clipped_noise(act, 0.2, 0.5), column(0.7, 1.0, -1.0, 0.6, -0.4))
        close(td3.add_clipped_noise(act, 0.0, 0.5), act)


@pytest.mark.parametrize("algo", [td3, sac], ids=name_of)
def test_two_critics_begin_different(algo):
    critic = algo.Agent(helpers.VECTOR, helpers.BOX, algo.Config()).critic
    for one, other in zip(critic.q1.parameters(), critic.q2.parameters(), strict=True):
        assert not torch.isclose(one, other).all()
