"""Replay of the memory's images: mixed with the batch (LUMP), or beside it (DER)."""

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
class LumpConfig(MethodConfig):
    name: str = "lump"
    # Below about 0.003 both gamma draws underflow, and lam is 0.5.
    alpha: float = key(0.4, "mixing weight lam ~ Beta(alpha, alpha), one per step", ge=0.01)
    mix_first_task: bool = key(True, "mix in a task without a past too, from its second step on, as public code does")


class Lump(Method[LumpConfig]):
    """LUMP: every batch is mixed with images from the replay memory, and the objective sees the mixture."""

    Config = LumpConfig
    needs_memory = True
    recapture = "never"  # whether a step mixes is in lam
    mixes_images = True
    baseline = True

    memory: Memory

    def draw(self, batch: int) -> dict[str, Tensor]:
        draws, lam = self.memory.draw(batch, self.generator), beta(self.config.alpha, self.generator)
        past = self.task > 0 or self.memory.old_count > 0
        mixing = (past or self.config.mix_first_task) and len(self.memory) > 0
        return {**draws, "lam": lam if mixing else torch.ones(()), **super().draw(batch)}

    def mix(self, batch: Batch) -> list[Tensor]:
        """View 1 with a fresh augmentation of a stored image, view 2 with the stored view as it is."""
        draws, lam = batch.draws, batch.draws["lam"]
        old = self.memory.fresh(draws["picks"], draws["memory_uniforms"]), self.memory.views[draws["picks"]]
        return [lam * new + (1 - lam) * stored for new, stored in zip(batch.views, old, strict=True)]


def beta(alpha: float, generator: torch.Generator) -> Tensor:
    """One draw of Beta(alpha, alpha) as the share of the first of two gamma draws."""
    first, second = torch._standard_gamma(torch.full((2,), alpha, dtype=torch.float64), generator=generator)
    return (first / (first + second)).float()


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
