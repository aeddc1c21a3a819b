"""Test plot.py: what it finds, computes, draws, prints, skips and refuses."""
import csv
import io
import json
import re
import shutil
import struct
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import tyro
from scipy.stats import binom, bootstrap, norm

import plot
from algos import ppo
from utils import sweep
from utils.mpi import UsageError

SETTINGS = {"total_steps": 1000.0, "lr": 0.0003, "hidden": [64, 64], "device": "auto"}


def write_run(folder, *, env="Hopper-v4", algo="ppo", seed=1, returns=range(100), result=None,
              steps=None, **settings):
    """Write a run. Its episode k takes 10 steps and one minute, and returns returns[k]."""
    folder, returns = Path(folder), list(returns)
    folder.mkdir(parents=True)
    config = SETTINGS | {"env": env, "seed": seed, "run_dir": str(folder)} | settings
    (folder / "config.json").write_text(json.dumps({"algo": algo, "settings": config}))
    rows = [f"{10 * k},{60.0 * k},0,{float(ret)},10" for k, ret in enumerate(returns, 1)]
    (folder / "episodes.csv").write_text("\n".join(["step,time,env,ep_ret,ep_len", *rows, ""]))
    last = steps or 10 * len(returns)
    rows = [f"{last // 2},{3.0 * last},0.5,", f"{last},{6.0 * last},0.25,7.0"]
    (folder / "progress.csv").write_text("\n".join(["step,time,kl,late", *rows, ""]))
    if result is not None:
        (folder / "result.json").write_text(json.dumps({"eval": [result], "sources": {}}))
    return folder


def write_result(folder, *, env="Hopper-v4", algo="ppo", seed=1, train100=1.0, **more):
    """Write a result.json, as it is kept of a published run."""
    result = {"algo": algo, "env": env, "seed": seed, "settings": {}, "total_steps": 1000,
              "steps": 1024, "train100": train100, "eval": [2.0, 4.0],
              "curve": [[10 * k, float(k)] for k in range(1, 101)]}
    Path(folder).mkdir(parents=True)
    Path(folder, "result.json").write_text(json.dumps(result | more))


def arguments(*runs, **more):
    return plot.Plot(tuple(map(str, runs or ["runs"])), **more)


def read(**more):
    """Return the runs in `runs`, grouped, with unsmoothed curves."""
    return plot.group(plot.load(arguments(**{"smooth": 1} | more)), more.get("by", ""))


def figure(**more):
    asked = arguments(**{"smooth": 1} | more)
    return plot.draw(read(**more), asked, {})


def cli(*args):
    plot.main(tyro.cli(plot.Plot, args=args))


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


# ---- What is found

def test_real_runs_of_this_project(capsys):
    """plot.py reads what the logger and the sweep write, not only what this file imitates."""
    for seed in (1, 2):
        ppo.train(ppo.Config("CartPole-v1", '{"max_episode_steps": 20}', seed=seed, hidden=(8,),
                             total_steps=512, rollout_steps=256, minibatch_size=64, epochs=1,
                             num_envs=2, run_dir=f"runs/{seed}"))
    assert sweep.main(sweep.Sweep(results="runs")) == 0
    Path("kept").mkdir()
    shutil.copy("runs/1/result.json", "kept")
    capsys.readouterr()
    cli("runs", "--smooth", "10", "--table", "csv")
    out, err = capsys.readouterr()
    assert err.splitlines() == ["curves.svg: 2 runs"]
    results = [json.loads(Path(f"runs/{seed}/result.json").read_text()) for seed in (1, 2)]
    (row,) = rows_of(out)
    assert (row["environment"], row["line"], row["seeds"]) == ("CartPole-v1", "ppo", "2")
    for name in ("train100", "eval"):
        mean = np.mean([np.mean(result[name]) for result in results])
        assert float(row[name]) == pytest.approx(mean, abs=1e-3)
    cli("runs", "--smooth", "1", "--y", "explained_variance", "--x", "time", "--table", "csv")
    assert capsys.readouterr().out == out           # the table is of returns, whatever the figure
    cli("kept", "--table", "csv")
    (row,) = rows_of(capsys.readouterr().out)
    assert float(row["eval"]) == pytest.approx(np.mean(results[0]["eval"]))


def test_environment_and_algorithm_are_of_the_config():
    """They are not read from folder names, since a folder can be moved and renamed."""
    write_run("runs/Walker2d-v4/td3/seed9", env="Hopper-v4", algo="sac", seed=4)
    groups = read()
    assert list(groups) == ["Hopper-v4"] and list(groups["Hopper-v4"]) == ["sac"]
    assert groups["Hopper-v4"]["sac"][0].seed == 4


def test_a_line_for_each_setting_that_differs(capsys):
    for k, (lr, seed) in enumerate([(1e-3, 2), (1e-3, 1), (3e-4, 1)]):
        write_run(f"runs/{k}", lr=lr, seed=seed, torch_threads=k)
    write_run("runs/3", env="Walker2d-v4", seed=1)
    groups = read()
    assert list(groups["Hopper-v4"]) == ["ppo lr=0.0003", "ppo lr=0.001"]
    assert [run.seed for run in groups["Hopper-v4"]["ppo lr=0.001"]] == [1, 2]
    assert list(groups["Walker2d-v4"]) == ["ppo"]   # no setting differs there
    assert list(read(by="lr")["Walker2d-v4"]) == ["ppo lr=0.0003"]
    assert capsys.readouterr().err == ""
    (runs,) = read(by="algo")["Hopper-v4"].values()
    assert len(runs) == 3 and "differ in lr are pooled" in capsys.readouterr().err
    assert {panel: list(lines) for panel, lines in read(by="env").items()} == {
        "ppo": ["Walker2d-v4"], "ppo lr=0.0003": ["Hopper-v4"], "ppo lr=0.001": ["Hopper-v4"]}
    for by in ("", "env"):                          # both tables have the same rows
        lines = {(row["environment"], row["line"], row["seeds"])
                 for row in plot.results(read(by=by), "mean")}
        assert lines == {("Walker2d-v4", "ppo", 1), ("Hopper-v4", "ppo lr=0.0003", 1),
                         ("Hopper-v4", "ppo lr=0.001", 2)}


def test_a_result_names_only_settings_that_are_not_the_default():
    write_result("runs/a", seed=1)
    write_result("runs/b", seed=1, settings={"total_steps": 1e5})
    write_result("runs/c", seed=1, library="stable-baselines3")
    assert list(read()["Hopper-v4"]) == ["ppo total_steps=100000", "ppo total_steps=1000000",
                                         "stable-baselines3 ppo"]
    shutil.rmtree("runs/b")
    write_run("runs/d", seed=2, total_steps=1e6)    # a config.json names all settings
    assert list(read()["Hopper-v4"]) == ["ppo", "stable-baselines3 ppo"]


def test_a_result_of_this_project_has_the_defaults_it_does_not_name():
    """A result with default settings and a run with other settings are not seeds of one line."""
    write_result("runs/a", seed=1)
    write_run("runs/b", seed=2, lr=0.5)
    default = {field.name: field.default for field in fields(ppo.Config)}["lr"]
    assert {line.split()[1] for line in read(by="lr")["Hopper-v4"]} == {f"lr={default}", "lr=0.5"}
    assert len(read()["Hopper-v4"]) == 2


def test_of_two_runs_of_a_seed_the_whole_one_counts(capsys):
    write_run("runs/a", seed=1, returns=[3] * 100, total_steps=1500.0)
    write_run("runs/b", seed=1, returns=[5] * 150, total_steps=1500.0)
    (row,) = plot.results(plot.finished(read()), "mean")
    assert row["train100"][0] == 5
    assert "runs/a: seed 1 of ppo is also in runs/b" in capsys.readouterr().err


def test_an_evaluation_of_before_a_resume_does_not_count():
    folder = write_run("runs/a", returns=[1] * 100)
    (folder / "result.json").write_text('{"eval": [7.0], "steps": 1000}')
    assert plot.results(read(), "mean")[0]["eval"][0] == 7
    (folder / "result.json").write_text('{"eval": [7.0], "steps": 900}')
    assert np.isnan(plot.results(read(), "mean")[0]["eval"][0])


@pytest.mark.parametrize("name, values", [
    ("num_envs", (1, 4)), ("env_kwargs", ("{}", '{"a": 1}')), ("hidden", ([64, 64], [64, 32])),
    ("gamma", (0.9995, 0.9996))])
def test_settings_that_make_another_line(name, values):
    for k, value in enumerate(values):
        write_run(f"runs/{k}", **{name: value})
    assert len(read()["Hopper-v4"]) == 2


@pytest.mark.parametrize("name", sorted(plot.PLACE - {"env", "seed", "run_dir", "resume"}))
def test_settings_that_make_none(name):
    for seed in (1, 2):
        write_run(f"runs/{seed}", seed=seed, **{name: seed})
    assert list(read()["Hopper-v4"]) == ["ppo"]


def test_eval_every_makes_no_line():
    for seed in (1, 2):
        write_run(f"runs/{seed}", seed=seed, eval_every=seed, num_procs=seed, compile=seed == 2)
    assert list(read()["Hopper-v4"]) == ["ppo"]


def test_by_takes_together_what_differs_otherwise(capsys):
    for k, (lr, gamma) in enumerate([(1e-3, 0.9), (1e-3, 0.99), (3e-4, 0.9)]):
        write_run(f"runs/{k}", lr=lr, gamma=gamma)
    lines = read(by="lr")["Hopper-v4"]
    assert {line: len(runs) for line, runs in lines.items()} == {"ppo lr=0.0003": 1,
                                                                 "ppo lr=0.001": 2}
    assert "differ in gamma are pooled" in capsys.readouterr().err


@pytest.mark.parametrize("algo", ["nobodys", "utils.mpi", "..mpi", "of another kind"])
def test_a_result_of_an_algorithm_that_is_not_here(algo):
    write_result("runs/a", algo=algo)
    assert list(read()["Hopper-v4"]) == [algo]


def test_lines_are_sorted_by_their_numbers():
    for k, lr in enumerate([1e-5, 1e-4, 0.003, 2.0, 16.0]):
        write_run(f"runs/{k}", lr=lr)
        write_run(f"runs/w{k}", env="Walker2d-v4", algo=f"dqn{'_per' * (k % 2)}", lr=3e-4)
    lines = ["ppo lr=1e-05", "ppo lr=0.0001", "ppo lr=0.003", "ppo lr=2", "ppo lr=16"]
    assert list(read()["Hopper-v4"]) == lines and list(read()["Walker2d-v4"]) == ["dqn", "dqn_per"]
    hopper = figure().axes[0]
    assert [text.get_text().split(" (")[0] for text in hopper.get_legend().get_texts()] == lines
    colours = [line.get_color() for line in hopper.lines if line.get_gid().endswith("mean")]
    assert colours == plot.COLOURS[2:7]             # the lines of Walker2d come first


def test_a_seed_counts_once(capsys):
    write_run("runs/a", seed=1)
    write_run("runs/b", seed=2)
    shutil.copytree("runs/a", "runs/copy")
    (runs,) = plot.group(plot.load(arguments("runs", "runs/a", "./runs")))["Hopper-v4"].values()
    assert [run.seed for run in runs] == [1, 2]
    err = capsys.readouterr().err
    assert err == "runs/copy: seed 1 of ppo is also in runs/a; skipped\n"


# ---- Curves

@pytest.mark.parametrize("window", [1, 10, 100])
def test_smoothing_of_a_ramp(window):
    """A point is the mean of the window that ends there, so on a ramp it lags by half a window."""
    write_run("runs/a", returns=range(150))
    (run,) = plot.load(arguments(smooth=window))
    assert run.x.tolist() == [10 * k for k in range(window, 151)]
    np.testing.assert_allclose(run.y, run.x / 10 - 1 - (window - 1) / 2)


def test_smoothing_of_a_column_with_gaps():
    folder = write_run("runs/a")
    text = [f"{10 * k},{k},{k if k % 3 == 0 else ''}" for k in range(1, 101)]
    (folder / "progress.csv").write_text("\n".join(["step,time,eval_ret_mean", *text, ""]))
    (run,) = plot.load(arguments(smooth=10, y="eval_ret_mean"))
    assert run.x.tolist() == list(range(300, 1000, 30))     # only rows with a value
    np.testing.assert_allclose(run.y, run.x / 10 - 13.5)


def test_smoothing_does_not_look_ahead():
    y = np.random.default_rng(0).normal(size=60)
    later = np.where(np.arange(60) < 40, y, 1e6)
    np.testing.assert_array_equal(plot.smooth(y, 10)[:31], plot.smooth(later, 10)[:31])
    assert plot.smooth(later, 10)[31] > 1e4


def test_between_two_points_the_earlier_holds():
    write_run("runs/a", returns=[5, 6, 7])
    (run,) = plot.load(arguments(smooth=1))
    assert plot.at(run, np.array([10, 19.9, 20, 30, 35])).tolist() == [5, 5, 6, 7, 7]


@pytest.mark.parametrize("x, first, end", [
    ("steps", 10, 1000), ("episodes", 1, 100), ("time", 1, 100)])
def test_x_axes(x, first, end):
    write_run("runs/a")
    (run,) = plot.load(arguments(smooth=1, x=x))
    assert (run.x[0], run.end) == (first, end)
    (run,) = plot.load(arguments(smooth=1, x=x, y="kl"))
    assert run.x.tolist() == [end / 2, end] and run.y.tolist() == [0.5, 0.25]


def test_rows_without_the_quantity_are_passed_over():
    write_run("runs/a")
    (run,) = plot.load(arguments(smooth=1, y="late"))
    assert run.x.tolist() == [1000] and run.y.tolist() == [7]


def test_seeds_are_cut_to_what_all_have(capsys):
    write_run("runs/a", seed=1, returns=range(100))
    write_run("runs/b", seed=2, returns=range(60))
    fig = figure()
    assert {line.get_xdata()[-1] for line in fig.axes[0].lines} == {600}
    said = capsys.readouterr().err
    assert "Hopper-v4, ppo: seeds end between 600 and 1,000; all are cut at 600" in said
    write_run("runs/c", seed=2, algo="sac", returns=range(90))
    figure()
    assert "sac" not in capsys.readouterr().err     # lines may end at different steps
    # The last episode may end before the run does. That cuts nothing.
    write_run("runs/d", seed=1, algo="sac", returns=range(89), steps=900)
    fig = figure()
    assert "sac" not in capsys.readouterr().err
    assert max(line.get_xdata()[-1] for line in fig.axes[0].lines) == 900


def test_seeds_that_have_nothing_in_common(capsys):
    write_run("runs/a", seed=1, returns=range(1))
    write_run("runs/b", seed=2)
    text = Path("runs/b/episodes.csv").read_text().splitlines()
    Path("runs/b/episodes.csv").write_text("\n".join([text[0], *text[50:], ""]))
    assert not figure().axes[0].lines
    assert "do not overlap on the x-axis; not in the figure" in capsys.readouterr().err


# ---- Statistics

def test_interquartile_mean_by_hand():
    assert plot.STATISTICS["iqm"]([900.0, 3, 5, 1, 4, 6, 2, -70], axis=-1) == (2 + 3 + 4 + 5) / 4
    assert plot.STATISTICS["iqm"]([1.0, 2, 3, 4, 5, 90], axis=-1) == 3.5
    assert plot.TRIMMED([1.0, 2, 3, 4, 5, 90], axis=-1) == 3.5
    assert plot.TRIMMED([7.0, 1, 1, 2, 90, 5], axis=-1) == (7 + 1 + 2 + 5) / 4


def test_interval_of_a_share_is_binomial():
    """A resample of k ones and n - k zeros has a Binomial(n, k / n) number of ones."""
    sample = np.repeat([0.0, 1.0], [8, 12])
    low, high = plot.interval([sample], np.mean)
    assert (low, high) == tuple(binom.ppf([0.025, 0.975], 20, 0.6) / 20)


def test_interval_of_a_mean_is_normal():
    sample = np.random.default_rng(1).normal(5, 2, 400)
    low, high = plot.interval([sample], np.mean)
    expected = sample.mean() + norm.ppf([0.025, 0.975]) * sample.std() / 20
    np.testing.assert_allclose([low, high], expected, atol=0.02)


@pytest.mark.parametrize("how", ["mean", "median", "iqm"])
def test_interval_is_scipys(how):
    sample, statistic = np.random.default_rng(2).normal(size=12), plot.STATISTICS[how]
    ours = plot.interval([np.stack([sample, 3 * sample])], statistic)
    other = bootstrap((sample,), statistic, n_resamples=20_000, method="percentile",
                      rng=np.random.default_rng(7)).confidence_interval
    np.testing.assert_allclose([each[0] for each in ours], other, atol=0.07)
    np.testing.assert_allclose([each[1] for each in ours], np.multiply(other, 3), atol=0.21)


def test_interval_is_stratified():
    """Seeds are resampled within their environment, so equal seeds add no width."""
    easy, hard = np.full(3, 1000.0), np.full(5, 1.0)
    assert plot.interval([easy, hard], plot.mean_of_means) == (500.5, 500.5)
    low, high = plot.interval([easy, np.array([0.0, 2.0] * 5)], plot.mean_of_means)
    assert 500 < low < 500.5 < high < 501


def test_seeds_of_two_environments_have_nothing_in_common():
    """Resampling them in pairs would cancel opposite results and leave no width."""
    sample = np.random.default_rng(3).normal(size=40)
    low, high = plot.interval([sample, -sample], plot.mean_of_means)
    expected = 2 * norm.ppf(0.975) * sample.std() / 40 ** 0.5 / 2 ** 0.5
    assert high - low == pytest.approx(expected, rel=0.15)


def test_one_seed_has_no_interval():
    assert np.isnan(plot.interval([np.array([3.0])], np.mean)).all()
    centre, low, _ = plot.band(np.array([[1.0], [2.0]]), "mean")
    assert centre.tolist() == [1, 2] and np.isnan(low).all()


def test_band_of_the_mean_is_a_standard_deviation():
    centre, low, high = plot.band(np.array([[1.0, 2, 6], [4, 4, 4]]), "mean")
    assert centre.tolist() == [3, 4]
    np.testing.assert_allclose(high - centre, [7 ** 0.5, 0])    # (4 + 1 + 9) / (3 - 1)
    np.testing.assert_allclose(centre - low, [7 ** 0.5, 0])


@pytest.mark.parametrize("how", ["median", "iqm"])
def test_band_of_other_statistics_is_their_interval(how):
    y = np.array([[1.0, 2, 3, 4, 5, 900]] * 3)
    centre, low, high = plot.band(y, how)
    assert (centre == 3.5).all()
    np.testing.assert_array_equal((low, high), plot.interval([y], plot.STATISTICS[how]))


def test_probability_of_improvement_by_hand():
    a, b = np.array([1.0, 3.0]), np.array([2.0, 3.0])
    assert plot.improvement(a, b) == (0 + 0 + 1 + 0.5) / 4
    assert plot.improvement(b, a) == 1 - 1.5 / 4
    better, worse = np.array([9.0, 8.0, 7.0]), np.array([1.0])
    assert plot.improvement(a, better, b, worse) == (1.5 / 4 + 1) / 2


def test_profile_by_hand():
    share, low, high = plot.profile([np.array([0.0, 5, 10]), np.array([200.0, 200])],
                                    [(0, 10), (100, 200)])
    at = {0: (2 / 3 + 1) / 2, 30: (2 / 3 + 1) / 2, 50: (1 / 3 + 1) / 2, 100: 0}
    for k, expected in at.items():
        assert share[k] == pytest.approx(expected)
    assert (low <= share).all() and (share <= high).all() and (high - low).max() > 0.1


# ---- Tables

def table_of(capsys, *args):
    cli("runs", "--smooth", "1", *args)
    return capsys.readouterr()


@pytest.fixture
def six():
    for seed, ret in enumerate([10, 20, 30, 40, 50, 900], 1):
        write_run(f"runs/{seed}", seed=seed, returns=[ret] * 100, result=ret / 10)
    write_run("runs/7", algo="sac", returns=[-1.0] * 50 + [2.0] * 100, total_steps=1500.0)


def test_three_protocols(six, capsys):
    ppo, sac = rows_of(table_of(capsys, "--table", "csv").out)
    assert [float(ppo[name]) for name in ("train100", "eval", "4 of 6")] == [175, 17.5, 35]
    assert 20 < float(ppo["train100_low"]) < 40 and 300 < float(ppo["train100_high"]) < 700
    assert float(sac["train100"]) == 2 and sac["eval"] == sac["4 of 6"] == "nan"
    (ppo, _) = rows_of(table_of(capsys, "--table", "csv", "--aggregate", "median").out)
    assert [float(ppo[name]) for name in ("train100", "eval", "4 of 6")] == [35, 3.5, 35]


@pytest.mark.parametrize("later", [-1e6, 0.0, 1e6])
def test_four_of_six_are_the_first_six_whatever_comes_later(six, capsys, later):
    for k in (7, 10, 23):                           # sorted as text, 10 would come before 2
        write_run(f"runs/later{k}", seed=k, returns=[later] * 100)
    (ppo, _) = rows_of(table_of(capsys, "--table", "csv").out)
    assert ppo["seeds"] == "9" and float(ppo["4 of 6"]) == 35


def test_four_of_six_are_six_seeds_of_one_setting(capsys):
    for k in range(6):
        write_run(f"runs/{k}", seed=1 + k % 3, lr=1e-3 if k < 3 else 1e-4, returns=[k] * 100)
    (row,) = rows_of(table_of(capsys, "--table", "csv", "--by", "algo").out)
    assert row["seeds"] == "6" and row["4 of 6"] == "nan"


def test_too_few_rows_to_smooth_are_in_the_table_and_not_in_the_figure(capsys):
    """CartPole's best seeds have the fewest episodes: without them the mean would be too low."""
    write_run("runs/a", seed=1, returns=[10] * 100)
    write_run("runs/b", seed=2, returns=[500] * 50, steps=1000)
    cli("runs", "--table", "csv", "--out", "few.svg")
    out, err = capsys.readouterr()
    assert float(rows_of(out)[0]["train100"]) == 255 and rows_of(out)[0]["seeds"] == "2"
    assert "runs/b: fewer rows than --smooth; not in the figure" in err
    gids, texts = drawn("few.svg")
    assert {"Hopper-v4, ppo, seed 1"} == {gid for gid in gids if "seed" in gid}
    assert "ppo (1 seed)" in texts
    shutil.rmtree("runs/a")
    write_run("runs/c", env="Walker2d-v4")
    cli("runs", "--out", "none.svg")                # an empty panel
    assert not any("Hopper-v4, ppo" in gid for gid in drawn("none.svg")[0])


def test_where_one_evaluation_is_not_there_the_line_has_none(capsys):
    for seed, final in ((1, 5.0), (2, 7.0), (3, None)):
        write_run(f"runs/{seed}", env="HalfCheetah-v4", seed=seed, steps=1_001_472,
                  total_steps=1e6, result=final)
    ours, others = table_of(capsys, "--anchors", "--table", "csv").out.split("\n\n")
    assert [row["eval"] for row in rows_of(ours)] == ["nan"]
    assert {row["eval"] for row in rows_of(others)} == {"nan"}


def test_four_of_six_needs_six(capsys):
    for seed in range(1, 6):
        write_run(f"runs/{seed}", seed=seed, returns=[seed] * 100)
    (row,) = rows_of(table_of(capsys, "--table", "csv").out)
    assert (row["train100"], row["4 of 6"]) == ("3.0", "nan")


def test_unfinished_runs_are_in_no_comparison(capsys):
    for algo, ret in (("ppo", 1.0), ("sac", 2.0)):
        write_run(f"runs/{algo}", algo=algo, env="HalfCheetah-v4", returns=[ret] * 100,
                  steps=1_000_000, total_steps=1e6)
    write_run("runs/cut", env="HalfCheetah-v4", seed=2, returns=[9.0] * 99, steps=950_000,
              total_steps=1e6)
    out, _ = table_of(capsys, "--compare", "ppo", "sac", "--anchors", "--table", "csv")
    _, compared, others = out.split("\n\n")
    assert [row["probability (train100)"] for row in rows_of(compared)] == ["0.0", "0.0"]
    assert {row["train100"] for row in rows_of(others) if row["algorithm"] == "ppo"} == {"1.0"}


def test_steps_of_a_row_are_those_all_seeds_have(capsys):
    for seed, steps in ((1, 3000), (2, 2000)):
        write_run(f"runs/{seed}", seed=seed, steps=steps)
    (row,) = rows_of(table_of(capsys, "--table", "csv").out)
    assert row["steps"] == "2000"


def test_a_run_is_whole_at_its_budget_and_not_before():
    write_run("runs/a", seed=1, returns=range(999), total_steps=10_000.0)
    write_run("runs/b", seed=2, returns=range(1000), total_steps=10_000.0)
    assert [run.whole for run in plot.load(arguments())] == [False, True]


def test_text_and_markdown(six, capsys):
    text = table_of(capsys).out.splitlines()
    assert text[0].split() == "environment line steps seeds train100 eval 4 of 6".split()
    assert text[2].split() == ["Hopper-v4", "sac", "1,500", "1", "2.00", "-", "-"]
    assert len({line.index(cell) for line, cell in zip(text, ["steps", "1,000", "1,500"])}) == 1
    head, rule, first, _ = table_of(capsys, "--table", "markdown").out.splitlines()
    assert head.count("|") == rule.count("|") == first.count("|") == 8
    assert first.startswith("| Hopper-v4 | ppo | 1,000 | 6 | 175 [")


def test_unfinished_runs_are_drawn_but_not_in_the_table(six, capsys):
    write_run("runs/8", algo="sac", seed=2, returns=[5.0] * 140, total_steps=1500.0)
    out, err = table_of(capsys, "--table", "csv")
    assert rows_of(out)[1]["seeds"] == "1"
    assert "runs/8: at step 1,400 of 1500; not in the table" in err and "all are cut" in err


def test_compare(six, capsys):
    for seed in (1, 2):
        write_run(f"runs/w{seed}", env="Walker2d-v4", seed=seed, returns=[1] * 100)
        write_run(f"runs/v{seed}", env="Walker2d-v4", algo="sac", seed=seed, returns=[7] * 100)
    write_run("runs/8", algo="sac", seed=2, returns=[35.0] * 150, total_steps=1500.0)
    out, _ = table_of(capsys, "--out", "profile.svg", "--compare", "ppo", "sac")
    head, hopper, walker, both = out.splitlines()[-4:]
    cli("--smooth", "1", "--compare", "ppo", "sac", "runs")         # flags may come first
    assert capsys.readouterr().out == out
    assert re.split("  +", head) == ["ppo beats sac", "probability (train100)"]
    assert re.match(r"Hopper-v4 +0\.75 \[0\.", hopper)
    assert walker.endswith(" 0.00 [0.00, 0.00]")
    assert re.match(r"mean over panels +0\.38 \[0\.", both)
    (_, rows) = table_of(capsys, "--table", "csv", "--compare", "ppo", "sac").out.split("\n\n")
    assert [float(row["probability (train100)"]) for row in rows_of(rows)] == [0.75, 0, 0.375]
    gids, texts = drawn("profile.svg")
    assert {"profile, ppo", "profile, sac"} <= gids
    assert "performance profile, 95% intervals" in texts


def test_it_does_not_matter_which_line_is_compared_with_which(capsys):
    """Both orders use one scale: 0 is the worst seed of both lines, 1 the best."""
    for seed, (ours, theirs) in enumerate([(1, 0), (2, 5), (3, 9), (4, 2)]):
        write_run(f"runs/a{seed}", seed=seed, returns=[ours] * 100)
        write_run(f"runs/b{seed}", seed=seed, algo="sac", returns=[theirs] * 100)
    once, again = (plot.compare(read(), *names) for names in (("ppo", "sac"), ("sac", "ppo")))
    for name in ("ppo", "sac"):
        np.testing.assert_array_equal(once[name][0], again[name][0])
    share, _, _ = once["sac"]
    assert share[0] == 0.75 and share[50] == 0.5 and share[100] == 0    # seeds 0, 5, 9 and 2
    values = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()
              if line.startswith("Hopper-v4")]
    assert len(values) == 2 and sum(values) == 1


def test_published_figures_stand_beside_ours(capsys, monkeypatch):
    write_run("runs/a", env="HalfCheetah-v4", returns=[4000] * 100, steps=1_001_472,
              total_steps=1e6, result=5000.0)
    out, _ = table_of(capsys, "--anchors", "--table", "csv")
    rows = rows_of(out.split("\n\n")[1])
    (vel,) = [row for row in rows if row["source"] == "Vel"]
    assert (vel["published for"], vel["mean"]) == ("HalfCheetah-v2", "2139")
    assert vel["metric"].startswith("train_last100ep;4_of_6")
    assert (vel["train100"], vel["eval"], vel["ours"]) == ("4000.0", "5000.0",
                                                           "ppo on HalfCheetah-v4")
    assert all(row["steps"] == "1000000" and row["source"] and row["metric"] for row in rows)
    write_run("runs/c", env="HalfCheetah-v4", seed=2, returns=[1000] * 100, steps=1_001_472,
              total_steps=1e6, result=2000.0)
    out, _ = table_of(capsys, "--anchors", "--table", "csv")    # now the mean of two seeds
    assert {(row["train100"], row["eval"]) for row in rows_of(out.split("\n\n")[1])} == {
        ("2500.0", "3500.0")}
    write_run("runs/d", env="HalfCheetah-v4", seed=3, returns=[0] * 100, steps=1_001_472,
              total_steps=1e6, result=0.0)
    out, _ = table_of(capsys, "--anchors", "--table", "csv", "--aggregate", "median")
    assert {(row["train100"], row["eval"]) for row in rows_of(out.split("\n\n")[1])} == {
        ("1000.0", "2000.0")}
    shutil.rmtree("runs/d")
    shutil.rmtree("runs/c")
    write_run("runs/b", env="Hopper-v4", returns=[1] * 100)
    shutil.rmtree("runs/a")
    assert "no published results" in table_of(capsys, "--anchors").err
    monkeypatch.setattr(plot, "ANCHORS", Path("nowhere.csv"))
    with pytest.raises(UsageError):
        cli("--anchors", "runs")


def test_published_is_of_about_this_budget(capsys):
    for steps, there in ((850_000, 0), (950_000, 1), (1_050_000, 1), (1_300_000, 0)):
        write_run("runs/a", env="HalfCheetah-v4", steps=steps, total_steps=steps)
        assert bool(plot.published(read())) == there, steps
        shutil.rmtree("runs/a")


def test_published_is_of_this_environment():
    for env in ("InvertedPendulum-v4", "Pendulum-v1", "InvertedDoublePendulum-v4"):
        write_run("runs/a", env=env, algo="a2c", steps=300_000, total_steps=3e5)
        write_run("runs/b", env=env, algo="sac", steps=1_000_000, total_steps=1e6)
        assert {row["published for"].rpartition("-v")[0] for row in plot.published(read())} <= {
            env.rpartition("-v")[0]}
        shutil.rmtree("runs")


# ---- Figures

def drawn(path):
    """Return the ids of the elements of an SVG, and its texts."""
    tree = ElementTree.parse(path)
    return ({node.get("id") for node in tree.iter()} - {None},
            [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")])


def test_what_a_figure_holds():
    for env in ("Hopper-v4", "Walker2d-v4"):
        for algo in ("ppo", "sac"):
            for seed in (1, 2, 3):
                write_run(f"runs/{env}{algo}{seed}", env=env, algo=algo, seed=seed,
                          returns=np.arange(100) * seed)
    write_run("runs/last", env="Swimmer-v4", algo="sac")
    fig = figure()
    assert [ax.get_title() for ax in fig.axes] == ["Hopper-v4", "Swimmer-v4", "Walker2d-v4"]
    hopper, swimmer, walker = fig.axes
    assert hopper.get_xlabel() == "environment steps" and hopper.get_ylabel() == "ep_ret"
    assert [text.get_text() for text in hopper.get_legend().get_texts()] == [
        "ppo (3 seeds)", "sac (3 seeds)"]
    assert [text.get_text() for text in swimmer.get_legend().get_texts()] == ["sac (1 seed)"]
    lines = {line.get_gid(): line for line in hopper.lines}
    assert set(lines) == {f"Hopper-v4, {algo}, {what}" for algo in ("ppo", "sac")
                          for what in ("seed 1", "seed 2", "seed 3", "mean")}
    mean, seed = lines["Hopper-v4, ppo, mean"], lines["Hopper-v4, ppo, seed 3"]
    assert mean.get_linewidth() > 2 * seed.get_linewidth()
    np.testing.assert_allclose(seed.get_ydata()[[0, -1]], [0, 297])
    np.testing.assert_allclose(mean.get_ydata()[[0, -1]], [0, 198])
    assert len(hopper.collections) == 2 and len(swimmer.collections) == 0   # bands
    colours = [{line.get_color() for line in ax.lines if ", sac" in line.get_gid()}
               for ax in (hopper, walker, swimmer)]
    assert colours[0] == colours[1] == colours[2] and len(colours[0]) == 1
    assert mean.get_color() not in colours[0]


def test_labels_say_what_a_point_is():
    write_run("runs/a", seed=1, returns=range(150))
    assert figure(smooth=100).axes[0].get_ylabel() == "ep_ret, mean of last 100 episodes"
    assert figure(y="kl", x="time").axes[0].get_ylabel() == "kl"
    assert figure(y="kl", x="time").axes[0].get_xlabel() == "minutes"
    shutil.rmtree("runs/a")
    write_result("runs/b")
    assert figure(smooth=100).axes[0].get_ylabel() == "ep_ret, mean of 1% of the steps"
    assert "iqm" in figure(aggregate="iqm").get_suptitle()


@pytest.mark.parametrize("how, band", [("mean", "one standard deviation"),
                                       ("median", "its 95% bootstrap interval"),
                                       ("iqm", "its 95% bootstrap interval")])
def test_title_says_what_the_band_is(how, band):
    write_run("runs/a")
    assert figure(aggregate=how).get_suptitle() == f"thin: a seed; thick: the {how}; band: {band}"


def test_a_profile_looks_like_its_line():
    for name in ("ddpg", "ppo", "sac"):
        for seed in (1, 2):
            write_run(f"runs/{name}{seed}", algo=name, seed=seed, returns=[seed] * 100)
    groups = read()
    fig = plot.draw(groups, arguments(smooth=1), plot.compare(groups, "sac", "ppo"))
    looks = [{line.get_gid().split(", ")[1]: (line.get_color(), line.get_linestyle())
              for line in ax.lines} for ax in fig.axes[:2]]
    assert list(looks[1]) == ["sac", "ppo"] and looks[1].items() <= looks[0].items()


def test_label_of_a_smoothed_column_of_progress():
    folder = write_run("runs/a")
    text = [f"{10 * k},{k},0.1" for k in range(1, 101)]
    (folder / "progress.csv").write_text("\n".join(["step,time,kl", *text, ""]))
    assert figure(y="kl", smooth=10).axes[0].get_ylabel() == "kl, mean of last 10 rows"


def test_many_lines_can_be_told_apart():
    for k in range(20):
        write_run(f"runs/{k}", lr=(k + 1) / 1000)
    lines = [line for line in figure().axes[0].lines if line.get_gid().endswith("mean")]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20


def test_svg_and_png(capsys):
    write_run("runs/a", seed=1)
    write_run("runs/b", seed=2)
    for name in ("first.svg", "second.svg", "third.png"):
        cli("runs", "--smooth", "10", "--out", name)
    assert Path("first.svg").read_bytes() == Path("second.svg").read_bytes()
    gids, texts = drawn("first.svg")
    assert {"Hopper-v4, ppo, seed 1", "Hopper-v4, ppo, seed 2", "Hopper-v4, ppo, mean",
            "Hopper-v4, ppo, band"} <= gids
    assert {"Hopper-v4", "environment steps", "ppo (2 seeds)", "1k"} <= set(texts)
    data = Path("third.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", data[16:24])) > 450


def test_two_hundred_runs_take_seconds():
    rng = np.random.default_rng(0)
    for k in range(200):
        write_run(f"runs/{k}", env=f"Env{k % 4}-v0", algo=f"algo{k // 4 % 5}", seed=k // 20,
                  returns=rng.normal(size=3000).round(3))
    start = time.process_time()
    cli("runs", "--aggregate", "iqm")
    assert time.process_time() - start < 15
    assert len(drawn("curves.svg")[0] & {f"Env{k}-v0, algo{j}, iqm"
                                         for k in range(4) for j in range(5)}) == 20


# ---- What is skipped, what is refused

def torn(folder):
    path = folder / "episodes.csv"
    path.write_text(path.read_text() + "1010,1.0,0,3")


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize("damage, said", [
    (remove("episodes.csv"), "damaged"),
    (remove("progress.csv"), "damaged"),
    (write("episodes.csv", "step,time,env,ep_ret,ep_len\n"), "episodes.csv has no rows yet"),
    (write("episodes.csv", "step,time,env,ep"), "episodes.csv has no rows yet"),
    (write("episodes.csv", ""), "episodes.csv has no rows yet"),
    (write("progress.csv", "step,time\n"), "progress.csv has no rows yet"),
    (write("episodes.csv", "step,time,env,ep_ret,ep_len\n1,2\n3,4,0,5,6\n"), "differ in length"),
    (write("episodes.csv", "step,time,env,ep_ret,ep_len\n1,2,0,x,1\n"), "damaged"),
    (write("episodes.csv", "step,time,env,length\n1,2,0,1\n"), "no column ep_ret"),
    (write("episodes.csv", "time,ep_ret\n" + "1,2\n" * 20), "damaged, or not a plainrl run .*step"),
    (write("episodes.csv", "step,time,env,ep_ret,ep_len\n1,2,0,nan,1\n"), "no row has a value"),
    (write("config.json", '{"architectures": ["BertModel"]}'), "not a plainrl run"),
    (write("config.json", '{"algo": "ppo", "settings": {"env"'), "damaged"),
    (write("config.json", "[1, 2]"), "not a plainrl run"),
    (write("result.json", "{}"), "damaged"),
])
def test_what_cannot_be_read_is_named_and_skipped(damage, said, capsys):
    write_run("runs/good")
    damage(write_run("runs/bad", seed=2))
    assert len(plot.load(arguments(smooth=10))) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert re.search(said, line)
    assert line.startswith("runs/bad") and line.endswith("skipped")


@pytest.mark.parametrize("damage", [
    write("result.json", '{"algo": "ppo"'), write("result.json", '{"loss": 3}'),
    write("result.json", '{"algo": "ppo", "env": "A", "curve": []}')])
def test_results_of_others(damage, capsys):
    write_result("runs/good")
    write_result("runs/bad", seed=2)
    damage(Path("runs/bad"))
    assert len(plot.load(arguments())) == 1
    assert capsys.readouterr().err.startswith("runs/bad")
    assert plot.load(arguments(x="episodes")) == []     # a result.json holds no episodes
    assert "runs/good: result.json holds only ep_ret" in capsys.readouterr().err


def test_a_result_knows_the_time_of_its_steps_as_if_all_took_as_long():
    write_result("runs/good", steps=2000, seconds=600.0, curve=[[500, 1.0], [2000, 3.0]])
    (run,) = plot.load(arguments(x="time"))
    np.testing.assert_allclose(run.x, [2.5, 10])        # in minutes
    assert (run.end, run.steps, list(run.y)) == (10, 2000, [1, 3])


def test_half_written_last_line(capsys):
    folder = write_run("runs/a")
    (before,) = plot.load(arguments(smooth=1))
    torn(folder)
    (run,) = plot.load(arguments(smooth=1))
    np.testing.assert_array_equal(run.y, before.y)
    assert capsys.readouterr().err == (
        "runs/a/episodes.csv: the half-written last line is skipped\n")


def test_not_a_byte_of_text(capsys):
    (write_run("runs/a") / "episodes.csv").write_bytes(b"\xff\xfe\x00" * 50)
    assert plot.load(arguments()) == [] and "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("args, said", [
    (["empty"], "error: no run to plot; folders given: empty"),
    (["nowhere", "empty"], "nowhere: there is no run in it; skipped"),
    ([], "error: no run to plot; folders given: none"),
    (["runs", "--y", "kll"], "there is no column kll"),
    (["runs", "--y", "late", "--smooth", "10"], "--smooth 10: no run has that many rows"),
    (["runs", "--smooth", "7"], "--smooth"),
    (["runs", "--x", "frames"], "--x"),
    (["runs", "--out", "curves.pdf"], "--out is curves.pdf; it takes a name that ends in .svg"),
    (["runs", "--out", "nowhere/curves.svg"], "error: --out nowhere/curves.svg cannot be written"),
    (["runs", "--by", "gama"], "error: --by gama: no run has such a setting; nearest:"),
    (["runs", "--compare", "ppo", "sac"], "--compare ppo sac: no panel .* finished lines: ppo"),
    (["runs", "--colour", "red"], "--colour"),
])
def test_status_two_and_one_message(args, said, capsys):
    Path("empty").mkdir()
    write_run("runs/a")
    with pytest.raises(SystemExit) as caught:
        cli(*args)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert re.search(said, err) and "Traceback" not in err
    assert not list(Path().glob("curves.*"))


def test_refusals_are_usage_errors():
    with pytest.raises(UsageError):
        plot.main(arguments("nowhere"))
