"""benchmarks/table.py: what the generated tables and numbers of the pages say."""
import json
import math
import re
import shlex
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from benchmarks import suite, table
from tests.house.test_plot import rows_of as cells
from tests.house.tree import ROOT
from utils.run.settings import parse

OF_CODE = {"source", "size"}            # parts that come from the code, not from results


def result(seed, train100, *, env="Hopper-v4", library=None, total_steps=1e6, **changed):
    made = {"algo": "ppo", "env": env, "seed": seed, "changed": changed, "train100": train100,
            "eval": [train100, train100 + 2], "total_steps": total_steps, "seconds": 60 * seed,
            "steps": total_steps,
            "curve": [[0.9 * total_steps, 0], [total_steps, train100]],
            "git_commit": f"{seed}0123456789" + "-dirty" * (seed == 2), "id": 0}
    return made | ({"library": library} if library else {})


def groups(*results):
    Path("suite.jsonl").write_text("".join(json.dumps(made) + "\n" for made in results))
    return table.read(Path("suite.jsonl"))


def made(order, found, old="old"):
    return cells(table.rewrite(f"<!-- made: {order} -->\n{old}\n<!-- end -->\n", found))


def judge(monkeypatch, agrees):
    """Give rows of these seeds a verdict."""
    told = {("ppo", "Hopper-v4", "", f"{seed}0123456789", suite.code("ppo", "Hopper-v4")): fine
            for seed, fine in agrees.items()}
    monkeypatch.setattr(suite, "verdicts", lambda: told)


def test_a_table_may_leave_results_out():
    found = groups(result(1, 1.0), result(1, 2.0, env="MinAtar/Breakout-v1"))
    for patterns, kept in ("* !*/MinAtar/*", ["1.00"]), ("*/MinAtar/*", ["2.00"]):
        assert [row["ends at"] for row in made(f"beside {patterns}", found)] == kept


def test_the_best_published_figure_has_the_same_measure_and_number_of_steps():
    """In anchors.csv Reacher's best training return is Vel's, its best evaluation Tianshou's."""
    found = groups(result(1, -4.0, env="Reacher-v4"))
    for kind, told in ("beside", "-6.60 (Vel)"), ("evals", "-4.96 (Tianshou benchmark json)"):
        assert made(kind, found)[0]["best published"] == told
    (row,) = made("beside", groups(result(1, -4.0, env="Reacher-v4", total_steps=9e5)))
    assert row["best published"] == "-"


@pytest.mark.parametrize("theirs,clear", [
    ([1.0, 2.0, 3.0, 1.0, 2.0], "ours"), ([41.0, 42.0, 43.0, 41.0, 42.0], "theirs"),
    ([1.0, 2.0, 13.0, 14.0, 15.0], ""), ([1.0, 2.0, 3.0, 4.0], "")])    # fewer seeds
def test_a_clear_win_takes_five_seeds_and_an_interval_without_0(theirs, clear):
    found = groups(*(result(seed, 9.0 + seed) for seed in range(1, 6)), *(
        result(seed, end, library="sb3", total_steps=1_001_472)
        for seed, end in enumerate(theirs)))
    (row,) = made("beside", found)
    assert row["peer's seeds"].strip("*") == str(len(theirs))
    assert row["ends at"].startswith("**") == (clear == "ours")
    assert row["peer"].startswith("**") == (clear == "theirs")
    where = {True: r"ppo on Hopper-v4 by -?\d+\.\d \[.*\]", False: "none"}
    said = (rf"interval\): {where[clear == 'ours']}[.] Lower: {where[clear == 'theirs']}[.]"
            if len(theirs) == 5 else
            "of our rows. To say who is better would take 5 seeds of each.")
    told = " ".join(table.wins(found).split())
    assert re.search(said, told)
    above = "higher in 1 of 1: Hopper-v4 (ppo)." if clear == "theirs" else "higher in 0 of 1: none."
    assert len(theirs) < 5 or f"The peer's mean is {above}" in told


def test_a_run_ends_at_its_last_tenth_and_at_evaluations_only_without_any_episode():
    page, none = "|command|ends at|\n|-|-|\n|`python -m algos.ppo --env Hopper-v4`||", {"curve": []}
    one, two = (result(k, 10.0 * k) | {"settings": {}} for k in (1, 3))
    for rows, end in ((one, two), "20"), ((one, two | none), "-"), ((one | none, two | none), "21"):
        assert table.runs(page, groups(*rows), "").split("|")[-2].startswith(end)


def test_a_difference_is_welchs():
    """Of two samples with variance 2.5 and 10 in 5 seeds each, by hand: 3 +- t_5.9 sqrt(2.5)."""
    mean, low, high = table.difference(np.arange(5.0) + 6, 2 * np.arange(5.0) + 1)
    assert mean == pytest.approx(3) and high - mean == pytest.approx(mean - low)
    assert mean - low == pytest.approx(2.458 * math.sqrt(12.5 / 5), rel=1e-3)
    assert np.isnan(table.difference(np.full(5, 2.0), np.full(5, 1.0))[1])


def test_minutes_are_those_of_a_quiet_machine():
    assert table.minutes([result(seed, 1.0) for seed in (3, 2, 9)]) == "2.0"
    assert table.minutes([result(1, 1.0) | {"seconds": 2.0}]) == "0.1"


def test_of_equal_settings_only_rows_of_this_code_are_shown(monkeypatch):
    rows = [result(seed, 10.0 * seed) for seed in (1, 2, 3, 4)]
    judge(monkeypatch, {2: True, 3: True, 4: False})    # 2 is dirty; nobody has asked for 1
    (row,) = made("beside", groups(*rows[2:]))
    assert (row["ends at"], row["seeds"], row["code"]) == ("30.0", "1*", "this")
    (row,) = made("beside", groups(*rows[1:]))              # one of three does not stand for all
    assert (row["seeds"], row["code"]) == ("3", "20123456-dirty 40123456")
    (row,) = made("beside", groups(rows[0], rows[1], rows[3]))
    assert row["code"] == "10123456 20123456-dirty 40123456"
    monkeypatch.setattr(suite, "code", lambda algo, env: "another")      # the code has changed
    assert made("beside", groups(*rows))[0]["code"].startswith("10123456 ")


def test_every_kind_names_older_commits(monkeypatch):
    curve = {"curve": [[1e4 * k, 1.0] for k in range(100)], "settings": {}, "id": "one"}
    rows = [result(seed, 10.0) | curve for seed in (1, 3, 4)]
    peers = [result(seed, 9.0, library="sb3") | curve for seed in (1, 3, 4)]
    page = "<!-- made: {} -->\n|command|ends at|\n|-|-|\n|`python -m algos.ppo --env Hopper-v4`||"
    for agrees in False, True:
        judge(monkeypatch, dict.fromkeys((1, 3, 4), agrees))
        found = groups(*rows, *peers)
        monkeypatch.setattr(table, "drawn", lambda figure: ["*"])
        for kind in ("beside *", "evals *", "settings *", "runs", "caption x.svg", "verdict",
                     "x.svg *"):
            text = table.rewrite(page.format(kind) + "\n<!-- end -->", found, save=False)
            named = "10123456 30123456 40123456" in " ".join(text.split()) or "(3)†" in text
            assert named == (not agrees), kind


OLD = {"repeat_action_probability": 0, "episodic_life": True, "num_threads": 1}


def game(seed, train100, kwargs=OLD, backend=None, **changed):
    changed |= {"env_kwargs": json.dumps(kwargs)} if kwargs else {}
    return result(seed, train100, env="ALE/Breakout-v5", **changed) | {
        "changed": changed, "backend": backend or {}, "seconds": 3600 * seed}


def test_games_stand_beside_published_figures_by_the_same_rules_alone():
    found = groups(game(1, 20.0), game(2, 22.0), game(1, 20.0, {}),
                   game(1, 20.0, OLD | {"episodic_life": False}), game(1, 5.0, lr=1.0))
    rows = made("beside", found)
    assert [row["best published"] for row in rows].count("-") == 2
    assert {row["best published"] for row in rows if row["seeds"] == "2*"} == {
        "22.0 (OpenAI Baselines' Atari page)"}


def test_commands_of_the_settings_that_a_marker_names():
    settings = {"gamma": 0.9, "norm_adv": False, "hidden": [64, 32]}
    found = groups(result(1, 1.0, **settings), result(2, 3.0, **settings),
                   result(1, 2.0, gamma=0.8), result(1, 3.0, library="sb3", num_envs=4))
    (row,) = made("settings ppo/Hopper*/gamma=0.9*", found)
    assert row["command"] == (
        "`python -m algos.ppo --env Hopper-v4 --gamma 0.9 --no-norm-adv --hidden 64 32`")
    assert (row["minutes"], row["seeds"], row["ends at"], row["eval"]) == (
        "1.0", "2*", "2.00", "3.00")
    (row,) = made("settings sb3*", found)
    assert row["command"] == ("`python -m benchmarks.sb3 --algo ppo --env Hopper-v4 --num-envs 4 "
                              "--total-steps 1e6 --out runs/sb3`")
    told = table.command({"env": "ALE/Pong-v5", "algo": "ppo",
                          "changed": {"env_kwargs": '{"a": "it is"}'}})
    assert shlex.split(told)[-2:] == ["--env-kwargs", '{"a": "it is"}']
    for stale in ("ppo/Walker2d*", "* ppo/Walker2d*", "* !ppo/Walker2d*"):  # also beside others
        with pytest.raises(ValueError, match="no result matches !?ppo/Walker2d"):
            made(f"settings {stale}", found)


def test_a_typed_command_gets_the_results_of_its_settings():
    """Only rows whose other settings were the defaults count, and only times of a CPU."""
    found = groups(result(1, 1.0, gamma=0.9), result(2, 3.0, gamma=0.9), result(1, 5.0, lr=1.0),
                   result(1, 7.0, gamma=0.9, lr=1.0), result(1, 9.0, library="sb3", gamma=0.9))
    for run in sum(found.values(), []):
        run |= {"settings": {"gamma": 0.99, "lr": 1e-3} | run["changed"],
                "seconds": 60 * run["seed"]}
    found["Hopper-v4", "plainrl", "ppo", "gamma=0.9"][1]["machine"] = "GPU"
    start = "typed | `python -m algos.ppo --env Hopper-v4"
    old = "\n".join(["algorithm | command|minutes| ends at", "---|---|---|---", "**a group** |||",
                     f"{start} --gamma .9 --lr 1e-3`|old|old", f"{start}`||"])
    text = table.rewrite(f"<!-- made: runs -->\n{old}\n<!-- end -->", found)
    assert text.splitlines()[3:6] == [
        "**a group** |||", f"{start} --gamma .9 --lr 1e-3`|1.0| 2.00 (2)†",
        f"{start}`|-| -"]


def test_a_command_on_a_game_names_the_rules_by_a_variable(monkeypatch):
    monkeypatch.setattr(table, "older", lambda results: "")
    found = groups(game(1, 20.0, backend={"bf16": True}), game(2, 22.0), game(3, 24.0, {}))
    for run in sum(found.values(), []):
        run["settings"] = run["changed"]
    old = json.dumps({name: x for name, x in OLD.items() if name != "num_threads"})
    text = f"OLD='{old}'\n<!-- made: runs -->\n|command|minutes|ends at|\n|-|-|-|\n"
    for flags, ends in {' --env-kwargs "$OLD" --bf16': "60|21.0 (2)",
                        ' --env-kwargs "$OLD" --run-dir runs/mine': "120|21.0 (2)",
                        "": "180|24.0 (1)", " --no-anneal-lr": "-|-"}.items():
        start = f"|`python -m algos.ppo --env ALE/Breakout-v5{flags}`|"
        page = table.rewrite(f"{text}{start}||\n<!-- end -->", found)
        assert f"{start}{ends}|" in page.splitlines()


def test_a_caption_says_how_many_seeds_its_figure_has_and_of_which_code():
    found = groups(result(1, 10.0), result(3, 30.0), result(1, 5.0, library="sb3"))
    said = table.caption(found).replace("\n", " ")
    assert said.startswith("*1 or 2 seeds each; ")
    assert said.endswith("Runs of older commits: 10123456 30123456.*")
    assert table.drawn("mujoco.svg") == ["*ppo/HalfCheetah-v4/", "*ppo/Hopper-v4/",
                                         "*ppo/Walker2d-v4/"]


def test_functions_of_a_page_are_those_of_the_file():
    text = table.source("algos/ppo.py", "ppo_loss", "clipped_policy_loss").split("```")[1]
    file = (ROOT / "algos/ppo.py").read_text(encoding="utf-8")
    first, second = text.removeprefix("python\n").strip().split("\n\n\n")
    assert first in file and second in file and first.startswith("def ppo_loss(")


def test_what_bugs_cost_is_counted(monkeypatch):
    rows = [{"bug": bug, "lost": lost} for bug, lost in (
        ("ppo-a", [0.5, 0.1, 0.9]), ("ppo-a@a2c", [0.41, -0.1, 0.9]), ("sac-b", [None] * 3),
        ("ppo-c", [0.3, 0.2, 0.4]))]
    monkeypatch.setattr(table, "read_lines", lambda path: rows)
    monkeypatch.setattr(table.doctor, "summary", lambda told: "it is right")
    assert " ".join(table.bugs().split()).endswith(
        "Of 4 planted bugs in 3 algorithms, 1 ended a run, 2 cost more than 40% of what healthy "
        "runs gain, and for 1 the interval contains 0: on their task they cost nothing that these "
        "seeds can show.")


def numbers(text):
    """Return a part of a page without intervals, for which SciPy draws samples."""
    return re.sub(r"\*\*| +(\[[^]]*\])? *|-{3,}", " ", text).strip()


@pytest.mark.parametrize("page", table.PAGES)
def test_pages_say_what_the_results_say_and_of_which_code(page, monkeypatch):
    """As `python -m benchmarks.table --check` does, but for intervals, and quotations of the code.

    If only commits differ, an algorithm has changed: run benchmarks/agree.py, then table.py.
    """
    shown = []
    for of in table.returns, table.steps:
        monkeypatch.setattr(table, of.__name__, lambda results, *args, of=of: (
            shown.extend(results), of(results, *args))[1])
    text = (ROOT / page).read_text(encoding="utf-8")
    found = table.read(table.HERE / "results.jsonl")
    for order, old in table.PART.findall(text):
        shown.clear()
        if order.split()[0] not in (*OF_CODE, "verdict"):
            again = table.made(order, old, text, found, table.HERE, save=False)
            assert numbers(old) == numbers(again), order
        for row in shown:
            assert ("library" in row or suite.verdict(row) or row["git_commit"][:8] in old
                    or order == "runs" and "†" in old)


def test_a_row_has_each_seed_once():
    for key, found in table.read(table.HERE / "results.jsonl").items():
        seeds = [result["seed"] for result in found]
        assert len({*seeds}) == len(seeds), key


def test_the_benchmarks_begin_with_one_screen():
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= 1000
    (kind, first), (figure, _) = [(order.split()[0], old) for order, old in
                                  table.PART.findall(text)[:2]]
    assert kind == "beside" and 10 <= len(cells(first)) <= 24 and figure == "mujoco.svg"


@pytest.mark.slow
def test_the_readme_quotes_todays_code():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    again = table.rewrite(text, table.read(table.HERE / "results.jsonl"), save=False)
    assert not {order.split()[0] for order in table.stale(text, again)} & OF_CODE


def test_todays_algorithms_take_the_commands_of_the_pages():
    taken = 0
    for page in ("docs/settings.md", "docs/games.md", "README.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        values = dict(re.findall(r"^(\w+)='(.*)'$", text, re.M))
        for told in re.findall(r"`(python -m algos\.[^`]+)`", text):
            words = [values.get(word.strip("$"), word) for word in shlex.split(told)]
            _, _, module, *flags = words
            assert parse(import_module(module).Config, "", flags).env == flags[1]
            taken += 1
    assert taken > 70
