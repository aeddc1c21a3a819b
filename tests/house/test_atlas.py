"""The atlas: its rows can be planted, and it tells what a bug costs. And the runner of bugs."""
import importlib
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import atlas, details, suite, table
from diagnose import catalogue
from tests.mutants import __main__ as mutants


@pytest.mark.slow       # rewording a line of algos/ fails no default test
def test_every_row_can_be_planted():
    for row in atlas.read_rows([]):
        catalogue.planted(row.mutant, catalogue.file_of(row.algo).read_text("utf-8"))
        assert row.env and row.seeds >= 5, row
    with pytest.raises(KeyError, match="no-such-bug"):
        atlas.read_rows(["no-such-bug"])


def write_run(folder, returns, kl, steps=2000):
    """Write what `collect` reads of a run: an episode and a report every 20 steps."""
    folder.mkdir(parents=True)
    at = range(20, steps + 1, 20)
    (folder / "config.json").write_text(json.dumps({
        "algo": folder.parts[-3], "git_commit": "abc",
        "settings": {"env": "CartPole-v1", "seed": 1, "total_steps": steps}}))
    for name, column, values in (("episodes", "ep_ret", returns), ("progress", "kl", kl)):
        (folder / f"{name}.csv").write_text("".join(
            [f"step,time,{column}\n", *(f"{k},{k},{x}\n" for k, x in zip(at, values))]))


def test_a_row_tells_what_is_lost_and_what_shows_it(tmp_path):
    row = atlas.Row("ppo-time-limit-is-an-end@a2c", "CartPole-v1", ("lr=1e-3",), 5)
    at, rng = np.arange(100), np.random.default_rng(0)
    for seed in range(1, 6):
        noise = rng.uniform(0, 1, 100)
        for algo, slope, late in (("a2c", 1.0, 0), ("a2c+time-limit-is-an-end", 0.5, 2)):
            write_run(tmp_path / "runs/lr=1e-3/CartPole-v1" / algo / "lr=0.001" / f"seed{seed}",
                      slope * at, noise + late * (at >= 50))
    (tmp_path / "figures").mkdir()
    path = tmp_path / "atlas.jsonl"
    told, = atlas.collect([row], tmp_path, path)
    assert told == json.loads(path.read_text())
    # The last tenth: 90 to 99. The first twentieth: 0 to 4, so the clean gain is 94.5 - 2.
    assert told["clean"] == [94.5] * 5 and told["planted"] == [47.25] * 5
    assert told["lost"] == pytest.approx([47.25 / 92.5] * 3)
    assert told["steps_to"] == [1600, None]         # 76 is the first part's mean above 2 + 0.8 92.5
    # Apart from step 1000 on.
    assert (told["metric"], told["step"], told["above"]) == ("kl", 1100, True)
    assert (tmp_path / "figures/atlas.svg").exists()
    assert atlas.collect([row._replace(seeds=6)], tmp_path, path) == []     # a seed is missing
    path.write_text(json.dumps(told | {"caught": "test_NaN"}) + "\n")
    atlas.collect([row], tmp_path, path)
    assert json.loads(path.read_text()) == told | {"caught": "test_NaN"}
    ended, = (tmp_path / "runs").rglob("a2c+time*/*/seed5/episodes.csv")
    ended.write_text("step,time,ep_ret\n")              # the bug ended the run before an episode
    told, = atlas.collect([row], tmp_path, path)
    assert np.isnan(told["planted"]).tolist() == [False] * 4 + [True]
    assert json.loads(path.read_text())["planted"][4] is None


def test_the_first_metric_that_stays_apart_is_named():
    """For three parts, not for two; whatever the order of the metrics."""
    def seeds(**apart):
        metrics = {name: np.isin(np.arange(20), at) for name, at in apart.items()}
        return 2 * [atlas.Seed(0.0, np.zeros(20), metrics, 2000)]

    for kl, val in ((6, 9), (9, 6)):
        told = atlas.separating(seeds(kl=[], val=[], short=[]),
                                seeds(kl=range(kl, 20), val=range(val, 20), short=[2, 3]))
        assert told == ("kl" if kl < val else "val", 700, True)
    low, high = seeds(kl=range(20))[0], seeds(kl=[])[0]                  # one seed lies among them
    assert atlas.separating([high, high], [high, low])[0] is None
    few = np.where(np.arange(20) % 2, np.arange(20) >= 6.0, np.nan)     # a report in every other
    clean, planted = ([seed._replace(metrics={"q": x}) for seed in seeds()]
                      for x in (0 * few, -few))
    assert atlas.separating(clean, planted) == ("q", 800, False)


def test_a_row_names_the_test_that_fails(tmp_path, capsys):
    def found(ident, outcome, by):
        mutants.report([mutants.Result(ident, outcome, by, 1.0)])
        for line in capsys.readouterr().out.splitlines(keepends=True):
            atlas.note(line, path)
        return [json.loads(line).get("caught") for line in path.read_text().splitlines()]

    path = tmp_path / "atlas.jsonl"
    atlas.write_rows([{"bug": "b", "env": "e"}, {"bug": "b", "env": "d"}, {"bug": "a", "env": "e"}],
                     path)
    test = "tests/algos/test_a2c.py::test_gae[a - b]"
    assert found("b", "killed", test) == [None, test, test]
    assert found("a", "killed", "the time limit") == [None, test, test]
    assert found("b", "survived", "") == [None, None, None]
    with pytest.raises(KeyError, match="no-such-bug"):
        atlas.catch(["a", "no-such-bug"], path)


@pytest.mark.slow
def test_every_detail_can_be_planted():
    for detail in details.read_details([]):
        text = catalogue.file_of(detail["algo"]).read_text("utf-8")
        assert details.show(detail) != text, detail["name"]


def test_a_detail_has_what_it_names_and_shows_a_file_of_its_own(tmp_path, monkeypatch):
    """The file learns by them without a flag."""
    detail, = details.read_details(["as-openai-baselines"])
    assert {"lr=3e-4", "std_init=1", "recompute_adv=False", "minibatch_size=64",
            "target_kl=0"} == {*detail["set"]}
    assert '"terminated": done, "done": done' in details.show(detail)
    (tmp_path / "my_ppo.py").write_text(details.show(detail), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("my_ppo")
    cfg = mine.Config(env="Pendulum-v1", total_steps=256, rollout_steps=128, run_dir="run")
    assert (cfg.lr, cfg.std_init, cfg.recompute_adv) == (3e-4, 1, False)
    agent = mine.train(cfg)
    assert agent.env_act(torch.full((1, 1), 1.5)) == 2 and agent.val_old.shape == (128,)


def test_a_detail_is_compared_with_published_runs_of_the_same_seeds(tmp_path, monkeypatch):
    chosen = details.read_details(["raw-rewards", "sigma-1"])
    envs = chosen[0]["envs"]

    def write(folder, seeds, end, **more):
        for seed, env in itertools.product(seeds, envs):
            path = tmp_path / folder / env / f"seed{seed}"
            path.mkdir(parents=True)
            (path / "result.json").write_text(json.dumps({
                "env": env, "algo": "ppo", "seed": seed, "curve": [[1, 7.0], [9, end(seed)]],
                "git_commit": "abc", "total_steps": 9} | more))

    monkeypatch.setattr(details, "HERE", tmp_path)
    suite.write_suite(tmp_path / "results.jsonl", [])
    write("plain", range(1, 11), lambda seed: 100.0 if seed < 4 else 1e6)
    suite.add(tmp_path / "plain", tmp_path / "results.jsonl")
    write("raw-rewards", range(1, 4), lambda seed: 50.0 + 10 * (seed - 2),
          changed={"scale_rew": False})
    write("sigma-1", range(1, 3), lambda seed: 1.0, changed={"std_init": 1})
    rows = details.collect(chosen, 3, tmp_path)
    assert [(row["detail"], row["env"], row["ends_at"]) for row in rows] == [
        ("raw-rewards", env, [40, 50, 60]) for env in envs]
    shown = table.detailed("ppo", suite.read(tmp_path / "results.jsonl")).splitlines()
    assert [line.split("|")[1].strip() for line in shown[2:]] == [
        "none", "`raw-rewards`", "published", "published"]
    assert "50.0" in shown[3] and "| 3 " in shown[3] and "| 1669 " in shown[4]
    assert "trained" in table.detailed("td3", {})
    told = {detail["name"]: ratio for detail, _, ratio in details.compared()}
    middle, low, high = told.pop("raw-rewards")
    assert middle == pytest.approx(0.5) and 0.4 <= low < 0.5 < high <= 0.6
    assert set(told.values()) == {None}
    for times, old in (0, "no such text"), (2, "t"):
        with pytest.raises(ValueError, match=f"stands {times} times"):
            catalogue.edited("text", [[old, ""]])
    # Where a study has a detail that changes nothing, its runs are compared with.
    envs = details.read_details(["rainbow"])[0]["envs"]
    write("rainbow", (1, 2), lambda seed: 10.0)
    write("one-step", (1, 2), lambda seed: 5.0)
    details.collect(details.read_details(["rainbow", "one-step"]), 2, tmp_path)
    told = {detail["name"]: ratio for detail, _, ratio in details.compared()}
    assert (told["rainbow"][0], told["one-step"][0]) == (1, 0.5) and told["raw-rewards"]


@pytest.mark.slow
def test_train_plants_a_bug_in_a_clone(tmp_path):
    row = atlas.Row("ppo-entropy-is-punished", "CartPole-v1", ("total_steps=4096",), 1)
    assert atlas.train([row], tmp_path, 1) == 0
    folder, = (tmp_path / row.folder / "CartPole-v1" / row.planted).glob("*/seed1")
    assert "+ cfg.ent_coef * ent" in (folder / "algo.py").read_text()
    assert (folder / "result.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sample_of_the_planted_bugs_is_killed():
    done = subprocess.run([sys.executable, "-m", "tests.mutants", "--sample", "12"],
                          cwd=catalogue.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "killed 12 of 12"
