"""A finished run's encoder, tested again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ptlf import evaluation
from ptlf.core.errors import UserError
from ptlf.run.build import make_stream
from ptlf.run.config import Config
from ptlf.run.folder import load_encoder
from ptlf.run.parts import Parts


def evaluate_run(
    folder: Path, config: Config, chosen: Sequence[str] | None = None, encoder: nn.Module | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The probes on a finished run's encoder, with the settings in `config`; and the names of the eval splits.

    chosen: only these probes; without it, those the settings enable. encoder: a module like the one trained, where the
    settings name none.
    """
    stream = make_stream(config, folder)
    parts = Parts(replace(config, evaluation=replace(config.evaluation, enabled=True)), None, encoder, stream)
    load_encoder(folder, parts.model.encoder)
    if parts.prober is None:
        raise UserError(f"the run in {folder} has no labelled test images to evaluate on")
    if chosen is not None:
        parts.prober.choose(chosen)
    rows = parts.prober.rows(parts.model.encoder, len(parts.stream.tasks))
    settings = parts.prober.settings()
    used = parts.prober.used(len(parts.stream.tasks))
    counts = {"test_images": [len(split.test) for split in parts.stream.eval_splits]}
    probes = {
        probe: {"settings": settings[probe], "used_by_task": [used[probe]], **counts, **evaluation.summary([row])}
        for probe, row in rows.items()
    }
    return probes, [split.name for split in parts.stream.eval_splits]
