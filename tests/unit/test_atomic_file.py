"""What can be replaced is told before the work, and a file of any legal name can be written."""

import os

import pytest

from trtcb.atomic_file import atomic_file, check_replaceable
from trtcb.errors import UsageError


def test_the_longest_name_can_be_written(tmp_path):
    path = tmp_path / ("x" * 255)
    with atomic_file(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["x" * 256, "file/below"])
def test_names_that_cannot_be_written_are_refused_beforehand(tmp_path, name):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UsageError, match="cannot be written"):
        check_replaceable(tmp_path / name)


def test_a_folder_that_takes_no_files_is_refused_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UsageError, match="takes no files"):
        check_replaceable(tmp_path / "new" / "x.plan")


def test_new_folders_are_fine(tmp_path, monkeypatch):
    check_replaceable(tmp_path / "new" / "deep" / "x.plan")
    monkeypatch.chdir(tmp_path)
    check_replaceable((tmp_path / "x.plan").relative_to(tmp_path))
