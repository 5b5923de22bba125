"""The encoder of a run, used without the run's data; `ptlf embed` against the encoder called by hand."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Done, run_cli, tiny_config, tiny_encoder
from PIL import Image
from safetensors.torch import load_file, save_file

import ptlf
from ptlf.core.errors import UserError
from ptlf.run.inference import read_card
from ptlf.run.loop import Run
from ptlf.stream.packing import pack_folder

RNG = np.random.default_rng(3)


def train(folder: Path, name: str = "digits/simsiam/finetune", encoder: torch.nn.Module | None = None, **more) -> Run:
    run = Run(tiny_config(name, training__epochs=1, **more), folder, encoder=encoder)
    run.train()
    return run


def features_in_training(run: Run, pixels: np.ndarray) -> np.ndarray:
    run.model.encoder.eval()
    with torch.no_grad():
        return run.model.encoder(run.components.prepare(torch.from_numpy(pixels))).numpy()


def test_features_are_those_of_the_run(finished_run: Run, tmp_path: Path) -> None:
    assert finished_run.stream.data.test is not None
    pixels = finished_run.stream.data.test.pixels[:20]
    encoder = ptlf.load_encoder(finished_run.folder, device="cpu", trust_code=True)
    expected = features_in_training(finished_run, pixels)
    assert not encoder.module.training and encoder.feature_dim == expected.shape[1] == 16
    assert np.array_equal(encoder.embed(pixels), expected)
    assert encoder.embed(pixels).dtype == np.float32
    assert np.allclose(encoder.embed(pixels, batch=3), expected, atol=1e-6)
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{index:02}.png")
    assert np.array_equal(encoder.embed(tmp_path), expected)
    one = encoder.preprocess(tmp_path / "07.png")
    assert one.shape == (1, 3, 16, 16) and torch.equal(
        one, finished_run.components.prepare(torch.from_numpy(pixels[7:8]))
    )
    assert torch.equal(encoder.preprocess(Image.fromarray(pixels[7])), one)
    assert torch.equal(encoder.preprocess(pixels[7]), one)


def test_photographs_are_cropped_as_packing_does(finished_run: Run, tmp_path: Path) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    for index, shape in enumerate([(50, 31, 3), (20, 47, 3), (16, 16, 3)]):
        Image.fromarray(RNG.integers(0, 256, shape, np.uint8)).save(tmp_path / "in" / "a" / f"{index}.png")
    pack = pack_folder(tmp_path / "in", tmp_path, "packed", size=16, workers=1, progress=False)
    encoder = ptlf.load_encoder(finished_run.folder, device="cpu", trust_code=True)
    expected = features_in_training(finished_run, np.array(pack.images("train")))
    assert np.array_equal(encoder.embed(tmp_path / "in"), expected)
    assert np.array_equal(encoder.embed(pack.path), expected)


def test_the_card_travels_in_the_file(finished_run: Run, tmp_path: Path) -> None:
    """The file alone suffices."""
    assert finished_run.folder is not None
    shutil.copy(finished_run.folder / "encoder.safetensors", tmp_path)
    card = read_card(tmp_path / "encoder.safetensors")
    assert card["recipe"] == "digits/simsiam/ptlf" and card["ptlf_version"] == ptlf.__version__
    assert (card["image_size"], card["view_size"], card["mean"]) == (16, 16, [0.5, 0.5, 0.5])
    assert ptlf.load_encoder(tmp_path, device="cpu", trust_code=True).card == card
    (tmp_path / "encoder.safetensors").rename(tmp_path / "model.safetensors")  # as version 0.2 exported it
    assert ptlf.load_encoder(tmp_path, device="cpu", trust_code=True).card == card


def test_columns_of_pnn_are_joined_and_views_may_be_smaller_than_the_images(tmp_path: Path) -> None:
    for name, more, dim, size in (
        ("digits/simsiam/pnn", {"encoder__name": "conftest:tiny_resnet"}, 2 * 8, 16),
        ("digits/simsiam/finetune", {"views__size": 12}, 16, 12),
    ):
        run = train(tmp_path / str(size), name, **more)
        pixels = RNG.integers(0, 256, (4, 16, 16, 3), np.uint8)
        encoder = ptlf.load_encoder(run.folder, device="cpu", trust_code=True)
        assert encoder.feature_dim == dim and encoder.preprocess(pixels).shape == (4, 3, size, size)
        assert np.array_equal(encoder.embed(pixels), features_in_training(run, pixels))
        run_cli("export", run.folder, "--to", tmp_path / f"{size}.pt2", "--trust-code")
        exported = torch.export.load(tmp_path / f"{size}.pt2").module()(encoder.preprocess(pixels))
        assert np.allclose(exported.detach().numpy(), encoder.embed(pixels), atol=1e-5)


def test_a_module_of_the_user_s_own(tmp_path: Path) -> None:
    run = train(tmp_path / "run", encoder=tiny_encoder())
    with pytest.raises(UserError, match=r"made with a module of your own.*load_encoder\(.*encoder=module\)"):
        ptlf.load_encoder(tmp_path / "run", trust_code=True)
    again = ptlf.load_encoder(tmp_path / "run", encoder=tiny_encoder(), device="cpu")
    pixels = RNG.integers(0, 256, (4, 16, 16, 3), np.uint8)
    assert np.array_equal(again.embed(pixels), features_in_training(run, pixels))
    with pytest.raises(UserError, match="not of an encoder like this one"):
        ptlf.load_encoder(tmp_path / "run", encoder=torch.nn.Conv2d(3, 4, 3))


def test_what_is_no_run(finished_run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no encoder.safetensors"):
        ptlf.load_encoder(tmp_path)
    file = tmp_path / "encoder.safetensors"
    file.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"encoder.safetensors cannot be read"):
        ptlf.load_encoder(tmp_path)
    assert finished_run.folder is not None
    weights, card = (read(finished_run.folder / "encoder.safetensors") for read in (load_file, read_card))
    for change in ({"mean": 1}, {"view_size": 0}, {"image_size": "big"}):
        file.unlink()
        save_file(weights, file, {"ptlf": json.dumps(card | change)})
        with pytest.raises(UserError, match=f"cannot be read: .*{next(iter(change))}"):
            ptlf.load_encoder(tmp_path)
    file.unlink()
    save_file(weights, file)
    with pytest.raises(UserError, match=r"before version 0\.2; a new run takes its weights by --encoder\.weights"):
        ptlf.load_encoder(tmp_path)


def test_code_that_a_folder_names_runs_only_if_trusted(finished_run: Run, tmp_path: Path) -> None:
    assert finished_run.folder is not None
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef make(): pass\n")
    shutil.copytree(finished_run.folder, tmp_path / "run")
    file = tmp_path / "run" / "encoder.safetensors"
    card = read_card(file)
    card["encoder"]["name"] = "hostile:make"
    save_file(load_file(file), file, {"ptlf": json.dumps(card)})
    with pytest.raises(UserError, match=r"'hostile:make' in .* names code.*trust"):
        ptlf.load_encoder(tmp_path / "run")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name / "deep").mkdir(parents=True)
        for index in range(4):
            pixels = RNG.integers(0, 256, (20 + index, 30, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "in" / name / ("deep" if index % 2 else ".") / f"{index}.png")
    return tmp_path / "in"


def embed(run: Run, out: Path | str, *words: object, code: int = 0) -> Done:
    return run_cli("embed", run.folder, *words, "--out", out, "--device", "cpu", "--batch", 3, code=code)


def test_features_in_files(finished_run: Run, photographs: Path, tmp_path: Path) -> None:
    assert "features of 8 images, 16 numbers each" in embed(finished_run, tmp_path / "f.npz", photographs).out
    found = np.load(tmp_path / "f.npz", allow_pickle=False)
    names, encoder = found["names"].tolist(), ptlf.load_encoder(finished_run.folder, device="cpu")
    assert sorted(names) == sorted(str(file.relative_to(photographs)) for file in photographs.rglob("*.png"))
    assert [name.split("/")[0] for name in names] == found["labels"].tolist()
    assert found["features"].dtype == np.float32 and found["features"].shape == (8, 16)
    by_hand = np.stack([encoder.embed(Image.open(photographs / name))[0] for name in names])
    assert np.allclose(found["features"], by_hand, atol=1e-6)
    assert sorted(os.listdir(tmp_path)) == ["f.npz", "in"]
    parquet = pytest.importorskip("pyarrow.parquet")
    embed(finished_run, tmp_path / "f.parquet", photographs)
    table = parquet.read_table(tmp_path / "f.parquet").to_pydict()
    assert (table["name"], table["label"]) == (names, found["labels"].tolist())
    assert np.array_equal(np.array(table["features"], np.float32), found["features"])


def test_other_forms_of_images(
    finished_run: Run, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    pack = pack_folder(photographs, root, "pets", size=16, test_fraction=0.25, workers=1, progress=False)
    monkeypatch.setenv("PTLF_DATA", str(root))
    embed(finished_run, tmp_path / "pack.npz", "pets")
    found = np.load(tmp_path / "pack.npz")
    stored = np.concatenate([pack.images("train"), pack.images("test")])
    expected = ptlf.load_encoder(finished_run.folder, device="cpu").embed(stored)
    assert np.allclose(found["features"], expected, atol=1e-6) and set(found["labels"]) == {"cat", "dog"}
    assert found["names"][0] == "train 0" and found["names"][-1] == "test 1"
    np.save(tmp_path / "a.npy", stored)
    embed(finished_run, tmp_path / "npy.npz", tmp_path / "a.npy", photographs / "cat")
    both = np.load(tmp_path / "npy.npz")
    assert np.allclose(both["features"][:8], expected, atol=1e-6) and len(both["names"]) == 12
    assert both["names"][8].startswith(f"{photographs}/cat/") and "labels" not in both


def test_images_that_are_broken(finished_run: Run, photographs: Path, tmp_path: Path) -> None:
    (photographs / "cat" / "1.png").write_bytes(b"broken")
    error = embed(finished_run, tmp_path / "f.npz", photographs, code=2).err
    assert "cat/1.png cannot be used: not an image" in error
    assert os.listdir(tmp_path) == ["in"]
    said = embed(finished_run, tmp_path / "f.npz", photographs, "--on-error", "skip")
    assert "features of 8 images" in said.out and "1 skipped" in said.out and "skipped cat/1.png" in said.err
    assert "cat/1.png" not in np.load(tmp_path / "f.npz")["names"]


def test_what_cannot_be_embedded(finished_run: Run, photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photographs.parent)
    Path("empty").mkdir()
    for images, out, message in (
        ("nowhere", "f.npz", "there is no folder or file nowhere"),
        ("in", "f.csv", "must end with .npz or .parquet"),
        ("in", "none/f.npz", "there is no folder none"),
        ("empty", "f.npz", "empty holds no images"),
    ):
        assert message in embed(finished_run, out, images, code=2).err, (images, out)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert ".parquet needs pyarrow" in embed(finished_run, "f.parquet", "in", code=2).err
    assert sorted(os.listdir()) == ["empty", "in"]
