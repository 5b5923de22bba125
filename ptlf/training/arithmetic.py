"""The encoder's precision and memory layout. On a CPU `auto` times the encoder: which is fastest depends on both."""

import contextlib
import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ptlf.core import processes

# Of an image's forward. Below, it is not the products that take the time; above, the timing would take minutes.
MIN_FLOPS, MAX_FLOPS = 1e7, 1e11
SECONDS = 0.3  # for one timed forward and backward, about; with few images casts of weights count too much
ROUNDS = 2
MEASURED = "time of "  # in a record, before what was timed
# Candidates as (bf16, channels last), and the share of float32's time that one must stay below to be chosen.
CANDIDATES = {(False, False): 1.0, (False, True): 0.9, (True, True): 0.85}


@dataclass
class Arithmetic:
    bf16: bool
    channels_last: bool
    measured: dict[str, float] = field(default_factory=dict)  # candidate -> time relative to float32

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def record(self) -> dict[str, Any]:
        timed = {MEASURED + key: value for key, value in self.measured.items()}
        return {"precision": "bf16" if self.bf16 else "fp32", "channels_last": self.channels_last, **timed}

    def __str__(self) -> str:
        """What was chosen by timing, for the line at a run's start; empty if nothing was timed."""
        key = describe_arithmetic(self.bf16, self.channels_last)
        if self.measured.get(key, 1.0) == 1.0:
            return ""
        overrule = "--training.precision fp32 overrules it"
        return f"the encoder runs in {key}: {self.measured[key]:.2f} of float32's time here; {overrule}"


def describe_arithmetic(bf16: bool, channels_last: bool) -> str:
    return f"{'bf16' if bf16 else 'float32'}{', channels last' if channels_last else ''}"


def choose_arithmetic(
    precision: str, channels_last: bool | None, device: torch.device, encoder: nn.Module, size: int, batch: int,
    earlier: Mapping[str, Any] | None = None,
) -> Arithmetic:  # fmt: skip
    """`auto` means bf16 on GPUs that have it (from Ampere on), and on a CPU what is fastest there, or what the run had
    before it was stopped: `earlier`, the environment in its record."""
    if device.type == "cuda":
        native = precision == "auto" and torch.cuda.is_bf16_supported(including_emulation=False)
        return Arithmetic(native or precision == "bf16", channels_last is not False)
    if precision != "auto":
        return Arithmetic(precision == "bf16", bool(channels_last))
    if earlier and earlier.get("device") == device.type and "precision" in earlier:
        last = bool(earlier.get("channels_last")) if channels_last is None else channels_last
        timed = {key.removeprefix(MEASURED): value for key, value in earlier.items() if key.startswith(MEASURED)}
        return Arithmetic(earlier["precision"] == "bf16", last, timed)
    allowed = [each for each in CANDIDATES if channels_last in (None, each[1]) and (has_bf16() or not each[0])]
    default = Arithmetic(False, bool(channels_last))
    return processes.broadcast_object(fastest(allowed, encoder, size, batch) if len(allowed) > 1 else default)


def has_bf16() -> bool:
    """Whether the processor multiplies bf16. Where it is emulated it can be many times slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def fastest(candidates: list[tuple[bool, bool]], encoder: nn.Module, size: int, batch: int) -> Arithmetic:
    """By the shortest of some forwards and backwards of a copy of the encoder, on noise: the processor's time of one
    thread, so that other work on the machine does not decide."""
    plain = Arithmetic(*candidates[0])
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), contextlib.ExitStack() as threads:
        threads.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        with FlopCounterMode(display=False) as counter:
            copy.deepcopy(encoder).to("meta")(torch.empty(2, 3, size, size, device="meta"))
        if not 2 * MIN_FLOPS <= counter.get_total_flops() <= 2 * MAX_FLOPS:
            return plain
        encoder = copy.deepcopy(encoder).train()
        once = min(pass_seconds(encoder, *candidates[0], 2, size) for _ in range(2))
        images = min(batch, 16, max(2, round(2 * SECONDS / once)))
        # The first round warms up, and is never the shortest.
        rounds = range(1 + ROUNDS)
        taken = [[pass_seconds(encoder, *each, images, size) for each in candidates] for _ in rounds]
        shortest = [min(seconds) for seconds in zip(*taken, strict=True)]
        share = {each: seconds / shortest[0] for each, seconds in zip(candidates, shortest, strict=True)}
        best = min(candidates, key=lambda each: share[each] / CANDIDATES[each])
        return Arithmetic(*best, {describe_arithmetic(*each): round(value, 2) for each, value in share.items()})
    return plain  # an encoder that cannot be copied, or takes no such images


def pass_seconds(encoder: nn.Module, bf16: bool, channels_last: bool, images: int, size: int) -> float:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    noise = torch.randn(images, 3, size, size).contiguous(memory_format=layout)
    encoder.to(memory_format=layout).zero_grad()  # type: ignore[call-overload]
    started = time.thread_time()
    with torch.autocast("cpu", torch.bfloat16, bf16):
        output = encoder(noise)
    output.float().square().mean().backward()
    return time.thread_time() - started
