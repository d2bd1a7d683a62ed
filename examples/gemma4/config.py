"""The shape of a Gemma-4 small text decoder, checked once so that nothing after it has to."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .quoting import shown

SLIDING, FULL = "sliding_attention", "full_attention"
# No known decoder comes near these; a file that asks for more is broken or hostile.
_MAX_LAYERS, _MAX_SIZE, _MAX_PARAMETERS = 1024, 2**24, 2**42
_MAX_INT = 2**53  # JSON's integers have no end; these are numbers in floating point too


@dataclass(frozen=True)
class Config:
    """What a decoder is made of; the names are those of Hugging Face's `config.json`.

    Make one with `Config.e2b()`, `Config.e4b()`, `Config.tiny()`, `Config.from_dict` or `load_config`.
    Raises `ValueError` where the values do not describe a decoder.
    """

    vocab_size: int
    vocab_size_per_layer_input: int
    hidden_size: int
    hidden_size_per_layer_input: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    global_head_dim: int
    layer_types: tuple[str, ...]
    num_kv_shared_layers: int
    use_double_wide_mlp: bool
    sliding_window: int = 512
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    global_rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 0.25
    final_logit_softcapping: float | None = 30.0
    max_position_embeddings: int = 131_072
    pad_token_id: int = 0
    bos_token_id: int = 2
    eos_token_ids: tuple[int, ...] = (1,)

    @classmethod
    def e2b(cls) -> "Config":
        """Gemma-4 E2B: 35 layers, 4.63 billion parameters."""
        return cls(
            vocab_size=262_144,
            vocab_size_per_layer_input=262_144,
            hidden_size=1536,
            hidden_size_per_layer_input=256,
            intermediate_size=6144,
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=256,
            global_head_dim=512,
            layer_types=((SLIDING,) * 4 + (FULL,)) * 7,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
        )

    @classmethod
    def e4b(cls) -> "Config":
        """Gemma-4 E4B: 42 layers, 7.46 billion parameters."""
        return cls(
            vocab_size=262_144,
            vocab_size_per_layer_input=262_144,
            hidden_size=2560,
            hidden_size_per_layer_input=256,
            intermediate_size=10_240,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            global_head_dim=512,
            layer_types=((SLIDING,) * 5 + (FULL,)) * 7,
            num_kv_shared_layers=18,
            use_double_wide_mlp=False,
        )

    @classmethod
    def tiny(cls) -> "Config":
        """Five layers of all kinds, 0.4 million parameters: trains on a laptop's CPU."""
        return cls(
            vocab_size=384,
            vocab_size_per_layer_input=384,
            hidden_size=64,
            hidden_size_per_layer_input=16,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            global_head_dim=32,
            layer_types=(SLIDING, SLIDING, FULL, SLIDING, FULL),
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            sliding_window=32,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_kv_layers(self) -> int:
        """How many layers, counted from the first, make their own keys and values."""
        return self.num_layers - self.num_kv_shared_layers

    @property
    def donors(self) -> dict[str, int]:
        """For each layer type that is shared, the layer whose keys and values the readers use."""
        shared = set(self.layer_types[self.num_kv_layers :])
        owners = self.layer_types[: self.num_kv_layers]
        return {kind: max(i for i, k in enumerate(owners) if k == kind) for kind in shared}

    def donor(self, layer: int) -> int | None:
        """The layer whose keys and values `layer` reads, or `None` where it makes its own."""
        return None if layer < self.num_kv_layers else self.donors[self.layer_types[layer]]

    def layer_head_dim(self, layer: int) -> int:
        return self.global_head_dim if self.layer_types[layer] == FULL else self.head_dim

    def layer_intermediate_size(self, layer: int) -> int:
        wide = self.use_double_wide_mlp and layer >= self.num_kv_layers
        return self.intermediate_size * (2 if wide else 1)

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), field.type)
        for name in _SIZES:
            if not 1 <= getattr(self, name) <= _MAX_SIZE:
                raise ValueError(f"{name} must be from 1 to {_MAX_SIZE}, got {getattr(self, name)}")
        if not 1 <= self.num_layers <= _MAX_LAYERS:
            raise ValueError(f"a decoder has 1 to {_MAX_LAYERS} layers, got {self.num_layers}")
        for i, kind in enumerate(self.layer_types):
            if kind not in (SLIDING, FULL):
                raise ValueError(f"layer_types[{i}] must be {SLIDING!r} or {FULL!r}, got {kind!r}")
        if not 0 <= self.num_kv_shared_layers < self.num_layers:
            raise ValueError(
                f"num_kv_shared_layers must be from 0 to {self.num_layers - 1} so that a layer is "
                f"left to make keys and values, got {self.num_kv_shared_layers}"
            )
        owned = set(self.layer_types[: self.num_kv_layers])
        for i in range(self.num_kv_layers, self.num_layers):
            if self.layer_types[i] not in owned:
                raise ValueError(
                    f"layer {i} reads the keys and values of an earlier {self.layer_types[i]} "
                    f"layer, but none of the {self.num_kv_layers} layers that make their own is one"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        for name in ("head_dim", "global_head_dim"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name} must be even for RoPE, got {getattr(self, name)}")
        for name in ("rms_norm_eps", "rope_theta", "global_rope_theta", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and positive, got {value}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                f"partial_rotary_factor must be in (0, 1], got {self.partial_rotary_factor}"
            )
        for name, ids in (
            ("pad_token_id", (self.pad_token_id,)),
            ("bos_token_id", (self.bos_token_id,)),
            ("eos_token_ids", self.eos_token_ids),
        ):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name} {token} is outside the {self.vocab_size} words")
        if (about := _rough_parameters(self)) > _MAX_PARAMETERS:
            raise ValueError(
                f"this config asks for about {about:.1e} parameters; it must be broken"
            )

    @classmethod
    def from_dict(cls, raw: Any) -> "Config":
        """A config from the contents of a `config.json`.

        Reads the text part of a multimodal config (`text_config`), and both spellings of the full
        layers' head size: the released `global_head_dim` and the `per_layer_config` that
        transformers 5.24 writes in its place (keys may be zero-padded).

        Two rules of transformers' own reader matter here. A last layer that is not full attention
        is read as one. A missing `layer_types` is read as a pattern of six, which is wrong for
        E2B, so here it is an error.
        """
        if not isinstance(raw, Mapping):
            raise ValueError(f"a config is a JSON object, got {type(raw).__name__}")
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config must be a JSON object, got {type(text).__name__}")
        for name, (only, why) in _UNSUPPORTED.items():
            if text.get(name, only) not in (only, None):
                raise ValueError(f"{name} must be {only!r} ({why}), got {text[name]!r}")

        def need(name: str) -> Any:
            if text.get(name) is None:
                raise ValueError(f"the config has no {name!r}, which has no safe default")
            return text[name]

        kinds = need("layer_types")
        if not isinstance(kinds, list | tuple) or not all(isinstance(k, str) for k in kinds):
            raise ValueError(f"layer_types must be a list of strings, got {kinds!r:.80}")
        if kinds and kinds[-1] == SLIDING:
            kinds = [*kinds[:-1], FULL]
        if text.get("num_hidden_layers", len(kinds)) != len(kinds):
            raise ValueError(
                f"layer_types names {len(kinds)} layers, but num_hidden_layers is "
                f"{text['num_hidden_layers']!r}"
            )
        sliding_rope = _rope(text, SLIDING, "default", 10_000.0, 1.0)
        full_rope = _rope(text, FULL, "proportional", 1_000_000.0, 0.25)
        # The multimodal wrapper knows more end-of-text ids than its text part.
        eos = raw.get("eos_token_id", text.get("eos_token_id", 1))
        given = {k: text[k] for k in _OPTIONAL if text.get(k) is not None}
        return cls(
            **{name: need(name) for name in _REQUIRED},
            **given,
            layer_types=tuple(kinds),
            global_head_dim=_global_head_dim(text, kinds),
            final_logit_softcapping=_number(text.get("final_logit_softcapping")),
            rope_theta=sliding_rope["rope_theta"],
            global_rope_theta=full_rope["rope_theta"],
            partial_rotary_factor=full_rope["partial_rotary_factor"],
            eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        )

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` from which transformers builds `Gemma4ForCausalLM`."""
        eos = self.eos_token_ids
        return {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            **{name: getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL)},
            "num_hidden_layers": self.num_layers,
            "layer_types": list(self.layer_types),
            "global_head_dim": self.global_head_dim,
            "num_global_key_value_heads": None,
            "final_logit_softcapping": self.final_logit_softcapping,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": self.rope_theta},
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": self.global_rope_theta,
                    "partial_rotary_factor": self.partial_rotary_factor,
                },
            },
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
            **{name: only for name, (only, _) in _UNSUPPORTED.items()},
        }


_REQUIRED = (
    "vocab_size",
    "vocab_size_per_layer_input",
    "hidden_size",
    "hidden_size_per_layer_input",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
    "sliding_window",
)
_OPTIONAL = ("rms_norm_eps", "max_position_embeddings", "pad_token_id", "bos_token_id")
_SIZES = (*_REQUIRED[:8], "global_head_dim", "sliding_window", "max_position_embeddings")
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "hidden_activation": ("gelu_pytorch_tanh", "the only activation here"),
    "tie_word_embeddings": (True, "the head is the embedding table"),
    "attention_bias": (False, "no projection has a bias"),
    "attention_dropout": (0.0, "dropout is not implemented"),
    "attention_k_eq_v": (False, "keys and values have their own projections"),
    "enable_moe_block": (False, "mixtures of experts are not implemented"),
    "use_bidirectional_attention": (None, "text attends causally"),
}


def load_config(path: str | Path) -> Config:
    """The config in a `config.json`, given the file or its folder."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        return Config.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:  # covers JSON and UTF-8 errors
        raise ValueError(f"{path}: {shown(error, 1000)}") from error


def _check_type(name: str, value: Any, annotation: Any) -> None:
    """Python's `bool` is an `int` and JSON has no tuples, so types are checked by hand."""
    if annotation in (float, float | None):
        ok = isinstance(value, float) or (type(value) is int and abs(value) <= _MAX_INT)
        ok = ok or (value is None and annotation is not float)
    elif annotation in (int, bool):
        ok = type(value) is annotation
    else:
        item = str if annotation == tuple[str, ...] else int
        ok = isinstance(value, tuple) and all(type(v) is item for v in value)
    if not ok:
        wanted = getattr(annotation, "__name__", annotation)
        raise ValueError(f"{name} must be {wanted}, got {value!r:.80}")


def _number(value: Any) -> Any:
    return float(value) if type(value) is int and abs(value) <= _MAX_INT else value


def _rough_parameters(c: Config) -> int:
    tables = c.vocab_size * c.hidden_size
    tables += c.vocab_size_per_layer_input * c.num_layers * c.hidden_size_per_layer_input
    heads = c.num_attention_heads + c.num_key_value_heads
    layer = 2 * heads * max(c.head_dim, c.global_head_dim) + 3 * 2 * c.intermediate_size
    return tables + c.num_layers * c.hidden_size * layer


def _global_head_dim(text: Mapping[str, Any], kinds: list[str] | tuple[str, ...]) -> Any:
    overrides = text.get("per_layer_config")
    if overrides is None:
        return text.get("global_head_dim", 512)  # transformers' default
    if not isinstance(overrides, Mapping):
        raise ValueError(f"per_layer_config must be a JSON object, got {overrides!r:.80}")
    sizes = {i: text.get("head_dim") for i in range(len(kinds))}
    for key, override in overrides.items():
        if not (isinstance(key, str) and key.isdecimal() and int(key) in sizes):
            raise ValueError(
                f"per_layer_config has no layer {key!r}; layers: 0 to {len(kinds) - 1}"
            )
        if not isinstance(override, Mapping) or set(override) - {"head_dim"}:
            raise ValueError(
                f"per_layer_config[{key!r}] may set head_dim only, got {override!r:.80}"
            )
        sizes[int(key)] = override.get("head_dim", sizes[int(key)])
    full = {repr(sizes[i]) for i, kind in enumerate(kinds) if kind == FULL}
    sliding = {repr(sizes[i]) for i, kind in enumerate(kinds) if kind == SLIDING}
    if len(full) > 1 or sliding - {repr(text.get("head_dim"))}:
        raise ValueError(
            "per_layer_config must give all full layers one head_dim and leave the sliding ones "
            f"alone; got {sorted(full)} for full and {sorted(sliding)} for sliding layers"
        )
    return next((sizes[i] for i, kind in enumerate(kinds) if kind == FULL), text.get("head_dim"))


def _rope(
    text: Mapping[str, Any], kind: str, rope_type: str, theta: float, rotary: float
) -> Mapping[str, Any]:
    every = text.get("rope_parameters")
    if every is not None and not isinstance(every, Mapping):
        raise ValueError(f"rope_parameters must be a JSON object, got {every!r:.80}")
    rope = (every or {}).get(kind)
    if rope is None:
        return {"rope_theta": theta, "partial_rotary_factor": rotary}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters[{kind!r}] must be a JSON object, got {rope!r:.80}")
    if rope.get("rope_type", rope_type) != rope_type or rope.get("factor", 1.0) != 1.0:
        raise ValueError(f"{kind} needs rope_type {rope_type!r} with no factor, got {rope!r:.120}")
    return {"rope_theta": theta, "partial_rotary_factor": 1.0, **rope}
