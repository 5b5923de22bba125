"""DER: the encoder's vectors of memory images are held near those stored when the images were seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.settings import key
from ptlf.methods.memory import Memory
from ptlf.methods.method import Method, MethodConfig
from ptlf.model import Model


@dataclass
class DERConfig(MethodConfig):
    name: str = "der"
    alpha: float = key(0.4, "weight of the squared error against the stored vectors", least=0)


class DER(Method):
    """Stored with an image: the vector of its first view as the step's forward made it."""

    Config = DERConfig
    needs_memory = True
    needs_outputs = True

    memory: Memory
    outputs: Tensor  # (B, feature_dim), from `losses` to `remember`

    def __init__(self, config: DERConfig, model: Model, memory: Memory, generator: torch.Generator) -> None:
        super().__init__(config, model, memory, generator)
        self.config = config

    def draw(self, batch: int) -> dict[str, Tensor]:
        draws = self.memory.draw(batch, self.generator)
        draws["filled"] = torch.tensor(len(self.memory) > 0)
        return {**draws, **super().draw(batch)}

    def losses(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        features = model.encode(batch.mixed)
        self.outputs = features[0].detach()
        return {"ssl": model.objective.loss(features, batch), "replay": self.replay(model, batch)}

    def replay(self, model: Model, batch: Batch) -> Tensor:
        picks, filled = batch.draws["picks"], batch.draws["filled"]
        fresh = self.memory.fresh(picks, batch.draws["memory_uniforms"])
        # While the memory is empty the batch itself stands in and counts nothing: norms never see blank images.
        (features,) = model.encode([torch.where(filled, fresh, batch.views[0])])
        return self.config.alpha * filled * F.mse_loss(features, self.memory.outputs[picks])

    def remember(self, batch: Batch) -> None:
        self.memory.add(batch, batch.draws["slots"], self.outputs)
