"""A safetensors file whose every byte is covered by a digest: JSON data and tensors, read by mapping them into memory.

Any reader of safetensors can open it: 8 bytes with the length of the header, the header in JSON, then the tensors one
after the other. What is added stands in the header's ``__metadata__``, the first two at a fixed place::

    {"__metadata__":{"kvbits.cache":"1","kvbits.sha256":"(of the header, with zeros here)","about":"(JSON)",
     "sha256":"(JSON: of each tensor)"},"3.pool":{"dtype":"U8","shape":[46,3,8832],"data_offsets":[0,1218816]},...}

Tensors are aligned to their elements, and those whose length is a multiple of 64 bytes, which come first, to 64 bytes.
"""

from __future__ import annotations

import concurrent.futures
import copy
import hashlib
import json
import math
import mmap
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from kvbits.files.atomic import replacing

FORMAT = 1
"""Number of the format that is written; later ones are refused."""

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}

_ALIGNMENT_BYTES = 64
_PIECE_BYTES = 2**25
_LONGEST_HEADER_BYTES = 10**8
"""Of safetensors itself."""

_BEGIN = re.compile(rb'\{"__metadata__":\{"kvbits\.cache":"(\d+)","kvbits\.sha256":"([0-9a-f]{64})"')
_NO_DIGEST = "0" * 64
_OWN = "__metadata__"


class Damaged(ValueError):
    """A file that is not what was written."""


class Foreign(ValueError):
    """A file that is something else, or whose very beginning is damaged."""


class Newer(ValueError):
    """A file of a later release."""


@dataclass(frozen=True)
class Selection:
    """Some rows of a tensor, gathered only while they are written.

    Attributes:
        source: ``[N, ...]``.
        index: which of its rows, int64 ``[n]``; None is the first ``count``.
        count: how many.
        blanks: spans ``[first, last)`` of the last dimension that hold nothing, and are written as zeros.
    """

    source: torch.Tensor
    index: torch.Tensor | None
    count: int
    blanks: tuple[tuple[int, int], ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.source.shape[1:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.source.itemsize

    def rows(self, first: int, last: int) -> torch.Tensor:
        rows = self.source[first:last] if self.index is None else self.source[self.index[first:last]]
        if self.blanks:
            rows = rows.clone() if self.index is None else rows
            for begin, end in self.blanks:
                rows[..., begin:end] = 0
        return rows


Content: TypeAlias = "torch.Tensor | Selection"


class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int


# -- writing -----------------------------------------------------------------------------------------------------------


def write(path: Path, about: Any, tensors: Mapping[str, Content]) -> int:
    """Write a file as a whole or not at all, and return its length in bytes.

    Args:
        about: plain JSON data.
        tensors: on any device; they are copied a piece at a time.

    Raises:
        OSError: if it cannot be written; what was at ``path`` is still there.
    """
    entries = _laid_out(tensors)
    digests = dict.fromkeys(entries, _NO_DIGEST)
    length = len(_header(about, entries, digests))
    try:
        with replacing(path) as beside, open(beside, "r+b") as file:
            file.seek(length)
            for name in entries:
                sha = hashlib.sha256()
                for piece in _pieces(tensors[name]):
                    sha.update(piece)
                    file.write(piece)
                digests[name] = sha.hexdigest()
            file.seek(0)
            file.write(_header(about, entries, digests))
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror}; what was there before is as it was"
        raise OSError(error.errno, reason) from None
    return length + sum(entry.last - entry.first for entry in entries.values())


def length_of(about: Any, tensors: Mapping[str, Content]) -> int:
    """Bytes that :func:`write` would write."""
    entries = _laid_out(tensors)
    header = _header(about, entries, dict.fromkeys(entries, _NO_DIGEST))
    return len(header) + sum(entry.last - entry.first for entry in entries.values())


def _laid_out(tensors: Mapping[str, Content]) -> dict[str, _Entry]:
    """Where each tensor lies, in an order that aligns all of them without gaps, which safetensors does not allow."""

    def alignment(name: str) -> int:
        x = tensors[name]
        return _ALIGNMENT_BYTES if x.nbytes % _ALIGNMENT_BYTES == 0 else x.dtype.itemsize

    entries, offset = {}, 0
    for name in sorted(tensors, key=alignment, reverse=True):
        x = tensors[name]
        if x.dtype not in _TYPE_NAMES:
            raise ValueError(f"{name} is {x.dtype}, which cannot be stored; allowed are {', '.join(_TYPES)}")
        entries[name] = _Entry(x.dtype, tuple(x.shape), offset, offset + x.nbytes)
        offset += x.nbytes
    return entries


def _header(about: Any, entries: Mapping[str, _Entry], digests: Mapping[str, str]) -> bytes:
    """The length and the header, as long as they will be in the end whatever the digests are."""
    words = {
        "kvbits.cache": str(FORMAT),
        "kvbits.sha256": _NO_DIGEST,
        "about": _json(about),
        "sha256": _json(digests),
    }
    header: dict[str, Any] = {_OWN: words}
    for name, entry in entries.items():
        where = [entry.first, entry.last]
        header[name] = {"dtype": _TYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": where}
    text = _json(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    text = text.replace(_NO_DIGEST.encode(), hashlib.sha256(text).hexdigest().encode(), 1)
    return len(text).to_bytes(8, "little") + text


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _pieces(x: Content) -> Iterator[memoryview]:
    """The bytes of a tensor, so many at a time."""
    if isinstance(x, torch.Tensor):
        flat = x.detach().contiguous().reshape(-1)
        x = Selection(flat, None, len(flat))
    row_bytes = x.nbytes // max(1, x.count)
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    for first in range(0, x.count, step):
        rows = x.rows(first, min(x.count, first + step))
        yield rows.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


# -- reading -----------------------------------------------------------------------------------------------------------


class Sealed:
    """A file that is open. Its header has been read and verified, its tensors not yet.

    Attributes:
        path: where it was.
        about: what :func:`write` was given.
        nbytes: length of the file.

    Raises:
        FileNotFoundError: if there is none.
        Damaged: if it is truncated, or another digest comes out of its header.
        Newer: if it has a later format.
        Foreign: if it is something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._first: Sealed | None = None
        if path.is_dir():
            raise Foreign(f"{path} is a folder, not the file of a cache")
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        with open(path, "rb") as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = self._verified(length, file.read(min(length, _LONGEST_HEADER_BYTES)))
            self._data = 8 + length
            try:
                words = json.loads(header)
                end = max((entry["data_offsets"][1] for name, entry in words.items() if name != _OWN), default=0)
                self._expect(self._data + end)
                own = words.pop(_OWN)
                self.about: Any = json.loads(own["about"])
                self._digests: dict[str, str] = json.loads(own["sha256"])
                self._entries = {name: self._entry(name, entry) for name, entry in words.items()}
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                if isinstance(error, Damaged):
                    raise
                raise Damaged(f"{path} is damaged: {type(error).__name__} {error} in its header") from None
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._map = mmap.mmap(self._file, self.nbytes, access=mmap.ACCESS_COPY)

    def remapped(self) -> Sealed:
        """The same file, mapped once more: what is done to tensors of one does not show in those of the other."""
        twin = copy.copy(self)
        twin._map = mmap.mmap(self._file, self.nbytes, access=mmap.ACCESS_COPY)
        twin._first = self  # which closes the file
        return twin

    def _verified(self, length: int, header: bytes) -> bytes:
        """The header, if it is one of ours and as it was written."""
        begin = _BEGIN.match(header)
        if begin is None:
            raise Foreign(f"{self.path} is no file of a kvbits cache{_what_else(header)}")
        if int(begin[1]) > FORMAT:
            raise Newer(
                f"{self.path} has format {int(begin[1])}, and this release of kvbits reads formats up to {FORMAT}: "
                "update kvbits"
            )
        if len(header) < length:
            self._expect(8 + length)
        unsealed = header[: begin.start(2)] + _NO_DIGEST.encode() + header[begin.end(2) :]
        if hashlib.sha256(unsealed).hexdigest().encode() != begin[2]:
            raise Damaged(f"{self.path} is damaged: its header is not as it was written")
        return header

    def _expect(self, nbytes: int) -> None:
        if self.nbytes != nbytes:
            what = "truncated" if self.nbytes < nbytes else "damaged"
            raise Damaged(
                f"{self.path} is {what}: it has {self.nbytes:,} bytes, and was written with {nbytes:,} or more"
            )

    def _entry(self, name: str, entry: Mapping[str, Any]) -> _Entry:
        dtype, shape, (first, last) = _TYPES[entry["dtype"]], tuple(map(int, entry["shape"])), entry["data_offsets"]
        if not 0 <= first <= last <= self.nbytes - self._data or min(shape, default=0) < 0:
            raise ValueError(f"{name} lies outside the file")
        if last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has another length than its shape")
        return _Entry(dtype, shape, first, last)

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entries[name].shape

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        return self._entries[name].last - self._entries[name].first

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, mapped: its bytes are read when they are looked at, and changes to it stay in memory.

        Raises:
            Damaged: if there is none of that name.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise Damaged(f"{self.path} lacks {name!r}")
        if entry.first == entry.last:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count, offset = math.prod(entry.shape), self._data + entry.first
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=offset).reshape(entry.shape)

    def verify(self, *names: str) -> None:
        """Read tensors (all of them, if none is named) and raise Damaged where one is not as it was written."""
        chosen = list(names) or self.names
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as threads:
            for name, found in zip(chosen, threads.map(self._digest, chosen), strict=True):
                if found != self._digests.get(name):
                    raise Damaged(f"{self.path} is damaged: {name!r} is not as it was written")

    def _digest(self, name: str) -> str:
        entry = self._entries[name]
        with memoryview(self._map) as whole, whole[self._data + entry.first : self._data + entry.last] as part:
            return hashlib.sha256(part).hexdigest()


def _what_else(header: bytes) -> str:
    """What a file is that is no cache, as far as its first bytes tell."""
    if not header:
        return ": it is empty"
    try:
        words = json.loads(header)
    except (ValueError, RecursionError):
        return ", or the beginning of its header is damaged"
    return ", but a safetensors file of something else" if isinstance(words, dict) else ""
