"""Measurements behind every figure in the README and the docs: `python -m benchmarks --help`."""
