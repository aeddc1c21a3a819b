"""algos/sac.py against torch.distributions and against stable-baselines3."""
import math

import pytest
import torch
from stable_baselines3 import SAC

from algos import crossq, sac, sac_her
from tests import helpers, offpolicy
from tests.helpers import bare, close, column, give, name_of, vec
from tests.offpolicy import flat, make_agent, make_batch, make_optimizers, noise_is, update

and_her = pytest.mark.parametrize("algo", [sac, sac_her], ids=name_of)
and_children = pytest.mark.parametrize("algo", [sac, sac_her, crossq], ids=name_of)


def squashed(algo, out, eps):
    """Actions and log pi of a policy that draws this eps."""
    with noise_is(eps):
        return algo.sample_squashed_gaussian(out)


def test_logp_far_out_is_finite_and_right():
    """tanh(30) is 1 in float32, and log(1 - 1) minus infinity: log 4 - 2 |u| is the answer.

    log sigma stays from -20 to 2.
    """
    out = vec((30, 0), (-30, 0), (88, 0), (0, 9), (0, -30)).requires_grad_()
    act, logp = squashed(sac, out, torch.zeros(5, 1))
    close(act, column(1, -1, 1, 0, 0))
    plain = -0.5 * math.log(2 * math.pi)
    far = plain - math.log(4)
    close(logp, [far + 60, far + 60, far + 176, plain - 2, plain + 20])
    logp.sum().backward()
    assert out.grad.isfinite().all()
    close(out.grad[:, 0], [2.0, -2, 2, 0, 0])


def test_samples_are_distributed_as_the_policy_and_the_best_is_the_middle():
    agent = make_agent(sac)
    obs = torch.ones(20000, 3)
    mean, log_std = agent.actor(obs[:1]).detach().chunk(2, -1)
    raw = agent.act(obs).atanh()
    close(raw.mean(0), mean[0], atol=0.05)
    close(raw.std(0), log_std.exp()[0], rtol=0.05)
    with noise_is():                                                # nothing is drawn for it
        close(agent.act(obs[:1], deterministic=True), mean.tanh())


@and_her
def test_a_fixed_temperature_stays(algo):
    """The losses use it, whatever log_alpha says, and no metric tells of learning it."""
    agent, batch, losses = make_agent(algo, alpha=0.2, learn_alpha=False), make_batch(algo), []
    learned, optimizers = make_agent(algo), make_optimizers(agent)
    agent.log_alpha.data.fill_(5.0), learned.log_alpha.data.fill_(math.log(0.2))
    for each in (agent, learned):
        torch.manual_seed(1)
        losses.append([loss(each, batch)[0] for loss in (algo.critic_loss, algo.actor_loss)])
    close(torch.stack(losses[0]), torch.stack(losses[1]))
    before, metrics = flat(agent.critic_targ), update(algo, agent, optimizers, batch)
    assert not {"alpha", "alpha_loss", "alpha_grad_norm"} & set(metrics)
    assert agent.log_alpha == 5 and optimizers["alpha"].steps == 0
    close(flat(agent.critic_targ), torch.lerp(before, flat(agent.critic), agent.cfg.tau))
    assert not torch.equal(flat(agent.critic_targ), before)
    close(sac.Agent(helpers.VECTOR, helpers.BOX, sac.Config(alpha=0.3)).log_alpha.exp(), 0.3)


@and_children
def test_a_fixed_temperature_may_be_0(algo):
    """Without the bonus, the actor's loss is as much smaller as the bonus was worth."""
    losses, logps = [], []
    for alpha in (0.0, 0.5):
        agent, batch = make_agent(algo, alpha=alpha, learn_alpha=False), make_batch(algo)
        assert agent.alpha() == alpha and agent.log_alpha.isfinite()
        torch.manual_seed(1)
        loss, metrics = algo.actor_loss(agent, batch)
        losses.append(loss.detach()), logps.append(metrics["logp"].mean())
    close(losses[0], losses[1] - 0.5 * logps[1])


def test_a_fixed_temperature_is_not_that_of_another_run():
    first = sac.train(helpers.quick(sac, run_dir="first", alpha=0.5))
    given = {"init_from": "first", "start_steps": 1000, "alpha": 0.2}
    learned = sac.train(helpers.quick(sac, run_dir="learned", **given))
    fixed = sac.train(helpers.quick(sac, run_dir="fixed", learn_alpha=False, **given))
    assert learned.log_alpha == first.log_alpha != math.log(0.5)
    close(learned.alpha(), first.log_alpha.exp())
    close(fixed.alpha(), 0.2)


def pairs(agent, model):
    """Our parameter and theirs, all of them. The actor's last layer is two there."""
    actor, critic, target = (getattr(model, name) for name in ("actor", "critic", "critic_target"))
    theirs = actor.latent_pi, *critic.q_networks, *target.q_networks, actor.mu, actor.log_std
    whole = agent.actor[:-1], agent.critic.q1, agent.critic.q2, agent.critic_targ.q1, \
        agent.critic_targ.q2
    halves = zip(*(x.chunk(2) for x in agent.actor[-1].parameters()))
    ours = *(net.parameters() for net in whole), *halves
    return [pair for own, net in zip(ours, theirs, strict=True)
            for pair in zip(own, net.parameters(), strict=True)]


def test_losses_and_ten_updates_are_those_of_stable_baselines3(monkeypatch):
    """In float64, on one noise for both: theirs draws for the actor first, ours for the target."""
    algo = bare(sac)
    agent = make_agent(algo, space=helpers.UNIT, lr=1e-3, tau=0.05, gamma=0.9).double()
    agent.log_alpha.data.fill_(math.log(0.3))
    spaces = helpers.Nowhere(helpers.VECTOR, helpers.UNIT)
    model = SAC("MlpPolicy", spaces, 1e-3, tau=0.05, gamma=0.9, device="cpu", buffer_size=1,
                ent_coef="auto", policy_kwargs={"net_arch": [16, 16]})
    model.policy.double()
    model.actor.action_dist.epsilon = 0.0                           # of the tanh correction
    model.log_ent_coef.data = agent.log_alpha.detach().clone().reshape(1)
    # It halves the critics' loss; with half of Adam's eps that makes the same step.
    model.critic.optimizer.param_groups[0]["eps"] = 0.5e-8
    give(model, pairs(agent, model))
    batches = [make_batch(algo, seed=k, dtype=torch.float64) for k in range(10)]
    model.replay_buffer = offpolicy.TheirBuffer(batches)
    optimizers = make_optimizers(agent)
    first, start = agent.critic(batches[0].obs, batches[0].act), agent.actor(batches[0].obs)
    noise = [torch.randn(2, 32, 2, dtype=torch.float64) for _ in batches]
    with monkeypatch.context() as patch:
        left = iter([eps for pair in noise for eps in (pair[1], pair[0])])
        patch.setattr(torch.distributions.normal, "_standard_normal", lambda *args, **_: next(left))
        patch.setattr("stable_baselines3.common.policies.preprocess_obs", offpolicy.as_it_is)
        model.train(10, 32)
        assert next(left, None) is None
    with noise_is(*[eps for pair in noise for eps in pair]):
        metrics = [update(algo, agent, optimizers, batch) for batch in batches]
    close(torch.stack([metrics[0]["q1"], metrics[0]["q2"]]), torch.stack(first).detach())
    close(metrics[0]["logp"], squashed(algo, start, noise[0][1])[1])
    theirs = model.logger.name_to_value
    names = {"actor_loss": "actor_loss", "alpha": "ent_coef", "alpha_loss": "ent_coef_loss"}
    for our, their in names.items():
        mean = torch.stack([each[our] for each in metrics]).mean()
        close(mean, theirs[f"train/{their}"], rtol=1e-9)
    close(torch.stack([each["critic_loss"] for each in metrics]).mean(),
          2 * theirs["train/critic_loss"], rtol=1e-9)
    for our, their in pairs(agent, model):
        close(our, their, rtol=1e-8, atol=1e-12)
    close(agent.log_alpha, model.log_ent_coef.item(), rtol=1e-10)
