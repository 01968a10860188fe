"""What a cubin says about itself: target, entries, parameters, resources.

A cubin is a small ELF64 file. The few fields needed are read here with `struct`, because importing a general
ELF package would take longer than everything else between a request and its first launch; the tests compare
the two. NVIDIA does not document the rest (`.nv.info`, `.nv.compat`, the flags); the layouts below were read
off cubins made by ptxas 11.8 to 13.5, and published ones, against what cuobjdump prints for them.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from cubin_runtime.errors import CubinFormatError
from cubin_runtime.request import Architecture
from kernel_meta.schema import KernelRow, Step

DYNAMIC_SHARED_MEMORY = "fmha_dynamic_shared_memory"
"""Constant by which a cubin states the dynamic shared memory of its one entry, in bytes:
`extern "C" __device__ const unsigned int`."""


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of an entry; offset and size in bytes within the parameter area."""

    ordinal: int
    offset: int
    size: int


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one entry needs. Sizes in bytes; None = the cubin does not say."""

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    static_shared_memory: int
    """Per block, without the part that the system reserves (1 KiB from sm_90 on)."""
    registers: int
    """Per thread at launch."""
    local_bytes: int
    """Stack frame per thread: local arrays and spilled registers."""
    max_threads: int | None
    """Most threads of one block (`__launch_bounds__`)."""
    required_threads: int | None
    """The one block size that it runs with (`__block_size__`, `.reqntid`)."""
    dynamic_shared_memory: int | None

    @property
    def threads(self) -> int | None:
        """Threads per block to launch with: the required number, else the bound."""
        return self.required_threads or self.max_threads


class Cubin(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded cubin; made by `inspect`."""

    arch: Architecture
    compiler: str | None
    """Such as "ptxas 13.0.88"."""
    kernels: dict[str, KernelFacts]
    symbols: dict[str, int]
    """Value of every 32-bit object that the file initialises."""


def inspect(data: bytes) -> Cubin:
    """Decodes a cubin. Raises CubinFormatError, and nothing else, for bytes that are none."""
    try:
        elf = _Elf(data)
        arch = _architecture(elf)
        constants = dict(_constants(elf))
        return Cubin(
            arch=arch,
            compiler=_compiler(elf),
            kernels=_kernels(elf, arch, constants),
            symbols=constants,
        )
    except (struct.error, OverflowError, UnicodeDecodeError) as error:
        raise CubinFormatError(f"not a cubin, or a damaged one: {error}") from error


def check_row(cubin: Cubin, row: KernelRow | Step) -> None:
    """Raises CubinFormatError, naming both sides, unless the cubin is the kernel that the row describes."""
    if row.resources is None:
        raise CubinFormatError(f"{row.name}: the table holds no resources for it, so it has not been built")
    kernel = cubin.kernels.get(row.entry_name)
    if kernel is None:
        raise CubinFormatError(
            f"{row.name}: the table names the entry {row.entry_name}, the cubin holds "
            + (", ".join(sorted(cubin.kernels)) or "none")
        )
    facts: dict[str, tuple[object, object]] = {
        "arch": (row.architecture, cubin.arch),
        "threads": (row.resources.threads, kernel.threads),
        "registers": (row.resources.registers, kernel.registers),
        "static_shared_memory": (row.resources.static_shared_memory, kernel.static_shared_memory),
        "parameter_bytes": (row.resources.parameter_bytes, kernel.parameter_bytes),
    }
    if kernel.dynamic_shared_memory is not None:
        facts["shared_memory"] = (row.resources.shared_memory, kernel.dynamic_shared_memory)
    differing = [
        f"{name} is {told} in the table and {found} in the cubin"
        for name, (told, found) in facts.items()
        if told != found
    ]
    if differing:
        raise CubinFormatError(f"{row.name}: not the cubin that the table describes: {'; '.join(differing)}")


# ---- the ELF container ----

_HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")

_EM_CUDA = 190
_SHT_NOBITS = 8
_STT_OBJECT = 1
_STT_FUNC = 2
_STO_CUDA_ENTRY = 0x10


class _Section(NamedTuple):
    """A section header, fields as in the file."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int

    @property
    def file_size(self) -> int:
        return 0 if self.type == _SHT_NOBITS else self.size


class _Symbol(NamedTuple):
    number: int
    name: str
    kind: int
    other: int
    section: int
    value: int
    size: int


class _Elf:
    """Header fields, sections by number (`table`, `names`) and by name (`sections`), and symbols."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._name_bytes = 0
        header = _HEADER.unpack_from(data)
        magic, bits, order, _, self.os_abi, self.abi_version = header[:6]
        _, machine, self.version, _, _, offset, self.flags, _, _, _, entry_size, count, names = header[6:]
        if (magic, bits, order) != (b"\x7fELF", 2, 1):
            raise CubinFormatError(f"not a cubin: it starts with {data[:6]!r}, not with a 64-bit ELF header")
        if machine != _EM_CUDA:
            raise CubinFormatError(f"not a cubin: its ELF machine is {machine}, not {_EM_CUDA} (CUDA)")
        if entry_size != _SECTION.size:
            raise CubinFormatError(
                f"a damaged cubin: section headers of {entry_size} bytes, not {_SECTION.size}"
            )
        self.table = [
            _Section._make(_SECTION.unpack_from(data, offset + i * entry_size)) for i in range(count)
        ]
        # Sections and names of real files overlap a little. Without bounds, here and in `_string`, crafted
        # files in which they all span the file would take quadratic time.
        if sum(section.file_size for section in self.table) > 2 * len(data):
            raise CubinFormatError(f"a damaged cubin: its sections claim more than its {len(data)} bytes")
        self.names = [self._string(self._section(names), section.name) for section in self.table]
        self.sections = dict(zip(self.names, self.table, strict=True))
        self.symbols = list(self._symbols())

    def content(self, name: str) -> bytes:
        """Bytes of the section; empty where there is none or it takes no room in the file."""
        section = self.sections.get(name)
        return b"" if section is None else self.read(section.offset, section.file_size)

    def read(self, offset: int, size: int) -> bytes:
        if offset + size > len(self.data):
            raise CubinFormatError(
                f"a damaged cubin: it has {len(self.data)} bytes and refers to {offset}..{offset + size}"
            )
        return self.data[offset : offset + size]

    def _section(self, index: int) -> _Section:
        if index >= len(self.table):
            raise CubinFormatError(f"a damaged cubin: it refers to section {index} of {len(self.table)}")
        return self.table[index]

    def _string(self, table: _Section, start: int) -> str:
        end = self.data.find(b"\0", table.offset + start, table.offset + table.size)
        if end < 0:
            raise CubinFormatError(
                f"a damaged cubin: no name at {start} in a string table of {table.size} bytes"
            )
        self._name_bytes += end - table.offset - start
        if self._name_bytes > 2 * len(self.data):
            raise CubinFormatError(f"a damaged cubin: its names claim more than its {len(self.data)} bytes")
        return self.data[table.offset + start : end].decode()

    def _symbols(self) -> Iterator[_Symbol]:
        section = self.sections.get(".symtab")
        if section is None:
            return
        names = self._section(section.link)
        for number, fields in enumerate(_SYMBOL.iter_unpack(self.content(".symtab"))):
            name, info, other, section_number, value, size = fields
            yield _Symbol(number, self._string(names, name), info & 15, other, section_number, value, size)


# ---- target and compiler ----

# (ELF OS ABI, ABI version) -> (shift of the compute capability within the flags, bit of an `a` target).
# The first is CUDA's up to 12.x for targets before sm_100, the second the one for all later.
_FLAG_LAYOUTS = {(51, 7): (0, 0x800), (65, 8): (8, 0x8)}

# `.nv.compat` attributes, and the class of instructions that only family targets have.
_COMPAT_ACCELERATOR_TARGET = 9
_COMPAT_ISA_CLASS = 2
_ISA_CLASS_FAMILY = 2


def _architecture(elf: _Elf) -> Architecture:
    layout = _FLAG_LAYOUTS.get((elf.os_abi, elf.abi_version))
    if layout is None:
        raise CubinFormatError(
            f"a cubin of an unknown kind: ELF OS ABI {elf.os_abi}, version {elf.abi_version}; "
            f"known are {', '.join(f'{abi} version {version}' for abi, version in _FLAG_LAYOUTS)}"
        )
    shift, accelerator_bit = layout
    major, minor = divmod(elf.flags >> shift & 0xFF, 10)
    compat = {
        tag: int.from_bytes(payload[:1], "little") for tag, payload in _attributes(elf.content(".nv.compat"))
    }
    # CUDA 12 states an `a` target in the flags, CUDA 13 in `.nv.compat`.
    if elf.flags & accelerator_bit or compat.get(_COMPAT_ACCELERATOR_TARGET) == 1:
        return Architecture(major, minor, "a")
    # Nothing else states an `f` target: it shows in the instructions used or in the compiler's arguments.
    family_code = compat.get(_COMPAT_ISA_CLASS, 0) >= _ISA_CLASS_FAMILY
    if family_code or re.search(rf"-arch[ =]sm_{major}{minor}f\b", _tool(elf).arguments):
        return Architecture(major, minor, "f")
    return Architecture(major, minor)


class _Tool(NamedTuple):
    name: str = ""
    version: str = ""
    arguments: str = ""


_NOTE = struct.Struct("<3I")
_TOOL = struct.Struct("<6I")


def _tool(elf: _Elf) -> _Tool:
    """The tool that wrote the file, from its note: a header of string offsets, then the strings."""
    note = elf.content(".note.nv.tkinfo")
    if not note:
        return _Tool()
    owner_size, _, _ = _NOTE.unpack_from(note)
    start = _NOTE.size + owner_size
    _, _, name, version, _, arguments = _TOOL.unpack_from(note, start)
    strings = note[start + _TOOL.size :]

    def text(offset: int) -> str:
        return strings[offset:].split(b"\0", 1)[0].decode()

    return _Tool(text(name), text(version), text(arguments))


def _compiler(elf: _Elf) -> str | None:
    tool = _tool(elf)
    if tool.name:
        release = re.search(r"V([0-9.]+)", tool.version)
        return f"{tool.name} {release[1]}" if release else tool.name
    # Files without the note carry the toolkit's version where ELF has its own.
    return f"CUDA {elf.version // 10}.{elf.version % 10}" if elf.version > 1 else None


# ---- kernels ----

# `.nv.info` attributes (EIATTR_*) and what follows their tag.
_PARAM_INFO = 0x17
_PARAM_INFO_V2 = 0x45
_PARAM_SIZE = 0x19
_MAX_THREADS = 0x05
_REQUIRED_THREADS = 0x10
_FRAME_SIZE = 0x11
_REGISTER_COUNT = 0x2F

_TAG = struct.Struct("<BBH")
_FORMAT_SIZED = 4

_PARAM = struct.Struct("<IHHI")
_PARAM_V2 = struct.Struct("<IHHHH")
_PER_SYMBOL = struct.Struct("<II")
_THREE = struct.Struct("<3I")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")

# From sm_90 on the system keeps this much of each block's shared memory. `.nv.shared.<entry>` counts it in,
# `ptxas -v` and the documented limits do not.
_RESERVED_SHARED_MEMORY = 1024


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Tags of an attribute section. The payload is what follows the tag, or the two bytes within it."""
    position = 0
    while position < len(content):
        kind, tag, value = _TAG.unpack_from(content, position)
        position += _TAG.size
        if kind == _FORMAT_SIZED:
            yield tag, content[position : position + value]
            position += value
        else:
            yield tag, _U16.pack(value)


def _kernels(elf: _Elf, arch: Architecture, constants: dict[str, int]) -> dict[str, KernelFacts]:
    kernels: dict[str, KernelFacts] = {}
    registers = _per_symbol(elf, _REGISTER_COUNT)
    frames = _per_symbol(elf, _FRAME_SIZE)
    reserved = _RESERVED_SHARED_MEMORY if arch.major >= 9 else 0
    for symbol in elf.symbols:
        if symbol.kind != _STT_FUNC or not symbol.other & _STO_CUDA_ENTRY:
            continue
        if symbol.number not in registers or symbol.name in kernels:
            raise CubinFormatError(f"a damaged cubin: no register count, or two, for its entry {symbol.name}")
        info = list(_attributes(elf.content(f".nv.info.{symbol.name}")))
        shared = elf.sections.get(f".nv.shared.{symbol.name}")
        parameters, parameter_bytes = _parameter_area(symbol.name, info)
        kernels[symbol.name] = KernelFacts(
            name=symbol.name,
            parameters=parameters,
            parameter_bytes=parameter_bytes,
            static_shared_memory=max(shared.size - reserved, 0) if shared else 0,
            registers=registers[symbol.number],
            local_bytes=frames.get(symbol.number, 0),
            max_threads=_block_size(info, _MAX_THREADS),
            required_threads=_block_size(info, _REQUIRED_THREADS),
            dynamic_shared_memory=constants.get(DYNAMIC_SHARED_MEMORY),
        )
    return kernels


def _per_symbol(elf: _Elf, wanted: int) -> dict[int, int]:
    """The attribute's value by number of the symbol that it is about."""
    return dict(
        _PER_SYMBOL.unpack(payload) for tag, payload in _attributes(elf.content(".nv.info")) if tag == wanted
    )


def _parameter_area(name: str, info: list[tuple[int, bytes]]) -> tuple[tuple[Parameter, ...], int]:
    """Parameters in order, and the bytes from the first to the end of the last.

    The file counts both from where the constant bank holds parameters, which is not aligned for every
    struct: on sm_90 one of alignment 64 starts at 48.
    """
    found = sorted(_parameters(info), key=lambda parameter: parameter.ordinal)
    start = found[0].offset if found else 0
    size = next((_U16.unpack(payload)[0] for tag, payload in info if tag == _PARAM_SIZE), 0) - start
    moved = tuple(Parameter(p.ordinal, p.offset - start, p.size) for p in found)
    if any(p.offset < 0 or p.offset + p.size > size for p in moved):
        raise CubinFormatError(f"a damaged cubin: {name} has parameters outside its area of {size} bytes")
    return moved, size


def _parameters(info: list[tuple[int, bytes]]) -> Iterator[Parameter]:
    for tag, payload in info:
        if tag == _PARAM_INFO:
            _, ordinal, offset, packed = _PARAM.unpack(payload)
            yield Parameter(ordinal, offset, packed >> 18)
        elif tag == _PARAM_INFO_V2:  # sizes beyond 14 bits
            _, ordinal, offset, size, _ = _PARAM_V2.unpack(payload)
            yield Parameter(ordinal, offset, size)


def _block_size(info: list[tuple[int, bytes]], wanted: int) -> int | None:
    return next((math.prod(_THREE.unpack(payload)) for tag, payload in info if tag == wanted), None)


def _constants(elf: _Elf) -> Iterator[tuple[str, int]]:
    for symbol in elf.symbols:
        if symbol.kind != _STT_OBJECT or symbol.size != _U32.size or symbol.section >= len(elf.table):
            continue
        section, name = elf.table[symbol.section], elf.names[symbol.section]
        if not name.startswith((".nv.global", ".nv.constant")):
            continue
        # Zeros take no room in the file.
        value = elf.read(section.offset + symbol.value, _U32.size) if section.file_size else bytes(_U32.size)
        yield symbol.name, _U32.unpack(value)[0]
