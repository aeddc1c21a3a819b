"""The model of benchmarks/scaling.py on numbers that a hand can check."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks/scaling.py"


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_model_by_hand(scaling):
    costs = scaling.Costs(vector_step=10, env_step=3, gae_step=11, gradient_step=5, sample=0.5,
                          message=2, byte=0.25, moments=7, gradient_bytes=8)
    # One process: 4 steps of a vector of 2; in 2 epochs 4 steps of GAE, 2 gradients of 4 samples.
    one = 4 * (10 + 6) + 8 * 11 + 4 * (5 + 2)
    assert scaling.update_seconds(costs, 1, 2, 8, 4, epochs=2) == one
    # Two: half of the environments and samples each; 4 gradients of 2 + 2, moments twice.
    both = 4 * (10 + 3) + 8 * 11 + 4 * (5 + 1) + 4 * (2 + 2) + 2 * 7
    assert scaling.update_seconds(costs, 2, 2, 8, 4, epochs=2) == both
    # Four speak in two rounds, and hear three others' moments.
    four = 4 * (10 + 1.5) + 8 * 11 + 4 * (5 + 0.5) + 2 * 4 * (2 + 2) + 3 * 2 * 7
    assert scaling.update_seconds(costs, 4, 2, 8, 4, epochs=2) == four
    assert scaling.rate(costs, 1, 2, 8, 4) == 8 / scaling.update_seconds(costs, 1, 2, 8, 4)


def test_a_line_is_found_again(scaling):
    assert scaling.line([1, 2, 4, 8], [5 + 3 * x for x in (1, 2, 4, 8)]) == pytest.approx((5, 3))


def test_weak_gives_each_process_the_same_work_and_strong_all_of_them_together(scaling):
    (one, *work), (four, *of_four) = scaling.weak(1), scaling.weak(4)
    assert (one, four) == (1, 4) and of_four == [4 * size for size in work]
    assert scaling.strong(4) == (4, *scaling.strong(1)[1:])


def test_the_costs_of_one_process_are_found_again(scaling, monkeypatch):
    """Calls take what the model says that they take; 2048 steps of 16 environments, ten epochs."""
    a, b, h, c, d = 100e-6, 30e-6, 2e-6, 400e-6, 3e-6

    def quickest(function, agent, *inputs):
        if function.__name__ == "collect":
            envs, _, steps = inputs
            return steps * (a + b * envs.num_envs)
        if function.__name__ == "compute_advantages":
            return h * len(inputs[0])
        minibatch = agent.cfg.minibatch_size
        return 10 * (128 * h + 2048 / minibatch * (c + d * minibatch))

    monkeypatch.setattr(scaling, "quickest", quickest)
    *found, gradient_bytes = scaling.one_process()
    assert found == pytest.approx([a, b, h, c, d])
    assert gradient_bytes == 4 * (2 * (17 * 64 + 64 + 64 * 64 + 64) + 64 * 6 + 6 + 64 + 1 + 6)
