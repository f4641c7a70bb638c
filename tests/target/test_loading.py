"""What `load_target` takes, and what it says when that is not there, not whole, or not a causal LM."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptspec.target import loading
from adaptspec.target.loading import load_target
from tests.tiny_models import CHAT_TEMPLATE, SPECIALS, TOKENS, write_gguf


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model folder that a test may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(20)[None]).logits


def message(error: type[Exception], model: Any, **options: Any) -> str:
    with pytest.raises(error) as caught:
        load_target(model, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


def test_folder_gives_the_same_model(tiny_folder: Path, tiny_llama: Any) -> None:
    model, tokenizer = load_target(tiny_folder, device="cpu")
    assert not model.training
    assert torch.equal(logits(model), logits(tiny_llama))
    assert tokenizer("abc d<|im_end|>").input_ids == [TOKENS.index(t) for t in ("ab", "c", "Ġ", "d", SPECIALS[2])]


def test_gguf_gives_the_same_model(tiny_gguf: Path, tiny_llama: Any, tmp_path: Path) -> None:
    model, tokenizer = load_target(str(tiny_gguf), device="cpu")
    assert not model.training
    assert torch.equal(logits(model), logits(tiny_llama))
    assert tokenizer("abc d<|im_end|>").input_ids == [TOKENS.index(t) for t in ("ab", "c", "Ġ", "d", SPECIALS[2])]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert model.generation_config.eos_token_id == 2
    model.save_pretrained(tmp_path)  # refused by transformers while the model looks quantised
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_followed(tiny_folder: Path, tiny_gguf: Path, dtype: str) -> None:
    for source in (tiny_folder, tiny_gguf):
        model, _ = load_target(source, dtype=dtype, device="cpu")
        assert {weights.dtype for weights in model.parameters()} == {getattr(torch, dtype)}


def test_auto_dtype_is_the_saved_one_for_folders_and_float32_for_gguf(
    tiny_folder: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    half, tokenizer = load_target(tiny_folder, dtype="bfloat16", device="cpu")
    half.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_target(tmp_path, device="cpu")[0].dtype is torch.bfloat16
    assert load_target(tiny_gguf, device="cpu")[0].dtype is torch.float32


def test_unknown_dtype(tiny_folder: Path) -> None:
    text = message(ValueError, tiny_folder, dtype="fp32")
    assert text == "dtype must be one of auto, float32, bfloat16, float16, got 'fp32'"


@pytest.mark.parametrize("device", ["cuda:99", "gpu", ""])
def test_absent_device(tiny_folder: Path, device: str) -> None:
    text = message(ValueError, tiny_folder, device=device)
    assert text.startswith(f"device {device!r} is not available; available: auto, cpu")


@pytest.mark.parametrize("model", ["./missing", "missing.gguf", "a/b/c", "../x", "~no-such-user/x", "owner/na me"])
def test_missing_path(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"model {model!r}: no such file or folder" in message(FileNotFoundError, model)


def test_hub_id_that_cannot_be_looked_up() -> None:
    text = message(FileNotFoundError, "no-such-owner/no-such-model")
    assert text == (
        "model 'no-such-owner/no-such-model': no such folder, not in the hub cache, and the hub cannot be reached"
    )


@pytest.fixture
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    """A server on this machine in the hub's place; it knows nothing and answers 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            """Stay off stderr."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(loading.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_reaching_the_hub_takes_one_request(
    hub_server: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not loading._hub_reachable()  # offline mode, as the test suite sets it
    monkeypatch.setattr(loading, "is_offline_mode", lambda: False)
    assert loading._hub_reachable()
    hub_server.shutdown()
    hub_server.server_close()
    assert not loading._hub_reachable()


def test_folder_without_config(folder: Path, tiny_gguf: Path) -> None:
    (folder / "config.json").unlink()
    assert message(ValueError, folder) == f"folder {folder} holds no config.json"
    shutil.copy(tiny_gguf, folder)
    assert message(ValueError, folder).endswith(f"to load the GGUF file in it, name the file: {folder / 'tiny.gguf'}")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "not a valid JSON"),
        ('{"hidden_size": 32}', "model_type"),
        ('{"model_type": "no-such-type"}', "no-such-type"),
        ('{"model_type": "t5"}', "cannot be loaded"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "configuration_x.X"}}', "custom code"),
    ],
)
def test_folder_with_unusable_config(folder: Path, config: str, expected: str) -> None:
    (folder / "config.json").write_text(config)
    text = message(ValueError, folder)
    assert expected in text
    assert str(folder) in text


def test_folder_without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert f"folder {folder} holds no tokenizer" in message(ValueError, folder)


def test_folder_with_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert "has no usable tokenizer" in message(ValueError, folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no file named model.safetensors" in message(ValueError, folder)


def test_folder_with_cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "cannot be loaded" in message(ValueError, folder)


@pytest.mark.parametrize(("shape", "expected"), [(None, "lack"), ((3, 3), "have another shape of")])
def test_weights_are_never_made_up(folder: Path, shape: tuple[int, int] | None, expected: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    if shape is not None:
        weights[name] = torch.zeros(shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{expected} {name}" in message(ValueError, folder)


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"PK\x03\x04")
    assert f"{path} is not a GGUF file" in message(ValueError, path)


@pytest.mark.parametrize("kept", [4, 22, 100, 1_000, 2_400, 5_000, 0.5, 0.99])
def test_cut_gguf(tiny_gguf: Path, tmp_path: Path, kept: float) -> None:
    data = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: kept if kept >= 1 else int(kept * len(data))])
    assert f"the GGUF file {path} cannot be read" in message(ValueError, path)


def test_gguf_that_lacks_a_tensor(tiny_llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "hole.gguf"
    write_gguf(path, tiny_llama, leave_out="model.layers.1.mlp.up_proj.weight")
    assert message(ValueError, path).endswith("lack model.layers.1.mlp.up_proj.weight")


def test_gguf_of_an_unknown_architecture(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(tiny_gguf.read_bytes().replace(b"llama", b"lxxma"))
    text = message(ValueError, path)
    assert "cannot be read" in text
    assert "lxxma" in text
