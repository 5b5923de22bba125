"""The fast step where processes share it: two on CPUs against one, and one with NCCL against none."""

import itertools
import subprocess
import sys

import pytest
import torch
from test_distributed import HERE, apart, environment, finish, free_port, start
from worker import FAST_RUNS, FROZEN

pytest.importorskip("triton")

from ptlf.core import processes
from ptlf.encoders.norm import SharedViewBatchNorm2d, ViewBatchNorm2d
from ptlf.run.loop import Run

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(tmp_path) -> None:
    """Losses, gradients, weights, running statistics, queue and memory, by other code than the eager step's; and both
    processes hold the same bits. One test: its workers run once."""
    words = [str(HERE / "worker.py"), "fast", str(tmp_path)]
    for code, text in finish(start(words, 2, CUDA_VISIBLE_DEVICES=""), 400):
        assert code == 0, text
    results = [torch.load(tmp_path / f"{name}.pt") for name in ("alone", "pair0", "pair1")]
    for name, frozen in itertools.product(FAST_RUNS, range(len(FROZEN))):
        at = f"{name}, {FROZEN[frozen]}"
        alone, pair, other = (found[name][frozen] for found in results)
        near = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(pair["losses"], alone["losses"], msg=lambda m, at=at: f"{at}: {m}", **near)
        assert apart(alone["gradients"], pair["gradients"]) < 1e-4, at
        assert pair["sent"] == sum(gradient.nbytes for gradient in alone["gradients"].values()), at
        for part in ("model", "method"):
            for key, value in alone[part].items():
                rows = slice(-1 if key.startswith("memory.") else None)  # the memory's last row holds rejected images
                one, two = (held[rows] if held.ndim else held for held in (value, pair[part][key]))
                torch.testing.assert_close(two, one, msg=lambda m, at=f"{at}, {key}": f"{at}: {m}", **near)
        for part in ("losses", "gradients", "model", "method"):
            assert all(torch.equal(value, other[part][key]) for key, value in pair[part].items()), f"{at}: {part}"


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_statistics_far_from_zero_keep_their_digits(monkeypatch, views: int, shared: bool) -> None:
    """Channels with means of 300 deviations, against batch norm in float64. shared: another process has the same."""
    from ptlf.kernels.norm import norm_relu

    torch.manual_seed(0)
    x = torch.randn(views * 4, 8, 4, 4) + torch.linspace(-300, 300, 8).view(8, 1, 1)
    plain, norm = ViewBatchNorm2d(8).double(), (SharedViewBatchNorm2d if shared else ViewBatchNorm2d)(8).to(DEVICE)
    plain.views = norm.views = views
    torch.nn.init.uniform_(plain.weight, 0.5, 1.5)
    norm.weight.data.copy_(plain.weight)
    if shared:
        monkeypatch.setattr(processes, "_joined", True)
        monkeypatch.setattr(processes, "_world_size", 2)
        monkeypatch.setattr(processes, "all_gather_rows", lambda mine: torch.cat([mine, mine]))
        monkeypatch.setattr(processes, "all_reduce_", lambda mine: mine.mul_(2))
    exact = x.double().requires_grad_()
    fast = x.to(DEVICE, memory_format=torch.channels_last).requires_grad_()
    outputs = [plain(exact).relu(), norm_relu(fast, norm)[0]]
    given = torch.randn_like(x)
    for output in outputs:
        (output * given.to(output.device)).sum().backward()
    expected = [outputs[0].detach(), exact.grad, plain.weight.grad, plain.bias.grad]
    found = [outputs[1].detach(), fast.grad, norm.weight.grad, norm.bias.grad]
    torch.testing.assert_close([one.cpu().double() for one in found], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(norm.running_mean.cpu().double(), plain.running_mean, rtol=1e-5, atol=1e-5)


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


def test_a_group_of_one_leaves_the_bits_of_none(tiny, monkeypatch) -> None:
    """A run, and the kernels with shared statistics. Those of eager synchronised norms round in another way."""
    from ptlf.kernels.norm import norm_relu

    small = {"stream__per_class": 48, "training__batch": 32, "distributed__sync_batch_norm": False}
    config = tiny("digits/simsiam/cassle", training__epochs=1, **small)

    def outcome(norm: ViewBatchNorm2d) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, norm.views = torch.randn(8, 4, 4, 4).to(DEVICE).requires_grad_(), 2
        out, _ = norm_relu(x, norm.to(DEVICE))
        gradients = torch.autograd.grad(out.sin().sum(), [x, norm.weight, norm.bias])
        run = Run(config)
        run.train()
        state = [*run.model.state_dict().values(), *run.method.state_dict().values()]
        return [out, *gradients, norm.running_mean, norm.running_var, *state]

    alone = outcome(ViewBatchNorm2d(4))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, value)
    with processes.process_group():
        assert processes.joined()
        group = outcome(SharedViewBatchNorm2d(4))
    assert all(torch.equal(one, other) for one, other in zip(alone, group, strict=True))


@pytest.mark.gpu
@pytest.mark.slow
def test_one_process_in_a_group_leaves_the_bits_of_none(tmp_path) -> None:
    """With NCCL and captured steps. Synchronised norms round in another way."""
    for how in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]):
        words = [sys.executable, *how, str(HERE / "worker.py"), "one", str(tmp_path)]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    alone, local, group = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "group local", "group"))
    assert local["losses"] == alone["losses"]
    for key, value in local["state"].items():
        assert torch.equal(value, alone["state"][key]), key
    assert group["losses"] == pytest.approx(alone["losses"], abs=0.02)
