"""Loading and launching on a GPU: every kind of argument, every attribute, every refusal."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu, registry, toolchain
from ptxlab.errors import ArgumentError, CompileError, LaunchError, UnavailableError
from ptxlab.runtime import by_name, verify
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec, Launch
from ptxlab.spec.dtypes import ByVariant, convert_to_dtype, dtype_in, storage

pytestmark = pytest.mark.gpu

ADD = Source.from_text(
    """.version 6.5
.target sm_75
.address_size 64
.visible .entry add_to(.param .u64 data, .param .u32 amount)
{
    .reg .u32 %i, %n, %t, %v;
    .reg .u64 %p;
    mov.u32 %i, %ctaid.x;
    mov.u32 %n, %ntid.x;
    mov.u32 %t, %tid.x;
    mad.lo.u32 %i, %i, %n, %t;
    ld.param.u64 %p, [data];
    mad.wide.u32 %p, %i, 4, %p;
    ld.global.u32 %v, [%p];
    ld.param.u32 %t, [amount];
    add.u32 %v, %v, %t;
    st.global.u32 [%p], %v;
    ret;
}
""",
    "<add>",
)
STRUCT = Source.from_text(
    """
struct Line { unsigned slope; unsigned offset; unsigned char more[120]; };
extern "C" __global__ void line(unsigned* y, const __grid_constant__ Line l) {
    y[threadIdx.x] = l.slope * threadIdx.x + l.offset + l.more[119];
}
""",
    "<struct>",
)
SHARED = Source.from_text(
    """
extern "C" __global__ void reverse(unsigned* data, unsigned n) {
    extern __shared__ unsigned tile[];
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) tile[i] = data[i];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) data[i] = tile[n - 1 - i];
}
""",
    "<shared>",
)
CLUSTER = Source.from_text(
    """
extern "C" __global__ void ranks(unsigned* out) {
    unsigned rank, size;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    out[blockIdx.x] = size * 100 + rank;
}
""",
    "<cluster>",
)
CHAIN = Source.from_text(
    """
extern "C" __global__ void chain(unsigned* x) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    x[threadIdx.x] = x[threadIdx.x] * 3 + 1;
}
""",
    "<chain>",
)
ONE_WARP = Launch((1, 1, 1), (32, 1, 1))


@pytest.fixture(scope="module")
def cupy():
    import cupy

    return cupy


@pytest.fixture
def add() -> gpu.GpuKernel:
    return gpu.load(ADD, "add_to")


def test_device() -> None:
    device = gpu.device_info()
    assert gpu.available() and gpu.why_not("sm_75") is None
    assert (
        device.sms > 0 and device.l2_bytes > 2**20 and device.memory_bytes > 2**30 and device.shared_bytes >= 48 * 1024
    )
    assert device.driver.count(".") >= 1


def test_numpy_in_place(add) -> None:
    numbers = np.arange(64, dtype=np.uint32)
    gpu.launch(add, [numbers, np.uint32(5)], Launch((2, 1, 1), (32, 1, 1)))
    assert (numbers == np.arange(64) + 5).all()


def test_only_what_is_written_comes_back(add) -> None:
    numbers = np.arange(32, dtype=np.uint32)
    gpu.launch(add, [numbers, np.uint32(5)], ONE_WARP, written=())
    assert (numbers == np.arange(32)).all()


def test_numpy_that_is_not_contiguous(add) -> None:
    numbers = np.arange(64, dtype=np.uint32)
    gpu.launch(add, [numbers[::2], np.uint32(5)], ONE_WARP)
    assert (numbers[::2] == np.arange(0, 64, 2) + 5).all() and (numbers[1::2] == np.arange(1, 64, 2)).all()


COPY = Source.from_text(
    """
extern "C" __global__ void copy(unsigned* to, const unsigned* from) { to[threadIdx.x + 1] = from[threadIdx.x]; }
""",
    "<copy>",
)


def test_numpy_passed_twice_is_one_buffer() -> None:
    numbers = np.arange(33, dtype=np.uint32)
    gpu.launch(gpu.load(COPY, "copy"), [numbers, numbers], ONE_WARP)
    assert (numbers == [0, *range(32)]).all()


def test_cupy_without_copy(cupy, add) -> None:
    numbers = cupy.arange(32, dtype=cupy.uint32)
    gpu.launch(add, [numbers, np.uint32(7)], ONE_WARP)
    assert (numbers.get() == np.arange(32) + 7).all()


def test_torch_without_copy_on_its_stream(add) -> None:
    torch = pytest.importorskip("torch")
    numbers = torch.arange(32, dtype=torch.int32, device="cuda")
    assert gpu.is_device_array(numbers)
    device_array = gpu.as_array("data", numbers)
    assert device_array.data.ptr == numbers.data_ptr()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), gpu.caller_stream() as current:
        assert current.ptr == stream.cuda_stream
        torch.cuda._sleep(20_000_000)  # the launch must queue behind this, and the addition behind the launch
        gpu.launch(add, [numbers, np.uint32(1)], ONE_WARP)
        numbers += 1
    stream.synchronize()
    assert (numbers.cpu().numpy() == np.arange(32) + 2).all()
    back = gpu.like(device_array, numbers)
    assert isinstance(back, torch.Tensor) and back.data_ptr() == numbers.data_ptr()


def test_on_cupys_current_stream(cupy, add) -> None:
    numbers = cupy.arange(32, dtype=cupy.uint32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        gpu.launch(add, [numbers, np.uint32(1)], ONE_WARP)
        graph = stream.end_capture()
    assert (numbers.get() == np.arange(32)).all()  # captured, not run
    graph.launch(stream)
    stream.synchronize()
    assert (numbers.get() == np.arange(32) + 1).all()


def test_struct_by_value() -> None:
    kernel = gpu.load(STRUCT, "line")
    struct = np.zeros(128, np.uint8)
    struct[:8] = np.array([3, 10], np.uint32).view(np.uint8)
    struct[-1] = 100
    out = np.zeros(32, np.uint32)
    gpu.launch(kernel, [out, struct.tobytes()], ONE_WARP)
    assert (out == 3 * np.arange(32) + 110).all()


def test_large_dynamic_shared_memory() -> None:
    n = gpu.device_info().shared_bytes // 4
    numbers = np.arange(n, dtype=np.uint32)
    gpu.launch(gpu.load(SHARED, "reverse"), [numbers, np.uint32(n)], Launch((1, 1, 1), (256, 1, 1), 4 * n))
    assert (numbers == np.arange(n)[::-1]).all()


@pytest.mark.parametrize("size", [2, 4, 16])
def test_clusters(size: int) -> None:
    if reason := gpu.why_not("sm_90"):
        pytest.skip(reason)
    out = np.zeros(32, np.uint32)
    gpu.launch(gpu.load(CLUSTER, "ranks"), [out], Launch((32, 1, 1), (32, 1, 1), cluster=(size, 1, 1)))
    assert (out == size * 100 + np.arange(32) % size).all()


def test_programmatic_launches_in_a_graph(cupy) -> None:
    if reason := gpu.why_not("sm_90"):
        pytest.skip(reason)
    numbers = cupy.arange(32, dtype=cupy.uint32)
    call = gpu.prepare(gpu.load(CHAIN, "chain"), [numbers], Launch((1, 1, 1), (32, 1, 1), programmatic=True))
    graph = gpu.capture([call] * 5)  # five calls before, five captured
    graph.replay()
    graph.synchronize()
    expected = np.arange(32, dtype=np.uint32)
    for _ in range(10):
        expected = expected * np.uint32(3) + np.uint32(1)
    assert (numbers.get() == expected).all()


@pytest.mark.timing
def test_graph_timing(cupy, add) -> None:
    buffers = [cupy.zeros(32, cupy.uint32) for _ in range(3)]
    graph = gpu.capture([gpu.prepare(add, [b, np.uint32(1)], ONE_WARP) for b in buffers * 10])
    timing = graph.time(replays=5, warm_up=1)
    assert timing.calls == 30 and timing.replays == 5
    assert 0.3 < timing.fastest <= timing.median <= timing.slowest < 1000
    assert all((b.get() == 10 * (1 + 1 + 5)).all() for b in buffers)


def test_what_a_capture_raises_passes_through(cupy, add) -> None:
    calls = 0

    def fails_second() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gpu.capture([fails_second])
    test_cupy_without_copy(cupy, add)  # and nothing is left capturing


def test_driver_error_shows_the_line() -> None:
    wrong = Source.from_text(ADD.text.replace("add.u32", "addd.u32"), "wrong.ptx")
    with pytest.raises(CompileError, match=r"^wrong.ptx:16: .*: `addd.u32 %v, %v, %t;`$") as raised:
        gpu.load(wrong, "add_to")
    assert "addd" in raised.value.log


def test_unknown_entry() -> None:
    for source in (ADD, STRUCT):
        with pytest.raises(ArgumentError, match=r"entry: an entry of that source \(got nope\)"):
            gpu.load(source, "nope")


def test_edited_source_is_loaded_anew(add) -> None:
    edited = Source(ADD.name, ADD.path, "ptx", ADD.text.replace("add.u32 %v, %v, %t", "sub.u32 %v, %v, %t"))
    numbers = np.full(32, 100, np.uint32)
    gpu.launch(gpu.load(edited, "add_to"), [numbers, np.uint32(1)], ONE_WARP)
    assert (numbers == 99).all()
    assert gpu.load(ADD, "add_to") is add


def test_edited_header_is_loaded_anew(tmp_path) -> None:
    """The rule holds even if only the preprocessor knows that it is a header; the same content again is a look-up."""
    header, path = tmp_path / "h.h", tmp_path / "k.cu"
    path.write_text('#define H <h.h>\n#include H\nextern "C" __global__ void k(int* out) { out[0] = VALUE; }\n')
    loaded = []
    for constant in (1, 2, 2):
        header.write_text(f"#define VALUE {constant}\n")
        out = np.zeros(1, np.int32)
        loaded.append(gpu.load(Source.read(path), "k"))
        gpu.launch(loaded[-1], [out], Launch((1, 1, 1), (1, 1, 1)))
        assert out[0] == constant
    assert loaded[0] is not loaded[1] and loaded[1] is loaded[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: [c.zeros(32, c.uint32)], r"add_to: args: 2 arguments \(got 1\)"),
        (lambda c: [c.zeros(32, c.uint32), np.uint64(1)], r"add_to: args\[1\]: a parameter of 4 bytes \(got 8 bytes\)"),
        (lambda c: [c.zeros(32, c.uint32), 1], r"args\[1\]: a NumPy scalar.*\(got 1\)"),
        (lambda c: [c.zeros((32, 2), c.uint32)[:, 0], np.uint32(1)], r"args\[0\]: C-contiguous \(got strides"),
        (lambda c: ["data", np.uint32(1)], r"args\[0\]: an array, a tensor map, a NumPy scalar or bytes \(got str\)"),
    ],
)
def test_arguments_refused(cupy, add, change, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        gpu.launch(add, change(cupy), ONE_WARP)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (Launch((1, 1, 1), (2048, 1, 1)), r"add_to: block: 1 to 1024 threads"),
        (Launch((0, 1, 1), (32, 1, 1)), r"add_to: grid"),
        (Launch((3, 1, 1), (32, 1, 1), cluster=(2, 1, 1)), r"add_to: grid: whole clusters"),
        (Launch((1, 1, 1), (32, 1, 1), 1 << 20), r"add_to: shared_bytes: at most"),
    ],
)
def test_geometry_refused(add, geometry: Launch, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        gpu.launch(add, [np.zeros(32, np.uint32), np.uint32(1)], geometry)


def test_refused_by_the_driver(add) -> None:
    with pytest.raises(LaunchError, match=r"add_to: the driver refused the launch: CUDA_ERROR"):
        gpu.launch(add, [np.zeros(32, np.uint32), np.uint32(1)], Launch((1, 1, 1), (1, 1, 128)))  # at most 64 in z


def test_misaligned_device_array(cupy) -> None:
    with pytest.raises(ArgumentError, match=r"x: aligned to 16 bytes on the GPU"):
        gpu.check_alignment("x", cupy.zeros(64, cupy.uint8)[4:])


def arrays_of(library: str) -> Callable[[np.ndarray, str], Any]:
    """Return a function that converts a host array to the library's array on the GPU (NumPy's on the host).

    Elements are named by dtype. Only PyTorch has a bfloat16; elsewhere it is its bits.
    """
    if library == "numpy":
        return lambda array, dtype: np.array(array, order="C")
    cupy = pytest.importorskip("cupy")
    if library == "cupy":
        return lambda array, dtype: cupy.asarray(array, order="C")
    torch = pytest.importorskip("torch")

    def tensor(array: np.ndarray, dtype: str) -> Any:
        device_array = torch.from_dlpack(cupy.asarray(array, order="C"))
        return device_array.view(torch.bfloat16) if dtype == "bfloat16" else device_array

    return tensor


def calls_of(name: str) -> list[verify.Job]:
    """List every source at the sizes of the last example, and in every dtype that a constant of the variant decides."""
    try:
        jobs, _ = verify.plan([name], "gpu")
    except UnavailableError as reason:
        pytest.skip(str(reason))
    last = registry.specs()[name].example_sizes[-1]
    return [job for job in jobs if job.sizes == last or job.config != job.spec.config_for(job.sizes)]


def holds(job: verify.Job, array: Callable[[np.ndarray, str], Any]) -> None:
    """Assert that a call with arrays made by `array` gives arrays of their kind that equal the spec's reference.

    The call allocates an array that is only written, unless its dtype is what asks for the variant.
    """
    spec, config = job.spec, {**job.spec.config_for(job.sizes), **(job.config or {})}
    dtypes = {arg.name: dtype_in(arg.dtype, config) for arg in spec.args}
    logical = spec.example(np.random.default_rng(1), **job.sizes)
    arrays = {n: array(convert_to_dtype(a, dtypes[n]), dtypes[n]) for n, a in spec.pack(logical).items()}
    read = {arg.name: arrays[arg.name] for arg in spec.inputs if arg.role != "inout" and arg.name in arrays}
    out = {arg.name: arrays[arg.name] for arg in spec.inputs if arg.role == "inout"}
    if config != spec.config_for(job.sizes):
        storage_types = {arg.name: storage(dtypes[arg.name]) for arg in spec.outputs if arg.role == "out"}
        out |= {n: array(np.zeros(spec.arg(n).resolve(job.sizes), s), dtypes[n]) for n, s in storage_types.items()}
    options = {"out_dtype": dtypes["y"]} if "y" in dtypes and isinstance(spec.arg("y").dtype, ByVariant) else {}
    outcome = by_name.run(job.source.label, backend=job.backend, out=out, **options, **read, **job.sizes)
    assert outcome.backend == job.backend and outcome.outputs.keys() == {arg.name for arg in spec.outputs}
    outputs = {}
    for name, output in outcome.outputs.items():
        assert type(output) is type(next(iter(read.values())))
        assert name not in out or output is out[name]
        device_array = gpu.as_array(name, output)
        outputs[name] = device_array if isinstance(device_array, np.ndarray) else gpu.to_host(device_array)
        assert outputs[name].shape == spec.arg(name).resolve(job.sizes)
        assert outputs[name].dtype == storage(dtypes[name])
    verify.compare(spec, outputs, logical, config)


@pytest.mark.parametrize("name", list(registry.specs()))
@pytest.mark.parametrize("library", ["numpy", "cupy", "torch"])
def test_every_kernel_takes_every_library(name: str, library: str) -> None:
    array = arrays_of(library)
    for job in calls_of(name):
        holds(job, array)


REGISTERS = 1 << 16  # of an SM, in every GPU from sm_75 on; ptxas hands them out to threads by eights
STREAMING = 1024  # threads on an SM that hide the latency of what only streams


def most_registers(spec: KernelSpec, source: Source) -> int:
    """Return the registers of a thread that leave room for the blocks that `__launch_bounds__` asks for.

    Without such bounds, a GEMM may take all, because accumulators live in registers. Others stream, with many threads.
    """
    if source.language == "cu":
        text = toolchain.compile_cuda(source, gpu.device_info().arch, output="ptx").data.decode()
        blocks, threads = (re.search(rf"\.{name} (\d+)", text) for name in ("minnctapersm", "maxntid"))
        if blocks and threads:
            return min(255, REGISTERS // (int(blocks[1]) * int(threads[1])) // 8 * 8)
    return 255 if spec.family == "gemm" else REGISTERS // STREAMING


@pytest.mark.parametrize("name", list(registry.specs()))
def test_kernels_use_no_local_memory(name: str) -> None:
    spec, kernel_sources = registry.find(name)
    if reason := gpu.why_not(spec.arch, exact=spec.exact_arch):
        pytest.skip(reason)
    for source in kernel_sources:
        kernel = gpu.load(source, name)
        assert (source.label, kernel.local_bytes) == (source.label, 0)
        assert 0 < kernel.registers <= most_registers(spec, source), source.label
