"""Encoders from ONNX files of convolutional networks: `onnx:FILE`. Their layers train like any other's.

Read are the operators that classifiers are made of after their norms were folded, and batch norms. Everything after the
last pooling, the classifier, is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ptlf.core.errors import UserError, import_optional
from ptlf.core.settings import key
from ptlf.encoders.encoder import EncoderEntry, SizedConfig

POOLING = ("GlobalAveragePool", "AveragePool", "ReduceMean")


@dataclass
class OnnxConfig(SizedConfig):
    channels: str = key("rgb", "order of the network's input channels", choices=("rgb", "bgr"))


class Add(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Padded(nn.Sequential):
    """A layer after zeros around its input, for padding that differs between the sides."""

    def __init__(self, layer: nn.Module, pads: list[int], value: float) -> None:
        top, left, bottom, right = pads
        super().__init__(nn.ConstantPad2d((left, right, top, bottom), value), layer)


def onnx_entry(path: str) -> EncoderEntry:
    def make(config: OnnxConfig) -> nn.Module:
        onnx = import_optional("onnx", f"encoder {'onnx:' + path!r}", "export")
        file = Path(path).expanduser()
        if not file.is_file():
            raise UserError(f"onnx:{path} names no file here")
        try:
            graph = onnx.load(file).graph
        except Exception as error:  # protobuf's own, of many kinds
            raise UserError(f"{path} is no ONNX file: {error}") from None
        weights = {w.name: torch.from_numpy(onnx.numpy_helper.to_array(w).copy()) for w in graph.initializer}
        network = read_graph(graph, weights, onnx.helper.get_attribute_value)
        if config.channels == "bgr":
            first = next(part for part in network.modules() if isinstance(part, nn.Conv2d))
            first.weight.data = first.weight.data.flip(1)
        return network

    return EncoderEntry(make, OnnxConfig, "the convolutional network in an ONNX file, without its classifier")


def read_graph(graph: Any, weights: dict[str, Tensor], value_of: Callable[[Any], Any]) -> nn.Module:
    """The graph up to its last pooling, as a module from images (B, 3, H, W) to vectors."""
    last = max((i for i, node in enumerate(graph.node) if node.op_type in POOLING), default=None)
    if last is None:
        raise UserError(f"the ONNX network has none of {', '.join(POOLING)} before its classifier; it is no encoder")
    layers, made = nn.Module(), fx.Graph()
    values: dict[str, fx.Node] = {graph.input[0].name: made.placeholder("images")}
    for index, node in enumerate(graph.node[: last + 1]):
        options = {attribute.name: value_of(attribute) for attribute in node.attribute}
        inputs = [values[name] for name in node.input if name in values]
        if node.op_type in ("Identity", "Dropout", "Transpose") and len(inputs) == 1:  # images are (B, 3, H, W) here
            values[node.output[0]] = inputs[0]
            continue
        layer = make_layer(node.op_type, options, [weights[name] for name in node.input if name in weights])
        if layer is None or len(inputs) != 1 + (node.op_type == "Add"):
            raise UserError(f"the ONNX operator {node.op_type!r} ({node.name}) is not read; give the network's weights")
        if index == last:
            layer = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        name = f"{node.op_type.lower()}{index}"
        layers.add_module(name, layer)
        values[node.output[0]] = made.call_module(name, tuple(inputs))
    made.output(values[graph.node[last].output[0]])
    return fx.GraphModule(layers, made, "OnnxEncoder")


def make_layer(kind: str, options: dict[str, Any], weights: list[Tensor]) -> nn.Module | None:
    if options.get("auto_pad", b"NOTSET") != b"NOTSET" or options.get("ceil_mode"):
        return None
    pads = list(options.get("pads", [0, 0, 0, 0]))
    even = pads[:2] == pads[2:]
    stride = tuple(options.get("strides", (1, 1)))
    window: dict[str, Any] = {"stride": stride, "padding": tuple(pads[:2]) if even else 0}
    layer: nn.Module
    if kind == "Conv":
        weight, *bias = weights
        groups = options.get("group", 1)
        shape, size = (weight.shape[1] * groups, weight.shape[0]), weight.shape[2:]
        dilation = tuple(options.get("dilations", (1, 1)))
        layer = nn.Conv2d(*shape, (size[0], size[1]), **window, dilation=dilation, groups=groups, bias=bool(bias))
        layer.load_state_dict({"weight": weight, **({"bias": bias[0]} if bias else {})})
        return layer if even else Padded(layer, pads, 0.0)
    if kind == "MaxPool":
        layer = nn.MaxPool2d(tuple(options["kernel_shape"]), **window)
        return layer if even else Padded(layer, pads, float("-inf"))
    if kind == "BatchNormalization":
        layer = nn.BatchNorm2d(len(weights[0]), eps=options.get("epsilon", 1e-5))
        names = ("weight", "bias", "running_mean", "running_var")
        layer.load_state_dict(dict(zip(names, weights, strict=True)), strict=False)
        return layer
    if kind == "Clip" and [float(w) for w in weights] == [0.0, 6.0]:
        return nn.ReLU6()
    simple = {"Relu": nn.ReLU, "Add": Add, "Sigmoid": nn.Sigmoid} | dict.fromkeys(POOLING, nn.Identity)
    return simple[kind]() if kind in simple and not weights else None
