"""The doctor: it names the bug that a run looks like, and leaves a healthy run alone."""
import json

import numpy as np
import pytest

from diagnose import doctor
from tests.helpers import refused
from utils.command import read_command
from utils.files import read_lines, write_lines
from utils.returns import parts

CLEAN, BUGS = "ppo", {"ppo+time-limit-is-an-end": (5, 0), "ppo+entropy-is-punished": (0, -5)}
STEPS = 1000


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that writes a run: `shift` moves kl, and val from its second half on."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)

    def write(algo, seed, shift=(0, 0), env="CartPole-v1", until=STEPS, scale=1):
        run = folder / env / algo / f"seed{seed}"
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({
            "algo": algo, "module": f"algos.{algo}",
            "settings": {"env": env, "seed": seed, "total_steps": STEPS}}))
        (run / "result.json").touch()
        rows = ["step,time,kl,val_mean,success"]
        for at in range(20, until + 1, 20):
            kl, val = rng.uniform(-1, 1, 2) + (shift[0], shift[1] * (at > STEPS / 2))
            rows.append(f"{at},1,{kl},{scale * val},")      # nothing is known of success
        (run / "progress.csv").write_text("\n".join(rows) + "\n")
        return run

    for seed in range(1, 6):
        write(CLEAN, seed)
        for bug, shift in BUGS.items():
            write(bug, seed, shift)
    write.folder = folder
    return write


@pytest.fixture
def learned(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "DATA", tmp_path / "doctor.jsonl")
    rows = [row for row in doctor.learn([runs.folder]) if row["env"] == "CartPole-v1"]
    write_lines(doctor.DATA, rows)


def ask(capsys, run):
    return doctor.ask(run), capsys.readouterr().out


def test_a_copy_with_a_bug_is_told_from_a_healthy_run(runs, learned, capsys):
    status, said = ask(capsys, runs("my_ppo", 11))
    assert status == 0 and said.startswith(
        "my_ppo on CartPole-v1, 1,000 steps, beside 3 healthy runs of ppo\n"
        "healthy   nothing is out of the ordinary; ") and said.count("nearest   ") == 2
    for (bug, shift), first, name in zip(BUGS.items(), ("step 0", "step 500"), ("kl", "val_mean")):
        status, said = ask(capsys, runs(f"my_{bug[-3:]}", 11, shift))
        lines = said.splitlines()
        assert status == 1 and len(lines) <= 10
        assert lines[1].startswith(f"unusual   {name} from {first}: ")
        assert lines[2].startswith(f"suspect   {bug.replace('+', '-')}: ")


def test_a_run_that_is_not_over_and_one_of_another_task(runs, learned, capsys):
    assert ask(capsys, runs("early", 11, (5, 0), until=300))[0] == 1
    assert ask(capsys, runs("early", 12, (0, -5), until=300))[0] == 0   # it begins later
    status, said = ask(capsys, runs("ppo", 11, scale=100, env="Other-v0"))
    assert status == 0 and "on CartPole-v1; only in metrics without a unit" in said     # not val
    assert ask(capsys, runs("ppo", 12, (9, 0), env="Other-v0"))[0] == 1                 # but kl
    run = runs("long", 11)
    (run / "config.json").write_text((run / "config.json").read_text().replace("1000", "5000"))
    assert "only runs of 1,000 steps are known" in ask(capsys, run)[1]
    text = (run / "progress.csv").read_text()
    (run / "progress.csv").write_text(text.replace("kl", "klunk"))
    doctor.DATA.write_text(doctor.DATA.read_text().replace('"kl"', '"val_max"'))
    assert ask(capsys, run)[1].splitlines()[-1].startswith("unknown ")


def test_what_is_no_finished_run_is_refused(tmp_path):
    for do in "learn", "score":
        refused(doctor.main, doctor.Doctor(do, (tmp_path,)), says=f"no finished run in {tmp_path}")
    refused(read_command, doctor.Doctor, "", "doctor", ["x"], says="'x' for argument 'do'")


def test_parts_are_means_of_what_is_known():
    means = parts(np.array([0, 5, 10, 15, 40]), np.array([1, 3, np.nan, 7, np.nan]), 40, 4)
    np.testing.assert_equal(means, [2, 7, np.nan, np.nan])


def test_a_run_without_a_row_is_not_called_healthy(runs):
    run = runs("begun", 11, until=0)
    (run / "result.json").unlink()
    refused(doctor.ask, run, says="no row in progress.csv yet")
    (run / "progress.csv").unlink()
    refused(doctor.ask, run, says="no row in progress.csv yet")


def test_rows_replace_those_of_their_task_alone(tmp_path):
    def row(algo, bug, number):
        return {"algo": algo, "bug": bug, "env": "e", "steps": 9, "number": number}

    path = tmp_path / "rows.jsonl"
    doctor.renew(path, [row("ppo", "", 1), row("ppo", "x", 2), row("a2c", "", 3)])
    doctor.renew(path, [row("ppo", "", 4)])
    assert [each["number"] for each in read_lines(path)] == [3, 4]


def test_other_seeds_are_scored(runs, learned, capsys):
    told = doctor.score([runs.folder / "CartPole-v1" / name for name in (CLEAN, *BUGS)])
    assert {(row["bug"], row["seed"], row["place"]) for row in told if row["bug"]} == {
        (bug.partition("+")[2], seed, 1) for bug in BUGS for seed in (4, 5)}
    assert doctor.summary(told) == (
        "Of 4 runs with one of 2 bugs, it named the right bug first in 100% (guessing: 50%), and "
        "among its three in 100% (guessing: 100%, since few bugs are known of a task). It called "
        "100% of these runs unusual, and 0% of 2 healthy runs of 1 algorithms on 1 tasks")
    late = doctor.summary([row | {"place": 3 + row["seed"] % 2} for row in told])
    assert "first in 0%" in late and "three in 50%" in late
    told = [row | {"place": None, "unusual": 0.5 * (not row["bug"])} for row in told]
    assert "three in 0%" in doctor.summary(told)
    assert "called 0% of these runs unusual, and 100% of 2" in doctor.summary(told)
