"""A policy as an ONNX graph, for programs without plainrl, PyTorch and the environment.

The graph takes one observation as the environment returns it, named `obs`, or the parts of a Dict
by their names. It returns `action`, for `env.step`. There is no batch axis. An agent with a memory
also takes `memory`, which is 0 when an episode starts, and returns `next_memory`.
"""

import importlib
import logging
import warnings

import gymnasium as gym
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from utils.errors import UsageError
from utils.files import atomic_write
from utils.spaces import FlatBox, Numbered, Parts, part_sizes, parts_of


def export(agent, file) -> None:
    """Write a policy that `load_agent` returned to `file`. UsageError: a package is missing."""
    try:
        importlib.import_module("onnxscript")
    except ImportError as error:
        raise UsageError(f"--export needs pip install onnxscript: {error}") from None
    if getattr(getattr(agent.spaces[1], "own", None), "spaces", None):
        raise UsageError("--export takes no action space that is a Tuple or a Dict")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is missing
    graph = Graph(agent).eval()
    inputs, outputs = graph.inputs(), ["action", *(f"next_{name}" for name in graph.memory)]
    with warnings.catch_warnings(action="ignore"):  # of PyTorch about itself
        program = torch.onnx.export(graph, tuple(inputs.values()), dynamo=True, verbose=False,
                                    input_names=list(inputs), output_names=outputs)
    with atomic_write(file) as onnx:
        onnx.write(program.model_proto.SerializeToString())
    print(f"{file}: from {', '.join(inputs)} to {', '.join(outputs)}")


class Graph(torch.nn.Module):
    """`predict` on tensors: the parts of one observation, memory -> action, next memory."""

    def __init__(self, agent):
        super().__init__()
        self.agent = agent
        for module in agent.modules():
            module.bf16 = False  # in which onnxruntime has no convolutions
        self.parts = parts_of(getattr(agent.spaces[0], "own", agent.spaces[0]))
        with Symbolic():  # makes the memory for one environment
            agent.act(np.zeros((1, *agent.obs_shape), agent.spaces[0].dtype), deterministic=True)
        agent.forget()
        saved = agent.state_dict()
        self.memory = {name: value for name, value in agent.named_buffers() if name not in saved}

    def inputs(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(np.zeros(part.shape, part.dtype))
                for name, part in self.parts.items()} | self.memory

    @torch.no_grad()
    def forward(self, *inputs):
        agent, (obs_space, act_space) = self.agent, self.agent.spaces
        obs = inputs[0]
        if isinstance(obs_space, FlatBox):
            obs = torch.cat([flatten(*part) for part in zip(self.parts.values(), inputs)])
        for name, value in zip(self.memory, inputs[len(self.parts):]):
            setattr(agent, name, value)
        with Symbolic():
            act = agent.env_act(agent.act(obs[None], deterministic=True))[0]
        memory = [getattr(agent, name) for name in self.memory]
        for name, value in self.memory.items():
            setattr(agent, name, value)  # the exporter refuses a module that it has changed
        if isinstance(act_space, Numbered):
            act = torch.tensor(act_space.own_act(np.arange(act_space.n)))[act]
        elif isinstance(act_space, Parts):
            start = torch.tensor(act_space.own_act(np.zeros(act_space.shape, int)))
            act = (act.reshape(start.shape) + start).to(start.dtype)
        return act, *memory


class Symbolic(TorchFunctionMode):
    """Lets `act` and `env_act` run on tensors without values, so that arrays stay tensors.

    A condition on values is false, because agents have one only to refuse bad input.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.numpy:
            return args[0]
        return False if func is torch.Tensor.__bool__ else func(*args, **(kwargs or {}))


def flatten(space: gym.Space, value: torch.Tensor) -> torch.Tensor:
    """Return a part as a vector, as `FlatBox.flatten` does: a Discrete one becomes one-hot."""
    value = value.reshape(-1)
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        sizes, starts = part_sizes(space), np.ravel(space.start)
        value = torch.cat([torch.arange(start, start + size) == number
                           for size, start, number in zip(sizes, starts, value)])
    return value.float()
