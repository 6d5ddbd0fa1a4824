"""Where a comparison runs: on a simulated machine or on a plan. Both drive the engine core of serving."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from trtcb.bench.metrics import Collector, RunResult, Slo
from trtcb.bench.token_check import TokenLog
from trtcb.bench.workload import Workload, reason
from trtcb.config import ServeConfig
from trtcb.config_sources import ALIASES, did_you_mean, load_yaml, resolve
from trtcb.errors import RequestError, UsageError, ValidationFailedError
from trtcb.executor.answers import AnswerReader
from trtcb.executor.config import EngineConfig
from trtcb.executor.policies import CAPACITY_POLICIES
from trtcb.executor.request import Request, SamplingParams
from trtcb.executor.runtime import Runtime
from trtcb.executor.sim_runtime import SimRuntime
from trtcb.executor.simulation import JumpingClock, Simulation
from trtcb.executor.step_time import StepTime
from trtcb.executor.virtual_time import (
    BlankRuntime,
    ScriptedRuntime,
    SkippingClock,
    VirtualClock,
    VirtualTimeRuntime,
)

SIM_VOCAB_SIZE = 32000
_ENGINE_FIELDS = tuple(field.name for field in fields(EngineConfig))
_HARDWARE_FIELDS = ("threads", "kv_memory_bytes", "kv_memory_fraction")


class _StepTimeSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    base_s: float
    per_token_s: float = 0.0
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    host_s: float = 0.0


class _SimSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    step_time: _StepTimeSettings
    engine: dict[str, Any] = {}


class Target(Protocol):
    """Something that configurations are compared on."""

    @property
    def description(self) -> str:
        """What it is, in words."""

    @property
    def engine(self) -> Mapping[str, Any]:
        """Settings that hold unless a configuration says otherwise."""

    def run(self, config: EngineConfig, workload: Workload, slo: Slo, log: TokenLog | None = None) -> RunResult:
        """Serve a workload with a fresh engine; ``log`` takes in every token."""

    def alone(self, config: EngineConfig, workload: Workload, numbers: Collection[int]) -> TokenLog:
        """Serve some requests of a workload, each alone in a fresh engine that finds nothing in its cache."""


@dataclass(frozen=True, slots=True)
class SimTarget:
    """A machine that is a formula, on a virtual clock.

    With ``check_contents`` the token ids are kept in the simulated KV blocks and every context is read back through
    its block table at every token; without, nothing is kept. The scheduler's decisions are the same.
    """

    description: str
    step_time: StepTime
    engine: Mapping[str, Any]
    check_contents: bool = False

    @staticmethod
    def load(source: str) -> "SimTarget":
        """Read a YAML file, or the one that comes with trtcb under a name (``builtin``)."""
        shipped = resources.files("trtcb.configs") / "sim" / f"{source}.yaml"
        try:
            text = (shipped if shipped.is_file() else Path(source)).read_text("utf-8")
            settings = _SimSettings.model_validate(load_yaml(f"--sim {source}", text))
            step_time = StepTime(**settings.step_time.model_dump())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--sim {source} cannot be read: {reason(error)}. Give a YAML file, or 'builtin'."
            ) from None
        except ValidationError as error:
            item = error.errors()[0]
            place = "".join(f"{name}: " for name in [".".join(map(str, item["loc"]))] if name)
            kind = "write 'name: value' lines" if item["type"].startswith("model_") else item["msg"]
            raise UsageError(f"--sim {source}: {place}{kind}.") from None
        except UsageError as error:
            text = str(error)
            raise UsageError(text if text.startswith("--sim") else f"--sim {source}: step_time: {text}") from None
        return SimTarget(f"sim {source}", step_time, settings.engine)

    def run(self, config: EngineConfig, workload: Workload, slo: Slo, log: TokenLog | None = None) -> RunResult:
        """Serve a workload in virtual time."""
        clock = VirtualClock()
        return serve(self._runtime(config, clock), config, clock, SIM_VOCAB_SIZE, workload, slo, log)

    def alone(self, config: EngineConfig, workload: Workload, numbers: Collection[int]) -> TokenLog:
        """Serve some requests one by one; only with ``check_contents`` are there tokens to look at."""
        if not self.check_contents:
            raise UsageError("A simulated model has tokens only with --check-contents: add it to check them.")
        clock = VirtualClock()
        return serve_alone(self._runtime(config, clock), config, clock, SIM_VOCAB_SIZE, workload, numbers)

    def _runtime(self, config: EngineConfig, clock: VirtualClock) -> Runtime:
        if config.num_blocks is None:
            raise UsageError("A simulated machine has no memory to size the pool by: set num_blocks.")
        size = {"num_blocks": config.num_blocks, "block_size": config.block_size}
        inner: Runtime = SimRuntime(vocab_size=SIM_VOCAB_SIZE, **size) if self.check_contents else BlankRuntime(**size)
        return VirtualTimeRuntime(inner, clock, self.step_time)


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """A real plan. Steps and scheduling take their real time; gaps without any request are skipped.

    The model computes every token, but where an answer ends is up to the workload.
    """

    description: str
    path: Path
    engine: Mapping[str, Any]

    def run(self, config: EngineConfig, workload: Workload, slo: Slo, log: TokenLog | None = None) -> RunResult:
        """Open the plan, warm up, and serve a workload."""
        with self._opened(config) as (runtime, config, vocab_size):
            warm_up(runtime, config, vocab_size)
            return serve(runtime, config, SkippingClock(), vocab_size, workload, slo, log)

    def alone(self, config: EngineConfig, workload: Workload, numbers: Collection[int]) -> TokenLog:
        """Open the plan, and serve some requests one by one."""
        with self._opened(config) as (runtime, config, vocab_size):
            return serve_alone(runtime, config, SkippingClock(), vocab_size, workload, numbers)

    @contextmanager
    def _opened(self, config: EngineConfig) -> Iterator[tuple[Runtime, EngineConfig, int]]:
        from trtcb.executor.served_model import ServedModel

        served = ServedModel.from_plan(self.path, config, verify="header")
        try:
            yield served.runtime, served.config, served.model.vocab_size
        finally:
            served.runtime.close()


def serve(
    runtime: Runtime,
    config: EngineConfig,
    clock: JumpingClock,
    vocab_size: int,
    workload: Workload,
    slo: Slo,
    log: TokenLog | None = None,
    on_finished: Callable[[int], None] = lambda count: None,
) -> RunResult:
    """Serve a workload on a runtime whose model has the tokens below ``vocab_size``, and measure it.

    ``on_finished`` is told how many requests each step has ended.
    """
    workload = workload.within(config.max_seq_len)
    collector = Collector(workload, runtime.num_blocks, config.max_batch_size)
    end_token = vocab_size  # one that the model does not have, so that nothing else ends an answer
    reasons: list[str] = []

    def refuse(request: Request, reason: str) -> None:
        reasons.append(reason)
        collector.refuse(request.request_id)

    simulation = Simulation(
        ScriptedRuntime(runtime, workload.ends, end_token),
        config,
        clock,
        eos_token_id=end_token,
        on_refused=refuse,
        max_concurrency=workload.max_concurrency,
        reader=None if log is None else AnswerReader(),
    )
    for outcome in simulation.run(workload.requests(vocab_size)):
        if log is not None:
            log.add(outcome.deltas)
        if outcome.stats is not None:
            collector.step(outcome.stats, clock())
            on_finished(len(outcome.stats.finished))
    if len(reasons) == len(workload):
        raise UsageError(
            "All requests of the workload were refused, so there is nothing to measure: set shorter lengths "
            f"(--random-input-len, --random-output-len, --max-tokens) or raise the engine's limits. {reasons[0]}"
        )
    return collector.result(max(clock() - float(workload.arrival_s[0]), 1e-9), slo)


def serve_alone(
    runtime: Runtime,
    config: EngineConfig,
    clock: JumpingClock,
    vocab_size: int,
    workload: Workload,
    numbers: Collection[int],
) -> TokenLog:
    """Serve some requests of a workload, one after the other has ended, and return their tokens."""

    def refuse(request: Request, reason: str) -> None:
        raise ValidationFailedError(
            f"Request {request.request_id} was served under load, but is refused alone: {reason}"
        )

    workload = workload.within(config.max_seq_len)
    log, wanted = TokenLog(len(workload)), set(numbers)
    simulation = Simulation(
        ScriptedRuntime(runtime, workload.ends, vocab_size),
        replace(config, prefix_caching=False),
        clock,
        eos_token_id=vocab_size,
        on_refused=refuse,
        max_concurrency=1,
        reader=AnswerReader(),
    )
    requests = (request for request in workload.requests(vocab_size) if int(request.request_id) in wanted)
    for outcome in simulation.run(requests):
        log.add(outcome.deltas)
    answer_len = workload.answer_len
    for number in wanted:
        num_tokens, expected = len(log.of(number)), int(answer_len[number])
        if num_tokens != expected:  # too little is easily equal
            raise ValidationFailedError(
                f"Request {number} was streamed {num_tokens} tokens alone, not {expected}: please report this."
            )
    return log


def warm_up(runtime: Runtime, config: EngineConfig, vocab_size: int) -> None:
    """Run a few short requests, so that nothing is compiled or faulted in while it is measured."""

    def refuse(request: Request, reason: str) -> None:
        raise RequestError(f"The warm-up does not fit this engine: {reason}")

    length = min(8, config.max_seq_len - 3)
    requests = [
        Request(f"warm-up-{number}", (number,) * length, SamplingParams(max_tokens=2, temperature=0.0))
        for number in range(min(4, config.max_queue_size))
    ]
    simulation = Simulation(runtime, config, SkippingClock(), eos_token_id=vocab_size, on_refused=refuse)
    for _ in simulation.run(requests):
        pass
    gc.collect()


@dataclass(frozen=True, slots=True)
class Setup:
    """A configuration and the words it was asked for with."""

    label: str
    config: EngineConfig
    settings: tuple[str, ...] = ()  # names of those that it was asked for with

    @staticmethod
    def parse(text: str, common: Mapping[str, Any], num_requests: int) -> "Setup":
        """Read ``POLICY[:setting=value,…]``; settings are those of ``trtcb serve``, and go over ``common`` ones.

        The queue takes all ``num_requests`` unless ``max_queue_size`` is set, so that nothing is refused by accident.
        """
        policy, _, rest = text.partition(":")
        policy = policy.strip().lower().replace("-", "_")
        if policy not in CAPACITY_POLICIES:
            raise UsageError(f"'{text}': there is no policy '{policy}'{_instead(policy, CAPACITY_POLICIES)}")
        flags: dict[str, Any] = {"scheduler_policy": policy}
        for part in filter(None, (part.strip() for part in rest.split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise UsageError(f"'{text}': write settings as name=value, not '{part}'.")
            name = name.strip().replace("-", "_")
            name = ALIASES.get(name, name)
            if name not in _ENGINE_FIELDS:
                raise UsageError(f"'{text}': the engine has no setting '{name}'{_instead(name, _ENGINE_FIELDS)}")
            if name in flags:
                raise UsageError(f"'{text}': {name} is given twice: leave one out.")
            flags[name] = value.strip()
        try:
            resolved = resolve(ServeConfig, flags={**common, **flags})
            config = resolved.config.engine
        except UsageError as error:
            raise UsageError(f"'{text}': {error}") from None
        if resolved.origins["max_queue_size"] != "flag":
            config = replace(config, max_queue_size=max(1, num_requests))
        return Setup(text, config, tuple(flags))

    def check_effect(self, workload: Workload, *, is_simulated: bool) -> None:
        """Raise ``UsageError`` for a setting of its own that would change nothing there."""
        useless = {"default_max_tokens": "every request of a workload declares a limit"}
        if is_simulated:
            useless |= dict.fromkeys(_HARDWARE_FIELDS, "a simulated machine has no CPU and no memory")
        if len(set(workload.users)) < 2:
            useless["queue_policy=wfq"] = "all requests have one user; name more in a --trace"
        if len(set(workload.priority.tolist())) < 2:
            useless["priority_ageing_s"] = "all requests have one priority; write others into a --trace"
        for name, why in useless.items():
            field, _, value = name.partition("=")
            if field in self.settings and value in ("", getattr(self.config, field)):
                raise UsageError(f"'{self.label}': {name} has no effect here, because {why}: leave it out.")


def _instead(name: str, known: Collection[str]) -> str:
    return did_you_mean(name, known) or f"; there are {', '.join(known)}."
