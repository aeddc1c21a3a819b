"""What the on-policy files share, in each of them: data, equations, statistics, saving, MPI.

Their own equations are in test_vpg.py, test_a2c.py, test_trpo.py, test_ppo_math.py,
test_ppo_popart.py, test_ppo_lstm.py and test_gail.py. Run as a program, this file is one of the
processes that `test_two_ranks_equal_one` starts.
"""
import copy
import csv
import json
import math
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

from algos import a2c, acktr, gail, ppo, ppo_popart, vpg
from tests import probe
from tests.envs import Counter
from tests.helpers import (
    BOX,
    DISCRETE,
    IMAGES,
    LOG_2PI,
    ONPOLICY as ALGOS,
    SPACES,
    VECTOR,
    Descent,
    close,
    column,
    copies,
    distribution,
    gae,
    gradients,
    learn,
    learn_with,
    make_rollout,
    moved,
    noted,
    onpolicy_agent as make_agent,
    onpolicy_collect,
    onpolicy_config as config,
    onpolicy_optimizers,
    parameters,
    reward_sums,
    rows as columns_of,
    same,
    scales_rewards,
    script,
    statistics,
    targets,
    two_ranks,
    vec,
)
from utils import mpi, run
from utils.envs import evaluate, make_envs

every_algo = pytest.mark.parametrize("name", ALGOS)
without_memory = pytest.mark.parametrize("name", [name for name in ALGOS if name != "ppo_lstm"])
every_kind = pytest.mark.parametrize("kind", SPACES)


# ---- ACKTR draws outputs at random; where the order of rows must not count, they follow from a row

def draw_alike(setattr):
    """Let the outputs that ACKTR draws for its Fisher matrix depend on the row alone."""
    def sampled_nll(agent, obs):
        features = agent.encoder(obs)
        actor_out, val = agent.actor(features), agent.value(features)
        noise = (7 * obs.flatten(1).sum(-1)).sin().detach()
        act = (actor_out + noise[:, None]).detach()
        return (0.5 * (val - val.detach() - noise).square()
                - acktr.log_prob(actor_out, agent.log_std, act)).sum()

    setattr(acktr, "sampled_nll", sampled_nll)


# ---- Equations (1) to (7), as in every file

@every_algo
@pytest.mark.parametrize("terminated,done,adv", [
    ((0, 0, 0, 0), (0, 0, 0, 0), (-1.1640625, -0.65625, -2.625, -2.5)),
    ((0, 0, 0, 0), (0, 1, 0, 0), (-1, 0, -2.625, -2.5)),  # a time limit: V(s') counts
    ((0, 1, 0, 0), (0, 1, 0, 0), (-2.25, -5, -2.625, -2.5)),  # a death: it does not
    ((0, 0, 0, 1), (0, 0, 0, 1), (-1.234375, -0.9375, -3.75, -7)),
])
def test_gae_by_hand(name, terminated, done, adv):
    val, next_val = column(5, 6, 7, 8), column(6, 10, 8, 9)
    actual, ret = gae(ALGOS[name], column(1, 1, 1, 1), val, next_val, column(*terminated),
                      column(*done), 0.5, 0.5)
    close(actual, column(*adv))
    close(ret, column(*adv) + val)


@every_algo
def test_log_prob_and_entropy_by_hand(name):
    algo, log_std = ALGOS[name], vec(0, math.log(2))
    logp, by_out, by_log_std = gradients(  # 1 and 2 deviations off
        lambda *x: algo.log_prob(*x, vec((1, 5))).sum(), vec((0, 1)), log_std)
    close(logp, -0.5 - 2 - math.log(2) - LOG_2PI)
    close(by_out, vec((1, 1)))  # z / sigma
    close(by_log_std, vec(0, 3))  # z^2 - 1
    close(algo.entropy(vec((5, -5), (1, 2)), log_std), math.log(2) + LOG_2PI + 1)
    out, act = vec((0, math.log(3)), (0, math.log(3))), torch.tensor([1, 0])
    close(algo.log_prob(out, None, act), vec(math.log(0.75), math.log(0.25)))
    close(algo.entropy(out, None), 2 * math.log(2) - 0.75 * math.log(3))


@every_algo
@pytest.mark.parametrize("discrete", [True, False])
def test_log_prob_and_entropy_are_those_of_the_library(name, discrete):
    torch.manual_seed(0)
    algo, out = ALGOS[name], 3 * torch.randn(6, 4)
    log_std = None if discrete else torch.randn(4)
    act = torch.randint(4, (6,)) if discrete else 5 * torch.randn(6, 4)
    library = (Categorical(logits=out) if discrete
               else Independent(Normal(out, log_std.exp()), 1))
    close(algo.log_prob(out, log_std, act), library.log_prob(act))
    close(algo.entropy(out, log_std), library.entropy().mean())


@every_algo
def test_value_loss_by_hand(name):
    loss, by_val = gradients(lambda x: ALGOS[name].value_loss(x, vec(1, 4, 0)), vec(1, 2, 3))
    close(loss, 13 / 3)
    close(by_val, vec(0, -4 / 3, 2))


@every_algo
def test_reward_sums_by_hand(name):
    if scales_rewards(ALGOS[name]):
        sums, last = reward_sums(ALGOS[name], column(1, 2, 3), column(0, 1, 0), vec(4), 0.5)
        close(sums, column(3, 3.5, 3))  # an episode's last reward counts, and then no more
        close(last, vec(3))


# ---- What is collected

@every_algo
@pytest.mark.parametrize("obs,act", [("vector", "box"), ("image", "discrete")])
def test_every_row_is_as_scripted(name, obs, act):
    algo = ALGOS[name]
    cfg = config(algo, env="tests.envs:Counter-v0", env_kwargs=json.dumps({"obs": obs, "act": act}))
    envs = make_envs(cfg, 3)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    last, rollouts, ended = envs.reset(seed=7)[0], [], []
    for start, steps in ((0, 5), (5, 1), (6, 9)):  # cut where an episode ends, and elsewhere
        rollout, last = onpolicy_collect(algo)(agent, envs, last, steps)
        rollouts.append(rollout)
        ended += [(start + steps - 1 - ago, *rest) for ago, *rest in envs.pop_episodes()]
    rows = [script(number, 16)[0] for number in range(3)]
    for i, field in enumerate(["obs", "rew", "next_obs", "terminated", "done"]):
        expected = torch.tensor([[row[i] for row in env[:15]] for env in rows]).transpose(0, 1)
        got = torch.cat([getattr(rollout, field) for rollout in rollouts]).float()
        got = got[:, :, 20, 20] if field.endswith("obs") and obs == "image" else got
        assert torch.equal(got, expected.float()), field
    assert sorted(tuple(map(float, end)) for end in ended) == sorted(
        tuple(map(float, end)) for number in range(3) for end in script(number, 15)[1])
    sent = np.stack([env.acts for env in Counter.made], axis=1)
    stored = torch.cat([rollout.act for rollout in rollouts])
    np.testing.assert_allclose(sent, np.stack([agent.env_act(row) for row in stored]), atol=1e-6)


# ---- The agent that acts

@every_algo
@every_kind
def test_the_first_policy_prefers_nothing(name, kind):
    """Weights keep the length of what passes through, but for the last ones of the policy."""
    agent = ALGOS[name].Agent(*SPACES[kind], config(ALGOS[name]))
    gains = {agent.actor[-1]: 0.01, agent.critic[-1]: 0.0 if ALGOS[name] is ppo_popart else 1.0}
    layers = [layer for name, layer in agent.named_modules()
              if hasattr(layer, "weight") and not name.startswith("disc.")]
    for layer in layers:
        weight = layer.weight.detach().flatten(1)
        weight = weight if len(weight) <= weight.shape[1] else weight.T
        gain = gains.get(layer, math.sqrt(2))
        close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-4 * gain**2)
        assert not layer.bias.any()
    assert set(gains) < set(layers)


@every_algo
def test_images_are_between_0_and_1_and_keep_their_rows(name):
    """And colours may stand first or last."""
    last = make_agent(ALGOS[name], "images")
    first = ALGOS[name].Agent(gym.spaces.Box(0, 255, (3, 44, 36), np.uint8), DISCRETE, last.cfg)
    obs = torch.randint(256, (5, 2, *IMAGES.shape), dtype=torch.uint8)
    expected = obs.permute(0, 1, 4, 2, 3).numpy() / np.float32(255)
    close(last.normalize_obs(obs), expected)
    close(first.normalize_obs(obs.permute(0, 1, 4, 2, 3)), expected)


@every_algo
@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_actions_are_drawn_from_the_policy_for_each_environment_anew(name, kind):
    agent = make_agent(ALGOS[name], kind)
    agent.actor[-1].weight.data *= 10
    obs = torch.tensor([[2.0, 4, 5], [3.0, -1, 2]])
    act = agent.act(obs.repeat(20000, 1)).unflatten(0, (-1, 2))
    policy = distribution(agent, obs)
    if kind == "discrete":
        shares = torch.stack([(act == k).float().mean(0) for k in range(4)], -1)
        assert policy.probs.std() > 0.02  # not as good as uniform
        close(shares, policy.probs, atol=0.015)
        both = (act[:, :1] == act[:, 1:]).float().mean()
        close(both, policy.probs.prod(0).sum(), atol=0.015)
    else:
        close(act.mean(0), policy.mean, atol=0.05)
        close(act.std(0), policy.stddev, rtol=0.03)
        assert torch.corrcoef(act.flatten(1).T).triu(1).abs().max() < 0.04
    assert torch.equal(agent.act(obs, deterministic=True), policy.mode)


@every_algo
def test_actions_fill_the_box_side_by_side(name):
    """From one bound to the other, as tanh goes from -1 to 1, whatever the bounds are."""
    agent = make_agent(ALGOS[name])
    act = torch.tensor([[-99.0, 99], [99, -99], [0, 0], [math.atanh(0.5), -math.atanh(0.5)]])
    np.testing.assert_allclose(agent.env_act(act), [[0, 3], [5, -3], [2.5, 0], [3.75, -1.5]],
                               atol=1e-6)


# ---- Statistics

@every_algo
@pytest.mark.parametrize("offset,scale", [(5, 2), (1e6, 1 / 16)])
def test_statistics_are_those_of_all_rows_and_of_each_running_return(name, offset, scale):
    """Of every environment, through rollouts, to the accuracy of float64."""
    algo = ALGOS[name]
    agent = algo.Agent(VECTOR, BOX, config(algo, gamma=0.9))
    rollouts = []
    for seed in range(3):
        torch.manual_seed(seed)
        columns = vars(make_rollout(algo, make_agent(algo), seed))
        noise = torch.randn(columns["obs"].shape) + torch.arange(3.0).view(1, 3, 1)
        columns["obs"] = (offset + scale * noise).float()
        rollouts.append(algo.Rollout(**columns))
        agent.update_stats(rollouts[-1])
    rows = torch.cat([rollout.obs for rollout in rollouts]).flatten(0, 1).double().numpy()
    rew, done = (torch.cat([getattr(rollout, key) for rollout in rollouts]).double().numpy()
                 for key in ("rew", "done"))
    returns, running = [], np.zeros(3)
    for t in range(len(rew)):
        running = rew[t] + 0.9 * running * (1 - done[t - 1] if t else 1)
        returns.append(running)
    assert done.any()
    returns = np.ravel(returns)
    expected = [(agent.obs_stats, rows)]
    if scales_rewards(algo):
        expected.append((agent.reward_sum_stats, returns))
    for stats, values_seen in expected:
        close(stats.count, float(len(values_seen)))
        np.testing.assert_allclose(stats.mean, values_seen.mean(0), rtol=1e-6)
        np.testing.assert_allclose(stats.var, values_seen.var(0), rtol=1e-4)


# ---- Evaluation

@without_memory
@pytest.mark.parametrize("act", ["box", "discrete"])
def test_evaluate_takes_the_best_actions_of_one_episode_and_changes_nothing(name, act):
    """Of each environment the first episode, however many of others end meanwhile."""
    algo = ALGOS[name]
    cfg = config(algo, env="tests.envs:Counter-v0", env_kwargs=json.dumps({"act": act}))
    envs = make_envs(cfg, 1)
    agent = algo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    agent.actor[-1].weight.data *= 100  # so that it looks at what it sees
    before, state = statistics(agent), torch.get_rng_state()
    Counter.made.clear()
    returns, lengths = evaluate(agent, cfg, 5, seed=1)
    first = [script(number, 8)[1][0] for number in range(5)]
    assert returns.tolist() == [ep_ret for _, _, ep_ret, _ in first]
    assert lengths.tolist() == [ep_len for *_, ep_len in first]
    assert same(statistics(agent), before) and torch.equal(torch.get_rng_state(), state)
    for env in Counter.made:
        seen = np.float32([row[0] for row in script(env.number, len(env.acts))[0]])
        expected = agent.env_act(agent.act(seen, deterministic=True))
        np.testing.assert_allclose(env.acts, expected, atol=1e-5)


# ---- What an update changes

@every_algo
@every_kind
def test_update_moves_every_parameter_and_leaves_statistics_alone(name, kind):
    algo = ALGOS[name]
    agent = make_agent(algo, kind)
    kept, before = statistics(agent), copy.deepcopy(agent)
    flat, metrics = learn(algo, agent, make_rollout(algo, agent), lr=0.1)
    changed = {each for each, now in statistics(agent).items() if not torch.equal(now, kept[each])}
    own = {"num_rollouts", "loc", "square"}                     # of PopArt's targets
    assert changed == (own if algo is ppo_popart else set())
    for (param_name, param), old in zip(agent.named_parameters(), before.parameters()):
        stays = param_name.startswith("disc.")                  # the discriminator has its own step
        assert torch.equal(param, old) == stays, f"{param_name} did not move, or did"
    assert flat.isfinite().all()
    assert all(torch.as_tensor(x).isfinite().all() for x in metrics.values())
    assert not any(x.requires_grad for x in metrics.values() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("name", [name for name, algo in ALGOS.items()
                                  if hasattr(algo, "explained_variance")])
def test_explained_variance_of_returns_that_do_not_vary(name):
    val = torch.tensor([[0.0], [2e-4]])  # its variance is 1e-8, the number that is added below
    close(ALGOS[name].explained_variance(val, torch.zeros(2, 1)), 0.0, atol=1e-4)


@without_memory
def test_metrics_say_what_was_believed_before(name):
    """val and the explained variance are those of the critic that acted, not of the fitted one."""
    algo = ALGOS[name]
    agent = make_agent(algo)
    rollout, before = make_rollout(algo, agent), copy.deepcopy(agent)
    _, metrics = learn(algo, agent, rollout, lr=1e-2)
    adv, ret = targets(algo, before, rollout)
    close(metrics["val"].flatten(), ret - adv, rtol=1e-4, atol=1e-5)
    close(metrics["explained_variance"], 1 - np.var(adv.numpy()) / np.var(ret.numpy()), rtol=1e-4)


@without_memory
@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_the_entropy_is_that_of_the_policy_that_acted_in_all_states(name, kind):
    algo = ALGOS[name]
    agent = make_agent(algo, kind)
    rollout = make_rollout(algo, agent)
    expected = distribution(agent, rollout.obs.flatten(0, 1)).entropy().mean()
    entropy = torch.as_tensor(learn(algo, agent, rollout)[1]["entropy"])
    close(entropy.mean(), expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["vpg", "trpo"])
def test_value_steps_are_on_rows_of_the_whole_rollout_and_report_their_mean(name, monkeypatch):
    algo = ALGOS[name]
    agent, given, losses = make_agent(algo, minibatch_size=8, v_steps=30), [], []
    rollout, value_loss = make_rollout(algo, agent), algo.value_loss

    def noting(val, ret):
        given.append(ret)
        losses.append(value_loss(val, ret))
        return losses[-1]

    monkeypatch.setattr(algo, "value_loss", noting)
    _, all_of_them = targets(algo, copy.deepcopy(agent), rollout)
    _, metrics = learn(algo, agent, rollout)
    rows = (torch.stack(given)[..., None] - all_of_them).abs().argmin(-1)  # [v_steps, minibatch]
    close(torch.stack(given), all_of_them[rows], rtol=1e-4, atol=1e-5)
    assert rows.shape == (30, 8) and all(len(row.unique()) == 8 for row in rows)
    assert len(rows.unique()) == 24
    close(metrics["v_loss"], torch.stack(losses).detach())


@every_algo
def test_the_order_of_environments_does_not_matter(name, monkeypatch):
    draw_alike(monkeypatch.setattr)
    algo, results = ALGOS[name], []
    for order in ([0, 1, 2], [2, 0, 1]):
        agent = make_agent(algo)
        columns = vars(make_rollout(algo, agent))
        rollout = algo.Rollout(**{field: x[:, order] for field, x in columns.items()})
        results.append(learn(algo, agent, rollout)[0])
    close(*results, rtol=1e-3, atol=2e-5)


@every_algo
def test_training_observes_after_it_has_learned_and_before_it_collects_again(name, monkeypatch):
    algo, calls = ALGOS[name], []
    collect = onpolicy_collect(algo).__name__
    for owner, function in ((algo, collect), (algo, "update"), (algo.Agent, "update_stats")):
        monkeypatch.setattr(owner, function, noted(calls, getattr(owner, function)))
    algo.train(config(algo, env="CartPole-v1", total_steps=72))
    assert calls == [collect, "update", "update_stats"] * 3


@pytest.mark.parametrize("name", ["vpg", "trpo"])
def test_values_of_images_are_fitted_on_what_the_encoder_makes_now(name, monkeypatch):
    """Not on features from before the policy's step, which has moved the encoder."""
    algo, seen = ALGOS[name], []
    plain = algo.critic_value_loss

    def look(agent, features, ret):
        if not seen:
            kept = agent.encoder(agent.normalize_obs(rollout.obs).flatten(0, 1))
            seen.extend((row == kept).all(-1).any().item() for row in features)
        return plain(agent, features, ret)

    monkeypatch.setattr(algo, "critic_value_loss", look)
    agent = make_agent(algo, "images", v_steps=1)
    rollout = make_rollout(algo, agent)
    with torch.no_grad():
        before = agent.encoder(agent.normalize_obs(rollout.obs).flatten(0, 1))
    learn(algo, agent, rollout, lr=0.1)
    with torch.no_grad():
        after = agent.encoder(agent.normalize_obs(rollout.obs).flatten(0, 1))
    assert not torch.equal(before, after) and len(seen) > 1 and all(seen)


WITHOUT_ADVANTAGE = {  # parts of the agent that learn from images where no action was better
    "vpg": {"critic"}, "trpo": {"critic"},
    "a2c": {"critic", "encoder"}, "acktr": {"critic", "encoder"}, "ppo": {"critic", "encoder"},
    "ppo_popart": {"critic", "encoder", "num_rollouts", "loc", "square"},
    "ppo_lstm": {"critic", "lstm", "encoder"}, "gail": {"critic", "encoder"},
}


@every_algo
def test_who_learns_from_the_value_loss_alone(name, monkeypatch):
    """With images, the encoder is the policy's in vpg and trpo, and shared in the others."""
    algo = ALGOS[name]
    targets = "recurrent_targets" if name == "ppo_lstm" else "compute_targets"
    plain = getattr(algo, targets)

    def no_advantage(*args):
        val, adv, ret = plain(*args)
        return val, torch.zeros_like(adv), ret

    monkeypatch.setattr(algo, targets, no_advantage)
    agent = make_agent(algo, "images", norm_adv=False, ent_coef=0.0)
    before = copies(agent)
    learn(algo, agent, make_rollout(algo, agent), lr=1e-2)
    assert {each.partition(".")[0] for each in moved(before, agent)} == WITHOUT_ADVANTAGE[name]


@without_memory
@every_kind
def test_a_step_moves_the_parameters_of_its_optimizer_alone(name, kind):
    """Also where the loss depends on others. The loss of an optimizer moves all of its own."""
    algo = ALGOS[name]
    agent = make_agent(algo, kind)
    optimizers = onpolicy_optimizers(algo, agent)
    names = {id(param): each for each, param in agent.named_parameters()}
    obs = agent.normalize_obs(make_rollout(algo, agent).obs).flatten(0, 1)
    if algo is acktr:
        optimizers[0].measure(agent, obs)
    for optimizer in optimizers:
        before = copies(agent)
        features = agent.encoder(obs)
        loss = agent.actor(features).square().sum() + agent.critic(features).square().sum()
        loss = loss + (0 if agent.discrete else agent.log_std.square().sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(1e-2)
        assert moved(before, agent) == {names[id(param)] for param in optimizer.params}


# ---- Whole runs

@every_algo
def test_a_seed_is_a_run(name):
    algo, runs = ALGOS[name], []
    for number, (seed, every) in enumerate([(1, 0), (1, 24), (2, 0)]):
        algo.train(config(algo, env="Hopper-v4", total_steps=72, seed=seed, eval_every=every,
                          env_kwargs='{"max_episode_steps": 9}', run_dir=f"run{number}"))
        runs.append(columns_of(f"run{number}"))
    evaluated = [{k: v for k, v in row.items() if "eval" not in k} for row in runs[1]]
    assert evaluated == runs[0] != runs[2] and len(runs[0]) == 3
    assert runs[1][-1]["eval_ret_mean"]


@every_algo
@pytest.mark.parametrize("eval_every", [48, 72])
def test_evaluations_stand_in_the_report_they_are_due_in(name, eval_every):
    """Also where several rollouts make a report, and where they are not due in every one."""
    algo = ALGOS[name]
    algo.train(config(algo, env="tests.envs:Counter-v0", total_steps=192, report_every=48,
                      eval_every=eval_every, run_dir="run"))
    rows = columns_of("run")
    ends = [0, *(int(row["step"]) for row in rows)]
    assert ends[-1] == 192 and len(rows) == (4 if hasattr(algo.Config, "report_every") else 8)
    for row, begin, end in zip(rows, ends, ends[1:]):
        due = end // eval_every > begin // eval_every or end == 192
        assert bool(row["eval_ret_mean"]) == due, end


@every_algo
def test_a_run_learns_from_every_row_and_reports_every_episode(name, monkeypatch):
    """From the first step to the last, also across the joints of rollouts and of reports."""
    algo, rollouts = ALGOS[name], []
    plain = algo.update

    def keep(*args):
        rollouts.append(next(arg for arg in args if isinstance(arg, algo.Rollout)))
        return plain(*args)

    monkeypatch.setattr(algo, "update", keep)
    algo.train(config(algo, env="tests.envs:Counter-v0", total_steps=96, report_every=48,
                      run_dir="run"))
    assert len(rollouts) == 4
    rows = [script(number, 32)[0] for number in range(3)]
    for i, field in enumerate(["obs", "rew", "next_obs", "terminated", "done"]):
        if field == "rew" and algo is gail:                     # learns from rewards of its own
            continue
        expected = torch.tensor([[row[i] for row in env] for env in rows]).transpose(0, 1)
        assert torch.equal(torch.cat([getattr(rollout, field) for rollout in rollouts]),
                           expected.float()), field
    with open("run/episodes.csv") as file:
        got = [tuple(float(row[key]) for key in ("step", "env", "ep_ret", "ep_len"))
               for row in csv.DictReader(file)]
    assert sorted(got) == sorted((3.0 * (t + 1), *rest) for number in range(3)
                                 for t, *rest in script(number, 32)[1])


@every_algo
def test_every_stream_of_random_numbers_is_one_of_its_own(name, monkeypatch):
    """Of each seed, of each rank, of each part of a run that goes on, and of each environment."""
    algo, drawn, said, told = ALGOS[name], [], [], []
    plain = algo.Agent.__init__

    def bcast(value):
        """What rank 0 says, on rank 1 too."""
        if mpi.rank() > 0:
            return told.pop(0)
        said.append(value)
        return value

    def note(*args):
        drawn.append(torch.initial_seed())
        if mpi.rank() > 0:
            raise InterruptedError  # before it waits for the others
        plain(*args)

    monkeypatch.setattr(algo.Agent, "__init__", note)
    monkeypatch.setattr(mpi, "bcast", bcast)
    run = {"env": "tests.envs:Counter-v0", "run_dir": "run"}
    for settings in ({"total_steps": 24}, {"total_steps": 48, "resume": True},
                     {"total_steps": 24, "seed": 2, "run_dir": "other"}):
        algo.train(algo.Config(**run | settings) if "resume" in settings
                   else config(algo, **run | settings))
    assert drawn[0] == drawn[1] != drawn[2]
    monkeypatch.setattr(mpi, "_rank", 1)
    told.extend(said)
    with pytest.raises(InterruptedError):
        algo.train(config(algo, **run | {"run_dir": "of rank 1"}))
    assert len(set(drawn)) == 3
    seeds = [env.seeds for env in Counter.made[:9]]
    assert all(first is not None and set(rest) <= {None} for first, *rest in seeds)
    assert len({first for first, *_ in seeds}) == 9


@every_algo
def test_resume_goes_on_with_all_that_was_saved(name, monkeypatch):
    """Parameters, statistics and what the optimizers remember, as they were after the last step."""
    algo, ended, begun = ALGOS[name], [], []
    plain = algo.update

    def note(kept, before):
        def call(agent, *rest):
            own = [arg.state_dict() for arg in rest if hasattr(arg, "state_dict")]
            known = [agent.state_dict(), own]
            if before:
                kept.append(copy.deepcopy(known))
            result = plain(agent, *rest)
            if not before:
                kept.append(copy.deepcopy(known))
            return result
        return call

    run = {"env": "CartPole-v1", "run_dir": "run"}
    monkeypatch.setattr(algo, "update", note(ended, before=False))
    agent = algo.train(config(algo, total_steps=48, **run))
    monkeypatch.setattr(algo, "update", note(begun, before=True))
    algo.train(algo.Config(**run, total_steps=96, resume=True))
    assert len(ended) == len(begun) == 2 and len(columns_of("run")) == 4
    known = {each: x for each, x in begun[0][0].items() if not each.startswith("disc.")}
    assert same(known, {each: agent.state_dict()[each] for each in known})  # D learns first
    learned, remembered = ended[-1][1], begun[0][1]
    assert same(learned, remembered)
    memory = "M" if algo is acktr else "square"
    assert len(learned) == (2 if algo is vpg else 1) and all(x[memory].any() for x in learned)


PROBED = {  # settings with which each learns the probes in a second or two
    "vpg": {"lr": 3e-2, "v_lr": 1e-2, "v_steps": 10, "rollout_steps": 128, "minibatch_size": 128,
            "total_steps": 5120, "std_init": 0.3},
    "a2c": {"lr": 1e-2, "rollout_steps": 64, "rmsprop": "torch", "rmsprop_eps": 1e-3,
            "total_steps": 10240, "report_every": 2560},
    "acktr": {"rollout_steps": 128, "max_kl": 0.003, "v_max_kl": 0.03, "total_steps": 10240,
              "report_every": 2560},
    "trpo": {"max_kl": 0.05, "v_lr": 1e-2, "v_steps": 20, "rollout_steps": 256,
             "minibatch_size": 256, "total_steps": 6144},
    "ppo_popart": {},
}


# The late reward needs values and their discount, the policy that sees needs all the rest.
@pytest.mark.slow
@pytest.mark.parametrize("name", PROBED)
@pytest.mark.parametrize("case,box", [(probe.CASES[2], False), (probe.CASES[4], False),
                                      (probe.CASES[4], True)], ids=lambda x: getattr(x, "env", x))
def test_probe(name, case, box):
    rows = probe.probe(ALGOS[name], case, box, **PROBED[name])
    assert probe.passed(rows), f"look at {case.hint}: {rows}"


# ---- The ladder

@every_kind
@pytest.mark.parametrize("optimizer", [mpi.Adam, Descent])
def test_ppo_of_one_epoch_one_minibatch_and_no_clipping_is_a2c(kind, optimizer):
    """At the first step the ratio is 1, so that the two losses have one gradient."""
    shared = {"ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5, "lam": 0.9}
    results = []
    for algo, own in ((a2c, {}), (ppo, {"clip_ratio": 1e9, "norm_adv": False})):
        agent = make_agent(algo, kind, **shared, **own)
        start = parameters(agent)
        results.append(learn(algo, agent, make_rollout(algo, agent), optimizer, lr=1e-2))
    (ours, metrics), (theirs, expected) = results
    assert (ours - start).abs().max() > 1e-4
    close(ours, theirs, rtol=1e-4, atol=5e-5 if optimizer is mpi.Adam else 1e-6)
    for key in ("v_loss", "entropy", "explained_variance"):
        close(metrics[key], expected[key].squeeze(), rtol=1e-4)
    close(metrics["grad_norm"], expected["grad_norm"][0], rtol=1e-4)


@every_kind
def test_vpg_and_a2c_have_one_policy_gradient(kind):
    """Where V counts nothing, and nor does the entropy."""
    shared = {"lam": 0.9, "vf_coef": 0.0, "ent_coef": 0.0, "max_grad_norm": 0.0, "v_steps": 1}
    steps = []
    for algo in (vpg, a2c):
        agent = make_agent(algo, kind, **shared)
        before = copies(agent)
        learn(algo, agent, make_rollout(algo, agent), Descent, lr=1.0)
        policy = [each for each in before if not each.startswith("critic")]
        steps.append(torch.cat([(agent.state_dict()[each] - before[each]).flatten()
                                for each in policy]))
    assert steps[0].abs().max() > 1e-3
    close(steps[0], steps[1], rtol=1e-4, atol=1e-6)


# ---- Other processes

@pytest.mark.parametrize("name", ["ppo", "ppo_popart", "gail", "vpg", "trpo"])
def test_a_minibatch_is_of_all_ranks(name, monkeypatch):
    """Each takes its share: what a step learns from does not grow with their number."""
    algo, taken = ALGOS[name], []
    has_minibatches = hasattr(algo, "Minibatch")
    loss = "ppo_loss" if has_minibatches else "critic_value_loss"
    loss = "popart_loss" if algo is ppo_popart else loss
    plain = getattr(algo, loss)

    def note(agent, first, *rest):
        taken.append(len(first.obs if has_minibatches else first))
        return plain(agent, first, *rest)

    monkeypatch.setattr(algo, loss, note)
    agent = make_agent(algo, minibatch_size=8, num_envs=4, rollout_steps=64)
    columns = vars(make_rollout(algo, agent))
    share = algo.Rollout(**{field: x[:, :1] for field, x in columns.items()})
    monkeypatch.setattr(mpi, "_size", 4)
    monkeypatch.setattr(mpi, "average", lambda tensor: tensor)    # the others are as this one
    monkeypatch.setattr(mpi, "gather", lambda value: 4 * [value])
    learn(algo, agent, share)
    assert set(taken) == {2}
    assert len(taken) == (8 if has_minibatches else 3)


@pytest.mark.parametrize("name", ["vpg", "a2c", "acktr", "ppo", "ppo_popart", "ppo_lstm", "gail"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_learning_rate_is_a_function_of_the_steps_of_all_ranks(name, size, monkeypatch):
    """So that a run of two processes anneals as one of one process."""
    algo, given = ALGOS[name], []
    monkeypatch.setattr(algo, "update", lambda *args: given.append(args[-1]) or {})
    monkeypatch.setattr(mpi, "_size", size)
    monkeypatch.setattr(run, "launch", lambda cfg: None)          # the others are not there
    for function, alone in (("average", lambda tensor: tensor), ("gather", lambda value: [value]),
                            ("bcast", lambda value: value), ("barrier", lambda: None)):
        monkeypatch.setattr(mpi, function, alone)
    algo.train(config(algo, env="CartPole-v1", num_envs=4, rollout_steps=8, minibatch_size=8,
                      minibatch_envs=4, total_steps=32, lr=0.1, run_dir="run"))
    close(given, [0.1, 0.075, 0.05, 0.025])


def learn_share(name, folder):
    """Two learning phases with this rank's environments, all of them if it is alone."""
    algo = ALGOS[name]
    if algo is acktr:
        plain = acktr.sampled_nll
        draw_alike(setattr)
    sizes = {"num_envs": 4, "rollout_steps": 64, "minibatch_size": 64, "minibatch_envs": 4}
    agent = make_agent(algo, **sizes)
    optimizer = onpolicy_optimizers(algo, agent)
    for seed in range(2):
        columns = vars(make_rollout(algo, make_agent(algo, **sizes), seed))
        columns["rew"] *= torch.tensor([1.0, 2.0, 5.0, 9.0])  # a rank alone would be misled
        columns["obs"] += torch.tensor([0.0, 0.1, 0.5, 1.0]).view(4, 1)
        envs = torch.arange(4).chunk(mpi.size())[mpi.rank()]
        rollout = algo.Rollout(**{field: x[:, envs] for field, x in columns.items()})
        flat, metrics = learn_with(algo, agent, optimizer, rollout)
        agent.update_stats(rollout)
    if algo is acktr:
        acktr.sampled_nll = plain
    names = ("kl", "grad_norm", "policy_grad_norm", "critic_grad_norm", "improvement",
             "improvement_expected", "backtracks", "cg_residual", "step_size")
    result = {"flat": flat, **{k: torch.as_tensor(metrics[k]) for k in names if k in metrics}}
    torch.save(result, Path(folder, f"{name}{mpi.rank()}of{mpi.size()}.pt"))
    return result


KL_LIMITS = (0.2, 0.4, 0.6, 0.8)                # of the way between two ranks' KLs


def stop_together(folder):
    """PPO's update with `target_kl` between what the two ranks alone would measure."""
    sizes = {"num_envs": 4, "rollout_steps": 64, "minibatch_size": 32, "epochs": 4}
    results = []
    own = []                                                    # KL of this rank's samples

    def update(target_kl):
        agent = make_agent(ppo, target_kl=target_kl, **sizes)
        columns = vars(make_rollout(ppo, agent))
        columns["rew"] *= torch.tensor([1.0, 2.0, 5.0, 9.0])
        columns["obs"] *= torch.tensor([1.0, 1.0, 4.0, 4.0]).view(4, 1)
        envs = torch.arange(4).chunk(mpi.size())[mpi.rank()]
        rollout = ppo.Rollout(**{field: x[:, envs] for field, x in columns.items()})
        own.clear()
        return learn(ppo, agent, rollout, lr=1e-2)

    plain = ppo.approx_kl
    ppo.approx_kl = lambda *args: own.append(plain(*args).mean()) or plain(*args)
    try:
        update(1e9)
        first = mpi.gather(float(own[0]))                       # after the first epoch
        for share in KL_LIMITS:
            limit = first[0] + share * (first[-1] - first[0])
            flat, metrics = update(limit)
            results.append({"flat": flat, "epochs": metrics["epochs"], "kl": metrics["kl"],
                            "limit": limit, "first": first})
    finally:
        ppo.approx_kl = plain
    torch.save(results, Path(folder, f"stop{mpi.rank()}of{mpi.size()}.pt"))


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    """Two processes that learn together, by one algorithm after the other."""
    folder = tmp_path_factory.mktemp("shares")
    two_ranks(__file__, folder)
    return folder


@every_algo
def test_two_ranks_equal_one(name, shares, tmp_path):
    one = learn_share(name, tmp_path)
    first, second = (torch.load(shares / f"{name}{k}of2.pt") for k in (0, 1))
    assert torch.equal(first["flat"], second["flat"])
    for key in one:
        close(first[key], one[key], rtol=2e-3, atol=1e-4 if name == "trpo" else 1e-5)


def test_target_kl_stops_all_ranks_after_the_same_epoch(shares):
    """Their own KLs lie on both sides of the limit. What counts is the mean over all samples."""
    first, second = (torch.load(shares / f"stop{k}of2.pt") for k in (0, 1))
    for one, two in zip(first, second, strict=True):
        low, high = sorted(one["first"])
        assert low < one["limit"] < high
        assert one["epochs"] == two["epochs"] and one["kl"] == two["kl"]
        assert torch.equal(one["flat"], two["flat"])
        assert (one["epochs"] == 1) == (one["limit"] < (low + high) / 2)
    assert {one["epochs"] == 1 for one in first} == {True, False}


if __name__ == "__main__":
    for each in ALGOS:
        learn_share(each, sys.argv[1])
    stop_together(sys.argv[1])
