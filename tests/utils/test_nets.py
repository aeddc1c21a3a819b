"""The distribution of continuous actions; the encoder of images is in the contract suite."""
import pytest
import torch
from torch.distributions import (
    Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence)

from tests.helpers import close
from utils.nets import SquashedGaussian


@pytest.mark.parametrize("shape", [(3,), (5, 3)])               # sigma of all states, or of each
def test_densities_and_samples_are_those_of_pytorchs_gaussian(shape):
    torch.manual_seed(0)
    loc, other, act = torch.randn(3, 5, 3)
    log_std = torch.randn(shape)
    ours, theirs = (SquashedGaussian(loc, log_std),
                    Independent(Normal(loc, log_std.exp()), 1))
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
def test_the_entropy_is_that_of_squashed_actions(sigma):
    """Against the mean of -log p(tanh(a)) over many draws, by PyTorch's own transform."""
    torch.manual_seed(0)
    loc = torch.tensor([0.0, 1.0, -2.0])
    theirs = TransformedDistribution(Normal(loc.double(), sigma), TanhTransform(cache_size=1))
    acts = theirs.sample((200_000,))
    ours = SquashedGaussian(loc, torch.full((3,), sigma).log())
    close(ours.entropy(), -theirs.log_prob(acts).mean(0).sum().float(), atol=0.03)


@pytest.mark.parametrize("sigma", [0.1, 10.0])
def test_the_bonus_leads_to_a_wide_choice(sigma):
    """From a narrow and from a far too wide policy: -1 and 1 alone are no choice."""
    loc, log_std = torch.full((1, 1), 1.0), torch.full((1,), sigma).log()
    params = [loc.requires_grad_(), log_std.requires_grad_()]
    optimizer = torch.optim.Adam(params, lr=0.05)
    for _ in range(500):
        optimizer.zero_grad()
        (-SquashedGaussian(loc, log_std).entropy().sum()).backward()
        optimizer.step()
    assert abs(loc.item()) < 0.05 and 0.7 < log_std.exp().item() < 1.0
