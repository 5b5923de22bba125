"""The fused forward against plain PyTorch. Without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ptlf.encoders.norm import ViewBatchNorm2d, views_in_one_pass
from ptlf.encoders.resnet import BasicBlock, Bottleneck, ResNet
from ptlf.freezing import Freezer
from ptlf.freezing.kernels import MaskedReLU
from ptlf.methods.pnn import Columns
from ptlf.objectives.teacher import PreviousModel
from ptlf.training import fast_parts, weight_gradients
from ptlf.training import fused_resnet as fused
from ptlf.training.cost import kept_bytes

pytestmark = [pytest.mark.gpu(emulated=True), pytest.mark.slow]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNITS = (
    "stem.conv",
    "stages.0.0.conv1",
    "stages.0.0.conv2",
    "stages.1.0.conv1",
    "stages.1.0.conv2",
    "stages.1.0.shortcut.0",
)


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def small(block: type = BasicBlock, stem: str = "cifar") -> ResNet:
    torch.manual_seed(0)
    encoder = ResNet(block, (1, 1), width=8, stem=stem).to(DEVICE, memory_format=torch.channels_last)
    for name, parameter in encoder.named_parameters():
        if "bn" in name or "shortcut.1" in name:
            torch.nn.init.uniform_(parameter, 0.3, 1.5)
    return encoder


def two_views(size: int = 3, pixels: int = 8) -> list[torch.Tensor]:
    views = torch.randn(2, size, 3, pixels, pixels, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    views[1] = 3 * views[1] + 1
    return list(views)


def run(encoder: ResNet, views: list[torch.Tensor], *, as_one: bool) -> tuple[list, dict, dict]:
    """Features, gradients and buffers after one forward and backward."""
    encoder.zero_grad()
    if as_one:
        with views_in_one_pass(encoder, len(views)):
            features = fused.forward(encoder, torch.cat(views)).chunk(len(views))
    else:
        features = [encoder(view) for view in views]
    (features[0].square().sum() + (features[0] * features[1]).sum() + features[1].sin().sum()).backward()
    gradients = {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}
    return [f.detach() for f in features], gradients, {name: b.clone() for name, b in encoder.named_buffers()}


SETS = [
    (),
    UNITS[:1],
    UNITS[1:2],
    UNITS[2:3],
    UNITS[5:],
    UNITS[4:5],
    UNITS[3:4],
    UNITS[:3],
    UNITS[1:3],
    UNITS[2:4],
    UNITS[2:],
    UNITS[4:],
    (UNITS[2], UNITS[3], UNITS[5]),
    UNITS,
]


@pytest.mark.parametrize("frozen", SETS, ids=lambda frozen: "+".join(name[-7:] for name in frozen) or "nothing")
def test_fused_is_the_plain_forward(frozen: tuple[str, ...]) -> None:
    plain, fast = small(), small()
    views = two_views()
    for encoder in (plain, fast):
        run(encoder, views, as_one=False)  # running statistics other than the initial ones
        Freezer(encoder, example=views[0]).freeze(frozen)
    assert fused.can_fuse(fast)
    if len(frozen) == len(UNITS):
        with views_in_one_pass(fast, 2), torch.no_grad():
            torch.testing.assert_close(fused.forward(fast, views[0]), plain(views[0]), rtol=1e-4, atol=1e-5)
        return
    same(run(fast, views, as_one=True), run(plain, views, as_one=False))


def same(found: tuple[list, dict, dict], expected: tuple[list, dict, dict]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        near = 5e-4 * gradient.abs().max().item()
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=near, msg=name)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("block", "stem", "pixels"), [(Bottleneck, "cifar", 8), (BasicBlock, "imagenet", 16), (BasicBlock, "imagenet", 17)]
)
def test_other_residual_networks(block: type, stem: str, pixels: int) -> None:
    plain, fast = small(block, stem), small(block, stem)
    views = two_views(pixels=pixels)
    same(run(fast, views, as_one=True), run(plain, views, as_one=False))


@pytest.mark.parametrize(
    ("frozen", "stem"), [((), "cifar"), (UNITS[2:3], "cifar"), (UNITS[:3], "cifar"), ((), "imagenet")]
)
def test_low_precision_follows_float32(frozen: tuple[str, ...], stem: str) -> None:
    plain, fast = small(stem=stem), small(stem=stem)
    views = two_views(size=6, pixels=8 if stem == "cifar" else 32)  # averages the rounding errors
    for encoder in (plain, fast):
        Freezer(encoder, example=views[0]).freeze(frozen)
    expected = run(plain, views, as_one=False)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = run(fast, views, as_one=True)
    for a, b in zip(found[0], expected[0], strict=True):
        assert (a - b).norm() < 0.03 * b.norm()
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert found[1][name].dtype is torch.float32
        assert (found[1][name] - gradient).norm() < 0.25 * gradient.norm(), name


@pytest.mark.parametrize("frozen", [UNITS[:1], UNITS[:3], UNITS[1:3]])
@pytest.mark.parametrize("options", [{}, {"batch_statistics": True}, {"save_memory": False}])
def test_a_stem_with_a_pool_frozen(frozen: tuple[str, ...], options: dict[str, bool]) -> None:
    plain, fast = small(stem="imagenet"), small(stem="imagenet")
    views = two_views(pixels=18)
    for encoder in (plain, fast):
        run(encoder, views, as_one=False)
        Freezer(encoder, example=views[0], **options).freeze(frozen)
    same(run(fast, views, as_one=True), run(plain, views, as_one=False))


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (1, 2), (5, 6)], ids=str)
def test_norm_relu_and_pool_in_one(size: tuple[int, int]) -> None:
    """Against PyTorch in float64, with equal values and windows that the ReLU sets to zero. The result has two
    consumers, of which one may send no gradient."""
    from ptlf.training.triton_pool import norm_relu_pool, pool

    def values(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).to(
            DEVICE, torch.float32
        )

    x, norm = values(6, 5, *size).requires_grad_(), ViewBatchNorm2d(5).to(DEVICE)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    torch.nn.init.uniform_(norm.bias, -1.0, 0.5)
    norm.views = 2
    exact = x.detach().double().requires_grad_()
    weight, bias = (p.detach().double().requires_grad_() for p in (norm.weight, norm.bias))
    normal = [F.batch_norm(half, None, None, weight, bias, training=True).relu() for half in exact.chunk(2)]
    wanted = F.max_pool2d(torch.cat(normal), 3, 2, 1)
    first, second = norm_relu_pool(x, norm)
    torch.testing.assert_close(first.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second) and first.is_contiguous(memory_format=torch.channels_last)
    by = [values(*wanted.shape), 2 * values(*wanted.shape) + 1]
    for sent in ([by[0], by[1]], [None, by[1]]):
        outputs = [(out, grad) for out, grad in zip(norm_relu_pool(x, norm), sent, strict=True) if grad is not None]
        found = torch.autograd.grad([o for o, _ in outputs], [x, norm.weight, norm.bias], [g for _, g in outputs])
        total = sum(grad.double() for grad in sent if grad is not None)
        for got, want in zip(found, torch.autograd.grad(wanted, [exact, weight, bias], total, True), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool(x.detach())[0], F.max_pool2d(x.detach(), 3, 2, 1), rtol=0, atol=0)


def images_of(height: int, width: int, layout: str) -> torch.Tensor:
    wide = torch.randn(2, 3, height, 2 * width, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    images = wide[..., ::2]  # neither layout
    return images if layout == "other" else images.contiguous(memory_format=getattr(torch, layout))


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last", "other"])
@pytest.mark.parametrize("size", [(16, 16), (13, 18), (14, 9), (1, 2)], ids=str)
def test_a_stem_over_squares(size: tuple[int, int], layout: str) -> None:
    """Output and weight gradient in float64, trained and frozen, against the 7 x 7 convolution."""
    from ptlf.training.triton_bn import FrozenConvReLU
    from ptlf.training.triton_stem import ON_SQUARES, squares, weight_on_squares

    torch.manual_seed(0)
    images, weight = images_of(*size, layout), torch.randn(5, 3, 7, 7).double().to(DEVICE).requires_grad_()
    bias = torch.randn(5).double().to(DEVICE)
    x = squares(images, torch.float64)
    assert x.is_contiguous(memory_format=torch.channels_last)
    found = F.conv2d(x, weight_on_squares(weight), None, *ON_SQUARES)
    expected = F.conv2d(images.double(), weight, None, 2, 3)
    torch.testing.assert_close(found, expected)
    by = torch.randn(expected.shape).double().to(DEVICE)
    torch.testing.assert_close(torch.autograd.grad(found, weight, by), torch.autograd.grad(expected, weight, by))
    if x.is_cuda:  # cuDNN's convolution with ReLU is not for float64
        x, weight, bias = x.float(), weight.float(), bias.float()
    frozen, _ = FrozenConvReLU.apply(x, weight_on_squares(weight.detach()), bias, None, *ON_SQUARES, False)
    wanted = (expected.detach() + bias.view(-1, 1, 1)).relu()
    near = {"rtol": 1e-4, "atol": 1e-4} if x.is_cuda else {}
    torch.testing.assert_close(frozen.double(), wanted.double(), **near)


def test_squares_in_the_step_s_type() -> None:
    """With values that bfloat16 has: the interpreter truncates others."""
    from ptlf.training.triton_stem import squares

    images = images_of(6, 7, "other").bfloat16()
    expected = squares(images.float(), torch.float32)
    for given in (images, images.float()):
        found = squares(given, torch.bfloat16)
        assert found.dtype is torch.bfloat16 and torch.equal(found.float(), expected)


def test_a_stem_of_another_size() -> None:
    plain, fast = small(stem="imagenet"), small(stem="imagenet")
    for encoder in (plain, fast):
        torch.manual_seed(0)
        encoder.stem.conv = torch.nn.Conv2d(3, 8, 5, 2, 2, bias=False).to(DEVICE)
    views = two_views(pixels=16)
    same(run(fast, views, as_one=True), run(plain, views, as_one=False))


@pytest.mark.parametrize(("dtype", "beside"), [(torch.float32, 0), (torch.bfloat16, 6)])
def test_weight_gradients_run_beside_backward_only_after_a_cast(monkeypatch, dtype: torch.dtype, beside: int) -> None:
    """The backward of the cast waits for them; without it they would be read before they are there."""
    called, real = [], weight_gradients.conv2d
    monkeypatch.setattr(weight_gradients, "conv2d", lambda *given: called.append(given) or real(*given))
    fused.Forward(small(stem="imagenet"), dtype).stages(torch.cat(two_views(pixels=16)))
    assert len(called) == beside


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ptlf.training.triton_pool import _pool, _pool_gradient
from ptlf.training.triton_stem import _squares

types = {"grad": "*bf16", "other": "*bf16", "x": "*bf16", "out": "*bf16", "positions": "*u8"}
types |= dict.fromkeys(("mean", "inv_std", "weight", "bias"), "*fp32")
tile = {"BLOCK_R": 32, "BLOCK_C": 64}
cases = [
    (_pool, {"NORM": 1, "POSITIONS": 1, **tile}),
    (_pool, {"NORM": 0, "POSITIONS": 0, **tile}),
    (_pool_gradient, {"OTHER": 1, **tile}),
    (_squares, {"BLOCK": 128}),
]
for kernel, constants in cases:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    made = compile(ASTSource(kernel, signature, places), GPUTarget("cuda", 90, 32), {"num_warps": 4})
    assert f".entry {kernel.__name__}" in made.asm["ptx"]
"""


def test_triton_compiles_the_stem(tmp_path) -> None:
    """For a GPU that need not be there: the interpreter takes more than the compiler does."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_pool_keeps_its_input_and_a_byte_per_value() -> None:
    """And the squares, 11 x 11 for images of 16 px, and the weight over them. Of 8 channels in the stem the convolution
    gives 8 x 8 and the pool 4 x 4 pixels."""
    encoder, views = small(stem="imagenet"), torch.cat(two_views(size=8, pixels=16))
    forward = fused.Forward(encoder, torch.float32)
    kept = kept_bytes(lambda: forward.stem(encoder.stem, views), [*encoder.parameters(), *encoder.buffers()])
    squares, weight, statistics = 4 * 16 * 16 * 11 * 11, 4 * 8 * 16 * 4 * 4, 4 * 2 * 8
    assert kept == squares + weight + 4 * 16 * 8 * 8 * 8 + 16 * 8 * 4 * 4 + statistics


def test_nothing_goes_back_into_a_frozen_beginning() -> None:
    encoder, views = small(), two_views()
    Freezer(encoder, example=views[0]).freeze(UNITS[:3])
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        forward = fused.Forward(encoder, torch.bfloat16)
        x = forward.stem(encoder.stem, torch.cat(views))
        x = forward.block(encoder.stages[0][0], x)
    assert not x[0].requires_grad and not x[1].requires_grad


# Of 16 images: 8 channels of 8 x 8 in the first stage, 16 of 4 x 4 in the second.
@pytest.mark.parametrize(("frozen", "masked"), [(UNITS[1:3], 8192 + 4096), (UNITS[2:], 8192 + 2 * 4096)])
def test_a_mask_takes_one_bit(frozen: tuple[str, ...], masked: int) -> None:
    """Freezing frees what only frozen layers would save; a ReLU then saves one bit per element."""
    encoder, views = small(), torch.cat(two_views(size=8))
    freezer = Freezer(encoder, example=views[:2])

    def kept() -> int:
        return kept_bytes(
            lambda: fused.forward(encoder, views), [*encoder.parameters(), *encoder.buffers(), *freezer.folded]
        )

    before = kept()
    freezer.freeze(frozen)
    as_bits = kept()
    assert as_bits < 0.8 * before
    for module in encoder.modules():
        if isinstance(module.__dict__.get("forward"), MaskedReLU):
            module.forward = torch.relu
    assert kept() - as_bits == 4 * masked - masked // 8


@pytest.mark.parametrize(
    "options", [{"batch_statistics": True}, {"save_memory": False}, {"batch_statistics": True, "save_memory": False}]
)
@pytest.mark.parametrize("frozen", [UNITS[:3], UNITS[2:4], UNITS[4:]])
def test_other_ways_to_freeze(options: dict[str, bool], frozen: tuple[str, ...]) -> None:
    plain, fast = small(), small()
    views = two_views()
    for encoder in (plain, fast):
        run(encoder, views, as_one=False)
        Freezer(encoder, example=views[0], **options).freeze(frozen)
    assert fused.can_fuse(fast)
    same(run(fast, views, as_one=True), run(plain, views, as_one=False))


def test_what_is_not_fused() -> None:
    encoder = small()
    assert fused.can_fuse(encoder)
    assert not fused.can_fuse(torch.nn.Sequential(encoder))
    assert not fused.can_fuse(small().double())
    encoder.stages[0][0].bn1.eval()
    assert not fused.can_fuse(encoder)
    changed = small()
    changed.stages[0][0].conv1.forward = lambda x: x
    assert not fused.can_fuse(changed)
    for name, value in (("dilation", (2, 2)), ("groups", 2), ("padding_mode", "circular")):
        changed = small()
        setattr(changed.stages[0][0].conv1, name, value)
        assert not fused.can_fuse(changed)


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_a_nan_is_not_hidden(stem: str) -> None:
    encoder, views = small(stem=stem), two_views()
    views[0][0, 0, 0, 0] = float("nan")
    assert fused.forward(encoder, torch.cat(views)).isnan().all()


def test_steps_are_fused_and_teachers_too(monkeypatch) -> None:
    """What goes through the accelerator, with gradient or without; an evaluated encoder is not called through it."""
    called = []
    monkeypatch.setattr(fused, "forward", lambda encoder, images: called.append(encoder) or images)
    monkeypatch.setattr(fast_parts, "has_triton", lambda: True)
    images = two_views()[0]
    monkeypatch.setattr(type(images), "is_cuda", property(lambda tensor: True))
    encoder, parts = small(), fast_parts.FastParts(batch=7)
    previous = PreviousModel(encoder, torch.nn.Identity()).encoder
    parts.encode(encoder, images)
    with torch.no_grad():
        parts.encode(previous, images)
    assert called == [encoder, previous]


def test_a_teacher_s_norms_use_the_batch_and_stay() -> None:
    encoder, views = small(), two_views()
    previous = PreviousModel(encoder, torch.nn.Identity()).encoder
    before = {name: value.clone() for name, value in previous.state_dict().items()}
    with views_in_one_pass(previous, 2), torch.no_grad():
        found = fused.forward(previous, torch.cat(views)).chunk(2)
    torch.testing.assert_close(list(found), [encoder(view) for view in views], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in previous.state_dict().items())


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_columns_with_their_lateral_connections(block: type) -> None:
    """Of three columns the first two are in eval mode, and the third trains."""
    views, found = two_views(), []
    for as_one in (True, False):
        torch.manual_seed(0)
        columns = Columns(ResNet(block, (1, 1), width=8), 1.0, tasks=4).to(DEVICE, memory_format=torch.channels_last)
        for task in range(3):
            columns.begin(task)
            run(columns, views, as_one=False)
        assert fused.can_fuse(columns)
        found.append(run(columns, views, as_one=as_one))
    same(*found)
    assert {name.split(".")[1] for name in found[0][1]} == {"2"}  # only the newest column and its laterals


SHAPES = [(4, 80, 12, 12), (4, 24, 18, 18)]  # two blocks of channels, the second partly filled; one block
if torch.cuda.is_available():
    SHAPES += [(512, 64, 32, 32), (512, 512, 4, 4), (32, 64, 32, 32)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_many_programs_are_whole_and_repeat(shape: tuple[int, ...]) -> None:
    """Partial sums of several programs: complete, and with the same bits in every repetition."""
    from ptlf.training.triton_bn import Tiles, norm_relu

    assert Tiles(torch.empty(shape), 2, "sums").parts > 4
    torch.manual_seed(0)
    x, residual = torch.randn(2, *shape).to(DEVICE)
    x[shape[0] // 2 :] += 1
    x, residual = (part.contiguous(memory_format=torch.channels_last).requires_grad_() for part in (x, residual))
    found = []
    for _ in range(20 if x.is_cuda else 2):
        norm = ViewBatchNorm2d(shape[1]).to(DEVICE)
        norm.views = 2
        out, _ = norm_relu(x, norm, residual)
        gradients = torch.autograd.grad(out.square().sum(), (x, residual, norm.weight, norm.bias))
        found.append([out.detach(), *gradients, norm.running_mean, norm.running_var])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    plain = torch.nn.BatchNorm2d(shape[1]).to(DEVICE).double()
    exact = [part.detach().double().requires_grad_() for part in (x, residual)]
    out = (torch.cat([plain(view) for view in exact[0].chunk(2)]) + exact[1]).relu()
    gradients = torch.autograd.grad(out.square().sum(), (*exact, plain.weight, plain.bias))
    expected = [out.detach(), *gradients, plain.running_mean, plain.running_var]
    for a, b in zip(found[0], expected, strict=True):
        assert (a.double() - b).abs().max() < 2e-5 * b.abs().max().clamp(min=1.0)


def test_both_gradients_are_searched_for_in_a_backward(monkeypatch) -> None:
    """cuDNN remembers algorithms by thread, and backward runs in autograd's."""
    asked = []
    monkeypatch.setattr(weight_gradients, "gradient", lambda *given, of_input: asked.append((given, of_input)))
    out, x, weight = torch.ones(2, 4, 3, 3), torch.ones(2, 3, 5, 5), torch.ones(4, 3, 3, 3)
    x = x.to(memory_format=torch.channels_last)
    like = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in (out, x, weight)]
    for of_input, expected in ((True, [True, False]), (False, [False])):
        asked.clear()
        anchor = torch.zeros((), device=DEVICE, requires_grad=True)
        weight_gradients._Search.apply(anchor, like, (1, 1), (0, 0), of_input).backward()
        assert [which for _, which in asked] == expected
        for (*tensors, stride, padding), _ in asked:
            assert [(t.shape, t.stride(), t.dtype) for t in tensors] == like
            assert (stride, padding) == ((1, 1), (0, 0)) and not any(t.any() for t in tensors)


@pytest.mark.gpu
def test_algorithms_are_searched_for_once_for_each_convolution(monkeypatch) -> None:
    searched, real = [], weight_gradients._search
    monkeypatch.setattr(weight_gradients, "_searched", set())
    monkeypatch.setattr(weight_gradients, "_search", lambda *given: searched.append(given) or real(*given))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    encoder, views = small(), two_views()
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            run(encoder, views, as_one=True)
    weight_gradients.end_searches()
    shapes = [(like[1][0], like[2][0]) for _, like, *_ in searched]
    assert len(shapes) == len(set(shapes)) == 4  # the stem is a product, and two others are alike
