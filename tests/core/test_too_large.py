"""What does not fit is refused with figures; an allocation that fails becomes a sentence with the last checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptlf.cli import main
from ptlf.core import memory
from ptlf.core.errors import UserError
from ptlf.core.memory import check_fits, too_large

FAILED = "out of memory: you tried to allocate"
QUICK = [
    "--stream.groups", "[[0, 1], [2, 3]]", "--encoder.name", "conftest:tiny_encoder", "--training.epochs", "1",
    "--training.batch", "128", "--device", "cpu", "--evaluation.gallery", "false",
]  # fmt: skip


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    check_fits("a thing", 10**9)
    sentence = r"a thing would take 1\.9 GiB of memory, and this machine has 953\.7 MiB free; lower"
    with pytest.raises(UserError, match=sentence):
        check_fits("a thing", 2 * 10**9)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    check_fits("a thing", 1e30)


def test_free_memory_is_of_this_machine() -> None:
    free = memory.free_bytes()
    assert free is None or 10**6 < free < 10**15


def test_failures_of_the_libraries_are_known_and_others_left_alone() -> None:
    for attempt, words in (
        (lambda: torch.empty(2**60), ""),
        (lambda: torch.empty(10**15, dtype=torch.uint8), "memory"),
        (lambda: np.empty(10**15, np.uint8), "memory"),
        (lambda: bytearray(2**60), "memory"),
    ):
        with pytest.raises((RuntimeError, TypeError, OverflowError, ValueError, MemoryError)) as caught:
            attempt()
        sentence = too_large(caught.value)
        assert sentence and words in sentence, caught.value
    assert too_large(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert too_large(ValueError("a value")) is None


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.OutOfMemoryError(f"CUDA {FAILED} 2.50 GiB. GPU 0"), "out of memory: CUDA out of memory: you tried"),
        (RuntimeError(f"DefaultCPUAllocator: {FAILED} 123 bytes. Error"), "out of memory: DefaultCPUAllocator: "),
        (MemoryError(), "out of memory: an allocation failed; "),
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
    err = capsys.readouterr().err
    assert err.count("ptlf:") == 1
    assert sentence in err
    last = tmp_path / "run" / "checkpoints" / "task02-epoch001-step00000.ckpt"
    again = f"`ptlf train --resume {tmp_path / 'run'} --trust-code` continues from it"
    assert f"the last checkpoint is {last}; {again}" in err
    monkeypatch.undo()
    assert main(["train", "--resume", str(tmp_path / "run"), "--trust-code"]) == 0
