"""Target names, such as `"cpu:8"`, `"tpu7x:2x2x1"` or `"h100:8"`, as compile-only devices.

Nothing here needs the hardware: TPU devices come from libtpu's description of a topology, GPU devices
from a description of the chip that is handed to XLA.
"""

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

Platform: TypeAlias = Literal["cpu", "tpu", "cuda"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    **Attributes:**

    - `name`: as the user wrote it.
    - `platform`: `"cpu"`, `"tpu"` or `"cuda"`.
    - `chip`: the generation, for example `"tpu7x"` or `"h100"`.
    - `devices`: how many devices the target has, as JAX counts them.
    - `capacity`: bytes of memory of one device, or `None` where the compiler checks it itself.
    """

    name: str
    platform: Platform
    chip: str
    devices: int
    capacity: int | None


class MissingPluginError(ImportError):
    """The compiler for a target is not installed; the message says how to get it."""


@dataclasses.dataclass(frozen=True)
class _TPU:
    cores: int  # devices a chip, as JAX counts them
    axes: int
    accelerator: str
    example: str


_TPUS = {
    "v4": _TPU(1, 3, "v4-8", "v4:2x2x1"),
    "v5e": _TPU(1, 2, "v5litepod-4", "v5e:2x2"),
    "v5p": _TPU(1, 3, "v5p-8", "v5p:2x2x1"),
    "v6e": _TPU(1, 2, "v6e-4", "v6e:2x2"),
    "tpu7x": _TPU(2, 3, "tpu7x-8", "tpu7x:2x2x1"),
}


@dataclasses.dataclass(frozen=True)
class _GPU:
    """The numbers of XLA's `GpuTargetConfigProto` that differ between chips."""

    description: str
    memory: int  # bytes
    bandwidth: int  # bytes a second
    cores: int
    l2_cache: int  # bytes
    clock_ghz: float
    compute_capability: int
    shared_memory: int = 233472  # bytes a core
    shared_memory_optin: int = 232448  # bytes a block
    fpus: int = 128
    features: str = "ACCELERATED_FEATURES"

    def config(self) -> str:
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
              shared_memory_per_block_optin: {self.shared_memory_optin}
              core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock_ghz}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_cache}
              device_memory_size: {self.memory}
              cuda_compute_capability {{
                major: {self.compute_capability} feature_extension: {self.features}
              }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 28 }}
            device_description_str: "{self.description}"
            """


# XLA rematerialises by itself what exceeds about three quarters of `memory`, so it has to be true.
_GPUS = {
    "a100": _GPU(
        "NVIDIA A100-SXM4-80GB", 85100068864, 2039040000000, 108, 41943040, 1.41, 8,
        shared_memory=167936, shared_memory_optin=166912, fpus=64, features="NONE",
    ),
    "h100": _GPU("NVIDIA H100 80GB HBM3", 84942979072, 3352320000000, 132, 52428800, 1.98, 9),
    "h200": _GPU("NVIDIA H200 141GB HBM3e", 151397597184, 4800000000000, 132, 52428800, 1.98, 9),
    "b200": _GPU("NVIDIA B200", 191514411008, 7672320000000, 148, 132644864, 1.965, 10),
}  # fmt: skip

EXAMPLES: tuple[str, ...] = (
    "cpu",
    "cpu:8",
    *(tpu.example for tpu in _TPUS.values()),
    *_GPUS,
    *(f"{gpu}:8" for gpu in _GPUS),
)


def parse_target(name: str) -> Target:
    """The target that a name means.

    **Arguments:**

    - `name`: `"cpu"`, `"cpu:N"`, a TPU topology such as `"tpu7x:2x2x1"` or `"v6e:4x4"` (chips along
      each axis), `"a100"`, `"h100"`, `"h200"` or `"b200"`, each with `:N` for N devices.

    **Raises:** `ValueError` with the nearest known name.
    """
    chip, _, size = name.lower().partition(":")
    if chip == "cpu" or chip in _GPUS:
        if not size or re.fullmatch("[1-9][0-9]{0,5}", size):
            gpu = _GPUS.get(chip)
            memory = gpu.memory if gpu else None
            return Target(name, "cuda" if gpu else "cpu", chip, int(size or 1), memory)
        raise ValueError(
            f"target {name!r}: after {chip}: comes the number of devices, as {chip}:8."
        )
    if (tpu := _TPUS.get(chip)) is not None:
        if re.fullmatch("x".join(["[1-9][0-9]{0,3}"] * tpu.axes), size):
            chips = math.prod(map(int, size.split("x")))
            return Target(name, "tpu", chip, chips * tpu.cores, None)
        raise ValueError(
            f"target {name!r}: after {chip}: come the chips along {tpu.axes} axes, as {tpu.example}."
        )
    near = difflib.get_close_matches(name, (*EXAMPLES, "cpu", *_TPUS, *_GPUS), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"target {name!r} is not known.{hint} Known, for example: {', '.join(EXAMPLES)}."
    )


def check_installed(target: Target) -> None:
    """**Raises:** `MissingPluginError` if the compiler for the target is not installed."""
    if target.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise MissingPluginError(
            f"target {target.name!r} needs libtpu, the TPU compiler (it needs no TPU): "
            'pip install "remat-scan[tpu-aot]"'
        )
    if target.platform == "cuda":
        plugins = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
        if not any(_exists(module) for module in plugins):
            raise MissingPluginError(
                f"target {target.name!r} needs JAX's CUDA plugin and NVIDIA's assembler (they need "
                'no GPU): pip install "remat-scan[gpu-aot]"'
            )


def environment(target: Target) -> dict[str, str]:
    """What has to stand in the environment before jax starts, in a process of its own."""
    env = {"JAX_PLATFORMS": "cpu"}  # the host's; without it JAX looks for the real hardware
    given = os.environ.get("XLA_FLAGS", "")  # of a flag that is there twice the last one wins
    if target.platform == "cpu":
        env["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count={target.devices}"
    if target.platform == "tpu":
        env |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": _TPUS[target.chip].accelerator,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process waits on a lock file
        }
    if target.platform == "cuda":
        env["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        # XLA can time no candidate without a GPU: what it compiles for autotuning is for nothing.
        env["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {given}"
    return env


def compile_only_devices(target: Target, count: int) -> Sequence[Any]:
    """`count` devices of the target, to compile for. Needs `environment(target)`, except on CPU."""
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        return jax.devices("cpu")[:count]
    if target.platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target.name.lower())
    else:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.chip,
            target_config=_GPUS[target.chip].config(),
            topology=f"1x1x{target.devices}",
        )
    return topology.devices[:count]


def versions(target: Target) -> dict[str, str]:
    """The versions that decide what a program compiled for `target` needs."""
    names = {
        "cpu": ("jax", "jaxlib"),
        "tpu": ("jax", "jaxlib", "libtpu"),
        "cuda": (
            "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12",
        ),
    }[target.platform]  # fmt: skip
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
