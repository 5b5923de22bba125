"""The complete configuration of a run, assembled from the sections that sit beside what they configure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ptlf import freezing
from ptlf.core.errors import UserError
from ptlf.core.reading import load_yaml, read_text
from ptlf.core.registry import Registry
from ptlf.core.settings import as_dict, build, key, section
from ptlf.encoders import ENCODERS, EncoderConfig
from ptlf.evaluation import PROBES, EvaluationConfig, ProbeConfig
from ptlf.freezing import Policy, PolicyConfig
from ptlf.integrations.trackers import TRACKERS
from ptlf.methods import METHODS, MemoryConfig, MethodConfig
from ptlf.objectives import OBJECTIVES, ObjectiveConfig
from ptlf.stream import STREAMS, StreamConfig
from ptlf.training.checkpoint import CheckpointConfig
from ptlf.training.distributed import DistributedConfig
from ptlf.training.trainer import TrainingConfig
from ptlf.views import ViewsConfig

POLICIES: Registry[type[Policy[Any]]] = Registry("freezing policy", "ptlf.policies", Policy, freezing.POLICIES)
MAX_SEED = 2**63 - 1  # what torch's generators take


@dataclass
class FreezingConfig:
    policy: PolicyConfig = section(PolicyConfig, family=POLICIES)
    initial: float = key(0.0, "share of the units frozen in a task's first epoch", ge=0, le=1)
    final: float = key(0.4, "share of the units frozen in a task's last epoch", ge=0, le=1)
    shape: str = key("cosine", "how the share rises", choices=("cosine", "linear", "constant"))
    update: str = key("one-shot", "when ratios are computed", choices=("one-shot", "per-epoch"))
    threshold: float = key(0.99, "energy of the past's inputs that a unit's subspace keeps", gt=0, le=1)
    reach: bool = key(
        True, "the subspace reaches that energy, as printed; false = one direction fewer, as in TRGP's code"
    )
    thaw: str = key("all", "at a task's start: all, or units that it would not freeze", choices=("all", "needed"))
    batches: int = key(8, "batches of the new task whose gradients are averaged for the ratios", ge=1, le=10_000)
    batch_statistics: bool = key(False, "frozen norms use batch statistics (true) or their running statistics (false)")
    save_memory: bool = key(True, "keep only what backward needs; false = plain requires_grad=False")


@dataclass
class Config:
    recipe: str = key("", "where the defaults came from; for the record")
    seed: int = key(0, "everything random follows from it", ge=0, le=MAX_SEED)
    device: str = key("auto", "cpu, cuda, cuda:1 ...; auto = cuda where there is one")
    data_root: str | None = key(None, "folder of packed data sets; null = $PTLF_DATA, else ~/.cache/ptlf")
    log: list[str] = key([], "trackers that get what goes into metrics.jsonl; `ptlf list trackers` names them")
    stream: StreamConfig = section(StreamConfig, family=STREAMS)
    views: ViewsConfig = section(ViewsConfig)
    encoder: EncoderConfig = section(EncoderConfig, family=ENCODERS)
    objective: ObjectiveConfig = section(ObjectiveConfig, family=OBJECTIVES)
    method: MethodConfig = section(MethodConfig, family=METHODS)
    memory: MemoryConfig = section(MemoryConfig)
    freezing: FreezingConfig = section(FreezingConfig)
    training: TrainingConfig = section(TrainingConfig)
    evaluation: EvaluationConfig = section(EvaluationConfig)
    probes: dict[str, ProbeConfig] = section(PROBES)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    def __post_init__(self) -> None:
        self.log = list(dict.fromkeys(self.log))
        for name in self.log:
            TRACKERS.find(name)


def from_dict(values: Mapping[str, Any]) -> Config:
    """A checked configuration."""
    return build(Config, values)


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = load_yaml(read_text(path))
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path}{place} cannot be read as YAML: {why}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold keys and values, as in the config.yaml of a run")
    return values


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(as_dict(config), sort_keys=False)
