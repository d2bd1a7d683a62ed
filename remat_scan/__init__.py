"""remat_scan makes ``jax.checkpoint`` keep its promise: one layer's working set alive at a time."""

from ._blocks import (
    blockwise as blockwise,
)
from ._compile import CompilerError as CompilerError
from ._layer import (
    checkpointed_layer as checkpointed_layer,
)
from ._layer import (
    isolated_scan as isolated_scan,
)
from ._lint import (
    lint as lint,
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
from ._nested import (
    Nested as Nested,
)
from ._periods import (
    Stacked as Stacked,
)
from ._periods import (
    stack_layers as stack_layers,
)
from ._periods import (
    unstack_layers as unstack_layers,
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
from ._residuals import (
    Residuals as Residuals,
)
from ._residuals import (
    residuals as residuals,
)
from ._stack import (
    StackResult as StackResult,
)
from ._stack import (
    run_stack as run_stack,
)
from ._stack_layer import (
    StackLayer as StackLayer,
)
from ._targets import MissingPluginError as MissingPluginError
from ._verify import (
    Verdict as Verdict,
)
from ._verify import (
    verify as verify,
)

__version__ = "0.1.0"
