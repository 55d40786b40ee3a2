"""What differs between vLLM versions, and which versions are tested. Imports nothing of vLLM or eyas at module level.

0.26        no cache manager is bound to a connector; a step without a forward pass may never call `wait_for_save`;
            the V2 model runner names no requests (no `request_ids` for `start_load_kv`): capture needs the V1 runner
0.32, 0.33  the V2 runner names the requests of its rows; `start_load_kv` runs after the forward pass was launched
The connector relies on neither: it keeps block ids from the scheduler's own output, and does its bookkeeping when the
step's metadata is bound.
"""

import re
from collections.abc import Sequence
from typing import Any

ARCH_VARIABLE = "EYAS_CAPTURE_ARCH"
"""switches eyas.engine.capture_plugin on: the target's architecture"""
OLDEST = (0, 26)
NEWEST = (0, 33)
NEWEST_VERSION = ".".join(map(str, NEWEST))
NAMED_ROWS = (0, 32)
"""the oldest version that is known to name the rows of its V2 model runner"""


def parse(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as 0.32.0+cpu. Raises ValueError on anything else."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"vLLM version {version!r} is not MAJOR.MINOR...")
    return int(found[1]), int(found[2])


def problem(version: str) -> str | None:
    """Why this vLLM cannot be used, or None."""
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST_VERSION}"
    try:
        if OLDEST <= parse(version) <= NEWEST:
            return None
    except ValueError as e:
        return f"{e}; eyas is tested with vLLM {tested}"
    return f"vLLM {version} is outside the range that eyas is tested with ({tested})"


def environment(version: str) -> dict[str, str]:
    """Variables that a capturing server of this version needs."""
    return {} if parse(version) >= NAMED_ROWS else {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def check_installed() -> None:
    """Inside vLLM's process. Raises RuntimeError outside the tested range."""
    from vllm import __version__

    if (wrong := problem(__version__)) is not None:
        raise RuntimeError(f"eyas capture: {wrong}")


def row_starts(hook: dict[str, Any]) -> dict[str, int] | None:
    """First row of each request of a step, from the keyword arguments of `start_load_kv`; None where it names none."""
    if hook.get("request_ids") is None:
        return None
    names: Sequence[str] = hook["request_ids"]
    counts: dict[str, int] = hook["scheduler_output"].num_scheduled_tokens
    starts, at = {}, 0
    for name in names:
        starts[name] = at
        at += counts[name]
    return starts
