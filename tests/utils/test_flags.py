"""The command line of every program: its --help, and what it says about wrong flags."""
import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest
import tyro

from algos import (
    a2c,
    acer,
    acktr,
    bc,
    ddpg,
    dqn,
    dqn_atari,
    dqn_per,
    gail,
    ppo,
    ppo_lstm,
    ppo_popart,
    sac,
    sac_her,
    td3,
    trpo,
    vpg,
)
from tests.helpers import ROOT, name_of, run
from utils import flags, play
from utils.flags import read_command
from utils.mpi import UsageError
from utils.run import parse

ALGOS = [vpg, a2c, acer, acktr, ppo, ppo_popart, ppo_lstm, gail, bc, trpo, ddpg, td3, sac,
         sac_her, dqn, dqn_atari, dqn_per]
MODULES = ["algos.ppo", "utils.play", "utils.sweep", "tests.probe", "tests.mutants"]
SCRIPTS = ["plot.py", *(f"benchmarks/{name}.py" for name in
                        ("sb3", "speed", "table"))]
PROGRAMS = {f"python -m {name}": ["-m", name] for name in MODULES} | {
    f"python {name}": [ROOT / name] for name in SCRIPTS}


# ---- --help

@pytest.mark.parametrize("prog", PROGRAMS)
def test_help_says_how_the_program_is_called(prog):
    text = run([sys.executable, *PROGRAMS[prog], "--help"],
               env=os.environ | {"COLUMNS": "80"}).stdout
    check_help(text, prog)


@pytest.mark.parametrize("algo", ALGOS, ids=name_of)
def test_help_of_every_algorithm(algo, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(algo.Config, algo.__doc__, ["--help"])
    text = capsys.readouterr().out
    assert text.startswith(algo.__doc__)
    check_help(text, f"python -m {algo.__name__}")


@pytest.mark.parametrize("before,on,frozen", [
    ("", True, True), ("gc.disable(); ", False, True), ("import torch; ", True, False)],
    ids=["as usual", "already off", "PyTorch is here already"])
def test_the_garbage_collector_waits_for_pytorch_and_works_on(before, on, frozen):
    run([sys.executable, "-c", f"import gc; {before}import algos.a2c; "
         f"assert gc.isenabled() is {on}; assert (gc.get_freeze_count() > 100_000) is {frozen}"])


@pytest.mark.skipif(os.name == "nt", reason="there are no such pipes")
@pytest.mark.parametrize("lines", [0, 1, 300])
def test_help_ends_in_silence_when_its_reader_leaves(lines):
    """As in `--help | head -1`. Whether the pipe breaks while printing or at the end is chance."""
    child = subprocess.Popen([sys.executable, "-m", "utils.sweep", "--help"], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(lines):
        child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == "" and child.wait() == (0 if lines == 300 else 141)


def check_help(text, prog):
    assert f"usage: {prog} [-h]" in text and str(ROOT) not in text


@dataclass
class Words:
    """Settings of each kind."""

    run: tyro.conf.Positional[tuple[str, ...]] = ()  # words without a flag
    lr: float = 0.1
    number: int | None = None
    pair: tuple[str, str] = ("", "")
    widths: tuple[int, ...] = ()
    smooth: Literal[1, 10] = 1
    fast: bool = False


def read(*args):
    return read_command(Words, "", "words", args)


def test_the_docstring_keeps_its_lines(capsys):
    with pytest.raises(SystemExit) as caught:
        read_command(Words, "One.\n\n    two     three\nfour\n", "python words.py", ["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("One.\n\n    two     three\nfour\n") and "python words.py [-h]" in out


# ---- What is right passes

def test_every_kind_of_value():
    assert read() == Words()
    assert read("a", "b", "--lr", "-1e-3", "--fast") == Words(("a", "b"), lr=-1e-3, fast=True)
    assert read("--no-fast", "--number=7", "--pair", "x", "y") == Words(number=7, pair=("x", "y"))
    assert read("--number", "None", "--widths", "1", "2", "3") == Words(widths=(1, 2, 3))
    assert read("--widths") == Words() and read("--smooth", "10").smooth == 10
    assert read("--lr", "-inf").lr == -float("inf")


def test_underscores_and_dashes_are_the_same():
    cfg = parse(ppo.Config, "", ["--num_envs=4", "--no_norm_obs", "--rollout-steps", "64"])
    assert (cfg.num_envs, cfg.norm_obs, cfg.rollout_steps) == (4, False, 64)


# ---- What is wrong is named

@pytest.mark.parametrize("given,said", [
    ("--render", "utils.play RUN --video"), ("--seeds", "utils.sweep --seeds"),
    ("--algo", "python -m algos."), ("--title", "--help lists the flags"),
])
def test_what_an_algorithm_does_not_have(given, said):
    with pytest.raises(UsageError, match=f"^there is no {given}; .*{said}"):
        parse(ppo.Config, "", [given, "3"])


@pytest.mark.parametrize("given,said", [
    ("--run x", "the run directory stands alone"), ("--deterministic", "it is the default"),
    ("--env x", "says which environment"), ("--algo x", "says which algorithm"),
    ("--num-episodes 3", "did you mean --episodes?"), ("--render", "did you mean --video?"),
])
def test_what_play_does_not_have(given, said):
    with pytest.raises(UsageError, match=f"^there is no {given.split()[0]}; .*{re.escape(said)}"):
        read_command(play.Play, "", "play", ["run", *given.split()], play.HINTS.get)


@pytest.mark.parametrize("args,said", [
    ("--lr x", "--lr is x; it takes a number, such as 0.01 or 1e6"),
    ("--lr=", "--lr is ; it takes a number"),
    ("--number 1e-3", "--number is 1e-3; it takes a whole number$"),
    ("--number 1.5", "--number is 1.5; it takes a whole number$"),
    ("--number inf", "--number is inf; it takes a whole number$"),
    ("--smooth 5", "--smooth is 5; it takes 1 or 10"),
    ("--widths 1 2,3", "--widths is 2,3; it takes a whole number, or several with spaces .*: 2 3"),
    ("--widths [4,5]", "--widths is .4,5.; .*: 4 5$"),
    ("--lr", "--lr needs a value"), ("--pair", "--pair needs a value"),
    ("--slow", "there is no --slow; --help lists the flags"),
    ("-lr 3", "there is no -lr; did you mean --lr?"),
    ("--no-lr", "there is no --no-lr"), ("--run x", "there is no --run"),
])
def test_what_is_wrong_is_named(args, said):
    with pytest.raises(UsageError, match=f"^{said}"):
        read(*args.split())


@pytest.mark.parametrize("given,meant", [
    ("1e3", 1000), ("2.5e1", 25), ("-1e1", -10), ("7", 7), (f"{2**60 + 1}", 2**60 + 1),
])
def test_whole_numbers_may_be_written_with_an_exponent(given, meant):
    for words in (["--number", given], [f"--number={given}"]):
        number = read("--lr", "1e-3", *words, "--widths", given, "2").number
        assert number == meant and type(number) is int
    assert read("--widths", given, "2").widths == (meant, 2)
    assert read("--pair", given, "2").pair == (given, "2")


def test_any_number_of_widths():
    assert parse(ppo.Config, "", ["--hidden", "8", "4", "2"]).hidden == (8, 4, 2)


def test_a_word_too_many():
    with pytest.raises(UsageError, match="^3 stands without a flag; --help lists the flags$"):
        parse(ppo.Config, "", ["3"])
    with pytest.raises(UsageError, match="^--no-norm-obs takes no value, but got 1: --norm-obs"):
        parse(ppo.Config, "", ["--no-norm-obs=1"])
    with pytest.raises(UsageError, match="^--seed takes 1 value, but got 1 2$"):
        parse(ppo.Config, "", ["--seed", "1", "2"])


@pytest.mark.parametrize("algo,theirs,ours", [
    (ppo, "learning_rate", "--lr"), (ppo, "n_envs", "--num-envs"), (ppo, "n_steps",
                                                                    "--rollout-steps"),
    (ppo, "batch_size", "--minibatch-size"), (sac, "minibatch_size", "--batch-size"),
    (ppo, "total_timesteps", "--total-steps"), (dqn, "timesteps", "--total-steps"),
    (ppo, "entropy_coef", "--ent-coef"), (sac, "ent_coef", "--alpha"), (a2c, "gae_lambda", "--lam"),
    (ppo, "clip_range", "--clip-ratio"), (ppo, "n_epochs", "--epochs"), (vpg, "vf_lr", "--v-lr"),
    (sac, "learning_starts", "--start-steps"), (ddpg, "polyak", "--tau"), (td3, "hid", "--hidden"),
    (trpo, "target_kl", "--max-kl"), (dqn, "exploration_fraction", "--eps-steps"),
    (dqn, "target_update_interval", "--target-every"), (sac, "replay_size", "--buffer-size"),
    (ppo, "env_id", "--env"), (ppo, "cuda", "--device"), (ppo, "save_dir", "--run-dir"),
    (ppo, "eval_freq", "--eval-every"), (ppo, "n_cpu", "--num-procs"),
    (ppo, "max_episode_steps", "--env-kwargs"),
])
def test_names_in_other_libraries(algo, theirs, ours):
    """With dashes or underscores, with a space or "=" before the value."""
    for given in (f"--{theirs}", f"--{theirs.replace('_', '-')}"):
        for args in ([given, "1"], [f"{given}=1"]):
            with pytest.raises(UsageError) as caught:
                parse(algo.Config, "", args)
            message = str(caught.value)
            assert message.startswith(f"there is no {given}; did you mean {ours}?"), message


def test_a_name_that_means_something_else_is_explained():
    for algo, theirs, said in ((ddpg, "polyak", "tau is 1 - polyak"),
                               (ppo, "n_steps", "of all environments together"),
                               (ppo, "num_minibatches", "it takes a size")):
        with pytest.raises(UsageError, match=rf"\? \(.*{said}.*\)$"):
            parse(algo.Config, "", [f"--{theirs}", "1"])


def test_every_name_that_is_suggested_exists():
    known = {field.name for algo in ALGOS for field in dataclasses.fields(algo.Config)}
    assert set(flags.OTHERS_SAY) <= known | {"jobs", "video"}
    words = " ".join(flags.OTHERS_SAY.values()).split()
    assert flags.REMARKS.keys() <= set(words)
    for ours, theirs in flags.OTHERS_SAY.items():
        assert ours not in theirs.split() and re.fullmatch(r"[a-z_ ]+", theirs)


def test_a_setting_that_exists_is_never_guessed_at():
    """`batch_size` is another library's name for `minibatch_size`, and a setting of SAC."""
    assert parse(sac.Config, "", ["--batch-size", "64"]).batch_size == 64
    for algo in ALGOS:
        for field in dataclasses.fields(algo.Config):
            assert flags.setting_of(flags.flag(field.name), flags.flags_of(algo.Config)[0]), (
                name_of(algo))
