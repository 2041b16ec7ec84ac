"""One word has one meaning: the words that went stay away."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

WENT: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # word: what finds it, what to write instead, and where the word has another right meaning
    "learn": (r"\blearn(?:s|ed|t|ing)?\b", "fit", ("files/layer.py",)),
    "the way back": (r"\bthe way back\b", "unrope", ()),
    "turned": (r"\bturned[ _](?:keys?|mean|back)|\bturns? (?:the )?keys\b", "rope, unrope", ()),
    "lane": (
        r"\blanes?\b",
        "row: it joins or leaves",
        ("native", "kernel", "triton", "docs/kernels.md", "docs/gpu.md"),
    ),
    "left behind": (r"\bleft behind\b", "crop", ()),
    "errand": (r"\berrands?\b", "due", ()),
    "memo": (r"\brecord\.memo\b", "derived", ()),
    "Work, Due": (r"\bpacking\.(?:Work|Due)\b|\bclass (?:Work|Due)\b", "ToPack, DueBlocks", ()),
}

WAITING: set[str] = {
    "docs/kernels.md",
    "src/kvbits/attend/triton/decode.py",
    "src/kvbits/attend/triton/kernel/packed.py",
    "src/kvbits/attend/triton/kernel/rotary.py",
    "src/kvbits/encode/triton/encode.py",
}
"""Files that still have one of these words; to be emptied."""


def found(path: str, text: str) -> list[str]:
    """The words of a file that went, with what to write instead."""
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1} says {match[0]!r}: write {instead}"
        for pattern, instead, rooms in WENT.values()
        if not any(room in path for room in rooms)
        for match in re.finditer(pattern, text)
    ]


def test_the_words_that_went_stay_away() -> None:
    files = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.*"),
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "src").rglob("*.md"),
    ]
    names = {str(path.relative_to(ROOT)): path for path in files if path.suffix in (".py", ".md")}
    assert len(names) > 200
    assert [f for name in sorted(names.keys() - WAITING) for f in found(name, names[name].read_text("utf-8"))] == []


def test_a_word_that_went_is_found_where_it_is_wrong() -> None:
    assert len(found("src/kvbits/layer/x.py", "a\nwhat is learned of turned keys, record.memo, packing.Work")) == 4
    assert "x.py:2 says 'lanes'" in found("src/kvbits/serve/x.py", "a\ntwo lanes")[0]
    assert found("src/kvbits/attend/triton/x.py", "two lanes") == [] and found("x.py", "fits memory, in turn") == []
