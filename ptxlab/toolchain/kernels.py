"""Finds the kernels of a CUDA C++ source: by name, by the arguments of a template, by symbol, or the only one.

The compiler says which there are. Names and parameters of templates are read off the preprocessed text.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ptxlab import declarations, mangled, sources
from ptxlab.declarations import KernelDeclaration
from ptxlab.errors import ArgumentError, CompileError, UnavailableError, UnnamedKernel
from ptxlab.mangled import is_end_of
from ptxlab.sources import Source
from ptxlab.toolchain import NO_DEFINES, Defines, compile_cuda, cuda_headers, find, front_end_text, nvcc, nvrtc, pytorch

_ENTRY = re.compile(r"^\s*(?:\.\w+\s+)*\.entry\s+([\w$]+)", re.MULTILINE)
_OF_HOST_COMPILER = ("/usr/include/", "/usr/lib/")
_LOWEST = "sm_80"  # that has what CUDA sources use
_LIBRARIES = ("cub::", "thrust::")
_MAX_INSTANCES = 4  # of a template that a message lists
_MAX_LAUNCHES = 32  # in host code, whose templates are tried


@dataclass(frozen=True)
class Kernels:
    """The kernels of a CUDA C++ source.

    Attributes:
        source: as it is to be compiled: by NVRTC, or by nvcc.
        arch: what they are compiled for.
    """

    source: Source
    arch: str
    defines: Defines

    @cached_property
    def symbols(self) -> list[str]:
        """Entry symbols that the compiler makes without being asked for any; not those of CUDA's C++ libraries."""
        ptx = compile_cuda(self.source, self.arch, output="ptx", defines=self.defines).data.decode()
        return [symbol for symbol in entry_symbols(ptx) if not mangled.demangle(symbol).startswith(_LIBRARIES)]

    @cached_property
    def text(self) -> str:
        """The source and its own headers as the preprocessor leaves them."""
        return _own_text(self.source, self.arch, self.defines)

    @cached_property
    def declared(self) -> list[KernelDeclaration]:
        """Kernels that the source and its headers declare."""
        return declarations.kernels(self.text)

    @cached_property
    def templates(self) -> dict[str, str]:
        """Template parameters by qualified name."""
        return {kernel.name: kernel.template for kernel in self.declared if kernel.template}

    @cached_property
    def launched(self) -> dict[str, tuple[Source, str]]:
        """Instances of templates that host code launches: by name, the source that has each, and its symbol."""
        if self.source.build.compiler == "nvcc":  # which makes them by itself
            return {}
        expressions = [
            expression for name in declarations.launches(self.text) for expression in self._expressions(name)
        ]
        instances = {}
        for source, symbol in self._instances(tuple(expressions[:_MAX_LAUNCHES])):
            if symbol not in self.symbols:
                instances[mangled.name_of(symbol)] = source, symbol
        return instances

    def _instances(self, expressions: tuple[str, ...]) -> list[tuple[Source, str]]:
        """Instantiate templates by NVRTC; an argument that is a parameter of a host function makes no instance."""
        source = replace(self.source, build=replace(self.source.build, instances=expressions))
        try:
            image = compile_cuda(source, self.arch, output="ptx", defines=self.defines)
        except (ArgumentError, CompileError):
            if len(expressions) < 2:
                return []
            return [instance for expression in expressions for instance in self._instances((expression,))]
        kernels = entry_symbols(image.data.decode())
        return [(source, symbol) for symbol in image.symbols.values() if symbol in kernels]

    @property
    def names(self) -> list[str]:
        """Names that `find` takes, of overloads with their parameters."""
        return [*mangled.distinct_names(self.symbols), *self.launched]

    def find(self, name: str | None) -> tuple[Source, str]:
        """Find the source with the instance that has a kernel, and its symbol. None: the only kernel there is.

        Raises ArgumentError, with what there is, where no kernel or more than one has that name.
        """
        if name is None:
            kernels = [*((self.source, symbol) for symbol in self.symbols), *self.launched.values()]
            if len(kernels) == 1:
                return kernels[0]
            raise self._no_such_kernel(None)
        if name in self.symbols:
            return self.source, name
        matching = [(self.source, symbol) for symbol in mangled.find_symbols(self.symbols, name)]
        if not matching and self._expressions(name):
            return self._instance(name)
        if not matching and (name.startswith("_Z") or self._is_template(name)):
            matching = [instance for instance in self.launched.values() if mangled.find_symbols([instance[1]], name)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            names = mangled.distinct_names([symbol for _, symbol in matching])
            raise ArgumentError(f"{self.source.path}: entry", f"one of {', '.join(names)}", name)
        raise self._no_such_kernel(name)

    def _instance(self, name: str) -> tuple[Source, str]:
        """Instantiate a template with its arguments."""
        error: ArgumentError | None = None
        for expression in self._expressions(name):
            source = replace(self.source, build=replace(self.source.build, instances=(expression,)))
            try:
                image = compile_cuda(source, self.arch, output="ptx", defines=self.defines)
            except ArgumentError as refused:
                error = refused
                continue
            symbols = entry_symbols(image.data.decode())
            if (symbol := image.symbols.get(expression)) in symbols:
                return source, str(symbol)
            # nvcc does not say which symbol it is. `f<half>` is `f<__half>`, and host code may launch it already.
            template = expression.partition("<")[0]
            template_symbols = [symbol for symbol in symbols if mangled.name_of(symbol).partition("<")[0] == template]
            candidates = [symbol for symbol in template_symbols if symbol not in self.symbols] or template_symbols
            if len(candidates) == 1:
                return source, candidates[0]
            if candidates:
                names = ", ".join(mangled.distinct_names(candidates))
                raise ArgumentError(f"{self.source.path}: entry", f"as nvcc spells it, one of {names}", name)
        raise error or self._no_such_kernel(name)

    def _is_template(self, name: str) -> bool:
        return any(is_end_of(template, name) for template in self.templates)

    def _expressions(self, name: str) -> list[str]:
        """List the names that C++ may have for an instance: with its namespaces."""
        if name.startswith("_Z"):
            name = mangled.name_of(name)
        base, angle, arguments = name.partition("<")
        names = [template for template in self.templates if is_end_of(template, base.strip())]
        return [f"{template}{angle}{arguments}" for template in names] if angle else []

    def _no_such_kernel(self, name: str | None) -> ArgumentError:
        templates = [f"{template}<{parameters}>" for template, parameters in self.templates.items()]
        rules = [f"a template with its arguments, of {', '.join(templates)}"] if templates else []
        if name is None and self.names:
            kernel_names = ", ".join(_first_of_templates(targets(self.source, self.names)))
            return UnnamedKernel(self.source.path, ", or ".join([kernel_names, *rules]))
        if self.names:
            rules.insert(0, f"one of {', '.join(_first_of_templates(self.names))}")
        rule = ", or ".join(rules) or "a kernel (__global__)"
        return ArgumentError(f"{self.source.path}: entry", rule, "nothing" if name is None else name)


def targets(source: Source, names: Sequence[str]) -> list[str]:
    """Spell kernels as commands take them, for a shell: `two.cu:scale`; of text without a file the names alone."""
    return list(names) if source.path.startswith("<") else [shlex.quote(f"{source.path}:{name}") for name in names]


def _first_of_templates(names: list[str]) -> list[str]:
    """Shorten a list of kernels: of a template with many instances it keeps the first.

    The name of the template alone lists them all.
    """
    instances: dict[str, list[str]] = {}
    for name in names:
        instances.setdefault(name.partition("<")[0], []).append(name)
    short_names = []
    for group in instances.values():
        short_names += group if len(group) <= _MAX_INSTANCES else [f"{group[0]} (the first of {len(group)})"]
    return short_names


def entry_symbols(ptx: str) -> list[str]:
    """List symbols of the kernels that a PTX text defines."""
    return list(dict.fromkeys(_ENTRY.findall(ptx)))


def declared_kernels(source: Source, arch: str | None, defines: Defines) -> list[KernelDeclaration]:
    """List kernels that a source and its own headers declare, as the preprocessor leaves them."""
    return declarations.kernels(_own_text(source, arch, defines))


def _own_text(source: Source, arch: str | None, defines: Defines) -> str:
    """Preprocess a source, and leave out the headers of CUDA, PyTorch and the host's compiler."""
    try:
        text = front_end_text(source, arch or _LOWEST, defines)
    except UnavailableError:
        text = ""
    foreign_folders = (*cuda_headers(), *pytorch.folders(), *_OF_HOST_COMPILER)
    return declarations.own_text(text, foreign_folders) if text else source.text


def kernels_of(source: Source, arch: str | None = None, defines: Defines = NO_DEFINES) -> Kernels:
    """Find the kernels of a source, by NVRTC; where it fails and there is host code, by nvcc.

    Raises:
        CompileError: neither compiles it.
        UnavailableError: there is no NVRTC, or nvcc would be needed and cannot run here.
    """
    kernels = Kernels(source, arch or _LOWEST, defines)
    try:
        _ = kernels.symbols
        return kernels
    except CompileError as error:
        if not _has_host_code(source, error.log):
            raise
        problem = error
    try:
        if find("nvcc") is None:
            raise UnavailableError("nvcc: not found")
        nvcc.require_host_compiler()
    except UnavailableError as error:
        if nvrtc.is_about_host_code(problem.problem):
            line = nvrtc.excerpt(source, problem.line, problem.path)
            reason = f"{error}; NVRTC does not compile this host code"
            raise CompileError(problem.path, problem.line, reason, line, problem.log) from None
        problem.args = (f"{problem.args[0]}; its host code may need nvcc ({error})",)
        raise problem from None
    return _kernels_by_nvcc(kernels, problem)


def _kernels_by_nvcc(kernels: Kernels, problem: CompileError) -> Kernels:
    """Compile by nvcc, with PyTorch's headers where a compilation failed for lack of them."""
    build = replace(kernels.source.build, compiler="nvcc")
    if lacks_headers := pytorch.lacks_headers(problem.log):
        try:
            build = pytorch.with_headers(build)
        except UnavailableError as error:
            problem.args = (f"{problem.args[0]} ({error})",)
            raise problem from None
    nvcc_kernels = replace(kernels, source=replace(kernels.source, build=build))
    try:
        _ = nvcc_kernels.symbols
        return nvcc_kernels
    except CompileError as error:
        if lacks_headers or not pytorch.lacks_headers(error.log):
            raise
        return _kernels_by_nvcc(kernels, error)


def _has_host_code(source: Source, log: str) -> bool:
    """Return whether a source or a header has functions for the host, or lacks a header that NVRTC does not have."""
    lacks_host_compiler = "cannot open source file" in log or "considered a host function" in log
    return (
        lacks_host_compiler
        or "<<<" in source.text
        or re.search(r"\bmain\s*\(", declarations.blank(source.text)) is not None
    )


def find_kernel(
    source: Source, name: str | None, arch: str | None = None, defines: Defines = NO_DEFINES
) -> tuple[Source, str]:
    """Find the source as it is to be compiled, and the symbol of one of its kernels. None: the only one.

    Of `extern "C"` kernels alone nothing is compiled: the preprocessor tells which are there.

    Raises:
        ArgumentError: no kernel, or more than one, has that name; the message lists what there is.
        CompileError: the source is wrong.
    """
    written_kernels = sources.cuda_entries(source.text)
    if written_kernels and not sources.cuda_entries(source.text, "C++") and not declarations.launches(source.text):
        names = extern_c_entries(source, arch, defines)
        if name in names or (name is None and len(names) == 1):
            return source, name or names[0]
        if not names:
            compile_cuda(source, arch or "sm_90", output="ptx", defines=defines)  # its errors come first
            rule = 'a kernel (extern "C" __global__) that the preprocessor leaves'
            raise ArgumentError(f"{source.path}: entry", rule, ", ".join(written_kernels))
        if name is None:
            raise UnnamedKernel(source.path, ", ".join(targets(source, names)))
        raise ArgumentError(f"{source.path}: entry", f"one of {', '.join(names)}", name)
    return kernels_of(source, arch, defines).find(name)


def extern_c_entries(source: Source, arch: str | None, defines: Defines) -> list[str]:
    """List the `extern "C"` kernels that the preprocessor leaves.

    It runs for an architecture, or for either of sm_80 and sm_90.
    """
    written_kernels = list(sources.cuda_entries(source.text))
    try:
        preprocessed = "".join(
            front_end_text(source, target_arch, defines) for target_arch in ([arch] if arch else ["sm_80", "sm_90"])
        )
    except UnavailableError:
        preprocessed = ""
    return (
        [name for name in written_kernels if re.search(rf"\b{name}\s*\(", preprocessed)]
        if preprocessed
        else written_kernels
    )


def entries(source: Source, arch: str | None = None, defines: Defines = NO_DEFINES) -> list[str]:
    """List names of all kernels that `find_kernel` finds without the arguments of a template."""
    written_kernels = sources.cuda_entries(source.text)
    if written_kernels and not sources.cuda_entries(source.text, "C++"):
        if names := extern_c_entries(source, arch, defines):
            return names
        find_kernel(source, None, arch, defines)  # which says why not
    kernels = kernels_of(source, arch, defines)
    return kernels.names
