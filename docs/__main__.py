"""Build the reading site of this project, without a network.

    python -m docs      writes docs/_build/index.html, to open in a browser

The site is made from the algorithm files, docs/equations.toml, the published
runs, the planted bugs and what they cost, and the notebooks. Notebooks are shown
with the outputs stored in them, which pytest -m notebooks compares with new ones.
"""
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from utils.errors import UsageError
from utils.command import program, read_command

NEEDED = ("sphinx", "furo", "myst_nb", "latex2mathml", "ziamath")


@dataclass(frozen=True)
class Site:
    out: str = "docs/_build"  # folder of the site


def main(site: Site) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing: pip install -e '.[docs]'")
    from docs.build import build  # after the check: it imports what may be missing
    try:
        warnings = build(Path(site.out))
    except FileExistsError as error:
        raise UsageError(f"--out: {error}") from None
    print(f"{warnings}{Path(site.out, 'index.html')}", flush=True)


if __name__ == "__main__":
    with program():
        main(read_command(Site, __doc__, "python -m docs"))
