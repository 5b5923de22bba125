"""Convert a results.json (or .json.gz) of schema 1 to schema 2.

python results/convert.py FILE [FILE ...]                        in place; FILE.json.gz becomes FILE.json
python results/convert.py FILE --out NEW --commit 55501cf       elsewhere, naming the commit where none is known
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError
from ptlf.run.results import to_columns, write_json

Json = dict[str, Any]
RENAMED = {
    "exams": "eval_splits",
    "saved_activation_bytes": "kept_bytes",
    "mean_saved_activation_bytes": "mean_kept_bytes",
}
# Recipes' last words of schema 1 that stand for a method and a freezing policy; every other one is a method's name.
VARIANTS = {
    "ptlf": ("lump", "correlation"),
    "ptlf-cost": ("lump", "cost_aware"),
    "cassle-ptlf": ("cassle", "correlation"),
    "layerwise": ("finetune", "correlation"),
}


def convert(old: Json) -> Json:
    config, cost = old["config"], rename(old["cost"])
    lines = [rename(line) for line in cost["per_epoch"]]
    if lines:
        cost.setdefault("mean_kept_bytes", statistics.fmean(line["kept_bytes"] for line in lines))
        cost.setdefault("last_peak_memory_bytes", lines[-1]["peak_memory_bytes"])
    per_epoch = [{key: value for key, value in line.items() if key != "newly_frozen"} for line in lines]
    cost |= {"per_task": [rename(task) for task in cost["per_task"]], "per_epoch": to_columns(per_epoch)}
    baseline = config["method"]["name"] == "lump" and config["freezing"]["policy"] == "none"
    head = {key: old[key] for key in ("ptlf_version", "commit")}
    named = {"schema": 2, **head, "name": name_of(config), "baseline": baseline}
    rest = {key: value for key, value in rename(old).items() if key not in named}
    for probe in rest["probes"].values():
        probe["settings"]["bank"] = probe["settings"]["bank"].replace("the exam's own task", "the split's own task")
    return named | rest | {"config": convert_config(config), "cost": cost}


def rename(values: Json) -> Json:
    return {RENAMED.get(key, key): value for key, value in values.items()}


def convert_config(old: Json) -> Json:
    """Settings of a policy and of an optimizer stand below its name, and those of the probes in their own section."""
    new: Json = {}
    for section, values in old.items():
        if section == "freezing":
            policy: Json = {"name": values["policy"]}
            if values["policy"] == "cost_aware":
                policy |= {"sharpness": values.get("sharpness", 8.0), "savings": values["savings"]}
            left_out = ("policy", "sharpness", "savings")
            new[section] = {"policy": policy, **without(values, left_out)}
        elif section == "training":
            optimizer = {"name": values["optimizer"], **{key: values[key] for key in ("momentum", "weight_decay")}}
            new[section] = {"optimizer": optimizer, **without(values, ("optimizer", "momentum", "weight_decay"))}
        elif section == "evaluation":
            probes = {name: values[name] for name in ("knn_task", "knn_class", "linear", "ridge")}
            new[section] = without(values, probes)
            new["probes"] = {name: {"enabled": True, **own} for name, own in probes.items()}
        else:
            new[section] = values
    return new


def without(values: Json, keys: Any) -> Json:
    return {key: value for key, value in values.items() if key not in keys}


def name_of(config: Json) -> str:
    """STREAM/OBJECTIVE/METHOD: the recipe's words where they still hold, and the freezing where they do not say it."""
    chosen = [config[section]["name"] for section in ("stream", "objective", "method")]
    words = (config.get("recipe") or "").split("/")
    words = words if len(words) == 3 else chosen
    meant = [*words[:2], VARIANTS.get(words[2], (words[2],))[0]]
    kept = [word if name == now else now for word, name, now in zip(words, meant, chosen, strict=True)]
    policy, usual = config["freezing"]["policy"], VARIANTS.get(kept[2], ("", "none"))[1]
    how = "" if policy == usual else ", no freezing" if policy == "none" else f" + {policy} freezing"
    return "/".join(kept) + how


def convert_file(path: Path, out: Path | None = None, commit: str | None = None) -> Path:
    try:
        data = path.read_bytes()
        old = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        schema = old["schema"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is not the results.json of a run: {error!r}") from None
    if schema != 1:
        raise UserError(f"{path} has schema {schema}; only schema 1 can be converted")
    out = out or (path.with_suffix("") if path.suffix == ".gz" else path)
    new = convert(old)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, new | {"commit": new["commit"] or commit})
    return out


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path, help="where one FILE goes (default: in place)")
    parser.add_argument("--commit", help="the commit of the code that ran, for a file that does not name it")
    arguments = parser.parse_args(words)
    if arguments.out and len(arguments.files) > 1:
        parser.error("--out takes one FILE")
    try:
        for path in arguments.files:
            print(convert_file(path, arguments.out, arguments.commit))
    except UserError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
