"""Every kernel compiles for every GPU as the committed table says: no spill, no more shared memory than there is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from adaptspec.kernels import ahead_of_time
from adaptspec.kernels.ahead_of_time import (
    GPUS,
    Row,
    Table,
    compile_all,
    find_gpu,
    format_table,
    main,
    measure,
    specialisations,
)
from adaptspec.kernels.backend import operations

COMMITTED = Path(__file__).parents[2] / "docs" / "kernels.json"

ROW = Row("op/kernel", "sm_90", warps=4, registers=96, spilled_bytes=0, shared_bytes=4096, roofline_microseconds=1.5)


def test_the_committed_table_is_what_is_compiled_now() -> None:
    table = compile_all()
    assert table.differences(Table.from_json(COMMITTED.read_text(encoding="utf-8"))) == []
    assert [problem for row in table.rows for problem in row.problems()] == []
    kernels = {row.kernel for row in table.rows}
    assert {kernel.split("/")[0] for kernel in kernels} == set(operations())
    assert len(table.rows) == len(kernels) * len(GPUS)


def test_a_changed_table_is_noticed() -> None:
    table = Table("3.7.1", (ROW, dataclasses.replace(ROW, gpu="sm_80")))
    assert table.differences(Table.from_json(table.to_json())) == []
    changed = Table("3.7.1", (dataclasses.replace(ROW, registers=97), table.rows[1]))
    (line,) = table.differences(changed)
    assert "registers=96" in line and "registers=97" in line
    assert table.differences(Table("3.7.1", (ROW,))) == ["op/kernel on sm_80 is not in the committed table"]
    assert Table("3.7.1", (ROW,)).differences(table) == ["op/kernel on sm_80 is committed but not compiled"]


def test_another_triton_asks_to_regenerate() -> None:
    (line,) = Table("3.8.0", (ROW,)).differences(Table("3.7.1", (ROW,)))
    assert line.startswith("the committed table is of triton 3.7.1, installed is 3.8.0: regenerate it with")


def test_spills_and_too_much_shared_memory_are_problems() -> None:
    assert ROW.problems() == []
    assert dataclasses.replace(ROW, spilled_bytes=8).problems() == ["op/kernel on sm_90 spills 8 bytes per thread"]
    for gpu, limit in (("sm_80", 166912), ("sm_90", 232448), ("sm_100", 232448), ("gfx942", 65536)):
        assert dataclasses.replace(ROW, gpu=gpu, shared_bytes=limit).problems() == []
        (line,) = dataclasses.replace(ROW, gpu=gpu, shared_bytes=limit + 1).problems()
        assert line == f"op/kernel on {gpu} takes {limit + 1} bytes of shared memory, allowed are {limit}"


def test_a_real_spill_is_read_from_the_compiler() -> None:
    """Blocks twice as large as `choose_launch` takes for float32 do not fit into registers."""
    (fits,) = (each for each in specialisations(["tree_attention"]) if "/attend fp32" in each.name)
    wide = dataclasses.replace(fits, constexprs={**fits.constexprs, "BLOCK_ROWS": 32, "BLOCK_COLUMNS": 32})
    assert measure(wide, find_gpu("sm_90")).spilled_bytes > 0
    assert ahead_of_time._hip_usage(
        {"amdgcn": "    .private_segment_fixed_size: 148\n    .sgpr_count: 9\n    .vgpr_count:     256\n"}
    ) == (256, 148)


def test_rooflines_take_the_slower_of_memory_and_arithmetic() -> None:
    gpu = find_gpu("sm_90")
    assert gpu.roofline_seconds(3_350_000, 0) == pytest.approx(1e-6)
    assert gpu.roofline_seconds(3_350_000, 10 * 989_000_000) == pytest.approx(10e-6)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("3.7.1", (ROW,))
    monkeypatch.setattr(ahead_of_time, "compile_all", lambda ops: table)
    monkeypatch.setattr(ahead_of_time, "specialisations", lambda ops: [])
    file = tmp_path / "kernels.json"
    assert main(["--write", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["rows"][0]["registers"] == 96
    assert main(["--check", str(file)]) == 0
    assert "op/kernel" in capsys.readouterr().out
    table = Table("3.7.1", (dataclasses.replace(ROW, spilled_bytes=4),))
    assert main(["--check", str(file)]) == 1
    errors = capsys.readouterr().err
    assert "spills 4 bytes" in errors and "committed" in errors
    assert main([]) == 1
    with pytest.raises(SystemExit):
        main(["kv_compact", "--write", str(file)])  # would replace the rows of other ops by none
    assert "name none" in capsys.readouterr().err


def test_the_printed_table_names_its_assumptions() -> None:
    text = format_table(Table("3.7.1", (ROW,)), {"op/kernel": "one sequence"})
    assert "estimates at the vendors' peak figures (A100 2 TB/s and 312 TFLOP/s" in text
    assert "op/kernel: one sequence" in text


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown GPU 'sm_91'; did you mean 'sm_90'"):
        compile_all(gpus=["sm_91"])
    with pytest.raises(ValueError, match="unknown kernel 'kv_compat'; did you mean 'kv_compact'"):
        compile_all(["kv_compat"])
