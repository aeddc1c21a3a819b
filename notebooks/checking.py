"""What a check cell of a notebook does: it runs the reader's function and says how it went.

    @exercise
    def returns_to_go(answer):                     in exercises_1.py; `answer` is the reader's
        close(answer(rew, done, 0.5), [1.5, 1.0], "What hint helps here?")

    exercises_1.returns_to_go(returns_to_go)       in the notebook; prints one line, never raises

A function that returns None, or raises NotImplementedError, is not answered yet.
"""
import functools

import numpy as np
import torch


class Unanswered(Exception):
    """The reader has not written anything yet."""


class Wrong(Exception):
    """The answer is not right; the message is the hint."""


def exercise(check):
    """`check(answer)`, which raises Wrong where it has to, as a function that prints the verdict.

    The returned function carries `verdict(answer)`, which gives the line instead of printing it.
    """

    def verdict(answer):
        try:
            check(functools.partial(call, answer))
        except Unanswered:
            return f"{check.__name__}: not answered yet"
        except Wrong as hint:
            return f"{check.__name__}: not right yet. {hint}"
        except Exception as error:  # a number where a tensor was asked for, and the like
            return (f"{check.__name__}: not right yet. What it returns is of another kind than "
                    f"what is asked for ({error}).")
        return f"{check.__name__}: right"

    @functools.wraps(check)
    def told(answer):
        print(verdict(answer))

    told.verdict, told.is_exercise = verdict, True
    return told


def call(answer, *inputs):
    """What the reader's function returns. Inputs are copied: it may write into its own."""
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    try:
        result = answer(*copies)
    except NotImplementedError:
        raise Unanswered from None
    except Exception as error:
        raise Wrong(f"It raises {type(error).__name__}: {error}") from None
    if result is None or result is Ellipsis:
        raise Unanswered
    return result


def close(got, want, hint, tol=1e-4):
    """Wrong with `hint` unless `got` is `want`, numbers or arrays or tensors, up to `tol`."""
    try:
        got, want = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, dtype=float)
                     for x in (got, want))
    except (TypeError, ValueError):
        raise Wrong(f"It returns a {type(got).__name__}, not numbers.") from None
    if got.shape != want.shape:
        raise Wrong(f"Its result has the shape {list(got.shape)}, not {list(want.shape)}.")
    if not np.allclose(got, want, rtol=tol, atol=tol):  # NaN is not close
        raise Wrong(hint)


def true(condition, hint):
    """Wrong with `hint` unless `condition`."""
    if not condition:
        raise Wrong(hint)
