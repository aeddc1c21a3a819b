"""What a run writes: progress.csv, episodes.csv, TensorBoard and the console."""
import numpy as np
import pytest
import torch

from tests.helpers import rows
from tests.toy import Config, Rare, Stop, start, train
from utils.run import checkpoint
from utils.run.directory import find_run_dir
from utils.run.settings import parse


@pytest.fixture
def log():
    with start(Config(total_steps=5000)) as run:
        yield run


def test_statistics_are_those_of_numpy(log):
    generator = np.random.default_rng(1)
    parts = [generator.normal(5, 2, shape) for shape in [(7,), (2, 3), (0,), (1, 1, 4)]]
    for part in parts:
        stored = part.copy(), torch.tensor(part, dtype=torch.float32, requires_grad=True)
        log.store(a=stored[0], b=stored[1])
        stored[0][...] = stored[1].data[...] = 9                # buffers may be used again
    log.store(count=3, loss=(one := torch.tensor(1.0)), flag=True)
    one.fill_(9)
    log.store(count=np.int64(4), loss=2, half=np.float32(0.1), list=[1, 2])
    for name in "step time steps_per_second ep_ret_mean ep_len success eval_ret eval_q_min".split():
        with pytest.raises(ValueError, match=f"its own {name};"):
            log.store(**{"a": 1, name: 2})
    log.advance(100, none=np.zeros(0))
    row, flat = rows()[-1], np.concatenate([part.ravel() for part in parts])
    for name, value in {"mean": flat.mean(), "std": flat.std(), "min": flat.min(),
                        "max": flat.max()}.items():
        assert float(row[f"a_{name}"]) == pytest.approx(value, rel=1e-12)
        assert float(row[f"b_{name}"]) == pytest.approx(value, rel=1e-6)
    assert [row[name] for name in ("count", "loss", "flag")] == ["3.5", "1.5", "1.0"]
    assert row["half"] == repr(float(np.float32(0.1))) and row["list_mean"] == "1.5"
    assert not any(name.startswith("none") for name in row)


def test_episodes(log):
    log.advance(100, (0, 3, 5.0, 9), (24, 1, 1.5, 4), (0, 0, 3.0, 5))
    log.advance(100)
    log.advance(100, (22, 0, 2.0, 1), (26, 1, 0.0, 1))      # as of a rank that takes more steps
    assert [[row[name] for name in ("step", "env", "ep_ret", "ep_len")]
            for row in rows(name="episodes.csv")] == [
        ["4", "1", "1.5", "4"], ["100", "0", "3.0", "5"], ["100", "3", "5.0", "9"],
        ["201", "1", "0.0", "1"], ["212", "0", "2.0", "1"]]
    first, none, last = rows()
    assert first["ep_ret_mean"] == repr(9.5 / 3) and first["ep_len_max"] == "9.0"
    assert none["ep_ret_mean"] == none["ep_len_std"] == "" and last["ep_ret_std"] == "1.0"


def test_success_of_episodes_that_tell_it(log, capsys):
    """A column of episodes.csv; in progress.csv the mean over the episodes that ended. The table
    shows it early, since it cuts off late columns."""
    names = {f"a{k}": float(k) for k in range(9)}
    log.advance(100, (0, 0, 5.0, 9), **names)
    log.advance(100, (0, 0, 5.0, 9, 1.0), (0, 1, 5.0, 9, 0.0), (0, 2, 5.0, 9, 1.0), **names)
    log.advance(100, (0, 0, 5.0, 9, 0.0), eval_ret=np.array([7.0]))
    log.advance(100)
    assert [row["success"] for row in rows()] == ["", repr(2 / 3), "0.0", ""]
    assert [row["success"] for row in rows(name="episodes.csv")] == ["", "1.0", "0.0", "1.0", "0.0"]
    titles = [line.split() for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert "success" not in titles[0] and titles[1][4] == "success"
    assert titles[2][4:7] == ["success", "eval_ret", "a0"]


@pytest.mark.parametrize("name,value,episodes", [
    ("q_loss", np.nan, []), ("q_loss", np.inf, []), ("q_loss", -np.inf, []),
    ("q_loss_mean", [1.0, np.nan], []), ("ep_ret_mean", 1.0, [(0, 0, np.nan, 3)])], ids=str)
def test_what_is_not_finite_stops_the_run(name, value, episodes):
    with pytest.raises(FloatingPointError, match=f"^{name} is .* at step 200") as caught:
        with start(Config()) as log:
            log.advance(100, q_loss=1.0)
            log.advance(100, *episodes, v_loss=1.0, q_loss=value)
    assert caught.value.__notes__ == [
        "In CartPole-v1, after step 200; the checkpoint of step 100 in run stays; --resume "
        "continues it"]
    assert len(rows()) == 1
    assert checkpoint.load_resume("run")[0] == checkpoint.load_file("run/policy.pt")["step"] == 100


def test_a_policy_with_nan_is_not_saved():
    agent = torch.nn.Linear(3, 2)
    with pytest.raises(FloatingPointError, match="weight of the agent is nan"):
        with start(Config(), agent) as log:
            agent.weight.data[1, 2] = float("nan")                 # one number is enough
            log.advance(100)
    assert checkpoint.load_file("run/policy.pt")["step"] == 0


def test_the_table_shows_returns_first_and_leaves_cells_empty(capsys):
    with start(Config(eval_every=200)) as log:
        log.evaluate = lambda: log.logger.store(eval_ret=np.array([7.0]))
        log.advance(100, loss=1.0)
        log.advance(100, (0, 0, 5.0, 9))
        table = capsys.readouterr().out.splitlines()[-3:]
        assert table[0].split() == ["step", "steps/s", "ep_ret", "ep_len", "eval_ret", "loss"]
        assert len(table[1]) == len(table[0]) and table[1].split()[2:] == ["1"]
        assert table[2].split()[2:] == ["5", "9", "7"]  # no column has moved
        log.advance(100, **dict.fromkeys("abcdefgh", 1.0))
        assert capsys.readouterr().out.splitlines()[-2].endswith(" e")  # the others: progress.csv


def test_a_long_run_has_fifty_lines_with_means(capsys):
    """progress.csv has all rows. The first line comes at once, the last at the end."""
    with start(Config(total_steps=40_000)) as log:
        for k in range(1, 401):
            log.advance(100, *[(0, 0, float(k), 9)] * (k % 8 == 5), loss=k)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    first, *table = [line for line in lines if line[0].replace(",", "").isdecimal()]
    assert first[0] == "100"
    assert [line[0] for line in table] == [f"{800 * k:,}" for k in range(1, 51)]
    assert lines.count(["step", "steps/s", "ep_ret", "ep_len", "loss"]) == 3
    assert [line[2:] for line in table[:2]] == [["5", "9", "5"], ["13", "9", "12.5"]]
    assert len(rows()) == 400


@pytest.mark.parametrize("cfg,said", [
    (Rare(start_steps=300), "300; steps take longer then"), (Rare(), "80; s"), (Config(), "")])
def test_a_run_says_when_learning_starts(cfg, said, capsys):
    with start(cfg):
        pass
    assert (f"learning starts at step {said}" in capsys.readouterr().out) == bool(said)


def test_a_resume_with_more_steps_starts_no_later_to_learn():
    with pytest.raises(Stop):
        train(Rare(), stop_at=100)
    more = ["--resume", "--total-steps", "1e5"]
    for cfg in (Rare.of_run("run", resume=True, total_steps=1e5), parse(Rare, "", more)):
        assert find_run_dir(cfg).start_steps == 80 < Rare(total_steps=1e5).start_steps
