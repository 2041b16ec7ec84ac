"""Files that are there as a whole or not at all, and folders that one process has to itself."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":  # where neither files nor folders are locked
    import fcntl

_STALE_SECONDS = 60
"""A part that nobody holds and that is older was left by a process that was killed."""


@contextlib.contextmanager
def alone(folder: Path, wait: bool = False) -> Iterator[Path]:
    """A folder, made if need be, that no other process has to itself meanwhile; a process that dies gives it back.

    Args:
        wait: for another one that has it.

    Raises:
        ValueError: if another one has it and ``wait`` is not set, or if it is a file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"{folder} is a file, not a folder") from None
    if sys.platform == "win32":
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _lock(descriptor, wait):
            raise ValueError(f"another run is at work in {folder}: wait for its end, or give another folder")
        yield folder
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; it takes the place of ``path`` once all is on the disk.

    Where ``path`` is a link its target is replaced, and a file that is there keeps its permissions. Parts that killed
    processes have left beside ``path`` are removed.

    Raises:
        OSError: of ``path``, where no file can be written there.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # a folder, or a device such as /dev/null, which a file would replace
        number, kind = (errno.EISDIR, "a folder") if path.is_dir() else (errno.EINVAL, "a device or the like")
        raise OSError(number, f"it is {kind}, not a file", str(path))
    sweep(path.parent, f".{glob.escape(path.name)}.*.part")
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    except OSError as error:  # nobody knows the name of the part
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        try:
            _lock(descriptor, wait=True)
            mode = (path if path.exists() else beside).stat().st_mode & 0o777
            yield beside
            beside.chmod(mode)  # safetensors makes files that only their owner can read
            _sync(beside)
        finally:
            os.close(descriptor)
        os.replace(beside, path)
        if os.name == "posix":
            _sync(path.parent)  # so that the new name outlasts a power cut, too
    finally:
        beside.unlink(missing_ok=True)


def sweep(folder: Path, parts: str, stale_seconds: float = _STALE_SECONDS) -> None:
    """Remove what writers that were killed have left in a folder: ``parts``, a pattern, that nobody holds."""
    for name in folder.glob(parts):
        with contextlib.suppress(OSError):
            if time.time() - name.stat().st_mtime > stale_seconds:
                descriptor = os.open(name, os.O_RDONLY)
                try:
                    if _lock(descriptor, wait=False):
                        name.unlink()
                finally:
                    os.close(descriptor)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _lock(file: int, wait: bool) -> bool:
    """Lock an open file or folder until it is closed. False if another process has it."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True
