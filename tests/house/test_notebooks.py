"""Every notebook runs from top to bottom, and every exercise tells right from wrong answers.

The checks of `notebooks/<n>_<title>.ipynb` are in exercises_<n>.py, its worked answers in
spoilers/answers_<n>.py, under the same names. wrong.py has the errors that are planted in the
answers.
"""
import importlib
import inspect
import os
import shutil

import nbformat
import pytest

from tests import notebooks
from tests.house.tree import ROOT, tracked
from tests.house.wrong import WRONG
from tests.notebooks import changed_cells, execute

FOLDER = ROOT / "notebooks"
NOTEBOOKS = tracked("notebooks/*.ipynb")
CPU_SECONDS = 240  # a minute on an idle core, but shared cores are slower: 123 were seen
OUTSIDE = {".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}


def every(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def number(path):
    return path.stem.split("_")[0]


def load(name, monkeypatch, folder=FOLDER):
    """Import a module from the folder of notebooks, as a notebook does, or from another one."""
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(name)


def exercises(path, monkeypatch):
    """Return name -> check of one notebook."""
    module = load(f"exercises_{number(path)}", monkeypatch)
    return {name: check for name, check in vars(module).items()
            if getattr(check, "is_exercise", False)}


def answers(path, monkeypatch):
    """Return name -> worked answer. Helpers of the answers start with an underscore."""
    module = load(f"answers_{number(path)}", monkeypatch, FOLDER / "spoilers")
    return {name: value for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"}


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
    copied = tmp_path / "copy"
    for file in tracked():
        place = copied / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
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
            assert "print(" not in cell.source or "def " in cell.source or cell.outputs, cell.source
    notebooks.strip(notebook)  # changes nothing: a single format, so a diff shows real changes
    assert text == nbformat.writes(notebook) + "\n", "python -m tests.notebooks stores it"


def test_the_first_cell_installs():
    (source,) = {nbformat.read(path, as_version=4).cells[1].source for path in NOTEBOOKS}
    assert "find_spec" in source and "%pip install" in source


# ---- Exercises

def with_error(answer, old, new):
    """Return a worked answer with an error planted in it."""
    source, names = inspect.getsource(answer), dict(answer.__globals__)
    assert old in source, old
    exec(source.replace(old, new), names)
    return names[answer.__name__]


@every(NOTEBOOKS)
def test_exercises_know_right_from_wrong(path, monkeypatch):
    checks, right = exercises(path, monkeypatch), answers(path, monkeypatch)
    assert 3 <= len(checks) <= 5 and set(checks) == set(right)
    for name, check in checks.items():
        assert check.verdict(right[name]) == f"{name}: right"
        assert check.verdict(lambda *inputs: None) == f"{name}: not answered yet"
        for old, new in WRONG[name]:
            hint = check.verdict(with_error(right[name], old, new))
            assert hint.startswith(f"{name}: not right yet. "), (old, new, hint)
            assert " raises " not in hint and " of the wrong type " not in hint, (old, new, hint)


@every(NOTEBOOKS)
def test_the_functions_to_complete_take_what_the_answers_take(path, monkeypatch):
    source = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    for answer in answers(path, monkeypatch).values():
        head = inspect.getsource(answer).partition(":\n")[0]
        assert f"{head}:\n" in source, head
