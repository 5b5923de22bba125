import gzip
import hashlib
import io
import os
import pickle
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream.archives import CIFAR10_NAMES, IMAGENET100_WNIDS, SOURCES, ArrayUnpickler
from ptlf.stream.fetch import get
from ptlf.stream.pack import data_root, list_packs, open_pack

RNG = np.random.default_rng(0)
PER_BATCH = 4


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)  # the same bytes every time


@dataclass
class Cifar:
    """A CIFAR-10 of 20 training and 4 test images, in both of its packagings."""

    images: np.ndarray = field(default_factory=lambda: RNG.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8))
    labels: list[int] = field(default_factory=lambda: [*(RNG.permutation(20) % 10).tolist(), 3, 1, 4, 1])

    def archive(self) -> bytes:
        members = {}
        for index, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
            part = slice(index * PER_BATCH, (index + 1) * PER_BATCH)
            planes = np.ascontiguousarray(self.images[part].transpose(0, 3, 1, 2)).reshape(PER_BATCH, 3072)
            batch = {b"data": planes, b"labels": self.labels[part]}
            members[f"cifar-10-batches-py/{name}"] = pickle.dumps(batch, protocol=2)
        return tar_of(dict(reversed(members.items())))  # the official tar is not in batch order either

    def check(self, root: Path) -> None:
        pack = open_pack(root, "cifar10")
        assert pack.names == CIFAR10_NAMES and pack.size == 32
        assert np.array_equal(pack.images("train"), self.images[:20])
        assert np.array_equal(pack.images("test"), self.images[20:])
        assert pack.labels("train").tolist() + pack.labels("test").tolist() == self.labels


@dataclass
class Server:
    url: str
    folder: Path  # of the files that are served
    asked: list[str]  # the paths of the requests


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    folder, asked = tmp_path_factory.mktemp("served"), []
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Server(f"http://127.0.0.1:{served.server_port}", folder, asked)
        served.shutdown()
        thread.join()


def put_archive(name: str, content: bytes, monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Make `content` the official archive of the data set `name`."""
    md5 = hashlib.md5(content).hexdigest()
    monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], md5=md5, **changes))  # type: ignore[arg-type]


@pytest.fixture
def cifar(server: Server, monkeypatch: pytest.MonkeyPatch) -> Cifar:
    """The small CIFAR-10 in place of the real one: served, with its checksum in the table of sources."""
    made = Cifar()
    (server.folder / "cifar-10-python.tar.gz").write_bytes(made.archive())
    put_archive("cifar10", made.archive(), monkeypatch, url=f"{server.url}/cifar-10-python.tar.gz")
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    return made


def test_a_kept_archive_is_not_asked_for_again(tmp_path: Path, cifar: Cifar, server: Server) -> None:
    get("cifar10", tmp_path, progress=False)
    cifar.check(tmp_path)
    assert os.listdir(tmp_path) == ["cifar10"]
    with pytest.raises(UserError, match="--overwrite"):
        get("cifar10", tmp_path, progress=False)
    for _ in range(2):
        get("cifar10", tmp_path, progress=False, keep_archive=True, overwrite=True)
    assert len(server.asked) == 2
    archive = tmp_path / ".downloads" / "cifar10" / "cifar-10-python.tar.gz"
    archive.write_bytes(b"spoilt")
    (server.folder / "mirror").mkdir()
    (server.folder / archive.name).rename(server.folder / "mirror" / archive.name)
    get("cifar10", tmp_path, progress=False, overwrite=True, url=f"{server.url}/mirror/{archive.name}")
    cifar.check(tmp_path)
    assert len(server.asked) == 3 and not archive.exists()
    assert [pack.name for pack in list_packs(tmp_path)] == ["cifar10"]


def test_a_download_that_fails(tmp_path: Path, cifar: Cifar, server: Server) -> None:
    (server.folder / "other.tar.gz").write_bytes(b"x")
    for url, why in {
        f"{server.url}/nothing.tar.gz": "404",
        f"{server.url}/other.tar.gz": f"does not match the known hash: expected md5:{SOURCES['cifar10'].md5}",
        "http://127.0.0.1:1/a.tar.gz": "Connection refused",
        "no address": "invalid character",
    }.items():
        with pytest.raises(UserError, match=rf"^{url} cannot be downloaded: .*{why}.*--source, or a mirror"):
            get("cifar10", tmp_path, url=url, progress=False)
        assert list_packs(tmp_path) == [] and not [path for path in tmp_path.rglob("*") if path.is_file()], url


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {os.environ['PTLF_HOSTILE']}",)


def test_hostile_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setenv("PTLF_HOSTILE", str(mark))
    content = pickle.dumps({b"data": Hostile()})
    with pytest.raises(pickle.UnpicklingError, match="system is not allowed in a data file"):
        ArrayUnpickler(io.BytesIO(content)).load()
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists()  # with the standard unpickler it does run


def test_source_may_be_the_archive(tmp_path: Path, cifar: Cifar, server: Server) -> None:
    file = tmp_path / "some-name"
    file.write_bytes(cifar.archive())
    get("cifar10", tmp_path / "root", source=file, progress=False)
    cifar.check(tmp_path / "root")
    assert file.exists() and server.asked == []
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(UserError, match="some-name has md5"):
        get("cifar10", tmp_path / "root2", source=file, progress=False)


def test_cifar100_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(labels: list[int]) -> bytes:
        data = np.full((len(labels), 3072), 7, np.uint8)
        return pickle.dumps({b"data": data, b"fine_labels": labels, b"coarse_labels": [0] * len(labels)}, protocol=2)

    meta = pickle.dumps({b"fine_label_names": [b"apple", b"bear"]}, protocol=2)
    members = {"meta": meta, "test": batch([1]), "train": batch([1, 0, 1])}
    file = tmp_path / "c.tar.gz"
    file.write_bytes(tar_of({f"cifar-100-python/{name}": content for name, content in members.items()}))
    put_archive("cifar100", file.read_bytes(), monkeypatch)
    pack = get("cifar100", tmp_path / "root", source=file, progress=False)
    assert pack.names == ("apple", "bear")
    assert pack.labels("train").tolist() == [1, 0, 1] and pack.labels("test").tolist() == [1]


def jpeg(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L" if shade % 2 else "RGB", (64, 64), shade if shade % 2 else (shade,) * 3).save(buffer, "JPEG")
    return buffer.getvalue()


TINY = {
    "train/n02/images/n02_0.JPEG": jpeg(20), "train/n02/n02_boxes.txt": b"n02_0.JPEG\t0\t0\t63\t63\n",
    "train/n01/images/n01_1.JPEG": jpeg(11), "train/n01/images/n01_0.JPEG": jpeg(10), "train/n01/n01_boxes.txt": b"",
    "val/images/val_0.JPEG": jpeg(120), "val/images/val_1.JPEG": jpeg(111),
    "val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1\n",
    "test/images/test_0.JPEG": jpeg(200), "wnids.txt": b"n02\nn01\n",
}  # fmt: skip


def test_tinyimagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "tiny.zip"
    with zipfile.ZipFile(source, "w") as archive:
        for name, content in TINY.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    put_archive("tinyimagenet", source.read_bytes(), monkeypatch)
    pack = get("tinyimagenet", tmp_path / "root", source=source, progress=False)
    assert pack.names == ("n01", "n02") and pack.size == 64
    assert pack.labels("train").tolist() == [0, 0, 1] and pack.labels("test").tolist() == [0, 1]
    assert np.abs(pack.images("train")[:, 0, 0, 0].astype(int) - [10, 11, 20]).max() <= 1
    assert np.abs(pack.images("test")[:, 0, 0, 2].astype(int) - [111, 120]).max() <= 1


def image_tree(folder: Path, classes: tuple[str, ...]) -> Path:
    for split in ("train", "val"):
        for shade, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (300, 260), (shade, 0, 0)).save(folder / split / name / "0.png")
    return folder


def test_image_folder_as_source(tmp_path: Path) -> None:
    source = image_tree(tmp_path / "s", CIFAR10_NAMES[::-1])
    pack = get("cifar10", tmp_path / "root", source=source, progress=False)
    assert pack.names == CIFAR10_NAMES and pack.size == 32
    assert pack.images("test")[:, 0, 0, 0].tolist() == list(range(10))[::-1]
    with pytest.raises(UserError, match="has 10 class folders, cifar100 has 100"):
        get("cifar100", tmp_path / "root", source=source, progress=False)
    with pytest.raises(UserError, match="must hold train/CLASS"):
        get("cifar10", tmp_path / "root2", source=source / "train", progress=False)


def test_imagenet100_picks_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(IMAGENET100_WNIDS)) == 100 and SOURCES["imagenet100"].names == IMAGENET100_WNIDS
    monkeypatch.setitem(SOURCES, "imagenet100", replace(SOURCES["imagenet100"], names=("n03", "n01")))
    source = image_tree(tmp_path / "s", ("n01", "n02", "n03"))
    pack = get("imagenet100", tmp_path / "root", source=source, progress=False)
    assert pack.names == ("n03", "n01") and pack.images("train").shape == (2, 256, 256, 3)
    assert pack.images("train")[:, 0, 0, 0].tolist() == [2, 0]
    monkeypatch.setitem(SOURCES, "imagenet100", replace(SOURCES["imagenet100"], names=("n01", "n77")))
    with pytest.raises(UserError, match="n77: No such file"):
        get("imagenet100", tmp_path / "root2", source=source, progress=False)


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    for message, name, options in [
        ("did you mean 'cifar10'", "cifar-10", {}),
        (r"imagenet100 cannot be downloaded.*--source", "imagenet100", {}),
        ("give one of", "cifar10", {"source": "x", "url": "http://127.0.0.1/"}),
        ("nowhere does not exist", "cifar100", {"source": tmp_path / "nowhere"}),
    ]:
        with pytest.raises(UserError, match=message):
            get(name, tmp_path, **options)


def test_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("PTLF_DATA", raising=False)
    assert data_root(None) == Path("/home/someone/.cache/ptlf")
    monkeypatch.setenv("PTLF_DATA", "/data")
    assert data_root(None) == Path("/data")
    assert data_root("~/here") == Path("/home/someone/here")
