"""What is often reported as a bug and is none: these choices pass, and why each is sound."""
import pytest
import torch

from algos import a2c, ddpg, dqn, ppo, sac, td3, trpo, vpg
from tests.helpers import (
    ONPOLICY as ALGOS,
    dqn_agent,
    dqn_batch,
    make_rollout,
    offpolicy_agent,
    offpolicy_batch,
    onpolicy_agent as make_agent,
)
from utils import mpi

every_algo = pytest.mark.parametrize("name", ALGOS)


def random_steps(rows=40, envs=3):
    torch.manual_seed(0)
    rew, val, next_val = torch.randn(3, rows, envs)
    terminated, truncated = (torch.rand(2, rows, envs) < 0.2).float()
    return rew, val, next_val, terminated, torch.maximum(terminated, truncated)


@pytest.mark.parametrize("algo", [vpg, a2c, ppo, trpo], ids=lambda algo: algo.__name__)
def test_delta_needs_no_mask_for_the_end_of_an_episode(algo):
    """ "GAE without (1 - done) on delta": V(s') of a terminal state is 0 before GAE sees it or by
    GAE's own mask, which comes to the same; that of a truncated one belongs in delta."""
    rew, val, next_val, terminated, done = random_steps()
    one = algo.gae(rew, val, next_val, terminated, done, 0.9, 0.8)
    two = algo.gae(rew, val, next_val * (1 - terminated), torch.zeros_like(done), done, 0.9, 0.8)
    for first, second in zip(one, two):
        torch.testing.assert_close(first, second)
    masked = algo.gae(rew, val, next_val * (1 - done), terminated, done, 0.9, 0.8)
    assert (masked[0] - one[0]).abs().max() > 0.1, "a truncated step has a future"


def test_kl_is_looked_at_once_an_epoch_after_its_steps():
    """ "KL is checked too late": a whole epoch is taken, policy and value function, then none."""
    agent = make_agent(ppo, target_kl=1e-9, epochs=5, minibatch=8)
    rollout, flat = make_rollout(ppo, agent), mpi.flatten(agent)
    before, steps = flat.detach().clone(), []
    optimizer = type("Counted", (mpi.Adam,), {
        "step": lambda self, lr: steps.append(1) or mpi.Adam.step(self, lr)})(flat, eps=1e-5)
    metrics = ppo.update(agent, flat, optimizer, rollout, 1e-2)
    assert len(steps) == rollout.rew.numel() // 8 and metrics["kl"] > 1e-9
    critic = torch.cat([param.flatten() for param in agent.critic.parameters()])
    moved = flat.detach() - before
    assert moved[-len(critic):].any() and moved[:-len(critic)].any()


@pytest.mark.parametrize("alpha", [0.05, 1.0, 20.0])
def test_the_temperature_steps_along_log_alpha(alpha):
    """ "The loss has log alpha instead of alpha": both vanish at the same entropy, and point the
    same way beside it; only the length of the step differs."""
    log_alpha = torch.tensor(alpha).log().requires_grad_()
    for logp in (torch.full((8,), 1.5), torch.full((8,), 2.5), torch.full((8,), 2.0)):
        by_alpha = torch.autograd.grad(-(log_alpha.exp() * (logp - 2.0)).mean(), log_alpha)[0]
        ours = sac.alpha_gradient(logp, -2.0)
        assert ours.sign() == by_alpha.sign()
        torch.testing.assert_close(by_alpha, alpha * ours)


@pytest.mark.parametrize("share", [-1.0, -0.5])
def test_target_entropy_is_a_choice(share):
    """ "-dim / 2 instead of -dim": alpha rests at the entropy that was asked for, whichever."""
    agent = offpolicy_agent(sac, target_entropy=share)
    want = share * agent.act_dim
    assert sac.alpha_gradient(torch.full((4,), -want), want) == 0
    assert sac.alpha_gradient(torch.full((4,), -want + 1), want) < 0, "too sure: alpha rises"


@every_algo
def test_rewards_are_scaled_and_not_centred(name):
    """ "NormalizeReward does not subtract the mean": it would change the task. A reward of 1 a step
    says live on; without its mean it would say nothing."""
    algo = ALGOS[name]
    rew, var = torch.ones(5, 2), torch.tensor(4.0, dtype=torch.float64)
    torch.testing.assert_close(algo.standardize(rew, 0.0, var), torch.full((5, 2), 0.5))
    assert (algo.standardize(torch.tensor([-3.0, 0.0, 3.0]), 0.0, var).sign()
            == torch.tensor([-1.0, 0.0, 1.0])).all()


@pytest.mark.parametrize("algo,loss", [(ppo, "ppo_gradient"), (a2c, "a2c_gradient")])
def test_the_bonus_is_subtracted_from_a_loss(algo, loss):
    """ "The entropy's sign is wrong": a descent on -ent_coef H widens the policy."""
    agent = make_agent(algo, ent_coef=0.1)
    obs, zeros = torch.randn(8, *agent.obs_stats.mean.shape), torch.zeros(8)
    flat, act = mpi.flatten(agent), torch.randn(8, len(agent.log_std))
    parts = (act, zeros, zeros, zeros) if algo is ppo else (act, zeros, zeros)
    with torch.enable_grad():
        getattr(algo, loss)(agent, flat, obs, *parts)
    assert (agent.log_std.grad < 0).all()


@pytest.mark.parametrize("algo", [ddpg, td3, sac], ids=lambda algo: algo.__name__)
def test_a_target_may_ask_for_gradients(algo):
    """ "The target is not detached": under no_grad, in no optimizer, it gets none anyway."""
    grads = []
    for asks in (False, True):
        agent, batch = offpolicy_agent(algo), offpolicy_batch(algo)
        critic = mpi.flatten(agent.critic)
        for name, module in agent.named_children():
            if name.endswith("_targ"):
                module.requires_grad_(asks)
        gradient = getattr(algo, f"{algo.__name__.rpartition('.')[2]}_critic_gradient")
        eps = () if algo is ddpg else (torch.zeros_like(batch.act),)
        gradient(agent, critic, batch.obs, batch.act, batch.rew, batch.next_obs, batch.terminated,
                 *eps)
        grads.append(critic.grad.clone())
        targets = [param for name, param in agent.named_parameters() if "_targ" in name]
        assert targets and all(param.grad is None for param in targets)
    assert torch.equal(*grads) and grads[0].any()


def test_a_target_may_ask_for_gradients_dqn():
    grads = []
    for asks in (False, True):
        agent, batch = dqn_agent(), dqn_batch()
        agent.critic_targ.requires_grad_(asks)
        flat = mpi.flatten(agent.critic)
        dqn.dqn_gradient(agent, flat, batch.obs, batch.act, batch.rew, batch.next_obs,
                         batch.terminated)
        grads.append(flat.grad.clone())
        assert all(param.grad is None for param in agent.critic_targ.parameters())
    assert torch.equal(*grads) and grads[0].any()
