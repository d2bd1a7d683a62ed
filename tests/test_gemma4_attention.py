"""Every kernel against plain attention, and plain attention against a loop over queries."""

import functools as ft
import types

import pytest

pytest.importorskip("safetensors")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from examples.gemma4.attention import KERNELS, Mask, Sharded, attention
from examples.gemma4.blockwise import blockwise_attention
from remat_scan import MissingPluginError, memory_report

# Two float32 programs that add up a few hundred products of order one in other orders.
CLOSE = {"rtol": 0, "atol": 2e-5}


def arrays(B=2, T=7, S=None, N=4, K=2, D=8, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(0)
    S = T if S is None else S
    q, g = (rng.normal(size=(B, T, N, D)) for _ in range(2))
    k, v = (rng.normal(size=(B, S, K, D)) for _ in range(2))
    return [jnp.asarray(x, dtype) for x in (scale * q, scale * k, v, g)]


def masks(B, T):
    """Padding on either side, packed documents, windows, and all of it together."""
    rng = np.random.default_rng(1)
    right = jnp.arange(T) < jnp.asarray([T, T - 3] * B)[:B, None]
    left = jnp.arange(T) >= jnp.asarray([3, 0] * B)[:B, None]
    cuts = jnp.asarray(np.sort(rng.integers(0, 3, (B, T)), axis=1))
    # Ids need not rise, and may come again where they are not next to each other.
    documents = jnp.asarray([5, 0, 5])[cuts]
    return {
        "causal": Mask(),
        "window 1": Mask(1),
        "window 3": Mask(3),
        "window beyond the length": Mask(T + 9),
        "right padding": Mask(valid=right),
        "left padding, window": Mask(3, valid=left),
        "documents": Mask(segments=documents),
        "all": Mask(3, valid=left & right, segments=documents),
        "no valid key": Mask(valid=jnp.zeros((B, T), bool)),
    }


def by_hand(q, k, v, mask):
    """Query by query in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (B, T, N, _), (S, K) = q.shape, k.shape[1:3]
    out = np.zeros(q.shape)
    for b in range(B):
        for t in range(T):
            at = t + int(mask.q_offset)
            keys = [s for s in range(S) if s <= at]
            if mask.window is not None:
                keys = [s for s in keys if s > at - mask.window]
            if mask.valid is not None:
                keys = [s for s in keys if mask.valid[b, s]]
            if mask.segments is not None:
                # One document is one run of equal ids.
                ids = np.asarray(mask.segments[b])
                keys = [s for s in keys if (ids[s : t + 1] == ids[t]).all()]
            if not keys:
                continue
            for n in range(N):
                head = n // (N // K)
                scores = k[b, keys, head] @ q[b, t, n]
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ v[b, keys, head] / weights.sum()
    return out


def test_plain_is_the_loop_over_queries():
    q, k, v, _ = arrays()
    for name, mask in masks(2, 7).items():
        got = attention(q, k, v, mask, "plain")
        np.testing.assert_allclose(got, by_hand(q, k, v, mask), err_msg=name, **CLOSE)


def test_plain_with_an_offset_and_more_keys():
    q, k, v, _ = arrays(T=3, S=9)
    for offset in (0, 4, 6):
        for window in (None, 4)[: 1 + (offset == 4)]:
            mask = Mask(window, offset, valid=jnp.arange(9) != 5 * jnp.ones((2, 1), int))
            for kernel in ("plain", "blockwise"):
                got = attention(q, k, v, mask, kernel)
                np.testing.assert_allclose(got, by_hand(q, k, v, mask), **CLOSE)


def values_and_gradients(run, q, k, v, g):
    out, back = jax.vjp(run, q, k, v)
    return out, *back(g)


LENGTHS = [(1, 4), (7, 4), (8, 4), (13, 5), (12, 100)]


@pytest.mark.parametrize(("T", "block"), LENGTHS)
def test_blockwise_is_plain(T, block):
    """Lengths that no block divides, windows that divide neither."""
    q, k, v, g = arrays(T=T)
    for name, mask in masks(2, T).items():
        if T != 7 and name not in ("causal", "all"):
            continue
        both = [
            jax.jit(
                lambda q, k, v, g, run=run, mask=mask: values_and_gradients(run(mask), q, k, v, g)
            )
            for run in (
                lambda mask: lambda q, k, v: attention(q, k, v, mask, "plain"),
                lambda mask: (
                    lambda q, k, v: attention(
                        q, k, v, mask, lambda *args: blockwise_attention(*args, block)
                    )
                ),
            )
        ]
        want, got = (f(q, k, v, g) for f in both)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, err_msg=name, **CLOSE)


def test_blockwise_in_bfloat16():
    q, k, v, g = arrays(T=9, dtype=jnp.bfloat16)
    exact = values_and_gradients(
        lambda q, k, v: attention(q, k, v, Mask(4), "plain"),
        *(x.astype(jnp.float32) for x in (q, k, v, g)),
    )
    got = values_and_gradients(lambda q, k, v: blockwise_attention(q, k, v, Mask(4), 4), q, k, v, g)
    for x, y in zip(got, exact, strict=True):
        assert x.dtype == jnp.bfloat16
        # A few roundings to bfloat16 on the way: 4 of 2**-8 of the largest number.
        np.testing.assert_allclose(
            x.astype(np.float32), y, rtol=0, atol=2**-6 * float(jnp.abs(y).max())
        )


def test_scores_too_large_for_exp():
    """Scores of several hundred, of either sign: a softmax without the maximum gives infinities."""
    q, k, v, g = arrays(T=9, scale=12.0)
    for kernel in ("plain", "blockwise"):
        out = values_and_gradients(
            lambda q, k, v, kernel=kernel: attention(q, k, v, Mask(), kernel), q, k, v, g
        )
        assert all(jnp.isfinite(x).all() for x in out)
        np.testing.assert_allclose(out[0], by_hand(q, k, v, Mask()), rtol=0, atol=1e-3)


def temporaries(kernel, T, window=None):
    shape = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)

    def loss(q, k, v):
        return (attention(q, k, v, Mask(window), kernel) ** 2).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
    stats = compiled.memory_analysis()
    assert stats is not None
    return stats.temp_size_in_bytes


def test_blockwise_memory_is_linear_in_the_length():
    """Forward and backward, compiled. Plain attention's grows with the square."""
    short, long = (temporaries("blockwise", T) for T in (1024, 8192))
    assert long < 1.2 * 8 * short
    assert long < 0.05 * temporaries("plain", 8192)


def test_blockwise_skips_what_no_query_sees(monkeypatch):
    """The ranges of key blocks, counted against the mask itself."""
    from examples.gemma4.blockwise import _key_blocks

    for T, bq, bk in ((16, 4, 4), (13, 4, 3), (9, 2, 5)):
        for window in (None, 1, 3, 7):
            mask = Mask(window)
            for start in range(0, T, bq):
                first, stop = _key_blocks((T, T, bq, bk), mask, jnp.asarray(start))
                seen = mask.block(start + jnp.arange(bq), jnp.arange(T), T)[0].any(0)
                blocks = {int(k) // bk for k in np.flatnonzero(seen)}
                assert blocks <= set(range(int(first), int(stop)))
                if start + bq <= T:
                    assert blocks == set(range(int(first), int(stop)))


# -- Splash -----------------------------------------------------------------------------


interpreted = ft.partial(KERNELS["splash"], interpret=True)


@pytest.mark.parametrize("name", ["causal", "left padding, window", "documents", "no valid key"])
def test_splash_values_are_plain(name):
    T = 130  # no multiple of the kernel's blocks
    q, k, v, _ = arrays(B=1, T=T, N=2, K=1, D=128, scale=128**-0.25)
    mask = masks(1, T)[name]
    got = attention(q, k, v, mask, interpreted)
    want = attention(q, k, v, mask, "plain")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "all"])
def test_splash_gradients_are_plain(name):
    T = 130
    q, k, v, g = arrays(B=1, T=T, N=2, K=1, D=128, scale=128**-0.25)
    mask = masks(1, T)[name]
    got, want = (
        jax.jit(lambda q, k, v, g, run=run: values_and_gradients(run, q, k, v, g))(q, k, v, g)
        for run in (
            lambda q, k, v: attention(q, k, v, mask, interpreted),
            lambda q, k, v: attention(q, k, v, mask, "plain"),
        )
    )
    for x, y in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-4)


# -- Which kernel, and what it refuses -----------------------------------------------------------------


def test_what_does_not_fit_is_said():
    q, k, v, _ = arrays()
    with pytest.raises(ValueError, match="kernel must be one of plain, blockwise, splash, cudnn"):
        attention(q, k, v, Mask(), "flash")
    # Where the tests check types, jaxtyping is faster to say so.
    with pytest.raises((ValueError, TypeError), match=r"do not match|violates type hint|'v'"):
        attention(q, k, v[:, :-1], Mask())
    with pytest.raises(ValueError, match="4 query heads do not divide among 3 key heads"):
        attention(q, k[:, :, [0, 1, 1]], v[:, :, [0, 1, 1]], Mask())
    with pytest.raises(ValueError, match="segments need the same tokens"):
        attention(q[:, :3], k, v, Mask(segments=jnp.zeros((2, 7), int)))
    with pytest.raises(ValueError, match="head size divisible by 128"):
        attention(q, k, v, Mask(), "splash")
    with pytest.raises(ValueError, match="cuDNN attention needs bfloat16 or float16"):
        attention(q, k, v, Mask(), "cudnn")
    q, k, v, _ = arrays(D=512, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="a head size up to 128"):
        attention(q, k, v, Mask(), "cudnn")
    mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))
    with pytest.raises(ValueError, match="cannot be lowered on an abstract mesh"):
        attention(q, k, v, Mask(), Sharded("cudnn", mesh, "fsdp"))


# Backend, compute capability, head size, length, dtype, what the mask has, and the kernel to take.
AUTO = [
    ("gpu", "9.0", 256, 2048, "bfloat16", {}, "cudnn"),  # E2B's sliding layers
    ("gpu", "9.0", 256, 2048, "bfloat16", {"window": 512}, "cudnn"),
    ("gpu", "9.0", 512, 2048, "bfloat16", {}, "blockwise"),  # its full ones
    ("gpu", "8.0", 256, 2048, "bfloat16", {}, "blockwise"),
    ("gpu", "8.0", 128, 2048, "bfloat16", {}, "cudnn"),
    ("gpu", "9.0", 256, 2048, "float32", {}, "blockwise"),
    ("gpu", "9.0", 256, 2048, "bfloat16", {"valid": True}, "blockwise"),
    ("gpu", "9.0", 256, 2048, "bfloat16", {"segments": True}, "blockwise"),
    ("gpu", "9.0", 256, 512, "bfloat16", {"q_offset": jnp.int32(3)}, "plain"),
    ("tpu", "", 256, 2048, "float32", {"valid": True, "window": 7}, "splash"),
    ("tpu", "", 64, 2048, "float32", {}, "blockwise"),
    ("tpu", "", 256, 100, "float32", {}, "plain"),
    ("cpu", "", 256, 2048, "bfloat16", {}, "blockwise"),
    ("cpu", "", 256, 512, "bfloat16", {}, "plain"),
]


@pytest.mark.parametrize(("backend", "capability", "D", "T", "dtype", "mask", "wanted"), AUTO)
def test_auto_takes_the_best_that_applies(
    monkeypatch, backend, capability, D, T, dtype, mask, wanted
):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    for name in KERNELS:
        monkeypatch.setitem(KERNELS, name, lambda *_, name=name: taken.append(name))
    per_token = {"valid": jnp.ones((1, T), bool), "segments": jnp.zeros((1, T), int)}
    mask = Mask(**{k: per_token[k] if v is True else v for k, v in mask.items()})
    taken = []
    q = jax.ShapeDtypeStruct((1, T, 2, D), dtype)
    attention(q, q, q, mask)
    assert taken == [wanted]


def test_own_kernels():
    q, k, v, _ = arrays()
    got = attention(q, k, v, Mask(3), lambda q, k, v, mask: q * mask.window)
    np.testing.assert_array_equal(got, 3 * q)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("kernel", ["plain", "blockwise"])
def test_sharded_over_batch_and_heads(kernel, K):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=auto)
    q, k, v, g = arrays(T=5, K=K)
    mask = masks(2, 5)["all"]
    sharded = Sharded(kernel, mesh, "fsdp", "tensor")
    got, want = (
        jax.jit(lambda q, k, v, g, run=run: values_and_gradients(run, q, k, v, g))(q, k, v, g)
        for run in (
            lambda q, k, v: attention(q, k, v, mask, sharded),
            lambda q, k, v: attention(q, k, v, mask, "plain"),
        )
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, **CLOSE)


# -- Compiled for hardware that is not there ---------------------------------------------------------


def compiled(target, kernel, D, window, padded):
    mesh = jax.sharding.AbstractMesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp"))
    B, T, N = 8, 1000, 8  # a length that no block divides
    q = jax.ShapeDtypeStruct((B, T, N, D), jnp.bfloat16, sharding=rows)
    k = jax.ShapeDtypeStruct((B, T, 1, D), jnp.bfloat16, sharding=rows)
    valid = jax.ShapeDtypeStruct((B, T), jnp.bool_, sharding=rows)

    def loss(q, k, v, valid):
        mask = Mask(window, valid=valid if padded else None)
        out = attention(q, k, v, mask, Sharded(kernel, mesh, "fsdp"))
        return (out.astype(jnp.float32) ** 2).sum()

    try:
        return memory_report(jax.grad(loss, (0, 1, 2)), q, k, k, valid, target=target)
    except MissingPluginError as error:
        pytest.skip(str(error))


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(("D", "window", "padded"), [(256, 512, False), (512, None, True)])
def test_splash_compiles_for_tpu(D, window, padded):
    report = compiled("tpu7x:2x2x1", "splash", D, window, padded)
    assert report.fits
    # Linear memory: the scores of one row would be 8 heads * 1024**2 * 4 bytes.
    assert report.temporaries < 8 * 1024**2 * 4


def cudnn_gradient(window, padded, T, devices=1):
    """Attention by cuDNN, with the library that this needs even to be traced, on devices that are
    here: its partitioning is written in Python, which JAX runs for no abstract mesh."""
    B, N, D = 8, 8, 128
    kernel, rows = "cudnn", None
    if devices > 1:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("fsdp",), auto, devices=jax.devices()[:devices])
        kernel = Sharded("cudnn", mesh, "fsdp")
        rows = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp"))
    q = jax.ShapeDtypeStruct((B, T, N, D), jnp.bfloat16, sharding=rows)
    k = jax.ShapeDtypeStruct((B, T, 1, D), jnp.bfloat16, sharding=rows)
    valid = jax.ShapeDtypeStruct((B, T), jnp.bool_, sharding=rows)

    def loss(q, k, v, valid):
        out = attention(q, k, v, Mask(window, valid=valid if padded else None), kernel)
        return (out.astype(jnp.float32) ** 2).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    try:
        jax.eval_shape(gradient, q, k, k, valid)
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        pytest.skip(f"cuDNN attention needs cuDNN's library: {error}")
    return gradient, (q, k, k, valid)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(("window", "padded"), [(None, False), (512, False), (512, True)])
def test_cudnn_compiles_for_gpu(window, padded, devices):
    gradient, shapes = cudnn_gradient(window, padded, 2001, devices)
    try:
        report = memory_report(gradient, *shapes, target=f"h100:{devices}")
    except MissingPluginError as error:
        pytest.skip(str(error))
    assert report.fits
    assert report.devices == devices
    # Linear memory, but for a mask, which all heads share: scores would take this much twice.
    assert report.temporaries < 8 // devices * 8 * 2001**2


@pytest.mark.parametrize("T", [10, 11])
def test_cudnn_takes_any_length_with_padding(T):
    gradient, shapes = cudnn_gradient(5, True, T)
    lowered = jax.jit(gradient).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "__cudnn$fmha" in lowered.as_text()


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", ["tpu7x:2x2x1", "h100:8"])
def test_blockwise_compiles(target):
    assert compiled(target, "blockwise", 512, 512, True).fits
