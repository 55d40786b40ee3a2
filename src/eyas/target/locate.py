"""A target's path or hub id to a local directory."""

import re
from pathlib import Path

from eyas.errors import InputError

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt"]


def locate(path_or_id: str, *, remote_code: bool = False) -> Path:
    """The checkpoint's directory; a hub id is downloaded (or found in the local cache). InputError when neither
    is there."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise InputError(f"target.path {path_or_id} is a file", fix="give the checkpoint's directory")
    if not _HUB_ID.match(path_or_id):
        raise InputError(
            f"target.path {path_or_id}: no such directory",
            fix="give a checkpoint directory or a hub id such as Qwen/Qwen3-8B",
        )
    return _from_hub(path_or_id, remote_code)


def _from_hub(name: str, remote_code: bool) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    patterns = [*_FILES, "*.py"] if remote_code else _FILES
    try:
        return Path(snapshot_download(name, allow_patterns=patterns)).resolve()
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.TransportError, OSError) as e:
        if isinstance(e, HfHubHTTPError):
            raise InputError(
                f"target.path {name}: the hub refused it ({_first_line(e)})",
                fix="check the name; a gated model needs `hf auth login`",
            ) from None
        raise InputError(
            f"target.path {name} is no local directory, is not in the local cache, and the hub cannot be "
            f"reached ({_first_line(e)})",
            fix="download the checkpoint where there is a network, and give its directory",
        ) from None


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no message'}"
