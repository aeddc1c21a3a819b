"""The checks of exercises: run the reader's function and say whether it is right.

    @exercise
    def returns_to_go(answer):                     in exercises_1.py; `answer` is the reader's
        close(answer(rew, done, 0.5), [1.5, 1.0], "What hint helps here?")

    exercises_1.returns_to_go(returns_to_go)       in the notebook; prints one line, never raises

A function that returns None or raises NotImplementedError counts as "not answered yet".
"""
import functools

import numpy as np
import torch


class Unanswered(Exception):
    """The reader has not written an answer yet."""


class Wrong(Exception):
    """The answer is wrong; the message is the hint."""


def exercise(check):
    """Turn `check(answer)`, which raises Wrong, into a function that prints a verdict.

    Its attribute `verdict(answer)` returns the line instead of printing it.
    """

    def verdict(answer):
        try:
            check(functools.partial(call, answer))
        except Unanswered:
            return f"{check.__name__}: not answered yet"
        except Wrong as hint:
            return f"{check.__name__}: not right yet. {hint}"
        except Exception as error:  # a number where a tensor was asked for, and the like
            return (f"{check.__name__}: not right yet. It returns something of the wrong type "
                    f"({error}).")
        return f"{check.__name__}: right"

    @functools.wraps(check)
    def told(answer):
        print(verdict(answer))

    told.verdict, told.is_exercise = verdict, True
    return told


def call(answer, *inputs):
    """Return what the reader's function returns. It gets copies, so it may change its inputs."""
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
    """Raise Wrong with `hint` unless `got` equals `want` within `tol`."""
    try:
        got, want = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, dtype=float)
                     for x in (got, want))
    except (TypeError, ValueError):
        raise Wrong(f"It returns a {type(got).__name__} instead of numbers.") from None
    if got.shape != want.shape:
        raise Wrong(f"Its result has shape {list(got.shape)} instead of {list(want.shape)}.")
    if not np.allclose(got, want, rtol=tol, atol=tol):  # NaN is not close
        raise Wrong(hint)


def true(condition, hint):
    """Raise Wrong with `hint` unless `condition` holds."""
    if not condition:
        raise Wrong(hint)
