"""How an engine schedules and how much it may hold: the frozen settings every part of the executor reads."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from trtcb.errors import UsageError, shown
from trtcb.executor.chunking import CHUNK_POLICIES
from trtcb.executor.own_policy import OwnPolicy
from trtcb.executor.policies import CAPACITY_POLICIES, CapacityPolicy
from trtcb.executor.queueing import QUEUE_POLICIES, QueueOptions, QueuePolicy
from trtcb.executor.values import LARGEST, is_int, is_number
from trtcb.executor.victims import VICTIM_POLICIES
from trtcb.spec import BuildLimits

_MOST = (1 << 63) - 1  # of any count

CPU_ENGINES = ("auto", "portable", "whole_step")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; raises ``UsageError`` for a value or a combination that cannot be honoured.

    ``max_num_tokens`` bounds the tokens of one step, ``max_seq_len`` prompt and output of one request together.
    ``queue_policy="fcfs"`` is upstream's order: higher ``Request.priority`` first, ties by arrival. The pool is sized
    by ``num_blocks``, else by ``kv_memory_bytes``, else by what ``kv_memory_fraction`` of the free memory leaves beside
    the weights. ``max_queue_size`` counts requests that were never started. ``default_max_tokens`` stands in for an
    omitted ``max_tokens``. ``cpu_engine`` chooses what runs a ``cpu`` plan, see
    :class:`~trtcb.executor.cpu_runtime.CpuRuntime`.

    ``scheduler_policy`` may also be a policy of your own, an object with ``select``. Options beyond upstream, each off
    by default (``docs/policies.md``): ``watermark``, the share of the pool that stays free when a request starts;
    ``stall_free``; ``max_prefill_tokens``, prompt tokens of one step; ``priority_ageing_s``, seconds of waiting that
    outweigh the whole span of priorities, for ``queue_policy="priority"``; ``tenant_weights`` for ``"wfq"``, 1 if not
    named; ``victim_policy``; ``overlap_depth``, how many steps stay in flight while the next one is scheduled: 0 or 1.
    """

    scheduler_policy: str | CapacityPolicy = "guaranteed_no_evict"
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
    watermark: float = 0.0
    stall_free: bool = False
    max_prefill_tokens: int | None = None
    priority_ageing_s: float | None = None
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    victim_policy: str = "newest"
    overlap_depth: int = 0
    cpu_engine: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.scheduler_policy, str) or not isinstance(self.scheduler_policy, CapacityPolicy):
            _check_name("scheduler_policy", self.scheduler_policy, CAPACITY_POLICIES)
        if isinstance(self.scheduler_policy, type):
            name = self.scheduler_policy.__name__
            raise UsageError(f"scheduler_policy {name} is a class: give an object of it, {name}().")
        _check_name("chunk_policy", self.chunk_policy, CHUNK_POLICIES)
        _check_name("queue_policy", self.queue_policy, QUEUE_POLICIES)
        _check_name("victim_policy", self.victim_policy, VICTIM_POLICIES)
        _check_name("cpu_engine", self.cpu_engine, CPU_ENGINES)
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "block_size", "max_queue_size"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("num_blocks", "kv_memory_bytes", "default_max_tokens", "threads", "max_prefill_tokens"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        for name in ("chunked_prefill", "prefix_caching", "stall_free"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is True or False, not {shown(getattr(self, name))}.")
        if not (is_number(self.kv_memory_fraction) and 0.0 < self.kv_memory_fraction <= 1.0):
            raise UsageError(
                f"kv_memory_fraction is a share above 0 and up to 1, not {shown(self.kv_memory_fraction)}."
            )
        if not (is_int(self.overlap_depth) and self.overlap_depth in (0, 1)):
            raise UsageError(f"overlap_depth is 0 (no step waits in flight) or 1, not {shown(self.overlap_depth)}.")
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise UsageError("num_blocks and kv_memory_bytes both size the pool: give one of them.")
        self._check_options()
        self._check_progress()

    @property
    def policy_name(self) -> str:
        """What reports call the capacity policy: its name, or the class of a policy of your own."""
        return self.scheduler_policy if isinstance(self.scheduler_policy, str) else type(self.scheduler_policy).__name__

    def capacity_policy(self) -> CapacityPolicy:
        """Return the capacity policy; one of your own is checked in every step."""
        policy = self.scheduler_policy
        return CAPACITY_POLICIES[policy] if isinstance(policy, str) else OwnPolicy(policy)

    def queue(self) -> QueuePolicy:
        """Make a queue policy for one scheduler."""
        return QUEUE_POLICIES[self.queue_policy](QueueOptions(self.priority_ageing_s, self.tenant_weights))

    def _check_options(self) -> None:
        """Refuse options that would have no effect where they are set, or no meaning."""
        if not (is_number(self.watermark) and 0.0 <= self.watermark < 1.0):
            raise UsageError(f"watermark is a share from 0 to below 1, not {shown(self.watermark)}.")
        if self.priority_ageing_s is not None:
            _check_positive("priority_ageing_s", self.priority_ageing_s)
            if self.queue_policy != "priority":
                raise UsageError("priority_ageing_s is for queue_policy 'priority': set that, or leave it out.")
        if not isinstance(self.tenant_weights, Mapping):
            raise UsageError("tenant_weights is a mapping of tenants to numbers: leave it out for none.")
        for tenant, weight in self.tenant_weights.items():
            _check_positive(f"the weight of tenant '{shown(tenant)}'", weight)
        if self.tenant_weights and self.queue_policy != "wfq":
            raise UsageError("tenant_weights are for queue_policy 'wfq': set that, or leave them out.")
        if self.victim_policy != "newest" and self.scheduler_policy in ("guaranteed_no_evict", "static_batch"):
            raise UsageError(
                f"{self.scheduler_policy} never pauses, so it has no use for victim_policy '{self.victim_policy}': "
                "leave it out, or use max_utilization."
            )
        if self.max_prefill_tokens is not None and not self.chunked_prefill:
            raise UsageError(
                "max_prefill_tokens splits prompts, so it needs chunked_prefill: turn that on, or leave this out."
            )

    def _check_progress(self) -> None:
        """Refuse combinations under which some accepted request could wait for ever."""
        if self.chunked_prefill and self.max_num_tokens < self.block_size:
            raise UsageError(
                f"Chunked prefill advances by whole blocks of {self.block_size} tokens: raise max_num_tokens "
                f"({self.max_num_tokens}) to at least that, or lower block_size."
            )
        if self.max_prefill_tokens is not None and self.max_prefill_tokens < self.block_size:
            raise UsageError(
                f"Chunked prefill advances by whole blocks of {self.block_size} tokens: raise max_prefill_tokens "
                f"({self.max_prefill_tokens}) to at least that."
            )
        may_pause = self.scheduler_policy not in ("guaranteed_no_evict", "static_batch")
        recomputes_whole = may_pause and not self.chunked_prefill
        if recomputes_whole and self.max_num_tokens < self.max_seq_len:
            raise UsageError(
                f"{self.policy_name} restarts a paused request from its first token, which without chunked prefill "
                f"takes one step of up to max_seq_len tokens: raise max_num_tokens ({self.max_num_tokens}) to "
                f"{self.max_seq_len}, or turn chunked_prefill on."
            )

    def within(self, limits: BuildLimits) -> "EngineConfig":
        """Fit these settings to a plan built with ``limits``.

        A limit left at its default gives way to the plan's. One that was set and that the plan cannot honour raises
        ``UsageError``, because an engine may be run below what it was compiled for, never above.
        """
        changes: dict[str, int] = {}
        for limit in fields(BuildLimits):
            asked, built = getattr(self, limit.name), getattr(limits, limit.name)
            fits = asked == built if limit.name == "block_size" else asked <= built
            if fits:
                continue
            if asked != getattr(_DEFAULTS, limit.name):
                relation = "exactly" if limit.name == "block_size" else "at most"
                raise UsageError(
                    f"{limit.name} {asked} does not fit this plan, which was built for {relation} {built}: "
                    f"use {built}, or rebuild with --{limit.name.replace('_', '-')} {asked}."
                )
            changes[limit.name] = built
        return replace(self, **changes) if changes else self  # type: ignore[arg-type]


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Make a configuration of settings by name, its own or those of other engines (``max_num_seqs``).

    Raises ``UsageError`` for one that there is not, and what :class:`EngineConfig` raises.
    """
    known = {setting.name for setting in fields(EngineConfig)}
    if settings.keys() <= known:
        return EngineConfig(**settings)
    from trtcb.config_sources import ALIASES, did_you_mean  # with their libraries, for those who need them

    named: dict[str, Any] = {}
    for given, value in settings.items():
        name = given if given in known else ALIASES.get(given, given)
        if name not in known:
            others = [alias for alias, meant in ALIASES.items() if meant in known]
            hint = did_you_mean(given, [*known, *others]) or ": EngineConfig has all that there are."
            raise UsageError(f"There is no engine setting '{shown(given)}'{hint}")
        if name in named:
            raise UsageError(f"{name} was given under two names: give one of them.")
        named[name] = value
    return EngineConfig(**named)


def _check_name(setting: str, name: object, known: Collection[str]) -> None:
    if isinstance(name, str) and name in known:
        return
    close = get_close_matches(shown(name).lower().replace("-", "_"), known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise UsageError(f"{setting} '{shown(name)}' is unknown: {hint}Choose one of {', '.join(known)}.")


def _check_positive(setting: str, value: float) -> None:
    if not is_number(value) or not 0 < value <= LARGEST:
        raise UsageError(f"{setting} must be a number above 0, not {shown(value)}.")


def _check_at_least(setting: str, value: int, least: int) -> None:
    if not is_int(value) or value < least:
        raise UsageError(f"{setting} must be a whole number of at least {least}, not {shown(value)}.")
    if value > _MOST:
        raise UsageError(f"{setting} must be at most {_MOST}, not {shown(value)}: lower it.")


_DEFAULTS = EngineConfig()
