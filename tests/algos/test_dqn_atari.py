"""algos/dqn_atari.py, where it is not algos/dqn.py: the ring of frames, and Atari itself."""
import numpy as np
import pytest
import torch

from algos import dqn_atari
from tests.offpolicy import dqn_quick as quick

CPU = torch.device("cpu")


# ---- The equation

def test_stacks_are_put_together_by_hand():
    """The docstring's example: an episode a to f of two steps, after one that ended with x."""
    buffer = dqn_atari.FrameBuffer(20, 1, 4, (4, 36, 36), CPU)
    x, a, b, c, d, e, f = (np.full((1, 36, 36), number, np.uint8) for number in range(7))
    buffer.position[:] = 11
    buffer.write(0, x)
    two_steps = (([a, b, c, d], 1, [b, c, d, e], False), ([b, c, d, e], 2, [c, d, e, f], True))
    for obs, rew, next_obs, terminated in two_steps:
        buffer.add(obs=np.concatenate(obs)[None], act=np.array([rew]), rew=np.array([rew]),
                   next_obs=np.concatenate(next_obs)[None], terminated=np.array([terminated]),
                   done=np.array([terminated]))
    assert np.flatnonzero(buffer.columns["live"][:, 0]).tolist() == [15, 16]
    assert buffer.columns["frame"][11:18, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    batch = buffer.gather(np.array([15, 16]), np.array([0, 0]))
    assert batch.obs[:, :, 0, 0].tolist() == [[1, 2, 3, 4], [2, 3, 4, 5]]
    assert batch.next_obs[:, :, 0, 0].tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert batch.rew.tolist() == batch.act.tolist() == [1, 2]
    assert batch.terminated.tolist() == [0, 1]


# ---- Runs

@pytest.mark.parametrize("env", ["ALE/Pong-v5", "ale_py:ALE/Pong-v5"])
def test_atari_stores_a_frame_once_and_gives_stacks(env, monkeypatch):
    """A row takes 84 x 84 bytes; what is learned from has the four frames that were acted on."""
    saw, batches, acted, update = [], [], dqn_atari.Agent.act, dqn_atari.update
    monkeypatch.setattr(dqn_atari.Agent, "act",
                        lambda self, obs: saw.append(obs) or acted(self, obs))
    monkeypatch.setattr(dqn_atari, "update", lambda *args: batches.append(args[2]) or update(*args))
    dqn_atari.train(quick(dqn_atari, env=env, env_kwargs="{}", start_steps=40, update_every=10))
    saved = torch.load("run/resume-120/rank0.pt")["state"]["buffer"]["columns"]["frame"]
    assert saved.shape[1:] == (1, 1, 84, 84) and len(saved) == 120 + 4
    acted_on = {obs[0].tobytes() for obs in saw}
    assert batches and all(row.numpy().tobytes() in acted_on for b in batches for row in b.obs)
