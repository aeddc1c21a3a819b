"""The model of benchmarks/scaling.py on numbers that a hand can check."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "benchmarks/scaling.py"


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_model_by_hand(scaling):
    costs = scaling.Costs(vector_step=10, env_step=3, gradient_step=5, sample=0.5, message=2,
                          byte=0.25, moments=7, gradient_bytes=8)
    # One process: 4 steps of a vector of 2, then 2 epochs of 2 gradient steps of 4 samples.
    assert scaling.update_seconds(costs, 1, 2, 8, 4, epochs=2) == 4 * (10 + 6) + 4 * (5 + 2)
    # Two: half of the environments and samples each; 4 gradients of 2 + 2, moments twice.
    both = 4 * (10 + 3) + 4 * (5 + 1) + 4 * (2 + 2) + 2 * 7
    assert scaling.update_seconds(costs, 2, 2, 8, 4, epochs=2) == both
    # Four speak in two rounds.
    four = 4 * (10 + 1.5) + 4 * (5 + 0.5) + 2 * (4 * (2 + 2) + 2 * 7)
    assert scaling.update_seconds(costs, 4, 2, 8, 4, epochs=2) == four
    assert scaling.rate(costs, 1, 2, 8, 4) == 8 / scaling.update_seconds(costs, 1, 2, 8, 4)


def test_a_line_is_found_again(scaling):
    assert scaling.line([1, 2, 4, 8], [5 + 3 * x for x in (1, 2, 4, 8)]) == pytest.approx((5, 3))


def test_weak_and_strong_are_the_same_for_one_process_but_for_size(scaling):
    assert scaling.weak(4) == (4, 32, 8192, 256)
    assert scaling.strong(4) == (4, 64, 8192, 256)
