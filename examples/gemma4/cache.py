"""Keys and values of earlier tokens, and the decoder run on new ones.

Only layers that make their own keys and values have slots: a full layer for every token, a sliding
layer of window W for the last W - 1, which is all that the next token can see besides itself.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from .attention import Mask
from .config import FULL, Config
from .layers import KV, Layer
from .model import Gemma4


class Cache(eqx.Module):
    """**Attributes:**

    - `kv`: for each layer that has slots, its keys and values. A full layer's token `i` is in slot
        `i`; a sliding layer's last token is in the last slot.
    - `valid`: `False` for padding, and for what is still empty.
    - `length`: how many tokens there were, padding included; the same in every row.
    """

    kv: tuple[KV, ...]
    valid: Bool[Array, "B S"]
    length: Int[Array, ""]

    @classmethod
    def empty(cls, config: Config, batch: int, capacity: int, dtype: DTypeLike) -> "Cache":
        """No tokens yet, and slots for `capacity` of them."""
        kv = []
        for i in range(config.num_kv_layers):
            full = config.layer_types[i] == FULL
            slots = capacity if full else min(config.sliding_window - 1, capacity)
            heads, size = config.num_key_value_heads, config.layer_head_dim(i)
            zeros = jnp.zeros((batch, slots, heads, size), dtype)
            kv.append(KV(zeros, zeros))
        return cls(tuple(kv), jnp.zeros((batch, capacity), bool), jnp.zeros((), jnp.int32))


def extend(
    model: Gemma4,
    cache: Cache,
    ids: Int[Array, "B T"],
    valid: Bool[Array, "B T"] | None = None,
    *,
    last: int | None = None,
    fresh: bool = False,
) -> tuple[Float[Array, "B L V"], Cache]:
    """The logits of new tokens, and the cache with them in it.

    The same as `model` on all tokens so far, of which it gives the last. Positions count valid
    tokens only, so a row padded on the left computes what it would alone.

    **Arguments:**

    - `valid`: `False` for padding.
    - `last`: how many of the new tokens' logits are wanted, the last ones; all by default. Layers
        that read others' keys and values then run on these alone: they put nothing in the cache.
    - `fresh`: the cache is empty, which a traced one cannot tell. The first tokens then attend to
        themselves alone, with any kernel.

    **Returns:** logits in float32 and the new cache. More tokens than the cache has room for are the
    caller's mistake.
    """
    config = model.config
    T = ids.shape[1]
    L = T if last is None else last
    if not 1 <= L <= T:
        raise ValueError(f"last must be from 1 to the {T} new tokens, got {last}")
    if valid is None:
        valid = jnp.ones(ids.shape, bool)
    earlier = cache.valid.sum(axis=1, keepdims=True)
    positions = jnp.maximum(earlier + jnp.cumsum(valid, axis=1) - 1, 0)
    all_valid = jax.lax.dynamic_update_slice_in_dim(cache.valid, valid, cache.length, axis=1)

    h = model.embed(ids, cache.kv[0].k.dtype)
    ple = model.per_layer_inputs(ids, h)
    slots: list[KV] = []
    seen: dict[int, tuple[KV, Mask]] = {}
    for i, layer in enumerate(model.layers):
        attention = layer.self_attn
        donor = config.donor(i)
        if donor is not None and h.shape[1] > L:
            h, ple, positions = h[:, -L:], ple[:, -L:], positions[:, -L:]
        x = layer.input_layernorm(h)
        if donor is None:
            new = attention.keys_values(x, positions)
            kept, kv, mask = _remember(layer, cache, cache.kv[i], new, valid, all_valid, fresh)
            slots.append(kept)
            seen[i] = kv, mask
        kv, mask = seen[i if donor is None else donor]
        mask = Mask(mask.window, mask.q_offset + T - h.shape[1], mask.valid)
        mixed = attention.mix(attention.queries(x, positions), kv, mask, "auto")
        h = layer.tail(h, mixed, ple[:, :, i])
    logits = model.head(model.norm(h[:, -L:]))
    return logits, Cache(tuple(slots), all_valid, cache.length + T)


def _remember(
    layer: Layer,
    cache: Cache,
    slots: KV,
    new: KV,
    valid: Bool[Array, "B T"],
    all_valid: Bool[Array, "B S"],
    fresh: bool,
) -> tuple[KV, KV, Mask]:
    """What to keep of old and new keys and values, and what queries see of them with which mask."""
    window = layer.self_attn.window
    if window is None:
        kept = jax.tree.map(
            lambda s, n: jax.lax.dynamic_update_slice_in_dim(s, n, cache.length, axis=1), slots, new
        )
        seen, mask = kept, Mask(None, cache.length, all_valid)
    else:
        size = slots.k.shape[1]
        seen = jax.tree.map(lambda s, n: jnp.concatenate([s, n], axis=1), slots, new)
        kept = jax.tree.map(lambda x: x[:, x.shape[1] - size :], seen)
        # Slot j holds token length - size + j, if there was one.
        padded = jnp.pad(cache.valid, ((0, 0), (size, 0)))
        old = jax.lax.dynamic_slice_in_dim(padded, cache.length, size, axis=1)
        mask = Mask(window, size, jnp.concatenate([old, valid], axis=1))
    if fresh:
        seen, mask = new, Mask(window, 0, valid)
    return kept, seen, mask
