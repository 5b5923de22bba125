"""Continue an encoder of your own on images of another kind, and see what it gained and what it kept.

    python examples/continue_encoder.py runs/continued

The encoder learns the digits 0 to 4 with labels, in a plain loop. Then it learns 5 to 9 without: half of its units are
frozen from the first step, and its features are held near those it began with.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

import ptlf


def make_encoder() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    encoder = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder.normalisation = (0.5,) * 3, (0.5,) * 3  # mean and deviation that it expects
    return encoder


def accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    half = len(labels) // 2
    return 100 * KNeighborsClassifier(5).fit(features[:half], labels[:half]).score(features[half:], labels[half:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = load_digits()
    images = np.repeat((data.images * 15.9).astype(np.uint8)[..., None], 3, -1)
    known, new = data.target < 5, data.target >= 5

    encoder, head = make_encoder(), nn.Linear(64, 5)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=2e-3)
    x = torch.tensor(images[known]).permute(0, 3, 1, 2) / 127.5 - 1
    y = torch.tensor(data.target[known])
    for _ in range(options.epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(encoder(x[rows])), y[rows]).backward()
            optimizer.step()

    settings = {"views.name": "digits", "training.epochs": options.epochs}
    learner = ptlf.Learner(encoder, out=options.out, size=8, **settings)
    with torch.no_grad():
        before = encoder.eval()(torch.tensor(images).permute(0, 3, 1, 2) / 127.5 - 1).numpy()
    learner.learn(images[new], "five to nine")
    after = learner.embed(images)
    for name, rows in (("the digits it knew", known), ("the new digits", new)):
        ends = [accuracy(features[rows], data.target[rows]) for features in (before, after)]
        print(f"{name}: {ends[0]:.1f} % before, {ends[1]:.1f} % after")


if __name__ == "__main__":
    main()
