"""The check for spills in main loops, on a disassembly with a tile loop around a kv loop.

In tests/data/main_loop.sass the kv loop is 0040 to 00a0; its slow barrier wait was moved behind the end of
the function (00f0) and branches back into the middle of the loop; 0030 and 00b0 are in the tile loop only.
"""

from pathlib import Path

import pytest
from sass_check import Function, check, main_loops, parse

SASS = (Path(__file__).parent / "data" / "main_loop.sass").read_text()


def attention(sass: str) -> Function:
    (function,) = parse(sass)
    return function


def test_instructions_and_labels() -> None:
    function = attention(SASS)
    assert (function.name, len(function.instructions)) == ("attention", 19)
    assert function.instructions[function.labels[".L_x_2"]].opcode == "WARPGROUP.ARRIVE"
    assert str(function.instructions[5]) == "/*0050*/ @!P0 BRA `(.L_x_4)"


def test_the_kv_loop_with_its_wait_is_the_main_loop() -> None:
    function = attention(SASS)
    (loop,) = main_loops(function)
    assert sorted(function.instructions[i].offset for i in loop) == [
        *("0040", "0050", "0060", "0070", "0080", "0090", "00a0"),
        *("00f0", "0100", "0110"),
    ]


def test_local_memory_around_the_main_loop_is_accepted() -> None:
    assert check(SASS) == []


@pytest.mark.parametrize(
    ("offset", "instruction"),
    [("0090", "LDL.LU.64 R6, [R1+0x10]"), ("0060", "STL [R1+0x4], R7"), ("00f0", "@P3 LDL R9, [R1]")],
)
def test_local_memory_in_the_main_loop_is_found(offset: str, instruction: str) -> None:
    lines = [
        f"        /*{offset}*/                   {instruction} ;" if f"/*{offset}*/" in line else line
        for line in SASS.splitlines()
    ]
    assert check("\n".join(lines)) == [f"attention: local memory in a main loop: /*{offset}*/ {instruction}"]


@pytest.mark.parametrize("opcode", ["QGMMA.SP.64x128x64.F32.E4M3.E4M3", "IGMMA.64x128x32.S8.S8"])
def test_every_kind_of_matrix_instruction_counts(opcode: str) -> None:
    sass = SASS.replace("HGMMA.64x128x16.F32.BF16", opcode).replace("FADD R6, R24, R25", "LDL R6, [R1]")
    assert len(check(sass)) == 1


def test_a_conditional_branch_falls_through() -> None:
    function = attention(SASS.replace("STL [R1], R2", "BRA.DIV UR4, `(.L_x_4)"))
    assert function.successors(1) == [2, function.labels[".L_x_4"]]


def test_what_is_not_understood_does_not_pass() -> None:
    assert check("") == ["no function found in the disassembly"]
    assert check(SASS.replace("@P1 BRA", "@P1 NOP").replace("@P2 BRA", "@P2 NOP")) == [
        "attention: no loop found around its matrix instructions"
    ]


def test_a_kernel_without_matrix_instructions_has_no_main_loop() -> None:
    assert check(SASS.replace("HGMMA", "FFMA")) == []
