"""`%%ptx` and `%%cuda`: compile the cell, show what became of it, bind its kernels under their names."""

from dataclasses import replace
from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ptxlab import gpu, registry, sass
from ptxlab.emulator import checks_of
from ptxlab.errors import PtxlabError
from ptxlab.jupyter.cell import Cell, compile_cell
from ptxlab.jupyter.errors import without_traceback
from ptxlab.runtime.arguments import parse_integers
from ptxlab.runtime.verify import Job, Verdict, verify
from ptxlab.sources import Language
from ptxlab.spec import KernelSpec


def _options(function: Any) -> Any:
    """Add the options that both magics take."""
    for option in (
        argument("-q", "--quiet", action="store_true", help="Bind the kernels and show nothing."),
        argument("--listing", action="store_true", help="Show the machine code, below the source lines."),
        argument("--verify", metavar="SPEC", help="Compare the kernel with the reference of this project kernel, "
                 "or of a KernelSpec in the notebook, with every check on."),
        argument("--check", metavar="CHECKS", default="", help="Emulator checks of every call of the kernel, "
                 "comma-separated: lanes, race, init, async, divergence, overrun, quirks, or all."),
        argument("--arch", help="Architecture to compile for. Default: this GPU, or sm_90a without one."),
        argument("--kernel", metavar="NAME", help="Bind only this kernel of the cell. Default: all."),
    ):  # fmt: skip
        function = option(function)
    return magic_arguments()(function)


@magics_class
class PtxlabMagics(Magics):
    """The cell magics; they remember what each kernel was before, so that a cell run again shows what changed."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.reports: dict[str, sass.Report] = {}

    @cell_magic
    @_options
    def ptx(self, line: str, cell: str) -> Cell | None:
        """Assemble a cell of PTX and bind its kernels under their names."""
        return self._run(parse_argstring(self.ptx, line), cell, "ptx")

    @cell_magic
    @_options
    @argument(
        "-D",
        dest="define",
        metavar="NAME[=N]",
        action="append",
        default=[],
        help="Constant; -D X is -D X=1.",
    )
    def cuda(self, line: str, cell: str) -> Cell | None:
        """Compile a cell of CUDA C++ and bind its kernels under their names."""
        return self._run(parse_argstring(self.cuda, line), cell, "cu")

    def _run(self, options: Any, text: str, language: Language) -> Cell | None:
        assert self.shell is not None
        try:
            cell = compile_cell(
                text,
                language,
                kernel=options.kernel,
                arch=options.arch,
                defines=parse_integers("-D", getattr(options, "define", [])),
                checks=checks_of("--check", options.check),
                listing=options.listing,
                earlier=self.reports,
            )
            if options.verify:
                cell = replace(cell, verdicts=self._verify(cell, options.verify))
        except PtxlabError as error:
            raise without_traceback(error) from None
        self.reports |= cell.reports
        self.shell.push(dict(cell.kernels))
        return None if options.quiet else cell

    def _verify(self, cell: Cell, contract: str) -> tuple[Verdict, ...]:
        """Verify each kernel of the cell at each size of the spec's examples.

        It runs in the emulator, and on a GPU that fits.
        """
        assert self.shell is not None
        spec = self.shell.user_ns.get(contract)
        if not isinstance(spec, KernelSpec):
            spec, _ = registry.find(contract)
        backends = ["emulator", *(["gpu"] if gpu.why_not(spec.arch, exact=spec.exact_arch) is None else [])]
        return tuple(
            verify(Job(replace(spec, name=name), cell.source, backend, sizes, dict(kernel.defines) or None))
            for name, kernel in cell.kernels.items()
            for backend in backends
            for sizes in spec.example_sizes
        )
