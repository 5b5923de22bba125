"""A Lightning module on the digits, whose units freeze during training. Stopped, it resumes with the same bits:

    python examples/lightning_digits.py runs/lightning              # six epochs
    python examples/lightning_digits.py runs/lightning --epochs 3   # stop early; run it again without --epochs

The digits 0 to 4 are the past, of which some images are kept; 5 to 9 are learnt, while the units that the past's images
explain best freeze.
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ptlf import FreezeSchedule
from ptlf.integrations.lightning import FreezingCallback

EPOCHS = 6


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
        self.head = nn.Linear(32, 10)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.encoder(images)), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="stop after this many epochs")
    arguments = parser.parse_args()
    lightning.seed_everything(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    labels = torch.from_numpy(digits.target)
    old = labels < 5
    model = Classifier()
    freezing = FreezingCallback(FreezeSchedule(0.34, 0.67, EPOCHS), part="encoder", replay=images[old][:64])
    last = arguments.out / "last.ckpt"
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[freezing, ModelCheckpoint(arguments.out, save_last=True), Report()],
    )
    # Batches in a fixed order: Lightning does not store that of a shuffling loader.
    loader = DataLoader(TensorDataset(images[~old], labels[~old]), batch_size=64)
    trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None)
    torch.save(model.state_dict(), arguments.out / "weights.pt")


class Report(lightning.Callback):
    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        freezing = next(callback for callback in trainer.callbacks if isinstance(callback, FreezingCallback))
        frozen = ", ".join(freezing.plan.freezer.frozen) or "nothing"
        print(f"epoch {trainer.current_epoch + 1}: loss {trainer.callback_metrics['loss']:.4f}, frozen: {frozen}")


if __name__ == "__main__":
    main()
