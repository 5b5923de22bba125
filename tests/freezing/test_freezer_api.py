"""What people type: which units, when, for how long, and what it would save."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from architectures import hugging
from promise import network as plain_network
from test_freezer import OPTIMIZERS, SOME, compare, equal, gradients, images, small, snapshot
from torch import Tensor, nn

from ptlf.freezing.cost import backward_flops, format_bytes, kept_bytes, parse_bytes, state_bytes
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.schedule import FreezeSchedule

ALL = ("stem.conv", *(f"stages.{path}" for path in ("0.0.conv1", "0.0.conv2", "1.0.conv1", "1.0.conv2")))
ALL = (*ALL, "stages.1.0.shortcut.0")


def test_units_are_chosen_as_people_write_them():
    model = small()
    for wanted, expected in (
        ("stages.1.0.conv1", ALL[3:4]),
        ("stages.0", ALL[1:3]),
        (re.compile(r"conv1$"), (ALL[1], ALL[3])),
        (0, ()),
        (2, ALL[:2]),
        (6, ALL),
        (lambda unit: unit.layer.kernel_size == (1, 1), ALL[5:]),
        (lambda unit: False, ()),
        (["stem", re.compile("shortcut")], (ALL[0], ALL[5])),
        (iter(["stages.1", "stem.conv"]), (ALL[0], *ALL[3:])),
        ([], ()),
        (model.stages[0], ALL[1:3]),
        ([model.stem.conv, model.stages[1][0].shortcut], (ALL[0], ALL[5])),
    ):
        freezer = Freezer(model)
        assert tuple(freezer.freeze(wanted)) == expected == freezer.frozen
        assert set(freezer.freeze(len(ALL))) == set(ALL) - set(expected)
        assert freezer.thaw(model) == list(ALL)
    assert freezer.estimate(model.stages[1], images()).names == ALL[3:]
    model = nn.Sequential()
    model.layer1, model.layer10 = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    assert Freezer(model, example=torch.randn(2, 4)).freeze("layer1") == ["layer1.0"], "a prefix ends at a dot"
    freezer = Freezer(small())
    for wanted, error, message in (
        ("stage", ValueError, "unknown unit 'stage'"),
        ("", ValueError, "unknown unit ''"),
        ("stem.bn", ValueError, "'stem.bn' is not a unit of its own: it freezes with 'stem.conv'"),
        (re.compile("attention"), ValueError, "'attention' is found in no name"),
        (nn.Identity(), ValueError, f"no unit lies in this Identity; the units are {', '.join(ALL)}"),
        (7, ValueError, "there are 6 units"),
        (-1, ValueError, "there are 6 units"),
        (1.5, TypeError, "'float' object is not iterable"),
        (["stem.conv", "nothing"], ValueError, "unknown unit 'nothing'"),
    ):
        for act in (freezer.freeze, freezer.thaw):
            with pytest.raises(error, match=re.escape(message)):
                act(wanted)
        assert freezer.frozen == (), wanted


def test_thawing_some_units_restores_those_alone_also_after_an_error():
    model = small()
    freezer = Freezer(model)
    freezer.freeze("stages")

    def patched() -> set[str]:
        return {name for name, module in model.named_modules() if "forward" in module.__dict__}

    everything = patched()
    assert {"stages.0.0.relu2", "stages.1.0.bn1", "stages.1.0.conv1"} <= everything
    assert freezer.thaw("stages.1.0.conv1") == ["stages.1.0.conv1"]
    # The thawed convolution saves the output of stages.0.0.relu2 again.
    assert everything - patched() == {"stages.0.0.relu2", "stages.1.0.bn1", "stages.1.0.conv1"}
    before = snapshot(model)
    model.train()(images())
    moved = {key for key, value in snapshot(model).items() if not torch.equal(value, before[key])}
    assert {key.rpartition(".")[0] for key in moved} == {"stem.bn", "stages.1.0.bn1"}
    freezer.freeze("stages.1.0.conv1")
    assert patched() == everything
    assert freezer.thaw() == list(ALL[1:]) and patched() == set()
    freezer = Freezer(small())
    freezer.freeze("stem")
    with pytest.raises(KeyError), freezer.temporarily_frozen(3) as names:
        assert names == list(ALL[1:3]) and freezer.frozen == ALL[:3]
        raise KeyError
    assert freezer.frozen == ALL[:1]


def test_timetables_freeze_and_thaw():
    freezer = Freezer(small())
    plan = freezer.schedule({0: 6, 2: 3, 5: 0})
    for step, count in enumerate([6, 6, 3, 3, 3, 0, 0]):
        plan.at(step)
        assert len(freezer.frozen) == count, step
    plan.at(3)  # a loop that resumes there
    assert freezer.frozen == ALL[:3]
    plan = freezer.schedule({0.29: "stem", 0.5: ["stem", "stages.1"]}, total=100)
    assert plan.at(28) == [] and plan.at(29) == ["stem.conv"] and plan.at(49) == []
    assert plan.at(50) == list(ALL[3:]) and freezer.frozen == (ALL[0], *ALL[3:])
    share = freezer.schedule({0.0: 1, 0.5: 2})
    assert [len(share.names(now)) for now in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 2, 2]
    with pytest.raises(ValueError, match="2 is not a fraction of training; give `total`"):
        share.at(2)
    with pytest.raises(ValueError, match=r"1\.5 is not a fraction"):
        freezer.schedule({1.5: 1})
    freezer, schedule = Freezer(small()), FreezeSchedule(0.0, 1.0, 10, "linear")
    by_epoch = freezer.schedule(schedule, order=ALL[::-1])
    expected = [len(by_epoch.names(epoch)) for epoch in range(10)]
    assert expected[0] == 0 and expected[-1] == len(ALL)
    assert by_epoch.names(12) == by_epoch.names(9)
    by_epoch.at(5)
    assert set(freezer.frozen) == set(ALL[::-1][: expected[5]])
    for total in (1000, 20, 5):
        by_step = freezer.schedule(schedule, total)
        assert [len(by_step.names(step)) for step in range(total)] == [expected[s * 10 // total] for s in range(total)]
        assert by_step.names(total) == list(ALL)
    by_fraction = freezer.schedule(schedule, total=1)
    assert [len(by_fraction.names(epoch / 10)) for epoch in range(10)] == expected
    with pytest.raises(ValueError, match=r"0\.99 is not an epoch of this freeze schedule, which has 10; give `total`"):
        by_epoch.at(0.99)
    with pytest.raises(ValueError, match="'nothing', which is not a unit"):
        freezer.schedule(FreezeSchedule(), order=["nothing"])


def test_several_optimizers():
    model, x = small(), images()
    optimizers = [OPTIMIZERS["sgd"](model.stem.parameters()), OPTIMIZERS["adamw"](model.stages.parameters())]
    freezer = Freezer(model, optimizers)
    for frozen in ([], ["stem", "stages.1"]):
        freezer.freeze(frozen)
        before = [parameter.clone() for parameter in model.stem.parameters()]
        gradients(model, x)
        for optimizer in optimizers:
            optimizer.step()
        kept = [torch.equal(a, b) for a, b in zip(before, model.stem.parameters(), strict=True)]
        assert set(kept) == {bool(frozen)}
    assert not optimizers[0].state and len(optimizers[1].state) == 6
    with pytest.raises(TypeError, match="not a int"):
        Freezer(model, [1, 2])


def test_loaded_states_freeze_and_thaw_and_count_at_once_in_compiled_code():
    model, other = small(), small(1)
    freezer = Freezer(model)
    freezer.freeze(SOME)
    model.load_state_dict(other.state_dict(), assign=True)
    assert {unit.name for unit in freezer.units if not unit.layer.weight.requires_grad} == set(SOME)
    torch.testing.assert_close(model.eval()(images()), other.eval()(images()))
    freezer.thaw()
    assert all(parameter.requires_grad for parameter in model.parameters())
    model, other, x = small(0), small(1).eval(), images()
    freezer = Freezer(model.eval())
    freezer.freeze("stages")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    assert not torch.allclose(compiled(x), other(x))
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(x), other(x))
    compiled.load_state_dict({f"_orig_mod.{key}": value for key, value in small(2).state_dict().items()})
    torch.testing.assert_close(compiled(x), small(2).eval()(x))
    third = small(3).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_(third.state_dict()[key])
    freezer.refresh()
    torch.testing.assert_close(compiled(x), third(x))
    freezer.thaw()
    assert not any(module._load_state_dict_post_hooks for module in model.modules())


def network(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    if name == "convnext":
        pytest.importorskip("transformers")
        return hugging("convnext")[0], images(batch, 16)
    return plain_network(name)[0], images(batch, 16)


@pytest.mark.parametrize("share", ["first", "middle", "all"])
@pytest.mark.parametrize("name", ["resnet", "vit", "convnext"])
def test_the_estimate_is_what_is_then_measured(name, share):
    """Bytes and FLOPs within 3 % of a step with another loss, gradients and optimizer state exactly."""
    model, x = network(name, 8)
    optimizer = torch.optim.AdamW(model.train().parameters(), 0.01)
    freezer = Freezer(model, optimizer, example=x[:2])
    names = [unit.name for unit in freezer.units]
    third = len(names) // 3
    chosen = {"first": names[:third], "middle": names[third : 2 * third], "all": names}[share]
    estimate = freezer.estimate(chosen, x)
    assert freezer.frozen == () and not optimizer.state and all(p.requires_grad for p in model.parameters())

    for cost in (estimate.current, estimate.if_frozen):
        held = [*model.parameters(), *model.buffers(), *freezer.folded]

        def loss() -> Tensor:
            return F.mse_loss(model(x), torch.zeros(()).expand_as(model(x).detach()))

        kept = kept_bytes(loss, exclude=held)
        trained = loss()
        flops = backward_flops(trained) if trained.requires_grad else 0
        assert cost.kept_bytes == pytest.approx(kept, rel=0.03, abs=x.nbytes // 10)
        assert cost.backward_flops == pytest.approx(flops, rel=0.03)
        optimizer.step()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        unused = [p for key, p in model.named_parameters() if "inner.layernorm" in key]  # no output depends on it
        assert cost.gradient_bytes == sum(g.nbytes for g in grads) + sum(p.nbytes for p in unused)
        moments = [value for state in optimizer.state.values() for value in state.values()]
        steps = 4 * len(unused)
        assert cost.optimizer_bytes == sum(v.nbytes for v in moments) + 2 * sum(p.nbytes for p in unused) + steps
        assert cost.held_bytes == sum(tensor.nbytes for tensor in held)
        model.zero_grad()
        freezer.freeze(chosen)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_known_before_its_first_step(kind):
    model = small()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    expected = state_bytes(optimizer, list(model.parameters()))
    assert not optimizer.state
    gradients(model, images())
    optimizer.step()
    scheduler.step()
    found = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    assert expected == found == state_bytes(optimizer, list(model.parameters()))


def test_an_estimate_takes_shapes_alone_and_leaves_no_fake_tensor_behind():
    model, x = small(), images()
    freezer = Freezer(model, OPTIMIZERS["adamw"](model.parameters()))
    estimate = freezer.estimate(3, x)
    assert freezer.estimate(3, torch.empty(x.shape, device="meta")) == estimate and estimate.names == ALL[:3]
    with torch.inference_mode():
        assert freezer.estimate(3, x) == freezer.estimate(3, images()) == estimate
    assert str(estimate).startswith("3 units to freeze ") and "activation memory" in str(estimate)
    batches = [torch.empty(n, *x.shape[1:], device="meta") for n in (4, 5, 1_000_000)]
    kept = [freezer.estimate(3, batch).if_frozen.kept_bytes for batch in batches]
    assert kept[2] == kept[0] + (kept[1] - kept[0]) * (1_000_000 - 4)

    def look(module: nn.Module, args: object, output: Tensor) -> None:
        float(output.detach().sum())

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()), torch.randn(6, 4)
    model[0].register_forward_hook(look)
    freezer = Freezer(model, example=x)
    estimate = freezer.estimate("0", x)
    assert estimate.current.kept_bytes == kept_bytes(lambda: model(x).sum(), exclude=model.parameters())
    freezer.freeze("0")
    assert estimate.if_frozen.kept_bytes == kept_bytes(lambda: model(x).sum(), exclude=model.parameters())
    model, other, x = small().train(), small(1), images()
    twin, freezer = copy.deepcopy(model), Freezer(model)
    with torch.autocast("cpu", torch.bfloat16):
        low = freezer.estimate(2, x)
        model(x).float().sum().backward()
    assert low.current.kept_bytes < freezer.estimate(2, x).current.kept_bytes
    assert all(type(parameter.grad) is Tensor for parameter in model.parameters())
    freezer.freeze(2)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    model.double()  # the folded weights are not of this type yet
    freezer.estimate(4, x.double())
    freezer.freeze("stages.1")
    compare(model, freezer, twin.double(), x.double())
    assert {type(value) for value in gradients(model, x.double()).values()} == {Tensor}


def test_a_budget_freezes_few_units_that_save_much(caplog):
    model, x = network("resnet", 8)
    freezer = Freezer(model.train(), torch.optim.AdamW(model.parameters()), example=x[:2])
    nothing, everything = freezer.estimate([], x).current.bytes, freezer.estimate(len(freezer.units), x).if_frozen.bytes
    assert freezer.budget(nothing, x).names == ()
    for share in (0.25, 0.75):
        limit = int(everything + share * (nothing - everything) - 1)
        found = freezer.budget(limit, x)
        assert found.if_frozen.bytes <= limit < found.current.bytes and freezer.frozen == ()
        assert freezer.estimate(found.names, x) == found
        # Of those that save the most bytes, as many as make it fit, every one is needed.
        order = sorted(freezer.saved, key=lambda unit: freezer.saved[unit], reverse=True)
        least = order[: max(map(order.index, found.names))]
        assert freezer.estimate(least, x).if_frozen.bytes > limit
        for name in found.names:
            assert freezer.estimate([other for other in found.names if other != name], x).if_frozen.bytes > limit
    assert caplog.messages == []
    everyone = f"a step takes at most {everything} only if no unit trains"
    for frozen in (0, 3):
        freezer.freeze(frozen)
        assert len(freezer.budget(everything, x).names) == len(freezer.units) - frozen
        assert len(caplog.messages) == 1 and everyone in caplog.text
        caplog.clear()
    freezer.thaw()
    with pytest.raises(ValueError, match=r"with all units frozen a step takes .*B, 1 B more than .*smaller batch"):
        freezer.budget(everything - 1, x)
    # Alone the head saves the most bytes; the GELU's input is kept until both convolutions before it are frozen.
    body = [nn.Conv2d(3, 4, 1), nn.Conv2d(4, 64, 3), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    model, x = nn.Sequential(*body, nn.Linear(64 * 16, 10)), torch.randn(16, 3, 16, 16)
    freezer = Freezer(model, torch.optim.AdamW(model.parameters()))
    assert freezer.budget(freezer.estimate(["0", "1"], x).if_frozen.bytes, x).names == ("0", "1")
    assert max(freezer.saved, key=lambda unit: freezer.saved[unit]) == "5"
    model, x = network("resnet", 8)
    freezer = Freezer(model.train(), example=x[:2])
    limit = int(freezer.estimate([], x).current.bytes * 0.95)
    by_bytes = freezer.budget(limit, x).names
    for name, saved in freezer.saved.items():
        found = freezer.estimate(name, x)
        assert saved == found.current.bytes - found.if_frozen.bytes
    freezer.ratios = {unit.name: 0.0 if unit.name in by_bytes else 0.99 for unit in freezer.units}
    assert not set(freezer.budget(limit, x).names) & set(by_bytes)


def test_the_table_of_units_and_amounts_of_memory():
    model, x = network("resnet", 4)
    freezer = Freezer(model.train(), example=x[:2])
    freezer.freeze("stem")
    freezer.ratios = {"stages.0.0.conv1": 0.98765}
    freezer.measure(x)
    lines = str(freezer).splitlines()
    assert lines[0].split() == ["unit", "parameters", "norm", "frozen", "ratio", "saved"]
    assert lines[1].split() == ["stem.conv", f"{8 * 27 + 16:,}", "ViewBatchNorm2d", "yes", "-", "-"]
    saved = format_bytes(freezer.saved["stages.0.0.conv1"]).split()
    assert lines[2].split() == ["stages.0.0.conv1", f"{8 * 72 + 16:,}", "ViewBatchNorm2d", "-", "0.988", *saved]
    assert lines[-1] == "1 of 6 units frozen"
    for text, expected in {"12GiB": 12 * 2**30, "500 MB": 500_000_000, "1.5k": 1500, "7": 7, 9: 9}.items():
        assert parse_bytes(text) == expected
    for text in ("", "GiB", "12 parsecs", "-1GB", "iB"):
        with pytest.raises(ValueError, match="is not an amount of memory"):
            parse_bytes(text)
    amounts = (1023, 1536, 2**20, 1.5 * 2**30, 2**41)
    assert [format_bytes(int(amount)) for amount in amounts] == ["1023 B", "1.5 KiB", "1.0 MiB", "1.5 GiB", "2.0 TiB"]


def test_an_estimate_copies_nothing_and_leaves_the_training_under_way_alone(monkeypatch):
    model, x = network("resnet", 8)
    optimizer = torch.optim.AdamW(model.train().parameters())
    freezer = Freezer(model, optimizer, example=x[:2])
    gradients(model, x)
    optimizer.step()
    freezer.freeze(1)
    expected = gradients(model, x)
    grads = [parameter.grad for parameter in model.parameters()]
    loss = model(x).square().mean()
    held = (*model.parameters(), *freezer.folded)
    versions, values = [tensor._version for tensor in held], snapshot(model)
    states = copy.deepcopy(optimizer.state_dict()["state"])
    shapes, clone = [], Tensor.clone
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "clone", lambda self, **how: (shapes.append(self.shape), clone(self, **how))[1])
        freezer.budget(freezer.estimate(3, x).if_frozen.bytes, x)
    assert all(shape.numel() == 1 for shape in shapes)
    assert [tensor._version for tensor in held] == versions
    torch.testing.assert_close(optimizer.state_dict()["state"], states, rtol=0, atol=0)
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))
    model.zero_grad()
    loss.backward()
    assert equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)
    assert equal(snapshot(model), values)


class Tied(nn.Module):
    """A small language model: the last layer has the embedding's weight; two layers in the middle share theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.first, self.again, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.again.weight, self.head.weight = self.first.weight, self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.other(self.again(self.first(self.embed(tokens)).relu()).relu()))


def test_units_that_share_a_parameter_freeze_together():
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(7, (5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    freezer = Freezer(model, optimizer, example=tokens)
    assert [unit.name for unit in freezer.units] == ["first", "again", "other", "head"]

    def moved() -> set[str]:
        before = snapshot(model)
        gradients(model, tokens)
        optimizer.step()
        return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}

    everything = moved()
    assert freezer.freeze("again") == ["first", "again"]
    assert moved() == everything - {"first.weight", "first.bias", "again.bias"}
    assert freezer.freeze_only("head") == ["head"]
    assert moved() == everything - {"embed.weight"}
    assert freezer.thaw("head") == ["head"]
    assert freezer.estimate("first", tokens).names == ("first", "again")
    with freezer.temporarily_frozen(1) as names:
        assert names == ["first", "again"] and freezer.state_dict() == {"frozen": names}
    assert freezer.frozen == () and moved() == everything
    assert freezer.frozen_for == freezer.temporarily_frozen
