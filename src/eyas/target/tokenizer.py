"""The target's tokenizer with its chat template."""

from typing import TYPE_CHECKING

from eyas.errors import InputError
from eyas.target.info import TargetInfo
from eyas.target.tokens import chat_template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(info: TargetInfo, remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """A transformers tokenizer, fast or slow. Raises InputError when it cannot be loaded, has no chat template, or has
    tokens beyond the embedding's rows."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(info.path), trust_remote_code=remote_code, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as e:
        text = " ".join(str(e).split())
        needs_code = "trust_remote_code" in text
        raise InputError(
            f"{info.path}: the tokenizer cannot be loaded: {text[:300]}",
            fix="set target.remote_code: true if you trust the checkpoint's code"
            if needs_code
            else "complete the tokenizer files",
        ) from None
    if not tokenizer.chat_template:
        template = chat_template_text(info.path)
        if not template:
            raise InputError(
                f"{info.path} has no chat template",
                fix="use the instruction-tuned checkpoint, or add chat_template.jinja to it",
            )
        tokenizer.chat_template = template
    if len(tokenizer) > info.vocab_size:
        raise InputError(
            f"{info.path}: the tokenizer has {len(tokenizer)} tokens, the embedding only {info.vocab_size} rows",
            fix="tokenizer and weights are of different checkpoints",
        )
    return tokenizer
