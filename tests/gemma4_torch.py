"""Runs one random Gemma-4 text decoder in transformers: `python gemma4_torch.py SEED FOLDER`.

Writes the checkpoint and `reference.npz` with its logits and gradients. Alone in a process: torch
and JAX each start threads of their own.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

KINDS = ("sliding_attention", "full_attention")


def shape(seed: int) -> dict:
    """A decoder unlike the others: depth, pattern, sharing, heads and widths are drawn.

    Not smaller: a norm over three numbers can turn one rounding into a relative error of 1e-4.
    """
    rng = random.Random(seed)
    owners = [*KINDS, *rng.choices(KINDS, k=rng.randint(0, 2))]
    rng.shuffle(owners)
    readers = [*rng.choices(KINDS, k=rng.randint(0, 2)), "full_attention"]
    group, groups = rng.choice([1, 2, 3]), rng.choice([1, 2])
    return {
        "layer_types": owners + readers,
        "num_hidden_layers": len(owners) + len(readers),
        "num_kv_shared_layers": len(readers),
        "use_double_wide_mlp": rng.random() < 0.5,
        "num_attention_heads": group * groups,
        "num_key_value_heads": groups,
        "head_dim": rng.choice([8, 12, 20]),
        "global_head_dim": rng.choice([16, 24, 40]),
        "hidden_size": rng.choice([20, 28, 36]),
        "intermediate_size": rng.choice([26, 38]),
        "hidden_size_per_layer_input": rng.choice([8, 10, 13]),
        "sliding_window": rng.randint(1, 7),
        "vocab_size": rng.randint(20, 60),
        "final_logit_softcapping": rng.choice([None, 5.0, 30.0]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
    }


def fill(model: torch.nn.Module, seed: int) -> None:
    """Random numbers in everything that a checkpoint holds, so that no weight is a neutral one."""
    source = torch.Generator().manual_seed(seed)

    def normal(x: torch.Tensor, deviation: float, mean: float = 0.0) -> None:
        x.copy_(mean + deviation * torch.randn(x.shape, generator=source))

    stored = dict(model.named_parameters())
    stored |= {n: b for n, b in model.named_buffers() if n.endswith("layer_scalar")}
    with torch.no_grad():
        for name, x in stored.items():
            if name.endswith("layer_scalar"):
                normal(x, 0.1, 0.8)
            elif x.ndim == 1:  # small on queries and keys, whose scores are not scaled
                normal(x, 0.1, 0.3 if "q_norm" in name or "k_norm" in name else 0.6)
            elif "embed_tokens" in name:
                normal(x, 0.3)
            else:
                normal(x, x.shape[1] ** -0.5)


def main(seed: int, folder: Path) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    sizes = shape(seed)
    config = Gemma4TextConfig(
        **sizes, vocab_size_per_layer_input=sizes["vocab_size"], max_position_embeddings=64
    )
    config._attn_implementation = "eager"
    model = Gemma4ForCausalLM(config).float().eval()
    fill(model, seed)
    model.save_pretrained(folder)
    rng = np.random.default_rng(seed)
    # Not id 0: torch leaves the padding word's embedding without a gradient.
    ids = torch.from_numpy(rng.integers(1, sizes["vocab_size"], (2, 9 + seed % 4)))
    scalars = [layer.layer_scalar.requires_grad_(True) for layer in model.model.layers]
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grads = {f"grad.{n}": p.grad.numpy() for n, p in model.named_parameters()}
    for i, scalar in enumerate(scalars):
        grads[f"grad.model.layers.{i}.layer_scalar"] = scalar.grad.numpy()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        left = model(input_ids=ids * mask, attention_mask=mask, use_cache=False).logits
    np.savez(
        folder / "reference.npz",
        **{
            "input_ids": ids.numpy(),
            "logits": logits.detach().numpy(),
            "loss": np.float32(loss.item()),
            "left.input_ids": (ids * mask).numpy(),
            "left.attention_mask": mask.numpy(),
            "left.logits": left.numpy(),
            **grads,
        },
    )


def compare(saved: Path, original: Path) -> None:
    """Both folders give transformers the same weights, and no complaint about keys."""
    models = []
    for folder in (saved, original):
        model, info = Gemma4ForCausalLM.from_pretrained(folder, output_loading_info=True)
        wrong = {k: v for k, v in info.items() if v}
        assert not wrong, wrong
        models.append(model)
    ours, theirs = (dict(m.state_dict()) for m in models)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert x.dtype == next(iter(models[0].parameters())).dtype or "inv_freq" in name, name
        assert torch.equal(x, theirs[name].to(x.dtype)), name
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        dtype = next(iter(models[0].parameters())).dtype
        got = models[0](input_ids=ids).logits
        if dtype == torch.float32:
            assert torch.equal(got, models[1](input_ids=ids).logits)
    assert torch.isfinite(got.float()).all()


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(int(sys.argv[1]), Path(sys.argv[2]))
