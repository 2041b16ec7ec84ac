"""Watches a vLLM in this process: its pages against the codecs bit for bit, and its attention against float64.

The model's own arithmetic decides which keys and values come in; the witness takes them as they come. So what it finds
is the backend's doing alone, and no error that grows from layer to layer or from token to token hides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch

from kvbits.attend import KERNELS
from kvbits.codecs import Codec
from kvbits.encode import encode
from kvbits.numerics import bitpack, hadamard
from kvbits.schemes.scheme import Scheme
from kvbits.store.record import Slot
from kvbits.transform.rotate import rotate
from kvbits.vllm import backend, pages
from kvbits.vllm.backend import PackedAttention, StepBuilder

BOUND = {"native": 1e-3, "reference": 1e-5}
"""Of the largest value that a row weighs. The first is the bound of docs/kernels.md, whose factors have sixteen bits;
the second is a hundred roundings of float32. An answer is a mean of values and may be far smaller than they are, and it
is the weights that are off: an error is in parts of what they weigh."""


@dataclass
class Found:
    """Counts of one round; ``wrong_`` are those that must be zero.

    Attributes:
        written: tokens of all layers that were looked at after they were written.
        attended: answers, one for each request, layer and step.
        over_history: those of them that read packed tokens.
        mixed: steps with prompts and single new tokens in them.
        reused: pages that were begun again over what another request had left.
        error: the largest of an answer, in parts of the largest value that it weighs.
        of_output: the largest of a call, in parts of its largest output, as docs/kernels.md counts.
    """

    written: int = 0
    attended: int = 0
    over_history: int = 0
    mixed: int = 0
    reused: int = 0
    error: float = 0.0
    of_output: float = 0.0
    wrong_bits: int = 0
    wrong_tokens: int = 0
    wrong_answers: int = 0


class Side:
    """What the keys, or the values, of one layer's pages should hold: each token by itself, through the codec."""

    def __init__(self, codec: Codec, slots: Sequence[Slot], block: int) -> None:
        self.codec, self.slots, self.block = codec, slots, block
        self.parts: dict[str, torch.Tensor] = {}

    def put(self, places: torch.Tensor, x: torch.Tensor, room: int) -> None:
        """Tokens ``x [T, H, D]`` at ``places`` of ``room``."""
        tokens = x.shape[0]
        block = torch.cat([x, x.new_zeros(-tokens % 8, *x.shape[1:])]).transpose(0, 1)  # [H, T, D]
        packed = self.codec.encode(rotate(block) if self.codec.rotates else block, {})
        decoded = self.codec.decode(packed, {}).double()
        if self.codec.rotates:
            decoded = decoded @ hadamard.rotation(x.shape[-1]).double().T
        if bits := self.codec.format.bits:
            packed["codes"] = bitpack.unpack(packed["codes"], bits)
        for name, part in {**packed, "decoded": decoded.float()}.items():
            lines = part.transpose(0, 1)[:tokens]
            if name not in self.parts:
                self.parts[name] = lines.new_zeros(room, *lines.shape[1:])
            self.parts[name][places] = lines

    def differs(self, pool: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
        """Whether each token of ``some`` pages of the ``pool [P, H, record bytes]`` has other bits: ``[n, block]``."""
        wrong = torch.zeros(len(some), self.block, dtype=torch.bool)
        for slot in self.slots:
            part, held = slot.part, pool[some][..., slot.offset : slot.offset + slot.part.nbytes]
            found = held.contiguous().view(part.dtype).unflatten(-1, part.shape)
            if part.role == "codes" and self.codec.format.bits:
                found = bitpack.unpack(found, self.codec.format.bits)
            wanted = self.parts[part.name].unflatten(0, (-1, self.block))[some].transpose(1, 2)  # [n, H, block, m]
            found, wanted = (x.contiguous().view(torch.uint8) for x in (found, wanted))
            wrong |= (found != wanted).transpose(1, 2).flatten(2).any(-1)
        return wrong


class Layer:
    """The pages of one layer, as they should be; ``ids`` and ``positions`` of tokens, -1 where nobody wrote."""

    def __init__(self, scheme: Scheme, layout: pages.Pages, count: int) -> None:
        self.block, self.room = layout.block, count * layout.block
        self.ids, self.positions = torch.full((self.room,), -1), torch.full((self.room,), -1)
        self.keys = Side(scheme.key, layout.record.keys, layout.block)
        self.values = Side(scheme.value, layout.record.values, layout.block)

    def wrong(self, pool: torch.Tensor, some: torch.Tensor) -> int:
        written = self.ids.unflatten(0, (-1, self.block))[some] >= 0
        return int(((self.keys.differs(pool, some) | self.values.differs(pool, some)) & written).sum())


@dataclass
class Witness:
    """Notes what every layer is given, and compares what it stores and answers under ``scheme``."""

    scheme: Scheme
    bound: float = BOUND["native"]
    layers: dict[int, Layer] = field(default_factory=dict)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    found: Found = field(default_factory=Found)
    ids: Any = None
    positions: Any = None
    step: Any = None
    pools: list[torch.Tensor] = field(default_factory=list)

    @contextmanager
    def watching(self, engine: Any) -> Iterator[None]:
        """Everything that happens to ``engine`` within."""
        build, update, forward = StepBuilder.build, PackedAttention.do_kv_cache_update, PackedAttention.forward

        def built(builder: Any, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
            lengths, starts = common.seq_lens.tolist(), common.query_start_loc_cpu.tolist()
            self.step = lengths[: common.num_reqs], starts, common.block_table_tensor.clone().long()
            queries = {starts[i + 1] - starts[i] for i in range(common.num_reqs)}
            self.found.mixed += 1 in queries and len(queries) > 1
            return build(builder, prefix, common, *args, **kwargs)

        def updated(impl: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            update(impl, layer, key, value, cache, slots)
            self.wrote(impl, cache, key, value, slots)

        def answered(
            impl: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, meta: Any, output: Any, **more: Any
        ) -> Any:
            forward(impl, layer, q, k, v, cache, meta, output, **more)
            if meta is not None:
                self.answered(impl, cache, q, k, v, output)
            return output

        def begun(model: Any, args: Any, kwargs: Any) -> None:
            self.ids, self.positions = kwargs["input_ids"].clone(), kwargs["positions"].clone()

        hooks = engine.apply_model(lambda model: model.register_forward_pre_hook(begun, with_kwargs=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepBuilder, "build", built)
            patch.setattr(PackedAttention, "do_kv_cache_update", updated)
            patch.setattr(PackedAttention, "forward", answered)
            yield
        for hook in hooks:
            hook.remove()

    def layer_of(self, impl: Any, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Layer:
        if cache.data_ptr() not in self.layers:
            self.pools.append(backend._pool(cache))
            self.layers[cache.data_ptr()] = Layer(self.scheme, impl._pages(cache, key, value), cache.shape[0])
        return self.layers[cache.data_ptr()]

    def wrote(self, impl: Any, cache: Any, key: Any, value: Any, slots: Any) -> None:
        real = (slots >= 0).nonzero().flatten()
        if not len(real):
            return
        layer, places = self.layer_of(impl, cache, key, value), slots[real].long()
        begun = places[places % layer.block == 0] // layer.block
        for side in (layer.ids, layer.positions):
            of_pages = side.unflatten(0, (-1, layer.block))
            self.found.reused += int((of_pages[begun] >= 0).any(-1).sum()) if side is layer.ids else 0
            of_pages[begun] = -1
        layer.ids[places], layer.positions[places] = self.ids[real].long(), self.positions[real].long()
        layer.keys.put(places, key[real], layer.room)
        layer.values.put(places, value[real], layer.room)
        self.found.written += len(places)
        self.found.wrong_bits += layer.wrong(backend._pool(cache), (places // layer.block).unique())

    def answered(self, impl: Any, cache: Any, query: Any, key: Any, value: Any, output: Any) -> None:
        """Compare the answers of one layer and step: those to single tokens together, each other by itself."""
        layer, (lengths, starts, table) = self.layer_of(impl, cache, key, value), self.step
        queries = torch.tensor(starts[1 : len(lengths) + 1]) - torch.tensor(starts[: len(lengths)])
        single = (queries == 1).nonzero().flatten()
        for some in filter(len, (single, *(queries > 1).nonzero())):
            count, length = int(queries[some[0]]), torch.tensor(lengths)[some]
            column = torch.arange(int(length.max()))
            places = table[some][:, column // layer.block] * layer.block + column % layer.block  # [B, T]
            self.read(layer, places, length)
            new = torch.tensor(starts)[some][:, None] + torch.arange(count)  # [B, q]
            rows, at = torch.arange(len(some))[:, None], length[:, None] + torch.arange(-count, 0)
            sides = [layer.keys.parts["decoded"][places], layer.values.parts["decoded"][places]]
            for side, exact in zip(sides, (key, value), strict=True):
                side[rows, at] = exact[new].to(side.dtype)
            weighed = sides[1].abs().amax((2, 3)).masked_fill(column >= length[:, None], 0).amax(1)
            # A prompt without history goes to torch, which rounds weights to the model's own dtype.
            bound = self.bound if bool((length > count).all()) else max(self.bound, torch.finfo(output.dtype).eps)
            self.compare(output[new], attention(query[new], *sides, length, impl.scale), weighed, bound)
            self.found.attended += len(some)
            self.found.over_history += int((length > count).sum())

    def read(self, layer: Layer, places: torch.Tensor, lengths: torch.Tensor) -> None:
        """That rows are read whose tokens lie at ``places [B, T]``, ``lengths`` of each."""
        for ids, positions, length in zip(layer.ids[places], layer.positions[places], lengths.tolist(), strict=True):
            self.seen.add(tuple(ids[:length].tolist()))
            self.found.wrong_tokens += int((positions[:length] != torch.arange(length)).sum())

    def compare(self, output: torch.Tensor, wanted: torch.Tensor, weighed: torch.Tensor, bound: float) -> None:
        """What a kernel has answered, ``[B, q, Hq, D]``, with what is right; ``weighed [B]`` are largest values."""
        rounding = 0.0 if output.dtype == torch.float32 else torch.finfo(output.dtype).eps / 2
        error = ((output.double() - wanted).abs() - rounding * wanted.abs()).flatten(1).amax(1)
        self.found.of_output = max(self.found.of_output, float(error.max() / wanted.abs().max()))
        self.found.error = max(self.found.error, float((error / weighed).max()))
        self.found.wrong_answers += int((~(error <= bound * weighed)).sum())

    def finished(self, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """What was found since the last time; ``texts`` are what each request has read and said in all."""
        for layer, pool in zip(self.layers.values(), self.pools, strict=True):
            self.found.wrong_bits += layer.wrong(pool, torch.arange(len(pool)))
        for ids in self.seen:
            self.found.wrong_tokens += not any(ids == tuple(text[: len(ids)]) for text in texts)
        found, self.found, self.seen = asdict(self.found), Found(), set()
        return found

    def forget(self) -> None:
        """That anything was written: what a fault has left is nobody's."""
        self.layers.clear()
        self.pools.clear()


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of the last tokens of rows, ``[B, q, Hq, D]`` over ``[B, T, H, D]``, in float64."""
    query, keys, values = (x.double().transpose(1, 2) for x in (query, keys, values))
    group, count, total = query.shape[1] // keys.shape[1], query.shape[2], keys.shape[2]
    scores = query @ keys.repeat_interleave(group, 1).transpose(2, 3) * scale
    last = lengths[:, None, None] + torch.arange(-count, 0)[:, None]
    hidden = torch.arange(total) > last  # [B, q, T]
    answer = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1) @ values.repeat_interleave(group, 1)
    return answer.transpose(1, 2)


# -- faults ------------------------------------------------------------------------------------------------------------


def _other_codec(codec: Codec, x: torch.Tensor, params: Any) -> Any:
    """Encoded as hqq4 does, whose bits lie as those of int4."""
    return encode(Scheme.parse("hqq4").key, x, params)


def _last_token_unseen(table: Any, packed: Sequence[int], queries: int, block: int) -> pages.Batch:
    return _batch_of(table, [count - (count > 1) for count in packed], queries, block)


def _page_of_another(table: torch.Tensor, packed: Sequence[int], queries: int, block: int) -> pages.Batch:
    return _batch_of(table.roll(1, 0), packed, queries, block)


def _token_beside(self: pages.Pages, pool: Any, places: torch.Tensor, keys: Any, values: Any) -> None:
    _write(self, pool, places // 2 * 2 + 1 - places % 2 if len(places) > 1 else places, keys, values)


def _unordered(self: pages.Pages, pool: Any, places: Any, keys: Any, values: Any) -> None:
    """A step's tokens come into their pages a step too late."""
    for late in _LATE.pop(pool.data_ptr(), ()):
        _write(self, *late)
    _LATE[pool.data_ptr()] = [(pool, places, keys.clone(), values.clone())]


_batch_of, _write = pages.Batch.of, pages.Pages.write
_LATE: dict[int, list[Any]] = {}

FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "another codec of the same format": (pages, "encode", _other_codec, "wrong_bits"),
    "two tokens change places": (pages.Pages, "write", _token_beside, "wrong_bits"),
    "a step is written too late": (pages.Pages, "write", _unordered, "wrong_bits"),
    "the last stored token is not seen": (pages.Batch, "of", staticmethod(_last_token_unseen), "wrong_answers"),
    "pages of the next request are read": (pages.Batch, "of", staticmethod(_page_of_another), "wrong_answers"),
}
"""Planted ones: where, which name, what stands there instead, and which count must tell."""


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """One of FAULTS, beneath the witness; None is none, and ``reference`` is the slow twin of the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "reference":
            patch.setattr("kvbits.attend.KERNELS", tuple(x for x in KERNELS if x.name == fault))
        elif fault is not None:
            patch.setattr(*FAULTS[fault][:3])
        yield
    _LATE.clear()
