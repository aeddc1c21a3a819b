"""One algorithm per file. Importing `utils` first makes PyTorch's import faster."""

import utils  # noqa: F401
