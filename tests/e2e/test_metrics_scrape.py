"""What a Prometheus scrape sees."""

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.fake_llm import FakeLLM
from tests.e2e.served import get, post, served
from trtcb.errors import QueueFullError
from trtcb.executor.request import FinishReason
from trtcb.executor.stats import FinishedRequest, StepStats
from trtcb.server.metrics import Metrics

STEP = StepStats(
    policy="max_utilization",
    num_rows=3,
    num_running=3,
    num_waiting=0,
    num_paused=1,
    free_blocks=1,
    cached_blocks=1,
    used_blocks=8,
    reserved_blocks=4,
    prompt_tokens=40,
    generated_tokens=3,
    recomputed_tokens=7,
    num_pauses=1,
    prefix_query_tokens=64,
    prefix_hit_tokens=32,
    step_s=0.02,
    schedule_s=0.001,
    ttft_s=(0.3,),
    itl_s=(0.02, 0.03),
    finished=(
        FinishedRequest("a", FinishReason.STOP, 10, 0, 5, 0, 0.1, 0.3, 0.02, 0.38),
        FinishedRequest("b", FinishReason.ABORT, 10, 0, 0, 0, None, None, None, 0.2),
    ),
    step_errors=0,
    audit_failures=0,
)
NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_paused",
    "kv_cache_utilization",
    "kv_blocks",
    "oldest_waiting_seconds",
    "oldest_paused_seconds",
    "reserved_blocks",
    "prompt_tokens",
    "generation_tokens",
    "pauses",
    "recomputed_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "request_success",
    "admission_rejections",
    "aborts",
    "engine_step_errors",
    "kv_audit_failures",
    "graph_replays",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "iteration_latency_seconds",
]


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_scrape_has_every_metric_and_resets_nothing():
    llm = FakeLLM()
    async with served(llm) as server:
        (on_step,) = llm.observers
        on_step(STEP)
        on_step(STEP)

        def refuse(request):
            raise QueueFullError("full")

        llm.refuse = refuse
        await post(f"{server.url}/v1/completions", {"model": "fake", "prompt": "x"})
        status, headers, first = await get(f"{server.url}/metrics")
        _, _, second = await get(f"{server.url}/metrics")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    families = {family.name for family in text_string_to_metric_families(first) if not family.name.endswith("_created")}
    assert families == {f"trtcb_{name}" for name in NAMES}
    values = samples(first)
    assert values == samples(second)
    assert values["trtcb_prompt_tokens_total",] == 80
    assert values["trtcb_generation_tokens_total",] == 6
    assert values["trtcb_recomputed_tokens_total",] == 14
    assert values["trtcb_prefix_cache_hits_total",] == 64
    assert values["trtcb_pauses_total", ("policy", "max_utilization"), ("reason", "capacity")] == 2
    assert values["trtcb_request_success_total", ("finished_reason", "stop")] == 2
    assert values["trtcb_admission_rejections_total", ("reason", "queue_full")] == 1
    assert values["trtcb_num_requests_paused",] == 3
    assert values["trtcb_kv_cache_utilization",] == 0.5
    assert (values["trtcb_oldest_waiting_seconds",], values["trtcb_oldest_paused_seconds",]) == (1.5, 2.5)
    assert values["trtcb_kv_blocks", ("state", "cached")] == 2


def test_histograms_count_every_value_of_a_step():
    from prometheus_client import generate_latest

    metrics = Metrics(lambda: FakeLLM().engine.snapshot())
    metrics.observe_step(STEP)
    values = samples(generate_latest(metrics.registry).decode())
    name = "trtcb_inter_token_latency_seconds"
    assert values[f"{name}_count",] == 2
    assert abs(values[f"{name}_sum",] - 0.05) < 1e-9
    assert values[f"{name}_bucket", ("le", "0.01")] == 0
    assert values[f"{name}_bucket", ("le", "0.025")] == 1
    assert values[f"{name}_bucket", ("le", "+Inf")] == 2
    assert values["trtcb_request_queue_time_seconds_count",] == 1
    assert values["trtcb_e2e_request_latency_seconds_count",] == 2


async def test_two_servers_in_one_process_keep_their_own_counts():
    async with served(FakeLLM()) as one, served(FakeLLM()) as two:
        one.context.metrics.observe_step(STEP)
        assert samples((await get(f"{one.url}/metrics"))[2])["trtcb_generation_tokens_total",] == 3
        assert samples((await get(f"{two.url}/metrics"))[2])["trtcb_generation_tokens_total",] == 0
