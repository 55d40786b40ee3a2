"""Trains the tiny run in two ranks of torchrun; run from tests/: -m train.launched ROOT."""

import json
import sys
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.train.launch import train_in_ranks

from .tiny_run import tiny_recipe, tiny_target

SETTINGS: dict[str, Any] = {"epochs": 12, "tokens_per_batch": 32, "save_every": 999, "eval_every": 999}


def main() -> int:
    root = Path(sys.argv[1])
    target = tiny_target(root / "target")
    try:
        counts = train_in_ranks(tiny_recipe(root, **SETTINGS), target, RunDir(root), Progress(), 2)
    except KeyboardInterrupt:
        return 130
    except EyasError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
