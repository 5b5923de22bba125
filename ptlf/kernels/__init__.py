"""Faster code for the parts of a training step. Numerics are those of the plain code but for rounding."""

from ptlf.kernels.parts import FastParts, module_variant
from ptlf.kernels.resnet import can_fuse, folded_tensors

__all__ = ["FastParts", "can_fuse", "folded_tensors", "module_variant"]
