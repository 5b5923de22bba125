"""Streams by name. To add one: pack its images (`ptlf data pack`) or write a loader in datasets.py, and add a line."""

from ptlf.core.registry import Registry
from ptlf.stream.datasets import StreamEntry, digits, open_stream, stream_entry
from ptlf.stream.task import Dataset, EvalSplit, Images, Stream, StreamConfig, Task

MEMBERS: dict[str, StreamEntry] = {
    "digits": stream_entry(digits, "scikit-learn's digits, embedded, 5 tasks x 2 classes", tasks=5, protocol="digits"),
    "split-cifar10": StreamEntry("CIFAR-10, 5 tasks x 2 classes, 32 px", "cifar10", tasks=5),
    "split-cifar100": StreamEntry("CIFAR-100, 20 tasks x 5 classes, 32 px", "cifar100", tasks=20),
    "split-tinyimagenet": StreamEntry(
        "first 100 classes of Tiny-ImageNet, 20 x 5, 64 px",
        "tinyimagenet",
        tasks=20,
        classes=100,
        presets={"views": {"memory": "memory-tinyimagenet"}},
    ),
    "imagenet100": StreamEntry("100 ImageNet classes, 5 tasks x 20, 224 px", "imagenet100", 5, protocol="cassle"),
    "arriving": StreamEntry("tasks that arrive one by one: `ptlf learn RUN IMAGES`", own=True, arriving=True),
    "folder": StreamEntry("your own packed image folder, stream.pack: a folder per task or per class", own=True),
}
STREAMS: Registry[StreamEntry] = Registry("stream", "ptlf.streams", StreamEntry, MEMBERS, wrap=stream_entry)

__all__ = ["STREAMS", "Dataset", "EvalSplit", "Images", "Stream", "StreamConfig", "StreamEntry", "Task", "open_stream"]
