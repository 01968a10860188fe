"""The checks of machine code: spills in main loops, on a disassembly with a tile loop around a kv loop, and
matrices on their way at an arrival.

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


def test_descriptors_that_are_moved_in_the_main_loop_are_found() -> None:
    """As many as there are matrix instructions are accepted."""

    def moving(times: int) -> str:
        return SASS.replace("FADD R6, R24, R25 ;", "\n/*0090*/ ".join(["R2UR UR4, R6 ;"] * times))

    assert check(moving(2)) == []
    assert check(moving(3)) == [
        "attention: 3 moves to uniform registers for 2 matrix instructions in the main loop with "
        "/*0040*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ], R5"
    ]


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


LOAD = "LDSM.16.M88.4 R184, [R0]"
ARRIVAL = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR18+0x10], RZ"


def assembled(*code: tuple[str, int, int] | str) -> str:
    """What `nvdisasm -hex` prints for labels and (instruction, scoreboard or 7, mask of those waited for)."""
    lines = [".text.attention:"]
    for number, line in enumerate(code):
        if isinstance(line, str):
            lines.append(f"{line}:")
            continue
        instruction, scoreboard, waits = line
        control = scoreboard << 5 | waits << 11
        lines.append(f"/*{16 * number:04x}*/ {instruction} ; /* 0x{0:016x} */")
        lines.append(f"/* 0x{control << 41:016x} */")
    return "\n".join([*lines, "/*f000*/ EXIT ; /* 0x000000000000794d */", "/* 0x000fea0003800000 */"])


def test_control_bits_belong_to_the_instruction_before() -> None:
    function = attention(assembled((LOAD, 3, 0b100001), ("NOP", 7, 0)))
    load, nothing, end = function.instructions
    assert (load.scoreboard, nothing.scoreboard, end.scoreboard) == (3, None, None)
    assert [load.waits_for(i) for i in range(6)] == [True, False, False, False, False, True]


def test_a_matrix_in_flight_at_an_arrival_is_found() -> None:
    sass = assembled((LOAD, 1, 0), ("NOP", 7, 0b000101), (ARRIVAL, 7, 0))
    assert check(sass) == [
        f"attention: matrix in flight at an arrival: /*0000*/ {LOAD}, then /*0020*/ {ARRIVAL}"
    ]


@pytest.mark.parametrize("waiting", [1, 2])
def test_a_matrix_that_something_waited_for_may_be_given_back(waiting: int) -> None:
    """An instruction that uses it, or the arrival itself."""
    waits = [0b10 if i == waiting else 0 for i in range(3)]
    assert check(assembled((LOAD, 1, 0), ("LOP3.LUT R184, R184", 7, waits[1]), (ARRIVAL, 7, waits[2]))) == []


@pytest.mark.parametrize(("waits", "findings"), [(0b10, 0), (0b01, 2)])
def test_loads_in_a_row_share_the_last_ones_scoreboard(waits: int, findings: int) -> None:
    code = [(LOAD, 7, 0), (LOAD, 1, 0), ("FADD R1, R184, R1", 7, waits), (ARRIVAL, 7, 0)]
    assert len(check(assembled(*code))) == findings


def test_every_path_to_the_arrival_counts() -> None:
    code = [
        (LOAD, 1, 0),
        ("@P2 BRA `(.L_x_1)", 7, 0),
        ("FADD R1, R184, R1", 7, 0b10),
        ".L_x_1",
        (ARRIVAL, 7, 0),
    ]
    assert len(check(assembled(*code))) == 1
    assert check(assembled(code[0], *code[2:])) == []


def test_matrices_without_control_bits_do_not_pass() -> None:
    bare = "\n".join([".text.attention:", f"/*0000*/ {LOAD} ;", f"/*0010*/ {ARRIVAL} ;", "/*0020*/ EXIT ;"])
    assert check(bare) == ["attention: no control bits found in the disassembly"]
