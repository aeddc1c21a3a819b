"""algos/sac_her.py, where it is not algos/sac.py. test_buffers.py compares relabelled rows."""
from collections import Counter

import pytest
import torch
from scipy import stats

from algos import sac, sac_her
from tests.helpers import quick, rows, same, script
from utils.envs import make_envs
from utils.evaluate import evaluate
from utils.goals import goal_env

COUNTER = "tests.envs:GoalCounter-v0"
ENDS = "tests.envs:GoalEnds-v0"


@pytest.mark.parametrize("size", [100, 5, 1], ids=["part", "wrapped", "least"])
def test_every_stored_step_and_every_goal_of_its_future_is_drawn_as_often(size):
    """Of three GoalCounters, by brute force. There are `size` rows for each of them."""
    envs = make_envs(cfg := quick(sac_her, COUNTER), 3)
    space = envs.single_observation_space
    agent = sac_her.Agent(space, envs.single_action_space, cfg)
    buffer = sac_her.HindsightBuffer(3 * size, space, 2, torch.device("cpu"), 3, goal_env(envs), 4)
    obs, _ = envs.reset(seed=7)
    for _ in range(33):
        obs = sac_her.interact(agent, envs, buffer, obs, agent.act(obs))
    expected = {}                                               # of 5000 draws
    for number in range(3):
        seen = [row[0] for row in script(number, 33)[0]]
        for at in range(max(0, 33 - size), 33):
            future = [row for row in seen[at:] if row[1] == seen[at][1]]
            share = 5000 / (min(size, 33) * 3 * len(future))
            expected |= {(*seen[at], later[2] + 1): share for later in future}
    batch = buffer.sample(6250)
    drawn = Counter(map(tuple, torch.cat([batch.obs[:, :3], -1 - batch.obs[:, 5:]], 1)[:5000]
                        .int().tolist()))
    assert drawn.keys() == expected.keys()
    counts = [drawn[pair] for pair in expected]
    assert stats.chisquare(counts, list(expected.values())).pvalue > 1e-3
    buffer.device = torch.device("meta")                        # stands for a GPU
    assert {column.device.type for column in vars(buffer.sample(5)).values()} == {"meta"}


def test_without_hindsight_it_is_sac_to_the_bit():
    """SAC on the same environment, whose observations are joined as the networks see them."""
    settings = {"env": ENDS, "num_envs": 2, "start_steps": 32, "total_steps": 160}
    ours = sac_her.train(quick(sac_her, run_dir="ours", her_k=0, **settings))
    theirs = sac.train(quick(sac, run_dir="theirs", env_kwargs='{"joined": true}', **settings))
    assert same(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert rows("ours") == rows("theirs") and len(rows("ours")) == 3
    assert rows("ours", "episodes.csv") == rows("theirs", "episodes.csv")
    other = sac_her.train(quick(sac_her, run_dir="other", **settings))
    assert not same(dict(other.state_dict()), dict(ours.state_dict()))


@pytest.mark.slow
def test_hindsight_learns_what_sac_does_not_see():
    success = []
    for her_k in (4, 0):
        cfg = quick(sac_her, "tasks:BitFlip-v0", env_kwargs='{"bits": 6}', her_k=her_k,
                    total_steps=1500, start_steps=300, report_every=500, buffer_size=1500,
                    batch_size=64, hidden=(64,), lr=5e-3, gamma=0.9, tau=0.05, alpha=0.05,
                    learn_alpha=False, run_dir=f"k{her_k}")
        returns, lengths = evaluate(sac_her.train(cfg), cfg, 100, seed=1)
        success.append((returns > -lengths).mean())
    assert success[0] > 0.9 and success[1] < 0.5
