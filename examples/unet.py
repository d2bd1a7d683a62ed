# %% [markdown]
# # A U-Net with skip connections
#
# The way down halves the resolution and doubles the channels; the way up reads what the way down left
# behind. No two blocks are alike, and each skip connection lives from one end of the network to the
# other. Checkpointing block by block leaves the skips as ordinary values between blocks.

# %%
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from remat_scan import checkpointed_layer, compare_reports, memory_report

CHANNELS = (4, 8, 16)


def conv(w: jax.Array, x: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def down(w: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the input of the next, coarser level, and the skip connection."""
    skip = jax.nn.gelu(conv(w["b"], jax.nn.gelu(conv(w["a"], x))))
    return conv(w["half"], skip, stride=2), skip


def up(w: dict[str, jax.Array], x: jax.Array, skip: jax.Array) -> jax.Array:
    x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
    x = jnp.concatenate([conv(w["double"], x), skip], axis=-1)
    return jax.nn.gelu(conv(w["b"], jax.nn.gelu(conv(w["a"], x))))


def init(key: jax.Array, in_channels: int = 3) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 64))

    def kernel(c_in: int, c_out: int) -> jax.Array:
        return jax.random.normal(next(keys), (3, 3, c_in, c_out)) / (9 * c_in) ** 0.5

    sizes = (in_channels, *CHANNELS)
    downs = [
        {"a": kernel(i, o), "b": kernel(o, o), "half": kernel(o, o)}
        for i, o in itertools.pairwise(sizes)
    ]
    ups = [
        {"double": kernel(coarse, c), "a": kernel(2 * c, c), "b": kernel(c, c)}
        for c, coarse in zip(CHANNELS[::-1], (CHANNELS[-1], *CHANNELS[:0:-1]), strict=True)
    ]
    return {"down": downs, "up": ups, "head": kernel(CHANNELS[0], in_channels)}


def loss(wrap: Callable[[Any], Any], weights: dict[str, Any], x: jax.Array) -> jax.Array:
    h, skips = x, []
    for w in weights["down"]:
        h, skip = wrap(down)(w, h)
        skips.append(skip)
    for w in weights["up"]:
        h = wrap(up)(w, h, skips.pop())
    return jnp.mean((conv(weights["head"], h) - x) ** 2)


# %%
weights = init(jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
plain = jax.jit(jax.grad(lambda w: loss(lambda f: f, w, x)))(weights)
ours = jax.jit(jax.grad(lambda w: loss(checkpointed_layer, w, x)))(weights)
worst = max(
    float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a)))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True)
)
print(f"gradients agree to {worst:.0e} (relative)")
assert worst < 1e-4

# %% [markdown]
# What a larger image needs:

# %%
image = jax.ShapeDtypeStruct((8, 128, 128, 3), jnp.float32)
reports = {
    name: memory_report(jax.grad(lambda w, x, f=wrap: loss(f, w, x)), weights, image, target="cpu")
    for name, wrap in {"no remat": lambda f: f, "loop": checkpointed_layer}.items()
}
print(compare_reports(reports))
