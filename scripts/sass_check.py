"""Finds three things in disassembled kernels that ptxas does not report.

Local memory (spills, indexed local arrays) in a main loop. ptxas reports spills of a whole kernel; those of a
prologue cost nothing, those of a loop that feeds the matrix unit cost everything. A main loop is an innermost
loop that holds warpgroup matrix instructions (HGMMA, QGMMA, IGMMA), and no load or store of local memory may
be in it.

Descriptors of matrices in ordinary registers in a main loop. A matrix instruction takes them from uniform
registers. Where ptxas cannot know that all lanes of a warp have the same one, it computes them in every lane
and moves them (R2UR) for every instruction. A few moves are about other things: more than there are matrix
instructions may not be in a main loop.

Matrices on their way to registers (LDSM) at an arrival. A warp that arrives at an mbarrier gives back what it
has read, but the arrival does not wait for loads in flight: these may come after what overwrites them. An
instruction that waits for a load says so in its control bits.

    python scripts/sass_check.py FILE.cubin...      exits 1 and lists them if there are any
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from toolchain import INSTALL, find_toolchain

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L_\w+):$")
_INSTRUCTION = re.compile(r"^/\*([0-9a-f]+)\*/\s+((?:@!?U?P\w+\s+)?)([A-Z0-9_.]+)\s*(.*?)\s*;")
_ENCODING = re.compile(r"/\* 0x([0-9a-f]{16}) \*/$")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_MATRIX = re.compile(r"[A-Z]GMMA\b")
_LOCAL = re.compile(r"(LDL|STL)\b")
_TO_UNIFORM = "R2UR"
_MATRIX_LOAD = "LDSM"
_ARRIVAL = "SYNCS.ARRIVE"
_STOPS = ("EXIT", "RET", "BRX", "JMX", "KILL")


class Instruction(NamedTuple):
    """One machine instruction; `offset` in hexadecimal, as the disassembler prints it.

    `control` are the upper bits of its encoding, if that was printed.
    """

    offset: str
    predicate: str
    opcode: str
    operands: str
    control: int | None = None

    def __str__(self) -> str:
        return f"/*{self.offset}*/ {self.predicate}{self.opcode} {self.operands}"

    @property
    def target(self) -> str | None:
        """Label that a branch goes to."""
        match = _TARGET.search(self.operands) if self.opcode.startswith(("BRA", "JMP")) else None
        return match[1] if match else None

    @property
    def scoreboard(self) -> int | None:
        """The one of six that tells that the instruction's result is there."""
        number = (self.control or 0) >> 5 & 7
        return number if self.control is not None and number < 6 else None

    def waits_for(self, scoreboard: int) -> bool:
        """Whether it is issued only when all results are there that this one tells of."""
        return bool((self.control or 0) >> 11 >> scoreboard & 1)

    @property
    def falls_through(self) -> bool:
        """Whether control may pass to the next instruction; BRA.DIV and BRA.U are conditional."""
        if self.predicate:
            return True
        is_jump = self.opcode in ("BRA", "JMP") and "," not in self.operands
        return not (is_jump or self.opcode.startswith(_STOPS))


class Function(NamedTuple):
    """A function's instructions, and the index in them that each label stands for."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]

    def successors(self, index: int) -> list[int]:
        """Indices of the instructions that may follow the one at `index`."""
        instruction = self.instructions[index]
        following = [index + 1] if instruction.falls_through and index + 1 < len(self.instructions) else []
        if instruction.target in self.labels:
            following.append(self.labels[instruction.target])
        return [i for i in following if i < len(self.instructions)]


def parse(sass: str) -> Iterator[Function]:
    """The functions in what `nvdisasm -c` prints; with `-hex`, it prints encodings, too, 64 bits a line."""
    function: Function | None = None
    for line in map(str.strip, sass.splitlines()):
        if match := _FUNCTION.match(line):
            if function:
                yield function
            function = Function(match[1], [], {})
        elif function and (match := _LABEL.match(line)):
            function.labels[match[1]] = len(function.instructions)
        elif function and (match := _INSTRUCTION.match(line)):
            function.instructions.append(Instruction(*match.groups()))
        elif function and function.instructions and (match := _ENCODING.match(line)):
            upper = int(match[1], 16)
            function.instructions[-1] = function.instructions[-1]._replace(control=upper >> 41)
    if function:
        yield function


def main_loops(function: Function) -> list[set[int]]:
    """Instruction indices of each innermost loop that holds matrix instructions."""
    matrix = {i for i, x in enumerate(function.instructions) if _MATRIX.match(x.opcode)}
    loops = [body for body in _loops(function).values() if body & matrix]
    return [body for body in loops if not any(other < body for other in loops)]


def check(sass: str) -> list[str]:
    """One line for each thing that is wrong, in the code or with what was understood of it."""
    functions = list(parse(sass))
    if not functions:
        return ["no function found in the disassembly"]
    return [finding for function in functions for finding in _check_function(function)]


def _check_function(function: Function) -> list[str]:
    return [*_local_memory(function), *_moved_descriptors(function), *_matrices_in_flight(function)]


def _local_memory(function: Function) -> list[str]:
    loops = main_loops(function)
    if not loops and any(_MATRIX.match(x.opcode) for x in function.instructions):
        return [f"{function.name}: no loop found around its matrix instructions"]
    return [
        f"{function.name}: local memory in a main loop: {function.instructions[i]}"
        for i in sorted(set().union(*loops))
        if _LOCAL.match(function.instructions[i].opcode)
    ]


def _moved_descriptors(function: Function) -> list[str]:
    findings = []
    for loop in main_loops(function):
        opcodes = [function.instructions[i].opcode for i in loop]
        moves = sum(opcode.startswith(_TO_UNIFORM) for opcode in opcodes)
        products = sum(bool(_MATRIX.match(opcode)) for opcode in opcodes)
        if moves > products:
            first = function.instructions[min(loop)]
            findings.append(
                f"{function.name}: {moves} moves to uniform registers for {products} matrix instructions "
                f"in the main loop with {first}"
            )
    return findings


def _matrices_in_flight(function: Function) -> list[str]:
    """Loads that may not have come when an arrival is issued, by any path."""
    loads = [i for i, x in enumerate(function.instructions) if x.opcode.startswith(_MATRIX_LOAD)]
    if any(function.instructions[i].control is None for i in loads):
        return [f"{function.name}: no control bits found in the disassembly"]
    return [
        f"{function.name}: matrix in flight at an arrival: {function.instructions[load]}, then "
        f"{function.instructions[arrival]}"
        for load in loads
        for arrival in _arrivals_before_its_end(function, load)
    ]


def _arrivals_before_its_end(function: Function, load: int) -> list[int]:
    """Arrivals that are reached from a load before anything waits for it.

    Loads come in order, and of several in a row only the last one may have a scoreboard.
    """
    found, seen = set(), set()
    pending = [(load, None)]
    while pending:
        index, scoreboard = pending.pop()
        instruction = function.instructions[index]
        if scoreboard is not None and instruction.waits_for(scoreboard):
            continue
        if instruction.opcode.startswith(_ARRIVAL):
            found.add(index)
        if scoreboard is None and instruction.opcode.startswith(_MATRIX_LOAD):
            scoreboard = instruction.scoreboard
        following = {(i, scoreboard) for i in function.successors(index)} - seen
        seen |= following
        pending += following
    return sorted(found)


def disassemble(cubin: Path, nvdisasm: Path) -> str:
    """Machine code of a cubin as text."""
    command = [nvdisasm, "-hex", "-c", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loops(function: Function) -> dict[int, set[int]]:
    """Natural loops by header. ptxas emits reducible flow, where an edge to an instruction on the current
    depth-first path closes a loop; code that was moved behind the function's end and branches back does not.
    """
    predecessors: dict[int, list[int]] = {}
    for index in range(len(function.instructions)):
        for following in function.successors(index):
            predecessors.setdefault(following, []).append(index)
    loops: dict[int, set[int]] = {}
    for source, header in _closing_edges(function):
        loops.setdefault(header, {header}).update(_reaching(source, header, predecessors))
    return loops


def _closing_edges(function: Function) -> list[tuple[int, int]]:
    edges = []
    on_path, done = {0}, set()
    stack = [(0, iter(function.successors(0)))] if function.instructions else []
    while stack:
        index, following = stack[-1]
        step = next(following, None)
        if step is None:
            stack.pop()
            on_path.discard(index)
            done.add(index)
        elif step in on_path:
            edges.append((index, step))
        elif step not in done:
            on_path.add(step)
            stack.append((step, iter(function.successors(step))))
    return edges


def _reaching(source: int, header: int, predecessors: dict[int, list[int]]) -> set[int]:
    """Instructions that reach `source` without passing `header`."""
    body, pending = {header}, [source]
    while pending:
        index = pending.pop()
        if index not in body:
            body.add(index)
            pending += predecessors.get(index, [])
    return body


def main(paths: list[str]) -> int:
    """Checks the cubins named on the command line."""
    nvdisasm = find_toolchain().nvdisasm
    if nvdisasm is None:
        sys.exit(f"no nvdisasm found; install it with: {INSTALL}")
    findings = [line for path in paths for line in check(disassemble(Path(path), nvdisasm))]
    print("\n".join(findings) if findings else f"files: {len(paths)}, nothing found")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
