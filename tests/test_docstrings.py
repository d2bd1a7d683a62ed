"""The code in docstrings of public names runs, and the plain loops there say what the functions do."""

import inspect
import re
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_scan
import remat_scan.testing
from remat_scan import Policy, StackLayer, blockwise, checkpointed_layer, run_stack

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

# What the examples take as given, small.
GIVEN = """
import fnmatch, operator
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from remat_scan import *
from remat_scan import POLICY_NAMES, StackLayer, Stacked, isolated_scan
from remat_scan.testing import *

class Block(eqx.Module):
    weight: jax.Array
    is_moe: bool = eqx.field(static=True, default=False)

    def __init__(self, key, is_moe=False):
        self.weight, self.is_moe = jax.random.normal(key, (4, 4)) / 2, is_moe

    def __call__(self, x, *args):
        x = jnp.tanh(x @ self.weight)
        return (x, jnp.mean(x)) if self.is_moe and not args else x

class MoE(Block): pass
class Dense(Block): pass

def keys(n): return jax.random.split(jax.random.key(1), n)

key = jax.random.key(0)
block, mlp, isolated, my_policy = Block(key), Block(key), isolated_scan, None
x, h = jnp.ones((2, 4)), jnp.ones((2, 8, 4))
mask, embeddings = jnp.ones(()), jnp.ones((3, 2))
blocks = [Dense(keys(3)[0]), MoE(keys(3)[1], is_moe=True), Dense(keys(3)[2])]
a0, b0, a1, b1, c = *(f(k) for f, k in zip((MoE, Dense, MoE, Dense), keys(4))), Block(key)
table, labels = jnp.ones((5, 4)), jnp.zeros((2, 8), int)
repeats, period = 3, (eqx.filter_vmap(Block)(keys(3)),)
weights, state, batch = [jnp.eye(4)] * 35, [jnp.eye(4)] * 2, x
def loss(weights, x):
    for w in weights:
        x = checkpointed_layer(lambda w, x: jnp.tanh(x @ w))(w, x)
    return jnp.mean(x ** 2)
train_step = step = jax.grad(loss)
layer = lambda w, x: jnp.tanh(x @ w)
"""
GIVEN_TO = {
    ("Nested", 0): "blocks = [Dense(k) for k in keys(8)]",
    ("memory_report", 1): """
def step(w, x):
    return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
batch = jax.ShapeDtypeStruct((8, 4096), "float32")
""",
}


def _documented():
    """Public names and public methods of theirs that have code in their docstrings."""
    for module in (remat_scan, remat_scan.testing):
        for name, thing in vars(module).items():
            if name.startswith("_") or not callable(thing) or inspect.ismodule(thing):
                continue
            yield name, thing
            if inspect.isclass(thing):
                yield from ((f"{name}.{k}", v) for k, v in vars(thing).items() if k[0] != "_")


def _blocks():
    found = {}
    for name, thing in _documented():
        doc = inspect.getdoc(thing) if isinstance(getattr(thing, "__doc__", None), str) else None
        for i, block in enumerate(BLOCK.finditer(doc or "")):
            found.setdefault((name, i), block[1])
    return found


BLOCKS = _blocks()
DEFINITIONS = sorted(n for (n, i), code in BLOCKS.items() if f"def {n}(" in code or n == "Policy")


def run(code, more=""):
    """Runs a block here: other hardware's compilers need not be installed."""
    namespace = {"__name__": "example"}
    exec(GIVEN + more, namespace)
    code = re.sub(
        r'target="(\w+)(:[\w:]*)?"', lambda m: f'target="cpu{":8" if m[2] else ""}"', code
    )
    exec(compile(textwrap.dedent(code), "docstring", "exec"), namespace)
    return namespace


@pytest.mark.parametrize(("name", "i"), sorted(BLOCKS), ids=lambda v: str(v))
def test_code_in_a_docstring_runs(name, i):
    pytest.importorskip("optax")
    namespace = run(BLOCKS[name, i], GIVEN_TO.get((name, i), ""))
    for test in [v for k, v in namespace.items() if k.startswith("test_")]:
        asked = []

        def snapshot(*args, asked=asked, **kwargs):
            asked.append(remat_scan.memory_report(*args, target=kwargs["target"]))

        test(*([snapshot] if inspect.signature(test).parameters else []))
        assert not inspect.signature(test).parameters or asked


def test_the_examples_are_found():
    """A change of the docstrings' form must not leave them untested."""
    known = {
        "run_stack",
        "StackLayer",
        "Stacked",
        "blockwise",
        "verify",
        "residuals",
        "memory_report",
    }
    assert known | {"assert_isolated", "assert_peak_below"} <= {n for n, _ in BLOCKS}
    assert set(DEFINITIONS) <= set(_CHECKS), "a loop that defines a function is compared with it"


# -- The definitions -------------------------------------------------------------------------------


def _same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), a, b)


X = jax.random.normal(jax.random.key(0), (2, 7, 4))


def _check_blockwise(plain):
    def layer(x, y, *, scale):
        return jnp.tanh(x) * scale + y

    for axis, size, out in ((1, 3, 1), (1, 2, "sum"), (0, 1, 0)):
        if out == "sum":
            continue  # blocks of a sum need a function that reduces: below
        ours = blockwise(layer, size=size, axis=axis, out=out)
        _same(ours(X, 2 * X, scale=3.0), plain(layer, size, axis, out)(X, 2 * X, scale=3.0))

    def total(x):
        return jnp.sum(x**2, axis=1)

    _same(blockwise(total, size=3, axis=1, out="sum")(X), plain(total, 3, 1, "sum")(X))


def _check_policy(plain):
    policies = [
        Policy(save=("a*", "key"), offload=("ab",), recompute=("abc",)),
        Policy(save=("abc",), recompute=("*",)),
        Policy(unnamed="save"),
        Policy(checkpoint=False),
        Policy(),
    ]
    for policy in policies:
        for name in ("a", "ab", "abc", "key", "other", "*"):
            assert policy.action(name) == plain(policy, name), (policy, name)


def _check_layer(plain):
    def layer(w, x, *, flag=False):
        return jnp.sin(x @ w) if flag else x @ w

    for isolation in ("loop", "barrier", "none"):
        ours = checkpointed_layer(layer, isolation=isolation)
        theirs = plain(lambda w, x: layer(w, x, flag=True), None, isolation)
        w = jnp.eye(4) / 2
        _same(
            jax.grad(lambda w, f=ours: f(w, X, flag=True).sum())(w),
            jax.grad(lambda w, f=theirs: f(w, X).sum())(w),
        )


def _check_run_stack(plain):
    def donor(x, row, scale, *, key):
        x = jnp.tanh(x * scale + row) + 0.1 * jax.random.normal(key, x.shape)
        return x, 2 * x, jnp.mean(x)

    def reader(x, row, scale, *, key, shared):
        return x + shared * row

    layers = [
        StackLayer(donor, writes=("kv",), collects=("aux",)),
        StackLayer(reader, reads={"shared": "kv"}),
        StackLayer(donor, writes=("kv",), collects=("aux",)),
        StackLayer(reader, reads={"shared": "kv"}),
    ]
    as_mappings = [SimpleNamespace(**{f: getattr(v, f) for f in ("fn", "writes", "collects")},
                                   reads=dict(v.reads)) for v in layers]  # fmt: skip
    policies, isolations = ["full"] * 4, ["loop"] * 4
    rows, key = jnp.arange(4.0), jax.random.key(3)
    ours = run_stack(layers, X, 0.5, per_layer=rows, values={}, key=key,
                     policy=policies, isolation=isolations)  # fmt: skip
    x, values, collected = plain(as_mappings, X, 0.5, per_layer=rows, values={}, key=key,
                                 policy=policies, isolation=isolations)  # fmt: skip
    _same((ours.x, ours.values, ours.collected), (x, values, collected))


_CHECKS = {
    "blockwise": ("blockwise", _check_blockwise),
    "Policy": ("action", _check_policy),
    "checkpointed_layer": ("checkpointed_layer", _check_layer),
    "run_stack": ("run_stack", _check_run_stack),
}


@pytest.mark.parametrize("name", sorted(_CHECKS))
def test_the_loop_in_a_docstring_is_what_the_function_does(name):
    defined, check = _CHECKS[name]
    check(run(BLOCKS[name, 0])[defined])


def test_stacked_is_the_loop_in_its_docstring():
    namespace = run(BLOCKS["Stacked", 0])
    given = {}
    exec(GIVEN, given)
    stacked = remat_scan.Stacked(given["period"], given["repeats"])
    _same(run_stack([stacked], given["x"]).x, namespace["x"])
