"""The reference's logits on the disk, until the plan's come: full rows, since KL needs every one of their entries."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from trtcb.errors import TrtcbError
from trtcb.executor.runtime import Float32
from trtcb.memory import format_size

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL)  # some file systems; writing then tells if the disk is full
_ROW_DTYPE = np.dtype(np.float32)


class LogitFile:
    """``num_rows`` rows of ``vocab_size`` logits, bit for bit: all are appended, then all are read in the same order.

    A context manager. The file lies in the temporary folder (``TMPDIR``), four bytes an entry, and has no name there:
    its room is given back when the context ends or the process does, however it ends. Raises :class:`TrtcbError` at
    once if the disk cannot hold that much.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._size = num_rows * vocab_size * _ROW_DTYPE.itemsize
        self._rewound = False
        with ExitStack() as stack, self._room():
            self._file = stack.enter_context(tempfile.TemporaryFile(prefix="trtcb-logits-"))
            _reserve(self._file.fileno(), self._size)
            stack.pop_all()  # from here on, our own context closes it

    def __enter__(self) -> "LogitFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, rows: Float32) -> None:
        """Keep a copy of ``rows [n, vocab]``; raises :class:`TrtcbError` if the disk is full."""
        if rows.dtype != _ROW_DTYPE or rows.ndim != 2 or rows.shape[1] != self._vocab_size:
            raise ValueError(f"rows are float32 [n, {self._vocab_size}], not {rows.dtype} {list(rows.shape)}")
        with self._room():
            self._file.write(rows.tobytes())

    def read(self, num_rows: int) -> Float32:
        """The next rows, ``[num_rows, vocab]``, from the first one on."""
        if not self._rewound:
            with self._room():
                self._file.seek(0)  # writes what is still buffered
            self._rewound = True
        data = self._file.read(num_rows * self._vocab_size * _ROW_DTYPE.itemsize)
        rows: Float32 = np.frombuffer(data, _ROW_DTYPE).reshape(-1, self._vocab_size)
        if len(rows) != num_rows:
            raise ValueError(f"{num_rows} rows were asked for, and {len(rows)} are left")
        return rows

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Say what to do where the temporary folder takes no more."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            folder = tempfile.gettempdir()
            raise TrtcbError(
                f"the reference's logits take {format_size(self._size)} until the plan is scored, and {folder} has "
                f"{format_size(shutil.disk_usage(folder).free)} free: set TMPDIR to a folder with more room, or score "
                "fewer tokens (--max-tokens)"
            ) from error


def _reserve(descriptor: int, size: int) -> None:
    """Take the disk's room now, so that a full disk is found before minutes of work, not after them."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
