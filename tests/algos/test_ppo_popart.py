"""algos/ppo_popart.py, where it is not algos/ppo.py: location and scale, and outputs that stay."""
import copy
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from algos import ppo_popart
from tests import onpolicy
from tests.helpers import UNIT, close, copies, moved, vec
from tests.onpolicy import SPACES, every_kind, make_config, parameters, rows_of

make_agent = partial(onpolicy.make_agent, ppo_popart)
make_rollout = partial(onpolicy.make_rollout, ppo_popart)
targets = partial(onpolicy.targets, ppo_popart)
learn = partial(onpolicy.spied, ppo_popart, "popart_loss")


def new_agent(**settings):
    """Return an agent for observations of two numbers, as it is at first."""
    return ppo_popart.Agent(UNIT, UNIT, make_config(ppo_popart, **settings))


def move(agent, *returns):
    """Let the agent see rollouts with these returns."""
    for ret in returns:
        agent.adapt_critic(torch.as_tensor(ret, dtype=torch.float32))


# ---- Location, scale and the last layer

def test_location_and_scale_by_hand():
    agent = new_agent(popart_beta=0.4)
    expected = [((1, 3), 2, 5),                 # u = 1: mean 2, mean of squares 5
                ((5, 9), 4.5, 29),              # u = 1/2: mean 7, mean of squares 53
                ((0, 0), 2.7, 17.4)]            # u = 0.4, not 1/3
    for ret, loc, square in expected:
        move(agent, ret)
        close(agent.loc, loc)
        close(agent.scale(), math.sqrt(square - loc**2))
    assert agent.scale().dtype == torch.float64


@pytest.mark.parametrize("offset,spread", [(0, 1), (1e4, 1), (-7, 1e-3), (3e4, 1e4)])
def test_with_beta_0_all_rollouts_count_alike(offset, spread):
    """Around the mean, and to the accuracy of float64: float32 would lose a small spread."""
    ret = np.float32(offset + spread * np.random.default_rng(0).normal(size=(7, 50)))
    agent = new_agent(popart_beta=0.0)
    move(agent, *ret)
    close(agent.loc, ret.astype(float).mean(), rtol=1e-9)
    close(agent.scale(), ret.astype(float).std(), rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, -3000.1])
def test_equal_returns_have_the_least_scale(value):
    agent = new_agent(popart_beta=0.1)
    move(agent, *np.full((3, 20), value))
    close(agent.scale(), 1e-6, rtol=1e-3)
    close(agent.loc, value)
    assert ((torch.full((5,), value) - agent.loc) / agent.scale()).isfinite().all()


SCALES = [1e-3, 1.0, 1e4]


@pytest.mark.parametrize("new", SCALES)
@pytest.mark.parametrize("old", SCALES)
@pytest.mark.parametrize("offset", [0.0, -5.0])
def test_values_stay_when_statistics_move(old, new, offset):
    """To the precision of float32, relative to the largest number that takes part."""
    agent = new_agent(hidden=(16,), popart_beta=0.5)
    obs = torch.randn(200, 2)
    with torch.no_grad():
        agent.critic[-1].weight.normal_()
        move(agent, old * (offset + torch.randn(50)), old * (offset + torch.randn(50)))
        before = agent.value(obs)
        assert before.std() > 0.05 * old        # not just a constant
        move(agent, new * (1 - offset + torch.randn(50)))
        after = agent.value(obs)
    assert agent.scale() > 0.3 * max(old, new)
    size = float(before.abs().max() + agent.loc.abs() + agent.scale())
    close(after, before, rtol=0, atol=1e-6 * size)


@every_kind
def test_only_the_last_layer_of_the_critic_adapts(kind):
    agent = make_agent(kind)
    before = copies(agent)
    move(agent, 7 + 9 * torch.randn(30))
    last = f"critic.{len(agent.critic) - 1}"
    assert moved(before, agent) == {"num_rollouts", "loc", "square", f"{last}.weight",
                                    f"{last}.bias"}


@every_kind
def test_the_first_value_is_0_and_after_one_rollout_the_mean(kind):
    """What the first V preserved would be its distance from the targets, in units of scale."""
    agent = ppo_popart.Agent(*SPACES[kind], make_config(ppo_popart))
    obs = torch.as_tensor(SPACES[kind][0].sample()[None, None])
    with torch.no_grad():
        assert onpolicy.values(agent, obs) == 0
        move(agent, [100, 102])
        close(onpolicy.values(agent, obs), vec(101))
        move(agent, [0, 0])                     # from then on V stays
        close(onpolicy.values(agent, obs), vec(101))


# ---- What an update does

@every_kind
@pytest.mark.parametrize("anew", [True, False])
def test_targets_and_advantages_are_in_units_of_the_new_scale(kind, anew):
    """In every epoch: of V in units of reward, and of statistics that know these targets."""
    agent = make_agent(kind, epochs=3, norm_adv=False, gamma=0.9, lam=0.8, recompute_adv=anew)
    rollout, before = make_rollout(agent), copy.deepcopy(agent)
    _, ret = targets(before, rollout)
    u = 1 / 6                                   # the sixth rollout
    loc = (1 - u) * 2 + u * ret.mean()
    square = (1 - u) * 13 + u * ret.square().mean()
    scale = (square - loc**2).sqrt()
    calls, _, metrics = learn(agent, rollout, lr=1e-2)
    assert len(calls) == 3
    for call in calls:
        order = rows_of(call, agent, rollout)
        adv, ret = targets(call.agent if anew else before, rollout)  # at the start of the epoch
        close(call.adv, (adv / scale)[order], rtol=1e-4, atol=1e-5)
        close(call.ret, ret[order], rtol=1e-4, atol=1e-5)
        close(call.agent.loc, loc)
        close(call.agent.scale(), scale)
        assert not (call.adv.requires_grad or call.ret.requires_grad)
    close(agent.scale(), scale)                 # once per rollout
    close(metrics["val_scale"], scale)
    assert agent.num_rollouts == 6


@every_kind
@pytest.mark.parametrize("unit", [2.0**-10, 2.0**13])
def test_the_unit_of_rewards_does_not_matter_to_the_bit(kind, unit):
    """Powers of two change no rounding, so that every epsilon would be seen."""
    def scaled(agent, rollout):
        return replace(rollout, rew=unit * rollout.rew)

    assert torch.equal(*(parameters(onpolicy.two_updates(ppo_popart, kind, *more, norm_adv=False))
                         for more in ([], [scaled])))
