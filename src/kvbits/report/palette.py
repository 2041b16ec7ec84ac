"""Colours by name, each with a value for light and one for dark: pictures are drawn in the light ones.

``s0`` is the exact cache, ``s1`` to ``s6`` are series: apart for those who see fewer colours too, and by shape. Names
of one light value have one dark value, so that a light value says which dark one takes its place.
"""

from __future__ import annotations

LIGHT = {
    "page": "#f6f7f8", "paper": "#ffffff", "ink": "#16202a", "soft": "#56626e", "grid": "#e4e8ec", "edge": "#d5dbe1",
    "accent": "#0b63ad", "tint": "#eaf3fb", "good": "#0a7358", "good-tint": "#e3f4ee", "warn": "#8a5200",
    "warn-tint": "#fdf3e1", "bad": "#b23a06", "bad-tint": "#fdece4", "lost": "#e2662b", "cell": "#eff2f4",
    "s0": "#16202a", "s1": "#0b63ad", "s2": "#b53a10", "s3": "#0a9a72", "s4": "#93407e", "s5": "#b98408",
    "s6": "#4e9ad1",
}  # fmt: skip
DARK = {
    "page": "#0f1418", "paper": "#171d23", "ink": "#e8ecf0", "soft": "#a2aeb9", "grid": "#2a333b", "edge": "#36414b",
    "accent": "#6db6f5", "tint": "#15293b", "good": "#4fcda4", "good-tint": "#12302a", "warn": "#f0b554",
    "warn-tint": "#33260f", "bad": "#ff9468", "bad-tint": "#3a1f15", "lost": "#b54a14", "cell": "#222b33",
    "s0": "#e8ecf0", "s1": "#6db6f5", "s2": "#ff8553", "s3": "#37cf92", "s4": "#dd92bd", "s5": "#f0c040",
    "s6": "#afd9ff",
}  # fmt: skip


def css() -> str:
    """The colours as CSS variables, for both schemes; paper is light."""
    light, dark = (";".join(f"--{name}:{value}" for name, value in colours.items()) for colours in (LIGHT, DARK))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark};color-scheme:dark}}}}\n"
