"""What is collected and evaluated, row by row, on scripted environments of known numbers."""
import copy
import functools
import itertools
import json
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal

from algos import ppo
from tests import envs as scripted
from tests.envs import HIGH, LOW, Counter
from tests.helpers import (
    bare,
    rows,
    script,
)
from utils import mpi
from utils.envs import evaluate, make_envs

counters = pytest.mark.parametrize("num_envs", [1, 3])
# Two are cut where an episode of environment 0 ends, one has a single step.
SIZES = 5, 1, 6, 9, 7


def config(env="tests.envs:Counter-v0", num_envs=3, env_kwargs=None, **settings):
    """A short run: four updates from six steps of each environment."""
    return ppo.Config(**{
        "env": env, "env_kwargs": json.dumps(env_kwargs or {}), "num_envs": num_envs,
        "total_steps": 24 * num_envs, "rollout_steps": 6 * num_envs,
        "minibatch_size": 6 * num_envs, "epochs": 2, "hidden": (8,),
        "std_init": 1.0, "device": "cpu", **settings})


def start(*args, **kwargs):
    """Environments, an agent, and first observations from a fixed seed."""
    cfg = config(*args, **kwargs)
    torch.manual_seed(0)
    envs = make_envs(cfg, cfg.num_envs)
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, cfg)
    return agent, envs, envs.reset(seed=7)[0]


def collect(agent, envs, obs, size):
    """A rollout, the next obs, and the episodes that ended in it: (t, env, ep_ret, ep_len)."""
    rollout, obs = ppo.collect(agent, envs, obs, size)
    ended = [(size - 1 - ago, *rest) for ago, *rest in envs.pop_episodes()]
    assert not envs.pop_episodes()                              # each is told once
    return rollout, obs, ended


def rollouts_of(agent, envs, obs, sizes=SIZES):
    """Rollouts one after the other, and the ended episodes of each."""
    rollouts, episodes = [], []
    for size in sizes:
        rollout, obs, ended = collect(agent, envs, obs, size)
        rollouts.append(rollout)
        episodes.append(ended)
    return rollouts, episodes, obs


def column(rollouts, name):
    return torch.cat([getattr(rollout, name) for rollout in rollouts])


def spy(monkeypatch, module, name):
    """Have module.name note each call: (args, result)."""
    calls, function = [], getattr(module, name)

    @functools.wraps(function)
    def noting(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append((args, result))
        return result

    monkeypatch.setattr(module, name, noting)
    return calls


# ---- The script itself

def test_counter_by_hand():
    env = Counter()
    first, _ = env.reset()
    seen = []
    for _ in range(5):
        obs, *ends, _ = env.step(np.zeros(2))
        assert obs is first                                     # the trap: one array for all
        seen.append((*obs.tolist(), *ends))
        if any(ends[1:]):
            env.reset()
    assert seen == [(0, 0, 1, -0.5, False, False), (0, 0, 2, -1.5, False, False),
                    (0, 0, 3, -2.5, True, False),
                    (0, 1, 1, 9.5, False, False), (0, 1, 2, 8.5, False, False)]
    assert {scripted.end(0, episode) for episode in range(3)} == {"terminated", "truncated", "both"}
    assert [scripted.length(2, episode) for episode in range(4)] == [1, 5, 2, 1]


# ---- Rollouts

@counters
@pytest.mark.parametrize("obs", ["vector", "image"])
@pytest.mark.parametrize("act", ["box", "discrete"])
def test_every_row_is_as_scripted(num_envs, obs, act):
    agent, envs, first = start(num_envs=num_envs, env_kwargs={"obs": obs, "act": act})
    rollouts, _, last = rollouts_of(agent, envs, first)
    steps = sum(SIZES)
    assert [len(rollout.obs) for rollout in rollouts] == list(SIZES)
    rows = [script(number, steps + 1)[0] for number in range(num_envs)]
    for i, name in enumerate(["obs", "rew", "next_obs", "terminated", "done"]):
        expected = torch.tensor([[row[i] for row in env[:steps]] for env in rows]).transpose(0, 1)
        got = column(rollouts, name)
        if name.endswith("obs"):
            assert got.dtype == (torch.uint8 if obs == "image" else torch.float32)
        if name.endswith("obs") and obs == "image":             # the colours say it, in every pixel
            assert got.shape == (steps, num_envs, *scripted.IMAGE)
            expected = expected[:, :, None, None].expand_as(got)
        assert got.shape == expected.shape and torch.equal(got.float(), expected.float()), name
    ends = [(row[3], row[4]) for env in rows for row in env[:steps]]
    assert {(1, 1), (0, 1), (0, 0)} == set(ends)
    goes_on = [env[steps][0] for env in rows]                   # what is handed to the next rollout
    assert np.array_equal(last if obs == "vector" else last[:, 20, 20], goes_on)


@counters
@pytest.mark.parametrize("act", ["box", "discrete"])
def test_the_sampled_action_is_stored_and_the_environment_gets_it_in_its_box(
        num_envs, act, monkeypatch):
    calls = spy(monkeypatch, ppo.Agent, "act")
    agent, envs, first = start(num_envs=num_envs, env_kwargs={"act": act})
    rollouts, _, _ = rollouts_of(agent, envs, first)
    stored, sampled = column(rollouts, "act"), torch.stack([result for _, result in calls])
    assert torch.equal(stored, sampled)
    if num_envs > 1:                                            # each environment draws its own
        assert (stored[:, 0] - stored[:, 1]).abs().float().mean() > 0.3
    sent = np.stack([env.acts for env in Counter.made], axis=1)
    if act == "discrete":
        assert stored.dtype == torch.int64 and stored.shape == (sum(SIZES), num_envs)
        assert np.array_equal(sent, stored) and len(set(sent.flatten())) == 5
        return
    assert stored.dtype == torch.float32 and stored.shape == (sum(SIZES), num_envs, 2)
    assert (stored > 1).any(dim=(0, 1)).all() and (stored < -1).any(dim=(0, 1)).all()
    half = (HIGH - LOW) / 2
    expected = np.tanh(stored.numpy()) * half + (LOW + half)
    np.testing.assert_allclose(sent, expected, atol=1e-6)
    assert (sent >= LOW).all() and (sent <= HIGH).all()


@counters
def test_ended_episodes(num_envs):
    """Lengths 3, 7 and 1, 5, 2 side by side, over the cuts between rollouts."""
    agent, envs, first = start(num_envs=num_envs)
    _, episodes, _ = rollouts_of(agent, envs, first)
    starts = np.cumsum((0, *SIZES))
    got = [(start + t, *rest) for start, ended in zip(starts, episodes) for t, *rest in ended]
    expected = [end for i in range(num_envs) for end in script(i, sum(SIZES))[1]]
    assert [tuple(map(float, end)) for end in got] == sorted(expected)
    for size, ended in zip(SIZES, episodes):
        assert all(0 <= t < size for t, *_ in ended)


@pytest.mark.parametrize("act", ["box", "discrete"])
def test_update_starts_from_the_probabilities_of_acting(act, monkeypatch):
    """Through `train`, so over updates of parameters and statistics, by torch's distributions."""
    acted, updates, plain_act, plain_loss = [], [], ppo.Agent.act, ppo.ppo_loss

    def act_and_note(agent, obs, deterministic=False):
        outs = []
        hook = agent.actor.register_forward_hook(lambda module, args, out: outs.append(out))
        sampled = plain_act(agent, obs, deterministic)
        hook.remove()
        std = None if agent.discrete else agent.log_std.exp()
        policy = Categorical(logits=outs[0]) if agent.discrete else Normal(outs[0], std)
        logp = policy.log_prob(sampled)
        acted.append(logp.detach() if agent.discrete else logp.detach().sum(-1))
        return sampled

    def loss_and_note(agent, minibatch):
        obs, act, logp_old = minibatch.obs, minibatch.act, minibatch.logp_old
        if acted:                                               # the first since the rollout
            with torch.no_grad():
                now = ppo.log_prob(agent.actor(agent.encoder(obs)), agent.log_std, act)
            updates.append((torch.cat(acted), logp_old, now, act))
            acted.clear()
        else:                                                   # of the second epoch
            assert torch.equal(logp_old.sort()[0], updates[-1][1].sort()[0])
        return plain_loss(agent, minibatch)

    monkeypatch.setattr(ppo.Agent, "act", act_and_note)
    monkeypatch.setattr(ppo, "ppo_loss", loss_and_note)
    ppo.train(config(env_kwargs={"act": act}, lr=0.1))
    assert len(updates) == 4
    for logp, logp_old, now, acts in updates:
        assert len(logp) == 18 and logp.std() > 0.001
        # The same ones, in the order of the minibatch, and belonging to its rows: the ratio is 1.
        torch.testing.assert_close(logp_old.sort()[0], logp.sort()[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logp_old, now, rtol=1e-4, atol=1e-5)
        assert act == "discrete" or (acts.abs() > 1).any()


@pytest.mark.parametrize("fault,at", [("obs nan", 2), ("obs nan", 3), ("obs inf", 5),
                                      ("rew nan", 3), ("rew -inf", 4)])
def test_what_is_no_number_is_not_collected(fault, at):
    """Nor if it comes with the end of an episode (3), after which the next one's start is fine."""
    agent, envs, first = start("tests.envs:Faulty-v0", 1, {"fault": fault, "at": at})
    with pytest.raises(FloatingPointError, match=f"environment .*vector step {at} "):
        ppo.collect(agent, envs, first, 6)


# ---- The true next observation

@pytest.mark.parametrize("form", ["objects", "dense"])
def test_true_next_obs_in_both_formats(form):
    next_obs, done = np.float32([[0, 1], [2, 3], [4, 5]]), np.array([True, False, True])
    final_obs = np.float32([[10, 11], [99, 99], [14, 15]])      # 99: of one that goes on
    if form == "objects":
        final_obs = np.array([final_obs[0], None, final_obs[2], None], dtype=object)[:3]
    infos, before = {"final_obs": final_obs, "_final_obs": done}, next_obs.copy()
    results = next_obs, np.zeros(3), done, np.zeros(3, bool), infos
    agent = SimpleNamespace(act=lambda obs: torch.zeros(3), env_act=lambda act: act)
    envs = SimpleNamespace(step=lambda act: results)
    rollout, obs = bare(ppo).collect(agent, envs, np.zeros((3, 2), np.float32), 1)
    assert rollout.next_obs[0].tolist() == [[10, 11], [2, 3], [14, 15]]
    assert np.array_equal(obs, before)                          # it goes on from there


class Kept(gym.vector.VectorWrapper):
    """Keeps a copy of all that passes, as it was at that moment."""

    def __init__(self, envs):
        super().__init__(envs)
        self.steps = []
        self.pop_episodes = envs.pop_episodes

    def step(self, actions):
        results = self.env.step(actions)
        self.steps.append(copy.deepcopy(results))
        return results


def test_true_next_obs_of_the_atari_vector():
    """Four frames are stacked, so the true successor begins with the last three of before."""
    pytest.importorskip("ale_py")
    agent, envs, first = start("ALE/Pong-v5", 2, {"max_num_frames_per_episode": 60})
    envs = Kept(envs)
    rollouts, episodes, last = rollouts_of(agent, envs, first, (20, 25))
    obs, next_obs, done = (column(rollouts, name) for name in ("obs", "next_obs", "done"))
    assert obs.dtype == torch.uint8 and obs.shape == (45, 2, 4, 84, 84)
    assert np.array_equal(done, [step[2] | step[3] for step in envs.steps])
    assert 4 <= done.sum() == sum(map(len, episodes)) and not column(rollouts, "terminated").any()
    assert torch.equal(next_obs[:, :, :3], obs[:, :, 1:])
    # Nothing was overwritten later on: these are the frames that came.
    assert np.array_equal(obs, [first, *(step[0] for step in envs.steps[:-1])])
    assert np.array_equal(last, envs.steps[-1][0])
    goes_on = obs[1:] == next_obs[:-1]
    assert goes_on[done[:-1] == 0].all()
    assert not goes_on[done[:-1] == 1].flatten(1).all(1).any()


def test_atari_rewards_are_clipped_and_scores_are_not():
    """A pellet is worth 10 points: 1 to the learner."""
    pytest.importorskip("ale_py")
    agent, envs, first = start("ALE/MsPacman-v5", 2, {"max_num_frames_per_episode": 440}, seed=3)
    rollout, _, episodes = collect(agent, envs, first, 110)
    assert set(rollout.rew.unique().tolist()) == {0, 1} and len(episodes) == 2
    for t, env, ep_ret, ep_len in episodes:
        assert ep_ret >= 10 * rollout.rew[:t + 1, env].sum() > 0 and ep_ret % 10 == 0
    score, _ = evaluate(agent, agent.cfg, 2, seed=1)
    assert (score % 10 == 0).all() and score.max() >= 10        # the score again


def test_a_run_on_atari_reports_scores():
    """Through `train`, whose environments must tell of their episodes."""
    pytest.importorskip("ale_py")
    ppo.train(config("ALE/MsPacman-v5", 2, {"max_num_frames_per_episode": 440}, total_steps=220,
                     rollout_steps=220, minibatch_size=220, epochs=1, run_dir="run"))
    scores = [float(row["ep_ret"]) for row in rows("run", "episodes.csv")]
    assert len(scores) == 2 and max(scores) >= 10 and all(score % 10 == 0 for score in scores)


@pytest.mark.parametrize("name,limit", [("CartPole-v1", 20), ("HalfCheetah-v4", 7),
                                        ("Hopper-v4", 15)])
def test_a_vector_is_as_many_plain_environments(name, limit):
    """The same actions in environments made by gym.make, which know of no vector and no wrapper."""
    agent, envs, obs = start(name, 3, {"max_episode_steps": limit})
    rollout, _, episodes = collect(agent, envs, obs, 3 * limit)
    sent = [agent.env_act(act) for act in rollout.act]
    ended = []
    for i in range(3):
        with gym.make(name, max_episode_steps=limit) as env:
            obs, ep_ret, ep_len = env.reset(seed=7 + i)[0], 0.0, 0
            for t, act in enumerate(sent):
                next_obs, rew, terminated, truncated, _ = env.step(act[i])
                expected = (obs, rew, next_obs, terminated, terminated or truncated)
                for key, value in zip(("obs", "rew", "next_obs", "terminated", "done"), expected):
                    got = getattr(rollout, key)[t, i].numpy()
                    assert np.array_equal(got, np.float32(value)), (key, t, i)
                ep_ret, ep_len, obs = ep_ret + rew, ep_len + 1, next_obs
                if expected[-1]:
                    ended.append((t, i, ep_ret, ep_len))
                    obs, ep_ret, ep_len = env.reset()[0], 0.0, 0
    assert [end[:2] for end in episodes] == [end[:2] for end in sorted(ended)]
    np.testing.assert_allclose(np.float64(episodes), sorted(ended), rtol=1e-6)
    cut = rollout.done.bool() & ~rollout.terminated.bool()
    assert cut.any() and (name == "HalfCheetah-v4" or rollout.terminated.any())


# ---- Seeds

def test_no_two_environments_share_a_seed_and_none_gets_it_twice():
    """Those of training and of evaluation, in runs of three seeds that follow each other."""
    seeds = []
    for seed in (1, 2, 3):
        Counter.made.clear()
        cfg = config(num_envs=6, seed=seed, eval_every=72, run_dir=f"run{seed}")
        ppo.train(cfg)
        trained, evaluated = Counter.made[:6], Counter.made[6:16]
        assert len(Counter.made) == 6 + 2 * 10
        assert [env.seeds[0] for env in Counter.made[16:]] == [env.seeds[0] for env in evaluated]
        for env in trained + evaluated:
            assert env.seeds[0] is not None and set(env.seeds[1:]) <= {None}
            seeds.append(env.seeds[0])
        assert all(len(env.seeds) > 3 for env in trained[::3])  # and resets it saw many
    assert len(set(seeds)) == len(seeds) == 3 * 16


def test_every_episode_begins_elsewhere(monkeypatch):
    """In all environments of runs of two seeds; and a run that is started again is the same."""
    begun, acts, calls = [], [], spy(monkeypatch, ppo, "collect")
    for number, seed in enumerate((1, 2, 1)):
        calls.clear()
        ppo.train(config("CartPole-v1", 4, {"max_episode_steps": 3}, seed=seed,
                         run_dir=f"run{number}"))
        starts = [args[2] for args, _ in calls[:1]]
        for _, (rollout, last) in calls:
            following = torch.cat([rollout.obs[1:], torch.as_tensor(last)[None]])
            starts.append(following[rollout.done.bool()].numpy())
        begun.append([tuple(obs) for obs in np.concatenate(starts).tolist()])
        acts.append(column([rollout for _, (rollout, _) in calls], "act").tolist())
    assert all(len(one) == 4 + 32 for one in begun)             # 24 steps of each of 4
    assert len(set(begun[0] + begun[1])) == 2 * 36
    assert begun[2] == begun[0] and acts[2] == acts[0] != acts[1]


# ---- Evaluation

def first_episodes(numbers):
    """Returns and lengths of the first episode of each of these environments."""
    ended = [script(number, 8)[1][0] for number in numbers]
    return [ep_ret for _, _, ep_ret, _ in ended], [ep_len for *_, ep_len in ended]


@pytest.mark.parametrize("episodes", [1, 3, 8])
def test_evaluate_takes_one_episode_of_each_environment(episodes):
    """Short ones, of 1 and of 3 steps, do not crowd out those of 7: they count once."""
    agent, envs, _ = start(num_envs=2)                          # environments 0 and 1
    returns, lengths = evaluate(agent, agent.cfg, episodes, seed=1)
    expected = first_episodes(range(2, 2 + episodes))
    assert (returns.tolist(), lengths.tolist()) == expected
    assert len(Counter.made) == 2 + episodes                    # in environments of its own
    assert all(not env.acts and len(env.seeds) == 1 for env in Counter.made[:2])


def test_evaluate_refuses_a_reward_that_is_no_number():
    agent, _, _ = start("tests.envs:Faulty-v0", 2, {"fault": "rew nan", "at": 2})
    with pytest.raises(FloatingPointError, match="vector step 2 "):
        evaluate(agent, agent.cfg, 3, seed=1)


@pytest.mark.parametrize("act", ["box", "discrete"])
def test_evaluate_takes_the_best_action(act):
    """Of the observation at hand, and for each environment its own."""
    agent, _, _ = start(num_envs=2, env_kwargs={"act": act}, norm_obs=False)
    with torch.no_grad():                                       # so that it looks at what it sees
        agent.actor[-1].weight *= 100
    evaluate(agent, agent.cfg, 3, seed=1)
    sent = []
    for env in Counter.made[2:]:
        seen = np.float32([row[0] for row in script(env.number, len(env.acts))[0]])
        expected = agent.env_act(agent.act(seen, deterministic=True))
        np.testing.assert_allclose(env.acts, expected, atol=1e-5)
        sent += [tuple(np.atleast_1d(act)) for act in env.acts]
    assert len(set(sent)) > 1


@pytest.mark.parametrize("name", ["CartPole-v1", "Hopper-v4"])
def test_evaluate_repeats_and_changes_nothing(name):
    agent, envs, obs = start(name, num_envs=4)
    rollout, obs = ppo.collect(agent, envs, obs, 6)
    agent.update_stats(rollout)                                      # statistics that could move
    before = copy.deepcopy(agent.state_dict()), torch.get_rng_state(), np.random.get_state()[1]
    returns = [evaluate(agent, agent.cfg, 5, seed)[0] for seed in (1, 1, 2)]
    assert len(set(returns[0])) > 1                             # 5 environments, not 5 times one
    assert np.array_equal(returns[0], returns[1]) and not np.array_equal(returns[0], returns[2])
    after = agent.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before[0].items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.array_equal(np.random.get_state()[1], before[2])
    # The environments of training stand where they stood.
    first = envs.step(agent.env_act(rollout.act[0]))[0]
    _, envs, _ = start(name, num_envs=4)
    for act in itertools.chain(rollout.act, rollout.act[:1]):
        second = envs.step(agent.env_act(act))[0]
    assert np.array_equal(first, second)


def test_evaluate_sees_by_the_statistics_of_training():
    """Observations of another scale and place: an agent that saw them raw would act otherwise."""
    agent, envs, obs = start(num_envs=3)
    agent.update_stats(rollouts_of(agent, envs, obs)[0][-1])
    with torch.no_grad():
        agent.actor[-1].weight *= 100
    Counter.made.clear()
    evaluate(agent, agent.cfg, 3, seed=1)
    for env in Counter.made:
        seen = np.float32([row[0] for row in script(env.number, len(env.acts))[0]])
        stats = agent.obs_stats
        normal = (seen - stats.mean.numpy()) / np.sqrt(stats.var.numpy() + 1e-8)
        out = agent.actor(torch.as_tensor(normal.clip(-10, 10), dtype=torch.float32))
        np.testing.assert_allclose(env.acts, agent.env_act(out.detach()), atol=1e-4)


def test_seeds_of_ranks_differ(monkeypatch):
    """Each rank's environments are its own; rank 0 alone evaluates."""
    seeds = []
    for rank in range(4):
        monkeypatch.setattr(mpi, "_rank", rank)
        seeds.append(mpi.seed(1, 1))
    assert len(set(seeds)) == 4
