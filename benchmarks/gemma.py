"""The training steps of all of Gemma-4 that `python -m benchmarks headline` compiles.

The published case is E2B, fully sharded over the devices, AdamW with clipped gradients, once with
24,576 x 8 tokens a device and everything recomputed, once with 8,192 x 1 and the projections to
queries, keys and values in the host's memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from examples.gemma4.config import Config
from examples.gemma4.sharding import make_mesh
from examples.gemma4.step import abstract_batch, abstract_state, make_optimizer, make_train_step
from remat_scan import Policy
from remat_scan._targets import parse_target

INPUTS_ON_HOST = Policy(offload=("decoder_layer_input",))


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` x `length` tokens on each device; `policy` is what the layers keep."""

    config: Callable[[], Config]
    length: int
    rows: int
    policy: str

    def ways(self) -> dict[str, dict[str, Any]]:
        """The configurations, as options of `make_train_step`."""
        ways: dict[str, dict[str, Any]] = {
            "no remat": {"policy": "none", "isolation": "none"},
            "jax.checkpoint": {"policy": self.policy, "isolation": "none"},
            "loop": {"policy": self.policy, "isolation": "loop"},
            "barrier": {"policy": self.policy, "isolation": "barrier"},
            "periods": {"policy": self.policy, "isolation": "barrier", "periods": True},
        }
        if self.rows > 1:
            for isolation in ("loop", "barrier"):
                one_row = {"isolation": isolation, "rows": 1}
                ways[f"{isolation}, a row at a time"] = {"policy": self.policy, **one_row}
                ways[f"{isolation}, a row at a time, inputs on host"] = {
                    "policy": INPUTS_ON_HOST,
                    **one_row,
                }
            ways["periods, a row at a time"] = {
                "policy": self.policy,
                **one_row,
                "periods": True,
            }
        return ways

    def program(self, target: str, way: str) -> tuple[Any, Any, Any]:
        """`(step, state, batch)` for all devices of a target."""
        where = parse_target(target)
        config, optimizer = self.config(), make_optimizer()
        mesh = make_mesh(fsdp=where.devices, devices=where.devices)
        kernel = "blockwise" if where.platform == "cuda" else "splash"
        options = self.ways()[way]
        step = make_train_step(config, mesh, optimizer, kernel=kernel, **options)
        batch = abstract_batch(mesh, self.rows * where.devices, self.length)
        periods = options.get("periods", False)
        return step, abstract_state(config, mesh, optimizer, periods=periods), batch


CASES = {
    "E2B, 24576 x 8, full": Case(Config.e2b, 24576, 8, "full"),
    "E2B, 8192 x 1, qkv_proj_offloaded": Case(Config.e2b, 8192, 1, "qkv_proj_offloaded"),
    "E4B, 24576 x 8, full": Case(Config.e4b, 24576, 8, "full"),
    "E4B, 8192 x 1, qkv_proj_offloaded": Case(Config.e4b, 8192, 1, "qkv_proj_offloaded"),
}
TARGETS = ("h100:8", "h200:8", "tpu7x:2x2x1", "v5p:2x2x1", "v6e:2x2")
