"""Images read ahead from a file equal those from indexing."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import StopsAt, tiny_config

from ptlf.core.errors import UserError
from ptlf.run.loop import Run
from ptlf.stream import loading
from ptlf.stream.loading import AHEAD, ImageSource
from ptlf.stream.packing import pack_images
from ptlf.stream.task import Images, digits
from ptlf.training.process import Stopped

CPU = torch.device("cpu")
PIXELS = np.random.default_rng(0).integers(0, 256, (90, 6, 6, 3), dtype=np.uint8)
LABELS = np.arange(90) % 7


@pytest.fixture
def file(tmp_path) -> Path:
    np.save(tmp_path / "images.npy", PIXELS)
    return tmp_path / "images.npy"


def source_of(file: Path, device: torch.device = CPU) -> ImageSource:
    return ImageSource(Images(np.load(file, mmap_mode="r"), LABELS), device, resident=False)


def shuffled(size: int = 16) -> list[torch.Tensor]:
    """The last batch is smaller: 90 = 5 * 16 + 10."""
    return list(torch.randperm(90, generator=torch.Generator().manual_seed(1)).split(size))


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


@pytest.mark.parametrize(("size", "start"), [(16, 0), (16, 1), (16, 4), (16, 6), (1, 0), (3, 0), (90, 0)])
def test_batches_are_those_of_indexing_in_their_order(file, size: int, start: int) -> None:
    order = shuffled(size)[start:]
    with source_of(file).batches(order) as batches:
        found = list(batches)
    assert len(found) == len(order)
    for images, indices in zip(found, order, strict=True):
        np.testing.assert_array_equal(images.numpy(), PIXELS[indices.numpy()])


def test_every_way_of_holding_images_gives_the_same_and_memory_needs_no_threads(file) -> None:
    mapped = np.load(file, mmap_mode="r")
    ways = {"file": mapped, "part of a file": np.load(file, mmap_mode="r")[:], "memory": PIXELS}
    ways["changed in memory"] = np.load(file, mmap_mode="c")
    for name, pixels in ways.items():
        for resident in (True, False):
            source = ImageSource(Images(pixels, LABELS), CPU, resident)
            assert (source._file is not None) == (name == "file" and not resident)
            with source.batches(shuffled()) as batches:
                for images, indices in zip(batches, shuffled(), strict=True):
                    assert torch.equal(images, source.gather(indices))
                    np.testing.assert_array_equal(images.numpy(), PIXELS[indices.numpy()])
    with ImageSource(Images(PIXELS, LABELS), CPU).batches(shuffled()) as batches:
        next(batches)
        assert not readers()


def test_the_next_batches_are_read_while_one_is_used(file, monkeypatch) -> None:
    source, order = source_of(file), shuffled()
    complete = [threading.Event() for _ in order]
    left = [len(indices) for indices in order]
    number = {int(row): batch for batch, indices in enumerate(order) for row in indices}
    lock, read = threading.Lock(), source._read

    def noted(indices, out) -> None:
        read(indices, out)
        batch = number[int(indices[0])]
        with lock:
            left[batch] -= len(indices)
            if left[batch] == 0:
                complete[batch].set()

    monkeypatch.setattr(source, "_read", noted)
    with source.batches(order) as batches:
        for batch, _ in enumerate(batches):
            for ahead in range(batch, min(batch + AHEAD, len(order) - 1) + 1):
                assert complete[ahead].wait(10)  # not requested yet
            assert not any(event.is_set() for event in complete[batch + AHEAD + 1 :])


@pytest.mark.parametrize("batch", [0, 3])
def test_an_error_of_the_disk_surfaces_at_its_batch(file, monkeypatch, batch: int) -> None:
    order, preadv = shuffled(), os.preadv
    bad = source_of(file)._file.begin + int(order[batch][7]) * PIXELS[0].nbytes

    def broken(descriptor, buffers, offset) -> int:
        if offset == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(loading.os, "preadv", broken)
    with source_of(file).batches(order) as batches:
        for indices in order[:batch]:
            np.testing.assert_array_equal(next(batches).numpy(), PIXELS[indices.numpy()])
        with pytest.raises(UserError, match=r"images\.npy: Input/output error") as caught:
            next(batches)
    assert isinstance(caught.value.__cause__, OSError)
    assert not readers()


def test_a_file_that_was_cut_short_is_named(file) -> None:
    source = source_of(file)
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(UserError, match=r"images\.npy is truncated: it holds 98 of the 108 bytes of image 89"):
        source.gather(torch.tensor([3, 89]))
    with pytest.raises(UserError, match="truncated"), source.batches(shuffled()) as batches:
        list(batches)


def test_the_file_that_was_opened_is_read_and_closed_with_its_source(file, tmp_path) -> None:
    source = source_of(file)
    np.save(tmp_path / "new.npy", 255 - PIXELS)
    os.replace(tmp_path / "new.npy", file)
    np.testing.assert_array_equal(source.gather(torch.arange(90)).numpy(), PIXELS)
    source = source_of(file)
    descriptor = source._file.descriptor
    os.fstat(descriptor)
    del source
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("why", [KeyboardInterrupt(), Stopped(Path("run"), 2), ValueError("odd")], ids=repr)
def test_leaving_early_ends_the_threads(file, why: BaseException) -> None:
    with pytest.raises(type(why)) as caught, source_of(file).batches(shuffled(8)) as batches:
        next(batches)
        assert readers()
        raise why
    assert caught.value is why
    assert not readers()


def packed_run(root: Path, resident: bool, out: Path | None = None, **more) -> Run:
    config = tiny_config(
        "digits/simsiam/ptlf", stream__name="folder", stream__pack="numbers", stream__resident=resident,
        data_root=str(root), freezing__final=0.67, training__batch=32, stream__per_class=48, **more,
    )  # fmt: skip
    return Run(config, out)


@pytest.fixture
def numbers(tmp_path) -> Path:
    train, test = ((part.pixels, part.labels) for part in (digits().train, digits().test))
    pack_images(train, tmp_path / "numbers", digits().size, test=test, names=digits().names, progress=False)
    return tmp_path


def test_a_run_that_reads_ahead_ends_with_the_same_bits(numbers) -> None:
    held, read = packed_run(numbers, True), packed_run(numbers, False)
    assert held.trainer.source._file is None
    assert read.trainer.source._file is not None
    results = [run.train() for run in (held, read)]
    assert results[0]["probes"] == results[1]["probes"]
    assert results[0]["freezing"] == results[1]["freezing"]
    for ours, theirs in zip(held.model.state_dict().values(), read.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert not readers()


def test_an_epoch_goes_on_in_its_middle_and_stops_without_threads(numbers, tmp_path) -> None:
    whole = packed_run(numbers, False)
    whole.train()
    first = packed_run(numbers, False, tmp_path / "run")
    with pytest.raises(Stopped):
        first.train(StopsAt(2))
    assert not readers()
    again = packed_run(numbers, False, tmp_path / "run")
    again.train(resume=True)
    for ours, theirs in zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("mapped", [True, False])
def test_batches_on_a_gpu_are_those_of_indexing(file, mapped: bool) -> None:
    device, order = torch.device("cuda"), shuffled() * 20
    pixels = np.load(file, mmap_mode="r") if mapped else PIXELS
    source = ImageSource(Images(pixels, LABELS), device, resident=False)
    assert source._empty(4).is_pinned()
    busy, found = torch.randn(2048, 2048, device=device), []
    with source.batches(order) as batches:
        for images in batches:
            busy = busy @ busy / 2048  # a step that outlasts the next batch's copy
            found.append(images + 0 * busy[0, 0].nan_to_num().to(torch.uint8))
            del images
    for images, indices in zip(found, order, strict=True):
        np.testing.assert_array_equal(images.cpu().numpy(), PIXELS[indices.numpy()])
        assert torch.equal(images, source.gather(indices))
    assert not readers()
