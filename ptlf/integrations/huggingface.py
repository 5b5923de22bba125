"""A callback for the Trainer of Hugging Face that freezes units during training, also after a resume."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ptlf.integrations.plan import FreezingPlan


class FreezingCallback(TrainerCallback, ExportableState):
    """`Trainer(..., callbacks=[FreezingCallback({0.25: "vit.embeddings", 0.5: 12}, by="step")])`.

    The arguments are those of `FreezingPlan`. Ratios come from the replay and from the model's loss on batches of the
    train dataloader. The state is in `trainer_state.json`, for a resume. All units thaw when training has ended.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.plan = FreezingPlan(*args, **kwargs)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *control: Any, **others: Any) -> None:
        model: nn.Module = others["model"]
        states: Any = state.stateful_callbacks or {}
        if state.global_step > 0 and (kept := states.get(type(self).__name__)):
            self.plan.loaded = (kept[0] if isinstance(kept, list) else kept)["attributes"]
        total = state.num_train_epochs if self.plan.by == "epoch" else state.max_steps
        device = next(model.parameters()).device

        def loss_fn(batch: Mapping[str, Any]) -> Tensor:
            moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
            return model(**moved)["loss"]

        self.plan.begin(model, [others["optimizer"]], int(total) or None, loss_fn, lambda: others["train_dataloader"])

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *control: Any, **others: Any) -> None:
        self.plan.at("epoch", int(state.epoch or 0))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *control: Any, **others: Any) -> None:
        self.plan.at("step", state.global_step)

    def on_train_end(self, *call: Any, **others: Any) -> None:
        self.plan.end()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self.plan.state()}
