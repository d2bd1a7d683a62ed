"""What the backward pass may keep: `Policy`, the named table, and `resolve`."""

import dataclasses
import difflib
import fnmatch
import functools as ft
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import jax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable

Action: TypeAlias = Literal["save", "offload", "recompute"]
Unnamed: TypeAlias = Literal[
    "recompute", "save", "dots", "dots_with_no_batch_dims", "offload_dots_with_no_batch_dims"
]

_QKV = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
_MLP_IN = ("mlpwi_0", "mlpwi_1", "mlpwi")

# What the layer's own input is called: the argument that an output continues. Layers need not tag it.
LAYER_INPUT = "decoder_layer_input"

# The names that policies below know; tag with `jax.ad_checkpoint.checkpoint_name`.
TENSOR_NAMES: tuple[str, ...] = (
    *_QKV,
    "out_proj",
    *_MLP_IN,
    "mlpwo",
    "context",
    LAYER_INPUT,
)
_DOTS = ("dot_general", "conv_general_dilated", "scaled_matmul_wrapper")


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


@dataclasses.dataclass(frozen=True)
class Policy:
    """What `jax.checkpoint` keeps between the forward and the backward pass of a layer.

    The layer's inputs are always kept: they are what recomputation starts from. Everything else is
    recomputed, except the tensors tagged with `jax.ad_checkpoint.checkpoint_name` that this policy
    names, and the untagged values that `unnamed` admits. What happens to one tagged tensor:

    ```python
    def action(policy, name):
        for matches in operator.eq, fnmatch.fnmatchcase:  # exact names count before patterns
            for verdict in "recompute", "offload", "save":
                if any(matches(name, given) for given in getattr(policy, verdict)):
                    return verdict
        return "save" if policy.unnamed == "save" or not policy.checkpoint else "recompute"
    ```

    **Arguments:**

    - `save`: names, or shell patterns such as `"mlpwi*"`, of tensors kept on the device.
    - `offload`: names or patterns of tensors kept in the host's memory and copied back.
    - `recompute`: exceptions from the patterns in the two before.
    - `unnamed`: what happens to values without a name: `"recompute"`, `"save"` (everything is kept),
      `"dots"` (matrix products and convolutions are kept), `"dots_with_no_batch_dims"` (matrix
      products without batch dimensions are kept: in a transformer the projections, not the
      attention scores), `"offload_dots_with_no_batch_dims"` (the same, kept on the host).
    - `checkpoint`: `False` means that the layer is not checkpointed at all (the policy `"none"`).
    - `function`: any callable that `jax.checkpoint(policy=...)` takes, instead of all of the above.
    - `name`: how the policy prints; no part of equality.

    **Raises:** `ValueError` if one name stands in two lists, if `unnamed` is unknown, or if names are
    given to a policy that keeps everything anyway; `TypeError` if a list is a bare string or holds
    something that is no string.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    unnamed: Unnamed = "recompute"
    checkpoint: bool = True
    function: Callable[..., Any] | None = None
    name: str | None = dataclasses.field(default=None, compare=False)

    def __init__(
        self,
        save: Iterable[str] = (),
        offload: Iterable[str] = (),
        recompute: Iterable[str] = (),
        *,
        unnamed: Unnamed = "recompute",
        checkpoint: bool = True,
        function: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        lists = {"save": save, "offload": offload, "recompute": recompute}
        owner: dict[str, str] = {}
        for field, names in lists.items():
            if isinstance(names, str):
                raise TypeError(
                    f"Policy: {field}={names!r} is one string; write {field}=({names!r},)."
                )
            names = tuple(dict.fromkeys(names))
            for n in names:
                if not isinstance(n, str):
                    raise TypeError(f"Policy: {field} takes tensor names (strings), got {n!r}.")
                if owner.setdefault(n, field) != field:
                    raise ValueError(
                        f"Policy: {n!r} is in {owner[n]} and in {field}; leave it in one."
                    )
            object.__setattr__(self, field, names)
        if unnamed not in (known := Unnamed.__args__):
            raise ValueError(f"Policy: unnamed={unnamed!r} is not one of {', '.join(known)}.")
        if function is not None and (owner or unnamed != "recompute" or not checkpoint):
            raise ValueError("Policy: a function decides everything; give it alone.")
        if not checkpoint and (owner or unnamed != "recompute"):
            raise ValueError("Policy: checkpoint=False keeps everything; give it alone.")
        if unnamed == "save" and owner:
            # A tensor is kept where it is made, before it gets its name: exceptions do nothing.
            raise ValueError("Policy: unnamed='save' keeps everything; give it alone.")
        object.__setattr__(self, "unnamed", unnamed)
        object.__setattr__(self, "checkpoint", checkpoint)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "name", name)

    # -- Reading ------------------------------------------------------------------------------

    def action(self, name: str) -> Action:
        """What happens to a tensor tagged `name`: `"save"`, `"offload"` or `"recompute"`."""
        lists: tuple[tuple[Action, tuple[str, ...]], ...] = (
            ("recompute", self.recompute),
            ("offload", self.offload),
            ("save", self.save),
        )
        for verdict, names in lists:
            if name in names:
                return verdict
        for verdict, names in lists:
            if any(_is_pattern(n) and fnmatch.fnmatchcase(name, n) for n in names):
                return verdict
        return "save" if self.unnamed == "save" or not self.checkpoint else "recompute"

    @property
    def offloads(self) -> bool:
        """Whether anything may be kept in the host's memory (for a `function`: not known, `False`)."""
        return bool(self.offload) or self.unnamed == "offload_dots_with_no_batch_dims"

    # -- Composing ----------------------------------------------------------------------------

    def __or__(self, other: "Policy | str") -> "Policy":
        """The policy that keeps what either keeps; where both keep a tensor, the device wins."""
        if isinstance(other, str):
            other = resolve(other)
        if not isinstance(other, Policy):
            return NotImplemented
        if self.function is not None or other.function is not None:
            raise TypeError(
                "Policy: functions can't be combined with |; write one function that calls both, or "
                "use jax.checkpoint_policies.save_from_both_policies."
            )
        if not (self.checkpoint and other.checkpoint):
            return resolve("none")
        if "save" in (self.unnamed, other.unnamed):
            return Policy(unnamed="save")
        save = (*self.save, *other.save)
        recompute = (
            *(n for n in self.recompute if other.action(n) == "recompute"),
            *(n for n in other.recompute if self.action(n) == "recompute"),
        )
        offload = tuple(
            n
            for n in (*self.offload, *other.offload)
            if n not in save and "save" not in (self.action(n), other.action(n))
        )
        order = list(Unnamed.__args__)
        kept: Any = {self.unnamed, other.unnamed} - {"recompute"}
        if len(kept) == 2 and "offload_dots_with_no_batch_dims" in kept:
            kept.remove("offload_dots_with_no_batch_dims")
        unnamed = min(kept, key=order.index) if kept else "recompute"
        return Policy(save, offload, recompute, unnamed=unnamed)

    # -- Showing and storing ------------------------------------------------------------------

    def __str__(self) -> str:
        if self.name is not None:
            return self.name
        if self.function is not None:
            return f"Policy(function={getattr(self.function, '__qualname__', self.function)})"
        shown = [
            f"{f.name}={value!r}"
            for f in dataclasses.fields(self)
            if f.compare and (value := getattr(self, f.name)) != f.default
        ]
        return f"Policy({', '.join(shown)})"

    def to_json(self) -> str:
        """The policy as a JSON object; `Policy.from_json` reads it.

        **Raises:** `TypeError` for a policy made from a function, which JSON can't hold.
        """
        if self.function is not None:
            raise TypeError(f"{self}: a policy made from a function can't be written as JSON.")
        fields = dataclasses.asdict(self)
        return json.dumps({k: v for k, v in fields.items() if k != "function"})

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """Reads what `to_json` wrote.

        **Raises:** `ValueError` for text that is no such object.
        """
        fields = json.loads(text)
        allowed = {f.name for f in dataclasses.fields(cls)} - {"function"}
        if not isinstance(fields, dict) or not set(fields) <= allowed:
            raise ValueError(
                f"Policy.from_json: expected an object with {sorted(allowed)}, got {text}"
            )
        return cls(**fields)

    @classmethod
    def custom(cls, **tensors: Literal["remat", "device", "offload"]) -> "Policy":
        """One word per known tensor, as MaxText's `remat_policy: custom`.

        **Arguments:**

        - `tensors`: for example `query_proj="offload", mlpwo="device"`; the others are `"remat"`
          (recomputed). `decoder_layer_input` is the layer's input: `"device"` unless offloaded.

        **Raises:** `ValueError` for a tensor or a word that is not known. For tensors that you named
        yourself use `Policy(save=..., offload=...)`.
        """
        for tensor, word in tensors.items():
            _check(tensor, TENSOR_NAMES, "Policy.custom", "tensor", "own names: Policy(save=(...))")
            _check(word, ("remat", "device", "offload"), f"Policy.custom: {tensor}", "word", "")
        return cls(
            save=[t for t, word in tensors.items() if word == "device"],
            offload=[t for t, word in tensors.items() if word == "offload"],
            name=None if tensors else "custom",
        )

    # -- For jax.checkpoint -------------------------------------------------------------------

    def as_function(self) -> Callable[..., Any]:
        """The callable for `jax.checkpoint(policy=...)`; the same object for equal policies.

        **Raises:** `ValueError` for the policy `"none"`, which means that `jax.checkpoint` is left out.
        """
        if not self.checkpoint:
            raise ValueError("The policy 'none' means no jax.checkpoint at all; leave it out.")
        if self.function is None:
            return _as_function(self)
        if getattr(jax.config, "jax_remat3", False):
            warnings.warn(
                f"{self}: under jax_remat3, jax asks a policy function about tensors named with "
                "checkpoint_name, matrix products and convolutions only; everything else is "
                "recomputed, whatever the function says (jax#39432).",
                stacklevel=2,
            )
        return self.function


@ft.cache
def _as_function(policy: Policy) -> Callable[..., Any]:
    if policy == Policy():
        return jax.checkpoint_policies.nothing_saveable
    if policy == Policy(unnamed="save"):
        return jax.checkpoint_policies.everything_saveable
    to_host = Offloadable(src="device", dst="pinned_host")
    verdicts: dict[str, Any] = {"save": Saveable, "offload": to_host, "recompute": Recompute}
    action = ft.cache(policy.action)

    def named_policy(prim: Any, *_: Any, **params: Any) -> Any:
        if prim.name == "name":
            return verdicts[action(params["name"])]
        if policy.unnamed != "recompute" and prim.name in _DOTS:
            if policy.unnamed == "dots":
                return Saveable
            if prim.name == "dot_general":
                (_, _), (lhs_batch, rhs_batch) = params["dimension_numbers"]
                if not lhs_batch and not rhs_batch:
                    return Saveable if policy.unnamed == "dots_with_no_batch_dims" else to_host
        return Recompute

    named_policy.__qualname__ = str(policy)
    return named_policy


_MINIMAL = (*_QKV, "out_proj", *_MLP_IN, "mlpwo")

_NAMED: dict[str, Policy] = {
    "none": Policy(checkpoint=False, name="none"),
    "full": Policy(name="full"),
    "custom": Policy(name="custom"),
    "minimal": Policy(_MINIMAL, name="minimal"),
    "minimal_with_context": Policy((*_MINIMAL, "context"), name="minimal_with_context"),
    "minimal_offloaded": Policy(offload=_MINIMAL, name="minimal_offloaded"),
    "save_qkv_proj": Policy(_QKV, name="save_qkv_proj"),
    "qkv_proj_offloaded": Policy(
        offload=("query_proj", "key_proj", "value_proj", "kv_proj"), name="qkv_proj_offloaded"
    ),
    "save_out_proj": Policy(("out_proj",), name="save_out_proj"),
    "save_dot_except_mlp": Policy((*_QKV, "out_proj"), name="save_dot_except_mlp"),
    "save_dot_except_mlpwi": Policy((*_QKV, "out_proj", "mlpwo"), name="save_dot_except_mlpwi"),
    "save_dot_with_context_except_mlp": Policy(
        (*_QKV, "context", "out_proj"), name="save_dot_with_context_except_mlp"
    ),
    "nothing_saveable": Policy(name="nothing_saveable"),
    "everything_saveable": Policy(unnamed="save", name="everything_saveable"),
    "dots_saveable": Policy(unnamed="dots", name="dots_saveable"),
    "dots_with_no_batch_dims_saveable": Policy(
        unnamed="dots_with_no_batch_dims", name="dots_with_no_batch_dims_saveable"
    ),
    "offload_dot_with_no_batch_dims": Policy(
        unnamed="offload_dots_with_no_batch_dims", name="offload_dot_with_no_batch_dims"
    ),
}

POLICY_NAMES: tuple[str, ...] = tuple(_NAMED)

# jax's own functions print, compare and serialise better by their names.
_KNOWN_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(jax.checkpoint_policies, name): name
    for name in (
        "nothing_saveable",
        "everything_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    )
}

PolicyLike: TypeAlias = (
    Policy | str | Callable[..., Any] | Mapping[str, Literal["remat", "device", "offload"]] | None
)


def resolve(policy: PolicyLike) -> Policy:
    """The `Policy` that a user's `policy=` argument means.

    **Arguments:**

    - `policy`: a `Policy`; one of the names below; a mapping for `Policy.custom`; any callable that
      `jax.checkpoint` takes; or `None`, which means what it means to `jax.checkpoint`: `"full"`.

    | name | kept beside the layer's inputs |
    |---|---|
    | `none` | everything: the layer is **not** checkpointed |
    | `full`, `nothing_saveable` | nothing: the layer is recomputed in full |
    | `minimal` | q/k/v projections, `out_proj`, `mlpwi*`, `mlpwo` |
    | `minimal_with_context` | the same and `context` |
    | `minimal_offloaded` | what `minimal` keeps, on the host |
    | `save_qkv_proj` | q/k/v projections |
    | `qkv_proj_offloaded` | `query_proj`, `key_proj`, `value_proj`, `kv_proj`, on the host |
    | `save_out_proj` | `out_proj` |
    | `save_dot_except_mlp` | q/k/v projections, `out_proj` |
    | `save_dot_except_mlpwi` | the same and `mlpwo` |
    | `save_dot_with_context_except_mlp` | q/k/v projections, `context`, `out_proj` |
    | `custom` | nothing until told: `Policy.custom(query_proj="offload", ...)` |
    | `everything_saveable` | everything, under `jax.checkpoint` |
    | `dots_saveable` | every matrix product and convolution |
    | `dots_with_no_batch_dims_saveable` | matrix products without batch dimensions |
    | `offload_dot_with_no_batch_dims` | the same, on the host |

    **Raises:** `ValueError` for an unknown name, with the nearest known one; `TypeError` for
    anything else.

    The names from `none` to `custom` are MaxText's, the rest are those of
    `jax.checkpoint_policies`.
    """
    if policy is None:
        return _NAMED["full"]
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        _check(policy, POLICY_NAMES, "policy", "policy", "")
        return _NAMED[policy]
    if isinstance(policy, Mapping):
        words: Any = policy
        return Policy.custom(**words)
    if callable(policy):
        try:
            known = _KNOWN_FUNCTIONS.get(policy)
        except TypeError:  # an unhashable callable
            known = None
        return _NAMED[known] if known is not None else Policy(function=policy)
    raise TypeError(
        f"policy={policy!r}: expected a remat_scan.Policy, a policy's name, a mapping from tensors to "
        "'remat', 'device' or 'offload', or a callable from jax.checkpoint_policies."
    )


def _check(given: str, known: tuple[str, ...], where: str, what: str, hint: str) -> None:
    if given in known:
        return
    near = difflib.get_close_matches(str(given), known, n=1, cutoff=0.5)
    raise ValueError(
        f"{where}: {given!r} is no known {what}."
        + (f" Did you mean {near[0]!r}?" if near else "")
        + f" Known: {', '.join(known)}."
        + (f" ({hint})" if hint else "")
    )
