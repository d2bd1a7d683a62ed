"""Proof on compiled programs: it holds for every kind of layer, and catches what is broken."""

import dataclasses
import functools as ft
import importlib
import json
import re
import sys
import textwrap

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import LAYERS, attention, attention_weights, loss_of, mlp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from test_memory import needs_compiler

import remat_scan._isolation as isolation_module
from remat_scan import Policy, checkpointed_layer, isolated_scan, lint, residuals, verify
from remat_scan._cli import main
from remat_scan._regions import MARK, find_regions

verify_module = importlib.import_module("remat_scan._verify")

WIDTH, HIDDEN, TOKENS = 64, 256, 512
HERE = __file__

# Under jax 0.10, XLA for CPU merges a recomputation outside of loops with the forward pass.
KEEPS_BARRIERS = jax.__version_info__ >= (0, 11)


def stack(layers):
    """`(gradient of the stack, weights, x)` for `verify`; `layers`: one callable for each layer."""

    def loss(ws, x):
        for layer, w in zip(layers, ws, strict=True):
            x = layer(w, x)
        return jnp.sum(x**2)

    w = {
        "wi": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
        "wo": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
    return jax.grad(loss, (0, 1)), [w] * len(layers), x


def checks(verdict):
    return {p.check for p in verdict.problems}


@pytest.mark.parametrize("isolation", ["loop", "barrier", "both"])
def test_a_good_stack_passes(isolation):
    if isolation == "barrier" and not KEEPS_BARRIERS:
        pytest.skip("XLA of this jax undoes jax.checkpoint on CPU unless it is in a loop")
    verdict = verify(*stack([checkpointed_layer(mlp, isolation=isolation)] * 3), layers=3)
    assert verdict.ok, verdict
    assert [r.number for r in verdict.layers] == [0, 1, 2]
    for row in verdict.layers:
        assert (row.name, row.isolation, row.recomputed, row.late) == ("mlp", isolation, 1.0, 0)
        assert row.backward == row.forward == ("in order" if isolation == "barrier" else "loop")
        assert row.source.startswith(HERE)
    assert json.loads(verdict.to_json())["ok"] is True
    assert "isolated and recomputed as asked" in str(verdict)


@pytest.mark.parametrize("isolation", ["loop", pytest.param("both", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYERS)
def test_no_kind_of_layer_is_a_false_alarm(name, isolation):
    case = LAYERS[name](jnp.float32)
    floats, rest = eqx.partition(case.arrays, eqx.is_inexact_array)
    wrap = checkpointed_layer(isolation=isolation)
    loss = loss_of(lambda floats: case.run(wrap, eqx.combine(floats, rest)))
    verdict = verify(jax.grad(loss), floats)
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    "policy", ["minimal", "save_out_proj", "everything_saveable", "dots_saveable"]
)
def test_what_a_policy_saves_need_not_be_recomputed(policy):
    layer = checkpointed_layer(mlp, policy=policy)
    assert verify(*stack([layer] * 2), layers=2).ok


def test_layers_inside_a_scan():
    """A period of two unlike layers as the body of a scan, as a long stack is run."""
    mine, other = checkpointed_layer(mlp), checkpointed_layer(attention)

    def loss(ws, x):
        def period(x, w):
            return other(w[1], mine(w[0], x)), None

        return jnp.sum(jax.lax.scan(period, x, ws)[0] ** 2)

    one = ({"wi": jnp.ones((4, 6)), "wo": jnp.ones((6, 4))}, attention_weights(jnp.float32))
    ws = jax.tree.map(lambda w: jnp.stack([w] * 5), one)
    verdict = verify(jax.jit(jax.grad(loss)), ws, jnp.ones((3, 4)), layers=2)
    assert verdict.ok, verdict
    assert [r.name for r in verdict.layers] == ["mlp", "attention"]


def test_checkpointed_segments_of_checkpointed_layers():
    """A nested schedule: the checkpoint around a segment is no checkpoint outside a loop."""
    layer = checkpointed_layer(mlp)
    segment = jax.checkpoint(lambda w, x: layer(w, layer(w, x)))
    verdict = verify(*stack([segment] * 2), layers=4)
    assert verdict.ok, verdict


@pytest.mark.parametrize("isolation", ["barrier", "both"])
def test_a_loop_of_the_users_own_that_runs_once(isolation):
    """Such as blockwise attention over a single block: compilers may inline it."""

    def layer(w, x):
        return mlp(w, jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=1)[0])

    verdict = verify(*stack([checkpointed_layer(layer, isolation=isolation)] * 2), layers=2)
    assert {r.isolation for r in verdict.layers} == {isolation}
    assert verdict.ok or not KEEPS_BARRIERS, verdict


def test_arguments_are_those_of_the_report():
    step, ws, x = stack([checkpointed_layer(mlp)] * 2)
    jitted = jax.jit(lambda ws, x, *, scale: jax.tree.map(lambda g: scale * g, step(ws, x)[0]),
                     donate_argnums=0, static_argnames="scale")  # fmt: skip
    assert verify(jitted, ws, x, scale=2, layers=2).ok


# -- Broken on purpose -----------------------------------------------------------------------------


def test_prevent_cse_false_outside_of_a_loop():
    layer = checkpointed_layer(mlp)
    undone = jax.checkpoint(mlp, prevent_cse=False)
    verdict = verify(*stack([layer, undone, layer]))
    assert checks(verdict) >= {"recompute"}
    bad = [r.recomputed for r in verdict.layers if "jax.checkpoint" in r.name]
    assert bad == [0.0]


def test_prevent_cse_false_behind_a_barrier():
    layer = isolated_scan(jax.checkpoint(mlp, prevent_cse=False), isolation="barrier")
    assert "recompute" in checks(verify(*stack([layer] * 3)))


def test_the_checkpoint_outside_of_the_loop():
    verdict = verify(*stack([jax.checkpoint(isolated_scan(mlp))] * 3))
    assert "checkpoint" in checks(verdict)
    assert "outside of the loop" in str(verdict)


@pytest.mark.parametrize("layer", [isolated_scan(mlp), checkpointed_layer(mlp, policy="none")])
def test_a_loop_without_a_checkpoint(layer):
    verdict = verify(*stack([layer] * 3))
    assert "checkpoint" in checks(verdict)
    assert "no checkpoint inside" in str(verdict)


def fresh(**options):
    """A layer that no earlier test has traced."""
    return checkpointed_layer(lambda w, x: mlp(w, x), **options)


def test_a_barrier_whose_result_is_unused(monkeypatch):
    def unused(fn, in_types):
        def with_barrier(*operands):
            jax.lax.optimization_barrier(list(operands))
            return fn(*operands)

        return with_barrier

    monkeypatch.setattr(isolation_module, "_behind_barrier", unused)
    verdict = verify(*stack([fresh(isolation="barrier")] * 3))
    assert "isolation" in checks(verdict)


def test_a_barrier_that_leaves_weights_out(monkeypatch):
    """Only the stream is held: weight gradients may come late, and the verdict says so."""
    real = isolation_module._behind_barrier

    def stream_only(fn, in_types):
        *_, last = in_types

        def with_barrier(*operands):
            *ws, x = operands
            return real(lambda x: fn(*ws, x), [last])(x)

        return with_barrier

    monkeypatch.setattr(isolation_module, "_behind_barrier", stream_only)
    verdict = verify(*stack([fresh(isolation="barrier")] * 3))
    assert "isolation" in checks(verdict)
    assert "2 pass by" in str(verdict)


def test_a_loop_that_the_compiler_simplifies(monkeypatch):
    """Without the tag that holds it, a loop that runs once is inlined."""
    monkeypatch.setattr(isolation_module, "LOOP_TAG", "no-such-attribute")
    verdict = verify(*stack([fresh()] * 3))
    assert "isolation" in checks(verdict)
    assert {r.forward for r in verdict.layers} == {"gone"}


def test_a_loop_that_is_there_without_its_tag(monkeypatch):
    """This compiler kept it; the next pass or the next version need not."""
    real = verify_module.memory_report

    def without_tag(*args, **kwargs):
        report = real(*args, **kwargs)
        return dataclasses.replace(
            report, hlo=report.hlo.replace(isolation_module.LOOP_TAG, "gone")
        )

    monkeypatch.setattr(verify_module, "memory_report", without_tag)
    verdict = verify(*stack([checkpointed_layer(mlp)] * 2))
    assert checks(verdict) == {"tag"}
    assert {r.backward for r in verdict.layers} == {"untagged"}
    assert all("while" in p.instruction for p in verdict.problems)


def compiled_as(monkeypatch, change):
    """The compiler's program with its lines changed, as another compiler might have made it."""
    real = verify_module.memory_report

    def changed(*args, **kwargs):
        report = real(*args, **kwargs)
        lines = report.hlo.splitlines()
        change(lines)
        return dataclasses.replace(report, hlo="\n".join(lines))

    monkeypatch.setattr(verify_module, "memory_report", changed)


def products(lines, region, again):
    """Where a region's matrix products stand in the schedule, or the fusions that hold them."""
    start = next(i for i, line in enumerate(lines) if line.startswith("ENTRY"))
    return [
        i
        for i, line in enumerate(lines)
        if i > start
        and f"{MARK}{region})" in line
        and ("rematted_computation" in line) == again
        and re.search(r" (dot|fusion)\(", line)
        and re.search(r"/(dot_general|transpose)\"", line)
    ]


# Regions of a stack of three: 0 to 2 are the forward passes, 3 to 5 the backward ones of layers 2 to 0.


@pytest.mark.skipif(not KEEPS_BARRIERS, reason="XLA of this jax undoes jax.checkpoint on CPU")
def test_a_weight_gradient_after_the_next_backward_pass_began(monkeypatch):
    def delay(lines):
        (first, *_), (*_, last) = products(lines, 3, False), products(lines, 4, False)
        lines.insert(last, lines.pop(first))

    compiled_as(monkeypatch, delay)
    verdict = verify(*stack([checkpointed_layer(mlp, isolation="barrier")] * 3))
    assert "late gradient" in checks(verdict)
    assert [r.late for r in verdict.layers] == [0, 0, 1]
    problem = next(p for p in verdict.problems if p.check == "late gradient")
    assert problem.layer == "2 mlp, backward"
    assert problem.source.startswith(helpers.__file__)
    assert problem.instruction in str(verdict)


@pytest.mark.skipif(not KEEPS_BARRIERS, reason="XLA of this jax undoes jax.checkpoint on CPU")
def test_two_backward_passes_in_turns(monkeypatch):
    def mix(lines):
        (first, *_), (*_, last) = products(lines, 4, True), products(lines, 3, False)
        lines.insert(last, lines.pop(first))

    compiled_as(monkeypatch, mix)
    verdict = verify(*stack([checkpointed_layer(mlp, isolation="barrier")] * 3))
    assert checks(verdict) == {"overlap"}
    assert [r.backward for r in verdict.layers] == ["in order", "mixed", "mixed"]


@pytest.mark.parametrize("how", ["one product more", "the compiler's own recomputation"])
def test_a_forward_pass_recomputed_twice(monkeypatch, how):
    def again(lines):
        at = next(
            i
            for i, line in enumerate(lines)
            if re.search(r" dot\(", line) and "rematted_computation" in line
        )
        name = re.search(r"%?([\w.\-]+) = ", lines[at])[1]
        if how == "one product more":
            lines.insert(at, lines[at].replace(f"{name} =", f"{name}.2 =").replace("ROOT ", ""))
        else:
            lines[at] = lines[at].replace(f"{name} =", f"{name}.remat =")

    compiled_as(monkeypatch, again)
    verdict = verify(*stack([checkpointed_layer(mlp)] * 2))
    assert checks(verdict) == {"recompute"}
    assert "recomputed more than once" in str(verdict)


def test_names_inside_loops_that_the_compiler_has_piled_up(monkeypatch):
    """XLA for TPU puts the names of all calls of a function in front of what is inside its loop."""

    def pile_up(lines):
        entry = next(i for i, line in enumerate(lines) if line.startswith("ENTRY"))
        for i in range(entry):
            for number in re.findall(re.escape(MARK) + r"(\d+)\)", lines[i])[:1]:
                alike = (2, 1, 0) if int(number) < 3 else (5, 4, 3)
                names = "/".join(f"jvp({MARK}{n})" for n in alike)
                lines[i] = lines[i].replace(f"{MARK}{number})", names)

    compiled_as(monkeypatch, pile_up)
    verdict = verify(*stack([checkpointed_layer(mlp)] * 3), layers=3)
    assert verdict.ok, verdict
    assert [r.recomputed for r in verdict.layers] == [1.0] * 3


@pytest.mark.parametrize("how", ["a call of the plain function", "a lambda around it"])
def test_a_layer_that_is_not_wrapped(how):
    layer = checkpointed_layer(mlp)
    plain = mlp if how == "a call of the plain function" else lambda w, x: mlp(w, x)
    verdict = verify(*stack([layer, plain, layer]))
    assert checks(verdict) == {"wrapped"}
    (problem,) = verdict.problems
    assert problem.source.startswith(HERE)
    assert "without its wrapper" in problem.message


def test_too_few_layers():
    verdict = verify(*stack([checkpointed_layer(mlp), lambda w, x: jnp.tanh(x)]), layers=2)
    assert checks(verdict) == {"layers"}
    assert "1 calls of wrapped layers were found, 2 are expected" in str(verdict)


def test_no_layer_at_all():
    assert checks(verify(*stack([lambda w, x: jnp.sin(x)]))) == {"layers"}


def test_isolation_none_isolates_nothing():
    verdict = verify(*stack([checkpointed_layer(mlp, isolation="none")] * 3))
    assert "isolation" in checks(verdict)


# -- What is traced: of no account for values, but for memory and for the time to compile -----------


def traced_layers(layer, n=2, transform=jax.grad):
    """The equations of the forward layers of a stack whose weights look like its stream."""

    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return jnp.sum(x**2)

    array = jnp.ones((8, 8))
    _, regions, _ = find_regions(jax.make_jaxpr(transform(loss))([array] * n, array))
    return [r.equation for r in regions if r.phase == "forward"]


def test_traced_weights_are_no_carry_of_the_loop():
    """A carry is copied, and its gradient summed up: the stream alone is one."""

    def layer(w, x):
        return checkpointed_layer(ft.partial(lambda w, x: jnp.sin(x @ w), w))(x)

    for eqn in traced_layers(layer, transform=jax.jit):
        program = eqn.params["jaxpr"].jaxpr
        (loop,) = (e for e in program.eqns if e.primitive.name == "scan")
        carried = [v for v in loop.invars if v.aval.shape == (8, 8)]
        assert carried == [program.invars[-1]], program


def test_traced_arguments_are_continued_once_and_by_their_own_type():
    def layer(x):
        return jnp.sin(x), jnp.cos(x), x > 0

    program = jax.make_jaxpr(checkpointed_layer(layer))(jnp.ones((8, 8))).eqns[0].params["jaxpr"]
    (loop,) = (e for e in program.jaxpr.eqns if e.primitive.name == "scan")
    assert [v.aval.shape for v in loop.invars] == [(8, 8)]
    assert [v.aval.shape for v in loop.outvars] == [(8, 8), (1, 8, 8), (1, 8, 8)]
    narrow = jax.eval_shape(checkpointed_layer(lambda x: x.astype(jnp.float16)), jnp.ones((8, 8)))
    assert narrow.dtype == jnp.float16


def test_traced_layers_alike_are_one_program():
    layer = checkpointed_layer(lambda w, x: jnp.sin(x @ w))
    first, *others = (e.params["jaxpr"] for e in traced_layers(layer, 4, jax.jit))
    assert all(other is first for other in others)


@pytest.mark.parametrize("isolation", ["loop", "barrier"])
def test_traced_copies_to_the_host_end_before_the_next_layer(isolation):
    policy = Policy(offload=("decoder_layer_input",))
    layer = checkpointed_layer(lambda w, x: jnp.sin(x @ w), policy=policy, isolation=isolation)
    host = jax.memory.Space.Host
    for eqn in traced_layers(layer):
        program = eqn.params["jaxpr"].jaxpr
        ties = [
            e
            for e in program.eqns
            if e.primitive.name == "optimization_barrier"
            and any(v.aval.memory_space == host for v in e.outvars)
        ]
        (tie,) = ties
        assert program.outvars[0] in tie.outvars


# -- On programs for hardware that is not there ----------------------------------------------------


def sharded_stack(isolation):
    """Four fully sharded layers on eight devices: where a scheduler puts weight gradients off."""
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def array(*shape, spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    layer = checkpointed_layer(
        ft.partial(lambda w, x: x + jax.nn.gelu(x @ w["wi"]) @ w["wo"]), isolation=isolation
    )

    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return jnp.mean(x**2)

    w = {"wi": array(512, 2048, spec=("fsdp", None)), "wo": array(2048, 512, spec=(None, "fsdp"))}
    return jax.grad(loss), [w] * 4, array(16, 512, 512, spec=("fsdp",))


@pytest.mark.aot
@pytest.mark.parametrize("isolation", ["loop", "barrier"])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("h100:8", marks=needs_compiler("h100:8")),
        pytest.param("tpu7x:2x2x1", marks=[needs_compiler("tpu7x:2x2x1"), pytest.mark.slow]),
    ],
)
def test_other_compilers_obey(target, isolation):
    """XLA for TPU does not keep such layers apart behind a barrier alone, and the verdict says so."""
    verdict = verify(*sharded_stack(isolation), target=target, layers=4)
    if (target, isolation) == ("tpu7x:2x2x1", "barrier"):
        assert checks(verdict) <= {"overlap", "late gradient"}
    else:
        assert verdict.ok, verdict


@pytest.mark.aot
@pytest.mark.slow
@needs_compiler("tpu7x:2x2x1")
@pytest.mark.parametrize(
    ("isolation", "found"),
    [
        ("loop", set()),
        ("barrier", set()),
        ("both", set()),
        ("none", {"isolation"}),
        ("one layer is not wrapped", {"wrapped"}),
    ],
)
def test_verdicts_on_tpu(isolation, found):
    """On one device, where layers alike are one function whose loop's body the compiler copies."""
    if isolation == "one layer is not wrapped":
        layers = [checkpointed_layer(mlp), mlp, checkpointed_layer(mlp)]
    else:
        layers = [checkpointed_layer(mlp, isolation=isolation)] * 3
    verdict = verify(*stack(layers), target="tpu7x:2x2x1")
    assert checks(verdict) == found, verdict
    assert {r.recomputed for r in verdict.layers} == {1.0}
    kept = {"loop": "loop", "both": "loop", "barrier": "in order", "none": "none"}
    assert {r.backward for r in verdict.layers} == {kept.get(isolation, "loop")}


@pytest.mark.aot
@needs_compiler("h100:8")
def test_the_schedule_of_a_stack_without_isolation_is_mixed():
    verdict = verify(*sharded_stack("none"), target="h100:8")
    assert sum(r.late for r in verdict.layers) > 0, verdict


# -- The command -----------------------------------------------------------------------------------

PROGRAM = """
import jax, jax.numpy as jnp
from remat_scan import checkpointed_layer

def build(isolation):
    layer = checkpointed_layer(lambda w, x: x + jnp.tanh(x @ w) @ w.T, isolation=isolation)
    def loss(w, x):
        return jnp.sum(layer(w, layer(w, x)) ** 2)
    return jax.grad(loss), jnp.ones((8, 16)), jnp.ones((32, 8))

good = lambda: build("loop")
bad = lambda: build("none")
"""


def test_the_exit_code_is_the_verdict(tmp_path, monkeypatch, capsys):
    (tmp_path / "proof_of_user.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("proof_of_user", None)
    assert main(["verify", "proof_of_user:good", "--layers", "2"]) == 0
    assert "isolated and recomputed as asked" in capsys.readouterr().out
    assert main(["verify", "proof_of_user:bad", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["verify", "proof_of_user:good", "--layers", "3"]) == 1
    assert main(["verify", "proof_of_user:good", "--target", "h10"]) == 2


# -- Under jax_remat3 ------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="this jax has no jax_remat3")
@pytest.mark.parametrize("read", [verify, residuals, lint])
def test_refuses_traces_of_remat3(read):
    before = jax.config.jax_remat3
    fn, ws, x = stack([checkpointed_layer(mlp)] * 2)
    jax.config.update("jax_remat3", True)
    try:
        with pytest.raises(NotImplementedError, match="unset JAX_REMAT3"):
            read(fn, ws, x)
    finally:
        jax.config.update("jax_remat3", before)
