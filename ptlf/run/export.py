"""The encoder of a run for other programs: FILE.onnx, or FILE.pt2 of torch.export.

The file is written beside its place, run on random images, compared with PyTorch, and only then renamed.
"""

import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ptlf.core.errors import UserError, import_optional
from ptlf.core.files import whole_file
from ptlf.encoders.weights import KEY
from ptlf.run.inference import LoadedEncoder, load_encoder

Model = Callable[[Tensor], np.ndarray]  # images (N, 3, V, V) to features (N, feature_dim)
TOLERANCE = 1e-4  # of the greatest feature


def export_run(
    folder: Path, to: Path, licence: str | None = None, overwrite: bool = False, trust_code: bool = False
) -> tuple[float, float]:
    """Write the encoder to FILE.onnx or FILE.pt2, its preprocessing and licence in the file's metadata. Returns the
    greatest difference to PyTorch, and the greatest feature."""
    if to.suffix not in EXPORTERS:
        hint = f"to share the encoder, copy {folder / 'encoder.safetensors'}, which ptlf.load_encoder reads"
        raise UserError(f"--to {to} must end with .onnx or .pt2; {hint}")
    if to.exists() and not overwrite:
        raise UserError(f"{to} exists; give --overwrite to replace it, or choose another --to")
    encoder = load_encoder(folder, device="cpu", trust_code=trust_code)
    metadata = json.dumps(encoder.card | ({"license": licence} if licence else {}))
    write, read = EXPORTERS[to.suffix]
    to.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(to.resolve()) as part:
        write(encoder, part, metadata)
        return compare_with_pytorch(encoder, read(part))


def compare_with_pytorch(encoder: LoadedEncoder, exported: Model) -> tuple[float, float]:
    size = encoder.card["image_size"]
    worst = greatest = 0.0
    for batch in (1, 5):  # the exported model takes any
        images = encoder.prepare(np.random.default_rng(batch).integers(0, 256, (batch, size, size, 3), np.uint8))
        with torch.no_grad():
            expected = encoder.module(images).numpy()
        features = exported(images)
        if features.shape != expected.shape:
            shapes = f"features of shape {features.shape}, PyTorch {expected.shape}"
            raise UserError(f"the exported model gives {shapes}; nothing is kept")
        worst = float(np.maximum(worst, np.abs(features - expected).max()))  # NaN stays
        greatest = max(greatest, float(np.abs(expected).max()))
    if not worst <= TOLERANCE * greatest:
        how = f"differs from PyTorch by {worst:.1e} where features reach {greatest:.1e}"
        raise UserError(f"the exported model {how}; nothing is kept")
    return worst, greatest


class OnImages(nn.Sequential):
    def forward(self, images: Tensor) -> Tensor:  # one argument of a fixed name
        return self[0](images)


@torch.no_grad()
def exported_program(encoder: LoadedEncoder) -> torch.export.ExportedProgram:
    view = encoder.card["view_size"]
    example, batch = torch.zeros(2, 3, view, view), torch.export.Dim("batch", min=1)
    try:
        return torch.export.export(OnImages(encoder.module).eval(), (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # whatever an encoder's forward makes of tracing
        why = " ".join(str(error).split())[:200]
        raise UserError(f"the encoder cannot be traced by torch.export: {why}") from error


def write_program(encoder: LoadedEncoder, path: Path, metadata: str) -> None:
    made = io.BytesIO()  # torch's own writer ends the process where the disk is full
    torch.export.save(exported_program(encoder), made, extra_files={f"{KEY}.json": metadata})
    path.write_bytes(made.getbuffer())


def program_model(path: Path) -> Model:
    module = torch.export.load(io.BytesIO(path.read_bytes())).module()
    return lambda images: module(images).detach().numpy()


def write_onnx(encoder: LoadedEncoder, path: Path, metadata: str) -> None:
    onnx, _, _ = (import_optional(name, "ONNX", "export") for name in ("onnx", "onnxscript", "onnxruntime"))
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of every operation of torchvision's, where that is not installed
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["features"]}
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch about itself
            made = torch.onnx.export(exported_program(encoder), dynamo=True, verbose=False, **names)
    finally:
        log.setLevel(level)
    assert made is not None
    model = made.model_proto
    model.metadata_props.add(key=KEY, value=metadata)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def onnx_model(path: Path) -> Model:
    session = import_optional("onnxruntime", "ONNX", "export").InferenceSession(
        path.read_bytes(), providers=["CPUExecutionProvider"]
    )
    return lambda images: session.run(None, {"images": images.numpy()})[0]


EXPORTERS = {".onnx": (write_onnx, onnx_model), ".pt2": (write_program, program_model)}
