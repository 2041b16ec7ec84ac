"""One Markdown page for each method and each modifier of a scheme, as the command line prints them."""

from __future__ import annotations

import difflib
from importlib import resources

from kvbits.codecs import Affine, Codec
from kvbits.codecs.grouped import Grouped
from kvbits.schemes.scheme import SINK_TOKENS, Scheme

METHODS = (
    "exact", "affine", "kivi", "normal_float", "half_quadratic", "fp8", "rotated", "lloyd_max", "non_uniform",
)  # fmt: skip
MODIFIERS = ("pre_rope", "centred", "outliers", "qnorm", "sinks", "calibration")

_WORDS = {
    "int": "affine",
    "nf": "normal_float",
    "hqq": "half_quadratic",
    "rot": "rotated",
    "lm": "lloyd_max",
    "nuq": "non_uniform",
    "pre-rope": "pre_rope",
    "post-rope": "pre_rope",
    "uncentred": "centred",
    "residual": "sinks",
    "block": "sinks",
    "static": "calibration",
    "calibrated": "calibration",
    "calibrate": "calibration",
    **{name: name for name in (*METHODS, *MODIFIERS)},
}
"""What else than a scheme has a page, and which."""


def read(page: str) -> str:
    """The text of a page."""
    return resources.files(__name__).joinpath(f"{page}.md").read_text(encoding="utf-8")


def of_word(word: str) -> str | None:
    """The page of a modifier or a family of methods, such as ``centred``, ``outliers=1%`` or ``nuq``."""
    name = word.strip().lower()
    return None if "," in name else _WORDS.get(name.partition("=")[0])


def near(word: str) -> list[str]:
    """Words with a page that look like this one."""
    return difflib.get_close_matches(word.strip().lower(), _WORDS, n=2, cutoff=0.75)


def of_scheme(scheme: Scheme) -> tuple[list[str], list[str]]:
    """Pages of a scheme's methods, and of the modifiers that it uses."""
    pairs = [(scheme.key, scheme.value), *((one.key, one.value) for one in scheme.overrides)]
    methods = list(dict.fromkeys(page for key, value in pairs for page in _of_pair(key, value)))
    used = {
        "pre_rope": scheme.pre_rope,
        "centred": scheme.centred,
        "outliers": any(getattr(codec, "outliers", 0) for codec in scheme.codecs),
        "qnorm": any(getattr(codec, "qnorm", False) for codec in scheme.codecs),
        "sinks": (scheme.sinks, scheme.late_sinks) != (SINK_TOKENS, 0),
        "calibration": scheme.needs_calibration or any(codec.is_fitted for codec in scheme.codecs),
    }
    return methods, [page for page in MODIFIERS if used[page]]


def _of_pair(key: Codec, value: Codec) -> list[str]:
    kinds = type(key) is Affine and type(value) is Affine
    if kinds and isinstance(key, Grouped) and key.per == "channel" and key.group and value.format.per == "token":
        return ["kivi"]
    return list(dict.fromkeys(type(codec).__module__.rpartition(".")[2] for codec in (key, value)))
