"""One algorithm per file. PyTorch is imported here, so that every command starts sooner.

Importing it makes several hundred thousand objects that stay. Python's garbage collector would go
over them again and again meanwhile, a sixth of the time. So it waits, and leaves them alone later.
"""

import gc

gc.disable()
import torch  # noqa: E402, F401

gc.freeze()
gc.enable()
