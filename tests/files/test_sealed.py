"""Files on disk: whole or not at all, whatever happens to their writer; not one bit of them can change unnoticed."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvbits.files import alone, replacing, sealed
from kvbits.files.sealed import Damaged, Newer, Sealed, Selection
from limits import file_size_limit

ABOUT = {"words": ["é", 'quote " and \\', "0" * 64], "number": 7, "nothing": None}
POOL = torch.arange(7 * 2 * 64, dtype=torch.uint8).reshape(7, 2, 64)
TENSORS: dict[str, Any] = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "double": torch.randn(3, 5, dtype=torch.float64),
    "half": torch.randn(3, 1, 3).half(),
    "bfloat16": torch.randn(9).bfloat16(),
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
    "long": torch.tensor([[2**40, -1]]),
    "turned": torch.randn(6, 4).t(),
    "chosen": Selection(POOL, torch.tensor([4, 0, 6]), 3, ((10, 16), (60, 64))),
    "first": Selection(POOL, None, 5),
}


def right(name: str) -> torch.Tensor:
    """What a tensor is read back as."""
    x = TENSORS[name]
    if isinstance(x, torch.Tensor):
        return x
    chosen = POOL[:5] if x.index is None else POOL[x.index]
    chosen = chosen.clone()
    for first, last in x.blanks:
        chosen[..., first:last] = 0
    return chosen


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cache.safetensors"
    sealed.write(path, ABOUT, TENSORS)
    return path


def read(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Everything, verified."""
    file = Sealed(path)
    file.verify()
    return file.about, {name: file.tensor(name) for name in file.names}


# -- what is written ---------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(path: Path) -> None:
    about, tensors = read(path)
    assert about == ABOUT and tensors.keys() == TENSORS.keys()
    for name, x in tensors.items():
        assert x.dtype == right(name).dtype and torch.equal(x, right(name)), name
        assert x.data_ptr() % x.dtype.itemsize == 0, name
        assert x.nbytes % 64 or not x.nbytes or x.data_ptr() % 64 == 0, name
    assert not POOL[4, 0, 10:16].eq(0).all()  # blanks are blank in the file alone


def test_the_safetensors_library_reads_it_too(path: Path) -> None:
    with safe_open(str(path), framework="pt") as file:
        assert set(file.keys()) == TENSORS.keys()
        assert all(torch.equal(file.get_tensor(name), right(name)) for name in TENSORS)
        assert json.loads(file.metadata()["about"]) == ABOUT


def test_the_same_content_is_the_same_file(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    length = sealed.write(again, ABOUT, TENSORS)
    assert again.read_bytes() == path.read_bytes()
    assert length == again.stat().st_size == sealed.length_of(ABOUT, TENSORS)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    sealed.write(tmp_path / "x", [], {})
    assert read(tmp_path / "x") == ([], {})


def test_long_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "_PIECE_BYTES", 100)
    x = torch.randn(50, 7)
    sealed.write(tmp_path / "x", None, {"x": x, "odd": Selection(x, torch.tensor([1, 49, 0, 3]), 4)})
    tensors = read(tmp_path / "x")[1]
    assert torch.equal(tensors["x"], x) and torch.equal(tensors["odd"], x[[1, 49, 0, 3]])


@pytest.mark.parametrize(
    ("about", "tensors"), [({"x": float("nan")}, {}), ({}, {"x": torch.zeros(1, dtype=torch.cfloat)})]
)
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, about: Any, tensors: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        sealed.write(tmp_path / "x", about, tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_mapped_as_often_as_one_likes(path: Path) -> None:
    file = Sealed(path)
    twin = file.remapped()
    file.tensor("first").zero_()
    path.unlink()
    del file
    assert torch.equal(twin.tensor("first"), right("first"))
    twin.tensor("first").fill_(7)
    assert torch.equal(twin.remapped().tensor("first"), right("first"))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_tensors_are_mapped_and_changes_stay_in_memory(path: Path) -> None:
    content = path.read_bytes()
    x = Sealed(path).tensor("first")
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    bounds = [[int(end, 16) for end in span[0].split("-")] for span in spans]
    assert any(first <= x.data_ptr() < last for first, last in bounds)
    x.zero_()
    path.unlink()  # and they outlive the file
    assert not x.any()
    path.write_bytes(content)
    assert torch.equal(Sealed(path).tensor("first"), right("first"))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_seen(tmp_path: Path) -> None:
    path, target = tmp_path / "x", tmp_path / "y"
    sealed.write(path, {"few": 1}, {"a": torch.arange(40), "b": torch.arange(3, dtype=torch.uint8)})
    content, target_bytes = path.read_bytes(), bytearray(path.read_bytes())
    assert len(content) < 1500
    for position in range(len(content)):
        bit = 1 << (position * 7 + position // 8) % 8
        target_bytes[position] ^= bit
        target.write_bytes(target_bytes)
        target_bytes[position] ^= bit
        with pytest.raises(ValueError, match=r"damaged|truncated|no file of a kvbits cache|has format"):
            read(target)
    target.write_bytes(target_bytes)
    read(target)


def test_every_other_length_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for length in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"truncated|no file of a kvbits cache"):
            Sealed(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(Damaged, match=f"damaged: it has {len(content) + 1:,} bytes"):
        Sealed(path)


def test_damage_names_the_part(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(right("odd").numpy().tobytes(), -200)
    content[at + 2] ^= 4
    path.write_bytes(content)
    file = Sealed(path)  # its header is whole
    file.verify("first", "chosen")
    with pytest.raises(Damaged, match=r"cache\.safetensors is damaged: 'odd' is not as it was written"):
        file.verify()
    with pytest.raises(Damaged, match="lacks 'other'"):
        file.tensor("other")


def test_a_later_format_is_refused(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"kvbits.cache":"1"', b'"kvbits.cache":"2"'))
    with pytest.raises(Newer, match="has format 2, and this release of kvbits reads formats up to 1: update kvbits"):
        Sealed(path)


@pytest.mark.parametrize("what", ["empty", "text", "other safetensors", "folder", "nothing"])
def test_other_things_are_refused(tmp_path: Path, what: str) -> None:
    path, error = tmp_path / "x", ValueError
    if what == "other safetensors":
        save_file({"a": torch.ones(3)}, str(path))
        says = "no file of a kvbits cache, but a safetensors file of something else"
    elif what == "folder":
        path.mkdir()
        says = "is a folder"
    elif what == "nothing":
        error, says = FileNotFoundError, "there is no file"  # type: ignore[assignment]
    else:
        path.write_text("once upon a time" * 10 if what == "text" else "")
        says = "no file of a kvbits cache"
    with pytest.raises(error, match=says):
        Sealed(path)


def sealed_by_hand(path: Path, change: Any) -> None:
    """A file with a header of one's own and digests that fit it, as only a forger would write."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    header["__metadata__"]["kvbits.sha256"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.replace(b"0" * 64, sealed.hashlib.sha256(text).hexdigest().encode(), 1)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["double"].update(data_offsets=[0, 10**9]),
        lambda header: header["double"].update(data_offsets=[8, 0]),
        lambda header: header["double"].update(shape=[-3, -5]),
        lambda header: header["double"].update(shape=[3, 500]),
        lambda header: header["double"].update(dtype="F8"),
        lambda header: header["double"].pop("shape"),
        lambda header: header["__metadata__"].pop("about"),
        lambda header: header["__metadata__"].update(about="[" * 100_000),
        lambda header: header.update(double=3),
    ],
    ids=range(9),
)
def test_a_forged_header_is_refused(path: Path, change: Any) -> None:
    sealed_by_hand(path, lambda header: None)
    read(path)
    sealed_by_hand(path, change)
    with pytest.raises(Damaged):
        read(path)


# -- what happens to a writer ------------------------------------------------------------------------------------------


def numbered(number: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((3000 + 100 * number,), number) for name in "abc"}


def number_in(path: Path) -> int:
    """Which of the contents :func:`numbered` a file has, all of it."""
    about, tensors = read(path)
    assert all(torch.equal(tensors[name], x) for name, x in numbered(about["number"]).items())
    return int(about["number"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    path, chance = tmp_path / "x", random.Random(0)
    sealed.write(path, {"number": 0}, numbered(0))
    rounds = 0
    while rounds < 25 or not list(tmp_path.glob(".x.*.part")):  # one was killed in the middle, sooner or later
        rounds += 1
        before = number_in(path)
        child = os.fork()
        if child == 0:
            number = number_in(path)
            while True:
                number = (number + 1) % 50
                sealed.write(path, {"number": number}, numbered(number))
        while number_in(path) == before:  # whatever else the machine does, it writes
            time.sleep(0.001)
        time.sleep(0.05 * chance.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        number_in(path)
    parts = list(tmp_path.glob(".x.*.part"))
    for part in parts:
        os.utime(part, (0, 0))
    sealed.write(path, {"number": 7}, numbered(7))
    assert list(tmp_path.iterdir()) == [path] and number_in(path) == 7  # what they left is gone, too


def test_a_part_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with replacing(path) as first:
        os.utime(first, (0, 0))
        first.write_text("first")
        os.utime(first, (0, 0))
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    sealed.write(path, {"number": 3}, numbered(3))
    with file_size_limit(size), pytest.raises(OSError, match=r"cannot write .*; what was there before is as it was"):
        sealed.write(path, {"number": 4}, numbered(4))
    assert number_in(path) == 3 and list(tmp_path.iterdir()) == [path]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_file(small_disk: Path) -> None:
    path = small_disk / "x"
    sealed.write(path, {"number": 0}, numbered(0))
    with pytest.raises(OSError, match="No space left on device") as error:
        sealed.write(path, {"number": 1}, numbered(1))
    assert error.value.errno == errno.ENOSPC
    assert number_in(path) == 0 and list(small_disk.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "x"
    sealed.write(path, {"number": 0}, numbered(0))

    class Interrupting(Selection):
        def rows(self, first: int, last: int) -> torch.Tensor:
            raise error

    with pytest.raises(error):
        sealed.write(path, {}, {**numbered(1), "z": Interrupting(POOL, None, 7)})
    assert number_in(path) == 0 and list(tmp_path.iterdir()) == [path]


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    path, errors = tmp_path / "x", []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                sealed.write(path, {"number": number}, numbered(number))
                number_in(path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and list(tmp_path.iterdir()) == [path]


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "x", tmp_path / "link"
    sealed.write(path, {"number": 1}, numbered(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~current_umask()
    path.chmod(0o600)
    link.symlink_to(path)
    sealed.write(link, {"number": 2}, numbered(2))
    assert link.is_symlink() and number_in(path) == 2 and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_only_files_are_replaced(tmp_path: Path) -> None:
    """Written as root, /dev/null would be a file from then on."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path, says in ((pipe, "a device or the like"), (folder, "a folder")):
        with pytest.raises(OSError, match=f"cannot write .*: it is {says}, not a file"):
            sealed.write(path, {}, numbered(1))
    assert pipe.is_fifo() and sorted(tmp_path.iterdir()) == [folder, pipe]


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot write .*no-such.*No such file or directory"):
        sealed.write(tmp_path / "no-such" / "x", {}, {})


def test_one_waits_for_a_folder_or_is_told(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="needs locks")
    order: list[str] = []

    def wait() -> None:
        with alone(tmp_path, wait=True):
            order.append("second")

    thread = threading.Thread(target=wait)
    with alone(tmp_path):
        with pytest.raises(ValueError, match="another run is at work"), alone(tmp_path):
            pass
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
