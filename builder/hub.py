"""Models on the Hugging Face hub: its client downloads and caches them; its errors are reworded to name the model."""

import re
from pathlib import Path

from trtcb.errors import ModelNotFoundError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# A repository may hold the weights several times over (PyTorch, ONNX, original layout).
_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
]


def is_hub_id(source: str) -> bool:
    """Whether ``source`` has the form ``owner/name``."""
    return _HUB_ID.fullmatch(source) is not None


def fetch_snapshot(hub_id: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Download what a build needs, or find it in the hub's cache, and return the folder.

    Raises :class:`ModelNotFoundError` if the model does not exist, is not open to this user, or the hub cannot be
    reached.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(hub_id, revision=revision, token=token, allow_patterns=_PATTERNS))
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{hub_id} is open only to users who accepted its terms: accept them on its hub page, then set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{hub_id} has no revision {revision!r} on the hub: check --revision.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"There is no model {hub_id} on the hub, or it is private: check the spelling, or set HF_TOKEN."
        ) from error
    except Exception as error:  # offline, proxy, timeout, disk: the classes differ with the client's version
        reason = f"{error}".strip().splitlines()
        raise ModelNotFoundError(
            f"{hub_id} is not in the local cache and the hub cannot be reached "
            f"({reason[0] if reason else type(error).__name__}): "
            "connect to the network, or give the path of a local model folder or .gguf file."
        ) from error


def cached_snapshot(hub_id: str) -> Path | None:
    """Folder of the last fetched revision if its weights are there; looks at the disk only."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if (snapshot / "config.json").is_file() and any(snapshot.glob("model*.safetensors")) else None
