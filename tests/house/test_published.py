"""benchmarks/README.md agrees with its result files, and marks results of earlier code."""
import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import plot
from benchmarks import sb3, show, table
from utils.results import sources

SVG = "{http://www.w3.org/2000/svg}"
AGAIN = "run: python benchmarks/table.py"


@pytest.fixture(scope="module")
def published():
    return table.read(table.RESULTS)


@pytest.fixture(scope="module")
def remade(published, tmp_path_factory):
    """Make the README and its figures again. Return its text and the folder of figures."""
    figures = tmp_path_factory.mktemp("made") / "figures"
    with redirect_stderr(StringIO()):
        text = table.rewrite(table.README.read_text(encoding="utf-8"), published, figures)
    return text, figures


# ---- What is published

def test_readme_is_what_the_results_say(remade):
    assert remade[0] == table.README.read_text(encoding="utf-8"), AGAIN


def numbers(path):
    return np.array([float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", path)]).reshape(-1, 2)


def plotted(path):
    """Return {(axes, id of a line): its points} of an SVG, and a list of its texts.

    Points are fractions of the axes' box, because other fonts would move the boxes.
    """
    lines, root = {}, ElementTree.parse(path).getroot()
    for axes in root.iter(f"{SVG}g"):
        frame = axes.find(f"{SVG}g/{SVG}path")
        if not axes.get("id", "").startswith("axes_") or frame is None:     # an empty panel
            continue
        box = numbers(frame.get("d"))
        low, size = box.min(0), np.ptp(box, 0)
        for group in axes.iter(f"{SVG}g"):
            shape = group.find(f"{SVG}path")
            if ", " in group.get("id", "") and shape is not None:
                lines[axes.get("id"), group.get("id")] = (numbers(shape.get("d")) - low) / size
    return lines, [text.text for text in root.iter(f"{SVG}text")]


def test_figures_are_what_the_results_say(remade):
    names = {path.name for path in remade[1].glob("*")}
    measured = {"growth.svg"}  # by speed.py, when it was drawn
    assert names | measured == {path.name for path in table.FIGURES.glob("*.svg")}, AGAIN
    for name in names:
        (old, texts), (new, new_texts) = plotted(table.FIGURES / name), plotted(remade[1] / name)
        assert texts == new_texts and old.keys() == new.keys(), f"{name}; {AGAIN}"
        assert sum(key.endswith(", mean") for _, key in old) >= 2
        for key in old:
            np.testing.assert_allclose(old[key], new[key], atol=2e-3, err_msg=f"{name}: {key}")


def test_the_readme_shows_a_small_film():
    film = table.FIGURES / "cheetah.gif"
    assert f"](benchmarks/figures/{film.name})" in (show.ROOT / "README.md").read_text("utf-8")
    assert film.stat().st_size < 1e6 and Image.open(film).n_frames > 60


def test_a_figure_of_other_data_is_seen(remade, published, tmp_path):
    """The comparison of the test above can fail: reversed curves look different."""
    asked = plot.Plot(tuple(str(result["folder"]) for key, results in published.items()
                            for result in results if key[0] == "CartPole-v1" and "ppo" in key))
    runs = plot.load(asked)
    plot.save(plot.draw(plot.group(runs), asked, {}), str(tmp_path / "a.svg"))
    moved = [run._replace(y=run.y[::-1]) for run in runs]
    plot.save(plot.draw(plot.group(moved), asked, {}), str(tmp_path / "b.svg"))
    a, b = plotted(tmp_path / "a.svg")[0], plotted(tmp_path / "b.svg")[0]
    assert len(a) == len(runs) + 1
    assert all(a[key].shape != b[key].shape or np.abs(a[key] - b[key]).max() > 0.02 for key in a)


def test_rows_of_changed_code_are_marked_stale(published):
    """A published row whose algorithm or arithmetic has changed says so, or is run again."""
    rows = [line for line in table.README.read_text(encoding="utf-8").splitlines()
            if re.match(r"\| [\w/-]+-v\d+ \|.*\| plainrl \|", line)]
    stale = {}
    for key, results in published.items():
        files = {file for result in results for file in table.changed(result) or []}
        if key[1] == "plainrl" and files:
            stale[key] = sorted(files)
    print("\n".join(f"{' '.join(key)}: changed since: {' '.join(stale[key])}" for key in stale))
    for env, _, algo, settings in stale:
        start = f"| {env} | {algo} | plainrl | {settings or 'default'} |"
        found = [row for row in rows if row.startswith(start)]
        assert all("earlier version (commit " in row for row in found), f"{start}: {AGAIN}"
    for env, library, algo, settings in published.keys() - stale.keys():
        start = f"| {env} | {algo} | {library} | {settings or 'default'} |"
        found = [row for row in rows if row.startswith(start)]      # batch/ may have another
        assert not found or any("earlier version" not in row for row in found), AGAIN


def test_every_result_names_its_code_and_is_small(published):
    for key, results in published.items():
        seeds = [result["seed"] for result in results]
        assert len(set(seeds)) == len(seeds), key
        for result in results:
            assert (result["folder"] / "result.json").stat().st_size < 10_000
            assert key[1] != "plainrl" or f"algos/{key[2]}.py" in result["sources"], key


def test_anchors():
    with open(plot.ANCHORS, newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["source"] and row["metric"] and row["where"] and float(row["budget_steps"]) > 0
               and np.isfinite(float(row["mean"])) for row in rows)
    vel = {(row["algo"], row["env"]): float(row["mean"]) for row in rows if row["source"] == "Vel"}
    assert len(vel) == 14                       # PPO and TRPO in seven environments
    assert vel["PPO", "Walker2d"] == 2952 and vel["TRPO", "HalfCheetah"] > 0


def test_figures_of_the_readme_are_in_the_tables():
    """The README quotes a few returns, written like 4,111."""
    whole = (table.README.parents[1] / "README.md").read_text(encoding="utf-8")
    quoted = {figure.replace(",", "") for figure in re.findall(r"\b\d{1,2},\d{3}\b", whole)}
    made = {figure for part in table.PART.finditer(table.README.read_text(encoding="utf-8"))
            for figure in re.findall(r"-?\d+", part[0])}
    assert quoted and quoted <= made, quoted - made


# ---- benchmarks/table.py

def write(folder, train100, **more):
    result = {"algo": "ppo", "env": "Hopper-v4", "seed": 1, "settings": {}, "total_steps": 1000,
              "steps": 1024, "train100": train100,
              "eval": [train100 + 1, train100 + 3] if train100 is not None else [],
              "curve": [[10, 1.0], [1000, 2.0]], "sources": sources("ppo"),
              "git_commit": "0123456789"} | more
    Path(folder).mkdir(parents=True)
    Path(folder, "result.json").write_text(json.dumps(result))


def test_table_and_its_marks():
    write("r/b", 30.0, seed=2)
    write("r/a", 10.0, seed=1)
    write("r/c", 5.0, library="peer", sources=None)
    write("r/d", 5.0, env="Walker2d-v4", sources=sources("ppo") | {"utils/mpi.py": "0"},
          git_commit="abcdef0123-dirty")
    write("r/e", 5.0, env="Walker2d-v4", seed=2, sources={})
    write("r/f", 7.0, settings={"lr": 0.1}, sources=sources("ppo") | {"utils/old.py": "0"})
    lines = table.table(table.read(Path("r"))).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    ours = "01234567"
    assert cells == [
        ["Hopper-v4", "ppo", "peer", "default", "1,000", "1", "5", "5.00", "7", "7.00", "-"],
        ["Hopper-v4", "ppo", "plainrl", "default", "1,000", "1 2", "10 30", "20.0", "12 32", "22.0",
         ours],
        ["Hopper-v4", "ppo", "plainrl", "lr=0.1", "1,000", "1", "7", "7.00", "9", "9.00", ours],
        ["Walker2d-v4", "ppo", "plainrl", "default", "1,000", "1 2", "5 5", "5.00", "7 7", "7.00",
         f"{ours}, earlier version (commit abcdef01-dirty)"]]


def test_a_run_without_training_episodes_and_small_returns():
    write("r/a", None, algo="bc", eval=[-1.6583, -1.6583])
    write("r/b", 0.0, algo="gail", eval=[-137.6])
    rows = [[cell.strip() for cell in line.split("|")[7:11]]
            for line in table.table(table.read(Path("r"))).splitlines()[2:]]
    assert rows == [["-", "-", "-1.66", "-1.66"], ["0", "0.00", "-138", "-138"]]


def write_scaled():
    for algo, returns in (("ppo_popart", (4.0, 9.0)), ("ppo", (1.0, 16.0))):
        for factor, gain in ((1000, 1 if algo == "ppo" else 2), (0.001, 1)):
            for seed, ret in enumerate(returns, 1):
                kwargs = json.dumps({"env": "CartPole-v1", "factor": factor})
                write(f"r/{algo}{factor}{seed}", gain * factor * ret, algo=algo, seed=seed,
                      env="utils.tasks:Scaled-v0",
                      settings={"env_kwargs": kwargs, "total_steps": 1000}
                      | ({"scale_rew": False} if algo == "ppo" else {}),
                      curve=[[500, 0.0], [1000, gain * factor * ret]])
    return table.read(Path("r"))


def test_returns_with_rewards_times_a_factor_by_hand():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in table.scaled(write_scaled()).splitlines()]
    assert rows[0][2:] == ["rewards times 0.001", "rewards times 1000", "largest over smallest"]
    assert rows[2:] == [                                # geometric means: 4 and 6
        ["CartPole-v1", "ppo, rewards not scaled", "4 (1 16)", "4 (1 16)", "1.00"],
        ["CartPole-v1", "ppo_popart", "6 (4 9)", "12 (8 18)", "2.00"]]


def test_no_geometric_mean_of_negative_returns():
    for factor, ret in ((1, -5.0), (10, 20.0)):
        kwargs = json.dumps({"env": "Pendulum-v1", "factor": factor})
        write(f"r/{factor}", ret, env="utils.tasks:Scaled-v0", settings={"env_kwargs": kwargs})
    assert table.scaled(table.read(Path("r"))).endswith("| - (-5) | 2 (2) | - |")


def test_curves_with_rewards_times_a_factor(tmp_path):
    line = table.scaled_curves(write_scaled(), tmp_path / "figures" / "factor.svg")
    assert line.endswith("(figures/factor.svg)")
    drawn, texts = plotted(tmp_path / "figures" / "factor.svg")
    drawn = {(axes, name.removesuffix(", mean")): points for (axes, name), points in drawn.items()}
    assert {name.rpartition(", ")[2] for _, name in drawn} == {"0.001", "1000"} and len(drawn) == 4
    assert "CartPole-v1, ppo_popart" in texts and "rewards times 1000" in texts
    heights = {name: points[-1, 1] for (_, name), points in drawn.items()}     # from the top
    assert heights["CartPole-v1, ppo_popart, 1000"] < heights["CartPole-v1, ppo_popart, 0.001"]
    assert heights["CartPole-v1, ppo, rewards not scaled, 1000"] == pytest.approx(
        heights["CartPole-v1, ppo, rewards not scaled, 0.001"])


def test_a_changed_setting_is_no_default_whatever_its_budget():
    for seed in (1, 2):
        write(f"r/a{seed}", 9.0, seed=seed, settings={"lr": 0.1, "total_steps": 1000})
        write(f"r/b{seed}", 1.0, seed=seed, library="peer")
    groups = table.read(Path("r"))
    assert table.choose(groups, ["default"]).keys() == {("Hopper-v4", "peer", "ppo", "")}
    assert table.difference(groups) == "```\n```"


def test_only_the_algorithm_and_its_arithmetic_make_a_row_stale():
    now = sources("ppo")
    without = {name: made for name, made in now.items() if name != "utils/mpi.py"}
    result = {"algo": "ppo", "env": "Hopper-v4", "settings": {}, "git_commit": "a"}
    assert table.changed(result | {"sources": without}) == ["utils/mpi.py"]
    assert table.changed(result | {"sources": now | {"utils/logger.py": "0"}}) == []
    assert table.changed(result | {"sources": now}) == []
    assert table.changed(result | {"sources": {}}) is table.changed(result) is None
    gone = {"algo": "gone", "sources": {"algos/gone.py": "0"}}
    assert table.changed(gone) == ["algos/gone.py"]


def test_what_has_been_shown_holds_for_this_code_and_these_results_alone(monkeypatch, tmp_path):
    now = sources("ppo")
    entry = {"algo": "ppo", "env": "Hopper-v4", "settings": {"hidden": [8], "rollout_steps": 64},
             "git_commit": "a", "steps": 9, "sources": now}
    result = entry | {"sources": {"algos/ppo.py": "0"}}
    monkeypatch.setattr(table, "SHOWN", tmp_path / "shown.json")
    monkeypatch.setattr(show, "SHOWN", tmp_path / "shown.json")
    assert table.read_shown() == [] and len(table.changed(result)) == 3
    show.write_shown(entry)
    assert table.changed(result) == []
    for name, other in (("env", "Walker2d-v4"), ("git_commit", "b"), ("settings", {})):
        assert len(table.changed(result | {name: other})) == 3
    show.write_shown(entry | {"git_commit": "b", "steps": 8})
    show.write_shown(entry | {"sources": now | {"utils/mpi.py": "0"}})      # of other code
    assert len(table.changed(result)) == 3 and table.changed(result | {"git_commit": "b"}) == []
    assert [(shown["git_commit"], shown["steps"]) for shown in table.read_shown()] == [
        ("a", 9), ("b", 8)]


def test_one_stale_seed_marks_the_row_and_seeds_are_in_order():
    write("r/a", 1.0, seed=2)
    write("r/b", 3.0, seed=10, sources=sources("ppo") | {"utils/mpi.py": "0"})
    (row,) = table.table(table.read(Path("r"))).splitlines()[2:]
    assert "| 2 10 | 1 3 |" in row and "earlier version (commit 01234567) |" in row


def test_difference_by_hand():
    for seed, ours, theirs in [(1, 30, 10), (2, 50, 10), (3, 99, None)]:
        write(f"r/ours{seed}", ours, seed=seed)
        if theirs:
            write(f"r/theirs{seed}", theirs, seed=seed, library="peer")
    write("r/budget", 1.0, library="peer", total_steps=20, settings={"total_steps": 20})
    write("r/other_settings", 1.0, settings={"lr": 0.1})
    write("r/peer's_other", 1.0, library="ahead", settings={"lr": 0.1})     # sorts before "peer"
    for figure, ratio in (("train100", "4.00"), ("eval", "3.50")):
        lines = table.difference(table.read(Path("r")), figure).splitlines()
        assert lines[1:-1] == [
            f"Hopper-v4, ppo, seeds [1, 2]: ratio of means {ratio}, difference 30 [20, 40]",
            f"geometric mean of the ratios: {ratio}"]
    Path("r/theirs2/result.json").unlink()                          # one seed has no interval
    assert table.difference(table.read(Path("r"))).splitlines()[1].endswith("3.00, difference 20")


def test_difference_is_at_equal_budgets():
    write("r/a", 9.0, total_steps=100_000, settings={"total_steps": 100_000})
    write("r/b", 1.0, total_steps=110_000, settings={"total_steps": 110_000}, library="peer")
    assert table.difference(table.read(Path("r"))) == "```\n```"


def test_difference_over_environments_and_unpaired():
    for env, ratio in (("Hopper-v4", 2), ("Walker2d-v4", 8)):
        for seed in (1, 2, 3):
            write(f"r/{env}a{seed}", 10.0 * seed * ratio, env=env, seed=seed)
            write(f"r/{env}b{seed}", 10.0 * seed, env=env, seed=seed, library="peer")
    first, _, last = table.difference(table.read(Path("r"))).splitlines()[1:-1]
    assert last == "geometric mean of the ratios: 4.00"
    low, high = map(float, first.split("[")[-1][:-1].split(", "))
    assert low < 10 and high > 30           # pairs of seeds would give [10, 30]


def test_ablation_by_hand():
    for env, whole, without in (("Hopper-v4", [10, 30, 99], [40, 120]),
                                ("Walker2d-v4", [8], [2, 50])):
        for name, values in (("whole", whole), ("norm_obs", without)):
            for seed, value in enumerate(values, 1):
                settings = {"norm_obs": False, "total_steps": 3e5}
                write(f"r/{env}{name}{seed}", value, env=env, seed=seed,
                      settings=settings if name == "norm_obs" else {"total_steps": 3e5})
    write("r/one", 5.0, settings={"lr": 0.1, "total_steps": 3e5})
    write("r/far", 5.0, seed=9, settings={"lr": 0.2, "total_steps": 3e5})
    write("r/peer", 5.0, library="stable-baselines3")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in table.ablation(table.read(Path("r"))).splitlines()]
    assert rows[0] == ["changed", "Hopper-v4", "Walker2d-v4", "ratio"]
    assert rows[2:] == [
        ["nothing", "46.3 (10 30 99)", "8.00 (8)", "1.00"],
        ["lr=0.1", "5.00 (5)", "-", "0.50"],
        ["lr=0.2", "5.00 (5)", "-", "-"],               # no seed in common
        # Hopper: (40 + 120) / (10 + 30) = 4 on the seeds that both have. Walker2d: 1/4.
        ["norm_obs=False", "80.0 (40 120)", "26.0 (2 50)", "1.00"]]


@pytest.mark.parametrize("other", [{"algo": "sac"}, {"settings": {"total_steps": 1e5}}])
def test_an_ablation_is_of_one_algorithm_and_budget(other):
    write("r/a", 1.0)
    write("r/b", 2.0, **other)
    with pytest.raises(ValueError, match="Hopper-v4: two algorithms or budgets, with nothing"):
        table.ablation(table.read(Path("r")))


def test_the_interval_of_an_ablation_is_that_of_its_ratio():
    for seed in range(1, 5):
        write(f"r/a{seed}", 10.0 * seed, seed=seed)
        write(f"r/b{seed}", 30.0 * seed, seed=seed, settings={"norm_obs": False})
    ratio, low, high = map(float, re.findall(r"[\d.]+", table.ablation(
        table.read(Path("r"))).splitlines()[-1].split("|")[-2]))
    assert ratio == 3 and 1 < low < 2.5 and 3.5 < high < 9


def test_the_interval_of_an_ablation_is_over_all_environments():
    for env, values in (("Hopper-v4", (10.0, 90.0)), ("Walker2d-v4", (50.0, 50.0))):
        for seed, value in enumerate(values, 1):
            write(f"r/{env}a{seed}", 50.0, env=env, seed=seed)
            write(f"r/{env}b{seed}", value, env=env, seed=seed, settings={"norm_obs": False})
    assert "1.00 [0.45, 1.34]" in table.ablation(table.read(Path("r"))).splitlines()[-1]


def test_standing_by_hand(tmp_path, monkeypatch):
    anchors = tmp_path / "anchors.csv"
    others = [("train_last100ep", 10), ("train_curve_smoothed", 30), ("train_last100ep", 20),
              ("eval_det_end", -50), ("last10_evals_mean", 500), ("eval_10ep_at_budget", 22)]
    anchors.write_text("algo,env,env_version,budget_steps,metric,mean,spread,seeds,source,where\n"
                       + "".join(f"PPO,Hopper,v2,1000,{metric},{mean},,,a,b\n"
                                 for metric, mean in others)
                       + "SAC,Hopper,v2,1000,train_last100ep,-7.25,,,a,b\n"
                       + "PPO,Hopper,v2,1050,train_last100ep,7,,,a,b\n"
                       + "PPO,Walker2d,v2,1000,train_last100ep,9,,,a,b\n")
    monkeypatch.setattr(plot, "ANCHORS", anchors)
    for seed, value in enumerate((10.0, 14.0, 36.0), 1):    # mean train100 20, mean eval 22
        write(f"r/{seed}", value, seed=seed, eval=[value, value, value + 6])
    write("r/peer", 900.0, library="stable-baselines3")
    write("r/lr", 900.0, settings={"lr": 0.1})
    write("r/sac", -7.5, algo="sac", settings={"total_steps": 1e3})
    write("r/none", 900.0, algo="vpg")
    write("r/few", float("nan"), env="Walker2d-v4")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in table.standing(table.read(Path("r"))).splitlines()]
    assert rows[0][5:] == ["published of training", "eval", "published evaluations"]
    assert rows[2:] == [
        ["Hopper-v4", "ppo", "1,000", "3", "20.0", "above 1 of 3, best 30.0", "22.0",
         "above 1 of 3, best 500"],
        ["Hopper-v4", "sac", "1,000", "1", "-7.50", "above 0 of 1, best -7.25", "-5.50", "-"],
        ["Walker2d-v4", "ppo", "1,000", "1", "-", "-", "-", "-"]]
    none = {key: results for key, results in table.read(Path("r")).items() if key[2] == "vpg"}
    assert table.standing(none) == "Nothing is published for these."


def test_trimmed_is_in_the_protocol_of_vel():
    for seed, value in enumerate([900, 10, 20, 30, 40, -70, 999], 1):     # only six count
        write(f"r/{seed}", float(value), seed=seed, steps=1_000_000)
        if seed < 6:
            write(f"r/few{seed}", 1.0, env="Walker2d-v4", seed=seed, steps=1_000_000)
            write(f"r/peer{seed}", 1.0, seed=seed, steps=1_000_000, library="peer")
    write("r/peer6", 1.0, seed=6, steps=1_000_000, library="peer")
    rows = [line.split("|")[1:-1] for line in table.trimmed(table.read(Path("r"))).splitlines()]
    (row,) = [[cell.strip() for cell in row] for row in rows[2:]]
    assert row[:2] == ["Hopper-v4", "ppo"] and row[3] == "2172"
    assert row[2].split(" ")[0] == "25.0"           # mean of 10 20 30 40


def test_a_marker_chooses():
    write("r/a", 1.0)
    write("r/b", 1.0, env="Walker2d-v4")
    write("r/c", 1.0, algo="sac")
    write("r/d", 1.0, settings={"lr": 0.1})
    write("r/e", 1.0, settings={"total_steps": 1e5})
    groups = table.read(Path("r"))
    count = {order: len(table.choose(groups, order.split())) for order in (
        "", "ppo", "sac", "Hopper-v4", "ppo Hopper-v4", "ppo Hopper-v4 default", "td3")}
    assert list(count.values()) == [5, 4, 1, 4, 3, 2, 0]


def test_only_what_stands_between_markers_changes(tmp_path):
    write("r/a", 1.0, algo="toy", sources={})
    text = ("before <!-- not a marker -->\n<!-- made: curves a.svg toy -->\nold\nlines\n"
            "<!-- end -->\nmiddle\n<!-- made: curves b.svg td3 -->\n<!-- end -->\nafter\n")
    with redirect_stderr(StringIO()):
        once = table.rewrite(text, table.read(Path("r")), tmp_path / "figures")
        assert table.rewrite(once, table.read(Path("r")), tmp_path / "figures") == once
    assert once == ("before <!-- not a marker -->\n<!-- made: curves a.svg toy -->\n\n"
                    "![Learning curves on Hopper-v4](figures/a.svg)\n\n<!-- end -->"
                    "\nmiddle\n<!-- made: curves b.svg td3 -->\n\nNot run yet.\n\n<!-- end -->\n"
                    "after\n")
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["a.svg"]


def test_curves_take_flags_and_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "HERE", tmp_path)
    for num_envs in (1, 4):
        write(tmp_path / f"more/{num_envs}", 1.0, algo="toy", seconds=60.0,
              settings={"num_envs": num_envs})
    drawn = []
    monkeypatch.setattr(table.plot, "save", lambda figure, path: drawn.append(figure))
    text = "<!-- made: curves a.svg x=time by=num_envs from=more toy -->\n<!-- end -->"
    assert "figures/a.svg" in table.rewrite(text, {}, tmp_path / "figures")
    (ax,) = [ax for ax in drawn[0].axes if ax.lines]
    assert "minutes" in ax.get_xlabel()
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels == ["toy num_envs=1 (1 seed)", "toy num_envs=4 (1 seed)"]
    for budget, expected in ((1000, 2), (3000, 0)):
        text = f"<!-- made: table toy from=more budget={budget} -->\n<!-- end -->"
        assert table.rewrite(text, {}, tmp_path).count("| toy |") == expected
    for wrong in ("curves a.svg from=nowhere toy", "table x=time toy"):
        with pytest.raises(ValueError, match="no such flag or folder"):
            table.rewrite(f"<!-- made: {wrong} -->\n<!-- end -->", {}, tmp_path)


# ---- The peer

@pytest.mark.parametrize("num_envs", [1, 2, 4])
def test_the_peers_dqn_has_as_many_updates_whatever_num_envs(num_envs):
    peer = sb3.make_peer("dqn", "CartPole-v1", 1, num_envs)
    assert peer.train_freq.frequency * num_envs == 2 * peer.gradient_steps


@pytest.mark.parametrize("flags,settings", [((), {}), (("--num-envs", "4"), {"num_envs": 4})])
def test_the_peers_result_names_its_settings(flags, settings, monkeypatch, tmp_path):
    given = "sb3.py --algo dqn --env CartPole-v1 --episodes 1 --total-steps 200 --out".split()
    monkeypatch.setattr("sys.argv", [*given, str(tmp_path), *flags])
    sb3.main()
    (key,) = table.read(tmp_path)
    assert key == ("CartPole-v1", "stable-baselines3", "dqn",
                   ",".join(f"{name}={value}" for name, value in settings.items()))


def test_the_peer_is_evaluated_with_its_own_statistics_frozen(monkeypatch):
    peer = sb3.make_peer("ppo", "Pendulum-v1", 1, 1)
    own = peer.get_vec_normalize_env()
    own.obs_rms.mean += 5

    def evaluated(model, test, **how):
        for _ in range(3):
            test.reset()
        x = np.ones((1, 3))
        np.testing.assert_array_equal(test.normalize_obs(x), own.normalize_obs(x))
        assert how["deterministic"]
        return [1.23456], [200]

    monkeypatch.setattr(sb3, "evaluate_policy", evaluated)
    before = own.obs_rms.mean.copy()
    assert sb3.evaluate(peer, "ppo", "Pendulum-v1", 1, 1) == [1.235]
    np.testing.assert_array_equal(own.obs_rms.mean, before)


@pytest.mark.parametrize("algo, library", [("ppo", "stable-baselines3"), ("trpo", "sb3-contrib")])
def test_the_peers_result_by_hand(algo, library, monkeypatch, tmp_path):
    class Peer:
        num_timesteps = 1500

        def learn(self, steps, callback):
            callback.rows += [[10 * k, 0.1, 0, float(k), 10] for k in range(1, 151)]

    monkeypatch.setattr(sb3, "make_peer", lambda *args, **given: Peer())
    monkeypatch.setattr(sb3, "evaluate", lambda *args: [1.0])
    monkeypatch.setattr("sys.argv", f"sb3.py --algo {algo} --env A-v0 --out {tmp_path}".split())
    sb3.main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["library"], result["train100"]) == (library, 100.5)
    assert result["curve"][:2] == [[15, 1.0], [30, 2.5]] and len(result["curve"]) == 100


def test_settings_of_the_peers():
    for algo, at_start in (("ppo", 3e-4), ("a2c", 7e-4)):
        peer = sb3.make_peer(algo, "Pendulum-v1", 1)
        assert [peer.lr_schedule(left) for left in (1, 0.5)] == [at_start, at_start / 2]
    assert sb3.make_peer("sac", "Pendulum-v1", 1).action_noise is None
    assert sb3.make_peer("td3", "Pendulum-v1", 1).action_noise._sigma == 0.1


# ---- benchmarks/show.py

def test_a_stale_row_is_shown_to_hold_only_where_it_does(monkeypatch, tmp_path, capsys):
    asked = []
    old = {"sources": {"algos/ppo.py": "0" * 64}, "settings": {"lr": 0.1, "batch": 64}}
    for name, more in {"one": {"seed": 3}, "two": {"seed": 4},                 # a group
                       "differs": {"env": "Walker2d-v4"}, "empty": {"env": "Reacher-v4"},
                       "dirty": {"git_commit": "b-dirty"}, "peer": {"library": "peer"},
                       "fresh": {"sources": sources("ppo")}}.items():
        write(tmp_path / name, 1.0, **old | {"git_commit": "a"} | more)

    def rows_of(code, algo, settings, folder, steps):
        asked.append((code == show.ROOT, algo, settings, folder.name, steps))
        rows = [{"step": "1", "v_loss": "2.0"}] if settings["env"] != "Reacher-v4" else []
        return rows * (2 if settings["env"] == "Walker2d-v4" and code == show.ROOT else 1)

    def ran(command, **how):
        return type("Done", (), {"stdout": b""})

    before = {path: path.read_text() for path in tmp_path.rglob("result.json")}
    monkeypatch.setattr(show, "RESULTS", tmp_path)
    for module in (show, table):
        monkeypatch.setattr(module, "SHOWN", tmp_path / "shown.json")
    monkeypatch.setattr(show, "rows_of", rows_of)
    monkeypatch.setattr(show.subprocess, "run", ran)
    monkeypatch.setattr("sys.argv", ["show.py", "--steps", "4096"])
    assert show.main() == 1
    assert before == {path: path.read_text() for path in before}    # no result is rewritten
    (entry,) = table.read_shown()
    settings = {"lr": 0.1, "rollout_steps": 64}
    assert entry == {"algo": "ppo", "env": "Hopper-v4", "settings": settings, "git_commit": "a",
                     "steps": 4096, "sources": sources("ppo")}
    envs = [settings["env"] for _, _, settings, *_ in asked]
    assert sorted(envs) == ["Hopper-v4"] * 2 + ["Reacher-v4"] * 2 + ["Walker2d-v4"] * 2
    hopper = [(new, algo, given, steps) for new, algo, given, _, steps in asked
              if given["env"] == "Hopper-v4"]
    place = {"env": "Hopper-v4", "seed": 3}                         # each code has its own names
    assert hopper == [(False, "ppo", old["settings"] | place, 4096),
                      (True, "ppo", settings | place, 4096)]
    assert len({folder for *_, folder, _ in asked}) == 6
    assert capsys.readouterr().out.count("NOT the same") == 2
    assert show.main() == 1 and len(asked) == 10                    # Hopper's are shown
    monkeypatch.setattr("sys.argv", ["show.py", "--algos", "sac"])
    assert show.main() == 0 and len(asked) == 10                    # none of SAC is stale
    monkeypatch.setattr("sys.argv", ["show.py"])
    for name, status in {"dirty": 1, "empty": 1, "differs": 0}.items():
        (tmp_path / name / "result.json").unlink()
        write(tmp_path / f"good{name}", 1.0, **old | {"git_commit": f"c{name}"})
        assert show.main() == status and asked[-1][-1] == 12288
    write(tmp_path / "again", 1.0, **old | {"git_commit": "b-dirty"})
    assert show.main() == 1


def test_runs_are_equal_in_what_both_have_and_have_learned():
    rows = [{"step": "1", "ep_ret_mean": "2", "loss": "3", "old": "4"},
            {"step": "2", "ep_ret_mean": "2", "loss": "5", "old": "4"}]
    assert show.equal(rows, [{k: v for k, v in row.items() if k != "old"} for row in rows])
    assert show.equal(rows, [row | {"new": "1"} for row in rows])
    assert not show.equal(rows, rows[:1]) and not show.equal([], [])
    for name in ("step", "ep_ret_mean", "loss"):
        assert not show.equal(rows, [rows[0], rows[1] | {name: "9"}])
    warm_up = [row | {"loss": ""} for row in rows]
    bare = [{k: row[k] for k in ("step", "ep_ret_mean")} for row in rows]
    assert not show.equal(bare, bare)                               # nothing shows any learning
    assert not show.equal([row | {"old": ""} for row in warm_up],
                          [row | {"old": ""} for row in warm_up])


def test_rows_of_a_short_run_have_no_clock_and_end_in_time(tmp_path):
    settings = {"env": "CartPole-v1", "total_steps": 1e8, "num_envs": 2, "rollout_steps": 64,
                "minibatch_size": 64, "epochs": 1, "hidden": [8]}
    first, again, other = (show.rows_of(show.ROOT, "ppo", settings | {"seed": seed},
                                        tmp_path / str(number), 256)
                           for number, seed in enumerate((1, 1, 2)))
    assert first == again != other
    assert [row["step"] for row in first] == ["64", "128", "192", "256"]
    assert not {"time", "steps_per_second"} & first[0].keys()
    with pytest.raises(SystemExit, match="ppo in .* failed:\n"):
        show.rows_of(show.ROOT, "ppo", settings | {"lr": -1.0}, tmp_path / "bad", 256)
