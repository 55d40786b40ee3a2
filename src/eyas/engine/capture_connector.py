"""A KV connector that stores no KV: it tells the worker which rows of a step belong to which capturing request.

    --kv-transfer-config '{"kv_connector": "Capture", "kv_connector_module_path": "eyas.engine.capture_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"dir": "/data/states", "shard_mb": 64, "shard_s": 5, "arena_gb": 64}}'
beside eyas.engine.capture_plugin, which keeps the states. A request opts in with kv_transfer_params {"capture":
true}; its reply carries kv_transfer_params {"capture": {"path", "index", "rows", "request"}}. The shard (format:
eyas.states.shard) appears under `path` once it is whole, some seconds after the reply at most: shards close when
they are full, when they are old, and when no capturing request is live. If it cannot be written, `path`.error says
why. Finished samples wait for their shard in the arena (host memory; by default at most half of the machine's).

An aborted request leaves nothing; a stop string reaches the scheduler as an abort, so capturing requests use stop
token ids. With n > 1 every answer is captured, but a reply has room for one entry: the shard's tokens tell whose. A
capturing request does not read the prefix cache (cached rows are never computed); its blocks still serve others.
Loaded inside vLLM's processes: imports only vLLM, torch, numpy and the capture_* modules beside it. Filing and writing
are done by a process of their own (eyas.engine.capture_filer).
"""

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from eyas.engine import capture_plugin, vllm_versions
from eyas.engine.capture_arena import default_limit
from eyas.engine.capture_process import FilingProcess
from eyas.engine.capture_steps import Books, Finished, Scheduled

EXTRA_KEYS = {"dir", "shard_mb", "shard_s", "arena_gb"}


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Travels from the scheduler to the worker with each step."""

    scheduled: Scheduled = field(default_factory=Scheduled)
    total: int = 0
    """rows of the step, other requests' included"""
    books: Books = field(default_factory=Books)


class Capture(KVConnectorBase_V1, SupportsHMA):
    """One instance in the scheduler, one in each worker; every call goes to the half of its role."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        vllm_versions.check_installed()
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse(vllm_config)
        extra = dict(self._kv_transfer_config.kv_connector_extra_config)
        if "dir" not in extra or not set(extra) <= EXTRA_KEYS:
            raise ValueError(
                f"eyas capture: kv_connector_extra_config needs dir, may have {EXTRA_KEYS}, found {set(extra)}"
            )
        layers = capture_plugin.chosen_layers(vllm_config)
        if not layers:
            raise ValueError('eyas capture: give the layers in --additional-config \'{"eyas": {"layers": [...]}}\'')
        group, block_size, layer_name = _attention_group(kv_cache_config)
        self._scheduler: _Scheduler | None = None
        self._worker: _Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            model = vllm_config.model_config
            row_bytes = len(layers) * model.get_hidden_size() * model.dtype.itemsize
            spec = vllm_config.speculative_config
            # each of up to two steps in flight may count drafts as accepted that are not
            overshoot = 0 if spec is None else 2 * (spec.num_speculative_tokens + 1)
            self._scheduler = _Scheduler(extra, row_bytes, group, block_size, overshoot)
        elif _is_first_tensor_rank():  # states are the same on every rank
            self._worker = _Worker(extra, block_size, layer_name)

    # scheduler

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self._scheduler is not None
        return self._scheduler.step(scheduler_output)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finish(request)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, ())

    # worker

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            assert isinstance(connector_metadata, StepMetadata)
            self._worker.bind(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.locate(forward_context, kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        """Called once the forward pass was launched, before the next one is."""
        if self._worker is not None:
            self._worker.save()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.stop()


class _Scheduler:
    """Knows which requests capture, where their KV blocks are, and which shard a finished one goes to."""

    def __init__(self, extra: dict[str, Any], row_bytes: int, group: int, block_size: int, overshoot: int) -> None:
        self._dir = os.path.abspath(extra["dir"])
        os.makedirs(self._dir, exist_ok=True)
        self._row_bytes, self._group, self._block_size, self._overshoot = row_bytes, group, block_size, overshoot
        self._shard_bytes = int(float(extra.get("shard_mb", 64)) * 2**20)
        self._shard_seconds = float(extra.get("shard_s", 5))
        self._blocks: dict[str, list[int]] = {}
        """live capturing requests and their KV blocks, in order"""
        self._books = Books()
        self._tag = secrets.token_hex(4)
        self._serial = 0
        self._shard: str | None = None
        self._shard_filled = self._shard_samples = 0
        self._shard_opened = 0.0

    def add(self, request: Any) -> None:
        if (request.kv_transfer_params or {}).get("capture") is True:
            self._blocks[request.request_id] = []
            request.skip_reading_prefix_cache = True

    def step(self, output: Any) -> StepMetadata:
        positions: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            if new.req_id in self._blocks:
                positions[new.req_id] = new.num_computed_tokens
                self._blocks[new.req_id] = list(new.block_ids[self._group])
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in self._blocks:
                positions[name] = computed
                if name in cached.resumed_req_ids:  # preempted before: it has other blocks now
                    self._blocks[name] = []
                if blocks is not None:
                    self._blocks[name].extend(blocks[self._group])
        scheduled = Scheduled()
        for name, count in output.num_scheduled_tokens.items():
            if name in positions:
                position = positions[name]
                first = max(position - self._overshoot, 0) // self._block_size
                last = (position + count - 1) // self._block_size
                scheduled.add(name, position, count, first, self._blocks[name][first : last + 1])
        self._close_shard_if_due()
        books, self._books = self._books, Books()
        return StepMetadata(scheduled, output.total_num_scheduled_tokens, books)

    def finish(self, request: Any) -> dict[str, Any] | None:
        name = request.request_id
        if self._blocks.pop(name, None) is None:
            return None
        tokens = np.array(list(request.all_token_ids), dtype=np.int32)
        if request.status == RequestStatus.FINISHED_ABORTED or len(tokens) < 2:
            self._books.dropped.append(name)
            return None
        if self._shard is None:
            self._shard = os.path.join(self._dir, f"{self._tag}-{self._serial:06d}.safetensors")
            self._serial += 1
            self._shard_filled = self._shard_samples = 0
            self._shard_opened = time.monotonic()
        finished = Finished(name, tokens, request.num_prompt_tokens, self._shard)
        self._books.finished.append(finished)
        told = {"path": self._shard, "index": self._shard_samples, "rows": finished.rows, "request": name}
        self._shard_samples += 1
        self._shard_filled += finished.rows * self._row_bytes
        if self._shard_filled >= self._shard_bytes:  # at once: requests that end together fill several
            self._close_shard()
        return {"capture": told}

    def _close_shard_if_due(self) -> None:
        if self._shard is not None:
            old = time.monotonic() - self._shard_opened > self._shard_seconds
            if old or not self._blocks:
                self._close_shard()

    def _close_shard(self) -> None:
        assert self._shard is not None
        self._books.closed.append(self._shard)
        self._shard = None


class _Worker:
    """Takes the captured rows of each step out of the plugin's buffer."""

    def __init__(self, extra: dict[str, Any], block_size: int, layer_name: str) -> None:
        tap = capture_plugin.tap()
        gigabytes = extra.get("arena_gb")
        limit = default_limit() if gigabytes is None else int(float(gigabytes) * 2**30)
        self._filing = FilingProcess(tap, block_size, limit)
        self._layer_name = layer_name
        self._step: StepMetadata | None = None
        self._starts: dict[str, int] | None = None
        self._slots: torch.Tensor | None = None

    def bind(self, step: StepMetadata) -> None:
        # at once, since a step without a forward pass may never reach `save`
        if step.books:
            self._filing.books(step.books)
        self._step = step if step.scheduled.requests else None
        self._filing.hand_over(wait=self._step is None)  # no later step may come
        self._starts = self._slots = None

    def locate(self, forward_context: Any, hook: dict[str, Any]) -> None:
        if self._step is None:
            return
        self._starts = vllm_versions.row_starts(hook)
        if self._starts is None and isinstance(forward_context.slot_mapping, dict):
            slots = forward_context.slot_mapping.get(self._layer_name)
            # a drafter's forward pass may write over the runner's own tensor
            self._slots = None if slots is None else slots[: self._step.total].clone()

    def save(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if self._starts is None and self._slots is None:
            raise RuntimeError(
                "eyas capture: this vLLM's model runner names neither the requests nor the KV slots of its rows; "
                "start it with VLLM_USE_V2_MODEL_RUNNER=0"
            )
        starts = None if self._starts is None else [self._starts.get(name, -1) for name in step.scheduled.requests]
        self._filing.step(step.scheduled, starts, self._slots, step.total)

    def stop(self) -> None:
        self._filing.stop()


def _refuse(vllm_config: Any) -> None:
    """What would overwrite, permute or move rows to other ranks is refused at start."""
    parallel = vllm_config.parallel_config
    wrong = [
        name
        for name, on in (
            ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
            ("prefill context parallelism", parallel.prefill_context_parallel_size > 1),
            ("decode context parallelism", parallel.decode_context_parallel_size > 1),
            ("dual-batch overlap", parallel.use_ubatching),
        )
        if on
    ]
    if wrong:
        raise ValueError(f"eyas capture does not work with {', '.join(wrong)}; start the server without")


def _attention_group(kv_cache_config: Any) -> tuple[int, int, str]:
    """A group of KV layers that has one slot for each token: its index, its block size, and one of its layers."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if "Mamba" not in type(group.kv_cache_spec).__name__:
            return index, group.kv_cache_spec.block_size, group.layer_names[0]
    raise ValueError("eyas capture: the model has no attention layer, so its rows cannot be told apart")


def _is_first_tensor_rank() -> bool:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0
