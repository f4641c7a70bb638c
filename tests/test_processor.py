"""The setting that AMD processors need, and only they."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptspec import processor


@pytest.fixture
def information(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "_INFORMATION", path)
    return path


def test_amd_gets_the_setting_and_keeps_its_own(information: Path) -> None:
    information.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n")
    environment: dict[str, str] = {}
    processor.prefer_fast_kernels(environment)
    assert environment == {"MKL_CBWR": "AVX2"}
    environment = {"MKL_CBWR": "COMPATIBLE"}
    processor.prefer_fast_kernels(environment)
    assert environment == {"MKL_CBWR": "COMPATIBLE"}
    assert processor.processor_name() == "AMD EPYC"


def test_others_do_not(information: Path) -> None:
    environment: dict[str, str] = {}
    processor.prefer_fast_kernels(environment)  # no such file
    information.write_text("vendor_id\t: GenuineIntel\n")
    processor.prefer_fast_kernels(environment)
    assert environment == {}
    assert processor.processor_name()


def test_settings_in_force_are_reported() -> None:
    assert processor.speed_settings({"MKL_CBWR": "AVX2", "HOME": "/"}) == {"MKL_CBWR": "AVX2"}
