# %% [markdown]
# # What a training step needs on a TPU and on GPUs, from a laptop
#
# `memory_report` compiles for hardware that is not there. The arrays are only described, so nothing of
# the model's size is ever allocated. For TPU it needs `pip install "remat-scan[tpu-aot]"`, for NVIDIA
# GPUs `"remat-scan[gpu-aot]"`; neither needs a driver or a device.

# %%
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from remat_scan import MissingPluginError, checkpointed_layer, compare_reports, memory_report

LAYERS, WIDTH, HIDDEN, BATCH, LENGTH = 6, 1024, 4096, 4, 2048


def layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    up, down = w["up"].astype(x.dtype), w["down"].astype(x.dtype)
    return x + jax.nn.gelu(x @ up) @ down


def train_step(layer: Any, weights: list[Any], x: jax.Array) -> list[Any]:
    def loss(weights: list[Any]) -> jax.Array:
        h = x
        for w in weights:
            h = layer(w, h)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


# %% [markdown]
# Eight devices are described by an abstract mesh: fully sharded weights in float32, activations in
# bfloat16, split along the batch.

# %%
mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
sharded = NamedSharding(mesh, PartitionSpec("fsdp"))
weights = [
    {
        "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32, sharding=sharded),
        "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32, sharding=sharded),
    }
    for _ in range(LAYERS)
]
x = jax.ShapeDtypeStruct((8 * BATCH, LENGTH, WIDTH), jnp.bfloat16, sharding=sharded)

# %%
ways = {
    "jax.checkpoint": jax.checkpoint(layer),
    "loop": checkpointed_layer(layer, isolation="loop"),
    "barrier": checkpointed_layer(layer, isolation="barrier"),
}
for target in ("h100:8", "tpu7x:2x2x1"):
    try:
        reports = {
            name: memory_report(
                ft.partial(train_step, way), weights, x, target=target, donate_argnums=0
            )
            for name, way in ways.items()
        }
    except MissingPluginError as missing:
        print(missing)
        continue
    print(f"{target}\n{compare_reports(reports)}\n")
    print(f"The loop, in detail:\n{reports['loop'].table(top=4)}\n")
