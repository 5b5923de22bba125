"""BatchNorm that keeps several views apart in one batch, and BatchNorm over the batch of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ptlf import ranks


class ViewBatchNorm2d(nn.BatchNorm2d):
    """In training, `views` equal parts of the batch are normalised one after the other, each by its own statistics:
    the same results, and the same running statistics, as one pass per view."""

    views = 1

    def forward(self, input: Tensor) -> Tensor:
        if self.views == 1 or not self.training:
            return super().forward(input)
        if torch.compiler.is_compiling() and self.weight is not None and self.momentum is not None:
            return self.all_views_at_once(input)
        return torch.cat([nn.BatchNorm2d.forward(self, part) for part in input.chunk(self.views)])

    def all_views_at_once(self, input: Tensor) -> Tensor:
        """The same in kernels that span all views: half as many, twice as large."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        output, mean, var = _ViewNorm.apply(input, self.weight, self.bias, self.views, self.eps)
        values = input.numel() // (self.views * input.shape[1])
        with torch.no_grad():
            for view in range(self.views if self.track_running_stats else 0):
                self.running_mean.lerp_(mean[view], self.momentum)
                self.running_var.lerp_(var[view] * (values / (values - 1)), self.momentum)
            if self.num_batches_tracked is not None and self.track_running_stats:
                self.num_batches_tracked.add_(self.views)
        return output


class _ViewNorm(torch.autograd.Function):
    """Batch norm of `views` equal parts of the batch: written out, for the compiler to fuse with what is around it."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, views: int, eps: float) -> tuple[Tensor, ...]:
        values = per_view(x, views)
        near = values[:1, :1, :, :1, :1]  # a value not far from the mean: one pass takes both sums and loses no digits
        shifted = values - near
        shift = shifted.mean((1, 3, 4), keepdim=True)  # (views, 1, C, 1, 1)
        var = (shifted.square().mean((1, 3, 4), keepdim=True) - shift.square()).clamp_min(0)
        scale = torch.rsqrt(var + eps) * per_channel(weight)
        output = (shifted - shift) * scale + per_channel(bias)
        mean = shift + near
        return output.flatten(0, 1).to(x.dtype), mean.flatten(1), var.flatten(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.views, ctx.eps = inputs
        _, mean, var = output
        ctx.save_for_backward(x, weight, mean, var)
        ctx.mark_non_differentiable(mean, var)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        shape = (ctx.views, 1, -1, 1, 1)
        deviation = torch.rsqrt(var + ctx.eps).view(shape)
        normalised = (per_view(x, ctx.views) - mean.view(shape)) * deviation
        values = per_view(grad, ctx.views)
        of_bias = values.sum((1, 3, 4), keepdim=True)
        of_weight = (values * normalised).sum((1, 3, 4), keepdim=True)
        count = x.numel() // (ctx.views * x.shape[1])
        of_input = (values - of_bias / count - normalised * (of_weight / count)) * (deviation * per_channel(weight))
        return (
            of_input.flatten(0, 1).to(x.dtype),
            of_weight.sum(0).flatten().to(weight.dtype),
            of_bias.sum(0).flatten().to(weight.dtype),
            None,
            None,
        )


def per_view(x: Tensor, views: int) -> Tensor:
    """(views * B, C, H, W) -> (views, B, C, H, W) in at least float32."""
    return x.unflatten(0, (views, -1)).to(torch.promote_types(x.dtype, torch.float32))


def per_channel(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)


@contextmanager
def views_in_one_pass(encoder: nn.Module, views: int) -> Iterator[None]:
    norms = [module for module in encoder.modules() if isinstance(module, ViewBatchNorm2d)]
    for norm in norms:
        norm.views = views
    try:
        yield
    finally:
        for norm in norms:
            norm.views = 1


def takes_views_in_one_pass(encoder: nn.Module) -> bool:
    """Whether every norm that looks at the batch keeps views apart."""
    batch_norms = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return all(isinstance(norm, ViewBatchNorm2d) for norm in batch_norms)


class SharedStatistics(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over the batch of all processes, on CPUs, where PyTorch has none. Every share has equal size."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        dims = [0, *range(2, input.ndim)]
        var, mean = torch.var_mean(input.float() if input.dtype is torch.bfloat16 else input, dims, correction=0)
        means, variances = ranks.whole(torch.stack((mean, var))[None]).unbind(1)  # (processes, C) each
        mean = means.mean(0)
        var = variances.mean(0) + (means - mean).square().mean(0)
        if self.track_running_stats:
            self.note(mean.detach(), var.detach(), ranks.count() * input.numel() // input.shape[1])
        scale = torch.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        shape = (1, -1, *[1] * (input.ndim - 2))
        return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def note(self, mean: Tensor, var: Tensor, values: int) -> None:
        """Statistics of a batch, with `values` per channel, into the running ones."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(var * values / (values - 1), share)


class SharedBatchNorm1d(SharedStatistics, nn.BatchNorm1d):
    pass


class SharedBatchNorm2d(SharedStatistics, nn.BatchNorm2d):
    pass


def synchronise(module: nn.Module, device: torch.device) -> None:
    """Make every BatchNorm below the module one over the batch of all processes. Parameters stay the same objects."""
    if device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.__class__ = SharedBatchNorm1d
        elif isinstance(norm, nn.BatchNorm2d):
            norm.__class__ = SharedBatchNorm2d


def is_synchronised(norm: nn.Module) -> bool:
    return isinstance(norm, nn.SyncBatchNorm | SharedStatistics)
