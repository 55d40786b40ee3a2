"""What of the recipe's draft section decides the drafter that a training begins with. Imports no torch."""

from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.files import sampled_fingerprint
from eyas.recipe import DraftPart
from eyas.rundir import RunDir


def draft_inputs(part: DraftPart) -> dict[str, Any]:
    """The section, with what `draft.from` holds now: its path alone would not tell of another drafter there."""
    found: dict[str, Any] = dict(part.model_dump(mode="json", by_alias=True))
    if part.from_ is not None:
        files = [Path(part.from_) / name for name in ("config.json", "model.safetensors")]
        found["what draft.from holds"] = [sampled_fingerprint(file) for file in files if file.is_file()]
    return found


def check_place(part: DraftPart, run: RunDir) -> None:
    """Raises InputError for a drafter that the training, or the export after it, moves or replaces."""
    if part.from_ is None:
        return
    place = Path(part.from_).resolve()
    for own in (run.train, run.drafter):
        if place.is_relative_to(own.resolve()):
            raise InputError(
                f"draft.from: {part.from_} lies in this run's {own.name}/, which a new training replaces",
                fix="copy it to another place and name that, or choose another run_dir",
            )
