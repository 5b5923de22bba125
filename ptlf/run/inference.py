"""The encoder that a run leaves, with its preprocessing, and features of any images; no training data are needed."""

import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import ptlf
from ptlf.core.errors import UserError, import_optional, printable, short_repr, warn
from ptlf.core.files import check_regular, whole_file
from ptlf.core.randomness import seeded
from ptlf.core.reading import check_shape
from ptlf.core.registry import settings_from
from ptlf.core.settings import as_dict
from ptlf.encoders import as_encoder
from ptlf.encoders.encoder import check_normalisation
from ptlf.encoders.weights import FILES, KEPT, KEY, at_version
from ptlf.evaluation.prober import eval_mode
from ptlf.methods import METHODS, Method
from ptlf.run.build import Components, choose_device, make_encoder
from ptlf.run.config import from_dict
from ptlf.run.folder import ENCODER, encoder_digest, has_finished, restore_encoder
from ptlf.run.recipes import name_of
from ptlf.run.results import refuse_folder_of_runs
from ptlf.run.versions import Map, find_maps, find_version, move, name_version
from ptlf.stream.decode import Fit
from ptlf.stream.disk import progress_bar
from ptlf.stream.images import find_images, open_images
from ptlf.stream.pack import data_root
from ptlf.stream.packing import SHOWN_SKIPS, SquareBatch, decode_squares, refuse_broken, refuse_or_skip
from ptlf.stream.rows import ImageSplit
from ptlf.views import normalise

# How an image becomes a square of image_size; resizing is bicubic and antialiased.
SHAPES: dict[Fit, str] = {
    "crop": "short side resized to image_size (bicubic, antialiased), centre cropped",
    "squash": "both sides resized to image_size (bicubic, antialiased)",
    "pad": "long side resized to image_size (bicubic, antialiased), centred on grey (127)",
}
Card = dict[str, Any]
CARD: Card = {
    "image_size": (1, 1 << 14),
    "view_size": (1, 1 << 14),
    "feature_dim": (1, 10**6),
    "mean": list,
    "std": list,
}
COLUMNS = ["name", "label", "features"]  # of a Parquet file
OnProblem = Callable[[list[tuple[str, str]]], None]  # takes (name, reason) of images that cannot be read


def card_of(parts: Components) -> Card:
    """What is needed to use the encoder without the run's data, as plain values."""
    config, view, encoder = parts.config, parts.view_specs[0], parts.model.encoder
    parameter, size = next(encoder.parameters()), parts.view_size
    with eval_mode(encoder):
        dim = encoder(torch.zeros(1, 3, size, size, device=parameter.device, dtype=parameter.dtype)).shape[1]
    card = {
        "ptlf_version": ptlf.__version__,
        "recipe": name_of(as_dict(config)),
        "encoder": None if parts.encoder_given else as_dict(config.encoder),
        "module": f"{type(encoder).__module__}.{type(encoder).__qualname__}",
        "image_size": parts.stream.size,
        "view_size": size,
        "fit": parts.stream.fit,
        "crop": SHAPES[parts.stream.fit],
        "mean": list(view.mean),
        "std": list(view.std),
        "feature_dim": dim,
    }
    if METHODS.find(config.method.name).adapt_encoder is not Method.adapt_encoder:  # such as the columns of PNN
        card |= {"method": as_dict(config.method), "tasks": len(parts.stream.tasks)}
    return card


@dataclass
class LoadedEncoder:
    """`module` is in eval mode and maps (N, 3, view_size, view_size) to (N, feature_dim); `card` says what it is."""

    module: nn.Module
    card: Card
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    folder: Path = Path()  # of its run
    maps: Sequence[Map] = ()  # from its vectors to those of an older or newer version,
    version: Mapping[str, str | None] = field(default_factory=dict)  # which is this one, as `name_version` gives it

    @cached_property
    def about(self) -> Card:
        """What a file of its vectors says of them. The checks are the vectors of two images that are made up."""
        size = self.card["image_size"]
        x = np.arange(size * size * 3).reshape(size, size, 3)
        checks = self.embed(np.stack([x * 255 // x.max(), x * x % 256]).astype(np.uint8))
        return {
            **name_version(self.folder, encoder_digest(self.module.state_dict())),
            **{"dim": self.feature_dim, "size": size, "fit": self.fit},
            **{"ptlf_version": ptlf.__version__, "checks": [[float(f"{v:.4g}") for v in row] for row in checks]},
            **self.version,
        }

    @property
    def feature_dim(self) -> int:
        return self.card["feature_dim"]

    @property
    def fit(self) -> Fit:
        return self.card.get("fit", "crop")

    def preprocess(self, images: Any) -> Tensor:
        """The module's input (N, 3, view_size, view_size) of an image or several, in any form that `embed` takes."""
        return torch.cat([self.prepare(batch.images) for batch in self.batches(images, 256)])

    def prepare(self, pixels: np.ndarray) -> Tensor:
        """The input of squares (N, image_size, image_size, 3) uint8."""
        return self.normalise(torch.from_numpy(pixels).to(self.device))

    def normalise(self, images: Tensor) -> Tensor:
        return normalise(images, self.card["mean"], self.card["std"], self.card["view_size"])

    def embed(self, images: Any, batch: int = 256) -> np.ndarray:
        """Features (N, feature_dim) float32 of images: a path (a folder, a packed set, .npz, .npy), an array
        (N, H, W, 3) uint8, a list of paths, PIL images or arrays, a torch Dataset or a Hugging Face dataset."""
        return np.concatenate([features for _, features in self.embedded(images, batch)])

    @torch.no_grad()
    def embedded(
        self, images: Any, batch: int, on_problem: OnProblem = refuse_broken
    ) -> Iterator[tuple[SquareBatch, np.ndarray]]:
        """Batches of images with their features (n, feature_dim) float32."""
        for part in self.batches(images, batch, on_problem):
            yield part, move(self.maps, self.module(self.prepare(part.images)).float().cpu().numpy())

    def batches(self, images: Any, batch: int, on_problem: OnProblem = refuse_broken) -> Iterator[SquareBatch]:
        if batch < 1:
            raise UserError(f"batch is {batch}; it must be at least 1")
        array = isinstance(images, np.ndarray | Tensor) and images.ndim == 3 and 3 in (images.shape[0], images.shape[2])
        several = [images] if array or isinstance(images, Image.Image) else images
        for part in [several] if isinstance(several, ImageSplit) else open_images(several).values():
            for squares in decode_squares(part, self.card["image_size"], self.fit):
                if squares.problems:
                    on_problem(squares.problems)
                for start in range(0, len(squares.images), batch):
                    piece = slice(start, start + batch)
                    yield SquareBatch(squares.names[piece], squares.images[piece], squares.labels[piece], [])


def load_encoder(
    folder: Path | str, encoder: nn.Module | None = None, device: str = "auto", *, trust_code: bool = False,
    as_of: str | None = None,
) -> LoadedEncoder:  # fmt: skip
    """The encoder of a run's folder, or its file, with its preprocessing; the training data are not needed.

    encoder: a module like the one trained, for a run that was made with a module and not with an encoder's name.
    trust_code: follow names such as "package.module:function" in the folder, which runs their code.
    as_of: a task: `embed` gives vectors like those of the encoder after it, by the encoder that was kept or by maps.
    """
    folder, place = at_version(Path(folder)), choose_device(device)
    if folder.is_file() and folder.name in FILES:
        folder = folder.parent
    if as_of and (folder / KEPT / as_of).is_dir():
        folder, as_of = folder / KEPT / as_of, None
    file = next((folder / name for name in FILES if (folder / name).exists()), folder / ENCODER)
    with nullcontext() if trust_code else settings_from(file):
        card = read_card(file)
        module = rebuilt(card, folder, encoder)
    restore_encoder(folder, module, file.name)
    if (folder / "results.json").exists() and not has_finished(folder):
        warn(f"the last task of {folder} has not ended: its encoder is the one from before that task")
    loaded = LoadedEncoder(module.to(place).eval().requires_grad_(False), card, place, folder)
    return loaded if as_of is None else mapped(loaded, as_of)


def mapped(encoder: LoadedEncoder, task: str, what: str = "") -> LoadedEncoder:
    """What gives vectors like those of the encoder after that task, which may be a checksum. what: needs them."""
    own, wanted = encoder_digest(encoder.module.state_dict()), find_version(encoder.folder, task)
    version = {} if own == wanted else name_version(encoder.folder, wanted) | {"mapped_from": own}
    maps = find_maps(encoder.folder, own, wanted, what or f"its vectors after {task}")
    return replace(encoder, maps=maps, version=version)


def read_card(file: Path) -> Card:
    """From the metadata of a run's encoder."""
    if not file.is_file():
        refuse_folder_of_runs(file.parent)
        raise UserError(f"{file.parent} holds no {ENCODER}; it is no run, or the run there has not finished")
    try:
        with safe_open(file, "pt") as opened:
            text = (opened.metadata() or {}).get(KEY)
        if text is None:
            hint = "a new run takes its weights by --encoder.weights"
            raise UserError(f"{file} does not say what encoder it is of, as files before version 0.2; {hint}")
        card: Card = json.loads(text)
        check_shape(card, CARD)
        if card.get("fit", "crop") not in SHAPES:
            raise ValueError(f"fit is {short_repr(card['fit'])}")
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    check_normalisation(card["mean"], card["std"], f"mean and std in {file}")
    return card


def rebuilt(card: Card, folder: Path, encoder: nn.Module | None, seed: int = 0) -> nn.Module:
    """The module that the card describes, with the weights that the seed gives."""
    config = from_dict({key: card[key] for key in ("encoder", "method") if card.get(key)})
    if encoder is None and card["encoder"] is None:
        hint = f"give one like it: load_encoder({str(folder)!r}, encoder=module)"
        raise UserError(f"the run in {folder} was made with a module of your own ({card.get('module')}); {hint}")
    encoder = as_encoder(encoder or make_encoder(config.encoder, seed, card["view_size"]))
    if "method" in card:
        with seeded(seed, "adapted encoder"):
            encoder = METHODS.find(config.method.name).adapt_encoder(config.method, encoder, card["tasks"])
    return encoder


def embed_images(
    folder: Path, images: Sequence[str], out: Path, *, batch: int, on_error: str, **loading: Any
) -> tuple[int, int, list[dict[str, str]]]:
    """Write the features of any number of images; names begin with their path if there are several paths. Returns how
    many images there are, how long each one's features are, and which were skipped. Only names and labels are held in
    memory. loading: `device`, `trust_code` and `as_of`, for `load_encoder`."""
    write_rows = writer_for(out)
    prefixes = [f"{path.rstrip('/')}/" if len(images) > 1 else "" for path in images]
    opened = [open_images(find_images(path, data_root())) for path in images]
    splits = [(prefix, part) for prefix, found in zip(prefixes, opened, strict=True) for part in found.values()]
    encoder = load_encoder(folder, **loading)
    root = Path(images[0] if len(images) == 1 else ".").absolute()  # names are relative to it
    about = json.dumps(encoder.about | {"root": str(root if root.is_dir() else root.parent)})
    skipped: list[dict[str, str]] = []
    total = 0
    with (
        progress_bar(f"embedding with {folder.name}", sum(split.count for _, split in splits), True) as advance,
        whole_file(out) as file,
        write_rows(file, encoder.feature_dim, about) as write,
    ):
        for prefix, split in splits:

            def on_problem(problems: list[tuple[str, str]], prefix: str = prefix) -> None:
                refuse_or_skip([(prefix + name, why) for name, why in problems], skipped, on_error)

            for squares, features in encoder.embedded(split, batch, on_problem):
                labels = [None if label is None else str(label) for label in squares.labels]
                write([prefix + name for name in squares.names], labels, features)
                total += len(features)
                advance(len(features))
        if not total:
            raise UserError(f"none of the {len(skipped)} images can be read: {skipped[0]['file']}: {skipped[0]['why']}")
    for entry in skipped[:SHOWN_SKIPS]:
        warn(f"skipped {entry['file']}: {entry['why']}")
    return total, encoder.feature_dim, skipped


def are_features(file: Path) -> bool:
    try:
        check_regular(file)
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return {"names", "features"} <= {*arrays.files} <= {"names", "features", "labels", "about"}
        return import_optional("pyarrow.parquet", ".parquet", "export").read_schema(file).names == COLUMNS
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):  # pyarrow's errors are ValueErrors
        return False


Write = Callable[[list[str], list[str | None], np.ndarray], object]  # names, labels, features (n, dim)


@contextmanager
def npz_writer(path: Path, dim: int, about: str) -> Iterator[Write]:
    """`names`, `features` (N, dim) float32, `about`, perhaps `labels` (text). Features are first written to a file
    without a name: the length of the array is known at the end only."""
    names: list[str] = []
    labels: list[str | None] = []
    with tempfile.TemporaryFile(dir=path.parent) as rows, open(path, "wb") as file:

        def write(more: list[str], texts: list[str | None], features: np.ndarray) -> None:
            names.extend(more)
            labels.extend(texts)
            rows.write(np.ascontiguousarray(features, np.float32).data)

        yield write
        rows.flush()
        arrays = {"names": np.array(names)}
        if any(label is not None for label in labels):
            arrays["labels"] = np.array([label or "" for label in labels])
        vectors = np.memmap(rows, np.float32, "r", shape=(len(names), dim))
        np.savez(file, allow_pickle=False, features=vectors, about=np.array(about), **arrays)


@contextmanager
def parquet_writer(path: Path, dim: int, about: str) -> Iterator[Write]:
    """Columns `name`, `label` (null where there is none) and `features`, a list of `dim` floats."""
    arrow, parquet = (import_optional(name, ".parquet", "export") for name in ("pyarrow", "pyarrow.parquet"))
    text, vector = arrow.string(), arrow.list_(arrow.float32(), dim)
    schema = arrow.schema(list(zip(COLUMNS, (text, text, vector), strict=True)), {KEY: about})
    with parquet.ParquetWriter(path, schema) as file:

        def write(names: list[str], labels: list[str | None], features: np.ndarray) -> None:
            vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(features.astype(np.float32).reshape(-1)), dim)
            texts = [
                [text and printable(text) for text in column] for column in (names, labels)
            ]  # they need not be UTF-8
            file.write_table(arrow.table([*texts, vectors], schema=schema))

        yield write


WRITERS = {".npz": npz_writer, ".parquet": parquet_writer}


def writer_for(out: Path) -> Callable[[Path, int, str], AbstractContextManager[Write]]:
    if out.suffix not in WRITERS:
        raise UserError(f"--out {out} must end with {' or '.join(WRITERS)}")
    if out.exists() and not are_features(out):
        raise UserError(f"--out {out} exists and holds no features of `ptlf embed`; choose another name, or remove it")
    return WRITERS[out.suffix]
