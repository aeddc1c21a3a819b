"""Every notebook runs from top to bottom, and every exercise tells right from wrong answers.

The checks of `notebooks/<n>_<title>.ipynb` are in exercises_<n>.py, its worked answers in
answers_<n>.py, under the same names. Plausible wrong answers are in wrong_<n>.py beside this file,
one list per name. All files are found by name, so a new notebook needs no change here.
"""
import ast
import base64
import importlib
import io
import os
import re
import sys

import nbformat
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from nbclient.exceptions import CellExecutionError

from tests import notebooks
from tests.house import tree
from tests.house.tree import ROOT, tracked
from tests.notebooks import changed_cells, differs, execute

FOLDER = ROOT / "notebooks"
NOTEBOOKS = tracked("notebooks/*.ipynb")
CPU_SECONDS = 120  # twice the limit on an idle core, since shared cores are slower
LARGEST = 2_000_000  # bytes of the whole folder
OUTSIDE = {".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}


def every(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def number(path):
    return path.stem.split("_")[0]


def load(name, monkeypatch):
    """Import a module from the folder of notebooks, as a notebook does."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module(name)


def exercises(path, monkeypatch):
    """Return name -> check of one notebook."""
    module = load(f"exercises_{number(path)}", monkeypatch)
    return {name: check for name, check in vars(module).items()
            if getattr(check, "is_exercise", False)}


def answers(path, monkeypatch):
    """Return name -> worked answer. Helpers of the answers start with an underscore."""
    module = load(f"answers_{number(path)}", monkeypatch)
    return {name: value for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"}


def code(notebook):
    """Return the syntax trees of all code cells, without IPython's own lines (% and !)."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [ast.parse("\n".join(line for line in source.split("\n") if line[:1] not in "%!"))
            for source in cells]


# ---- Running

def texts(notebook, stream):
    """Return what all cells wrote to "stdout" or "stderr"."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.get("name") == stream)


def files(folder):
    """Return path -> time of the last change, for every file that git may see."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")
            if path.is_file() and not OUTSIDE & set(path.parts)}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Return the notebooks folder of a copy of the project. Cells run there and import from it.

    Edits to the real tree meanwhile do not matter. Jupyter's own files go to another folder.
    """
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    copied = tree.copy(tmp_path / "copy")
    monkeypatch.setenv("PYTHONPATH", str(copied))
    return copied / "notebooks"


def cpu_seconds():
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.notebooks
@every(NOTEBOOKS)
@pytest.mark.timeout(1800)  # for a busy machine; the real limit is CPU_SECONDS
def test_runs_from_top_to_bottom(path, copy, monkeypatch):
    before, used = files(copy.parent), cpu_seconds()
    done = execute(copy / path.name, copy)
    assert cpu_seconds() - used < CPU_SECONDS
    assert files(copy.parent) == before, "a notebook may only write to a temporary folder"
    assert "Warning" not in texts(done, "stderr")
    unanswered = [f"{name}: not answered yet" for name in exercises(path, monkeypatch)]
    said = texts(done, "stdout").split("\n")
    assert [line for line in said if line in unanswered] == unanswered
    changed = changed_cells(nbformat.read(path, as_version=4), done)
    assert not changed, "\n".join([*changed, "python -m tests.notebooks stores what is printed"])


@pytest.mark.notebooks
def test_a_bad_notebook_is_seen(copy):
    """The tests above see an error in a cell, a file left behind, the time and the interpreter."""
    cell = nbformat.v4.new_code_cell("import sys, time, lab\nopen('left', 'w').close()\n"
                                     "while time.process_time() < 1:\n    pass\n"
                                     "raise RuntimeError(sys.executable)")
    (copy / "bad.ipynb").write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[cell])))
    before, used = files(copy), cpu_seconds()
    with pytest.raises(CellExecutionError, match=re.escape(sys.executable)):
        execute(copy / "bad.ipynb", copy)
    assert set(files(copy)) - set(before) == {copy / "left"}
    assert cpu_seconds() - used > 0.9


# ---- Stored files

@every(NOTEBOOKS)
def test_stored_with_outputs_alone(path):
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)  # since 4.5 cells have ids
    shown = [cell for cell in notebook.cells if cell.get("outputs")]
    assert any("image/png" in output.get("data", {}) for cell in shown for output in cell.outputs)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert all(len(line) <= 100 for line in cell.source.split("\n")), cell.source
            assert "print(" not in cell.source or "def " in cell.source or cell.outputs, cell.source
        assert not cell.get("attachments"), cell.source
    notebooks.strip(notebook)  # changes nothing: a single format, so a diff shows real changes
    assert text == nbformat.writes(notebook) + "\n", "python -m tests.notebooks stores it"


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in tracked("notebooks/*")) < LARGEST


def test_what_is_stored_of_an_output():
    new = nbformat.v4.new_output
    notebook = nbformat.v4.new_notebook(metadata={"widgets": {}})
    cell = nbformat.v4.new_code_cell("1", execution_count=3, metadata={"execution": {"at": "now"}})
    other = nbformat.v4.new_code_cell("2", metadata={"tags": ["trained"], "execution": {}})
    cell.outputs = [new("stream", text="a\n"), new("stream", name="stderr", text="a note"),
                    new("execute_result", {"text/plain": "7"}, execution_count=3,
                        metadata={"x": 1}),
                    new("stream", text="b\n")]
    notebook.cells = [cell, other]
    notebooks.strip(notebook)
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
    assert cell.execution_count is None and cell.metadata == {}
    assert other.metadata == {"tags": ["trained"]}
    assert [output.get("text") for output in cell.outputs] == ["a\nb\n", None]
    assert cell.outputs[1].metadata == {} and cell.outputs[1].execution_count is None
    assert notebooks.text_of(cell) == "a\nb\n7"


def test_pictures_are_stored_small_and_once():
    """A picture that was stored keeps its bytes, so a diff shows only those that changed."""
    figure, file = Figure(figsize=(7, 3)), io.BytesIO()
    axes = figure.add_subplot()
    axes.plot(np.random.default_rng(0).normal(size=300).cumsum())
    figure.savefig(file, format="png")
    data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": "<Figure>"}
    small = notebooks.small(nbformat.v4.new_output("display_data", data))
    assert len(small.data["image/png"]) < 0.6 * len(data["image/png"])
    assert notebooks.small(small) == small


@pytest.mark.parametrize("stored,new,equal", [
    ("mean 1.234", "mean  1.236\n", True),
    ("mean 1.234", "mean 1.434", False),
    ("mean 1,234", "mean 1,534", False),
    ("mean 0.0", "mean 1e-7", True),
    ("mean 1.234", "median 1.234", False),
    ("[1 2]", "[1 2 3]", False),
    ("[1 2]", "", False),
    ("", "", True),
])
def test_which_outputs_are_equal(stored, new, equal):
    assert differs(stored, new) == (not equal)


def test_numbers_of_training_are_free():
    assert not differs("step 20,816: helps", "step 30,000: harms", trained=True)
    assert differs("step 20,816", "reward 20,816", trained=True)
    one, two = (nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(
        "1", metadata={"tags": tags}, outputs=[nbformat.v4.new_output("stream", text=text)])])
        for tags, text in ((["trained"], "step 1\n"), ([], "step 2\n")))
    assert not changed_cells(one, two)
    assert changed_cells(two, one) == ["cell 0 printed\nstep 1\n\nstored is\nstep 2\n"]


# ---- Exercises

@every(NOTEBOOKS)
def test_exercises_know_right_from_wrong(path, monkeypatch):
    checks, right = exercises(path, monkeypatch), answers(path, monkeypatch)
    wrong = importlib.import_module(f"tests.house.wrong_{number(path)}").WRONG
    assert 3 <= len(checks) <= 5
    assert set(checks) == set(right) == set(wrong)
    for name, check in checks.items():
        assert check.verdict(right[name]) == f"{name}: right"
        assert check.verdict(lambda *inputs: None) == f"{name}: not answered yet"
        assert wrong[name]
        hints = [check.verdict(answer) for answer in wrong[name]]
        for hint in hints:
            assert hint.startswith(f"{name}: not right yet. "), hint
            assert " raises " not in hint and " of the wrong type " not in hint, hint


@every(NOTEBOOKS)
def test_exercises_stand_in_the_notebook(path, monkeypatch):
    """For each exercise the notebook defines its function to complete, and calls its check."""
    cells = code(nbformat.read(path, as_version=4))
    defined = {node.name: ast.unparse(node.args) for cell in cells for node in cell.body
               if isinstance(node, ast.FunctionDef)}
    called = {ast.unparse(node) for cell in cells for node in ast.walk(cell)
              if isinstance(node, ast.Call)}
    source = ast.parse((FOLDER / f"answers_{number(path)}.py").read_text(encoding="utf-8"))
    right = {node.name: ast.unparse(node.args) for node in source.body
             if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    for name in exercises(path, monkeypatch):
        assert defined[name] == right[name]
        assert f"exercises_{number(path)}.{name}({name})" in called


@every(NOTEBOOKS)
def test_nothing_is_retyped(path):
    """A notebook imports what algos/ defines, so it always shows the real code."""
    ours = {node.name for file in tracked("algos/*.py")
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for cell in code(nbformat.read(path, as_version=4)):
        for node in cell.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.name not in ours, node.name


def test_checks_never_raise(monkeypatch, capsys):
    checking = load("checking", monkeypatch)

    @checking.exercise
    def double(answer):
        checking.close(answer(2.0), 4.0, "Multiply by 2.")
        checking.true(answer(0.0) == 0, "Twice 0 is 0.")

    def raises(x):
        return x.nothing

    def not_begun(x):
        raise NotImplementedError

    for answer in (raises, lambda x: 3.0, lambda x: float("nan"), lambda x: "four",
                   lambda x: [4.0], lambda x: x + 2, lambda x: [] if x else 4.0,
                   lambda x: 2 * x if x else torch.zeros(2)):
        assert double.verdict(answer).startswith("double: not right yet. ")
    assert double.verdict(lambda x: ...) == double.verdict(not_begun) == "double: not answered yet"
    assert double(lambda x: 2 * x) is None
    assert capsys.readouterr().out == "double: right\n"
