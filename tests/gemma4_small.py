"""A small decoder of random weights, for tests that need no one else's numbers."""

import dataclasses
import functools as ft
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.gemma4 import weights
from examples.gemma4.config import FULL, SLIDING, load_config

DATA = Path(__file__).parent / "data" / "gemma4"


@ft.cache
def small(
    kinds: tuple[str, ...] = (FULL, SLIDING, SLIDING, FULL),
    readers: int = 2,
    shape: tuple[int, int] = (2, 7),
) -> tuple[Any, jax.Array]:
    """A donor and a reader of each kind, and a batch of ids."""
    config = load_config(DATA / "tiny_e2b")
    config = dataclasses.replace(config, layer_types=kinds, num_kv_shared_layers=readers)
    rng = np.random.default_rng(0)

    def random(x):
        normal = rng.normal(size=x.shape)
        # Norms near 0.6, which keeps the unscaled scores small; matrices of unit gain.
        value = 0.6 + 0.2 * normal if len(x.shape) == 1 else normal * x.shape[1] ** -0.5
        return jnp.asarray(value, jnp.float32)

    model = jax.tree.map(random, weights.abstract(config))
    return model, jnp.asarray(rng.integers(3, config.vocab_size, shape))
