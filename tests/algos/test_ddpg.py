"""algos/ddpg.py and td3.py against stable-baselines3, and what holds for sac, too."""
import pytest
import torch
from stable_baselines3 import DDPG, TD3

from algos import crossq, ddpg, sac, sac_discrete, sac_her, td3
from tests import helpers, offpolicy
from tests.helpers import bare, close, give, name_of, noted, quick
from tests.offpolicy import make_agent, make_batch, make_optimizers, noise_is, update

every_algo = pytest.mark.parametrize("algo", [ddpg, td3, sac], ids=name_of)
and_td3 = pytest.mark.parametrize("algo", [ddpg, td3], ids=name_of)


@and_td3
def test_exploration_by_hand(algo):
    """The policy's action is (0.5, -0.9) in all states."""
    agent = make_agent(algo, hidden=())
    agent.actor[0].weight.data.zero_()
    agent.actor[0].bias.data = torch.tensor([0.5, -0.9]).atanh()
    with noise_is(torch.tensor([[1.0, -2], [0, 30], [-16, 1]])):
        close(agent.act(torch.zeros(3, 3)), [[0.6, -1], [0.5, 1], [-1, -0.8]])


@pytest.mark.parametrize("algo", [ddpg, td3, sac, sac_her, crossq], ids=name_of)
def test_the_first_actions_are_uniform_and_from_the_seeded_generator(algo):
    agent = make_agent(algo)
    torch.manual_seed(5)
    act = agent.random_act(20000)
    assert act.shape == (20000, 2) and act.abs().max() <= 1
    close(act.mean(0), [0, 0], atol=0.02)
    close(act.var(0), [1 / 3, 1 / 3], rtol=0.03)
    between = torch.corrcoef(torch.cat([act.T[:, 1:], act.T[:, :-1]]))  # and with the row before
    close(between, torch.eye(4), atol=0.04)
    torch.manual_seed(5)
    assert torch.equal(act, agent.random_act(20000))


def pairs(agent, policy):
    """Our parameter and theirs, all of them."""
    theirs = policy.actor.mu, policy.actor_target.mu, *policy.critic.q_networks, \
        *policy.critic_target.q_networks
    ours = agent.actor, agent.actor_targ, *agent.critic.children(), *agent.critic_targ.children()
    return [pair for a, b in zip(ours, theirs, strict=True)
            for pair in zip(a.parameters(), b.parameters(), strict=True)]


@and_td3
def test_losses_and_ten_updates_are_those_of_stable_baselines3(algo, monkeypatch):
    """In float64, on one noise for both. Their DDPG also draws it, and multiplies it by 0."""
    delayed, algo = algo is td3, bare(algo)
    settings, ours, theirs, count = {"tau": 0.05, "gamma": 0.9}, {"act_noise": 0.3}, {}, 10
    if delayed:
        settings["policy_delay"], count = 3, 3
        ours |= {"target_noise": 0.25, "noise_clip": 0.4}
        theirs |= {"target_policy_noise": 0.25, "target_noise_clip": 0.4}
    agent = make_agent(algo, space=helpers.UNIT, lr=1e-3, **settings, **ours).double()
    model = (TD3 if delayed else DDPG)(
        "MlpPolicy", helpers.Nowhere(helpers.VECTOR, helpers.UNIT), 1e-3, device="cpu",
        buffer_size=1, policy_kwargs={"net_arch": [16, 16]}, **settings, **theirs)
    model.policy.double()
    give(model, pairs(agent, model.policy))
    optimizers = make_optimizers(agent)
    batches = [make_batch(algo, seed=k, dtype=torch.float64) for k in range(10)]
    first = agent.critic(batches[0].obs, batches[0].act)
    noise = [torch.randn(32, 2, dtype=torch.float64) for _ in batches]
    model.replay_buffer = offpolicy.TheirBuffer(batches)
    with monkeypatch.context() as patch:
        left = iter(noise)
        patch.setattr(torch.Tensor, "normal_", lambda self, mean, std: self.copy_(std * next(left)))
        patch.setattr("stable_baselines3.common.policies.preprocess_obs", offpolicy.as_it_is)
        model.train(10, 32)
        assert next(left, None) is None
    with noise_is(*noise if delayed else ()):
        metrics = [update(algo, agent, optimizers, batch, count=k)
                   for k, batch in enumerate(batches)]
    for name, times in (("critic_loss", 10), ("actor_loss", count)):
        losses = [each[name] for each in metrics if name in each]
        assert len(losses) == times
        close(torch.stack(losses).mean(), model.logger.name_to_value[f"train/{name}"], rtol=1e-10)
    for our, their in pairs(agent, model.policy):
        close(our, their, rtol=1e-9, atol=1e-12)
    for name, q in zip(("q1", "q2") if delayed else ("q",), first if delayed else (first,)):
        close(metrics[0][name], q.detach())


@pytest.mark.parametrize("algo", [ddpg, td3, sac, sac_discrete], ids=name_of)
def test_actions_are_random_until_start_steps_and_the_policys_then(algo, monkeypatch):
    sources = []
    for name in ("act", "random_act"):
        noted(monkeypatch, algo.Agent, name, lambda *_, name=name: sources.append(name))
    env = "CartPole-v1" if algo is sac_discrete else "tasks:Line-v0"
    algo.train(quick(algo, env, num_envs=2, start_steps=40))
    assert sources == 20 * ["random_act"] + 40 * ["act"]


@every_algo
@pytest.mark.parametrize("total,start,random_steps", [
    (1e6, None, 10_000), (1e5, None, 10_000), (3e4, None, 3000), (99, None, 9), (5, None, 0),
    (120, 40, 40), (120, 0, 0), (100, 5000, 5000),
])
def test_the_warm_up_is_at_most_a_tenth_of_the_budget_unless_given(algo, total, start,
                                                                    random_steps):
    cfg = algo.Config(total_steps=total, start_steps=start)
    assert cfg.start_steps == random_steps and isinstance(cfg.start_steps, int)
    assert algo.num_updates(random_steps, cfg) == 0
    assert algo.num_updates(random_steps + 7, cfg) == 7
