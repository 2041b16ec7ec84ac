"""Calibrations on disk: ``calibration.safetensors`` and ``calibration.json`` in a folder, and nothing that executes.

A file is written beside its place and renamed into it, so it is there as a whole or not at all. The JSON comes last and
names the digest of the tensors: half a pair, a damaged file and one from a later release are refused, with the reason.

Names of tensors: ``3.key.mean`` (float32 ``[H, D]``, before the rotary embedding), ``3.key.pre.nuq3-static-1%.table``
(layer, side, :func:`variant`, codec, parameter) and ``3.value.nuq3-token.table``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from kvbits.codecs import Codec
from kvbits.files import fingerprint
from kvbits.files.atomic import replacing
from kvbits.files.tensors import load_tensors, save_tensors
from kvbits.schemes.catalogue import RECOMMENDED
from kvbits.schemes.scheme import Scheme
from kvbits.types import Params

FORMAT = 1
"""Number of the format that is written; later ones are refused."""

TENSORS, ABOUT = "calibration.safetensors", "calibration.json"
WEIGHTS = "fingerprint.weights"
_FIELDS = ("format", "kvbits", "model", "tokenizer", "text", "samples", "length", "sinks", "layers", "sha256")

Side: TypeAlias = Literal["key", "value"]


def variant(pre_rope: bool, centred: bool) -> str:
    """What keys were fitted as: ``pre`` or ``post`` the rotary embedding, ``-centred`` where the mean was taken off."""
    return ("pre" if pre_rope else "post") + ("-centred" if centred else "")


@dataclass(frozen=True)
class Calibration:
    """What was fitted for one model.

    Attributes:
        tensors: float32 on the CPU, under the names of this module.
        about: plain JSON data: the fingerprint, and ``layers``, those that were seen.
    """

    tensors: Mapping[str, torch.Tensor]
    about: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Calibration({self._whose()}: {', '.join(self.fits()) or 'means only'})"

    def params(self, layer: int, side: Side, codec: Codec, *, pre_rope: bool = True, centred: bool = False) -> Params:
        """The parameters of a codec for one layer and side.

        Args:
            layer: index of the layer.
            side: ``key`` or ``value``.
            codec: one that ``needs_calibration``.
            pre_rope, centred: what becomes of keys before they are encoded; values are encoded as they are.

        Raises:
            ValueError: where it was not fitted, naming what was, and the command that adds it.
        """
        prefix = _prefix(layer, side, codec, pre_rope, centred)
        found = {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}
        if not found:
            what = f"{codec} ({variant(pre_rope, centred)})" if side == "key" else str(codec)
            raise ValueError(self._missing(layer, side, what))
        return found

    def has(self, layer: int, side: Side, codec: Codec, *, pre_rope: bool = True, centred: bool = False) -> bool:
        """Whether :meth:`params` has an answer."""
        prefix = _prefix(layer, side, codec, pre_rope, centred)
        return any(name.startswith(prefix) for name in self.tensors)

    def mean(self, layer: int) -> torch.Tensor:
        """Mean of each channel of the keys before the rotary embedding, float32 ``[H, D]``."""
        found = self.tensors.get(f"{layer}.key.mean")
        if found is None:
            raise ValueError(self._missing(layer, "key", "mean"))
        return found

    def of_layer(self, layer: int, scheme: Scheme) -> tuple[Params, Params]:
        """What calibration fitted of the keys and values of one layer under its scheme, the key mean included.

        Codecs that need no calibration get nothing, and so are fitted to the first tokens that they pack, as always.
        """
        key, value = scheme.key, scheme.value
        form = {"pre_rope": scheme.pre_rope, "centred": scheme.centred}
        keys = self.params(layer, "key", key, **form) if key.needs_calibration else {}
        if scheme.centred:
            keys["mean"] = self.mean(layer)
        return keys, self.params(layer, "value", value) if value.needs_calibration else {}

    def fits(self) -> list[str]:
        """What was fitted, in words: ``key nuq3-static (pre)``, ``value nuq3-token``, ..."""
        names: dict[str, None] = {}
        for name in self.tensors:
            if name != WEIGHTS and not name.endswith(".key.mean"):
                _, side, rest = name.rpartition(".")[0].split(".", 2)
                kind, _, codec = rest.partition(".") if side == "key" else ("", "", rest)
                names[f"key {codec} ({kind})" if side == "key" else f"value {codec}"] = None
        return list(names)

    def check(self, model: Any, tokenizer: Any = None) -> None:
        """Raise ValueError where ``model`` (or ``tokenizer``, if given) is not what this was made for, naming how."""
        here, there = fingerprint.of_model(model), self.about["model"]
        found = fingerprint.differences(here, there, fingerprint.weights(model), self.tensors[WEIGHTS])
        ours, theirs = fingerprint.of_tokenizer(tokenizer), self.about["tokenizer"]
        if None not in (ours, theirs) and ours != theirs:
            found.append("its tokenizer has another vocabulary")
        if found:
            more = f", and {len(found) - 4} more differences" if len(found) > 4 else ""
            raise ValueError(
                f"this calibration is {self._whose()}, and not for this model: {'; '.join(found[:4])}{more}. "
                "Calibrate this model: kvbits calibrate MODEL --text FILE --out DIR"
            )

    def save(self, folder: str | Path) -> Path:
        """Write both files, in place of those that are there, and return the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Without its JSON the pair is refused: an interruption between the two never leaves a wrong one.
        (folder / ABOUT).unlink(missing_ok=True)
        save_tensors(folder / TENSORS, self.tensors)
        about = {**self.about, "sha256": _sha256(folder / TENSORS)}
        with replacing(folder / ABOUT) as beside:
            beside.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Calibration:
        """Read what :meth:`save` has written.

        Raises:
            FileNotFoundError: if there is none, or half of one.
            ValueError: for damaged files and those of a later release.
        """
        folder = Path(folder)
        if not (folder / ABOUT).is_file():
            if (folder / TENSORS).is_file() or (folder / "samples").is_dir():
                raise FileNotFoundError(
                    f"the calibration in {folder} is not finished: the same command goes on with it"
                )
            raise FileNotFoundError(f"there is no {folder / ABOUT}: that is what 'kvbits calibrate' writes")
        about = _read_about(folder / ABOUT)
        if not (folder / TENSORS).is_file():
            raise FileNotFoundError(f"{folder / ABOUT} is there, but {TENSORS} beside it is not")
        if _sha256(folder / TENSORS) != about["sha256"]:
            raise ValueError(
                f"{folder / TENSORS} is damaged, or of another calibration than the {ABOUT} beside it: its digest is "
                "not the one written there"
            )
        return cls(load_tensors(folder / TENSORS), about)

    def _whose(self) -> str:
        model, samples, length = self.about["model"]["class"], self.about["samples"], self.about["length"]
        return f"of {model} on {samples} x {length} tokens"

    def _missing(self, layer: int, side: Side, what: str) -> str:
        if layer not in self.about["layers"]:
            return f"this calibration {self._whose()} has no layer {layer}; it has {self.about['layers']}"
        near = ", ".join(name for name in self.fits() if name.startswith(side)) or "nothing"
        return (
            f"this calibration {self._whose()} has no {side} {what} for layer {layer}, but {near}. "
            "Add it with 'kvbits calibrate MODEL --text FILE --out DIR --scheme SCHEME', with the same model, text and "
            "folder and the scheme that needs it"
        )


def refuse_uncalibrated(scheme: Scheme) -> None:
    """Raise ValueError where a scheme cannot run without a calibration, saying how to make one."""
    if scheme.needs_calibration:
        raise ValueError(
            f"{scheme} needs a calibration of this model: make one with 'kvbits calibrate MODEL --text FILE --out DIR "
            f"--scheme {scheme}' or kvbits.calibrate(model, texts, {str(scheme)!r}), and give it as calibration= "
            f"(--calibration DIR on the command line); schemes such as {RECOMMENDED} need none"
        )


def load_calibration(folder: str | Path) -> Calibration:
    """The calibration in a folder that ``kvbits calibrate`` has written. Raises as :meth:`Calibration.load`."""
    return Calibration.load(folder)


def _prefix(layer: int, side: Side, codec: Codec, pre_rope: bool, centred: bool) -> str:
    if side not in ("key", "value"):
        raise ValueError(f"side={side!r} is none; give 'key' or 'value'")
    return f"{layer}.key.{variant(pre_rope, centred)}.{codec}." if side == "key" else f"{layer}.value.{codec}."


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    number = about.get("format") if isinstance(about, dict) else None
    if isinstance(number, int) and number > FORMAT:
        raise ValueError(
            f"{path} has format {number}, written by kvbits {about.get('kvbits')}; this release reads formats up to "
            f"{FORMAT}: update kvbits"
        )
    missing = [name for name in _FIELDS if not isinstance(about, dict) or name not in about]
    if missing:
        raise ValueError(f"{path} is no calibration, or damaged: it lacks {', '.join(missing)}")
    return dict(about)


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            sha.update(piece)
    return sha.hexdigest()
