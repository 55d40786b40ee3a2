"""A server's reply to one request, checked against what was asked."""

import math
from pathlib import Path
from typing import Any

from eyas.engine.base import Captured, Completion, Request
from eyas.engine.vllm_server import LAUNCH_LINE, GivenServerError
from eyas.errors import EngineError


def completion(request: Request, reply: dict[str, Any], capture: bool) -> Completion:
    """Checks a reply against what was asked. Raises EngineError naming the request."""

    def wrong(what: str) -> EngineError:
        return EngineError(f"request {request.id}: {what}")

    try:
        choice = reply["choices"][0]
    except (LookupError, TypeError):
        raise wrong(f"expected an answer, found {reply!r:.200}") from None
    prompt, output = choice.get("prompt_token_ids"), choice.get("token_ids")
    if prompt is None or output is None:
        raise wrong("the server returned no token ids (return_token_ids); it must be vLLM 0.26 or newer")
    if prompt != request.prompt_ids:
        raise wrong(
            f"the engine consumed {len(prompt)} prompt tokens that are not the {len(request.prompt_ids)} that were sent"
        )
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if logprobs is None or len(logprobs) != len(output) or not all(_is_logprob(x) for x in logprobs):
        raise wrong(f"expected {len(output)} log probabilities, found {logprobs!r:.200}")
    if not 0 < len(output) <= request.max_tokens:
        raise wrong(f"expected 1 to {request.max_tokens} tokens, found {len(output)}")
    of_prompt = None
    if request.prompt_logprobs:
        entries = choice.get("prompt_logprobs") or []
        if len(entries) != len(prompt):
            raise wrong(f"expected {len(prompt)} prompt log probabilities, found {len(entries)}")
        of_prompt = [float(entry[str(token)]["logprob"]) for token, entry in zip(prompt[1:], entries[1:], strict=True)]
    captured = None
    if capture:
        told = (reply.get("kv_transfer_params") or {}).get("capture")
        if told is None:
            none = wrong(f"the server kept no hidden states (finish reason {choice['finish_reason']})")
            if choice["finish_reason"] == "abort":
                raise none
            raise GivenServerError(none.message, fix=f"start it with {LAUNCH_LINE}")  # ours always keeps them
        captured = Captured(Path(told["path"]), told["index"], told["rows"])
        if captured.rows != len(prompt) + len(output) - 1:
            raise wrong(f"{captured.rows} rows of hidden states for {len(prompt)} + {len(output)} tokens")
    return Completion(request.id, prompt, output, logprobs, of_prompt, choice["finish_reason"], captured)


def _is_logprob(x: object) -> bool:
    return isinstance(x, float | int) and math.isfinite(x) and x <= 0
