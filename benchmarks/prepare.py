"""Rate and peak memory of the prepare stage.

    python benchmarks/prepare.py --target DIR --prompts prompts.jsonl [--synthetic 500000] [--responses keep]

`peak_growth_mb` is the memory above what the imports and the tokenizer take: constant in the number of rows but for the
set of ids that finds duplicates.
"""

import argparse
import datetime
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eyas.data.prepare import prepare
from eyas.progress import Progress
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.resolve import resolve_target

WANTED_SECONDS = 60.0
"""for the 11,773 rows of the reference file on two cores"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--synthetic", type=int, help="also a file of so many rows, made from the prompts")
    parser.add_argument("--responses", choices=["regenerate", "keep"], default="regenerate")
    parser.add_argument("--machine", default="cpu2")
    args = parser.parse_args()
    measurements = {}
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.jsonl"
        multiply(args.prompts, small, 256)
        measure(args, small, Path(folder) / "warm")  # imports, the tokenizer, and pyarrow's pools
        measurements["prompts"] = measure(args, args.prompts, Path(folder) / "run")
        if args.synthetic:
            large = Path(folder) / "large.jsonl"
            multiply(args.prompts, large, args.synthetic)
            measurements["synthetic"] = measure(args, large, Path(folder) / "large")
    ratios = {"of_wanted_time": measurements["prompts"]["seconds"] / WANTED_SECONDS}
    print(f"{'file':12}{'rows':>10}{'seconds':>10}{'rows/s':>10}{'tokens/s':>12}{'growth MB':>11}")
    for name, m in measurements.items():
        print(
            f"{name:12}{m['rows']:>10,}{m['seconds']:>10.1f}{m['rows_per_s']:>10,.0f}{m['tokens_per_s']:>12,.0f}"
            f"{m['peak_growth_mb']:>11.0f}"
        )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "benchmark": "prepare",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "machine": args.machine,
        "command": "python benchmarks/prepare.py " + " ".join(sys.argv[1:]),
        "measurements": measurements,
        "ratios": ratios,
    }
    path = Path(__file__).parent / "results" / f"prepare-{args.machine}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def measure(args: argparse.Namespace, prompts: Path, root: Path) -> dict[str, float]:
    recipe = Recipe.model_validate(
        {
            "run_dir": str(root),
            "target": {"path": args.target},
            "data": {"prompts": [str(prompts)], "responses": args.responses, "max_length": 4096},
        }
    )
    before, begin = peak_mb(), time.perf_counter()
    counts = prepare(recipe, resolve_target(args.target), RunDir(root), Progress(quiet=True))
    seconds = time.perf_counter() - begin
    return {
        "rows": counts["rows"],
        "conversations": counts["conversations"],
        "seconds": round(seconds, 2),
        "rows_per_s": round(counts["rows"] / seconds, 1),
        "tokens_per_s": round(counts["tokens"] / seconds, 1),
        "peak_mb": round(peak_mb(), 1),
        "peak_growth_mb": round(peak_mb() - before, 1),
    }


def multiply(source: Path, path: Path, rows: int) -> None:
    """Writes `rows` distinct conversations: the source's, each time with another number before the question."""
    written = 0
    with open(path, "w", encoding="utf-8") as out:
        while written < rows:
            with open(source, encoding="utf-8") as lines:
                for line in lines:
                    row = json.loads(line)
                    row["messages"][0]["content"] = f"{written}. {row['messages'][0]['content']}"
                    out.write(json.dumps(row) + "\n")
                    written += 1
                    if written == rows:
                        return


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
