"""Vision transformers: patches, pre-norm blocks of attention and MLP, mean over the patches."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptlf.core.settings import Presets, key
from ptlf.encoders.encoder import EncoderEntry, SizedConfig


@dataclass
class ViTConfig(SizedConfig):
    patch: int | None = key(None, "side of a patch in pixels; null = largest of 16, 8, 4 ... with 8 on a side", ge=1)
    width: int | None = key(None, "length of a token; null = the network's own", ge=1)
    depth: int | None = key(None, "number of blocks; null = the network's own", ge=1)
    heads: int | None = key(None, "attention heads of a block; null = one for every 64 of the width", ge=1)


class Embedding(nn.Module):
    """Images (B, 3, H, W) to tokens (B, T, width), one per patch, with a learnt position."""

    def __init__(self, image_size: int, patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        # As large as what the patches give. With the usual 0.02 short runs learn a bag of patches.
        self.position = nn.Parameter(torch.randn(1, (image_size // patch) ** 2, width) * 0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.patches(images).flatten(2).mT + self.position


class Block(nn.Module):
    """Self-attention, and an MLP four times as wide as the tokens; each after a norm, and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, d)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Pool(nn.Module):
    """Tokens (B, T, width) to vectors (B, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).mean(1)


class ViT(nn.Module):
    """Images (B, 3, image_size, image_size) to vectors (B, feature_dim)."""

    rowwise = True

    def __init__(self, width: int, depth: int, size: int, patch: int | None = None, heads: int | None = None) -> None:
        super().__init__()
        heads = heads or max(1, width // 64)
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}")
        patch = patch or patch_for(size)
        if size % patch:
            raise ValueError(f"patches of {patch} px do not divide images of {size} px; set encoder.patch")
        self.feature_dim, self.image_size = width, size
        self.embedding, self.pool = Embedding(size, patch, width), Pool(width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(self.blocks(self.embedding(images)))


def patch_for(image_size: int) -> int:
    """The largest patch of at most 16 px, a power of two, that divides the image and leaves 8 or more on a side."""
    return next((p for p in (16, 8, 4, 2) if image_size % p == 0 and image_size // p >= 8), 1)


# Rates are for a batch of 256, as everywhere. On the digits a network of full size would take an hour.
ADAMW = {"name": "adamw", "weight_decay": 0.05}
SCHEDULE = {"schedule": "cosine", "clip": 1.0}
PRESETS: Presets = {
    "digits": {
        "encoder": {"width": 64, "depth": 4, "heads": 4, "patch": 4},
        "training": {"optimizer": ADAMW, "lr": 2e-3, "warmup": 3, **SCHEDULE},
    },
    "lump": {"training": {"optimizer": ADAMW, "lr": 5e-4, "warmup": 10, **SCHEDULE}},
    "cassle": {"training": {"optimizer": ADAMW, "lr": 5e-4, "warmup": 20, **SCHEDULE}},
}


def vit(about: str, width: int, depth: int) -> EncoderEntry:
    def make(config: ViTConfig) -> ViT:
        size = config.image_size or 32
        return ViT(config.width or width, config.depth or depth, size, config.patch, config.heads)

    return EncoderEntry(make, ViTConfig, about, PRESETS)
