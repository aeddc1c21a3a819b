"""algos/acktr.py: Kronecker factors, damped inverses, trust region and momentum."""
import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributions import kl_divergence

from algos import acktr, trpo  # noqa: F401  (trpo knows the KL of Gaussians)
from tests import onpolicy
from tests.helpers import close, copies, moved, noted, vec
from tests.onpolicy import distribution, every_kind, make_agent, make_rollout, targets, values

tiny_agent = partial(onpolicy.tiny_agent, acktr, hidden=())


def measured(agent, obs, times=1):
    """An optimizer that has seen these inputs `times` times."""
    optimizer = acktr.KFAC(agent)
    for _ in range(times):
        optimizer.measure(agent, obs)
    return optimizer


def take_step(optimizer, loss, lr):
    """One step down the gradient of a loss. Return the step sizes."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.average_grads()
    return optimizer.step(lr)


def factors(agent, obs, times=1):
    """The optimizer's factors by layer."""
    optimizer = measured(agent, obs, times)
    return dict(zip(optimizer.layers, optimizer.fishers))


# ---- A batch's factors, caught by hooks, of outputs that it draws

@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_the_last_factors_are_those_of_the_distributions(kind):
    """S is diag(p) - p p' of a softmax, diag(1 / sigma^2) of a normal, 1 of the critic."""
    agent = make_agent(acktr, kind, decay=1.0)
    agent.actor[-1].bias.data = torch.linspace(-1, 1, len(agent.actor[-1].bias))
    agent.actor[-1].weight.data.zero_()
    if kind == "box":
        agent.log_std.data = vec(math.log(0.5), math.log(2))
    found = factors(agent, torch.randn(10_000, 3), 4)
    p = agent.actor[-1].bias.softmax(-1).detach()
    expected = torch.diag(p) - torch.outer(p, p) if kind == "discrete" else torch.diag(vec(4, 0.25))
    close(found[agent.actor[-1]].S, expected, rtol=0.03, atol=0.02)
    close(found[agent.critic[-1]].S, vec((1,)), rtol=0.03)


def seen_by(layer, inputs, grad_out):
    """A LayerFisher whose hook has seen a pass through the layer, and one update."""
    fisher = acktr.LayerFisher(layer.weight)
    hook = layer.register_forward_hook(fisher.on_forward)
    layer(inputs)
    hook.remove()
    fisher.update(grad_out, 1.0)
    return fisher


@pytest.mark.parametrize("layer,inputs,grad_out,X,S", [
    (nn.Linear(2, 1), ((1, 2), (3, -1)), ((2,), (-4,)),
     ((5, -0.5, 2), (-0.5, 2.5, 0.5), (2, 0.5, 1)), ((10,),)),
    # A kernel of two pixels sees (1, 2) and (2, 3). X is a sum over places, S a mean.
    (nn.Conv2d(1, 2, (1, 2)), ((((1, 2, 3),),),), ((((1, 2),), ((3, 0),)),),
     ((5, 8, 3), (8, 13, 5), (3, 5, 2)), ((2.5, 1.5), (1.5, 4.5)))], ids=["linear", "convolution"])
def test_factors_by_hand(layer, inputs, grad_out, X, S):
    fisher = seen_by(layer, vec(*inputs), vec(*grad_out))
    close(fisher.X, vec(*X))
    close(fisher.S, vec(*S))


LAYERS = [nn.Linear(3, 2), nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, (2, 3), stride=(2, 1)),
          nn.Conv2d(3, 2, 2, stride=2, padding=1), nn.Conv2d(1, 2, 2, dilation=2)]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_gradient_is_the_sum_of_e_x(layer):
    """In the order of weight and bias: e x' summed over positions is each sample's gradient."""
    size = (4, 3) if isinstance(layer, nn.Linear) else (4, layer.in_channels, 6, 5)
    inputs = torch.randn(size)
    out = layer(inputs)
    grad_out = torch.randn_like(out)
    fisher = seen_by(layer, inputs, grad_out)
    expected = torch.autograd.grad((out * grad_out).sum(), [layer.weight, layer.bias])
    grad = torch.einsum("bti,btj->ij", fisher.e, fisher.x)
    close(grad[:, :-1].reshape(layer.weight.shape), expected[0], rtol=1e-4, atol=1e-4)
    close(grad[:, -1], expected[1], rtol=1e-4, atol=1e-4)


@every_kind
def test_hooks_see_every_layer_and_leave_nothing_behind(kind):
    agent = make_agent(acktr, kind)
    rollout = make_rollout(acktr, agent)
    before, obs = copies(agent), agent.normalize_obs(rollout.obs).flatten(0, 1)
    torch.manual_seed(3)
    found = factors(agent, obs)
    torch.manual_seed(3)                                        # the same samples
    nll = acktr.sampled_nll(agent, obs)
    for layer, fisher in found.items():                         # each has its own x and e
        expected, = torch.autograd.grad(nll, [layer.weight], retain_graph=True)
        grad = torch.einsum("bti,btj->ij", fisher.e, fisher.x)[:, :-1]
        close(grad.reshape(layer.weight.shape), expected, rtol=1e-3, atol=1e-3)
    assert set(found) == {each for each in agent.modules()
                          if isinstance(each, nn.Linear | nn.Conv2d)}
    assert all(fisher.X.any() and fisher.S.any() for fisher in found.values())
    assert not any(param.grad.any() for param in agent.parameters())
    assert not any(torch.is_tensor(fisher.out) for fisher in found.values())    # nor the graph
    assert not moved(before, agent)
    assert not any(each._forward_hooks or each._backward_hooks for each in agent.modules())


# ---- Running factors

def test_running_factors_by_hand():
    fisher = acktr.LayerFisher(torch.zeros(1, 1))
    fisher.X.fill_(8)
    fisher.S.fill_(2)
    fisher.x = vec(((2, 1),))
    fisher.update(vec((6,)), 0.25)
    close(fisher.X, vec((6 + 1, 6 + 0.5), (6 + 0.5, 6 + 0.25)))
    close(fisher.S, vec((1.5 + 9,)))


def test_weights_of_the_first_batches_by_hand(monkeypatch):
    agent = make_agent(acktr, decay=0.8)
    given = noted(monkeypatch, acktr.LayerFisher, "update", lambda self, grad, w: w)
    measured(agent, torch.randn(8, 3), 7)
    close(given[::6], [1, 1 / 2, 1 / 3, 1 / 4, 0.2, 0.2, 0.2])
    assert given[::6] == given[5::6]  # all six layers alike


@pytest.mark.parametrize("every", [1, 3])
def test_inverses_are_renewed_when_due(every):
    """At first in every update, since young factors change much."""
    agent = make_agent(acktr, inverse_every=every)
    optimizer, renewed = acktr.KFAC(agent), []
    for k in range(1, 8):
        before = copy.deepcopy(optimizer.fishers[0].X_inv)
        optimizer.measure(agent, torch.randn(8, 3))
        if not torch.equal(before, optimizer.fishers[0].X_inv):
            renewed.append(k)
    assert renewed == [k for k in range(1, 8) if k <= every or k % every == 0]


# ---- Damped inverses

def damped(X, S, damping):
    """A LayerFisher with these factors, inverted."""
    fisher = acktr.LayerFisher(torch.zeros(len(S), len(X) - 1))
    fisher.X.copy_(X)
    fisher.S.copy_(S)
    fisher.invert(damping)
    return fisher


@pytest.mark.parametrize("kind,usual", [("discrete", 0.1), ("images", 0.1), ("box", 0.01)])
def test_damping_is_larger_by_default_where_actions_are_discrete(kind, usual):
    assert acktr.KFAC(make_agent(acktr, kind)).damping == usual
    assert acktr.KFAC(make_agent(acktr, kind, damping=0.3)).damping == 0.3


def test_no_step_where_gradients_have_left():
    agent = make_agent(acktr, "box")
    optimizer = acktr.KFAC(agent)
    agent.zero_grad()                                           # the module's own drops them
    with pytest.raises(RuntimeError, match="has left the optimizer"):
        optimizer.step(0.1)


def test_f_is_nearly_the_same_if_images_compute_in_bfloat16():
    found = []
    for bf16 in (False, True):
        agent = make_agent(acktr, "images")
        agent.encoder.bf16 = bf16
        optimizer = acktr.KFAC(agent)
        torch.manual_seed(1)
        optimizer.measure(agent, make_rollout(acktr, agent).obs.flatten(0, 1))
        found.append(optimizer.fishers[1].X)                    # of the second convolution
    assert found[1].dtype == torch.float32 and not torch.equal(*found)
    close(found[1], found[0], rtol=0.05, atol=0.02 * found[0].abs().max().item())


def test_damping_survives_a_dead_layer():
    fisher = damped(torch.eye(3), torch.zeros(2, 2), 0.01)
    assert fisher.X_inv.isfinite().all() and fisher.S_inv.isfinite().all()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("damping", [0.01, 1.0])
def test_solve_is_that_with_the_explicit_kronecker_product(layer, damping):
    num_outputs, num_inputs = layer.weight.flatten(1).shape
    X, S = (root @ root.T for root in (torch.randn(num_inputs + 1, 40),
                                       torch.randn(num_outputs, 9)))
    fisher = damped(X / 40, S / 9, damping)
    layer.weight.grad, layer.bias.grad = torch.randn_like(layer.weight), torch.randn(num_outputs)
    columns = torch.cat([layer.weight.grad.flatten(1), layer.bias.grad[:, None]], 1).T
    c = math.sqrt(X.trace() / 40 / len(X) / (S.trace() / 9 / len(S)))
    matrix = torch.kron(X / 40 + c * damping**0.5 * torch.eye(len(X)),
                        S / 9 + damping**0.5 / c * torch.eye(len(S)))  # of columns of W
    expected = torch.linalg.solve(matrix, columns.flatten()).view(-1, num_outputs).T
    D = fisher.solve(layer)
    close(D[layer.weight], expected[:, :-1].reshape(layer.weight.shape), rtol=1e-3, atol=1e-4)
    close(D[layer.bias], expected[:, -1], rtol=1e-3, atol=1e-4)


# ---- The step

@pytest.mark.parametrize("max_kl,v_max_kl", [(1e-5, 1e-4), (1e-4, 1e-5)])
def test_kl_of_a_linear_agent_is_as_predicted(max_kl, v_max_kl):
    """There the factors are exact: the step goes to the trust regions of pi and of N(V, 1)."""
    for seed in range(3):
        agent = make_agent(acktr, seed=seed, hidden=(), max_kl=max_kl, v_max_kl=v_max_kl, lr=1e9,
                           rollout_steps=96, momentum=0.0, damping=1e-6, decay=1.0)
        rollout, before = make_rollout(acktr, agent, seed), copy.deepcopy(agent)
        batch = acktr.Batch(agent.normalize_obs(rollout.obs).flatten(0, 1),
                            rollout.act.flatten(0, 1), *targets(acktr, agent, rollout))
        metrics = take_step(measured(agent, batch.obs, times=200),
                            acktr.a2c_loss(agent, batch)[0], agent.cfg.lr)
        kl = kl_divergence(*(distribution(each, rollout.obs.flatten(0, 1))
                             for each in (before, agent)))
        with torch.no_grad():
            by_val = values(agent, rollout.obs) - values(before, rollout.obs)
        close(kl.double().mean(), max_kl, rtol=0.08, atol=0)
        close(by_val.double().square().mean() / 2, v_max_kl, rtol=0.08, atol=0)
        assert 0 < metrics["step_size"] < 1e9 and 0 < metrics["v_step_size"] < 1e9


def test_momentum_by_hand():
    """log sigma: D = grad / (2 + damping), eta = lr; M is 0.25 of the first, and so on."""
    agent = tiny_agent(momentum=0.75, damping=0.5, max_kl=1e9, v_max_kl=1e9)
    optimizer = acktr.KFAC(agent)
    for grad, position in ((10, -0.5), (-20, -0.5 - 0.375 + 1), (0, 0.125 + 0.46875)):
        take_step(optimizer, grad * agent.log_std.sum(), 0.5)
        close(agent.log_std, vec(position))


@every_kind
def test_the_inputs_of_the_batch_are_measured_before_the_step(kind, monkeypatch):
    agent = make_agent(acktr, kind)
    rollout, before = make_rollout(acktr, agent), copies(agent)
    given = noted(monkeypatch, acktr.KFAC, "measure",
                  lambda self, agent, obs: (obs, moved(before, agent)))
    acktr.update(agent, acktr.KFAC(agent), rollout, 0.1)
    ((obs, changed),) = given
    close(obs, agent.normalize_obs(rollout.obs).flatten(0, 1))
    assert not changed and moved(before, agent)
