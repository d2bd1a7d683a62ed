"""remat_scan makes ``jax.checkpoint`` keep its promise: one layer's working set alive at a time."""

__version__ = "0.1.0"
