"""`--compile`: a function that makes a gradient, through torch.compile."""

import torch

from utils.ranks import say


def compiled(function, wanted: bool):
    """`function(agent, flat, *inputs)`, which fills `flat.grad`, compiled or as it is.

    `flat` is a vector of `utils.mpi.flatten`. The function must bear no decorator: torch.compile
    would take all of a decorator's functions for one.
    """
    return Compiled(function) if wanted else function


class Compiled:
    """`function`, compiled when it is first called; if that fails it is called as it is."""

    def __init__(self, function):
        if hasattr(torch._dynamo.config, "trace_autograd_ops"):
            torch._dynamo.config.trace_autograd_ops = True  # a backward() belongs to the graph too
        torch._inductor.config.cpp.vec_isa_ok = True  # the processor can do what it says: no trial
        self.plain, self.params = function, None
        self.fast = torch.compile(self.in_one_piece, dynamic=False)  # shapes stay as they are

    def __call__(self, agent, flat, *inputs):
        if self.params is not None:
            return self.fast(agent, flat, *inputs)
        self.params = [param for param in agent.parameters() if is_part(param.grad, flat.grad)]
        try:
            return self.fast(agent, flat, *inputs)
        except Exception as error:  # its own, if it was that, comes again from the next line
            say(f"--compile: not here, going on without ({str(error).splitlines()[0][:100]})")
            self.fast = self.plain
            return self.plain(agent, flat, *inputs)

    def in_one_piece(self, agent, flat, *inputs):
        """The function; but what backward() finds goes to `flat.grad` at once, at its end.

        A graph that adds to a dozen parts of one vector, each an input of its own, spends a
        quarter of its time on telling them apart. So while it runs no parameter has a gradient.
        """
        parts = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        result = self.plain(agent, flat, *inputs)
        found = [param.grad for param in self.params]
        if any(grad is not None for grad in found):  # else it has filled flat.grad itself
            torch.cat([(torch.zeros_like(param) if grad is None else grad).flatten()
                       for param, grad in zip(self.params, found)], out=flat.grad)
        for param, part in zip(self.params, parts):
            param.grad = part
        return result


def is_part(grad, whole) -> bool:
    """Whether there is a gradient, and in the memory of `whole`."""
    places = [tensor.untyped_storage().data_ptr() for tensor in (grad, whole) if tensor is not None]
    return len(places) == 2 and places[0] == places[1]
