"""What the off-policy files share: target networks, and when updates are due."""
import pytest
import torch

from tests.algos.test_contract import build, kinds
from tests.helpers import noted
from tests.registry import ALGOS, config, module

OFFPOLICY = [name for name in ALGOS if "start_steps" in module(name).Config.__annotations__]
every_algo = pytest.mark.parametrize("name", OFFPOLICY)


@every_algo
@pytest.mark.parametrize("num_envs,every", [(1, 4), (2, 1), (7, 4)])
def test_updates_keep_their_interval_whatever_num_envs(name, num_envs, every, monkeypatch):
    """The k-th belongs to its step, or comes right after it, and has a sample of its own.

    Those that do not always move the actor are told how many came before them.
    """
    algo = module(name)
    stepped = noted(monkeypatch, algo, "interact", lambda agent, envs, *rest: envs.num_envs)
    calls = noted(monkeypatch, algo, "update", lambda *args: (sum(stepped), args))
    algo.train(config(name, num_envs=num_envs, update_every=every, total_steps=60))
    assert sum(stepped) == -(-60 // num_envs) * num_envs        # whole steps of all
    due = range(12 + every, sum(stepped) + 1, every)
    batches = {id(x) for _, args in calls for x in args if hasattr(x, "rew")}
    assert len(calls) == len(due) == len(batches)
    for k, (at, (now, args)) in enumerate(zip(due, calls)):
        assert 0 <= now - at < num_envs
        assert name not in ("td3", "crossq") or args[-1] == k


@kinds(lambda name: name in OFFPOLICY)
def test_targets_begin_equal_and_are_networks_of_their_own(name, kind):
    """And two critics begin different."""
    agent = build(name, config(name, kind=kind))["agent"]
    nets = {each for each, _ in agent.named_children()}
    for each in {each for each in nets if f"{each}_targ" in nets}:
        net, targ = (list(getattr(agent, key).parameters()) for key in (each, f"{each}_targ"))
        assert len(net) == len(targ) and all(map(torch.equal, net, targ))
        assert len({param.data_ptr() for param in net + targ}) == len(net + targ)
        assert not any(param.requires_grad for param in targ)
    assert "critic_targ" in nets or name == "crossq"
    two = [getattr(agent.critic, each).parameters() for each in ("q1", "q2")
           if hasattr(agent.critic, each)]
    assert not any(torch.isclose(one, other).all() for one, other in zip(*two) if one.ndim > 1)
