"""The probes on a stream: features of the splits' images, and an accuracy for every split that counts by now."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.settings import key
from ptlf.evaluation.probe import OWN, SEEN, Probe, ProbeConfig
from ptlf.evaluation.probes import PROBES
from ptlf.stream import EvalSplit, Stream
from ptlf.stream.loading import ImageSource

Row = list[float | None]
Labelled = tuple[Tensor, Tensor]  # features (N, D) and labels (N,)


@dataclass
class EvaluationConfig:
    enabled: bool = key(True, "test the encoder after every task")
    batch: int = key(512, "images per forward", least=1)
    reference: str | None = key(None, "labelled folder or packed set: what the encoder knew before; null = none")
    reference_test: float = key(0.2, "share of it held out for testing if it has no test images", above=0, most=0.9)
    gallery: bool = key(True, "keep nearest images and a map of the features, before and after, for the report")


class Prober:
    """Tests an encoder on a stream's eval_splits. `prepare` turns stored images into the encoder's input.

    An encoder whose vector has a part for each task says where: `encoder.feature_slice(task)`. A split against its
    own task's images is tested with its own part, one against all classes with the whole vector.
    """

    def __init__(
        self,
        stream: Stream,
        config: EvaluationConfig,
        probes: Mapping[str, ProbeConfig],
        prepare: Callable[[Tensor], Tensor],
        device: torch.device,
        source: ImageSource | None = None,
    ) -> None:
        """`probes` are the settings of each by name; those that are enabled are used. `source` already holds the
        stream's training images, which mostly are those of the splits' banks too."""
        self.stream, self.config, self.prepare, self.device = stream, config, prepare, device
        data = stream.eval_data
        if data is None or data.test is None:
            raise UserError(f"stream {stream.name} has no labelled test images to evaluate on")
        self.bank = source if source and data is stream.data else ImageSource(data.train, device)
        self.test = ImageSource(data.test, device)
        self.settings_by_name = probes
        self.choose([name for name, settings in probes.items() if settings.enabled])

    def choose(self, names: Sequence[str]) -> None:
        """Use only these probes, enabled or not."""
        kinds = {name: PROBES.find(name) for name in names}
        self.probes = [kind(self.settings_by_name.get(name) or kind.Config()) for name, kind in kinds.items()]
        banks = [(len(split.bank), split.since) for split in self.stream.eval_splits]
        smallest = {OWN: min(size for size, _ in banks), SEEN: sum(size for size, since in banks if since == 0)}
        for probe in self.probes:
            probe.check(smallest)

    def rows(self, encoder: nn.Module, task: int) -> dict[str, Row]:
        """A row of each accuracy matrix after task number `task` (from 0)."""
        eval_splits = self.stream.eval_splits
        seen = self.examined(encoder, [split for split in eval_splits if split.since <= task])
        features, labels = (torch.cat(part) for part in zip(*(bank for _, bank, _ in seen), strict=True))
        rows: dict[str, Row] = {}
        for probe in self.probes:
            for name, bank in probe.rows.items():
                if bank == OWN:
                    row: Row = [own_accuracy(probe, encoder, *exam, len(seen)) for exam in seen]
                else:
                    score = probe.fit(features, labels, len(seen))
                    row = [score(*test) for _, _, test in seen]
                rows[name] = row + [None] * (len(eval_splits) - len(seen))
        return rows

    def future(self, encoder: nn.Module, task: int) -> dict[str, Row]:
        """Accuracies on the splits whose task comes next, for forward transfer, by row; as many tasks count as seen as
        after the last one."""
        splits = self.stream.eval_splits
        forward = [probe for probe in self.probes if probe.forward]
        owners = {name: probe for probe in forward for name, bank in probe.rows.items() if bank == OWN}
        exams = self.examined(encoder, [split for split in splits if owners and split.since == task + 1])
        return {
            name: [own_accuracy(probe, encoder, *exam, len(splits)) for exam in exams] for name, probe in owners.items()
        }

    def examined(self, encoder: nn.Module, splits: Sequence[EvalSplit]) -> list[tuple[EvalSplit, Labelled, Labelled]]:
        """The splits, with their bank and test images as the encoder sees them."""
        with testing(encoder):
            banks = [self.features(encoder, self.bank, split.bank) for split in splits]
            tests = [self.features(encoder, self.test, split.test) for split in splits]
        return list(zip(splits, banks, tests, strict=True))

    def features(self, encoder: nn.Module, source: ImageSource, indices: np.ndarray) -> Labelled:
        """Features (N, D) in float32 and labels (N,) of the images with these indices."""
        chosen = torch.from_numpy(indices)
        # Every process looks at its share; the last image fills up what cannot be shared equally.
        filled = torch.cat((chosen, chosen[-1:].expand(-len(chosen) % processes.world_size())))
        mine = filled[processes.shard(len(filled))]
        with source.batches(mine.split(self.config.batch)) as batches:
            parts = [encoder(self.prepare(images)).float() for images in batches]
        return processes.all_gather_rows(torch.cat(parts))[: len(chosen)], source.labels[chosen].to(self.device)

    def settings(self) -> dict[str, dict[str, Any]]:
        """What the accuracies were measured with, by row."""
        return {name: {**probe.settings(), "bank": bank} for probe in self.probes for name, bank in probe.rows.items()}


def own_accuracy(
    probe: Probe, encoder: nn.Module, split: EvalSplit, bank: Labelled, test: Labelled, seen_tasks: int
) -> float:
    """Of a split against its own bank, on the part of the vectors that is its task's."""
    feature_slice = getattr(encoder, "feature_slice", None)
    part = feature_slice(split.since) if callable(feature_slice) else slice(None)
    return probe.fit(bank[0][:, part], bank[1], seen_tasks)(test[0][:, part], test[1])


@contextmanager
def testing(encoder: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and the mode it was in again afterwards."""
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        encoder.train(was_training)
