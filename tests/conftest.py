"""Settings that must stand before jax starts, and hypothesis profiles."""

import os

# Eight simulated devices for sharding tests; the accelerator plugins that may be installed are for
# compiling only, and must not be started here.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
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
