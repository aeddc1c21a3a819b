"""Test plot.py: what it finds, computes, draws, prints, skips and refuses."""
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, mannwhitneyu

import plot
from algos import ppo
from benchmarks import suite, table
from tests.helpers import refused
from utils.returns import curve
from utils import sweep
from utils.command import program, read_command


def write_run(folder, *, env="Hopper-v4", algo="ppo", seed=1, returns=range(100), steps=None,
              **settings):
    """Write a run. An episode takes 10 steps and one minute."""
    folder, returns = Path(folder), list(returns)
    folder.mkdir(parents=True)
    config = {"env": env, "seed": seed, "total_steps": 1000.0, "lr": 0.0003} | settings
    (folder / "config.json").write_text(json.dumps({"algo": algo, "settings": config}))
    rows = [f"{10 * k},{60.0 * k},0,{float(ret)},10" for k, ret in enumerate(returns, 1)]
    (folder / "episodes.csv").write_text("\n".join(["step,time,env,ep_ret,ep_len", *rows, ""]))
    last = steps or 10 * len(returns)
    (folder / "progress.csv").write_text(
        f"step,time,kl\n{last // 2},{3.0 * last},0.5\n{last},{6.0 * last},0.25\n")
    return folder


def write_lines(env="Hopper-v4", **lines):
    """Write runs with constant returns: one algorithm per name, one seed per return."""
    for algo, returns in lines.items():
        for seed, ret in enumerate(returns, 1):
            write_run(f"runs/{env}/{algo}{seed}", env=env, algo=algo, seed=seed,
                      returns=[ret] * 100)


def asked(**more):
    return plot.Plot(("runs",), **({"smooth": (1,)} | more))


def read(**more):
    """Return the runs in `runs`, grouped."""
    return plot.group(plot.load(asked(**more)), more.get("by", ""), more.get("rows", ""))


def figure(**more):
    return plot.draw(read(**more), asked(**more))


@pytest.fixture
def cli(capsys):
    """A function that runs a command line. It returns what was written: (stdout, stderr)."""
    def run(*args):
        capsys.readouterr()
        with program():
            plot.main(read_command(plot.Plot, plot.__doc__, "python -m plot", args or ["--help"]))
        return capsys.readouterr()
    return run


def rows_of(text):
    """Return the rows of the Markdown table in a text."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")]
                      for line in text.splitlines() if line.startswith("|"))
    return [dict(zip(head, row)) for row in rows]


def thick(ax):
    """Return the lines of a panel over the seeds: {the line's name: its curve}."""
    return {line.get_label().split(" (seeds")[0]: line for line in ax.lines
            if "(seeds" in line.get_label()}


# ---- What is found

def test_real_runs_of_this_project(cli):
    """plot.py reads what the logger and the sweep write, not only what this file imitates."""
    for seed in (1, 2):
        ppo.train(ppo.Config("CartPole-v1", '{"max_episode_steps": 5}', seed=seed, hidden=(8,),
                             total_steps=512, rollout_steps=256, minibatch_size=64, epochs=1,
                             num_envs=2, run_dir=f"runs/{seed}"))
    assert sweep.main(sweep.Sweep(results="runs")) == 0
    out, err = cli("runs", "--smooth", "1", "10")
    assert err == "curves.svg (runs: 2)\n"
    (row,) = rows_of(out)
    assert (row["panel"], row["line"], row["seeds"]) == ("CartPole-v1", "ppo", "2*")
    results = [json.loads(Path(f"runs/{k}/result.json").read_text()) for k in (1, 2)]
    assert row["eval"] == plot.cell(float(np.mean([result["eval"] for result in results])))
    assert row["train"] == "5.00"                   # no pole falls within five steps
    more = "--y", "explained_variance", "--x", "time", "--out", "other.png"
    assert cli("runs", *more)[0] == out             # the table is of returns, whatever the figure
    stored = suite.read_runs(Path("runs"))
    suite.write_suite(Path("kept.jsonl"), stored[::-1])
    assert suite.read_suite(Path("kept.jsonl")) == stored
    assert "curve" not in Path("kept.jsonl").read_text()    # they have a file of their own
    (found,) = suite.read(Path("kept.jsonl")).values()
    assert [table.of_result(result).settings["lr"] for result in found] == [ppo.Config.lr] * 2


BOTH = {"norm_obs": True, "scale_rew": True}
GAMMAS = [{"lr": 1e-3, "gamma": 0.9}, {"lr": 1e-3, "gamma": 0.99}, {"lr": 3e-4, "gamma": 0.9},
          {"algo": "acer"}]                         # which lacks the other setting
SHORT, LONG, LONGER = {"algo": "trpo"}, {"total_steps": 1050.0}, {"total_steps": 1100.0}


@pytest.mark.parametrize("by, runs, lines", [
    ("", [{"lr": 1e-3, "torch_threads": 2}, {"lr": 1e-3}, {"lr": 3e-4}, {"lr": 3e-4}],
     ["ppo lr=0.0003", "ppo lr=0.001"]),
    ("gamma", GAMMAS, {"Hopper-v4, lr=0.0003": ["acer", "ppo gamma=0.9"],
                       "Hopper-v4, lr=0.001": ["ppo gamma=0.9", "ppo gamma=0.99"]}),
    ("seed", GAMMAS[:2], {"Hopper-v4, gamma=0.9": ["ppo seed=0"],
                          "Hopper-v4, gamma=0.99": ["ppo seed=1"]}),
    # A name leaves out the value that two thirds of an algorithm's runs have, in any environment.
    ("", [BOTH, BOTH | {"norm_obs": False}, BOTH | {"scale_rew": False}, BOTH | {"lr": 1e-3}],
     ["ppo", "ppo lr=0.001", "ppo norm_obs=False", "ppo scale_rew=False"]),
    ("", [{"lr": 1e-3}, {}, {"env": "Walker2d-v4"}],
     {"Hopper-v4": ["ppo", "ppo lr=0.001"], "Walker2d-v4": ["ppo"]}),
    ("", [{"num_envs": n} for n in (16, 2, 4)], [f"ppo num_envs={n}" for n in (2, 4, 16)]),
    ("", [{"hidden": [64, 64]}, {"hidden": [64, 32]}], ["ppo hidden=64-32", "ppo hidden=64-64"]),
    ("", [{"lr": lr} for lr in (2.0, 1e-5, 0.003)], ["ppo lr=1e-05", "ppo lr=0.003", "ppo lr=2"]),
    # They depend on no default of today. A run that lacks a setting is of another version.
    ("", [{"lr": 0.123, "torch_threads": 1, "device": "cpu", "eval_every": 1},
          {"lr": 0.123, "torch_threads": 2, "eval_every": 2, "no_longer_there": 5}], ["ppo"]),
    ("", [{"num_procs": n} for n in (1, 2)], ["ppo num_procs=1", "ppo num_procs=2"]),
    # A longer run has a panel of its own: --compare would take it for a better one.
    ("", [SHORT, LONG], ["ppo", "trpo"]), ("", [SHORT, LONGER], {
        "Hopper-v4, total_steps=1000": ["trpo"], "Hopper-v4, total_steps=1100": ["ppo"]}),
    ("total_steps", [SHORT, LONGER], ["ppo", "trpo"])])
def test_a_line_is_named_by_the_settings_that_differ(by, runs, lines):
    for k, settings in enumerate(runs):
        write_run(f"runs/{k}", **{"seed": k} | settings)
    panels = lines if isinstance(lines, dict) else {"Hopper-v4": lines}
    assert {panel: list(found) for panel, found in read(by=by).items()} == panels


@pytest.mark.parametrize("codes,resumed,told", [
    ("ab", False, True), ("aa", False, False), (("a", ""), False, False), ("aa", True, True)])
def test_seeds_of_different_code_are_told(cli, codes, resumed, told):
    for seed, code in enumerate(codes):
        path = write_run(f"runs/{seed}", seed=seed) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"code": code}))
    if resumed:                                         # with other code
        Path("runs/1/algo-until-500.py").touch()
    assert ("Hopper-v4: the seeds of ppo are of different code" in cli("runs")[1]) == told


def test_of_two_runs_of_a_seed_the_finished_one_counts(cli):
    write_run("runs/a", seed=1, returns=[3] * 100, total_steps=1500.0)
    write_run("runs/b", seed=1, returns=[5] * 150, total_steps=1500.0)
    out, err = cli("runs")
    assert rows_of(out)[0]["train"] == "5.00"
    assert "runs/a: seed 1 of ppo is also in runs/b; skipped" in err


def test_the_last_evaluation_of_a_run_stands_in_the_table(cli):
    """--eval-every also evaluates at the end. Without any, a line under the table says why."""
    folder = write_run("runs/a", returns=[1] * 100)
    assert rows_of(cli("runs")[0])[0]["eval"] == "-"
    (folder / "progress.csv").write_text("step,time,eval_ret_mean\n500,3,1\n1000,6,4.5\n")
    for steps, final in ((900, "4.50"), (1000, "7.00")):        # 900: of before a resume
        (folder / "result.json").write_text(json.dumps({"eval": [7.0], "steps": steps}))
        assert rows_of(cli("runs")[0])[0]["eval"] == final


# ---- Curves

@pytest.mark.parametrize("window", [1, 100])
def test_smoothing_of_a_ramp(window):
    """A point is the mean of the window that ends there, so on a ramp it lags by half a window."""
    write_run("runs/a", returns=range(1000))
    fig = figure(smooth=(window,))
    x, y = thick(fig.axes[0])["ppo"].get_data()
    assert (x[0], x[-1]) == (10 * window, 10_000)
    np.testing.assert_allclose(y, x / 10 - 1 - (window - 1) / 2)
    assert fig.axes[0].get_title() == "Hopper-v4" + f": mean of {window} episodes" * (window > 1)


def test_a_window_is_at_most_a_tenth_of_the_shortest_run_of_its_panel():
    for k, (algo, env) in enumerate((("a", "Hopper"), ("b", "Hopper"), ("a", "Walker2d"))):
        write_run(f"runs/{k}", algo=algo, env=f"{env}-v4", returns=range(400 if k == 1 else 1000))
    fig = figure(smooth=(100,))
    assert [ax.get_title() for ax in fig.axes] == [
        "Hopper-v4: mean of 40 episodes, a tenth of the\nshortest run",
        "Walker2d-v4: mean of 100 episodes"]
    assert {line.get_xdata()[0] for line in thick(fig.axes[0]).values()} == {400}


def test_gaps_in_a_column_are_passed_over_and_a_half_written_line():
    folder = write_run("runs/a")
    text = [f"{10 * k},{k},{k if k % 3 == 0 else ''}" for k in range(1, 101)]
    (folder / "progress.csv").write_text("\n".join(["step,time,eval_ret_mean", *text, "10"]))
    (run,) = plot.load(asked(y="eval_ret"))         # it finds the column with _mean
    assert run.x.tolist() == [10 * y for y in run.y] == list(range(30, 1000, 30))


def test_time_runs_on_between_reports():
    """The log knows an episode only by the time of its report, which would draw a staircase."""
    folder = write_run("runs/a")
    text = (folder / "episodes.csv").read_text()
    (folder / "episodes.csv").write_text(re.sub(r"\n(\d+),[\d.]+", r"\n\1,900.0", text))
    (folder / "progress.csv").write_text("step,time\n500,300.0\n1000,900.0\n")
    (run,) = plot.load(asked(x="time"))
    assert run.x[[24, 49, 74, 99]].tolist() == [2.5, 5, 10, 15]     # minutes


def test_episodes_that_end_together_draw_no_staircase():
    """As those of environments with a time limit do: on a steady rise, each step would be one."""
    folder = write_run("runs/a", returns=[8 * (k // 8) + 8 for k in range(320)])
    text = (folder / "episodes.csv").read_text().splitlines()
    rows = [f"{80 * (k // 8) + 80}," + row.partition(",")[2] for k, row in enumerate(text[1:])]
    (folder / "episodes.csv").write_text("\n".join([text[0], *rows, ""]))
    for smooth in (1, 10):
        slopes = np.diff(thick(figure(smooth=(smooth,)).axes[0])["ppo"].get_ydata())
        assert slopes[10:-10].min() > 0.5 * slopes[10:-10].max()


def test_curves_are_interpolated_and_cut_to_what_all_seeds_have():
    for seed, returns in ((1, [0, 10, 20]), (2, [0, 10])):
        write_run(f"runs/{seed}", seed=seed, returns=returns, steps=1000)
    x, y = thick(figure(x="episodes").axes[0])["ppo"].get_data()
    assert (x[0], x[-1]) == (1, 2)
    np.testing.assert_allclose(y, 10 * (x - 1))
    for seed in (1, 2):                             # their only values have no stretch in common
        Path(f"runs/{seed}/progress.csv").write_text("step,time,loss\n1000,60,5\n")
    assert set(figure(x="episodes", y="loss").axes[0].lines[0].get_xdata()) == {3}


@pytest.mark.parametrize("ends, drawn, length", [
    ([1000, 1000, 1000, 20], [1, 2, 3], 1000),      # one has crashed
    ([1000, 990, 20, 10], [1], 1000),               # others are still on their way
    ([500, 460, 440, 10], [1, 2], 460)])            # nobody has finished
def test_a_line_is_of_the_seeds_that_have_come_as_far(ends, drawn, length, capsys, cli):
    """A seed that crashed at once would cut the line of all others, and smooth it over nothing."""
    for seed, end in enumerate(ends, 1):
        write_run(f"runs/{seed}", seed=seed, returns=range(end // 10))
    fig = figure(smooth=(10,))
    said = capsys.readouterr().err.replace(os.sep, "/").splitlines()
    assert len(said) == sum(end < 1000 for end in ends)
    for seed, end in enumerate(ends, 1):
        told = [line for line in said if line.startswith(f"runs/{seed}: unfinished, at step {end}")]
        assert len(told) == (end < 1000)
        assert all(line.endswith("left out") != (seed in drawn) for line in told)
    assert fig.axes[0].lines[0].get_label() == f"ppo (seeds: {len(drawn)})"
    assert fig.axes[0].lines[0].get_xdata()[-1] == length
    assert "mean of " in fig.axes[0].get_title()
    assert cli("runs")[0].count("| Hopper-v4 |") == (1000 in ends)


# ---- Statistics and tables

def test_probability_of_improvement_is_mann_whitneys():
    """It is U / (n m) in each environment, averaged over environments of any number of seeds."""
    rng = np.random.default_rng(0)
    ours = [rng.integers(0, 6, n).astype(float) for n in (5, 8, 3)]     # with ties
    theirs = [rng.integers(1, 7, n).astype(float) for n in (7, 5, 6)]
    each = [mannwhitneyu(a, b).statistic / (len(a) * len(b)) for a, b in zip(ours, theirs)]
    assert plot.improvement(*ours, *theirs) == pytest.approx(np.mean(each))


def test_interval_of_an_improvement_is_stratified():
    """A side with equal seeds adds no width: the other wins a Binomial(5, 3 / 5) number of five."""
    same, mixed = np.full(5, 3.0), np.array([1.0, 1, 1, 5, 5])
    expected = binom.ppf([0.025, 0.975], 5, 0.6) / 5
    assert tuple(plot.interval([mixed < 3], np.mean)) == tuple(expected)
    assert tuple(plot.interval([same, mixed], plot.improvement)) == tuple(expected)
    ends = plot.interval([same, same, mixed, np.full(5, 9.0)], plot.improvement)
    np.testing.assert_allclose(ends, expected / 2)


def test_the_table_and_its_marks(cli):
    write_lines(ppo=[900, 10, 20, 30, 40, 50], sac=[2])
    for run in ("ppo1", "sac1"):                    # the other seeds of ppo have no evaluation
        Path(f"runs/Hopper-v4/{run}/result.json").write_text('{"eval": [7, 8], "steps": 1000}')
    first, second = rows_of(cli("runs")[0])
    assert re.fullmatch(r"175 \[[23]\d\.\d, [3-6]\d\d\]", first["train"])
    assert first | {"train": 0} == {"panel": "Hopper-v4", "line": "ppo", "steps": "1,000",
                                    "seeds": "6", "train": 0, "eval": "-"}
    assert (second["seeds"], second["train"], second["eval"]) == ("1*", "2.00", "7.50")
    assert rows_of(cli("runs", "--aggregate", "iqm")[0])[0]["train"].startswith("35.0 [")


@pytest.mark.parametrize("count, mean", [
    (40, "-"), (50, "47.0"), (1000, "950"), (2000, "1900")])
def test_the_end_of_a_run_is_its_last_tenth(count, mean, cli):
    """Its last 100 episodes may be most of a short run, and 4 episodes say nothing.

    A hundredth of the steps with many short episodes counts once, as in the published tables.
    """
    run = write_run("other", steps=1000)
    rows = [f"{step},1,0,{ret},9" for step, ret in [(905, 0)] * 9 + [(1000, 100.1264)]]
    (run / "episodes.csv").write_text("\n".join(["step,time,env,ep_ret,ep_len", *rows, ""]))
    assert plot.read_run(run, "steps", "ep_ret").train == pytest.approx(50.063)
    result = {"curve": curve([905, 1000], [0, 100.1264], 1000), "steps": 1000, "total_steps": 900}
    assert suite.ends_at(result) == pytest.approx(50.063)
    assert np.isnan(suite.ends_at(result | {"curve": [[900, 1]]}))
    write_run("runs/a", returns=range(count), total_steps=10 * count)
    out, _ = cli("runs")
    assert rows_of(out)[0]["train"] == mean
    assert "in the last tenth of the steps, where" in out and "-: fewer than 5 episodes" in out


def test_compare_answers_in_the_direction_asked(cli):
    write_lines(ppo=[35, 35, 35, 5, 12], my_ppo=[10, 20, 30, 40, 50])
    write_lines("Swimmer-v4", ppo=range(9), my_ppo=range(100, 104))
    write_lines("Walker2d-v4", ppo=[7] * 5, my_ppo=range(10, 15))
    for k, ret in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 9, 9)):    # evaluations tell the opposite
        path = f"runs/Hopper-v4/{'ppo' if k > 4 else 'my_ppo'}{k % 5 + 1}/result.json"
        Path(path).write_text(json.dumps({"eval": [ret]}))
    _, said = cli("runs", "--compare", "my_ppo", "ppo")[0].split("\n\n")
    hopper, swimmer, walker, every = rows_of(said)
    assert list(hopper) == ["P(my_ppo > ppo)", "seeds", "train", "eval"]
    assert hopper["P(my_ppo > ppo)"] == "Hopper-v4" and hopper["eval"] == "0.00"
    assert re.fullmatch(r"0\.60 \[0\.\d\d, 0\.\d\d\]", hopper["train"])
    assert (swimmer["seeds"], swimmer["train"], swimmer["eval"]) == ("4, 9", "1.00", "-")
    # Without any overlap, every resample gives 1: there is no interval that says anything.
    assert (walker["seeds"], walker["train"]) == ("5, 5", "1.00")
    assert every | {"eval": 0} == {"P(my_ppo > ppo)": "average over 3 panels", "seeds": "14, 19",
                                   "train": "0.87", "eval": 0}


def test_compare_says_nothing_of_two_seeds_or_of_half_a_run(cli):
    """A change that learns faster and ends lower has the higher mean over the whole run."""
    write_lines(ppo=[1, 2, 3], sac=[2, 9])
    write_lines("Swimmer-v4", ppo=[6, 7, 8])
    for seed in (1, 2, 3):
        write_run(f"runs/fast{seed}", env="Swimmer-v4", algo="sac", seed=seed,
                  returns=[9] * 80 + [5] * 20)
    write_run("runs/cut", algo="sac", seed=3, returns=[9] * 99)
    out, err = cli("runs", "--compare", "ppo", "sac")
    assert [row["seeds"] for row in rows_of(out)[:2]] == ["3", "2*"]
    hopper, swimmer, _ = rows_of(out.split("\n\n")[1])
    assert (hopper["seeds"], hopper["train"], swimmer["train"]) == ("3, 2", "-", "1.00")
    assert "runs/cut: unfinished, at step 990 of 1,000" in err


def test_published_results_are_in_the_table_and_drawn(cli, monkeypatch):
    for algo in ("ppo", "mine"):
        write_run(f"runs/{algo}", env="HalfCheetah-v4", algo=algo, steps=1_001_472, total_steps=1e6)
    mine, ours = rows_of(cli("runs", "--anchors")[0])
    assert mine["best in anchors.csv"] == "-"
    assert ours["best in anchors.csv"].startswith("2906 (CleanRL ")
    (ax,) = figure(anchors=True).axes
    theirs = plot.published("HalfCheetah-v4", "ppo", 1e6, training=True)
    dotted = [line for line in ax.lines if line.get_linestyle() == ":"]
    assert [line.get_ydata()[0] for line in dotted] == [mean for mean, *_ in theirs]
    assert {line.get_color() for line in dotted} == {thick(ax)["ppo"].get_color()}
    for steps, there in ((1_040_000, True), (940_000, False)):
        assert bool(plot.published("HalfCheetah-v4", "ppo", steps, training=False)) == there
    monkeypatch.setattr(plot, "ANCHORS", Path("not/installed.csv"))
    refused(plot.main, asked(anchors=True), says="--anchors: .* only in a clone of the repository")


# ---- Figures

def test_what_a_figure_holds():
    write_lines(ppo=[1, 2, 6], sac=[1, 2, 3])
    write_lines("Swimmer-v4", sac=[1])
    fig = figure()
    hopper, swimmer = fig.axes
    assert [ax.get_title() for ax in fig.axes] == ["Hopper-v4", "Swimmer-v4"]
    assert (hopper.get_xlabel(), hopper.get_ylabel()) == ("environment steps", "episode return")
    assert [text.get_text() for text in fig.legends[0].get_texts()] == [
        "ppo (seeds: 3)", "sac (seeds: 1 or 3)"]
    assert len(hopper.lines) == 2 and len(swimmer.lines) == 1           # means
    assert len(hopper.collections) == 2 and len(swimmer.collections) == 0   # bands
    ours, theirs = thick(hopper)["ppo"].get_color(), thick(hopper)["sac"].get_color()
    assert ours != theirs == thick(swimmer)["sac"].get_color()


@pytest.mark.parametrize("how, centre", [("mean", 5), ("iqm", 3)])
def test_lines_and_bands(how, centre):
    write_lines(ppo=[2, 3, 3, 12])
    fig = figure(aggregate=how)
    np.testing.assert_allclose(thick(fig.axes[0])["ppo"].get_ydata(), centre)
    ends = fig.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    reach = 22 ** 0.5                               # (9 + 4 + 4 + 49) / (4 - 1)
    np.testing.assert_allclose([ends.min(), ends.max()], [centre - reach, centre + reach])
    assert fig.legends[0].get_title().get_text().startswith(f"line: {how} of seeds, to where ")
    shutil.rmtree("runs")
    write_lines(ppo=[2])
    assert figure().legends[0].get_title().get_text() == "line: one seed"


def test_a_grid_of_a_setting_and_smoothings():
    for n in (16, 2):
        write_run(f"runs/{n}", env="ALE/Pong-v5", algo="a2c", num_envs=n, returns=range(2000))
    fig = figure(rows="num_envs", smooth=(1, 10, 100), x="time")
    assert [ax.get_title() for ax in fig.axes] == [
        f"ALE/Pong-v5, num_envs={n}{part}" for n in (2, 16)
        for part in ("", ": mean of 10 episodes", ": mean of 100 episodes")]
    assert {ax.get_subplotspec().get_geometry()[:2] for ax in fig.axes} == {(2, 3)}
    assert len({ax.get_ylim() for ax in fig.axes}) == 1     # one environment, one scale


@pytest.mark.parametrize("envs, lines", [(1, 25), (5, 12)])
def test_the_legend_is_outside_the_panels_and_fits(envs, lines):
    for env in range(envs):
        for k in range(lines):
            write_run(f"runs/{env}-{k}", env=f"InvertedDoublePendulum{env}-v4",
                      learning_rate_of_the_critic=k / 7, returns=[30000 * k, -2])
    fig = figure()
    looks = {(line.get_color(), line.get_linestyle()) for line in thick(fig.axes[0]).values()}
    assert len(looks) == lines
    fig.draw_without_rendering()
    box = fig.legends[0].get_window_extent()
    assert -1 < box.x0 < box.x1 < fig.bbox.width + 1 and -1 < box.y0
    assert not any(box.overlaps(ax.get_tightbbox()) for ax in fig.axes)
    assert min(min(ax.get_window_extent().size) for ax in fig.axes) > 1.3 * fig.dpi     # inches


@pytest.mark.parametrize("name, start", [
    ("a.svg", b"<?xml"), ("a.pdf", b"%PDF-"), ("a.png", b"\x89PNG")])
def test_the_same_data_give_the_same_file(name, start, cli):
    write_lines(ppo=[1, 2])
    cli("runs", "--out", name)
    first = Path(name).read_bytes()
    cli("runs", "--out", name)
    assert Path(name).read_bytes() == first and first.startswith(start)


def test_no_picture_of_another_command_is_overwritten(cli):
    write_lines(ppo=[1, 2])
    Path("curves-2.svg").write_bytes(b"somebody's own \xff")
    shutil.copytree("runs", "mine & yours")
    for folder, x, name in (("runs", "steps", "curves.svg"), ("runs", "time", "curves-3.svg"),
                            ("mine & yours", "steps", "curves-4.svg")):
        other = "; curves.svg holds another figure" * (name != "curves.svg")
        for _ in range(2):                          # a command knows its own picture
            assert cli(folder, "--x", x)[1] == f"{name} (runs: 2){other}\n"
    assert Path("curves-2.svg").read_bytes() == b"somebody's own \xff"
    Path("curves-5.svg").mkdir()
    with pytest.raises(SystemExit, match="2"):
        cli("runs", "--x", "episodes")


# ---- What is skipped, what is refused

@pytest.mark.parametrize("name, text, said", [
    ("episodes.csv", "step,time,env,ep_ret,ep_len\n", "no value of ep_ret yet; --y draws other"),
    ("progress.csv", "step,time,kl\n", "no value of ep_ret yet"),
    ("episodes.csv", "step,time,env,length\n1,2,0,1\n", "--y ep_ret: no such column, but step"),
    ("episodes.csv", "", "a file is missing or damaged"),
    ("progress.csv", "step,time,kl\n1,2,0.5\n2,3\n4,5,6\n", "a file is missing or damaged"),
    ("config.json", '{"architectures": ["BertModel"]}', "a file is missing or damaged"),
    ("config.json", '{"algo": "ppo", "settings": {"env": "Hopper-v4", "seed": null, '
     '"total_steps": 1000}}', "a file is missing or damaged"),
    ("result.json", '{"eval": "?"}', "a file is missing or damaged"),
    ("episodes.csv", None, "a file is missing or damaged")])
def test_what_cannot_be_read_is_named_and_skipped(name, text, said, capsys):
    write_run("runs/good")
    for seed in (2, 3):
        path = write_run(f"runs/bad{seed}", seed=seed) / name
        path.unlink() if text is None else path.write_text(text)
    assert len(plot.load(asked())) == 1
    (line,) = capsys.readouterr().err.replace(os.sep, "/").splitlines()
    assert line.startswith(f"skipped; {said}") and line.endswith(": runs/bad2, runs/bad3")


def test_a_run_without_episodes_is_drawn_by_a_column_of_its_reports(cli):
    """Behaviour cloning trains without episodes. It has evaluations and losses."""
    folder = write_run("runs/1", algo="bc", returns=[], steps=1000)
    (folder / "result.json").write_text('{"eval": [4], "steps": 1000}')
    (folder / "episodes.csv").write_text("step,time,env,ep_ret,ep_len\n")
    (run,) = plot.load(asked(y="kl"))
    assert list(run.y) == [0.5, 0.25] and run.end == 1000 and np.isnan(run.train)
    (row,) = rows_of(cli("runs", "--y", "kl")[0])
    assert (row["train"], row["eval"]) == ("-", "4.00")


@pytest.mark.parametrize("args, said", [
    (["nowhere", "empty"], "error: no run to plot; no run in it (no config.json): nowhere, empty"),
    (["--y", "ep_len"], "error: no run to plot; name a folder"),
    (["runs", "--smooth", "7"], "error: invalid choice '7' for argument '--smooth'"),
    (["runs", "--out", "curves.gpj"], "--out curves.gpj cannot be written"),
    (["runs", "--y", "ret"], "--y ret: no such column, but ep_ret: runs/a, runs/b"),
    (["runs", "--rows", "nums"], "error: --rows nums: no such setting; there are algo env lr"),
    (["runs", "--compare", "ppo", "sac"], "ppo sac: no panel has finished runs of both; ppo"),
])
def test_status_two_and_one_message(args, said, cli, capsys):
    Path("empty").mkdir()
    write_run("runs/a")
    write_run("runs/b", seed=2)
    with pytest.raises(SystemExit) as caught:
        cli(*args)
    (line,) = capsys.readouterr().err.replace(os.sep, "/").splitlines()
    assert caught.value.code == 2 and said in line and not list(Path().glob("curves.*"))
