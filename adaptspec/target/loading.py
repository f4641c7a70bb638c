"""From what a user calls a model to the model and its tokenizer."""

from __future__ import annotations

import os
import re
import ssl
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import torch
from huggingface_hub import constants, is_offline_mode
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from adaptspec.target.embedded import embedded_folder
from adaptspec.target.gguf_file import CHECKED_LOADING, READ_ERRORS, check_complete, first_sentence, is_gguf, load_gguf

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_SECONDS = 5.0


def load_target(
    model: str | os.PathLike[str], *, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """A causal LM in eval mode and its tokenizer.

    Args:
        model: "embedded", a local folder, a GGUF file, or a hub id. A folder called "embedded" is "./embedded".
        dtype: "float32", "bfloat16", "float16", or "auto": what the folder or hub model was saved in, and float32 for
            GGUF files and the embedded model, because only that holds dequantised weights exactly.
        device: "cpu", "cuda", "cuda:1", ..., or "auto": the first CUDA device if there is one, else the CPU.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        FileNotFoundError: no such folder, file or hub model, or the embedded model is not installed.
        ValueError: unknown dtype, absent device, a folder or file that holds no complete causal LM with tokenizer.

    >>> model, tokenizer = load_target("embedded")
    >>> model.dtype, tokenizer.eos_token
    (torch.float32, '<|im_end|>')
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    place = _device(device)
    name = os.fspath(model)
    path = Path(os.path.expanduser(name))
    if name == "embedded":
        network, tokenizer = _load_pretrained(embedded_folder(), dtype, local=True, trust_remote_code=False)
    elif path.is_dir():
        _check_folder(path)
        network, tokenizer = _load_pretrained(path, dtype, local=True, trust_remote_code=trust_remote_code)
    elif path.exists():
        if not is_gguf(path):
            raise ValueError(f"{path} is not a GGUF file; to load safetensors, name the folder that holds config.json")
        network, tokenizer = load_gguf(path, dtype=DTYPES.get(dtype, torch.float32))
    elif _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        network, tokenizer = _load_pretrained(
            name, dtype, local=not _hub_reachable(), trust_remote_code=trust_remote_code
        )
    else:
        raise FileNotFoundError(f"model {name!r}: no such file or folder, and not of the form of a hub id, owner/name")
    return network.to(place).eval(), tokenizer


def _load_pretrained(name: str | Path, dtype: str, *, local: bool, trust_remote_code: bool) -> tuple[Any, Any]:
    """Config, then tokenizer, then weights: what is quick to fail comes first."""
    options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(name, **options)
    except OSError as error:
        if isinstance(name, Path):
            raise ValueError(f"config.json in {name} cannot be read: {first_sentence(error)}") from error
        reason = "and the hub cannot be reached" if local else first_sentence(error)
        raise FileNotFoundError(f"model {name!r}: no such folder, not in the hub cache, {reason}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the config of model {str(name)!r} cannot be used: {first_sentence(error)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except READ_ERRORS as error:
        raise ValueError(f"model {str(name)!r} has no usable tokenizer: {first_sentence(error)}") from error
    try:
        network, found = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=DTYPES.get(dtype, "auto"),
            **CHECKED_LOADING,
            **options,
        )
    except (*READ_ERRORS, SafetensorError) as error:
        raise ValueError(f"model {str(name)!r} cannot be loaded: {first_sentence(error)}") from error
    check_complete(found, name)
    return network, tokenizer


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        hint = f"; to load the GGUF file in it, name the file: {files[0]}" if files else ""
        raise ValueError(f"folder {folder} holds no config.json{hint}")
    if not _has_tokenizer(folder):
        raise ValueError(f"folder {folder} holds no tokenizer (tokenizer.json, tokenizer.model or a vocab file)")


def _has_tokenizer(folder: Path) -> bool:
    """Any of the files that tokenizers are made from, config files aside."""
    patterns = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        available += [kind, *(f"{kind}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in available:
        raise ValueError(f"device {name!r} is not available; available: auto, {', '.join(available)}")
    return torch.device(name)


def _hub_reachable() -> bool:
    """One quick request, because the hub client retries for some 20 s per file before it gives up."""
    if is_offline_mode():
        return False
    try:
        with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_HUB_SECONDS):
            return True
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the hub client may know the certificate
    except TimeoutError:
        return False
