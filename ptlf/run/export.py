"""The encoder of a run for other programs: ONNX, torch.export, or a folder as on the Hugging Face hub.

Each is written beside its place, run on random images, compared with PyTorch, and only then renamed.
"""

import importlib.util
import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ptlf.core.errors import UserError
from ptlf.core.files import write_error, write_whole
from ptlf.core.reading import damaged, read_json, read_text
from ptlf.core.words import short_repr
from ptlf.encoders.weights import KEY
from ptlf.run.folder import ENCODER, encoder_bytes
from ptlf.run.inference import MODEL, SHAPES, LoadedEncoder, load_encoder
from ptlf.run.results import RESTORE_HINT, Json, read_results, to_json

Model = Callable[[Tensor], np.ndarray]  # images (N, 3, V, V) to features (N, feature_dim)
NO_ONNX = "ONNX needs onnx, onnxscript and onnxruntime: `pip install 'ptlf[export]'`, or export to FILE.pt2 or a folder"
CARD, CONFIG, PROCESSOR = "README.md", "config.json", "preprocessor_config.json"  # of an exported folder
EXPORTED = (CARD, CONFIG, PROCESSOR, MODEL)  # all that is in one; CARD is the model card
MODEL_TYPE = "ptlf-encoder"
TOLERANCE = 1e-4  # of the greatest feature
UNTESTED = "It was not tested: there were no labelled test images."
TESTED_LATER = "In training there were no labelled test images. It was tested later, see below."
BATCHES = (1, 5)  # sizes that are checked: the exported model takes any


def export_run(
    folder: Path, to: Path, licence: str | None = None, overwrite: bool = False, trust_code: bool = False
) -> tuple[float, float]:
    """Write the encoder to FILE.onnx, FILE.pt2 or a folder. Returns the greatest difference to PyTorch, and the
    greatest feature."""
    if to.suffix not in (".onnx", ".pt2", ""):
        raise UserError(f"--to {to} must be FILE.onnx, FILE.pt2 or a folder without such an end")
    named, to = to, to.resolve()
    check_target(named, to, folder.resolve(), overwrite)
    encoder = load_encoder(folder, device="cpu", trust_code=trust_code)
    with replaced(to) as part:
        if to.suffix == ".onnx":
            write_onnx(encoder, part)
            return check(encoder, onnx_model(part), "ONNX")
        if to.suffix == ".pt2":
            write_program(encoder, part)
            return check(encoder, program_model(part), "torch.export")
        results = read_results(folder) if (folder / "results.json").exists() else None
        write_folder(encoder, part, results, licence, to.name)
        return check(encoder, folder_model(part), "the folder")


def check_target(named: Path, to: Path, run: Path, overwrite: bool) -> None:
    """Of what is there, only a file of the same kind and a folder with an earlier export and nothing else are replaced.
    named: `to` as the user wrote it."""
    if to.suffix and to.is_dir():
        raise UserError(f"{named} is a folder; choose another --to")
    if not to.suffix and to.exists() and not to.is_dir():
        raise UserError(f"{named} is a file, and --to without .onnx or .pt2 is a folder; choose another --to")
    if not to.suffix and (to == run or to in run.parents or run in to.parents):
        place = "is the run itself" if to == run else "holds the run" if to in run.parents else "lies in the run"
        raise UserError(f"{named} {place}; choose a --to outside it")
    if to.is_dir() and (foreign := not_exported(to)):
        raise UserError(
            f"{named} holds {short_repr(foreign)}, which is of no earlier export, and stays; choose another --to"
        )
    if to.exists() and not overwrite:
        raise UserError(f"{named} exists; give --overwrite to replace it, or choose another --to")


def not_exported(folder: Path) -> str:
    """The first name in the folder that is not of an earlier export; empty if there is none."""
    names = sorted(name for name in os.listdir(folder) if name != ".DS_Store")
    foreign = [name for name in names if name not in EXPORTED]
    if foreign or not names:
        return foreign[0] if foreign else ""
    try:
        kind = read_json(folder / CONFIG).get("model_type")
    except (UserError, OSError, ValueError, AttributeError):
        kind = None
    return "" if kind == MODEL_TYPE else names[0]


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """A place beside `target`, renamed to it after the block; removed if the block raises."""
    part = target.with_name(f".{target.stem}.part{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(part)
        yield part
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(part, target)
    except OSError as error:
        raise write_error(target, error) from error
    finally:
        remove(part)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check(encoder: LoadedEncoder, exported: Model, what: str) -> tuple[float, float]:
    size = encoder.card["image_size"]
    worst, greatest = 0.0, 0.0
    for batch in BATCHES:
        pixels = np.random.default_rng(batch).integers(0, 256, (batch, size, size, 3), np.uint8)
        images = encoder.prepare(pixels)
        with torch.no_grad():
            expected = encoder.module(images).numpy()
        found = exported(images)
        if found.shape != expected.shape:
            raise UserError(f"{what} gives features of shape {found.shape}, PyTorch {expected.shape}; nothing is kept")
        difference = float(np.abs(found - expected).max())
        worst = difference if not difference <= worst else worst  # NaN stays
        greatest = max(greatest, float(np.abs(expected).max()))
    if not worst <= TOLERANCE * greatest:
        raise UserError(
            f"{what} differs from PyTorch by {worst:.1e} where features reach {greatest:.1e}; nothing is kept"
        )
    return worst, greatest


def example(encoder: LoadedEncoder) -> Tensor:
    size = encoder.card["view_size"]
    return torch.zeros(2, 3, size, size)


class Plain(nn.Module):
    """Only the forward on images, with one argument of a fixed name."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images)


def exported_program(encoder: LoadedEncoder) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad():
            module = Plain(encoder.module).eval()
            return torch.export.export(module, (example(encoder),), dynamic_shapes=({0: batch},))
    except Exception as error:  # whatever an encoder's forward makes of tracing
        why = " ".join(str(error).split())[:200]
        raise UserError(f"the encoder cannot be traced by torch.export: {why}; export it to a folder") from error


def write_program(encoder: LoadedEncoder, path: Path) -> None:
    made = io.BytesIO()  # torch's own writer ends the process where the disk is full
    torch.export.save(exported_program(encoder), made, extra_files={f"{KEY}.json": json.dumps(encoder.card)})
    path.write_bytes(made.getbuffer())


def program_model(path: Path) -> Model:
    module = torch.export.load(path).module()
    return lambda images: module(images).detach().numpy()


def write_onnx(encoder: LoadedEncoder, path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")):
        raise UserError(NO_ONNX)
    import onnx

    program = exported_program(encoder)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["features"]}
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of every operation of torchvision's, where that is not installed
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch about itself
            made = torch.onnx.export(program, (example(encoder),), dynamo=True, verbose=False, **names)
    finally:
        log.setLevel(level)
    assert made is not None
    model = made.model_proto
    for name, value in {KEY: json.dumps(encoder.card)}.items():
        model.metadata_props.add(key=name, value=value)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def onnx_model(path: Path) -> Model:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images.numpy()})[0]


def write_folder(encoder: LoadedEncoder, path: Path, results: Json | None, licence: str | None, name: str) -> None:
    """config.json, model.safetensors, preprocessor_config.json and README.md, the model card."""
    path.mkdir()
    card = encoder.card
    kind = type(encoder.module).__name__
    config = {"model_type": MODEL_TYPE, "architectures": [kind], **card}
    write_whole(path / CONFIG, to_json(config) + "\n")
    write_whole(path / MODEL, encoder_bytes(encoder.module, {"format": "pt", KEY: json.dumps(card)}))
    if card.get("fit") != "pad":  # which Hugging Face's image processors do not do
        write_whole(path / PROCESSOR, to_json(processor_config(card)) + "\n")
    write_whole(path / CARD, model_card(card, results, licence, name))


def processor_config(card: Json) -> Json:
    """The preprocessing as Hugging Face's image processors read it."""
    view = card["view_size"]
    side = max(card["image_size"], view)
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": side, "width": side} if card.get("fit") == "squash" else {"shortest_edge": side},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": view, "width": view},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": card["mean"],
        "image_std": card["std"],
    }


def model_card(card: Json, results: Json | None, licence: str | None, name: str) -> str:
    head = ["---", *([f"license: {licence}"] if licence else []), "library_name: ptlf"]
    head += ["pipeline_tag: image-feature-extraction", "tags: [self-supervised, continual-learning]", "---"]
    parts = ["\n".join(head), f"# {name}", about(card, results)]
    if results:
        parts += ["## Scores", scores(results), "## Cost of training", costs(results)]
    parts += ["## How to load it", LOADING.format(name=name), "## Preprocessing", preprocessing(card)]
    parts += ["## Licence", licence or "None was stated by whoever exported it: ask before you use it."]
    return "\n\n".join(parts) + "\n"


LOADING = """```python
import ptlf

encoder = ptlf.load_encoder("{name}")  # the path of this folder
features = encoder.embed(["photograph.jpg"])  # numpy, float32
```

`encoder.module` is a torch module in eval mode, `encoder.preprocess(images)` makes its input."""


def about(card: Json, results: Json | None) -> str:
    made = card["encoder"]["name"] if card["encoder"] else card["module"]
    words = f"An image encoder ({made}) with features of {card['feature_dim']} numbers, trained by ptlf"
    words += f" {card['ptlf_version']} with the recipe `{card['recipe']}`" if card.get("ptlf_version") else ""
    if not results:
        return words + "."
    config = results["config"]
    tasks = len(results["tasks"])
    words += f": {tasks} task{'s' * (tasks != 1)} one after another, {config['training']['epochs']} epochs each"
    labels = "with labels" if results.get("uses_labels") else "without labels"
    words += f", {labels}, seed {results['seed']}."
    given = results.get("encoder_weights")
    start = (
        f" It began with the weights in `{Path(given['path']).name}` (sha256 {given['sha256'][:12]})." if given else ""
    )
    return words + start


def scores(results: Json) -> str:
    rows = ["| probe | accuracy, % | forgetting, points | before training, % |", "|---|---|---|---|"]
    for probe, values in results["probes"].items():
        keys = ("accuracy", "forgetting", "untrained_accuracy")
        rows.append(f"| {probe} | " + " | ".join(figure(values.get(key)) for key in keys) + " |")
    if len(rows) == 2:
        rows = [UNTESTED]
    for probe, values in ((results.get("reference") or {}).get("probes") or {}).items():
        change = f"{figure(values['before'])} % before, {figure(values['accuracy'])} % after"
        rows += ["", f"What it knew before ({probe}): {change}."]
    tested = ", ".join(results["eval_splits"])
    return "\n".join(rows) + (f"\n\nTested on: {tested}." if tested else "")


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def costs(results: Json) -> str:
    cost, place = results["cost"], results["environment"]
    flops = f"{cost['backward_flops'] / 1e12:.3f} T FLOPs backward"
    frozen = sum(len(event["frozen"]) for entry in results["freezing"] for event in entry["events"])
    freezes = f"; units froze {frozen} times" if frozen else ""
    where = f"{place.get('device_name')}, torch {place.get('torch')}"
    return f"{cost.get('learning_seconds', cost['train_seconds']):.0f} s of training on {where}; {flops}{freezes}."


def preprocessing(card: Json) -> str:
    mean, std = (", ".join(f"{value:g}" for value in card[key]) for key in ("mean", "std"))
    size, view = card["image_size"], card["view_size"]
    crop = f"; the centre {view} px are used" if view != size else ""
    shape = SHAPES[card.get("fit", "crop")].replace("image_size", f"{size} px")
    values = f"divided by 255 and normalised with mean ({mean}) and deviation ({std})"
    return f"EXIF orientation is applied; {shape}{crop}. Values are {values}."


def check_card(folder: Path, to: Path) -> None:
    """`to` must be an exported folder with the encoder of the run in `folder`."""
    hint = f"`ptlf export {folder} --to {to} --overwrite` writes it anew"
    if not (folder / ENCODER).is_file():
        raise UserError(f"{folder} holds no {ENCODER}: there is no run, or the run there has not finished")
    if not (to / CARD).is_file():
        raise UserError(f"{to} holds no {CARD}; `ptlf export {folder} --to DIR` makes a folder with one")
    mine, theirs = weights(folder / ENCODER, RESTORE_HINT), weights(to / MODEL, hint)
    if mine.keys() != theirs.keys() or not all(same(mine[name], theirs[name]) for name in mine):
        raise UserError(f"{to} is not of the encoder in {folder}; {hint}")


def weights(path: Path, hint: str) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, error, hint) from None


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def add_scores(to: Path, probes: Json, tested: Sequence[str]) -> bool:
    """A section of the card with the figures of a later test. Returns whether it replaced one: that of the same test,
    with the same probes and settings on the same images."""
    title = f"Scores of a later test: {', '.join(tested)}\n"
    rows = [title, "| probe | accuracy, % | before training, % | test images | settings |", "|---|---|---|---|---|"]
    for probe, values in probes.items():
        figures = [figure(values.get(key)) for key in ("accuracy", "untrained_accuracy")]
        used = (values.get("used_by_task") or [{}])[-1]
        settings = ", ".join(
            f"{key} {value}" if used.get(key, value) == value else f"{key} {used[key]} ({value} was set)"
            for key, value in values["settings"].items()
            if key != "enabled"
        )
        rows.append(f"| {probe} | {' | '.join(figures)} | {sum(values['test_images'])} | {settings} |")
    text = read_text(to / CARD).strip().replace(UNTESTED, TESTED_LATER)
    there, test = text.split("\n\n## "), subject("\n".join(rows))
    sections = [section for section in there if subject(section) != test]
    loading = [place for place, section in enumerate(sections) if section.startswith("How to load it")]
    sections.insert(loading[0] if loading else len(sections), "\n".join(rows))
    write_whole(to / CARD, "\n\n## ".join(sections) + "\n")
    return len(sections) <= len(there)


def subject(section: str) -> list[list[str]]:
    """What a section of `add_scores` is of: its title; the probe, the number of images and the settings of each row."""
    title, *lines = section.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return [[title], *([row[0], *row[3:]] for row in rows)]


def folder_model(path: Path) -> Model:
    loaded = load_encoder(path, device="cpu", trust_code=True)  # it was just written here

    def features(images: Tensor) -> np.ndarray:
        with torch.no_grad():
            return loaded.module(images).numpy()

    return features
