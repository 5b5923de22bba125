"""BatchNorm with separate statistics per view of a batch, and BatchNorm over the batch of all processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.freezing.kernels import STANDARD_FORWARDS


class ViewBatchNorm2d(nn.BatchNorm2d):
    """In training, the same as a forward for each of `views` equal parts of the batch, with statistics of their own."""

    views = 1

    def forward(self, input: Tensor) -> Tensor:
        if self.views == 1 or not self.training:
            return super().forward(input)
        return torch.cat([nn.BatchNorm2d.forward(self, part) for part in input.chunk(self.views)])


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
    """Whether all BatchNorms are ViewBatchNorm2d. Without any, the encoder must say so itself (`rowwise`)."""
    if getattr(encoder, "rowwise", False):
        return True
    batch_norms = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return bool(batch_norms) and all(isinstance(norm, ViewBatchNorm2d) for norm in batch_norms)


def is_usual(norm: nn.modules.batchnorm._BatchNorm) -> bool:
    """Whether it has what the Triton kernels expect: weight, bias, running statistics, and a fixed momentum."""
    return norm.affine and norm.running_mean is not None and norm.momentum is not None


class SharedStatistics(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over the batch of all processes, which have shares of equal size. Each of `views` is normalised by its
    own statistics, which update the running ones in order."""

    views = 1

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        views = input.chunk(self.views)
        dims = [0, *range(2, input.ndim)]
        precise = [view.float() if view.dtype in (torch.bfloat16, torch.float16) else view for view in views]
        moments = [torch.stack(torch.var_mean(view, dims, correction=0)) for view in precise]  # variance and mean
        variances, means = processes.all_gather_rows(torch.stack(moments)[None]).unbind(2)  # (processes, views, C) each
        mean = means.mean(0)
        var = variances.mean(0) + (means - mean).square().mean(0)
        if self.track_running_stats:
            assert self.num_batches_tracked is not None
            assert self.running_mean is not None and self.running_var is not None
            values = processes.world_size() * views[0].numel() // input.shape[1]  # per channel
            unbiased = var.detach() * (values / (values - 1))
            for view_mean, view_var in zip(mean.detach(), unbiased, strict=True):
                self.num_batches_tracked += 1
                momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(view_mean, momentum)
                self.running_var.lerp_(view_var, momentum)
        scale = torch.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        shape = (1, -1, *[1] * (input.ndim - 2))
        affine = zip(views, scale, shift, strict=True)
        parts = [(view * factor.view(shape) + term.view(shape)).to(view.dtype) for view, factor, term in affine]
        return parts[0] if self.views == 1 else torch.cat(parts)


STANDARD_FORWARDS |= {ViewBatchNorm2d.forward, SharedStatistics.forward}


class SharedBatchNorm1d(SharedStatistics, nn.BatchNorm1d):
    pass


class SharedBatchNorm2d(SharedStatistics, nn.BatchNorm2d):
    pass


class SharedViewBatchNorm2d(SharedStatistics, ViewBatchNorm2d):
    pass


SHARED: dict[type[nn.Module], type[SharedStatistics]] = {
    shared.__bases__[1]: shared for shared in (SharedBatchNorm1d, SharedBatchNorm2d, SharedViewBatchNorm2d)
}


def synchronise(module: nn.Module) -> None:
    """Make every BatchNorm in the module use the batch of all processes, in place. Parameters stay the same objects."""
    for norm in module.modules():
        if shared := SHARED.get(type(norm)):
            norm.__class__ = shared
        elif isinstance(norm, nn.modules.batchnorm._BatchNorm) and not is_synchronised(norm):
            raise UserError(f"{type(norm).__name__} is no plain batch norm; use --distributed.sync_batch_norm false")


def is_synchronised(norm: nn.Module) -> bool:
    return isinstance(norm, SharedStatistics | nn.SyncBatchNorm)
