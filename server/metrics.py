"""Prometheus metrics: counters and histograms fed once a step by the engine thread, gauges read at the scrape."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from threading import Lock

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from trtcb.executor.request import FinishReason
from trtcb.executor.stats import EngineSnapshot, StepStats

_PREFIX = "trtcb_"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class StepHistogram(Collector):
    """A histogram of seconds that takes many values under one lock: a step brings one for each sequence it ran."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._lock = Lock()
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, values: Sequence[float]) -> None:
        """Count every value."""
        if not values:
            return
        with self._lock:
            for value in values:
                self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += sum(values)

    def collect(self) -> Iterator[Metric]:
        """Cumulative buckets, as the exposition format has them."""
        with self._lock:
            counts, total_s = list(self._counts), self._sum
        names = [*map(repr, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=total_s)


class EngineGauges(Collector):
    """Gauges of the engine as it is at the scrape."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask an engine that has not started."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Queue lengths and the state of the block pool."""
        now = self._snapshot()
        usable = max(1, now.num_blocks)
        values = {
            "num_requests_running": ("Requests that own blocks", now.num_running),
            "num_requests_waiting": ("Requests never started", now.num_waiting),
            "num_requests_paused": ("Requests that lost their blocks and wait for a restart", now.num_paused),
            "kv_cache_utilization": ("Share of the blocks in use by requests", now.used_blocks / usable),
            "oldest_waiting_seconds": ("Age of the oldest request never started", now.oldest_waiting_s),
            "oldest_paused_seconds": ("Time since the oldest pause that lasts", now.oldest_paused_s),
            "reserved_blocks": ("Blocks that running requests may still take", now.reserved_blocks),
        }
        for name, (documentation, value) in values.items():
            yield GaugeMetricFamily(_PREFIX + name, documentation, value=float(value))
        blocks = GaugeMetricFamily(_PREFIX + "kv_blocks", "Blocks of the pool by state", labels=["state"])
        for state, count in (("free", now.free_blocks), ("cached", now.cached_blocks), ("used", now.used_blocks)):
            blocks.add_metric([state], float(count))
        yield blocks


class Metrics:
    """All metrics of one server, in a registry of its own. ``observe_step`` is called on the engine thread."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineGauges(snapshot))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed for the first time")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._recomputed_tokens = self._counter("recomputed_tokens", "Tokens computed again after a pause")
        self._pauses = self._counter("pauses", "Requests that lost their blocks", "policy", "reason")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._success = self._counter("request_success", "Requests that ended well", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests refused at submission", "reason")
        self._aborts = self._counter("aborts", "Requests ended before they were finished", "cause")
        self._step_errors = self._counter("engine_step_errors", "Steps that raised")
        self._audit_failures = self._counter("kv_audit_failures", "Failed audits of the block pool; stays 0")
        self._graph_replays = self._counter("graph_replays", "Steps replayed from a captured graph; 0 on cpu")
        self._ttft = self._histogram("time_to_first_token", "Arrival to first token", _LONG_S)
        self._itl = self._histogram("inter_token_latency", "Between two tokens of a request", _SHORT_S)
        self._tpot = self._histogram("request_time_per_output_token", "Mean per token after the first", _SHORT_S)
        self._e2e = self._histogram("e2e_request_latency", "Arrival to end", _LONG_S)
        self._queue = self._histogram("request_queue_time", "Arrival to first step", _LONG_S)
        self._iteration = self._histogram("iteration_latency", "One step of the engine", _SHORT_S)

    def observe_step(self, step: StepStats) -> None:
        """Account for one step."""
        self._prompt_tokens.inc(step.prompt_tokens)
        self._generation_tokens.inc(step.generated_tokens)
        self._recomputed_tokens.inc(step.recomputed_tokens)
        self._prefix_queries.inc(step.prefix_query_tokens)
        self._prefix_hits.inc(step.prefix_hit_tokens)
        self._step_errors.inc(step.step_errors)
        self._audit_failures.inc(step.audit_failures)
        if step.num_pauses:
            self._pauses.labels(step.policy, "capacity").inc(step.num_pauses)
        if step.num_rows:
            self._iteration.observe((step.step_s,))
        self._ttft.observe(step.ttft_s)
        self._itl.observe(step.itl_s)
        self._observe_finished(step)

    def rejected(self, reason: str) -> None:
        """Count a request that was refused before it ran."""
        self._rejections.labels(reason).inc()

    def aborted(self, cause: str) -> None:
        """Count a request that did not reach its end: ``disconnect``, ``stalled_reader`` or ``shutdown``."""
        self._aborts.labels(cause).inc()

    def _observe_finished(self, step: StepStats) -> None:
        for request in step.finished:
            if request.reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._success.labels(request.reason.value).inc()
        self._queue.observe([request.queue_s for request in step.finished if request.queue_s is not None])
        self._tpot.observe([request.tpot_s for request in step.finished if request.tpot_s is not None])
        self._e2e.observe([request.e2e_s for request in step.finished])

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> StepHistogram:
        histogram = StepHistogram(_PREFIX + name + "_seconds", f"{documentation}, in seconds", bounds)
        self.registry.register(histogram)
        return histogram
