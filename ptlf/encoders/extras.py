"""Encoders of other libraries, without their classifiers: `timm:NAME`, `torchvision:NAME`, `hf:FOLDER`.

Weights are random, but for a Hugging Face folder that holds some, and with `--encoder.pretrained`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ptlf.core.errors import UserError, import_optional
from ptlf.core.files import check_regular
from ptlf.core.settings import key
from ptlf.encoders.encoder import EncoderEntry, SizedConfig


@dataclass
class PretrainedConfig(SizedConfig):
    pretrained: bool = key(False, "with the library's own weights, from its cache or downloaded")


def timm_entry(name: str) -> EncoderEntry:
    def make(config: PretrainedConfig) -> nn.Module:
        timm = import_optional("timm", f"encoder {'timm:' + name!r}", "timm")
        if not timm.is_model(name):
            raise UserError(f"timm has no model {name!r}; timm.list_models() names them")
        with loading_weights(name, config.pretrained):
            options = {"pretrained": config.pretrained, "num_classes": 0}
            model = sized(timm.create_model, name, "img_size", config.image_size, **options)
        described: Any = model.pretrained_cfg
        return normalised(model, described.get("mean"), described.get("std"))

    return EncoderEntry(make, PretrainedConfig, "of timm, without its classifier")


def torchvision_entry(name: str) -> EncoderEntry:
    def make(config: PretrainedConfig) -> nn.Module:
        models = import_optional("torchvision.models", f"encoder {'torchvision:' + name!r}", "timm")
        if name not in models.list_models(models):
            raise UserError(f"torchvision has no classifier {name!r}; torchvision.models.list_models() names them")
        with loading_weights(name, config.pretrained):
            weights = "DEFAULT" if config.pretrained else None
            model = sized(models.get_model, name, "image_size", config.image_size, weights=weights)
        *_, last = (path for path, part in model.named_modules() if isinstance(part, nn.Linear))
        model.set_submodule(last, nn.Identity())
        crop = models.get_model_weights(name).DEFAULT.transforms()
        return normalised(model, crop.mean, crop.std)

    return EncoderEntry(make, PretrainedConfig, "of torchvision, without its classifier")


def hf_entry(path: str) -> EncoderEntry:
    """path: a folder in the format of `save_pretrained`, with or without weights."""

    def make(config: SizedConfig) -> nn.Module:
        transformers = import_optional("transformers", f"encoder {'hf:' + path!r}", "timm")
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise UserError(f"hf:{path} names no folder here")
        check_regular(*(file for file in folder.iterdir() if not file.is_dir()))
        here = {"local_files_only": True, "trust_remote_code": False}  # no download, no code in the folder
        settings = transformers.AutoConfig.from_pretrained(folder, **here)
        if any([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
            model = transformers.AutoModel.from_pretrained(folder, config=settings, **here)
        else:
            if config.image_size and hasattr(settings, "image_size"):
                settings.image_size = config.image_size
            model = transformers.AutoModel.from_config(settings)
        if any(True for _ in getattr(model, "pooler", nn.Identity()).parameters()):
            model.pooler = None  # a layer for classifiers, of which checkpoints mostly hold nothing
        described: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            described = json.loads((folder / "preprocessor_config.json").read_text())
        return normalised(as_encoder(model), described.get("image_mean"), described.get("image_std"))

    return EncoderEntry(make, SizedConfig, "a Hugging Face model")


@contextmanager
def loading_weights(name: str, wanted: bool) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not wanted:
            raise
        hint = "without a network, give them as a file with --encoder.weights"
        raise UserError(f"the weights of {name!r} cannot be loaded ({type(error).__name__}); {hint}") from error


def sized(make: Any, name: str, key: str, size: int | None, **options: Any) -> nn.Module:
    """The model for images of that size, where its kind depends on one and takes it under this key."""
    if size is not None:
        with suppress(TypeError):
            return make(name, **{key: size}, **options)
    return make(name, **options)


def normalised(model: nn.Module, mean: Any, std: Any) -> nn.Module:
    if mean is not None and std is not None:
        model.normalisation = tuple(mean), tuple(std)  # type: ignore[assignment]
    return model


def as_encoder(model: nn.Module) -> nn.Module:
    """The module itself, or a Hugging Face model's pooled output."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__}
    return Pooled(model) if "transformers.modeling_utils.PreTrainedModel" in kinds else model


class Pooled(nn.Module):
    """A Hugging Face model without its head: its pooled output, else the first token, or the mean of a feature map."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: nn.Module = getattr(model, "base_model", model)

    @property
    def config(self) -> Any:
        return self.model.config

    def forward(self, images: Tensor) -> Tensor:
        output = self.model(pixel_values=images)
        if (pooled := getattr(output, "pooler_output", None)) is not None:
            return pooled.flatten(1)
        last = output.last_hidden_state
        return last[:, 0] if last.ndim == 3 else last.mean((2, 3))
