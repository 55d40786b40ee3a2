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
    numa_nodes: int = 1

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
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
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
    """Those that a CUDA program started here would see."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[word.strip() for word in line.split(",")] for line in out.splitlines()]
    found = {(row[0], row[1]): Gpu(row[2], int(row[3]) << 20) for row in rows if len(row) == 4 and row[3].isdigit()}
    return _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(gpus: dict[tuple[str, str], Gpu], chosen: str | None) -> tuple[Gpu, ...]:
    """The GPUs, by index and UUID, that CUDA_VISIBLE_DEVICES leaves: its names up to the first that is none's."""
    if chosen is None or "MIG-" in chosen:  # parts of a GPU are not listed by the driver's query
        return tuple(gpus.values())
    left: list[Gpu] = []
    for name in (word.strip() for word in chosen.split(",")):
        one = next((g for (index, uuid), g in gpus.items() if name == index or (name and uuid.startswith(name))), None)
        if one is None:
            break
        left.append(one)
    return tuple(left)
