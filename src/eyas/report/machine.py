"""What this machine has: processors, memory, GPUs, disk. Starts nothing and imports no framework."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    """bytes"""


@dataclass(frozen=True)
class Machine:
    cores: int
    memory: int
    """bytes that programs may use"""
    gpus: tuple[Gpu, ...]
    disk_free: int
    """bytes free where the run directory lies"""

    @property
    def gpu_memory(self) -> int:
        return sum(gpu.memory for gpu in self.gpus)

    @property
    def name(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} x {self.gpus[0].name}"
        return f"{self.cores} CPU cores"


def this_machine(run_dir: Path) -> Machine:
    where = run_dir.absolute()
    while not where.exists():
        where = where.parent
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        gpus=_gpus(),
        disk_free=shutil.disk_usage(where).free,
    )


def _memory() -> int:
    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            return min(total, int(text))
    return total


def _gpus() -> tuple[Gpu, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rsplit(",", 1) for line in out.splitlines() if "," in line]
    return tuple(Gpu(name.strip(), int(mib) << 20) for name, mib in rows if mib.strip().isdigit())
