"""What every file of algos/ keeps, whatever it learns by. The rows of tests/registry.py say which.

Expectations come from the scripts of tests/envs.py, from NumPy, or from a second run of the same
code in which one thing differs. Run as a program, this file is one of two processes that learn
together.
"""
import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from hypothesis import HealthCheck, given, settings as how, strategies as st
from jaxtyping import TypeCheckError

from diagnose import probe
from tests import helpers
from tests.envs import HIGH, LOW, Counter
from tests.helpers import assert_same_run, mpiexec, refused, rows, run, same, script
from tests.house.tree import tracked
from tests.onpolicy import parameters
from tests.registry import ALGOS, ENDS, config, module
from tests.toy import Stop
from utils import mpi
from utils.envs import make_envs
from utils.errors import UsageError
from utils.evaluate import evaluate
from utils.nets import ImageEncoder
from utils.optim import Optimizer
from utils.play import Play, load_agent, main as play
from utils.run import Run, RunConfig
from utils.run.launch import clean_env
from utils.run.checkpoint import to_plain


def kinds(applies=lambda name: True):
    """Parametrise by algorithm and kind of environment."""
    return pytest.mark.parametrize("name,kind", [
        (name, kind) for name, row in ALGOS.items() if applies(name) for kind in row.takes.split()])


def has(name, setting):
    return setting in [each.name for each in dataclasses.fields(module(name).Config)]


def steps_a_script(name):
    return has(name, "num_envs") and "text" not in ALGOS[name].takes


every_algo = pytest.mark.parametrize("name", ALGOS)
divided_algo = pytest.mark.parametrize("name", [name for name in ALGOS if ALGOS[name].procs])
every_kind = kinds()
SHARED = {each.name for each in dataclasses.fields(RunConfig)} | {"total_steps"}
SIGNED = {"v_min", "v_max"}
DRAWS = "rand", "randn", "randn_like", "randint", "randperm"


def test_every_file_has_a_row_that_names_its_parent():
    """Which is the file that its docstring compares it with, so drift from it is seen."""
    assert set(ALGOS) == {path.stem for path in tracked("algos/[a-z]*.py")}
    for name, row in ALGOS.items():
        doc = module(name).__doc__
        assert not row.parent or f"diff algos/{row.parent}.py algos/{name}.py" in doc, name


# ---- A run, watched

def watch(name, cfg):
    """Train. Return all that was learned from, and what it did."""
    algo, state, phases, draws, batches = module(name), {}, [], [], []
    start, names = Run.start, ALGOS[name].learns

    def starting(run, agent, **rest):
        state.update(agent=agent, **rest)
        return start(run, agent, **rest)

    def learning(function):
        def learn(*args):
            given = inspect.signature(function).bind(*args).arguments
            own = {key: name for key, x in given.items() for name, y in state.items() if x is y}
            data = {key: copy.deepcopy(x) for key, x in given.items() if key not in own}
            before, rng = snapshot(state), torch.get_rng_state()
            batches.clear()
            result = function(*args)
            metrics = result[1] if isinstance(result, tuple) else result
            steps = len(Counter.made[0].acts) if Counter.made else 0
            phases.append(SimpleNamespace(                      # a call of a function that learns
                function=function.__name__, args=data,          # copies of its data, by name
                own=own,                                        # what it got -> what the run saves
                before=before, after=snapshot(state),           # name of an object -> state dict
                rng=rng, metrics=metrics, steps=steps,          # of each environment, before it
                batches=list(batches)))                         # (loss, its first tensor) of each
            return result
        return learn

    def losing(loss_name, loss):
        def call(*args, **kwargs):
            batch = args[1 if isinstance(args[0], torch.nn.Module) else 0]  # there may be no agent
            if torch.is_grad_enabled():
                first = batch
                while not isinstance(first, torch.Tensor):      # ppo_lstm's holds a sequence
                    first = [*vars(first).values()][0]
                batches.append((loss_name, first.detach().clone()))
            return loss(*args, **kwargs)
        return call

    def drawing(function):
        def draw(*args, **kwargs):
            draws.append((function.__name__, function(*args, **kwargs)))
            return draws[-1][1]
        return draw

    Counter.made.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "start", starting)
        for each in names:
            patch.setattr(algo, each, learning(getattr(algo, each)))
        for each in [each for each in vars(algo) if each.endswith("_loss")]:
            patch.setattr(algo, each, losing(each, getattr(algo, each)))
        for each in DRAWS:
            patch.setattr(torch, each, drawing(getattr(torch, each)))
        agent = algo.train(cfg)
    acts = [np.array(env.acts) for env in Counter.made[:getattr(cfg, "num_envs", 0)]]
    return SimpleNamespace(
        cfg=cfg, agent=agent, state=state, phases=phases,       # state: what the run saves
        updates=[phase for phase in phases if phase.function == "update"],
        draws=draws, acts=acts,                                 # (function, numbers); of each env
        episodes=rows(cfg.run_dir, "episodes.csv"), rows=rows(cfg.run_dir))


def snapshot(state):
    return {key: copy.deepcopy(x.state_dict()) for key, x in state.items()
            if not hasattr(x, "sample")}                        # buffers are compared elsewhere


WATCHED = {}


@pytest.fixture
def watched(name, kind, tmp_path_factory):
    """A tiny run on Counter, watched. Several tests look at the same one."""
    if (name, kind) not in WATCHED:
        run_dir = tmp_path_factory.mktemp(f"{name}-{kind}") / "run"
        WATCHED[name, kind] = watch(name, config(name, kind=kind, run_dir=str(run_dir)))
    return WATCHED[name, kind]


def build(name, cfg):
    """Return {name: object} of what a run saves, as its `train` makes it."""
    state = {}

    def starting(run, agent, **rest):
        state.update(agent=agent, **rest)
        raise Stop                                              # all has been made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "start", starting)
        with pytest.raises(Stop):
            module(name).train(cfg)
    return state


def repeat(name, phase, state, **changes):
    """Make a phase's call again with these objects. Return what they hold after it."""
    args = phase.args | {key: state[own] for key, own in phase.own.items()} | changes
    torch.set_rng_state(phase.rng)
    result = getattr(module(name), phase.function)(**args)
    rollout = result[0] if isinstance(result, tuple) else args.get("rollout")
    return snapshot(state), rollout


# ---- What is learned from

def identity(obs):
    """(environment, episode, time) of Counter's observations [B, ...], which begin with them."""
    obs = obs[..., 5, 5, :] if obs.ndim > 2 else obs[:, :3]
    return [tuple(map(int, row)) for row in obs.tolist()]


@kinds(lambda name: steps_a_script(name) and not ALGOS[name].episodes)
def test_every_row_that_is_learned_from_is_as_scripted(name, kind, watched):
    """True successors, ends, rewards, and the action that the environment got."""
    steps = len(watched.acts[0])
    happened = {}
    for number in range(3):
        for at, (obs, rew, next_obs, terminated, done) in enumerate(script(number, steps)[0]):
            happened[obs] = rew, next_obs, terminated, done, watched.acts[number][at]
    learned, ends = set(), set()
    for phase in watched.updates:
        data = next(x for x in phase.args.values() if hasattr(x, "rew"))
        flat = {key: x.flatten(0, data.rew.ndim - 1) for key, x in vars(data).items()
                if key in "obs act rew next_obs terminated done".split()}
        keys, after = identity(flat["obs"]), identity(flat["next_obs"])
        terminal = flat["terminated"] if "terminated" in flat else data.discount == 0
        act = watched.agent.env_act(flat["act"])
        for i, key in enumerate(keys):
            rew, next_obs, terminated, done, sent = happened[key]
            assert after[i] == next_obs and terminal[i] == terminated
            assert name == "gail" or flat["rew"][i] == rew      # its rewards are its own
            assert "done" not in flat or flat["done"][i] == done
            np.testing.assert_allclose(act[i], sent, atol=1e-5)
            ends.add((terminated, done))
        learned.update(keys)
    assert ends >= {(0, 0), (0, 1), (1, 1)}
    on_policy = any(hasattr(x, "done") for x in watched.phases[0].args.values())
    assert not on_policy or learned == set(happened)            # each, up to the last one


@kinds(lambda name: not ALGOS[name].episodes)
def test_every_episode_is_reported_once_at_its_step(name, kind, watched):
    got = [tuple(float(row[key]) for key in ("step", "env", "ep_ret", "ep_len"))
           for row in watched.episodes]
    expected = [(3.0 * (t + 1), *rest) for number, acts in enumerate(watched.acts)
                for t, *rest in script(number, len(acts))[1]]
    assert sorted(got) == sorted(expected)
    assert [float(row["step"]) for row in watched.rows] == [24, 48, 72]


@kinds(lambda name: "rollout" in inspect.signature(module(name).update).parameters)
def test_statistics_before_an_update_are_those_of_all_rollouts_before_it(name, kind, watched):
    """By the script: each row once, replayed ones not again, and none of what is learned from."""
    for phase in watched.updates:
        steps = phase.steps - phase.args["rollout"].rew.shape[0]
        scripts = [script(number, steps)[0] for number in range(3)]
        seen = {"obs_stats": [row[0] for each in scripts for row in each if kind != "image"]}
        if name != "gail":                                      # its rewards are its own
            gamma, sums = watched.cfg.gamma, seen.setdefault("reward_sum_stats", [])
            for each in scripts:
                running = 0.0
                for _, rew, _, _, done in each:
                    sums.append(running := rew + gamma * running)
                    running *= 1 - done
        agent = phase.before["agent"]
        for part, values in seen.items():
            if f"{part}.count" not in agent:
                continue
            count, mean, var = (agent[f"{part}.{key}"] for key in ("count", "mean", "var"))
            assert count == len(values)
            if len(values):
                np.testing.assert_allclose(mean, np.mean(values, 0), rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(var, np.var(values, 0), rtol=1e-4, atol=1e-5)


# ---- What moves

@every_kind
def test_every_update_moves_every_parameter_that_learns(name, kind, watched):
    """In its optimizer's own storage; targets follow by the end, unless the row says that they are
    fixed; metrics are finite constants, and progress.csv has them."""
    learner = watched.state.get("learner", watched.agent)
    key = next(key for key, x in watched.state.items() if x is learner)
    learns = {name for name, param in learner.named_parameters() if param.requires_grad}
    states = [phase.before[key] for phase in watched.phases
              if phase.function == ALGOS[name].learns[0]] + [watched.phases[-1].after[key]]
    assert learns and len(states) > 3
    for before, after in itertools.pairwise(states):
        still = {each for each in learns if torch.equal(before[each], after[each])}
        assert not still, f"did not move: {still}"
    follows = {name for name, param in learner.named_parameters() if not param.requires_grad}
    fixed = {each for each in learns | follows if each.partition(".")[0] == ALGOS[name].fixed}
    assert fixed == {each for each in learns | follows
                     if torch.equal(states[0][each], states[-1][each])}
    owned = []
    for optimizer in (x for x in watched.state.values() if isinstance(x, Optimizer)):
        for param in optimizer.params:
            for view, whole in ((param, optimizer.flat), (param.grad, optimizer.grad)):
                assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            owned.append(id(param))
    names = {id(param): each for each, param in learner.named_parameters()}
    assert len(owned) == len(set(owned)) and {names[each] for each in owned} <= learns
    for phase in watched.phases:
        for metric, x in phase.metrics.items():
            x = torch.as_tensor(x)
            assert x.isfinite().all() and not x.requires_grad, metric
            assert {metric, f"{metric}_mean"} & watched.rows[-1].keys(), metric


@every_algo
def test_every_step_and_every_norm_is_of_a_gradient_of_all_ranks(name, monkeypatch):
    """Of its own loss alone, averaged, cut before the step if at all; from the first step on."""
    cfg, done, optimizers = config(name), {}, {Optimizer, *Optimizer.__subclasses__()}
    calls = "zero_grad", "average_grads", "clip_grads", "grad_norm", "step"

    def noting(call, function):
        def note(self, *args):
            done.setdefault(id(self), [self]).append(call)
            assert call != "clip_grads" or args == (cfg.max_grad_norm,)
            return function(self, *args)
        return note

    for cls, call in itertools.product(optimizers, calls):
        if call in vars(cls):
            monkeypatch.setattr(cls, call, noting(call, vars(cls)[call]))
    module(name).train(cfg)
    assert name == "ars" or done
    norm, cut = "(grad_norm )*", "(clip_grads grad_norm )?"
    for _, *events in done.values():
        said = "".join(f"{call} " for call in events)
        assert re.fullmatch(f"(zero_grad average_grads {norm}{cut}step {norm})+", said), said[:200]
    calls = [call for _, *events in done.values() for call in events]
    assert has(name, "max_grad_norm") == ("clip_grads" in calls)


@every_kind
def test_no_draw_of_random_numbers_and_no_minibatch_comes_twice(name, kind, watched):
    draws = [(function, x.shape, x.numpy().tobytes()) for function, x in watched.draws
             if x.numel() > 7]
    assert len(draws) == len(set(draws))
    for phase in watched.phases if not hasattr(watched.cfg, "minibatch_envs") else ():
        seen = [(loss, x.numpy().tobytes()) for loss, x in phase.batches]
        assert len(seen) == len(set(seen)), phase.function


@kinds(lambda name: steps_a_script(name) and has(name, "anneal_lr"))
def test_the_learning_rate_falls_to_zero_with_the_steps(name, kind, watched):
    cfg = watched.cfg
    for phase in watched.updates:
        if "lr" in phase.args:                                  # trpo's is that of its critic alone
            taken = 3 * phase.steps
            left = 1 - (taken - cfg.rollout_steps if "rollout" in phase.args else taken - 3) / 72
            assert phase.args["lr"] == pytest.approx(cfg.lr * left)
    last = watched.updates[-1]
    if "lr" in last.args:
        assert float(watched.rows[-1]["lr"]) == pytest.approx(last.args["lr"])
        fresh = build(name, config(name, kind=kind))
        before, (after, _) = snapshot(fresh), repeat(name, last, fresh, lr=0.0)  # moves nothing
        learner = "learner" if "learner" in fresh else "agent"
        part = "actor." if hasattr(fresh["agent"], "actor") else "critic."
        assert all(torch.equal(x, after[learner][each]) for each, x in before[learner].items()
                   if each.startswith(part))


# ---- What is loaded goes on

@every_kind
def test_fresh_objects_with_a_loaded_state_take_the_same_step_to_the_bit(name, kind, watched):
    """One more update on the same data, with the same random numbers."""
    fresh = build(name, config(name, kind=kind))
    last = {phase.function: phase for phase in watched.phases}
    for phase in last.values():
        torch.save(phase.before, "state.pt")
        for key, saved in torch.load("state.pt", weights_only=True).items():
            fresh[key].load_state_dict(saved)
        after, _ = repeat(name, phase, fresh)
        for key in after:
            assert same(dict(after[key]), dict(phase.after[key])), key


# Episodes end at the save. It is past the warm-up, and the buffer has wrapped. Inverses of acktr
# are old, td3's next update is no actor's, and dqn's target is no copy of its network.
ALIGNED = {"num_envs": 2, "total_steps": 192, "rollout_steps": 32, "minibatch_size": 16,
           "report_every": 64, "check_every": 32, "buffer_size": 96, "start_steps": 40,
           "target_every": 24, "eps_steps": 400, "anneal_lr": False, "beta_start": 1.0,
           "inverse_every": 3, "policy_delay": 3, "her_k": 4, "momentum": 0.5}


def train(name, **settings):
    return module(name).train(config(name, ENDS, **ALIGNED | settings))


WHOLE = {}


@pytest.fixture
def whole(name, tmp_path_factory):
    """The directory of a run that ends by itself. Two tests compare others with it."""
    if name not in WHOLE:
        WHOLE[name] = str(tmp_path_factory.mktemp(f"{name}-whole") / "run")
        train(name, run_dir=WHOLE[name])
    return WHOLE[name]


@every_algo
def test_a_resumed_run_is_the_run_that_was_not_interrupted(name, whole):
    """Networks, optimizers, buffers, schedules, statistics and generators: all to the bit."""
    train(name, run_dir="parts", total_steps=128)
    module(name).train(module(name).Config.of_run("parts", resume=True, total_steps=192))
    assert_same_run("parts", whole)


@every_algo
def test_a_seed_is_a_run_whether_it_is_evaluated_or_not(name, whole, monkeypatch):
    """And what is played afterwards is what was evaluated."""
    agent = train(name, run_dir="evaluated", eval_every=64)
    with monkeypatch.context() as patch:
        given = helpers.noted(patch, module(name).Agent, "act", lambda agent, obs, *how: how)
        train(name, run_dir="other", seed=2)
    assert not any(True is each for how in given for each in how)   # training acts with noise
    evaluated = rows("evaluated")
    last = evaluated[-1]["eval_ret_mean"]
    plain = [{k: v for k, v in row.items() if "eval" not in k} for row in evaluated]
    assert plain == rows(whole) != rows("other")
    same_episodes, episodes, others = ([row["ep_ret"] for row in rows(run_dir, "episodes.csv")]
                                       for run_dir in ("evaluated", whole, "other"))
    assert same_episodes == episodes and (not episodes or episodes != others)
    with pytest.MonkeyPatch.context() as patch:                 # it needs no environment
        patch.setattr("utils.load.make_envs", None)
        loaded = load_agent("evaluated")
    assert same(to_plain(loaded.spaces), to_plain(agent.spaces))
    returns = play(Play("evaluated", episodes=10))
    assert same(dict(loaded.state_dict()), dict(agent.state_dict()))
    assert float(last) == returns.mean()


# ---- Acting

def sharpen(agent, factor):
    """Let the best action depend strongly on what is seen."""
    net = agent.actor if hasattr(agent, "actor") else agent.critic
    [*_, last] = (each for each in net.modules() if isinstance(each, torch.nn.Linear))
    last.weight.data *= factor
    return agent


@kinds(lambda name: "text" not in ALGOS[name].takes)
def test_evaluation_is_the_first_episode_of_each_environment_by_predict(name, kind, watched):
    """Short ones do not crowd out long ones; nothing is drawn, and nothing of the agent changes."""
    agent = sharpen(copy.deepcopy(watched.agent), 1 if kind == "goal" else 30)
    before, state = copy.deepcopy(agent.state_dict()), torch.get_rng_state()
    Counter.made.clear()
    returns, lengths = evaluate(agent, watched.cfg, 5, seed=1)
    first = [script(number, 8)[1][0] for number in range(5)]
    assert returns.tolist() == [ep_ret for _, _, ep_ret, _ in first]
    assert lengths.tolist() == [ep_len for *_, ep_len in first]
    assert torch.equal(torch.get_rng_state(), state)
    assert same(dict(before), dict(agent.state_dict()))
    made, sent = list(Counter.made), set()
    for env in made:
        plain = make_envs(watched.cfg, 1)
        own = Counter.made[-1]
        own.number, own.episode = env.number, -1
        obs, _ = plain.reset()
        agent.forget()
        for act in env.acts:
            best = agent.predict(obs[0])
            np.testing.assert_allclose(best, act, atol=1e-4)
            sent.add(tuple(np.atleast_1d(best).tolist()))
            obs, _, terminated, truncated, _ = plain.step(best[None])
            agent.forget(terminated | truncated)
    assert len(sent) > 1 or kind == "image"                     # of nearly black ones


@pytest.mark.parametrize("name", [name for name, row in ALGOS.items() if "box" in row.takes])
@pytest.mark.parametrize("space", [
    Box(LOW, HIGH), Box(np.float32([[0, -3, 1]] * 2), np.float32([[5, 3, 1.5]] * 2)),
    Box(np.array([0.1, -3]), np.array([0.7, 3]), dtype=np.float64)], ids=["box", "block", "double"])
def test_actions_fill_the_box_to_the_bit_and_never_leave_it(name, space):
    """Each dimension has its own bounds, and outputs of 0 are the middle of them."""
    agent = module(name).Agent(helpers.VECTOR, space, config(name))
    [*_, last] = (each for each in agent.actor.modules() if isinstance(each, torch.nn.Linear))
    last.weight.data.zero_()
    obs, dims = torch.randn(50, 3), math.prod(space.shape)
    for sign in (-1.0, 0.0, 1.0):
        signs = sign * (-1.0) ** torch.arange(dims)             # bounds on both sides at once
        last.bias.data[:dims] = 1e5 * signs
        act = agent.env_act(agent.act(obs, deterministic=True))
        wanted = np.where(signs.view(space.shape) > 0, space.high, space.low)
        if sign == 0:
            np.testing.assert_allclose(act[0], (space.low + space.high) / 2, rtol=1e-6)
        else:
            assert np.array_equal(act, np.stack(50 * [wanted]))
        assert act.dtype == space.dtype and space.contains(agent.predict(np.ones(3)))
        assert all(one in space for one in agent.env_act(agent.act(obs)))


# ---- Seeds and ranks

@pytest.mark.parametrize("name", [*filter(steps_a_script, ALGOS)])
def test_no_two_environments_share_a_seed_and_none_gets_it_twice(name):
    """Those of training, of evaluation and of what is resumed, in runs of two seeds."""
    seeds, evaluated, drawn = [], [], set()
    for seed in (1, 2):
        for total in (48, 72):
            Counter.made.clear()
            cfg = config(name, seed=seed, eval_every=48, total_steps=total, run_dir=f"run{seed}",
                         num_envs=2, resume=total > 48)
            if total == 48:
                drawn.add(tuple(parameters(build(name, cfg)["agent"]).tolist()))
                Counter.made.clear()
            module(name).train(cfg)
            made = [env for env in Counter.made if env.seeds]  # one is only tried
            assert len(made) >= 2 + 10 and all(env.seeds[0] is not None for env in made)
            assert all(set(env.seeds[1:]) <= {None} for env in made)
            assert all(len(env.seeds) > 1 for env in made[:2])
            seeds += [env.seeds[0] for env in made[:2]]
            evaluated.append([env.seeds[0] for env in made[2:12]])
    assert evaluated[0] == evaluated[1] and evaluated[2] == evaluated[3]
    seeds += evaluated[0] + evaluated[2]
    assert len(set(seeds)) == len(seeds) == 2 * (2 * 2 + 10)
    assert len(drawn) == 2 or not any(map(any, drawn))          # or all weights start at 0


@divided_algo
def test_one_of_two_ranks_takes_half_of_every_count(name, monkeypatch):
    """Of environments, buffer, minibatch and rollout; and its learning rate is that of both."""
    counts, made, plain = {"num_envs": 4, "minibatch_envs": 2}, [], make_envs
    monkeypatch.setattr(module(name), "make_envs", lambda cfg, n: made.append(n) or plain(cfg, n))
    alone = watch(name, config(name, run_dir="alone", **counts))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)      # a run of several sets its own
    twin = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2, bcast=lambda x: x,
                           allgather=lambda x: [x, x])          # the other is not there
    for function, told in (("comm", lambda: twin), ("launched", lambda: 2),
                           ("average", lambda x: x)):
        monkeypatch.setattr(mpi, function, told)
    half = watch(name, config(name, run_dir="half", **counts))
    assert made[0] == 2 * made[1] or made == [1, 1]
    assert len(half.phases) == len(alone.phases)
    for ours, whole in zip(half.phases, alone.phases):
        assert len(ours.batches) == len(whole.batches)
        assert ours.args.get("lr") == whole.args.get("lr")
        for (loss, mine), (_, both) in zip(ours.batches, whole.batches):
            dims = 2 if name == "ppo_lstm" else 1               # [T, n, ...] there
            assert 2 * mine.shape[:dims].numel() == both.shape[:dims].numel(), loss
    for key in alone.state.keys() & {"buffer"}:
        own, whole = (filled(x.state[key].state_dict()) for x in (half, alone))
        assert 2 * own == whole > 0


def filled(state):
    """How many numbers a buffer holds."""
    if isinstance(state, dict | list):
        return sum(map(filled, state.values() if isinstance(state, dict) else state))
    return state.numel() if isinstance(state, torch.Tensor) else 0


def part_of(data):
    """This rank's part: of a batch its rows, of a rollout its environments (also of a memory)."""
    if not hasattr(data, "rew"):
        return data                                             # demonstrations are for all
    ranks, rank, dim = mpi.size(), mpi.rank(), data.rew.ndim - 1
    return type(data)(**{key: x.chunk(ranks, dim)[rank] if isinstance(x, torch.Tensor)
                         else np.array_split(x, ranks)[rank] for key, x in vars(data).items()})


@contextlib.contextmanager
def drawn_alike():
    """Noise follows from the row that it belongs to; rows are drawn for all ranks, and shared."""
    randint = torch.randint

    def shared(high, shape, **kwargs):
        whole = randint(high, (shape[0] * mpi.size(),), **kwargs)
        return whole.chunk(mpi.size())[mpi.rank()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", lambda x: 1.4 * (50 * x.detach()).sin())
        patch.setattr(torch, "randint", shared)
        yield


def rank_config(name, kind="", **settings):
    return config(name, kind=kind, num_envs=4, rollout_steps=32, minibatch_size=32, lr=1e-2,
                  minibatch_envs=4, total_steps=96, buffer_size=96, anneal_lr=False, **settings)


def learn_share(name, folder, kind=""):
    """Repeat the last phases of a run with this rank's part. Return what the agent is then."""
    state = build(name, rank_config(name, kind))
    result = {}
    for phase in torch.load(Path(folder, f"{name}.pt"), weights_only=False):
        for key, saved in phase.before.items():
            state[key].load_state_dict(saved)
        with drawn_alike():
            parts = {key: part_of(x) for key, x in phase.args.items()}
            after, rollout = repeat(name, phase, state, **parts)
        if rollout is not None and hasattr(state["agent"], "update_stats"):
            state["agent"].update_stats(rollout)
            after = snapshot(state)
        result[phase.function] = dict(copy.deepcopy(after.get("learner", after["agent"])))
    torch.save(result, Path(folder, f"{name}-{mpi.rank()}of{mpi.size()}.pt"))
    return result


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", ["", pytest.param("image", marks=pytest.mark.slow)])
def test_two_ranks_equal_one(part, kind, tmp_path):
    """With half of each batch, or of each rollout's environments, they take the step of one.

    Starting two processes takes longer than what they do, so they do it for many algorithms.
    """
    names = sorted(name for name, row in ALGOS.items() if row.procs and kind in row.takes)[part::2]
    for name in names:                                          # the last call of each function
        seen = watch(name, rank_config(name, kind, run_dir=f"run-{name}"))
        torch.save(list({phase.function: phase for phase in seen.phases}.values()), f"{name}.pt")
    env = clean_env() | {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user", "KIND": kind}
    run([mpiexec(), "-n", 2, sys.executable, __file__, tmp_path, *names], env=env)
    for name in names:
        one = learn_share(name, tmp_path, kind)
        first, second = (torch.load(f"{name}-{k}of2.pt") for k in (0, 1))
        assert same(first, second), name
        for function, state in one.items():
            for key, expected in state.items():
                assert torch.allclose(first[function][key], expected, 2e-3, 1e-4), (name, key)


# ---- Games

of_images = pytest.mark.parametrize("name", [
    name for name, row in ALGOS.items() if "image" in row.takes])


@of_images
def test_bf16_reaches_every_network_of_images(name):
    for bf16 in (False, True):
        agent = build(name, config(name, kind="image", bf16=bf16))["agent"]
        found = {part.bf16 for part in agent.modules() if isinstance(part, ImageEncoder)}
        assert found == {bf16 and has(name, "bf16")}


def suited(name, env="ALE/Pong-v5"):
    return {key: x for key, x in module(name).Config.suited_to(env).items() if key != "bf16"}


@of_images
def test_what_suits_a_game_fits_together(name):
    for env in ("ALE/Pong-v5", "MinAtar/Breakout-v1"):
        cfg = module(name).Config.for_env(env)
        assert suited(name, env).items() <= vars(cfg).items()


def test_atari_and_minatar_bring_settings_of_their_own():
    small = {name: suited(name, "MinAtar/Breakout-v1") for name in ALGOS}
    atari = {"max_kl": 1e-3, "damping": 1e-3, "gamma": 0.98, "lam": 1}
    assert suited("trpo") == small["trpo"] | atari and not small["trpo"].keys() & atari.keys()
    assert suited("acer")["lr"] == module("acer").Config.lr
    assert small["ppo_popart"] | {"scale_rew": False} == small["ppo"]
    assert suited("ppo_popart") | {"scale_rew": False} == suited("ppo")
    assert small["ppo_rnd"] == small["ppo"]
    own = {"buffer_size": module("qr_dqn").Config.buffer_size, "huber_delta": 1}    # of DQN
    assert small["dqn"] == small["dqn_per"] == small["qr_dqn"] | own
    for found, plain, end in (small["c51"], small["dqn"], 20), (suited("c51"), suited("dqn"), 10):
        assert found | {"lr": 1e-3, "huber_delta": 1} == plain | {"v_min": -end, "v_max": end}


# ---- What is refused

@pytest.mark.parametrize("name,kind", [
    (name, kind) for name, row in ALGOS.items() for kind in ("box", "discrete", "image")
    if kind not in row.takes])
def test_other_spaces_are_refused(name, kind):
    said = refused(module(name).train, config(name, kind=kind))
    assert "space" in said and said.endswith("docs/howto.md has a table of what each takes, and "
                                             "what helps")


@every_algo
def test_no_setting_takes_nan_a_negative_number_or_a_huge_count(name):
    """But the entropy that is asked for, and the ends of a support: these may be negative."""
    cfg = config(name)
    for each in dataclasses.fields(cfg):
        kind, flag = type(getattr(cfg, each.name)), f"--{each.name.replace('_', '-')}"
        if kind in (int, float) and each.name not in SHARED | SIGNED:
            for bad in (-1, math.nan if kind is float else 10**15):
                said = refused(lambda each=each, bad=bad: config(name, **{each.name: bad}))
                assert said.startswith(f"{flag} is {bad}; it takes"), said


COLUMN = (4, 1)


@pytest.mark.parametrize("name,function,shapes,rest", [
    *((name, "policy_loss", shapes, ()) for name in ("vpg", "a2c", "acktr")
      for shapes in ((COLUMN, 4), (4, COLUMN))),
    *(("ppo", "clipped_policy_loss", shapes, (0.2,))
      for shapes in ((COLUMN, 4, 4), (4, COLUMN, 4), (4, 4, COLUMN))),
    *(("qr_dqn", "quantile_huber", shapes, (torch.ones(3),))
      for shapes in ((COLUMN, (4, 3)), ((4, 3), COLUMN), ((1, 3), (4, 3)))),
    ("c51", "project", (COLUMN, 4, (4, 2)), (torch.arange(2.0),)),
    ("ppo_mask", "mask_logits", ((4, 3), COLUMN), ()),
    ("sac_discrete", "expectation", ((4, 3), COLUMN), ())])
def test_a_column_is_refused_by_the_checker_and_without_it(name, function, shapes, rest):
    for algo, error in (module(name), TypeCheckError), (helpers.bare(module(name)), AssertionError):
        with pytest.raises(error):
            getattr(algo, function)(*map(torch.ones, shapes), *rest)


@pytest.mark.parametrize("name,settings,says", [
    ("c51", {"num_atoms": 1}, "--num-atoms is 1; it takes a whole number, at least 2"),
    ("c51", {"v_min": -100.0, "v_max": -100.0}, "--v-max is -100.0; it takes a number, above -100"),
    ("c51", {"v_min": math.nan}, "--v-min is nan; it takes a number"),
    ("qr_dqn", {"num_quantiles": 0}, "--num-quantiles is 0; it takes a whole number, at least 1"),
    ("rainbow", {"num_atoms": 1}, "--num-atoms is 1"), ("rainbow", {"n_step": 0}, "--n-step is 0"),
    ("grpo", {"width": 24}, "--width is 24"), ("grpo", {"layers": 0}, "--layers is 0"),
    ("grpo", {"group_size": 1}, "--group-size is 1"),
    ("crossq", {"critic_hidden": (0,)}, "--critic-hidden"),
    ("ppo", {"rollout_steps": 1024, "num_envs": 6},
     "--rollout-steps is 1024; it takes a multiple of --num-envs, which is 6"),
    ("ppo", {"rollout_steps": 1088, "minibatch_size": 256},
     "--rollout-steps is 1088; it takes a multiple of --minibatch-size, which is 256"),
    ("ppo", {"minibatch_size": 1}, "--minibatch-size is 1; it takes a whole number, at least 2"),
    ("ppo", {"minibatch_size": 0, "norm_adv": False}, "--minibatch-size is 0; it takes a whole "
     "number, at least 1"),
    ("ppo", {"num_procs": 3, "num_envs": 3, "rollout_steps": 96, "minibatch_size": 32},
     "--minibatch-size is 32; it takes a multiple of --num-procs, which is 3"),
    ("ddpg", {"num_procs": 2, "num_envs": 7},
     "--num-envs is 7; it takes a multiple of --num-procs, which is 2"),
    ("ddpg", {"num_procs": 2, "num_envs": 2, "buffer_size": 7}, "--buffer-size is 7; it takes a m"),
    ("sac", {"alpha": 0.0}, "--alpha is 0.0; it takes a number, above 0"),
    ("sac", {"alpha": -0.1, "learn_alpha": False}, "--alpha is -0.1; it takes a number, at least"),
    ("sac_discrete", {"target_entropy_ratio": 1.0}, "--target-entropy-ratio is 1.0; it takes a nu"),
    ("ppo_rnd", {"int_gamma": 1.0}, "--int-gamma is 1.0; it takes a number"),
    ("ppo_rnd", {"pred_share": 0.0}, "--pred-share is 0.0; it takes a number"),
    ("ppo_rnd", {"pred_share": 1.5}, "--pred-share is 1.5; it takes a number"),
    ("bc", {"held_out": 0.0}, "--held-out is 0.0"),
    ("bc", {"held_out": 0.95}, "--held-out is 0.95"),
    ("ppo_lstm", {"minibatch_envs": 3},
     "--num-envs is 8; it takes a multiple of --minibatch-envs, which is 3"),
    ("ppo_lstm", {"num_envs": 6, "rollout_steps": 60, "minibatch_envs": 3, "num_procs": 2},
     "--minibatch-envs is 3; it takes a multiple of --num-procs, which is 2")])
def test_settings_with_bounds_of_their_own_are_refused(name, settings, says):
    assert refused(lambda: module(name).Config(**settings)).startswith(says)


VALUES = {int: (0, 1, 2, 3, 8, 24, -1), float: (0.0, 1e-3, 0.5, 1.0, 1.5, -0.1),
          bool: (True, False)}


@every_algo
def test_any_configuration_trains_or_is_refused_with_the_flag(name):
    """Of one to three settings of its own, with any values of their types."""
    count, cfg = itertools.count(), config(name)
    kinds = {each.name: type(getattr(cfg, each.name)) for each in dataclasses.fields(cfg)}
    some = st.sampled_from([(each, value) for each, kind in kinds.items() if each not in SHARED
                            for value in VALUES.get(kind, ())])

    @how(max_examples=6, deadline=None, derandomize=True, database=None,
         suppress_health_check=list(HealthCheck))
    @given(st.lists(some, min_size=1, max_size=3).map(dict))
    def check(changed):
        run_dir = f"run{next(count)}"
        try:
            agent = module(name).train(config(name, run_dir=run_dir, total_steps=48, **changed))
        except UsageError as error:
            said = str(error)
            assert any(f"--{each.replace('_', '-')}" in said for each in changed), said
            assert not Path(run_dir).exists()
        else:
            assert parameters(agent).isfinite().all() and rows(run_dir)

    check()


# ---- What is learned

@pytest.mark.slow
@pytest.mark.parametrize("case", probe.CASES, ids=lambda case: case.env)
@pytest.mark.parametrize("name,box", [
    (name, kind == "box") for name, row in ALGOS.items() for kind in ("box", "discrete")
    if kind in row.takes and name not in ("gail", "bc")])
def test_probe(name, box, case):
    found = probe.probe(module(name), case, box, **probe.OWN.get(name, {}))
    assert found or ALGOS[name].episodes                        # which has no critic
    assert probe.passed(found), f"look at {case.hint}: {found}"


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    os.makedirs(Path(folder, f"rank{mpi.rank()}"), exist_ok=True)
    os.chdir(Path(folder, f"rank{mpi.rank()}"))
    for each in names:
        learn_share(each, folder, os.environ["KIND"])
