"""Versions of an encoder: files that know theirs, maps between them, search, drift, and a run that keeps no image."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Done, StopsAt, paint, run_cli, tiny_encoder
from PIL import Image

import ptlf
from ptlf.core.errors import UserError
from ptlf.core.phases import Watcher
from ptlf.learner import Learner
from ptlf.run import vectors
from ptlf.run.drift import Past, decisions
from ptlf.run.inference import load_encoder
from ptlf.run.vectors import read_vectors
from ptlf.run.versions import Map, find_version, fit_maps, read_steps, recall
from ptlf.training.process import Stopped

SMALL: dict[str, Any] = {"training.epochs": 2, "training.batch": 8, "device": "cpu", "evaluation.gallery": False}
NAMED = {"encoder": "conftest:tiny_encoder", **SMALL}
DAYS = ("monday", "tuesday", "wednesday")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a day, and `others`."""
    root = tmp_path_factory.mktemp("photos")
    for seed, day in enumerate((*DAYS, "others")):
        paint(root / day, 24, seed=seed)
    return root


@pytest.fixture(scope="module")
def three_days(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three days, which kept its encoders from the second on; its vectors of `others` after each, DAY.npz."""
    root = tmp_path_factory.mktemp("runs")
    for day in DAYS:
        learner = Learner.load(root / "cam", trust_code=True) if day != "monday" else Learner(out=root / "cam", **NAMED)
        learner.learn(photos / day, keep_encoders=day == "tuesday", watcher=Watcher())
        embed(root / "cam", photos / "others", root / f"{day}.npz")
    return root


@pytest.fixture
def run(three_days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(three_days, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs" / "cam"


def embed(run: Path | str, images: Path, out: Path | str, *words: object, code: int = 0) -> Done:
    return run_cli("embed", run, images, "--out", out, "--device", "cpu", "--trust-code", *words, code=code)


def features(path: Path | str) -> np.ndarray:
    return np.load(path)["features"]


def test_files_know_their_encoder_and_move_to_another_version(run: Path, photos: Path) -> None:
    found = [read_vectors(Path(f"{day}.npz")) for day in DAYS]
    assert [each.about["task"] for each in found] == [*DAYS]
    assert [each.about["encoder"] for each in found] == [find_version(run, day) for day in DAYS]
    assert found[0].about["root"] == str(photos / "others") and len(found[0].about["checks"]) == 2
    assert (
        "24 vectors after monday as those after wednesday"
        in run_cli("upgrade", run, "monday.npz", "--out", "m.npz").out
    )
    moved, today = read_vectors(Path("m.npz")), found[2]
    assert moved.about["encoder"] == today.about["encoder"] and list(moved.names) == list(today.names)
    assert np.abs(moved.features - today.features).mean() < np.abs(found[0].features - today.features).mean()
    learner = Learner.load(run, trust_code=True)
    assert np.array_equal(learner.upgrade(found[0].features, "monday"), moved.features)
    for wrong in (moved.features[:, :3], moved.features[0]):
        with pytest.raises(UserError, match=r"vectors must be \(N, 16\)"):
            learner.upgrade(wrong, "monday")
    pytest.importorskip("pyarrow")
    run_cli("upgrade", run, "monday.npz", "--out", "m.parquet")
    table = read_vectors(Path("m.parquet"))
    assert table.about == moved.about and np.array_equal(table.features, moved.features)
    run_cli("upgrade", run, "m.parquet", "--out", "same.npz")  # they are of today
    assert np.array_equal(features("same.npz"), moved.features) and read_vectors(Path("same.npz")).labels is None


def test_new_images_in_an_old_space_by_a_map_or_a_kept_encoder(run: Path, photos: Path) -> None:
    learner, others = Learner.load(run, trust_code=True), photos / "others"
    embed(run, others, "mapped.npz", "--as", "monday")
    assert np.allclose(features("mapped.npz"), learner.embed(others, as_of="monday"), atol=1e-6)
    about = [read_vectors(Path(name)).about for name in ("mapped.npz", "monday.npz", "wednesday.npz")]
    assert about[0]["encoder"] == about[1]["encoder"] and about[0]["mapped_from"] == about[2]["encoder"]
    assert (run / "encoders" / "wednesday").is_dir() and not (run / "encoders" / "monday").exists()
    for name in ("cam@tuesday", "cam"):
        embed(name, others, "kept.npz", *(["--as", "tuesday"] if name == "cam" else []))
        assert np.allclose(features("kept.npz"), features("tuesday.npz"), atol=1e-6)
        kept = read_vectors(Path("kept.npz")).about
        assert kept["encoder"] == find_version(run, "tuesday") and kept["task"] == "tuesday"
        assert kept["run"] == str(run)
    weights = Learner(out="next", **NAMED, **{"encoder.weights": "cam@tuesday"}).config.encoder.weights
    assert weights == "cam@tuesday"
    assert "encoders/monday" not in embed("cam@monday", others, "no.npz", code=2).err


def test_a_resumed_and_an_undone_run_have_the_same_maps(run: Path, photos: Path) -> None:
    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (run / "versions").iterdir()}

    before = files()
    assert sorted(before) == ["0002.safetensors", "0003.safetensors"]
    learner = Learner.load(run, trust_code=True)
    learner.undo(Watcher())
    assert sorted(files()) == ["0002.safetensors"] and not (run / "encoders" / "wednesday").exists()
    with pytest.raises(Stopped):
        learner.learn(photos / "wednesday", watcher=StopsAt(4))
    assert sorted(files()) == ["0002.safetensors"]
    Learner.load(run, trust_code=True).learn(watcher=Watcher())
    assert files() == before


BAD = [  # words and what is said
    (["upgrade", "cam", "other.npz"], "cam has no maps for other.npz, of elsewhere after monday: .*give the run"),
    (["upgrade", "cam", "damaged.npz"], "damaged.npz is no readable .npz of vectors file"),
    (["upgrade", "cam", "cut.npz"], "cut.npz is no readable .npz of vectors file"),
    (
        ["upgrade", "cam", "plain.npz"],
        "plain.npz does not say which encoder it is of; write it again with `ptlf embed`",
    ),
    (["upgrade", "cam", "notes.txt"], "notes.txt is no file of vectors"),
    (["upgrade", "cam", "none.npz"], "none.npz is no readable"),
    (["upgrade", "nowhere", "monday.npz"], "nowhere holds no encoder.safetensors"),
    (["embed", "cam", "{others}", "--as", "mondai"], "unknown task 'mondai'; did you mean 'monday'"),
    (["embed", "cam@sunday", "{others}"], "cam keeps no encoder of after sunday; learn with --keep-encoders"),
    (
        ["search", "monday.npz", "tuesday.npz", "{others}"],
        "vectors of two encoders cannot be compared: monday.npz.*upgrade",
    ),
    (["search", "monday.npz"], "needs a file of vectors and a query"),
    (["search", "monday.npz", "empty"], "empty holds no images"),
    (["search", "gone.npz", "{others}"], "there is no run .*elsewhere, which gone.npz is of; name it with --run"),
    (["search", "changed.npz", "{others}"], "it encodes two images otherwise .*; embed the images again"),
    (["drift", "cam", "empty"], "empty holds no images"),
    (["drift", "cam", "few"], "3 images are too few"),
    (["drift", "nowhere", "{others}"], "there is no configuration file nowhere"),
]


def test_bad_input_is_one_sentence_and_nothing_is_lost(run: Path, photos: Path) -> None:
    monday, stored = read_vectors(Path("monday.npz")), dict(np.load("monday.npz"))

    def write(name: str, **about: Any) -> None:
        np.savez(name, **{**stored, "about": np.array(json.dumps({**monday.about, **about}))})

    write("other.npz", encoder="0" * 64, run="/runs/elsewhere")
    write("gone.npz", run="/runs/elsewhere")
    checks = read_vectors(Path("wednesday.npz")).about
    write("changed.npz", encoder=checks["encoder"], checks=[[-x for x in row] for row in checks["checks"]])
    np.savez("plain.npz", names=stored["names"], features=stored["features"])
    data = bytearray(Path("monday.npz").read_bytes())
    Path("cut.npz").write_bytes(data[: len(data) // 2])
    data[stored["features"].nbytes // 2] ^= 255
    Path("damaged.npz").write_bytes(data)
    Path("notes.txt").write_text("notes")
    Path("empty").mkdir()
    paint(Path("few"), 3)
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and path.name != ".lock"}
    for words, said in BAD:
        words = [word.format(others=photos / "others") for word in words]
        more = ["--out", "out.npz"] if words[0] in ("upgrade", "embed") else []
        more += [] if words[0] == "upgrade" else ["--trust-code"]
        told = " ".join(run_cli(*words, *more, code=2).err.splitlines()[-1:])
        assert re.search(said, told), (words, told)
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and path.name != ".lock"} == before
    np.savez("mine.npz", images=1)
    assert "holds no features" in run_cli("upgrade", run, "monday.npz", "--out", "mine.npz", code=2).err
    steps = run / "versions" / "0003.safetensors"
    steps.write_bytes(steps.read_bytes()[:-8])
    assert "0003.safetensors is damaged" in run_cli("upgrade", run, "monday.npz", "--out", "out.npz", code=2).err
    steps.unlink()
    assert "cam has no maps for monday.npz" in run_cli("upgrade", run, "monday.npz", "--out", "out.npz", code=2).err


def test_a_run_with_one_task_and_a_renamed_task(photos: Path, tmp_path: Path, run: Path) -> None:
    Learner(out=tmp_path / "one", **NAMED).learn(photos / "monday", watcher=Watcher())
    error = embed(tmp_path / "one", photos / "others", "f.npz", "--as", "monday", code=2).err
    assert "has learnt one task" in error
    embed(tmp_path / "one", photos / "others", "f.npz")
    assert (
        "24 vectors after monday as those after monday"
        in run_cli("upgrade", tmp_path / "one", "f.npz", "--out", "g.npz").out
    )
    found = Learner.load(tmp_path / "one", trust_code=True).drift(photos / "monday")
    assert found.answer == "as usual" and found.duplicates == found.images == 24
    (run / "tasks" / "0001-monday").rename(run / "tasks" / "0001-mon")
    assert "after monday" in run_cli("upgrade", run, "monday.npz", "--out", "g.npz").out


def test_maps_are_fitted_and_chosen_on_other_images() -> None:
    old = RNG.normal(size=(300, 12)) @ np.diag(np.linspace(3, 0.3, 12))
    rotation = np.linalg.qr(RNG.normal(size=(12, 12)))[0]
    for new, best in (
        (old @ rotation + 1, {"ridge 0.1", "procrustes"}), (old + 2, {"shift", "procrustes", "ridge 10"}),
        (old @ (np.eye(12) + 0.3 * RNG.normal(size=(12, 12))), {"ridge 0.1"}),
    ):  # fmt: skip
        forward, backward, kind, scores = fit_maps(old, new)
        assert kind in best and scores[kind] == max(list(scores.values())[1:])
        assert recall(forward(old), new) > 0.9 > scores["none"] or scores["none"] == pytest.approx(1, abs=0.2)
        assert recall(backward(new), old) > 0.9
    forward, _, kind, scores = fit_maps(old[:1], old[:1] + 3)
    assert (kind, scores) == ("shift", {}) and np.allclose(forward(old), old + 3)
    large, *_ = fit_maps(1e6 * old[:40], 1e6 * old[:40] @ rotation)  # both factors in half precision
    assert all(np.isfinite(part.astype(np.float16)).all() for part in large[:2])
    assert (
        recall(Map(*(part.astype(np.float16) for part in large[:2]), large.shift)(1e6 * old[40:]), old[40:] @ rotation)
        > 0.8
    )


def test_search_by_hand(run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = photos / "others"
    query = sorted(others.rglob("*.png"))[5]
    (first, *rest), *_ = ptlf.search("wednesday.npz", query, k=4, trust_code=True)
    assert first.image == query and first.similarity == pytest.approx(1, abs=1e-5) and len(rest) == 3
    x = features("wednesday.npz")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    names = np.load("wednesday.npz")["names"]
    place = names.tolist().index(first.name)
    expected = names[np.argsort(-x @ x[place], kind="stable")[:4]].tolist()
    for block, memory in ((5, 0), (vectors.ROWS, vectors.IN_MEMORY)):  # a memory map, in blocks
        monkeypatch.setattr(vectors, "ROWS", block)
        monkeypatch.setattr(vectors, "IN_MEMORY", memory)
        assert isinstance(read_vectors(Path("wednesday.npz")).features, np.memmap) == (memory == 0)
        (hits,) = ptlf.search(["wednesday.npz"], query, k=4, trust_code=True)
        assert [hit.name for hit in hits] == expected
    embed(run, photos / "monday", "more.npz")
    shown = run_cli(
        "search", "wednesday.npz", "more.npz", others, "--trust-code", "--count", 2, "--out", "page.html"
    ).out
    page = Path("page.html").read_text()
    assert shown.count("nearest to") == 24 and page.count("data:image/jpeg") == 24 * 3 and "page: page.html" in shown
    by_map = run_cli("search", "monday.npz", query, "--run", run, "--trust-code").out
    assert query.name in by_map.splitlines()[4]
    (run / "results.json").unlink()
    assert load_encoder(run, trust_code=True).about["task"] == "wednesday"


def test_names_of_strangers_stay_text_on_the_page(run: Path, tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    folder = tmp_path / name.replace("/", "")
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a<b>.png")
    embed(run, folder, "s.npz")
    run_cli("search", "s.npz", folder / "a<b>.png", "--trust-code", "--out", "page.html")
    assert "<b>.png" not in Path("page.html").read_text() and "a&lt;b&gt;.png" in Path("page.html").read_text()


def test_drift_of_known_kinds() -> None:
    def draw(place: float, count: int, spread: float = 1.0) -> np.ndarray:
        return place + spread * RNG.normal(size=(count, 20)) + np.linspace(0, 4, 20)

    past = [draw(0, 60), draw(2, 60)]
    for name, new, answer in (
        ("more of the same", np.concatenate([draw(0, 20), draw(2, 20)]), "as usual"),
        ("of one task", draw(2, 30), "as usual"),
        ("a part of a task again", past[0][:9], "as usual"),
        ("narrower", 0.2 * draw(2, 30) + 2.2, "shifted"),
        ("elsewhere", -draw(0, 30), "new"),
    ):
        found = Past(past).compare(new, [f"{row}.png" for row in range(len(new))])
        assert found.answer == answer, (name, str(found))
        assert found.images == len(new) and found.compared == 120 and len(found.novel) == 5
        assert found == Past(past).compare(new, [f"{row}.png" for row in range(len(new))])
    assert Past(past).compare(past[0]).duplicates == 60
    assert (
        found.figures["distance"]["value"] > found.figures["distance"]["usual"]
        and found.figures["distance"]["p"] < 0.01
    )


def test_learning_only_what_drifts(run: Path, photos: Path, tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    shutil.copytree(photos / "monday", watched / "again")
    said = run_cli("learn", run, watched / "again", "--if-drift", "--trust-code")
    assert "again is not learnt: as usual; Fréchet distance" in said.err and "report" not in said.out
    Image.new("RGB", (8, 8)).save(watched / "again" / "more.png")
    before = (run / "encoder.safetensors").read_bytes()
    for _ in range(2):  # the decision is kept
        said = run_cli("learn", run, "--watch", watched, "--once", "--settle", 0, "--if-drift", "new", "--trust-code")
    assert [(made["name"], made["learnt"], made["if"]) for made in decisions(run)] == [("again", False, "shifted")]
    assert (run / "encoder.safetensors").read_bytes() == before and "nothing new" in said.out
    for number in range(20):
        place = watched / "white" / f"{number}.png"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(RNG.integers(200, 256, (8, 8, 3), np.uint8)).save(place)
    run_cli("learn", run, watched / "white", "--if-drift", "shifted", "--trust-code", "--training.epochs", 1, code=2)
    Learner.load(run, trust_code=True).learn(watched / "white", if_drift="shifted", watcher=Watcher())
    assert decisions(run)[-1]["learnt"] and decisions(run)[-1]["answer"] in ("shifted", "new")
    assert Learner.load(run, trust_code=True).tasks == [*DAYS, "white"]
    with pytest.raises(UserError, match="unknown level of if_drift 'odd'"):
        Learner.load(run, trust_code=True).learn(photos / "others", if_drift="odd", watcher=Watcher())
    (run / "drift.json").write_text("{")
    assert decisions(run) == []
    shown = run_cli("drift", run, photos / "monday", "--trust-code").out
    assert "as usual" in shown and "most novel: " in shown and "24 of 24 images nearly as learnt ones" in shown


FORGETS = {**SMALL, "checkpoint.keep_images": False, "method": "anchor", "objective": "vicreg"}


def test_a_run_that_keeps_no_image(photos: Path, tmp_path: Path) -> None:
    def holds(folder: Path) -> list[str]:
        """Files with a row of pixels of any image, as bytes or as floating point numbers from 0 to 1."""
        rows = [np.array(Image.open(file).convert("RGB"))[3] for file in photos.rglob("*.png")]
        found = {row.tobytes() for row in rows} | {(row / np.float32(255)).astype(np.float32).tobytes() for row in rows}
        kinds = (b"\x89PNG\r\n", b"\0JFIF\0", b"data:image")
        return [
            str(f)
            for f in sorted(folder.rglob("*"))
            if f.is_file() and any(x in f.read_bytes() for x in (*found, *kinds))
        ]

    def learnt(name: str, **settings: Any) -> Learner:
        learner = Learner(tiny_encoder(), out=tmp_path / name, size=8, **settings)
        for day in DAYS[:2]:
            learner.learn(photos / day, watcher=Watcher())
        return learner

    kept = learnt("kept", **{**FORGETS, "checkpoint.keep_images": True})
    assert len(holds(kept.folder)) == 2 and kept.results["holds_images"] == {"tasks": 48, "memory": 0, "gallery": False}
    lump = learnt("lump", **SMALL, method="lump", objective="simsiam")
    assert lump.results["holds_images"]["memory"] and any("checkpoints" in file for file in holds(lump.folder))
    learner = learnt("private", **FORGETS)
    assert holds(learner.folder) == [] and not any(learner.results["holds_images"].values())
    assert len(read_steps(learner.folder)) == 1
    with pytest.raises(UserError, match="holds no images of its tasks any more"):
        learner.drift(photos / "others")
    assert learner.undo(Watcher())["tasks"] == ["monday"] and holds(learner.folder) == []
    for settings, said in (
        ({"method": "lump"}, "the memory"),
        ({"evaluation.gallery": True}, "the gallery"),
    ):
        with pytest.raises(UserError, match=f"checkpoint.keep_images is false, but .* for {said}"):
            learnt("refused", **{**FORGETS, **settings})
