"""`python tests/properties.py`: random layers against the plain loop, 2,000 examples.

In parts, each in a process of its own and with a seed of its own, so that compiled programs do not pile
up. Writes `benchmarks/results/properties.json`, a row for each part; pytest's own output is shown.
"""

import argparse
import json
import os
import re
import subprocess
import sys
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
    parser.add_argument("--examples", type=int, default=2000, help="of each test (2000)")
    parser.add_argument("--part", type=int, default=250, help="as many in one process (250)")
    parser.add_argument("--seed", type=int, default=0, help="of the first part")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    chosen = options.pytest or [str(ROOT / "tests" / "test_properties.py"), "-k", "random_stacks"]
    stored = json.loads(options.output.read_text()) if options.output.exists() else []
    code = 0
    for i, done in enumerate(range(0, options.examples, options.part)):
        seed, count = options.seed + i, min(options.part, options.examples - done)
        part, failed = run(chosen, seed, count)
        code = code or failed
        names = {r["test"] for r in part}
        # A part that is run again takes the place of what it gave before.
        stored = [r for r in stored if r["seed"] != seed or r["test"] not in names] + part
        options.output.write_text(json.dumps(stored, indent=1) + "\n")
    return code


def run(chosen: list[str], seed: int, count: int) -> tuple[list[dict[str, object]], int]:
    """Runs pytest once; returns a row for each test, and its exit code."""
    command = [sys.executable, "-m", "pytest", "--hypothesis-show-statistics", *chosen]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "nightly", "NIGHTLY_EXAMPLES": str(count)}
    pytest = subprocess.run(
        [*command, f"--hypothesis-seed={seed}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(pytest.stdout, flush=True)
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    about = {
        "seed": seed,
        **{name: version(name) for name in ("jax", "jaxlib", "hypothesis")},
        "python": ".".join(map(str, sys.version_info[:3])),
        "commit": commit or "unknown",
    }
    found = [r | about for r in rows(pytest.stdout)]
    if not found:
        print("no hypothesis test ran", file=sys.stderr)
    return found, pytest.returncode or int(not found)


if __name__ == "__main__":
    sys.exit(main())
