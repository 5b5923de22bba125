"""Bytes, FLOPs and seconds of one step with units frozen, beside nothing frozen.

python benchmarks/freezing.py --encoder resnet18 --batch 8
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.options import add_json, pixels, positive, run_script, script
from benchmarks.printing import show_rows
from benchmarks.timing import Row, per_call, save_rows
from ptlf.core.errors import UserError
from ptlf.core.memory import check_fits
from ptlf.encoders import ENCODERS, feature_dim
from ptlf.freezing import Freezer, Unit, find_units
from ptlf.freezing.cost import backward_flops, kept_bytes, measure_savings
from ptlf.report.live import console
from ptlf.run.build import choose_device, make_encoder
from ptlf.run.record import environment
from ptlf.training.cost import peak_memory_bytes, reset_peak_memory


def main(argv: Sequence[str] | None = None) -> int:
    parser, add = script("python benchmarks/freezing.py", __doc__, settings=False)
    add("--encoder", "which encoder", default="resnet18")
    add("--batch", "images per step", positive, default=8)
    add("--size", "side of the images in pixels", pixels, default=32)
    add("--repeats", "timed steps; the median counts", positive, default=5)
    add("--device", "cpu or cuda; auto is cuda where there is one", default="auto")
    add_json(add)
    return run_script(parser, print_freezing, argv)


def print_freezing(encoder: str, batch: int, size: int, repeats: int, device: str, json: Path | None) -> None:
    place, made = choose_device(device), make_encoder(ENCODERS.find(encoder).Config(name=encoder), 0, size)
    rows = measure_freezing(made, batch, size, place, repeats)
    title = f"{encoder}, {batch} images of {size} px, float32, eager, {place.type}"
    show_rows(console, "freezing", title, rows)
    save_rows(json, encoder=encoder, batch=batch, size=size, environment=environment(place), rows=rows)


def measure_freezing(encoder: nn.Module, batch: int, size: int, device: torch.device, repeats: int = 5) -> list[Row]:
    """A row per way of freezing: activation bytes saved for backward, backward FLOPs, seconds of forward and backward.

    The input needs no gradient, as in training; every ratio is to nothing frozen, measured first.
    """
    check_fits(f"{batch} images of {size} px (--batch and --size)", 12 * batch * size**2, device)
    encoder = encoder.to(device).train()
    images = torch.randn(batch, 3, size, size, device=device, generator=torch.Generator(device).manual_seed(0))
    try:
        if not any(True for _ in encoder.parameters()):
            raise ValueError("it has no parameters")
        feature_dim(encoder, size)
        units = find_units(encoder, images[:2])
        if not units:
            raise ValueError("it has no convolution or linear layer that could freeze")
    except (RuntimeError, ValueError, AssertionError, TypeError, StopIteration) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the encoder does not take images of {size} px, or cannot freeze: {reason}") from None
    rows = []
    for name, chosen in frozen_sets(encoder, units, images[:2]).items():
        for way in ("plain", "ours") if chosen else ("",):
            freezer = Freezer(encoder, units=units, example=images[:2], save_memory=way == "ours")
            freezer.freeze(chosen)
            rows.append({"frozen": name, "way": way, "units": chosen, **step_of(encoder, images, freezer, repeats)})
            freezer.thaw()
    for row in rows:
        row |= {f"{key}_ratio": row[key] / rows[0][key] for key in ("kept_bytes", "backward_flops", "seconds")}
    return rows


def frozen_sets(encoder: nn.Module, units: Sequence[Unit], example: torch.Tensor) -> dict[str, list[str]]:
    """Nothing; the middle 40 % of the units; the 40 % whose weight gradients cost most, the first unit left trainable
    (so that every input gradient is still needed); the first 40 %."""
    names = [unit.name for unit in units]
    count = max(1, int(0.4 * len(names)))
    start = (len(names) - count) // 2
    savings = measure_savings(encoder, units, example)
    heaviest = sorted(names[1:], key=lambda name: (-savings[name].weight_cost, -savings[name].bytes))[:count]
    return {
        "nothing": [],
        f"middle {count}": names[start : start + count],
        f"heaviest {count}": [name for name in names if name in heaviest],
        f"prefix of {count}": names[:count],
    }


def step_of(encoder: nn.Module, images: torch.Tensor, freezer: Freezer, repeats: int) -> Row:
    def loss() -> torch.Tensor:
        return encoder(images).square().mean()

    kept = kept_bytes(loss, exclude=[*encoder.parameters(), *encoder.buffers(), *freezer.folded])
    flops = backward_flops(loss())
    reset_peak_memory(images.device)
    timed = [per_call(lambda: loss().backward(), 1, images.device) for _ in range(repeats + 1)]
    encoder.zero_grad(set_to_none=True)
    seconds, peak = statistics.median(timed[1:]), peak_memory_bytes(images.device)  # the first call warms up
    return {"kept_bytes": kept, "backward_flops": flops, "seconds": seconds, "peak_memory_bytes": peak}


if __name__ == "__main__":
    sys.exit(main())
