"""BatchNorm with separate statistics per view of a batch, and BatchNorm over the batch of all processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.freezing.kernels import standard_in_eval


@standard_in_eval
class ViewBatchNorm2d(nn.BatchNorm2d):
    """In training, splits the batch into `views` equal parts and normalises each by its own statistics.

    Outputs and running statistics are the same as with one forward pass per view.
    """

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
    """Whether all BatchNorms are ViewBatchNorm2d. Without any, the encoder must say so itself (`rowwise`): other layers
    may depend on the batch."""
    if getattr(encoder, "rowwise", False):
        return True
    batch_norms = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return bool(batch_norms) and all(isinstance(norm, ViewBatchNorm2d) for norm in batch_norms)


@torch.no_grad()
def is_rowwise(encoder: nn.Module, example: Tensor) -> bool:
    """Whether the vectors of example[:1] are the same beside two other images, in train mode. Networks with batch norms
    are not tried: their running statistics would move."""
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in encoder.modules()):
        return False
    was_training = encoder.training
    vectors = []
    with torch.random.fork_rng([example.device] if example.is_cuda else []):
        first, *others = torch.randn_like(example[:1].expand(3, -1, -1, -1)).split(1)
        for other in others:
            torch.manual_seed(0)  # the same dropout
            vectors.append(encoder.train()(torch.cat((first, other)))[:1])
    encoder.train(was_training)
    return torch.allclose(vectors[0], vectors[1], rtol=1e-4, atol=1e-6)


def is_usual(norm: nn.modules.batchnorm._BatchNorm) -> bool:
    """Whether it has what the Triton kernels expect: weight, bias, running statistics, and a fixed momentum."""
    return norm.affine and norm.running_mean is not None and norm.momentum is not None


@standard_in_eval
class SharedStatistics(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over the batch of all processes, which have shares of equal size. One exchange in each direction."""

    views = 1

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        parts = self.of_views(input.chunk(self.views))
        return parts[0] if self.views == 1 else torch.cat(parts)

    def of_views(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Each view normalised by its own statistics, in train mode. They update the running ones in order."""
        dims = [0, *range(2, views[0].ndim)]
        precise = [view.float() if view.dtype in (torch.bfloat16, torch.float16) else view for view in views]
        moments = [torch.stack(torch.var_mean(view, dims, correction=0)) for view in precise]  # variance and mean
        variances, means = processes.all_gather_rows(torch.stack(moments)[None]).unbind(2)  # (processes, views, C) each
        mean = means.mean(0)
        var = variances.mean(0) + (means - mean).square().mean(0)
        if self.track_running_stats:
            values = processes.world_size() * views[0].numel() // views[0].shape[1]  # per channel
            self.track(mean.detach(), var.detach() * (values / (values - 1)))
        scale = torch.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        shape = (1, -1, *[1] * (views[0].ndim - 2))
        affine = zip(views, scale, shift, strict=True)
        return [(view * factor.view(shape) + term.view(shape)).to(view.dtype) for view, factor, term in affine]

    def track(self, means: Tensor, variances: Tensor) -> None:
        """Update the running statistics with those of each view, (views, C)."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        for mean, var in zip(means, variances, strict=True):
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(var, momentum)


class SharedBatchNorm1d(SharedStatistics, nn.BatchNorm1d):
    pass


class SharedBatchNorm2d(SharedStatistics, nn.BatchNorm2d):
    pass


class SharedViewBatchNorm2d(SharedStatistics, ViewBatchNorm2d):
    pass


class SharedBatchNorm3d(SharedStatistics, nn.BatchNorm3d):
    pass


SHARED: dict[type[nn.Module], type[SharedStatistics]] = {
    ViewBatchNorm2d: SharedViewBatchNorm2d,
    nn.BatchNorm1d: SharedBatchNorm1d,
    nn.BatchNorm2d: SharedBatchNorm2d,
    nn.BatchNorm3d: SharedBatchNorm3d,
}


def synchronise(module: nn.Module) -> None:
    """Make every BatchNorm in the module use the batch of all processes, in place. Parameters stay the same objects."""
    for norm in module.modules():
        if shared := SHARED.get(type(norm)):
            norm.__class__ = shared
        elif isinstance(norm, nn.modules.batchnorm._BatchNorm) and not is_synchronised(norm):
            kind = type(norm).__name__
            problem = f"{kind} is no plain batch norm: it cannot use the batch of all processes"
            raise UserError(f"{problem}; use --distributed.sync_batch_norm false")


def is_synchronised(norm: nn.Module) -> bool:
    return isinstance(norm, SharedStatistics | nn.SyncBatchNorm)
