"""Replay memory on the device: a reservoir over every image seen, each with the second view it was trained with."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.batch import Batch
from ptlf.core.memory import check_fits
from ptlf.core.settings import key
from ptlf.model import PLAIN, Accelerator
from ptlf.views import UNIFORMS_PER_VIEW, View


@dataclass
class MemoryConfig:
    size: int = key(256, "images in the replay memory", ge=1)
    images: str | None = key(None, "folder or packed set that fills it before the first task; null = it begins empty")


class Memory(nn.Module):
    """A reservoir sample: every image seen so far is kept with equal probability; an epoch's repeats count as seen.

    The host decides (`slots`). For copies of a fixed shape the buffers have a spare row, for what is not kept.
    """

    def __init__(
        self, size: int, image_size: int, view_size: int, view: View, outputs: int = 0, accelerator: Accelerator = PLAIN
    ) -> None:
        """`view` is the augmentation of `fresh`; `outputs` the length of a vector to store with each image."""
        super().__init__()
        needed = (size + 1) * (2 * 3 * image_size**2 + 4 * 3 * view_size**2 + 4 * outputs)
        check_fits(f"memory.size {size}", needed)
        self.size, self.view, self.view_size, self.accelerator = size, view, view_size, accelerator
        self.images = nn.Buffer(torch.zeros(size + 1, image_size, image_size, 3, dtype=torch.uint8))
        self.views = nn.Buffer(torch.zeros(size + 1, 3, view_size, view_size))
        self.outputs = nn.Buffer(torch.zeros(size + 1, outputs))
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.old_images, self.old_seen = nn.Buffer(torch.zeros_like(self.images)), nn.Buffer(self.seen.clone())
        self.count = 0  # `seen` on the host: asking the device would make it wait
        self.old_count = 0  # `old_seen` on the host
        self.register_load_state_dict_post_hook(Memory._count)

    def __len__(self) -> int:
        return min(self.count, self.size)

    def slots(self, batch: int, generator: torch.Generator) -> Tensor:
        """Where each image of a batch goes, (B,) int64; `size` means nowhere. The last to claim a slot gets it."""
        number = torch.arange(self.count, self.count + batch)  # images seen before each
        chance = torch.rand(batch, generator=generator, dtype=torch.float64)
        slots = torch.where(number < self.size, number, (chance * (number + 1)).long()).clamp(max=self.size)
        last = torch.zeros(self.size + 1, dtype=torch.int64).scatter_reduce_(0, slots, number, "amax")
        self.count += batch
        return torch.where(last[slots] > number, self.size, slots)

    def draw(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        """What `fresh` needs for `batch` images: which ones, drawn without replacement, in several rounds where the
        memory holds fewer (the spare row while it is empty); and the randomness of their augmentation."""
        rounds = -(-batch // len(self)) if len(self) else 0
        picks = [torch.randperm(len(self), generator=generator) for _ in range(rounds)]
        drawn = torch.cat(picks)[:batch] if picks else torch.full((batch,), self.size)
        return {"picks": drawn, "memory_uniforms": torch.rand(batch, UNIFORMS_PER_VIEW, generator=generator)}

    def add(self, batch: Batch, slots: Tensor, outputs: Tensor | None = None) -> None:
        """Every process keeps the same memory, so all get the rows of the whole batch: the shape is fixed."""
        views = batch.views[-1].detach().to(self.views.dtype)
        slots, images, views = (processes.all_gather_rows(rows) for rows in (slots, batch.images, views))
        self.images.index_copy_(0, slots, images)
        self.views.index_copy_(0, slots, views)
        if outputs is not None:
            self.outputs.index_copy_(0, slots, processes.all_gather_rows(outputs))
        self.seen.add_(len(batch) * processes.world_size())

    def _count(self, incompatible_keys: object) -> None:
        self.count, self.old_count = int(self.seen), int(self.old_seen)

    def fill(self, images: Tensor, views: Tensor, outputs: Tensor | None, seen: int) -> None:
        """Begin with a sample of `seen` images: images (n, H, W, 3), with n the lesser of `seen` and the size."""
        rows = len(images)
        self.images[:rows], self.views[:rows] = images, views
        if outputs is not None:
            self.outputs[:rows] = outputs
        self.seen.fill_(seen)
        self.count = seen

    def fresh(self, picks: Tensor, uniforms: Tensor) -> Tensor:
        """A new augmentation of the picked images, (B, 3, S, S)."""
        return self.accelerator.augment(self.images[picks], uniforms, self.view, self.view_size)

    def begin_task(self) -> None:
        """From here on, `past` is what the memory holds now."""
        self.old_images.copy_(self.images)
        self.old_seen.copy_(self.seen)
        self.old_count = self.count

    def past(self) -> Tensor:
        """The images held when the task began, (len, H, W, 3) uint8: none of the task's own."""
        return self.old_images[: min(self.old_count, self.size)]
