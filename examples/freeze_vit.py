"""A vision transformer whose blocks freeze one after the other, on a schedule.

    python examples/freeze_vit.py

Units of a transformer are its linear layers and attentions, each with the norm before it. They are named as people name
them: a prefix, a regular expression, a number from the input on.
"""

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import ptlf

EPOCHS = 4


def main() -> None:
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(data.target)
    shape = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64, num_labels=10,
    )  # fmt: skip
    model = ViTForImageClassification(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    freezer = ptlf.Freezer(model, optimizer, example={"pixel_values": images[:2]})
    schedule = ptlf.FreezeSchedule(initial=0.0, final=0.6, epochs=EPOCHS)

    for epoch in range(EPOCHS):
        freezer.freeze(schedule.count(epoch, len(freezer.units)))  # that many, from the input on
        right = 0
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            result = model(pixel_values=images[rows], labels=labels[rows])
            result.loss.backward()
            optimizer.step()
            right += int((result.logits.argmax(1) == labels[rows]).sum())
        print(f"epoch {epoch}: {100 * right / len(images):.1f} %, {len(freezer.frozen)} of {len(freezer.units)} frozen")
    freezer.thaw()


if __name__ == "__main__":
    main()
