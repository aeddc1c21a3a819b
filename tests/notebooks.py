"""Run the notebooks and store them with what they print and draw.

    python -m tests.notebooks             all of them, in some minutes
    python -m tests.notebooks 1 4         only these

Stored are only the outputs. Counters, times and other metadata of the run would
make every diff large. Pictures get 64 colours, which makes them small.
pytest -m notebooks tells whether a notebook still prints what is stored. In a
cell with the tag "trained", numbers come from training, where rounding
decides. They differ between processors and are not compared.
"""
import base64
import io
import os
import re
import sys
from pathlib import Path

import nbformat
import numpy as np
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image
from traitlets import default

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?")
OPEN = re.compile(r"\b(?:helps|harms|None|True|False)\b")  # words that depend on such numbers


class ThisPython(AsyncKernelManager):
    """Run the kernel in this interpreter, whatever other kernels are installed."""

    @default("kernel_spec_manager")
    def without_folders(self):
        return KernelSpecManager(kernel_dirs=[])


def execute(path, folder):
    """Run a notebook in a folder and return it with its outputs. An error in a cell is raised."""
    client = NotebookClient(nbformat.read(path, as_version=4), kernel_manager_class=ThisPython,
                            timeout=1500, resources={"metadata": {"path": str(folder)}})
    return client.execute()


# ---- What is stored

def strip(notebook):
    """Leave of a notebook that has run what is stored, in place."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {"tags": cell.metadata.tags} if "tags" in cell.metadata else {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [small(output) for output in joined(cell.outputs)]


def joined(outputs):
    """Return outputs with one stream of text per cell, in its first place, without stderr.

    Where Jupyter splits a stream depends on time.
    """
    kept, stream = [], None
    for output in outputs:
        if output.output_type != "stream":
            kept.append(output)
        elif output.name == "stdout" and stream:
            stream.text += output.text
        elif output.name == "stdout":
            stream = nbformat.v4.new_output("stream", text=output.text)
            kept.append(stream)
    return kept


def small(output):
    """Return an output without metadata, its picture with 64 colours."""
    if output.output_type == "stream":
        return output
    data = dict(output.data)
    if "image/png" in data:
        picture, file = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))), io.BytesIO()
        if picture.mode != "P":  # else it has been stored before
            picture.convert("RGB").quantize(64).save(file, "png", optimize=True)
            data["image/png"] = base64.b64encode(file.getvalue()).decode()
    return nbformat.v4.new_output(output.output_type, data)


# ---- What is compared

def text_of(cell):
    """Return all text that a cell shows."""
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "")
                   for output in joined(cell.get("outputs", [])))


def differs(stored, new, trained=False):
    """Return whether two texts differ by more than spaces and the last digits of numbers.

    If `trained`, numbers may have any value.
    """
    words = [NUMBER.sub("#", " ".join(text.split())) for text in (stored, new)]
    if trained:
        words = [OPEN.sub("#", text) for text in words]
        return words[0] != words[1]
    numbers = [[float(number.replace(",", "")) for number in NUMBER.findall(text)]
               for text in (stored, new)]
    return words[0] != words[1] or not np.allclose(*numbers, rtol=0.02, atol=0.001)


def changed_cells(stored, new):
    """Return "cell 3 printed ..., stored is ..." for each cell whose text has changed."""
    return [f"cell {k} printed\n{text_of(two)}\nstored is\n{text_of(one)}"
            for k, (one, two) in enumerate(zip(stored.cells, new.cells))
            if differs(text_of(one), text_of(two), "trained" in one.metadata.get("tags", []))]


def main(numbers):
    os.environ["PYTHONPATH"] = str(ROOT)  # the kernel imports this tree
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if not numbers or path.name.split("_")[0] in numbers:
            done = execute(path, path.parent)
            strip(done)
            nbformat.write(done, path)
            print(path.name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
