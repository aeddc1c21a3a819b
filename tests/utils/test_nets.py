"""The distribution of continuous actions; the encoder of images is in the contract suite."""
import pytest
import torch
from torch.distributions import (
    Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence)

from algos import trpo  # noqa: F401  (it knows the KL of Gaussians)
from tests.helpers import close, gradients, vec
from utils.nets import SquashedGaussian


@pytest.mark.parametrize("shape", [(3,), (5, 3)])               # sigma of all states, or of each
def test_densities_and_samples_are_those_of_pytorchs_gaussian(shape):
    loc, other, act = torch.randn(3, 5, 3)
    log_std = torch.randn(shape)
    ours, theirs = SquashedGaussian(loc, log_std), Independent(Normal(loc, log_std.exp()), 1)
    close(ours.log_prob(act), theirs.log_prob(act))
    close(kl_divergence(SquashedGaussian(other, 0.5 * log_std), ours),
          kl_divergence(Independent(Normal(other, (0.5 * log_std).exp()), 1), theirs), rtol=1e-4)
    assert torch.equal(ours.mode, loc) and "Gaussian" in repr(ours)
    torch.manual_seed(1)
    draws = ours.sample()
    torch.manual_seed(1)
    close(draws, theirs.sample())


def test_a_policy_stays_as_it_was_when_the_weights_move():
    """And its samples are constants."""
    log_std = torch.nn.Parameter(torch.zeros(2))
    old = SquashedGaussian(torch.zeros(4, 2), log_std)
    before = old.log_prob(torch.ones(4, 2))
    with torch.no_grad():
        log_std.fill_(1.0)
    assert torch.equal(old.log_prob(torch.ones(4, 2)), before)
    assert before.requires_grad and not old.sample().requires_grad


@pytest.mark.parametrize("sigma", [0.1, 0.6, 1.0, 1.5])
def test_the_entropy_and_its_gradient_are_those_of_squashed_actions(sigma):
    """Against the mean of -log p(tanh(a)) over many draws, by PyTorch's own transform."""
    loc, log_std = torch.tensor([0.0, 1.0, -2.0]), torch.full((3,), sigma).log()
    ours, *slopes = gradients(lambda m, s: SquashedGaussian(m, s).entropy(), loc, log_std)

    def mean(m, s):
        theirs = TransformedDistribution(Normal(m, s.exp()), TanhTransform(cache_size=1))
        return -theirs.log_prob(theirs.rsample((200_000,))).mean(0).sum()

    expected, *their_slopes = gradients(mean, loc.double(), log_std.double())
    close(ours, expected.float(), atol=0.03)
    for slope, other in zip(slopes, their_slopes):
        close(slope, other.float(), atol=0.05)
    _, back = gradients(lambda s: SquashedGaussian(loc, s).entropy(), vec(10, 10, 10).log())
    assert (back < -10).all()                                   # from far too wide a policy
