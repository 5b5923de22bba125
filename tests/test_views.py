"""Every transform against Pillow, colorsys, scipy or a naive loop, on photographs; then the whole view."""

import colorsys
import dataclasses
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy import ndimage, stats
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ptlf import views as V
from ptlf.core.errors import UserError
from ptlf.views import View
from ptlf.views import operations as ops
from ptlf.views.operations import ATTEMPTS, COLUMNS, Interpolation

LEVEL = 1 / 255
PHOTOS = load_sample_images().images
RAW = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
PLAIN = View(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0, **RAW)
FULL = View(jitter=0.9, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grey=0.2, blur=0.5, solarise=0.3)


def photos(count: int, height: int, width: int | None = None) -> np.ndarray:
    """(count, height, width, 3) uint8 pieces of the two sample photographs."""
    width = width or height
    rng = np.random.default_rng(height * 1000 + width)
    pieces = []
    for i in range(count):
        photo = PHOTOS[i % 2]
        top, left = rng.integers(photo.shape[0] - height), rng.integers(photo.shape[1] - width)
        pieces.append(photo[top : top + height, left : left + width])
    return np.stack(pieces)


def to_float(images: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).contiguous().float() / 255


def from_pil(picture: Image.Image) -> Tensor:
    return to_float(np.asarray(picture.convert("RGB"))[None])[0]


def uniforms(count: int, **columns: float) -> Tensor:
    """0.5 everywhere except in the named columns."""
    u = torch.full((count, V.UNIFORMS_PER_VIEW), 0.5)
    for name, value in columns.items():
        u[:, COLUMNS[name]] = value
    return u


def drawn(count: int, views: int = 2, seed: int = 0) -> Tensor:
    return V.draw(count, torch.Generator().manual_seed(seed), views)


# ---------------------------------------------------------------- crop, resize, flip


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size_in", "size_out"), [((32, 32), 32), ((64, 64), 32), ((48, 64), 96), ((224, 200), 64)])
def test_resized_crop_is_pillows(interpolation: Interpolation, size_in: tuple[int, int], size_out: int) -> None:
    images = photos(12, *size_in)
    view = View(crop_scale=(0.08, 1.0), interpolation=interpolation, **RAW)
    u = drawn(len(images), 1)[0]
    ours = V.apply_view(torch.from_numpy(images), u, view, size_out)
    boxes = torch.stack(ops.crop_boxes(u, *size_in, view.crop_scale, view.crop_ratio), dim=1).int().tolist()
    for i, (top, left, h, w) in enumerate(boxes):
        piece = Image.fromarray(images[i]).crop((left, top, left + w, top + h))
        picture = piece.resize((size_out, size_out), Image.Resampling[interpolation.upper()])
        if u[i, COLUMNS["flip"]] < 0.5:
            picture = ImageOps.mirror(picture)
        # Pillow rounds after each of its two passes, by half a level each; the second pass spreads the first error.
        torch.testing.assert_close(ours[i], from_pil(picture), atol=1.25 * LEVEL, rtol=0)


def torchvision_box(row: list[float], height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]):
    """RandomResizedCrop's rule as a plain loop over one row of uniforms."""
    for k in range(ATTEMPTS):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * row[k])
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + (high - low) * row[ATTEMPTS + k])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = row[COLUMNS["top"]], row[COLUMNS["left"]]
            return int(top * (height - h + 1)), int(left * (width - w + 1)), h, w
    h, w = height, width
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("shape", [(32, 32), (64, 64), (30, 80), (80, 30), (8, 8)])
@pytest.mark.parametrize("scale", [(0.2, 1.0), (0.08, 1.0), (0.9, 1.0)])
def test_crop_boxes_follow_the_loop(shape: tuple[int, int], scale: tuple[float, float]) -> None:
    u = drawn(1000, 1)[0]
    ours = torch.stack(ops.crop_boxes(u, *shape, scale, (3 / 4, 4 / 3)), dim=1).long()
    reference = torch.tensor([torchvision_box(row, *shape, scale, (3 / 4, 4 / 3)) for row in u.tolist()])
    # In float32 a value close to a half may round the other way: at most one in a thousand.
    assert (ours != reference).any(dim=1).sum() <= 1


def test_pick_never_reaches_the_number_of_choices() -> None:
    largest = torch.full((1, V.UNIFORMS_PER_VIEW), 1 - 2.0**-24)
    assert all(ops.pick(largest, "top", n).item() == n - 1 for n in range(1, 2000))
    counts = torch.bincount(ops.pick(drawn(24000, 1)[0], "order", 24).long())
    assert len(counts) == 24 and stats.chisquare(counts.numpy()).pvalue > 0.01


@pytest.mark.parametrize(("shape", "size"), [((32, 32), 32), ((40, 36), 32)])
def test_padded_crop_is_the_naive_one(shape: tuple[int, int], size: int) -> None:
    images = photos(20, *shape)
    u = drawn(20, 1)[0]
    ours = V.apply_view(torch.from_numpy(images), u, View(padding=4, **RAW), size)
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    for i, row in enumerate(u.tolist()):
        top = int(row[COLUMNS["top"]] * (padded.shape[1] - size + 1))
        left = int(row[COLUMNS["left"]] * (padded.shape[2] - size + 1))
        piece = padded[i, top : top + size, left : left + size]
        piece = piece[:, ::-1] if row[COLUMNS["flip"]] < 0.5 else piece
        torch.testing.assert_close(ours[i], to_float(piece[None])[0], atol=1e-6, rtol=0)


# ---------------------------------------------------------------- colour

ENHANCERS = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.4])
@pytest.mark.parametrize("kind", [ops.BRIGHTNESS, ops.CONTRAST, ops.SATURATION])
def test_blends_are_pillows(kind: int, factor: float) -> None:
    images = photos(6, 48)
    ours = ops.blend(to_float(images), torch.full((6,), factor), torch.full((6,), kind))
    assert factor != 1 or torch.equal(ours, to_float(images))
    for i in range(6):
        theirs = from_pil(ENHANCERS[kind](Image.fromarray(images[i])).enhance(factor))
        torch.testing.assert_close(ours[i], theirs, atol=1.5 * LEVEL, rtol=0)


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.07, 0.3])
def test_hue_is_colorsys(turn: float) -> None:
    images = photos(2, 12)
    images[0, 0, :4] = [[0, 0, 0], [255, 255, 255], [90, 90, 90], [255, 255, 0]]  # no hue, and a tie
    ours = ops.shift_hue(to_float(images), torch.full((2,), turn))
    for i, row, col in np.ndindex(images.shape[:3]):
        h, s, v = colorsys.rgb_to_hsv(*(images[i, row, col] / 255).tolist())
        expected = torch.tensor(colorsys.hsv_to_rgb((h + turn) % 1.0, s, v))
        torch.testing.assert_close(ours[i, :, row, col], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("step", ["grey", "solarise"])
def test_grey_and_solarise_are_pillows(step: str) -> None:
    images = photos(4, 32)
    images.reshape(-1)[:256] = np.arange(256)
    ours = V.apply_view(torch.from_numpy(images), uniforms(4), dataclasses.replace(PLAIN, **{step: 1.0}), 32)
    for i in range(4):
        picture = Image.fromarray(images[i])
        theirs = from_pil(picture.convert("L") if step == "grey" else ImageOps.solarize(picture))
        torch.testing.assert_close(ours[i], theirs, atol=0.51 * LEVEL if step == "grey" else 1e-6, rtol=0)


def numpy_step(x: np.ndarray, name: str | int, amount: float) -> np.ndarray:
    """x (H, W, 3) float64."""
    if name == "hue":
        flat = [colorsys.rgb_to_hsv(*pixel) for pixel in x.reshape(-1, 3)]
        return np.array([colorsys.hsv_to_rgb((h + amount) % 1.0, s, v) for h, s, v in flat]).reshape(x.shape)
    grey = x @ np.array([0.299, 0.587, 0.114])
    base = {ops.BRIGHTNESS: 0.0, ops.CONTRAST: grey.mean(), ops.SATURATION: grey[..., None]}[name]
    return np.clip(amount * x + (1 - amount) * base, 0, 1)


def test_jitter_is_its_steps_in_each_of_the_24_orders() -> None:
    image = photos(1, 8).repeat(24, axis=0)
    hue_position, kinds = ops.jitter_order(torch.arange(24))
    amounts = [1.35, 0.7, 1.4, 0.1]  # strong enough that clamping makes the orders differ
    factors, shift = torch.tensor(amounts[:3]).expand(24, 3), torch.full((24,), amounts[3])
    ours = ops.jitter_in_order(to_float(image), factors, shift, hue_position, kinds)
    orders = set()
    for i in range(24):
        order: list[str | int] = kinds[i].tolist()
        order.insert(int(hue_position[i]), "hue")
        orders.add(tuple(order))
        x = image[i] / 255
        for name in order:
            x = numpy_step(x, name, amounts[3] if name == "hue" else amounts[int(name)])
        torch.testing.assert_close(ours[i], torch.from_numpy(x).permute(2, 0, 1).float(), atol=1e-5, rtol=0)
    assert len(orders) == 24
    assert len({tuple(x.flatten().tolist()) for x in ours}) == 24
    images = photos(5, 16)
    view = dataclasses.replace(PLAIN, jitter=0.8, brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1)
    u = uniforms(5, jitter=0.79, order=0.0, brightness=0.25, contrast=0.75, saturation=1.0, hue=0.0)
    x = to_float(images)
    hue_position, kinds = ops.jitter_order(torch.zeros(5))
    factors = torch.tensor([0.8, 1.15, 1.2]).expand(5, 3)
    expected = ops.jitter_in_order(x, factors, torch.full((5,), -0.1), hue_position, kinds)
    torch.testing.assert_close(ops.jitter(x, u, view), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(ops.jitter(x, uniforms(5, jitter=0.8, hue=0.9), view), x, atol=1e-6, rtol=0)


# ---------------------------------------------------------------- blur


@pytest.mark.parametrize(("shape", "kernel"), [((32, 32), 3), ((64, 64), 7), ((20, 31), 23), ((8, 8), 15)])
def test_blur_is_scipys(shape: tuple[int, int], kernel: int) -> None:
    images = photos(4, *shape)
    sigma = torch.tensor([0.1, 0.7, 1.3, 2.0])
    ours = ops.blur(to_float(images), sigma, kernel)
    for i, s in enumerate(sigma.tolist()):
        taps = np.exp(-0.5 * (np.arange(-(kernel // 2), kernel // 2 + 1) / s) ** 2)
        theirs = images[i] / 255
        for axis in (0, 1):
            theirs = ndimage.convolve1d(theirs, taps / taps.sum(), axis=axis, mode="mirror")
        torch.testing.assert_close(ours[i], torch.from_numpy(theirs).permute(2, 0, 1).float(), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("size", "kernel"), [(64, 7), (224, 23)])
def test_blur_kernel_follows_the_size(size: int, kernel: int) -> None:
    images, u = torch.from_numpy(photos(2, size)), uniforms(2, sigma=0.9)
    blurred = V.apply_view(images, u, dataclasses.replace(PLAIN, blur=1.0), size)
    x, sigma = V.apply_view(images, u, PLAIN, size), ops.between(u, "sigma", *PLAIN.blur_sigma)
    assert torch.equal(blurred, ops.normalise_channels(ops.blur(x, sigma, kernel), PLAIN.mean, PLAIN.std))


# ---------------------------------------------------------------- the whole view


@pytest.mark.parametrize("name", V.VIEWS)
@pytest.mark.parametrize("size", [8, 32, 64])
def test_every_recipe_runs_at_every_size(name: str, size: int) -> None:
    recipe = V.named_views(name, size)
    images = torch.from_numpy(photos(16, size))
    for view, out in zip(recipe, V.make_views(images, drawn(16, len(recipe)), recipe, size), strict=True):
        assert out.shape == (16, 3, size, size) and out.dtype == torch.float32 and out.is_contiguous()
        x = out * torch.tensor(view.std)[:, None, None] + torch.tensor(view.mean)[:, None, None]
        assert x.isfinite().all() and x.min() > -1e-5 and x.max() < 1 + 1e-5


@pytest.mark.parametrize("name", V.VIEWS)
def test_views_are_pure_and_images_independent(name: str) -> None:
    recipe = V.named_views(name, 48)
    images, u = torch.from_numpy(photos(10, 64)), drawn(10, len(recipe))
    kept = images.clone(), u.clone()
    first, again = V.make_views(images, u, recipe, 48), V.make_views(images, u, recipe, 48)
    assert torch.equal(images, kept[0]) and torch.equal(u, kept[1])
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    permuted = V.make_views(images[order], u[:, order], recipe, 48)
    alone = V.make_views(images[3:4], u[:, 3:4], recipe, 48)
    for a, b, c, d in zip(first, again, permuted, alone, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, a[order], atol=1e-5, rtol=0)
        torch.testing.assert_close(d, a[3:4], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", V.VIEWS)
def test_no_step_reads_a_value_on_the_host(name: str) -> None:
    """Fake tensors have no values: reading one, or using one as a shape, fails."""
    recipe = V.named_views(name, 40)
    with FakeTensorMode():
        images = torch.empty((6, 48, 56, 3), dtype=torch.uint8)
        u = torch.empty((len(recipe), 6, V.UNIFORMS_PER_VIEW))
        outputs = [*V.make_views(images, u, recipe, 40), V.normalise(images, (0.5,) * 3, (0.5,) * 3, 40)]
    assert all(out.shape == (6, 3, 40, 40) for out in outputs)


def test_a_view_is_one_graph_for_the_compiler() -> None:
    images, u, view = torch.from_numpy(photos(4, 48)), drawn(4, 1)[0], FULL
    compiled = torch.compile(V.apply_view, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images, u, view, 40), V.apply_view(images, u, view, 40))


@pytest.mark.parametrize("name", ["lump", "cassle-barlow"])
def test_views_made_at_once_are_the_same(name: str) -> None:
    images = torch.randint(0, 256, (5, 40, 40, 3), dtype=torch.uint8)
    u = V.draw(5, torch.Generator().manual_seed(0))
    apart, together = (V.make_views(images, u, V.named_views(name, 32), 32, at_once=once) for once in (False, True))
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", V.VIEWS)
def test_views_captured_in_a_cuda_graph_are_the_cpus(name: str) -> None:
    recipe = V.named_views(name, 40)
    images, u = torch.from_numpy(photos(16, 48)), drawn(16, len(recipe))
    fixed_images, fixed_u = torch.zeros_like(images, device="cuda"), torch.zeros_like(u, device="cuda")
    V.make_views(fixed_images, fixed_u, recipe, 40)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = V.make_views(fixed_images, fixed_u, recipe, 40)
    fixed_images.copy_(images)
    fixed_u.copy_(u)
    graph.replay()
    for ours, reference in zip(outputs, V.make_views(images, u, recipe, 40), strict=True):
        near = (ours.cpu() - reference).abs() < 1e-3
        assert near.float().mean() > 0.999  # solarisation jumps at its threshold


def test_autocast_does_not_reach_the_views() -> None:
    images, u, recipe = torch.from_numpy(photos(4, 64)), drawn(4), V.named_views("lump", 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = V.make_views(images, u, recipe, 64)
    assert all(torch.equal(a, b) for a, b in zip(inside, V.make_views(images, u, recipe, 64), strict=True))


CHANGES = {
    "crop_scale": (0.5, 0.8), "crop_ratio": (1.0, 1.0), "interpolation": "bicubic", "padding": 4, "flip": 0.1,
    "blur_sigma": (1.0, 1.5), "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(View)])
def test_every_field_of_a_view_changes_the_picture(field: str) -> None:
    images, u = torch.from_numpy(photos(32, 64)), drawn(32, 1)[0]
    changed = dataclasses.replace(FULL, **{field: CHANGES.get(field, 0.0)})
    assert (V.apply_view(images, u, FULL, 64) - V.apply_view(images, u, changed, 64)).abs().max() > 0.01


def test_the_protocols_settings() -> None:
    for size in (32, 64):
        first, second = V.named_views("lump", size)
        assert first == second and first.blur == (0.5 if size > 32 else 0.0)
        assert (first.brightness, first.contrast, first.saturation, first.hue) == (0.4, 0.4, 0.4, 0.1)
    assert [view.blur for view in V.named_views("cassle-barlow", 224)] == [1.0, 0.1]
    assert [view.solarise for view in V.named_views("cassle-barlow", 224)] == [0.0, 0.2]
    for size in (32, 64, 224):  # a fresh view of a memory image is normalised as the views are
        (fresh,), (view, _) = V.named_views("memory", size), V.named_views("lump", size)
        assert (fresh.mean, fresh.std) == (view.mean, view.std) == (ops.CIFAR_MEAN, ops.CIFAR_STD)
    (tiny,) = V.named_views("memory-tinyimagenet", 64)
    assert (tiny.mean, tiny.std) == ((0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821))
    assert dataclasses.replace(tiny, mean=ops.CIFAR_MEAN, std=ops.CIFAR_STD) == V.named_views("memory", 64)[0]


# ---------------------------------------------------------------- evaluation, errors


def test_normalise_crops_at_the_centre_and_enlarges_as_pillow_does() -> None:
    images = photos(3, 40, 37)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    whole = (to_float(images) - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(V.normalise(torch.from_numpy(images), mean, std), whole)
    centre = V.normalise(torch.from_numpy(images), mean, std, 32)
    torch.testing.assert_close(centre, whole[:, :, 4:36, 2:34])  # (37 - 32) / 2 rounds to even, as in torchvision
    images = photos(3, 8, 12)
    ours = V.normalise(torch.from_numpy(images), (0.0,) * 3, (1.0,) * 3, 16)
    for i in range(3):
        picture = Image.fromarray(images[i]).resize((24, 16), Image.Resampling.BILINEAR).crop((4, 0, 20, 16))
        torch.testing.assert_close(ours[i], from_pil(picture), atol=1.25 * LEVEL, rtol=0)


def test_errors_name_the_value() -> None:
    images = torch.from_numpy(photos(2, 16))
    with pytest.raises(UserError, match="did you mean 'lump'"):
        V.named_views("lumpp", 32)
    with pytest.raises(UserError, match="padded by 2"):
        V.apply_view(images, uniforms(2), View(padding=2), 32)
    with pytest.raises(ValueError, match="uint8"):
        V.apply_view(images.float(), uniforms(2), View(), 16)
