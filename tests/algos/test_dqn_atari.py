"""algos/dqn_atari.py on Atari itself. test_buffers.py has its ring of frames."""
import pytest
import torch

from algos import dqn_atari
from tests.helpers import noted
from tests.offpolicy import dqn_quick as quick


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "ale_py:ALE/Pong-v5"])
def test_atari_stores_a_frame_once_and_gives_stacks(env, monkeypatch):
    """A row takes 84 x 84 bytes; what is learned from has the four frames that were acted on."""
    saw = noted(monkeypatch, dqn_atari.Agent, "act", lambda agent, obs: obs)
    batches = noted(monkeypatch, dqn_atari, "update", lambda *args: args[2])
    dqn_atari.train(quick(dqn_atari, env=env, env_kwargs="{}", start_steps=40, update_every=10))
    saved = torch.load("run/resume-120/rank0.pt")["state"]["buffer"]["columns"]["frame"]
    assert saved.shape[1:] == (1, 1, 84, 84) and len(saved) == 120 + 4
    acted_on = {obs[0].tobytes() for obs in saw}
    assert batches and all(row.numpy().tobytes() in acted_on for b in batches for row in b.obs)
