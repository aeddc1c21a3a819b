"""Build the reading site of this project, without a network.

    python -m docs                      writes docs/_build/index.html
    python -m docs --serve --port 8000  and shows it on 127.0.0.1

The site is made from the algorithm files, docs/equations.toml, the published
runs, the planted bugs and the notebooks. Notebooks are shown with the outputs
stored in them, which pytest -m notebooks compares with new ones.
"""
import argparse
import importlib.util
import sys
import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

OUT = Path(__file__).resolve().parent / "_build"
NEEDED = ("sphinx", "furo", "myst_nb", "latex2mathml", "ziamath")


class Quiet(SimpleHTTPRequestHandler):
    """Serve files without a line for each."""

    def log_message(self, *args):
        pass


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="show the site on 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="port of --serve (default: 8000)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: docs/_build)")
    asked = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return refuse(f"{', '.join(missing)} missing: pip install -e '.[docs]'")
    server = None
    if asked.serve:
        handler = partial(Quiet, directory=str(asked.out))
        try:
            server = ThreadingHTTPServer(("127.0.0.1", asked.port), handler)
        except (OSError, OverflowError) as error:
            return refuse(f"--port {asked.port}: {error}; choose another port")
    from docs.build import build  # after the check: it imports what may be missing
    try:
        warnings = build(asked.out)
    except FileExistsError as error:
        return refuse(f"--out: {error}")
    print(f"{warnings}{asked.out / 'index.html'}", flush=True)
    if server:
        address = f"http://127.0.0.1:{asked.port}/"
        print(f"{address}   (Ctrl-C ends)", flush=True)
        webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.server_close()
    return 0


def refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
