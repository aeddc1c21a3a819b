"""Random numbers: seeds for each use and rank, and the generators that --resume restores."""

import random

import numpy as np
import torch

from utils import mpi


def seed_of(run_seed: int, stream: int, step: int = 0) -> int:
    """Return a seed for one stream of random numbers of this rank, independent of all others.

    Streams: 0 PyTorch, 1 training environments, 2 evaluation. A vector environment adds 0, 1, ...
    to it, one for each of its environments. `step` is where a resumed run starts again.
    """
    sequence = np.random.SeedSequence([run_seed, mpi.rank()], spawn_key=(stream, step))
    return int(sequence.generate_state(1)[0]) >> 1  # room to add in 32 bits


def seed_all(seed: int) -> None:
    """Seed PyTorch, and the two generators by which an environment may draw but should not."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def random_state(device: torch.device) -> dict:
    """Return the state of these generators as plain values and tensors, for a checkpoint."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    name, numbers, *rest = np.random.get_state()  # noqa: NPY002
    return {"rng": torch.get_rng_state(), "cuda_rng": cuda,
            "env_rng": (random.getstate(), (name, numbers.tolist(), *rest))}


def set_random_state(saved: dict, device: torch.device) -> None:
    """Continue from what `random_state` returned."""
    torch.set_rng_state(saved["rng"])
    random.setstate(saved["env_rng"][0])
    np.random.set_state(saved["env_rng"][1])  # noqa: NPY002
    if device.type == "cuda" and saved["cuda_rng"] is not None:
        torch.cuda.set_rng_state(saved["cuda_rng"], device)
