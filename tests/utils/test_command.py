"""The command line of every program: --help, wrong flags, settings out of range, how it ends."""
import dataclasses
import importlib
import inspect
import os
import re
import runpy
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from algos import c51, ddpg, dqn, ppo, sac, vpg
from tests import toy
from tests.helpers import ROOT, name_of, not_on_windows, refused, run
from utils import mpi, play
from utils.errors import UsageError
from utils.load import find_module
from utils import command
from utils.command import flag, program, read_command
from utils.run.signals import Stopped
from utils.run.settings import parse

ALGOS = [importlib.import_module(f"algos.{path.stem}") for path in ROOT.glob("algos/[a-z]*.py")]
PROGRAMS = "algos.ppo", "utils.play", "utils.sweep", "plot", "diagnose.probe", "docs"


# ---- --help

@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", PROGRAMS)
def test_help_says_how_the_program_is_called(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m {name} [-h]") and str(ROOT) not in text


@pytest.mark.parametrize("algo", ALGOS, ids=name_of)
def test_help_of_every_algorithm(algo, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(algo.Config, algo.__doc__, ["--help"])
    text = capsys.readouterr().out
    usage, title, settings = text.split("\n\n", 2)
    assert usage == f"usage: python -m {algo.__name__} [-h] [OPTIONS]"
    assert text.endswith(f"\n\n{algo.__doc__}")
    assert algo.__doc__.startswith(title) and len(title) > 10 and "\n" not in title
    assert str(ROOT) not in text and "(default: )" not in text
    assert max(map(len, settings.removesuffix(algo.__doc__).splitlines())) <= 80
    words = " ".join(text.split())
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(algo.Config), re.M))
    for field in dataclasses.fields(algo.Config):
        comment = re.escape(comments.get(field.name, ""))
        assert re.search(f" {flag(field.name)}[ ,].*{comment}", words), field.name
    first, other = (re.findall(r"^  (--[a-z0-9-]+)", part, re.M)
                    for part in settings.partition("often-changed options")[2].split(" other opt"))
    assert set(first) == {"--env", "--total-steps", "--seed", "--num-envs", "--lr"} & {
        *first, *other} and first[0] == "--env"
    own = [flag(name) for name in algo.Config.__annotations__]
    assert {*other[:other.index("--env-kwargs")]} == {*own} - {*first}  # those of every run follow
    assert len(text.splitlines()) < 160


def test_the_package_lists_the_algorithms():
    """And nobody takes its __main__ for one."""
    first, *lines, last = run([sys.executable, "-m", "algos"]).stdout.splitlines()
    assert first == "python -m algos.a2c          Advantage Actor-Critic (A2C)" and "--help" in last
    assert len(lines) + 1 == len(ALGOS) and max(map(len, lines)) < 90
    refused(find_module, "algos.x", "x", says="no algos.x, only algos.a2c, .*, algos.vpg$")


@dataclass
class Words:
    """Settings of each kind."""

    run: tuple[str, ...]  # words without a flag
    lr: float = 0.1
    number: int | None = None
    pair: tuple[str, str] = ("", "")
    widths: tuple[int, ...] = ()
    smooth: Literal[1, 10] = 1
    fast: bool = False


def read(*args):
    return read_command(Words, "", "words", args)


# ---- What is right passes, and what is wrong is named

def test_every_kind_of_value():
    assert read() == Words(())
    assert read("a", "b", "--lr", "-0.1", "--fast") == Words(("a", "b"), lr=-0.1, fast=True)
    assert read("--no-fast", "--number=7", "--pair", "x", "y") == Words((), number=7,
                                                                        pair=("x", "y"))
    assert read("--number", "None", "--widths", "1", "2", "3") == Words((), widths=(1, 2, 3))
    assert read("--fast", "a", "b", "--lr", "1") == Words(("a", "b"), lr=1.0, fast=True)
    assert read("--widths") == Words(()) and read("--smooth", "10").smooth == 10
    assert read("--lr", "-1e-1") == read("--lr=-1E-1") == Words((), lr=-0.1)
    assert read("--lr", "1", "--lr", "2", "--fast", "--no-fast") == Words((), lr=2.0)  # the last
    assert parse(ppo.Config, "", ["--num_envs", "4", "--env-kwargs", '{"a": -1}']) == ppo.Config(
        num_envs=4, env_kwargs='{"a": -1}')
    assert parse(ppo.Config, "", ["--no-norm-obs"]).norm_obs is False  # which is on by default


@pytest.mark.parametrize("args,said", [
    ("ppo --title 3", "there is no flag --title; --help lists the flags$"),
    ("ppo 3", "3 belongs to no flag; "), ("ppo --seed 1 2", "2 belongs to no flag; "),
    ("ppo --norm-obs True", "True belongs to no flag; what is on or off takes no value"),
    ("ppo --device gpu --seed 3", ".*'gpu' .*'--device'.*'auto', 'cpu', 'cuda'"),
    ("play --seed 1", "Missing .*: RUN .*a run d"),
    ("--lr x", "--lr: .*'x'$"), ("--lr=", "--lr: .*''$"), ("--lr", ".*'--lr'"),
    ("--number 1e-3", "--number: .*'1e-3'"), ("--number inf", "--number: .*'inf'"),
    ("--smooth 5", ".*'5' .*'--smooth'.*'1', '10'"), ("--pair x", ".*'--pair'. Expected 2 values"),
    ("--widths 1 2,3", "--widths: .*'1', '2,3'"),
    ("a --fast --lr 1 --number x", "--number: .*'x'"),
    ("--slow", "there is no flag --slow; --help lists the flags"),
    ("-lr 3", "there is no flag -lr; did you mean --lr?"),
    ("--no-lr", "there is no flag --no-lr"), ("--run x", "there is no flag --run"),
])
def test_what_is_wrong_is_named(args, said, capfd):
    """Of an algorithm, of a program that needs a word, and of `Words`."""
    first, *rest = args.split()
    ask = {"ppo": partial(parse, ppo.Config, "", rest),
           "play": partial(read_command, play.Play, "", "play", rest)}
    refused(ask.get(first, partial(read, *args.split())), says=f"^{said}")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("given,meant", [
    ("1e3", 1000), ("2.5E1", 25), ("-7", -7), (f"{2**60 + 1}", 2**60 + 1),
])
def test_whole_numbers_may_be_written_with_an_exponent(given, meant):
    for words in (["--number", given], [f"--number={given}"]):
        number = read("--lr", "1e-3", *words, "--widths", given, "2").number
        assert number == meant and type(number) is int
    assert read("--widths", given, "2").widths == (meant, 2)
    assert read("--pair", given, "2").pair == (given, "2")


@pytest.mark.parametrize("algo,theirs,ours", [
    (ppo, "learning_rate", "--lr"), (ppo, "n_envs", "--num-envs"), (ppo, "n_steps",
                                                                    "--rollout-steps"),
    (ppo, "batch_size", "--minibatch-size"), (sac, "minibatch_size", "--batch-size"),
    (ppo, "total_timesteps", "--total-steps"), (dqn, "timesteps", "--total-steps"),
    (ppo, "entropy_coef", "--ent-coef"), (sac, "ent_coef", "--alpha"), (vpg, "vf_lr", "--v-lr"),
    (ppo, "num_steps", "--rollout-steps"), (dqn, "num_steps", "--total-steps"),
    (ppo, "batch", "--rollout-steps"), (sac, "batch", "--batch-size"),  # of earlier versions
])
def test_names_in_other_libraries(algo, theirs, ours):
    """With dashes or underscores, with a space or "=" before the value."""
    for given in (f"--{theirs}", f"--{theirs.replace('_', '-')}"):
        for args in ([given, "1"], [f"{given}=1"]):
            message = refused(parse, algo.Config, "", args)
            assert message == f"there is no flag {args[0]}; did you mean {ours}?"


# ---- Ranges

@pytest.mark.parametrize("algo,name,good,bad", [
    (ppo, "clip_ratio", (1e-9, 7), (0, -1)), (ddpg, "act_noise", (0, 9), (-1,)),
    (ppo, "epochs", (1, 9), (0,)), (c51, "v_min", (-9, 0, 9), (float("nan"), float("inf"))),
    (ppo, "gamma", (0, 1), (-0.1, 1.1)), (ppo, "lr", (1e-9,), (0,)),
    (ppo, "seed", (0, 10**15), (-1,)), (toy, "env", ("x",), (5, None)), (toy, "lr", (1,), (None,)),
    (ppo, "num_envs", (1,), (0, False, 10**6)),
    (ppo, "total_steps", (1, 1e12), (0, 1.1e12, float("inf"))),
    (ppo, "hidden", ((1, 2), ()), ((1, 0), (10**6,))), (ppo, "eval_every", (0,), (-1, 10**15)),
    (ddpg, "start_steps", (None, 0), (-1,)),
])
def test_check_settings(algo, name, good, bad):
    for value in good:
        algo.Config(**{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"{flag(name)} is "):  # from Python, a plain one
            algo.Config(**{name: value})


@pytest.mark.parametrize("cores", [1, 6])
def test_more_threads_than_cores_of_this_process_are_refused(cores, monkeypatch):
    """They hang. The machine may have more cores than the process may use."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    ppo.Config(torch_threads=cores)
    said = f"--torch-threads is {cores + 1}; .* at most {cores}$"
    refused(ppo.Config, torch_threads=cores + 1, says=said)


# ---- How a program ends

def test_ctrl_c_reaches_a_program_that_a_shell_runs_with_an_ampersand(monkeypatch):
    """Such a shell lets it ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as caught, program("stopped"):
            signal.raise_signal(signal.SIGINT)
        assert caught.value.code == 130
    finally:
        signal.signal(signal.SIGINT, before)


@not_on_windows("os.kill ends a process there, without a signal")
def test_ctrl_c_while_the_modules_are_imported_prints_nothing():
    Path("gymnasium.py").write_text("import os\nos.kill(os.getpid(), 2)\n")    # found first
    assert run([sys.executable, "-m", "algos.ppo"], -signal.SIGINT).stderr == ""


def noted(error, note):
    error.add_note(note)
    return error


@pytest.mark.parametrize("error,status,said", [
    (UsageError("--gamma is 7"), 2, "error: --gamma is 7\n"), (Stopped(15), 143, ""),
    (MemoryError("no 9 GB"), 2, "error: out of memory: no 9 GB\n"),
    (KeyboardInterrupt(), 130, "stopped by Ctrl-C; nothing is lost\n"), (signal.SIGTERM, 143, ""),
    (noted(KeyboardInterrupt(), "step 8 is saved"), 130, "stopped by Ctrl-C; step 8 is saved\n"),
])
def test_a_program_ends_with_one_message_and_a_status(error, status, said, capsys):
    with pytest.raises(SystemExit) as caught, program("nothing is lost"):
        raise error if isinstance(error, BaseException) else signal.raise_signal(error)
    assert caught.value.code == status and capsys.readouterr() == ("", said)


def test_a_refusal_of_one_of_several_ranks_ends_all(monkeypatch):
    left, before = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(mpi, "size", lambda: 2)
    monkeypatch.setattr(command, "leave", lambda *args: left.append(args))
    for error in (UsageError("--gamma is 7"), KeyboardInterrupt()):
        with program("nothing is lost"):
            raise error
    assert left == [("error: --gamma is 7", 2), ("stopped by Ctrl-C; nothing is lost", 130)]
    assert signal.getsignal(signal.SIGTERM) is before           # which ends a rank that waits, too
