"""A ResNet in a plain loop: what freezing would save, what fits a budget, and four lines that freeze.

    python examples/freeze_resnet.py

The network comes from transformers, with random weights; torchvision's and timm's work alike.
"""

import torch
from transformers import ResNetConfig, ResNetModel

import ptlf

torch.manual_seed(0)
model = ResNetModel(ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic"))
head = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05, momentum=0.9, weight_decay=5e-4)
images, labels = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))

freezer = ptlf.Freezer(model, optimizer)
print(freezer)  # every unit, its weights and what it keeps
print(freezer.estimate(4, images))  # the first four units: nothing is changed by asking
chosen = freezer.budget("3MiB", images)  # units without which a step takes 3 MiB; it takes more than 6
print("to freeze, for 3 MiB a step:", *chosen.names)

for step in range(6):
    if step == 3:
        freezer.freeze(chosen.names)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(head(model(images).pooler_output.flatten(1)), labels)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}, {len(freezer.frozen)} units frozen")
freezer.thaw()
