"""Build the reading site of this project, without a network.

    python -m docs      writes docs/_build/index.html, to open in a browser

The site is made from the algorithm files, docs/equations.toml, the published
runs, the planted bugs and the notebooks. Notebooks are shown with the outputs
stored in them, which pytest -m notebooks compares with new ones.
"""
import argparse
import importlib.util
import sys
from pathlib import Path

OUT = Path(__file__).resolve().parent / "_build"
NEEDED = ("sphinx", "furo", "myst_nb", "latex2mathml", "ziamath")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: docs/_build)")
    asked = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return refuse(f"{', '.join(missing)} missing: pip install -e '.[docs]'")
    from docs.build import build  # after the check: it imports what may be missing
    try:
        warnings = build(asked.out)
    except FileExistsError as error:
        return refuse(f"--out: {error}")
    print(f"{warnings}{asked.out / 'index.html'}", flush=True)
    return 0


def refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
