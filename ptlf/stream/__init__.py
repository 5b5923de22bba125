"""Streams of tasks, and the images they are made of."""

from ptlf.stream.task import STREAMS, Dataset, EvalSplit, Images, Stream, StreamConfig, StreamEntry, Task, open_stream

__all__ = ["STREAMS", "Dataset", "EvalSplit", "Images", "Stream", "StreamConfig", "StreamEntry", "Task", "open_stream"]
