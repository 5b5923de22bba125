import pytest
import torch
from torch import nn

from ptlf.core.errors import UserError
from ptlf.encoders import ENCODERS, feature_dim


def make(name: str, **settings) -> nn.Module:
    entry = ENCODERS[name]
    return entry.make(entry.Config(name, **settings))


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "given"])
def test_images_to_vectors(name: str) -> None:
    size = 64 if name.endswith("imagenet") else 16
    encoder = make(name, **({"image_size": size} if name.startswith("vit") else {})).eval()
    with torch.no_grad():
        assert encoder(torch.randn(1, 3, size, size)).shape == (1, feature_dim(encoder, size))


def test_resnet18_is_the_protocols_with_either_stem() -> None:
    encoder, seen = make("resnet18"), []
    assert sum(p.numel() for p in encoder.parameters()) == 11_168_832
    assert feature_dim(encoder, 32) == 512
    assert (encoder.stem.conv.kernel_size, encoder.stem.conv.stride) == ((3, 3), (1, 1))
    assert sum(isinstance(m, nn.Conv2d) for m in encoder.modules()) == 20
    encoder.stages[3].register_forward_hook(lambda m, i, o: seen.append(o.shape))
    encoder(torch.zeros(2, 3, 32, 32))
    fan_out = 128 * 9
    std = encoder.stages[1][1].conv1.weight.std().item()
    assert std == pytest.approx((2 / fan_out) ** 0.5, rel=0.02)
    encoder = make("resnet18-imagenet")
    encoder.stages.register_forward_pre_hook(lambda m, i: seen.append(i[0].shape))
    encoder(torch.zeros(2, 3, 64, 64))
    assert seen == [(2, 512, 4, 4), (2, 64, 16, 16)]
    assert sum(p.numel() for p in encoder.parameters()) == 11_176_512  # torchvision's resnet18 without its classifier


def test_the_width_is_that_of_the_first_stage() -> None:
    assert make("resnet18-mini").shape["width"] == 16
    encoder = make("resnet50", width=4)
    assert encoder.stem.conv.out_channels == 4
    assert feature_dim(encoder, 16) == 4 * 8 * 4  # doubled at three stages, expanded by four


def test_feature_dim_of_any_module() -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert feature_dim(module, 8) == 5
    assert module.training
    with pytest.raises(UserError, match="must map images to vectors"):
        feature_dim(nn.Conv2d(3, 5, 3), 8)
