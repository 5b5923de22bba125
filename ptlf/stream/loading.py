"""Batches of stored images on the device: gathered there when the whole set fits, streamed from the file otherwise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ptlf.batch import to_device
from ptlf.stream.task import Images


class ImageSource:
    """`gather(indices)` gives (B, H, W, 3) uint8 on the device."""

    def __init__(self, images: Images, device: torch.device, resident: bool | None = None) -> None:
        self.device = device
        self.labels = torch.from_numpy(np.ascontiguousarray(images.labels))
        self.resident = fits(images.pixels.nbytes, device) if resident is None else resident
        self._pixels = images.pixels
        self._held = torch.from_numpy(np.array(images.pixels)).to(device) if self.resident else None

    def gather(self, indices: Tensor) -> Tensor:
        if self._held is not None:
            return self._held[to_device(indices, self.device)]
        return to_device(torch.from_numpy(self._pixels[indices.numpy()]), self.device)


def fits(size: int, device: torch.device) -> bool:
    """Half of the free GPU memory may hold images. On the CPU the file itself is mapped memory: nothing to copy."""
    if device.type != "cuda":
        return False
    return size < torch.cuda.mem_get_info(device)[0] // 2
