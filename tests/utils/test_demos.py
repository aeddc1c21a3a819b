"""`utils.play --record` and `utils.demos`: what is written, what is read again, what is refused."""
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from algos import bc, ppo
from tests.envs import Counter
from tests.helpers import agent_for, refused, script, write_demos
from tests.registry import config, module
from tests.utils.test_checkpoint import Payload
from utils import demos, play
from utils.envs import make_envs
from utils.evaluate import evaluate

LIMIT = '{"max_episode_steps": 40}'


def trained(name="ppo", env="CartPole-v1"):
    """Make a short run."""
    module(name).train(config(name, env=env, env_kwargs=LIMIT))


def load(env="CartPole-v1", **settings):
    """Return what an algorithm would learn from."""
    cfg = bc.Config(**{"env": env, "demos": "demos.npz", "subsample": 1} | settings)
    return demos.load_demos(cfg, make_envs(cfg, 1))


# ---- What is recorded

@pytest.mark.parametrize("name,env,stochastic", [
    ("ppo", "Pendulum-v1", False), ("ppo_lstm", "CartPole-v1", False),
    ("ppo", "CartPole-v1", True)])
def test_recorded_episodes_are_those_that_play_plays(name, env, stochastic, capsys):
    """To the bit. `test_rows_are_as_scripted` says which steps they have."""
    trained(name, env)
    plain, returns, recorded = (play.main(play.Play("run", episodes=3, **more)) for more in (
        {}, {"stochastic": stochastic}, {"stochastic": stochastic, "record": "demos.npz"}))
    assert np.array_equal(returns, recorded) and np.array_equal(plain, returns) != stochastic
    arrays = demos.read_demos("demos.npz")
    assert "demos.npz: " in capsys.readouterr().out
    assert np.array_equal(arrays["ret"], returns)
    assert (str(arrays["env"]), str(arrays["env_kwargs"])) == (env, LIMIT)
    ends = np.flatnonzero(arrays["terminated"] | arrays["truncated"]) + 1
    assert len(ends) == 3 and ends[-1] == len(arrays["obs"]) == len(load(env).obs)


def test_rows_are_as_scripted():
    """Also where an episode ends by both, and where others are shorter. Nothing is overwritten."""
    agent = agent_for(ppo, cfg := ppo.Config(env="tests.envs:Counter-v0", hidden=(8,)))
    Counter.made.clear()
    returns, lengths = demos.record_demos(agent, cfg, "demos.npz", 3, seed=1)
    sent = [np.array(env.acts) for env in Counter.made]
    arrays = demos.read_demos("demos.npz")
    assert lengths.tolist() == [3, 7, 1]
    rows, ended = zip(*(script(number, 7) for number in range(3)))
    expected = [row for number in range(3) for row in rows[number][:lengths[number]]]
    assert np.array_equal(arrays["obs"], [row[0] for row in expected])
    assert np.array_equal(arrays["rew"], [row[1] for row in expected])
    assert np.array_equal(arrays["terminated"], [row[3] for row in expected])
    done = arrays["terminated"] | arrays["truncated"]
    assert np.array_equal(done, [row[4] for row in expected])
    assert arrays["truncated"].sum() == 2               # one of them also terminated
    assert np.array_equal(arrays["act"], np.concatenate(
        [acts[:length] for acts, length in zip(sent, lengths)]))
    assert np.array_equal(arrays["ret"], [ends[0][2] for ends in ended])
    Counter.made.clear()
    assert np.array_equal(returns, evaluate(agent, cfg, 3, seed=1)[0])


def test_atari_is_recorded_with_its_true_rewards():
    """In whole games: a lost life ends the learner's episode, and none that is recorded."""
    kwargs = '{"max_num_frames_per_episode": 3000, "episodic_life": true}'
    agent = agent_for(ppo, cfg := ppo.Config("ALE/MsPacman-v5", kwargs, device="cpu"))
    returns, _ = demos.record_demos(agent, cfg, "demos.npz", 1, seed=1, deterministic=False)
    arrays = demos.read_demos("demos.npz")
    assert arrays["obs"].dtype == np.uint8 and arrays["obs"].shape[1:] == (4, 84, 84)
    assert arrays["rew"].max() >= 10 and arrays["rew"].sum() == returns[0]
    assert (arrays["terminated"] | arrays["truncated"]).sum() == 1
    assert not np.array_equal(arrays["obs"][0], arrays["obs"][-1])


def test_a_file_is_replaced_whole_or_not_at_all(monkeypatch):
    trained()
    Path("old.npz").write_text("precious")
    again = play.Play("run", 2, record="old.npz", max_steps=3)
    refused(play.main, again, says="2 of 2 .* within 3 steps .*--max-steps")
    play.main(play.Play("run", 2, record="old.npz"))
    assert len(demos.read_demos("old.npz")["ret"]) == 2
    assert sorted(path.name for path in Path().glob("*.npz*")) == ["old.npz"]


# ---- What is read

def test_actions_become_int64_or_float32_and_observations_stay():
    write_demos(act=np.array([0, 1, 1, 0, 1, 0, 0, 1], np.uint8))
    assert load().act.tolist() == [0, 1, 1, 0, 1, 0, 0, 1] and load().act.dtype == torch.int64
    write_demos(env="HalfCheetah-v4")
    shown = load("HalfCheetah-v4")
    assert (shown.obs.dtype, shown.act.dtype) == (torch.float64, torch.float32)
    assert np.array_equal(shown.obs, demos.read_demos("demos.npz")["obs"])


@pytest.mark.parametrize("count,rows", [(0, 8), (1, 3), (2, 7), (3, 8)])
def test_so_many_episodes_are_taken_from_the_start(count, rows):
    """Whether they were terminated or cut by a time limit; the second and the last are cut."""
    arrays = write_demos(lengths=(3, 4, 1))
    assert np.array_equal(load(num_trajectories=count).obs, arrays["obs"][:rows])
    refused(load, num_trajectories=4, says="--num-trajectories is 4, but demos.npz has 3")


def test_every_kth_pair_of_an_episode_from_an_offset_of_its_own():
    lengths = 40 * (23,)
    arrays = write_demos(lengths=lengths)
    numbers = {tuple(row): i for i, row in enumerate(arrays["obs"])}
    offsets = []
    for seed in (1, 2):
        shown = load(subsample=7, seed=seed)
        rows = np.array([numbers[tuple(row)] for row in shown.obs.numpy()])
        assert np.array_equal(shown.act, arrays["act"][rows])
        episodes = [rows[rows // 23 == k] % 23 for k in range(40)]
        for steps in episodes:
            assert steps[0] < 7 and set(np.diff(steps)) == {7} and steps[-1] + 7 >= 23
        offsets.append([steps[0] for steps in episodes])
        assert set(offsets[-1]) == set(range(7))
    assert offsets[0] != offsets[1]
    assert torch.equal(*(load(subsample=7, seed=1).obs for _ in range(2)))
    write_demos(lengths=(3, 1, 5))                              # shorter ones give one pair each
    assert len(load(subsample=20).obs) == 3


# ---- What is refused

N = 8                                                           # rows of the file
NOTHING = {name: [] for name in ("obs", "act", "rew", "terminated", "truncated", "ret")}
NO = "cannot be read, or is not what python -m utils.play RUN --record demos.npz writes: "
BAD = {
    "missing": (lambda: Path("demos.npz").unlink(), NO + "[Errno 2] No such file"),
    "a pickle": (lambda: pickle.dump(Payload(), open("demos.npz", "wb")), NO),
    "objects": (lambda: write_demos(ret=np.array([Payload(), Payload()])), NO),
    "a flipped bit": (lambda: flip_bit("demos.npz"), NO),
    "no ret": (lambda: write_demos(ret=None), NO + "'ret is not a file"),
    "no steps": (lambda: write_demos(lengths=(), **NOTHING), NO),
    "another length": (lambda: write_demos(act=np.zeros(N + 1, int)), NO + "its arrays do not fit"),
    "no end": (lambda: write_demos(truncated=np.zeros(N, bool)), NO + "its arrays do not fit"),
    "texts": (lambda: write_demos(act=np.full(N, "left")), "act, <U4 [8], is not of the space"),
    "obs of another size": (lambda: write_demos(obs=np.zeros((N, 3), np.float32)),
                            "obs, float32 [8, 3], is not of the space of --env CartPole-v1"),
    "obs of another kind": (lambda: write_demos(obs=np.zeros((N, 4))), "obs, float64 [8, 4]"),
    "act too large": (lambda: write_demos(act=2 * np.eye(N)[0].astype(int)), "act, int64 [8], is"),
}


def flip_bit(file):
    data = bytearray(Path(file).read_bytes())
    data[data.index(b"obs.npy") + 200] ^= 1
    Path(file).write_bytes(data)


@pytest.mark.parametrize("spoil,message", BAD.values(), ids=BAD)
def test_a_damaged_file_is_refused_and_nothing_in_it_is_run(spoil, message):
    write_demos()
    spoil()
    said = refused(load)
    assert message in said                                      # `refused`: nothing was written
    refused(load, demos="", says="--demos .* is not what python -m utils.play RUN --record demos")


@pytest.mark.parametrize("act,fits", [((-2.0,), True), ((2.0,), True), ((2.01,), False),
                                      ((-2.01,), False), ((np.nan,), False)])
def test_bounds_of_a_box(act, fits):
    write_demos(env="Pendulum-v1", act=np.float32([(0.0,)] * (N - 1) + [act]))
    load("Pendulum-v1") if fits else refused(load, "Pendulum-v1", says="not of the space")
