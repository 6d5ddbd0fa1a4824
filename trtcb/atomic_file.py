"""A file that appears under its name complete, or not at all."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trtcb.errors import UsageError

# What file systems without unnamed files (NFS, old overlayfs) answer to O_TMPFILE.
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def check_replaceable(path: Path) -> None:
    """Raise ``UsageError`` unless ``path`` can be written: a device, pipe or link must not be replaced.

    For finding out before hours of work, not after them.
    """
    try:
        if path.name in ("", "..") or path.is_symlink() or (path.exists() and not path.is_file()):
            raise UsageError(f"'{path}' is not a regular file and will not be replaced: name a file to write")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:  # such as a name that is too long
        raise UsageError(f"'{str(path)[:60]}' cannot be written ({error}): name another file") from None
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"'{path}' cannot be written, because {folder} takes no files: name another folder")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open ``path`` for writing; it replaces the old file when the block ends without an exception, durably.

    The bytes go to an unnamed file in the same folder where the file system has those, so that even SIGKILL leaves
    nothing, and elsewhere to a hidden temporary name, which any exception (Ctrl-C too) removes. Missing folders are
    made, and unmade after an exception.
    """
    check_replaceable(path)
    folder = path.parent
    temporary = folder / f".trtcb-{secrets.token_hex(6)}.tmp"  # of its own length, as the name may have the longest
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, unnamed = _create(folder, temporary)
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if unnamed:
                # `src_dir_fd` means nothing for an absolute path, but without it Python calls link(2), which links the
                # symbolic link under /proc itself instead of following it.
                os.link(f"/proc/self/fd/{file.fileno()}", temporary, src_dir_fd=file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        with suppress(OSError):  # someone else put a file there
            for parent in made:
                parent.rmdir()
        raise
    _sync_folder(folder)


def _create(folder: Path, temporary: Path) -> tuple[int, bool]:
    """Return a descriptor of a new file, and whether that file has no name yet."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), True
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
