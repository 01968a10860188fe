"""Finds local-memory traffic (spills, indexed local arrays) in the main loops of disassembled kernels.

ptxas reports spills of a whole kernel; those of a prologue cost nothing, those of a loop that feeds the
matrix unit cost everything. So the check works on the machine code: a main loop is an innermost loop that
holds warpgroup matrix instructions (HGMMA, QGMMA, IGMMA), and no load or store of local memory may be in it.

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
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_MATRIX = re.compile(r"[A-Z]GMMA\b")
_LOCAL = re.compile(r"(LDL|STL)\b")
_STOPS = ("EXIT", "RET", "BRX", "JMX", "KILL")


class Instruction(NamedTuple):
    """One machine instruction; `offset` in hexadecimal, as the disassembler prints it."""

    offset: str
    predicate: str
    opcode: str
    operands: str

    def __str__(self) -> str:
        return f"/*{self.offset}*/ {self.predicate}{self.opcode} {self.operands}"

    @property
    def target(self) -> str | None:
        """Label that a branch goes to."""
        match = _TARGET.search(self.operands) if self.opcode.startswith(("BRA", "JMP")) else None
        return match[1] if match else None

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
    """The functions in what `nvdisasm -c` prints."""
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
    if function:
        yield function


def main_loops(function: Function) -> list[set[int]]:
    """Instruction indices of each innermost loop that holds matrix instructions."""
    matrix = {i for i, x in enumerate(function.instructions) if _MATRIX.match(x.opcode)}
    loops = [body for body in _loops(function).values() if body & matrix]
    return [body for body in loops if not any(other < body for other in loops)]


def check(sass: str) -> list[str]:
    """One line for each thing that is wrong: local memory in a main loop, or no main loop where one must be.

    The second kind keeps a disassembly that is not understood from passing as clean.
    """
    functions = list(parse(sass))
    if not functions:
        return ["no function found in the disassembly"]
    return [finding for function in functions for finding in _check_function(function)]


def _check_function(function: Function) -> list[str]:
    loops = main_loops(function)
    if not loops and any(_MATRIX.match(x.opcode) for x in function.instructions):
        return [f"{function.name}: no loop found around its matrix instructions"]
    return [
        f"{function.name}: local memory in a main loop: {function.instructions[i]}"
        for i in sorted(set().union(*loops))
        if _LOCAL.match(function.instructions[i].opcode)
    ]


def disassemble(cubin: Path, nvdisasm: Path) -> str:
    """Machine code of a cubin as text."""
    return subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout


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
    print("\n".join(findings) if findings else f"files: {len(paths)}, no local memory in a main loop")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
