"""DER: with an image, the memory stores the vector of its first view as the step's forward made it."""

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
    alpha: float = key(0.4, "weight of the squared error against the stored vectors", ge=0)


class DER(Method[DERConfig]):
    """DER: the encoder's vectors of memory images are held near those stored when the images were seen."""

    Config = DERConfig
    needs_memory = True
    recapture = "never"
    needs_outputs = True

    memory: Memory

    def draw(self, batch: int) -> dict[str, Tensor]:
        filled = torch.tensor(len(self.memory) > 0)
        return {**self.memory.draw(batch, self.generator), "filled": filled, **super().draw(batch)}

    def losses(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        picks, filled = batch.draws["picks"], batch.draws["filled"]
        fresh = self.memory.fresh(picks, batch.draws["memory_uniforms"])
        # While the memory is empty, the batch replaces it and counts nothing: norms never see blank images.
        *features, replayed = model.encode([*batch.mixed, torch.where(filled, fresh, batch.views[0])])
        batch.outputs = features[0].detach()
        replay = self.config.alpha * filled * F.mse_loss(replayed, self.memory.outputs[picks])
        return {"ssl": model.loss(features, batch), "replay": replay}

    def remember(self, model: Model, batch: Batch) -> None:
        self.memory.add(batch, batch.draws["slots"], batch.outputs)
