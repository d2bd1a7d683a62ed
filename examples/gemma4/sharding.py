"""Which device holds what: one mesh with three axes, and a rule that places every weight.

- `data`: copies of the weights; each copy sees other rows of the batch.
- `fsdp`: rows of the batch, and every matrix cut once more, gathered where it is used.
- `tensor`: heads, MLP columns and words of the vocabulary.

Everything here also works on an abstract mesh, for programs that are only compiled.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int

from .config import Config
from .layers import Embedding, Layer
from .model import Gemma4
from .rows import Rows

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))

AnyMesh: TypeAlias = Mesh | AbstractMesh

# The dimension of each matrix [out, in] that the tensor axis cuts, as in Megatron-LM
# (arXiv:1909.08053): what fans out by rows and what fans in by columns, so that a layer needs one
# sum over the axis after attention and one after the MLP.
_TENSOR_DIMENSION = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
    "per_layer_input_gate": 0,
    "per_layer_projection": 1,
    "per_layer_model_projection": 0,
    "embed_tokens": 0,
    "embed_tokens_per_layer": 0,
}
# Cut by `fsdp` along the same dimension: each layer reads a few columns of every row.
_ALSO_BY_FSDP = ("embed_tokens_per_layer",)


def make_mesh(
    data: int = 1,
    fsdp: int | None = None,
    tensor: int = 1,
    *,
    devices: Sequence[Any] | int | None = None,
) -> AnyMesh:
    """A mesh with the axes `data`, `fsdp` and `tensor`.

    **Arguments:**

    - `fsdp`: `None` takes as many devices as are left.
    - `devices`: all that JAX has by default. A number gives an abstract mesh of that many.

    **Raises:** `ValueError` if the sizes do not multiply to the number of devices.
    """
    if devices is None:
        devices = jax.devices()
    count = devices if isinstance(devices, int) else len(devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"the {name} axis must have at least one device, got {size}")
    if fsdp is None:
        fsdp = max(1, count // (data * tensor))
    shape = (data, fsdp, tensor)
    if math.prod(shape) != count:
        product = " × ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(
            f"{product} makes a mesh of {math.prod(shape)} devices, but there are {count}: choose "
            "sizes whose product that is"
        )
    types = (AxisType.Auto,) * 3
    if isinstance(devices, int):
        return AbstractMesh(shape, AXES, axis_types=types)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Rows of a batch over `data` and `fsdp`."""
    return NamedSharding(mesh, BATCH)


def shardings(tree: Any, mesh: AnyMesh, config: Config) -> Any:
    """A `NamedSharding` for every array of a tree that holds weights under the model's names.

    The model, its gradients and an optimiser's moments are such trees; so is a training state of
    all of them. Arrays need only a shape.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, _spec(path, x.shape, mesh.shape, config)), tree
    )


def replicated_matrices(model: Gemma4, mesh: AnyMesh) -> list[str]:
    """The matrices that some axis of the mesh, `data` aside, does not cut, and why, one a line."""
    lines = []
    for path, x in jax.tree_util.tree_leaves_with_path(model):
        if x.ndim - is_stacked(path) < 2:
            continue
        spec = _spec(path, x.shape, mesh.shape, model.config)
        used = {
            axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())
        }
        for axis in ("fsdp", "tensor"):
            if mesh.shape[axis] > 1 and axis not in used:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                lines.append(f"{name} {list(x.shape)} is not cut by {axis} ({mesh.shape[axis]})")
    return lines


def _spec(
    path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mapping[str, int], config: Config
) -> PartitionSpec:
    """Matrices are cut by `tensor` as the table says, and by `fsdp` along the other dimension.

    Where the size of an axis does not divide the one, `fsdp` takes the other dimension; where that
    does not go either, the axis leaves the matrix whole. Tables that are cut by words alone take the
    words first. Vectors are too small to be worth a
    collective, so every device has them. Stacked layers are cut as each of them would be.
    """
    stacked = is_stacked(path)
    shape = shape[stacked:]
    if len(shape) < 2:
        return PartitionSpec()
    fsdp, tensor = mesh["fsdp"], mesh["tensor"]
    name = _name(path)
    cut = _TENSOR_DIMENSION.get(name, int(np.argmax(shape)))
    parts: list[list[str]] = [[] for _ in shape]
    sizes = list(shape)
    if tensor > 1 and _units(name, shape[cut], config) % tensor == 0:
        parts[cut].append("tensor")
        sizes[cut] //= tensor
    others = [i for i in range(len(shape)) if i != cut]
    for i in (cut, *others) if name in _ALSO_BY_FSDP else (*others, cut):
        if fsdp > 1 and sizes[i] % fsdp == 0:
            parts[i].append("fsdp")
            break
    spec = (tuple(p) if len(p) > 1 else p[0] if p else None for p in parts)
    return PartitionSpec(*(None,) * stacked, *spec)


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Whether the array at this path is one of several layers' together."""
    return any(isinstance(k, jax.tree_util.GetAttrKey) and k.name == "period" for k in path)


def _name(path: tuple[Any, ...]) -> str:
    names = [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)]
    return next((n for n in reversed(names) if n in _TENSOR_DIMENSION), "")


def _units(name: str, size: int, config: Config) -> int:
    """How many parts a dimension has: a head stays whole, or RoPE would turn pairs across devices."""
    if name in ("q_proj", "o_proj"):
        return config.num_attention_heads
    return config.num_key_value_heads if name in ("k_proj", "v_proj") else size


def on_mesh(model: Gemma4, mesh: AnyMesh) -> Gemma4:
    """The same model, computing with its activations split over the batch.

    Its tables, most of the model's weights, are never gathered: they are looked up where they lie,
    and what was found goes to the batch row that asked for it. In the backward pass the same happens
    in the other direction.
    """
    if math.prod(mesh.shape.values()) == 1:
        return model
    by_words = model.config.vocab_size_per_layer_input % (
        mesh.shape["tensor"] * mesh.shape["fsdp"]
    ) == 0  # fmt: skip

    def split(path: tuple[Any, ...], x: Any) -> Any:
        if not isinstance(x, Embedding):
            return x
        own = _name(path) == "embed_tokens_per_layer"  # the model's, or one layer's columns of it
        return _SplitWords(x, mesh) if own and by_words else _SplitColumns(x, mesh)

    is_table = lambda x: isinstance(x, Embedding)  # noqa: E731
    return jax.tree_util.tree_map_with_path(split, model, is_leaf=is_table)


def rows_on_mesh(size: int | None, mesh: AnyMesh, config: Config) -> Rows | None:
    """Layers on `size` rows of each device's batch at a time."""
    if math.prod(mesh.shape.values()) == 1:
        return None if size is None else Rows(size, 1, _cast)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    gather = partial(_gather, mesh=mesh, config=config)
    return Rows(None if size is None else size * shards, shards, gather)


def _cast(layer: Layer, dtype: DTypeLike) -> Layer:
    return jax.tree.map(lambda x: x.astype(dtype) if x.ndim >= 2 else x, layer)


def _gather(layer: Layer, dtype: DTypeLike, mesh: AnyMesh, config: Config) -> Layer:
    """The layer's matrices in another dtype, whole but for the tensor axis's cut."""
    sizes = {**mesh.shape, "fsdp": 1}
    places = jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, _spec(path, x.shape, sizes, config)), layer
    )
    return jax.lax.with_sharding_constraint(_cast(layer, dtype), places)


class _SplitColumns(Embedding):
    """A table whose columns lie on different devices."""

    mesh: AnyMesh = eqx.field(static=True)

    def __init__(self, table: Embedding, mesh: AnyMesh):
        self.weight = table.weight
        self.mesh = mesh

    def __call__(self, ids: Int[Array, "B T"], scale: float, dtype: Any) -> Float[Array, "B T d"]:
        if self.weight.shape[1] % self.mesh.shape["fsdp"] == 0:
            ids = self._constrain(ids, "data")
            found = super().__call__(ids, scale, dtype)
            found = self._constrain(found, "data", None, "fsdp")
        else:
            found = super().__call__(ids, scale, dtype)
        return self._constrain(found, *BATCH)

    def _constrain(self, x: Array, *spec: Any) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))


class _SplitWords(Embedding):
    """A table whose rows lie on different devices, so that any of its columns do too."""

    mesh: AnyMesh = eqx.field(static=True)

    def __init__(self, table: Embedding, mesh: AnyMesh):
        self.weight = table.weight
        self.mesh = mesh

    def __call__(self, ids: Int[Array, "B T"], scale: float, dtype: Any) -> Float[Array, "B T d"]:
        places = ("tensor", "fsdp")

        def on_each_device(table: Array, ids: Array) -> Array:
            ids = jax.lax.all_gather(ids, "fsdp", tiled=True)
            own = ids - jax.lax.axis_index(places) * len(table)
            here = (own >= 0) & (own < len(table))
            found = table[jnp.where(here, own, 0)].astype(dtype) * jnp.asarray(scale, dtype)
            found = jax.lax.psum(jnp.where(here[..., None], found, 0), "tensor")
            return jax.lax.psum_scatter(found, "fsdp", tiled=True)

        return jax.shard_map(
            on_each_device,
            mesh=self.mesh,
            in_specs=(PartitionSpec(places), BATCH),
            out_specs=BATCH,
        )(self.weight, ids)
