"""Try the environments of other packages that docs/howto.md lists, and compare with its table.

    python benchmarks/packages.py              # all of them: an hour
    python benchmarks/packages.py minigrid     # the rows with this word

Install the packages first, in an environment of their own. Each row is trained for 4,096 steps,
unless it says more, and then one episode is drawn. Status 1: a row is not as the table says.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rows():
    """Return [package, command, spaces, trains, film, note] for each row of the table."""
    text = (ROOT / "docs/howto.md").read_text()
    table = re.search("<!-- packages -->\n(.*?)<!-- end -->", text, re.S)[1]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]


def run(*words) -> tuple[int, str]:
    """Return the status of a module of this project, and the last line that it printed."""
    try:
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, text=True, timeout=600,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        return 124, "it took more than ten minutes"
    return done.returncode, (done.stdout.splitlines() or [""])[-1]


def try_row(command: str) -> tuple[str, str, str]:
    """Return what the cells "trains" and "film" of a row should be, and what was said last."""
    algo, *flags = shlex.split(command.strip("`"))
    with tempfile.TemporaryDirectory() as folder:
        status, said = run(f"algos.{algo}", "--run-dir", f"{folder}/run",
                           "--total-steps", "4096", *flags)
        if status == 2 and not Path(folder, "run").exists():
            return "refused", "", said
        if status:
            return "fails", "", said
        status, said = run("utils.play", f"{folder}/run", "--episodes", "1", "--max-steps", "1000",
                           "--video", f"{folder}/film.gif")
        return "yes", "no" if status else "yes", said


def main(words):
    wrong = 0
    for package, command, _, *expected, _ in rows():
        if all(word in package + command for word in words):
            *found, said = try_row(command)
            wrong += found != expected
            print(f"{'as listed' if found == expected else 'OTHERWISE'}: {package}, {command}: "
                  f"{', '.join(filter(None, found))}; {said}", flush=True)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
