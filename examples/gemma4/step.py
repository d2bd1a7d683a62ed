"""One step of training, for devices that are here or only described.

`make_train_step(config, mesh)` and `abstract_state(config, mesh)` are all that a benchmark needs to
compile the same step for hardware that is not there.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Float, Int

from .attention import Kernel, Sharded
from .config import FULL, Config
from .loss import next_token_loss
from .model import Gemma4
from .sharding import AnyMesh, batch_sharding, is_stacked, on_mesh, rows_on_mesh, shardings
from .weights import load as load_weights


class State(NamedTuple):
    """What a step changes: float32 weights, and the optimiser's moments beside them."""

    model: Gemma4
    optimizer: Any


class Metrics(NamedTuple):
    """**Attributes:** `loss` in nats a token, without z-loss; `grad_norm` before clipping."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]


Batch = Int[Array, "B T"]
Step = Callable[[State, Batch], tuple[State, Metrics]]


def make_optimizer(
    *,
    learning_rate: float = 3e-4,
    warmup: int = 100,
    steps: int = 1000,
    weight_decay: float = 0.1,
    clip: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW with the gradient clipped to a global norm.

    The learning rate rises over `warmup` steps and falls along a cosine to a tenth at `steps`.
    Matrices decay, vectors do not; `layer_scalar` is a buffer in transformers and stays as it is.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, min(warmup, steps), max(steps, warmup + 1), learning_rate / 10
    )
    return optax.chain(
        optax.masked(optax.set_to_zero(), _layer_scalars),
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_matrices),
    )


def _layer_scalars(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "name", None) == "layer_scalar", tree
    )


def _matrices(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim - is_stacked(path) >= 2, tree)


def abstract_state(
    config: Config,
    mesh: AnyMesh,
    optimizer: optax.GradientTransformation | None = None,
    *,
    periods: bool = False,
) -> State:
    """The shapes and shardings of a training state; takes no memory."""
    optimizer = make_optimizer() if optimizer is None else optimizer
    shapes = jax.eval_shape(_new_state(config, optimizer, periods), jax.random.key(0))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings(shapes, mesh, config),
    )


def init_state(
    config: Config,
    mesh: AnyMesh,
    optimizer: optax.GradientTransformation | None = None,
    *,
    seed: int = 0,
    weights: Path | None = None,
    periods: bool = False,
) -> State:
    """A new state, each device making its own part. The same numbers on every mesh.

    **Arguments:**

    - `weights`: a Hugging Face checkpoint to start from instead of random numbers.
    - `periods`: the model as its `in_periods` has it. Loaded weights are then there twice until they
        are stacked.
    """
    optimizer = make_optimizer() if optimizer is None else optimizer
    abstract = abstract_state(config, mesh, optimizer, periods=periods)
    places = jax.tree.map(lambda x: x.sharding, abstract)
    if weights is None:
        new_state = _new_state(config, optimizer, periods)
        return jax.jit(new_state, out_shardings=places)(jax.random.key(seed))
    model = load_weights(weights, abstract_state(config, mesh, optimizer).model)
    if periods:
        model = model.in_periods()
    init: Any = optimizer.init
    return State(model, jax.jit(init, out_shardings=places.optimizer)(model))


def _new_state(
    config: Config, optimizer: optax.GradientTransformation, periods: bool
) -> Callable[..., State]:
    init: Any = optimizer.init  # optax types parameters as pytrees other than modules

    def new_state(key: Array) -> State:
        model = Gemma4(config, key=key)
        if periods:
            model = model.in_periods()
        return State(model, init(model))

    return new_state


def abstract_batch(mesh: AnyMesh, batch: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=batch_sharding(mesh))


def make_train_step(
    config: Config,
    mesh: AnyMesh,
    optimizer: optax.GradientTransformation | None = None,
    *,
    policy: Any = "full",
    isolation: str = "loop",
    kernel: Kernel = "auto",
    compute: DTypeLike = jnp.bfloat16,
    rows: int | None = None,
    periods: bool = False,
    loss_block: int = 4096,
    z_loss: float = 0.0,
) -> Step:
    """`step(state, batch) -> (state, metrics)` under `jax.jit`, with the state donated.

    **Arguments:**

    - `mesh`: where the state and the batch lie; an abstract one for a step that is only compiled.
    - `policy`, `isolation`: what each layer keeps for the backward pass, and what keeps layers
        apart, as for `remat_scan.checkpointed_layer`.
    - `kernel`: the attention kernel. On several devices each runs it on its own rows and heads.
    - `compute`: the dtype of activations and of the weights where they are used.
    - `rows`: how many rows of its batch a device runs through a layer at a time; all by default.
    - `periods`: for a state with `periods`.
    - `loss_block`: how many tokens' logits exist at a time, of all devices together.
    """
    optimizer = make_optimizer() if optimizer is None else optimizer
    places = jax.tree.map(
        lambda x: x.sharding, abstract_state(config, mesh, optimizer, periods=periods)
    )
    update: Any = optimizer.update  # optax types the parameters as other pytrees than modules
    kernel = _on_each_device(kernel, mesh, config)
    blocks = rows_on_mesh(rows, mesh, config)

    def loss_of(model: Gemma4, batch: Batch) -> tuple[Array, Array]:
        loss = next_token_loss(
            on_mesh(model, mesh),
            batch,
            block_tokens=loss_block,
            z_loss=z_loss,
            dtype=compute,
            policy=policy,
            isolation=isolation,
            kernel=kernel,
            rows=blocks,
        )
        return loss.total, loss.cross_entropy

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        (_, loss), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.model, batch)
        # Where the weights are, so that sums over the batch need not be had by every device.
        gradients = jax.lax.with_sharding_constraint(gradients, places.model)
        updates, moments = update(gradients, state.optimizer, state.model)
        model = jax.tree.map(jnp.add, state.model, updates)
        state = State(model, moments)
        state = jax.lax.with_sharding_constraint(state, places)
        return state, Metrics(loss, optax.tree.norm(gradients))

    return jax.jit(train_step, donate_argnums=0)


def _on_each_device(kernel: Kernel, mesh: AnyMesh, config: Config) -> Kernel:
    if callable(kernel) or math.prod(mesh.shape.values()) == 1:
        return kernel
    heads = "tensor" if config.num_attention_heads % mesh.shape["tensor"] == 0 else None
    return Sharded(kernel, mesh, ("data", "fsdp"), heads)


# -- What a step costs -------------------------------------------------------------------------------


class Flops(NamedTuple):
    """FLOPs of one training step on all devices, a multiply-add counted as two."""

    learnable: int
    attention: int

    @property
    def total(self) -> int:
        return self.learnable + self.attention


def model_flops(config: Config, batch: int, length: int) -> Flops:
    """What the mathematics of a step needs; what remat computes again does not count.

    ```python
    learnable = 6 * batch * length * (size of all matrices that multiply activations)
    attention = sum over layers of 12 * batch * heads * head_dim * visible
    ```

    Six: two FLOPs a multiply-add, once forward and twice backward. The table of the head counts, the
    lookups do not. `visible` is how many pairs of query and key the causal mask leaves: `T(T+1)/2`
    for full attention, `sum(min(t, W) for t in 1..T)` for a window `W`. Twelve: the two products
    with keys and with values, each as above.
    """
    c, d, P = config, config.hidden_size, config.hidden_size_per_layer_input
    weights = c.vocab_size * d + c.num_layers * P * d  # the head and the per-layer projection
    attention = 0
    for i in range(c.num_layers):
        D = c.layer_head_dim(i)
        heads = 2 * c.num_attention_heads + (
            0 if c.donor(i) is not None else 2 * c.num_key_value_heads
        )
        weights += d * (heads * D + 3 * c.layer_intermediate_size(i) + 2 * P)
        W = length if c.layer_types[i] == FULL else min(c.sliding_window, length)
        visible = W * (W + 1) // 2 + (length - W) * W
        attention += 12 * batch * c.num_attention_heads * D * visible
    return Flops(6 * batch * length * weights, attention)
