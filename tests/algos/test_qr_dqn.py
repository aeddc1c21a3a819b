"""algos/qr_dqn.py, where it is not algos/dqn.py: the quantiles, and the loss that finds them."""
import pytest
import torch
from sb3_contrib.common.utils import quantile_huber_loss

from algos import qr_dqn
from tests.helpers import bare, close, gradients, refused, vec
from tests.offpolicy import dqn_agent as make_agent, dqn_batch as make_batch, fits, through
from utils.run import checkpoint


@pytest.mark.parametrize("count", [1, 16, 50])                  # also as many as samples
def test_loss_and_gradient_are_those_of_sb3_contrib(count):
    quantiles, target = 3 * torch.randn(2, 16, count, dtype=torch.float64)
    levels = make_agent(qr_dqn, num_quantiles=count).taus.double()
    ours = gradients(lambda x: bare(qr_dqn).quantile_huber(x, target, levels).mean(), quantiles)
    expected = gradients(lambda x: quantile_huber_loss(x, target), quantiles)
    for mine, other in zip(ours, expected):
        close(mine, other, rtol=1e-6)


@pytest.mark.parametrize("kind", ["vector", "film", "image"])
def test_the_loss_is_that_of_a_loop_over_samples(kind):
    """And its gradient that of a fit to constants: none reaches the network by the target."""
    agent = make_agent(qr_dqn, kind, gamma=0.7, num_quantiles=9)
    batch, losses, taken = make_batch(qr_dqn, kind), [], []
    out = through(agent.critic.head, agent.critic.encoder(batch.obs))
    close(agent.critic(batch.obs).flatten(1), out, rtol=1e-4)
    for k in range(32):
        with torch.no_grad():
            following = agent.critic_targ(batch.next_obs[k:k + 1])[0]
        best = following[max(range(4), key=following.mean(-1).tolist().__getitem__)]
        target = batch.rew[k] + 0.7 * (1 - batch.terminated[k]) * best
        taken.append(agent.critic(batch.obs[k:k + 1])[0, batch.act[k]])
        losses.append(qr_dqn.quantile_huber(taken[-1][None], target[None], agent.taus)[0])
    loss, taken = torch.stack(losses).mean(), torch.stack(taken).detach()
    metrics = fits(agent.critic, loss, qr_dqn.critic_loss, agent, batch)
    for name, x in (("q_loss", loss.detach()), ("q", taken.mean(-1)),
                    ("spread", taken.std(-1, correction=0))):
        close(metrics[name], x, rtol=1e-4)


@pytest.mark.parametrize("quantiles,best", [
    (((9, 0, 0), (1, 2, 3)), 0),                                # means 3 and 2, medians 0 and 2
    (((0, 0, 9), (4, 4, 4)), 1)])                               # 3 and 4; they need not be sorted
def test_the_best_action_has_the_highest_mean(quantiles, best):
    agent = make_agent(qr_dqn, num_acts=2, num_quantiles=3)
    agent.critic.forward = lambda obs: vec(*quantiles).expand(5, 2, 3)
    agent.critic_targ.forward = lambda obs: vec(*quantiles[::-1]).expand(5, 2, 3)
    assert agent.act(torch.zeros(5, 3), deterministic=True).tolist() == [best] * 5


def test_weights_of_another_number_of_quantiles_are_refused():
    """Also if the networks are of one size: 2 actions with 6 quantiles, 4 with 3."""
    state = make_agent(qr_dqn, num_acts=2, num_quantiles=6).state_dict()
    agent = make_agent(qr_dqn, num_acts=4, num_quantiles=3)
    refused(checkpoint.load_into, agent.load_state_dict, state, "policy.pt",
            says="size mismatch for taus: ")
