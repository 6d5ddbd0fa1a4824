"""Turns the JSON of a plan into records, trusting none of it: each value is checked before it is used."""

import re
from typing import Any

from trtcb.plan_format import (
    ITEM_BYTES,
    MAX_FILE_BYTES,
    MAX_SECTIONS,
    MAX_TENSORS,
    SCHEMA_VERSION,
    SECTION_ALIGNMENT,
    TENSOR_ALIGNMENT,
    TENSOR_TABLE,
    WEIGHTS,
    FormatError,
    PlanHeader,
    SectionInfo,
    TensorInfo,
    align,
)
from trtcb.spec import (
    MAX_EOS_TOKENS,
    MAX_ROPE_FACTOR,
    MAX_ROPE_THETA,
    BuildLimits,
    KVDtype,
    ModelSpec,
    RopeScaling,
    WeightDtype,
)

_MAX_TEXT = 4096
_MAX_ENTRIES = 256
_MAX_DIMENSIONS = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

_HEADER_FIELDS = (
    *("schema_version", "target", "fingerprint", "model", "weight_dtype", "kv_dtype", "limits", "source", "versions"),
    "sections",
)
_MODEL_SIZES = {  # inclusive upper bounds; the lower one is 1
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_layers": 4096,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 4096,
    "vocab_size": 1 << 24,
    "max_position": 1 << 28,
}
_MODEL_FIELDS = (
    "name",
    *_MODEL_SIZES,
    *("rms_norm_eps", "rope_theta", "rope_scaling", "tie_embeddings", "bos_token_id", "eos_token_ids"),
)
_SCALING_FIELDS = ("kind", "factor", "low_freq_factor", "high_freq_factor", "original_max_position")
_LIMITS = {"max_batch_size": 1 << 16, "max_num_tokens": 1 << 24, "max_seq_len": 1 << 28, "block_size": 4096}


def parse_header(data: Any) -> PlanHeader:
    """Check the header's own fields (the section table is :func:`parse_sections`); raises ``FormatError``."""
    data = _object(data, "header", _HEADER_FIELDS)
    schema = _integer(data["schema_version"], "schema_version", 0, 1 << 31)
    if schema != SCHEMA_VERSION:
        raise FormatError(f"header field 'schema_version' is {schema}, this trtcb reads {SCHEMA_VERSION}")
    limits = _object(data["limits"], "limits", tuple(_LIMITS))
    return PlanHeader(
        target=_name(data["target"], "target"),
        fingerprint=_strings(data["fingerprint"], "fingerprint"),
        model=_model(data["model"]),
        weight_dtype=_choice(data["weight_dtype"], "weight_dtype", [d.value for d in WeightDtype]),
        kv_dtype=KVDtype(_choice(data["kv_dtype"], "kv_dtype", [d.value for d in KVDtype])),
        limits=BuildLimits(**{k: _integer(limits[k], f"limits.{k}", 1, top) for k, top in _LIMITS.items()}),
        source=_strings(data["source"], "source"),
        versions=_strings(data["versions"], "versions"),
    )


def parse_sections(data: Any, *, body_start: int, file_size: int) -> tuple[SectionInfo, ...]:
    """Check the section table, whose offsets must be the ones its sizes imply and end where the file ends."""
    rows = _list(data, "sections", MAX_SECTIONS)
    sections: list[SectionInfo] = []
    expected = 0
    end = body_start
    for index, row in enumerate(rows):
        where = f"sections[{index}]"
        row = _object(row, where, ("name", "offset", "size", "sha256"))
        name = _name(row["name"], f"{where}.name")
        if any(s.name == name for s in sections):
            raise FormatError(f"header field '{where}.name' repeats section '{name}'")
        offset = _integer(row["offset"], f"{where}.offset", 0, MAX_FILE_BYTES)
        size = _integer(row["size"], f"{where}.size", 0, MAX_FILE_BYTES)
        if offset != expected:
            raise FormatError(f"section '{name}' claims offset {offset}, but must start at {expected}")
        end = body_start + offset + size
        if end > file_size:
            raise FormatError(f"section '{name}' ends at byte {end}, beyond the file's {file_size}")
        if not isinstance(row["sha256"], str) or not _SHA256.fullmatch(row["sha256"]):
            raise FormatError(f"header field '{where}.sha256' is not a SHA-256 in hexadecimal")
        sections.append(SectionInfo(name, body_start + offset, size, row["sha256"]))
        expected = align(offset + size, SECTION_ALIGNMENT)
    names = {s.name for s in sections}
    for required in (TENSOR_TABLE, WEIGHTS):
        if required not in names:
            raise FormatError(f"section '{required}' is missing")
    if end != file_size:
        raise FormatError(f"section '{sections[-1].name}' ends at byte {end}, but the file at {file_size}")
    return tuple(sections)


def parse_tensors(data: Any, *, weights_size: int) -> dict[str, TensorInfo]:
    """Check the tensor table, whose offsets must follow from its shapes and end where section ``weights`` ends."""
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    end = 0
    for index, row in enumerate(_list(data, "tensors", MAX_TENSORS, what="section")):
        where = f"tensors[{index}]"
        row = _object(row, where, ("name", "dtype", "shape", "offset"), what="section")
        name = _text(row["name"], f"{where}.name", what="section")
        if not name or name in tensors:
            raise FormatError(f"section '{where}.name' is empty or repeats tensor '{name}'")
        dtype = _choice(row["dtype"], f"{where}.dtype", list(ITEM_BYTES), what="section")
        shape = tuple(
            _integer(n, f"{where}.shape", 1, MAX_FILE_BYTES, what="section")
            for n in _list(row["shape"], f"{where}.shape", _MAX_DIMENSIONS, what="section")
        )
        offset = _integer(row["offset"], f"{where}.offset", 0, MAX_FILE_BYTES, what="section")
        info = TensorInfo(name, dtype, shape, offset)
        if offset != expected:
            raise FormatError(
                f"tensor '{name}' claims offset {offset} in section 'weights', but must start at {expected}"
            )
        if info.end > weights_size:
            raise FormatError(f"tensor '{name}' reaches beyond section 'weights' ({info.end} of {weights_size} bytes)")
        tensors[name] = info
        end = info.end
        expected = align(end, TENSOR_ALIGNMENT)
    if end != weights_size:
        raise FormatError(f"section 'weights' has {weights_size} bytes, but its tensors end at {end}")
    return tensors


def _model(data: Any) -> ModelSpec:
    data = _object(data, "model", _MODEL_FIELDS)
    _text(data["name"], "model.name")
    for key, top in _MODEL_SIZES.items():
        _integer(data[key], f"model.{key}", 1, top)
    if data["num_heads"] % data["num_kv_heads"]:
        raise FormatError("header field 'model.num_heads' is not a multiple of 'model.num_kv_heads'")
    if data["head_dim"] % 2:
        raise FormatError("header field 'model.head_dim' is odd; rotary embedding needs pairs")
    _number(data["rms_norm_eps"], "model.rms_norm_eps", 0.0, 1.0)
    _number(data["rope_theta"], "model.rope_theta", 1.0, MAX_ROPE_THETA)
    if data["rope_scaling"] is not None:
        _scaling(data["rope_scaling"])
    if not isinstance(data["tie_embeddings"], bool):
        raise FormatError("header field 'model.tie_embeddings' must be true or false")
    last_id = data["vocab_size"] - 1
    if data["bos_token_id"] is not None:
        _integer(data["bos_token_id"], "model.bos_token_id", 0, last_id)
    for token in _list(data["eos_token_ids"], "model.eos_token_ids", MAX_EOS_TOKENS):
        _integer(token, "model.eos_token_ids", 0, last_id)
    return ModelSpec.from_json(data)


def _scaling(data: Any) -> None:
    data = _object(data, "model.rope_scaling", _SCALING_FIELDS)
    _choice(data["kind"], "model.rope_scaling.kind", list(RopeScaling.__annotations__["kind"].__args__))
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        _number(data[key], f"model.rope_scaling.{key}", 0.0, MAX_ROPE_FACTOR)
    _integer(data["original_max_position"], "model.rope_scaling.original_max_position", 1, 1 << 28)


def _object(value: Any, where: str, fields: tuple[str, ...], what: str = "header field") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} '{where}' must be an object")
    for field in fields:
        if field not in value:
            raise FormatError(f"{what} '{where}' lacks '{field}'")
    for key in value:
        if key not in fields:
            raise FormatError(f"{what} '{where}' has an unknown entry '{key[:64]}'")
    return value


def _list(value: Any, where: str, most: int, what: str = "header field") -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{what} '{where}' must be a list")
    if len(value) > most:
        raise FormatError(f"{what} '{where}' has {len(value)} entries, at most {most} are allowed")
    return value


def _integer(value: Any, where: str, least: int, most: int, what: str = "header field") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise FormatError(f"{what} '{where}' must be an integer from {least} to {most}, not {_shown(value)}")
    return value


def _number(value: Any, where: str, above: float, most: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise FormatError(f"header field '{where}' must be a number, not {_shown(value)}")
    if not above < value <= most:  # refuses NaN, and compares integers too large for a float
        raise FormatError(f"header field '{where}' must be above {above:g} and at most {most:g}, not {_shown(value)}")


def _text(value: Any, where: str, what: str = "header field") -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise FormatError(f"{what} '{where}' must be a string of at most {_MAX_TEXT} characters")
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise FormatError(f"header field '{where}' must be a short lower-case name, not {_shown(value)}")
    return value


def _choice(value: Any, where: str, choices: list[str], what: str = "header field") -> str:
    if not isinstance(value, str) or value not in choices:
        raise FormatError(f"{what} '{where}' must be one of {', '.join(choices)}, not {_shown(value)}")
    return value


def _strings(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > _MAX_ENTRIES:
        raise FormatError(f"header field '{where}' must be an object of at most {_MAX_ENTRIES} strings")
    return {_text(k, where): _text(v, f"{where}.{k[:64]}") for k, v in value.items()}


def _shown(value: Any) -> str:
    # A hostile integer may have thousands of digits, and converting more than 4300 raises.
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge integer"
    return repr(value)[:64]
