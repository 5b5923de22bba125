"""Encoders of timm, torchvision and transformers, as far as these are installed: shapes, preprocessing, coverage."""

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_config
from torch import nn

from ptlf.core.errors import UserError
from ptlf.core.registry import settings_from
from ptlf.encoders import ENCODERS, as_encoder, feature_dim
from ptlf.encoders.extras import Pooled
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.units import trace
from ptlf.run.build import make_encoder
from ptlf.run.loop import Run


def make(name: str, size: int) -> nn.Module:
    return make_encoder(ENCODERS.find(name).Config(name), 0, size)


def imported(package: str) -> object:
    try:
        return pytest.importorskip(package)
    except Exception as error:  # a build for another torch fails with other errors than ImportError
        pytest.skip(f"{package} cannot be imported: {error}")


def check_encoder(encoder: nn.Module, size: int) -> None:
    """Vectors of the right length; with everything frozen, nothing trains but an unused mask token."""
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        assert encoder.eval()(images).shape == (2, feature_dim(encoder, size))
    seen = trace(encoder, images)
    held = [parameter for unit in seen.units for parameter in unit.parameters()]
    assert len(held) == len(set(held))
    freezer = Freezer(encoder, example=images)
    freezer.freeze([unit.name for unit in freezer.units])
    assert all("mask_token" in name for name, p in encoder.named_parameters() if p.requires_grad)


SIZES = {  # of the images, and of the vectors
    "timm:resnet50": (64, 2048),
    "timm:vit_small_patch16_224": (64, 384),
    "timm:deit_small_patch16_224": (64, 384),
    "timm:swin_tiny_patch4_window7_224": (224, 768),
    "timm:convnext_tiny": (64, 768),
    "timm:mixer_s16_224": (224, 512),
    "timm:efficientnet_b0": (64, 1280),
    "timm:regnety_002": (64, 368),
    "torchvision:resnet18": (64, 512),
    "torchvision:convnext_tiny": (64, 768),
    "torchvision:vit_b_16": (64, 768),
    "torchvision:swin_t": (64, 768),
    "torchvision:efficientnet_b0": (64, 1280),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_models_of_timm_and_torchvision(name: str) -> None:
    imported(name.partition(":")[0])
    size, dim = SIZES[name]
    encoder = make(name, size)
    assert feature_dim(encoder, size) == dim
    described = getattr(encoder, "pretrained_cfg", {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)})
    assert encoder.normalisation == (described["mean"], described["std"])
    check_encoder(encoder, size)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_unknown_names(package: str) -> None:
    imported(package)
    with pytest.raises(UserError, match=rf"{package} has no (model|classifier) 'vit_enormous'"):
        make(f"{package}:vit_enormous", 32)


def tiny_hugging(kind: str) -> nn.Module:
    """A Hugging Face model for images of 32 px."""
    t = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8, "image_size": 32}
    deep = {"hidden_sizes": [8, 16], "depths": [1, 1]}
    made = {
        "vit": lambda: t.ViTModel(t.ViTConfig(**sizes, intermediate_size=32)),
        "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(**sizes)),
        "convnext": lambda: t.ConvNextModel(t.ConvNextConfig(**deep, num_stages=2)),
        "resnet": lambda: t.ResNetModel(t.ResNetConfig(embedding_size=8, **deep, layer_type="basic")),
        "classifier": lambda: t.ViTForImageClassification(t.ViTConfig(**sizes, intermediate_size=32)),
    }
    torch.manual_seed(0)
    return made[kind]()


@pytest.mark.parametrize("kind", ["vit", "dinov2", "convnext", "resnet"])
def test_a_hugging_face_folder(kind: str, tmp_path: Path) -> None:
    model = tiny_hugging(kind).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    encoder = make(f"hf:{tmp_path}", 32).eval()
    assert encoder.normalisation == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        output = model(images)
        # Of a ViT the class token: its pooler is a layer for classifiers.
        expected = output.last_hidden_state[:, 0] if kind == "vit" else output.pooler_output.flatten(1)
        torch.testing.assert_close(encoder(images), expected)
    check_encoder(encoder, 32)


def test_a_hugging_face_configuration_gives_random_weights_for_the_size_of_the_images(tmp_path: Path) -> None:
    model = tiny_hugging("vit")
    model.config.save_pretrained(tmp_path)
    encoder = make(name := f"hf:{tmp_path}", 16)
    assert encoder(torch.zeros(2, 3, 16, 16)).shape == (2, 16) and not hasattr(encoder, "normalisation")
    same, other = make(name, 16).state_dict(), make_encoder(ENCODERS.find(name).Config(name), 1, 16).state_dict()
    key = "model.embeddings.patch_embeddings.projection.weight"
    assert torch.equal(encoder.state_dict()[key], same[key]) and not torch.equal(same[key], other[key])
    with pytest.raises(UserError, match="hf:nowhere names no folder here"):
        make("hf:nowhere", 16)


def test_a_hugging_face_folder_runs_no_code_and_needs_no_trust(tmp_path: Path, monkeypatch) -> None:
    """The name stands in a run's config.yaml; the folder's config.json names code beside it."""
    monkeypatch.chdir(tmp_path)
    tiny_hugging("vit").config.save_pretrained(tmp_path / "safe")
    with settings_from(tmp_path / "config.yaml"):
        assert make(f"hf:{tmp_path / 'safe'}", 16)(torch.zeros(2, 3, 16, 16)).shape == (2, 16)
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "evil.Evil"}}))
    (hostile / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError):
        make(f"hf:{hostile}", 16)
    assert not (tmp_path / "ran").exists()


def raw_hugging() -> nn.Module:
    return tiny_hugging("vit")


def test_a_hugging_face_model_is_trained_as_it_is() -> None:
    pytest.importorskip("transformers")
    config = tiny_config("digits/simsiam/ptlf", encoder__name="test_extras:raw_hugging", views__size=32)
    config.training.epochs = 1
    run = Run(config)
    assert isinstance(run.model.encoder, Pooled)
    assert run.train()["probes"]["knn_class"]["accuracy"] is not None
    given = Run(config, encoder=tiny_hugging("classifier"))  # without its head
    assert given.model.encoder(torch.zeros(2, 3, 32, 32)).shape == (2, 16)
    assert "classifier" not in {name.split(".")[1] for name, _ in given.model.encoder.named_parameters()}
    plain = nn.Linear(3, 3)
    assert as_encoder(plain) is plain


class Normalised(nn.Sequential):
    normalisation = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


def normalised() -> nn.Module:
    return Normalised(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_views_and_probes_are_normalised_as_the_encoder_says() -> None:
    run = Run(tiny_config("digits/simsiam/lump", encoder__name="test_extras:normalised"))
    for view in (*run.components.view_specs, run.method.memory.view):
        assert (view.mean, view.std) == Normalised.normalisation
    white = torch.full((1, 16, 16, 3), 255, dtype=torch.uint8)
    expected = [(1 - mean) / std for mean, std in zip(*Normalised.normalisation, strict=True)]
    torch.testing.assert_close(run.components.prepare(white)[0, :, 0, 0], torch.tensor(expected))


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18", "hf:somewhere"])
def test_a_missing_extra_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}[name.partition(":")[0]]

    def absent(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("ptlf.core.errors.importlib.import_module", absent)
    with pytest.raises(UserError, match=rf"\(No module named '{package}'\): pip install 'ptlf\[timm\]'"):
        make(name, 32)
