"""Where a setting comes from: flag > YAML file > preset > default. Every resolved value remembers its origin."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from trtcb.errors import TrtcbError, UsageError

# Names under which other engines' users know our settings; accepted in files and, in kebab case, as flags.
ALIASES: Mapping[str, str] = {
    "max_num_seqs": "max_batch_size",
    "max_model_len": "max_seq_len",
    "max_num_batched_tokens": "max_num_tokens",
    "kv_cache_dtype": "kv_dtype",
    "tokens_per_block": "block_size",
    "dtype": "weight_dtype",
    "kv_memory": "kv_memory_bytes",
    "priority_ageing": "priority_ageing_s",
    "shutdown_timeout": "shutdown_timeout_s",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
}

C = TypeVar("C", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[C]):
    """A configuration and, for each of its fields, where the value came from."""

    config: C
    origins: Mapping[str, str]

    def lines(self) -> list[str]:
        """One line a setting, ``name = value  (origin)``, for ``--show-config``."""
        shown = {name: _shown(value) for name, value in self.config}
        name_width = max(map(len, shown))
        value_width = max(map(len, shown.values()))
        return [f"{n:<{name_width}} = {v:<{value_width}}  ({self.origins[n]})" for n, v in shown.items()]


def resolve(
    kind: type[C],
    *,
    flags: Mapping[str, Any],
    config_file: Path | None = None,
    preset: str | None = None,
) -> Resolved[C]:
    """Merge all origins into a checked ``kind``. Flags that are ``None`` were not given.

    ``preset`` names a file under ``configs/serve``. Raises ``UsageError`` naming the setting, its origin and the fix.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = [
        (f"preset {preset}", {} if preset is None else _preset(preset)),
        (str(config_file), {} if config_file is None else _yaml(config_file.name, _text(config_file))),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ]
    for origin, layer in layers:
        for key, value in layer.items():
            name = _field(kind, key, origin)
            values[name] = value
            origins[name] = origin
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        raise UsageError(_explain(error, origins)) from None
    return Resolved(config, {name: origins.get(name, "default") for name in kind.model_fields})


def preset_names() -> list[str]:
    """Names of the serving presets that come with trtcb."""
    files = (resources.files("trtcb.configs") / "serve").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing if no known name is near."""
    close = get_close_matches(name, list(known), 1)
    return f"; did you mean '{close[0]}'?" if close else ""


def load_yaml(name: str, text: str) -> Any:
    """Read YAML without aliases, through which a few lines can stand for gigabytes; raises ``UsageError``."""
    try:
        return yaml.load(text, Loader=_PlainLoader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number that is none
        raise UsageError(f"{name} is not valid YAML: {' '.join(str(error).split())}.") from None


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed, write the value out")
        return super().compose_node(parent, index)


def _preset(name: str) -> dict[str, Any]:
    known = preset_names()
    if name not in known:
        hint = did_you_mean(name, known) or f"; there are {', '.join(known)}."
        raise UsageError(f"There is no preset '{name}'{hint}")
    return _yaml(f"preset {name}", (resources.files("trtcb.configs") / "serve" / f"{name}.yaml").read_text("utf-8"))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise UsageError(f"--config: there is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path} cannot be read: {error}.") from None


def _yaml(name: str, text: str) -> dict[str, Any]:
    data = load_yaml(name, text)
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{name} must hold settings as 'name: value' lines.")
    return data


def _field(kind: type[BaseModel], key: str, origin: str) -> str:
    name = key.replace("-", "_")
    name = ALIASES.get(name, name) if name not in kind.model_fields else name
    if name not in kind.model_fields:
        hint = did_you_mean(key.replace("-", "_"), [*kind.model_fields, *ALIASES])
        raise UsageError(f"{origin}: there is no setting '{key}'{hint or '.'}")
    return name


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    complaints = []
    for item in error.errors(include_url=False, include_context=True):
        cause = item.get("ctx", {}).get("error")
        text = str(cause) if isinstance(cause, (TrtcbError, ValueError)) else item["msg"]
        name = str(item["loc"][0]) if item["loc"] else ""
        if item["type"] == "missing":
            complaints.append(f"{name} is required: give --{name.replace('_', '-')}")
        elif name:
            complaints.append(f"{name} ({origins.get(name, 'default')}): {text}, not {_shown(item['input'])}")
        else:
            complaints.append(text)
    return "; ".join(complaints) + "."


def _shown(value: Any) -> str:
    if isinstance(value, (str, int, float, Path)) and not isinstance(value, bool):
        return str(value)
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
