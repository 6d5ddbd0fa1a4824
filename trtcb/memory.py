"""Sizes as people write them, how much memory this machine has, and what of it the KV pool may take."""

import re
from collections.abc import Iterator
from pathlib import Path

from trtcb.errors import UsageError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)
_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for "none"


def parse_size(text: str | int) -> int:
    """Bytes of ``"2GiB"``, ``"500 MB"``, ``"1.5g"`` (decimal without ``i``) or a number; raises ``UsageError``."""
    if isinstance(text, int) and not isinstance(text, bool) and abs(text) <= _NO_LIMIT:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].upper() not in _UNITS:
        shown = text[:40] if isinstance(text, str) else "a huge number" if type(text) is int else repr(text)
        raise UsageError(
            f"'{shown}' is not a size: write a number of bytes or one with a unit, such as 512MiB or 2GiB."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_size(num_bytes: int) -> str:
    """Write bytes with the largest binary unit that leaves at least one before the point."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def total_memory() -> int:
    """Bytes of main memory, or of the container's limit if that is lower."""
    return min([_meminfo("MemTotal"), *(limit for limit, _ in _cgroups())])


def available_memory() -> int:
    """Bytes that can be taken without swapping, within every limit of the container.

    A container's reclaimable file cache counts as available, as it does in ``MemAvailable``.
    """
    return max(0, min([_meminfo("MemAvailable"), *(limit - used for limit, used in _cgroups())]))


def pool_memory(available_bytes: int, resident_bytes: int, fraction: float) -> int:
    """Bytes the KV pool may take: what is left of ``fraction`` of the available memory beside ``resident_bytes``."""
    return max(0, int(available_bytes * fraction) - resident_bytes)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _cgroups() -> Iterator[tuple[int, int]]:
    """(limit, bytes used and not reclaimable) of each control group around this process that limits memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":
            root, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # Inside a container `path` may name a folder only the host sees; its root is then the group itself.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if (folder / limit).is_file() and (most := _number(folder / limit)) is not None and most < _NO_LIMIT:
                yield most, (_number(folder / used) or 0) - _reclaimable(folder / "memory.stat", cache)
            if folder == root:
                break


def _reclaimable(stat: Path, key: str) -> int:
    try:
        return int(dict(line.split(maxsplit=1) for line in stat.read_text().splitlines()).get(key, "0"))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # unreadable, or the word "max"
        return None
