"""One task: epochs of steps over its images. `Trainer.step` is the whole of training, read from top to bottom."""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.batch import Batch
from ptlf.core.errors import UserError
from ptlf.core.phases import Phase, silent
from ptlf.core.randomness import Randomness, derived_seed
from ptlf.core.reading import recordable
from ptlf.core.settings import key, section
from ptlf.freezing.cost import backward_flops, kept_bytes
from ptlf.freezing.recording import unchanged
from ptlf.kernels import can_fuse, folded_tensors, module_variant
from ptlf.methods import Method
from ptlf.model import Model
from ptlf.objectives.objective import Teacher
from ptlf.stream import Images
from ptlf.stream.loading import ImageSource, Sources
from ptlf.training.arithmetic import Arithmetic
from ptlf.training.cost import peak_memory_bytes, reset_peak_memory
from ptlf.training.distributed import average_statistics
from ptlf.training.engine import ENGINES, Addresses, CapturedEngine, Engine, choose_engine
from ptlf.training.kept_views import KeptViews
from ptlf.training.optimizers import OPTIMIZERS, OptimizerConfig, prepare_state
from ptlf.views import View, draw, make_views


@dataclass
class TrainingConfig:
    lr: float = key(0.03, "learning rate for a batch of 256; scaled with the batch", gt=0)
    head_lr: float | None = key(None, "the same for the heads, all but the encoder; null = lr", gt=0)
    schedule: str = key("constant", "learning rate over a task's epochs", choices=("constant", "cosine"))
    warmup: int = key(0, "epochs of linear warm-up at the start of each task", ge=0)
    warmup_start: float | None = key(None, "rate of the first warm-up epoch, by epoch; null = by step from 0", gt=0)
    batch: int = key(256, "images per step, of all processes (each gives two views)", ge=2)
    optimizer: OptimizerConfig = section(OptimizerConfig, family=OPTIMIZERS)
    epochs: int = key(200, "passes over each task's images", ge=1)
    keep_views: int = key(0, "views per image kept behind a frozen prefix (CPU); 0 = new ones in every step", ge=0)
    clip: float | None = key(None, "greatest norm of a step's gradient, of all parameters; null = any", gt=0)
    last_batch: str = key("use", "what to do with an epoch's last, smaller batch", choices=("use", "drop"))
    precision: str = key(
        "auto",
        "encoder's arithmetic; auto = bf16 if the GPU can; on a CPU, what is fastest",
        choices=("auto", "fp32", "bf16"),
    )
    channels_last: bool | None = key(
        None, "memory layout of images and convolutions; null = on a GPU, and where `auto` finds it faster"
    )
    engine: str = key("auto", "how the step is run; auto = captured on a GPU, else eager", choices=ENGINES)


@dataclass
class EpochState:
    """Progress of an epoch, and what is needed to resume it."""

    order: Tensor  # state of the generator that shuffles, before it did
    steps: int = 0
    views: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)  # (steps of the epoch,) each, on the device

    def add(self, losses: dict[str, Tensor], views: int, of: int) -> None:
        """Record a step's losses; the epoch has `of` steps. Values are copied: replays write to the same tensors."""
        for name, loss in losses.items():
            if name not in self.losses:
                self.losses[name] = torch.zeros(of, device=loss.device)
            self.losses[name][self.steps] = loss
        self.steps, self.views = self.steps + 1, self.views + views

    def resize(self, of: int) -> None:
        """Resize to `of` steps: with another number of processes the epoch may have had one more or less."""
        for name, values in self.losses.items():
            self.losses[name] = torch.cat([values, values.new_zeros(of)])[:of]

    def mean_losses(self) -> dict[str, float]:
        """Waits for the device."""
        return {name: float(values.double().sum()) / self.steps for name, values in self.losses.items()}

    def first_bad(self) -> tuple[int, float] | None:
        """The first step (from 0) with a loss that no record may hold, and that loss. Waits for the device."""
        steps = enumerate(zip(*(values.tolist() for values in self.losses.values()), strict=True))
        bad = ((step, value) for step, values in steps for value in values if not recordable(value))
        return next(bad, None)


@dataclass(frozen=True)
class MeasuredStep:
    kept_bytes: int  # like every field a column of the epochs' lines, where the FLOPs are those of all views
    backward_flops_per_view: float
    peak_memory_bytes: int | None  # of forward and backward, uncaptured: a captured graph's memory is not counted


@dataclass
class Trainer:
    model: Model
    method: Method
    optimizer: torch.optim.Optimizer
    sources: Sources
    images: Images  # of the task that is trained; all indices are theirs
    view_specs: tuple[View, ...]
    view_size: int
    config: TrainingConfig
    random: Randomness
    device: torch.device
    arithmetic: Arithmetic

    def __post_init__(self) -> None:
        self.engine_kind = choose_engine(self.config.engine, self.device)
        self.engine = Engine(self.body, self.device)
        if self.engine_kind == "captured":
            self.engine = CapturedEngine(self.body, self.device, processes.share(self.config.batch))
        self.sampled: Sequence[Tensor] | None = None  # weights to compute gradients of; None while training
        self.update_rule = OPTIMIZERS.find(self.config.optimizer.name)
        self.kept: KeptViews | None = None
        self.kept_state: dict[Tensor, dict[str, Tensor]] = {}  # of every parameter that ever trained, see prepare_state
        self.rebuilds = 0
        self.variant, self.addresses = "", Addresses()  # the key of the step's operations, and where its tensors are
        self.sent: dict[str, int] = {}  # bytes of gradients that a step exchanges, by variant

    @property
    def source(self) -> ImageSource:
        return self.sources(self.images)

    def body(self, batch: Batch) -> dict[str, Tensor]:
        return self.step(batch) if self.sampled is None else self.gradients(batch, self.sampled)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        batch.views = self.views(batch)
        batch.mixed = self.method.mix(batch)
        losses = self.method.losses(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        total(losses).backward()
        if processes.joined():
            self.sent[self.variant] = average_gradients(self.trained())
        if self.config.clip is not None:  # without waiting for the device
            nn.utils.clip_grad_norm_(self.trained(), self.config.clip, foreach=True)
        self.method.after_backward(self.model, self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.model.objective.after_step(self.model.encoder, batch)
        self.method.remember(self.model, batch)
        values = {name: loss.detach() for name, loss in losses.items()}
        if processes.joined():
            average_statistics(self.model, self.method)
            values = {name: value.clone() for name, value in values.items()}
            processes.all_reduce_mean_(values.values())
        return values

    def trained(self) -> list[Tensor]:
        """The optimizer's parameters, frozen or not."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def sent_bytes(self) -> int:
        """Bytes of gradients that a step with the current frozen set exchanges with other processes."""
        if not processes.joined():
            return 0
        trained = sum(p.nbytes for p in self.trained() if p.requires_grad)  # after a resume no step may have run yet
        return self.sent.get(self.variant, trained)

    def new_epoch_state(self) -> EpochState:
        return EpochState(self.random["order"].get_state())

    def epoch(self, indices: np.ndarray, epoch: int, state: EpochState) -> Generator[None]:
        """One pass over the images with these indices, or the rest of one. Yields after every step."""
        self.model.train()
        self.random["order"].set_state(state.order)
        shuffled = torch.from_numpy(indices)[torch.randperm(len(indices), generator=self.random["order"])]
        order = [part[: self.usable(len(part))] for part in shuffled.split(self.config.batch)]
        order = [part for part in order if len(part)]
        state.resize(len(order))
        order, steps = order[state.steps :], len(order)
        with self.source.batches([chosen[processes.shard(len(chosen))] for chosen in order]) as loaded:
            for chosen, images in zip(order, loaded, strict=True):
                set_rate(self.optimizer, learning_rate(self.config, epoch + state.steps / steps))
                batch = self.load(chosen, self.random["views"], self.method.draw(len(chosen)), images)
                state.add(self.engine(batch), len(chosen) * len(self.view_specs), of=steps)
                yield

    def keep_views(self, indices: np.ndarray, phase: Phase = silent) -> None:
        """Keep the outputs of a frozen prefix that all of a step shares for `training.keep_views` views per image."""
        prefix, sharing = self.model.prefix, len(self.model.sharing) == len(self.teachers())
        if not self.config.keep_views or prefix is None or not sharing or self.method.memory is not None:
            self.kept = None
            return
        key, kinds = (self.method.task, prefix.cut), len(self.view_specs)
        if self.kept is None or self.kept.key != key:
            self.kept = None  # before others are made: memory may not suffice for both
            generator = torch.Generator().manual_seed(derived_seed(self.random.seed, f"kept views {self.method.task}"))

            def encode(chosen: Tensor, view: int) -> Tensor:
                uniforms = draw(len(chosen), generator, 1)
                spec = (self.view_specs[view % kinds],)
                (made,) = make_views(self.source.gather(chosen), uniforms, spec, self.view_size)
                with self.model.autocast(made.device):
                    return prefix(self.in_layout(made))

            self.model.train()
            self.kept = KeptViews.make(key, indices, self.config.keep_views // kinds * kinds, encode, phase)
        self.model.begins_behind_prefix = True

    def teachers(self) -> list[Teacher]:
        return [teacher for teacher in (self.method.teacher(), self.model.objective.teacher) if teacher]

    def views(self, batch: Batch) -> list[Tensor]:
        if self.kept is not None and self.model.begins_behind_prefix:
            assert batch.indices is not None
            return self.kept.pick(batch.indices, batch.uniforms[:, :, 0])
        augment, at_once = self.model.accelerator.augment, self.engine_kind != "eager"
        views = make_views(batch.images, batch.uniforms, self.view_specs, self.view_size, augment, at_once=at_once)
        return [self.in_layout(view) for view in views]

    def in_layout(self, view: Tensor) -> Tensor:
        return view.contiguous(memory_format=torch.channels_last) if self.arithmetic.channels_last else view

    def rebuild(self) -> None:
        """The step's operations changed (a freeze, a thaw, a new task)."""
        self.optimizer.zero_grad(set_to_none=True)
        self.rebuilds += 1
        kept = self.kept_state if self.engine_kind == "captured" else {}
        complete = prepare_state(self.update_rule, self.optimizer, kept)
        self.variant = f"{self.method.graph_key()} {module_variant(self.model)} {module_variant(self.method)}"
        self.addresses = tuple(tensor.data_ptr() for tensor in self.held())
        if not complete:  # the first step creates state: it must run uncaptured, and no earlier graph may be replayed
            self.addresses += (self.rebuilds,)
        self.engine.rebuild(self.variant, self.addresses)
        if self.engine_kind == "eager":
            view = torch.randn(2, 3, self.view_size, self.view_size, generator=torch.Generator().manual_seed(0))
            keep = self.config.keep_views > 0
            self.model.share_prefix(self.teachers(), self.in_layout(view.to(next(self.model.parameters()))), keep)

    def held(self) -> list[Tensor]:
        """All that a step reads or writes besides its batch."""
        tensors = [*tensors_of(self.model), *tensors_of(self.method), *folded_tensors(self.model)]
        for group in self.optimizer.param_groups:
            states = [self.optimizer.state.get(parameter, {}) for parameter in group["params"]]
            found = [group["lr"], *(value for state in states for value in state.values())]
            tensors += [value for value in found if isinstance(value, Tensor)]
        return tensors

    def load(
        self, chosen: Tensor, generator: torch.Generator, draws: Mapping[str, Tensor], images: Tensor | None = None
    ) -> Batch:
        """The images with these indices on the device, labels and randomness on the host: this process's share."""
        mine = processes.shard(len(chosen))
        images = self.source.gather(chosen[mine]) if images is None else images
        uniforms = draw(len(chosen), generator, len(self.view_specs))[:, mine]
        shared = {name: value[mine] if value.ndim else value for name, value in draws.items()}
        return Batch(images, self.source.labels[chosen[mine]], uniforms, shared, indices=chosen[mine])

    def usable(self, images: int) -> int:
        """How many of a batch's images are trained on: equal shares. One image per process has no batch statistics."""
        if images == self.config.batch:
            return images
        each = images // processes.world_size()
        return each * processes.world_size() if self.config.last_batch == "use" and each > 1 else 0

    def steps_per_epoch(self, indices: np.ndarray) -> int:
        full, rest = divmod(len(indices), self.config.batch)
        return full + (self.usable(rest) > 0)

    def cost_of_step(self, indices: np.ndarray) -> MeasuredStep:
        """Of a step with the current frozen set, without what is there anyway and without teachers. Changes nothing."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        chosen, losses = torch.from_numpy(indices[: self.config.batch]), list[Tensor]()
        with self.method.rehearsal(), unchanged(self.model, self.method), self.engine.arithmetic():
            batch = self.load(chosen, torch.Generator().manual_seed(0), self.method.draw(len(chosen))).to(self.device)
            batch.views = self.views(batch)
            batch.mixed = self.method.mix(batch)
            reset_peak_memory(self.device)
            kept = kept_bytes(lambda: losses.append(total(self.method.losses(self.model, batch))), exclude=self.held())
            flops = backward_flops(losses.pop())
            peak = peak_memory_bytes(self.device)
            if peak is not None:  # without what the rehearsal itself keeps, to put things back
                peak -= sum(tensor.nbytes for tensor in {*tensors_of(self.model), *tensors_of(self.method)})
        self.optimizer.zero_grad(set_to_none=True)
        return MeasuredStep(kept, flops / (len(batch) * len(batch.views)), peak)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, the engine runs `gradients`, for `sample_gradients`, and not the step."""
        self.sampled = []
        self.model.train()
        addresses = tuple(tensor.data_ptr() for tensor in tensors_of(self.model))
        self.engine.rebuild(f"gradients {module_variant(self.model)}", addresses)
        try:
            yield
        finally:
            self.engine.rebuild(self.variant, self.addresses)
            self.sampled = None

    def sample_gradients(
        self, indices: np.ndarray, generator: torch.Generator, weights: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Of the objective on a random batch of these images, unmixed; None for a weight that has no part in it."""
        self.sampled = weights
        chosen = torch.from_numpy(indices)[torch.randperm(len(indices), generator=generator)[: self.config.batch]]
        batch = self.load(chosen, generator, {})
        # The weights of other encoders may be computed from others: they run uncaptured.
        found = self.engine(batch) if can_fuse(self.model.encoder) else self.body(batch.to(self.device))
        return [found.get(str(number)) for number in range(len(weights))]

    def gradients(self, batch: Batch, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """By the weight's number."""
        batch.views = batch.mixed = self.views(batch)
        loss = self.model.loss(self.model.encode(batch.mixed), batch)
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        return {str(number): gradient for number, gradient in enumerate(found) if gradient is not None}


def average_gradients(parameters: Sequence[Tensor]) -> int:
    """Average them over the processes, with one all-reduce. Returns how many bytes that exchanges."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    processes.all_reduce_mean_(gradients)
    return sum(gradient.nbytes for gradient in gradients)


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def total(losses: dict[str, Tensor]) -> Tensor:
    for name, loss in losses.items():
        if loss.ndim:
            raise UserError(f"the loss {name!r} has the shape {tuple(loss.shape)}; return a number, such as the mean")
    return torch.stack(list(losses.values())).sum()


def learning_rate(config: TrainingConfig, epoch: float) -> float:
    """The rate at a (fractional) epoch of a task: linear warm-up, then constant or half a cosine down to zero."""
    peak = config.lr * config.batch / 256
    if epoch < config.warmup:
        if (start := config.warmup_start) is not None:  # the last epoch of warm-up has the full rate
            return start + (peak - start) * int(epoch) / max(1, config.warmup - 1)
        return peak * epoch / config.warmup
    if config.schedule == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (epoch - config.warmup) / max(1, config.epochs - config.warmup)))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """In place where the rate is a tensor: a captured step reads the one it saw."""
    for group in optimizer.param_groups:
        scaled, lr = rate * group.get("scale", 1.0), group["lr"]
        group["lr"] = lr.fill_(scaled) if isinstance(lr, Tensor) else scaled


def check_batch(config: TrainingConfig, sizes: list[int], arrived: int = 0) -> None:
    """sizes: images of each task. The last `arrived` of them came later, and may be smaller than a batch."""
    count, batch = processes.world_size(), config.batch
    if batch % count or batch < 2 * count:
        advice = f"choose a multiple of {count}, at least {2 * count}"
        raise UserError(f"training.batch is {batch}, the images of one step of all {count} processes; {advice}")
    for number, size in enumerate(sizes, start=1):
        if size < 2 * count:
            raise UserError(f"task {number} has {size} image{'s' * (size != 1)}; a batch needs at least {2 * count}")
    known = sizes[: len(sizes) - arrived] if config.last_batch == "use" else sizes
    for number, size in enumerate(known, start=1):
        if batch > size:
            problem = f"training.batch is {batch}, but task {number} has only {size} images"
            raise UserError(f"{problem}; choose a batch of at most {min(sizes)}")
