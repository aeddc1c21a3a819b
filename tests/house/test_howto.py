"""The Python in docs/howto.md runs as it stands, with fewer steps."""
import re
from pathlib import Path

from tests.helpers import steps
from tests.house.tree import ROOT


def test_the_python_of_the_page_runs(capsys):
    text = (ROOT / "docs/howto.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    few = code.replace("1e5", "4096").replace("2e5", "6144")
    assert few.count("4096") == few.count("6144") == 1
    names = {}
    exec(compile(few, "howto.md", "exec"), names)
    assert names["steps"] == [2048, 4096] and len(names["losses"]) == 2
    assert steps("runs/mine") == [2048, 4096, 6144]
    assert Path(names["agent"].cfg.run_dir) == Path("runs/mine")


def test_the_lines_to_change_are_there():
    """The page names them; they have to stand in the files."""
    envs = (ROOT / "utils/envs.py").read_text(encoding="utf-8")
    assert envs.count('"vectorization_mode": "sync"') == 1 and "def nature_cnn(" in envs
    assert all((ROOT / f"algos/{name}.py").read_text(encoding="utf-8").count(layer) == 1
               for name, layer in (("ppo", "nn.Tanh()"), ("vpg", "nn.Tanh()"), ("sac", "nn.ReLU()"),
                                   ("dqn", "nn.ReLU()"), ("ddpg", "nn.ReLU()")))
