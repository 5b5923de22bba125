"""Benchmarks: what freezing saves, measured beside nothing frozen in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ptlf.freezing import Freezer, Unit, find_units
from ptlf.freezing.policies import measure_savings
from ptlf.training.cost import backward_flops, kept_bytes, peak_memory_bytes, reset_peak_memory

Loss = Callable[[], torch.Tensor]


def freezing(encoder: nn.Module, batch: int, size: int, device: torch.device, repeats: int = 5) -> list[dict[str, Any]]:
    """A row per way of freezing: bytes kept for backward, backward FLOPs, seconds of forward and backward.

    The input needs no gradient, as in training; every ratio is to nothing frozen, measured before and after the others.
    """
    encoder = encoder.to(device).train()
    images = torch.randn(batch, 3, size, size, device=device, generator=torch.Generator(device).manual_seed(0))
    units = find_units(encoder, images[:2])
    rows = []
    for name, chosen in frozen_sets(encoder, units, images[:2]).items():
        for way in ("plain", "ours") if chosen else ("plain",):
            freezer = Freezer(encoder, units=units, example=images[:2], save_memory=way == "ours")
            freezer.freeze(chosen)
            figures = measure(encoder, images, freezer, repeats)
            freezer.thaw()
            label = {"plain": "plain PyTorch", "ours": "ptlf.Freezer"}[way] if chosen else ""
            rows.append({"frozen": name, "way": label, "units": chosen, **figures})
    base = rows[0]
    for row in rows:
        row |= {f"{key}_ratio": row[key] / base[key] for key in ("kept_bytes", "backward_flops", "seconds")}
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


def measure(encoder: nn.Module, images: torch.Tensor, freezer: Freezer, repeats: int) -> dict[str, Any]:
    def loss() -> torch.Tensor:
        return encoder(images).square().mean()

    held = [*encoder.parameters(), *encoder.buffers(), *freezer.folded]
    kept = kept_bytes(loss, exclude=held)
    flops = backward_flops(loss())
    reset_peak_memory(images.device)
    seconds = [timed(loss, images.device) for _ in range(repeats + 1)][1:]  # the first one warms up
    encoder.zero_grad(set_to_none=True)
    return {
        "kept_bytes": kept,
        "backward_flops": flops,
        "seconds": statistics.median(seconds),
        "peak_memory_bytes": peak_memory_bytes(images.device),
    }


def timed(loss: Loss, device: torch.device) -> float:
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronise()
    started = time.perf_counter()
    loss().backward()
    synchronise()
    return time.perf_counter() - started
