"""Faster code for the parts of a training step, mostly for GPUs. Numerics are those of the plain code but for rounding.

`FastParts` runs encoder, heads, losses and views; the others tell when a step must be captured again.
"""

from ptlf.kernels.parts import FastParts, module_variant
from ptlf.kernels.resnet import folded_tensors, step_pieces

__all__ = ["FastParts", "folded_tensors", "module_variant", "step_pieces"]
