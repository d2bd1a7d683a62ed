"""What is kept, against sizes worked out by hand and JAX's own listing; and what lint finds."""

import json
import re
import sys
import textwrap

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mlp
from jax.ad_checkpoint import checkpoint_name

from remat_scan import Policy, checkpointed_layer, lint, residuals
from remat_scan._cli import main

D, F, T = 8, 32, 16
STREAM, WIDE = 4 * T * D, 4 * T * F  # bytes
W = {
    "wi": jax.ShapeDtypeStruct((D, F), jnp.float32),
    "wo": jax.ShapeDtypeStruct((F, D), jnp.float32),
}
X = jax.ShapeDtypeStruct((T, D), jnp.float32)


def stack(wrap, n=3, layer=mlp):
    wrapped = wrap(layer)

    def loss(ws, x):
        for w in ws:
            x = wrapped(w, x)
        return jnp.sum(x)

    return loss, [W] * n, X


def only(found, **where):
    return {
        t.name: t.bytes for t in found.tensors if all(getattr(t, k) == v for k, v in where.items())
    }


# -- Accounting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["loop", "barrier", "both", "none"])
def test_full_keeps_inputs_and_recomputes_the_rest(isolation):
    found = residuals(*stack(checkpointed_layer(isolation=isolation)))
    assert list(dict.fromkeys(t.layer for t in found.tensors)) == ["0 mlp", "1 mlp", "2 mlp"]
    for layer in ("0 mlp", "1 mlp", "2 mlp"):
        assert only(found, layer=layer, what="recomputed") == {"mlpwi": WIDE}
    assert found.total("saved") == 2 * STREAM  # the first layer's input is the program's argument
    assert found.total("argument") == STREAM + 3 * 4 * 2 * D * F
    assert found.total("offloaded") == 0


@pytest.mark.parametrize("isolation", ["loop", "barrier", "none"])
def test_names(isolation):
    saved = residuals(*stack(checkpointed_layer(policy="minimal", isolation=isolation)))
    assert only(saved, layer="1 mlp", what="saved") == {"(input)": STREAM, "mlpwi": WIDE}
    assert saved.total("recomputed") == 0
    policy = Policy(offload=("mlpwi",))
    moved = residuals(*stack(checkpointed_layer(policy=policy, isolation=isolation)))
    assert moved.total("offloaded", name="mlpwi") == 3 * WIDE
    assert moved.total("saved", name="mlpwi") == 0


def test_an_offloaded_input_is_on_the_host_alone():
    policy = Policy(offload=("decoder_layer_input",))
    found = residuals(*stack(checkpointed_layer(policy=policy)))
    assert found.total("offloaded", name="decoder_layer_input") == 3 * STREAM
    assert found.total("saved") == 0


def test_plain_checkpoint_and_no_checkpoint():
    found = residuals(*stack(jax.checkpoint))
    assert {t.layer for t in found.tensors} == {f"{i} jax.checkpoint(mlp)" for i in range(3)}
    assert found.total("saved") == 2 * STREAM
    assert only(found, layer="2 jax.checkpoint(mlp)", what="recomputed") == {"mlpwi": WIDE}
    nothing = residuals(*stack(lambda fn: fn))
    assert nothing.total("recomputed") == 0
    assert nothing.total("saved") >= 3 * WIDE


@pytest.mark.parametrize("wrap", [checkpointed_layer, jax.checkpoint])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_a_scan_over_stacked_layers_counts_every_step(wrap, jit):
    wrapped = wrap(mlp)

    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (wrapped(w, x), None), x, ws)[0])

    ws = jax.tree.map(lambda w: jax.ShapeDtypeStruct((7, *w.shape), w.dtype), W)
    found = residuals(jit(loss), ws, X)
    (layer,) = {t.layer for t in found.tensors}
    assert layer.startswith("0 ")
    assert found.total("saved") == 7 * STREAM
    assert found.total("recomputed") == 7 * WIDE
    assert found.total("argument") == 7 * 4 * 2 * D * F


@pytest.mark.parametrize("policy", [None, "dots", "names"])
def test_jaxs_own_listing_has_the_same_bytes(policy, capsys):
    policies = {
        "dots": jax.checkpoint_policies.checkpoint_dots,
        "names": jax.checkpoint_policies.save_only_these_names("mlpwi"),
    }
    layer = jax.checkpoint(mlp, policy=policies.get(policy))

    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return jnp.sum(jnp.sin(x))

    args = [W] * 2, X
    jax.ad_checkpoint.print_saved_residuals(loss, *args)
    lines = capsys.readouterr().out.splitlines()
    listed = 0
    for line in lines:
        shape = re.match(r"f(?:loat)?32\[([\d,]*)\]", line)
        if shape and "literal" not in line:
            listed += 4 * int(np.prod([int(d) for d in shape[1].split(",") if d]))
    found = residuals(loss, *args)
    assert listed == found.total("saved") + found.total("argument")


def test_the_timeline_rises_forward_and_falls_backward():
    small, large = (residuals(*stack(checkpointed_layer, n)) for n in (4, 12))
    assert max(large.kept) - max(small.kept) >= 8 * STREAM
    assert large.kept[0] <= large.kept[large.turn - 1] == max(large.kept[: large.turn])
    assert large.kept[-1] < 2 * STREAM
    none = residuals(*stack(lambda fn: fn, 12))
    assert max(none.alive) > max(large.alive)
    assert all(a >= k for a, k in zip(none.alive, none.kept, strict=True))


def test_showing():
    found = residuals(*stack(checkpointed_layer))
    assert json.loads(found.to_json())["tensors"][0]["layer"] == "0 mlp"
    text = str(found)
    assert "recomputed" in text
    assert "mlpwi float32[16,32]" in text


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    axes = residuals(*stack(checkpointed_layer)).plot()
    assert axes.get_ylabel() == "GiB, all devices"


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (jax.grad(lambda x: jnp.sum(jnp.sin(x))), (1.0,), "differentiates already"),
        (lambda i: i + 1, (jnp.arange(3),), "nothing to differentiate"),
        (lambda x: x > 0, (jnp.ones(3),), "no result has a floating-point type"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(fn, args, words):
    args = tuple(jnp.asarray(a) for a in args)
    with pytest.raises(ValueError, match=words):
        residuals(fn, *args)


# -- Lint ------------------------------------------------------------------------------------------


def found_by_lint(*call):
    return {f.check: f for f in lint(*call).findings}


@pytest.mark.parametrize("isolation", ["loop", "barrier", "none"])
@pytest.mark.parametrize(
    "policy", ["full", "minimal", Policy(save=("mlpwi",)), "minimal_offloaded"]
)
def test_a_good_program_has_no_findings(policy, isolation):
    assert lint(*stack(checkpointed_layer(policy=policy, isolation=isolation))).ok
    assert str(lint(*stack(jax.checkpoint))) == "nothing found"


@pytest.mark.parametrize(
    "wrap",
    [
        checkpointed_layer(policy=Policy(save=("mlpwi", "mplwo"))),
        checkpointed_layer(policy=Policy(offload=("mlpwi", "mplwo"))),
        lambda fn: jax.checkpoint(
            fn, policy=jax.checkpoint_policies.save_only_these_names("mlpwi", "mplwo")
        ),
    ],
    ids=["ours", "offloading", "jax"],
)
def test_a_name_that_no_tensor_carries(wrap):
    (finding,) = lint(*stack(wrap)).findings
    assert finding.check == "name without tensor"
    assert "'mplwo'" in finding.message
    assert "did you mean 'mlpwo'" in finding.message
    assert finding.source.startswith(__file__)


def test_a_shipped_policy_of_which_no_name_is_carried():
    assert set(found_by_lint(*stack(checkpointed_layer(policy="save_out_proj")))) == {
        "name without tensor"
    }
    assert lint(*stack(checkpointed_layer(policy=Policy(save=("mlp*",))))).ok


def test_a_residual_that_nobody_reads():
    @jax.custom_vjp
    def wasteful(x):
        return jnp.sin(x)

    wasteful.defvjp(lambda x: (jnp.sin(x), (x, jnp.exp(x))), lambda r, ct: (ct * jnp.cos(r[0]),))
    finding = found_by_lint(lambda x: jnp.sum(wasteful(x * 2)), X)["kept but unread"]
    assert "float32[16,8]" in finding.message or "f32[16,8]" in finding.message


def test_a_name_inside_a_custom_vjp():
    @jax.custom_vjp
    def kernel(x):
        return checkpoint_name(jnp.sin(x), "context")

    kernel.defvjp(lambda x: (kernel(x), x), lambda x, ct: (ct * jnp.cos(x),))

    def layer(w, x):
        return mlp(w, kernel(x))

    finding = found_by_lint(*stack(checkpointed_layer, layer=layer))["hidden name"]
    assert "'context'" in finding.message
    assert finding.source.startswith(__file__)


@pytest.mark.parametrize(
    "wrap",
    [
        checkpointed_layer(policy="everything_saveable"),
        lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.everything_saveable),
    ],
)
def test_a_policy_that_keeps_everything(wrap):
    finding = found_by_lint(*stack(wrap))["keeps everything"]
    assert "everything_saveable" in finding.message


def test_an_array_closed_over():
    mask = jnp.tril(jnp.ones((T, T), jnp.float32))

    def layer(w, x):
        return mlp(w, mask @ x)

    finding = found_by_lint(*stack(checkpointed_layer, layer=layer))["closed over"]
    assert "16,16] (1.00 KiB)" in finding.message
    assert len(lint(*stack(checkpointed_layer, layer=layer)).findings) == 1


def test_a_dtype_promoted_on_the_way():
    narrow = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), ([W] * 2, X))

    def widening(w, x):
        return x + jnp.tanh(x @ w["wi"]) @ w["wo"].astype(jnp.float32)

    loss, _, _ = stack(checkpointed_layer, 2, widening)
    finding = found_by_lint(loss, *narrow)["promoted"]
    assert "bf16[16,8]" in finding.message or "bfloat16[16,8]" in finding.message
    assert finding.source.startswith(__file__)
    loss, _, _ = stack(checkpointed_layer, 2)
    assert lint(loss, *narrow).ok


def test_a_widened_copy_that_is_kept():
    def loss(x):
        wide = x.astype(jnp.float32)
        return jnp.sum(wide * jnp.sin(wide)) + jnp.sum(wide**2)

    finding = found_by_lint(loss, jax.ShapeDtypeStruct((T, D), jnp.bfloat16))["promoted"]
    assert "made wider" in finding.message


# -- The commands ----------------------------------------------------------------------------------

PROGRAM = """
import jax, jax.numpy as jnp
from remat_scan import Policy, checkpointed_layer

def build(policy):
    layer = checkpointed_layer(lambda w, x: x + jnp.tanh(x @ w) @ w.T, policy=policy)
    return lambda w, x: jnp.sum(layer(w, x)), jnp.ones((8, 16)), jnp.ones((32, 8))

good = lambda: build("full")
bad = lambda: build(Policy(save=("nothing",)))

def step():
    loss, *args = build("full")
    return jax.grad(loss), *args
"""


def test_commands(tmp_path, monkeypatch, capsys):
    (tmp_path / "lint_of_user.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("lint_of_user", None)
    assert main(["residuals", "lint_of_user:good"]) == 0
    assert "recomputed" in capsys.readouterr().out
    assert main(["lint", "lint_of_user:good"]) == 0
    assert capsys.readouterr().out == "nothing found\n"
    assert main(["lint", "lint_of_user:bad", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["check"] == "name without tensor"
    assert main(["residuals", "lint_of_user:step"]) == 2
    assert "differentiates already" in capsys.readouterr().err
