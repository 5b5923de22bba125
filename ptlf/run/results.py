"""A run's record: `results.json`, `metrics.jsonl` (a line per epoch), `evaluations.json` (labels that came later)."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from ptlf.core.errors import UserError, short_repr
from ptlf.core.files import check_held, open_regular, write_error, write_whole
from ptlf.core.reading import DAMAGE, NUMBER, check_shape, damaged, parse_json, read_json, read_text

Json = dict[str, Any]
SCHEMA = 2
EVALUATIONS = "evaluations.json"
Z = NormalDist().inv_cdf(0.975)  # standard errors of a 95 % interval
# Said beside seconds of a run that are compared with those of another one: see `compiling_seconds`.
STEADY = "a run's first epoch, in which the step is compiled, counts as its second"
RESTORE_HINT = "take the run's folder from where it was made again, or leave it out"


def more_than_zero(value: Any, place: str) -> None:
    check_shape(value, NUMBER, place)
    if value <= 0:
        raise ValueError(f"{place} is {value}, not more than 0")


def half_difference(one: float, other: float, images: float) -> float:
    """Half of the 95 % interval of the difference of two accuracies in %, each on `images` images."""
    both = (one + other) / 2
    return Z * (2 * both * (100 - both) / images) ** 0.5


def optional(shape: Any, *names: str) -> Json:
    return dict.fromkeys((f"{name}?" for name in names), shape)


# What every reader of a record relies on; see `core.reading.check_shape`.
COUNT, PLACE = (0, 10**6), (1, 10**6)  # of tasks, epochs and units
ACCURACY, NAMES, RATIOS = (*NUMBER, type(None)), [(str, int)], {"*": NUMBER}
PROBE: Json = {
    "settings": {"bank?": str, "k?": (str, int)},
    "matrix": [[ACCURACY]],
    "used_by_task?": [{"*": (str, *NUMBER), "k?": NUMBER}],
    **optional(NUMBER, "accuracy", "forgetting", "untrained_accuracy"),
    **optional([ACCURACY], "untrained", "accuracy_by_task", "forgetting_by_task"),
}
EPOCH: Json = {
    **{"task": PLACE, "epoch": PLACE, "frozen": COUNT, "backward_flops": NUMBER, "kept_bytes": NUMBER},
    **dict.fromkeys(("seconds", "steps", "views_per_second"), more_than_zero),
    **optional(NUMBER, "peak_memory_bytes", "all_reduced_bytes", "correlation_seconds", "rebuild_seconds"),
    **{"newly_frozen?": [str], "loss?": {"*": (str, *NUMBER)}},
}
# A line of metrics.jsonl needs only its place.
LINE = {key if key in ("task", "epoch") else key.removesuffix("?") + "?": shape for key, shape in EPOCH.items()}
EVENT = {"epoch": PLACE, "frozen": [str]}
RATIOS_OF_TASK = {**optional({"*": RATIOS}, "ratios_by_epoch"), **optional(RATIOS, "directions")}
SECONDS = [f"{name}_seconds" for name in ("learning", "correlation", "rebuild", "eval", "checkpoint", "measuring")]
BYTES = ("kept_bytes", "mean_kept_bytes", "peak_memory_bytes", "last_peak_memory_bytes")
FEATURES = [{"task": PLACE, "images": COUNT, "effective_rank": NUMBER, "spread": NUMBER}]
KNOWN: Json = {"before": NUMBER, "after": [NUMBER], **optional(NUMBER, "accuracy", "lost")}
RESULTS: Json = {
    **{"status": str, "name": str, "class_order": NAMES, "tasks": NAMES, "eval_splits": NAMES, "units": [str]},
    **optional(bool, "baseline", "uses_labels", "own_encoder"),
    **{"seed": int, "arrived?": COUNT, "test_images?": [(0, 10**9)], "arrived_sha256?": [str]},
    "environment": {"*": (str, *NUMBER, bool, type(None))},
    "config": {
        **{"stream": {"name": str}, "encoder": {"name": str}, "objective": {"name?": str}, "method": {"name?": str}},
        "freezing": {"policy": {"name": str}},
        "training": {"epochs": PLACE},
        "recipe?": str,
    },
    "probes": {"*": PROBE},
    "freezing": [{"task": PLACE, "order": [str], "ratios": RATIOS, "events": [EVENT], **RATIOS_OF_TASK}],
    **optional(FEATURES, "features", "untrained_features"),
    "reference?": {"probes": {"*": KNOWN}},
    "encoder_weights?": {"path?": str, "sha256": str},
    "cost": {
        **{"train_seconds": NUMBER, "backward_flops": NUMBER, "per_epoch": {"*": (list, dict)}},
        **optional(NUMBER, *SECONDS, *BYTES),
        "per_task?": [{"task": PLACE, **optional(NUMBER, "train_seconds", "correlation_seconds", "rebuild_seconds")}],
    },
    **optional(NUMBER, "wall_seconds", "host_share"),
}
EVALUATION: Json = {
    **{"date": str, "images": str, "sha256": str, "tasks": COUNT, "verdict?": str, "gains?": {"*": [NUMBER]}},
    "probes": {"*": {**PROBE, "test_images": [(1, 10**9)]}},
}


def write_json(path: Path, value: Any) -> None:
    write_whole(path, to_json(value) + "\n")


def to_json(value: Any, level: int = 0) -> str:
    """Indented by one space per level; a list of plain values is on one line."""
    if isinstance(value, dict) and value:
        ends, parts = "{}", [f"{json.dumps(str(key))}: {to_json(item, level + 1)}" for key, item in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
        ends, parts = "[]", [to_json(item, level + 1) for item in value]
    else:
        return json.dumps(value, allow_nan=False)
    line = "\n" + " " * level
    return f"{ends[0]}{line} {f',{line} '.join(parts)}{line}{ends[1]}"


def append_line(path: Path, values: Sequence[Json]) -> None:
    """The last of the lines. A file that is gone, or a link, is made anew with all of them."""
    check_held(path)
    if len(values) < 2 or path.is_symlink() or not path.is_file():
        return write_whole(path, to_lines(values))
    try:
        with open_regular(path, os.O_WRONLY | os.O_APPEND) as file:
            file.write(to_lines(values[-1:]).encode())
    except OSError as error:
        raise write_error(path, error) from error


def keep_lines(path: Path, values: Sequence[Json]) -> None:
    """Make the file hold exactly these lines. One that does, as after a clean end, is left alone."""
    text = to_lines(values)
    if path.is_symlink() or not path.is_file() or path.stat().st_nlink > 1 or path.read_bytes() != text.encode():
        write_whole(path, text)


def to_lines(values: Sequence[Json]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def read_results(folder: Path) -> Json:
    """What the run in the folder has written down, checked: whoever reads it need not ask again."""
    path = folder / "results.json"
    try:
        results = read_json(path, RESTORE_HINT)
    except FileNotFoundError:
        refuse_folder_of_runs(folder)
        raise UserError(f"{folder} holds no results.json: there is no run, or it has not begun") from None
    schema = results.get("schema") if isinstance(results, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise UserError(f"{path} is damaged: it names no schema; {RESTORE_HINT}")
    if schema != SCHEMA:
        other = f"{path} has schema {short_repr(schema)}, this version reads schema {SCHEMA}"
        raise UserError(f"{other}; use {'an older' if schema < SCHEMA else 'a newer'} ptlf")
    try:
        check_results(results)
    except DAMAGE as error:
        raise damaged(path, error, RESTORE_HINT) from None
    return results


def results_if_any(folder: Path) -> Json | None:
    """None of a run that has not begun."""
    return read_results(folder) if (folder / "results.json").exists() else None


def read_evaluations(folder: Path) -> list[Json]:
    """The verdicts, and the tests on labels that came later, the latest at the end; of a damaged file none."""
    try:
        found = read_json(folder / EVALUATIONS)
        check_shape(found, [EVALUATION])
        return found
    except (FileNotFoundError, UserError, *DAMAGE):
        return []


def add_evaluation(folder: Path, new: Json) -> None:
    """One of the same encoder with the same images, probes and settings is replaced, and what was taken back goes."""

    def key(one: Json) -> Any:
        return one["tasks"], one["sha256"], {probe: values["settings"] for probe, values in one["probes"].items()}

    there = [one for one in read_evaluations(folder) if one["tasks"] <= new["tasks"] and key(one) != key(new)]
    write_json(folder / EVALUATIONS, [*there, new])


def refuse_folder_of_runs(folder: Path) -> None:
    """Of a folder that is no run: raises if runs lie in it or in the folders below."""
    below = sorted(folder.glob("*/results.json")) or sorted(folder.glob("*/*/results.json"))
    if below:
        raise UserError(f"{folder} is no run but holds some; name one of them, as {below[0].parent}")


def check_results(results: Json) -> None:
    check_shape(results, RESULTS)
    lines = epoch_lines(results)
    check_shape(lines, [EPOCH], "cost.per_epoch")
    splits, arrived = len(results["eval_splits"]), results.get("arrived") or 0
    rows = [("test_images", results.get("test_images"), splits)]
    rows += [("arrived_sha256", results.get("arrived_sha256"), arrived)]
    rows += [("tasks", results["tasks"][-arrived:] if arrived else None, arrived)]
    for probe, values in results["probes"].items():
        rows += [(f"{probe}.untrained", values.get("untrained"), splits)]
        rows += [(f"{probe}.matrix", row or [None], splits) for row in values["matrix"]]
        means = {"accuracy": values["matrix"][-1:], "untrained_accuracy": [values.get("untrained") or ()]}
        for key, found in means.items():
            known, said = [value for row in found for value in row if value is not None], values.get(key)
            if known and said is not None and abs(said - fmean(known)) > 1e-6:
                raise ValueError(
                    f"{probe}.{key} is {said}, but the mean of its row in the matrix is {fmean(known):.2f}"
                )
    for name, row, count in rows:
        if row and len(row) != count:
            raise ValueError(f"{name} has {len(row)} values, not {count}")
    events = [event["epoch"] for entry in results["freezing"] for event in entry["events"]]
    epochs = results["config"]["training"]["epochs"]
    if any(epoch > epochs for epoch in [*events, *(line["epoch"] for line in lines)]):
        raise ValueError(f"an epoch is later than the {epochs} of config.training.epochs")


def read_lines(path: Path) -> list[Json]:
    """The epochs in a metrics.jsonl: of whole lines, since the last one may still be on its way, and of the shape."""
    lines = []
    for raw in read_text(path).split("\n")[:-1] if path.exists() else ():
        with suppress(*DAMAGE):
            line = parse_json(raw)
            check_shape(line, LINE)
            lines.append(line)
    return lines


def epoch_lines(results: Json) -> list[Json]:
    """A dictionary per epoch, as in metrics.jsonl without `newly_frozen` and losses not computed in that epoch."""
    columns: Json = results["cost"]["per_epoch"]
    losses = columns.get("loss") or {}
    plain = {key: values for key, values in columns.items() if key != "loss"}
    lines: list[Json] = [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]
    for place, line in enumerate(lines):
        line["loss"] = {name: values[place] for name, values in losses.items() if values[place] is not None}
    return lines


def to_columns(lines: Sequence[Json]) -> Json:
    """A list per key with a value per line, None where a line has none; a dictionary of lists for a dictionary."""
    columns: Json = {}
    for key in dict.fromkeys(key for line in lines for key in line):
        values = [line.get(key) for line in lines]
        nested = any(isinstance(value, dict) for value in values)
        columns[key] = to_columns([value or {} for value in values]) if nested else values
    return columns


def compiling_seconds(results: Json) -> float:
    """What the run's first epoch took longer than its second: on a GPU it waits for the compiler. 0 of a single one."""
    columns = results["cost"]["per_epoch"]
    seconds, tasks = (columns.get(key, [])[:2] for key in ("seconds", "task"))
    return max(seconds[0] - seconds[1], 0.0) if len(seconds) == 2 and tasks[0] == tasks[1] else 0.0
