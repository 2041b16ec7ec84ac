"""Small models whose caches are saved, and how layers are compared."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers as hf
from typer.testing import CliRunner

import stored
import zoo
from kvbits.attend import Call, attend
from kvbits.cli import app
from kvbits.hf.names import cache_name
from kvbits.layer.cache import LayerCache
from kvbits.schemes.scheme import Scheme
from kvbits.transform.rotary import Rotary
from kvbits.types import Params

SMALL = "residual=4,block=32"

INT8 = f"int8,{SMALL}"

VARIOUS = (INT8, f"kivi4,sinks=2+3,{SMALL}", f"fp8-static,{SMALL}", f"lm4,centred,{SMALL}")


def tokens(rows: int, count: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 2, count, channels, generator=generator).to(dtype) for channels in (16, 24)]


def calibrated(scheme: Scheme) -> tuple[Params, Params]:
    sides = zip((scheme.key, scheme.value), tokens(1, 256, 99), strict=True)
    return tuple(codec.fit(x) if codec.needs_calibration else {} for codec, x in sides)  # type: ignore[return-value]


def layer(scheme: str | Scheme, window: int | None = None) -> LayerCache:
    parsed = Scheme.parse(scheme)
    turning = parsed.pre_rope or parsed.centred
    rotary = Rotary(10.0 ** -torch.arange(8).double()) if turning else None
    return LayerCache(parsed, window, rotary=rotary, calibrated=calibrated(parsed))


def assert_same_layer(one: LayerCache, other: LayerCache) -> None:
    """All that is stored, and what attention makes of it."""
    assert one.held == other.held and one.late == other.late and one.dropped == other.dropped
    assert one.calibrated == other.calibrated and one.even == other.even
    for ours, theirs in zip((one.key_params, one.value_params), (other.key_params, other.value_params), strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for row in range(one.rows.batch):
        stored.assert_same(stored.row_of(one, row), stored.row_of(other, row))
    if one.keys is not None and one.columns and one.rows.batch:
        query = torch.randn(one.rows.batch, 4, 1, 16, generator=torch.Generator().manual_seed(7))
        mask = None
        if one.rows.valid is not None:
            mask = torch.zeros(one.rows.valid.shape).masked_fill(~one.rows.valid, -torch.inf)[:, None, None]
        ours, theirs = (attend(Call(query, core.view(), 0.25, mask)) for core in (one, other))
        assert torch.equal(ours, theirs)


def grow(cores: tuple[LayerCache, ...], count: int, seed: int) -> None:
    for core in cores:
        core.append(*tokens(core.rows.batch or 2, count, seed))


_built = functools.cache(lambda name, dtype, number: zoo.build(name, dtype))


def model_of(name: str, dtype: torch.dtype = torch.float32, number: int = 0) -> hf.PreTrainedModel:
    """One of a family; those with another number are equal to it, as in another process."""
    return _built(name, dtype, number)


def call(model: hf.PreTrainedModel, cache: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **{cache_name(model): cache}, **more).logits


def inspect(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output
