"""Run students' notebooks and print which exercises are right: one csv line per student.

    python notebooks/grade.py submissions > grades.csv

A folder holds a folder or a notebook per student, with the student's name. Each notebook runs anew
in an empty folder; then our checks judge its functions. An exercise is right, wrong, unanswered,
timeout, error (what it needs failed, such as an import that took too long), crashed (the kernel
died), unreadable (the file is no notebook) or missing (no file).
Students' code runs with your rights, so use a container. It could even replace the checks.
"""
import argparse
import asyncio
import csv
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
EXERCISES = {path.stem[-1]: re.findall(r"^@exercise\ndef (\w+)", path.read_text("utf-8"), re.M)
             for path in sorted(HERE.glob("exercises_*.py"))}
WORDS = {"right": "right", "not answered yet": "unanswered"}


def students(path):
    """Yield (student, file or folder) for what was handed in."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        inside = file.relative_to(path).parts or [str(path)]
        if (file.is_dir() or file.suffix == ".ipynb") and ".ipynb_checkpoints" not in file.parts:
            yield inside[0].removesuffix(".ipynb"), file


def read(file):
    """Return the number of a notebook ("" if unknown), and the notebook, or why there is none."""
    try:
        notebook = nbformat.read(file, as_version=4)
        text = "\n".join(cell.source for cell in notebook.cells)
    except Exception:  # whatever a student hands in
        notebook, text = "unreadable" if file.exists() else "missing", ""
    number = re.search(r"^import exercises_([1-7])", text, re.M) or re.match("([1-7])_", file.name)
    return number[1] if number else "", notebook


def grade(file, number, seconds):
    """Return the verdicts on the exercises of one notebook, in order."""
    notebook, otherwise = read(file)[1] if file else "missing", "crashed"
    if isinstance(notebook, str):
        return [notebook] * len(EXERCISES[number])
    checks = [nbformat.v4.new_code_cell(f"import exercises_{number} as e\ne.{name}.verdict({name})")
              for name in EXERCISES[number]]
    notebook.cells, notebook.metadata = notebook.cells + checks, {}  # our Python, no other kernel
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        client = NotebookClient(notebook, timeout=seconds, interrupt_on_timeout=True,
                                resources={"metadata": {"path": folder}}, allow_errors=True)
        try:
            asyncio.run(asyncio.wait_for(client.async_execute(), 10 * seconds))
        except Exception as error:  # DeadKernelError, or a loop that ignores interrupts
            otherwise = "timeout" if isinstance(error, TimeoutError) else "crashed"
    told = [[each for each in cell.outputs if each.output_type in ("execute_result", "error")]
            for cell in checks]
    return [word(outputs[0], name) if outputs else otherwise
            for outputs, name in zip(told, EXERCISES[number])]


def word(output, name):
    """Return the verdict that a check of the exercise `name` has printed, or what its error means.

    An answer that raises an error is wrong: the check says so itself.
    """
    if output.output_type == "execute_result":
        return WORDS.get(output.data["text/plain"].strip("'").partition(": ")[2], "wrong")
    if output.ename == "NameError" and f"'{name}'" in output.evalue:
        return "unanswered"
    return "timeout" if output.ename == "KeyboardInterrupt" else "error"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--seconds", type=int, default=120, help="per cell; ten times for all")
    parser.add_argument("--jobs", type=int, default=1, help="students at once")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    found = {}  # student -> number of the notebook -> file
    for path in args.paths:
        if not path.exists() and path.suffix != ".ipynb":
            parser.error(f"there is no folder {path}")
    for who, file in (pair for path in args.paths for pair in students(path)):
        own = found.setdefault(who, {})
        if file.suffix == ".ipynb":
            number = read(file)[0]
            if number in own:
                print(f"{who}: {file} is graded, {own[number]} is not", file=sys.stderr)
            own[number] = file
    numbers = sorted({n for files in found.values() for n in files if n}) or list(EXERCISES)
    print("student", "right", *(f"{n}.{x}" for n in numbers for x in EXERCISES[n]), sep=",")
    with ThreadPoolExecutor(args.jobs) as pool:
        for who, row in zip(found, pool.map(lambda who: sum(
                (grade(found[who].get(n, found[who].get("")), n, args.seconds) for n in numbers),
                []), found)):
            csv.writer(sys.stdout, lineterminator="\n").writerow([who, row.count("right"), *row])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
