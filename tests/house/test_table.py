"""benchmarks/table.py: what the generated tables and numbers of the pages say."""
import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import table
from tests.house.test_plot import rows_of as cells
from tests.house.tree import ROOT
from utils.run.settings import parse


def result(seed, train100, *, env="Hopper-v4", library=None, total_steps=1e6, **changed):
    made = {"algo": "ppo", "env": env, "seed": seed, "changed": changed, "train100": train100,
            "eval": [train100, train100 + 2], "total_steps": total_steps,
            "git_commit": f"{seed}0123456789" + "-dirty" * (seed == 2), "id": 0}
    return made | ({"library": library} if library else {})


def groups(*results):
    Path("suite.jsonl").write_text("".join(json.dumps(made) + "\n" for made in results))
    return table.read(Path("suite.jsonl"))


def made(order, found, old="old"):
    return cells(table.rewrite(f"<!-- made: {order} -->\n{old}\n<!-- end -->\n", found))


def test_few_seeds_are_marked_and_have_no_interval():
    two = [result(seed, 10.0 * seed) for seed in (1, 2)]
    (row,) = made("defaults", groups(*two, result(1, 50.0, gamma=0.9)))
    assert (row["seeds"], row["train100"], row["eval"]) == ("2*", "15.0", "16.0")
    assert row["commit"] == "10123456 20123456-dirty"
    (row,) = made("defaults", groups(*two, result(3, 30.0)))
    assert row["seeds"] == "3" and row["train100"].startswith("20.0 [")


def test_a_table_may_leave_results_out():
    found = groups(result(1, 1.0), result(1, 2.0, env="MinAtar/Breakout-v1"))
    for patterns, kept in ("* !*/MinAtar/*", ["1.00"]), ("*/MinAtar/*", ["2.00"]):
        assert [row["train100"] for row in made(f"defaults {patterns}", found)] == kept


def test_the_best_published_figure_has_the_same_measure_and_number_of_steps():
    """In anchors.csv Reacher's best training return is Vel's, its best evaluation Tianshou's."""
    (row,) = made("defaults", groups(result(1, -4.0, env="Reacher-v4")))
    assert row["best published, training"] == "-6.60 (Vel)"
    assert row["best published, evaluation"] == "-4.96 (Tianshou benchmark json)"
    (row,) = made("defaults", groups(result(1, -4.0, env="Reacher-v4", total_steps=9e5)))
    assert not [name for name in row if "published" in name]


def test_peers_are_compared_at_equal_seeds():
    ours = [result(seed, 10.0 * seed) for seed in (1, 2, 3, 4)]
    theirs = [result(seed, 1.0, library="sb3", total_steps=1_001_472) for seed in (1, 2, 3)]
    (row,) = made("peers", groups(*ours, *theirs))
    assert (row["peer"], row["seeds"], row["train100"], row["peer's train100"]) == (
        "sb3", "3", "20.0", "1.00")
    assert row["difference of train100"].startswith("19.0 [9.00, ")


OLD = {"repeat_action_probability": 0, "episodic_life": True, "num_threads": 1}


def game(seed, train100, kwargs=OLD, backend=None, **changed):
    changed |= {"env_kwargs": json.dumps(kwargs)} if kwargs else {}
    return result(seed, train100, env="ALE/Breakout-v5", **changed) | {
        "changed": changed, "backend": backend or {}, "seconds": 3600 * seed}


def test_a_row_of_a_game_has_all_seeds_with_the_same_flags():
    """Which machine it was, or bfloat16, is no flag."""
    both = game(3, 24.0, backend={"bf16": True}) | {"machine": "both"}
    three, flagged = made("games", groups(
        game(2, 19.0, bf16=True), game(1, 18.0) | {"machine": "CPU"}, both,
        *(game(seed, 16.0, anneal_lr=False) for seed in (1, 2))))
    assert (three["seed"], three["train100"], three["eval"]) == ("1 2 3", "18 19 24", "19 20 25")
    assert three["hours of a core"] == "1.0 float32 2.0 GPU"
    assert (three["game"], three["flags"]) == ("Breakout-v5", "")
    assert (flagged["flags"], flagged["commit"]) == ("`--no-anneal-lr`", "10123456 20123456-dirty")


def test_a_game_is_as_in_the_old_tables_or_its_name_says_what_differs():
    rows = made("games", groups(
        game(1, 20.0), game(1, 20.0, {}), game(1, 20.0, {"num_threads": 1}, lr=1.0),
        game(1, 20.0, OLD | {"episodic_life": False, "frameskip": 2}),
        game(1, 20.0, total_steps=3e6)))
    typed = "Breakout-v5, sticky 0.25, whole games"
    assert [(row["game"], row["steps"]) for row in rows] == [
        ("Breakout-v5", "1,000,000"), ("Breakout-v5", "3,000,000"), (typed, "1,000,000"),
        (typed, "1,000,000"), ("Breakout-v5, whole games, frameskip 2", "1,000,000")]


def test_where_games_stand_beside_baselines():
    """By the old rules alone, after as many steps, with the mean of our seeds."""
    found = groups(*(game(seed, 20.0 + seed) for seed in (1, 2, 3)), game(1, 90.0, {}),
                   game(4, 98.0, total_steps=3e6), game(1, 50.0, total_steps=2e6),
                   game(1, 2.6) | {"algo": "a2c"},
                   game(1, 0.0) | {"algo": "a2c", "env": "ALE/Enduro-v5"})
    assert made("standing", found) == [
        {"game": "Breakout", "random play": "1.1", "a2c": "**2.6** / 3", "ppo": "**22** / 22",
         "a person": "31.8"},
        {"game": "Enduro", "random play": "0", "a2c": "0 / 0", "ppo": "- / 121",
         "a person": "309.6"},                  # no better than random play
        {"game": "Breakout, 3,000,000", "random play": "1.1", "a2c": "- / 50", "ppo": "98 / 99",
         "a person": "31.8"}]


def test_figures_of_games_have_the_published_ends_and_sticky_rows_have_none():
    curve = [[1e4 * k, 1.0] for k in range(100)]
    run = game(1, 20.0) | {"id": "one", "curve": curve, "settings": {}}
    table.curves(groups(run), Path("games.svg"))
    assert "ppo, published" in Path("games.svg").read_text()
    typed = table.defaults(groups(game(1, 20.0, {})))
    assert "published" not in typed and "22" not in typed


def test_commands_of_the_settings_that_a_marker_names():
    settings = {"gamma": 0.9, "norm_adv": False, "hidden": [64, 32]}
    found = groups(result(1, 1.0, **settings), result(2, 3.0, **settings),
                   result(1, 2.0, gamma=0.8), result(1, 3.0, library="sb3", gamma=0.9))
    for run in sum(found.values(), []):
        run["seconds"] = 60 * run["seed"]
    (row,) = made("settings ppo/Hopper*/gamma=0.9*", found)
    assert row["command"] == (
        "`python -m algos.ppo --env Hopper-v4 --gamma 0.9 --no-norm-adv --hidden 64 32`")
    assert (row["minutes"], row["seeds"], row["train100"], row["eval"]) == (
        "1.5", "2*", "2.00", "3.00")
    told = table.command("ALE/Pong-v5", "ppo", {"env_kwargs": '{"a": "it is"}'})
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
                     f"{start} --gamma .9`|old|old", f"{start}`||"])
    text = table.rewrite(f"<!-- made: runs -->\n{old}\n<!-- end -->", found)
    assert text.splitlines()[3:6] == ["**a group** |||", f"{start} --gamma .9`|1.0| 2.00*",
                                      f"{start}`|-| -"]


def test_a_command_on_a_game_names_the_rules_by_a_variable():
    found = groups(game(1, 20.0, backend={"bf16": True}), game(2, 22.0), game(3, 24.0, {}))
    for run in sum(found.values(), []):
        run["settings"] = run["changed"]
    old = json.dumps({name: x for name, x in OLD.items() if name != "num_threads"})
    text = f"OLD='{old}'\n<!-- made: runs -->\n|command|minutes|random play|ends at|\n|-|-|-|-|\n"
    for flags, ends in {' --env-kwargs "$OLD" --bf16': "60|1.1|21.0*",
                        ' --env-kwargs "$OLD" --run-dir runs/mine': "120|1.1|21.0*",
                        "": "180|1.1|24.0*", " --no-anneal-lr": "-|1.1|-"}.items():
        start = f"|`python -m algos.ppo --env ALE/Breakout-v5{flags}`|"
        page = table.rewrite(f"{text}{start}|||\n<!-- end -->", found)
        assert f"{start}{ends}|" in page.splitlines()


def test_milestones_are_means_of_50_000_steps():
    curve = [[1e4 * k, float(k)] for k in range(1, 101)]     # up to 1e4 k, the return was k
    one, two = game(1, 0.0), game(2, 0.0)
    one["curve"], two["curve"] = curve, [[x, y + 10] for x, y in curve]
    (row,) = made("milestones", groups(one, two))
    assert (row["algorithm"], row["game"], row["seeds"]) == ("ppo", "ALE/Breakout-v5", "2")
    assert (row["100,000"], row["1,000,000"], row["2,000,000"]) == ("10 to 20", "98 to 108", "")


def test_a_caption_says_what_the_lines_of_its_figure_end_at():
    found = groups(result(1, 10.0), result(2, 30.0), result(1, 5.0, library="sb3"))
    assert "Hopper-v4: ppo here 20 (2 seeds: 10 to 30), sb3 5 (1" in table.caption(found)
    assert table.drawn("mujoco.svg") == ["*ppo/HalfCheetah-v4/", "*ppo/Hopper-v4/",
                                         "*ppo/Walker2d-v4/"]


def test_functions_of_a_page_are_those_of_the_file():
    text = table.source("algos/ppo.py", "ppo_loss", "clipped_policy_loss").split("```")[1]
    file = (ROOT / "algos/ppo.py").read_text(encoding="utf-8")
    first, second = text.removeprefix("python\n").strip().split("\n\n\n")
    assert first in file and second in file and first.startswith("def ppo_loss(")


def numbers(text):
    """Return the parts of a page that come from results, without intervals: SciPy draws samples.

    Parts of the code are not compared, since rewording a line should fail no test.
    """
    return [(order, re.sub(r" +(\[[^]]*\])? *|-{3,}", " ", old))
            for order, old in table.PART.findall(text)
            if order.split()[0] not in (*table.OF_CODE, "verdict")]


@pytest.mark.parametrize("page", table.PAGES)
def test_pages_say_what_the_results_say(page):
    """`python benchmarks/table.py` rewrites what is stale, `--check` names it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    again = table.rewrite(text, table.read(table.HERE / "results.jsonl"), save=False)
    assert numbers(text) == numbers(again)


@pytest.mark.slow
def test_the_readme_quotes_todays_code():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    again = table.rewrite(text, table.read(table.HERE / "results.jsonl"), save=False)
    assert not {order.split()[0] for order in table.stale(text, again)} & set(table.OF_CODE)


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
