"""One algorithm per file. A file imports PyTorch itself, and `utils` imports it faster."""

import utils  # noqa: F401
