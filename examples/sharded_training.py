# %% [markdown]
# # Sharded training with Optax, on 8 simulated devices
#
# Weights and optimiser state are split over all devices, and so is the batch (FSDP). Nothing about the
# layers changes: shardings go through the boundary.

# %%
import os

if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # before jax starts
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from remat_scan import checkpointed_layer, memory_report

mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec("fsdp"))


@checkpointed_layer
def layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def init(key: jax.Array) -> dict[str, jax.Array]:
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (32, 128)) / 32**0.5,
        "down": jax.random.normal(down, (128, 32)) / 128**0.5,
    }


weights = [init(k) for k in jax.random.split(jax.random.key(0), 4)]
weights = jax.device_put(weights, rows)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
state = optimizer.init(weights)


# %%
def loss(weights: list[Any], x: jax.Array, y: jax.Array) -> jax.Array:
    for w in weights:
        x = layer(w, x)
    return jnp.mean((x - y) ** 2)


@jax.jit
def train_step(weights: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(weights, x, y)
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, value


x = jax.random.normal(jax.random.key(1), (64, 32))
y = jnp.roll(x, 1, axis=-1)  # to be learned
on_one_device = loss(jax.device_get(weights), x, y)
x, y = jax.device_put((x, y), rows)
print(memory_report(train_step, weights, state, x, y, target="cpu:8").table(top=3))

losses = []
for _ in range(40):
    weights, state, value = train_step(weights, state, x, y)
    losses.append(float(value))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert jnp.allclose(losses[0], on_one_device, rtol=1e-5)
assert losses[-1] < 0.5 * losses[0]
assert weights[0]["up"].sharding.is_equivalent_to(rows, 2)
