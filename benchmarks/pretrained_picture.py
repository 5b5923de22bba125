"""What a given encoder gains on new images, and what it loses of what it knew: all settings that were tried, drawn.

    python benchmarks/pretrained_picture.py --out docs/pictures

Reads results/pretrained/*.jsonl, which `benchmarks/pretrained_loop.py` writes. A point is a setting, its mean over
domains; its colour says how much of the encoder was frozen.
"""

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from ptlf.report.drawing import Colours, frame, save_picture, style, themed

RESULTS = Path(__file__).parent.parent / "results" / "pretrained"
MEASURED = ("domain", "seed", "sec", "knn", "linear", "knew", "knew_linear", "frozen", "days")
MEASURED += ("bf16", "rank", "spread", "retrieved", "moved")
SHARES = {0: "run2", 0.25: "run5", 0.5: "run3", 0.75: "run1", 0.9: "run6"}  # of the layers that were frozen; colours
Point = tuple[float, ...]  # points gained on new images, by kNN and linearly, and change in what the encoder knew


def read(file: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Trainings, and the untouched encoder by domain."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    start = {line["domain"]: line for line in lines if line["obj"] == "untouched"}
    return [line for line in lines if line["obj"] != "untouched"], start


def points(file: Path, domains: Collection[str], seeds: bool) -> dict[str, Point]:
    """By settings, as JSON: means over these domains, and over seeds unless each `seeds` a setting of its own. Settings
    that were not tried on all of them are left out."""
    lines, start = read(file)
    found: dict[str, list[Point]] = {}
    for line in lines:
        if line["domain"] not in domains:
            continue
        settings = {key: value for key, value in line.items() if key not in MEASURED}
        key = json.dumps(settings | ({"seed": line["seed"]} if seeds else {}), sort_keys=True)
        gains = [line[test] - start[line["domain"]][test] for test in ("knn", "linear")]
        found.setdefault(key, []).append((*gains, line["knew"] - start["photos"]["knn"]))
    return {key: tuple(np.mean(each, axis=0).tolist()) for key, each in found.items() if len(each) >= len(domains)}


def picture(colours: Colours) -> Canvas:
    keys = [(f"{share:.0%}", {"color": colours[c], "marker": "o", "linestyle": ""}) for share, c in SHARES.items()]
    recipe = {"color": colours["ink"], "marker": "*", "markersize": 11, "linestyle": "-"}
    titled = "Gain and loss by the share of layers frozen"
    searched = points(RESULTS / "search-h200.jsonl", ("cells", "signs", "textures"), seeds=True)
    canvas, axes = frame(colours, 230, width=500, title=titled, keys=[*keys, ("settings of ptlf learn", recipe)])
    for key, (gain, _, change) in searched.items():
        colour = colours[SHARES[json.loads(key)["depth"]]]
        axes.plot(change, gain, "o", color=colour, markersize=4, alpha=0.75)
    path = points(RESULTS / "depth-h200.jsonl", ("cells", "letters", "textures"), seeds=False)
    depths = sorted((each["depth"], point) for key, point in path.items() if "which" not in (each := json.loads(key)))
    axes.plot(
        *zip(*((change, gain) for _, (gain, _, change) in depths), strict=True), color=colours["ink"], linewidth=1
    )
    for depth, (gain, _, change) in depths:
        axes.plot(change, gain, "*", color=colours[SHARES[depth]], markeredgecolor=colours["ink"], markersize=11)
    axes.axhline(0, color=colours["soft"], linewidth=0.8)
    axes.axvline(0, color=colours["soft"], linewidth=0.8)
    axes.set_xlabel("change in what the encoder knew, points")
    axes.set_ylabel("gain on new images, points")
    axes.set_xlim(-45, 5)
    return canvas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args()
    with style(colours := themed(False, 1)):
        save_picture(picture(colours), options.out, "pretrained")


if __name__ == "__main__":
    main()
