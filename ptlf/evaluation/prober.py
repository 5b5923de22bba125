"""The probes on a stream: features of the splits' images, and an accuracy for every split that counts by now."""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError, short_repr, warn
from ptlf.core.phases import Advance, Phase, silent
from ptlf.core.registry import Registry
from ptlf.core.settings import key
from ptlf.evaluation.probes import OWN, KnnClass, KnnTask, Linear, Probe, ProbeConfig
from ptlf.stream import EvalSplit, Images, Stream
from ptlf.stream.loading import Sources, image_sources
from ptlf.views import View, draw
from ptlf.views.operations import crop

Row = list[float | None]
Labelled = tuple[Tensor, Tensor]  # features (N, D) and labels (N,)
Prepare = Callable[[Tensor], Tensor]  # stored images as the encoder's input
Bank = tuple[Images, np.ndarray]  # images, and the indices of those that count

CROPS = View(crop_scale=(0.08, 1.0))  # random crops and flips, as in CaSSLe's linear probe

# To add a probe: a subclass of `Probe`, and its name here.
PROBES: Registry[type[Probe]] = Registry(
    "probe", "ptlf.probes", Probe, {"knn_task": KnnTask, "knn_class": KnnClass, "linear": Linear}
)


@dataclass
class EvaluationConfig:
    enabled: bool = key(True, "test the encoder after every task")
    batch: int = key(512, "images per forward", ge=1)
    tasks: str = key("all", "whose test images are used after a task: all, last:N, or sample:N, the newest among them")
    reference: str | None = key(None, "labelled folder or packed set: what the encoder knew before; null = none")
    reference_test: float = key(0.2, "share of it held out for testing if it has no test images", gt=0, le=0.9)
    gallery: bool = key(True, "keep nearest images and a map of the features, before and after, for the report")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"all|(last|sample):[1-9]\d*", self.tasks):
            raise UserError(f"evaluation.tasks must be all, last:N or sample:N, as last:5, not {self.tasks!r}")

    def tested(self, splits: Sequence[EvalSplit], task: int) -> list[EvalSplit]:
        """The splits that are tested after task number `task` (from 0), if their images are there. One of no task
        always is."""
        seen = [split for split in splits if split.since <= task and split.kept]
        chosen = self.limited(sorted({split.since for split in seen if not split.always}))
        return [split for split in seen if split.always or split.since in chosen]

    def limited(self, tasks: Sequence[int]) -> list[int]:
        """Those of the tasks, oldest first, that are tested on. A sample follows from the number of tasks alone."""
        how, _, number = self.tasks.partition(":")
        if how == "all" or len(tasks) <= int(number):
            return list(tasks)
        if how == "last":
            return list(tasks[-int(number) :])
        older = np.random.default_rng(len(tasks)).choice(len(tasks) - 1, int(number) - 1, replace=False)
        return [tasks[place] for place in sorted(older)] + [tasks[-1]]


class Prober:
    """Tests an encoder on a stream's eval_splits. `prepare` turns stored images into the encoder's input.

    An encoder whose vector has a part for each task says where: `encoder.feature_slice(task)`. Only splits against
    their own task's images are tested with that part.
    """

    def __init__(
        self, stream: Stream, config: EvaluationConfig, probes: Mapping[str, ProbeConfig], prepare: Prepare,
        device: torch.device, sources: Sources | None = None,
    ) -> None:  # fmt: skip
        """probes: settings by name; those enabled are used. sources: may hold the images of the banks already."""
        self.stream, self.config, self.prepare, self.device = stream, config, prepare, device
        if not stream.eval_splits:
            raise UserError(f"stream {stream.name} has no labelled test images to evaluate on")
        if gone := [split.name for split in stream.eval_splits if not split.kept]:
            warn(f"the images of {short_repr(gone)} were deleted: these tasks stay learnt, and are tested no more")
        self.sources = sources or image_sources(device)
        chosen = [PROBES.find(name)(settings) for name, settings in probes.items() if settings.enabled]
        chosen += [variant for probe in chosen for variant in probe.variants()]
        rows = [(probe, name, bank) for probe in chosen for name, bank in probe.rows.items()]
        # On one set that belongs to no task both banks are the same: of two equal tests one stays.
        one = len(stream.eval_splits) == 1 and stream.eval_splits[0].always
        twice = [probe.settings() for probe, _, bank in rows if one and bank != OWN]
        self.rows_of = [row for row in rows if row[2] != OWN or row[0].settings() not in twice]

    def used(self, task: int) -> dict[str, dict[str, Any]]:
        """Settings of each row after task number `task` (from 0) that depend on the bank, the least of all splits'."""
        tested = self.config.tested(self.stream.eval_splits, task)
        if not tested:
            return {name: {} for _, name, _ in self.rows_of}
        splits, banks = self.banks(task)
        labels = [torch.from_numpy(images.labels[chosen]) for images, chosen in banks]
        own = [one for split, one in zip(splits, labels, strict=False) if split in tested]
        found: dict[str, dict[str, Any]] = {}
        for probe, name, bank in self.rows_of:
            each = [probe.used(one, self.tasks_seen(task)) for one in (own if bank == OWN else [torch.cat(labels)])]
            found[name] = {key: min(settings[key] for settings in each) for key in each[0]}
        return found

    def rows(self, encoder: nn.Module, task: int, phase: Phase = silent) -> dict[str, Row]:
        """A row of each accuracy matrix after task number `task` (from 0). Splits that are not tested have None, and
        are in the bank of all classes seen nevertheless."""
        splits, tasks = self.stream.eval_splits, self.tasks_seen(task)
        tested = self.config.tested(splits, task)
        rows: dict[str, Row] = {name: [None] * len(splits) for _, name, _ in self.rows_of}
        if not tested:
            return rows
        owners, banks = self.banks(task)
        encoded = self.encode(encoder, [*banks, *((split.test_images, split.test) for split in tested)], phase)
        own_banks, tests = dict(zip(owners, encoded, strict=False)), encoded[len(banks) :]
        features, labels = (torch.cat(part) for part in zip(*encoded[: len(banks)], strict=True))

        def augmented(epoch: int) -> Tensor:
            return torch.cat([made for made, _ in self.encode(encoder, banks, phase, epoch)])

        with phase("probes", len(rows) * len(tested), "scores") as advance:
            for probe, name, bank in self.rows_of:
                score = probe.fit_augmented(features, labels, tasks, augmented) if bank != OWN else None
                for split, test in zip(tested, tests, strict=True):
                    own = None if score else own_accuracy(probe, encoder, split, own_banks[split], test, tasks)
                    rows[name][splits.index(split)] = score(*test) if score else own
                    advance(1)
        return rows

    def tasks_seen(self, task: int) -> int:
        """How many, after task number `task` (from 0), with or without test images."""
        return sum(each.joined for each in self.stream.tasks[: task + 1])

    def banks(self, task: int) -> tuple[list[EvalSplit], list[Bank]]:
        """Splits whose banks are needed after task number `task`, and the banks: theirs and, for the bank of all
        classes seen, what no split has, which is training images of classes without test images."""
        shared = any(bank != OWN for _, _, bank in self.rows_of)
        seen = [split for split in self.stream.eval_splits if split.since <= task and split.kept]
        splits = seen if shared else self.config.tested(self.stream.eval_splits, task)
        banks = [(split.bank_images, split.bank) for split in splits]
        for each in (each for each in self.stream.tasks[: task + 1] if shared and each.images.kept):
            covered = [split.bank for split in seen if split.bank_images is each.images]
            rest = np.setdiff1d(each.train, np.concatenate([*covered, each.train[:0]]))
            if each.classes and len(rest):
                banks.append((each.images, rest))
        return splits, banks

    def ahead(self, encoder: nn.Module, tasks: Container[int], phase: Phase = silent) -> dict[str, Row]:
        """Accuracies on the splits of tasks that are yet to come, by row, for forward transfer. As many tasks count as
        seen as right after each, so that the figures do not depend on what comes later still."""
        owners = {name: probe for probe, name, bank in self.rows_of if probe.forward and bank == OWN}
        splits = [split for split in self.stream.eval_splits if split.since in tasks]
        if not owners or not splits:
            return {name: [] for name in owners}
        banks, tests = ([(s.bank_images, s.bank) for s in splits], [(s.test_images, s.test) for s in splits])
        encoded = self.encode(encoder, [*banks, *tests], phase)
        tested = list(zip(splits, encoded[: len(banks)], encoded[len(banks) :], strict=True))
        return {
            name: [own_accuracy(probe, encoder, *one, self.tasks_seen(one[0].since)) for one in tested]
            for name, probe in owners.items()
        }

    def encode(
        self, encoder: nn.Module, banks: Sequence[Bank], phase: Phase, epoch: int | None = None
    ) -> list[Labelled]:
        """epoch: of the images' random crops, which follow from its number."""
        crops = None if epoch is None else torch.Generator().manual_seed(epoch)
        name = "features" if crops is None else "features of random crops"
        with eval_mode(encoder), phase(name, sum(len(indices) for _, indices in banks)) as advance:
            return [self.features(encoder, *bank, advance, crops) for bank in banks]

    def features(
        self, encoder: nn.Module, images: Images, indices: np.ndarray, advance: Advance = lambda amount: None,
        crops: torch.Generator | None = None,
    ) -> Labelled:  # fmt: skip
        """Features (N, D) in float32 and labels (N,) of the images with these indices, or of random crops of them."""
        source = self.sources(images)
        chosen = torch.from_numpy(indices)
        uniforms = None if crops is None else draw(len(chosen), crops, 1)[0]
        # Every process looks at its share; the last image fills up what cannot be shared equally.
        rows = torch.arange(len(chosen) + -len(chosen) % processes.world_size()).clamp_max(len(chosen) - 1)
        shares = rows[processes.shard(len(rows))].split(self.config.batch)
        parts = []
        with source.batches([chosen[share] for share in shares]) as batches:
            for batch, share in zip(batches, shares, strict=True):
                shown = batch if uniforms is None else self.random_crops(batch, uniforms[share])
                parts.append(encoder(self.prepare(shown)).float())
                advance(len(batch) * processes.world_size())
        return processes.all_gather_rows(torch.cat(parts))[: len(chosen)], source.labels[chosen].to(self.device)

    def random_crops(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """Of stored images, of the encoder's size, flipped by chance; as images again (B, S, S, 3) uint8."""
        size = self.prepare(images[:1]).shape[-1]
        made = crop(images, uniforms.to(images.device), CROPS, size)
        return made.mul_(255).round_().to(torch.uint8).permute(0, 2, 3, 1)

    def settings(self) -> dict[str, dict[str, Any]]:
        """What the accuracies were measured with, by row. Augmentation only where it was used."""
        limit = {} if self.config.tasks == "all" else {"tasks": self.config.tasks}
        found: dict[str, dict[str, Any]] = {}
        for probe, name, bank in self.rows_of:
            own = {key: value for key, value in probe.settings().items() if key != "augment" or (value and bank != OWN)}
            found[name] = {**own, "bank": bank, **limit}
        return found


def own_accuracy(
    probe: Probe, encoder: nn.Module, split: EvalSplit, bank: Labelled, test: Labelled, seen_tasks: int
) -> float:
    """Of a split against its own bank, on the part of the vectors that is its task's, if it has one."""
    feature_slice = getattr(encoder, "feature_slice", None)
    part = feature_slice(split.since) if callable(feature_slice) and not split.always else slice(None)
    return probe.fit(bank[0][:, part], bank[1], seen_tasks)(test[0][:, part], test[1])


@contextmanager
def eval_mode(encoder: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and the mode it was in again afterwards."""
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        encoder.train(was_training)
