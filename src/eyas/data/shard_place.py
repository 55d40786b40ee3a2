"""Where an engine may leave its shards: in this run's states directory, or in one that is no other run's."""

from pathlib import Path

from eyas.errors import InputError
from eyas.rundir import RunDir


def check_place(directory: Path, run: RunDir) -> None:
    """Raises InputError for another run's directory: shards would be moved out of it, and that run, when it is
    continued, deletes what it did not commit, the shards of this one too."""
    found, ours = directory.resolve(), run.root.resolve()
    for place in (found, found.parent):
        other = RunDir(place)
        if place != ours and (other.run_json.exists() or other.target_json.exists()):
            raise InputError(
                f"the server of engine.urls leaves its hidden states in {found}, which belongs to the run {place}; "
                f"expected {run.states.resolve()}, or a directory of no run",
                fix="start the server with the launch line that `eyas plan RECIPE` prints for this recipe, "
                "or give it a directory of its own there (kv_connector_extra_config, dir)",
            )
