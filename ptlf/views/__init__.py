"""Views by name. To add one: a function of the image size that returns `View`s, in named.py, and a line here."""

from collections.abc import Callable

from ptlf.core.errors import unknown
from ptlf.views.named import (
    ViewsConfig,
    cassle_barlow,
    cassle_moco,
    digits_views,
    lump,
    memory,
    memory_tinyimagenet,
    supervised,
)
from ptlf.views.operations import apply_view, make_views, normalise
from ptlf.views.view import CIFAR_MEAN, CIFAR_STD, UNIFORMS_PER_VIEW, View, draw

VIEWS: dict[str, Callable[[int], tuple[View, ...]]] = {
    "lump": lump,
    "memory": memory,
    "memory-tinyimagenet": memory_tinyimagenet,
    "supervised": supervised,
    "cassle-barlow": cassle_barlow,
    "cassle-moco": cassle_moco,
    "digits": digits_views,
}


def named_views(name: str, size: int) -> tuple[View, ...]:
    """`named_views("lump", 32)`: the views of that name for images of `size` pixels."""
    if name not in VIEWS:
        raise unknown("views", name, VIEWS)
    return VIEWS[name](size)


__all__ = ["CIFAR_MEAN", "CIFAR_STD", "UNIFORMS_PER_VIEW", "VIEWS", "View", "ViewsConfig"]
__all__ += ["apply_view", "draw", "make_views", "named_views", "normalise"]
