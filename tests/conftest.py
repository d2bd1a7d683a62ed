"""Settings that must stand before jax starts, and hypothesis profiles."""

import os

# Eight simulated devices for sharding tests; the accelerator plugins that may be installed are for
# compiling only, and must not be started here.
# Thousands of programs are compiled and each is run once, so LLVM is told not to try hard; what XLA
# itself does to a program, and so its memory, stays the same.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from hypothesis import HealthCheck, settings

_COMMON = {
    "deadline": None,  # the first example of a kind compiles
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("quick", max_examples=50, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=200, derandomize=True, **_COMMON)
# In parts, each in a process of its own: `tests/properties.py`.
_NIGHTLY = int(os.environ.get("NIGHTLY_EXAMPLES", "2000"))
settings.register_profile("nightly", max_examples=_NIGHTLY, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
