"""The files of a run's record: `results.json`, written whole or not at all, and `metrics.jsonl`, a line per epoch."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError
from ptlf.core.files import write_error, write_whole

Json = dict[str, Any]
SCHEMA = 1


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def append_line(path: Path, value: dict[str, Any]) -> None:
    try:
        with open(path, "a") as file:
            file.write(json.dumps(value) + "\n")
    except OSError as error:
        raise write_error(path, error) from error


def read_results(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    try:
        return completed(json.loads(path.read_text()))
    except FileNotFoundError:
        if below := sorted(folder.glob("*/results.json")):
            raise UserError(f"{folder} is no run but holds some; name one of them, as {below[0].parent}") from None
        raise UserError(f"{folder} holds no results.json: there is no run, or it has not begun") from None
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def completed(results: Any) -> Any:
    """With what older files lack: figures that they have only in their epochs, and a setting that had one value.
    Whoever reads on finds what else is wrong."""
    with contextlib.suppress(LookupError, TypeError, AttributeError, statistics.StatisticsError):
        results["config"]["freezing"].setdefault("sharpness", 8.0)
        cost = results["cost"]
        cost.setdefault("last_peak_memory_bytes", cost["per_epoch"][-1]["peak_memory_bytes"])
        kept = statistics.fmean(line["kept_bytes"] for line in cost["per_epoch"])
        cost.setdefault("mean_kept_bytes", kept)
    return results


SAME_SETTINGS: dict[str, Callable[[Json], Json]] = {
    "streams": lambda config: {key: value for key, value in config.get("stream", {}).items() if key != "resident"},
    "epochs": lambda config: {"training.epochs": config.get("training", {}).get("epochs")},
}


def check_alike(configs: Sequence[Json]) -> None:
    """Of runs that are to be compared, before they are made."""
    for what, look in SAME_SETTINGS.items():
        first, *others = map(look, configs)
        for other in others:
            if other != first:
                raise UserError(f"the runs are of different {what} ({difference(first, other)}) and cannot be compared")


def difference(mine: Json, theirs: Json) -> str:
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    return ", ".join(f"{key}: {mine.get(key)} and {theirs.get(key)}" for key in keys[:3])
