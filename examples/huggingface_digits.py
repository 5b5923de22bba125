"""The Trainer of Hugging Face with units that freeze during training. Stopped, it resumes with the same units frozen.

python examples/huggingface_digits.py runs/trainer
"""

import argparse

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from ptlf.integrations.huggingface import FreezingCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder for the checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in OUT")
    options = parser.parse_args()
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(images, data.target.tolist(), strict=True)]
    torch.manual_seed(0)
    shape = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, num_labels=10,
    )  # fmt: skip
    freezing = FreezingCallback({1: "vit.embeddings", 2: 5}, by="epoch")  # at epoch 2 the first five units
    arguments = TrainingArguments(
        options.out, num_train_epochs=3, per_device_train_batch_size=64, learning_rate=2e-3, save_strategy="epoch",
        report_to=[], use_cpu=True, logging_steps=29, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(ViTForImageClassification(shape), arguments, train_dataset=rows, callbacks=[freezing])
    trainer.train(resume_from_checkpoint=options.resume)


if __name__ == "__main__":
    main()
