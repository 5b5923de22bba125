"""Units, gradients, ratios and bytes of transformers and other modern encoders."""

import copy
import random
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
import torch
from architectures import HUGGING, OWN, hugging, own
from test_correlation import reference_ratio, svd_ratio
from test_freezer import compare
from torch import Tensor, nn

from ptlf.freezing.correlation import correlation_ratios
from ptlf.freezing.cost import backward_flops, kept_bytes, measure_savings
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.subspace import Inputs, parts
from ptlf.freezing.units import find_units, trace


def make(name: str) -> tuple[nn.Module, Tensor]:
    if name in OWN:
        return own(name)
    pytest.importorskip("transformers")
    return hugging(name)


@pytest.mark.parametrize("name", [*OWN, *HUGGING])
def test_every_parameter_is_in_one_unit_but_for_those_that_no_output_depends_on(name):
    model, example = make(name)
    seen = trace(model, example)
    names = {parameter: key for key, parameter in model.named_parameters()}
    held = [names[parameter] for unit in seen.units for parameter in unit.parameters()]
    assert len(held) == len(set(held))
    unused = {
        "timm-like": {"unused"},
        "dinov2": {"inner.embeddings.mask_token"},
        "convnext": {"inner.layernorm.weight", "inner.layernorm.bias"},  # only the pooled output goes through it
    }
    assert set(names.values()) - set(held) == unused.get(name, set())
    model.requires_grad_(False)
    next(model.parameters()).requires_grad_()
    found = find_units(model, example)
    assert [(u.name, [*u.extra]) for u in found] == [(u.name, [*u.extra]) for u in seen.units], "whatever trains"
    assert [parameter.requires_grad for parameter in model.parameters()][:2] == [True, False]


def norm(path: str) -> list[str]:
    return [f"{path}.weight", f"{path}.bias"]


def test_extra_parameters_belong_to_the_layer_they_feed_or_the_one_before():
    """Norms to the layer they feed or, after a residual sum, to the one before; parameters in front to the first,
    queries to their attention, and the rest to the layer before."""
    attention = [*norm("blocks.1.norm1"), "blocks.1.attn.table", *norm("blocks.1.attn.q_norm")]
    for name, unit, expected in (
        ("timm-like", "patch", ["cls_token", "pos_embed"]),
        ("timm-like", "blocks.1.attn.qkv", attention),
        ("timm-like", "blocks.1.attn.proj", ["blocks.1.ls1.gamma"]),
        ("timm-like", "blocks.1.mlp.0", norm("blocks.1.norm2")),
        ("timm-like", "blocks.1.mlp.2", ["blocks.1.ls2.gamma"]),
        ("timm-like", "blocks.2.mlp.2", ["blocks.2.ls2.gamma", *norm("norm")]),
        ("encoder post", "layers.0.self_attn", norm("layers.0.norm1")),
        ("encoder post", "layers.0.linear2", norm("layers.0.norm2")),
        ("encoder pre", "layers.1.self_attn", norm("layers.1.norm1")),
        ("encoder pre", "layers.1.linear2", norm("norm")),
        ("words", "blocks.0.1", ["places", "words.weight", "blocks.0.0.weight"]),
        ("words", "blocks.1.1", ["blocks.1.0.weight"]),
        ("words", "pool", ["query"]),
        ("pre-activation", "blocks.1.1", [*norm("blocks.1.0"), "slope.weight"]),
    ):
        found = {unit.name: list(unit.extra) for unit in find_units(*make(name))}
        assert found[unit] == expected, (name, unit)


@pytest.mark.parametrize("name", [*OWN, *HUGGING, "vit plain", "resnet plain"])
def test_gradients_equal_plain_pytorch_for_any_frozen_set(name):
    model, example = make(name.removesuffix(" plain"))
    model = model.double().train()
    example = example.double() if example.is_floating_point() else example
    freezer, draw = Freezer(model, example=example, save_memory=not name.endswith("plain")), random.Random(0)
    names, twin = [unit.name for unit in freezer.units], copy.deepcopy(model)
    sets = [names, names[: len(names) // 2], *(draw.sample(names, k) for k in (1, 2, len(names) // 2, len(names) - 1))]
    for chosen in sets:
        freezer.freeze_only(chosen)
        compare(model, freezer, twin, example)
        if chosen is names:
            held = {parameter for unit in freezer.units for parameter in unit.parameters()}
            assert {p for p in model.parameters() if p.requires_grad} == set(model.parameters()) - held
    freezer.unfreeze()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_statistics_of_a_norm_that_feeds_a_frozen_layer_stay():
    model, example = own("pre-activation")
    freezer = Freezer(model.train(), example=example)
    freezer.freeze(["blocks.1.1"])
    before = [norm.running_mean.clone() for norm, _ in model.blocks]
    model(example)
    after = [norm.running_mean for norm, _ in model.blocks]
    assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])
    freezer.thaw()
    model(example)
    assert not torch.equal(before[1], model.blocks[1][0].running_mean)


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_statistics_of_an_instance_norm_stay(batch_statistics):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)).train()
    freezer = Freezer(model, example=torch.randn(2, 3, 8, 8), batch_statistics=batch_statistics)
    freezer.freeze("0")
    before = copy.deepcopy(model.state_dict())
    for frozen in (True, False):
        model(torch.randn(2, 3, 8, 8))
        assert torch.equal(model[1].running_mean, before["1.running_mean"]) == frozen
        assert any(parameter.requires_grad for parameter in model.parameters()) != frozen
        freezer.thaw()


def bytes_of(model: nn.Module, example: Tensor, freezer: Freezer | None = None) -> int:
    held = [*model.parameters(), *model.buffers(), *(freezer.folded if freezer else ())]
    return kept_bytes(lambda: model(example).square().mean(), exclude=[*held, example])


CHOSEN = {  # and the most that they may keep of the bytes of plain PyTorch
    "vit": ("inner.embeddings. inner.layers.0. inner.layers.1.", 1),
    "dinov2": ("inner.embeddings. inner.encoder.layer.0. inner.encoder.layer.1.", 1),
    "convnext": ("inner.embeddings. inner.encoder.stages.0.", 1),
    "convnext in the middle": ("inner.encoder.stages.0.", 0.95),
    "swin": ("inner.embeddings. inner.encoder.layers.0.", 1),
    "timm-like": ("patch. cls_token pos_embed blocks.0. blocks.1.", 1),
    "encoder post": ("layers.0.", 1),
    "encoder pre": ("layers.0.", 1),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_frozen_units_keep_no_more_bytes_than_plain_pytorch(name):
    model, example = make(name.removesuffix(" in the middle"))
    model.train()
    words, most = CHOSEN[name]
    chosen, plain = tuple(words.split()), copy.deepcopy(model)
    for key, parameter in plain.named_parameters():
        parameter.requires_grad_(not key.startswith(chosen))
    freezer = Freezer(model, example=example)
    everything = bytes_of(model, example)
    freezer.freeze([unit.name for unit in freezer.units if f"{unit.name}.".startswith(chosen)])
    reference = bytes_of(plain, example)
    assert 0 < bytes_of(model, example, freezer) <= most * reference < everything


def ratios_of(model: nn.Module, replay: Tensor, new: Tensor, threshold: float) -> dict[str, float]:
    return correlation_ratios(model, replay, lambda: model(new).square().sum(), threshold, batches=1, example=new)


def seen_and_trained(model: nn.Module, replay: Tensor, new: Tensor, names: Iterable[str]) -> tuple[nn.Module, dict]:
    """A copy with the new images' gradients, and what goes into these layers for the replay."""
    twin, seen = copy.deepcopy(model), {}
    for name in names:
        twin.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args[0]}))
    twin(new).square().sum().backward()
    twin(replay)
    return twin, seen


def agree(model: nn.Module, replay: Tensor, new: Tensor, names: Iterable[str], threshold: float, found: dict) -> None:
    twin, seen = seen_and_trained(model, replay, new, names)
    for name in names:
        layer = twin.get_submodule(name)
        expected = reference_ratio(layer, seen[name], layer.weight.grad, threshold)
        assert found[name] == pytest.approx(expected, abs=1e-9), name


@pytest.mark.parametrize(("count", "threshold"), [(1, 0.7), (9, 0.95), (9, 1.0)])
def test_ratios_of_linear_layers_over_tokens_agree_with_numpy(count, threshold):
    model, new = own("timm-like")
    model, new, replay = model.double(), new.double(), torch.randn(count, 3, 8, 8).double()
    found = ratios_of(model, replay, new, threshold)
    assert set(found) == {unit.name for unit in find_units(model, new)}
    agree(model, replay, new, found, threshold, found)


@pytest.mark.parametrize("threshold", [0.7, 0.95])
def test_ratios_of_an_attention_count_all_its_projections(threshold):
    """The reference computes the attention by hand, with four products."""
    model, new = own("words")
    model, replay = model.double(), torch.randint(11, (7, 6), generator=torch.Generator().manual_seed(2))
    found = ratios_of(model, replay, new, threshold)
    twin = copy.deepcopy(model)
    twin(new).square().sum().backward()
    calls: dict[str, tuple[Tensor, ...]] = {}

    def note(name: str, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        calls[name] = (*args, *(value for key, value in kwargs.items() if key == "value"))

    for name in ("pool", "other"):
        twin.get_submodule(name).register_forward_pre_hook(partial(note, name), with_kwargs=True)
    twin(replay)
    for name, given in calls.items():
        layer = twin.get_submodule(name)
        inner = [weight for key, weight in layer.named_parameters() if key.endswith("proj_weight")]  # of 8 rows each
        grads = [part for weight in inner for part in weight.grad.split(8)]
        weights = [part for weight in inner for part in weight.split(8)]
        biases = layer.in_proj_bias.chunk(3)
        projected = (x @ w.T + b for x, w, b in zip(given, weights, biases, strict=True))
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in projected)
        heads = ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
        matrices = [x.detach().reshape(-1, x.shape[-1]).T.numpy() for x in (*given, heads)]
        products = list(zip([g.numpy() for g in (*grads, layer.out_proj.weight.grad)], matrices, strict=True))
        assert found[name] == pytest.approx(svd_ratio(products, threshold), abs=1e-9), name


def test_attention_ratios_are_seen_under_autocast_and_in_evaluation_s_fast_path():
    model, example = own("encoder post")
    plain = ratios_of(model, example, example, 0.9)
    assert set(plain) == {unit.name for unit in find_units(model, example)}
    assert all(0 < ratio <= 1 for ratio in plain.values())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = ratios_of(model, example, example, 0.9)
    assert low == pytest.approx(plain, abs=0.1)


def test_ratios_of_convolutions_of_other_dimensions_agree_with_numpy():
    model, new = own("volumes")
    model, new, replay = model.double().eval(), new.double(), torch.randn(4, 3, 8, 8).double()
    found = ratios_of(model, replay, new, 0.8)
    agree(model, replay, new, ("solid", "line"), 0.8, found)
    twin, seen = seen_and_trained(model, replay, new, ("up",))
    x, g = seen["up"].detach().transpose(0, 1).flatten(1).numpy(), twin.up.weight.grad.numpy()
    up = [(g[half].reshape(6, -1).T, x[half]) for half in (slice(0, 6), slice(6, 12))]
    # All groups keep as many directions as the one that needs most, each no more than it needs.
    assert found["up"] == pytest.approx(svd_ratio(up, 0.8), abs=1e-9)


@pytest.mark.parametrize("n", [3, 16, 17, 40])
def test_few_columns_give_the_subspace_of_their_gram_matrix(n):
    x = torch.randn(n, 32, generator=torch.Generator().manual_seed(n)).double() * torch.logspace(0, -6, 32).double()
    inputs = Inputs(parts(nn.Linear(32, 2).double())[0])
    for row in x.split(5):
        inputs.add(row)
    assert (inputs.gram is None) == (n <= 16)
    for threshold in (0.9, 0.999999, 1.0):
        u, s, _ = np.linalg.svd(x.T.numpy(), full_matrices=False)
        energy = np.cumsum(s**2)
        kept = u[:, : 1 + np.argmax(energy >= threshold * (1 - 1e-11) * energy[-1])]
        basis = inputs.basis(threshold)[0].numpy()
        assert basis.shape == kept.shape
        np.testing.assert_allclose(basis @ basis.T, kept @ kept.T, atol=1e-6)


def test_what_an_attention_s_backward_costs():
    model, example = own("encoder post")
    units = find_units(model, example)
    saving = measure_savings(model, units, example)["layers.0.self_attn"]
    assert saving.weight_cost == saving.input_cost == 2 * (3 * 5) * (4 * 8 * 8)
    assert saving.bytes == 2 * example.nbytes  # its input, once, and the output projection's
    volumes, images = own("volumes")
    found = measure_savings(volumes, find_units(volumes, images), images)
    total = sum(cost.weight_cost + cost.input_cost for cost in found.values())
    assert total == backward_flops(volumes(images.requires_grad_()).sum())
    assert found["up"].weight_cost == 2 * (3 * 8 * 8) * (12 * 3 * 9)
