"""One algorithm per file."""
import os
import signal
import sys
from pathlib import Path

import utils

found = utils.__file__ or utils.__path__
if found != str(Path(__file__).parents[1] / "utils" / "__init__.py"):
    raise ImportError(f"algos needs the utils beside it, but Python found {found}")

# Only for --torch-threads 2 or more: a thread that waits for another sleeps at once. By
# default it spins, and beside another busy process a run then takes up to 100 times as
# long.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

if sys.argv[0] == "-m":  # python -m algos.ppo: until it starts, Ctrl-C ends it silently
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for word in sys.orig_argv[1:3]:
        file = Path(__file__).with_name(f"{word.removeprefix('algos.')}.py")
        if word.startswith("algos.") and not file.exists():
            sys.exit(f"error: there is no {word}; python -m algos lists them")
