"""vLLM's own example connector for hidden states, on a machine without CUDA: its copy is made at once."""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector


class _Done:
    """In place of a CUDA event."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class ExampleOnCpu(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        cache = self._kv_cache
        blocks = torch.tensor(pending.block_ids)
        within = torch.arange(len(pending.token_ids))
        rows = cache[blocks[within // self._block_size], :, within % self._block_size].contiguous()
        save_file({"hidden_states": rows, "token_ids": pending.token_ids}, pending.filename)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = _Done()
