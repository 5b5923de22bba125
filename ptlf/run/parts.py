"""All that a run is made of, built from its settings and checked, before anything is trained or written."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.randomness import Randomness, derived_seed
from ptlf.core.words import short_repr
from ptlf.encoders import ENCODERS
from ptlf.evaluation import Gallery, Prober
from ptlf.run import build
from ptlf.run.config import Config
from ptlf.run.start import find_given, make_reference, starting_encoder
from ptlf.stream import Stream
from ptlf.stream.images import open_images
from ptlf.stream.loading import Sources
from ptlf.training.ahead import compile_ahead
from ptlf.training.distributed import make_alike
from ptlf.training.trainer import Trainer
from ptlf.views import normalise


class Parts:
    """Where several processes share the run, every one of them builds the same parts; the first one writes."""

    trains = False  # whether steps will follow

    def __init__(
        self,
        config: Config,
        out: Path | str | None = None,
        encoder: nn.Module | None = None,
        stream: Stream | None = None,
    ) -> None:
        """`encoder` and `stream` take the place of those the configuration names."""
        own = ENCODERS.names_code(config.encoder.name) or config.encoder.name.startswith("hf:")
        self.own_encoder = encoder is not None or own  # which may come with weights
        self.config, self.folder = config, Path(out) if out else None
        self.encoder_given = encoder is not None
        self.out = self.folder if processes.is_first() else None  # where this process writes
        self.stream = build.checked_stream(config, self.folder, stream)
        self.device = processes.local_device(build.choose_device(config.device))
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # streams, graphs and Triton kernels use the current device
        self.random = Randomness(config.seed)
        self.view_size = config.views.size or self.stream.size
        sources = Sources(self.device, config.stream.resident)
        tests = config.evaluation
        self.prober = self.gallery = None
        if tests.enabled and self.stream.untested:
            names = short_repr(list(self.stream.untested))
            processes.warn(
                f"ptlf: warning: there are no test images of {names}: these tasks are learnt, but not tested"
            )
        if tests.enabled and self.stream.eval_splits:
            self.prober = Prober(self.stream, tests, config.probes, self.prepare, self.device, sources)
        self.reference = make_reference(config, self.stream, self.prepare, self.device)
        if config.memory.images and not (self.folder and (self.folder / "config.yaml").exists()):
            open_images(find_given(config, config.memory.images))  # a run that goes on has them in its memory
        if tests.enabled and tests.gallery and self.out:
            seed = derived_seed(config.seed, "gallery")
            self.gallery = Gallery(self.stream, self.prepare, self.device, config=tests, seed=seed)
        encoder, self.weights = starting_encoder(config, encoder, self.folder, self.view_size)
        self.model = build.make_model(config, self.stream, self.view_size, self.device, encoder)
        self.view_specs = build.views_for(self.model.encoder, config.views.name, self.view_size)
        build.check_memory(config, self.model.encoder, len(self.view_specs), self.view_size, self.device)
        self.channels_last = build.default_on_gpu(config.training.channels_last, self.device)
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        method = build.make_method(config, self.stream, self.model, self.view_size, self.random["method"])
        self.method = method.to(self.device)
        make_alike([self.model, self.method], config.distributed)
        parameters = [*self.model.parameters(), *self.method.parameters()]
        optimizer = build.make_optimizer(config.training, [p for p in parameters if p.requires_grad])
        self.trainer = Trainer(
            self.model,
            self.method,
            optimizer,
            sources,
            self.stream.tasks[0].images,
            self.view_specs,
            self.view_size,
            config.training,
            self.random,
            self.device,
            self.channels_last,
        )
        if self.trains:
            compile_ahead(self.trainer, len(self.stream.tasks[0].train))
        self.freezing = build.make_freezing(config, self.trainer, self.random["policy"], len(self.stream.tasks))

    def prepare(self, images: Tensor) -> Tensor:
        """Stored images (B, H, W, 3) uint8 as the encoder's input, without augmentation."""
        view = self.view_specs[0]
        x = normalise(images, view.mean, view.std, self.view_size)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x
