import pytest
import torch
from torch import nn

from ptlf.core.errors import UserError
from ptlf.encoders import ENCODERS, ViT
from ptlf.encoders.norm import takes_views_in_one_pass
from ptlf.encoders.vit import patch_for
from ptlf.freezing.units import trace
from ptlf.run.build import make_encoder
from ptlf.run.loop import Run
from ptlf.run.recipes import resolve_config


def test_it_is_a_pre_norm_transformer() -> None:
    """Its blocks against torch's own encoder layers, with the same weights."""
    torch.manual_seed(0)
    model, images = ViT(64, 2, 16, 4, heads=4).double(), torch.randn(3, 3, 16, 16).double()
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    names = {"norm1": "norm1", "norm2": "norm2", "proj": "self_attn.out_proj", "fc1": "linear1", "fc2": "linear2"}
    for block, layer in zip(model.blocks, layers.layers, strict=True):
        for ours, theirs in names.items():
            layer.get_submodule(theirs).load_state_dict(block.get_submodule(ours).state_dict())
        layer.self_attn.in_proj_weight.data.copy_(block.qkv.weight)
        layer.self_attn.in_proj_bias.data.copy_(block.qkv.bias)
    patches = nn.functional.unfold(images, 4, stride=4).mT  # (B, 16, 48)
    x = patches @ model.embedding.patches.weight.flatten(1).T + model.embedding.patches.bias + model.embedding.position
    expected = nn.functional.layer_norm(layers(x), (64,)).mean(1)
    torch.testing.assert_close(model(images), expected)


def test_sizes_are_those_of_the_paper_and_the_patch_follows_from_the_image_size() -> None:
    """DeiT-Ti and DeiT-S at 224 px without classifier, less their class token and its position."""
    patches = {8: 1, 16: 2, 28: 2, 32: 4, 64: 8, 96: 8, 128: 16, 224: 16}
    assert {size: patch_for(size) for size in patches} == patches
    counts = {}
    for name in ("vit-tiny", "vit-small"):
        encoder = make_encoder(ENCODERS[name].Config(name), 0, 224)
        counts[name] = sum(p.numel() for p in encoder.parameters())
    assert counts == {"vit-tiny": 5_524_416 - 2 * 192, "vit-small": 21_665_664 - 2 * 384}
    with pytest.raises(ValueError, match="patches of 5 px do not divide images of 16 px"):
        ViT(32, 1, 16, 5)
    with pytest.raises(ValueError, match="3 heads do not divide a width of 32"):
        ViT(32, 1, 16, heads=3)


def test_every_parameter_freezes_with_a_layer_and_views_may_be_one_batch() -> None:
    model = ViT(32, 3, 16)
    seen = trace(model)
    assert sum(len(unit.parameters()) for unit in seen.units) == len(list(model.parameters()))
    norm = ["blocks.0.norm1.weight", "blocks.0.norm1.bias"]
    assert [list(unit.extra) for unit in seen.units[:3]] == [["embedding.position"], norm, []]
    assert takes_views_in_one_pass(model)
    both = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(model(both), torch.cat([model(both[:2]), model(both[2:])]))


def test_its_presets_hold_and_give_way_to_the_command_line() -> None:
    config = resolve_config("digits/simsiam/ptlf", None, ["--encoder.name", "vit-tiny"])
    training = config.training
    assert (training.optimizer.name, training.schedule, training.warmup, training.clip) == ("adamw", "cosine", 3, 1.0)
    assert (config.encoder.width, config.encoder.depth) == (64, 4)
    given = ["--encoder.name", "vit-tiny", "--encoder.depth", "2", "--training.lr", "0.01", "--training.clip", "null"]
    config = resolve_config("digits/simsiam/ptlf", None, given)
    assert (config.encoder.depth, config.training.lr, config.training.clip) == (2, 0.01, None)
    config = resolve_config(None, None, ["--encoder.name", "vit-tiny", "--training.optimizer", "sgd"])
    assert (config.training.optimizer.name, config.training.lr) == ("sgd", 0.03)
    config = resolve_config("digits/simsiam/ptlf", None, [])
    assert (config.training.optimizer.name, config.training.clip, config.encoder.name) == ("sgd", None, "resnet18-mini")
    with pytest.raises(UserError, match="unknown encoder 'vit-tinny'; did you mean 'vit-tiny'"):
        resolve_config(None, None, ["--encoder.name", "vit-tinny"])


def test_a_small_one_learns_the_digits() -> None:
    """Three tasks: what it knows of all six classes at the end is above an untrained encoder."""
    words = ["--encoder.name=vit-tiny", "--encoder.depth=2", "--training.epochs=8", "--training.warmup=1"]
    words += ["--stream.groups=[[0,1],[2,3],[4,5]]", "--stream.per_class=100", "--device=cpu"]
    run = Run(resolve_config("digits/simsiam/ptlf", None, words))
    results = run.train()
    assert run.config.encoder.image_size == 16
    probe = results["probes"]["knn_class"]
    assert probe["accuracy"] > probe["untrained_accuracy"] + 3
    frozen = {name for entry in results["freezing"] for event in entry["events"] for name in event["frozen"]}
    assert frozen and frozen <= {unit.name for unit in run.freezing.freezer.units}
