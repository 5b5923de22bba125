"""Batches of stored images on the device: indexed there if the whole set fits, else read ahead from the file."""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ptlf.core.batch import to_device
from ptlf.core.errors import UserError
from ptlf.core.files import open_regular
from ptlf.stream.disk import disk_errors
from ptlf.stream.task import Images

AHEAD = 2  # batches read in advance
READERS = 8  # threads that read one batch; disks are faster with several requests at once


class ImageSource:
    """`gather(indices)` returns (B, H, W, 3) uint8 on the device; `batches(order)` yields a batch per index tensor."""

    def __init__(self, images: Images, device: torch.device, resident: bool | None = None) -> None:
        self.device, pixels = device, images.pixels
        self.labels = torch.from_numpy(np.ascontiguousarray(images.labels))
        gpu = device.type == "cuda"
        if resident is None:  # in half of the free GPU memory; a CPU uses the memory map
            resident = gpu and pixels.nbytes < torch.cuda.mem_get_info(device)[0] // 2
        self._pixels = pixels
        self._held = torch.from_numpy(np.array(pixels)).to(device) if resident else None
        # Only a complete read-only memory map of a file is read from the file itself.
        mapped = isinstance(pixels, np.memmap) and isinstance(pixels.base, mmap.mmap) and pixels.mode == "r"
        self._file = PixelFile(pixels) if mapped and not resident else None  # type: ignore[arg-type]
        # Copies run on their own CUDA stream. Created once: the caching allocator has a memory pool per stream.
        self._copy_stream = torch.cuda.Stream(device) if gpu and not resident else None

    def gather(self, indices: Tensor) -> Tensor:
        if self._held is not None:
            return self._held[to_device(indices, self.device)]
        pixels = self._empty(len(indices))
        self._read(indices, pixels)
        return pixels.to(self.device, non_blocking=True)

    @contextmanager
    def batches(self, order: Iterable[Tensor]) -> Iterator[Iterator[Tensor]]:
        """`gather` of each index tensor in turn, read ahead by threads (which end with the block) if need be."""
        if self._held is not None or (self._file is None and self.device.type == "cpu"):
            yield map(self.gather, order)
            return
        readers = ThreadPoolExecutor(READERS, "reader")
        try:
            yield self._read_ahead(iter(order), readers)
        finally:
            readers.shutdown(cancel_futures=True)

    def _read_ahead(self, order: Iterator[Tensor], readers: ThreadPoolExecutor) -> Iterator[Tensor]:
        """The threads only fill host memory: a CUDA call in another thread would invalidate a graph capture."""
        started = deque(self._start(indices, readers) for indices in islice(order, AHEAD))
        used: deque[torch.cuda.Event] = deque()
        while started:
            started.extend(self._start(indices, readers) for indices in islice(order, 1))
            yield self._finish(*started.popleft())
            if self._copy_stream is not None:  # stay at most one step ahead of the GPU, to bound its memory
                used.append(torch.cuda.current_stream(self.device).record_event())
                if len(used) > 1:
                    used.popleft().synchronize()

    def _start(self, indices: Tensor, readers: ThreadPoolExecutor) -> tuple[Tensor, list[Future[None]]]:
        pixels = self._empty(len(indices))
        parts = zip(indices.chunk(READERS), pixels.chunk(READERS), strict=True)
        return pixels, [readers.submit(self._read, *part) for part in parts]

    def _finish(self, pixels: Tensor, parts: list[Future[None]]) -> Tensor:
        """The batch on the device. `record_stream` keeps the copy until the training stream has used it."""
        for part in parts:
            part.result()
        if self._copy_stream is None:
            return pixels
        with torch.cuda.stream(self._copy_stream):
            images = pixels.to(self.device, non_blocking=True)
        training = torch.cuda.current_stream(self.device)
        training.wait_stream(self._copy_stream)
        images.record_stream(training)
        return images

    def _empty(self, count: int) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.empty(count, *self._pixels.shape[1:], dtype=torch.uint8, pin_memory=pinned)

    def _read(self, indices: Tensor, out: Tensor) -> None:
        if self._file is not None:
            self._file.read(indices.tolist(), out.numpy())
        else:
            out.numpy()[:] = self._pixels[indices.numpy()]


Sources = Callable[[Images], ImageSource]


def image_sources(device: torch.device, resident: bool | None = None) -> Sources:
    """An ImageSource for each set of images. The latest are kept: training and test images are used in turn."""
    return lru_cache(3)(partial(ImageSource, device=device, resident=resident))


class PixelFile:
    """The open file behind memory-mapped pixels. A failed read raises; one of mapped memory kills the process."""

    def __init__(self, pixels: np.memmap) -> None:
        self.path, self.begin, self.bytes = Path(str(pixels.filename)), pixels.offset, pixels.strides[0]
        with open_regular(self.path) as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, rows: list[int], out: np.ndarray) -> None:
        for row, image in zip(rows, out, strict=True):
            with disk_errors(self.path):
                read = os.preadv(self.descriptor, [image], self.begin + row * self.bytes)
            if read < self.bytes:
                cut = f"{self.path} is truncated: it holds {read} of the {self.bytes} bytes of image {row}"
                raise UserError(f"{cut}; `ptlf data verify` checks packed sets")
