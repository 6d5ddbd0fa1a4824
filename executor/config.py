"""How an engine schedules and how much it may hold: the frozen settings every part of the executor reads."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches

from trtcb.errors import UsageError
from trtcb.executor.chunking import CHUNK_POLICIES
from trtcb.executor.policies import CAPACITY_POLICIES
from trtcb.spec import BuildLimits

QUEUE_POLICIES = ("fcfs",)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; raises ``UsageError`` for a value or a combination that cannot be honoured.

    ``max_num_tokens`` bounds the tokens of one step, ``max_seq_len`` prompt and output of one request together.
    ``queue_policy="fcfs"`` is upstream's order: higher ``Request.priority`` first, ties by arrival. The pool is sized
    by ``num_blocks``, else by ``kv_memory_bytes``, else by what ``kv_memory_fraction`` of the free memory leaves beside
    the weights. ``max_queue_size`` counts requests that were never started. ``default_max_tokens`` stands in for an
    omitted ``max_tokens``.
    """

    scheduler_policy: str = "guaranteed_no_evict"
    chunk_policy: str = "first_come_first_served"
    queue_policy: str = "fcfs"
    max_batch_size: int = 64
    max_num_tokens: int = 512
    max_seq_len: int = 4096
    block_size: int = 32
    chunked_prefill: bool = True
    prefix_caching: bool = True
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    kv_memory_fraction: float = 0.9
    max_queue_size: int = 256
    default_max_tokens: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        _check_name("scheduler_policy", self.scheduler_policy, CAPACITY_POLICIES)
        _check_name("chunk_policy", self.chunk_policy, CHUNK_POLICIES)
        _check_name("queue_policy", self.queue_policy, QUEUE_POLICIES)
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "block_size", "max_queue_size"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("num_blocks", "kv_memory_bytes", "default_max_tokens", "threads"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        if not 0.0 < self.kv_memory_fraction <= 1.0:
            raise UsageError(f"kv_memory_fraction is a share above 0 and up to 1, not {self.kv_memory_fraction}.")
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise UsageError("num_blocks and kv_memory_bytes both size the pool: give one of them.")
        self._check_progress()

    def _check_progress(self) -> None:
        """Refuse combinations under which some accepted request could wait for ever."""
        if self.chunked_prefill and self.max_num_tokens < self.block_size:
            raise UsageError(
                f"Chunked prefill advances by whole blocks of {self.block_size} tokens: raise max_num_tokens "
                f"({self.max_num_tokens}) to at least that, or lower block_size."
            )
        recomputes_whole = self.scheduler_policy == "max_utilization" and not self.chunked_prefill
        if recomputes_whole and self.max_num_tokens < self.max_seq_len:
            raise UsageError(
                "max_utilization restarts a paused request from its first token, which without chunked prefill takes "
                f"one step of up to max_seq_len tokens: raise max_num_tokens ({self.max_num_tokens}) to "
                f"{self.max_seq_len}, or turn chunked_prefill on."
            )

    def within(self, limits: BuildLimits) -> "EngineConfig":
        """Fit these settings to a plan built with ``limits``.

        A limit left at its default gives way to the plan's. One that was set and that the plan cannot honour raises
        ``UsageError``, because an engine may be run below what it was compiled for, never above.
        """
        changes: dict[str, int] = {}
        for field in fields(BuildLimits):
            asked, built = getattr(self, field.name), getattr(limits, field.name)
            fits = asked == built if field.name == "block_size" else asked <= built
            if fits:
                continue
            if asked != getattr(_DEFAULTS, field.name):
                relation = "exactly" if field.name == "block_size" else "at most"
                raise UsageError(
                    f"{field.name} {asked} does not fit this plan, which was built for {relation} {built}: "
                    f"use {built}, or rebuild with --{field.name.replace('_', '-')} {asked}."
                )
            changes[field.name] = built
        return replace(self, **changes) if changes else self  # type: ignore[arg-type]


def _check_name(setting: str, name: str, known: Collection[str]) -> None:
    if name in known:
        return
    close = get_close_matches(str(name).lower().replace("-", "_"), known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise UsageError(f"{setting} '{name}' is unknown: {hint}Choose one of {', '.join(known)}.")


def _check_at_least(setting: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{setting} must be a whole number of at least {least}, not {value!r}.")


_DEFAULTS = EngineConfig()
