"""`ptlf evaluate`, `embed` and `export`: what the encoder of a run is used for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptlf.commands.hits import write_hits
from ptlf.core.errors import UserError
from ptlf.evaluation import PROBES
from ptlf.learner import Learner
from ptlf.report.intervals import images_of_mean, start_of, worsened
from ptlf.report.live import console, tell
from ptlf.report.tables import new_table, show_matrix
from ptlf.run.evaluate import evaluate_run, may_change
from ptlf.run.export import export_run
from ptlf.run.inference import embed_images
from ptlf.run.recipes import resolve_config
from ptlf.run.results import refuse_folder_of_runs, results_if_any
from ptlf.run.vectors import after, encode_queries, nearest, read_vectors, upgrade_file
from ptlf.stream.packing import OnError


def evaluate(
    folder: Path, probe: Sequence[str] | None, on_error: OnError, trust_code: bool, overrides: Sequence[str]
) -> None:
    for word in (word.partition("=")[0] for word in overrides if word.startswith("--")):
        if not may_change(word[2:].replace("-", "_")):
            raise UserError(f"`ptlf evaluate` changes the probes only; leave out {word}")
    for name in probe or ():
        PROBES.find(name)
    if not (folder / "config.yaml").exists():
        refuse_folder_of_runs(folder)
    config = resolve_config("", folder / "config.yaml", overrides, trust_code=trust_code)
    labelled = config.stream.labelled if any(word.startswith("--stream.labelled") for word in overrides) else None
    probes, eval_splits, verdicts = evaluate_run(folder, config, probe, labelled=labelled, on_error=on_error)
    start = start_of(results_if_any(folder) or {})
    for name, values in probes.items():
        show_matrix(console, name, values, eval_splits, start)
    for name, values in probes.items():
        if words := worsened(name, [values], start, images_of_mean(values["test_images"])):
            console.print(words, style="yellow", soft_wrap=True)
    for verdict in verdicts:
        tell(verdict.sentence(folder))


def embed(folder: Path, images: Sequence[str], out: Path, **how: Any) -> None:
    """how: the arguments of `embed_images`."""
    count, dim, skipped = embed_images(folder, images, out, **how)
    left_out = f", {len(skipped)} skipped" if skipped else ""
    tell(f"{out}: features of {count} image{'s' * (count != 1)}, {dim} numbers each{left_out}")


def export(folder: Path, to: Path, **how: Any) -> None:
    """how: the arguments of `export_run`."""
    difference, greatest = export_run(folder, to, **how)
    tell(f"{to}: checked on random images; differs from PyTorch by {difference:.1e}, features reach {greatest:.2g}")


def upgrade(folder: Path, vectors: Path, out: Path) -> None:
    old, about = upgrade_file(folder, vectors, out)
    tell(f"{out}: {len(old.names)} vectors{after(old.about)} as those{after(about)}")


def show_nearest(
    words: Sequence[str], encoder: Path | None, count: int, out: Path | None, device: str, trust_code: bool
) -> None:
    if len(words) < 2:
        raise UserError(f"`ptlf search` needs a file of vectors and a query; {words[0]} is one of them")
    files = [read_vectors(Path(word)) for word in words[:-1]]
    names, vectors = encode_queries(files, words[-1], encoder, device, trust_code=trust_code)
    found = nearest(files, vectors, count)
    for name, hits in zip(names, found, strict=True):
        table = new_table(f"nearest to {name}", ["image"], ["cosine"])
        for hit in hits:
            table.add_row(f"{hit.name} ({hit.label})" if hit.label else hit.name, f"{hit.similarity:.3f}")
        console.print(table)
    if out:
        write_hits(out, Path(words[-1]), names, found)
        tell(f"page: {out}")


def drift(folder: Path, images: str, device: str, trust_code: bool) -> None:
    found = Learner.load(folder, trust_code=trust_code, device=device).drift(images)
    tell(f"{images}: {found}")
    if found.novel:
        tell("most novel: " + ", ".join(f"{name} ({distance:.2f})" for name, distance in found.novel))
