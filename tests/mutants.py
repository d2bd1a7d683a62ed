"""`python tests/mutants.py`: breaks the library on purpose, one way after another, and runs the tests
that should notice each. Writes `benchmarks/results/mutations.json`.

A mutation is a text and what stands in its place; a text that is not found is an error, so the list
can't rot unseen. Each runs on a copy in a temporary directory.
"""

# ruff: noqa: E501 (mutations are quoted as they stand)

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"


class Mutation(NamedTuple):
    name: str
    file: str  # a pattern: the text may move between the files that it matches
    old: str
    new: str
    tests: tuple[str, ...]  # pytest arguments of the tests that should notice


LAYER = ("tests/test_layer.py", "-k", "not sharding and not bf16")
KINDS = ("tests/test_layer.py", "-k", "plain_calls and f32")
POLICIES = ("tests/test_policies.py", "tests/test_layer.py", "-k", "polic and not plain_calls")
REACHES = ("tests/test_layer.py", "-k", "survive or grows or inputs_and_none or threads")
TRACING = ("tests/test_layer.py", "-k", "alike or alive or rebound or nothing_wrapped")
VERIFY = ("tests/test_verify.py", "-k", "not alarm and not other_compilers")
TRACED = ("tests/test_verify.py", "-k", "traced")
RESIDUALS = ("tests/test_residuals.py",)
MEMORY = ("tests/test_testing.py", "-k", "donated")
HOST = ("tests/test_host.py",)

ISOLATION, WRAP, TRACE = "_isolation.py", "_layer.py", "_trace.py"
OFFLOAD, POLICY = "_offload.py", "_policies.py"
STACKS, PERIODS, BLOCKS = "_stack*.py", "_periods.py", "_blocks.py"

STACK = ("tests/test_stack.py", "-k", "not sharded and not transformations")
SHARED = ("tests/test_stack.py", "-k", "share_are")
SHARDED = ("tests/test_stack.py", "-k", "sharded")
BLOCKWISE = ("tests/test_blocks.py", "-k", "not transformations")

MUTATIONS = (
    Mutation("drop the tag", ISOLATION, '**{LOOP_TAG: "true"}', '**{"other": "true"}', REACHES),
    Mutation("drop the loop", ISOLATION,
             "fn = _in_loop(fn, in_types, out_types, streams_from)", "pass", REACHES),
    Mutation("drop the barrier", ISOLATION, "fn = _behind_barrier(fn, in_types)", "pass", VERIFY),
    Mutation("a barrier that nobody reads", ISOLATION, "            inner[i] = x\n        return fn",
             "            pass\n        return fn", VERIFY),
    Mutation("a barrier over the first operand only", ISOLATION,
             "if not _is_mutable(t)]\n        for i, x in zip(held",
             "if not _is_mutable(t)][:1]\n        for i, x in zip(held", VERIFY),
    Mutation("a barrier over the stream only", ISOLATION,
             "if not _is_mutable(t)]\n        for i, x in zip(held",
             "if not _is_mutable(t)][-1:]\n        for i, x in zip(held", VERIFY),
    Mutation("both means the loop alone", ISOLATION, 'in ("barrier", "both")', 'in ("barrier",)', VERIFY),
    Mutation("both means the barrier alone", ISOLATION, 'in ("loop", "both")', 'in ("loop",)', VERIFY),
    Mutation("swap the carry's outputs", ISOLATION,
             "return [outputs[o] for o in slots],", "return [outputs[o] for o in reversed(slots)],", KINDS),
    Mutation("swap carry and output", ISOLATION, "outputs[o] = y\n        for o, y in zip(others",
             "outputs[-1 - o] = y\n        for o, y in zip(others", KINDS),
    Mutation("swap the other outputs", ISOLATION, "zip(others, ys", "zip(others[::-1], ys", KINDS),
    Mutation("operands in the wrong places", ISOLATION,
             "zip(carried + stacked, carry + xs", "zip(stacked + carried, carry + xs", KINDS),
    Mutation("an argument continued twice", ISOLATION, "                free.remove(i)\n", "", TRACED),
    Mutation("outputs continue weights", ISOLATION, "range(streams_from, len(in_types))",
             "range(len(in_types))", TRACED),
    Mutation("any type continues an argument", ISOLATION, "if in_types[i] == out_type:",
             "if in_types[i].shape == out_type.shape:", TRACED),
    Mutation("loop operands are not given back", ISOLATION, "inner = list(operands)  # what",
             "inner = [0 * x for x in operands]  # what", KINDS),
    Mutation("ignore the policy", WRAP, "policy=policy.as_function())", "policy=None)", POLICIES),
    Mutation("drop the checkpoint", WRAP, "if policy.checkpoint:", "if False:", VERIFY),
    Mutation("let the compiler merge the recomputation", WRAP,
             "policy=policy.as_function())", "policy=policy.as_function(), prevent_cse=False)", VERIFY),
    Mutation("the checkpoint outside of the loop", WRAP,
             "        if policy.checkpoint:",
             "        layer = isolate(layer, program.in_types, program.out_types, program.num_weights,"
             ' isolation)\n        isolation = "none"\n        if policy.checkpoint:', VERIFY),
    Mutation("offload without isolation", WRAP, 'policy.offloads and isolation != "none"',
             "False", ("tests/test_layer.py", "tests/test_policies.py", "-k", "offload")),
    Mutation("a cache that forgets the policy", WRAP,
             "(id(program.jaxpr), policy, isolation)", "(id(program.jaxpr), isolation)", POLICIES),
    Mutation("a cache that forgets the isolation", WRAP,
             "(id(program.jaxpr), policy, isolation)", "(id(program.jaxpr), policy)", VERIFY),
    Mutation("lose the layer's name", WRAP, "_named(layer, program.name)", '_named(layer, "f")', VERIFY),
    Mutation("no common program for layers alike", WRAP, "program.built[key] = layer", "pass",
             TRACED),
    Mutation("the input keeps no name", WRAP,
             'if policy.action(LAYER_INPUT) == "offload":', "if False:", RESIDUALS),
    Mutation("the weights get the input's name", WRAP, "if i in inputs else x",
             "if i not in inputs else x", RESIDUALS),
    Mutation("1, 1.0 and True are the same", TRACE, "(type(value), shown, value)", "(value,)", TRACING),
    Mutation("0.0 and -0.0 are the same", TRACE,
             "repr(value) if isinstance(value, float | complex) else", '"" if value else', TRACING),
    Mutation("stale closures", TRACE, "if weak and kept.captured !=", "if False and kept.captured !=",
             KINDS),
    Mutation("a trace outlives its tracers", TRACE,
             "lasting = not any(isinstance(c, jax.core.Tracer) for c in consts)", "lasting = True",
             ("tests/test_properties.py", "-k", "outlives")),
    Mutation("a cache that never ends", TRACE,
             "weakref.finalize(first, _FLAT_LAYERS.pop, anchor, None)", "pass", ("tests/test_properties.py", "-k", "cache_of_layers")),
    Mutation("weights count as arguments", TRACE, "len(consts) + sum(is_dynamic[:num_callee])", "0",
             TRACED),
    Mutation("static results in the wrong order", TRACE,
             "for x in out_leaves]", "for x in out_leaves[::-1]]", KINDS),
    Mutation("lose a cotangent", OFFLOAD, "return [g for g in gradients if not _is_float0(g)]",
             "return [g * (i > 0) for i, g in enumerate(g for g in gradients if not _is_float0(g))]",
             ("tests/test_layer.py", "-k", "every_policy and offload")),
    Mutation("cotangents in the wrong order", OFFLOAD, "from_host)(cts)", "from_host)(cts[::-1])",
             ("tests/test_layer.py", "-k", "every_policy and offload")),
    Mutation("offload to the device", OFFLOAD, "on_host = [jax.device_put(x, _HOST) for x in to_host]",
             "on_host = list(to_host)", RESIDUALS),
    Mutation("the host copies are not tied down", OFFLOAD,
             "        outputs, on_host = jax.lax.optimization_barrier((outputs, on_host))\n", "",
             TRACED),
    Mutation("a name that is both is saved", POLICY, '("recompute", self.recompute),\n', "", POLICIES),
    Mutation("patterns match nothing", POLICY, "if any(_is_pattern(n) and fnmatch", "if any(False and fnmatch",
             POLICIES),
    Mutation("offload means save", POLICY, '"offload": to_host', '"offload": Saveable',
             RESIDUALS),
    Mutation("dots are recomputed", POLICY, 'if policy.unnamed == "dots":\n                return Saveable',
             'if policy.unnamed == "dots":\n                return Recompute', POLICIES),
    Mutation("minimal forgets a tensor", POLICY, '_MINIMAL = (*_QKV, "out_proj", *_MLP_IN, "mlpwo")',
             '_MINIMAL = (*_QKV, "out_proj", *_MLP_IN)', POLICIES),
    Mutation("full keeps everything", POLICY, "return jax.checkpoint_policies.nothing_saveable",
             "return jax.checkpoint_policies.everything_saveable", VERIFY),
    Mutation("aliased memory counts twice", "_memory.py", 'needs -= memory["alias_size"]', "pass", MEMORY),
    Mutation("verify does not look for the tag", "_schedule.py", "if LOOP_TAG in ins.rest:", "if True:",
             VERIFY),
    Mutation("verify does not look for late gradients", "_schedule.py", "            if late:\n",
             "            if False:\n", VERIFY),
    Mutation("verify finds every recomputation", "_verify.py", "    if ratio < 1:\n", "    if False:\n", VERIFY),
    Mutation("lint does not look into custom_vjp", "_lint.py", "if inside and eqn.primitive.name ==",
             "if False and eqn.primitive.name ==", RESIDUALS),
    Mutation("accounting counts the host as the device", "_residuals.py",
             '"offloaded" if on_host(var.aval) else', "", RESIDUALS),
    Mutation("names are found at the top alone", OFFLOAD, "in jax.extend.core.jaxprs_in_params(eqn.params)",
             "in ()", ("tests/test_policies.py", "-k", "wherever")),
    Mutation("the sums of shared cotangents wait for nothing", STACKS,
             "            shared = _hold_cotangents(shared)\n", "            pass\n", SHARED),
    Mutation("cotangents that nobody asked for", STACKS, "if not isinstance(t, SymbolicZero)]", "]", SHARED),
    Mutation("the first writer of a value counts", STACKS, "(values | written)[name]",
             "(written | values)[name]", STACK),
    Mutation("written values in the wrong order", STACKS, "values = iter(more)",
             "values = iter(more[::-1])", STACK),
    Mutation("all layers have one key", STACKS, "jax.random.fold_in(self.key, first + begin + j)",
             "jax.random.fold_in(self.key, 0)", STACK),
    Mutation("all repetitions have the keys of the first", STACKS, "start + size * step", "start + 0 * step",
             STACK),
    Mutation("all layers have the first one's policy", STACKS,
             "self.policies[start + begin], self.isolations[start + begin]",
             "self.policies[0], self.isolations[start + begin]", STACK),
    Mutation("all layers have the first one's isolation", STACKS,
             "self.policies[start + begin], self.isolations[start + begin]",
             "self.policies[start + begin], self.isolations[0]", STACK),
    Mutation("a boundary of one layer", STACKS, "inputs[begin : begin + self.boundary]",
             "inputs[begin : begin + 1]", STACK),
    Mutation("a period forgets what was written before it", STACKS, "initial[name] = old_arrays[name]",
             "initial[name] = jax.tree.map(_placeholder, new[name])", STACK),
    Mutation("every layer is given the first one's input", STACKS, "slice(start + j, start + steps * size, size)",
             "slice(start, start + steps * size, size)", STACK),
    Mutation("what is read before it is written is not carried", STACKS, "for _, name in layer.reads} - written",
             "for _, name in layer.reads} - {name for a in period for name in a.writes}",
             STACK),
    Mutation("the last pattern counts", STACKS, "for pattern, found in matches.items() if i in found",
             "for pattern, found in reversed(matches.items()) if i in found", STACK),
    Mutation("overlap holds nothing", STACKS, '"barrier")(*leaves)', '"none")(*leaves)', STACK),
    Mutation("no barrier inside a period", STACKS, "jax.lax.optimization_barrier([held[i] for i in moving])", "[held[i] for i in moving]",
             (*STACK[:1], "-k", "period")),
    Mutation("what is collected is numbered from 0", STACKS, "(start + size * r + j, take(more, r))",
             "(size * r + j, take(more, r))", STACK),
    Mutation("unstacking gives the first repetition", PERIODS, "layers += take(item.period, r)",
             "layers += take(item.period, 0)", STACK),
    Mutation("layers stacked in the wrong order", PERIODS, "stack_trees(run[j::length])",
             "stack_trees(run[j::length][::-1])", STACK),
    Mutation("places of a period mixed up", PERIODS, "stack_trees(run[j::length])",
             "stack_trees(run[j * repeats : (j + 1) * repeats])", STACK),
    Mutation("the most layers to compile", PERIODS, "best.append(min(options", "best.append(max(options", STACK),
    Mutation("layers of other dtypes are alike", PERIODS, "return np.shape(leaf), leaf.dtype,",
             "return np.shape(leaf), None,", STACK),
    Mutation("layers of other static values are alike", PERIODS, "return _StaticInput(leaf)",
             "return type(leaf)", STACK),
    Mutation("stacking gathers what was sharded", PERIODS, "PartitionSpec(None, *sharding.spec)",
             "PartitionSpec()", SHARDED),
    Mutation("layers of other shardings are alike", PERIODS, "leaf.dtype, _named_sharding(leaf)",
             "leaf.dtype, None", SHARDED),
    Mutation("a sum is the last block's", BLOCKS, "r + x.astype(r.dtype)", "x.astype(r.dtype)", BLOCKWISE),
    Mutation("the last block again at the start", BLOCKS, "            start = count * share\n",
             "            start = 0\n", BLOCKWISE),
    Mutation("the last block is left out", BLOCKS, "        if rest:\n", "        if False:\n", BLOCKWISE),
    Mutation("blocks keep what they compute", BLOCKS,
             "jax.checkpoint(block, prevent_cse=prevent_cse)(operands, start)", "block(operands, start)",
             BLOCKWISE),
    Mutation("sums of blocks in their own dtype", BLOCKS, "return jnp.promote_types(dtype, accumulate)",
             "return dtype", BLOCKWISE),
    Mutation("float64 is added up in float32", BLOCKS, "return jnp.promote_types(dtype, accumulate)",
             "return jnp.dtype(accumulate)", BLOCKWISE),
    Mutation("sums come back wide", BLOCKS, 'r.astype(t.dtype) if a == "sum"', 'r if a == "sum"', BLOCKWISE),
    Mutation("shards are not looked for", BLOCKS, "max(_num_shards(leaves[i], a) for i, a in cut.items())", "1",
             BLOCKWISE),
    Mutation("axes from the back", BLOCKS, "return axis % ndim", "return abs(axis)", BLOCKWISE),
    Mutation("arrays put together along the first axis", BLOCKS, "_put(r, split(x, a), start, a + 1)",
             "_put(r, split(x, 0), start, 1)", BLOCKWISE),
    Mutation("what segments send is added up", "_host.py",
             "in_a_region = max(in_a_region, sum(inner))", "in_a_region += sum(inner)", HOST),
    Mutation("what branches send is added up", "_host.py", "sent += max(inner)", "sent += sum(inner)", HOST),
    Mutation("what leaves a loop is not counted", "_host.py",
             "max(_bytes(eqn.outvars), sum(inner))", "sum(inner)", HOST),
    Mutation("what is on the host is sent again", "_host.py",
             "if r and not on_host(given.aval)", "if r", HOST),
    Mutation("what nobody reads is sent", "_host.py", "if r and _is_var(v)}", "if _is_var(v)}", HOST),
    Mutation("one shard counts", "_host.py", "sum(inner) * shards", "sum(inner)", HOST),
    Mutation("nothing is said of what is taken back", "_memory.py", "if 2 * stayed >= sent:", "if True:",
             ("tests/test_memory.py", "-k", "compiler_undoes")),
)  # fmt: skip


def mutate(mutation: Mutation, folder: Path) -> None:
    """Writes a copy of the project with one mutation into `folder`."""
    for name in ("remat_scan", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "pytest_remat_scan.py"):
        shutil.copy(ROOT / name, folder / name)
    for path in sorted((folder / "remat_scan").glob(mutation.file)):
        text = path.read_text()
        if mutation.old in text:
            path.write_text(text.replace(mutation.old, mutation.new, 1))
            return
    raise SystemExit(f"{mutation.name}: {mutation.file} has no {mutation.old!r} any more")


def run(mutation: Mutation) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mutate(mutation, folder)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *mutation.tests,
        ]
        environment = {**os.environ, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        failed = [line.split(" - ")[0] for line in done.stdout.splitlines()
                  if line.startswith(("FAILED", "ERROR"))]  # fmt: skip
        if done.returncode not in (0, 1) and not failed:
            raise SystemExit(
                f"{mutation.name}: pytest itself failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return {
            "mutation": mutation.name,
            "file": mutation.file,
            "caught": done.returncode != 0,
            "by": failed[0].split(" ", 1)[1] if failed else "",
            "seconds": round(time.perf_counter() - start, 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="a mutation's name; repeatable")
    parser.add_argument("--resume", action="store_true", help="leave out what was caught already")
    parser.add_argument(
        "--check", action="store_true", help="only look whether all texts are there"
    )
    options = parser.parse_args()
    if options.check:
        for mutation in MUTATIONS:
            with tempfile.TemporaryDirectory() as name:
                mutate(mutation, Path(name))
        return 0
    rows = {r["mutation"]: r for r in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    rows = {m.name: rows[m.name] for m in MUTATIONS if m.name in rows}
    for mutation in MUTATIONS:
        if options.only and mutation.name not in options.only:
            continue
        if options.resume and rows.get(mutation.name, {}).get("caught"):
            continue
        rows[mutation.name] = row = run(mutation)
        print(
            "caught  " if row["caught"] else "SURVIVED",
            mutation.name,
            row["by"],
            row["seconds"],
            flush=True,
        )
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    return 0 if all(r["caught"] for r in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
