"""``PrefixStore``, a folder of caches that are found again by what they have read.

The folder is the index: every entry is one file of :mod:`kvbits.sessions.saving`, whose name tells of which model and
scheme it is, and whose header what it has read. Several processes may share it. Whoever writes has the folder to
himself meanwhile; readers need no lock, since entries never change, and one that is removed while it is mapped lives
on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvbits.files import Calibration, alone, fingerprint, load_calibration
from kvbits.files.atomic import sweep
from kvbits.files.sealed import Damaged, Foreign, Newer, length_of, write
from kvbits.hf.attach import cache_for
from kvbits.hf.cache import KVCache
from kvbits.hf.layer import PackedLayer
from kvbits.schemes.catalogue import RECOMMENDED
from kvbits.schemes.scheme import Scheme
from kvbits.sessions.saving import Saved, Tokens, contents, tokens_of
from kvbits.tensor_parallel import Heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX, SUFFIX = "prefix-", ".safetensors"

LEAST_TOKENS = 32
"""A shorter prefix is read again: opening a file takes as long."""


class Entry(NamedTuple):
    """What is known of a file.

    Attributes:
        tokens: int32 ``[T]``, those it has read.
        whole: it can only be used as a whole, since it cannot be cropped.
        inode: of the file, to notice another one of the same name.
    """

    tokens: torch.Tensor
    whole: bool
    inode: int


class File(NamedTuple):
    """An entry as the folder lists it; ``used_ns`` is when it was last looked up."""

    path: Path
    inode: int
    nbytes: int
    used_ns: int


class PrefixStore:
    """Caches of one model under one scheme in a folder, found by their tokens.

    Several stores, for other models, schemes or processes, may share a folder; they share its budget, too, and each
    sees only what is its own.

    Args:
        folder: made if need be.
        budget_bytes: of all entries together; the least recently used ones make room for new ones.
        model, scheme, sliding, calibration: as for :func:`kvbits.cache_for`, which makes the caches of the store.

    Raises:
        ValueError: as :func:`kvbits.cache_for`, for a folder that is a file, or a budget that is no number of bytes.
    """

    def __init__(
        self,
        folder: str | Path,
        budget_bytes: int,
        model: PreTrainedModel,
        scheme: str | Scheme = RECOMMENDED,
        *,
        sliding: bool = False,
        calibration: str | Path | Calibration | None = None,
    ) -> None:
        if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes <= 0:
            raise ValueError(f"budget_bytes={budget_bytes!r} is no number of bytes; give for example 10 * 2**30")
        if Heads.of(model).world > 1:
            raise ValueError(
                "a store of prefixes serves one process: ranks of tensor parallel could find different entries, and "
                "would then wait for each other for good; save and load by name, kvbits.save(cache, 'NAME.{rank}')"
            )
        self.folder, self.budget_bytes, self.model = Path(folder), budget_bytes, model
        self.scheme, self.sliding = Scheme.parse(scheme), sliding
        if isinstance(calibration, (str, Path)):
            calibration = load_calibration(calibration)
        self.calibration = calibration
        self.identity = identity_of(self._new())
        with alone(self.folder, wait=True):
            pass  # it can be made, and is a folder
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.folder)!r}, {self.nbytes:,} of {self.budget_bytes:,} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of all entries in the folder, whosever they are."""
        return sum(file.nbytes for file in files_of(self.folder))

    def lookup(self, tokens: Tokens) -> tuple[KVCache, int]:
        """A cache that has read the beginning of ``tokens``, and how many of them.

        An entry is cropped to what it has in common with them, but never through a packed block: what is reused is as
        it was stored. So up to a block less may be covered than is in common; models whose layers cannot be cropped
        (full sliding windows, linear attention) reuse whole entries only. At least one token is left to be read. Where
        there is nothing to reuse the cache is a new one, and covers 0.

        Args:
            tokens: ids of one prompt, ``[T]`` or ``[1, T]``.
        """
        wanted = _row(tokens)[:-1]
        for _, name in self._candidates(wanted):
            cache = self._open(name, wanted)
            if cache is not None:
                return cache, cache.get_seq_length()
        return self._new(), 0

    def common(self, tokens: Tokens) -> int:
        """How many leading tokens an entry has in common with ``tokens``: :meth:`lookup` covers up to a block less."""
        return max((common for common, _ in self._candidates(_row(tokens)[:-1])), default=0)

    def put(self, cache: KVCache, tokens: Tokens | None = None) -> Path:
        """Keep a cache, and return the file.

        Args:
            cache: of this store's model and scheme, of one row without padding; it is not changed.
            tokens: as for :func:`kvbits.save`.

        Raises:
            ValueError: if the cache is another one, does not know all that it has read, or is larger than the budget.
            OSError: if it cannot be written.
        """
        ids = self._ids_of(cache, tokens)
        about, tensors = contents(cache, ids)
        name = f"{PREFIX}{self.identity}-{hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:32]}{SUFFIX}"
        size = length_of(about, tensors)
        if size > self.budget_bytes:
            raise ValueError(f"this cache takes {size:,} bytes, more than the budget of {self.budget_bytes:,}")
        path = self.folder / name
        with alone(self.folder, wait=True):
            sweep(self.folder, f".{PREFIX}*.part", 0)
            if not path.is_file():
                self._make_room(size)
                write(path, about, tensors)
            self._mark(path)
        return path

    def _new(self) -> KVCache:
        return cache_for(self.model, self.scheme, sliding=self.sliding, calibration=self.calibration)

    # -- finding ---------------------------------------------------------------------------------------------------

    def _candidates(self, wanted: torch.Tensor) -> Iterator[tuple[int, str]]:
        """Entries that have enough in common with ``wanted``, and how much, the most promising one first."""
        found = []
        for name, entry in self._refreshed().items():
            common = in_common(entry.tokens, wanted)
            if common < LEAST_TOKENS or (entry.whole and common < len(entry.tokens)):
                continue
            lost = 0 if common == len(entry.tokens) else self.scheme.block - 1  # at most, where a block is cropped
            found.append((lost - common, len(entry.tokens), common, name))
        return ((common, name) for _, _, common, name in sorted(found))

    def _refreshed(self) -> dict[str, Entry]:
        """All entries of this store that are there now; only headers of new files are read."""
        with self._lock:
            known: dict[str, Entry] = {}
            for file in files_of(self.folder, self.identity):
                before = self._entries.get(file.path.name)
                same = before is not None and before.inode == file.inode
                entry = before if same else self._read(file.path, file.inode)
                if entry is not None:
                    known[file.path.name] = entry
            self._entries = known
            return known

    def _read(self, path: Path, inode: int) -> Entry | None:
        try:
            saved = Saved(path)
            states = saved.about["layers"]
            own = any(state["type"] not in (PackedLayer.__name__, "DummyLayer") for state in states)
            whole = own or any(state.get("window") is not None for state in states)
            return Entry(saved.tokens[0].clone(), whole, inode)
        except (OSError, ValueError) as error:
            self._refuse(path, error)
            return None

    def _open(self, name: str, wanted: torch.Tensor) -> KVCache | None:
        """The cache of an entry, cropped to what it shares with ``wanted``; None if it cannot be used after all."""
        path = self.folder / name
        try:
            saved = Saved(path)
            cache = saved.cache(self.model)
        except (OSError, ValueError) as error:
            self._refuse(path, error)
            return None
        covered = cache.whole(in_common(saved.tokens[0], wanted))  # another file may have taken its name meanwhile
        if covered < LEAST_TOKENS:
            return None
        if covered < cache.get_seq_length():
            cache.crop(covered - cache.get_seq_length())
        self._mark(path)
        return cache

    def _refuse(self, path: Path, error: Exception) -> None:
        """Say why an entry is passed over; one that is damaged is removed, since it will never be of use."""
        damaged = isinstance(error, (Damaged, Foreign))
        if damaged:
            with contextlib.suppress(OSError):
                path.unlink()
        if not isinstance(error, (FileNotFoundError, Newer)):  # what is not there had to make room meanwhile
            done = "is removed" if damaged else "is passed over"
            warnings.warn(f"an entry of {self.folder} {done}: {error}", RuntimeWarning, stacklevel=4)

    # -- keeping ---------------------------------------------------------------------------------------------------

    def _ids_of(self, cache: KVCache, tokens: Tokens | None) -> torch.Tensor:
        """Ids int32 ``[1, T]`` of a cache that may be kept."""
        if not isinstance(cache, KVCache) or cache.model is not self.model:
            raise ValueError("this cache is not of the model of this store; make caches with lookup()")
        if identity_of(cache) != self.identity:
            raise ValueError(f"this cache ({cache.scheme}) is not as those of this store; make caches with lookup()")
        ids, rows = tokens_of(cache, tokens), cache.columns.rows
        if ids.shape[0] != 1 or rows.padded:
            raise ValueError(f"a store keeps caches of one row without padding, not of {ids.shape[0]}")
        if rows.runs is not None and any(run.position != run.token for run in rows.runs[0]):
            raise ValueError("the tokens of this cache are at positions of their own, which ids do not tell")
        if bool((ids < 0).any()):
            raise ValueError("this cache has read something whose ids it does not know: it could not be found again")
        return ids

    def _mark(self, path: Path) -> None:
        """Make an entry the one that was used last, also where the clock has been put back since."""
        with contextlib.suppress(OSError):
            last = max((file.used_ns for file in files_of(self.folder)), default=0)
            now = max(time.time_ns(), last + 1)
            os.utime(path, ns=(now, now))

    def _make_room(self, size: int) -> None:
        """Remove the least recently used entries until ``size`` bytes more are within the budget."""
        files = sorted(files_of(self.folder), key=lambda file: (file.used_ns, file.path))
        total = sum(file.nbytes for file in files)
        for file in files:
            if total + size <= self.budget_bytes:
                break
            file.path.unlink(missing_ok=True)
            total -= file.nbytes


def identity_of(cache: KVCache) -> str:
    """What two caches must have in common to be continued alike: model, layers, schemes, and what they were taught."""
    assert cache.model is not None
    layers = []
    for layer in cache.layers:
        parts: list[object] = [type(layer).__name__]
        if isinstance(layer, PackedLayer):
            core = layer.core
            parts += [str(core.scheme), core.window]
            parts += [[name, fingerprint.digest(x)] for params in core.calibrated for name, x in sorted(params.items())]
        layers.append(parts)
    model = fingerprint.of_model(cache.model)
    text = json.dumps([model, fingerprint.adapters(cache.model), layers], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def files_of(folder: Path, identity: str = "") -> list[File]:
    """The entries in a folder, all of them or those of one identity; none where it was removed."""
    found: list[File] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as things:
        for thing in things:
            if thing.name.startswith(f"{PREFIX}{identity}") and thing.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(thing.path)
                    found.append(File(Path(thing.path), status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _row(tokens: Tokens) -> torch.Tensor:
    """Ids of one prompt as int32 ``[T]`` on the CPU."""
    ids = torch.as_tensor(tokens)
    if ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[0] != 1) or ids.is_floating_point():
        raise ValueError(f"tokens are ids of one prompt, [T] or [1, T], not {ids.dtype} {tuple(ids.shape)}")
    return ids.reshape(-1).to("cpu", torch.int32)


def in_common(one: torch.Tensor, other: torch.Tensor) -> int:
    """Leading tokens that two prompts ``[T]`` share."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
