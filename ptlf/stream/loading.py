"""Batches of stored images on the device: gathered there when the whole set fits, read ahead from the file if not."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ptlf.core.batch import to_device
from ptlf.core.errors import UserError
from ptlf.stream.disk import disk_errors
from ptlf.stream.task import Images

AHEAD = 2  # batches that are read while one is used
READERS = 8  # threads that share a batch: a disk is fastest with several reads at once


class ImageSource:
    """`gather(indices)` gives (B, H, W, 3) uint8 on the device, `batches(order)` one such after the other."""

    def __init__(self, images: Images, device: torch.device, resident: bool | None = None) -> None:
        self.device = device
        self.labels = torch.from_numpy(np.ascontiguousarray(images.labels))
        self.resident = fits(images.pixels.nbytes, device) if resident is None else resident
        self._pixels = images.pixels
        self._held = torch.from_numpy(np.array(images.pixels)).to(device) if self.resident else None
        self._file = None if self.resident else open_file(images.pixels)
        # For copies beside the training. One for good: torch keeps memory apart by stream.
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and not self.resident else None

    def gather(self, indices: Tensor) -> Tensor:
        if self._held is not None:
            return self._held[to_device(indices, self.device)]
        pixels = self._room(len(indices))
        self._read(indices, pixels)
        return pixels.to(self.device, non_blocking=True)

    @contextmanager
    def batches(self, order: Iterable[Tensor]) -> Iterator[Iterator[Tensor]]:
        """What `gather` gives for each of these in turn. Where it would have to wait for the disk or for the copy to
        the GPU, the next ones are read meanwhile, by threads that end with the block."""
        if self._held is not None or (self._file is None and self.device.type == "cpu"):
            yield map(self.gather, order)
            return
        readers = ThreadPoolExecutor(READERS, "reader")
        try:
            yield self._read_ahead(iter(order), readers)
        finally:
            readers.shutdown(cancel_futures=True)

    def _read_ahead(self, order: Iterator[Tensor], readers: ThreadPoolExecutor) -> Iterator[Tensor]:
        """The readers only fill memory: a CUDA call of another thread would break a capture."""
        started = deque(self._start(indices, readers) for indices in islice(order, AHEAD))
        used: deque[torch.cuda.Event] = deque()
        while started:
            started.extend(self._start(indices, readers) for indices in islice(order, 1))
            yield self._finish(*started.popleft())
            if self._side is not None:  # the host stays one step ahead of the GPU, or batches would pile up there
                used.append(torch.cuda.current_stream(self.device).record_event())
                if len(used) > 1:
                    used.popleft().synchronize()

    def _start(self, indices: Tensor, readers: ThreadPoolExecutor) -> tuple[Tensor, list[Future[None]]]:
        pixels = self._room(len(indices))
        parts = zip(indices.chunk(READERS), pixels.chunk(READERS), strict=True)
        return pixels, [readers.submit(self._read, *part) for part in parts]

    def _finish(self, pixels: Tensor, parts: list[Future[None]]) -> Tensor:
        """The batch on the device. torch keeps pinned memory until a copy from it is done, and with `record_stream` the
        copy until the training stream is done with it."""
        for part in parts:
            part.result()
        if self._side is None:
            return pixels
        with torch.cuda.stream(self._side):
            images = pixels.to(self.device, non_blocking=True)
        training = torch.cuda.current_stream(self.device)
        training.wait_stream(self._side)
        images.record_stream(training)
        return images

    def _room(self, count: int) -> Tensor:
        shape = (count, *self._pixels.shape[1:])
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _read(self, indices: Tensor, out: Tensor) -> None:
        if self._file is not None:
            self._file.read(indices.tolist(), out.numpy())
        else:
            out.numpy()[:] = self._pixels[indices.numpy()]


class PixelFile:
    """The file behind mapped pixels, held open. Where it cannot be read there is an exception; touching the mapped
    memory would end the process."""

    def __init__(self, pixels: np.memmap) -> None:
        self.path, self.begin, self.bytes = Path(str(pixels.filename)), pixels.offset, pixels.strides[0]
        self.descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, rows: list[int], out: np.ndarray) -> None:
        for row, image in zip(rows, out, strict=True):
            got, place = 0, memoryview(image).cast("B")
            with disk_errors(self.path):
                at = self.begin + row * self.bytes
                while got < self.bytes and (more := os.preadv(self.descriptor, [place[got:]], at + got)):
                    got += more
            if got < self.bytes:
                raise UserError(
                    f"{self.path} has been cut short: of image {row} it holds {got} of {self.bytes} bytes; "
                    "`ptlf data verify` checks packed sets"
                )


def open_file(pixels: np.ndarray) -> PixelFile | None:
    """None for what is no file mapped as a whole for reading, or where there is no `preadv` (Windows)."""
    if not isinstance(pixels, np.memmap) or not isinstance(pixels.base, mmap.mmap) or pixels.mode != "r":
        return None
    return PixelFile(pixels) if pixels.flags.c_contiguous and hasattr(os, "preadv") else None


def fits(size: int, device: torch.device) -> bool:
    """Half of the free GPU memory may hold images. On the CPU the file itself is mapped memory: nothing to copy."""
    if device.type != "cuda":
        return False
    return size < torch.cuda.mem_get_info(device)[0] // 2
