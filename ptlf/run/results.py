"""The files of a run's record: `results.json`, written whole or not at all, and `metrics.jsonl`, a line per epoch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError
from ptlf.core.files import write_error, write_whole

Json = dict[str, Any]
SCHEMA = 2


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
    if not path.exists() or path.read_text() != text:
        write_whole(path, text)


def read_results(folder: Path) -> Json:
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text())
    except FileNotFoundError:
        if below := sorted(folder.glob("*/results.json")):
            raise UserError(f"{folder} is no run but holds some; name one of them, as {below[0].parent}") from None
        raise UserError(f"{folder} holds no results.json: there is no run, or it has not begun") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    schema = results.get("schema") if isinstance(results, dict) else None
    if not isinstance(schema, int):
        raise UserError(f"{path} is damaged: it names no schema")
    if schema != SCHEMA:
        way_out = f"convert it with `python results/convert.py {path}`" if schema < SCHEMA else "use a newer ptlf"
        raise UserError(f"{path} has schema {schema}, this version reads schema {SCHEMA}; {way_out}")
    return results


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
    losses = columns.get("loss", {})
    plain = {key: values for key, values in columns.items() if key != "loss"}
    return [
        dict(zip(plain, values, strict=True))
        | {"loss": {name: loss[place] for name, loss in losses.items() if loss[place] is not None}}
        for place, values in enumerate(zip(*plain.values(), strict=True))
    ]


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def shared_settings(config: Json) -> dict[str, Json]:
    """What runs must have in common to be compared."""
    stream = {key: value for key, value in config.get("stream", {}).items() if key != "resident"}
    return {"streams": stream, "epochs": {"training.epochs": config.get("training", {}).get("epochs")}}


def check_alike(configs: Sequence[Json]) -> None:
    """Of runs that are to be compared, before they are made."""
    first, *others = map(shared_settings, configs)
    for other in others:
        for what, settings in first.items():
            if found := difference(settings, other[what]):
                raise UserError(f"the runs are of different {what} ({found}) and cannot be compared")


def difference(mine: Json, theirs: Json) -> str:
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    return ", ".join(f"{key}: {mine.get(key)} and {theirs.get(key)}" for key in keys[:3])
