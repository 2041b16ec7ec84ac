"""The line of Python that takes a scheme."""

from __future__ import annotations

import json

from kvbits.schemes.scheme import Scheme


def snippet(scheme: str) -> str | None:
    """What makes a cache of a kvbits scheme; None for peers, and for a name that this release does not know."""
    try:
        parsed = Scheme.parse(scheme)
    except ValueError:
        return None
    calibrated = ', calibration="FOLDER"' if parsed.needs_calibration else ""
    return f"cache = kvbits.cache_for(model, {json.dumps(scheme)}{calibrated})"
