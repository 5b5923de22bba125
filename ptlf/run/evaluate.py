"""A finished run's encoder, tested again, or on labelled images that came later."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ptlf import evaluation
from ptlf.core.errors import UserError
from ptlf.evaluation import Prober
from ptlf.run.build import make_stream
from ptlf.run.config import Config
from ptlf.run.folder import load_encoder
from ptlf.run.inference import load_encoder as load
from ptlf.run.parts import Parts
from ptlf.run.start import without_start
from ptlf.stream import StreamConfig
from ptlf.stream.given import find_images
from ptlf.stream.pack import data_root
from ptlf.stream.packing import labelled_dataset
from ptlf.stream.task import split


def evaluate_run(
    folder: Path, config: Config, chosen: Sequence[str] | None = None, encoder: nn.Module | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The probes on a finished run's encoder, with the settings in `config`; and the names of the eval splits.

    chosen: only these probes; without it, those the settings enable. encoder: a module like the one trained, where the
    settings name none.
    """
    config = without_start(replace(config, evaluation=replace(config.evaluation, enabled=True)))
    parts = Parts(config, None, encoder, make_stream(config, folder))
    load_encoder(folder, parts.model.encoder)
    if parts.prober is None:
        raise UserError(f"the run in {folder} has no labelled test images to evaluate on")
    if chosen is not None:
        parts.prober.choose(chosen)
    rows = parts.prober.rows(parts.model.encoder, len(parts.stream.tasks))
    probes = summaries(parts.prober, rows, len(parts.stream.tasks))
    return probes, [split.name for split in parts.stream.eval_splits]


def evaluate_labelled(
    folder: Path,
    config: Config,
    labelled: str,
    chosen: Sequence[str] | None = None,
    module: nn.Module | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The probes on labelled images: a packed set or a folder per class. The run's own images are not needed.

    module: like the one trained, where the run was made with one.
    """
    encoder = load(folder, module, config.device, trust_code=True)  # as whoever made `config` decided
    path = find_images(labelled, data_root(config.data_root))
    data = labelled_dataset(path, encoder.card["image_size"], config.evaluation.reference_test, encoder.fit)
    stream = split(data, StreamConfig(name="labelled", tasks=1), 0)
    prober = Prober(stream, config.evaluation, config.probes, encoder.normalise, encoder.device)
    if chosen is not None:
        prober.choose(chosen)
    rows = prober.rows(encoder.module, 0)
    return summaries(prober, rows, 0), [path.name]


def summaries(prober: Prober, rows: Mapping[str, Any], task: int) -> dict[str, Any]:
    """Of rows taken after task number `task` (from 0), as in results.json."""
    settings, used = prober.settings(), prober.used(task)
    counts = {"test_images": [len(split.test) for split in prober.stream.eval_splits]}
    return {
        probe: {"settings": settings[probe], "used_by_task": [used[probe]], **counts, **evaluation.summary([row])}
        for probe, row in rows.items()
    }
