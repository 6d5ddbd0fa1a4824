import pytest

from trtcb.errors import UsageError
from trtcb.memory import available_memory, format_size, parse_size, pool_memory, total_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30), ("2gib", 2 << 30), ("1.5 GiB", 3 << 29), ("500MB", 500_000_000), ("1k", 1000),
        ("64Ki", 65536), ("4096", 4096), ("0", 0), (17, 17), ("1T", 10**12),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "2 parsecs", "1e9", "2iB", "nan", "9" * 400, "1." + "9" * 400, 10**400, True, None, 1.5]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5.0 TiB")]
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


def test_this_machine() -> None:
    assert 0 < available_memory() <= total_memory()


def test_pool_memory() -> None:
    assert pool_memory(1000, 300, 0.5) == 200
    assert pool_memory(1000, 600, 0.5) == 0
