"""Loaded by vLLM (entry point vllm.general_plugins): keeps chosen layers' hidden states of each step in one buffer.

Inert unless EYAS_CAPTURE_ARCH names the target's architecture (the outer one of config.json): a general plugin runs
before any configuration exists, so this one variable, set by eyas for its own server process, is how it learns of
its job. Layers:
    --additional-config '{"eyas": {"layers": [2, 15, 27, 30]}}'
k is the residual stream after k layers; k = num_hidden_layers is the state before the final norm.
`additional_config` is part of vLLM's compile-cache key, so a graph compiled for other layers is never reused.

The architecture is registered again under its own name as a thin subclass. It asks the model's own SupportsEagle3
interface for the layers, copies them into a static buffer and returns what the plain model would. The copy lies
outside the torch.compile region (the inner decoder) and inside the region that a full CUDA graph records. Which row
belongs to which request is eyas.engine.capture_connector's business.
"""

import functools
import os
from typing import Any

import torch

from eyas.engine import vllm_versions
from eyas.engine.capture_sizes import RING, buffer_rows
from eyas.engine.vllm_versions import ARCH_VARIABLE

_registered: dict[str, Any] = {}


class Tap:
    """The static buffer of this process. rows [N, layers, hidden]; numbers [2, N]; N: the most of one step."""

    def __init__(self, vllm_config: Any, layers: tuple[int, ...], device: torch.device) -> None:
        tokens = buffer_rows(vllm_config.scheduler_config.max_num_batched_tokens)
        model = vllm_config.model_config
        self.layers = layers
        self.rows = torch.zeros(tokens, len(layers), model.get_hidden_size(), dtype=model.dtype, device=device)
        self.numbers = torch.full((2, tokens), -1, dtype=torch.int64, device=device)
        """positions as the model saw them, and tokens; -1 where positions have several components (M-RoPE), or where
        the model was given embeddings"""
        self.staging = [torch.empty_like(self.rows) for _ in range(RING)] if self.rows.is_cuda else []
        """for eyas.engine.capture_copy; allocated with the weights, so that vLLM's memory profile counts it"""

    def keep(self, states: list[torch.Tensor], positions: torch.Tensor, ids: torch.Tensor | None) -> None:
        """states: one [tokens, hidden] for each layer; positions [tokens] or [components, tokens]; ids [tokens]."""
        tokens = states[0].shape[0]
        if tokens > self.rows.shape[0]:
            raise RuntimeError(f"eyas capture: a step of {tokens} rows, room for {self.rows.shape[0]}")
        for i, state in enumerate(states):
            self.rows[:tokens, i].copy_(state)
        if positions.ndim == 1:
            self.numbers[0, :tokens].copy_(positions)
        if ids is not None:
            self.numbers[1, :tokens].copy_(ids)
        else:
            self.numbers[1, :tokens].fill_(-1)


_tap: Tap | None = None


def tap() -> Tap:
    """The buffer of this worker process. Raises RuntimeError where the model was loaded without one."""
    if _tap is None:
        raise RuntimeError(
            f"eyas capture: the loaded model has no buffer; set {ARCH_VARIABLE} to the target's architecture "
            'and give layers in --additional-config \'{"eyas": {"layers": [...]}}\''
        )
    return _tap


def chosen_layers(vllm_config: Any) -> tuple[int, ...]:
    """The layers of --additional-config, ascending. Raises ValueError on anything but distinct layers of 1..depth."""
    options = (vllm_config.additional_config or {}).get("eyas") or {}
    layers = options.get("layers", [])
    depth = vllm_config.model_config.hf_text_config.num_hidden_layers
    # layer 0 (embeddings) makes some architectures fail in the first forward pass, and no drafter uses it
    if any(not isinstance(k, int) or not 1 <= k <= depth for k in layers) or list(layers) != sorted(set(layers)):
        raise ValueError(f"eyas capture: layers must be distinct, ascending and within 1..{depth}, found {layers}")
    return tuple(layers)


@functools.cache
def capturing(base: Any) -> Any:
    """The subclass of a vLLM model class that keeps its hidden states."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(base):
        raise TypeError(
            f"eyas capture: {base.__name__} cannot return hidden states of inner layers (no SupportsEagle3)"
        )

    class Capturing(base):
        _eyas_tap: Tap | None = None
        _eyas_layers: tuple[int, ...] = ()
        """what the inner model returns: ours and the drafter's, ascending"""
        _eyas_drafter_layers: tuple[int, ...] = ()

        @functools.wraps(base.__init__)  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            global _tap
            super().__init__(*args, **kwargs)
            vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
            layers = chosen_layers(vllm_config)
            if layers and _tap is None:  # the first instance is the target; a drafter of the same class stays plain
                _tap = self._eyas_tap = Tap(vllm_config, layers, torch.get_default_device())
                self._eyas_layers = layers
                super().set_aux_hidden_state_layers(layers)

        def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
            """Called by the runner when an EAGLE-3 drafter is served too: it gets its layers, we keep ours."""
            self._eyas_drafter_layers = tuple(sorted(set(layers)))
            ours = self._eyas_tap.layers if self._eyas_tap is not None else ()
            self._eyas_layers = tuple(sorted({*self._eyas_drafter_layers, *ours}))
            super().set_aux_hidden_state_layers(self._eyas_layers)

        @functools.wraps(base.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if self._eyas_tap is None:
                return out
            hidden, states = out
            by_layer = dict(zip(self._eyas_layers, states, strict=True))
            positions = kwargs["positions"] if "positions" in kwargs else args[1]
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._eyas_tap.keep([by_layer[k] for k in self._eyas_tap.layers], positions, ids)
            if self._eyas_drafter_layers:
                return hidden, [by_layer[k] for k in self._eyas_drafter_layers]
            return hidden

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Capturing, name, getattr(base, name))
    return Capturing


def register() -> None:
    """The entry point; called in every process of vLLM, possibly more than once."""
    architecture = os.environ.get(ARCH_VARIABLE)
    if not architecture or architecture in _registered:
        return
    vllm_versions.check_installed()
    from vllm import ModelRegistry, __version__

    if architecture not in ModelRegistry.models:
        raise RuntimeError(
            f"eyas capture: {ARCH_VARIABLE} is {architecture!r}, which this vLLM {__version__} does not know"
        )
    _registered[architecture] = ModelRegistry.models[architecture]
    # vLLM caches a class's properties by its name and this file's hash: the name carries the version
    version = "".join(c if c.isalnum() else "_" for c in __version__)
    ModelRegistry.register_model(architecture, f"{__name__}:capturing__{architecture}__{version}")


def __getattr__(name: str) -> Any:
    """capturing__ARCHITECTURE__VERSION: the class, built when vLLM loads it, not when the plugin registers it."""
    if name.startswith("capturing__"):
        return capturing(_registered[name.split("__")[1]].load_model_cls())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
