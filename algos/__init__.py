"""One algorithm per file."""
import os

# Only for --torch-threads 2 or more: a thread that waits for another sleeps at once. By
# default it spins, and beside another busy process a run then takes up to 100 times as
# long.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
