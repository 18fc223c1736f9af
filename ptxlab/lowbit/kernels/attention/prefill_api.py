"""`attention_kv4` with `query_start_loc`: chunks of any number of queries, each of its own length."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.attention import prefill_sm80
from ptxlab.lowbit.kernels.attention.append import rows_with_gaps
from ptxlab.lowbit.kernels.attention.call import MOST_RATIO, NAME, check_cache, check_zeros, workspace_rules
from ptxlab.lowbit.kernels.attention.common import cache_arrays
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.attention.prefill import (
    CHUNKED,
    MOST_PARTS,
    OWN,
    OWN_ROTATED,
    PREFILL,
    ROTATED,
    choose_parts,
)
from ptxlab.lowbit.kernels.attention.sm80 import DTYPES
from ptxlab.lowbit.kernels.operation import (
    CallArray,
    DeviceMemory,
    Operation,
    Prepared,
    Results,
    Scratch,
    copy_to_host,
    dtype_of,
)
from ptxlab.lowbit.kernels.spec_call import SpecCall, why_not
from ptxlab.lowbit.layout import KVCache
from ptxlab.runtime.arguments import require_on_host
from ptxlab.spec import KernelSpec
from ptxlab.validate import is_one_of, shape_of

OWN_TOKENS = ("k", "v")
_STARTS = f"{NAME}: query_start_loc"
_KERNELS = {  # by whether own keys are given and whether the cache is rotated; the highest last
    (False, False): (prefill_sm80.PREFILL_SM80, PREFILL),
    (False, True): (prefill_sm80.ROTATED, ROTATED),
    (True, False): (prefill_sm80.OWN, OWN),
    (True, True): (prefill_sm80.OWN_ROTATED, OWN_ROTATED),
}
_KEPT = tuple(arg.name for arg in PREFILL.args if arg.role == "inout")


@dataclass(frozen=True, eq=False)
class _ChunkCall(SpecCall):
    """A call whose kernel does not depend on how many queries there are."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Sizes, dtype and form that select the compiled kernel, without the number of queries."""
        return (*(size for name, size in self.sizes.items() if name != "N"), self.dtype, self.specs[0].form)

    def on_host(self) -> Results:
        """Run on host arrays, as `SpecCall` does; rows of own tokens are laid out as they lie apart."""
        return SpecCall.on_host(replace(self, operands=tuple(map(self._with_gaps, self.operands))))

    def _with_gaps(self, operand: CallArray) -> CallArray:
        if operand.name not in OWN_TOKENS:
            return operand
        shape = self.sizes["N"], self.sizes[f"{operand.name}_pitch"]
        return operand._replace(array=rows_with_gaps(require_on_host(*operand[1:5]), shape), shape=shape)


def chunk_memory(D: int, blocks: int) -> tuple[Scratch, ...]:
    """Return what any call needs besides operands and results, whose launches have so many blocks."""
    sizes = {"D": D, "blocks": blocks, "parts": MOST_PARTS}
    return tuple(Scratch.of(PREFILL.arg(name), sizes) for name in ("partial", *_KEPT))


def attend_chunks(
    options: AttentionOptions,
    q: Any,
    cache: KVCache,
    starts: Any,
    own_kv: tuple[Any, Any],
    out: Any,
    lse: Any,
    workspace: DeviceMemory | None,
) -> Any:
    """Make the call of `attention_kv4` with `query_start_loc`; see there."""
    arrays, tokens = {"q": q, **cache_arrays(cache), "starts": starts, "out": out, "lse": lse}, {}
    pitches: dict[str, int] = {}
    if any(x is not None for x in own_kv):
        tokens = dict(zip(OWN_TOKENS, own_kv, strict=True))
        for name, x in tokens.items():
            if x is None:
                raise ArgumentError(f"{NAME}: {name}", "must be given too, as the other of k and v is", "None")
            arrays[name], pitches[f"{name}_pitch"] = gpu.flat_rows(f"{NAME}: {name}", x)
    description = (*cache.description, *pitches.values())
    new_arrays = _CHUNKS(options, description, arrays, cache, tokens, pitches, workspace=workspace)
    out = new_arrays["out"] if out is None else out
    return (out, new_arrays["lse"] if lse is None else lse) if options.return_lse else out


def _check(
    options: AttentionOptions,
    arrays: Mapping[str, Any],
    cache: KVCache,
    own_kv: Mapping[str, Any],
    pitches: Mapping[str, int],
) -> _ChunkCall:
    """Make the call; raises ArgumentError for what does not fit together."""
    shape, starts, dtype = shape_of(arrays["q"]), shape_of(arrays["starts"]), dtype_of(arrays["q"])
    D, Hkv, B = cache.head_dim, cache.num_kv_heads, cache.batch
    if cache.scheme not in CHUNKED:
        raise ArgumentError(f"{NAME}: cache", f"scheme must be {CHUNKED[0]} with query_start_loc", cache.scheme)
    spec = _choose(options, rotated=cache.rotated, has_own_kv=bool(own_kv))
    if len(shape) != 3 or shape[2] != D:
        raise ArgumentError(f"{NAME}: q", f"must be [T, Hq, {D}] with query_start_loc", f"shape {list(shape)}")
    if dtype not in DTYPES:
        raise ArgumentError(f"{NAME}: q", f"dtype {' or '.join(DTYPES)}", dtype)
    N, Hq, _ = shape
    if Hq % Hkv or not 1 <= Hq // Hkv <= MOST_RATIO:
        raise ArgumentError(f"{NAME}: q", f"Hq must be 1 to {MOST_RATIO} times the cache's {Hkv}", f"Hq={Hq}")
    for name, x in own_kv.items():
        if shape_of(x) != (N, Hkv, D):
            rule = f"must be [{N}, {Hkv}, {D}], one for each query and kv head"
            raise ArgumentError(f"{NAME}: {name}", rule, f"shape {list(shape_of(x))}")
    if starts != (B + 1,):
        raise ArgumentError(_STARTS, f"must be [{B + 1}], one more than sequences", f"shape {list(starts)}")
    tokens = cache.max_pages * cache.page_size
    window = 0 if options.window is None or options.window >= tokens else int(options.window)
    sizes = {"N": N, "B": B, "Hq": Hq, "Hkv": Hkv, "D": D, "P": cache.max_pages, "pages": cache.pages}
    sizes |= {"page": cache.page_size, "window": window, "parts": 1, **pitches}
    sizes["blocks"] = _blocks(spec, arrays["q"], sizes)
    sizes["softmax_scale"] = D**-0.5 if options.scale is None else float(options.scale)
    operands = tuple(_operands(arrays, cache, shape, dtype, return_lse=options.return_lse))
    check_values = None if gpu.is_device_array(arrays["q"]) else lambda values: _check_numbers(cache, values, N)
    if "parts" not in spec.symbols:
        return _ChunkCall(NAME, (spec,), operands, sizes, dtype, options, check_values)
    if not options.batch_invariant:
        sizes["parts"] = choose_parts(sizes, has_own_kv=bool(own_kv))
    memory = chunk_memory(D, sizes["blocks"]) if sizes["parts"] > 1 else ()
    rules = workspace_rules(f", kernel={PREFILL.name!r}")
    return _ChunkCall(NAME, (spec,), operands, sizes, dtype, options, check_values, memory, _KEPT, rules)


def _choose(options: AttentionOptions, *, rotated: bool, has_own_kv: bool = False) -> KernelSpec:
    """Return the kernel asked for, or the highest that the GPU here, else the emulator, runs.

    If neither runs one, it is the highest of all. Raises ArgumentError for the name of another kernel.
    """
    specs = _KERNELS[has_own_kv, rotated]
    names = [spec.name for spec in specs]
    if not is_one_of(options.kernel, (*names, None)):
        rule = f"must be one of {', '.join(names)} with query_start_loc"
        raise ArgumentError(f"{NAME}: kernel", rule, options.kernel)
    candidates = [spec for spec in specs if options.kernel in (None, spec.name)]
    gpu_specs = [spec for spec in candidates if options.backend != "emulator" and _runs_here(spec)]
    emulated = [spec for spec in candidates if options.backend != "gpu" and why_not(spec, "emulator") is None]
    return (gpu_specs or emulated or candidates)[-1]


def _runs_here(spec: KernelSpec) -> bool:
    return why_not(spec, "gpu") is None


def _blocks(spec: KernelSpec, q: Any, sizes: Mapping[str, Any]) -> int:
    """Return the blocks of a launch: as many as are resident on the SMs, or two in the emulator."""
    runs_on_gpu = gpu.is_device_array(q) or _runs_here(spec)
    return gpu.device_info().sms * spec.config_for(sizes).get("BLOCKS", 1) if runs_on_gpu else 2


def _operands(
    arrays: Mapping[str, Any], cache: KVCache, shape: tuple[int, ...], dtype: str, *, return_lse: bool
) -> Iterator[CallArray]:
    yield CallArray("q", f"{NAME}: q", arrays["q"], dtype, shape)
    yield CallArray("pool", f"{NAME}: cache.pool", cache.pool, "uint8", shape_of(cache.pool))
    pages = cache.batch, cache.max_pages
    yield CallArray("table", f"{NAME}: cache.block_table", cache.block_table, "int32", pages)
    yield CallArray("lengths", f"{NAME}: cache.lengths", cache.lengths, "int32", (cache.batch,))
    yield CallArray("starts", _STARTS, arrays["starts"], "int32", (cache.batch + 1,))
    for name in OWN_TOKENS:
        if name in arrays:
            yield CallArray(name, f"{NAME}: {name}", arrays[name], dtype, shape_of(arrays[name]))
    yield CallArray("out", f"{NAME}: out", arrays["out"], dtype, shape)
    if return_lse:
        yield CallArray("lse", f"{NAME}: out lse", arrays["lse"], "float32", shape[:2])


def _check_numbers(cache: KVCache, values: Mapping[str, np.ndarray], N: int) -> None:
    """Raise ArgumentError for lengths, a table or starts, on the host, that the kernel must not be given."""
    check_cache(NAME, replace(cache, block_table=values["table"], lengths=values["lengths"]))
    starts = values["starts"]
    if starts[0] != 0 or starts[-1] > N or (np.diff(starts) < 0).any():
        raise ArgumentError(_STARTS, f"must rise from 0, to {N} queries at most", starts.tolist())
    is_beyond = np.diff(starts) > values["lengths"]
    if is_beyond.any():
        b = int(is_beyond.argmax())
        rule = "a sequence's length must include its queries"
        got = f"{int(values['lengths'][b])} tokens, {int(np.diff(starts)[b])} queries in sequence {b}"
        raise ArgumentError(f"{NAME}: cache.lengths", rule, got)


def _check_values(call: _ChunkCall, prepared: Prepared, memory: DeviceMemory | None) -> None:
    """Raise ArgumentError for numbers on the device that the kernel must not be given."""
    arrays = {operand.name: operand.array for operand in call.operands}
    values = {name: copy_to_host(NAME, arrays[name]) for name in ("table", "lengths", "starts")}
    cache = KVCache(
        pool=arrays["pool"], block_table=arrays["table"], lengths=arrays["lengths"],
        page_size=call.sizes["page"], head_dim=call.sizes["D"], scheme="kv4",
    )  # fmt: skip
    _check_numbers(cache, values, call.sizes["N"])
    if memory is not None:
        check_zeros(memory, prepared.zero_buffers)


_CHUNKS = Operation(
    NAME,
    _check,
    _ChunkCall.prepare,
    _ChunkCall.on_host,
    _check_values,
    disjoint={"k": "k", "v": "v", "out": "out"},
    written=("out",),
)
