"""A finished run's encoder, tested again, or on labelled images that came later."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ptlf import evaluation
from ptlf.evaluation import PROBES, Prober
from ptlf.evaluation.probes import OWN
from ptlf.run.build import labelled_images, make_stream
from ptlf.run.config import Config
from ptlf.run.inference import load_encoder
from ptlf.run.results import results_if_any
from ptlf.run.verdict import Verdict, both_splits, judge, keep, labelled_parts, name_start, start_encoder
from ptlf.stream.packing import OnError
from ptlf.stream.task import digest, single_task_stream


def may_change(setting: str) -> bool:
    """Whether a test of a finished run may change this setting: those of training, and the seed, are the run's own."""
    return setting.startswith(("probes.", "evaluation.")) or setting in ("device", "data_root", "stream.labelled")


def evaluate_run(
    folder: Path,
    config: Config,
    chosen: Sequence[str] | None = None,
    module: nn.Module | None = None,
    labelled: str | None = None,
    on_error: OnError = "refuse",
) -> tuple[dict[str, Any], list[str], list[Verdict]]:
    """The probes on a finished run's encoder, with the settings in `config`. Returns rows as in results.json, by name,
    names of what they were tested on, and the encoder beside the one before training on all labelled images.

    chosen: only these probes; default: those enabled. module: as before training, if the run was made with one.
    labelled: a packed set or a folder per class to test on in place of the run's own images, which are not needed then.
        They are of no task: rows that test within one are left out beside others, unless `chosen` names them. The
        results are kept in the run's folder.
    """
    encoder = load_encoder(folder, copy.deepcopy(module), config.device, trust_code=True)  # decided for `config`
    results, task = results_if_any(folder), 0
    # Tasks that the encoder has learnt, which is of before one that has not ended.
    learnt = len(results["tasks"]) - (results["status"] != "finished") if results else None
    if labelled is None:
        stream = make_stream(config, folder)
        names, task = [split.name for split in stream.eval_splits], len(stream.tasks)
    else:
        data = labelled_images(config, labelled, encoder.card["image_size"], encoder.fit, on_error)
        stream, names = single_task_stream(data, "labelled", learnt or 1), [data.name]
    probes = dict(config.probes)
    if chosen is not None:
        probes = {name: replace(probes.get(name) or PROBES.find(name).Config(), enabled=True) for name in chosen}
    prober = Prober(stream, config.evaluation, probes, encoder.normalise, encoder.device)

    start = start_encoder(encoder, folder, config, module)
    untrained = {} if start is None else prober.rows(start.module, task)
    settings, used = prober.settings(), prober.used(task)
    counts = {"test_images": [len(split.test) for split in stream.eval_splits]}
    rows: dict[str, Any] = {}
    for name, row in prober.rows(encoder.module, task).items():
        rows[name] = {"settings": settings[name], "used_by_task": [used[name]], **counts}
        if name in untrained:
            accuracy = evaluation.accuracy([untrained[name]])
            rows[name] |= {"untrained": untrained[name], "untrained_accuracy": accuracy}
        rows[name] |= evaluation.summary([row])
    sets = list(labelled_parts(stream)) if labelled is None else [(names[0], both_splits(data))]
    judged = [judge(name, images, encoder, start, name_start(config)) for name, images in sets] if start else []
    if labelled is None:
        return rows, names, judged
    among = {name: row for name, row in rows.items() if row["settings"]["bank"] != OWN or name in (chosen or ())}
    rows = among or rows
    if learnt is not None:
        split = stream.eval_splits[0]
        sums = digest(split.bank_images, split.bank), digest(split.test_images, split.test)
        keep(folder, learnt, names[0], "-".join(sums), judged[0] if judged else None, rows)
    return rows, names, judged
