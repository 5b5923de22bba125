"""Augmented views of images: their settings, by name, and their computation on the device."""

from ptlf.views.named import VIEWS, ViewsConfig, named_views
from ptlf.views.operations import UNIFORMS_PER_VIEW, View, apply_view, draw, make_views, normalise

__all__ = ["UNIFORMS_PER_VIEW", "VIEWS", "View", "ViewsConfig", "apply_view", "draw", "make_views", "named_views"]
__all__ += ["normalise"]
