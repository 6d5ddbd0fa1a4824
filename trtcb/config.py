"""What a user may set: the pydantic edge of ``trtcb build`` and ``trtcb serve``. Inside are frozen dataclasses."""

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from trtcb.errors import TargetUnavailableError, UsageError
from trtcb.memory import parse_size
from trtcb.spec import BuildLimits, KVDtype, ModelSpec, WeightDtype

if TYPE_CHECKING:
    from trtcb.executor.config import EngineConfig
    from trtcb.server.limits import ServerConfig

DEFAULT_MAX_SEQ_LEN = 4096
TARGETS = ("cpu", "cuda", "tensorrt", "tensorrt-rtx")


def _size(value: Any) -> Any:
    try:
        return parse_size(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


Bytes = Annotated[int, BeforeValidator(_size), Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
OneDevice = Annotated[int, Field(ge=1)]


def _only_one_device(value: int) -> int:
    if value != 1:
        raise ValueError("an engine runs on one device, so tensor and pipeline parallelism must stay 1")
    return value


def _name(value: Any) -> Any:
    """TensorRT-LLM writes its policies and types in capitals, and some write hyphens."""
    return value.lower().replace("-", "_") if isinstance(value, str) else value


class BuildConfig(BaseModel):
    """What to build. ``auto`` types are the checkpoint's; ``max_seq_len=None`` is the model's, at most 4,096 tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    output: Path | None = None
    target: Literal["auto", "cpu", "cuda", "tensorrt", "tensorrt-rtx"] = "auto"
    weight_dtype: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto"
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8", "fp8"] = "auto"
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 64
    max_num_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    max_seq_len: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    block_size: Annotated[int, Field(ge=32, le=1024, multiple_of=32)] = 32
    random_weights: bool = False
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    revision: str | None = None
    tensor_parallel_size: OneDevice = 1
    pipeline_parallel_size: OneDevice = 1

    _named = field_validator("weight_dtype", "kv_dtype", mode="before")(_name)
    _parallel = field_validator("tensor_parallel_size", "pipeline_parallel_size")(_only_one_device)

    @property
    def plan_path(self) -> Path:
        """Where the plan goes: ``output``, or ``engines/<model>.plan`` under the current folder."""
        if self.output is not None:
            return self.output
        name = Path(self.model.rstrip("/")).name.removesuffix(".gguf").lower()
        return Path("engines") / f"{re.sub(r'[^a-z0-9._-]+', '-', name) or 'model'}.plan"

    def resolved_target(self) -> str:
        """Return the target to compile for; raises ``TargetUnavailableError`` for one this version cannot build."""
        if self.target in ("auto", "cpu", "tensorrt-rtx"):
            return "cpu" if self.target == "auto" else self.target
        raise TargetUnavailableError(f"This version of trtcb does not build for '{self.target}' yet: use --target cpu.")

    def weight_type(self, checkpoint_dtype: str) -> WeightDtype:
        """Resolve ``auto`` against the checkpoint's own type; what is narrower than fp32 becomes bf16."""
        if self.weight_dtype != "auto":
            return WeightDtype(self.weight_dtype)
        return WeightDtype.FP32 if checkpoint_dtype == "fp32" else WeightDtype.BF16

    def kv_type(self, checkpoint_dtype: str) -> KVDtype:
        """Resolve ``auto`` to the type of the weights, and beside int8 and int4 ones to bf16."""
        if self.kv_dtype != "auto":
            return KVDtype(self.kv_dtype)
        return KVDtype(self.weight_type(checkpoint_dtype).table_dtype)

    def limits(self, spec: ModelSpec) -> BuildLimits:
        """Bounds for this model; raises ``UsageError`` if it cannot see as far as ``max_seq_len``."""
        longest = self.max_seq_len or min(spec.max_position, DEFAULT_MAX_SEQ_LEN)
        if longest > spec.max_position:
            raise UsageError(
                f"--max-seq-len {longest} is beyond what {spec.name} was trained for: use at most {spec.max_position}."
            )
        if longest < 2:
            raise UsageError("a sequence needs room for a prompt and an answer: use --max-seq-len 2 or more")
        if self.max_num_tokens < self.block_size:
            raise UsageError(
                f"--max-num-tokens {self.max_num_tokens} is less than a block of {self.block_size} tokens, "
                "and long prompts advance by whole blocks: raise it, or lower --block-size"
            )
        return BuildLimits(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=longest,
            block_size=self.block_size,
        )


class ServeConfig(BaseModel):
    """How to run a plan. A limit that is ``None`` is the plan's own; a server may lower it, never raise it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheduler_policy: Literal["guaranteed_no_evict", "max_utilization", "static_batch"] = "guaranteed_no_evict"
    chunk_policy: Literal["first_come_first_served", "equal_progress"] = "first_come_first_served"
    queue_policy: Literal["fcfs", "priority", "srtf", "wfq"] = "fcfs"
    max_batch_size: Positive | None = None
    max_num_tokens: Positive | None = None
    max_seq_len: Positive | None = None
    block_size: Positive | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True
    num_blocks: Positive | None = None
    kv_memory_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    kv_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_queue_size: Positive = 256
    default_max_tokens: Positive | None = None
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stall_free: bool = False
    max_prefill_tokens: Positive | None = None
    priority_ageing_s: Seconds | None = None
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    victim_policy: Literal["newest", "cheapest"] = "newest"
    overlap_depth: Annotated[int, Field(ge=0, le=1)] = 0
    cpu_engine: Literal["auto", "portable", "whole_step"] = "auto"

    _named = field_validator(
        *("scheduler_policy", "chunk_policy", "queue_policy", "victim_policy", "cpu_engine"), mode="before"
    )(_name)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    served_model_name: str | None = None
    api_key_file: Path | None = None
    insecure: bool = False
    overload_status: Literal[429, 503] = 429
    max_body_bytes: Annotated[Bytes, Field(ge=1024)] = 4 << 20
    max_prompts_per_call: Positive = 256
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    idle_timeout_s: Seconds = 75.0
    keepalive_comment_s: Seconds = 15.0
    write_stall_s: Seconds = 30.0
    send_buffer_bytes: Annotated[Bytes, Field(ge=4096)] = 64 << 10
    offload_bytes: Bytes = 16 << 10
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = 30.0
    health_stall_s: Seconds = 30.0
    retry_after_s: Positive = 1
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    verify: Literal["full", "header"] = "full"
    tensor_parallel_size: OneDevice = 1
    pipeline_parallel_size: OneDevice = 1

    _parallel = field_validator("tensor_parallel_size", "pipeline_parallel_size")(_only_one_device)

    def fit(self, limits: BuildLimits) -> "ServeConfig":
        """Fill the limits left open from a plan's; raises ``UsageError`` for one that the plan cannot honour."""
        for field in fields(BuildLimits):
            asked, built = getattr(self, field.name), getattr(limits, field.name)
            flag = f"--{field.name.replace('_', '-')}"
            if field.name == "block_size" and asked not in (None, built):
                raise UsageError(
                    f"{flag} {asked} does not match the plan's {built}: leave it out, or build another plan."
                )
            if asked is not None and asked > built:
                raise UsageError(
                    f"{flag} {asked} is more than the plan was built for: use at most {built}, or rebuild it."
                )
        return self.model_copy(
            update={f.name: getattr(limits, f.name) for f in fields(BuildLimits) if getattr(self, f.name) is None}
        )

    @property
    def engine(self) -> "EngineConfig":
        """The engine's part; limits left open (see :meth:`fit`) take the engine's defaults."""
        from trtcb.executor.config import EngineConfig  # with the engine, not with every command

        names = (field.name for field in fields(EngineConfig))
        return EngineConfig(**{n: getattr(self, n) for n in names if getattr(self, n, None) is not None})

    @property
    def server(self) -> "ServerConfig":
        """The HTTP part, with the API keys read; raises ``UsageError`` if their file cannot be."""
        from trtcb.server.auth import read_keys
        from trtcb.server.limits import ServerConfig

        names = (field.name for field in fields(ServerConfig) if field.name != "api_keys")
        keys = () if self.api_key_file is None else read_keys(self.api_key_file)
        return ServerConfig(**{n: getattr(self, n) for n in names}, api_keys=keys)
