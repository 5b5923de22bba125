"""The environment of a run: Python, torch, device, and the commit of the source tree."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import ptlf


def environment(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
    }


def source_commit() -> str | None:
    """Commit of the source tree, with `-dirty` if files have changed; None if the package is not a checkout."""
    tree = Path(ptlf.__file__).resolve().parent.parent
    if not (tree / ".git").exists():
        return None
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
