"""Small networks in the shapes that people use, each as (name, module, example)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scale(nn.Module):
    """Layer scale, in a module of its own as in timm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    """timm's: one product for query, key and value, with a table of relative position biases as in Swin."""

    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(dim // 2)
        self.table = nn.Parameter(torch.randn(2 * tokens - 1, 2))
        places = torch.arange(tokens)
        self.register_buffer("index", places[:, None] - places + tokens - 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        scores = self.q_norm(q) @ k.mT + self.table[self.index].permute(2, 0, 1)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(dim), Attention(dim, tokens), Scale(dim)
        self.norm2, self.ls2 = nn.LayerNorm(dim), Scale(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class TimmLike(nn.Module):
    """A vision transformer with class token, position embedding, layer scale and a final norm."""

    def __init__(self, dim: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim))
        self.blocks = nn.Sequential(*(Block(dim, 5) for _ in range(blocks)))
        self.norm = nn.LayerNorm(dim)
        self.unused = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.norm(self.blocks(x))[:, 0]


class RootMeanSquare(nn.Module):
    """A norm that is written out, as in many language models."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class PreActivation(nn.Module):
    """Blocks of BatchNorm, ReLU and convolution, with a learnt slope after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.ModuleList([nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)]) for _ in range(2))
        self.slope = nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv in self.blocks:
            x = x + conv(F.relu(norm(x)))
        return self.slope(x).mean((2, 3))


class Words(nn.Module):
    """An embedding in front, a written-out norm in every block, and queries that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8))
        self.blocks = nn.ModuleList(nn.Sequential(RootMeanSquare(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.query = nn.Parameter(torch.randn(2, 8))
        self.pool = nn.MultiheadAttention(8, 2, kdim=8, vdim=8, batch_first=True)
        self.other = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.words(indices) + self.places
        for block in self.blocks:
            x = x + block(x)
        pooled, _ = self.pool(self.query.expand(len(x), -1, -1), x, value=x, need_weights=False)
        return self.other(pooled, x[..., :4], x[..., 2:])[0].flatten(1)


class Volumes(nn.Module):
    """Convolutions of one and three dimensions and transposed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.solid, self.norm = nn.Conv3d(1, 4, (1, 3, 3), padding=(0, 1, 1)), nn.BatchNorm3d(4)
        self.up = nn.ConvTranspose2d(12, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.line = nn.Conv1d(6, 5, 3, dilation=2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.solid(x[:, None])))  # (B, 4, 3, H, W)
        return self.line(F.relu(self.up(x.flatten(1, 2))).flatten(2)).mean(2)


def own(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    images = torch.randn(3, 3, 8, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=name.endswith("pre"))
    made = {
        "timm-like": lambda: (TimmLike(), images),
        "pre-activation": lambda: (PreActivation(), images),
        "words": lambda: (Words(), torch.randint(11, (3, 6))),
        "volumes": lambda: (Volumes(), images),
        "encoder post": lambda: (nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 8)),
        "encoder pre": lambda: (nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), False), torch.randn(3, 5, 8)),
    }
    return made[name]()


OWN = ["timm-like", "pre-activation", "words", "volumes", "encoder post", "encoder pre"]


class Last(nn.Module):
    """A Hugging Face model's last hidden state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).last_hidden_state


def hugging(name: str) -> tuple[nn.Module, Tensor]:
    """A Hugging Face model of a tiny configuration, with random norms and layer scales."""
    import transformers as t

    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8, "image_size": 16}
    deep = {"hidden_sizes": [8, 16], "depths": [2, 2]}
    swin = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    torch.manual_seed(0)
    made = {
        "vit": lambda: t.ViTModel(t.ViTConfig(**sizes, intermediate_size=16), add_pooling_layer=False),
        "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(**sizes)),
        "convnext": lambda: t.ConvNextModel(t.ConvNextConfig(**deep, num_stages=2, patch_size=2)),
        "swin": lambda: t.SwinModel(t.SwinConfig(**swin, drop_path_rate=0.0), add_pooling_layer=False),
        "resnet": lambda: t.ResNetModel(t.ResNetConfig(embedding_size=8, **deep, layer_type="basic")),
    }
    model = made[name]()
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1 or "table" in key or "token" in key:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return Last(model), torch.randn(3, 3, 16, 16)


HUGGING = ["vit", "dinov2", "convnext", "swin", "resnet"]
