"""The user's cache folder: one place decides where it is and who may write to it."""

import os
import stat
from pathlib import Path


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/trtcb``, by default ``~/.cache/trtcb``. A relative path is ignored, as the XDG spec asks."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "trtcb"


def make_cache_root() -> Path:
    """Create the folder for this user alone, whatever the umask.

    One of this user's that others may write to (an umask of 002 is common) is closed to them; one of somebody else is
    left as it is, for the caller to judge. Raises ``OSError``.
    """
    root = cache_root()
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    state = root.lstat()
    if stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and state.st_mode & 0o022:
        root.chmod(stat.S_IMODE(state.st_mode) & ~0o022)
    return root
