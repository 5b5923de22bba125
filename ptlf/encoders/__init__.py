"""Encoders by name. To add one: a function that makes an `nn.Module` of its settings, and a line here."""

from ptlf.core.registry import Registry
from ptlf.encoders.encoder import (
    EncoderConfig,
    EncoderEntry,
    ask_for_module,
    brings_weights,
    feature_dim,
    from_function,
    set_normalisation,
)
from ptlf.encoders.extras import as_encoder, hf_entry, timm_entry, torchvision_entry
from ptlf.encoders.onnx import onnx_entry
from ptlf.encoders.resnet import BasicBlock, Bottleneck, ResNet, resnet
from ptlf.encoders.vit import ViT, vit
from ptlf.encoders.weights import Weights, load_weights, read_tensors, stored_encoder

SMALL, LARGE = "3x3 stem, for 32 to 64 px", "7x7 stem and max-pool, for 224 px"
MINI = "three blocks, 16 channels, 3x3 stem, for 16 to 64 px without a GPU"

MEMBERS = {
    "resnet18": resnet(SMALL, BasicBlock, (2, 2, 2, 2)),
    "resnet34": resnet(SMALL, BasicBlock, (3, 4, 6, 3)),
    "resnet50": resnet(SMALL, Bottleneck, (3, 4, 6, 3)),
    "resnet18-imagenet": resnet(LARGE, BasicBlock, (2, 2, 2, 2), stem="imagenet"),
    "resnet34-imagenet": resnet(LARGE, BasicBlock, (3, 4, 6, 3), stem="imagenet"),
    "resnet50-imagenet": resnet(LARGE, Bottleneck, (3, 4, 6, 3), stem="imagenet"),
    "resnet18-mini": resnet(MINI, BasicBlock, (1, 1, 1), width=16),
    "vit-tiny": vit("vision transformer, 12 blocks, 192 wide, patches by image size", 192, 12),
    "vit-small": vit("vision transformer, 12 blocks, 384 wide, patches by image size", 384, 12),
    "given": EncoderEntry(ask_for_module, about="a module of your own, given in Python to `ptlf.Learner`"),
}
ENCODERS: Registry[EncoderEntry] = Registry(
    "encoder",
    "ptlf.encoders",
    EncoderEntry,
    MEMBERS,
    wrap=from_function,
    prefixes={"timm": timm_entry, "torchvision": torchvision_entry, "hf": hf_entry, "onnx": onnx_entry},
)

__all__ = ["ENCODERS", "EncoderConfig", "EncoderEntry", "ResNet", "ViT", "Weights", "as_encoder", "feature_dim"]
__all__ += ["brings_weights", "load_weights", "read_tensors", "set_normalisation", "stored_encoder"]
