"""`python tests/properties.py`: the hypothesis tests in their nightly profile, 2,000 examples each.

Writes `benchmarks/results/properties.json`, a row for each test. pytest's own output is shown.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "properties.json"
_COUNTS = re.compile(r"- (\d+) passing, (\d+) failing, and (\d+) invalid test cases")


def rows(output: str) -> list[dict[str, object]]:
    """What hypothesis says of each test: its name stands before what was counted."""
    found = []
    for block in re.split(r"^(?=tests/\S+::\S+:$)", output, flags=re.MULTILINE)[1:]:
        counts = [tuple(map(int, c)) for c in _COUNTS.findall(block)]
        seconds = re.findall(r"during \w+ phase \(([\d.]+) seconds\)", block)
        found.append(
            {
                "test": block.partition("\n")[0].removesuffix(":"),
                "examples": sum(passing + failing for passing, failing, _ in counts),
                "failures": sum(failing for _, failing, _ in counts),
                "seconds": round(sum(map(float, seconds))),
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="nightly", choices=("quick", "ci", "nightly"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    chosen = options.pytest or [str(ROOT / "tests" / "test_properties.py"), "-k", "random_stacks"]
    command = [sys.executable, "-m", "pytest", "--hypothesis-show-statistics", *chosen]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": options.profile}
    start = time.perf_counter()
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(run.stdout)
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    about = {
        "profile": options.profile,
        **{name: version(name) for name in ("jax", "jaxlib", "hypothesis")},
        "python": ".".join(map(str, sys.version_info[:3])),
        "commit": commit or "unknown",
    }
    found = rows(run.stdout)
    if not found:
        print(f"no hypothesis test ran in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        return run.returncode or 1
    options.output.write_text(json.dumps([r | about for r in found], indent=1) + "\n")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
