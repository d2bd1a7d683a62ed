"""How much a traced program puts into the host's memory at once."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from remat_scan import Policy, checkpointed_layer, run_stack, stack_layers
from remat_scan._host import bytes_sent_to_host

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
INPUTS = Policy(offload=("decoder_layer_input",))
N, T, D = 9, 8, 4
ONE = T * D * 4  # a layer's input


def sent(fn, *args):
    return bytes_sent_to_host(jax.make_jaxpr(fn)(*args))


def there(x):
    return jax.device_put(x, HOST)


def and_back(x):
    return jax.device_put(there(x), DEVICE)


def custom_vjp(fn):
    with_rule = jax.custom_vjp(fn)
    with_rule.defvjp(lambda x: (there(fn(x)), x), lambda x, g: (and_back(g) * x,))
    return with_rule


def layers():
    return [jax.tree_util.Partial(lambda w, x: jnp.sin(x @ w), jnp.ones((D, D)))] * N


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "periods"])
def test_of_a_stack(stacked):
    stack = stack_layers(layers()) if stacked else layers()
    loss = lambda s, x: jnp.sum(run_stack(s, x, policy=INPUTS).x)  # noqa: E731
    assert sent(jax.grad(loss), stack, jnp.ones((T, D))) == N * ONE


def test_of_checkpointed_segments():
    """What one sends while it is recomputed is gone when the next one is."""

    @jax.checkpoint
    def three(ws, x):
        return run_stack(ws, x, policy=INPUTS).x

    def loss(ws, x):
        for i in range(0, N, 3):
            x = three(ws[i : i + 3], x)
        return jnp.sum(x)

    assert sent(jax.grad(loss), layers(), jnp.ones((T, D))) == 3 * ONE


def test_nothing_is_sent_without_gradients_or_offload():
    layer = checkpointed_layer(jnp.sin, policy=INPUTS)
    x = jnp.ones((T, D))
    assert sent(layer, x) == 0
    assert sent(jax.grad(lambda x: jnp.sum(layer(x))), x) == ONE
    layer = checkpointed_layer(jnp.sin)
    assert sent(jax.grad(lambda x: jnp.sum(layer(x))), x) == 0


def test_where_it_is_sent():
    x = jnp.ones((T, D))
    mesh = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
    cases = {
        0: [lambda x: jax.jit(lambda x: (x, there(x)))(x)[0]],  # nobody reads it
        1: [
            and_back,
            jax.jit(and_back),
            lambda x: there(there(x)),
            lambda x: jax.lax.cond(x[0, 0] > 0, and_back, jnp.sin, x),
            lambda x: jax.lax.cond(x[0, 0] > 0, and_back, lambda x: and_back(2 * x), x),
            custom_vjp(and_back),
            lambda x: jax.lax.scan(lambda c, _: (and_back(c), None), x, length=5)[0],
            lambda x: jax.lax.scan(lambda c, row: (c, there(row)), 0, x)[1],
            jax.shard_map(
                and_back, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")
            ),
        ],
        2: [lambda x: (there(x), there(2 * x)), lambda x: and_back(and_back(x))],
    }
    for times, programs in cases.items():
        for program in programs:
            assert sent(program, x) == times * ONE


def test_what_lies_there_already_is_not_sent():
    x = jax.ShapeDtypeStruct((T, D), jnp.float32)
    on_host = jax.make_jaxpr(lambda x: jax.device_put(there(x), DEVICE))(x)
    assert bytes_sent_to_host(on_host) == ONE
    inner = on_host.jaxpr.replace(invars=[on_host.jaxpr.eqns[0].outvars[0]], eqns=on_host.eqns[1:])
    assert bytes_sent_to_host(inner) == 0
