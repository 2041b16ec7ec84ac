"""Caches on disk. ``save`` writes a cache into one file, ``load`` goes on from there, bit for bit.

The file is a safetensors file with a digest of every byte (:mod:`kvbits.files.sealed`). Its JSON data say of which
model the cache is, under which scheme, what it has read, and what each layer holds (:mod:`kvbits.files.layer`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvbits import __version__
from kvbits.files import fingerprint
from kvbits.files.layer import restore, state_of
from kvbits.files.plain import from_plain, to_plain
from kvbits.files.sealed import Content, Damaged, Sealed, write
from kvbits.hf.attach import make_cache, refuse_unless_served
from kvbits.hf.cache import KVCache
from kvbits.hf.devices import devices_of_layers
from kvbits.hf.layer import PackedLayer
from kvbits.hf.tokens import UNKNOWN, TokenIds
from kvbits.schemes.scheme import Scheme
from kvbits.store.rows import Rows, Run
from kvbits.tensor_parallel import Heads
from kvbits.transform.rotary import Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_RANK = "{rank}"

Tokens = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]


def save(
    cache: KVCache,
    path: str | Path,
    tokens: Tokens | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    note: Any = None,
) -> Path:
    """Write all that a cache holds into one file, as a whole or not at all, in place of what is there.

    With tensor parallel each rank writes the KV heads that it has, into a file of its own.

    Args:
        cache: while its model is there.
        path: of the file. With tensor parallel, ``{rank}`` in it stands for the number of the rank.
        tokens: ids that it has read, ``[columns]`` or ``[B, columns]``. A cache notes them itself; they are needed
            only where a call brought embeddings in place of ids, and must agree with what was noted.
        tokenizer: so that :func:`load` can tell one with another vocabulary.
        note: any JSON data to keep with it, such as the messages of a chat.

    Raises:
        ValueError: if the tokens are not those of the cache, for something in it that cannot be stored, or where
            several ranks would write one file.
        OSError: if the file cannot be written; the old one is then still there.
    """
    about, tensors = contents(cache, tokens, tokenizer, note)
    assert cache.model is not None
    own = _of_rank(path, Heads.of(cache.model))
    write(own, about, tensors)
    return own


def load(
    path: str | Path,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    verify: bool = True,
) -> KVCache:
    """The cache that :func:`save` has written, for the same model: its logits go on as if nothing had happened.

    The packed blocks are mapped from the file until the cache packs more of them; do not overwrite the file in place
    meanwhile (:func:`save` never does, and to remove it is fine).

    Args:
        path: the file; with tensor parallel ``{rank}`` in it is as for :func:`save`.
        model: on any device; in the same dtype as before.
        tokenizer: if given, it must have the vocabulary of the one that was given to :func:`save`.
        verify: read the whole file and compare its digests. Without, those of the header alone are.

    Raises:
        FileNotFoundError: if there is no such file.
        TypeError: where file and model are in each other's place.
        ValueError: if it is damaged, of a later release, or no cache, or not for this model; the reason says which.
    """
    if isinstance(model, (str, Path)) or not isinstance(path, (str, Path)):
        raise TypeError("load takes the file first and the model second: kvbits.load('cache.kvbits', model)")
    own = str(path).replace(_RANK, str(Heads.of(model).rank))
    return Saved(own).cache(model, tokenizer=tokenizer, verify=verify)


def _of_rank(path: str | Path, heads: Heads) -> Path:
    """The file that this rank writes."""
    if heads.world > 1 and _RANK not in str(path):
        raise ValueError(
            f"{heads.world} ranks have a part of this cache each, and all would write {path}: name it with {_RANK} "
            f"for the number of the rank, such as {Path(path).with_suffix(f'.{_RANK}{Path(path).suffix}')}"
        )
    return Path(str(path).replace(_RANK, str(heads.rank)) if heads.world > 1 else path)


# -- writing -----------------------------------------------------------------------------------------------------------


def contents(
    cache: KVCache, tokens: Tokens | None = None, tokenizer: PreTrainedTokenizerBase | None = None, note: Any = None
) -> tuple[dict[str, Any], dict[str, Content]]:
    """JSON data and tensors of a file. Raises as :func:`save`."""
    model = _model_of(cache)
    rows = cache.columns.rows
    tensors: dict[str, Content] = {"tokens": tokens_of(cache, tokens)}
    if rows.valid is not None:
        tensors["valid"] = rows.valid
    rotaries = () if cache.columns.rotaries is None else cache.columns.rotaries.distinct
    for number, rotary in enumerate(rotaries):
        tensors[f"rotary.{number}"] = torch.stack(rotary.epochs)
    layers = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PackedLayer):
            if layer.core.keys is not None and layer.core.columns != rows.columns:
                raise ValueError(f"{layer.name} holds {layer.core.columns} columns and the cache {rows.columns}")
            state, parts = state_of(layer.core, str(index))
            state["rotary"] = _place(layer.core.rotary, rotaries)
        else:
            try:
                parts = {}
                state = {"own": to_plain(vars(layer), str(index), parts)}
            except ValueError as error:
                kind = type(layer).__name__
                raise ValueError(f"layer {index} of this cache is a {kind} that cannot be stored: {error}") from None
        tensors |= parts
        layers.append({"type": type(layer).__name__, **state})
    about = {
        "kvbits": __version__,
        "saved": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": {**fingerprint.of_model(model), "adapters": fingerprint.adapters(model)},
        "transformers": _release(),
        "tokenizer": fingerprint.of_tokenizer(tokenizer),
        "scheme": cache.scheme.to_json(),
        "rows": {"batch": rows.batch, "columns": rows.columns, "runs": rows.runs, "first_epoch": rows.first_epoch},
        "layers": layers,
        "rope_deltas": [None if (x := m.rope_deltas) is None else list(x.shape) for m in _counting(model)],
        "nbytes": asdict(cache.nbytes),
        "note": _checked(note),
    }
    return about, tensors


def _model_of(cache: KVCache) -> PreTrainedModel:
    """The model of a cache that can be stored."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"save takes a cache that kvbits.cache_for made, not {type(cache).__name__}")
    if cache.unsaved:
        raise ValueError(cache.unsaved)
    cache.settle()
    if not cache.packed_layers:
        raise ValueError(
            "every layer of this cache keeps the model's own type, so there is nothing that kvbits stores; layers with "
            "a sliding window are packed with sliding=True"
        )
    if cache.model is None:
        raise ValueError("the model of this cache is not there any more, and a file says of which model it is")
    deltas = [module.rope_deltas for module in _counting(cache.model)]
    if any(isinstance(x, torch.Tensor) and bool(x.any()) for x in deltas):
        raise ValueError(
            "the model itself keeps how far the positions of its pictures are ahead (rope_deltas), and another process "
            "would go on without; such a cache cannot be stored"
        )
    return cache.model


def _counting(model: PreTrainedModel) -> list[Any]:
    """Modules of Qwen2-VL and its relatives that remember how far the positions of the last pictures are ahead."""
    return [module for module in model.modules() if hasattr(module, "rope_deltas")]


def tokens_of(cache: KVCache, given: Tokens | None = None) -> torch.Tensor:
    """Ids that a cache has read, int32 ``[B, columns]``; -1 where neither the cache nor ``given`` knows them.

    Raises:
        ValueError: if what is given are not those of the cache.
    """
    noted = cache.tokens
    if given is None:
        return noted.int()
    ids = torch.as_tensor(given, dtype=torch.int64).cpu()
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.shape != noted.shape:
        more = noted.shape[1] + 1 == ids.shape[-1]
        hint = "; generate returns one token more than it has read" if more else ""
        raise ValueError(f"tokens {tuple(ids.shape)} are not those of a cache of {tuple(noted.shape)}{hint}")
    valid = cache.columns.rows.valid
    differ = (ids != noted) & (noted != UNKNOWN) & (True if valid is None else valid.cpu())
    if bool(differ.any()):
        row, column = differ.nonzero()[0].tolist()
        raise ValueError(
            f"token {column} of row {row} is {int(ids[row, column])}, but the cache has read {int(noted[row, column])}"
        )
    return torch.where(noted == UNKNOWN, ids, noted).int()


def _place(rotary: Rotary | None, rotaries: Sequence[Rotary]) -> int | None:
    return None if rotary is None else rotaries.index(rotary)


def _release() -> str:
    """Of Transformers, whose own layers may hold other things in another one."""
    from transformers import __version__ as release

    return ".".join(release.split(".")[:2])


def _checked(note: Any) -> Any:
    try:
        json.dumps(note, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"note is no JSON data: {error}") from None
    return note


# -- reading -----------------------------------------------------------------------------------------------------------


class Saved:
    """The file of a cache, open: what it says of itself is known, and no tensor has been read.

    Attributes:
        about: its JSON data.
        nbytes: length of the file.

    Raises as :func:`load`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file = Sealed(self.path)
        self.about: Mapping[str, Any] = self.file.about
        self.nbytes = self.file.nbytes

    @property
    def note(self) -> Any:
        """What :func:`save` was given."""
        return self.about["note"]

    @property
    def tokens(self) -> torch.Tensor:
        """Ids that the cache has read, int32 ``[B, columns]``; -1 where they are not known. Verified."""
        self.file.verify("tokens")
        return self.file.tensor("tokens")

    @property
    def scheme(self) -> Scheme:
        """Of the cache."""
        return Scheme.from_json(self.about["scheme"])

    def check(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Raise ValueError where ``model`` (or ``tokenizer``, if given) is not that of the cache, naming how."""
        found = differences(self.about, model)
        ours, theirs = fingerprint.of_tokenizer(tokenizer), self.about["tokenizer"]
        if None not in (ours, theirs) and ours != theirs:
            found.append("its tokenizer has another vocabulary")
        if found:
            more = f", and {len(found) - 4} more differences" if len(found) > 4 else ""
            kind = self.about["model"]["class"]
            raise ValueError(
                f"{self.path} is the cache of another {kind}, and not for this model: {'; '.join(found[:4])}{more}"
            )

    def cache(
        self, model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None, verify: bool = True
    ) -> KVCache:
        """As :func:`load`."""
        refuse_unless_served(model)
        self.check(model, tokenizer)
        if verify:
            self.file.verify()
        try:
            return self._cache(model)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise Damaged(f"{self.path} contradicts itself: {type(error).__name__} {error}") from None

    def _cache(self, model: PreTrainedModel) -> KVCache:
        about, tensor = self.about, self.file.remapped().tensor  # caches write over blocks that were cropped
        states = about["layers"]
        cache = make_cache(model, self.scheme, any(state.get("window") is not None for state in states))
        tokens = self.tokens.clone()
        rows, rotaries = self._rows(tokens.shape, model.device), cache.columns.rotaries
        if rotaries is not None:
            names = [f"rotary.{number}" for number in range(len(rotaries.distinct))]
            rows = rows.renumbered(rotaries.adopt([tensor(name) for name in names]))
        self._require(len(states) == len(cache.layers), f"it has {len(states)} layers, not {len(cache.layers)}")
        devices = devices_of_layers(model, len(states))
        for index, (layer, state, device) in enumerate(zip(cache.layers, states, devices, strict=True)):
            kind = type(layer).__name__
            self._require(state["type"] == kind, f"layer {index} is a {state['type']}, and here a {kind}")
            if isinstance(layer, PackedLayer):
                core = layer.core
                there = (state["scheme"], state["window"], state["rotary"])
                place = _place(core.rotary, () if rotaries is None else rotaries.distinct)
                here = (str(core.scheme), core.window, place)
                self._require(there == here, f"layer {index} (scheme, window, rotary) is {there}, here {here}")
                restore(core, state, str(index), tensor, rows, device)
                layer.is_initialized = core.keys is not None
            else:
                release = about["transformers"]
                self._require(release == _release(), f"a {kind} of Transformers {release} may hold other things here")
                vars(layer).update(from_plain(state["own"], tensor, device))
        for module, shape in zip(_counting(model), about["rope_deltas"], strict=True):  # as where it was saved
            module.rope_deltas = None if shape is None else torch.zeros(shape, dtype=torch.int64, device=model.device)
        cache.hold(rows, TokenIds(tokens))
        return cache

    def _rows(self, shape: torch.Size, device: torch.device) -> Rows:
        data = self.about["rows"]
        valid = self.file.tensor("valid").to(device, copy=True) if "valid" in self.file.names else None
        if shape != (data["batch"], data["columns"]) or (valid is not None and valid.shape != shape):
            raise Damaged(f"{self.path} contradicts itself: its rows")
        runs = data["runs"] and tuple(tuple(Run(*map(int, run)) for run in row) for row in data["runs"])
        return Rows(*shape, None if valid is None else valid.bool(), runs, int(data["first_epoch"]))

    def _require(self, true: bool, what: str) -> None:
        if not true:
            raise ValueError(f"{self.path} does not fit what this release makes of its model: {what}")


def differences(about: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """How a model differs from that of a saved cache, in words; empty where it does not."""
    here, there = fingerprint.of_model(model), about["model"]
    ours, theirs = Heads(*here.get("heads", ())), Heads(*there.get("heads", ()))
    if ours != theirs:  # their weights are then others, too
        return [f"the file has {theirs}, and this process {ours}"]
    found = fingerprint.differences(here, there)
    if not found and here["dtype"] != there["dtype"]:
        found.append(f"it is {here['dtype']}, not {there['dtype']}, and so are its keys and values")
    if not found and (active := fingerprint.adapters(model)) != there["adapters"]:
        found.append(f"its active adapters are {active}, not {there['adapters']}")
    return found
