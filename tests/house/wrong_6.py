"""Plausible wrong answers to the exercises of notebook 6."""
import numpy as np

WRONG = {
    "next_memory": [
        lambda memory, done: memory,                                     # never forgets
        lambda memory, done: memory * 0,                                 # forgets everywhere
        lambda memory, done: memory * done[None, :, None],               # the mask turned round
        lambda memory, done: memory * (1 - done.max()),                  # one end clears all
        lambda memory, done: memory[1] * (1 - done)[:, None],            # c alone
    ],
    "same_values": [
        lambda w, b, lo, so, ln, sn: (w, b),                             # nothing rescaled
        lambda w, b, lo, so, ln, sn: (w * so / sn, b),                   # the bias forgotten
        lambda w, b, lo, so, ln, sn: (w * so / sn, b * so / sn),         # loc forgotten
        lambda w, b, lo, so, ln, sn: (w * sn / so, (sn * b + ln - lo) / so),     # old and new
        lambda w, b, lo, so, ln, sn: (w * so / sn, (so * b + ln - lo) / sn),     # sign of loc
        lambda w, b, lo, so, ln, sn: w * so / sn,                        # w alone
        lambda w, b, lo, so, ln, sn: (w * so / sn + ln - lo, (so * b + lo - ln) / sn),
    ],
    "relabel": [
        lambda a, t, j: (a[t + j], 0 if j == 0 else -1),                 # one step early
        lambda a, t, j: (a[t + 1 + j], 0 if j == 0 else -1),             # not recomputed
        lambda a, t, j: (a[t + 1 + j], -1),                              # the old reward
        lambda a, t, j: (a[t + 1 + j], 0 if (a[t] == a[t + 1 + j]).all() else -1),   # before it
        lambda a, t, j: (a[-1], 0 if (a[t + 1] == a[-1]).all() else -1),             # "final"
        lambda a, t, j: a[t + 1 + j],                                    # no reward
        lambda a, t, j: (a[t + 1 + j], 0 if (a[t + 1] == a[t + 1 + j]).any() else -1),  # one bit
        lambda a, t, j: (a[t + 1 + j], 0 if a[t + 1][0] == a[t + 1 + j][0] else -1),
        lambda a, t, j: (a[t + 1 + j],                                   # before it, or after
                         0 if (a[t : t + 2] == a[t + 1 + j]).all(1).any() else -1),
    ],
    "best_d": [
        lambda e, p: p / (e + p),                                        # labels turned round
        lambda e, p: e,
        lambda e, p: np.float64(e > p),
        lambda e, p: 0.5 + (e - p) / 2,
    ],
}
