"""Which layer a parameter or a norm of no layer belongs to."""

import heapq
import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from ptlf.freezing.recording import ForwardRecord, Layer, LayerCall, tensors_in


class Ownership:
    """The autograd graph of a forward, to find the unit that a parameter of no layer belongs to.

    The parameter is followed to the first operation that joins it with data. If the result goes to layers only, and the
    next layer is nearer in the module tree than the last one before, it belongs to the next layer; also if they are
    equally near and the data go past the operation too, as a residual stream does. So a norm belongs to the layer that
    it feeds. Otherwise the parameter belongs to the last layer that the result depends on: layer scale, position
    embedding, relative position bias, a norm after a residual sum. A parameter used in several places goes to the first
    of the units found, so that nothing trains before a frozen prefix.
    """

    def __init__(self, record: ForwardRecord, layers: Mapping[str, Layer], output: Any) -> None:
        self.paths = [name.split(".") for name in layers]
        self.outputs = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
        self.unit_at: dict[Node, int] = {}  # operations inside a layer
        for index, layer in enumerate(layers.values()):
            for call in record.layers[layer]:
                self._enter(call, index)
        self.consumers: dict[Node, list[Node]] = {node: [] for node in self.outputs}
        self.leaves: dict[Tensor, Node] = {}
        waiting = list(self.outputs)
        while waiting:
            node = waiting.pop()
            if is_leaf(node):
                self.leaves[node.variable] = node  # type: ignore[attr-defined]
            for before in node_inputs(node):
                if before not in self.consumers:
                    self.consumers[before] = []
                    waiting.append(before)
                self.consumers[before].append(node)
        bare = {node for leaf, node in self.leaves.items() if isinstance(leaf, nn.Parameter)}
        inner = sorted((node for node in self.consumers if not is_leaf(node)), key=age)
        leaves = list(self.leaves.values())
        self.has_data = {node: node not in bare for node in leaves}
        self.last_before = dict.fromkeys(leaves, -1)  # greatest index of a unit that the result depends on
        for node in inner:
            given, own = node_inputs(node), self.unit_at.get(node, -1)
            self.has_data[node] = own >= 0 or any(self.has_data[before] for before in given)
            self.last_before[node] = max([own, *(self.last_before[before] for before in given)])
        self.next_after: dict[Node, int] = {}  # least index of a unit that depends on the result
        for node in [*reversed(inner), *leaves]:
            after = (min(self.unit_at.get(user, len(layers)), self.next_after[user]) for user in self.consumers[node])
            self.next_after[node] = min(after, default=len(layers))

    def _enter(self, call: LayerCall, index: int) -> None:
        waiting = [call.node] if call.node is not None and call.node not in call.inputs else []
        while waiting:
            node = waiting.pop()
            if node not in self.unit_at and not is_leaf(node):
                self.unit_at[node] = index
                waiting += [before for before in node_inputs(node) if before not in call.inputs]

    def owner_of_parameter(self, parameter: Tensor, path: str) -> int | None:
        """Index of the unit; `path` is that of the module that holds the parameter."""
        waiting = [self.leaves[parameter]] if parameter in self.leaves else []
        seen: set[Node] = set(waiting)
        owners: set[int | None] = set()
        while waiting:
            for user in self.consumers[waiting.pop()]:
                if user in self.unit_at:
                    owners.add(self.unit_at[user])
                elif self.has_data[user]:
                    owners.add(self.owner_of_result(user, path))
                elif user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return min((owner for owner in owners if owner is not None), default=None)

    def owner_of_result(self, node: Node, path: str) -> int | None:
        fed, before, after = self._feeds(node), self.last_before[node], self.next_after[node]
        if before < 0:
            return after if after < len(self.paths) else None
        if not fed:
            return before
        near, nearer = self._nearness(path, before), self._nearness(path, min(fed))
        beside = any(self.has_data[source] and len(self.consumers[source]) > 1 for source in node_inputs(node))
        return min(fed) if nearer > near or (nearer == near and beside) else before

    def _feeds(self, start: Node) -> set[int]:
        """The units whose layers take the node's result, if nothing else does; otherwise none."""
        waiting, followed, fed, seen = [(age(start), id(start), start)], set(), set(), {start}
        while waiting:
            *_, node = heapq.heappop(waiting)  # the oldest first, so that all its inputs were looked at
            joins = any(self.has_data[before] and before not in followed for before in node_inputs(node))
            if node in self.outputs or (joins and node is not start):
                return set()
            followed.add(node)
            for user in self.consumers[node]:
                if user in self.unit_at:
                    fed.add(self.unit_at[user])
                elif user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, (age(user), id(user), user))
        return fed

    def _nearness(self, path: str, index: int) -> int:
        """How many levels of the module tree the path and the unit share."""
        pairs = zip(path.split("."), self.paths[index], strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def node_inputs(node: Node) -> list[Node]:
    return [before for before, _ in node.next_functions if before is not None]


def is_leaf(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


def age(node: Node) -> int:
    """Position in the forward: an operation comes after those it depends on."""
    return node._sequence_nr()  # type: ignore[attr-defined, no-any-return]
