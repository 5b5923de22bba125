import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptlf.core.errors import UserError
from ptlf.stream import pack as packing
from ptlf.stream.disk import natural
from ptlf.stream.pack import list_packs, open_pack, verify_pack
from ptlf.stream.packing import PackOptions, pack_folder, pack_images, write_squares
from ptlf.stream.rows import ImageSplit, Row

RNG = np.random.default_rng(0)
ROWS = [Row("image", np.zeros((4, 4, 3), np.uint8), 0)] * 6


def arrays(count: int = 6, size: int = 4) -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, 256, (count, size, size, 3), dtype=np.uint8), np.arange(count) % 2


def small_pack(root: Path, name: str = "set", **options: object) -> packing.Pack:
    return pack_images(arrays(), root / name, 4, names=("a", "b"), progress=False, **options)


def pack_rows(path: Path, rows: Callable[[], Iterator[Row]]) -> None:
    """Of 12 rows, as many as there are."""
    described = packing.Pack(path, size=4, folders="classes", names=())
    write_squares(described, {"train": ImageSplit(12, rows)}, PackOptions(progress=False))


def test_one_batch_and_several_give_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = arrays(7)
    whole = pack_images((images, labels), tmp_path / "whole", 4, names=("a", "b"))
    monkeypatch.setattr("ptlf.stream.packing.BATCH", 3)
    streamed = pack_images((images, labels), tmp_path / "streamed", 4, names=("a", "b"))
    assert whole.splits == streamed.splits
    assert np.array_equal(streamed.images("train"), images) and isinstance(streamed.images("train"), np.memmap)
    assert np.array_equal(streamed.labels("train"), labels) and streamed.labels("train").dtype == np.int64
    assert list_packs(tmp_path) == [streamed, whole] and verify_pack(tmp_path, "whole", progress=False) == []
    with pytest.raises(UserError, match="no split 'test'"):
        whole.images("test")


def test_overwriting_must_be_asked_for(tmp_path: Path) -> None:
    first = np.array(small_pack(tmp_path).images("train"))
    with pytest.raises(UserError, match="--overwrite"):
        small_pack(tmp_path)
    assert np.array_equal(open_pack(tmp_path, "set").images("train"), first)
    assert not np.array_equal(small_pack(tmp_path, overwrite=True).images("train"), first)
    assert os.listdir(tmp_path) == ["set"]
    (tmp_path / "set" / "pack.json").unlink()  # now it is something else
    with pytest.raises(UserError, match="no packed data set"):
        small_pack(tmp_path, overwrite=True)
    assert len(os.listdir(tmp_path / "set")) == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, None])
def test_an_interrupted_pack_leaves_nothing_and_another_of_its_name_waits(tmp_path: Path, error: Any) -> None:
    def rows() -> Iterator[Row]:
        yield from ROWS
        assert ".set.partial" in os.listdir(tmp_path)
        with pytest.raises(UserError, match=f"being packed by process {os.getpid()} on "):
            small_pack(tmp_path)
        small_pack(tmp_path, "other")
        if error:
            raise error

    with pytest.raises(error) if error else nullcontext():
        pack_rows(tmp_path / "set", rows)
    assert sorted(os.listdir(tmp_path)) == ["other", *([] if error else ["set"])]


KILLED = """
import os, signal, sys, numpy as np
from pathlib import Path
from ptlf.stream.packing import pack_images
class Killing(list):
    def __getitem__(self, index):
        return super().__getitem__(index) if index < 2 else os.kill(os.getpid(), signal.SIGKILL)
pack_images(Killing([(np.zeros((4, 4, 3), np.uint8), 0)] * 6), Path(sys.argv[1], "set"), 4)
"""


def test_killed_pack_is_not_seen_and_is_cleared_by_the_next(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(packing.__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert ".set.partial" in os.listdir(tmp_path)
    assert list_packs(tmp_path) == []
    with pytest.raises(UserError, match="no packed data set"):
        open_pack(tmp_path, "set")
    images = np.array(small_pack(tmp_path).images("train"))
    assert os.listdir(tmp_path) == ["set"]
    os.rename(tmp_path / "set", tmp_path / ".set.old")  # as if killed between the two renames
    with pytest.raises(UserError, match="already packed"):
        small_pack(tmp_path)
    assert np.array_equal(open_pack(tmp_path, "set").images("train"), images)


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "no space left on"), (errno.EACCES, "no permission for")])
def test_disk_errors_become_one_sentence(tmp_path: Path, monkeypatch: Any, code: int, message: str) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=f"{message} {tmp_path}"):
        small_pack(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("file", ["train.npy", "train_labels.npy"])
def test_damaged_files(tmp_path: Path, file: str) -> None:
    path = small_pack(tmp_path, "cifar10").path / file
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    (problem,) = verify_pack(tmp_path, "cifar10", progress=False)
    assert file in problem and "sha256" in problem
    damages = {
        f"{file} cannot be read: mmap length is greater": lambda: os.truncate(path, len(content) - 1),
        f"{file} cannot be read: .*No such file": path.unlink,
    }
    for why, damage in damages.items():
        damage()
        with pytest.raises(UserError, match=why + ".*ptlf data get cifar10 --overwrite"):
            open_pack(tmp_path, "cifar10")
        assert len(verify_pack(tmp_path, "cifar10", progress=False)) == 1


def test_missing_sets_bad_names_and_bad_manifests(tmp_path: Path) -> None:
    file = small_pack(tmp_path).path / "pack.json"
    with pytest.raises(UserError, match=r"'flowers'.*there: set.*ptlf data pack FOLDER --name flowers --size PIXELS`"):
        open_pack(tmp_path, "flowers")
    with pytest.raises(UserError, match=r"there: nothing.*ptlf data get cifar10`"):
        open_pack(tmp_path / "nowhere", "cifar10")
    for name in ("", "../up", ".hidden", "a/b"):
        with pytest.raises(UserError, match="cannot name"):
            pack_folder(tmp_path, tmp_path, name, size=4)
        with pytest.raises(UserError, match="cannot name"):
            open_pack(tmp_path, name)
    good = json.loads(file.read_text())
    elsewhere = {"train": good["splits"]["train"] | {"images": "../train.npy"}}
    for change, why in [
        ({"schema": 2}, "schema 2"),
        ({"splits": {}}, "beside pack.json"),
        ({"splits": elsewhere}, "beside pack.json"),
        ({"splits": {"train": {"count": 1}}}, "bytes is missing"),
        ({"folders": "things"}, "folders is 'things'"),
        ({"size": None}, "size is None"),
    ]:
        file.write_text(json.dumps(good | change))
        with pytest.raises(UserError, match=f"pack.json cannot be read .*{why}"):
            open_pack(tmp_path, "set")


def test_natural_order() -> None:
    names = ["b", "task10", "task2", "task", "10", "9", "a2b10", "a2b9", "01", "1"]
    assert sorted(names, key=natural) == ["01", "1", "9", "10", "a2b9", "a2b10", "b", "task", "task2", "task10"]
