"""Milliseconds and memory of a whole training step, by freeze stage.

python benchmarks/step.py --stages 0 2 4 6 8
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.options import add_json, add_steps, run_script, script
from benchmarks.printing import show_kernels, show_rows
from benchmarks.timing import RANGE, Row, noise_for, save_rows, time_steps
from ptlf.commands.parser import bounded
from ptlf.core.errors import UserError
from ptlf.core.settings import as_dict
from ptlf.report.live import console
from ptlf.run.build import choose_device
from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.run.recipes import resolve_config
from ptlf.run.record import environment, source_commit


def main(argv: Sequence[str] | None = None) -> int:
    parser, add = script("python benchmarks/step.py", __doc__)
    add("--recipe", "what to train, on noise", default="split-cifar10/simsiam/lump")
    add("--stages", "numbers of frozen units", bounded(int, 0, 1000), nargs="+", default=[0, 2, 4, 6, 8])
    add("--first", "freeze from the input on, not around the middle", bool)
    add("--streamed", "read the images from a file, none held on the device", bool)
    add("--plain", "freeze with requires_grad=False alone", bool)
    add("--profile", "leave a trace of every stage in this folder, and list the kernels", Path)
    add_steps(add)
    add_json(add)
    return run_script(parser, print_steps, argv)


def print_steps(recipe: str, plain: bool, json: Path | None, overrides: Sequence[str], **how: Any) -> None:
    """how: the arguments of `measure_steps`."""
    config = resolve_config(recipe, None, overrides)
    config.freezing.save_memory = not plain
    rows = measure_steps(config, **how)
    where = environment(choose_device(config.device))
    frozen = f"{'first' if how['first'] else 'middle'} units frozen{' as PyTorch does it' if plain else ''}"
    what = f"{config.training.batch} images of {how['size']} px on {where['device_name']}, {frozen}"
    title = f"{recipe}, {what}, {how['steps']} steps each; {RANGE}"
    show_rows(console, "step", title, rows)
    show_kernels(console, rows)
    ways = {key: how[key] for key in ("first", "streamed", "size", "steps")}
    save_rows(json, commit=source_commit(), config=as_dict(config), environment=where, plain=plain, **ways, rows=rows)


def measure_steps(
    config: Config, size: int, steps: int, stages: list[int], first: bool, streamed: bool, profile: Path | None
) -> list[Row]:
    """A row per stage of freezing (that many units around the middle, frozen one after the other): milliseconds of a
    step with everything in it, and its memory. Timed after warming up, over `steps` steps, the device synchronised;
    the spread is half of what lies between the fastest and the slowest fifth of them.

    first: the units nearest to the input instead, so that no gradient has to pass them.
    streamed: the images are read ahead from a file, not held on the device.
    profile: a folder for a trace of each stage; the rows then also have the kernels that took the most time.
    """
    config.stream.resident = False if streamed else config.stream.resident
    with TemporaryDirectory() as folder:
        file = Path(folder) / "noise.npy" if streamed else None
        run = Run(config, stream=noise_for(config, 4 * config.training.batch, size, 1, file))
        run.trainer.sources(run.trainer.images)  # opens the file, and holds it open
    names = [unit.name for unit in run.freezing.freezer.units]
    for frozen in stages:
        if not 0 <= frozen <= len(names):
            raise UserError(f"--stages names {frozen} frozen units, but {config.encoder.name} has {len(names)}")
    order = names if first else sorted(names, key=lambda name: abs(names.index(name) - (len(names) - 1) / 2))
    rows = []
    for frozen in stages:
        run.freezing.freezer.thaw()
        run.freezing.freezer.freeze(order[:frozen])
        trace = profile / f"frozen-{frozen}.json.gz" if profile else None
        rows.append({"frozen": frozen, "units": order[:frozen], **time_steps(run, steps, trace)})
    return rows


if __name__ == "__main__":
    sys.exit(main())
