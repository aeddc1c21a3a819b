"""The Gaussian policy, against PyTorch's; the encoder of images is in the contract suite."""
import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from tests.helpers import close
from utils.nets import Gaussian


@pytest.mark.parametrize("shape", [(3,), (5, 3)])               # sigma of all states, or of each
def test_the_gaussian_is_pytorchs(shape):
    torch.manual_seed(0)
    loc, other, act = torch.randn(3, 5, 3)
    log_std = torch.randn(shape)
    ours, theirs = Gaussian(loc, log_std), Independent(Normal(loc, log_std.exp()), 1)
    close(ours.log_prob(act), theirs.log_prob(act))
    close(ours.entropy(), theirs.entropy())
    close(kl_divergence(Gaussian(other, 0.5 * log_std), ours),
          kl_divergence(Independent(Normal(other, (0.5 * log_std).exp()), 1), theirs), rtol=1e-4)
    assert torch.equal(ours.mode, loc) and torch.equal(ours.mean, loc) and "Gaussian" in repr(ours)
    close(ours.variance, theirs.variance)
    torch.manual_seed(1)
    draws = ours.sample()
    torch.manual_seed(1)
    close(draws, theirs.sample())


def test_a_policy_stays_as_it_was_when_the_weights_move():
    """And its samples are constants."""
    log_std = torch.nn.Parameter(torch.zeros(2))
    old = Gaussian(torch.zeros(4, 2), log_std)
    before = old.log_prob(torch.ones(4, 2))
    with torch.no_grad():
        log_std.fill_(1.0)
    assert torch.equal(old.log_prob(torch.ones(4, 2)), before)
    assert before.requires_grad and not old.sample().requires_grad
