import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ptlf.freezing.cost import kept_bytes
from ptlf.freezing.kernels import FrozenLayer, MaskedReLU, fold, masked_relu, pack, unpack

FORMATS = [torch.contiguous_format, torch.channels_last]
CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 5), "stride": (3, 2), "padding": (0, 2), "bias": False},
    {"kernel_size": 3, "dilation": 2, "padding": 2, "groups": 2}, {"kernel_size": 7, "stride": 4, "padding": 3},
    {"kernel_size": 1, "stride": 3}, {"kernel_size": 4, "padding": "same"}, {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
]  # fmt: skip


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("arguments", CONVOLUTIONS, ids=str)
def test_frozen_convolution_equals_pytorch(arguments, memory_format):
    torch.manual_seed(0)
    layer = frozen(nn.Conv2d(4, 8, **arguments).double()).to(memory_format=memory_format)
    for height, width in itertools.product((9, 10, 11), (12, 13)):
        x = torch.randn(2, 4, height, width, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
        ours, reference = FrozenLayer(layer)(x), layer(x)
        upstream = torch.randn_like(reference)
        (gradient,) = torch.autograd.grad(ours, x, upstream)
        (expected,) = torch.autograd.grad(reference, x, upstream)
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
        assert gradient.is_contiguous(memory_format=memory_format)


def test_frozen_convolution_keeps_its_weight_alone_and_takes_one_image():
    layer, x = frozen(nn.Conv2d(3, 4, 3)), torch.randn(3, 8, 8)
    torch.testing.assert_close(FrozenLayer(layer)(x), layer(x))
    assert not masked_relu(FrozenLayer(layer)(x[None])).requires_grad
    with torch.autocast("cpu", torch.bfloat16):  # leaves double alone, like PyTorch
        assert FrozenLayer(layer.double())(x.double()).dtype == torch.float64
    layer = frozen(nn.Conv2d(4, 8, 3))
    x = torch.randn(2, 4, 16, 16, requires_grad=True)
    assert kept_bytes(lambda: layer(x), layer.parameters()) == x.numel() * 4
    assert kept_bytes(lambda: FrozenLayer(layer)(x)) == layer.weight.numel() * 4
    assert kept_bytes(lambda: FrozenLayer(layer)(x), layer.parameters()) == 0


@pytest.mark.parametrize(("forward_inside", "backward_inside"), [(True, False), (True, True), (False, True)])
def test_autocast_like_pytorch(forward_inside, backward_inside):
    """Backward keeps the precision of the forward."""
    layer, x = frozen(nn.Conv2d(4, 8, 3)), torch.randn(2, 4, 8, 8, requires_grad=True)

    def run(forward):
        with torch.autocast("cpu", torch.bfloat16, enabled=forward_inside):
            y = forward(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_inside):
            return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    (y, gradient), (reference, expected) = run(FrozenLayer(layer)), run(layer)
    assert y.dtype == (torch.bfloat16 if forward_inside else torch.float32) and gradient.dtype == torch.float32
    torch.testing.assert_close(y, reference)
    near = {"rtol": 0.02, "atol": 0.02} if forward_inside else {}
    torch.testing.assert_close(gradient, expected, **near)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_fold_is_layer_then_norm_in_the_weights_dtype_and_layout(affine, bias):
    torch.manual_seed(0)
    for layer, norm, shape in (
        (nn.Conv2d(4, 6, 3, groups=2, bias=bias), nn.BatchNorm2d(6, affine=affine), (2, 4, 8, 8)),
        (nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6, affine=affine), (5, 4)),
    ):
        for tensor in (norm.running_mean, norm.weight, norm.bias):
            if tensor is not None:
                nn.init.normal_(tensor)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        norm, layer, x = frozen(norm.eval().double()), frozen(layer.double()), torch.randn(shape).double()
        torch.testing.assert_close(FrozenLayer(layer, norm, nn.Sequential(norm))(x), norm(layer(x)), rtol=0, atol=1e-12)
    layer = nn.Conv2d(4, 6, 3).to(torch.bfloat16).to(memory_format=torch.channels_last)
    weight, bias = fold(layer, nn.BatchNorm2d(6))
    assert weight.dtype == bias.dtype == torch.bfloat16
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_folded_layer_follows_its_sources_and_keeps_its_memory():
    layer, norm = frozen(nn.Conv2d(3, 4, 3)), frozen(nn.BatchNorm2d(4).eval())
    override, x = FrozenLayer(layer, norm, nn.Sequential(norm)), torch.randn(2, 3, 8, 8)
    override.refresh()
    address = override.weight.data_ptr()
    for change in (
        lambda: layer.load_state_dict(nn.Conv2d(3, 4, 3).state_dict()),
        lambda: norm.running_mean.add_(1),
        lambda: norm.running_var.mul_(2),
        lambda: setattr(norm.weight, "data", torch.rand(4)),
    ):
        with torch.no_grad():
            change()
        torch.testing.assert_close(override(x), norm(layer(x)))
        override.waiting.clear()
    assert override.weight.data_ptr() == address
    layer.double(), norm.double()
    torch.testing.assert_close(override(x.double()), norm(layer(x.double())))


def test_pack_and_unpack():
    for shape in ((1,), (8,), (5, 3), (2, 3, 5, 7), (0, 4), (2, 16, 8, 8), (1, 4, 1, 1)):
        mask = torch.rand(shape) > 0.5
        bits = pack(mask)
        assert bits.dtype == torch.uint8 and bits.numel() == (mask.numel() + 7) // 8
        assert torch.equal(unpack(bits, mask.shape, channels_last=False), mask), shape
        if mask.ndim == 4 and mask.shape[1] > 1 and mask.shape[2] > 1:
            mask = mask.to(memory_format=torch.channels_last)
            assert torch.equal(unpack(pack(mask), mask.shape, channels_last=True), mask), shape


@pytest.mark.parametrize("memory_format", FORMATS)
def test_masked_relu_equals_relu_on_one_bit_per_element(memory_format):
    base = torch.randn(2, 16, 4, 4).to(memory_format=memory_format)
    base[0, 0, 0] = 0.0
    x = base.requires_grad_()
    y = masked_relu(x)
    upstream = torch.randn_like(y)
    assert torch.equal(y, F.relu(x))
    (gradient,) = torch.autograd.grad(y, x, upstream)
    assert torch.equal(gradient, torch.autograd.grad(F.relu(x), x, upstream)[0])
    assert gradient.is_contiguous(memory_format=memory_format)
    assert kept_bytes(lambda: masked_relu(x)) == x.numel() // 8
    assert kept_bytes(lambda: F.relu(x)) == x.numel() * 4


def test_relus_of_odd_tensors_and_in_place():
    """Expanded, transposed or sliced, and with an upstream gradient that is not finite."""
    for view in (lambda t: t.t(), lambda t: t[:, :1].expand(-1, 5), lambda t: t[:, ::2]):
        x = torch.randn(6, 7, requires_grad=True)
        upstream = torch.randn_like(F.relu(view(x)))
        (gradient,) = torch.autograd.grad(masked_relu(view(x)), x, upstream)
        assert torch.equal(gradient, torch.autograd.grad(F.relu(view(x)), x, upstream)[0])
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(masked_relu(x), x, torch.tensor([float("inf"), 2.0]))
    assert gradient.tolist() == [0.0, 2.0]
    x = torch.randn(4, 8, requires_grad=True)
    for relu in (nn.ReLU(inplace=True), MaskedReLU(nn.ReLU(inplace=True))):
        y = x * 1
        z = relu(y)
        assert z is y and torch.equal(z, F.relu(x))
        (gradient,) = torch.autograd.grad((z + y).sum(), x)
        assert torch.equal(gradient, 2.0 * (x > 0))
