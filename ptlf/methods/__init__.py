"""Methods by name. To add one: a file with a subclass of `Method`, and a line here."""

from typing import Any

from ptlf.core.registry import Registry
from ptlf.methods.distillation import PFR, Anchor, Cassle
from ptlf.methods.memory import Memory, MemoryConfig
from ptlf.methods.method import Finetune, Method, MethodConfig, Multitask
from ptlf.methods.pnn import PNN
from ptlf.methods.replay import DER, Lump
from ptlf.methods.si import SI

MEMBERS = {
    "finetune": Finetune,
    "multitask": Multitask,
    "lump": Lump,
    "si": SI,
    "der": DER,
    "pnn": PNN,
    "cassle": Cassle,
    "pfr": PFR,
    "anchor": Anchor,
}
METHODS: Registry[type[Method[Any]]] = Registry("method", "ptlf.methods", Method, MEMBERS)

__all__ = ["METHODS", "Memory", "MemoryConfig", "Method", "MethodConfig"]
