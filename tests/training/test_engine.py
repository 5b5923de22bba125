import copy
import dataclasses
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import StopsAt
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptlf.core import processes
from ptlf.core.batch import Batch
from ptlf.core.errors import UserError
from ptlf.encoders.norm import takes_views_in_one_pass
from ptlf.encoders.resnet import BasicBlock, ResNet
from ptlf.freezing import Freezer, correlation
from ptlf.kernels import FastParts, module_variant, parts
from ptlf.methods import METHODS, Method
from ptlf.model import PLAIN, Accelerator, Model
from ptlf.objectives import OBJECTIVES, Objective, ObjectiveConfig
from ptlf.run import build
from ptlf.run.loop import Run
from ptlf.run.results import epoch_lines
from ptlf.training import arithmetic, engine
from ptlf.training.optimizers import OPTIMIZERS
from ptlf.training.process import Stopped
from ptlf.training.trainer import total
from ptlf.views import UNIFORMS_PER_VIEW, named_views

CPU = torch.device("cpu")
FROZEN = ("stem.conv", "stages.0.0.conv2", "stages.1.0.shortcut.0")


def small() -> ResNet:
    torch.manual_seed(0)
    return ResNet(BasicBlock, (1, 1), width=8).double()


class OnePass(Accelerator):
    def takes_views_in_one_pass(self, encoder: nn.Module) -> bool:
        return True


def model_of(encoder: nn.Module, accelerator: Accelerator = PLAIN) -> Model:
    return Model(encoder, Objective(ObjectiveConfig(), encoder, 16, 0), accelerator=accelerator)


def gradients(encoder: nn.Module, views: list[torch.Tensor], accelerator=PLAIN) -> list[torch.Tensor]:
    encoder.zero_grad()
    first, second = model_of(encoder, accelerator).encode(views)
    (first.square().sum() + (first * second).sum() + second.sin().sum()).backward()
    return [p.grad.clone() for p in encoder.parameters() if p.grad is not None]


@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_one_pass_equals_two(frozen: tuple[str, ...]) -> None:
    """Features, gradients and running statistics, with every view's own batch statistics."""
    one, two = small(), small()
    views = list(torch.randn(2, 6, 3, 8, 8, dtype=torch.float64))
    views[1] = 3 * views[1] + 1  # so that sharing statistics would show
    for encoder in (one, two):
        Freezer(encoder, example=views[0]).freeze(frozen)
    features = [model_of(one, OnePass()).encode(views), model_of(two).encode(views)]
    torch.testing.assert_close(features[0], features[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients(one, views, OnePass()), gradients(two, views), rtol=0, atol=1e-5)
    for (name, a), b in zip(one.named_buffers(), two.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)
    assert all(m.views == 1 for m in one.modules() if hasattr(m, "views"))
    assert takes_views_in_one_pass(small())
    assert not takes_views_in_one_pass(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    assert not takes_views_in_one_pass(nn.Sequential(nn.Conv2d(3, 4, 3)))  # who knows what else it has


@pytest.fixture
def light_compiler(monkeypatch):
    """Traces and splits like the real compiler, and leaves out the slow code generation."""
    monkeypatch.setattr(parts, "BACKEND", "aot_eager")
    parts.compile_part.cache_clear()
    torch._dynamo.reset()
    yield
    parts.compile_part.cache_clear()
    torch._dynamo.reset()


def test_only_full_batches_are_compiled(monkeypatch) -> None:
    called = []

    def noting(function):
        return lambda module, *given: called.append(function.__name__) or function(module, *given)

    monkeypatch.setattr(parts, "compile_part", noting)
    encoder, fast_parts = small(), FastParts(4, CPU)
    images, uniforms = torch.zeros(8, 8, 8, 3, dtype=torch.uint8), torch.rand(8, UNIFORMS_PER_VIEW)
    view = named_views("memory", 8)[0]
    for rows, expected in ((3, 0), (4, 1)):  # 3: an epoch's smaller last batch
        gradients(encoder, list(torch.randn(2, rows, 3, 8, 8, dtype=torch.float64)), fast_parts)
        assert called == ["call_module"] * len(encoder.stages) * expected
        called.clear()
        assert fast_parts.augment(images[:rows], uniforms[:rows], view, 8).shape == (rows, 3, 8, 8)
        assert called == ["apply_view"] * expected
        called.clear()
    encoder.eval()(torch.randn(8, 3, 8, 8, dtype=torch.float64))
    assert called == []


def test_running_out_of_variants_is_an_error(light_compiler, monkeypatch) -> None:
    encoder, fast_parts = small(), FastParts(4, CPU)
    monkeypatch.setitem(parts.DYNAMO, "recompile_limit", 1)
    with pytest.raises(Exception, match="recompile_limit"):
        for size in (8, 10, 12):
            fast_parts.encode(encoder, torch.randn(4, 3, size, size, dtype=torch.float64))


@pytest.mark.slow
def test_a_compiled_run_is_like_an_eager_one(light_compiler, tiny) -> None:
    settings = {"encoder__name": "conftest:tiny_resnet", "training__batch": 64, "training__lr": 0.01}
    settings |= {"freezing__final": 0.34, "stream__per_class": 64}
    runs = [Run(tiny("digits/simsiam/ptlf", **settings, training__engine=kind)) for kind in ("eager", "compiled")]
    eager, compiled = [run.train() for run in runs]
    assert compiled["environment"]["engine"] == "compiled"
    for a, b in zip(epoch_lines(eager), epoch_lines(compiled), strict=True):
        assert a["loss"]["ssl"] == pytest.approx(b["loss"]["ssl"], abs=2e-3)
        assert a["backward_flops"] == b["backward_flops"]
    assert [entry["order"] for entry in eager["freezing"]] == [entry["order"] for entry in compiled["freezing"]]


@pytest.mark.slow
def test_what_is_compiled_does_not_keep_the_run(light_compiler, tiny) -> None:
    run = Run(tiny("digits/byol/cassle", training__epochs=1, training__engine="compiled"))
    run.train()
    parameters = [weakref.ref(p) for p in run.model.parameters()]
    del run
    gc.collect()
    assert [p() for p in parameters] == [None] * len(parameters)


class Blocks(nn.Module):
    """Three alike blocks between other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 2, stride=2), nn.Linear(6, 5)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)))

    def forward(self, images):
        return self.last(self.blocks(self.first(images).flatten(2).mT.contiguous()).mean(1))


def test_repeated_blocks_are_compiled_once_for_all(light_compiler) -> None:
    torch.manual_seed(0)
    plain = Blocks().double()
    fast, views = copy.deepcopy(plain), list(torch.randn(2, 4, 3, 8, 8, dtype=torch.float64))
    blocks = parts.repeated_blocks(fast)
    assert blocks == list(fast.blocks)
    fast_parts = FastParts(4, CPU)
    freezers = [Freezer(encoder, example=views[0]) for encoder in (plain, fast)]
    names = [unit.name for unit in freezers[0].units]
    made = []
    for frozen in ((), names[1:2], names[2:3], names[:2], names[:3]):
        for freezer in freezers:
            freezer.thaw()
            freezer.freeze(frozen)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch.testing.assert_close(gradients(fast, views, fast_parts), gradients(plain, views), rtol=0, atol=1e-10)
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    # A trained block; a frozen one with a gradient through it; nothing for the next block; one that no gradient enters.
    assert made[:3] == [1, 1, 0] and made[4] <= 1
    assert all(block._compiled_call_impl is None for block in blocks)


def test_compiled_blocks_keep_their_hooks_or_name_the_way_out(light_compiler) -> None:
    torch.manual_seed(0)
    encoder, images = Blocks().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    FastParts(4, CPU).encode(encoder, images)  # the code of blocks without hooks is there
    encoder.blocks[0].register_forward_hook(lambda block, given, made: made + 1)
    encoder.blocks[1].register_forward_pre_hook(lambda block, given: (2 * given[0],))
    encoder.blocks[2].compile(backend="eager")
    own = encoder.blocks[2]._compiled_call_impl
    fast_parts = FastParts(4, CPU)
    torch.testing.assert_close(fast_parts.encode(encoder, images), encoder(images), rtol=0, atol=1e-12)
    assert [block._compiled_call_impl for block in encoder.blocks] == [None, None, own]
    whole = nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).double()
    whole.register_forward_hook(lambda module, given, made: 3 * made)
    assert not parts.repeated_blocks(whole)
    torch.testing.assert_close(fast_parts.encode(whole, images), whole(images), rtol=0, atol=1e-12)

    class Branches(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x

    encoder = nn.Sequential(nn.Flatten(), *(Branches(nn.Linear(12, 12)) for _ in range(2)))
    with pytest.raises(UserError, match=r"Branches cannot be compiled .*; use --training.engine eager"):
        FastParts(4, CPU).encode(encoder, torch.randn(4, 3, 2, 2))
    assert all(block._compiled_call_impl is None for block in encoder[1:])


def choose(precision: str, device: torch.device, **also) -> tuple[torch.dtype, bool]:
    made = arithmetic.choose_arithmetic(precision, None, device, nn.Conv2d(3, 4, 3), 16, 8, **also)
    return made.dtype, made.channels_last


def seconds_of(slow: dict[tuple[bool, bool], float]):
    """In place of `pass_seconds`."""
    return lambda encoder, bf16, channels_last, images, size: slow[bf16, channels_last]


FAST = {(False, False): 1.0, (False, True): 0.95, (True, True): 0.5}


@pytest.mark.parametrize(
    ("seconds", "bf16", "wanted", "expected"),
    [
        (FAST, True, None, (True, True)),
        (FAST, False, None, (False, False)),  # in place of emulated bf16: a gain of 5 % is not told from chance
        ({**FAST, (True, True): 5.0}, True, None, (False, False)),
        ({**FAST, (False, True): 0.6}, False, None, (False, True)),
        (FAST, True, False, (False, False)),
    ],
)
def test_a_cpu_gets_what_it_is_fastest_with(tiny, monkeypatch, seconds, bf16: bool, wanted, expected) -> None:
    """The record says what was timed, and a resumed run keeps what it had."""
    monkeypatch.setattr(arithmetic, "MIN_FLOPS", 0)
    monkeypatch.setattr(arithmetic, "has_bf16", lambda: bf16)
    monkeypatch.setattr(arithmetic, "pass_seconds", seconds_of(seconds))
    encoder, random = nn.Conv2d(3, 4, 3), torch.get_rng_state()
    made = arithmetic.choose_arithmetic("auto", wanted, CPU, encoder, 16, 8)
    assert (made.bf16, made.channels_last) == expected
    assert torch.equal(torch.get_rng_state(), random) and encoder.weight.grad is None
    assert bool(str(made)) == any(expected)
    there = {"device": "cpu", **made.record()}
    monkeypatch.setattr(arithmetic, "fastest", lambda *_: pytest.fail("timed again"))
    assert arithmetic.choose_arithmetic("auto", wanted, CPU, encoder, 16, 8, there) == made


def test_a_resumed_run_keeps_its_arithmetic(tiny, monkeypatch, tmp_path) -> None:
    config = tiny("digits/simsiam/lump", training__epochs=2, evaluation__enabled=False)
    monkeypatch.setattr(arithmetic, "MIN_FLOPS", 0)
    monkeypatch.setattr(arithmetic, "has_bf16", lambda: True)
    monkeypatch.setattr(arithmetic, "pass_seconds", seconds_of(FAST))
    whole, folder = Run(config).train(), tmp_path / "run"
    assert whole["environment"]["precision"] == "bf16" and whole["environment"]["channels_last"]
    assert whole["environment"]["time of bf16, channels last"] == 0.5
    with pytest.raises(Stopped):
        Run(config, folder).train(StopsAt(8))
    monkeypatch.setattr(arithmetic, "pass_seconds", seconds_of({**FAST, (True, True): 5.0}))  # another would be chosen
    resumed = Run(config, folder).train(resume=True)
    assert resumed["environment"]["precision"] == "bf16"
    assert [line["loss"] for line in epoch_lines(resumed)] == [line["loss"] for line in epoch_lines(whole)]


def test_an_encoder_that_cannot_be_timed_is_trained_in_float32(monkeypatch) -> None:
    monkeypatch.setattr(arithmetic, "MIN_FLOPS", 0)
    monkeypatch.setattr(arithmetic, "pass_seconds", lambda *_: 1 / 0)
    assert choose("auto", CPU) == (torch.float32, False)


def test_what_auto_means(monkeypatch) -> None:
    """Not where PyTorch would emulate it, as on a T4."""
    gpu = torch.device("cuda")
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        supported = partial(lambda native, including_emulation=True: including_emulation or native, native)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        assert choose("auto", gpu) == (expected, True), native
    assert [choose(wanted, gpu) for wanted in ("fp32", "bf16")] == [(torch.float32, True), (torch.bfloat16, True)]
    assert [choose(wanted, CPU) for wanted in ("fp32", "bf16")] == [(torch.float32, False), (torch.bfloat16, False)]
    assert engine.choose_engine("auto", CPU) == "eager"
    assert engine.choose_engine("compiled", CPU) == "compiled"
    with pytest.raises(UserError, match=r"training\.engine is captured, but that needs a GPU; use eager or auto"):
        engine.choose_engine("captured", CPU)
    for joined, triton, nccl, why in (
        (False, True, False, None),
        (False, False, True, "there is no Triton compiler for this GPU"),
        (True, True, True, None),
        (True, True, False, "this PyTorch has no NCCL, which captured steps of several processes need"),
    ):
        monkeypatch.setattr(engine, "has_triton", lambda there=triton: there)
        monkeypatch.setattr(processes, "_joined", joined)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda there=nccl: there)
        assert engine.why_not_captured(gpu) == why
        assert engine.choose_engine("auto", gpu) == ("eager" if why else "captured"), why
        assert engine.choose_engine("eager", gpu) == "eager"
    with pytest.raises(UserError, match="captured, but this PyTorch has no NCCL"):
        engine.choose_engine("captured", gpu)


def batch_of(size: int, draws: float = 0.0) -> Batch:
    images = torch.zeros(size, 2, 2, 3, dtype=torch.uint8)
    return Batch(images, torch.zeros(size, dtype=torch.int64), torch.rand(2, size, 5), {"lam": torch.tensor(draws)})


def test_a_batch_takes_over_another_in_place() -> None:
    fixed, new = batch_of(3).to(CPU), batch_of(3, draws=0.5)
    new.images += 1
    new.labels += 2
    places = fixed.inputs()
    fixed.fill(new)
    assert len(places) == 4 and all(fixed.inputs()[name] is tensor for name, tensor in places.items())
    torch.testing.assert_close(places, new.inputs(), rtol=0, atol=0)


@pytest.fixture
def recording(monkeypatch):
    """A captured engine that writes down what it would do, for want of a GPU."""
    for name in ("graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    engine.capturing_stream.cache_clear()

    class Recording(engine.CapturedEngine):
        def uncaptured(self, batch):
            did.append("run")
            return {}

        def capture(self, mine, batch):
            did.append("capture")
            mine.batch, mine.graph = batch, SimpleNamespace(replay=lambda: did.append("replay"))

    did: list[str] = []
    monkeypatch.setattr(engine, "is_scarce", lambda device: False)
    made = Recording(lambda batch: {}, CPU, 8)
    made.did = did
    yield made
    engine.capturing_stream.cache_clear()


@pytest.fixture
def steps(recording):
    def steps(variant: str, *sizes: int, addresses: engine.Addresses = ()) -> list[str]:
        recording.rebuild(variant, addresses)
        recording.did.clear()
        for size in sizes:
            recording(batch_of(size))
        return recording.did

    return steps


def test_what_was_captured_before_is_replayed_unless_it_has_moved(steps) -> None:
    assert steps("a", 8, 8, 8, 8, 8) == ["run"] * engine.WARM_UP + ["capture", "replay", "replay"]
    assert steps("b", 8, 8, 8) == ["run", "capture", "replay", "replay"]  # its kernels may not all be there
    assert steps("a", 8, 8) == ["replay", "replay"]
    assert steps("a", 8, 3, 3) == ["replay", "run", "capture", "replay"]  # another size
    assert steps("a", 3, 8) == ["replay", "replay"]
    assert steps("b", 8) == ["replay"]
    steps("c", 8, 8, addresses=(1, 2))
    assert steps("c", 8, addresses=(1, 2)) == ["replay"]
    assert steps("c", 8, 8, addresses=(1, 3)) == ["run", "capture", "replay"]
    assert steps("c", 8, addresses=(1, 3)) == ["replay"]
    assert steps("c", 8, 8, addresses=(1, 2)) == ["run", "capture", "replay"]  # one of a kind is kept


def test_the_graphs_not_used_for_longest_go_first_and_all_where_memory_is_scarce(steps, recording, monkeypatch) -> None:
    monkeypatch.setattr(engine, "KEPT", 2)
    for variant in "aab":
        steps(variant, 8, 8, 8, 8)
    assert steps("a", 8) == ["replay"]
    steps("c", 8, 8)
    assert list(recording.kept) == ["a", "c"] and recording.graphs()
    monkeypatch.setattr(engine, "is_scarce", lambda device: True)
    recording.rebuild("c")
    assert not recording.graphs() and recording.captured == {}


def test_all_graphs_read_one_batch_of_a_layout_and_other_draws_are_an_error(steps, recording) -> None:
    steps("a", 8, 8, 8, 8, 3, 3)
    steps("b", 8, 8, 3, 3)
    graphs = [captured for _, sizes in recording.kept.values() for captured in sizes.values()]
    assert len(graphs) == 4
    assert len({id(captured.batch) for captured in graphs}) == len(recording.batches) == 2
    steps("a", 8, 8, 8, 8)
    for draws in ({"lam": torch.zeros((), dtype=torch.float64)}, {"other": torch.zeros(())}, {}):
        odd = batch_of(8)
        odd.draws = draws
        with pytest.raises(RuntimeError, match="draws other names, shapes or types"):
            recording(odd)


def test_scarce_is_less_than_what_is_held(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 150)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)  # images and weights
    for free, scarce in {99: True, 101: False}.items():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 1000))
        assert engine.is_scarce(torch.device("cuda")) is scarce


def test_the_arithmetic_of_a_step(recording) -> None:
    """Algorithms are tried for full batches, and repeat themselves."""
    cudnn, seen = torch.backends.cudnn, []
    for batch in (batch_of(8), batch_of(3), None):
        with recording.arithmetic(batch):
            seen.append((cudnn.benchmark, torch.get_float32_matmul_precision(), cudnn.deterministic))
    assert seen == [(True, "high", True), (False, "high", True), (True, "high", True)]
    engine.Engine(lambda batch: seen.append(cudnn.deterministic), CPU)(batch_of(8))
    assert seen[-1] is True
    assert not cudnn.benchmark and not cudnn.deterministic


def test_the_new_task_s_gradient_has_the_arithmetic_of_a_step(tiny, monkeypatch) -> None:
    """Its backward too."""
    seen = []

    def noted(*given):
        seen.append(torch.backends.cudnn.deterministic)
        return plain(*given)

    plain = correlation.mean_gradients
    monkeypatch.setattr(correlation, "mean_gradients", noted)
    Run(tiny("digits/simsiam/ptlf", training__epochs=1)).train()
    assert seen == [True]


def test_variants_tell_apart_what_is_frozen_how() -> None:
    encoder, images = small(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    names = {module_variant(encoder)}
    for save_memory in (True, False):
        freezer = Freezer(encoder, example=images, save_memory=save_memory)
        for count in (1, 2, 3):
            freezer.freeze(FROZEN[:count])
            names.add(module_variant(encoder))
        freezer.thaw()
    assert len(names) == 7
    assert module_variant(encoder) in names


class Tape(TorchDispatchMode):
    """What a CUDA graph records, on a CPU: every operation with its very tensors and constants. A replay runs them
    again and nothing else: no line of Python of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert operator is not torch.ops.aten._local_scalar_dense.default, "a captured step cannot ask the device"
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        result = operator(*args, **kwargs)
        made = [tensor for tensor in tensors_in(result) if tensor.numel()]
        fresh = [tensor.untyped_storage().data_ptr() not in given for tensor in made]
        if any(fresh) or operator._schema.is_mutable:  # all else are views
            self.operations.append((operator, args, kwargs, made, fresh))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for operator, args, kwargs, made, fresh in self.operations:
            again = [tensor for tensor in tensors_in(operator(*args, **kwargs)) if tensor.numel()]
            for old, new, is_fresh in zip(made, again, fresh, strict=True):
                if is_fresh:
                    old.detach().copy_(new)

    def reset(self) -> None:
        self.operations.clear()


class TapedEngine(engine.CapturedEngine):
    """A captured engine whose graphs are tapes. `did` has what it did, with the task."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.trainer.body, run.device, run.config.training.batch)
        self.run, self.did, self.sampled = run, [], []

    def note(self, what: str) -> None:
        did = self.did if self.run.trainer.sampled is None else self.sampled
        did.append((self.run.progress.position.task, what))

    def uncaptured(self, batch):
        self.note("run")
        return self.body(batch)

    def capture(self, mine, batch):
        """Without running: what it changes is put back."""
        held = [*self.run.trainer.held(), *batch.inputs().values()]
        before = [tensor.detach().clone() for tensor in held]
        with Tape() as tape:
            mine.losses = self.body(dataclasses.replace(batch))
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=True):
                tensor.detach().copy_(value)
        self.note("capture")
        mine.batch, mine.graph = batch, tape


def optimizer_for_graphs(config, model, method) -> torch.optim.Optimizer:
    """As on a GPU: the rate is a tensor."""
    parameters = [p for p in (*model.parameters(), *method.parameters()) if p.requires_grad]
    return OPTIMIZERS[config.optimizer.name].make(config.optimizer, parameters, torch.tensor(0.1))


PAIRS = [(name, "cassle" if objective.can_distill() else "lump") for name, objective in OBJECTIVES.items()]
PAIRS += [("simsiam", method) for method in METHODS if method != "cassle"]
PAIRS += [("mocov2plus", "pnn"), ("byol", "lump"), ("supervised", "der")]
SMALL = {"stream__groups": [[0, 1], [2, 3], [4, 5]], "stream__per_class": 20, "training__epochs": 2}
SMALL |= {"training__batch": 16, "training__last_batch": "drop"}  # its size is another one in every task
SMALL |= {"memory__size": 24, "evaluation__enabled": False}
HEADS = {"hidden": 16, "projection": 16, "queue": 48}


def small_config(tiny, objective: str, method: str, **settings):
    """Three tasks of two steps per epoch; two of three units freeze in the last epoch, but PNN's."""
    known = OBJECTIVES[objective].Config.__dataclass_fields__
    settings = {f"objective__{key}": value for key, value in HEADS.items() if key in known} | settings
    if method == "pnn":
        settings["encoder__name"] = "conftest:tiny_resnet"
    elif not METHODS[method].joint:
        settings |= {"freezing__policy": "ascending", "freezing__final": 0.67}
    return tiny(f"digits/{objective}/finetune", method__name=method, **{**SMALL, **settings})


def trained_both_ways(config, monkeypatch) -> tuple[Run, Run]:
    """One run with its steps as they are, and one whose steps are recorded and replayed."""
    monkeypatch.setattr(build, "make_optimizer", optimizer_for_graphs)
    plain, taped = Run(config), Run(config)
    for run in (plain, taped):
        run.trainer.engine_kind = "captured"  # the optimizer's state keeps its place
    taped.trainer.engine = TapedEngine(taped)
    for run in (plain, taped):
        run.train()
    return plain, taped


def assert_same_run(one: Run, other: Run) -> None:
    for a, b in zip(one.record.per_epoch, other.record.per_epoch, strict=True):
        assert a["loss"] == b["loss"]
    for mine, theirs in ((one.model, other.model), (one.method, other.method)):
        for (name, a), b in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "method"), PAIRS)
def test_replayed_graphs_train_like_the_step_itself(tiny, recording, monkeypatch, objective: str, method: str) -> None:
    """To the bit, for every objective with every method, with units that freeze and thaw."""
    config = small_config(tiny, objective, method, training__schedule="cosine", training__lr=0.02)
    plain, taped = trained_both_ways(config, monkeypatch)
    assert_same_run(plain, taped)
    # In the third task nothing runs but what was recorded before, unless steps depend on the task's number.
    expected = {0, 1, 2} if METHODS[method].recapture == "every_task" else {0, 1}
    assert {task for task, _ in taped.trainer.engine.did} == ({0} if METHODS[method].joint else expected)


@pytest.mark.parametrize("objective", ["simsiam", "mocov2plus"])
def test_gradients_for_the_ratios_are_replayed(tiny, recording, monkeypatch, objective: str) -> None:
    """Recorded in the second task, they give the third one its ratios, to the bit."""
    settings = {"freezing__policy": "correlation", "freezing__final": 0.67, "encoder__name": "conftest:tiny_resnet"}
    settings |= {"objective__queue": 48} if objective == "mocov2plus" else {}
    config = tiny(f"digits/{objective}/finetune", method__name="lump", **{**SMALL, **settings})
    plain, taped = trained_both_ways(config, monkeypatch)
    assert_same_run(plain, taped)
    ratios = [[entry["ratios"] for entry in run.freezing.log] for run in (plain, taped)]
    assert ratios[0] == ratios[1]
    assert len({*ratios[0][0].values(), *ratios[0][1].values()}) > 4
    assert taped.trainer.engine.sampled == [(1, "run"), (1, "capture")]


KEEP = {"freezing__final": 0.67, "freezing__thaw": "needed"}


OTHER = {name: {"training__optimizer": name, "training__lr": 0.01} for name in ("lars", "adamw")}
OTHER |= {policy: {**KEEP, "freezing__policy": policy} for policy in ("ascending", "correlation")}


@pytest.mark.parametrize("settings", OTHER.values(), ids=OTHER)
def test_replayed_graphs_with_other_settings(tiny, recording, monkeypatch, settings: dict) -> None:
    """With another optimizer, and where a task begins with units frozen."""
    plain, taped = trained_both_ways(small_config(tiny, "simsiam", "lump", **settings), monkeypatch)
    assert_same_run(plain, taped)
    assert plain.freezing.log == taped.freezing.log
    assert len(plain.freezing.log[1]["order"]) == 2


def test_a_loss_that_depends_on_the_task_is_captured_for_every_task(tiny, recording, monkeypatch) -> None:
    class Louder(Method):
        def losses(self, model, batch):
            return {name: (1 + self.task) * loss for name, loss in super().losses(model, batch).items()}

    class Careless(Louder):
        recapture = "never"

    monkeypatch.setitem(METHODS, "finetune", Louder)
    assert_same_run(*trained_both_ways(small_config(tiny, "simsiam", "finetune"), monkeypatch))
    monkeypatch.setitem(METHODS, "finetune", Careless)
    with pytest.raises(AssertionError):  # so that the comparison above could fail
        assert_same_run(*trained_both_ways(small_config(tiny, "simsiam", "finetune"), monkeypatch))


@pytest.mark.gpu
def test_captured_bf16_follows_eager_float32(tiny) -> None:
    """Its loss curve, for 20 epochs with nothing frozen and 20 in which units freeze in a fixed order.

    25 steps stay within 0.005. Later, rounding alone parts any two runs: over all 40 epochs the captured run may lie
    twice as far from eager float32 as eager bf16 does, or as eager float32 that began 1e-6 apart. Four seeds are in
    results/bench/apart-h200.txt.
    """
    settings = {"encoder__name": "resnet18-mini", "training__batch": 64, "training__lr": 0.03, "training__epochs": 20}
    settings |= {"freezing__policy": "ascending", "device": "cuda"}
    eager = {"training__engine": "eager", "training__precision": "fp32"}

    def curve(moved: float = 0.0, engine: str = "eager", **changes: str) -> list[float]:
        run = Run(tiny("digits/simsiam/ptlf", **settings, **changes))
        assert run.trainer.engine_kind == engine
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter += moved * torch.randn(parameter.shape, generator=generator).to(parameter.device)
        return [line["loss"]["ssl"] for line in epoch_lines(run.train())]

    exact = curve(**eager)
    others = [curve(moved=1e-6, **eager), curve(**eager | {"training__precision": "bf16"}), curve(engine="captured")]
    apart = [[abs(a - b) for a, b in zip(exact, other, strict=True)] for other in others]
    *by_rounding, captured = apart
    assert max(captured[:5]) < 0.005
    assert max(captured) < 2 * max(max(distances) for distances in by_rounding)


def tensors_in(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def moved(run: Run, other: Run) -> float:
    """How far apart the weights of two runs end, relative to how far they went from where both began."""
    start = Run(run.config).model.to("cpu").parameters()
    ends = [[p.detach().cpu() for p in each.model.parameters()] for each in (run, other)]
    apart = sum(float((a - b).square().sum()) for a, b in zip(*ends, strict=True))
    went = sum(float((a - p.detach()).square().sum()) for a, p in zip(ends[0], start, strict=True))
    return (apart / went) ** 0.5


@pytest.mark.gpu
@pytest.mark.parametrize(("objective", "method"), PAIRS)
def test_every_objective_and_method_can_be_captured(tiny, objective: str, method: str) -> None:
    """A captured run has the losses of an eager one, and its weights end where that one's do."""
    sensitive = objective == "vicreg" or (objective, method) == ("barlow_twins", "cassle")
    lr = 0.01 if sensitive else 0.05  # at 0.05 their losses end 4 % apart if weights begin 1e-6 apart
    settings = {"method__name": method, "training__epochs": 4, "training__lr": lr, "device": "cuda"}
    settings |= {"stream__groups": [[0, 1], [2, 3], [4, 5]], "training__last_batch": "drop"}
    if method == "pnn":
        settings["encoder__name"] = "resnet18-mini"
    settings["training__precision"] = "fp32"
    kinds = ("eager", "captured")
    runs = [Run(tiny(f"digits/{objective}/finetune", **settings, training__engine=kind)) for kind in kinds]
    eager, captured = [[line["loss"] for line in epoch_lines(run.train())] for run in runs]
    for a, b in zip(eager, captured, strict=True):
        assert a == pytest.approx(b, rel=0.05, abs=0.05)
    assert moved(*runs) < 0.3


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "lars", "adamw", "plugin_members:RMSprop"])
def test_a_set_that_freezes_again_is_replayed_and_right(tiny, optimizer: str) -> None:
    """In the third task every set of frozen units has been captured before: all its steps are replays of those graphs,
    and end with the bits of steps that are captured anew. An optimizer without `first_state` is captured anew."""
    settings = {"encoder__name": "conftest:tiny_resnet", "freezing__policy": "ascending", "training__epochs": 6}
    settings |= {"stream__groups": [[0, 1], [2, 3], [4, 5]], "training__last_batch": "drop", "device": "cuda"}
    settings |= {"training__optimizer": optimizer, "training__lr": 0.1 if optimizer in ("sgd", "lars") else 0.005}
    settings |= {"training__precision": "fp32", "training__engine": "captured"}
    kept, anew = [Run(tiny("digits/simsiam/ptlf", **settings)) for _ in range(2)]
    prepared: list[int] = []

    def noted(plain, *given):
        prepared.append(kept.progress.position.task)
        return plain(*given)

    for name in ("uncaptured", "capture"):
        setattr(kept.trainer.engine, name, partial(noted, getattr(kept.trainer.engine, name)))
    rebuild = anew.trainer.engine.rebuild
    anew.trainer.engine.rebuild = lambda *given: anew.trainer.engine.kept.clear() or rebuild(*given)
    for run in (kept, anew):
        run.train()
    assert {0, 1} <= set(prepared)
    assert (2 in prepared) == (":" in optimizer)
    assert moved(kept, anew) == 0


def test_a_loss_with_a_value_per_image_is_refused() -> None:
    with pytest.raises(UserError, match=r"the loss 'ssl' has the shape \(64,\); return a number"):
        total({"ssl": torch.zeros(64)})
