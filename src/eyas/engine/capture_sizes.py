"""How large the capturing server's buffers are. Imports nothing: `eyas plan` reads it without loading a framework."""

RING = 4
"""steps whose rows may be on their way to the filing process; each takes as much host memory as the static buffer, and
beside a GPU as much of its memory"""
_ROW_ALIGN = 64  # runners pad the token count (tensor parallel multiples, graph sizes)


def buffer_rows(step_tokens: int) -> int:
    """Rows of the static buffer of a server whose steps have at most `step_tokens` tokens."""
    return -(-step_tokens // _ROW_ALIGN) * _ROW_ALIGN + _ROW_ALIGN
