"""algos/trpo.py: conjugate gradient, line search, and sb3-contrib's step."""
import copy
import itertools
import math
from functools import partial

import pytest
import torch
from sb3_contrib import TRPO
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from torch.distributions import kl_divergence

from algos import trpo
from tests import onpolicy
from tests.helpers import Nowhere, bare, close, give, noted, vec
from tests.onpolicy import (
    SPACES, Still, distribution, every_kind, make_agent, make_optimizers, make_rollout, pairs,
    parameters, targets)
from utils import mpi
from utils.nets import SquashedGaussian

tiny_agent = partial(onpolicy.tiny_agent, trpo, hidden=())


def rollout_of(obs, act):
    """Return a rollout of one environment with these rows."""
    nothing = torch.zeros(len(obs), 1)
    return trpo.Rollout(obs[:, None], act[:, None], nothing, obs[:, None], nothing, nothing)


def step(agent, rollout=None, adv=None, **functions):
    """Call `update`: return the parameters before and after, and the metrics.

    adv          replaces the advantages
    functions    replace those of the file
    """
    rollout, before = rollout or make_rollout(trpo, agent), parameters(agent)
    if adv is not None:
        adv = adv.view_as(rollout.rew)
        functions["compute_targets"] = lambda *_: (adv, adv, adv)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in functions.items():
            patch.setattr(trpo, name, function)
        metrics = trpo.update(agent, Still(agent.critic), rollout)
    return before, parameters(agent), metrics


def test_surrogate_refuses_a_column_of_advantages():
    algo, zeros = bare(trpo), torch.zeros(3, 1)
    agent = onpolicy.tiny_agent(algo, hidden=())
    batch = algo.Batch(zeros, zeros, zeros, zeros[:, 0], agent.policy(zeros))
    with pytest.raises(AssertionError):
        algo.surrogate(agent, batch)


# ---- The conjugate gradient

@pytest.mark.parametrize("scale", [1e-10, 1e-4, 1e4, 1e10])
def test_conjugate_gradient_is_linear_in_its_right_side(scale):
    """Neither when it stops nor what it says is left depends on the unit of the gradient."""
    root, g = torch.randn(8, 8), torch.randn(8)
    product = partial(torch.mv, root @ root.T / 8 + torch.eye(8))
    for steps in (2, 4, 100):
        (x, left), (scaled, same) = (trpo.conjugate_gradient(product, size * g, steps)
                                     for size in (1.0, scale))
        close(scaled / scale, x, rtol=1e-3)
        close(same, left, rtol=1e-2, atol=1e-5)


def test_conjugate_gradient_stops_when_float32_goes_no_further():
    """A matrix of three different eigenvalues needs three products, however many are allowed."""
    basis, g, made = torch.linalg.qr(torch.randn(9, 9)).Q, torch.randn(9), []
    matrix = basis @ torch.diag(vec(1, 1, 1, 2, 2, 2, 3, 3, 3)) @ basis.T
    product = partial(lambda v: made.append(v) or matrix @ v)
    x, left = trpo.conjugate_gradient(product, g, 100)
    assert 3 <= len(made) <= 5 and left < 1e-5
    close(matrix @ x, g, rtol=1e-4, atol=1e-5)
    for steps in range(3):                                      # what is left, relative to |g|
        x, left = trpo.conjugate_gradient(product, g, steps)
        close(left, (matrix @ x - g).norm() / g.norm(), rtol=1e-4)


# ---- The step

def true_kl(before, agent, rollout):
    """KL of the policy from the one before, by the library."""
    return kl_divergence(*(distribution(x, rollout.obs.flatten(0, 1)) for x in (before, agent)))


TWO = rollout_of(torch.zeros(2, 1), vec((2,), (0,)))  # actions 2 and 0


def test_step_by_hand():
    """Actions 2 and 0 deviations off and A = (1, -1): g = (2, 0, 1) of (log sigma, weight, bias)

    and F = diag(2, 0, 1), so that x = (1, 0, 1), x' F x = 3, and max_kl = 0.015 gives 0.1 x.
    """
    agent = tiny_agent(max_kl=0.015, damping=0.0, cg_steps=9)
    _, _, metrics = step(agent, TWO, vec(1, -1))
    close(parameters(agent)[:3], vec(0.1, 0, 0.1), rtol=1e-4)
    close(metrics["gain_expected"], 0.3, rtol=1e-4)  # g' step
    first, second = 2 - 1.9**2 / math.exp(0.2) / 2 - 0.1, -0.01 / math.exp(0.2) / 2 - 0.1
    close(metrics["gain"], (math.expm1(first) - math.expm1(second)) / 2, rtol=1e-4)
    close(metrics["kl"], (1 + 0.01) / (2 * math.exp(0.2)) - 0.5 + 0.1, rtol=1e-3)
    close(metrics["policy_grad_norm"], 5**0.5)
    assert metrics["backtracks"] == 0 and metrics["cg_residual"] < 1e-4
    close(metrics["entropy"], SquashedGaussian(vec(0), vec(0)).entropy())  # of pi_old


def test_the_fisher_matrix_is_that_of_one_sample_in_k(monkeypatch):
    """The rows between have another s and A = 0: with them, F and the step would be others."""
    monkeypatch.setattr(torch, "randperm", torch.arange)
    agent = tiny_agent(max_kl=0.015, damping=0.0, cg_steps=9, fisher_every=2)
    rollout = rollout_of(vec([0], [1], [0], [1]), vec([2], [9], [0], [9]))
    _, after, metrics = step(agent, rollout, vec(1, 0, -1, 0))
    close(after[:3], vec(0.1, 0, 0.1), rtol=1e-4)
    close(metrics["policy_grad_norm"], 5**0.5 / 2)  # g is that of all four


def test_the_samples_of_the_fisher_matrix_are_drawn_anew(monkeypatch):
    """Every k-th would be always of the same environments if k divides their number.

    The line search measures KL on all samples.
    """
    given = noted(monkeypatch, trpo, "mean_kl", lambda agent, obs, pi_old: (
        obs.flatten().tolist(), pi_old.loc.flatten().tolist()))
    for _ in range(20):
        agent = tiny_agent(fisher_every=2, backtracks=1)
        agent.actor[-1].weight.data.fill_(2)                    # so that mu is 2 s
        step(agent, rollout_of(vec([1], [9]), vec([0], [0])), vec(0, 0))
    for obs, loc in given:
        assert loc == [2 * x for x in obs]                      # these samples' own pi_old
    drawn = [obs for obs, _ in given]
    assert [1] in drawn[::2] and [9] in drawn[::2]
    assert drawn[1::2] == 20 * [[1, 9]]


@pytest.mark.parametrize("max_kl", [0.1, 0.5, 1.0, 1.5, 2.5])
def test_a_step_that_goes_too_far_is_drawn_back_by_hand(max_kl):
    """The other way sigma shrinks, which the estimate of KL takes too lightly: 0.8^k of it fits."""
    agent = tiny_agent(max_kl=max_kl, damping=0.0, cg_steps=9)
    _, _, metrics = step(agent, TWO, vec(-1, 1))
    sizes = [(max_kl / 1.5) ** 0.5 * 0.8**k for k in range(10)]  # times (-1, 0, -1)
    kls = [(1 + size**2) * math.exp(2 * size) / 2 - 0.5 - size for size in sizes]
    k = next(k for k, kl in enumerate(kls) if kl <= max_kl)
    assert k == metrics["backtracks"] > 0
    close(parameters(agent)[:3], vec(-1, 0, -1) * sizes[k], rtol=1e-4)
    close(metrics["kl"], kls[k], rtol=1e-3)
    close(metrics["gain_expected"], 3 * sizes[k], rtol=1e-4)


@pytest.mark.parametrize("unit,size", [(0.1, 0.02), (0.5, 0.1), (3.0, 0.1)])
@pytest.mark.parametrize("scale_rew", [True, False])
def test_steps_shorten_as_returns_become_equal_by_hand(unit, size, scale_rew):
    """As in `test_step_by_hand`, but R = (unit, -unit): the step is min(1, 2 unit) of 0.1."""
    agent = tiny_agent(max_kl=0.015, damping=0.0, cg_steps=9, scale_rew=scale_rew)
    agent.reward_sum_stats.var.fill_(1e-8 if scale_rew else 49.0)  # the unit of R without scaling
    ret = vec(unit, -unit) if scale_rew else 7 * vec(unit, -unit) + 300
    adv = vec(1, -1).view_as(TWO.rew)
    _, _, metrics = step(agent, TWO, compute_targets=lambda *_: (adv, adv, ret.view_as(adv)))
    close(parameters(agent)[:3], vec(size, 0, size), rtol=1e-4)
    close(metrics["step_size"], size, rtol=1e-4)
    close(metrics["step_fraction"], size / 0.1, rtol=1e-4)
    close(metrics["gain_expected"], 3 * size, rtol=1e-4)


def test_all_processes_shorten_their_steps_alike(monkeypatch):
    """The returns of each rank are equal, but not those of both."""
    agent = tiny_agent()
    monkeypatch.setattr(trpo, "moments", lambda rows: (4, rows.mean(), torch.tensor(0.04).double()))
    close(trpo.step_fraction(agent, torch.ones(2, 1)), 0.4)


@every_kind
@pytest.mark.parametrize("max_kl", [0.001, 0.02, 0.5])
def test_the_divergence_stays_within_max_kl_and_something_is_gained(kind, max_kl):
    kls = []
    for seed in range(3):
        agent = make_agent(trpo, kind, seed, max_kl=max_kl)
        before, rollout = copy.deepcopy(agent), make_rollout(trpo, agent, seed)
        _, _, metrics = step(agent, rollout)
        kl = true_kl(before, agent, rollout).mean()
        limit = max_kl * (2 if kind == "box" else 1)  # for each dimension of an action
        assert 0 < kl <= limit * 1.001 and metrics["gain"] > 0
        close(metrics["kl"], kl, rtol=1e-2, atol=1e-6)
        kls.append(kl)
    assert min(kls) > 0.1 * limit and max(kls) > 0.2 * limit  # it goes as far as it may


@every_kind
def test_the_line_search_goes_by_what_all_ranks_measure(kind, monkeypatch):
    """The mean KL is too large, so this rank draws back, too."""
    plain, agent = mpi.average, make_agent(trpo, kind, backtracks=4)
    monkeypatch.setattr(mpi, "average", lambda x: (torch.tensor([1.0, 1e9]) if x.shape == (2,)
                                                   else plain(x)))
    _, _, metrics = step(agent)
    assert metrics["backtracks"] == 4


@every_kind
@pytest.mark.parametrize("name,worse", [("mean_kl", 1e9), ("surrogate", -1e9)])
def test_a_failed_line_search_leaves_every_bit_as_it_was(kind, name, worse):
    """The search is forced to fail. A zero keeps its sign, too."""
    agent = make_agent(trpo, kind, backtracks=4)
    agent.actor[-1].bias.data = torch.zeros_like(agent.actor[-1].bias) * -1.0
    plain, searched = getattr(trpo, name), []

    def spoiled(*args):
        if torch.is_grad_enabled():  # the step's own gradients
            return plain(*args)
        searched.append(plain(*args))
        return searched[-1] + worse

    before, after, metrics = step(agent, **{name: spoiled})
    assert len(searched) == 4
    assert before.numpy().tobytes() == after.numpy().tobytes()
    assert metrics["kl"] == metrics["gain"] == metrics["gain_expected"] == 0
    assert metrics["backtracks"] == 4


def test_without_advantages_nothing_moves_and_nothing_is_nan():
    agent = make_agent(trpo)
    before, after, metrics = step(agent, adv=torch.zeros(24))
    assert before.numpy().tobytes() == after.numpy().tobytes()
    assert all(torch.as_tensor(x).isfinite().all() for x in metrics.values())


# ---- sb3-contrib

@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_the_step_is_that_of_sb3_contrib(kind, monkeypatch):
    """Ten updates. Their KL is a mean over d dimensions, ours a sum: our damping is d times theirs.
    The peer's critic gets our falling rate, and we take its full steps."""
    monkeypatch.setattr(trpo, "step_fraction", lambda *_: torch.ones(()))
    dims = 2 if kind == "box" else 1
    agent = make_agent(trpo, kind, num_envs=4, rollout_steps=64, minibatch_size=64, v_steps=5,
                       v_lr=1e-2, max_kl=0.005, damping=0.05 * dims, cg_steps=12)
    policy = {"net_arch": [8, 8], "optimizer_kwargs": {"eps": 1e-8}}
    model = TRPO("MlpPolicy", Nowhere(*SPACES[kind]), 1e-2, n_steps=64, batch_size=64,
                 cg_max_steps=12, cg_damping=0.05, target_kl=0.005, n_critic_updates=5,
                 normalize_advantage=False, line_search_shrinking_factor=0.8, policy_kwargs=policy,
                 device="cpu")
    give(model, pairs(agent, model.policy))
    optimizers = make_optimizers(trpo, agent)
    adam, rates = model.policy.optimizer, itertools.cycle([1e-2, 8e-3, 6e-3, 4e-3, 2e-3])
    plain = adam.step
    adam.step = lambda: [adam.param_groups[0].update(lr=next(rates)), plain()]
    for seed in range(10):
        rollout, before = make_rollout(trpo, agent, seed), copy.deepcopy(agent)
        adv, ret = targets(trpo, agent, rollout)
        obs, act = agent.normalize_obs(rollout.obs).flatten(0, 1), rollout.act.flatten(0, 1)
        logp = distribution(agent, rollout.obs.flatten(0, 1)).log_prob(act)
        sample = RolloutBufferSamples(obs, act, torch.zeros(64), logp, adv, ret)
        model.rollout_buffer.get = lambda batch_size, sample=sample: iter([sample])
        model.train()
        metrics = trpo.update(agent, *optimizers, rollout)
        logged = model.logger.name_to_value
        assert metrics["backtracks"] < 5 and logged["train/is_line_search_success"] == 1
        close(metrics["gain"], logged["train/policy_objective"] - adv.mean(), rtol=1e-2, atol=1e-4)
        close(metrics["v_loss"].mean(), logged["train/value_loss"], rtol=1e-3)
        moved = max((our - old).detach().abs().max() for our, old in zip(agent.parameters(),
                                                                before.parameters()))
        assert moved > 1e-2
        for our, their in pairs(agent, model.policy):
            close(our.data, their.data, rtol=0, atol=3e-4)  # a step moves some by 0.1
