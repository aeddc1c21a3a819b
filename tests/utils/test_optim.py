"""Each verb of an optimizer against PyTorch's own, and whose parameters they change."""
import copy
import math

import pytest
import torch
from torch import nn

from tests.onpolicy import Descent, parameters as params
from utils.optim import Adam, RMSProp

X = torch.linspace(-3, 3, 15).view(5, 3)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(net, x=X):
    return net(x).square().mean()


def take_step(optimizer, loss, lr, max_norm=0.0):
    """Take a step as algorithm files do. Return the gradient's norm."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.average_grads()
    norm = optimizer.clip_grads(max_norm)
    optimizer.step(lr)
    return norm


def test_some_parameters_of_a_module_and_none_that_are_frozen():
    net = small_net()
    before = params(net)
    take_step(Descent([net[0].weight, net[2].bias]), loss_of(net), lr=0.1)
    changed = params(net) != before
    assert changed[:12].any() and not changed[12:24].any() and changed[24:].any()
    net = small_net()
    net[0].requires_grad_(False)
    assert list(map(id, Adam(net).params)) == list(map(id, net[2].parameters()))


def test_a_parameter_belongs_to_one_optimizer_only():
    """Two would take turns to tear it out of each other's vector."""
    net = small_net()
    take_step(Adam(net), loss_of(net), lr=0.1)
    for again in (net, [net[2].bias]):
        with pytest.raises(ValueError, match="one optimizer only"):
            RMSProp(again)
    Adam(copy.deepcopy(net))                                    # its parameters are its own


@pytest.mark.parametrize("limit", [0.0, 0.25, 1e9])
def test_a_long_gradient_is_clipped_as_by_pytorch(limit):
    net, twin = small_net(), small_net()
    before = params(net)
    loss_of(twin, 3 * X).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), limit or math.inf)
    norm = take_step(Descent(net), loss_of(net, 3 * X), lr=1.0, max_norm=limit)
    torch.testing.assert_close(norm, expected)                  # as it was before
    assert norm > 0.25
    for param, other in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(param.grad, other.grad)
    torch.testing.assert_close(before - params(net), torch.cat([
        param.grad.flatten() for param in twin.parameters()]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-5])                  # where it is small, eps decides
@pytest.mark.parametrize("ours,theirs", [
    (lambda net: Adam(net, eps=1e-5), lambda net: torch.optim.Adam(net, eps=1e-5)),
    (lambda net: Adam(net, beta1=0.5), lambda net: torch.optim.Adam(net, betas=(0.5, 0.999))),
    (RMSProp, lambda net: torch.optim.RMSprop(net, alpha=0.99, eps=1e-5))])
def test_steps_are_pytorchs(ours, theirs, scale):
    net, twin = small_net(), small_net()
    ours, theirs = ours(net), theirs(twin.parameters())
    for lr in (0.1, 0.1, 0.02, 0.0, 0.3):
        theirs.zero_grad()
        (scale * loss_of(twin)).backward()
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        take_step(ours, scale * loss_of(net), lr)
    torch.testing.assert_close(params(net), params(twin))
    assert not torch.allclose(params(net), params(small_net()))


def moved(net):
    net[2].bias.data = net[2].bias.data.clone()         # as `.to(device)` does


def grads_moved(net):
    net.zero_grad()                                     # the module's own, which drops gradients


@pytest.mark.parametrize("optimizer", [Adam, RMSProp])
@pytest.mark.parametrize("lose", [moved, grads_moved])
def test_no_step_where_weights_or_gradients_have_left(lose, optimizer):
    """They are no views any more, so steps would train nothing, or only some layers."""
    net = small_net()
    optimizer = optimizer(net)
    take_step(optimizer, loss_of(net), lr=0.1)
    lose(net)
    before = params(net)
    with pytest.raises(RuntimeError, match="has left the optimizer.*after agent.to.*its zero_grad"):
        take_step(optimizer, loss_of(net), lr=0.1)
    assert torch.equal(params(net), before)
    net[0].weight.grad = None
    with pytest.raises(RuntimeError, match="has left the optimizer"):
        optimizer.step(0.1)                             # without any gradient
