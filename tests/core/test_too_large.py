"""What does not fit is refused with figures; an allocation that fails becomes a sentence with the last checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptlf.cli import main
from ptlf.core import memory
from ptlf.core.errors import UserError
from ptlf.core.memory import check_fits, too_large

QUICK = [
    "--stream.groups", "[[0, 1], [2, 3]]", "--encoder.name", "conftest:tiny_encoder", "--training.epochs", "1",
    "--training.batch", "128", "--device", "cpu", "--evaluation.gallery", "false",
]  # fmt: skip


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    check_fits("a thing", 10**9)
    with pytest.raises(
        UserError, match=r"a thing would take 1\.9 GiB of memory, and this machine has 953\.7 MiB free; lower"
    ):
        check_fits("a thing", 2 * 10**9)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    check_fits("a thing", 1e30)


def test_free_memory_is_of_this_machine() -> None:
    free = memory.free_bytes()
    assert free is None or 10**6 < free < 10**15


def real_failures() -> list[BaseException]:
    found: list[BaseException] = []
    for attempt in (
        lambda: torch.empty(2**60),
        lambda: torch.empty(10**15, dtype=torch.uint8),
        lambda: np.empty(10**15, np.uint8),
        lambda: bytearray(2**60),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            attempt()
        found.append(caught.value)
    return found


@pytest.mark.parametrize("error", real_failures(), ids=lambda error: type(error).__name__)
def test_failures_of_the_libraries_are_known(error: BaseException) -> None:
    assert "memory" in str(too_large(error)) or "too large" in str(too_large(error))


def test_numbers_that_overflow_are_known() -> None:
    with pytest.raises((RuntimeError, TypeError, OverflowError, ValueError)) as caught:
        torch.zeros(10**20)
    assert "too large for this machine" in str(too_large(caught.value))


def test_other_errors_are_left_alone() -> None:
    assert too_large(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert too_large(ValueError("a value")) is None


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0"),
            "(2.50 GiB at once) than this GPU",
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                         "you tried to allocate 123456789 bytes. Error code 12"),
            "(123456789 bytes at once) than this machine",
        ),
        (MemoryError(), "this needs more memory than this machine can give"),
    ],
    ids=["gpu", "cpu", "python"],
)  # fmt: skip
def test_a_run_that_runs_out_of_memory_names_its_last_checkpoint(
    tmp_path, capsys, monkeypatch, error: BaseException, sentence: str
) -> None:
    from ptlf.methods.method import Method

    def fail(self, task: int, model: object) -> None:
        if task == 1:
            raise error

    monkeypatch.setattr(Method, "end_task", fail)
    assert main(["train", "--recipe", "digits/simsiam/finetune", "--out", str(tmp_path / "run"), *QUICK]) == 2
    told = capsys.readouterr().err
    assert told.count("ptlf:") == 1
    assert sentence in told
    last = tmp_path / "run" / "checkpoints" / "task02-epoch001-step00000.ckpt"
    assert (
        f"the last checkpoint is {last}; `ptlf train --resume {tmp_path / 'run'} --trust-code` continues from it"
        in told
    )
    monkeypatch.undo()
    assert main(["train", "--resume", str(tmp_path / "run"), "--trust-code"]) == 0
