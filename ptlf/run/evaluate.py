"""A finished run's encoder, tested again, or on labelled images that came later."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from ptlf import evaluation
from ptlf.core.errors import UserError, warn
from ptlf.evaluation import PROBES, Prober
from ptlf.evaluation.probe import OWN, ProbeConfig
from ptlf.run.build import make_stream
from ptlf.run.components import build_components
from ptlf.run.config import Config
from ptlf.run.folder import START, restore_encoder
from ptlf.run.inference import load_encoder, rebuilt
from ptlf.run.results import add_evaluation, read_results
from ptlf.run.start import without_start
from ptlf.stream.images import find_images
from ptlf.stream.pack import data_root
from ptlf.stream.packing import labelled_dataset
from ptlf.stream.squares import OnError
from ptlf.stream.task import digest, single_task_stream

Tested = tuple[dict[str, Any], list[str]]  # rows as in results.json, by name; names of the eval splits


def may_change(setting: str) -> bool:
    """Whether a test of a finished run may have another value of this setting, such as "probes.knn_class.k": those of
    training, and the seed of the encoder before it, are the run's own."""
    return setting.startswith(("probes.", "evaluation.")) or setting in ("device", "data_root", "stream.labelled")


def evaluate_run(
    folder: Path, config: Config, chosen: Sequence[str] | None = None, encoder: nn.Module | None = None
) -> Tested:
    """The probes on a finished run's encoder, with the settings in `config`.

    chosen: only these probes; without it, those the settings enable. encoder: the module as it was before training,
    where the settings name none.
    """
    tests = replace(config.evaluation, enabled=True)
    plain = without_start(replace(config, evaluation=tests, probes=enabled_probes(config.probes, chosen)))
    parts = build_components(plain, None, encoder, make_stream(plain, folder))
    before = copy.deepcopy(parts.model.encoder)
    restore_encoder(folder, parts.model.encoder)
    if parts.prober is None:
        raise UserError(f"the run in {folder} has no labelled test images to evaluate on")
    start = with_start(before, folder, config) if encoder is None else before
    rows = measured_rows(parts.prober, parts.model.encoder, start, len(parts.stream.tasks))
    return rows, [split.name for split in parts.stream.eval_splits]


def enabled_probes(probes: Mapping[str, ProbeConfig], chosen: Sequence[str] | None) -> dict[str, ProbeConfig]:
    """The settings of the chosen probes, enabled; without a choice, all as they are."""
    if chosen is None:
        return dict(probes)
    return {name: replace(probes.get(name) or PROBES.find(name).Config(), enabled=True) for name in chosen}


def evaluate_labelled(
    folder: Path,
    config: Config,
    labelled: str,
    chosen: Sequence[str] | None = None,
    module: nn.Module | None = None,
    on_error: OnError = "refuse",
) -> Tested:
    """The probes on labelled images, a packed set or a folder per class. The run's own images are not needed. The
    results are kept in the run's folder.

    The images are of no task: rows that test within one are left out beside others, unless `chosen` names them.

    module: as it was before training, where the run was made with one. on_error: for broken images, refuse or skip.
    """
    encoder = load_encoder(folder, copy.deepcopy(module), config.device, trust_code=True)  # decided for `config`
    path = find_images(labelled, data_root(config.data_root))
    size, share = encoder.card["image_size"], config.evaluation.reference_test
    data = labelled_dataset(path, size, share, encoder.fit, on_error)
    learnt = tasks_learnt(folder)
    stream = single_task_stream(data, "labelled", learnt or 1)
    probes = enabled_probes(config.probes, chosen)
    prober = Prober(stream, config.evaluation, probes, encoder.normalise, encoder.device)
    before = rebuilt(encoder.card, folder, module, config.seed).to(encoder.device)
    start = with_start(before, folder, config) if module is None else before
    rows = measured_rows(prober, encoder.module, start, 0)
    among = {name: row for name, row in rows.items() if row["settings"]["bank"] != OWN or name in (chosen or ())}
    rows = among or rows
    if learnt is not None:
        split = stream.eval_splits[0]
        sums = digest(split.bank_images, split.bank), digest(split.test_images, split.test)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        test = {"date": date, "tasks": learnt, "images": path.name, "sha256": "-".join(sums), "probes": rows}
        try:
            add_evaluation(folder, test)  # for the run's page
        except UserError as error:
            warn(f"the test is not kept for the report: {error}")
    return rows, [path.name]


def tasks_learnt(folder: Path) -> int | None:
    """By the encoder in the folder, which is of before a task that has not ended; None where no record says it."""
    if not (folder / "results.json").exists():
        return None
    results = read_results(folder)
    return len(results["tasks"]) - (results["status"] != "finished")


def with_start(encoder: nn.Module, folder: Path, config: Config) -> nn.Module | None:
    """The encoder with the weights of `encoder.weights`, if the run began with some; None if it did not keep them."""
    if config.encoder.weights is None:
        return encoder
    if not (folder / START).is_file():
        return None
    restore_encoder(folder, encoder, START)
    return encoder


def measured_rows(prober: Prober, encoder: nn.Module, before: nn.Module | None, task: int) -> dict[str, Any]:
    """Of the encoder after task number `task` (from 0), and of the one before training, as in results.json."""
    rows, untrained = prober.rows(encoder, task), prober.rows(before, task) if before else {}
    settings, used = prober.settings(), prober.used(task)
    counts = {"test_images": [len(split.test) for split in prober.stream.eval_splits]}
    measured: dict[str, Any] = {}
    for name, row in rows.items():
        measured[name] = {"settings": settings[name], "used_by_task": [used[name]], **counts}
        if name in untrained:
            accuracy = evaluation.accuracy([untrained[name]])
            measured[name] |= {"untrained": untrained[name], "untrained_accuracy": accuracy}
        measured[name] |= evaluation.summary([row])
    return measured
