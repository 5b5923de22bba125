"""Augmented views of images: their settings, by name, and their computation on the device."""

from ptlf.views.named import VIEWS, ViewsConfig, named_views
from ptlf.views.operations import apply_view, make_views, normalise
from ptlf.views.view import CIFAR_MEAN, CIFAR_STD, UNIFORMS_PER_VIEW, View, draw

__all__ = ["CIFAR_MEAN", "CIFAR_STD", "UNIFORMS_PER_VIEW", "VIEWS", "View", "ViewsConfig"]
__all__ += ["apply_view", "draw", "make_views", "named_views", "normalise"]
