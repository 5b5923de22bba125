"""A run that learns one task after the other, as their images arrive; `ptlf learn` is this class as a command."""

import gc
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import nn

from ptlf.core.errors import UserError, info, quoted, warn
from ptlf.core.phases import Watcher
from ptlf.core.reading import flatten
from ptlf.core.registry import settings_from
from ptlf.core.settings import as_dict, merge
from ptlf.encoders import brings_weights
from ptlf.evaluation import PROBES
from ptlf.report.live import Live, tell
from ptlf.run.build import check_grows, make_stream
from ptlf.run.config import Config, from_dict, read_yaml
from ptlf.run.drift import LEAST, Drift, drift_of, record_decision
from ptlf.run.evaluate import evaluate_run, may_change
from ptlf.run.fitting import fit_settings, free_settings, nest_settings
from ptlf.run.folder import START, check_arrived, check_new, has_finished, keep_encoder, restore_encoder, save_encoder
from ptlf.run.incoming import STREAM, arriving_config, claimed_for_learning, select_new, take_back
from ptlf.run.inference import LoadedEncoder, load_encoder
from ptlf.run.loop import Run
from ptlf.run.recipes import default_recipe, name_of, recipe, with_stored_encoder
from ptlf.run.results import read_results
from ptlf.run.vectors import upgrade_vectors
from ptlf.run.verdict import Verdict, verdicts
from ptlf.stream.arrivals import accept, arrivals, check_watched, clear, next_new, note_look, pack_incoming, task_name
from ptlf.stream.decode import Fit
from ptlf.stream.disk import subfolders
from ptlf.stream.pack import Pack, data_root
from ptlf.stream.packing import OnError
from ptlf.training.checkpoint import Checkpoints
from ptlf.training.process import Stopped

MAX_SECONDS = 1e9
MAY_BE_GIVEN = ("device", "evaluation.tasks", "log")  # of a run that is there
FROM_NOTHING = (
    "the encoder begins with random weights: from a few thousand images it may tell them apart no better than a "
    "histogram of colours does; give one that knows something, as --encoder.name hf:FOLDER or --encoder.weights FILE"
)
Source = Any  # a path, an array, a list of images, a data set


class Learner:
    """`learn` brings the next task; the run continues from where the last one ended.

    The run is in the folder `out`: what `ptlf train` leaves, and the packed images of the tasks in `tasks/`.
    """

    def __init__(
        self,
        encoder: str | nn.Module | None = None,
        objective: str | None = None,
        method: str | None = None,
        out: Path | str = "runs/learner",
        *,
        size: int | None = None,
        config: Config | None = None,
        free: Collection[str] = (),
        **settings: Any,
    ) -> None:
        """A new run; nothing is written before the first task. For one that is there: `Learner.load`.

        encoder: a name (`ptlf list encoders`) or a module that maps images (B, 3, S, S) to vectors (B, dim). Copies of
            it are trained. None: one that fits the first task's images and the machine.
        objective, method: as recipes name them, such as "simsiam" and "lump", "ptlf", "continue". Default: those for an
            encoder that has learnt something if a module or weights are given, else those that begin with nothing.
        size: side of the images in pixels; default: that of a packed set or array, else the views' or 32.
        settings: sections, as training={"epochs": 20}, or keys, as **{"training.epochs": 20}; also seed and device.
            Batch and epochs, where they are not given, are chosen with the first task. log="tensorboard" or a list
            names trackers.
        config: a complete configuration in place of names and settings, as `new` and `load` give it, with the settings
            that are `free` until the first task.
        """
        if config is None:
            named: dict[str, Any] = {}
            if isinstance(encoder, nn.Module):
                mean, std = getattr(encoder, "normalisation", (None, None))
                named = {"encoder.name": "given", "encoder.mean": mean and [*mean], "encoder.std": std and [*std]}
            elif encoder is not None:
                named = {"encoder.name": encoder}
            given = with_stored_encoder(nest_settings({**named, **settings}))
            stream, *default = default_recipe(STREAM, given).split("/")
            values = merge(Config, recipe("/".join((stream, objective or default[0], method or default[1]))), given)
            config, free = arriving_config(from_dict(values), Path(out)), free_settings(given)
        self._out = Path(out), Path(out).absolute()
        self.size, self.config = size, config
        self.free = frozenset(free) - {"stream.tasks"}
        self.module = encoder if isinstance(encoder, nn.Module) else None
        self.run: Run | None = None  # the latest
        self._encoder: LoadedEncoder | None = None  # as the last task left it, once it is asked for

    @classmethod
    def new(cls, config: Config, out: Path | str, size: int | None = None, free: Collection[str] = ()) -> Self:
        """A new run with a complete configuration but for its stream. free: settings that the first task chooses."""
        return cls(out=out, size=size, config=arriving_config(config, Path(out)), free=free)

    @classmethod
    def load(
        cls, folder: Path | str, encoder: nn.Module | None = None, *, trust_code: bool = False, **settings: Any
    ) -> Self:
        """The run in this folder, made by a Learner, `ptlf learn` or `ptlf train`, finished or not.

        encoder: a module like the one the run was made with, if that was given as a module.
        trust_code: follow names of code, "package.module:attribute", in the run's config.yaml. It runs here.
        settings: `device`, `log` and evaluation={"tasks": ...} may change; all others are the run's own.
        """
        file, given = Path(folder) / "config.yaml", nest_settings(settings)
        if changed := [name for name in flatten(given) if name not in MAY_BE_GIVEN]:
            first = "were chosen with its first task and hold for all; for others begin a new run"
            why = f"; epochs and batch {first}" if changed[0] in ("training.epochs", "training.batch") else ""
            raise UserError(f"{folder} has settings of its own, in config.yaml; leave out {changed[0]}{why}")
        with nullcontext() if trust_code else settings_from(file):
            stored = from_dict(read_yaml(file))
        if stored.encoder.name == "given" and encoder is None:
            raise UserError(f"the encoder of {folder} was given as a module; load it with encoder=MODULE in Python")
        return cls(encoder, out=folder, config=from_dict(merge(Config, as_dict(stored), given)))

    def __repr__(self) -> str:
        return f"Learner({str(self.folder)!r}, {name_of(as_dict(self.config))})"

    @property
    def folder(self) -> Path:
        """As it was given, or absolute once the working folder is another."""
        given, absolute = self._out
        return given if given.absolute() == absolute else absolute

    @property
    def tasks(self) -> list[str]:
        """Names of all tasks, learnt or not."""
        return [task.name for task in make_stream(self.config, self.folder).tasks] if self.exists else []

    @property
    def results(self) -> dict[str, Any]:
        """What results.json holds."""
        return read_results(self.folder)

    @property
    def encoder(self) -> nn.Module:
        """The encoder as the last task left it, in eval mode."""
        return self._loaded().module.requires_grad_()

    @property
    def exists(self) -> bool:
        return (self.folder / "config.yaml").exists()

    def learn(
        self,
        source: Source | None = None,
        name: str | None = None,
        *,
        again: bool = False,
        new_only: bool = False,
        if_drift: str | None = None,
        keep_encoders: bool = False,
        watcher: Watcher | None = None,
        fit: Fit | None = None,
        **packing: Any,
    ) -> dict[str, Any]:
        """Learn the images in `source` as the next task. Returns what results.json holds.

        A task that was interrupted is finished first; without a source nothing else is done.

        source: a folder of images; a folder with a `train` and a `test` folder, each with a folder per class; a packed
            set; an .npz; an array (N, H, W, 3) uint8, a list of images, a torch Dataset or a Hugging Face dataset of
            images or (image, label) pairs. Labels are used for testing only.
        name: of the task; default: the folder's or file's.
        again: learn a task even though all its images were learnt before.
        new_only: leave out images that earlier tasks have, as of a folder that has grown; if there are no others,
            nothing is learnt.
        if_drift: learn them only if `drift` finds them at least that new, "shifted" or "new"; drift.json says why.
        keep_encoders: keep the encoder of after this task, and from then on of all.
        watcher: gets what happens; default: a progress bar.
        packing: `test_fraction`, `on_error`, `workers` and, for a new run, `fit`, as for `ptlf data pack`.
        """
        if source is None and not self.exists:
            raise UserError(f"{self.folder} holds no run; give the images of its first task")
        if again and new_only:
            raise UserError("--again learns what --new-only leaves out (again=True, new_only=True); give one of them")
        tells, watcher = watcher is None, watcher or Live(name_of(as_dict(self.config)))
        with claimed_for_learning(self.folder):
            unfinished = self.exists and not self._check_continues()
            incoming = accepted = None
            try:
                if source is not None:
                    incoming = self._pack(source, name, fit, packing)
                    again |= bool(if_drift) and not new_only  # that decides
                    incoming = select_new(incoming, arrivals(self.folder), unfinished, again, new_only)
                if unfinished:
                    run = self._train(watcher)
                    if incoming is not None and run.stop_signal:  # in its last moments
                        raise Stopped(self.folder, run.stop_signal)
                if incoming and if_drift and self.exists and not self._drifts(incoming, if_drift):
                    incoming = None
                if incoming is not None:
                    if not self.exists:  # choose the settings that are free
                        counts, values = [incoming.split("train").count], as_dict(self.config)
                        fitted, chosen = fit_settings(values, self.free, counts, incoming.size)
                        self.config = from_dict(fitted)
                        if chosen and tells:
                            tell(f"{chosen}; they hold for all later tasks, and cannot be changed then")
                        if not brings_weights(self.config.encoder):
                            info(FROM_NOTHING)
                    accepted = accept(self.folder, incoming)
                    self._train(watcher, accepted)
                if keep_encoders:
                    keep_encoder(self.folder, self.tasks[-1])
            except Stopped as stopped:
                if incoming is None or (accepted and accepted.path.exists()):
                    raise
                unlearnt = f"{task_name(incoming)} is not learnt, and will be packed again"
                raise Stopped(self.folder, stopped.number, "give it again", stopped.lost, unlearnt) from None
            finally:
                clear(self.folder)
        return self.results

    def undo(self, watcher: Watcher | None = None) -> dict[str, Any]:
        """Take the last task back: encoder, record and checkpoints are those from before it."""
        with claimed_for_learning(self.folder):
            take_back(self.folder, self.config)
            self._train(watcher or Live(name_of(as_dict(self.config))))
        return self.results

    def verdicts(self) -> list[Verdict]:
        """The encoder beside the one it began as, on the labelled images that the run knows."""
        return verdicts(self.folder, self.config, make_stream(self.config, self.folder), self._start)

    def watch(
        self, folder: Path | str, *, settle: float = 30.0, every: float = 10.0, once: bool = False, **learning: Any
    ) -> Iterator[dict[str, Any]]:
        """Learn every subfolder as it appears, first the one with the oldest image file; yields the results after each.
        Never ends by itself.

        A subfolder is left for later while anything in it is younger than `settle` seconds. One that cannot be learnt
        is named on stderr, and tried again when it changes. Images that an earlier task has, by whatever name, are left
        out; so of a subfolder that has changed only what is new is learnt. Images in no subfolder are not learnt.

        every: seconds between looks. once: end when nothing is left to learn, with an error if a subfolder with images
            could not be learnt.
        learning: as for `learn`.
        """
        for word, value in {"settle": settle, "every": every}.items():
            if not 0 <= value <= MAX_SECONDS:
                raise UserError(f"{word} must be a number of seconds from 0 to {MAX_SECONDS:g}, not {value:g}")
        folder = Path(folder)
        looked: dict[Path, str] = {}
        refused: set[Path] = set()
        check_watched(folder)
        check_new(self.folder)
        if not once and not subfolders(folder):
            info(f"{folder} has no subfolders yet; each that comes is learnt as a task")
        if self.exists and not has_finished(self.folder):
            yield self._one_of_many(None, folder, learning)
        while True:
            if new := next_new(self.folder, folder, settle, time.time(), [*looked.values()]):
                path, look = new
                count, looked[path] = len(arrivals(self.folder)), look
                refused.discard(path)
                try:
                    results = self._one_of_many(path, folder, {**learning, "new_only": not learning.get("again")})
                    note_look(self.folder, look)
                except UserError as error:
                    if self.exists and not has_finished(self.folder):  # not for what the folder holds
                        raise
                    warn(f"{path} is left out: {error}")
                    refused.add(path)
                else:
                    if len(arrivals(self.folder)) > count:
                        yield results
            elif once:
                if refused:
                    names = ", ".join(sorted(path.name for path in refused))
                    raise UserError(f"{len(refused)} left out: {names}; repair, or move out of {folder}")
                return
            else:
                time.sleep(every)

    def _one_of_many(self, source: Path | None, folder: Path, learning: Mapping[str, Any]) -> dict[str, Any]:
        advice = f"`ptlf learn {quoted(self.folder)} --watch {quoted(folder)}` continues from here"
        try:
            results = self.learn(source, **learning)
        except Stopped as stopped:
            raise Stopped(self.folder, stopped.number, advice, stopped.lost) from None
        if self.run is not None and self.run.stop_signal:
            raise Stopped(self.folder, self.run.stop_signal, advice)
        return results

    def evaluate(
        self,
        probes: Sequence[str] | Path | None = None,
        labelled: Path | str | None = None,
        *,
        on_error: OnError = "refuse",
        **settings: Any,
    ) -> dict[str, Any]:
        """The probes' rows on the encoder as it is now, by name: `settings`, `matrix` (one row), `accuracy`,
        and `untrained`, the row of the encoder before training.

        probes: which; default: those of the run. A path stands for `labelled`.
        settings: of `probes` and `evaluation`, `device` and `data_root`.
        labelled: test on these images, a packed set or a folder per class, in place of the run's own.
        on_error: for broken images among them, "refuse" or "skip".
        """
        if isinstance(probes, Path) or (isinstance(probes, str) and probes not in PROBES):
            probes, labelled = None, probes
        chosen = [probes] if isinstance(probes, str) else probes
        given = nest_settings(settings)
        if refused := [name for name in flatten(given) if not may_change(name)]:
            raise UserError(f"evaluate changes the probes only; leave out {refused[0]}")
        config = from_dict(merge(Config, as_dict(self.config), given))
        images = str(labelled) if labelled is not None else config.stream.labelled if "stream" in given else None
        return evaluate_run(self.folder, config, chosen, self._start(), images, on_error)[0]

    def embed(self, images: Any, batch: int = 256, as_of: str | None = None) -> np.ndarray:
        """Features (N, dim) float32 of images in any form that `learn` takes, files sorted by path. They are made
        square as the run's own images were. as_of: a task: features like those of the encoder after it."""
        return (self._load(as_of) if as_of else self._loaded()).embed(images, batch)

    def upgrade(self, vectors: np.ndarray, since: str) -> np.ndarray:
        """Features (N, dim) of the encoder after the task `since` as features of today's, by maps."""
        return upgrade_vectors(self.folder, vectors, since)

    def drift(self, images: Any) -> Drift:
        """How new images are to the encoder as it is, in any form that `embed` takes."""
        return drift_of(self._loaded(), self.config, self.folder, images)

    def _repr_html_(self) -> str:
        """The report page, for notebooks."""
        from ptlf.report.page import inline_report  # matplotlib takes a while

        return inline_report(self.folder)

    def _drifts(self, incoming: Pack, level: str) -> bool:
        if len(images := incoming.images("train")) < LEAST:
            info(f"{task_name(incoming)} is not learnt: {len(images)} images are too few to tell whether they are new")
            return False
        return record_decision(self.folder, self.drift(images), incoming.source, task_name(incoming), level)

    def _check_continues(self) -> bool:
        """Whether the run has finished. One that cannot learn another task is refused."""
        check_grows(self.config)
        check_arrived(self.folder)
        saved = Checkpoints(self.folder, self.config.checkpoint)
        saved.check_version()
        finished = has_finished(self.folder)
        if finished and not saved.files():
            raise UserError(f"{self.folder} holds no checkpoint of its last task, and cannot continue without it")
        return finished

    def _pack(self, source: Source, name: str | None, fit: Fit | None, packing: dict[str, Any]) -> Pack:
        """The images of the next task, in size and shape as those of the run."""
        known = make_stream(self.config, self.folder) if self.exists else None
        if known and fit not in (None, known.fit):
            raise UserError(f"the images of {self.folder} were packed with --fit {known.fit}; leave out --fit {fit}")
        size, fit = (known.size, known.fit) if known else (self.size, fit or "crop")
        options = {"root": data_root(self.config.data_root), "default_size": self.config.views.size or 32, **packing}
        return pack_incoming(self.folder, source, name, size, fit=fit, **options)

    def _start(self) -> nn.Module | None:
        """A copy of the module that was given, with the weights that training began with."""
        if self.module is None:
            return None
        start = deepcopy(self.module)
        if self.exists and (self.folder / START).exists():
            restore_encoder(self.folder, start, START)
        return start

    def _train(self, watcher: Watcher, accepted: Pack | None = None) -> Run:
        """What the run has left. accepted: its new task, which is given back if training does not begin."""
        self._encoder = self.run = None
        gc.collect()  # a run is in reference cycles: the last one's memory is needed now
        try:
            self.run = run = Run(self.config, self.folder, encoder=self._start())
            if self.module is not None and not self.exists and run.components.weights is None:
                save_encoder(self.folder, self.module, START)
            run.train(watcher, resume=True, claim=False)
            if self.module is not None:
                run.judge(self._start)
        except BaseException:
            if accepted is not None and not (self.run and self.run.begun):
                shutil.rmtree(accepted.path)
            raise
        return run

    def _loaded(self) -> LoadedEncoder:
        self._encoder = self._encoder or self._load()
        return self._encoder

    def _load(self, as_of: str | None = None) -> LoadedEncoder:
        return load_encoder(self.folder, self._start(), self.config.device, trust_code=True, as_of=as_of)
