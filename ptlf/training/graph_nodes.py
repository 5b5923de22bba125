"""Memset nodes of a captured graph replaced by kernel nodes.

cuDNN clears a few counters before most convolutions. As a memset node of a graph that takes 8 microseconds between two
kernels of an H200, as a kernel 1. The calls are the CUDA driver's own, which torch does not offer.
"""

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
THREADS = 256
LARGEST = 1 << 20  # bytes; more is bound by memory either way
# One 32-bit word per thread.
FILL = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 start, .param .u64 words, .param .u32 value)
{
    .reg .pred %outside;
    .reg .b32 %value, %thread, %block, %threads;
    .reg .b64 %at, %words, %word;
    ld.param.u64 %at, [start];
    ld.param.u64 %words, [words];
    ld.param.u32 %value, [value];
    cvta.to.global.u64 %at, %at;
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    cvt.u64.u32 %word, %thread;
    mad.wide.u32 %word, %block, %threads, %word;
    setp.ge.u64 %outside, %word, %words;
    @%outside ret;
    shl.b64 %word, %word, 2;
    add.u64 %at, %at, %word;
    st.global.u32 [%at], %value;
    ret;
}
"""


class MemsetParameters(ctypes.Structure):
    _fields_ = (
        ("start", c_ulonglong), ("pitch", c_size_t), ("value", c_uint), ("element_size", c_uint),
        ("width", c_size_t), ("height", c_size_t),
    )  # fmt: skip


class KernelParameters(ctypes.Structure):
    _fields_ = (
        ("function", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared_bytes", c_uint),
        ("arguments", POINTER(c_void_p)), ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p),
    )  # fmt: skip


class DriverError(RuntimeError):
    pass


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def fill_function() -> c_void_p:
    module, function = c_void_p(), c_void_p()
    call("cuModuleLoadData", byref(module), c_char_p(FILL))
    call("cuModuleGetFunction", byref(function), module, c_char_p(b"fill"))
    return function


def call(name: str, *arguments: Any) -> None:
    if (code := getattr(driver(), name)(*arguments)) != 0:
        raise DriverError(f"{name} failed with code {code}")


def listed(name: str, of: c_void_p) -> list[c_void_p]:
    """What a driver call lists: first asked how many, then which."""
    count = c_size_t()
    call(name, of, None, byref(count))
    found = (c_void_p * count.value)()
    if count.value:
        call(name, of, found, byref(count))
    return [c_void_p(node) for node in found]


def array(nodes: list[c_void_p]) -> Any:
    return (c_void_p * len(nodes))(*nodes)


def replace_memsets(graph: int) -> int:
    """Replace the small memset nodes of a graph that is not instantiated yet. Returns how many there were; an older
    driver may offer none of these calls, and the graph is left as it is."""
    replaced = 0
    try:
        for node in listed("cuGraphGetNodes", c_void_p(graph)):
            kind = c_int()
            call("cuGraphNodeGetType", node, byref(kind))
            replaced += kind.value == MEMSET and replace(c_void_p(graph), node)
    except (OSError, AttributeError, DriverError):
        pass
    return replaced


def replace(graph: c_void_p, node: c_void_p) -> bool:
    memset = MemsetParameters()
    call("cuGraphMemsetNodeGetParams", node, byref(memset))
    size = memset.width * memset.element_size
    if memset.height > 1 or size % 4 or memset.start % 4 or size > LARGEST:
        return False
    repeated = {1: 0x01010101, 2: 0x00010001, 4: 1}[memset.element_size]
    value = (memset.value & (1 << 8 * memset.element_size) - 1) * repeated
    before, after = listed("cuGraphNodeGetDependencies", node), listed("cuGraphNodeGetDependentNodes", node)
    given = [c_ulonglong(memset.start), c_ulonglong(size // 4), c_uint(value)]
    arguments = (c_void_p * 3)(*(ctypes.cast(byref(one), c_void_p) for one in given))
    blocks = -(-size // (4 * THREADS))
    kernel = KernelParameters(fill_function(), (blocks, 1, 1), (THREADS, 1, 1), 0, arguments, None, None, None)
    made = c_void_p()
    call("cuGraphAddKernelNode_v2", byref(made), graph, array(before), c_size_t(len(before)), byref(kernel))
    if after:
        call("cuGraphAddDependencies", graph, array([made] * len(after)), array(after), c_size_t(len(after)))
    call("cuGraphDestroyNode", node)
    return True
