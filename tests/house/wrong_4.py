"""Plausible wrong answers to the exercises of notebook 4. The checks must reject each."""
import math

import torch


def time_alone(rollout):
    return (rollout.next_obs[..., 2] != rollout.obs[..., 2]).all()


def rows_follow(rollout):
    return torch.equal(rollout.next_obs[:-1], rollout.obs[1:])


def without_first_average(grad, lr, eps, tf_style):
    return lr * grad / (math.sqrt(1 + eps) if tf_style else eps)


def epsilon_beside(grad, lr, eps, tf_style):
    m = 0.99 * (1 if tf_style else 0) + 0.01 * grad**2
    return lr * grad / (math.sqrt(m) + eps)


def not_loaded(agent, fresh, obs):
    return torch.equal(agent.act(obs, deterministic=True), fresh.act(obs, deterministic=True))


def with_chance(agent, fresh, obs):
    fresh.load_state_dict(agent.state_dict())
    return torch.equal(agent.act(obs), fresh.act(obs))


def weights_alone(agent, fresh, obs):
    fresh.load_state_dict(agent.state_dict())
    return all(torch.equal(a, b) for a, b in zip(agent.parameters(), fresh.parameters()))


WRONG = {
    "diagnosis": [lambda: {"A": 3}, lambda: {"A": 8, "B": 3}, lambda: 8,
                  lambda: {"A": 8, "B": 3, "C": 1, "D": 7, "E": 5, "F": 2}],
    "in_step": [time_alone, rows_follow, lambda rollout: True,
                lambda rollout: rollout.next_obs > rollout.obs],
    "first_step": [without_first_average, epsilon_beside,
                   lambda grad, lr, eps, tf_style: lr * grad,
                   lambda grad, lr, eps, tf_style: lr if tf_style else 10 * lr],
    "limit_is_no_end": [lambda rollout: not rollout.terminated.any(),
                        lambda rollout: bool((rollout.terminated == rollout.done).all()),
                        lambda rollout: bool((rollout.terminated <= rollout.done).all()),
                        lambda rollout: bool((rollout.terminated == 0).any())],
    "same_policy": [not_loaded, with_chance, weights_alone,
                    lambda agent, fresh, obs:
                        fresh.load_state_dict(agent.state_dict()) is not None],
}
