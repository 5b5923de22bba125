"""Named random generators whose state can be stored in a checkpoint."""

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ptlf.core.errors import UserError


class Randomness:
    """Named CPU generators, each seeded from (seed, name): drawing from one does not affect another."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[str, torch.Generator] = {}

    def __getitem__(self, name: str) -> torch.Generator:
        if name not in self._generators:
            self._generators[name] = torch.Generator().manual_seed(derived_seed(self.seed, name))
        return self._generators[name]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, generator in self._generators.items():
            if name not in state:  # not used yet when the state was saved
                generator.manual_seed(derived_seed(self.seed, name))
        for name, value in state.items():
            self[name].set_state(value)


def derived_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


_seeding = threading.RLock()


@contextmanager
def seeded(seed: int, name: str, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generators (CPU, and `device` if it is a GPU) from (seed, name); restore them afterwards.
    A second thread is refused: both would draw from them."""
    if not _seeding.acquire(blocking=False):
        what = "torch's random numbers are the process's, and another thread trains or builds an encoder with them"
        raise UserError(f"{what}; wait until it is done, or use a process of its own")
    gpus = [device] if device is not None and device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(derived_seed(seed, name))
            yield
    finally:
        _seeding.release()
