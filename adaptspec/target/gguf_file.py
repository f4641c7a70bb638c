"""A GGUF file as a transformers model: dequantised weights, nothing left that says they were quantised."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"

READ_ERRORS = (OSError, ValueError, LookupError, OverflowError, MemoryError, TypeError, RuntimeError, struct.error)
"""What the readers below raise on damaged, cut or unsupported files, as found by cutting and flipping bytes."""


CHECKED_LOADING = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Options of `from_pretrained` that go with `check_complete`; its own error for mismatches only points to a log."""


def is_gguf(path: Path) -> bool:
    """Whether the file starts with the GGUF magic bytes."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def first_sentence(error: BaseException) -> str:
    """The beginning of another library's message, on one line and short enough to be quoted."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{line[:197]}..." if len(line) > 200 else line or type(error).__name__


def check_complete(found: Mapping[str, Any], name: str | Path) -> None:
    """Refuse weights that transformers would silently fill up with random numbers.

    Args:
        found: the loading info that comes with `CHECKED_LOADING`.

    Raises:
        ValueError: tensors are missing or have another shape than the config says.
    """
    for problem, keys in (("lack", found["missing_keys"]), ("have another shape of", found["mismatched_keys"])):
        if keys:
            first = min(key if isinstance(key, str) else key[0] for key in keys)
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ValueError(f"the weights of model {str(name)!r} {problem} {first}{more}")


def load_gguf(path: Path, *, dtype: Any) -> tuple[Any, Any]:
    """The causal LM (in eval mode, as transformers loads it) and the tokenizer in a GGUF file.

    Args:
        dtype: torch dtype of the weights after dequantisation. float32 holds them exactly.

    Raises:
        ValueError: not a GGUF file, damaged, or an architecture that transformers cannot read from GGUF.
        FileNotFoundError: no such file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not is_gguf(path):
        raise ValueError(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'")
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, **CHECKED_LOADING
        )
    except READ_ERRORS as error:
        raise ValueError(f"the GGUF file {path} cannot be read: {first_sentence(error)}") from error
    check_complete(found, path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except READ_ERRORS as error:
        raise ValueError(f"the GGUF file {path} holds no usable tokenizer: {first_sentence(error)}") from error
    # The weights are plain floats now; left in place, these two make saving and moving the model fail.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer
