"""The last part of the page: what every run was made with, and the command that repeats it."""

from __future__ import annotations

import shlex
from html import escape
from typing import Any

import yaml

from ptlf.report.runs import Comparison, Group, RunRecord, flatten


def details_part(comparison: Comparison) -> str:
    groups = "".join(group_details(group) for group in comparison.groups)
    return f'<section id="part-details"><h2>How to repeat it</h2>{differences(comparison)}{groups}</section>'


def differences(comparison: Comparison) -> str:
    """A table of the settings in which the runs differ; the rest they share."""
    flat = [flatten(group.config) for group in comparison.groups]
    keys = [key for key in dict.fromkeys(k for one in flat for k in one) if key not in ("seed", "recipe")]
    keys = [key for key in keys if len({str(one.get(key, "-")) for one in flat}) > 1]
    if not keys:
        return ""
    heads = "".join(f'<th class="f-run{g.colour}">{escape(g.label)}</th>' for g in comparison.groups)
    rows = "".join(
        f"<tr><th scope=row>{escape(key)}</th>"
        + "".join(
            f'<td data-label="{escape(group.label)}">{escape(show(one.get(key, "-")))}</td>'
            for one, group in zip(flat, comparison.groups, strict=True)
        )
        + "</tr>"
        for key in keys
    )
    return (
        "<h3>Where the settings differ</h3>"
        f'<table class="settings"><thead><tr><th>setting</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )


def show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def group_details(group: Group) -> str:
    return "".join(run_details(run, group) for run in group.runs)


def run_details(run: RunRecord, group: Group) -> str:
    results, place = run.results, shlex.quote(str(run.folder / "config.yaml"))
    seed = f", seed {results.get('seed')}"
    facts = {
        "folder": str(run.folder),
        "status": results["status"],
        "commit": results.get("commit") or "not known (installed without its source tree)",
        "version": f"ptlf {results.get('ptlf_version')}",
        "environment": ", ".join(f"{key} {value}" for key, value in results["environment"].items() if value),
        "class order": ", ".join(map(str, results["class_order"])) or "no classes",
        "tasks": " | ".join(map(str, results["tasks"])),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    text = yaml.safe_dump(run.config, sort_keys=False)
    again = f"<p>Repeat it with <code>ptlf train --config {escape(place)} --out again</code></p>"
    if not (run.folder / "config.yaml").exists():
        again = "<p>To repeat it, save the settings below as a file and give it to <code>ptlf train --config</code></p>"
    return (
        f'<details><summary><span class="f-run{group.colour}">{escape(group.label)}</span>{escape(seed)}</summary>'
        f"{again}"
        f"<dl>{listed}</dl><h4>config.yaml</h4><pre>{escape(text)}</pre></details>"
    )
