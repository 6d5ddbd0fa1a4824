"""How large the KV pool becomes, and what is refused before anything is allocated."""

from types import SimpleNamespace

import pytest

from trtcb.errors import OutOfMemoryError
from trtcb.executor import open_runtime
from trtcb.executor.config import CPU_ENGINES, EngineConfig
from trtcb.spec import KVDtype, ModelSpec

SPEC = ModelSpec("tiny", 64, 128, 2, 4, 2, 32, 256, 4096)
BLOCK_BYTES = SPEC.kv_bytes_per_token(KVDtype.FP8) * 32
WEIGHTS = 1000
PLAN = SimpleNamespace(
    header=SimpleNamespace(model=SPEC, kv_dtype=KVDtype.FP8), tensors={"w": SimpleNamespace(num_bytes=WEIGHTS)}
)


@pytest.fixture
def free(monkeypatch):
    """Memory for the weights and 100 blocks."""
    monkeypatch.setattr(open_runtime, "available_memory", lambda: WEIGHTS + 100 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({"num_blocks": 7}, 7),
        ({"kv_memory_bytes": 5 * BLOCK_BYTES + 1}, 5),
        ({"kv_memory_fraction": 1.0}, 100),
        ({"kv_memory_fraction": 1.0, "max_batch_size": 1, "max_seq_len": 64}, 2),  # a full batch needs no more
    ],
)
def test_the_pool_is_what_was_asked_for(free, settings, blocks):
    assert open_runtime.pool_blocks(PLAN, EngineConfig(**settings)) == blocks


@pytest.mark.parametrize(
    "settings", [{"num_blocks": 101}, {"kv_memory_bytes": 101 * BLOCK_BYTES}, {"kv_memory_bytes": BLOCK_BYTES - 1}]
)
def test_a_pool_that_cannot_be_is_refused(free, settings):
    with pytest.raises(OutOfMemoryError):
        open_runtime.pool_blocks(PLAN, EngineConfig(**settings))


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_the_runtime_gets_the_engine_that_was_chosen(monkeypatch, free, engine):
    monkeypatch.setattr("trtcb.executor.cpu_runtime.CpuRuntime", lambda plan, **settings: settings)
    PLAN.header.target = "cpu"
    settings = open_runtime.open_runtime(PLAN, EngineConfig(num_blocks=2, threads=1, cpu_engine=engine))
    assert (settings["engine"], settings["num_threads"], settings["num_blocks"]) == (engine, 1, 2)
