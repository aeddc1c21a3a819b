"""Checks for 3_where_episodes_end.ipynb. Answers: spoilers/answers_3.py."""
import numpy as np
from checking import Wrong, close, exercise, true


@exercise
def counter_value(answer):
    close(answer(7, 8, 0.9, True), 1.0, "From the last count, the next step has the reward of 1.")
    close(answer(5, 8, 0.5, True), 0.25,
          "From count 5 of 8, two steps have no reward and the third has 1.")
    close(answer(0, 2, 0.5, False), 2 / 3,
          "Endless, period 2, gamma 0.5: from count 0 the rewards are 0, 1, 0, 1, ..., so the "
          "value is 1/2 + 1/8 + 1/32 + ...")
    for count in range(5):
        close(answer(count, 5, 0.9, False), 0.9 ** (4 - count) / (1 - 0.9**5),
              f"Wrong for count {count} of an endless counter with period 5.")
        close(answer(count, 5, 0.9, True), 0.9 ** (4 - count),
              f"Wrong for count {count} of a counter with period 5 that ends.")


@exercise
def led_to(answer):
    obs, final_obs = np.array([1.0, 2.0, 3.0, 4.0]), np.array([9.0, 8.0, 7.0, 6.0])
    terminated = np.array([False, True, False, True])
    truncated = np.array([False, False, True, True])
    before = obs.copy()
    got = answer(obs, final_obs, terminated, truncated)
    true(np.array_equal(obs, before), "Your function changed `obs`. The loop still needs it: copy.")
    close(np.asarray(got)[:1], [1.0], "Environment 0 continues: its action led to `obs`.")
    close(np.asarray(got)[2:3], [7.0], "Environment 2 was truncated: its action led to "
                                       "`final_obs`, and `obs` is from the next episode.")
    close(got, [1, 8, 7, 6], "After any end, the last observation is in `final_obs`.")


@exercise
def masks(answer):
    terminated = np.array([False, True, False, True])
    truncated = np.array([False, False, True, True])
    got = answer(terminated, truncated)
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong("Return two masks: bootstrap, continues.")
    bootstrap, continues = got
    close(bootstrap, [1, 0, 1, 0],
          "bootstrap: rule 1. Of the four rows one continues, one is terminated, one truncated, "
          "and the last is both at once. Termination wins.")
    close(continues, [1, 0, 0, 0],
          "continues: rule 2. Of the four rows one continues, one is terminated, one truncated, "
          "and the last is both at once. The last three all end an episode.")


@exercise
def shrunk_gamma(answer):
    close(answer(0.9, 2), 0.45, "With a limit of 2, half of the steps are followed by another "
                                "step, whose value counts gamma.")
    close(answer(0.9, 5), 0.72, "A share 1 / limit of the steps has no next value, the rest has.")
    close(answer(0.8, 1), 0.0, "If every step is the last one, no next value counts.")


@exercise
def mean_return(answer):
    close(answer(0.5, 1), 1.0, "In an episode of one step there is 1 to come, and nothing else.")
    close(answer(0.5, 2), 1.25, "Two steps, gamma 0.5: before the first, 1 + 0.5 is left; before "
                                "the second, 1. The mean is 1.25.")
    close(answer(0.8, 5), 2.3107, "Wrong for gamma 0.8 and five steps: the returns are 3.3616, "
                                  "2.952, 2.44, 1.8 and 1.")
