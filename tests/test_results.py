"""What README and docs claim, checked on the result files that their tables are made from."""

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.peers import OURS, PEERS

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def rows(name, **where):
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return [r for r in found if all(r[k] == v for k, v in where.items())]


def peaks(case, target):
    return {
        r["configuration"]: r["peak_bytes"] for r in rows("isolation", case=case, target=target)
    }


@pytest.mark.parametrize(("target", "share"), [("h100:8", 0.30), ("tpu7x:2x2x1", 0.46)])
def test_the_better_isolation_under_fsdp(target, share):
    found = peaks("FSDP over 8", target)
    assert min(found["loop"], found["barrier"]) <= share * found["jax.checkpoint"]


@pytest.mark.parametrize("target", ["h100", "tpu7x:2x2x1"])
def test_the_default_on_one_device(target):
    found = peaks("one device", target)
    assert found["loop"] <= 1.10 * found["jax.checkpoint"]


@pytest.mark.parametrize("way", ["loop", "barrier"])
def test_growth_with_depth_is_what_the_policy_keeps(way):
    """One layer's input, 8 x 8192 x 2048 in bfloat16, and its share of the weights' gradients."""
    found = {r["layers"]: r["peak_bytes"] for r in rows("depth", configuration=way)}
    kept = 8 * 8192 * 2048 * 2 + 3 * 2048 * 8192 * 4 // 8
    depths = sorted(found)
    assert depths == [4, 8, 16, 32, 64]
    for shallow, deep in itertools.pairwise(depths):
        assert (found[deep] - found[shallow]) / (deep - shallow) <= 1.15 * kept


@pytest.mark.parametrize(("way", "most"), [("loop", 0.36), ("barrier", 0.34)])
def test_growth_with_length(way, most):
    """Against `jax.checkpoint`, from 8192 tokens on, where activations are more than weights."""
    found, plain = (
        {r["tokens"]: r["peak_bytes"] for r in rows("length", configuration=w)}
        for w in (way, "jax.checkpoint")
    )
    assert sorted(found) == [2048, 4096, 8192, 16384, 32768]
    assert found[32768] - found[8192] <= most * (plain[32768] - plain[8192])


@pytest.mark.parametrize("way", ["loop", "barrier", "both"])
def test_overhead_on_cpu(way):
    (row,) = rows("overhead", configuration=way)
    assert row["trace_ratio"] <= 1.3
    assert row["compile_ratio"] <= 1.5
    assert row["step_ratio"] <= 1.05


@pytest.mark.parametrize("name", ["isolation", "depth", "length", "overlap", "overhead"])
def test_rows_say_where_they_come_from(name):
    for row in rows(name):
        assert {"case", "target", "configuration", "jax", "jaxlib"} <= set(row)


@pytest.mark.parametrize(
    ("way", "least", "most"),
    [("barrier", 0.40, 0.50), ("loop", 0.40, 0.50), ("barrier, overlap 1", 0.80, 1.0)],
)
def test_what_runs_beside_compute(way, least, most):
    """Isolation takes overlap away; a layer of overlap under the barrier gives it back."""
    (row,) = rows("overlap", target="h100:8", configuration=way)
    (plain,) = rows("overlap", target="h100:8", configuration="jax.checkpoint")
    moved = row["entry_bytes"] + row["loop_bytes"]
    assert moved == plain["entry_bytes"]
    assert least <= (row["entry_beside_bytes"] + row["loop_beside_bytes"]) / moved <= most
    assert row["peak_bytes"] <= 0.33 * plain["peak_bytes"]


@pytest.mark.parametrize(("on_host", "most"), [(False, 0.6), (True, 0.45)])
def test_against_the_best_peer(on_host, most):
    """On the device alone, and with arrays on the host, each at equal or fewer FLOPs."""
    found = {
        r["configuration"]: r
        for r in rows("peers", case="16 layers", target="h100:8")
        if on_host or not r["host_bytes"]
    }
    theirs = {way for way in PEERS if way not in OURS and ("offload" not in way or on_host)}
    assert theirs <= set(found)
    flops = found["scan over stacked layers"]["flops"]

    def best(ways):
        return min(found[w]["peak_bytes"] for w in ways if found[w]["flops"] <= flops)

    assert best(found.keys() & set(OURS)) <= most * best(theirs)


def test_blocks_pay_in_collectives():
    """Each of eight blocks gathers the weights and reduces their gradients anew."""
    moved = {
        r["configuration"]: r["entry_bytes"] + r["loop_bytes"]
        for r in rows("peers", case="16 layers", target="h100:8")
    }
    assert moved["periods"] < moved["periods, in blocks"] < moved["periods, by rows"]
    assert moved["periods, by rows"] <= 8.1 * moved["periods"]


# -- Stacks and Gemma ------------------------------------------------------------------------------


def figures(name, column, **where):
    return {r["configuration"]: r[column] for r in rows(name, **where)}


def test_nested_schedules_at_64_layers():
    where = {"case": "64 layers", "target": "h100:8"}
    peak, flops = (figures("stacks", c, **where) for c in ("peak_bytes", "flops"))
    assert peak["2 levels, barrier"] <= 0.45 * peak["barrier"]
    assert flops["2 levels, barrier"] <= 4 / 3 * flops["barrier"]  # one forward pass more


@pytest.mark.parametrize("way", ["loop", "barrier", "periods"])
def test_inputs_on_the_host_at_32_layers(way):
    where = {"case": "32 layers", "target": "h100:8"}
    peak, host = (figures("stacks", c, **where) for c in ("peak_bytes", "host_bytes"))
    inputs = 32 * 8 * 8192 * 2048 * 2
    assert host[f"input on host, {way}"] == inputs
    assert peak[f"input on host, {way}"] < 0.5 * peak[way]


@pytest.mark.parametrize(("target", "most"), [("tpu7x:2x2x1", 40), ("h200:8", 50)])
def test_e2b_in_the_memory_it_should_need(target, most):
    (row,) = rows(
        "headline",
        case="E2B, 24576 x 8, full",
        target=target,
        configuration="barrier, a row at a time",
    )
    assert row["peak_bytes"] <= most * 2**30
    assert row["needs_bytes"] <= 45 * 2**30


def test_e2b_with_its_inputs_on_the_host():
    (row,) = rows(
        "headline",
        case="E2B, 24576 x 8, full",
        target="tpu7x:2x2x1",
        configuration="loop, a row at a time, inputs on host",
    )
    assert row["host_bytes"] == 35 * 8 * 24576 * 1536 * 2
    assert row["peak_bytes"] <= 24 * 2**30
    assert row["needs_bytes"] <= 30 * 2**30


@pytest.mark.parametrize(
    ("case", "target"),
    [("E2B, 24576 x 8, full", "h200:8"), ("E2B, 8192 x 1, qkv_proj_offloaded", "h100:8")],
)
def test_e2b_recomputes_one_forward_pass_at_most(case, target):
    found = figures("headline", "flops", case=case, target=target)
    once = found.pop("no remat")
    assert found
    assert all(flops <= 1.30 * once for flops in found.values())


@pytest.mark.parametrize("target", ["h100:8", "tpu7x:2x2x1"])
def test_inputs_that_come_back_a_layer_ahead(target):
    """Every copy runs beside compute, none does at a distance of 0, and both are below recomputing."""
    found = {r["configuration"]: r for r in rows("prefetch", target=target)}
    at_once, ahead = found["loop, distance 0"], found["loop, distance 1"]
    assert at_once["from_host_bytes"] == at_once["host_bytes"]
    assert at_once["from_host_beside_bytes"] == 0
    assert ahead["from_host_beside_bytes"] == ahead["from_host_bytes"] == ahead["host_bytes"]
    assert max(at_once["peak_bytes"], ahead["peak_bytes"]) < 0.75 * found["loop"]["peak_bytes"]
