"""Values in a stopped session, by name: registers, special registers, variables, arguments."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ptxlab.debugger import values
from ptxlab.debugger.session import DebuggerError, Session
from ptxlab.debugger.stoppable import Moment
from ptxlab.debugger.variables import declared_type
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.memory import BASE, LOCAL_NAME, SHARED_START
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, bits_of
from ptxlab.emulator.launch import array_of
from ptxlab.hardware.descriptors import SPANS, swizzle
from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.runtime import Kernel
from ptxlab.runtime.signature import parse_declaration

_NAME = re.compile(r"(?P<name>[^\s\[\]]+|\[[^\]]+\])(?:\[(?P<index>[^\]]*)\])?")
_SPECIAL = re.compile(r"%[a-z]\w*(\.[xyz])?")
_ADDRESS = re.compile(r"\[(?P<register>%?[\w$]+)(?P<offset>[+-]\d+)?\]")


@dataclass(frozen=True)
class Held:
    """A named value: a register, variable or argument, with its type and contents.

    Attributes:
        name: as it is printed.
        origin: whose it is, or where it lies.
        type: a PTX type, or lanes such as `u8x4`.
        values: of `values.dtype_of` that type; a register's of all lanes of the warp [32], a variable's in its shape.
        lane: of the warp, for a register; None for memory.
    """

    name: str
    origin: str
    type: str
    values: Array
    lane: int | None = None
    first: int = 0  # index of the first value, of a slice
    byte: Callable[[int], str] | None = None  # names the byte at an offset, of memory whose parts have places
    address: int | None = None  # of a whole variable in shared memory

    def as_type(self, type_name: str) -> "Held":
        """View the same bits as another type."""
        dtype = values.dtype_of(type_name)
        contiguous_values = np.ascontiguousarray(self.values)
        if self.lane is not None:
            if dtype.itemsize > contiguous_values.itemsize or (type_name == "pred") != (self.type == "pred"):
                raise DebuggerError(
                    f"as: {self.name} has {8 * contiguous_values.itemsize} bits, {type_name} does not fit"
                )
            return replace(
                self,
                type=type_name,
                values=contiguous_values.view(dtype)[:: contiguous_values.itemsize // dtype.itemsize],
            )
        if contiguous_values.itemsize != dtype.itemsize:
            raw = contiguous_values.reshape(-1).view(np.uint8)
            contiguous_values = raw[: len(raw) // dtype.itemsize * dtype.itemsize]
            if not len(contiguous_values):
                raise DebuggerError(f"as: {self.name} has {len(raw)} bytes, {type_name} takes {dtype.itemsize}")
        return replace(self, type=type_name, values=contiguous_values.view(dtype))

    def part(self, index: str) -> "Held":
        """Return the values at an index such as `3`, `0:16` or `2, 0:8`; a register is indexed by lane."""
        parts = [part.strip() for part in index.split(",")]
        if not all(re.fullmatch(r"\d*(?::\d*)?", part) and part for part in parts):
            raise DebuggerError(f"print: an index is a number or from:to, per axis (got [{index}])")
        ranges = [slice(*(int(n) if n else None for n in part.split(":"))) if ":" in part else int(part)
                  for part in parts]  # fmt: skip
        try:
            chosen = self.values[tuple(ranges)]
        except IndexError:
            shape = " x ".join(map(str, self.values.shape))
            is_flat = self.values.ndim == 1 and len(parts) > 1
            hint = f"; `print {self.name} as {self.type} ROWSxCOLUMNS` gives it a shape" if is_flat else ""
            raise DebuggerError(f"print: {self.name} is {shape} (got [{index}]){hint}") from None
        if not np.size(chosen):
            raise DebuggerError(f"print: [{index}] of {self.name} is empty")
        last_range = ranges[-1] if len(ranges) == self.values.ndim else slice(None)
        start = last_range.start or 0 if isinstance(last_range, slice) and np.ndim(chosen) == 1 else 0
        name = f"{self.name}[{', '.join(parts)}]"
        chosen_at = np.arange(self.values.size).reshape(self.values.shape)[tuple(ranges)].flat[0]
        place = self.byte(int(chosen_at) * self.values.itemsize) if self.byte else self.origin
        return replace(self, name=name, origin=place, values=np.asarray(chosen), first=start, address=None)

    def tile(self, rows: int, columns: int, span: int = 16) -> "Held":
        """View the first elements as a matrix.

        `span` is that of the swizzle by which its 16-byte pieces lie in shared memory.
        """
        if rows * columns > self.values.size or not rows * columns:
            raise DebuggerError(f"print: {self.name} has {self.values.size} elements, {rows}x{columns} does not fit")
        if span == 16:
            return replace(self, values=self.values.reshape(-1)[: rows * columns].reshape(rows, columns), first=0)
        row_bytes = columns * self.values.itemsize
        if span not in SPANS or row_bytes != span or self.address is None:
            rule = f"swizzle {', '.join(map(str, SPANS[1:]))}, the bytes of a row, of a whole variable in shared memory"
            raise DebuggerError(f"print: {rule} (got {self.name}, rows of {row_bytes} bytes, {span})")
        raw = np.ascontiguousarray(self.values).reshape(-1).view(np.uint8)
        places = swizzle(self.address + np.arange(rows * span), span) - self.address
        if places.min() < 0 or places.max() >= len(raw):
            raise DebuggerError(f"print: {self.name} does not begin or end at a multiple of {8 * span} bytes")
        return replace(self, values=raw[places].view(self.values.dtype).reshape(rows, columns), first=0)


class State:
    """Looks names up, for the thread that a session looks at."""

    def __init__(self, session: Session, moment: Moment | None = None, lane: int | None = None) -> None:
        """Look at the session's moment and thread, or at another moment of its run and another lane of the wave."""
        self.session, self.moment = session, session.now.moment if moment is None else moment
        self.machine = self.moment.machine
        chosen_lane = session.lane if lane is None else lane
        if chosen_lane is None:
            raise DebuggerError("the block that is looked at runs in another wave; thread or block chooses another")
        self.lane: int = chosen_lane

    @property
    def place(self) -> str:
        """`block (0,0,0) thread (5,0,0)`."""
        return place_of(self.machine, self.lane)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the arguments: those of the session's kernel, or of another kernel those in its PTX."""
        entry, kernel = self.machine.launch.entry, self.session.kernel
        return kernel.parameters if entry.name == kernel.entry else tuple(parameter.name for parameter in entry.params)

    def find(self, text: str) -> Held:
        """Find the value of `%r5`, `%tid.x`, `tile[0:8]`, `a[3]`, `[%rd4+16]` or `shared`."""
        match = _NAME.fullmatch(text.strip())
        if match is None:
            raise DebuggerError(f"print: a name, perhaps with an index such as [0:8] (got {text!r})")
        name, index = match["name"], match["index"]
        named_value = self.at_address(name) if name.startswith("[") else self.held_by_name(name)
        return named_value if index is None else named_value.part(index)

    def knows(self, name: str) -> bool:
        """Check whether `held_by_name` finds a name."""
        return name in self.registers() or name in self.memory_names() or name in self.parameters

    def held_by_name(self, name: str) -> Held:
        """Find a register, a special register, a variable of the kernel or of the module, or an argument."""
        if register := self.register(name):
            return self.of_register(register)
        if name.startswith("%"):
            return self.special(name)
        memory_names = self.memory_names()
        if name in memory_names:
            return self.of_memory(name, *memory_names[name])
        if name in self.parameters:
            return self.argument(self.parameters.index(name))
        names = [*self.registers(), *memory_names, *self.parameters]
        suggestions = ", ".join(difflib.get_close_matches(name, names, 3, 0.5))
        unread_note = (
            " (debug information of `nvcc -G` is not read)" if ".debug_info" in self.session.kernel.source.text else ""
        )
        hint = (
            f"nearest: {suggestions}"
            if suggestions
            else f"C++ locals are in registers{unread_note}, which `line` shows by source line"
        )
        raise DebuggerError(f"print: no register, variable or argument {name!r}; {hint}")

    # Registers

    def registers(self) -> dict[str, ir.Register]:
        """Return the registers of the code, by name.

        If blocks of PTX declare one name twice, it is the one that is nearest above.
        """
        pc, register_by_name = self.moment.pc, dict[str, ir.Register]()
        code = self.machine.code
        for index in [*range(len(code) - 1, pc, -1), *range(min(pc, len(code) - 1) + 1)]:
            for register in ir.registers((*code[index].operands, *([code[index].guard] if code[index].guard else []))):
                register_by_name[register.name] = register
        return register_by_name

    def register(self, name: str) -> ir.Register | None:
        """Return the register of that name, or None."""
        return self.registers().get(name)

    def of_register(self, register: ir.Register) -> Held:
        """Return a register's values in the warp."""
        first = self.lane // 32 * 32
        row = self.machine.row(replace(register, negated=False, selector=""), register.type)[first : first + 32]
        return Held(register.name, self.place, register.type, row.copy(), self.lane - first)

    def special(self, name: str) -> Held:
        """Return a special register such as `%tid.x`."""
        type_name = "u64" if name.endswith("64") else "u32"
        try:
            if not _SPECIAL.fullmatch(name):
                raise ValueError(name)
            read = self.machine.special(name, type_name)
        except (UnknownOpcode, ValueError):
            suggestions = ", ".join(difflib.get_close_matches(name, self.registers(), 3, 0.4))
            raise DebuggerError(
                f"print: no register {name} in this kernel{suggestions and '; nearest: '}{suggestions}"
            ) from None
        first = self.lane // 32 * 32
        row = np.broadcast_to(read(slice(first, first + 32)), (32,))
        return Held(name, self.place, type_name, row.copy(), self.lane - first)

    # Memory

    def memory_names(self) -> dict[str, tuple[int, int, str]]:
        """Return variables by name -> arena offset, bytes, PTX type.

        `shared` and `local` are the whole windows.
        """
        machine, launch = self.machine, self.machine.launch
        base = int(machine.shared_base[self.lane]) + SHARED_START
        places = {"shared": (base, launch.window_bytes, "u32")} if launch.window_bytes else {}
        if launch.entry.local_bytes:
            places["local"] = int(machine.local_base[self.lane]), launch.entry.local_bytes, "u32"
        for variable in launch.entry.shared:
            size = variable.size or launch.window_bytes - variable.offset  # of an extern array: all that follows
            places[plain_name(variable.name)] = base + variable.offset, size, variable.type
        for region in launch.memory.regions:
            space, _, name = region.name.partition(" ")
            if space in ("global", "const"):
                types = {v.name: v.type for v in self.session.kernel.module.variables}
                places[plain_name(name)] = region.start, region.end - region.start, types.get(name, "u32")
        return places

    def of_memory(self, name: str, start: int, size: int, type_name: str) -> Held:
        """Return a variable; in CUDA C++ of the type and shape that its declaration shows."""
        type_name = f"u{type_name[1:]}" if type_name[0] == "b" and type_name[1:].isdigit() else type_name
        shape: tuple[int, ...] = (-1,)
        if self.session.kernel.source.language == "cu" and name not in ("shared", "local"):
            type_name, shape = declared_type(self.session.kernel, name, size) or (type_name, shape)
        dtype = values.dtype_of(type_name)
        bytes_ = self.machine.memory.arena[start : start + size // dtype.itemsize * dtype.itemsize]
        base = int(self.machine.shared_base[self.lane])
        shared_offset = start - base if self.machine.launch.is_shared(np.array([start]))[0] else None
        elements = bytes_.view(dtype).reshape(shape)
        place = self.byte_namer(start)
        return Held(name, place(0), type_name, elements, address=shared_offset, byte=place)

    def byte_namer(self, start: int) -> Callable[[int], str]:
        """Return a function that names the byte at an offset from the arena offset `start`."""
        return lambda offset: self.machine.memory.name_byte(start + offset)

    def argument(self, position: int) -> Held:
        """Return a parameter: a number, or the array that it points to."""
        launch, name = self.machine.launch, self.parameters[position]
        argument = launch.args[position]
        array = array_of(argument)
        if array is None:
            raw = np.frombuffer(argument, np.uint8) if isinstance(argument, bytes) else np.asarray(argument).reshape(1)
            return Held(name, f"argument {position}", type_named(raw.dtype), raw)
        offset = launch.addresses[id(launch.entry.params[position])] - BASE
        if isinstance(argument, TensorMap):
            start = launch.tensor_maps[offset][1]
        else:
            start = int(self.machine.memory.view[8][offset // 8]) - BASE
        type_name = type_named(array.dtype)
        elements = self.machine.memory.arena[start : start + array.nbytes].view(values.dtype_of(type_name))
        elements = elements.reshape(array.shape) if elements.itemsize == array.itemsize else elements
        return Held(name, f"argument {position}, {array.dtype}{list(array.shape)}", type_name, elements)

    def at_address(self, text: str) -> Held:
        """Return the memory at an address such as `[%rd4+16]`.

        It goes from where the register points to, to the end of what lies there.
        """
        match = _ADDRESS.fullmatch(text)
        register = self.register(match["register"]) if match else None
        if match is None or register is None or bits_of(register.type) < 32:
            raise DebuggerError(f"print: [REGISTER+OFFSET] of 32 bits, into shared memory, or 64 (got {text})")
        address = int(self.of_register(register).values[self.lane % 32]) + int(match["offset"] or 0)
        base = int(self.machine.shared_base[self.lane]) if bits_of(register.type) == 32 else -BASE
        region = self.machine.memory.region_of(address + base)
        if region is None or address + base >= region.end or address + base < region.start:
            description = self.machine.memory.describe(address + base, 1)
            raise DebuggerError(f"print: {text} points nowhere: {description}")
        start = address + base
        count = min(region.end - start, 4 * values.MOST) // 4 * 4
        words = self.machine.memory.arena[start : start + count].copy().view(np.uint32)
        place = self.byte_namer(start)
        return Held(text, place(0), "u32", words, byte=place)


def place_of(machine: Machine, lane: int) -> str:
    """Format a lane's place as `block (0,0,0) thread (5,0,0)`."""
    block, thread = ("({},{},{})".format(*index) for index in machine.place_of(lane))
    return f"block {block} thread {thread}"


def plain_name(name: str) -> str:
    """Return the name of a variable as its source has it."""
    return LOCAL_NAME.sub("", name)


def could_hold(kernel: Kernel, name: str) -> Callable[[ir.Register], bool]:
    """Return a function that tells whether a register could hold a local of C++.

    The register must be as wide as the local and, like it, of floats or not.
    """
    text = kernel.source.text
    declaration = re.search(rf"\b((?:unsigned\s+)?\w+)\s+{name}\s*[=;,(\[]", text)
    number = parse_declaration(text, name, f"{declaration[1]} {name}", kernel.defines).number if declaration else None
    if number is None or number.kind == "raw":
        return lambda register: True
    bits, is_float = 8 * number.nbytes, number.kind == "f" and number.nbytes > 2
    return lambda register: bits_of(register.type) == bits and (register.type[0] == "f") == is_float


def type_named(dtype: np.dtype) -> str:
    """Return the PTX type of an array's elements; u8 for elements that are no numbers."""
    letter = {"i": "s", "f": "f", "c": "b"}.get(dtype.kind, "u")
    name = f"{letter}{8 * dtype.itemsize}"
    return name if name in DTYPES else "u8"
