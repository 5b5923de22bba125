"""The fast step where processes share it: two on CPUs against one, and one with NCCL against none."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from test_distributed import HERE, apart, environment, finish, start

pytest.importorskip("triton")

from fast_worker import FROZEN, RUNS

from ptlf.core import processes
from ptlf.encoders.norm import SharedViewBatchNorm2d, ViewBatchNorm2d

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Results of `fast_worker.py`: of a single process with the whole batch, and of two."""
    folder = tmp_path_factory.mktemp("found")
    for code, text in finish(start([str(HERE / "fast_worker.py"), str(folder)], 2, CUDA_VISIBLE_DEVICES=""), 400):
        assert code == 0, text
    return {name: torch.load(folder / f"{name}.pt") for name in ("alone", "pair0", "pair1")}


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(found) -> None:
    """Losses, gradients, weights, running statistics, queue and memory, by other code than the eager step's; and both
    processes hold the same bits. One test: its workers run once."""
    for name, frozen in itertools.product(RUNS, range(len(FROZEN))):
        at = f"{name}, {FROZEN[frozen]}"
        alone, pair, other = (found[kind][name][frozen] for kind in ("alone", "pair0", "pair1"))
        torch.testing.assert_close(
            pair["losses"], alone["losses"], rtol=1e-4, atol=1e-5, msg=lambda m, at=at: f"{at}: {m}"
        )
        assert apart(alone["gradients"], pair["gradients"]) < 1e-4, at
        assert pair["sent"] == sum(gradient.nbytes for gradient in alone["gradients"].values()), at
        for part in ("model", "method"):
            for key, value in alone[part].items():
                rows = slice(-1 if key.startswith("memory.") else None)  # the memory's last row holds rejected images
                one, two = (held[rows] if held.ndim else held for held in (value, pair[part][key]))
                torch.testing.assert_close(
                    two, one, rtol=1e-4, atol=1e-5, msg=lambda m, key=key, at=at: f"{at}, {key}: {m}"
                )
        for part in ("losses", "gradients", "model", "method"):
            assert all(torch.equal(value, other[part][key]) for key, value in pair[part].items()), f"{at}: {part}"


class Both:
    """Stands for two processes that run one after the other: what they exchange is noted first, then given to both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[list[torch.Tensor]] = []
        self.known: list[torch.Tensor] = []
        monkeypatch.setattr(processes, "_joined", True)
        monkeypatch.setattr(processes, "_world_size", 2)
        monkeypatch.setattr(processes, "all_gather_rows", self.gather)
        monkeypatch.setattr(processes, "all_reduce_", self.add_up)

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.exchange(mine))

    def add_up(self, mine: torch.Tensor) -> None:
        mine.copy_(sum(self.exchange(mine)))

    def exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """One exchange is learnt in each round; what comes after it in that round counts for nothing."""
        self.noted[-1].append(mine.clone())
        number = len(self.noted[-1]) - 1
        return self.known[number] if number < len(self.known) else [mine, mine]

    def run(self, of_process, exchanges: int) -> list:
        for _ in range(exchanges + 1):
            self.noted = []
            results = []
            for rank in range(2):
                self.noted.append([])
                results.append(of_process(rank))
            assert all(len(noted) == exchanges for noted in self.noted)
            self.known = [list(both) for both in zip(*self.noted, strict=True)]
        return results


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("views", [1, 2])
def test_statistics_far_from_zero_keep_their_digits(monkeypatch, views: int) -> None:
    """Channels with means of 300 deviations, another one on each process, against batch norm in float64."""
    from ptlf.kernels.norm import norm_relu

    torch.manual_seed(0)
    x = torch.randn(2, views, 4, 8, 4, 4, dtype=torch.float64)  # (processes, views, rows, C, H, W)
    x += torch.linspace(-300, 300, 8, dtype=torch.float64).view(8, 1, 1)
    x[1] += 2
    x = x.float()
    given = torch.randn_like(x)
    plain = ViewBatchNorm2d(8).double()
    plain.views = views
    torch.nn.init.uniform_(plain.weight, 0.5, 1.5)
    whole = x.transpose(0, 1).flatten(0, 2).double().requires_grad_()  # views outside, as one process has them
    (plain(whole).relu() * given.transpose(0, 1).flatten(0, 2)).sum().backward()
    norms = []

    def of_process(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        norm = SharedViewBatchNorm2d(8).to(DEVICE)
        norm.views = views
        norm.weight.data.copy_(plain.weight)
        norms.append(norm)
        mine = x[rank].flatten(0, 1).to(DEVICE, memory_format=torch.channels_last).requires_grad_()
        out, _ = norm_relu(mine, norm)
        (out * given[rank].flatten(0, 1).to(DEVICE)).sum().backward()
        return out.detach().cpu(), mine.grad.cpu()

    results = Both(monkeypatch).run(of_process, exchanges=2)
    monkeypatch.undo()
    expected = [plain.double()(whole).relu().detach(), whole.grad]
    for number, value in enumerate(expected):
        found = torch.stack([result[number].view(views, 4, 8, 4, 4) for result in results], 1).flatten(0, 2)
        torch.testing.assert_close(found.double(), value, rtol=1e-3, atol=1e-3)
    for norm in norms[-2:]:
        torch.testing.assert_close(norm.running_mean.cpu().double(), 0.1 * mean_of(x, views), rtol=1e-5, atol=1e-5)
    of_weight = sum(norm.weight.grad.cpu().double() for norm in norms[-2:])
    torch.testing.assert_close(of_weight, plain.weight.grad, rtol=1e-3, atol=1e-2)


def mean_of(x: torch.Tensor, views: int) -> torch.Tensor:
    """The running mean after one step, times 10."""
    means = x.double().mean((0, 2, 4, 5))  # (views, C)
    return means[0] if views == 1 else 0.9 * means[0] + means[1]


def test_means_of_tensors_of_any_layout(monkeypatch) -> None:
    """One exchange for all tensors of a dtype, whose values come back to their places."""
    sent = []

    def send(flat: torch.Tensor) -> None:
        sent.append(flat.clone())
        flat += flat

    monkeypatch.setattr(processes, "_joined", True)
    monkeypatch.setattr(processes, "_world_size", 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", send)
    dense = torch.arange(48.0).view(2, 3, 2, 4)
    tensors = [
        dense.contiguous(memory_format=torch.channels_last), torch.tensor(5.0), dense[:, ::2], torch.zeros(0),
        torch.arange(3, dtype=torch.float64), dense[0, 0].T,
    ]  # fmt: skip
    before = [tensor.clone() for tensor in tensors]
    processes.all_reduce_mean_(tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
    assert [len(flat) for flat in sent] == [48 + 1 + 32 + 8, 3]
    assert torch.equal(sent[0][:48], tensors[0].permute(0, 2, 3, 1).flatten())  # in the order of memory


@pytest.mark.gpu(emulated=True)
@pytest.mark.slow
def test_one_process_in_a_group_leaves_the_bits_of_none(tmp_path) -> None:
    """On a GPU with NCCL and captured steps.

    Where norms are not synchronised, nothing is computed in another way than without a group. Where they are, the heads
    are: that run is compared with one whose collectives are those of one process, nothing or a copy. The encoder's
    kernels give the same bits with shared statistics as without.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    for kinds in (["alone", "stand_in"], ["group_local", "group"]):
        how = torchrun if "group" in kinds else []
        done = subprocess.run(
            [sys.executable, *how, str(HERE / "one_worker.py"), str(tmp_path), *kinds],
            env=environment(), capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    runs = {name: torch.load(tmp_path / f"{name}.pt") for name in ("alone", "stand_in", "group_local", "group")}
    for name, other in (("group_local", "alone"), ("group", "stand_in")):
        assert runs[name]["losses"] == runs[other]["losses"]
        for key, value in runs[name]["state"].items():
            assert torch.equal(value, runs[other]["state"][key]), f"{name}: {key}"
    assert runs["group"]["losses"] == pytest.approx(runs["alone"]["losses"], abs=0.02)
    for key, value in runs["group"]["encoder"].items():
        assert torch.equal(value, runs["alone"]["encoder"][key]), key
