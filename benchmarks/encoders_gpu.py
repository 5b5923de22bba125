"""What a frozen third of an encoder saves: `ptlf.Freezer` against `requires_grad_(False)` on the same parameters.

    python benchmarks/encoders_gpu.py                          # a GPU, timm: ViT-S/16, ConvNeXt-T; our ResNet-50
    python benchmarks/encoders_gpu.py --compile                # and the ResNet-50 compiled, with inductor's own fusion
    python benchmarks/encoders_gpu.py --device cpu --source hf --batch 2 --repeats 0     # only bytes and FLOPs

A step is forward, backward and AdamW on noise, under bfloat16 autocast on a GPU and in float32 on a CPU. A row per
network, frozen units (none, the first third, the middle third, in data order) and way: activation bytes saved for
backward, those that `Freezer.estimate` predicted, backward FLOPs, milliseconds (median), peak
memory. Ratios are to nothing frozen.
"""

import argparse
import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import per_call
from ptlf.encoders.resnet import Bottleneck, ResNet
from ptlf.encoders.vit import ViT
from ptlf.freezing import Freezer, Unit, find_units
from ptlf.freezing.cost import backward_flops, kept_bytes
from ptlf.run.record import environment, source_commit
from ptlf.run.results import write_json
from ptlf.training.cost import peak_memory_bytes, reset_peak_memory

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
MEASURED = ("kept_bytes", "backward_flops", "milliseconds")
SETS = ("nothing", "first third", "middle third")


class Last(nn.Module):
    """A Hugging Face model's last hidden state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images).last_hidden_state


def networks(source: str, size: int, tiny: bool) -> dict[str, Callable[[], nn.Module]]:
    depths, width = ((1, 1), 8) if tiny else ((3, 4, 6, 3), 64)
    resnet = {"resnet50": lambda: ResNet(Bottleneck, depths, width=width, stem="imagenet")}
    if tiny:
        return {"vit-s16": lambda: ViT(32, 3, size, 16, 2), **resnet}
    if source == "timm":
        import timm

        sized = {"img_size": size} if size != 224 else {}
        return {
            "vit-s16": lambda: timm.create_model("vit_small_patch16_224", num_classes=0, **sized),
            "convnext-t": lambda: timm.create_model("convnext_tiny", num_classes=0),
            **resnet,
        }
    import transformers as t

    small = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "image_size": size}
    return {
        "vit-s16": lambda: Last(t.ViTModel(t.ViTConfig(**small), add_pooling_layer=False)),
        "convnext-t": lambda: Last(t.ConvNextModel(t.ConvNextConfig())),
        **resnet,
    }


def chosen(units: list[Unit], frozen: str) -> list[Unit]:
    third = len(units) // 3
    return {"nothing": [], "first third": units[:third], "middle third": units[third : 2 * third]}[frozen]


@contextlib.contextmanager
def frozen_plainly(units: list[Unit]) -> Iterator[None]:
    """requires_grad_(False), and norms with running statistics in eval mode."""
    for unit in units:
        for parameter in unit.parameters():
            parameter.requires_grad_(False)
        for norm in unit.norms:
            norm.eval()
    try:
        yield
    finally:
        for unit in units:
            for parameter in unit.parameters():
                parameter.requires_grad_(True)
            for norm in unit.norms:
                norm.train()


class Bench:
    def __init__(self, make: Callable[[], nn.Module], images: Tensor, repeats: int) -> None:
        torch.manual_seed(0)
        self.device, self.images, self.repeats = images.device, images, repeats
        self.model = make().to(self.device).train()
        self.units = find_units(self.model, images[:2])
        if self.device.type == "cuda" and any(isinstance(unit.norm, nn.BatchNorm2d) for unit in self.units):
            self.model.to(memory_format=torch.channels_last)
            self.images = images.to(memory_format=torch.channels_last)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def measure(self, run: nn.Module, folded: Callable[[], list[Tensor]], *, count: bool = True) -> Row:
        def loss() -> Tensor:
            with self.autocast():
                return run(self.images).float().square().mean()

        row: Row = {}
        if count:
            held = [*self.model.parameters(), *self.model.buffers(), *folded()]
            row = {"kept_bytes": kept_bytes(loss, exclude=held), "backward_flops": backward_flops(loss())}
        if not self.repeats:
            self.model.zero_grad()
            return row
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-4, fused=self.device.type == "cuda")

        def step() -> None:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

        for _ in range(3):  # warm up
            step()
        reset_peak_memory(self.device)
        times = [per_call(step, 1, self.device) for _ in range(self.repeats)]
        self.model.zero_grad()
        return row | {"milliseconds": 1e3 * statistics.median(times), "peak_bytes": peak_memory_bytes(self.device)}

    def rows(self) -> Iterator[Row]:
        for frozen in SETS:
            units = chosen(self.units, frozen)
            common = {"frozen": frozen, "units": len(units), "of": len(self.units)}
            with frozen_plainly(units):
                way = "requires_grad_(False)" if units else ""
                yield {**common, "way": way, **self.measure(self.model, list)}
            if units:
                freezer = Freezer(self.model, units=self.units, example=self.images[:2])
                with self.autocast():
                    said = freezer.estimate(units, self.images, loss=lambda output: output.float().square().mean())
                with freezer.temporarily_frozen(units):
                    row = self.measure(self.model, lambda f=freezer: f.folded)
                estimate = {
                    "estimated_kept_bytes": said.if_frozen.kept_bytes,
                    "estimated_flops": said.if_frozen.backward_flops,
                }
                yield {**common, "way": "ptlf.Freezer", **row, **estimate}

    def compiled_rows(self) -> Iterator[Row]:
        """The middle third frozen, compiled by inductor: plain, with its fusion of convolution and norm, and ours."""
        import torch._inductor.config as inductor

        units = chosen(self.units, "middle third")
        common = {"frozen": "middle third", "units": len(units), "of": len(self.units)}
        for fuse in (False, True):
            torch._dynamo.reset()
            with frozen_plainly(units), inductor.patch(efficient_conv_bn_eval_fx_passes=fuse):
                row = self.measure(torch.compile(self.model), list, count=False)
            yield {**common, "way": "compiled, conv-bn-eval fusion" if fuse else "compiled", **row}
        torch._dynamo.reset()
        freezer = Freezer(self.model, units=self.units, example=self.images[:2])
        with freezer.temporarily_frozen(units):
            yield {
                **common,
                "way": "ptlf.Freezer, compiled",
                **self.measure(torch.compile(self.model), list, count=False),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--source", choices=("timm", "hf"), default="timm")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--networks", nargs="+", help="only these: vit-s16, convnext-t, resnet50")
    parser.add_argument("--compile", action="store_true", help="also the ResNet-50 compiled, which takes minutes")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try the script")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=device)
    rows: list[Row] = []
    for name, make in networks(arguments.source, arguments.size, arguments.tiny).items():
        if arguments.networks and name not in arguments.networks:
            continue
        bench = Bench(make, images, arguments.repeats)
        found = list(bench.rows())
        if arguments.compile and name == "resnet50":
            found += bench.compiled_rows()
        for row in found:
            ratios = {f"{key}_ratio": row[key] / found[0][key] for key in MEASURED if key in row}
            if row.get("peak_bytes"):
                ratios["peak_bytes_ratio"] = row["peak_bytes"] / found[0]["peak_bytes"]
            rows.append({"network": name, **row, **ratios})
            shown = {key: round(value, 3) for key, value in {**row, **ratios}.items() if isinstance(value, float)}
            print(f"{name:12} {row['frozen']:14} {row['way']:32} {shown}", flush=True)
        del bench, found
        gc.collect()
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "out"}
    out = arguments.out or ROOT / "results" / "bench" / f"encoders-{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"settings": settings, "environment": environment(device), "commit": source_commit(), "rows": rows})
    print(out)


if __name__ == "__main__":
    main()
