"""A training step on this CPU beside plain PyTorch, with layers frozen, and what the processor could do at most.

    python benchmarks/cpu.py --json results/bench/cpu.json

All steps are of one process and take turns, so that a busy machine slows them alike: 64 images, two views each, SimSiam
with LUMP's memory. Plain PyTorch is a loop as tutorials have it: Pillow views, image by image, in the same process, the
encoder and heads in float32, one view after the other, SGD. Beside it the same loop with LUMP's replay, and in bf16.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.options import add_json, positive, run_script, script
from benchmarks.timing import noise_for, save_rows
from ptlf.encoders.resnet import ResNet
from ptlf.report.live import console
from ptlf.run.build import make_encoder
from ptlf.run.loop import Run
from ptlf.run.recipes import resolve_config
from ptlf.run.record import environment, source_commit

SIZE, BATCH = 32, 64
FLOAT32 = ["--training.precision", "fp32", "--training.channels_last", "false"]
BF16 = ["--training.precision", "bf16", "--training.channels_last", "true"]
MEAN, STD = np.float32([0.4914, 0.4822, 0.4465]), np.float32([0.2470, 0.2435, 0.2615])
Step = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    parser, add = script("python benchmarks/cpu.py", __doc__)
    add("--encoders", "to time", nargs="+", default=["resnet18", "resnet18-mini"])
    add("--rounds", "timed steps of each", positive, default=8)
    add_json(add)
    return run_script(parser, print_steps, argv)


def print_steps(encoders: list[str], rounds: int, json: Path | None, overrides: Sequence[str]) -> None:
    rows = [row for name in encoders for row in time_encoder(name, rounds, overrides)]
    table = Table("encoder", "step", "ms", "of float32", title=f"{BATCH} images of {SIZE} px, two views")
    for row in rows:
        share = f"{row['share']:.2f}" if row["share"] else ""
        table.add_row(row["encoder"], row["step"], f"{row['step_ms']:.0f}", share)
    console.print(table)
    where = environment(torch.device("cpu"))
    save_rows(json, commit=source_commit(), environment=where, batch=BATCH, size=SIZE, rounds=rounds, rows=rows)


def time_encoder(name: str, rounds: int, overrides: Sequence[str]) -> list[dict[str, Any]]:
    common = ["--device", "cpu", "--evaluation.enabled", "false", "--training.batch", str(BATCH)]
    words = [*common, "--encoder.name", name, *overrides]
    steps: dict[str, Step] = {
        "plain PyTorch, float32": plain_step(name),
        "plain PyTorch, float32, with LUMP's replay": plain_step(name, replay=True),
        "plain PyTorch, bf16 and channels last, with LUMP's replay": plain_step(name, replay=True, bf16=True),
        "ours, float32": our_step([*words, *FLOAT32]),
        "ours, what auto chooses": our_step(words),
        "ours, bf16 and channels last": our_step([*words, *BF16]),
    }
    if name == "resnet18":
        frozen = {f"first {count} of 20 units frozen": range(count) for count in (8, 12)}
        frozen["middle 8 of 20 units frozen"] = range(6, 14)
        steps |= {f"ours, bf16, {what}": our_step([*words, *BF16], which) for what, which in frozen.items()}
    seconds: dict[str, list[float]] = {what: [] for what in steps}
    for number in range(rounds + 1):  # the first warms up
        for what, step in steps.items():
            started = time.perf_counter()
            step()
            if number:
                seconds[what].append(time.perf_counter() - started)
    base = min(seconds["ours, float32"])
    rows: list[dict[str, Any]] = [
        {"encoder": name, "step": what, "step_ms": 1000 * min(taken), "share": min(taken) / base,
         "median_ms": 1000 * float(np.median(taken))}
        for what, taken in seconds.items()
    ]  # fmt: skip
    for low, precision in ((False, "float32"), (True, "bf16")):
        floor = encoder_flops(name) / products_per_second(low)
        what = f"floor: the encoder's products alone, {precision}"
        rows.append({"encoder": name, "step": what, "step_ms": 1000 * floor, "share": floor / base, "median_ms": None})
    return rows


def our_step(words: Sequence[str], frozen: Sequence[int] = ()) -> Step:
    config = resolve_config("split-cifar10/simsiam/lump", None, words)
    run = Run(config, stream=noise_for(config, 4 * BATCH, SIZE, 1))
    trainer, freezer = run.trainer, run.freezing.freezer
    freezer.freeze([freezer.units[index].name for index in frozen])
    run.rebuild_step()
    trainer.model.train()
    indices = torch.from_numpy(run.stream.tasks[0].train[:BATCH])
    return lambda: trainer.engine(trainer.load(indices, trainer.random["views"], trainer.method.draw(BATCH)))


def plain_step(name: str, *, replay: bool = False, bf16: bool = False) -> Step:
    """What a reader of tutorials writes. replay: LUMP's memory of 256 images, mixed with both views."""
    config = resolve_config("split-cifar10/simsiam/lump", None, ["--encoder.name", name])
    encoder = make_encoder(config.encoder, 0, SIZE)
    assert isinstance(encoder, ResNet)
    width = encoder(torch.zeros(2, 3, SIZE, SIZE)).shape[1]
    projector = nn.Sequential(nn.Linear(width, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 2048))
    projector.append(nn.BatchNorm1d(2048))
    predictor = nn.Sequential(nn.Linear(2048, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 2048))
    layout = torch.channels_last if bf16 else torch.contiguous_format
    encoder.to(memory_format=layout)  # type: ignore[call-overload]
    parameters = [p for module in (encoder, projector, predictor) for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.03, 0.9, weight_decay=5e-4)
    draws = np.random.default_rng(0)
    images = [Image.fromarray(pixels) for pixels in draws.integers(0, 256, (4 * BATCH, SIZE, SIZE, 3), np.uint8)]
    memory = images[-256:]

    def two_views(chosen: list[Image.Image], make: Callable[[Image.Image], np.ndarray]) -> list[Tensor]:
        made = [torch.from_numpy(np.stack([make(image) for image in chosen])) for _ in range(2)]
        return [view.permute(0, 3, 1, 2).contiguous(memory_format=layout) for view in made]

    stored = two_views(memory, lambda image: augment(image, draws))[1]

    def step() -> None:
        views = two_views(images[:BATCH], lambda image: augment(image, draws))
        if replay:
            picks, lam = draws.permutation(len(memory))[:BATCH], draws.beta(0.4, 0.4)
            fresh = two_views([memory[pick] for pick in picks], lambda image: crop_and_flip(image, draws, 0.08))[0]
            old = (fresh, stored[torch.from_numpy(picks)])
            views = [float(lam) * view + (1 - float(lam)) * past for view, past in zip(views, old, strict=True)]
        with torch.autocast("cpu", torch.bfloat16, bf16):
            z1, z2 = (projector(encoder(view)) for view in views)
            p1, p2 = predictor(z1), predictor(z2)
        z1, z2, p1, p2 = (vectors.float() for vectors in (z1, z2, p1, p2))
        loss = -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def augment(image: Image.Image, draws: np.random.Generator) -> np.ndarray:
    """SimCLR's view of an image of 32 px: crop, flip, colours, grey."""
    image = crop_and_flip(image, draws, 0.2, as_image=True)
    if draws.random() < 0.8:
        for kind in draws.permutation(4):
            if kind == 3:
                hue, saturation, value = image.convert("HSV").split()
                shift = int(draws.uniform(-0.1, 0.1) * 255)
                turned = Image.fromarray((np.asarray(hue).astype(np.int16) + shift).astype(np.uint8))
                image = Image.merge("HSV", (turned, saturation, value)).convert("RGB")
            else:
                enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[kind]
                image = enhance(image).enhance(draws.uniform(0.6, 1.4))
    if draws.random() < 0.2:
        image = image.convert("L").convert("RGB")
    return normalised(image)


def crop_and_flip(image: Image.Image, draws: np.random.Generator, least: float, as_image: bool = False) -> Any:
    side = SIZE * np.sqrt(draws.uniform(least, 1))
    ratio = np.sqrt(np.exp(draws.uniform(np.log(3 / 4), np.log(4 / 3))))
    w, h = min(SIZE, max(1, round(side * ratio))), min(SIZE, max(1, round(side / ratio)))
    left, top = draws.integers(0, SIZE - w + 1), draws.integers(0, SIZE - h + 1)
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, (left, top, left + w, top + h))
    if draws.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image if as_image else normalised(image)


def normalised(image: Image.Image) -> np.ndarray:
    return (np.asarray(image, np.float32) / 255 - MEAN) / STD


def encoder_flops(name: str) -> float:
    """Of forward and backward of both views; the backward has twice the forward's."""
    from torch.utils.flop_counter import FlopCounterMode

    encoder = make_encoder(
        resolve_config("split-cifar10/simsiam/lump", None, ["--encoder.name", name]).encoder, 0, SIZE
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(torch.zeros(2, 3, SIZE, SIZE))
    return counter.get_total_flops() / 2 * 3 * 2 * BATCH


def products_per_second(low: bool, side: int = 2048) -> float:
    """FLOP per second of a large product, the best of several."""
    a = torch.randn(side, side, dtype=torch.bfloat16 if low else torch.float32)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


if __name__ == "__main__":
    sys.exit(main())
