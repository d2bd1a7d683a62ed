"""`memory_report`: what a compiled program needs, for hardware that need not be there."""

import dataclasses
import html
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ._compile import Compiled, Job, compile_here, compile_in_child
from ._flops import count_flops
from ._hlo import Buffer, Module
from ._host import bytes_sent_to_host
from ._targets import Target, check_installed, parse_target, versions
from ._trace import is_array

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What one compiled program needs. Bytes are per device; a figure nobody knows is `None`.

    **Attributes:**

    - `target`: what it was compiled for; `devices`: how many of them it runs on.
    - `needs`: what must fit: arguments + temporaries + outputs − aliased. For a program that does
      not fit it is the size that the compiler asked for.
    - `peak`: the most that is alive at once, by the compiler's own account. XLA's CPU compiler gives
      none that includes temporaries, so it is `None` there: compare `temporaries`.
    - `temporaries`, `arguments`, `outputs`, `aliased`: parts of `needs`; `aliased` is what outputs
      share with donated arguments.
    - `host`: bytes in the host's memory (offloaded residuals, offloaded arguments); `None` on CPU.
    - `sent_to_host`: bytes that the program asked to have there at once beside such arguments, at
      least; counted on the traced program and divided by `devices`.
    - `fits`: whether `needs` fits into the target's memory, or `None` where that is not known.
    - `flops`: floating-point operations of matrix products and convolutions, of all devices
      together, counted on the traced program with loop trip counts; `flops_exact` is `False` if
      there is a loop or kernel whose count isn't known.
    - `compile_seconds`: on this machine.
    - `versions`: of jax, jaxlib and the target's compiler.
    - `buffers`: what is alive at the peak, by the line of the user's program that made it, largest
      first: a reconstruction from the schedule, which finds most but not all of `peak`.
    - `message`: the compiler's own words if the program does not fit.
    """

    target: str
    devices: int
    needs: int | None
    peak: int | None
    temporaries: int | None
    arguments: int | None
    outputs: int | None
    aliased: int | None
    host: int | None
    fits: bool | None
    flops: int
    flops_exact: bool
    compile_seconds: float
    versions: dict[str, str]
    sent_to_host: int = 0
    buffers: tuple[Buffer, ...] = ()
    message: str = ""
    hlo: str = dataclasses.field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        return self.table()

    def table(self, top: int = 8) -> str:
        """The report as text, with the `top` largest groups of buffers."""
        head = f"{self.target}, {self.devices} device{'s' * (self.devices != 1)}"
        head += f"; {', '.join(f'{k} {v}' for k, v in self.versions.items())}"
        lines = [head]
        if self.fits is False:
            lines.append(f"DOES NOT FIT. {self.message}".rstrip())
        lines += [f"  {name:<12}{value:>12}   {what}" for name, value, what in self._rows()]
        if self.buffers:
            found = sum(b.bytes for b in self.buffers)
            of = f", {100 * found / self.peak:.0f} % of the peak" if self.peak else ""
            lines.append(f"Alive at the peak ({format_bytes(found)} found{of}):")
            for b in self.buffers[:top]:
                count = f"{b.count} × " if b.count > 1 else ""
                lines.append(
                    f"  {format_bytes(b.bytes):>12}  {count}{b.shape}  {b.source}  {b.operation}"
                )
            if len(self.buffers) > top:
                rest = sum(b.bytes for b in self.buffers[top:])
                lines.append(
                    f"  {format_bytes(rest):>12}  in {len(self.buffers) - top} more places"
                )
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, str]]:
        flops = f"{self.flops / 1e12:,.3f} T"
        sent = f"; {format_bytes(self.sent_to_host)} sent there" if self.sent_to_host else ""
        return [
            ("needs", format_bytes(self.needs), "arguments + temporaries + outputs − aliased"),
            ("peak", format_bytes(self.peak), "alive at once"),
            ("temporaries", format_bytes(self.temporaries), ""),
            ("arguments", format_bytes(self.arguments), ""),
            ("outputs", format_bytes(self.outputs), ""),
            ("aliased", format_bytes(self.aliased), "outputs in donated arguments"),
            ("host", format_bytes(self.host), f"in the host's memory{sent}"),
            ("FLOPs", flops, "all devices" if self.flops_exact else "all devices, at least"),
            ("compile", f"{self.compile_seconds:.1f} s", ""),
        ]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> str:
        """The report as a JSON object, without the program's text; `from_json` reads it."""
        fields = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "hlo"
        }
        fields["buffers"] = [dataclasses.asdict(b) for b in self.buffers]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "MemoryReport":
        """Reads what `to_json` wrote.

        **Raises:** `ValueError` for text that is no such object.
        """
        try:
            fields = json.loads(text)
            fields["buffers"] = tuple(Buffer(**b) for b in fields["buffers"])
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"MemoryReport.from_json: not a report: {error}") from None


def memory_report(
    fn: Callable[..., Any],
    *args: Any,
    target: str = "cpu",
    donate_argnums: int | Sequence[int] = (),
    timeout: float | int | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> MemoryReport:
    """Compiles `fn(*args, **kwargs)` for a target and says what the program needs.

    ```python
    step = jax.jit(train_step, donate_argnums=0)
    print(memory_report(step, state, batch, target="h100"))
    ```

    Nothing is run. To compile for several devices, give the arguments `NamedSharding`s over a mesh
    of as many devices; an abstract mesh will do, so a laptop can describe any number:

    ```python
    mesh = jax.sharding.AbstractMesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("fsdp"))
    weights = jax.ShapeDtypeStruct((4096, 4096), "float32", sharding=rows)
    memory_report(step, weights, batch, target="tpu7x:2x2x1")
    ```

    If `step` names a mesh, the arguments' must be the same one. A mesh of devices that are here,
    such as simulated ones, will do for any target too.

    Arguments without shardings are for one device of the target. Programs for TPU and GPU are
    compiled in a child process, so that a crash of the compiler is an error and not the end of this
    session.

    **Arguments:**

    - `fn`: any function, also one under `jax.jit`, whose donated arguments are then donated.
    - `args`, `kwargs`: arrays or `jax.ShapeDtypeStruct`s in any pytrees; everything that is neither
      is static.
    - `target`: `"cpu"`, `"cpu:N"`, a TPU topology such as `"tpu7x:2x2x1"`, or a GPU such as
      `"h100:8"`; `remat-scan targets` lists them.
    - `donate_argnums`: arguments whose memory the outputs may take over, as for `jax.jit`.
    - `timeout`: seconds after which a child process is ended.
    - `progress`: show the seconds that a long compile takes, if standard error is a terminal.

    **Returns:**

    A [`remat_scan.MemoryReport`][]. A program that does not fit is a report too.

    **Warns:** `UserWarning` if the program offloads and the compiler undid most of it.

    **Raises:** `ValueError` for an unknown target or a number of devices that the target has not;
    `MissingPluginError` (an `ImportError`) if its compiler is not installed; `CompilerError` (a
    `RuntimeError`) if the compiler fails; `TimeoutError`.
    """
    where = parse_target(target)
    check_installed(where)
    job, counted, names = _export(fn, args, kwargs, donate_argnums, where)
    devices = job.exported.nr_devices
    if devices > where.devices:
        raise ValueError(
            f"The arguments are sharded over {devices} devices, but target {target!r} has "
            f"{where.devices}. Take a larger target or a smaller mesh."
        )
    if where.platform == "cpu" and devices <= len(jax.devices("cpu")):
        compiled = compile_here(job, where)
    else:
        compiled = compile_in_child(job, where, timeout, progress)
    return _report(compiled, where, devices, counted, names)


class _Counted(NamedTuple):
    """Of all devices together, on the traced program."""

    flops: int
    flops_exact: bool
    sent_to_host: int


def _export(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    donate_argnums: int | Sequence[int],
    target: Target,
) -> tuple[Job, _Counted, list[str]]:
    with_paths, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in with_paths]
    dynamic = [is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    arrays = [x for x, d in zip(leaves, dynamic, strict=True) if d]
    names = [_argument_name(p) for (p, _), d in zip(with_paths, dynamic, strict=True) if d]
    donated = _donated(fn, args, kwargs, donate_argnums, dynamic)
    meshes: dict[Any, AbstractMesh] = {}
    described = [_describe(getattr(x, "sharding", None)) for x in arrays]
    avals = [
        jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=traced_sharding(x, meshes))
        for x in arrays
    ]

    def program(*arrays: Any) -> Any:
        rest = iter(arrays)
        merged = [next(rest) if d else x for x, d in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if is_array(x)]

    program.__name__ = getattr(fn, "__name__", type(fn).__name__)
    # What is not read lies on the device too, and says on how many devices the program runs.
    jitted = jax.jit(program, donate_argnums=donated, keep_unused=True)
    traced = jitted.trace(*avals).jaxpr
    counted = _Counted(*count_flops(traced), bytes_sent_to_host(traced))
    exported = jax.export.export(
        jitted, platforms=[target.platform], disabled_checks=_AnyCustomCall.checks()
    )(*avals)
    return Job(exported, tuple(described), donated), counted, names


class _AnyCustomCall:
    """Custom calls (Pallas kernels, cuDNN) need no promise of stability: they are compiled today."""

    @staticmethod
    def checks() -> list[Any]:
        names = ("tpu_custom_call", "__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax",
                 "__cudnn$fmhaSoftmaxBackward", "__cudnn$fmhaScaleBiasSoftmax",
                 "__cudnn$fmhaScaleBiasSoftmaxBackward", "mosaic_gpu_v2", "xla.sdy.FuncResultSharding",
                 "annotate_device_placement", "Sharding", "__gpu$xla.gpu.ptx")  # fmt: skip
        check = jax.export.DisabledSafetyCheck
        return [check.custom_call(name) for name in names]


def _donated(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    donate_argnums: int | Sequence[int],
    dynamic: list[bool],
) -> tuple[int, ...]:
    """The positions of donated arrays: what the caller says, and what a jitted `fn` says."""
    argnums = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if any(not 0 <= i < len(args) for i in argnums):
        raise ValueError(f"donate_argnums={donate_argnums!r}, but there are {len(args)} arguments.")
    flags = [i in argnums for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    flags += [False] * len(jax.tree.leaves(kwargs))
    flags = [f for f, d in zip(flags, dynamic, strict=True) if d]
    if isinstance(fn, jax.stages.Wrapped):
        info = jax.tree.leaves(fn.trace(*args, **kwargs).args_info)
        inner = [bool(getattr(i, "donated", False)) for i in info]
        if len(inner) == len(flags):
            flags = [a or b for a, b in zip(flags, inner, strict=True)]
    return tuple(i for i, f in enumerate(flags) if f)


def _describe(sharding: Any) -> Any:
    """A sharding without its devices, or `None` for one device and for no sharding."""
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    axes = tuple(
        (name, size, type_.name)
        for (name, size), type_ in zip(mesh.shape.items(), mesh.axis_types, strict=True)
    )
    kind = sharding.memory_kind
    return axes, sharding.spec, kind if kind in ("pinned_host", "unpinned_host") else None


def traced_sharding(x: Any, meshes: dict[Any, AbstractMesh]) -> NamedSharding | None:
    """The sharding of an array to trace with. A mesh with devices stays: the program may name it too,
    and some primitives, such as cuDNN's attention, are lowered for nothing less."""
    if (described := _describe(getattr(x, "sharding", None))) is None:
        return None
    axes, spec, kind = described
    mesh: Mesh | AbstractMesh = x.sharding.mesh
    if not isinstance(mesh, Mesh):
        if axes not in meshes:
            meshes[axes] = AbstractMesh(
                tuple(size for _, size, _ in axes),
                tuple(name for name, _, _ in axes),
                axis_types=tuple(AxisType[type_] for *_, type_ in axes),
            )
        mesh = meshes[axes]
    return NamedSharding(mesh, spec, memory_kind=kind)


def _argument_name(path: tuple[Any, ...]) -> str:
    in_kwargs, *rest = path
    prefix = "args" if getattr(in_kwargs, "idx", 0) == 0 else "kwargs"
    return prefix + jax.tree_util.keystr(tuple(rest))


def _report(
    compiled: Compiled,
    target: Target,
    devices: int,
    counted: _Counted,
    names: list[str],
) -> MemoryReport:
    common: dict[str, Any] = {
        "target": target.name,
        "devices": devices,
        "flops": counted.flops,
        "flops_exact": counted.flops_exact,
        "sent_to_host": counted.sent_to_host // devices,
        "compile_seconds": compiled.seconds,
        "versions": versions(target),
        "hlo": compiled.text,
    }
    memory = compiled.memory
    if memory is None:
        unknown = dict.fromkeys(("peak", "temporaries", "arguments", "outputs", "aliased", "host"))
        message = compiled.out_of_memory
        needs = size_asked_for(message)
        return MemoryReport(needs=needs, fits=False, message=_short(message), **unknown, **common)
    needs = memory["argument_size"] + memory["temp_size"] + memory["output_size"]
    needs -= memory["alias_size"]
    host = sum(memory.get(f"host_{part}_size", 0) for part in ("argument", "temp", "output"))
    on_cpu = target.platform == "cpu"
    if not on_cpu:
        _warn_if_taken_back(
            target, counted.sent_to_host // devices, host - memory.get("host_argument_size", 0)
        )
    fits = None
    if target.capacity is not None:
        fits = needs <= target.capacity
    elif target.platform == "tpu":
        fits = True  # libtpu refuses what does not fit
    return MemoryReport(
        needs=needs,
        peak=None if on_cpu else _peak_on_device(memory.get("peak_memory"), needs),
        temporaries=memory["temp_size"],
        arguments=memory["argument_size"],
        outputs=memory["output_size"],
        aliased=memory["alias_size"],
        host=None if on_cpu else host,
        fits=fits,
        buffers=tuple(_with_names(Module(compiled.text).at_peak(), names)),
        **common,
    )


def _warn_if_taken_back(target: Target, sent: int, stayed: int) -> None:
    if 2 * stayed >= sent:
        return
    remedy = "isolation='loop'" + " or 'barrier'" * (target.platform == "cuda")
    warnings.warn(
        f"The program sends {format_bytes(sent)} a device to the host's memory, but compiled for "
        f"{target.name} it keeps {format_bytes(stayed)} there: XLA copied it back at once, so that "
        f"offloading saves nothing. What ties the copies down on this target is "
        f"checkpointed_layer(..., {remedy}); without that, recompute the tensor.",
        stacklevel=4,
    )


def _peak_on_device(peak: int | None, needs: int) -> int | None:
    """XLA for GPU takes the peak over all memory spaces together. With more in the host's memory than
    on the device, its figure is the host's; what must fit on the device is still an upper bound."""
    return None if peak is None else min(peak, needs)


def _with_names(buffers: list[Buffer], names: list[str]) -> list[Buffer]:
    """The compiler calls arguments `args[7]`; the user knows them as `args[0]['wq']`."""
    named = []
    for b in buffers:
        number = re.fullmatch(r"(?:args|arrays)\[(\d+)\]", b.source)
        if b.kind == "argument" and number and int(number[1]) < len(names):
            b = dataclasses.replace(b, source=names[int(number[1])])
        named.append(b)
    return named


def size_asked_for(message: str) -> int | None:
    """The size in an out-of-memory message, in bytes: what the program wanted, not what there is."""
    number = r"([\d.]+)\s*(GiB|MiB|KiB|TiB|[GMKT]i?B?|B|bytes)?"
    for pattern in (
        r"\(" + number + r"\) exceeds available",
        r"Used " + number + r" of",
        r"[Pp]rogram (?:\w+ ){0,3}requires? " + number,
        r"allocate " + number,
        r"requires " + number,
    ):
        if found := re.search(pattern, message):
            unit = (found[2] or "B")[0].upper()
            return int(
                float(found[1]) * {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(unit, 1)
            )
    return None


def _short(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "")[:500]


def format_bytes(size: int | float | None) -> str:
    """Bytes as people read them: `8.34 GiB`; `–` for a figure that is not known."""
    if size is None:
        return "–"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Several reports side by side; made by [`remat_scan.compare_reports`][]."""

    reports: dict[str, MemoryReport]

    _FIGURES = ("needs", "peak", "temporaries", "arguments", "host", "flops", "compile_seconds")

    def __str__(self) -> str:
        titles = list(self.reports)
        width = max(12, *(len(t) + 2 for t in titles))
        lines = [" " * 16 + "".join(f"{t:>{width}}" for t in titles)]
        for figure in self._FIGURES:
            cells = [_cell(figure, getattr(r, figure)) for r in self.reports.values()]
            lines.append(f"{figure:<16}" + "".join(f"{c:>{width}}" for c in cells))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> str:
        """A JSON object from each title to its report."""
        return json.dumps({t: json.loads(r.to_json()) for t, r in self.reports.items()})

    def plot(self, ax: Any = None) -> Any:
        """Bars of `peak` (of `temporaries` where no peak is known), in GiB, on matplotlib axes.

        **Raises:** `ImportError` if matplotlib is not installed.
        """
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots(figsize=(1.5 + 1.2 * len(self.reports), 3.5))
        with_peak = all(r.peak is not None for r in self.reports.values())
        figure = "peak" if with_peak else "temporaries"
        sizes = [(getattr(r, figure) or 0) / GIB for r in self.reports.values()]
        ax.bar_label(ax.bar(list(self.reports), sizes), fmt="%.2f")
        ax.set_ylabel(f"{figure}, GiB a device")
        return ax


def compare_reports(
    reports: Mapping[str, MemoryReport] | Sequence[MemoryReport],
) -> Comparison:
    """Several reports side by side.

    **Arguments:**

    - `reports`: from a title to a report, or a sequence of reports, which their targets then name.

    **Returns:**

    A `Comparison`: print it for a table, `.plot()` it for bars, `.to_json()` it.

    **Raises:** `ValueError` if there is none.
    """
    if not isinstance(reports, Mapping):
        counts: dict[str, int] = {}
        named: dict[str, MemoryReport] = {}
        for report in reports:
            counts[report.target] = counts.get(report.target, 0) + 1
            number = counts[report.target]
            named[report.target if number == 1 else f"{report.target} ({number})"] = report
        reports = named
    if not reports:
        raise ValueError("compare_reports: there is no report to compare.")
    return Comparison(dict(reports))


def _cell(figure: str, value: Any) -> str:
    if figure == "flops":
        return f"{value / 1e12:,.3f} T"
    if figure == "compile_seconds":
        return f"{value:.1f} s"
    return format_bytes(value)
