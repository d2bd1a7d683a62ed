"""remat_scan makes ``jax.checkpoint`` keep its promise: one layer's working set alive at a time."""

from ._compile import CompilerError as CompilerError
from ._layer import (
    checkpointed_layer as checkpointed_layer,
)
from ._layer import (
    isolated_scan as isolated_scan,
)
from ._memory import (
    MemoryReport as MemoryReport,
)
from ._memory import (
    compare_reports as compare_reports,
)
from ._memory import (
    memory_report as memory_report,
)
from ._policies import (
    POLICY_NAMES as POLICY_NAMES,
)
from ._policies import (
    TENSOR_NAMES as TENSOR_NAMES,
)
from ._policies import (
    Policy as Policy,
)
from ._targets import MissingPluginError as MissingPluginError
from ._verify import (
    Verdict as Verdict,
)
from ._verify import (
    verify as verify,
)

__version__ = "0.1.0"
