"""What people do around a frozen model that a freezer does not see: each row is right, or one sentence says so.

The reference is plain PyTorch: `requires_grad_(False)`, norms in eval mode.
"""

import copy
import functools
import io
import logging
import random
import warnings
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_freezer import compare, equal, plainly_frozen, snapshot
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental import optimization
from torch.nn.utils import fusion, parametrizations, parametrize

from ptlf.freezing import Freezer, correlation_ratios, find_units

Row = Callable[[], None]


class Net(nn.Module):
    """`choose` says what follows the second convolution, in every forward."""

    def __init__(self, inplace: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.c1, self.b1, self.c2, self.b2 = (
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 6, 3),
            nn.BatchNorm2d(6),
        )
        self.c3, self.b3, self.fc = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 4)
        self.relu = nn.ReLU(inplace)
        self.choose: list[Callable[[nn.Module, Tensor], Tensor]] = [lambda net, x: net.b2(x)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.b1(self.c1(x)))
        x = self.relu(self.choose[0](self, self.c2(x)))
        x = x + self.relu(self.b3(self.c3(F.pad(x, (1, 1, 1, 1)))))
        return self.fc(x.mean((2, 3)))


def images(n: int = 5) -> Tensor:
    return torch.randn(n, 3, 10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def net(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    model = make().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.train()


def frozen(*names: str, make: Callable[[], nn.Module] = Net, **options) -> tuple[nn.Module, Freezer, nn.Module, Tensor]:
    """A model with these units frozen, its freezer, a plainly frozen copy, and a batch."""
    model, x = net(make), images()
    twin = copy.deepcopy(model)
    freezer = Freezer(model, example=x[:2], **options)
    plainly_frozen(twin, find_units(twin, x[:2]), set(names))
    freezer.freeze(names)
    return model, freezer, twin, x


def near(found, expected, message: str = "") -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{message} {text}")


def same(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """Outputs and gradients."""
    found = []
    for module in (model, twin):
        module.zero_grad()
        output = module(x)
        output.square().mean().backward()
        found.append(
            {"output": output.detach(), **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}
        )
    assert found[0].keys() == found[1].keys(), found[0].keys() ^ found[1].keys()
    near(found[0], found[1])


ROWS: dict[str, Row] = {}


def row(function: Row) -> Row:
    ROWS[function.__name__] = function
    return function


# Folded norms


@row
def fuse_conv_bn_eval():
    model, _, twin, x = frozen("c2")
    model.eval(), twin.eval()
    expected = twin(x)
    model.c2, model.b2 = fusion.fuse_conv_bn_eval(model.c2, model.b2), nn.Identity()
    near(model(x), expected)
    model.c2.load_state_dict(model.c2.state_dict())
    near(model(x), expected, "loaded again")


@row
def fx_fuse():
    model, _, twin, x = frozen("0", "3", make=chain)
    near(optimization.fuse(model.eval())(x), twin.eval()(x))


@row
def ao_fuse_modules():
    model, _, twin, x = frozen("0", "3", make=chain)
    fused = torch.ao.quantization.fuse_modules(model.eval(), [["0", "1"], ["3", "4"]])
    near(fused(x), twin.eval()(x))
    near(model(x), twin(x))


@row
def convert_sync_batchnorm():
    model, _, twin, x = frozen("3", make=chain)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    near(converted.eval()(x), twin.eval()(x))


@row
def norm_replaced():
    model, freezer, twin, x = frozen("3", make=chain)
    model[4], twin[4] = nn.Identity(), nn.Identity()
    same(model, twin, x)
    freezer.thaw()
    twin.requires_grad_(True)
    twin.train()
    same(model, twin, x)


@row
def block_replaced_by_one_without_the_norm():
    """One forward is wrong, and a warning says so; from then on all are right."""
    model, _, twin, x = frozen("0.0", make=lambda: nn.Sequential(chain(), nn.Identity()))
    model[0], twin[0] = (nn.Sequential(*[part for place, part in enumerate(m[0]) if place != 1]) for m in (model, twin))
    model(x)
    says("did not get its last output", lambda: model(x))
    same(model, twin, x)


def chain() -> nn.Sequential:
    body = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def says(text: str, action: Callable[[], object]) -> None:
    """The action logs exactly one warning, with this text."""
    handler, logger = Messages(), logging.getLogger("ptlf.freezing")
    logger.addHandler(handler)
    try:
        action()
    finally:
        logger.removeHandler(handler)
    assert len(handler.texts) == bool(text) and all(text in found for found in handler.texts), handler.texts


@row
def quantize_dynamic():
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(300, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))

    model, _, twin, x = frozen("1", make=make)
    model, twin, x = model.float().eval(), twin.float().eval(), x.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            quantized = [torch.ao.quantization.quantize_dynamic(m, {nn.Linear}) for m in (model, twin)]
        except RuntimeError:
            pytest.skip("no quantised kernels here")
    torch.testing.assert_close(quantized[0](x), quantized[1](x))
    torch.testing.assert_close(model(x), twin(x))


class Domains(Net):
    """The norm depends on the domain."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.domain = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6)]), 0
        self.choose = [lambda net, x: net.norms[net.domain](x)]


@row
def norms_by_domain():
    model, _, twin, x = frozen("c2", make=Domains)
    for domain in (0, 1, 1, 0):
        model.domain = twin.domain = domain
        same(model, twin, x)
    assert equal(snapshot(model), snapshot(twin))


@row
def norm_skipped_at_times():
    model, _, twin, x = frozen("c2")
    same(model, twin, x)
    usual, model.choose = model.choose, [lambda net, x: x]
    twin.choose = model.choose
    model(x)
    says("did not get its last output", lambda: same(model, twin, x))
    model.choose = twin.choose = usual
    twin.load_state_dict(model.state_dict())
    same(model, twin, x)


@row
def norm_of_another_tensor():
    model, _, twin, x = frozen("c2")
    model.choose = twin.choose = [lambda net, x: net.b2(net.b2(x))]
    same(model, twin, x)


@row
def output_changed_between_layer_and_norm():
    model, _, twin, x = frozen("c2")
    model.choose = twin.choose = [lambda net, x: net.b2(x.contiguous(memory_format=torch.channels_last))]
    says("", lambda: [same(model, twin, x) for _ in range(3)])
    handles = [m.c2.register_forward_hook(lambda m, i, o: o.clone()) for m in (model, twin)]
    handles += [m.b2.register_full_backward_hook(lambda m, i, o: None) for m in (model, twin)]
    says("", lambda: [same(model, twin, x) for _ in range(3)])


@row
def frozen_and_thawed_in_the_layers_own_hook():
    model, freezer, twin, x = frozen()
    handle = model.c2.register_forward_hook(lambda *_: freezer.freeze("c2") and None)
    expected = copy.deepcopy(twin)
    expected.b2.eval()
    near(model(x), expected(x))
    handle.remove()
    model.c2.register_forward_hook(lambda *_: freezer.thaw() and None)
    says("did not get its last output", lambda: model(x))


@row
def exported():
    model, _, twin, x = frozen("c1", "c2")
    program, traced = torch.export.export(model.eval(), (x,)), torch.jit.trace(model, x)
    near(traced(x), twin.eval()(x))
    near(program.module()(x), twin.eval()(x))
    other = net()
    nn.init.normal_(other.c2.weight)
    state = other.state_dict()
    module = program.module()
    module.load_state_dict(state)
    near(module(x), other.eval()(x))
    traced.load_state_dict(state)
    near(traced(x), other(x))


@row
def onnx():
    pytest.importorskip("onnxruntime")
    import onnxruntime

    model, _, twin, x = frozen("c1", "c2")
    for dynamo in (True, False):
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model.float().eval(), (x.float(),), file, dynamo=dynamo, verbose=False)
        session = onnxruntime.InferenceSession(file.getvalue())
        (found,) = session.run(None, {session.get_inputs()[0].name: x.float().numpy()})
        torch.testing.assert_close(torch.from_numpy(found), twin.float().eval()(x.float()), rtol=1e-4, atol=1e-4)


@row
def script():
    model, freezer, twin, x = frozen("0", "3", make=chain)
    with pytest.raises(AttributeError, match="script cannot read a frozen Conv2d; thaw it first"):
        torch.jit.script(model)
    freezer.thaw()
    near(torch.jit.script(model.eval())(x), twin.eval()(x))


# Frozen stays frozen


@row
def requires_grad_of_the_whole_model():
    for names in (["c2"], ["fc"]):
        model, freezer, twin, x = frozen(*names)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        freezer.optimizers = [optimizer]
        freezer.thaw()
        freezer.freeze(names)
        model.requires_grad_(True)
        twin.requires_grad_(True)
        same(model, twin, x)
        says(f"unit {names[0]!r} is frozen, but trains", optimizer.step)
        says("", optimizer.step)
        before = snapshot(model)
        assert freezer.freeze(names) == names and freezer.freeze(names) == []
        model(x).sum().backward()
        optimizer.step()
        now = snapshot(model)
        assert all(torch.equal(now[key], before[key]) for key in now if key.split(".")[0] in names)


@row
def lbfgs():
    model, x = net(), images()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    freezer = Freezer(model, optimizer, example=x[:2])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    freezer.freeze(["c2", "fc"])
    before = snapshot(model)
    optimizer.step(closure)
    optimizer.step(closure)
    now = snapshot(model)
    moved = {key.split(".")[0] for key in now if not torch.equal(now[key], before[key])}
    assert moved == {"c1", "b1", "c3", "b3"}
    freezer.thaw()
    optimizer.step(closure)
    assert not torch.equal(model.fc.weight, before["fc.weight"])


@row
def old_spectral_norm():
    model, x = (
        net(lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Conv2d(4, 4, 3))),
        images(),
    )
    freezer = Freezer(model, example=x[:2])
    freezer.freeze("0")
    before = snapshot(model)
    model(x).sum().backward()
    assert equal(snapshot(model), before)
    freezer.thaw()
    model(x)
    assert not torch.equal(model[0].weight_u, before["0.weight_u"])


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 2, 3)), 0.1)
        return (x - self.mean[:, None, None]) * self.weight[:, None, None]


@row
def own_norm():
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), OwnNorm(), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(216, 3)
        )

    model, freezer, _, x = frozen("0", make=make)
    before = snapshot(model)
    model(x).sum().backward()
    assert equal(snapshot(model), before) and model[1].training
    freezer.thaw()
    model(x)
    assert not torch.equal(model[1].mean, before["1.mean"])


@row
def state_loaded_before_a_thaw():
    model, x = net(), images()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    freezer = Freezer(model, optimizer, example=x[:2])
    model(x).sum().backward()
    optimizer.step()
    old = optimizer.state_dict()
    freezer.freeze("c2")
    optimizer.load_state_dict(old)
    freezer.thaw()
    assert model.c2.weight not in optimizer.state and model.c1.weight in optimizer.state
    freezer.freeze("c2")
    optimizer.load_state_dict(old)
    freezer.load_state_dict({"frozen": []})  # a resume from before the freeze
    assert model.c2.weight in optimizer.state


@row
def update_bn():
    for options in ({}, {"batch_statistics": True}, {"save_memory": False}):
        model, freezer, _, x = frozen("c1", "c2", **options)
        average = torch.optim.swa_utils.AveragedModel(model)
        for module in (model, average.module):
            before = snapshot(module)
            torch.optim.swa_utils.update_bn([x, x], module)
            now = snapshot(module)
            held = {key for key in now if key.split(".")[0] in ("b1", "b2") and torch.equal(now[key], before[key])}
            assert len(held) == 10, options
            assert not torch.equal(now["b3.running_mean"], before["b3.running_mean"])
        freezer.thaw()
        model.b1.reset_running_stats()
        assert not model.b1.running_mean.any()


# What is made trainable inside a frozen unit trains


class LoRA(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full_like(weight, 0.01))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a


def _lora(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", LoRA(layer.weight))


def _bias(layer: nn.Module) -> None:
    layer.bias.requires_grad_(True)


def _new(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


@row
def trainable_inside():
    for change in (_lora, _bias, _new):
        for place in ("c2", "b2", "fc"):
            if (change, place) == (_lora, "b2"):
                continue
            model, freezer, twin, x = frozen("c2", "fc")
            for module in (model, twin):
                change(getattr(module, place))
            for _ in range(2):
                same(model, twin, x)
            freezer.thaw()
            assert all(parameter.requires_grad for parameter in model.parameters()), (change, place)
            assert not any("forward" in module.__dict__ for module in model.modules())
            plainly_frozen(twin, [], set())
            twin.load_state_dict(model.state_dict())
            same(model, twin, x)


@row
def surgery_then_thaw():
    model, freezer, twin, x = frozen("c2")
    for module in (model, twin):
        parametrizations.weight_norm(module.c2)
        module.b2.bias = None
    same(model, twin, x)
    freezer.thaw()
    assert all(parameter.requires_grad for parameter in model.parameters()) and freezer.frozen == ()
    model.c1.weight.requires_grad_(False)
    freezer.freeze("c1")
    freezer.thaw()
    assert not model.c1.weight.requires_grad and model.b1.weight.requires_grad


@row
def error_inside_freeze():
    model, x = net(), images()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    freezer = Freezer(model, optimizer, example=x[:2])
    model(x).sum().backward()
    optimizer.step()
    model.b3.running_var = torch.ones(3, dtype=torch.float64)  # does not fit
    with pytest.raises(RuntimeError):
        freezer.freeze(["c1", "c2", "c3"])
    assert freezer.frozen == () and all(p.requires_grad and p.grad is not None for p in model.parameters())
    assert len(optimizer.state) == len(list(model.parameters()))
    assert not any("forward" in module.__dict__ or "_frozen_by" in module.__dict__ for module in model.modules())


@row
def functional_calls():
    model, _, twin, x = frozen("c1", "c2", "fc")
    given = {name: value.detach().mul(1.5).requires_grad_() for name, value in twin.named_parameters()}
    expected = torch.autograd.grad(functional_call(twin, given, (x,)).square().mean(), list(given.values()))
    found = torch.autograd.grad(functional_call(model, given, (x,)).square().mean(), list(given.values()))
    near(found, expected)
    near(functional_call(model, {k: v.detach() for k, v in given.items()}, (x,)), functional_call(twin, given, (x,)))
    same(model, twin, x)


@row
def transforms():
    model, _, twin, x = frozen("c1", "c2")
    model.b3.eval(), twin.b3.eval()
    results = []
    for module in (model, twin):
        trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

        def loss(trained: dict[str, Tensor], image: Tensor, module=module) -> Tensor:
            return functional_call(module, trained, (image[None],)).square().mean()

        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(trained, x)
        slope = torch.func.jvp(module, (x,), (torch.ones_like(x),))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.unpack_dual(module(torch.autograd.forward_ad.make_dual(x, x))).tangent
        jacobian = torch.func.jacrev(module)(x[:1])
        params, buffers = torch.func.stack_module_state([copy.deepcopy(module), copy.deepcopy(module)])
        base = copy.deepcopy(module).to("meta")
        ensemble = torch.func.vmap(lambda p, b, base=base: functional_call(base, (p, b), (x,)))(params, buffers)
        results.append((each, slope, dual, jacobian, ensemble))
    near(results[0], results[1])
    same(model, twin, x)


@row
def lazy_modules():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="lazy layers without weights yet; run one forward first"):
        Freezer(model, example=torch.randn(2, 3, 8, 8))
    model(torch.randn(2, 3, 8, 8))
    assert len(Freezer(model, example=torch.randn(2, 3, 8, 8)).units) == 2


@row
def frozen_in_gradient_hooks():
    model, x = net(), images()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    freezer = Freezer(model, optimizer, example=x[:2])
    model.c1.weight.register_post_accumulate_grad_hook(lambda p: freezer.freeze("c1") and None)
    model(x).sum().backward()
    before = snapshot(model)
    optimizer.step()
    now = snapshot(model)
    assert freezer.frozen == ("c1",) and torch.equal(now["c1.weight"], before["c1.weight"])
    model(x).sum().backward()
    optimizer.step()
    assert torch.equal(snapshot(model)["c1.weight"], before["c1.weight"])


@row
def inference_mode():
    model, x = net(), images()
    with torch.inference_mode():
        freezer = Freezer(model)
        freezer.freeze("c2")
        cost = freezer.estimate(2, x)
    assert cost == freezer.estimate(2, x) and cost.if_frozen.bytes < cost.current.bytes
    twin = net()
    compare(model, freezer, twin, x)


# Estimates change nothing


class Caching(nn.Module):
    """Every way to keep a tensor in forward."""

    shared: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 6)
        self.tables: dict[int, Tensor] = {}
        self.latest: Tensor | None = None
        self.generator = torch.Generator()
        self.register_buffer("grid", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        random.random(), np.random.rand(), torch.rand(1), torch.rand(1, generator=self.generator)  # noqa: NPY002
        x, side = self.conv(x), x.shape[-1]
        if side not in self.tables:
            self.tables[side] = x.new_ones(()) * self.scale.mean()
        if side not in self.shared:
            self.shared[side] = torch.ones((), device=x.device, dtype=x.dtype)
        if len(self.grid) != side:
            self.register_buffer("grid", torch.ones(side, dtype=x.dtype))
        if self.latest is None or self.latest.shape != x.shape:
            self.latest = x.detach()
        self.scale.mul_(0.5).add_(0.5)
        x = x * self.tables[side] * self.shared[side] * table(side, x.device) * self.grid[:1]
        return self.head(x.mean((2, 3)) * self.scale)


@functools.lru_cache
def table(side: int, device: torch.device) -> Tensor:
    return torch.ones((), device=device, dtype=torch.float64)


kept: dict[int, Tensor] = {}


@functools.lru_cache
def of_a_tensor(x: Tensor) -> Tensor:
    return x * 2


@row
def estimates_change_nothing():
    for make in (Caching, Net):
        model, x = net(make), images()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        freezer = Freezer(model, optimizer, example=x[:2])
        model(x).sum().backward()
        optimizer.step()
        model(x).sum().backward()
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        before, grads = snapshot(model), [p.grad.clone() for p in model.parameters()]
        moments = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
        held = {name: repr(vars(module)) for name, module in model.named_modules()}
        numbers = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
        for size in (10, 12, 14):
            freezer.estimate(1, torch.randn(4, 3, size, size, dtype=torch.float64, generator=torch.Generator()))
        freezer.measure(x)
        freezer.budget(10**9, torch.empty(7, 3, 16, 16, dtype=torch.float64, device="meta"))
        assert (random.getstate(), str(np.random.get_state())) == numbers[:2] and torch.equal(  # noqa: NPY002
            torch.get_rng_state(), numbers[2]
        )
        assert equal(snapshot(model), before) and {name: repr(vars(m)) for name, m in model.named_modules()} == held
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
        assert all(
            torch.equal(optimizer.state[p]["momentum_buffer"], m)
            for p, m in zip(model.parameters(), moments, strict=True)
        )
        for size in (10, 12, 14, 16):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3, size, size, dtype=torch.float64)).square().mean()
            loss.backward()
            optimizer.step()
            assert type(loss) is Tensor and loss.item() > 0
        assert not torch.equal(model.head.weight if make is Caching else model.fc.weight, before[[*before][-2]])


@row
def estimates_that_leave_a_placeholder_are_refused():
    model, x = net(chain), images()
    handle = model[0].register_forward_hook(lambda m, i, o: kept.__setitem__(0, o))
    freezer = Freezer(model, example=x[:2])
    with pytest.raises(RuntimeError, match="has kept a tensor of the estimate outside of the module"):
        freezer.estimate(1, x)
    handle.remove()
    kept.clear()
    assert freezer.estimate(1, x).names == ("0",)
    model, x = net(chain), images()
    model[0].register_forward_hook(lambda m, i, o: of_a_tensor(o))
    with pytest.raises(RuntimeError, match="has kept a tensor"):
        Freezer(model, example=x[:2]).estimate(1, x)
    of_a_tensor.cache_clear()


@row
def estimate_of_dinov3():
    transformers = pytest.importorskip("transformers")
    config = transformers.DINOv3ViTConfig(
        image_size=16, patch_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.DINOv3ViTModel(config).train()
    freezer = Freezer(model, example=torch.randn(2, 3, 16, 16))
    x = torch.randn(4, 3, 24, 24)
    assert freezer.estimate(3, x).if_frozen.bytes < freezer.estimate(3, x).current.bytes
    optimizer, before = torch.optim.SGD(model.parameters(), 0.1), snapshot(model)
    loss = model(x).last_hidden_state.square().mean()
    loss.backward()
    optimizer.step()
    assert loss.item() > 0 and not equal(snapshot(model), before)


# Numbers


@row
def autocast_in_bfloat16():
    """Against float64, gradients are as far off as those of plain PyTorch, in the mean over seeds."""
    for names in (["c1"], ["c2"], ["c1", "c2", "c3"]):
        errors = []
        for seed in range(8):
            mine, _, plain, x = frozen(*names, make=lambda: Net(seed=seed))  # noqa: B023
            exact, found = copy.deepcopy(plain), []
            for module, batch in ((mine.float(), x.float()), (plain.float(), x.float()), (exact, x)):
                with torch.autocast("cpu", torch.bfloat16, enabled=module is not exact):
                    output = module(batch)
                output.double().square().mean().backward()
                found.append({name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None})
            used = [name for name, value in found[2].items() if value.norm() > 1e-10]  # a bias before a norm has none
            errors.append([[(g[n] - found[2][n]).norm() / found[2][n].norm() for n in used] for g in found[:2]])
        of_mine, of_plain = torch.tensor(errors).mean((0, 2))
        assert of_mine < 1.5 * of_plain, (names, of_mine, of_plain)


@row
def inplace_relus():
    for names in (["c1"], ["c2"], ["c3"], ["c1", "c2"], ["c1", "c2", "c3"]):
        same_with = functools.partial(Net, True)
        model, _, twin, x = frozen(*names, make=same_with)
        for _ in range(2):
            same(model, twin, x)


@row
def ratios_of_tiny_and_huge_inputs():
    for dtype, scales in ((torch.float64, (1e-160, 1e-300, 1e160)), (torch.float32, (1e-25, 1e-36, 1e25))):
        for rows in (4, 60):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(12, 5)).to(dtype)
            x = torch.randn(rows, 12, dtype=dtype) * torch.linspace(0.01, 1, 12, dtype=dtype)
            y = torch.randn(9, 12, dtype=dtype)

            def ratio(scale: float, x=x, y=y, model=model) -> float:
                given = [x[:2] * 0, x[:1] * scale * 1e-3, x * scale] if len(x) > 9 else x * scale
                return correlation_ratios(model, given, lambda: model(y).square().sum() * scale, 0.9, batches=1)["0"]

            vectors = np.linalg.svd(x.double().numpy().T, full_matrices=False)
            count = int((np.cumsum(vectors[1] ** 2) < 0.9 * (vectors[1] ** 2).sum()).sum()) + 1
            loss = model(y).square().sum()
            (gradient,) = torch.autograd.grad(loss, model[0].weight)
            gradient = gradient.double().numpy()
            expected = np.linalg.norm(gradient @ vectors[0][:, :count]) / np.linalg.norm(gradient)
            for scale in (1.0, *scales):
                assert ratio(scale) == pytest.approx(expected, rel=1e-4), (dtype, rows, scale)


@pytest.mark.parametrize("name", ROWS)
def test_unusual(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        ROWS[name]()
