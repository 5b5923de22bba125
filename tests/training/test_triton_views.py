"""The augmentation's kernel against `operations.apply_view`. Without a GPU it runs in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ptlf import views as V
from ptlf.training import fast_parts, triton_views
from ptlf.views import View, operations
from ptlf.views.view import ATTEMPTS, COLUMNS

pytestmark = [pytest.mark.gpu(emulated=True), pytest.mark.slow]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = 2e-5  # in normalised units, of which a level of 255 is about 0.016
RAW = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
PLAIN = View(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0, **RAW)
COLOURS = {"jitter": 1.0, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
FULL = View(**COLOURS, grey=0.3, blur=0.7, blur_kernel=5, solarise=0.4)


def images_of(count: int, height: int, width: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(height)
    return torch.randint(0, 256, (count, height, width or height, 3), dtype=torch.uint8, generator=generator)


def drawn(count: int, seed: int = 0) -> Tensor:
    return V.draw(count, torch.Generator().manual_seed(seed), 1)[0]


def by_kernel(images: Tensor, u: Tensor, view: View, size: int, **options: bool) -> Tensor:
    assert triton_views.can_apply(images, view, size)
    return triton_views.apply_view(images.to(DEVICE), u.to(DEVICE), view, size, **options).cpu()


def check(images: Tensor, u: Tensor, view: View, size: int) -> Tensor:
    """All values are near; rounding may put a few on the other side of the threshold of a solarisation."""
    found, expected = by_kernel(images, u, view, size), operations.apply_view(images, u, view, size)
    assert found.shape == expected.shape and found.dtype is torch.float32
    far = (found - expected).abs() > NEAR
    assert far.sum() <= (3 if view.solarise else 0), (found - expected).abs().amax((1, 2, 3))
    return found


@pytest.mark.parametrize(("name", "size"), [*((name, size) for name in V.VIEWS for size in (16, 32)), ("lump", 64)])
def test_named_views(name: str, size: int) -> None:
    for seed, view in enumerate(dict.fromkeys(V.named_views(name, size))):
        check(images_of(6, size), drawn(6, seed), view, size)


STEPS = {
    "crop": {"crop_scale": (0.2, 0.8), "crop_ratio": (0.5, 2.0)},
    "bicubic": {"crop_scale": (0.2, 0.8), "interpolation": "bicubic"},
    "padding": {"padding": 3},
    "flip": {"flip": 1.0},
    "brightness": {"jitter": 1.0, "brightness": 0.4},
    "contrast": {"jitter": 1.0, "contrast": 0.4},
    "saturation": {"jitter": 1.0, "saturation": 0.4},
    "more than all of it": {"jitter": 1.0, "brightness": 1.5, "contrast": 1.5, "saturation": 1.5},
    "hue": {"jitter": 1.0, "hue": 0.5},
    "grey": {"grey": 1.0},
    "blur": {"blur": 1.0, "blur_sigma": (0.5, 2.0)},
    "wide blur": {"blur": 1.0, "blur_sigma": (2.0, 9.0), "blur_kernel": 39},
    "solarise": {"solarise": 1.0},
    "normalise": {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)},
}


@pytest.mark.parametrize("step", STEPS)
def test_each_step_alone(step: str) -> None:
    images, u = images_of(4, 20), drawn(4, 3)
    found = check(images, u, dataclasses.replace(PLAIN, **STEPS[step]), 20)
    without = by_kernel(images, u, PLAIN, 20)
    assert ((found - without).abs().amax((1, 2, 3)) > 0.02).all()


@pytest.mark.parametrize("hue", [0.1, 0.0])
def test_every_order_of_the_jitter(hue: float) -> None:
    images, u = images_of(1, 4).expand(24, -1, -1, -1), drawn(1).expand(24, -1).clone()
    u[:, COLUMNS["order"]] = (torch.arange(24) + 0.5) / 24
    found = check(images, u, dataclasses.replace(PLAIN, **{**COLOURS, "hue": hue}), 4)
    if hue:
        assert len({tuple(row.tolist()) for row in found.flatten(1)}) > 12  # some orders give the same picture


def test_grey_and_black_images() -> None:
    """Where no channel is the greatest, and where there is no chroma."""
    images = images_of(4, 8)
    images[0], images[1], images[2] = 0, 255, images[2, :, :, :1]
    images[3, :, :, 1] = images[3, :, :, 0]
    check(images, drawn(4), dataclasses.replace(PLAIN, **COLOURS), 8)


@pytest.mark.parametrize("value", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_ends_of_the_uniforms(value: float, padding: int) -> None:
    certain = dataclasses.replace(FULL, padding=padding, grey=0.0, blur=1.0, solarise=1.0)
    u = torch.full((2, V.UNIFORMS_PER_VIEW), value)
    assert u.max() < 1
    for view in (certain, dataclasses.replace(FULL, padding=padding)):
        check(images_of(2, 12), u, view, 12)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("height", "width", "size"), [(24, 17, 20), (17, 24, 20), (12, 12, 33), (48, 40, 16), (100, 80, 64), (6, 4, 3)]
)
def test_other_sizes(height: int, width: int, size: int, interpolation: str) -> None:
    view = dataclasses.replace(V.View(crop_scale=(0.08, 1.0), **COLOURS), interpolation=interpolation)
    check(images_of(3, height, width), drawn(3, size), view, size)


@pytest.mark.parametrize(("height", "width", "size"), [(12, 12, 16), (12, 20, 8), (20, 12, 14)])
def test_padding_of_other_sizes(height: int, width: int, size: int) -> None:
    check(images_of(4, height, width), drawn(4), View(padding=4), size)


@pytest.mark.parametrize(("height", "width", "ratio"), [(12, 20, (0.4, 1.2)), (20, 12, (1 / 1.2, 2.5))])
def test_all_attempts_at_a_crop(height: int, width: int, ratio: tuple[float, float]) -> None:
    """Boxes that fit at the first attempt, at a later one, and at none: then it is centred, along the long side."""
    view, u = View(crop_scale=(0.4, 1.0), crop_ratio=ratio, **RAW), drawn(12, 1)
    u[:3, :ATTEMPTS] = 0.999
    area, ratios = 240 * (0.4 + 0.6 * u[:, :ATTEMPTS]), ratio[0] * 3 ** u[:, ATTEMPTS : 2 * ATTEMPTS]
    fits = ((area / ratios).sqrt().round() <= height) & ((area * ratios).sqrt().round() <= width)
    attempts = {int(row.nonzero()[0]) if row.any() else None for row in fits}
    assert {None, 0} < attempts and len(attempts) > 3
    check(images_of(12, height, width), u, view, 12)


def test_half_a_pixel_is_rounded_to_even() -> None:
    """A quarter of 9 x 9 pixels has a side of 4.5, of 7 x 7 one of 3.5: boxes of 4 pixels."""
    for side in (9, 7):
        view = dataclasses.replace(PLAIN, crop_scale=(0.25, 0.25))
        h = operations.crop_boxes(drawn(2), side, side, view.crop_scale, view.crop_ratio)[2]
        assert h.tolist() == [4, 4]
        check(images_of(2, side), drawn(2), view, 8)


def test_layout() -> None:
    images, u = images_of(3, 12), drawn(3)
    plain, last = by_kernel(images, u, FULL, 12), by_kernel(images, u, FULL, 12, channels_last=True)
    assert plain.is_contiguous() and last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)
    turned = images.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous() and torch.equal(by_kernel(turned, u, FULL, 12), plain)
    wide = torch.cat([u, u], dim=1)[:, : V.UNIFORMS_PER_VIEW]
    assert not wide.is_contiguous() and torch.equal(by_kernel(images, wide, FULL, 12), plain)
    assert by_kernel(images[:0], u[:0], FULL, 12).shape == (0, 3, 12, 12)


def test_the_same_bits_every_time() -> None:
    """Threads of a program exchange pixels for the blur."""
    count, size = (256, 64) if DEVICE.type == "cuda" else (2, 24)
    images, u = images_of(count, size).to(DEVICE), drawn(count).to(DEVICE)
    view = dataclasses.replace(FULL, blur=1.0, blur_kernel=7)
    first = triton_views.apply_view(images, u, view, size)
    for _ in range(20 if DEVICE.type == "cuda" else 1):
        assert torch.equal(triton_views.apply_view(images, u, view, size), first)


@pytest.mark.gpu
def test_captured_in_a_cuda_graph() -> None:
    images, u = images_of(16, 40), drawn(16)
    fixed_images, fixed_u = torch.zeros_like(images, device="cuda"), torch.zeros_like(u, device="cuda")
    triton_views.apply_view(fixed_images, fixed_u, FULL, 40)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_views.apply_view(fixed_images, fixed_u, FULL, 40)
    fixed_images.copy_(images)
    fixed_u.copy_(u)
    graph.replay()
    assert torch.equal(out.cpu(), by_kernel(images, u, FULL, 40))


def test_what_is_left_to_the_compiler() -> None:
    images = images_of(2, 16)
    assert triton_views.can_apply(images, View(), 64)
    assert not triton_views.can_apply(images, View(), 65)
    assert not triton_views.can_apply(images, View(padding=2), 32)
    assert not triton_views.can_apply(images, View(blur=0.5, blur_kernel=33), 16)
    assert triton_views.can_apply(images, View(blur=0.5, blur_kernel=31), 16)
    with pytest.raises(ValueError, match="uniforms have shape"):
        triton_views.apply_view(images, drawn(3), View(), 16)
    with pytest.raises(ValueError, match="uint8"):
        triton_views.apply_view(images.float(), drawn(2), View(), 16)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ptlf.training.triton_views import _apply_view, settings
from ptlf.views import View

colours = {"jitter": 1, "brightness": 1, "contrast": 0.5, "saturation": 1, "hue": 0.1}
view = View(crop_scale=(0.5, 1), crop_ratio=(1, 2), **colours, blur=1, blur_sigma=(1, 2.5), blur_kernel=3, solarise=1,
            interpolation="bicubic", mean=(0, 0.5, 1), std=(1, 0.5, 2))
for view in (view, View(padding=2)):
    constants = settings(view, 12, 16, 16)
    options = {"num_warps": constants.pop("num_warps")}
    types = {"images": "*u8", "uniforms": "*fp32", "out": "*fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in _apply_view.arg_names}
    places = {(_apply_view.arg_names.index(name),): value for name, value in constants.items()}
    kernel = compile(ASTSource(_apply_view, signature, places), GPUTarget("cuda", 90, 32), options)
    assert ".entry _apply_view" in kernel.asm["ptx"]
"""


def test_triton_compiles_it(tmp_path) -> None:
    """For a GPU that need not be there: the interpreter takes more than the compiler does, such as integers here."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_step_takes_its_views_from_the_kernel(monkeypatch) -> None:
    """On a GPU, for any number of rows; what the kernel does not cover is compiled or run as it is."""
    called, view = [], View(**COLOURS)
    monkeypatch.setattr(fast_parts, "compiled", lambda function: lambda *given: called.append("compiled"))
    monkeypatch.setattr(fast_parts, "has_triton", lambda: True)
    parts = fast_parts.FastParts(batch=4, channels_last=True)
    images, u = images_of(4, 8).to(DEVICE), drawn(4).to(DEVICE)
    monkeypatch.setattr(type(images), "is_cuda", property(lambda tensor: True))
    kernel = triton_views.apply_view
    monkeypatch.setattr(
        triton_views, "apply_view", lambda *given, **named: called.append("kernel") or kernel(*given, **named)
    )
    for rows in (4, 3):
        found = parts(V.apply_view, images[:rows], u[:rows], view, 8)
        torch.testing.assert_close(found, operations.apply_view(images[:rows], u[:rows], view, 8), rtol=0, atol=NEAR)
        assert found.is_contiguous(memory_format=torch.channels_last)
    parts(V.apply_view, images, u, view, 65)
    assert called == ["kernel", "kernel", "compiled"]
    monkeypatch.setattr(type(images), "is_cuda", property(lambda tensor: False))
    parts(V.apply_view, images, u, view, 8)
    assert called == ["kernel", "kernel", "compiled", "compiled"]
