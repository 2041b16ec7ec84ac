"""What the exact run said, kept on disk: computed once, read again for every scheme, and in no one's peak of memory."""

from __future__ import annotations

import shutil
import tempfile

import torch


class ExactLogits:
    """Logits of an exact run, ``[W, T, V]``, in a temporary file without a name. It is gone when this is closed.

    Args:
        windows, length: of the run.

    A window is written from its first token to its last, a chunk at a time, and read in any order.
    """

    def __init__(self, windows: int, length: int) -> None:
        self.windows, self.length = windows, length
        self._file = tempfile.TemporaryFile(prefix="kvbits-")  # noqa: SIM115
        self._dtype: torch.dtype | None = None
        self._vocabulary = 0

    def close(self) -> None:
        """Give the disk back."""
        self._file.close()

    def write(self, logits: torch.Tensor) -> None:
        """The next chunk, ``[q, V]``.

        Raises:
            ValueError: at the first chunk, if the disk has not enough room for all.
        """
        if self._dtype is None:
            self._dtype, self._vocabulary = logits.dtype, logits.shape[-1]
            self._refuse_if_too_large()
        plain = logits.detach().contiguous().cpu().view(torch.uint8)
        self._file.write(plain.numpy().data)

    def read(self, window: int, first: int, last: int) -> torch.Tensor:
        """Tokens ``first .. last - 1`` of a window, ``[last - first, V]`` on the CPU, in the dtype of the model."""
        assert self._dtype is not None, "nothing was written yet"
        row = self._vocabulary * self._dtype.itemsize
        buffer = bytearray((last - first) * row)
        self._file.seek((window * self.length + first) * row)
        found = self._file.readinto(buffer)
        assert found == len(buffer), f"window {window} ends before token {last}"
        return torch.frombuffer(buffer, dtype=self._dtype).view(last - first, self._vocabulary)

    def _refuse_if_too_large(self) -> None:
        assert self._dtype is not None
        needed = self.windows * self.length * self._vocabulary * self._dtype.itemsize
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ValueError(
                f"the logits of the exact run, {self.windows} x {self.length} tokens over {self._vocabulary:,}, need "
                f"{needed / 1e9:.1f} GB on disk, and {folder} has {free / 1e9:.1f} GB free; give fewer windows, a "
                "smaller length, or another folder in the variable TMPDIR"
            )
