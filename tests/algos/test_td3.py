"""algos/td3.py: its noise by hand. test_ddpg.py compares its updates."""
from algos import td3
from tests.helpers import close, column
from tests.offpolicy import noise_is


def test_noise_on_the_targets_action_by_hand():
    act, eps = column(0.5, 0.5, -0.8, 0.1, 0.1), column(1.0, 10, -3, 2.5, -2.6)
    with noise_is(eps, eps):
        close(td3.add_clipped_noise(act, 0.2, 0.5), column(0.7, 1.0, -1.0, 0.6, -0.4))
        close(td3.add_clipped_noise(act, 0.0, 0.5), act)
