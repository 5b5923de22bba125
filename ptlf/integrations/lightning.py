"""A Lightning callback that freezes units during training, also after a resume."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock, patch

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ptlf.integrations.plan import FreezingPlan


class FreezingCallback(Callback):
    """`Trainer(callbacks=[FreezingCallback(FreezeSchedule(0, 0.5, epochs), part="encoder")])`.

    The arguments are those of `FreezingPlan`. Ratios come from the replay and from the module's own `training_step` on
    batches of the train dataloader. `fit(ckpt_path=...)` resumes bit-exactly. All units thaw when `fit` has ended.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.plan = FreezingPlan(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wrapped = trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel) and not wrapped.find_unused_parameters:
            raise ValueError("units freeze under DDP only with Trainer(strategy='ddp_find_unused_parameters_true')")
        if not pl_module.automatic_optimization and self.plan.replay is not None:
            raise ValueError("a training_step that optimizes by itself gives no loss for ratios; leave replay out")
        total = trainer.max_epochs if self.plan.by == "epoch" else trainer.estimated_stepping_batches

        def loss_fn(batch: Any) -> Tensor:
            nothing_logged = patch.multiple(pl_module, log=Mock(), log_dict=Mock())
            with nothing_logged, trainer.strategy.precision_plugin.forward_context():
                result = pl_module.training_step(trainer.strategy.batch_to_device(batch), 0)
            return result["loss"] if isinstance(result, Mapping) else result

        total = total if isinstance(total, int) and total > 0 else None
        optimizers, broadcast = trainer.optimizers, trainer.strategy.broadcast
        self.plan.begin(pl_module, optimizers, total, loss_fn, lambda: trainer.train_dataloader, broadcast)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.plan.at("epoch", trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        self.plan.at("step", trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.plan.end()

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.plan.loaded = state_dict
