"""DistributedDataParallel for a model whose units freeze and thaw."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


class FreezeAwareDDP(nn.Module):
    """`model` as a DistributedDataParallel, which is made anew when a parameter froze or thawed since the last forward.

    A DistributedDataParallel decides once which gradients it averages: it would wait for ever for one that froze. Every
    process must freeze the same units between the same steps. frozen_buffers: of frozen norms, which need no exchange.
    """

    def __init__(self, model: nn.Module, frozen_buffers: Callable[[], Iterable[Tensor]], **options: Any) -> None:
        super().__init__()
        self.module = model
        self._frozen_buffers, self._options = frozen_buffers, options
        self._trained: list[bool] = []
        self._wrapped: list[DistributedDataParallel] = []  # in a list: it is no submodule, whose parameters count twice
        self._rewrap()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._rewrap()
        return self._wrapped[0](*args, **kwargs) if self._wrapped else self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients are accumulated without being averaged."""
        self._rewrap()
        return self._wrapped[0].no_sync() if self._wrapped else nullcontext()

    def _rewrap(self) -> None:
        trained = [parameter.requires_grad for parameter in self.module.parameters()]
        if trained == self._trained:
            return
        first = not self._trained
        self._trained = trained
        self._wrapped.clear()
        frozen = dict.fromkeys(self._frozen_buffers())
        ignored = [name for name, buffer in self.module.named_buffers() if buffer in frozen]
        if first or self._options.get("broadcast_buffers", True):
            # Each process has updated the statistics since the last exchange; the first one's are frozen on all.
            group = self._options.get("process_group")
            for buffer in frozen:
                distributed.broadcast(buffer, distributed.get_process_group_ranks(group)[0], group)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.module, ignored)
        if any(trained):  # DistributedDataParallel refuses a model without trainable parameters
            # Processes exchange weights at the first wrap only: they are equal from then on.
            self._wrapped.append(DistributedDataParallel(self.module, init_sync=first, **self._options))
