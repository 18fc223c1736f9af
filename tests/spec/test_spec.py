import numpy as np
import pytest

from ptxlab import registry, sources
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import kernels
from ptxlab.lowbit.layout.nibbles import pack_u4
from ptxlab.spec import Arg, KernelSpec, Launch
from ptxlab.spec.dtypes import ByVariant, convert_to_dtype, storage

LQQ = registry.specs()["dequant_lqq"]


def shapes(R: int = 3, K: int = 128, g: int = 64) -> dict[str, tuple[int, ...]]:
    return {"qweight": (R, K // 8), "scale": (R, K // g), "offset": (R, K // g)}


def test_sizes_are_read_off_the_shapes() -> None:
    assert LQQ.sizes_of(shapes()) == {"R": 3, "K": 128, "g": 64}


def test_given_sizes_are_checked_against_the_shapes() -> None:
    with pytest.raises(ArgumentError, match=r"dequant_lqq: qweight: shape \[R, K/8\] with R=3, K=256.*\(3, 16\)"):
        LQQ.sizes_of(shapes(), {"R": 3, "K": 256})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": (3, 1), "offset": (3, 2)}, r"dequant_lqq: offset: shape \[R, K/g\] with .*g=128.* \(got \(3, 2\)\)"),
        ({"scale": (4, 2)}, r"dequant_lqq: scale: shape \[R, K/g\]"),
        ({"qweight": (48,)}, r"dequant_lqq: qweight: 2 axes \[R, K/8\] \(got \(48,\)\)"),
        ({"scale": (3, 8), "offset": (3, 8)}, r"dequant_lqq: g in \(32, 64, 128\) \(got g=16\)"),
    ],
)
def test_a_wrong_shape_names_argument_rule_and_value(changed: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LQQ.sizes_of({**shapes(), **changed})


def test_a_rule_is_quoted_with_the_sizes_that_break_it() -> None:
    with pytest.raises(ArgumentError, match=r"^dequant_lqq: K % g == 0 \(got K=4100, g=64\)$"):
        LQQ.check_sizes({"R": 1, "K": 4100, "g": 64})


def test_a_grid_that_no_gpu_takes_is_refused() -> None:
    assert Launch((2**31 - 1, 65535, 65535), (1, 1, 1))
    with pytest.raises(
        ArgumentError, match=r"grid: at most \(2147483647, 65535, 65535\) blocks \(got \(1, 65536, 1\)\)"
    ):
        Launch((1, 65536, 1), (1, 1, 1))


def test_the_sizes_of_a_spec_are_the_names_in_its_expressions() -> None:
    appended = {"T", "H", "D", "pages", "size", "bits", "channel", "R"}
    atom = {"M", "K", "outliers", "g", "pairs", "code", "clip"}
    expected = {
        "reorder": (atom,),
        "append": (appended | {"k_pitch", "v_pitch"},),
        "rope": (appended | {"ratio", "kept", "pitch"},),
        "dequant": ({"R", "K", "g"}, {"R", "K"}),
        "load": ({"T"}, {"P", "B"}),
        "quantize": ({"M", "K", "rows", "span"},),
        "sum": ({"M", "K"},),
        "rmsnorm": ({"M", "K", "rows", "span", "added", "kept", "eps"}, atom | {"added", "kept", "eps"}),
        "silu": ({"M", "K", "rows", "span", "activation"}, atom | {"activation"}),
        "choose": ({"M", "H", "E", "k"},),
        "gather": ({"M", "K", "E", "k"},),
        "combine": ({"M", "H", "k", "rows"},),
        "gemm": (
            {"M", "N", "K", "g"},
            {"M", "N", "K"},
            {"M", "N", "K", "E", "g"},
            {"M", "N", "K", "outliers"},
            {"M", "N", "K", "outliers", "g"},
            {"M", "N", "K4", "K8"},
            {"M", "N", "K4", "K8", "blocks"},
        ),
        "attention": (
            {"B", "Hq", "Hkv", "P", "pages", "softmax_scale"},
            {"B", "Hq", "Hkv", "P", "pages", "softmax_scale", "T", "D", "page", "bits", "channel", "window", "blocks"},
            {"B", "T", "Hq", "Hkv", "D", "blocks", "columns", "tile"},
            {"N", "B", "Hq", "Hkv", "D", "P", "pages", "page", "window", "blocks", "softmax_scale"},
            {"N", "B", "Hq", "Hkv", "D", "P", "pages", "page", "window", "blocks", "softmax_scale", "parts"},
        ),
    }
    symbols_by_name = {name: spec.symbols for name, spec in registry.specs().items()}
    assert [name for name, symbols in symbols_by_name.items() if symbols not in expected[name.partition("_")[0]]] == []
    assert LQQ.symbols == {"R", "K", "g"} and registry.specs()["dequant_comet"].symbols == {"R", "K"}
    with pytest.raises(ArgumentError, match=r"dequant_lqq: sizes: K, R, g \(got G\)"):
        LQQ.sizes_of(shapes(), {"G": 64})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"dequant_lqq: sizes: g must be given"):
        LQQ.check_sizes({"R": 1, "K": 64})


@pytest.mark.parametrize(
    ("scale", "offset", "q4", "message"),
    [
        (0, 9, 0, r"dequant_lqq: scale: scale >= 1 \(got scale\[1, 0\] = 0\)"),
        (17, 9, 0, r"dequant_lqq: scale: scale <= 16 \(got scale\[1, 0\] = 17\)"),
        (16, 16, 15, r"nibbles\(qweight\) \* per_weight\(scale\) \+ per_weight\(offset\) <= 255 .*scale\[1, 0\] = 16"),
    ],
)
def test_a_value_rule_names_the_first_element_that_breaks_it(scale: int, offset: int, q4: int, message: str) -> None:
    arrays = {
        "qweight": pack_u4(np.full((2, 32), [[0], [q4]], np.uint8)),
        "scale": np.array([[1], [scale]], np.uint8),
        "offset": np.array([[9], [offset]], np.uint8),
    }
    with pytest.raises(ArgumentError, match=message):
        LQQ.check_values(arrays, {"R": 2, "K": 32, "g": 32})


def test_bytes_moved_are_compulsory_traffic() -> None:
    assert LQQ.bytes_moved({"R": 2, "K": 256, "g": 64}) == 2 * (128 + 4 + 4 + 256)


def test_scalars_are_computed_from_the_sizes() -> None:
    sizes = {"R": 2, "K": 256, "g": 64}
    assert {a.name: LQQ.scalar(a, sizes) for a in LQQ.args if a.role == "scalar"} == {"pairs": 32, "shift": 2}
    assert LQQ.scalar(LQQ.arg("pairs"), sizes).dtype == np.uint32


def test_a_scalar_may_be_a_float() -> None:
    spec = registry.specs()["attention_kv4_simple"]
    scale = spec.scalar(spec.arg("softmax_scale"), {"softmax_scale": 0.1})
    assert scale == np.float32(0.1) and scale.dtype == np.float32
    with pytest.raises(ArgumentError, match=r"attention_kv4_simple: sizes: softmax_scale must be given"):
        spec.scalar(spec.arg("softmax_scale"), {"Hq": 1})


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ArgumentError, match="dequant_lqq takes qweight, scale, offset, out, pairs, shift"):
        LQQ.arg("zero")


@pytest.mark.smoke
@pytest.mark.parametrize("spec", registry.specs().values(), ids=lambda s: s.name)
def test_every_example_obeys_its_own_rules(spec: KernelSpec) -> None:
    assert spec.example_sizes
    for sizes in spec.example_sizes:
        arrays = spec.pack(spec.example(np.random.default_rng(0), **sizes))
        assert {a.name for a in spec.inputs if not a.optional} <= set(arrays) <= {a.name for a in spec.inputs}
        solved = spec.sizes_of({n: a.shape for n, a in arrays.items()}, sizes)
        spec.check_values(arrays, solved)
        for arg in map(spec.arg, arrays):
            dtypes = arg.dtype.dtypes if isinstance(arg.dtype, ByVariant) else (arg.dtype,)
            assert convert_to_dtype(arrays[arg.name], dtypes[0]).dtype in map(storage, dtypes)  # as `verify` has them
            assert arrays[arg.name].shape == arg.resolve(sizes)


def test_a_file_without_a_spec_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first step of adding a kernel and the third."""
    all_specs = registry.specs()
    monkeypatch.setattr(registry, "specs", lambda: {n: s for n, s in all_specs.items() if n != "dequant_lqq"})
    with pytest.raises(ArgumentError, match=r"dequant_lqq.ptx has no spec yet: add one to SPECS of the family dequant"):
        registry.find("dequant_lqq")


def test_unknown_kernels_suggest_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"^unknown kernel 'dequant_lq'; nearest: dequant_lqq, "):
        registry.find("dequant_lq")
    with pytest.raises(ArgumentError, match=r"dequant_comet comes as dequant_comet.ptx"):
        registry.find("dequant_comet.cu")


def test_a_form_of_a_kernel_is_found_by_its_label() -> None:
    for spec in kernels.gemm.FORMS:
        source = registry.find(spec.name)[1][0]
        if "w4a4" not in spec.name:
            assert ("g" in spec.symbols) == ("channel" not in spec.form) and "g" in registry.specs()[spec.name].symbols
        assert spec.label == f"{spec.name}:{spec.form}"
        assert (
            registry.find(spec.label) == (spec, (source,)) and registry.find(f"{source.label}:{spec.form}")[0] is spec
        )
        assert registry.resolve_all(f"{source.label}:{spec.form}") == [(spec, (source,), spec.name)]
    with pytest.raises(ArgumentError, match=r"one of gemm_w4a8_sm90, gemm_.*:channel, .*residual \(got .*:rows\)"):
        registry.find("gemm_w4a8_sm90:rows")
    with pytest.raises(ArgumentError, match=r"kernel: one of dequant_lqq \(got dequant_lqq:channel\)"):
        registry.find("dequant_lqq:channel")


def test_shape_of_an_argument_in_numbers() -> None:
    assert Arg("scale", "uint8", ("R", "K/g")).resolve({"R": 2, "K": 256, "g": 64}) == (2, 4)


@pytest.mark.parametrize("name", registry.specs())
def test_a_kernel_waits_for_the_one_before_it_if_its_spec_says_so(name: str) -> None:
    """And the spec names inputs: another name would be looked for in vain."""
    spec = registry.specs()[name]
    assert set(spec.after_wait) <= {arg.name for arg in spec.inputs}
    for source in sources.sources_of_kernel(name):
        waits = "griddepcontrol.wait" in source.text or "wait_for_predecessors()" in source.text
        assert waits == bool(spec.after_wait)
