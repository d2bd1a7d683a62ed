"""Reports against programs whose sizes are known, and what happens when a compiler dies."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import remat_scan._compile as compile_
from remat_scan import (
    CompilerError,
    MemoryReport,
    MissingPluginError,
    Policy,
    checkpointed_layer,
    compare_reports,
    memory_report,
)
from remat_scan._memory import size_asked_for
from remat_scan._targets import check_installed, parse_target


def needs_compiler(target: str) -> pytest.MarkDecorator:
    try:
        check_installed(parse_target(target))
        missing = importlib.util.find_spec("flatbuffers") is None
    except MissingPluginError:
        missing = True
    return pytest.mark.skipif(missing, reason=f"the compiler for {target} is not installed")


TPU = pytest.param("v5e:2x2", marks=[pytest.mark.aot, needs_compiler("v5e:2x2")])
GPU = pytest.param("h100:4", marks=[pytest.mark.aot, needs_compiler("h100:4")])


def abstract(shape, dtype="float32", spec=None, devices=1):
    if devices == 1:
        return jax.ShapeDtypeStruct(shape, dtype)
    mesh = AbstractMesh((devices,), ("d",), axis_types=(AxisType.Auto,))
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*(spec or ())))
    )


def test_known_sizes_and_flops():
    a, b = abstract((256, 512)), abstract((512, 128))
    report = memory_report(lambda a, b: a @ b, a, b)
    assert report.arguments == 4 * (256 * 512 + 512 * 128)
    assert report.outputs == 4 * 256 * 128
    assert report.aliased == 0
    assert report.needs == report.arguments + report.temporaries + report.outputs
    assert (report.flops, report.flops_exact) == (2 * 256 * 512 * 128, True)
    assert report.peak is None  # XLA's CPU compiler has none that means what it says
    assert report.host is None
    assert set(report.versions) == {"jax", "jaxlib"}


def test_donation_is_found_in_a_jitted_function_and_given_by_hand():
    x = abstract((1024, 1024))
    assert memory_report(lambda x: x + 1, x).aliased == 0
    assert memory_report(lambda x: x + 1, x, donate_argnums=0).aliased == 2**22
    assert memory_report(jax.jit(lambda x: x + 1, donate_argnums=0), x).aliased == 2**22


def test_static_arguments_and_keywords():
    def fn(x, how, *, scale):
        assert how == "twice"
        return x * scale

    x = jnp.ones((8, 8))
    assert memory_report(fn, x, "twice", scale=2.0).arguments == 256


def test_flops_count_trip_counts_and_shards():
    x = abstract((16, 16))

    def loop(x):
        return jax.lax.scan(lambda c, _: (c @ x, None), x, None, length=7)[0]

    assert memory_report(loop, x).flops == 7 * 2 * 16**3

    def unknown(x):
        return jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ x, x)

    report = memory_report(unknown, x)
    assert (report.flops, report.flops_exact) == (2 * 16**3, False)

    def branches(x):
        return jax.lax.cond(x.sum() > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert memory_report(branches, x).flops == 2 * 2 * 16**3

    def recomputed(x):
        return jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ x) @ x)(x)))(x)

    # Forward 2 products, 1 of them again for the backward pass, backward 2 each.
    assert memory_report(recomputed, x).flops == (2 + 1 + 4) * 2 * 16**3


@pytest.mark.parametrize("target", ["cpu:4", TPU, GPU])
def test_a_sharded_program_needs_a_share_of_the_arguments(target):
    x = abstract((64, 1024), spec=("d",), devices=4)
    w = abstract((1024, 1024), spec=(None, "d"), devices=4)
    report = memory_report(lambda w, x: jnp.tanh(x @ w), w, x, target=target)
    assert report.devices == 4
    assert report.arguments == (64 * 1024 + 1024 * 1024) * 4 // 4
    assert report.flops == 2 * 64 * 1024 * 1024  # of all devices


@pytest.mark.parametrize("target", [TPU, GPU])
def test_the_child_compiles_the_program_as_a_direct_compile_would(target):
    """The way through another process loses neither donation, tags, host memory nor source lines."""

    def layer(w, x):
        return x + jnp.tanh(x @ w) @ w.T

    wrapped = checkpointed_layer(layer, policy=Policy(offload=("decoder_layer_input",)))

    def step(ws, x):
        def loss(ws, x):
            for w in ws:
                x = wrapped(w, x)
            return jnp.sum(x)

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))

    ws = [abstract((2048, 2048), spec=("d",), devices=4) for _ in range(3)]
    x = abstract((16384, 2048), spec=("d",), devices=4)
    report = memory_report(jax.jit(step, donate_argnums=0), ws, x, target=target)
    assert report.aliased == 3 * 2048 * 2048 * 4 // 4
    assert report.host == 3 * 16384 * 2048 * 4 // 4
    assert report.hlo.count("skip-simplify-while-loops_trip-count-one") >= 6
    assert any("test_memory.py" in b.source for b in report.buffers)
    assert report.peak is not None
    assert report.peak <= report.needs
    found = sum(b.bytes for b in report.buffers)
    # The list is a reconstruction: the compiler packs small buffers better than it knows.
    assert 0.7 * report.peak <= found <= 1.5 * report.peak


@pytest.mark.parametrize("target", [pytest.param("h100", marks=GPU.marks)])
def test_the_peak_is_the_devices_own(target):
    """XLA for GPU gives one peak for all memory spaces; here the host holds more than the device."""
    layers, layer_input = 16, 8192 * 512 * 4
    wrapped = checkpointed_layer(
        lambda w, x: x + jnp.tanh(x @ w), policy=Policy(offload=("decoder_layer_input",))
    )

    def loss(ws, x):
        for w in ws:
            x = wrapped(w, x)
        return jnp.sum(x)

    ws, x = [abstract((512, 512))] * layers, abstract((8192, 512))
    report = memory_report(jax.grad(loss), ws, x, target=target)
    assert report.host == layers * layer_input
    assert report.peak is not None
    assert report.peak <= report.needs < report.host


def plainly_offloaded(fn):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(lambda w, x: fn(w, checkpoint_name(x, "input")), policy=policy)


def offloaded(isolation):
    policy = Policy(offload=("decoder_layer_input",))
    return lambda fn: checkpointed_layer(fn, policy=policy, isolation=isolation)


@pytest.mark.parametrize(
    ("target", "wrap", "remedy"),
    [
        pytest.param(*TPU.values, offloaded("loop"), None, marks=TPU.marks, id="TPU, loop"),
        pytest.param(
            *TPU.values, offloaded("barrier"), "isolation='loop'[)]", marks=TPU.marks, id="TPU, barrier"
        ),
        pytest.param(*GPU.values, offloaded("barrier"), None, marks=GPU.marks, id="GPU, barrier"),
        pytest.param(
            *GPU.values, plainly_offloaded, "isolation='loop' or 'barrier'[)]", marks=GPU.marks,
            id="GPU, jax.checkpoint",
        ),
    ],
)  # fmt: skip
def test_offloading_that_the_compiler_undoes_is_said(target, wrap, remedy):
    layers, layer_input = 8, 8192 * 512 * 4
    wrapped = wrap(lambda w, x: x + jax.nn.gelu(x @ w) @ w.T)

    def loss(ws, x):
        for w in ws:
            x = wrapped(w, x)
        return jnp.sum(x**2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ws, x = [abstract((512, 2048))] * layers, abstract((8192, 512))
        report = memory_report(jax.grad(loss), ws, x, target=target)
    said = [w for w in caught if "to the host's memory" in str(w.message)]
    assert report.sent_to_host == layers * layer_input
    assert "128.00 MiB sent there" in str(report)
    if remedy is None:
        assert report.host == report.sent_to_host
        assert not said
    else:
        assert report.host < report.sent_to_host / 2
        assert re.search(remedy, str(said[0].message))


@pytest.mark.parametrize("target", [TPU, GPU])
def test_buffers_at_the_peak_name_the_line_and_the_argument(target):
    def fn(w, x):
        h = x
        for _ in range(2):
            h = jnp.sort(h @ w["large"], axis=0)  # 16384 x 4096, too large for on-chip memory
        return jnp.cumsum(h, axis=0)

    w, x = {"large": abstract((4096, 4096))}, abstract((16384, 4096))
    report = memory_report(fn, w, x, target=target)
    by_source = {b.source: b for b in report.buffers}
    assert by_source["args[0]['large']"].bytes == 4096 * 4096 * 4
    assert by_source["args[1]"].bytes == 16384 * 4096 * 4
    mine = [b for b in report.buffers if "test_memory.py" in b.source]
    assert max(b.bytes for b in mine) >= 16384 * 4096 * 4


def test_a_program_that_does_not_fit_is_a_report():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 640.51G of 94.74G hbm. Exceeded hbm capacity by 545.77G."
    )
    assert size_asked_for(message) == int(640.51 * 2**30)
    assert size_asked_for("HbmOom: (640.51G) exceeds available HBM (94.74G)") == int(640.51 * 2**30)
    assert size_asked_for("no number here") is None


@pytest.mark.parametrize("target", [pytest.param("v5e:2x2", marks=TPU.marks)])
def test_a_tpu_program_that_does_not_fit(target):
    x = abstract((2**17, 2**17), "float32")  # 64 GiB each
    report = memory_report(lambda x: jnp.sum(x @ x @ x), x, target=target)
    assert report.fits is False
    assert report.needs is None or report.needs > 64 * 2**30
    assert report.peak is None
    assert "DOES NOT FIT" in str(report)


@pytest.mark.parametrize("target", [pytest.param("h100", marks=GPU.marks)])
def test_a_gpu_program_that_does_not_fit(target):
    x = abstract((2**17, 2**17), "float32")
    report = memory_report(lambda x: x @ x, x, target=target)
    assert report.fits is False
    assert report.needs >= 128 * 2**30


def test_json_round_trip_and_text():
    report = memory_report(lambda x: x @ x, abstract((32, 32)))
    assert MemoryReport.from_json(report.to_json()) == report
    assert "temporaries" in str(report)
    assert "<pre>" in report._repr_html_()
    with pytest.raises(ValueError, match="not a report"):
        MemoryReport.from_json("{}")


def test_compare_reports():
    report = memory_report(lambda x: x @ x, abstract((32, 32)))
    both = compare_reports([report, report])
    assert list(both.reports) == ["cpu", "cpu (2)"]
    assert "needs" in str(both)
    assert compare_reports({"a": report}).reports["a"] is report
    with pytest.raises(ValueError, match="no report"):
        compare_reports([])


@pytest.mark.parametrize("target", ["cpu:4", GPU])
def test_a_program_may_name_a_mesh_of_the_devices_here(target):
    """As some primitives need: those whose partitioning is written in Python, cuDNN's attention too."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    square = custom_partitioning(lambda x: x @ x.T)
    square.def_partition(
        partition=lambda *_: pytest.fail("each device has its own"),
        infer_sharding_from_operands=None,
        sharding_rule="i j -> i k",
    )
    rows = PartitionSpec("d")
    fn = jax.shard_map(square, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    x = jax.device_put(np.ones((64, 32), np.float32), NamedSharding(mesh, rows))
    report = memory_report(fn, x, target=target)
    assert (report.devices, report.arguments) == (4, 16 * 32 * 4)


def test_more_devices_than_the_target_has():
    x = abstract((8, 8), spec=("d",), devices=8)
    with pytest.raises(ValueError, match="over 8 devices, but target 'cpu:2' has 2"):
        memory_report(lambda x: x, x, target="cpu:2")


def test_cpu_devices_that_this_process_does_not_have():
    pytest.importorskip("flatbuffers")
    x = abstract((64, 8), spec=("d",), devices=16)
    report = memory_report(lambda x: x * 2, x, target="cpu:16")
    assert report.arguments == 64 * 8 * 4 // 16


# -- The child process -----------------------------------------------------------------------------


@pytest.fixture
def child(monkeypatch):
    """Makes the child run other code than the compiler."""
    pytest.importorskip("flatbuffers")

    def run(code: str) -> None:
        command = (sys.executable, "-c", textwrap.dedent(code))
        monkeypatch.setattr(compile_, "_command", lambda: command)

    return run


def compile_in_child(timeout=None):
    return memory_report(
        lambda x: x * 2, abstract((64,), spec=("d",), devices=16), target="cpu:16", timeout=timeout
    )


def test_a_compiler_that_aborts_is_an_error_with_its_line(child):
    child(
        """
        import os, sys
        print("F0101 window.cc:12] Check failed: rank == size() Cannot find a window", file=sys.stderr)
        print("*** stack trace ***", file=sys.stderr, flush=True)
        os.abort()
        """
    )
    with pytest.raises(CompilerError, match=r"SIGABRT.*Check failed: rank == size\(\)"):
        compile_in_child()


def test_a_compiler_that_takes_too_long_is_ended(child, tmp_path):
    pid_file = tmp_path / "pid"
    child(f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    with pytest.raises(TimeoutError, match="timeout"):
        compile_in_child(timeout=1.5)
    assert not _alive(int(pid_file.read_text()))


def test_ctrl_c_ends_the_child(child, tmp_path):
    pid_file = tmp_path / "pid"
    child(f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    def interrupt():
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # Whoever runs the tests in the background may have had SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_in_child()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not _alive(int(pid_file.read_text()))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.aot
@needs_compiler("v5e:2x2")
def test_whatever_jax_platforms_says():
    """A user's session that has set nothing, or something else, can still compile for a TPU."""
    code = """
    import jax, jax.numpy as jnp
    jnp.ones(3) + 1  # jax has started
    from remat_scan import memory_report
    x = jax.ShapeDtypeStruct((128, 128), "float32")
    print("peak", memory_report(lambda x: x @ x, x, target="v5e:2x2").peak)
    """
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {"JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr[-2000:]
    assert int(out.stdout.split()[-1]) >= 2 * 128 * 128 * 4


def test_an_argument_that_is_sharded_and_not_read():
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    unread = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=rows)
    y = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    report = memory_report(lambda _, y: 2 * y, unread, y, target="cpu:8")
    assert (report.arguments, report.outputs) == (1024 // 8 + 256, 256)
