"""What does not fit is refused with figures; an allocation that fails becomes a sentence with the last checkpoint."""

import numpy as np
import pytest
import torch
from conftest import QUICK

from ptlf.cli import main
from ptlf.core import memory
from ptlf.core.errors import UserError
from ptlf.core.memory import check_fits, too_large
from ptlf.methods.method import Method


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory.free_bytes()
    assert free is None or 10**6 < free < 10**15
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    check_fits("a thing", 10**9)
    sentence = r"a thing would take 1\.9 GiB of memory, and this machine has 953\.7 MiB free; lower"
    with pytest.raises(UserError, match=sentence):
        check_fits("a thing", 2 * 10**9)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    check_fits("a thing", 1e30)


def test_failures_of_the_libraries_are_known_and_others_left_alone() -> None:
    for attempt in (lambda: torch.empty(10**15), lambda: np.empty(10**15, np.uint8), lambda: bytearray(2**60)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            attempt()
        assert str(too_large(caught.value)).startswith("out of memory: "), caught.value
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")
    assert too_large(gpu) == f"out of memory: {gpu}"
    assert too_large(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert too_large(ValueError("a value")) is None


def test_a_run_that_runs_out_of_memory_names_its_last_checkpoint(tmp_path, capsys, monkeypatch) -> None:
    def fail(self, task: int, model: object) -> None:
        if task == 1:
            raise MemoryError

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Method, "end_task", fail)
        assert main(["train", "--recipe", "digits/simsiam/finetune", "--out", str(run), *QUICK]) == 2
    err = capsys.readouterr().err
    assert err.count("ptlf:") == 1
    last = run / "checkpoints" / "task02-epoch001-step00000.ckpt"
    again = f"`ptlf train --resume {run} --trust-code` continues from it"
    assert f"out of memory: an allocation failed; the last checkpoint is {last}; {again}" in err
    assert main(["train", "--resume", str(run), "--trust-code"]) == 0
