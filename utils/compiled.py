"""`--compile`: a function that makes a gradient, through torch.compile."""

import torch

from utils.ranks import say


def compiled(function, wanted: bool):
    """`function(agent, flat, *inputs)`, always of one agent, compiled or as it is.

    `flat` is a vector of `utils.mpi.flatten`, and the function makes `flat.grad` the gradient of a
    loss, by `flat.grad.zero_()` and `backward()` or by writing to it. Compiled, `flat.grad` has
    what `backward()` found only after the function has returned: so it must neither change it after
    `backward()` nor add to what was there, nor reach parameters that belong to another vector.
    It must bear no decorator: torch.compile would take all of a decorator's functions for one.
    """
    return Compiled(function) if wanted else function


class Compiled:
    """`function`, compiled when it is first called; if that fails it is called as it is."""

    def __init__(self, function):
        config = torch._dynamo.config
        if hasattr(config, "trace_autograd_ops"):
            config.trace_autograd_ops = True  # a backward() belongs to the graph too
        if hasattr(config, "recompile_limit"):  # which all functions share, as `in_one_piece`
            config.recompile_limit = max(config.recompile_limit, 64)
        self.plain, self.params = function, None
        self.fast = torch.compile(self.in_one_piece, dynamic=False)  # shapes stay as they are

    def __call__(self, agent, flat, *inputs):
        if self.params is not None:
            return self.fast(agent, flat, *inputs)
        self.params = [param for param in agent.parameters() if is_part(param.grad, flat.grad)]
        parts = [param.grad for param in self.params]
        try:
            return self.fast(agent, flat, *inputs)
        except Exception as error:  # if it is the function's own, `plain` raises it again
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            say(f"--compile: not here, going on without ({reason[:100]})")
            self.give_back(parts)
            self.fast = self.plain
            return self.plain(agent, flat, *inputs)

    def in_one_piece(self, agent, flat, *inputs):
        """The function; but what backward() finds goes to `flat.grad` at once, at its end.

        Parameters' gradients are parts of one vector. A graph that adds to each of them, all of
        one memory, takes long to tell them apart; so while it runs no parameter has a gradient.
        """
        parts = [param.grad for param in self.params]
        self.give_back([None] * len(parts))
        result = self.plain(agent, flat, *inputs)
        found = [param.grad for param in self.params]
        if any(grad is not None for grad in found):  # else it has filled flat.grad itself
            torch.cat([(torch.zeros_like(param) if grad is None else grad).flatten()
                       for param, grad in zip(self.params, found)], out=flat.grad)
        self.give_back(parts)
        return result

    def give_back(self, parts):
        for param, part in zip(self.params, parts):
            param.grad = part


def is_part(grad, whole) -> bool:
    """Whether there is a gradient, and in the memory of `whole`."""
    places = [tensor.untyped_storage().data_ptr() for tensor in (grad, whole) if tensor is not None]
    return len(places) == 2 and places[0] == places[1]
