"""remat_scan makes ``jax.checkpoint`` keep its promise: one layer's working set alive at a time."""

from ._layer import (
    checkpointed_layer as checkpointed_layer,
    isolated_scan as isolated_scan,
)
from ._policies import (
    POLICY_NAMES as POLICY_NAMES,
    TENSOR_NAMES as TENSOR_NAMES,
    Policy as Policy,
)

__version__ = "0.1.0"
