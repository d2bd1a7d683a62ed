"""The training step of Gemma-4 E2B that `python -m benchmarks headline` compiles."""

from typing import Any

from examples.gemma4.config import Config
from examples.gemma4.sharding import make_mesh
from examples.gemma4.train import (
    abstract_batch,
    abstract_state,
    make_optimizer,
    make_train_step,
)

E2B_8192 = "E2B, 8192 x 1 tokens a device, full, FSDP 8, AdamW"
KERNELS = {"h100:8": "blockwise", "tpu7x:2x2x1": "splash"}


def program(isolation: str, kernel: str) -> tuple[Any, Any, Any]:
    """`(step, state, batch)` on eight devices."""
    config, mesh, optimizer = Config.e2b(), make_mesh(fsdp=8, devices=8), make_optimizer()
    step = make_train_step(config, mesh, optimizer, isolation=isolation, kernel=kernel)
    return step, abstract_state(config, mesh, optimizer), abstract_batch(mesh, 8, 8192)
