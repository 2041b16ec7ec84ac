"""One word, one meaning: words that went do not come back, but where they have another right meaning."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

WORDS: dict[str, tuple[str, str]] = {
    # pattern: what is said instead, and the rooms (a pattern) where it has another right meaning
    r"\blearn(s|ed|t|ing)?\b": ("fit", r"src/kvbits/files/layer\.py"),  # a key on disk
    r"\bway back\b": ("unrope, or take the rotation off", r""),
    r"\bturned (key|mean|angle)s?\b": ("rope", r""),
    r"\berrands?\b": ("DueBlocks, ToPack", r""),
    r"\bclass (Work|Due)\b": ("DueBlocks, ToPack", r""),
    r"\bgrowth\b": ("room", r""),
    r"\blanes?\b": ("row", r"docs/kernels\.md"),  # of a vector register
    r"\bleft behind\b": ("crop, drop", r""),
    r"\bstatic cache": ("frozen cache", r""),
}


def pages() -> list[Path]:
    """All that is read: sources, documentation."""
    found = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.md"), *(ROOT / "docs").glob("*.md")]
    return sorted([*found, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def found(texts: dict[str, str]) -> dict[tuple[str, str], str]:
    """Pattern and file, and the first place of each that is not right."""
    places = {}
    for pattern, (_, right) in WORDS.items():
        for name, text in texts.items():
            hit = re.search(pattern, text, flags=re.I)
            if hit and not (right and re.search(right, name)):
                places[pattern, name] = f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]}"
    return places


def test_words_that_went_stay_away() -> None:
    places = found({str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages()})
    assert [f"{place}: say {WORDS[pattern][0]}" for (pattern, _), place in places.items()] == []


def test_a_word_that_comes_back_is_found() -> None:
    assert found({"docs/x.md": "a mean\nlearned here"}).popitem()[1] == "docs/x.md:2: learned"
    assert found({"docs/kernels.md": "lanes"}) == {} and found({"src/x.py": "# lanes"})
    assert found({"src/x.py": "fit, rope, room"}) == {}
