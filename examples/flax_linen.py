# %% [markdown]
# # A Flax Linen module
#
# `module.apply` is a function of variables and inputs, so it is a layer as it is, with mutable
# collections among its results. Inside a Linen model the adapter below does the same for a submodule:
# it unbinds it, runs it checkpointed, and puts what changed back. The tree of parameters is that of the
# plain model.

# %%
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_scan import checkpointed_layer


@checkpointed_layer
def _apply(module: nn.Module, variables: Any, rngs: Any, *args: Any) -> tuple[Any, Any]:
    return module.apply(variables, *args, rngs=rngs, mutable=["batch_stats"])


def checkpointed(module: nn.Module, *args: Any, rngs: tuple[str, ...] = ("dropout",)) -> Any:
    """`module(*args)` for a submodule of a Linen module, checkpointed and isolated."""
    if module.is_initializing():
        return module(*args)
    unbound, variables = module.unbind()
    keys = {name: module.make_rng(name) for name in rngs if module.has_rng(name)}
    out, updates = _apply(unbound, variables, keys, *args)
    if module.is_mutable_collection("batch_stats"):
        for name, value in updates.get("batch_stats", {}).items():
            module.put_variable("batch_stats", name, value)
    return out


# %%
class Block(nn.Module):
    hidden: int
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.BatchNorm(use_running_average=not self.train)(x)
        h = nn.Dropout(0.1, deterministic=not self.train)(nn.gelu(nn.Dense(self.hidden)(h)))
        return x + nn.Dense(x.shape[-1])(h)


class Model(nn.Module):
    checkpoint: bool
    train: bool = True

    def setup(self) -> None:
        self.blocks = [Block(hidden, self.train) for hidden in (32, 64, 32)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = checkpointed(block, x) if self.checkpoint else block(x)
        return x


# %% [markdown]
# In evaluation the results are those of the plain model. In training, so are parameters and statistics
# wherever no randomness is involved; a dropout inside `checkpointed` draws from a stream of its own.

# %%
x = jax.random.normal(jax.random.key(1), (32, 16))
ours, plain = Model(checkpoint=True), Model(checkpoint=False)
variables = ours.init({"params": jax.random.key(0), "dropout": jax.random.key(2)}, x)
plain_variables = plain.init({"params": jax.random.key(0), "dropout": jax.random.key(2)}, x)
assert jax.tree.structure(variables) == jax.tree.structure(plain_variables)

evaluated: list[Any] = [
    Model(checkpoint=checkpoint, train=False).apply(variables, x) for checkpoint in (True, False)
]
assert jnp.allclose(*evaluated, atol=1e-5)


def loss(model: Model, params: Any, batch_stats: Any, key: jax.Array) -> tuple[jax.Array, Any]:
    y, updates = model.apply(
        {"params": params, "batch_stats": batch_stats},
        x,
        rngs={"dropout": key},
        mutable=["batch_stats"],
    )
    return jnp.mean((y - jnp.roll(x, 1, -1)) ** 2), updates["batch_stats"]


step = jax.jit(jax.value_and_grad(loss, argnums=1, has_aux=True), static_argnums=0)
params, stats, losses = variables["params"], variables["batch_stats"], []
for key in jax.random.split(jax.random.key(3), 5):
    (value, new_stats), gradients = step(ours, params, stats, key)
    (_, plain_stats), _ = step(plain, params, stats, key)
    first = "blocks_0"  # the statistics of the first block depend on the input alone
    for a, b in zip(
        jax.tree.leaves(new_stats[first]), jax.tree.leaves(plain_stats[first]), strict=True
    ):
        assert jnp.allclose(a, b, atol=1e-5)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    stats = new_stats
    losses.append(float(value))
print("losses:", " ".join(f"{value:.4f}" for value in losses))
assert losses[-1] < losses[0]
