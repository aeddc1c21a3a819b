"""One algorithm per file."""

import utils  # noqa: F401  how threads wait is set before PyTorch is loaded
