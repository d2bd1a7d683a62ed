"""Live against Hugging Face transformers, where torch is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip("needs torch and transformers", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np

from examples.gemma4 import weights
from examples.gemma4.compare import gradients

HERE = Path(__file__).parent
TINY = HERE / "data" / "gemma4"
pytestmark = pytest.mark.slow


def in_torch(*args):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "gemma4_torch.py"), *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "cannot import name 'Gemma4" in run.stderr:
        pytest.skip("needs transformers with Gemma 4")
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("seed", range(5))
def test_random_shapes(tmp_path, seed):
    in_torch(seed, tmp_path)
    ref = dict(np.load(tmp_path / "reference.npz"))
    model = weights.load(tmp_path)
    ids = jnp.asarray(ref["input_ids"])
    got = jax.jit(lambda m: m(ids))(model)
    # Both round float32 in their own order; what matters is small beside a logit.
    close = {"rtol": 0, "atol": 5e-5 * max(1.0, np.abs(ref["logits"]).max() / 5)}
    np.testing.assert_allclose(got, ref["logits"], **close)
    valid = ref["left.attention_mask"] == 1
    got = jax.jit(lambda m: m(jnp.asarray(ref["left.input_ids"]), valid=jnp.asarray(valid)))(model)
    np.testing.assert_allclose(got[valid], ref["left.logits"][valid], **close)
    loss, grads = jax.jit(gradients)(model, ids)
    np.testing.assert_allclose(loss, ref["loss"], rtol=1e-5)
    assert set(grads) == {k.removeprefix("grad.") for k in ref if k.startswith("grad.")}
    last = f"layers.{len(model.layers) - 1}.layer_scalar"
    for key, x in grads.items():
        want = ref[f"grad.{key}"]
        atol = 1e-4 * np.abs(want).max()
        if key.endswith("layer_scalar"):  # a sum that nearly cancels, in the last layer all of it
            atol = 1e-4 * max(np.abs(ref[k]).max() for k in ref if k.endswith("layer_scalar"))
            assert not key.endswith(last) or np.abs(want).max() < 1e-3
        np.testing.assert_allclose(x, want, rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [2**31, 60_000])
@pytest.mark.parametrize("name", ["tiny_e2b", "tiny_e4b"])
def test_transformers_loads_what_we_save(tmp_path, name, shard_bytes, dtype):
    model = weights.load(TINY / name)
    weights.save(model, tmp_path / "saved", dtype=dtype, shard_bytes=shard_bytes)
    in_torch("compare", tmp_path / "saved", TINY / name)
