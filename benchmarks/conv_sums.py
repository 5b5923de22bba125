"""Can cuDNN sum a convolution's output by channel in the convolution's own kernel, and is that faster?

Batch norm in training needs the sum and the sum of squares of every channel. Today a Triton kernel reads the
convolution's output again for them. Here cuDNN's graph API, through the Python package nvidia-cudnn-frontend (module
`cudnn`), fuses them into the convolution: as its `genstats` node, or as two `reduction` nodes. It also takes the norm
before it, relu(x * scale + shift), into the convolution's input. All 3x3, stride 1, channels-last.

    PYTHONPATH=.:UNPACKED_WHEEL python benchmarks/conv_sums.py [--shapes 64:32 128:16] [--seconds 120]

Times are of one call out of 100 in a row in a captured CUDA graph, between two events; the same buffers every time, so
that what fits into the L2 cache (50 MB) stays there. Of every graph the plans of heuristics A, B and FALLBACK are built
and timed, and the fastest is listed. FALLBACK's plans set no knobs: only those of engines not seen yet are built.

With --plans-of FILE nothing runs. It lists the plans for the device that FILE describes, as the JSON of
CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, and needs no GPU.
"""

import argparse
import ctypes
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPEATS = 100
BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", flush=True)


def import_cudnn() -> Any:
    """The frontend, with the libcudnn that torch brings: once it is loaded, the frontend finds it by its name."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    for library in [*packages.glob("cu*/lib/libnvrtc.so.*"), *packages.glob("cudnn/lib/libcudnn.so.9")]:
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            say(f"{library.name} not loaded: {error}")
    import cudnn

    return cudnn


def strides(shape: list[int]) -> list[int]:
    """Of a channels-last tensor."""
    _, channels, height, width = shape
    return [channels * height * width, 1, width * channels, channels]


class Fusion:
    """One graph: an optional norm and ReLU, the convolution, and the sums of its output.

    sums: "" (none), "genstats", or "reductions". norm: relu(x * scale + shift) before the convolution.
    """

    def __init__(
        self,
        cudnn: Any,
        images: int,
        channels: int,
        pixels: int,
        *,
        sums: str,
        norm: bool,
        half: bool = False,
        **device: Any,
    ) -> None:
        kinds = cudnn.data_type
        io, f32 = kinds.HALF if half else kinds.BFLOAT16, kinds.FLOAT
        self.cudnn, self.handle = cudnn, device.get("handle")
        graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=f32, compute_data_type=f32, **device)
        shape, kernel, vector = [images, channels, pixels, pixels], [channels, channels, 3, 3], [1, channels, 1, 1]
        self.nodes = {
            "x": graph.tensor(dim=shape, stride=strides(shape), data_type=io, name="x"),
            "weight": graph.tensor(dim=kernel, stride=strides(kernel), data_type=io, name="weight"),
        }
        x = self.nodes["x"]
        if norm:
            for name in ("scale", "shift"):
                self.nodes[name] = graph.tensor(dim=vector, stride=strides(vector), data_type=io, name=name)
            x = graph.relu(graph.add(graph.mul(x, self.nodes["scale"]), self.nodes["shift"]))
            x.set_data_type(io)  # what is multiplied must have the type of the weight
        y = graph.conv_fprop(image=x, weight=self.nodes["weight"], padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        self.nodes["y"] = y.set_output(True).set_data_type(io)
        if sums == "genstats":
            made = graph.genstats(y)
        elif sums == "reductions":
            made = [graph.reduction(of, mode=cudnn.reduction_mode.ADD) for of in (y, graph.mul(y, y))]
        for name, node in zip(("first", "second"), made if sums else (), strict=False):
            self.nodes[name] = node.set_output(True).set_data_type(f32).set_dim(vector).set_stride(strides(vector))
        graph.validate()
        graph.build_operation_graph()
        self.graph = graph

    def plans(self, at_most: int) -> list[tuple[str, str, int]]:
        """(heuristic, name, index) of the plans, without those that an earlier heuristic has named. FALLBACK's plans
        have no knobs in their name: they count as named once their engine is."""
        modes, names, count = self.cudnn.heur_mode, set[str](), 0
        found: list[tuple[str, str, int]] = []
        for mode in (modes.A, modes.B, modes.FALLBACK):
            try:
                self.graph.create_execution_plans([mode])  # appends
            except Exception as error:
                say(f"    heuristic {mode.name}: {reason(error)}")
                continue
            last, new = count, 0
            count = self.graph.get_execution_plan_count()
            for index in range(last, count):
                name = self.graph.get_plan_name_at_index(index)
                if name not in names and new < at_most:
                    names |= {name, name.split("_")[0]}
                    found.append((mode.name, name, index))
                    new += 1
        return found


def reason(error: Exception) -> str:
    """One line of an error; cuDNN's have many, and the reason stands first."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.split('Reason:')[1] if 'Reason:' in text else text}"[:200]


def milliseconds(work: Callable[[], Any]) -> float:
    """Of one call, in a captured graph; where it cannot be captured, launched one by one (then it says so)."""

    def one_by_one() -> None:
        for _ in range(REPEATS):
            work()

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        begin.record()
        work()
        end.record()
        end.synchronize()
    if begin.elapsed_time(end) > 2:
        return begin.elapsed_time(end)  # far too slow to be repeated
    graph, all_of_them = torch.cuda.CUDAGraph(), one_by_one
    try:
        graph.capture_begin()  # torch.cuda.graph would first collect garbage, every time
        try:
            one_by_one()
        finally:
            graph.capture_end()
        all_of_them = graph.replay
    except Exception as error:
        say(f"    not captured ({reason(error)}): launched one by one")

    all_of_them()
    begin.record()
    all_of_them()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def apart(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


class Shape:
    """Buffers and references of one shape, and its timings in `best`."""

    def __init__(self, cudnn: Any, handle: Any, images: int, channels: int, pixels: int, half: bool = False) -> None:
        self.cudnn, self.handle, self.half = cudnn, handle, half
        self.size = (images, channels, pixels)
        dtype = torch.float16 if half else torch.bfloat16
        torch.manual_seed(0)
        last: dict[str, Any] = {"device": "cuda", "memory_format": torch.channels_last, "dtype": dtype}
        x = torch.randn(images, channels, pixels, pixels, device="cuda").to(**last)
        weight = (torch.randn(channels, channels, 3, 3, device="cuda") / (3 * channels**0.5)).to(**last)
        scale, shift = (
            (torch.rand(1, channels, 1, 1, device="cuda") + 0.5).to(dtype),
            torch.randn_like(x[:1, :, :1, :1]),
        )
        self.buffers = {
            "x": x, "weight": weight, "scale": scale, "shift": shift, "y": torch.empty_like(x),
            "first": torch.empty(channels, device="cuda"), "second": torch.empty(channels, device="cuda"),
        }  # fmt: skip
        self.best: dict[str, float] = {}  # milliseconds
        self.fastest: dict[tuple[str, bool], str] = {}  # plan by sums and norm

    def reference(self, norm: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Output, sums and sums of squares, in float32 from torch's convolution of the same low-precision input."""
        x, weight = self.buffers["x"], self.buffers["weight"]
        if norm:
            x = (x.float() * self.buffers["scale"].float() + self.buffers["shift"].float()).relu().to(x.dtype)
        y = F.conv2d(x, weight, padding=1)
        return y, y.float().sum((0, 2, 3)), y.float().square().sum((0, 2, 3))

    def today(self) -> None:
        """torch's convolution, the Triton sums of two views, and the Triton norm with ReLU."""
        from ptlf.training import triton_bn as kernels

        x, weight = self.buffers["x"], self.buffers["weight"]

        def convolve() -> Tensor:
            return F.conv2d(x, weight, padding=1)

        y = convolve()
        tiles, small = kernels.Tiles(y, 2, "sums"), kernels.Tiles(y, 2, "normalise")
        partial, out = tiles.partial_sums(y), torch.empty_like(y)
        norm = nn.BatchNorm2d(y.shape[1], device="cuda")
        mean = torch.zeros(2, y.shape[1], device="cuda")

        def sums() -> None:
            kernels._sums[tiles.sum_grid](y, partial, *tiles.sum_size, **tiles.block)

        def both() -> None:
            kernels._sums[tiles.sum_grid](convolve(), partial, *tiles.sum_size, **tiles.block)

        def normalise() -> None:
            flags = {"RESIDUAL": False, "EXTRA": False, "RELU": True}
            terms = (y, y, y, mean, mean, norm.weight, norm.bias, out)
            kernels._normalise[small.grid](*terms, *small.size, **small.block, **flags)

        for name, work in {"conv": convolve, "_sums": sums, "conv + _sums": both, "_normalise": normalise}.items():
            self.keep(f"today: {name}", milliseconds(work))

    def keep(self, name: str, time_: float) -> None:
        self.best[name] = min(time_, self.best.get(name, float("inf")))
        say(f"  {name:44} {time_:.4f} ms")

    def fused(self, name: str, plans: int, *, calls: int = 1, sums: str = "", norm: bool = False) -> None:
        """Build and time one fusion. With calls > 1 the batch is divided among so many calls of the plan that was the
        fastest in one call."""
        images, channels, pixels = self.size
        try:
            fusion = Fusion(
                self.cudnn, images // calls, channels, pixels, sums=sums, norm=norm, half=self.half, handle=self.handle
            )
            found = fusion.plans(plans)
            fastest = self.fastest.get((sums, norm))
            if calls > 1 and fastest is not None:
                found = [plan for plan in found if plan[1] == fastest] or found[:1]
        except Exception as error:
            say(f"  {name:44} no plan: {reason(error)}")
            return
        if not found:
            say(f"  {name:44} no plan")
            return
        best, best_name = float("inf"), ""
        wanted = self.reference(norm)
        for mode, plan, index in found:
            try:
                began = time.perf_counter()
                fusion.graph.build_plan_at_index(index)
                built = time.perf_counter() - began
                time_, wrong = self.time_plan(fusion, index, calls, wanted, bool(sums))
                say(f"    {mode} {plan}: {time_:.4f} ms, built in {built:.1f} s; apart {wrong}")
                if time_ < best:
                    best, best_name = time_, plan
            except Exception as error:
                say(f"    {mode} {plan}: {reason(error)}")
        if best_name:
            self.fastest.setdefault((sums, norm), best_name)
            self.keep(f"{name} [{best_name}]", best)

    def time_plan(
        self, fusion: Fusion, index: int, calls: int, wanted: tuple[Tensor, Tensor, Tensor], sums: bool
    ) -> tuple[float, str]:
        """Milliseconds for the whole batch, and how far output and sums lie from the reference."""
        workspace = torch.empty(
            max(1, fusion.graph.get_workspace_size_plan_at_index(index)), dtype=torch.uint8, device="cuda"
        )
        packs = []
        each = self.size[0] // calls
        for call in range(calls):
            own = dict(self.buffers)
            own["x"], own["y"] = (own[name][call * each : (call + 1) * each] for name in ("x", "y"))
            own["first"], own["second"] = (torch.empty_like(own[name]) for name in ("first", "second"))
            packs.append(own)
        variants = [{node: own[name] for name, node in fusion.nodes.items()} for own in packs]

        def work() -> None:
            # cuDNN's handle follows torch's stream, also into a capture.
            self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
            for variant in variants:
                fusion.graph.execute_plan_at_index(variant, workspace, index, handle=self.handle)

        self.buffers["y"].zero_()
        time_ = milliseconds(work)
        torch.cuda.synchronize()
        wrong = f"output {apart(self.buffers['y'], wanted[0]):.1e}"
        for name, want in zip(("first", "second"), wanted[1:], strict=True):
            if sums:
                wrong += f", {name} {apart(sum(own[name] for own in packs), want):.1e}"  # type: ignore[arg-type]
        return time_, wrong


CASES: dict[str, dict[str, Any]] = {
    "cuDNN conv": {},
    "cuDNN conv + genstats": {"sums": "genstats"},
    "cuDNN conv + reductions": {"sums": "reductions"},
    "cuDNN norm, ReLU, conv + genstats": {"norm": True, "sums": "genstats"},
    "cuDNN norm, ReLU, conv + reductions": {"norm": True, "sums": "reductions"},
    "by view: conv + genstats": {"sums": "genstats", "calls": 2},
    "by view: conv + reductions": {"sums": "reductions", "calls": 2},
    "by view: norm, ReLU, conv + genstats": {"norm": True, "sums": "genstats", "calls": 2},
}


def list_plans(cudnn: Any, file: Path, shapes: list[tuple[int, int]], images: int) -> None:
    properties = cudnn.create_device_properties(file.read_text())
    for channels, pixels in shapes:
        for half in (False, True):
            for name, given in CASES.items():
                case: dict[str, Any] = {"sums": "", "norm": False} | given
                each = images // case.pop("calls", 1)
                try:
                    fusion = Fusion(cudnn, each, channels, pixels, **case, half=half, device_property=properties)
                    text = ", ".join(f"{mode} {plan}" for mode, plan, _ in fusion.plans(2)) or "none"
                except Exception as error:
                    text = reason(error)
                say(f"{channels} at {pixels} px, {'float16' if half else 'bfloat16'}, {name}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["64:32", "128:16", "256:8", "512:4"], help="channels:pixels")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--plans", type=int, default=3, help="plans built per heuristic; one takes 1 to 2 s to compile")
    parser.add_argument("--seconds", type=float, default=120, help="begin nothing after so long")
    parser.add_argument("--plans-of", type=Path, help="only list the plans for the device in this JSON file")
    arguments = parser.parse_args()
    shapes = [(int(channels), int(pixels)) for channels, pixels in (text.split(":") for text in arguments.shapes)]
    cudnn = import_cudnn()
    say(f"frontend {cudnn.__version__}, cuDNN {cudnn.backend_version()}, torch {torch.__version__}")
    if arguments.plans_of is not None:
        return list_plans(cudnn, arguments.plans_of, shapes, arguments.images)
    torch.backends.cudnn.benchmark = True
    handle = cudnn.create_handle()
    rows = []
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        for channels, pixels in shapes:
            for half in (False, True):
                kind = "float16" if half else "bfloat16"
                say(f"{channels} channels at {pixels} px, {arguments.images} images, {kind}")
                try:
                    shape = Shape(cudnn, handle, arguments.images, channels, pixels, half)
                    shape.today()
                except Exception as error:
                    say(f"  today: {reason(error)}")
                    continue
                for name, case in CASES.items():
                    if time.perf_counter() - BEGAN > arguments.seconds:
                        say(f"  {name}: left out, {arguments.seconds:.0f} s are over")
                    elif half and "reductions" in name:
                        continue  # float16 is there for its precompiled genstats alone
                    else:
                        shape.fused(name, arguments.plans, **case)
                rows.append((f"{channels} at {pixels} px, {kind}", shape.best))
    for title, best in rows:
        print(title)
        for name, time_ in best.items():
            print(f"  {name:70} {time_:.4f} ms")


if __name__ == "__main__":
    main()
