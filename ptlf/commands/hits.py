"""The page of `ptlf search`: queries and the images nearest to them, in one file."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from ptlf.core.files import write_whole
from ptlf.run.vectors import Hit
from ptlf.stream.decode import BadImage, to_square

SIDE = 176  # pixels of a small picture


def write_hits(out: Path, query: Path, names: Sequence[str], found: Sequence[Sequence[Hit]]) -> None:
    """query: an image, or the folder that names are relative to."""
    templates = Environment(loader=PackageLoader("ptlf.report"), autoescape=True, undefined=StrictUndefined)
    root = query if query.is_dir() else query.parent
    rows = [(name, thumbnail(root / name), hits) for name, hits in zip(names, found, strict=True)]
    write_whole(out, templates.get_template("hits.html").render(rows=rows, thumbnail=thumbnail, side=SIDE))


def thumbnail(path: Path) -> str:
    """A data URL; empty if the image is not there, or no file of its own."""
    try:
        pixels = to_square(path, SIDE, "crop")
    except BadImage:
        return ""
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "jpeg", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
