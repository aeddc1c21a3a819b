"""`utils.export`: a graph in onnxruntime acts as `predict` does, for every algorithm and space."""
import re
import sys

import gymnasium as gym
import jaxtyping
import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from algos import ppo, ppo_lstm
from tests import registry
from tests.helpers import agent_for, refused
from tests.house.tree import ROOT
from utils import export, play
from utils.spaces import FlatBox, Numbered, Parts

NUM_OBS = 100


@pytest.fixture(autouse=True)
def tensors_for_arrays(monkeypatch):
    """While a graph is recorded, `env_act` returns a tensor, which its annotation denies."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


class Together(torch.nn.Module):
    """Many graphs as one: the exporter takes a second to start, whatever it exports."""

    def __init__(self, graphs):
        super().__init__()
        self.graphs = torch.nn.ModuleList(graphs)

    def forward(self, *inputs):
        left = iter(inputs)
        return tuple(output for graph in self.graphs
                     for output in graph(*(next(left) for _ in graph.inputs())))


def check_equals_predict(agents):
    """Export agents, run them on random observations, with their memories, and compare."""
    for agent in agents:
        for value in agent.parameters():                        # so that actions differ
            if value.ndim > 1:
                value.data.add_(torch.randn_like(value))
        for name, value in agent.named_buffers():
            if name.endswith("obs_stats.mean"):
                value.copy_(torch.rand_like(value))
            if name.endswith("obs_stats.var"):
                value.copy_(torch.rand_like(value) + 0.5)
    graphs = [export.Graph(agent.eval()) for agent in agents]
    inputs = [f"{i}:{name}" for i, graph in enumerate(graphs) for name in graph.inputs()]
    outputs = [f"{i}:{name}" for i, graph in enumerate(graphs)
               for name in ["action", *(f"next_{name}" for name in graph.memory)]]
    values = tuple(value for graph in graphs for value in graph.inputs().values())
    program = torch.onnx.export(
        Together(graphs).eval(), values,
        input_names=inputs, output_names=outputs, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    memory = {f"{i}:{name}": value.numpy() for i, graph in enumerate(graphs)
              for name, value in graph.memory.items()}
    acts = [[] for _ in agents]
    for agent in agents:
        agent.forget()
        getattr(agent.spaces[0], "own", agent.spaces[0]).seed(0)
    for _ in range(NUM_OBS):
        observed, given = [], dict(memory)
        for i, graph in enumerate(graphs):
            own = getattr(graph.agent.spaces[0], "own", graph.agent.spaces[0])
            obs = own.sample()
            if "action_mask" in graph.parts:
                obs["action_mask"][np.random.randint(len(obs["action_mask"]))] = 1
            observed.append(obs)
            given |= {f"{i}:{name}": np.asarray(value) for name, value in pieces(obs).items()}
        got = dict(zip(outputs, session.run(outputs, given)))
        memory = {name: got[name.replace(":", ":next_")] for name in memory}
        for i, (agent, obs) in enumerate(zip(agents, observed)):
            act, expected = got[f"{i}:action"], np.asarray(agent.predict(obs))
            assert (act.dtype, act.shape) == (expected.dtype, expected.shape), agent
            np.testing.assert_allclose(act, expected, 1e-5, 1e-5, err_msg=str(type(agent)))
            acts[i].append(act)
    vary = [len(np.unique(made, axis=0)) > 1 for made in acts]
    assert sum(vary) > len(vary) / 2, vary                      # with what the agents see


def pieces(obs, prefix=""):
    """The parts of an observation by the names that the graph gives them."""
    if not isinstance(obs, dict | tuple):
        return {prefix or "obs": obs}
    items = obs.items() if isinstance(obs, dict) else enumerate(obs)
    return {name: part for key, inner in items
            for name, part in pieces(inner, f"{prefix}.{key}".strip(".")).items()}


# Those that act by code of their own come first; the others copy a parent's `act`.
OWN = "ppo ppo_lstm ppo_mask ars td3 sac_her crossq c51 qr_dqn pqn dqn_atari".split()
REST = sorted(registry.ALGOS.keys() - set(OWN))


@pytest.mark.parametrize("names", [OWN, pytest.param(REST, marks=pytest.mark.slow)], ids=len)
def test_every_algorithm_acts_as_predict_does(names):
    check_equals_predict([
        agent_for(registry.module(name), registry.config(name)) for name in names])


def test_every_space_is_taken_as_the_environment_has_it():
    parts = Dict({"mask": MultiBinary([2, 2]), "id": Discrete(3, start=-1), "more": Tuple((
        MultiDiscrete([[2, 3]], start=[[1, 0]]), Box(-1, 1, (2, 2), np.float64)))})
    spaces = [(FlatBox(parts), Numbered(MultiDiscrete([2, 3], start=[5, 0]))),
              (FlatBox(Discrete(4)), Numbered(Discrete(3, start=-2, dtype=np.int32))),
              (FlatBox(Tuple((Discrete(4), Discrete(2)))), Numbered(MultiBinary([2, 2]))),
              (Box(-1, 1, (3,), np.float64), Box(np.float64([[-1, 0]]), 5.0, dtype=np.float64)),
              (Box(0, 9, (3,), np.int64), Discrete(3)),
              (Box(0, 255, (12, 10, 3), np.uint8), Discrete(3)),
              (FlatBox(Dict(see=Box(0, 255, (3, 9, 8), np.uint8), at=Box(-1, 1, (2,)))),
               Parts(MultiDiscrete([[2, 3]], start=[[5, 0]], dtype=np.int32))),
              (Box(-1, 1, (3,)), Parts(MultiBinary([2, 2])))]
    cfg = ppo.Config(hidden=(8,), bf16=True)                    # a graph has float32 instead
    check_equals_predict([ppo.Agent(*pair, cfg) for pair in spaces])


def test_observations_in_float64_keep_all_digits():
    """1.7e9 and 1.7e9 + 60, seconds of 2023, are the same number in float32."""
    agent = ppo.Agent(Box(1.7e9, 1.7e9 + 60, (3,), np.float64), Box(-1, 1, (2,)), ppo.Config())
    agent.obs_stats.mean.fill_(1.7e9 + 30)
    agent.actor[-1].weight.data.mul_(1000)
    for obs in (agent.spaces[0].sample() for _ in range(3)):
        act = agent.env_act(agent.act(obs[None], deterministic=True))[0]
        for made in agent.predict(obs), export.Graph(agent)(torch.tensor(obs))[0]:
            np.testing.assert_allclose(made, act, 1e-5, 1e-6)


def test_an_action_that_is_a_tuple_is_refused():
    for space in (Parts(Tuple((Discrete(2), Discrete(2)))), Numbered(Dict(a=Discrete(2)))):
        agent = ppo.Agent(Box(-1, 1, (3,)), space, ppo.Config(hidden=(8,)))
        said = refused(export.export, agent, "policy.onnx")
        assert said == "--export takes no action space that is a Tuple or a Dict"


def test_the_program_of_the_page_acts_with_an_exported_run(capsys, monkeypatch):
    """An agent with a memory, so that the program must keep it. No environment is made for it."""
    ppo_lstm.train(ppo_lstm.Config("CartPole-v1", run_dir="run", total_steps=512, rollout_steps=256,
                                   num_envs=2, minibatch_envs=1, hidden=(8,), lstm_size=8))
    agent = play.load_agent("run")
    with monkeypatch.context() as patch:
        patch.setattr("utils.load.make_envs", None)
        play.main(play.Play("run", export="policy.onnx"))
    assert "policy.onnx: from obs, memory to action, next_memory" in capsys.readouterr().out
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    program, = re.findall(r"^```py\n([^`]*onnxruntime[^`]*)^```", page, re.M)
    exec(compile(program, "training.md", "exec"), names := {})
    with gym.make("CartPole-v1") as env:
        ep_ret, done, (obs, _) = 0.0, False, env.reset(seed=0)
        while not done:
            obs, rew, terminated, truncated, _ = env.step(agent.predict(obs))
            ep_ret, done = ep_ret + rew, terminated or truncated
    assert names["ep_ret"] == ep_ret
    np.testing.assert_allclose(names["memory"]["memory"], agent.memory, 1e-4, 1e-5)
    ppo.train(ppo.Config("FrozenLake-v1", run_dir="lake", total_steps=64, rollout_steps=64,
                         num_envs=2, minibatch_size=32, hidden=(8,)))       # observations are ints
    play.main(play.Play("lake", export="policy.onnx"))
    exec(compile(program.replace("CartPole", "FrozenLake"), "training.md", "exec"), names)
    assert "memory" not in names["memory"] and names["ep_ret"] in (0, 1)


def test_a_missing_package_is_named_with_our_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    said = refused(export.export, None, "policy.onnx")
    assert said.startswith("--export needs pip install onnxscript: ")
