from pathlib import Path
from typing import Any

import pytest

from trtcb.config import BuildConfig, ServeConfig
from trtcb.config_sources import ALIASES, preset_names, resolve
from trtcb.errors import TargetUnavailableError, UsageError
from trtcb.spec import BuildLimits, KVDtype, ModelSpec, WeightDtype

SPEC = ModelSpec("toy", 64, 128, 2, 4, 2, 16, 256, 2048)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_precedence_and_origins(tmp_path: Path) -> None:
    file = write(tmp_path / "my.yaml", "max_queue_size: 7\nmax-batch-size: 16\nkv-memory: 2GiB\n")
    resolved = resolve(
        ServeConfig,
        flags={"max_batch_size": 4, "port": None, "kv_memory_fraction": 0.6},
        config_file=file,
        preset="throughput",
    )
    config = resolved.config
    assert (config.max_batch_size, resolved.origins["max_batch_size"]) == (4, "flag")
    assert (config.max_queue_size, resolved.origins["max_queue_size"]) == (7, str(file))
    assert (config.kv_memory_bytes, resolved.origins["kv_memory_bytes"]) == (2 << 30, str(file))
    assert (config.scheduler_policy, resolved.origins["scheduler_policy"]) == ("max_utilization", "preset throughput")
    assert (config.kv_memory_fraction, resolved.origins["kv_memory_fraction"]) == (0.6, "flag")
    assert (config.port, resolved.origins["port"]) == (8000, "default")
    shown = resolved.lines()
    assert len(shown) == len(ServeConfig.model_fields)
    assert any(line.split() == ["max_batch_size", "=", "4", "(flag)"] for line in shown)


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_and_set_something(name: str) -> None:
    resolved = resolve(ServeConfig, flags={}, preset=name)
    assert resolved.config != ServeConfig()
    assert resolved.config.engine != ServeConfig().engine


def test_there_are_presets() -> None:
    assert {"throughput", "low-latency"} <= set(preset_names())


def test_types_may_be_written_in_capitals() -> None:
    config = resolve(BuildConfig, flags={"model": "m", "dtype": "INT8", "kv_cache_dtype": "FP8"}).config
    assert (config.weight_dtype, config.kv_dtype) == ("int8", "fp8")
    assert resolve(BuildConfig, flags={"model": "m", "weight_dtype": "Auto"}).config.weight_dtype == "auto"
    with pytest.raises(UsageError, match=r"kv_dtype \(flag\): Input should be 'auto', 'fp32', .* or 'fp8'"):
        resolve(BuildConfig, flags={"model": "m", "kv_dtype": "FP7"})


def test_every_alias_names_a_setting() -> None:
    settings = {*BuildConfig.model_fields, *ServeConfig.model_fields}
    assert set(ALIASES.values()) <= settings
    assert not set(ALIASES) & settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batchsize: 3", "there is no setting 'max_batchsize'; did you mean 'max_batch_size'"),
        ("max_batch_size: 0", r"max_batch_size \(.*my.yaml\): .*greater than or equal to 1, not 0"),
        ("kv_memory: 2 parsecs", "kv_memory_bytes .*not a size"),
        ("kv_memory_fraction: .nan", "kv_memory_fraction"),
        ("scheduler_policy: evict_all", "scheduler_policy .*guaranteed_no_evict"),
        ("tp_size: 2", "tensor_parallel_size .*one device"),
        ("pipeline_parallel_size: 4", "pipeline_parallel_size .*one device"),
        ("port: 70000", "port"),
        ("- a list", "must hold settings"),
        ("a: [", "not valid YAML"),
        ("port: &p 1\nthreads: *p", "aliases"),
        ("port: 2026-99-99", "not valid YAML"),
        ("port: " + "9" * 5000, "not valid YAML"),
        ("kv_memory: " + "9" * 400, "not a size"),
        ("1: 2", "must hold settings"),
        ("!!python/object/apply:os.system [true]", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(ServeConfig, flags={}, config_file=write(tmp_path / "my.yaml", text))


def test_missing_file_and_preset(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        resolve(ServeConfig, flags={}, config_file=tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="did you mean 'throughput'"):
        resolve(ServeConfig, flags={}, preset="thruput")
    with pytest.raises(UsageError, match="low-latency, throughput"):
        resolve(ServeConfig, flags={}, preset="zzz")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    resolved = resolve(BuildConfig, flags={"model": "x"}, config_file=write(tmp_path / "my.yaml", "# nothing\n"))
    assert resolved.config == BuildConfig(model="x")


def test_model_is_required() -> None:
    with pytest.raises(UsageError, match="model is required"):
        resolve(BuildConfig, flags={})


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("smollm2-135m", "engines/smollm2-135m.plan"),
        ("some/Folder/", "engines/folder.plan"),
        ("org/Model-1.5B", "engines/model-1.5b.plan"),
        ("/x/A B.Q4_1.gguf", "engines/a-b.q4_1.plan"),
    ],
)
def test_plan_path(model: str, plan: str) -> None:
    assert BuildConfig(model=model).plan_path == Path(plan)
    assert BuildConfig(model=model, output=Path("x.plan")).plan_path == Path("x.plan")


def test_types_follow_the_checkpoint() -> None:
    auto = BuildConfig(model="x")
    assert (auto.weight_type("fp32"), auto.kv_type("fp32")) == (WeightDtype.FP32, KVDtype.FP32)
    assert (auto.weight_type("q4_1"), auto.kv_type("bf16")) == (WeightDtype.BF16, KVDtype.BF16)
    fixed = BuildConfig(model="x", weight_dtype="fp32", kv_dtype="fp8")
    assert (fixed.weight_type("bf16"), fixed.kv_type("bf16")) == (WeightDtype.FP32, KVDtype.FP8)
    assert BuildConfig(model="x", weight_dtype="fp32").kv_type("bf16") is KVDtype.FP32
    assert BuildConfig(model="x", weight_dtype="int8").kv_type("fp32") is KVDtype.BF16
    assert BuildConfig(model="x", weight_dtype="int4").kv_type("q4_1") is KVDtype.BF16


@pytest.mark.parametrize("name", ["whole_step", "Whole-Step", "WHOLE_STEP"])
def test_a_choice_may_be_written_in_capitals_and_with_hyphens(name) -> None:
    assert ServeConfig(cpu_engine=name).engine.cpu_engine == "whole_step"


def test_limits() -> None:
    assert BuildConfig(model="x").limits(SPEC) == BuildLimits(64, 512, 2048, 32)
    assert BuildConfig(model="x", max_seq_len=100, block_size=64).limits(SPEC) == BuildLimits(64, 512, 100, 64)
    with pytest.raises(UsageError, match=r"--max-seq-len 4096 .* at most 2048"):
        BuildConfig(model="x", max_seq_len=4096).limits(SPEC)
    with pytest.raises(UsageError, match="block_size"):
        resolve(BuildConfig, flags={"model": "x", "block_size": 48})


def test_targets() -> None:
    assert BuildConfig(model="x").resolved_target() == "cpu"
    assert BuildConfig(model="x", target="tensorrt-rtx").resolved_target() == "tensorrt-rtx"
    with pytest.raises(TargetUnavailableError, match="--target cpu") as caught:
        BuildConfig(model="x", target="tensorrt").resolved_target()
    assert caught.value.exit_code == 8
    with pytest.raises(UsageError, match="target"):
        resolve(BuildConfig, flags={"model": "x", "target": "tpu"})


def test_a_plan_fills_open_limits_and_caps_given_ones() -> None:
    limits = BuildLimits(max_batch_size=8, max_num_tokens=128, max_seq_len=1024, block_size=64)
    fitted = ServeConfig(max_batch_size=4).fit(limits)
    assert (fitted.max_batch_size, fitted.max_num_tokens, fitted.max_seq_len, fitted.block_size) == (4, 128, 1024, 64)
    with pytest.raises(UsageError, match=r"--max-batch-size 9 is more .* at most 8"):
        ServeConfig(max_batch_size=9).fit(limits)
    with pytest.raises(UsageError, match="--block-size 32 does not match the plan's 64"):
        ServeConfig(block_size=32).fit(limits)


def defaults(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def test_serve_settings_cover_the_engine_and_the_server(tmp_path: Path) -> None:
    from trtcb.executor.config import EngineConfig
    from trtcb.server.limits import ServerConfig

    config = ServeConfig()
    assert config.engine == EngineConfig()
    assert set(defaults(config.engine)) <= set(ServeConfig.model_fields)
    assert config.server == ServerConfig()
    assert set(defaults(config.server)) - {"api_keys"} <= set(ServeConfig.model_fields)
    changed = ServeConfig(max_queue_size=3, host="::1", api_key_file=write(tmp_path / "keys", "secret\n"))
    assert changed.engine.max_queue_size == 3
    assert (changed.server.host, changed.server.api_keys) == ("::1", ("secret",))
