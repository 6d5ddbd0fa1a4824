"""The file that holds the reference's logits until the plan's come."""

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from trtcb.errors import TrtcbError
from trtcb.evaluation.logit_file import LogitFile

VOCAB = 1000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may exceed 64 KiB: what a full disk answers, without filling one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_come_back_bit_for_bit_however_they_are_cut(folder: Path) -> None:
    rows = np.random.default_rng(0).normal(0, 10, (300, VOCAB)).astype(np.float32)
    rows[0, :4] = -np.inf, np.inf, np.nan, -0.0
    with LogitFile(len(rows), VOCAB) as file:
        for begin, end in ((0, 1), (1, 256), (256, 300)):
            scratch = rows[begin:end].copy()
            file.append(scratch)
            scratch[:] = 0  # the next step overwrites what was appended
        found = [file.read(count) for count in (100, 7, 193)]
        assert np.array_equal(np.concatenate(found).view(np.uint32), rows.view(np.uint32))
        with pytest.raises(ValueError, match="0 are left"):
            file.read(1)


def open_sizes(folder: Path) -> list[int]:
    """Bytes on the disk of each file of ``folder`` that this process has open, named or not."""
    sizes = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if os.readlink(link).startswith(str(folder)):
                sizes.append(os.stat(link).st_blocks * 512)
    return sizes


def test_it_has_no_name_and_its_room_from_the_beginning_to_the_end(folder: Path) -> None:
    with LogitFile(50, VOCAB):
        assert list(folder.iterdir()) == []
        [size] = open_sizes(folder)
        assert size >= 50 * VOCAB * 4
    assert open_sizes(folder) == []


def test_a_disk_without_room_is_told_before_anything_is_scored(folder: Path, small_files: None) -> None:
    with pytest.raises(TrtcbError, match=r"logits take 3\.8 MiB.*TMPDIR.*--max-tokens"):
        LogitFile(1000, VOCAB)
    assert open_sizes(folder) == []
    with LogitFile(16, VOCAB) as file:
        file.append(np.ones((16, VOCAB), np.float32))
        assert file.read(16).sum() == 16 * VOCAB


def test_a_disk_that_fills_up_meanwhile_is_told_the_same_way(
    folder: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtcb.evaluation.logit_file._reserve", lambda descriptor, size: None)
    with LogitFile(1000, VOCAB) as file, pytest.raises(TrtcbError, match="TMPDIR"):
        file.append(np.ones((1000, VOCAB), np.float32))


@pytest.mark.parametrize("rows", [np.zeros((2, VOCAB + 1), np.float32), np.zeros((2, VOCAB)), np.zeros(VOCAB)])
def test_rows_of_another_shape_or_type_are_refused(folder: Path, rows: np.ndarray) -> None:
    with LogitFile(4, VOCAB) as file, pytest.raises(ValueError, match="rows are float32"):
        file.append(rows)
