"""The files of a run's record: `results.json`, written whole or not at all, `metrics.jsonl`, a line per epoch, and
`evaluations.json`, tests on labels that came later."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError
from ptlf.core.files import write_error, write_whole
from ptlf.core.reading import DAMAGE, NUMBER, check_shape, damaged, parse_json, read_json, read_text
from ptlf.core.words import short_repr

Json = dict[str, Any]
SCHEMA = 2
EVALUATIONS = "evaluations.json"
MAX_COUNT = 10**6  # of tasks, epochs and units


def more_than_zero(value: Any, place: str) -> None:
    check_shape(value, NUMBER, place)
    if value <= 0:
        raise ValueError(f"{place} is {value}, not more than 0")


ACCURACY = (*NUMBER, type(None))
COUNT, FLAG = (0, MAX_COUNT), (bool, type(None))
NAMES = [(str, int)]
SETTINGS = {name: {"name?": str} for name in ("objective", "method", "freezing")}
SETTINGS |= {name: {"name": str} for name in ("stream", "encoder")}
# What every reader of a record relies on; see `core.reading.check_shape`.
PROBE: Json = {
    "settings": {"bank?": str, "k?": (str, int)},
    "matrix": [[ACCURACY]],
    "used_by_task?": [{"*": (str, *NUMBER), "k?": NUMBER}],
    **dict.fromkeys(("accuracy?", "forgetting?", "untrained_accuracy?"), NUMBER),
    **{name: [ACCURACY] for name in ("untrained?", "accuracy_by_task?", "forgetting_by_task?")},
}
FROZEN: Json = {
    "task": (1, MAX_COUNT),
    "order": [str],
    "ratios": {"*": NUMBER},
    "ratios_by_epoch?": {"*": {"*": NUMBER}},
    "directions?": {"*": NUMBER},
    "events": [{"epoch": (1, MAX_COUNT), "frozen": [str]}],
}
FEATURES: Json = {"task": (1, MAX_COUNT), "images?": COUNT, "effective_rank": NUMBER, "spread": NUMBER}
KNOWN: Json = {"before": NUMBER, "after": [NUMBER], "accuracy?": NUMBER, "lost?": NUMBER}
EPOCH: Json = {
    **dict.fromkeys(("task", "epoch"), (1, MAX_COUNT)),
    "frozen": COUNT,
    **dict.fromkeys(("seconds", "steps", "views_per_second"), more_than_zero),
    **dict.fromkeys(("backward_flops", "kept_bytes"), NUMBER),
    **dict.fromkeys(("peak_memory_bytes?", "all_reduced_bytes?"), NUMBER),
    **dict.fromkeys(("correlation_seconds?", "rebuild_seconds?"), NUMBER),
    "newly_frozen?": [str],
    "loss?": {"*": (str, *NUMBER)},
}
# A line of metrics.jsonl needs only its place.
LINE = {key if key in ("task", "epoch") else key.removesuffix("?") + "?": shape for key, shape in EPOCH.items()}
TASK_COST: Json = {
    "task": (1, MAX_COUNT),
    **dict.fromkeys(("train_seconds?", "correlation_seconds?", "rebuild_seconds?"), NUMBER),
}
COSTS = ("learning", "correlation", "rebuild", "eval", "checkpoint", "measuring")
RESULTS: Json = {
    **dict.fromkeys(("status", "name"), str),
    **dict.fromkeys(("class_order", "tasks", "eval_splits"), NAMES),
    "units": [str],
    **dict.fromkeys(("baseline?", "uses_labels?", "own_encoder?"), bool),
    "seed?": int,
    "arrived?": COUNT,
    "test_images?": [(0, 10**9)],
    "arrived_sha256?": [str],
    "environment": {"*": (str, *NUMBER, bool, type(None))},
    "config": {
        **SETTINGS,
        "freezing": {"policy": {"name": str}},
        "training": {"epochs": (1, MAX_COUNT)},
        "recipe?": str,
    },
    "probes": {"*": PROBE},
    "freezing": [FROZEN],
    "features?": [FEATURES],
    "untrained_features?": [FEATURES],
    "reference?": {"probes": {"*": KNOWN}},
    "encoder_weights?": {"path?": str, "sha256": str},
    "cost": {
        **dict.fromkeys(("train_seconds", "backward_flops"), NUMBER),
        **dict.fromkeys((f"{name}_seconds?" for name in COSTS), NUMBER),
        **dict.fromkeys(("kept_bytes?", "mean_kept_bytes?", "peak_memory_bytes?", "last_peak_memory_bytes?"), NUMBER),
        "per_epoch": {"*": (list, dict)},
        "per_task?": [TASK_COST],
    },
    **dict.fromkeys(("wall_seconds?", "host_share?"), NUMBER),
}
EVALUATION: Json = {
    **dict.fromkeys(("date", "images", "sha256"), str),
    "tasks": COUNT,
    "probes": {"*": {**PROBE, "test_images": [(1, 10**9)]}},
}
# Said beside seconds of a run that are compared with those of another one: see `compiling_seconds`.
STEADY = "a run's first epoch, in which the step is compiled, counts as its second"
RESTORE_HINT = "take the run's folder from where it was made again, or leave it out"


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


def append_line(path: Path, value: Json) -> None:
    try:
        with open(path, "a") as file:
            file.write(json.dumps(value) + "\n")
    except OSError as error:
        raise write_error(path, error) from error


def keep_lines(path: Path, values: Sequence[Json]) -> None:
    """Make the file hold exactly these lines. One that does, as after a clean end, is left alone."""
    text = "".join(json.dumps(value) + "\n" for value in values)
    if not path.exists() or path.read_bytes() != text.encode():
        write_whole(path, text)


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
        hint = f"convert it with `python results/convert.py {path}`" if schema < SCHEMA else "use a newer ptlf"
        raise UserError(f"{path} has schema {short_repr(schema)}, this version reads schema {SCHEMA}; {hint}")
    try:
        check_results(results)
    except DAMAGE as error:
        raise damaged(path, error, RESTORE_HINT) from None
    return results


def read_evaluations(folder: Path) -> list[Json]:
    """The tests on labels that came later, the latest at the end. Of a damaged file there are none: nothing but what a
    page says in addition hangs on it."""
    try:
        found = read_json(folder / EVALUATIONS)
        check_shape(found, [EVALUATION])
        return found
    except (FileNotFoundError, UserError, *DAMAGE):
        return []


def add_evaluation(folder: Path, new: Json) -> None:
    """One of the same encoder with the same images, probes and settings is replaced."""
    there = [one for one in read_evaluations(folder) if evaluation_key(one) != evaluation_key(new)]
    write_json(folder / EVALUATIONS, [*there, new])


def evaluation_key(evaluation: Json) -> list[Any]:
    settings = {probe: values["settings"] for probe, values in evaluation["probes"].items()}
    return [evaluation["tasks"], evaluation["sha256"], settings]


def refuse_folder_of_runs(folder: Path) -> None:
    """Of a folder that is no run: raises if runs lie in it or in the folders below."""
    below = sorted(folder.glob("*/results.json")) or sorted(folder.glob("*/*/results.json"))
    if below:
        raise UserError(f"{folder} is no run but holds some; name one of them, as {below[0].parent}")


def check_results(results: Json) -> None:
    check_shape(results, RESULTS)
    check_shape(epoch_lines(results), [EPOCH], "cost.per_epoch")
    splits, epochs = len(results["eval_splits"]), results["config"]["training"]["epochs"]
    if results.get("arrived", 0) > len(results["tasks"]):
        raise ValueError(f"arrived is {results['arrived']}, of {len(results['tasks'])} tasks")
    if len(sums := results.get("arrived_sha256") or []) not in (0, results.get("arrived", 0)):
        raise ValueError(f"arrived_sha256 is of {len(sums)} tasks, and arrived {results.get('arrived', 0)}")
    if len(results.get("test_images") or results["eval_splits"]) != splits:
        raise ValueError(f"test_images is not of {splits} eval_splits")
    for probe, values in results["probes"].items():
        for name, rows in {"matrix": values["matrix"], "untrained": [values.get("untrained") or []]}.items():
            if any(len(row) not in ({splits} if name == "matrix" else {0, splits}) for row in rows):
                raise ValueError(f"{probe}.{name} has a row that is not of {splits} eval_splits")
    events = [event["epoch"] for entry in results["freezing"] for event in entry["events"]]
    if any(epoch > epochs for epoch in [*events, *(line["epoch"] for line in epoch_lines(results))]):
        raise ValueError(f"an epoch is later than the {epochs} of config.training.epochs")


def read_lines(path: Path) -> tuple[list[Json], int]:
    """The epochs in a metrics.jsonl, and how many lines are not of the shape. Only whole lines: the last one may still
    be on its way."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        return [], 0
    lines, skipped = [], 0
    for raw in text.split("\n")[:-1]:
        try:
            line = parse_json(raw)
            check_shape(line, LINE)
            lines.append(line)
        except DAMAGE:
            skipped += 1
    return lines, skipped


def epoch_lines(results: Json) -> list[Json]:
    """A dictionary per epoch, as in metrics.jsonl but for `newly_frozen`, which the freezing log has."""
    return to_lines(results["cost"]["per_epoch"])


def to_columns(lines: Sequence[Json]) -> Json:
    """A list per key with a value per line, None where a line has none; a dictionary of lists for a dictionary."""
    columns: Json = {}
    for key in dict.fromkeys(key for line in lines for key in line):
        values = [line.get(key) for line in lines]
        nested = any(isinstance(value, dict) for value in values)
        columns[key] = to_columns([value or {} for value in values]) if nested else values
    return columns


def to_lines(columns: Json) -> list[Json]:
    """The lines that gave these columns. A loss that is None was not computed in that epoch, and is left out."""
    losses = columns.get("loss") or {}
    plain = {key: values for key, values in columns.items() if key != "loss"}
    return [
        dict(zip(plain, values, strict=True))
        | {"loss": {name: loss[place] for name, loss in losses.items() if loss[place] is not None}}
        for place, values in enumerate(zip(*plain.values(), strict=True))
    ]


def compiling_seconds(results: Json) -> float:
    """What the run's first epoch took longer than its second: on a GPU it waits for the compiler. It is left out where
    seconds of two runs are compared; 0 where the first task has a single epoch."""
    columns = results["cost"]["per_epoch"]
    seconds, tasks = (columns.get(key, [])[:2] for key in ("seconds", "task"))
    return max(seconds[0] - seconds[1], 0.0) if len(seconds) == 2 and tasks[0] == tasks[1] else 0.0


def ratio_or_none(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
