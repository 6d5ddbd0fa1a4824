"""Settings that cannot be honoured are refused by name, with the fix."""

import dataclasses

import pytest

from trtcb.errors import UsageError
from trtcb.executor.config import EngineConfig, engine_config
from trtcb.executor.policies import MaxUtilization
from trtcb.spec import BuildLimits

FLAGS = ("chunked_prefill", "prefix_caching", "stall_free")


def test_defaults_are_valid_and_frozen():
    config = EngineConfig()
    assert (config.scheduler_policy, config.chunk_policy) == ("guaranteed_no_evict", "first_come_first_served")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_batch_size = 1


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("scheduler_policy", "max_utilisation", "did you mean 'max_utilization'"),
        ("scheduler_policy", "GUARANTEED-NO-EVICT", "did you mean 'guaranteed_no_evict'"),
        ("scheduler_policy", "fastest", "Choose one of guaranteed_no_evict, max_utilization, static_batch"),
        ("chunk_policy", "equal", "Choose one of first_come_first_served, equal_progress"),
        ("scheduler_policy", object(), "is unknown: Choose one of"),
        ("queue_policy", "wfk", "did you mean 'wfq'. Choose one of fcfs, priority, srtf, wfq"),
        ("victim_policy", "oldest", "Choose one of newest, cheapest"),
        ("cpu_engine", "Whole-Step", "did you mean 'whole_step'"),
        ("cpu_engine", "onednn", "Choose one of auto, portable, whole_step"),
        ("cpu_engine", None, "Choose one of auto, portable, whole_step"),
        ("victim_policy", "cheapest", "guaranteed_no_evict never pauses"),
        ("watermark", 1.0, "a share from 0 to below 1"),
        ("watermark", -0.1, "a share from 0 to below 1"),
        ("watermark", float("nan"), "a share from 0 to below 1"),
        ("max_prefill_tokens", 0, "max_prefill_tokens"),
        ("overlap_depth", 2, "overlap_depth is 0 .* or 1, not 2"),
        ("overlap_depth", True, "overlap_depth is 0"),
        ("max_prefill_tokens", 31, "raise max_prefill_tokens \\(31\\) to at least that"),
        ("priority_ageing_s", 0, "must be a number above 0"),
        ("priority_ageing_s", 60.0, "for queue_policy 'priority'"),
        ("tenant_weights", {"a": 2.0}, "for queue_policy 'wfq'"),
        ("tenant_weights", {"a": 0}, "the weight of tenant 'a' must be a number above 0"),
        ("max_batch_size", 0, "max_batch_size must be a whole number of at least 1, not 0"),
        ("max_num_tokens", -1, "max_num_tokens"),
        ("max_seq_len", True, "max_seq_len"),
        ("block_size", 1.5, "block_size"),
        ("max_queue_size", 0, "max_queue_size"),
        ("num_blocks", 0, "num_blocks"),
        ("kv_memory_bytes", 0, "kv_memory_bytes"),
        ("default_max_tokens", 0, "default_max_tokens"),
        ("threads", 0, "threads"),
        ("kv_memory_fraction", 0.0, "above 0 and up to 1"),
        ("kv_memory_fraction", 1.01, "above 0 and up to 1"),
        ("kv_memory_fraction", float("nan"), "above 0 and up to 1"),
        *((name, "0.5", "is a share") for name in ("watermark", "kv_memory_fraction")),
        *((name, value, "is True or False") for name in FLAGS for value in ("no", 0, None)),
        ("watermark", False, "is a share"),
        ("tenant_weights", None, "tenant_weights is a mapping"),
        ("tenant_weights", {"a": 10**400}, "must be a number above 0, not 1000"),
        ("overlap_depth", 1.0, "overlap_depth is 0"),
        ("num_blocks", 1 << 63, "num_blocks must be at most 9223372036854775807, not 9223372036854775808"),
        ("scheduler_policy", MaxUtilization, "MaxUtilization is a class: give an object of it"),
    ],
)
def test_bad_values_are_named(setting, value, message):
    with pytest.raises(UsageError, match=message):
        EngineConfig(**{setting: value})


def test_two_sizes_of_the_pool_are_refused():
    with pytest.raises(UsageError, match="give one of them"):
        EngineConfig(num_blocks=10, kv_memory_bytes=1 << 20)


def test_chunks_need_a_budget_of_one_block():
    with pytest.raises(UsageError, match="raise max_num_tokens \\(31\\)"):
        EngineConfig(max_num_tokens=31, block_size=32)
    EngineConfig(max_num_tokens=31, block_size=32, chunked_prefill=False)


def test_a_restart_must_fit_into_one_step_without_chunks():
    with pytest.raises(UsageError, match="turn chunked_prefill on"):
        EngineConfig(scheduler_policy="max_utilization", chunked_prefill=False, max_num_tokens=99, max_seq_len=100)
    EngineConfig(scheduler_policy="max_utilization", chunked_prefill=False, max_num_tokens=100, max_seq_len=100)


def test_options_that_need_another_are_refused_without_it():
    with pytest.raises(UsageError, match="needs chunked_prefill"):
        EngineConfig(chunked_prefill=False, max_prefill_tokens=64)
    EngineConfig(queue_policy="priority", priority_ageing_s=60, max_prefill_tokens=32)
    EngineConfig(queue_policy="wfq", tenant_weights={"a": 2.5})
    EngineConfig(scheduler_policy="max_utilization", victim_policy="cheapest", watermark=0.05)


class TestWithinLimits:
    LIMITS = BuildLimits(max_batch_size=8, max_num_tokens=256, max_seq_len=1024, block_size=64)

    def test_defaults_give_way(self):
        config = EngineConfig().within(self.LIMITS)
        assert (config.max_batch_size, config.max_num_tokens, config.max_seq_len, config.block_size) == (
            8,
            256,
            1024,
            64,
        )

    def test_lower_values_are_kept(self):
        config = EngineConfig(max_batch_size=4, max_seq_len=100, block_size=64).within(self.LIMITS)
        assert (config.max_batch_size, config.max_num_tokens, config.max_seq_len) == (4, 256, 100)

    @pytest.mark.parametrize(
        ("setting", "value", "message"),
        [
            ("max_batch_size", 9, "max_batch_size 9 does not fit this plan, which was built for at most 8"),
            ("max_seq_len", 2000, "rebuild with --max-seq-len 2000"),
            ("block_size", 16, "block_size 16 does not fit this plan, which was built for exactly 64"),
        ],
    )
    def test_what_was_asked_for_is_never_changed_silently(self, setting, value, message):
        with pytest.raises(UsageError, match=message):
            EngineConfig(**{setting: value}).within(self.LIMITS)


def test_names_of_other_engines_are_known():
    asked = {"max_num_seqs": 3, "max_num_batched_tokens": 99, "max_model_len": 77, "tokens_per_block": 64}
    assert engine_config(asked) == EngineConfig(max_batch_size=3, max_num_tokens=99, max_seq_len=77, block_size=64)
    assert engine_config({"threads": 2, "kv_memory": 1 << 20}) == EngineConfig(threads=2, kv_memory_bytes=1 << 20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seq": 3}, "no engine setting 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"max_batchsize": 3}, "no engine setting 'max_batchsize'; did you mean 'max_batch_size'?"),
        ({"kv_dtype": "fp8"}, "no engine setting 'kv_dtype'"),
        ({"tp_size": 2}, "no engine setting 'tp_size'"),
        ({"max_num_seqs": 3, "max_batch_size": 3}, "max_batch_size was given under two names"),
        ({"max_num_seqs": 0}, "max_batch_size must be a whole number of at least 1, not 0"),
    ],
)
def test_a_setting_that_there_is_not_is_one_sentence(settings, message):
    with pytest.raises(UsageError, match=message.replace("?", "\\?")):
        engine_config(settings)
