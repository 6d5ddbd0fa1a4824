"""The gate through which a model's shape enters: YAML presets, HF configs and GGUF metadata all pass these checks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trtcb.errors import TrtcbError
from trtcb.spec import MAX_EOS_TOKENS, MAX_ROPE_FACTOR, MAX_ROPE_THETA, ModelSpec, RopeScaling

# Wide enough for any published Llama, narrow enough that a hostile file cannot ask for a billion layers.
Width = Annotated[int, Field(ge=1, le=1 << 20)]
Count = Annotated[int, Field(ge=1, le=1 << 12)]
Factor = Annotated[float, Field(gt=0, le=MAX_ROPE_FACTOR)]
TokenId = Annotated[int, Field(ge=0)]


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RopeScalingFacts(_Facts):
    """See :class:`trtcb.spec.RopeScaling`."""

    kind: Literal["llama3", "linear"]
    factor: Factor
    low_freq_factor: Factor = 1.0
    high_freq_factor: Factor = 4.0
    original_max_position: Annotated[int, Field(ge=1, le=1 << 26)] = 8192

    @model_validator(mode="after")
    def _check_band(self) -> "RopeScalingFacts":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be larger than low_freq_factor")
        return self


class ModelFacts(_Facts):
    """See :class:`trtcb.spec.ModelSpec`; this is the checked form, without the name."""

    hidden_size: Width
    intermediate_size: Width
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Annotated[int, Field(ge=2, le=1024, multiple_of=2)]
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    max_position: Annotated[int, Field(ge=1, le=1 << 26)]
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    rope_theta: Annotated[float, Field(gt=1, le=MAX_ROPE_THETA)]
    rope_scaling: RopeScalingFacts | None = None
    tie_embeddings: bool
    bos_token_id: TokenId | None = None
    eos_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_EOS_TOKENS, strict=False)

    @model_validator(mode="after")
    def _check_relations(self) -> "ModelFacts":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})")
        tokens = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        if any(token >= self.vocab_size for token in tokens):
            raise ValueError(
                f"a bos or eos token id in {sorted(tokens)} is outside the vocabulary of {self.vocab_size}"
            )
        return self

    def spec(self, name: str) -> ModelSpec:
        """Return the model's spec under ``name``."""
        values = dict(self)
        if self.rope_scaling is not None:
            values["rope_scaling"] = RopeScaling(**dict(self.rope_scaling))
        return ModelSpec(name=name, **values)


def spec_from_facts(
    facts: Mapping[str, Any],
    *,
    name: str,
    origin: str,
    error: type[TrtcbError],
    field_names: Mapping[str, str] | None = None,
) -> ModelSpec:
    """Check ``facts`` and return the spec; raises ``error`` naming the first offending field of ``origin``.

    ``field_names`` says what the origin calls our fields, for messages.
    """
    try:
        return ModelFacts.model_validate(dict(facts)).spec(name)
    except ValidationError as failure:
        raise error(f"{origin}: {describe(failure, field_names)}.") from failure


def describe(failure: ValidationError, field_names: Mapping[str, str] | None = None) -> str:
    """Return the first complaint of pydantic as ``field: reason (got value)``."""
    first = failure.errors(include_url=False)[0]
    reason = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return reason
    head, *rest = (str(part) for part in first["loc"])
    field = ".".join([(field_names or {}).get(head, head), *rest])
    value = repr(first["input"])
    return f"{field}: {reason[0].lower()}{reason[1:]} (got {value if len(value) <= 60 else value[:57] + '...'})"
