"""What a step on N GPUs of one machine would take: a prediction, from what a single GPU measures.

    torchrun --nproc-per-node 1 benchmarks/several_gpus.py --json results/bench/several-gpus-h200.json

Measured: the step without a process group; the step in a group of one process, which does all its collectives, with the
whole batch and with the share of it that each of N GPUs would have; the bytes and the number of the collectives.
Assumed: the bandwidth and the latency of the links between the GPUs, and that nothing is computed while data is sent.
"""

import argparse
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import noise_for, time_steps
from ptlf.core import processes
from ptlf.core.batch import Batch
from ptlf.run.config import Config, from_dict
from ptlf.run.loop import Run
from ptlf.run.recipes import recipe
from ptlf.run.record import environment, source_commit
from ptlf.run.results import write_json

Row = dict[str, Any]


@dataclass(frozen=True)
class Links:
    """Between the GPUs of a machine with NVLink. Each way of the fourth generation carries 450 GB/s at most; less than
    half of it is left for messages of tens of megabytes."""

    bandwidth: float = 200e9  # bytes per second that each GPU sends, while it receives as many
    latency: float = 20e-6  # seconds of a collective without data


@dataclass
class Exchange:
    """What one process hands to the collectives of a step."""

    reduced_bytes: int = 0  # summed over the processes: gradients, and the gradients' sums of norms
    gathered_bytes: int = 0  # sent to all: statistics of norms, rows for the memory
    collectives: int = 0

    def seconds(self, gpus: int, links: Links) -> float:
        """By rings: of N GPUs each sends 2 (N - 1) / N of what is reduced, and N - 1 times what it gives to all."""
        if gpus == 1:
            return 0.0
        sent = 2 * (gpus - 1) / gpus * self.reduced_bytes + (gpus - 1) * self.gathered_bytes
        return sent / links.bandwidth + self.collectives * links.latency


def predict(measured: dict[int, Row], links: Links) -> list[Row]:
    """A row per number of GPUs; `measured` has, by number of GPUs, the step of one GPU's share and its exchange.

    step_ms: with the batch divided among them. whole_batch_each_ms: each with a batch as large as one GPU's now.
    """
    rows = []
    for gpus, found in measured.items():
        shared, whole = found["exchange"].seconds(gpus, links), measured[1]["exchange"].seconds(gpus, links)
        step = found["step_ms"] + 1e3 * shared
        rows.append(
            {
                "gpus": gpus,
                "step_ms": step,
                "sending_ms": 1e3 * shared,
                "speed_up": measured[1]["step_ms"] / step,
                "whole_batch_each_ms": measured[1]["step_ms"] + 1e3 * whole,
            }
        )
    return rows


@contextmanager
def counted(exchange: Exchange) -> Iterator[None]:
    """Counts the collectives that happen inside."""
    reduce, gather = torch.distributed.all_reduce, processes._gather

    def count_reduced(tensor: Tensor, *operation: Any) -> Any:
        exchange.reduced_bytes += tensor.nbytes
        exchange.collectives += 1
        return reduce(tensor, *operation)

    def count_gathered(rows: Tensor, mine: Tensor) -> Any:
        exchange.gathered_bytes += mine.nbytes
        exchange.collectives += 1
        return gather(rows, mine)

    torch.distributed.all_reduce, processes._gather = count_reduced, count_gathered
    try:
        yield
    finally:
        torch.distributed.all_reduce, processes._gather = reduce, gather


def measure(config: Config, size: int, frozen: int, steps: int) -> Row:
    """The step with the first `frozen` units frozen: as `benchmarks/step.py` times it, and what it exchanges."""
    gc.collect()  # the run before: it is in reference cycles
    run = Run(config, stream=noise_for(config, 4 * config.training.batch, size, 1))
    run.freezing.freezer.freeze([unit.name for unit in run.freezing.freezer.units][:frozen])
    exchange, body = Exchange(), run.trainer.engine.body

    def once(batch: Batch) -> dict[str, Tensor]:
        run.trainer.engine.body = body
        with counted(exchange):
            return body(batch)

    run.trainer.engine.body = once
    row = time_steps(run, steps)
    run.trainer.engine.close()
    return {"step_ms": row["step_ms"], "gradient_bytes": run.trainer.sent_bytes(), "exchange": exchange}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="split-cifar10/simsiam/ptlf")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--frozen", type=int, nargs="+", default=[0, 8], help="how many of the first units are frozen")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, help="images of a step of all GPUs; default: the recipe's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(words)
    settings = recipe(chosen.recipe) | {"device": chosen.device}
    links = Links()

    def config(gpus: int) -> Config:
        made = from_dict(settings)
        made.training.batch = (chosen.batch or made.training.batch) // gpus
        return made

    def time(frozen: int, gpus: int) -> Row:
        return measure(config(gpus), chosen.size, frozen, chosen.steps)

    alone = {frozen: time(frozen, 1) for frozen in chosen.frozen}
    with processes.process_group():
        assert processes.joined(), "start it with torchrun"
        counts = sorted({1, *chosen.gpus})
        measured = {frozen: {gpus: time(frozen, gpus) for gpus in counts} for frozen in chosen.frozen}
    tables = [(frozen, alone[frozen], found, predict(found, links)) for frozen, found in measured.items()]
    for frozen, before, found, rows in tables:
        one = found[1]
        print(f"{frozen} units frozen, measured: {before['step_ms']:.2f} ms per step without a group,")
        print(f"  {one['step_ms']:.2f} ms in a group of one; {one['exchange'].collectives} collectives,")
        print(f"  {one['gradient_bytes'] / 1e6:.1f} MB of gradients. Predicted:")
        for row in rows:
            print(
                f"  on {row['gpus']}: {row['step_ms']:.2f} ms, {row['sending_ms']:.2f} of them sending, "
                f"{row['speed_up']:.2f} times as fast; {row['whole_batch_each_ms']:.2f} ms with a whole batch each"
            )
    if chosen.json:
        write_json(
            chosen.json,
            {
                "commit": source_commit(),
                "environment": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
                "recipe": chosen.recipe,
                "size": chosen.size,
                "assumed": asdict(links),
                "tables": [
                    {
                        "frozen": frozen,
                        "alone_ms": before["step_ms"],
                        "measured": [
                            {"gpus": gpus, **row, "exchange": asdict(row["exchange"])} for gpus, row in found.items()
                        ],
                        "predicted": rows,
                    }
                    for frozen, before, found, rows in tables
                ],
            },
        )


if __name__ == "__main__":
    main()
