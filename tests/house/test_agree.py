"""benchmarks/agree.py and suite.py: which rows are of this code, and where the others go."""
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import agree, suite
from utils.run.code import code

ROW = {"algo": "toy", "env": "Toy-v0", "seed": 3, "changed": {"gamma": 0.9}, "settings": {},
       "git_commit": "old", "id": "plainrl/Toy-v0/toy/gamma=0.9/seed3", "train100": 1.0,
       "eval": [1.0], "total_steps": 100}
# A program that "learns" after its second report, and never ends.
TOY = """
import json, sys, time
from pathlib import Path
if "--help" in sys.argv:
    sys.exit(print("{flags}"))
words = [word for word in sys.argv[1:] if word != "--no-compile"]
given = dict(zip(words[::2], words[1::2]))
assert given["--seed"] in "34" and given["--gamma"] == "0.9"
assert ("--no-compile" in sys.argv) == ("--no-compile" in "{flags}")
run = Path(given["--run-dir"])
run.mkdir()
(run / "config.json").write_text(json.dumps({{"settings": {{"total_steps": {total}}}}}))
loss = {loss} if given["--seed"] == "3" else {other}
rows = [["step", "time", "v_loss", "gain"]] + [
    [k, time.time(), k * loss if k > 2 else "", 1000 * (k == 3)] for k in range(1, 9)]
(run / "progress.csv").write_text("".join(",".join(map(str, row)) + chr(10) for row in rows))
time.sleep(600)
"""


@pytest.fixture
def trees(tmp_path, monkeypatch):
    """Return a function that writes the algorithm toy of the commits old and HEAD."""
    def write(commit, flags="", total=100, loss=1.0, other=1.0):
        (tmp_path / commit / "algos").mkdir(parents=True, exist_ok=True)
        text = TOY.format(flags=flags, total=total, loss=loss, other=other)
        (tmp_path / commit / "algos/toy.py").write_text(text)
        (tmp_path / commit / "algos/__init__.py").touch()

    monkeypatch.setattr(agree, "checkout", lambda commit: SimpleNamespace(name=tmp_path / commit))
    for cached in agree.usage, agree.run:
        cached.cache_clear()
    return write


@pytest.mark.parametrize("today,agrees,where", [
    ({}, True, "same syntax trees"), ({"loss": 1.00005}, True, "v_loss"),
    ({"loss": 1.0002, "other": 1.00005}, True, "v_loss"),      # the second seed agrees
    ({"loss": 1.0002, "other": 1.0002}, False, "v_loss"), ({"total": 200}, False, "total_steps")])
def test_a_row_is_of_this_code_if_runs_of_both_agree(trees, today, agrees, where):
    trees("old", flags="--no-compile" if today else "")
    trees("HEAD", **today)
    told = agree.ask(ROW, [3, 4])
    assert (told["agrees"], told["where"]) == (agrees, where)
    assert (told["algo"], told["env"], told["settings"], told["commit"]) == (
        "toy", "Toy-v0", "gamma=0.9", "old")


def test_a_row_that_agreed_with_a_commit_agrees_with_what_equals_it(trees, monkeypatch):
    """As on another processor, where old code makes other numbers."""
    for commit, loss in ("old", 2.0), ("between", 1.0), ("HEAD", 1.00005):
        trees(commit, loss=loss, other=loss)
    known = {}
    monkeypatch.setattr(agree, "verdicts", lambda: known)
    assert not agree.ask(ROW, [3])["agrees"]
    with pytest.raises(RuntimeError, match="did not agree with between"):
        agree.ask(ROW, [3], "between")
    between = suite.code("toy", "Toy-v0", agree.checkout("between").name)
    known["toy", "Toy-v0", "gamma=0.9", "old", between] = True
    told = agree.ask(ROW, [3], "between")
    assert told["agrees"] and told["commit"] == "old" and told["code"] != between
    assert told["by"] == "between"


def test_a_checkout_has_the_demonstrations_of_the_folder():
    Path("e.npz").touch()
    folder = Path(agree.checkout("HEAD").name)
    assert (folder / "e.npz").exists() and (folder / "algos/bc.py").exists()


def test_a_run_that_ends_before_it_learns_gives_no_verdict(trees):
    trees("old", flags="--no-compile")
    trees("HEAD")
    with pytest.raises(RuntimeError, match="^AssertionError"):
        agree.ask(ROW | {"changed": {"gamma": 0.8}}, [3])


def test_a_prefix_ends_with_the_third_report_that_has_learning_in_it():
    Path("progress.csv").write_text("step,time,q_loss,eps\n1,1,,1\n2,2,1,1\n3,3,,1\n4,4,1,1\n")
    assert agree.reports(Path("progress.csv")) == agree.reports(Path("none.csv")) == {}
    with open("progress.csv", "a") as file:
        file.write("5,5,2,1\n6,6,2,1\n")
    assert agree.reports(Path("progress.csv"))["step"].tolist() == [1, 2, 3, 4, 5]


def test_a_number_is_compared_relative_to_its_column():
    old = {"time": np.array([1.0, 2.0]), "kl": np.array([1e-9, 1.0]), "ret": np.array([np.nan, 5])}
    assert agree.difference(old, old | {"time": np.zeros(2), "new": np.ones(2)})[0] == 0
    assert agree.difference(old, old | {"kl": np.array([2e-9, 0.75])}) == (0.25, "kl")
    for other in np.array([4.0, 5]), np.array([5.0]):       # a number for none, or fewer reports
        assert agree.difference(old, old | {"ret": other}) == (1.0, "ret")


FILES = {"algos/a.py": "import utils.stats\nfrom utils import mine, mpi\n"
                       "from utils.envs import make\nrate = 1",
         "algos/b.py": "from utils.film import draw", "utils/mpi.py": "import numpy",
         "utils/envs.py": "def make():\n    from utils.wrappers import wrap",
         "utils/wrappers.py": "'''A docstring.'''", "utils/film.py": "from utils import envs",
         "utils/goals.py": "x = 1", "utils/stats.py": "x = 1", "utils/seeds.py": "x = 1",
         "tasks.py": "length = 1",
         "utils/mine.py": "import helper, torch", "helper.py": "from algos import b",
         "pack/__init__.py": "from .far import World", "pack/far.py": "from . import near",
         "pack/near.py": "x = 1"}
ROWS = {"a": ("a", "Toy-v0"), "b": ("b", "Toy-v0"), "t": ("b", "tasks:Toy-v0"),
        "p": ("b", "pack:Toy-v0")}


@pytest.mark.parametrize("name,text,changed", [
    ("algos/a.py", FILES["algos/a.py"] + "  # a comment\n", ""),
    ("utils/wrappers.py", "'''Another.'''", ""), ("utils/film.py", "import os", ""),
    ("algos/a.py", FILES["algos/a.py"] + "0", "a"), ("utils/mpi.py", "import numpy as np", "a"),
    ("utils/wrappers.py", "wrap = 1", "a"), ("algos/b.py", "from utils.mpi import x", "abtp"),
    ("utils/mine.py", "import helper as h", "a"), ("helper.py", "import algos.b", "a"),
    ("pack/near.py", "x = 2", "p"), ("pack/far.py", "from . import near as n", "p"),
    ("utils/stats.py", "x = 2", "a"), ("utils/mpi.py", "half written = (", "a"),
    ("utils/goals.py", "x = 2", ""), ("utils/seeds.py", "x = 2", "abtp"),
    ("tasks.py", "length = 2", "t")])
def test_the_hash_is_that_of_what_an_algorithm_computes_with(name, text, changed, monkeypatch):
    found = []
    for tree, files in ("old", FILES), ("new", FILES | {name: text}):
        for path, told in files.items():
            Path(tree, path).parent.mkdir(parents=True, exist_ok=True)
            Path(tree, path).write_text(told)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(Path(tree).resolve())
            found.append([suite.code(*row, Path(tree).resolve()) for row in ROWS.values()])
    assert [name for name, x, y in zip(ROWS, *found) if x != y] == [*changed]


def test_a_fork_elsewhere_may_have_the_name_of_what_it_imports():
    fork, hashes = Path("a.py").resolve(), set()
    fork.write_text("from algos import a")
    Path("algos").mkdir()
    for k in 1, 2:
        Path("algos/a.py").write_text(f"x = {k}")
        hashes.add(code(fork, utils=Path("utils").resolve()))
    assert len(hashes) == 2


def write(rows, name="results"):
    suite.write_suite(Path(f"{name}.jsonl"), rows)
    return Path(f"{name}.jsonl")


def stored(name):
    return [row["id"] for row in suite.read_suite(Path(f"{name}.jsonl"))]


def test_rows_that_others_replace_go_to_the_history(monkeypatch):
    monkeypatch.setattr(suite, "HERE", Path())
    rows = [ROW | {"algo": "ppo", "seed": k, "id": f"seed{k}", "git_commit": commit}
            for k, commit in enumerate(["old", "new", "unasked", "x-dirty"])]
    rows += [ROW | {"algo": "ppo", "changed": {"few": 1}, "id": f"few{k}", "git_commit": commit}
             for k, commit in enumerate(["new", "old", "old"])]   # one of three stands for no row
    others = [ROW | {"algo": "ppo", "changed": {}, "id": "alone"},
              ROW | {"algo": "ppo", "library": "sb3", "id": "peer"}]
    told = {("ppo", "Toy-v0", settings, commit, suite.code("ppo", "Toy-v0")): agrees
            for settings, commit, agrees in (
                ("gamma=0.9", "old", False), ("", "old", False), ("gamma=0.9", "new", True),
                ("few=1", "old", False), ("few=1", "new", True))}
    monkeypatch.setattr(suite, "verdicts", lambda: told)
    suite.retire(write(rows + others))
    few = ["few0", "few1", "few2"]
    assert stored("results") == ["alone", *few, "peer", "seed1", "seed2"]
    groups = suite.read(Path("results.jsonl")).values()
    assert few in [sorted(row["id"] for row in group) for group in groups]
    assert stored("history") == ["seed0@old", "seed3@x-dirty"]


def test_added_runs_replace_rows_and_need_a_commit(monkeypatch):
    monkeypatch.setattr(suite, "HERE", Path())
    write([ROW | {"curve": [[1, 2.0]]}, ROW | {"id": "other"}])
    Path("runs").mkdir()
    run = ROW | {"git_commit": "new", "curve": [[1, 3.0]]}
    Path("runs/result.json").write_text(json.dumps(run))
    suite.add(Path("runs"), Path("results.jsonl"))
    new = suite.read_suite(Path("results.jsonl"))[1]
    history = suite.read_suite(Path("history.jsonl"))
    assert (new["git_commit"], new["curve"]) == ("new", [[1, 3.0]])
    assert [(row["id"], row["curve"]) for row in history] == [(f"{ROW['id']}@old", [[1, 2.0]])]
    Path("runs/result.json").write_text(json.dumps(ROW | {"git_commit": "new-dirty"}))
    with pytest.raises(SystemExit, match="no commit has the code of plainrl/Toy"):
        suite.add(Path("runs"), Path("results.jsonl"))
