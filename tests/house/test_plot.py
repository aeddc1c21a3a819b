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
from scipy.stats import binom, bootstrap, mannwhitneyu, norm

import plot
from algos import ppo
from benchmarks import table
from utils import curves, results, sweep
from utils.cli import program
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
        (folder / "result.json").write_text(json.dumps({"eval": [result], "steps": last}))
    return folder


def write_result(folder, *, env="Hopper-v4", algo="ppo", seed=1, train100=1.0, **more):
    """Add a row to a suite of results, as it is kept of a published run."""
    settings = {} if "library" in more else curves.defaults(algo)
    changed = more.pop("settings", {})
    result = {"id": str(folder), "algo": algo, "env": env, "seed": seed, "changed": changed,
              "settings": settings | changed, "total_steps": 1000, "seconds": 60.0,
              "steps": 1024, "train100": train100, "eval": [2.0, 4.0],
              "curve": [[10 * k, float(k)] for k in range(1, 101)]}
    suite = Path(str(folder).partition("/")[0] + ".jsonl")
    results.write_suite(suite, [*(results.read_suite(suite) if suite.exists() else []),
                                result | more])


def arguments(*runs, **more):
    there = [name for name in ("runs", "runs.jsonl") if Path(name).exists()]
    return plot.Plot(tuple(map(str, runs or there)), **more)


def read(**more):
    """Return the runs in `runs`, grouped, with unsmoothed curves."""
    return plot.group(plot.load(arguments(**{"smooth": 1} | more)), more.get("by", ""))


def figure(**more):
    asked = arguments(**{"smooth": 1} | more)
    return plot.draw(read(**more), asked, {})


def cli(*args):
    with program():
        plot.main(plot.parse(list(args)))


def legend(fig):
    """Return the entries of the only legend, and the text above them on one line."""
    (found,) = fig.legends
    assert not any(ax.get_legend() for ax in fig.axes)
    return ([text.get_text() for text in found.get_texts()],
            found.get_title().get_text().replace("\n", " "))


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
    results.write_suite(Path("kept.jsonl"), table.read_runs(Path("runs/1")))
    capsys.readouterr()
    cli("runs", "--smooth", "10", "--table", "csv")
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "curves.svg: 2 runs"
    made = [json.loads(Path(f"runs/{seed}/result.json").read_text()) for seed in (1, 2)]
    (row,) = rows_of(out)
    assert (row["environment"], row["line"], row["seeds"]) == ("CartPole-v1", "ppo", "2")
    for name in ("train100", "eval"):
        mean = np.mean([np.mean(result[name]) for result in made])
        assert float(row[name]) == pytest.approx(mean, abs=1e-3)
    cli("runs", "--smooth", "1", "--y", "explained_variance", "--x", "time", "--table", "csv")
    assert capsys.readouterr().out == out           # the table is of returns, whatever the figure
    cli("kept.jsonl", "--table", "csv")
    (row,) = rows_of(capsys.readouterr().out)
    assert float(row["eval"]) == pytest.approx(np.mean(made[0]["eval"]))


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
    assert list(groups["Hopper-v4"]) == ["ppo", "ppo lr=0.001"]
    assert [run.seed for run in groups["Hopper-v4"]["ppo lr=0.001"]] == [1, 2]
    assert list(groups["Walker2d-v4"]) == ["ppo"]   # no setting differs there
    assert list(read(by="lr")["Walker2d-v4"]) == ["ppo lr=0.0003"]
    assert capsys.readouterr().err == ""
    (runs,) = read(by="algo")["Hopper-v4"].values()
    assert len(runs) == 3 and "differ in lr are pooled" in capsys.readouterr().err
    assert {panel: list(lines) for panel, lines in read(by="env").items()} == {
        "ppo": ["Hopper-v4", "Walker2d-v4"], "ppo lr=0.001": ["Hopper-v4"]}
    for by in ("", "env"):                          # both tables have the same rows
        lines = {(row["environment"], row["line"], row["seeds"])
                 for row in plot.results(read(by=by), "mean")}
        assert lines == {("Walker2d-v4", "ppo", 1), ("Hopper-v4", "ppo", 1),
                         ("Hopper-v4", "ppo lr=0.001", 2)}


def test_an_ablation_has_short_names_and_a_grid_whole_ones():
    """A name leaves out a value that at least twice as many lines have as any other."""
    for k, changed in enumerate([{}, {"norm_obs": False}, {"scale_rew": False}, {"lr": 1e-3}]):
        write_run(f"runs/{k}", **{"norm_obs": True, "scale_rew": True} | changed)
    assert list(read()["Hopper-v4"]) == ["ppo", "ppo lr=0.001", "ppo norm_obs=False",
                                         "ppo scale_rew=False"]
    for k, (lr, gamma) in enumerate([(1, 0.9), (1, 0.99), (2, 0.9), (2, 0.99), (3, 0.9)]):
        write_run(f"grid/{k}", lr=float(lr), gamma=gamma)
    runs = plot.load(arguments("grid"))
    assert list(plot.group(runs)["Hopper-v4"]) == [
        "ppo gamma=0.9 lr=1", "ppo gamma=0.9 lr=2", "ppo gamma=0.9 lr=3", "ppo gamma=0.99 lr=1",
        "ppo gamma=0.99 lr=2"]
    assert list(plot.group(runs, "gamma")["Hopper-v4"]) == ["ppo gamma=0.9", "ppo gamma=0.99"]


def test_the_values_left_out_are_each_algorithms_own():
    for env in ("Hopper-v4", "Walker2d-v4"):
        for algo, usual, other in (("ppo", 1.0, 2.0), ("sac", 2.0, 1.0)):
            for lr in (usual, other) if env == "Hopper-v4" else (usual,):
                write_run(f"runs/{env}{algo}{lr}", env=env, algo=algo, lr=lr)
    assert list(read()["Hopper-v4"]) == ["ppo", "ppo lr=2", "sac", "sac lr=1"]
    assert list(read()["Walker2d-v4"]) == ["ppo", "sac"]


def test_lines_of_a_suite_are_named_by_the_settings_in_which_they_differ():
    write_result("runs/a", seed=1)
    write_result("runs/b", seed=1, settings={"total_steps": 1e5})
    write_result("runs/c", seed=1, library="stable-baselines3")
    assert list(read()["Hopper-v4"]) == ["ppo total_steps=100000", "ppo total_steps=1000000",
                                         "stable-baselines3 ppo"]
    kept = [row for row in results.read_suite(Path("runs.jsonl")) if row["id"] != "runs/b"]
    results.write_suite(Path("runs.jsonl"), kept)
    write_run("runs/d", seed=2, total_steps=1e6)
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


@pytest.mark.parametrize("name", sorted(curves.PLACE - {"env", "seed", "run_dir", "resume"}))
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


def test_by_names_no_setting_that_an_algorithm_lacks():
    write_run("runs/a", algo="acer", replay_ratio=0)
    write_run("runs/b", algo="a2c")
    assert list(read(by="replay_ratio")["Hopper-v4"]) == ["a2c", "acer replay_ratio=0"]


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
    fig = figure()
    assert [text.split(" (")[0] for text in legend(fig)[0]] == ["dqn", "dqn_per", *lines]
    colours = [line.get_color() for line in fig.axes[0].lines if line.get_gid().endswith("mean")]
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
    (run,) = plot.load(arguments())
    run = plot.smoothed(run, window)
    assert run.x.tolist() == [10 * k for k in range(window, 151)]
    np.testing.assert_allclose(run.y, run.x / 10 - 1 - (window - 1) / 2)


def test_smoothing_of_a_column_with_gaps():
    folder = write_run("runs/a")
    text = [f"{10 * k},{k},{k if k % 3 == 0 else ''}" for k in range(1, 101)]
    (folder / "progress.csv").write_text("\n".join(["step,time,eval_ret_mean", *text, ""]))
    (run,) = plot.load(arguments(y="eval_ret_mean"))
    run = plot.smoothed(run, 10)
    assert run.x.tolist() == list(range(300, 1000, 30))     # only rows with a value
    np.testing.assert_allclose(run.y, run.x / 10 - 13.5)


def test_smoothing_does_not_look_ahead():
    write_run("runs/a", seed=1, returns=np.arange(60.0) ** 0.5)
    write_run("runs/b", seed=2, returns=[*np.arange(40.0) ** 0.5, *[1e6] * 20])
    a, b = (plot.smoothed(run, 10) for run in plot.load(arguments()))
    np.testing.assert_array_equal(a.y[:31], b.y[:31])
    assert b.y[31] > 1e4


def test_a_window_larger_than_the_data_shrinks_for_the_whole_panel():
    """Curves of one panel must be comparable. The text above the legend names the panel."""
    write_run("runs/a", seed=1, returns=range(400))
    write_run("runs/b", seed=2, returns=range(399), algo="sac")
    write_run("runs/c", env="Walker2d-v4", returns=range(400))
    fig = figure(smooth=100)
    starts = [{line.get_xdata()[0] for line in ax.lines} for ax in fig.axes]
    assert starts == [{100}, {1000}]
    assert legend(fig)[1].endswith(
        "each point: mean of 10 episodes (too few for 100 in Hopper-v4) or mean of 100 episodes")
    write_run("runs/d", seed=3, returns=range(39))
    fig = figure(smooth=10)
    assert {line.get_xdata()[0] for line in fig.axes[0].lines} == {10}
    assert "one episode (too few for 10 in Hopper-v4) or mean of 10 episodes" in legend(fig)[1]
    assert len(fig.axes[0].lines) == 3 + 2          # no seed is left out
    shutil.rmtree("runs/c")
    assert "each point: one episode (too few for 100)" in legend(figure(smooth=100))[1]
    assert "each point" not in legend(figure(smooth=1))[1]


@pytest.mark.parametrize("smooth", [1, 10, 100])
def test_a_window_is_never_larger_than_asked(smooth):
    write_run("runs/a", returns=range(1000))
    assert figure(smooth=smooth).axes[0].lines[0].get_xdata()[0] == 10 * smooth


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


def test_probability_of_improvement_is_mann_whitneys():
    """It is U / (n m) in each environment, averaged over environments of any number of seeds."""
    rng = np.random.default_rng(0)
    ours = [rng.integers(0, 6, n).astype(float) for n in (5, 8, 3)]     # with ties
    theirs = [rng.integers(1, 7, n).astype(float) for n in (7, 5, 6)]
    each = [mannwhitneyu(a, b).statistic / (len(a) * len(b)) for a, b in zip(ours, theirs)]
    assert plot.improvement(*ours, *theirs) == pytest.approx(np.mean(each))
    for a, b, value in zip(ours, theirs, each):
        assert plot.improvement(a, b) == pytest.approx(value)


def test_interval_of_an_improvement_is_stratified():
    """The seeds of each line and environment are resampled among themselves.

    A side with equal seeds adds no width. So the other side wins a Binomial(5, 3 / 5) number of
    five comparisons, and an environment without any spread halves the width.
    """
    same, mixed = np.full(5, 3.0), np.array([1.0, 1, 1, 5, 5])
    expected = binom.ppf([0.025, 0.975], 5, 0.6) / 5
    assert plot.interval([same, mixed], plot.improvement) == tuple(expected)
    ends = plot.interval([same, same, mixed, np.full(5, 9.0)], plot.improvement)
    np.testing.assert_allclose(ends, expected / 2)


def test_profile_by_hand():
    share, low, _ = plot.profile([np.array([0.0, 5, 10]), np.array([200.0, 200])],
                                 [(0, 10), (100, 200)])
    at = {0: (2 / 3 + 1) / 2, 30: (2 / 3 + 1) / 2, 50: (1 / 3 + 1) / 2, 100: 0}
    for k, expected in at.items():
        assert share[k] == pytest.approx(expected)
    assert np.isnan(low).all()          # too few seeds
    share, low, high = plot.profile([np.array([0.0, 2, 5, 8, 10])], [(0, 10)])
    assert share[[0, 30, 60, 90]].tolist() == [0.8, 0.6, 0.4, 0.2]
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


def test_a_run_with_few_rows_is_in_the_table_and_in_the_figure(capsys):
    """CartPole's best seeds have the fewest episodes: without them the mean would be too low."""
    write_run("runs/a", seed=1, returns=[10] * 100)
    write_run("runs/b", seed=2, returns=[500] * 50, steps=1000)
    cli("runs", "--table", "csv", "--out", "few.svg")
    out, err = capsys.readouterr()
    assert float(rows_of(out)[0]["train100"]) == 255 and rows_of(out)[0]["seeds"] == "2"
    assert err.endswith("\nfew.svg: 2 runs\n")
    gids, texts = drawn("few.svg")
    assert {"Hopper-v4, ppo, seed 1", "Hopper-v4, ppo, seed 2"} <= gids
    assert "ppo (2 seeds)" in texts


@pytest.mark.parametrize("seeds, there", [(2, False), (3, True)])
def test_two_seeds_have_no_interval_in_the_table(seeds, there, capsys):
    """The bootstrap of two seeds only says what they are."""
    for seed in range(seeds):
        write_run(f"runs/{seed}", seed=seed, returns=[seed] * 100)
    (row,) = rows_of(table_of(capsys, "--table", "csv").out)
    assert (row["train100_low"] != "nan") == there == (row["train100_high"] != "nan")


def test_where_one_evaluation_is_not_there_the_line_has_none(capsys):
    for seed, final in ((1, 5.0), (2, 7.0), (3, None)):
        write_run(f"runs/{seed}", env="HalfCheetah-v4", seed=seed, steps=1_001_472,
                  total_steps=1e6, result=final)
    ours, others = table_of(capsys, "--anchors", "--table", "csv").out.split("\n\n")
    assert [row["eval"] for row in rows_of(ours)] == ["nan"]
    *means, last = [row["mean"] for row in rows_of(others) if row["measure"].startswith("eval")]
    assert last == "nan" and len(means) > 1
    assert sorted(map(float, means), reverse=True) == [float(mean) for mean in means]


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
    (row,) = rows_of(compared)
    assert (row["probability (train100)"], row["seeds"]) == ("0.0", "1+1")
    assert [row["mean"] for row in rows_of(others) if row["source"] == "ours"
            and (row["line"], row["measure"]) == ("ppo", "train100")] == ["1.0"]


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


def test_a_run_of_few_episodes_is_named_beside_its_train100(capsys):
    write_run("runs/a", returns=range(100), total_steps=1000.0)
    write_run("runs/b", seed=2, returns=range(100), total_steps=1000.0)
    said = "runs/a: the last 100 episodes are more than half of the run, as of 1 more; train100"
    assert said in table_of(capsys)[1]


def test_a_run_of_many_episodes_is_not(capsys):
    write_run("runs/a", returns=range(300), total_steps=3000.0)
    assert "lags" not in table_of(capsys)[1]


def test_unfinished_runs_are_drawn_but_not_in_the_table(six, capsys):
    write_run("runs/8", algo="sac", seed=2, returns=[5.0] * 140, total_steps=1500.0)
    out, err = table_of(capsys, "--table", "csv")
    assert rows_of(out)[1]["seeds"] == "1"
    assert "runs/8: at step 1,400 of 1500; not in the table" in err and "all are cut" in err
    write_run("runs/9", algo="sac", seed=3, returns=[5.0] * 140, total_steps=1500.0)
    assert "1500, and 1 more unfinished; not in the table" in table_of(capsys)[1]


def test_compare(six, capsys):
    for seed in range(1, 6):
        write_run(f"runs/w{seed}", env="Walker2d-v4", seed=seed, returns=[seed] * 100)
        write_run(f"runs/v{seed}", env="Walker2d-v4", algo="sac", seed=seed, returns=[7] * 100)
    for seed, ret in enumerate([35, 35, 35, 5], 2):     # with six: 10 20 30 40 50 900 against these
        write_run(f"runs/sac{seed}", algo="sac", seed=seed, returns=[ret] * 150,
                  total_steps=1500.0)
    out, _ = table_of(capsys, "--out", "profile.svg", "--compare", "ppo", "sac")
    head, hopper, walker, both = (re.split("  +", line) for line in out.splitlines()[-4:])
    cli("--smooth", "1", "--compare", "ppo", "sac", "runs")         # flags may come first
    assert capsys.readouterr().out == out
    assert head == ["ppo beats sac", "probability (train100)", "seeds", "better"]
    assert hopper[0] == "Hopper-v4" and re.match(r"0\.70 \[0\.\d\d, (0\.\d\d|1\.00)\]", hopper[1])
    assert hopper[2:] == ["6+5", "no difference shown"]
    # Without any overlap, every resample gives 0: there is no interval that says anything.
    assert walker == ["Walker2d-v4", "0.00", "5+5", "sac"]
    assert both[0] == "mean over panels" and both[1].startswith("0.35 [")
    assert both[2] == "6+5 5+5"
    (_, rows) = table_of(capsys, "--table", "csv", "--compare", "ppo", "sac").out.split("\n\n")
    rows = rows_of(rows)
    assert [float(row["probability (train100)"]) for row in rows] == [0.7, 0, 0.35]
    assert [row["probability (train100)_low"] == "nan" for row in rows] == [False, True, False]
    gids, texts = drawn("profile.svg")
    assert {"profile, ppo", "profile, sac"} <= gids
    assert "performance profile, 95% intervals" in texts
    assert rows[2]["better"] == ("sac" if float(rows[2]["probability (train100)_high"]) < 0.5
                                 else "no difference shown")


@pytest.mark.parametrize("ours, theirs, said", [
    (2, 2, "too few seeds: needs 3 more of ppo and 3 more of my_ppo"),
    (4, 9, "too few seeds: needs 1 more of ppo"),
    (9, 1, "too few seeds: needs 4 more of my_ppo"),
    (5, 5, "my_ppo")])
def test_few_seeds_decide_nothing(ours, theirs, said, capsys):
    """Two seeds against two are 0.00 or 1.00 in a third of all comparisons of equals."""
    for algo, seeds in (("ppo", ours), ("my_ppo", theirs)):
        for seed in range(seeds):
            write_run(f"runs/{algo}{seed}", algo=algo, seed=seed,
                      returns=[seed + 100 * (algo != "ppo")] * 100)
    out, _ = table_of(capsys, "--compare", "ppo", "my_ppo", "--out", "few.svg")
    row = re.split("  +", out.splitlines()[-1])
    assert row == ["Hopper-v4", "0.00", f"{ours}+{theirs}", said]
    title = "performance profile" + ", 95% intervals" * (max(ours, theirs) >= 5)
    assert title in drawn("few.svg")[1]


def test_few_seeds_on_one_panel_decide_nothing_over_all(capsys):
    for env, seeds in (("Hopper-v4", 7), ("Walker2d-v4", 4)):
        for seed in range(seeds):
            for k, algo in enumerate(("ppo", "sac")):
                write_run(f"runs/{env}{algo}{seed}", env=env, algo=algo, seed=seed,
                          returns=[seed - k / 2] * 100)
    (_, rows) = table_of(capsys, "--table", "csv", "--compare", "ppo", "sac").out.split("\n\n")
    few = "too few seeds: needs 1 more of ppo and 1 more of sac"
    assert [row["better"] for row in rows_of(rows)] == ["no difference shown", few, few]
    assert [row["probability (train100)_low"] == "nan" for row in rows_of(rows)] == [
        False, True, True]


def test_short_runs_are_not_compared_with_long_ones(capsys):
    for seed in range(1, 6):
        for env, length in (("Hopper-v4", 200), ("Walker2d-v4", 201)):
            write_run(f"runs/{env}/p{seed}", env=env, seed=seed, returns=[seed] * 100)
            write_run(f"runs/{env}/s{seed}", env=env, algo="sac", seed=seed,
                      returns=[9] * length, total_steps=10 * length)
    out, err = table_of(capsys, "--compare", "ppo", "sac")
    assert "Walker2d-v4: not compared, since ppo has 1,000 steps and sac 2,010" in err
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["ppo", "Hopper-v4"]
    with pytest.raises(UsageError, match="no panel has comparable runs of both"):
        cli("runs/Walker2d-v4", "--compare", "ppo", "sac")


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


def published_rows(capsys, *flags):
    out, _ = table_of(capsys, "--anchors", "--table", "csv", *flags)
    return rows_of(out.split("\n\n")[1])


def test_published_figures_stand_beside_ours(capsys, monkeypatch):
    """Training returns beside train100, evaluations beside eval, each ranked."""
    for seed, (train, final) in enumerate([(4000, 5000.0), (1000, 2000.0)], 1):
        write_run(f"runs/{seed}", env="HalfCheetah-v4", seed=seed, returns=[train] * 100,
                  steps=1_001_472, total_steps=1e6, result=final)
    rows = published_rows(capsys)
    (vel,) = [row for row in rows if row["source"] == "Vel"]
    assert vel == {"environment": "HalfCheetah-v4", "line": "ppo",
                   "measure": "train: last 100 (4 of 6 seeds)", "mean": "2139.0", "spread": "nan",
                   "seeds": "4", "steps": "1000000", "env": "v2", "source": "Vel"}
    ours = {row["measure"]: row for row in rows if row["source"] == "ours"}
    assert list(ours) == ["train100", "eval"]
    assert ours["train100"] | {"spread": "-"} == {
        "environment": "HalfCheetah-v4", "line": "ppo", "measure": "train100", "mean": "2500.0",
        "spread": "-", "seeds": "2", "steps": "1001472", "env": "v4", "source": "ours"}
    assert float(ours["train100"]["spread"]) == pytest.approx(3000 / 2 ** 0.5)
    assert ours["eval"]["mean"] == "3500.0"
    kinds = [row["measure"].replace("train100", "train").partition(":")[0] for row in rows]
    assert kinds == sorted(kinds, reverse=True) and kinds.count("train") > 5 < len(rows)
    for kind in ("train", "eval"):
        means = [float(row["mean"]) for row, of in zip(rows, kinds) if of == kind]
        assert means == sorted(means, reverse=True)
    write_run("runs/3", env="HalfCheetah-v4", seed=3, returns=[0] * 100, steps=1_001_472,
              total_steps=1e6, result=0.0)
    rows = published_rows(capsys, "--aggregate", "median")
    assert [row["mean"] for row in rows if row["source"] == "ours (median)"] == [
        "1000.0", "2000.0"]
    shutil.rmtree("runs")
    write_run("runs/b", env="Hopper-v4", returns=[1] * 100)
    assert "no published results" in table_of(capsys, "--anchors").err
    monkeypatch.setattr(plot, "ANCHORS", Path("nowhere.csv"))
    with pytest.raises(UsageError):
        cli("runs", "--anchors")


def test_published_figures_as_text_are_at_most_120_columns_wide(capsys):
    for k, lr in enumerate((1e-3, 1e-4)):
        write_run(f"runs/{k}", env="HalfCheetah-v4", steps=1_000_000, total_steps=1e6, lr=lr,
                  result=9e9)
    out = table_of(capsys, "--anchors").out
    _, first, second = out.rstrip("\n").split("\n\n")
    for text, lr in ((first, "0.0001"), (second, "0.001")):
        title, head, *rows = text.splitlines()
        assert title == f"ppo lr={lr} on HalfCheetah-v4, ours and published"
        assert head.split() == ["measure", "mean", "spread", "seeds", "steps", "env", "source"]
        assert len(rows) > 10 and max(map(len, text.splitlines())) == 120
        assert sum(row.endswith("...") for row in rows) < len(rows) / 2


def test_a_table_is_cut_in_its_widest_column():
    rows = [{"a": "x" * 30, "b": "y" * 50, "c": 12345.0}, {"a": "x", "b": "y", "c": 1.0}]
    lines = plot.table(rows, "text", 60).splitlines()
    assert lines[1] == f"{'x' * 22}...  {'y' * 23}...  12345" and len(lines[1]) == 60
    assert plot.table(rows, "text").splitlines()[1] == f"{'x' * 30}  {'y' * 50}  12345"
    assert "y" * 50 in plot.table(rows, "markdown", 60)


def test_every_published_measure_has_a_readable_name():
    with open(plot.ANCHORS, newline="") as file:
        names = {row["metric"]: row["measure"] for row in csv.DictReader(file)}
    assert all(re.fullmatch(r"[a-z0-9 ()]{5,30}", name) for name in names.values())


def test_published_is_of_about_this_budget(capsys):
    for steps, there in ((850_000, 0), (950_000, 1), (1_050_000, 1), (1_300_000, 0)):
        write_run("runs/a", env="HalfCheetah-v4", steps=steps, total_steps=steps)
        assert bool(plot.published(read())) == there, steps
        shutil.rmtree("runs/a")


def test_published_is_of_this_environment():
    for env in ("InvertedPendulum-v4", "Pendulum-v1", "InvertedDoublePendulum-v4"):
        write_run("runs/a", env=env, algo="a2c", steps=300_000, total_steps=3e5)
        write_run("runs/b", env=env, algo="sac", steps=1_000_000, total_steps=1e6)
        assert {row["env"] for *_, rows in plot.published(read()) for row in rows} <= {
            env.rpartition("-v")[0]}
        shutil.rmtree("runs")


def test_published_training_returns_are_marked_in_the_figure():
    """Those of a line have its colour. Evaluations are not comparable with the curves."""
    for algo in ("ppo", "trpo", "mine"):
        write_run(f"runs/{algo}", env="HalfCheetah-v4", algo=algo, steps=1_000_000,
                  total_steps=1e6)
    groups = read()
    others = plot.published(groups)
    expected = {line: sorted(float(row["mean"]) for row in rows
                             if row["metric"].startswith("train")) for _, line, _, rows in others}
    fig = plot.draw(groups, arguments(smooth=1), {}, others)
    lines = {line.get_gid(): line for line in fig.axes[0].lines}
    marks = {line.get_color(): line for line in fig.axes[0].lines if line.get_marker() == "D"}
    assert set(expected) == {"ppo", "trpo"} and len(marks) == 2
    for name, values in expected.items():
        mark = marks[lines[f"HalfCheetah-v4, {name}, mean"].get_color()]
        assert sorted(mark.get_ydata()) == values and set(mark.get_xdata()) == {1e6}
    assert legend(fig)[0][-1] == "published training return"
    evaluations = [(panel, line, runs, [row for row in rows if not plot.of_training(row)])
                   for panel, line, runs, rows in others]
    assert legend(plot.draw(groups, arguments(smooth=1), {}, evaluations))[0] == [
        "mine (1 seed)", "ppo (1 seed)", "trpo (1 seed)"]       # nothing is marked
    for more in ({"x": "time"}, {"y": "kl"}):
        fig = plot.draw(read(**more), arguments(smooth=1, **more), {}, others)
        assert legend(fig)[0] == ["mine (1 seed)", "ppo (1 seed)", "trpo (1 seed)"]


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
    assert hopper.get_xlabel() == "environment steps"
    assert hopper.get_ylabel() == "episode return" and walker.get_ylabel() == ""
    assert legend(fig)[0] == ["ppo (3 seeds)", "sac (1 to 3 seeds)"]
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
    write_run("runs/a", seed=1, returns=range(450))
    assert legend(figure(smooth=100))[1] == "each point: mean of 100 episodes"
    kl = figure(y="kl", x="time")
    assert (kl.axes[0].get_ylabel(), kl.axes[0].get_xlabel()) == ("kl", "minutes")
    shutil.rmtree("runs/a")
    folder = write_run("runs/a")
    text = [f"{10 * k},{k},0.1" for k in range(1, 101)]
    (folder / "progress.csv").write_text("\n".join(["step,time,kl", *text, ""]))
    assert legend(figure(y="kl", smooth=10))[1] == "each point: mean of 10 rows"
    write_result("runs/b", env="Walker2d-v4")
    assert legend(figure(smooth=10))[1] == (
        "each point: mean of 10 episodes or mean of 5% of the steps")
    shutil.rmtree("runs/a")
    assert legend(figure(smooth=100))[1] == "each point: mean of 5% of the steps"
    assert legend(figure(smooth=1))[1] == "each point: mean of 1% of the steps"


@pytest.mark.parametrize("how, band", [("mean", "one standard deviation"),
                                       ("median", "its 95% bootstrap interval"),
                                       ("iqm", "its 95% bootstrap interval")])
def test_the_text_above_the_legend_says_what_the_band_is(how, band):
    write_run("runs/a", seed=1)
    assert legend(figure(aggregate=how))[1] == ""           # one seed has no band
    write_run("runs/b", seed=2)
    assert legend(figure(aggregate=how))[1] == f"thin: a seed; thick: the {how}; band: {band}"


@pytest.mark.parametrize("lines, thin", [(6, True), (7, False)])
def test_a_crowded_panel_shows_no_single_seeds(lines, thin):
    for k in range(lines):
        for seed in (1, 2):
            write_run(f"runs/{k}{seed}", algo=f"algo{k}", seed=seed)
    fig = figure()
    assert len(fig.axes[0].lines) == lines * (3 if thin else 1)
    assert legend(fig)[1].startswith("thin: a seed; thick" if thin else "thick")
    write_run("runs/w1", env="Walker2d-v4", seed=1)         # a panel with room
    assert legend(figure())[1].startswith("thin: a seed; thick")


def test_a_profile_looks_like_its_line():
    for name in ("ddpg", "ppo", "sac"):
        for seed in (1, 2):
            write_run(f"runs/{name}{seed}", algo=name, seed=seed, returns=[seed] * 100)
    groups = read()
    fig = plot.draw(groups, arguments(smooth=1), plot.compare(groups, "sac", "ppo"))
    looks = [{line.get_gid().split(", ")[1]: (line.get_color(), line.get_linestyle())
              for line in ax.lines} for ax in fig.axes[:2]]
    assert list(looks[1]) == ["sac", "ppo"] and looks[1].items() <= looks[0].items()


def looks(fig):
    return {(line.get_label(), line.get_color(), line.get_linestyle(), str(line._dash_pattern))
            for line in fig.legends[0].get_lines()}


@pytest.mark.parametrize("count", [10, 11, 60])
def test_many_lines_can_be_told_apart(count):
    for k in range(count):
        write_run(f"runs/{k}", lr=(k + 1) / 1000)
    lines = [line for line in figure().axes[0].lines if line.get_gid().endswith("mean")]
    assert len({(line.get_color(), str(line._dash_pattern)) for line in lines}) == count
    assert len({line.get_color() for line in lines}) == 10
    assert {line.get_linestyle() for line in lines[:10]} == {"-"}


@pytest.mark.parametrize("variants", [2, 4])
def test_colours_are_of_algorithms_if_dashes_tell_their_lines_apart(variants):
    """With a peer for each algorithm, or with too many lines for the colours."""
    for algo in ("ppo", "sac", "td3"):
        for k in range(variants):
            write_result(f"runs/{algo}{k}", algo=algo, library=["plainrl", "peer", "b", "c"][k])
    by_name = {name.split(" (")[0]: (colour, dash) for name, colour, _, dash in looks(figure())}
    assert len(set(by_name.values())) == len(by_name) == 3 * variants
    assert {len({colour for name, (colour, _) in by_name.items() if algo in name})
            for algo in ("ppo", "sac", "td3")} == {1}
    assert len({colour for colour, _ in by_name.values()}) == 3


def test_one_algorithm_and_its_peer_have_two_colours():
    write_result("runs/a")
    write_result("runs/b", library="peer")
    assert len({colour for _, colour, _, _ in looks(figure())}) == 2


def test_lines_of_many_algorithms_differ_even_if_one_has_two():
    for k in range(12):
        write_run(f"runs/{k}", algo=f"algo{k}")
    write_result("runs/peer", algo="algo1", library="peer")
    assert len({look[1:] for look in looks(figure())}) == 13


def inside(fig):
    """Check that the legend covers no panel, and that the figure contains it and the panels."""
    fig.draw_without_rendering()
    width, height = fig.bbox.size
    box = fig.legends[0].get_window_extent()
    panels = [ax.get_tightbbox() for ax in fig.axes]
    for low, high, end in [(part.x0, part.x1, width) for part in (box, *panels)] + [
            (part.y0, part.y1, height) for part in (box, *panels)]:
        assert -1 < low < high < end + 1
    assert not any(box.overlaps(panel) for panel in panels)
    for k, panel in enumerate(panels):
        assert not any(panel.overlaps(other) for other in panels[:k])
    sizes = np.array([ax.get_window_extent().size for ax in fig.axes]) / fig.dpi
    assert sizes.min() > 1.3                    # inches: no panel is squeezed


@pytest.mark.parametrize("envs, lines", [(1, 1), (1, 3), (1, 25), (2, 5), (3, 7), (4, 2), (5, 12),
                                         (10, 3)])
def test_the_legend_is_outside_the_panels_and_fits(envs, lines):
    for env in range(envs):
        for k in range(lines):
            write_run(f"runs/{env}-{k}", env=f"InvertedDoublePendulum{env}-v4",
                      learning_rate_of_the_critic=k / 7, returns=[30000 * k, -2])
    inside(figure(title="A title"))
    if envs < 5:
        inside(figure(names=tuple(f"WMW{k}" for k in range(lines))))


def test_long_settings_are_cut_in_the_legend_and_wrapped():
    for k, path in enumerate(["runs/of/last/week/in/a/long/folder/a1", "b"]):
        write_run(f"runs/{k}", init_from=path, env_kwargs='{"a": 1}' if k else "{}",
                  buffer_size=10 ** (3 + 3 * k), hidden=[4000, 300])
    first, second = legend(figure())[0]
    assert "buffer_size=1k env_kwargs={} init_from=runs/" in first and "..." in first
    assert max(map(len, first.split())) <= plot.LONG and first.endswith(" (1 seed)")
    assert second == "ppo buffer_size=1M env_kwargs=a: 1 init_from=b (1 seed)"
    inside(figure())
    shutil.rmtree("runs")
    for k in range(2):                              # cut, the two would look the same
        write_run(f"runs/{k}", init_from=f"runs/of/last/week/{k}/in/a/very/long/folder")
    assert legend(figure())[0] == [
        f"ppo init_from=runs/of/last/week/{k}/in/a/very/long/folder (1 seed)" for k in range(2)]


@pytest.mark.parametrize("names, expected", [
    ((), ["ppo", "ppo lr=0.1"]),
    (("ppo=PPO",), ["PPO", "ppo lr=0.1"]),
    (("ppo lr=0.1=fast", "ppo=PPO, slow"), ["PPO, slow", "fast"]),
    (("PPO", "Fast PPO"), ["PPO", "Fast PPO"])])
def test_names(names, expected):
    for k, lr in enumerate((1e-3, 1e-3, 0.1)):
        write_run(f"runs/{k}", lr=lr, env="Walker2d-v4" if k == 1 else "Hopper-v4")
    assert [text.split(" (")[0] for text in legend(figure(names=names))[0]] == expected


def test_names_that_take_the_folder_say_how_to_write_it(capsys):
    write_run("runs/a")
    with pytest.raises(SystemExit) as caught:
        cli("--names", "PPO", "runs", "--out", "fig.svg")
    assert caught.value.code == 2
    assert "--names took the folder runs for a name: write folders first" in capsys.readouterr().err
    cli("runs", "--names", "PPO", "--compare", "", "", "--out", "fig.svg")
    Path("PPO").mkdir()         # a name may be that of a folder
    cli("runs", "--names", "PPO", "--out", "fig.svg")


def test_a_comparison_leaves_the_folder_alone():
    for k, algo in enumerate(("ppo", "sac")):
        write_run(f"runs/{algo}", algo=algo, seed=k)
    assert plot.parse(["--compare", "ppo", "sac", "runs"]).runs == ("runs",)


@pytest.mark.parametrize("steps,panels", [
    (5000, {"Hopper-v4": ["ppo", "sac", "trpo"]}),
    (5010, {"Hopper-v4, 2k steps": ["ppo", "sac"], "Hopper-v4, 5k steps": ["trpo"]})])
def test_short_runs_have_a_panel_of_their_own(steps, panels):
    """A run more than five times as long as the shortest would squeeze it."""
    write_run("runs/short", returns=range(100), total_steps=1000)
    write_run("runs/middle", algo="sac", returns=range(200), total_steps=2000)
    write_run("runs/long", algo="trpo", returns=range(steps // 10), total_steps=steps)
    groups = plot.by_budget(read())
    assert {panel: list(lines) for panel, lines in groups.items()} == panels
    assert [panel for panel, *_ in plot.flat(groups)] == [
        panel for panel, lines in panels.items() for _ in lines]


def test_an_unfinished_run_is_drawn_beside_runs_of_its_budget():
    write_run("runs/a", returns=range(600), total_steps=6000)
    write_run("runs/b", algo="sac", returns=range(50), total_steps=6000)
    assert list(plot.by_budget(read())) == ["Hopper-v4"]


def test_figures_of_the_command_are_split_by_budget():
    write_run("runs/short", returns=range(100), total_steps=1000)
    write_run("runs/long", algo="sac", returns=range(600), total_steps=6000)
    cli("runs", "--out", "fig.svg")
    text = Path("fig.svg").read_text()
    assert "Hopper-v4, 1k steps" in text and "Hopper-v4, 6k steps" in text
    cli("runs", "--x", "episodes", "--out", "fig.svg")
    assert "k steps" not in Path("fig.svg").read_text()


def test_beside_anchors_many_lines_become_one_per_algorithm(capsys):
    """It is the line nearest to the defaults, then that of most seeds; a peer has its own."""
    for k in range(1, 10):
        write_result(f"runs/ppo{k}", env="HalfCheetah-v4", steps=1_000_000, total_steps=1_000_000,
                     settings={"lr": k / 100, "gamma": 0.5})
    write_result("runs/nearest", env="HalfCheetah-v4", steps=1_000_000, total_steps=1_000_000,
                 settings={"lr": 0.5})
    for seed in (1, 2):
        write_result(f"runs/sac{seed}", env="HalfCheetah-v4", algo="sac", seed=seed,
                     steps=900_000, total_steps=900_000, settings={"total_steps": 9e5})
    write_result("runs/sac", env="HalfCheetah-v4", algo="sac", steps=1_000_000,
                 total_steps=1_000_000)
    write_result("runs/peer", env="HalfCheetah-v4", library="stable-baselines3",
                 steps=1_000_000, total_steps=1_000_000)
    kept = plot.nearest_default(read())
    assert {line: [run.path.name for run in runs] for _, line, runs in plot.flat(kept)} == {
        "ppo": ["nearest"], "sac": ["sac1", "sac2"], "stable-baselines3 ppo": ["peer"]}
    cli("runs.jsonl", "--anchors", "--out", "fig.svg")
    said, text = capsys.readouterr().err, Path("fig.svg").read_text()
    assert "the figure shows 4 runs: one line per algorithm, nearest to the defaults" in said
    assert "lr=" not in text and "published training return" in text
    for more in (["--by", "lr", "--anchors"], []):
        cli("runs.jsonl", *more, "--out", "fig.svg")
        assert "lr=" in Path("fig.svg").read_text()


def test_stored_curves_are_smoothed_over_five_points():
    write_result("runs/a")
    (line,) = [line for line in figure(smooth=1).axes[0].lines if "mean" in line.get_gid()]
    assert line.get_xdata()[0] == 10 and line.get_ydata()[-1] == 100
    (line,) = [line for line in figure(smooth=10).axes[0].lines if "mean" in line.get_gid()]
    assert line.get_xdata()[0] == 50 and line.get_ydata()[-1] == np.mean([96, 97, 98, 99, 100])
    Path("runs.jsonl").unlink()
    write_result("runs/a", curve=[[10, 1.0], [20, 3.0]])
    (line,) = [line for line in figure(smooth=10).axes[0].lines if "mean" in line.get_gid()]
    assert set(line.get_ydata()) == {2.0}


@pytest.mark.parametrize("names", [("PPO",), ("pppo=PPO",), ("ppo=PPO", "other"), ("a", "b", "c")])
def test_wrong_names(names, capsys):
    for algo in ("ppo", "sac"):
        write_run(f"runs/{algo}", algo=algo)
    with pytest.raises(UsageError):
        figure(names=names)
    assert ("it takes old=new, or a name for each of the 2 lines: ppo, sac"
            in capsys.readouterr().err)


def test_title_and_size():
    write_run("runs/a")
    fig = figure(title="PPO at work", size=(7.5, 4.0))
    assert fig.get_suptitle() == "PPO at work" and fig.get_size_inches().tolist() == [7.5, 4]
    inside(fig)
    assert figure().get_suptitle() == ""
    cli("runs", "--size", "5", "3", "--out", "a.png")
    assert struct.unpack(">II", Path("a.png").read_bytes()[16:24]) == (1000, 600)
    for k in range(30):
        write_run(f"runs/{k}", lr=float(k))
    with pytest.raises(UsageError):
        cli("runs", "--size", "3", "1", "--out", "b.png")
    assert not Path("b.png").exists()


def test_ticks_are_in_thousands_and_millions():
    write_run("runs/a", returns=[0, 250_000], steps=2_000_000, total_steps=2e6)
    write_run("runs/b", env="Walker2d-v4", returns=[0, 0.25])
    fig = figure()
    fig.draw_without_rendering()
    texts = [[[text.get_text() for text in axis.get_ticklabels()] for axis in (ax.xaxis, ax.yaxis)]
             for ax in fig.axes]
    assert "1M" in texts[0][0] and "200k" in texts[0][1]
    assert "20" in texts[1][0] and "0.20" in texts[1][1]


def test_a_band_beyond_all_seeds_does_not_stretch_the_axis():
    for seed, ret in ((1, 500.0), (2, 500.0), (3, 0.0)):
        write_run(f"runs/{seed}", seed=seed, returns=[ret] * 100)
    (ax,) = figure().axes
    assert max(path.vertices[:, 1].max() for path in ax.collections[0].get_paths()) > 600
    low, high = ax.get_ylim()
    assert -50 < low < 0 and 500 < high < 550
    write_run("runs/4", algo="sac", seed=1, returns=[500.0] * 100)
    for k in range(6):                              # a crowded panel shows no seeds
        write_run(f"runs/more{k}", algo=f"algo{k}", returns=[400.0] * 100)
    low, high = figure().axes[0].get_ylim()
    assert 0 < low < 50 and 500 < high < 550


# ---- A setting

def test_equal_seeds_against_a_setting():
    """A mean of equal values may differ from them by rounding, and bars have no negative length."""
    for lr in (1, 2):
        for seed in range(6):
            write_run(f"runs/{lr}{seed}", seed=seed, lr=lr, returns=[0.1] * 100)
    assert len(figure(against="lr").axes[0].containers) == 1


def test_final_returns_against_a_setting():
    for k, lr in enumerate((1e-4, 1e-3, 1e-2)):
        for seed in (1, 2, 3, 4):
            write_run(f"runs/{k}{seed}", seed=seed, lr=lr, returns=[0] * 50 + [seed + k] * 100,
                      total_steps=1500.0)
        write_run(f"runs/sac{k}", algo="sac", lr=lr, returns=[-k] * 100)
    fig = figure(against="lr")
    (ax,) = fig.axes
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "lr")
    assert ax.get_ylabel() == "final return (train100)"
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0.0001", "0.001", "0.01"]
    ppo, sac = ax.containers
    np.testing.assert_allclose(ppo.lines[0].get_xydata(), [(1e-4, 2.5), (1e-3, 3.5), (1e-2, 4.5)])
    np.testing.assert_allclose(sac.lines[0].get_xydata(), [(1e-4, 0), (1e-3, -1), (1e-2, -2)])
    bars = ppo.lines[2][0].get_segments()           # from the low to the high end, at each value
    low, high = plot.interval([np.arange(1.0, 5.0)], np.mean)
    np.testing.assert_allclose([bar[:, 1] for bar in bars],
                               [(low + k, high + k) for k in range(3)])
    assert not any(len(bar) for bar in sac.lines[2][0].get_segments())     # one seed has none
    dots = sorted(tuple(point) for line in ax.lines if line.get_marker() == "."
                  for point in line.get_xydata())
    assert dots == sorted([(lr, seed + k) for k, lr in enumerate((1e-4, 1e-3, 1e-2))
                           for seed in (1, 2, 3, 4)] + [(1e-4, 0), (1e-3, -1), (1e-2, -2)])
    assert legend(fig) == (["ppo (4 seeds)", "sac (1 seed)"],
                           "dot: a seed; circle: the mean; bar: its 95% bootstrap interval, for "
                           "three seeds or more")


@pytest.mark.parametrize("values, places, scale", [
    ((0.9, 0.99, 0.995), (0.9, 0.99, 0.995), "linear"),
    ((1, 2, 16), (1, 2, 16), "log"),
    ((0.0, 0.001, 0.1), (0, 1, 2), "linear"),               # 0 has no place on a logarithmic axis
    (([64, 64], [64, 128], [256]), (0, 1, 2), "linear"),
    ((False, True), (0, 1), "linear")])
def test_places_of_values(values, places, scale):
    for k, value in enumerate(values):
        write_run(f"runs/{k}", setting=value, env="Hopper-v4", returns=[k] * 100)
    (ax,) = figure(against="setting").axes
    assert ax.get_xscale() == scale
    np.testing.assert_allclose(ax.containers[0].lines[0].get_xdata(), places)
    assert ax.containers[0].lines[0].get_ydata().tolist() == [*range(len(values))]
    assert len(ax.get_xticks()) == len(values) and len(ax.get_xticks(minor=True)) == 0


def test_other_settings_tell_lines_apart_against_a_setting(capsys):
    for lr in (1e-3, 1e-4):
        for gamma in (0.9, 0.99):
            for env in ("Hopper-v4", "Walker2d-v4"):
                write_run(f"runs/{lr}{gamma}{env}", lr=lr, gamma=gamma, env=env)
    write_run("runs/cut", lr=1e-5, gamma=0.9, total_steps=1e6)
    cli("runs", "--against", "lr", "--out", "a.svg", "--table", "csv")
    out, err = capsys.readouterr()
    assert "runs/cut: at step 1,000" in err and "pooled" not in err
    assert {row["line"] for row in rows_of(out)} == {
        f"ppo gamma={gamma} lr={lr}" for lr in (1e-3, 1e-4) for gamma in (0.9, 0.99)}
    gids, texts = drawn("a.svg")
    assert {f"{env}, ppo gamma={gamma}, mean" for env in ("Hopper-v4", "Walker2d-v4")
            for gamma in (0.9, 0.99)} <= gids
    assert {"ppo gamma=0.9 (1 seed)", "0.001", "0.0001"} <= set(texts) and "1e-5" not in texts
    cli("runs", "--against", "lr", "--by", "env", "--out", "b.svg")
    assert "ppo gamma=0.9" in drawn("b.svg")[1] and "Walker2d-v4 (1 seed)" in drawn("b.svg")[1]
    cli("runs", "--against", "lr", "--compare", "ppo gamma=0.9 lr=0.001", "ppo gamma=0.99 lr=0.001")
    assert "too few seeds" in capsys.readouterr().out


# ---- Files

def test_svg_png_and_pdf(capsys):
    write_run("runs/a", seed=1)
    write_run("runs/b", seed=2)
    for name in ("first.svg", "second.svg", "third.png", "first.pdf", "second.pdf"):
        cli("runs", "--smooth", "10", "--out", name)
    assert Path("first.svg").read_bytes() == Path("second.svg").read_bytes()
    assert Path("first.pdf").read_bytes() == Path("second.pdf").read_bytes()
    assert Path("first.pdf").read_bytes().startswith(b"%PDF-")
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


def test_a_run_without_episodes_is_drawn_by_a_column_of_its_reports(capsys):
    """Behaviour cloning trains without episodes. It has evaluations and losses."""
    for seed, kl in ((1, 4.0), (2, 8.0)):
        folder = write_run(f"runs/{seed}", algo="bc", seed=seed, returns=[], steps=1000, result=kl)
        write("episodes.csv", "step,time,env,ep_ret,ep_len\n")(folder)
    assert plot.load(arguments()) == []
    assert "has no rows yet; --y draws a column of progress.csv" in capsys.readouterr().err
    first, second = plot.load(arguments(y="kl"))
    assert list(first.y) == [0.5, 0.25] and first.end == 1000 and np.isnan(first.train100)
    cli("runs", "--y", "kl", "--out", "fig.svg")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "bc" in line]
    assert line.split() == ["Hopper-v4", "bc", "1,000", "2", "-", "6.00", "-"]


def test_a_suite_holds_no_episodes(capsys):
    write_result("runs/good")
    write_result("runs/bad", seed=2, curve=[[1.0]])
    assert len(plot.load(arguments())) == 1
    assert "runs/bad: damaged" in capsys.readouterr().err
    assert plot.load(arguments(x="episodes")) == []
    assert "a suite holds only ep_ret and eval_ret" in capsys.readouterr().err


def test_a_result_has_the_evaluations_during_training(capsys):
    write_result("runs/good", eval_curve=[[500, 1.0], [1000, 3.0]])
    write_result("runs/none", seed=2)
    (run,) = plot.load(arguments(y="eval_ret"))
    assert (run.x.tolist(), run.y.tolist()) == ([500, 1000], [1.0, 3.0])
    assert "runs/none: this run was not evaluated during training" in capsys.readouterr().err


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
    (["--smooth", "10"], "error: no run to plot; folders given: none"),
    (["runs", "--y", "kll"], "there is no column kll in episodes.csv or progress.csv; nearest: kl"),
    (["runs", "--smooth", "7"], "--smooth"),
    (["runs", "--x", "frames"], "--x"),
    (["runs", "--out", "curves.jpg"],
     "--out is curves.jpg; it takes a name ending in .svg .png .pdf"),
    (["runs", "--size", "8", "0.5"], "error: --size is 8 0.5; each takes 1 to 100"),
    (["runs", "--size", "101", "2"], "error: --size is 101 2; each takes 1 to 100"),
    (["runs", "--against", "lr"], "error: --against lr: finished runs have no two values of it"),
    (["runs", "--against", "env_"], "error: --against env_: no run has such a setting; nearest: env"
     ".*; there are: device, env, hidden, lr, run_dir, seed, total_steps"),
    (["runs", "--against", "lr", "--y", "kl"], "--against draws final returns; leave out --x and"),
    (["runs", "--names", "a=b", "c"], "error: --names a=b c: it takes old=new, or a name for each"),
    (["runs", "--out", "nowhere/curves.svg"], "error: --out nowhere/curves.svg cannot be written"),
    (["runs", "--by", "hiden"], "error: --by hiden: no run has such a setting; nearest: hidden"
     ".*; there are: algo, device, env, hidden, lr, run_dir, seed, total_steps"),
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


def test_no_arguments_print_the_help_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for args in ([], ["--help"]):
        with pytest.raises(SystemExit) as caught:
            cli(*args)
        assert caught.value.code == 0
        out, err = capsys.readouterr()
        assert out.startswith(plot.__doc__) and err == ""
        assert max(map(len, out.splitlines())) <= 80
        assert all(f"--{field.name}" in out for field in fields(plot.Plot)[1:])


def test_y_finds_the_mean_of_a_quantity():
    """progress.csv has val_mean, and a user asks for val. The exact name comes first."""
    folder = write_run("runs/a")
    (folder / "progress.csv").write_text("step,time,val_mean,val_std,kl,kl_mean\n"
                                         "500,1,2.0,9,1,5\n1000,2,3.0,9,2,6\n")
    for y, expected in (("val", [2, 3]), ("val_mean", [2, 3]), ("kl", [1, 2])):
        (run,) = plot.load(arguments(y=y))
        assert run.y.tolist() == expected
