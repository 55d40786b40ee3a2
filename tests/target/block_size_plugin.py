"""A vLLM plugin for tests alone: on a CPU, vLLM finds no block size that an MLA target and a Llama drafter share.

Its CPU backend allows Llama layers blocks of 32 tokens and more, the latent cache of a tiny MLA target wants others.
Blocks of any multiple of 16 compute the same; the plugin says so. On a GPU nothing of it is needed.
"""

from pathlib import Path

MODULE = """
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


def register():
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
"""


def write_block_size_plugin(directory: Path) -> Path:
    """An installed package, as far as importlib.metadata can tell, for whoever has `directory` on PYTHONPATH."""
    about = directory / "small_blocks-0.dist-info"
    about.mkdir(parents=True)
    (directory / "small_blocks.py").write_text(MODULE, encoding="utf-8")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: small-blocks\nVersion: 0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nsmall_blocks = small_blocks:register\n", encoding="utf-8"
    )
    return directory
