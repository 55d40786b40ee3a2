"""Which options of `vllm serve` a recipe's engine.args may not give. Imports nothing: the recipe reads it."""

import re
from collections.abc import Mapping
from typing import Any

_LOOPBACK = (
    "a server that eyas starts listens on loopback alone, with a random key; name one of your own in engine.urls"
)
_CAPTURE = "eyas itself tells the server what to capture, and where to: leave it out"
_SAMPLING = "sampling comes with each request: set engine.sampling"
_DRAFTER = "a drafter is served by the verify stage: set verify.speculative_tokens"

OWNED = {
    "model": "set target.path",
    "config": "write what that file holds below engine.args",
    "dtype": "set engine.dtype",
    "tensor-parallel-size": "set engine.tensor_parallel",
    "attention-backend": "set engine.attention_backend",
    "max-model-len": "it follows from data.max_length",
    **dict.fromkeys(("host", "port", "uds", "api-key", "ssl-keyfile", "ssl-certfile"), _LOOPBACK),
    **dict.fromkeys(("kv-transfer-config", "additional-config"), _CAPTURE),
    **dict.fromkeys(("generation-config", "override-generation-config"), _SAMPLING),
    **dict.fromkeys(("speculative-config", "spec-method", "spec-model", "spec-tokens"), _DRAFTER),
}
"""options that eyas sets, or that would undo those; each with what to do instead"""

ONE_RANK = {
    "pipeline-parallel-size": "pipeline parallelism",
    "prefill-context-parallel-size": "prefill context parallelism",
    "decode-context-parallel-size": "decode context parallelism",
    "ubatch-size": "dual-batch overlap",
    "enable-dbo": "dual-batch overlap",
}
"""what would overwrite, permute or move captured rows to other ranks; the connector refuses it too, once it loads"""


def refused(args: Mapping[str, Any]) -> str | None:
    """What is wrong with `engine.args`, and after " - " what to do; None where nothing is."""
    for key, value in args.items():
        name = re.split(r"[.=]", key.lstrip("-").replace("_", "-"))[0]  # vLLM takes NAME.KEY and NAME=VALUE too
        if name in OWNED:
            return f"engine.args.{key} would replace what eyas sets - {OWNED[name]}"
        if name in ONE_RANK and str(value).lower() not in ("0", "1", "false", "none"):
            return f"engine.args.{key}: {value}: capture does not work with {ONE_RANK[name]} - leave it out"
    return None
