"""Convolutional networks from ONNX files, against ONNX Runtime."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptlf.core.errors import UserError
from ptlf.encoders import ENCODERS
from ptlf.freezing.units import trace
from ptlf.run.build import make_encoder

onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")


def write_network(path: Path, pool: str = "GlobalAveragePool", extra: tuple[Any, ...] = (), **conv: Any) -> Path:
    """Two convolutions, the second with a norm and a shortcut, pooling that differs between the sides, a classifier."""
    random, node = np.random.default_rng(0), onnx.helper.make_node
    shapes = {"w1": (4, 3, 3, 3), "b1": (4,), "w2": (4, 2, 1, 3), "fc": (4, 2)}
    shapes |= dict.fromkeys(("scale", "shift", "mean", "var"), (4,))
    values = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    nodes = [
        node("Transpose", ["images"], ["x"], perm=[0, 3, 1, 2]),
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2], **conv),
        node("Relu", ["c1"], ["r1"]),
        node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], pads=[0, 0, 1, 1]),
        node("Conv", ["p1", "w2"], ["c2"], pads=[0, 0, 0, 2], group=2),
        node("BatchNormalization", ["c2", "scale", "shift", "mean", "var"], ["n2"], epsilon=1e-3),
        node("Add", ["n2", "p1"], ["a2"]),
        *extra,
        node(pool, ["a2"], ["features"]),
        node("Flatten", ["features"], ["flat"]),
        node("MatMul", ["flat", "fc"], ["scores"]),
    ]
    images = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["N", 8, 8, 3])
    outputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("scores", "flat")]
    weights = [onnx.numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = onnx.helper.make_graph(nodes, "network", [images], outputs, weights)
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


def load(path: Path, **settings: Any) -> nn.Module:
    entry = ENCODERS.find(f"onnx:{path}")
    return make_encoder(entry.Config(name=f"onnx:{path}", **settings), 0, 8)


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_features_are_those_before_the_classifier_and_every_layer_trains(tmp_path: Path, channels: str) -> None:
    path = write_network(tmp_path / "net.onnx")
    encoder = load(path, channels=channels).eval()
    images = np.random.default_rng(1).random((2, 8, 8, 3), np.float32)
    _, expected = runtime.InferenceSession(path).run(None, {"images": images})
    shown = torch.from_numpy(images).permute(0, 3, 1, 2)
    found = encoder(shown.flip(1) if channels == "bgr" else shown)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert encoder(torch.zeros(2, 3, 16, 16)).shape == (2, 4)  # of another size
    found.square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    assert [unit.name for unit in trace(encoder, shown).units] == ["conv1", "conv4.1"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.onnx").write_bytes(b"text")
    softmax = onnx.helper.make_node("Softmax", ["a2"], ["s2"])
    for path, words in (
        (tmp_path / "none.onnx", "names no file"),
        (tmp_path / "no.onnx", "is no ONNX file"),
        (write_network(tmp_path / "soft.onnx", extra=(softmax,)), "'Softmax'"),
        (write_network(tmp_path / "same.onnx", auto_pad="SAME_UPPER"), "'Conv'"),
        (write_network(tmp_path / "pool.onnx", pool="Identity"), "none of GlobalAveragePool"),
    ):
        with pytest.raises(UserError, match=words):
            load(path)
