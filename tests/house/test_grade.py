"""notebooks/grade.py: one line per student, whatever was handed in."""
import csv
import os
import sys

import nbformat
import pytest

from tests.helpers import run
from tests.house.tree import ROOT

ANSWERS = (ROOT / "notebooks/spoilers/answers_1.py").read_text(encoding="utf-8")
LOOP = "def kl(logits_old, logits):\n    while True:\n        pass"
TYPED = "print('kl: right')"


def hand_in(place, *cells):
    place.parent.mkdir(parents=True, exist_ok=True)
    cells = [nbformat.v4.new_code_cell(cell) for cell in ("import exercises_1", *cells)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), place)


@pytest.mark.notebooks
def test_every_student_gets_a_line(tmp_path):
    name = "1_policy_gradient_to_ppo.ipynb"
    hand_in(tmp_path / "in/ada" / name, ANSWERS)
    hand_in(tmp_path / "in/bob" / name, "1 / 0", TYPED, "def kl(*logits):\n    return None",
            "def clip_slope(ratio, adv, clip):\n    return adv")
    hand_in(tmp_path / "in/cleo.ipynb", ANSWERS, LOOP)
    hand_in(tmp_path / "in/dan.ipynb", ANSWERS, "import os\nos._exit(1)")
    (tmp_path / "in/eve").mkdir()
    (tmp_path / "in/fay").mkdir()
    (tmp_path / "in/fay" / name).write_text("{")
    (tmp_path / "in/gus.ipynb").write_text("hello")
    hand_in(tmp_path / "in/hal" / name, ANSWERS, "import sys\nsys.modules['exercises_1'] = None")
    hand_in(tmp_path / "in/hal/1_again.ipynb")
    env = os.environ | {"JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter")}
    done = run([sys.executable, ROOT / "notebooks/grade.py", tmp_path / "in", tmp_path / name,
                "--seconds", 20], env=env)
    assert f"hal: {tmp_path / 'in/hal' / name} is graded, " in done.stderr
    head, *lines = csv.reader(done.stdout.splitlines())
    assert head == ["student", "right", "1.exact_gradient", "1.returns_to_go", "1.advantages",
                    "1.clip_slope", "1.kl"]
    assert {who: words for who, *words in lines} == {
        "ada": ["5"] + ["right"] * 5, "bob": ["0"] + ["unanswered"] * 3 + ["wrong", "unanswered"],
        "cleo": ["4"] + ["right"] * 4 + ["timeout"], "dan": ["0"] + ["crashed"] * 5,
        "eve": ["0"] + ["missing"] * 5, "fay": ["0"] + ["unreadable"] * 5,
        "gus": ["0"] + ["unreadable"] * 5, "hal": ["0"] + ["error"] * 5,
        str(tmp_path / name).removesuffix(".ipynb"): ["0"] + ["missing"] * 5}
