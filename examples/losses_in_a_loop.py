"""The losses and heads of the runs in a plain PyTorch loop, without anything else of `ptlf`.

python examples/losses_in_a_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from ptlf.objectives import barlow_twins_loss, each_view, mlp, simsiam_loss, vicreg_loss


def augment(images: torch.Tensor) -> torch.Tensor:
    """Shifted by up to a pixel, with noise."""
    shifts = torch.randint(-1, 2, (2,)).tolist()
    return images.roll(shifts, (2, 3)) + 0.1 * torch.randn_like(images)


def main() -> None:
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    for name in ("simsiam", "barlow_twins", "vicreg"):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(144, 32))
        projector, predictor = mlp(32, 64, 64, last_norm=True), mlp(64, 16, 64)
        parameters = [p for module in (encoder, projector, predictor) for p in module.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        for rows in torch.randperm(len(images)).split(128):
            z1, z2 = each_view(projector, [encoder(augment(images[rows])) for _ in range(2)])
            if name == "simsiam":
                p1, p2 = each_view(predictor, [z1, z2])
                loss = simsiam_loss(p1, p2, z1, z2)
            else:
                loss = (barlow_twins_loss if name == "barlow_twins" else vicreg_loss)(z1, z2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{name}: last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
