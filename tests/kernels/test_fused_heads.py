"""Heads by Triton kernels against plain PyTorch. Without a GPU they run in Triton's interpreter."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")


from ptlf.kernels import FastParts, parts
from ptlf.kernels.norm import FusedMLP, fuse_heads
from ptlf.objectives import MLP, each_view, mlp

pytestmark = [pytest.mark.gpu(emulated=True)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = {
    "norms": lambda: mlp(6, 9, 5),
    "last norm": lambda: mlp(6, 9, 5, last_norm=True),
    "no norm": lambda: mlp(6, 9, 5, norm=False),
    "three layers": lambda: mlp(6, 40, 40, 5),
    "one linear layer": lambda: nn.Linear(6, 5),
    "an unknown layer": lambda: MLP(nn.Linear(6, 5), Centred()),
    "a norm without weights": lambda: MLP(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False)),
}


class Centred(nn.Module):
    """Its output depends on all rows, so views must be kept apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def views_of(count: int, rows: int = 7) -> list[torch.Tensor]:
    drawn = torch.randn(count, rows, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return [(3 * number + 1) * view + number for number, view in enumerate(drawn)]


def fused(head: nn.Module) -> nn.Module:
    return fuse_heads(holder := nn.ModuleList([copy.deepcopy(head)])) or holder[0]


def outcome(head: nn.Module, views: list[torch.Tensor]) -> tuple[list, list, dict, dict]:
    views = [view.clone().requires_grad_() for view in views]
    outputs = each_view(head, views)
    sum((output.sin() * (number + 1)).sum() for number, output in enumerate(outputs)).backward()
    gradients = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    return [o.detach() for o in outputs], [v.grad for v in views], gradients, dict(head.named_buffers())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", HEADS)
def test_heads_are_those_of_pytorch(name: str, count: int, training: bool) -> None:
    torch.manual_seed(0)
    head = HEADS[name]().to(DEVICE)
    for layer in head.modules():
        if isinstance(layer, nn.BatchNorm1d) and layer.affine:
            nn.init.uniform_(layer.weight, 0.3, 1.5)
            nn.init.uniform_(layer.bias, -1, 1)
    outcome(head, views_of(2))  # running statistics other than the initial ones
    head.zero_grad()
    head.train(training)
    plain = outcome(copy.deepcopy(head), views_of(count))
    found = outcome(fused(head), views_of(count))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)  # the bias before a norm has a gradient of 0


class Doubled(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class TenTimes(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * super().forward(x)


@pytest.mark.parametrize("head", [Doubled(*mlp(6, 9, 5)), MLP(nn.Linear(6, 5), TenTimes(5))], ids=["head", "norm"])
def test_a_forward_of_one_s_own_is_called(head: MLP) -> None:
    head = head.to(DEVICE)
    torch.testing.assert_close(each_view(fused(head), views_of(2)), [head(view) for view in views_of(2)])


def test_views_and_their_hooks_stay_apart() -> None:
    head, called = fused(mlp(6, 9, 5).to(DEVICE)), []
    for module in (head, head[1]):
        module.register_forward_hook(lambda module, given, out: called.append(len(out)))
    each_view(head, views_of(2))
    assert called == [7, 7, 7, 7]
    head = fused(mlp(6, 9, 5).to(DEVICE))
    views = [views_of(2)[0], views_of(2)[1][:3]]
    assert [len(rows) for rows in each_view(head, views)] == [7, 3]
    head = fused(mlp(6, 9, 5).to(DEVICE))
    views = views_of(2)
    apart = each_view(head, views)
    assert not torch.allclose(torch.cat(apart), head(torch.cat(views)), atol=1e-2)


@pytest.mark.gpu
def test_on_a_gpu_nothing_of_a_head_is_compiled(monkeypatch) -> None:
    monkeypatch.setattr(parts, "compile_part", lambda function: pytest.fail(f"{function} is compiled"))
    fast, heads = FastParts(7, DEVICE), nn.ModuleList([mlp(6, 9, 5).to(DEVICE)])
    fast.prepare(heads)
    assert isinstance(heads[0], FusedMLP) and len(each_view(heads[0], views_of(2))) == 2
