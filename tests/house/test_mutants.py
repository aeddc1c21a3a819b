"""The catalogue of planted bugs still applies, and the runner tells kills from errors.

These tests plant a sample of the bugs. `python -m tests.mutants` plants all of them.
"""
import ast
import csv
import re
import signal
import subprocess
import sys

import pytest

from tests.mutants import __main__ as runner, catalogue, changes, general
from tests.mutants.catalogue import ROOT, TESTS, Mutant

BOTH = pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
LEAST = {"algos": 15, "utils": 8, "": 8}    # bugs per file, if it has any, by folder
LEAST_SECOND = 3                            # in the second, whose entries moved to utils/


def one(**changes):
    """Return an entry that applies to any file with one "import math"."""
    fields = {"id": "ppo-x", "module": "ppo", "old": "import math\n", "new": "import math as m\n",
              "wrong": "All of it.", "found": "Nowhere."}
    return Mutant(**fields | changes)


# ---- The catalogue

@BOTH
def test_every_bug_has_one_place_in_each_of_its_files(second):
    wrong = []
    for mutant in catalogue.read(second):
        for module in (mutant.module, *mutant.also):
            path = catalogue.file_of(module)
            text = path.read_text(encoding="utf-8")
            try:
                new = catalogue.planted(mutant, text)
                compile(new, path, "exec")
                assert new != text, "`new` is `old`"
            except (ValueError, SyntaxError, AssertionError) as error:
                wrong.append(f"{mutant.id} in {path.relative_to(ROOT)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_entries_are_whole():
    mutants = catalogue.read() + catalogue.read(second=True)
    ids = [mutant.id for mutant in mutants]
    assert len(set(ids)) == len(ids), {name for name in ids if ids.count(name) > 1}
    for mutant in mutants:
        assert mutant.module in TESTS and set(mutant.also) <= TESTS.keys() - {mutant.module}
        assert re.fullmatch(rf"({mutant.module}|2)-[a-z0-9-]+", mutant.id), mutant.id
        assert len(mutant.wrong) > 10 and len(mutant.found) > 3, mutant.id


@BOTH
def test_every_file_has_its_share(second):
    mutants = catalogue.read(second)
    files = [module for mutant in mutants for module in (mutant.module, *mutant.also)]
    for module in {mutant.module for mutant in mutants}:
        folder = catalogue.file_of(module).parent.relative_to(ROOT).name
        least = LEAST[folder] if not second else LEAST_SECOND if folder == "algos" else 1
        assert files.count(module) >= least, f"{module} has {files.count(module)} of {least}"


def test_the_tests_of_every_module_are_there():
    for module, names in TESTS.items():
        assert catalogue.file_of(module).exists()
        assert all((ROOT / catalogue.test_file(name)).exists() for name in names.split()), module


# ---- The runner

def test_a_shared_bug_is_planted_alone_and_in_all_copies():
    found = [(p.id, p.module, p.files) for p in catalogue.plantings([one(also=["a2c", "vpg"])])]
    assert found == [("ppo-x", "ppo", ("ppo",)), ("ppo-x@a2c", "a2c", ("a2c",)),
                     ("ppo-x@vpg", "vpg", ("vpg",)), ("ppo-x@all", "ppo", ("ppo", "a2c", "vpg"))]
    assert [p.id for p in catalogue.plantings([one()])] == ["ppo-x"]


@pytest.mark.parametrize("said,status,crashes,expected", [
    ("2 passed", 0, False, ("survived", "")),
    ("..F\nFAILED tests/algos/test_a.py::test_b[no gain-box] - assert 1 == 2\n1 failed", 1, False,
     ("killed", "test_a.py::test_b[no gain-box]")),
    ("ERROR tests/algos/test_a.py::test_b - a fixture", 1, False, ("killed", "test_a.py::test_b")),
    ("FAILED tests/mutants/smoke.py::test_it_runs - AssertionError", 1, False,
     ("error", "crashes by itself: AssertionError")),
    ("FAILED tests/mutants/smoke.py::test_it_runs - AssertionError", 1, True,
     ("killed", "an error in the file")),
    ("FAILED tests/mutants/smoke.py::test_it_runs - TypeError: x", 1, True,
     ("error", "crashes by itself: TypeError: x")),
    ("FAILED tests/mutants/smoke.py::test_it_runs - Failed: Timeout (>300.0s) from", 1, False,
     ("killed", "the time limit")),
    ("ERROR tests/algos/test_a.py - SyntaxError", 1, False, ("error", None)),
    ("ERROR tests/algos/test_a.py - SyntaxError", 2, False, ("error", None)),
    ("Segmentation fault", -11, False, ("error", None)),
    ("....", -signal.SIGXCPU, False, ("killed", "the time limit")),
])
def test_verdict(said, status, crashes, expected):
    outcome, by = runner.verdict(said, status, one(crashes=crashes))
    assert outcome == expected[0] and expected[1] in (by, None)


def test_a_bug_is_planted_in_all_its_files_or_in_none(tmp_path):
    """It is an error if `old` is missing from a file, or stands there several times."""
    (tmp_path / "algos").mkdir()
    files = {name: tmp_path / f"algos/{name}.py" for name in ("ppo", "a2c")}
    every = list(catalogue.plantings([one(also=["a2c"])]))[-1]
    for text in ("import cmath\n", "import math\n" * 2, "import math\n"):
        files["ppo"].write_text("import math\n")
        files["a2c"].write_text(text)
        if text != "import math\n":
            with pytest.raises(ValueError, match="[02] times"):
                runner.plant(every, tmp_path)
            assert files["ppo"].read_text() == "import math\n"
    assert runner.plant(every, tmp_path) == dict.fromkeys(files.values(), text)
    assert {path.read_text() for path in files.values()} == {"import math as m\n"}


def test_what_was_not_killed_stands_last_and_is_the_exit_status(tmp_path, capsys):
    results = [runner.Result("ppo-a", "survived", "", 1.0),
               runner.Result("ppo-b", "error", "?", 1.0),
               runner.Result("ppo-c", "killed", "test_d", 2.0)]
    assert runner.report(results, tmp_path / "table.csv") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ppo-c", "ppo-b", "ppo-a"]
    assert lines[-1] == "killed 1 of 3"
    assert (tmp_path / "table.csv").read_text().splitlines()[3] == "ppo-c,killed,test_d,2.0"
    assert runner.report(results[2:], "") == 0


def test_an_unknown_bug_is_refused():
    with pytest.raises(SystemExit, match="ppo-nothing"):
        runner.main(["--id", "ppo-nothing"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sample_is_killed():
    done = subprocess.run([sys.executable, "-m", "tests.mutants", "--sample", "12"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "killed 12 of 12"


def test_no_bug_of_a_kept_run_has_left_the_catalogue():
    planted = {p.id for p in catalogue.plantings(catalogue.read() + catalogue.read(second=True))}
    kept = [row["id"] for name in ("last_run.csv", "second/last_run.csv")
            for row in csv.DictReader((catalogue.HERE / name).read_text("utf-8").splitlines())]
    assert set(kept) <= planted and len(kept) > 900


HANGS = """
from tests.mutants import __main__ as runner
from tests.mutants.catalogue import Mutant, Planting

runner.LIMIT = 3
new = "while True: pass\\n\\ndef compute_advantages("
bug = Mutant("a2c-x", "a2c", old="def compute_advantages(", new=new, wrong="", found="")
for result in runner.run_all([Planting(bug.id, "a2c", ("a2c",), bug)], 1):
    print(result.outcome, "by", result.by)
"""


@pytest.mark.slow
def test_a_bug_that_hangs_is_killed_by_the_time_limit():
    done = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "killed by the time limit\n", done.stdout + done.stderr


# ---- General mutants

TOY = changes.Function("ppo.toy", ("ppo",), ast.parse('''
def toy(a: Float32[Tensor, "1"], b, eps=1):
    """Text - 1."""
    assert a.shape == b.shape == eps.shape, "message 1"
    if a < 0.5 and b is None:
        note(a)
        return -a, b[0] + torch.clamp(a - b, -1, eps + 1e-8)
    return torch.where(a <= b, a, b.max(dim=-1, keepdim=True) * a / b) if not eps else b.exp().T
''').body[0])


@pytest.mark.parametrize("old,new", [
    ("a < 0.5", "a <= 0.5"), ("a < 0.5", "a > 0.5"), ("b is None", "b is not None"),
    ("a.shape == b.shape == eps.shape", "a.shape == b.shape"),
    ("a < 0.5 and b is None", "a < 0.5 or b is None"), ("a < 0.5 and b is None", "b is None"),
    ("a - b", "a + b"), ("a - b", "b - a"), ("a - b", "a"), ("-a", "a"), ("not eps", "eps"),
    ("b.max(dim=-1, keepdim=True) * a", "b.max(dim=-1, keepdim=True) / a"),
    ("b[0]", "b[1]"), ("a < 0.5", "a < 1.0"), ("eps + 1e-08", "eps + 0.0"),
    ("eps + 1e-08", "eps + 2e-08"), ("dim=-1", "dim=0"), ("dim=-1", "dim=-2"), ("dim=-1", "dim=1"),
    ("True", "False"), ("b.max(dim=-1, keepdim=True)", "b.max(keepdim=True)"),
    ("b.max(dim=-1, keepdim=True)", "b.min(dim=-1, keepdim=True)"),
    ("torch.clamp(a - b, -1, eps + 1e-08)", "torch.clamp(a - b, -1)"),
    ("torch.clamp(a - b, -1, eps + 1e-08)", "torch.clamp(a - b, eps + 1e-08, -1)"),
    ("torch.clamp(a - b, -1, eps + 1e-08)", "a - b"), ("b.exp()", "b"), ("b.exp().T", "b.exp()"),
    ("note(a)", "pass"),
])
def test_each_kind_of_change_is_made(old, new):
    assert (old, new) in {(mutant.old, mutant.new) for mutant in changes.mutants(TOY)}


def test_a_general_mutant_is_one_change_of_what_is_computed():
    made = changes.mutants(TOY)
    texts = [ast.unparse(mutant.tree) for mutant in made] + [ast.unparse(TOY.tree)]
    assert len(set(texts)) == len(texts) and len({mutant.key for mutant in made}) == len(made)
    kept = ['def toy(a: Float32[Tensor, "1"], b, eps=1)', "Text - 1."]
    assert all(part in text.replace("'", '"') for part in kept for text in texts)
    for text in texts:
        compile(text, "toy", "exec")


def test_a_function_of_several_files_is_one():
    places = {function.name: function.modules for function in changes.functions()}
    on_policy = ("ppo", "ppo_popart", "ppo_lstm", "gail", "a2c", "acktr", "vpg", "trpo")
    assert places["ppo.compute_advantages"] == on_policy
    assert "a2c.compute_advantages" not in places
    assert places["trpo.fisher_product"] == ("trpo",) and len(places) >= 30


def test_what_is_listed_as_equivalent_is_a_mutant(tmp_path):
    every = [mutant for function in changes.functions() for mutant in changes.mutants(function)]
    assert all(len(why) > 10 for why in general.equivalents(every).values())
    path, entry = tmp_path / "list.toml", '{function="ppo.toy", old="a - b", new="%s", why="?"}'
    path.write_text(f"equivalent = [{entry % 'b - a'}]")
    assert list(general.equivalents(changes.mutants(TOY), path)) == [("ppo.toy", "a - b", "b - a")]
    path.write_text(f"equivalent = [{entry % 'a - c'}]")
    with pytest.raises(SystemExit, match="a - c"):
        general.equivalents(changes.mutants(TOY), path)


def test_a_sample_of_the_mathematics(monkeypatch):
    """So many, the same again, of several modules, and none that computes the same."""
    monkeypatch.setattr(general, "run", lambda todo, tests, listed, *rest: (todo, listed))
    todo, listed = runner.main(["--math", "--sample", "12"])
    assert len(todo) == len({mutant.key for mutant in todo}) == 12
    assert len({mutant.function.modules[0] for mutant in todo}) >= 6
    assert not {mutant.key for mutant in todo} & listed.keys()
    again, _ = runner.main(["--math", "--sample", "12"])
    assert [mutant.key for mutant in again] == [mutant.key for mutant in todo]
    checked, _ = runner.main(["--math", "--check", "--sample", "3"])
    assert len(checked) == 3 and {mutant.key for mutant in checked} <= listed.keys()
    assert len(runner.main(["--math", "--algo", "a2c"])[0]) > 12


ONE = """
import sys
from tests.mutants import changes, general

function, = (each for each in changes.functions() if each.name == "a2c.policy_loss")
wanted = [mutant for mutant in changes.mutants(function) if mutant.old == "logp * adv"]
unseen = [mutant for mutant in changes.mutants(function) if mutant.new == "pass"]
sys.exit(general.run(wanted + unseen, ["tests/algos/test_vpg.py::test_policy_loss_by_hand"]))
"""


@pytest.mark.slow
def test_general_mutants_are_killed_by_a_test_that_sees_them_and_no_other():
    done = subprocess.run([sys.executable, "-c", ONE], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "killed 3 of 4, 0 equivalent", done.stdout + done.stderr
    assert done.returncode == 1
