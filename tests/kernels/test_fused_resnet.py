"""The fused forward against plain PyTorch. Without a GPU the kernels run in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from ptlf.encoders.norm import ViewBatchNorm2d, views_in_one_pass
from ptlf.encoders.resnet import BasicBlock, Bottleneck, ResNet
from ptlf.freezing import Freezer
from ptlf.freezing.cost import kept_bytes
from ptlf.freezing.kernels import MaskedReLU
from ptlf.kernels import FastParts
from ptlf.kernels import resnet as fused
from ptlf.methods.distillation import PreviousModel
from ptlf.methods.pnn import Columns

pytestmark = [pytest.mark.gpu(emulated=True), pytest.mark.slow]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNITS = ("stem.conv", *(f"stages.{path}" for path in ("0.0.conv1", "0.0.conv2", "1.0.conv1", "1.0.conv2")))
UNITS = (*UNITS, "stages.1.0.shortcut.0")


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
            features = fused.fused_forward(encoder, torch.cat(views)).chunk(len(views))
    else:
        features = [encoder(view) for view in views]
    (features[0].square().sum() + (features[0] * features[1]).sum() + features[1].sin().sum()).backward()
    gradients = {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}
    return [f.detach() for f in features], gradients, {name: b.clone() for name, b in encoder.named_buffers()}


SETS = [(), *((unit,) for unit in UNITS), UNITS[:3], UNITS[1:3], UNITS[2:4], UNITS[2:], UNITS[4:]]
SETS += [(UNITS[2], UNITS[3], UNITS[5]), UNITS]


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
            torch.testing.assert_close(fused.fused_forward(fast, views[0]), plain(views[0]), rtol=1e-4, atol=1e-5)
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


def test_a_stem_of_another_size() -> None:
    plain, fast = small(stem="imagenet"), small(stem="imagenet")
    for encoder in (plain, fast):
        torch.manual_seed(0)
        encoder.stem.conv = torch.nn.Conv2d(3, 8, 5, 2, 2, bias=False).to(DEVICE)
    views = two_views(pixels=16)
    same(run(fast, views, as_one=True), run(plain, views, as_one=False))


# Of 16 images: 8 channels of 8 x 8 in the first stage, 16 of 4 x 4 in the second.
@pytest.mark.parametrize(("frozen", "masked"), [(UNITS[1:3], 8192 + 4096), (UNITS[2:], 8192 + 2 * 4096)])
def test_a_mask_takes_one_bit(frozen: tuple[str, ...], masked: int) -> None:
    """Freezing frees what only frozen layers would save; a ReLU then saves one bit per element."""
    encoder, views = small(), torch.cat(two_views(size=8))
    freezer = Freezer(encoder, example=views[:2])

    def kept() -> int:
        held = [*encoder.parameters(), *encoder.buffers(), *freezer.folded]
        return kept_bytes(lambda: fused.fused_forward(encoder, views), held)

    before = kept()
    freezer.freeze(frozen)
    as_bits = kept()
    assert as_bits < 0.8 * before
    for module in encoder.modules():
        if isinstance(module.__dict__.get("forward"), MaskedReLU):
            module.forward = torch.relu
    assert kept() - as_bits == 4 * masked - masked // 8


PLAIN, STATISTICS, KEEPING = {}, {"batch_statistics": True}, {"save_memory": False}
WAYS = [("cifar", how, UNITS[part]) for how in (STATISTICS, KEEPING) for part in (slice(3), slice(2, 4), slice(4, 6))]
WAYS += [("cifar", STATISTICS | KEEPING, UNITS[:3]), ("imagenet", PLAIN, UNITS[:1]), ("imagenet", PLAIN, UNITS[1:3])]
WAYS += [("imagenet", STATISTICS, UNITS[:3]), ("imagenet", KEEPING, UNITS[:3])]


@pytest.mark.parametrize(("stem", "how", "frozen"), WAYS)
def test_other_stems_and_ways_to_freeze(stem: str, how: dict[str, bool], frozen: tuple[str, ...]) -> None:
    plain, fast = small(stem=stem), small(stem=stem)
    views = two_views(pixels=18 if stem == "imagenet" else 8)
    for encoder in (plain, fast):
        run(encoder, views, as_one=False)
        Freezer(encoder, example=views[0], **how).freeze(frozen)
    assert fused.can_fuse(fast)
    same(run(fast, views, as_one=True), run(plain, views, as_one=False))


def test_rocm_takes_pytorchs_own_convolution(monkeypatch) -> None:
    """cuDNN's convolution with bias and ReLU is not there."""
    from ptlf.kernels.norm import FrozenConvReLU

    x, weight, bias = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(4)
    for name in ("cudnn_convolution_relu", "cudnn_convolution_add_relu"):
        monkeypatch.setattr(torch, name, lambda *given: pytest.fail("is called"))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    for more in (None, torch.randn(2, 4, 6, 6)):
        out, _ = FrozenConvReLU.apply(x, weight, bias, more, (1, 1), (1, 1), False)
        expected = torch.nn.functional.conv2d(x, weight, bias, padding=1)
        torch.testing.assert_close(out, (expected if more is None else expected + more).relu())


def test_what_is_not_fused_and_takes_no_gradient() -> None:
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
    encoder, views = small(), two_views()
    Freezer(encoder, example=views[0]).freeze(UNITS[:3])
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        forward = fused.Forward(encoder, torch.bfloat16)
        x = forward.stem(encoder.stem, torch.cat(views))
        x = forward.block(encoder.stages[0][0], x)
    assert not x[0].requires_grad and not x[1].requires_grad


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_a_nan_is_not_hidden(stem: str) -> None:
    encoder, views = small(stem=stem), two_views()
    views[0][0, 0, 0, 0] = float("nan")
    assert fused.fused_forward(encoder, torch.cat(views)).isnan().all()


def test_steps_are_fused_and_teachers_too(monkeypatch) -> None:
    """What goes through the accelerator, with gradient or without; an evaluated encoder is not called through it."""
    called = []
    monkeypatch.setattr(fused, "fused_forward", lambda encoder, images: called.append(encoder) or images)
    images = two_views()[0]
    encoder, parts = small(), FastParts(batch=7, device=DEVICE)
    parts.has_kernels = True
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
        found = fused.fused_forward(previous, torch.cat(views)).chunk(2)
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
    from ptlf.kernels.norm import Tiles, norm_relu

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
