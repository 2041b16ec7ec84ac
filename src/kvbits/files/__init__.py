"""What kvbits keeps on disk. Files are written as a whole or not at all, and nothing in them executes.

- ``calibration.py``: what was fitted for a model, a pair of files in a folder.
- ``layer.py``: what one layer of a cache holds, as JSON and tensors; ``plain.py``: the same of any object's attributes.
- ``sealed.py``: a safetensors file whose every byte is covered by a digest: caches.
- ``rows.py``: results as JSON, one row a line.
- ``tensors.py``: safetensors files as their own library writes them: calibrations.
- ``atomic.py``: how all of them come to be.
"""

from __future__ import annotations

from kvbits.files.atomic import alone, replacing
from kvbits.files.calibration import (
    ABOUT,
    FORMAT,
    TENSORS,
    WEIGHTS,
    Calibration,
    Side,
    load_calibration,
    refuse_uncalibrated,
    variant,
)
from kvbits.files.rows import row_lines
from kvbits.files.tensors import about_tensors, load_tensors, save_tensors

__all__ = [
    "ABOUT",
    "FORMAT",
    "TENSORS",
    "WEIGHTS",
    "Calibration",
    "Side",
    "about_tensors",
    "alone",
    "load_calibration",
    "load_tensors",
    "refuse_uncalibrated",
    "replacing",
    "row_lines",
    "save_tensors",
    "variant",
]
