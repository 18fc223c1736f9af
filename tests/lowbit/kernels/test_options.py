"""Options of public calls: stated once, part of every key, documented; none serves another call's kernel."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.kernels.operation import Operation, record_launches
from ptxlab.lowbit.kernels.options import Options
from ptxlab.runtime.plan import Plan
from tests.support import public_calls
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device
from tests.support.public_calls import CALLS, WITH, other_value

# Arrays on a device are for the GPU, with `backend="gpu"` or without; what a call with `check` prepares serves others.
OF_NO_KERNEL = {"backend", "check"}
EACH_CALL = pytest.mark.parametrize("name", CALLS)
OPTIONS = [*public_calls.options_of_calls()]
EACH_OPTION = pytest.mark.parametrize(("name", "option"), OPTIONS)
# `epilogue` goes with another weight; `check` and `return_lse` leave what is run on the host as it is.
SAME_WEIGHT = [option for option in OPTIONS if option[1] != "epilogue"]
ON_HOST = [option for option in SAME_WEIGHT if option[1] not in ("check", "return_lse")]


@EACH_CALL
def test_signature_fields_and_docstring_agree(name: str) -> None:
    call, options, operands = CALLS[name]
    parameters = CALLS[name].parameters
    fields_by_name = {field.name: field for field in fields(options)}
    assert set(parameters) == {*fields_by_name, *operands} and not {*fields_by_name} & {*operands}
    for option, field in fields_by_name.items():
        default = parameters[option].empty if field.default is MISSING else field.default
        assert parameters[option].default == default and parameters[option].annotation == field.type, option
    text = call.__doc__ or ""
    assert "{options}" not in text
    documented = re.findall(r"^ {8}(\w+(?:, \w+)*): ", text[text.index("Args:") : text.index("Raises")], re.MULTILINE)
    described = [parameter for line in documented for parameter in line.split(", ")]
    assert sorted(described) == sorted(parameters)
    for option, field in fields_by_name.items():
        assert f"{option}: {' '.join(field.metadata['text'].split())}" in " ".join(text.split())


def classes(options: type[Options] = Options) -> Iterator[type[Options]]:
    yield options
    for subclass in options.__subclasses__():
        yield from classes(subclass)


@pytest.mark.parametrize("options", [*dict.fromkeys(classes())], ids=lambda options: options.__name__)
def test_every_field_is_in_both_keys(options: type[Options]) -> None:
    """The key of a call is the object; two objects are one only if all fields are equal."""
    base = {field.name: f"value of {field.name}" for field in fields(options)}
    first = options(**base)
    assert options.of(*base.values()) is options.of(*base.values())
    assert vars(options.of(*base.values())) == base
    for name in base:
        changed = {**base, name: "another"}
        assert options.of(*changed.values()) is not options.of(*base.values()), name
        assert (replace(first, **{name: "another"}).kernel_key == first.kernel_key) == (name in OF_NO_KERNEL), name


def test_equal_values_of_other_types_are_other_options() -> None:
    assert len({Options.of(backend) for backend in (1, 1.0, True, np.int64(1))}) == 4


def test_a_value_without_a_hash_makes_options_that_are_refused() -> None:
    options = Options.of([])
    assert options.backend == [] and options is not Options.of([])  # type: ignore[comparison-overlap]
    with pytest.raises(ArgumentError, match=r"^gemm: backend: one of gpu, emulator \(got \[\]\)"):
        options.require_valid("gemm")


@pytest.mark.parametrize("values", [(), (None, False, None)])
def test_a_value_too_few_or_too_many_is_noticed(values: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="zip"):
        Options.of(*values)


class AskedError(Exception):
    pass


@EACH_OPTION
def test_every_keyword_reaches_its_field(monkeypatch: pytest.MonkeyPatch, name: str, option: str) -> None:
    """Values are passed to `Options.of` by position."""

    def note(_: Operation[Any], options: Options, *__: Any, **___: Any) -> None:
        raise AskedError(options)

    monkeypatch.setattr(Operation, "__call__", note)
    arguments = public_calls.arguments(np.asarray, lambda operand: operand)[name]
    setting = other_value(name, option)
    with pytest.raises(AskedError) as raised:
        CALLS[name].call(**{**arguments, option: setting})
    (options,) = raised.value.args
    assert type(options) is CALLS[name].options
    for field in fields(options):
        expected = setting if field.name == option else arguments.get(field.name, field.default)
        assert getattr(options, field.name) == expected, field.name


def launch_plans(name: str, arguments: dict[str, Any]) -> list[Plan]:
    with record_launches() as noted:
        CALLS[name].call(**arguments)
    return [plan for plans, _ in noted for plan in plans]


@pytest.mark.full_cases(
    "?*_reorder_quantize-*",
    "*mul_quantize-rows",
    "*norm_quantize-layout",
    "gemm_w4a4-out_dtype",
    "gemm_w4ax-out_dtype",
    "gemm_w8a8-out_dtype",
    "*-batch_invariant",
)
@pytest.mark.parametrize(("name", "option"), SAME_WEIGHT)
def test_calls_that_differ_in_an_option_share_no_plan(fake: FakeGpu, name: str, option: str) -> None:
    """They share on a device neither what is remembered of calls nor a prepared kernel, and each launches what it
    launches alone. Each is made twice, as the second of each finds the first."""
    fake.runs = False
    arguments = {**public_calls.arguments(DeviceArray, on_device)[name], **WITH.get(option, {})}
    arguments = {key: argument for key, argument in arguments.items() if key in CALLS[name].parameters}
    changed = {**arguments, option: other_value(name, option)}
    alone = launch_plans(name, changed)
    geometry = fake.geometries.copy()
    for remembered in (operation._prepared, operation._ready):
        remembered.clear()  # type: ignore[attr-defined]
    first = launch_plans(name, arguments)
    calls = len(operation._ready)
    fake.geometries.clear()
    second = launch_plans(name, changed)
    assert [(plan.spec, plan.sizes) for plan in second] == [(plan.spec, plan.sizes) for plan in alone]
    assert fake.geometries == geometry
    assert len(operation._ready) == calls + (option != "check")  # a call with `check` is not remembered
    assert bool({*first} & {*second}) == (option in OF_NO_KERNEL)
    assert launch_plans(name, arguments) == first and launch_plans(name, changed) == second


@pytest.mark.parametrize("name", CALLS)
def test_no_tokens_are_no_error(fake: FakeGpu, name: str) -> None:
    """Every result is empty but for the offsets of experts, which are zeros."""
    on_host = np.asarray, lambda operand: operand, "emulator"
    for to_array, to_place, backend in (on_host, (DeviceArray, on_device, None)):
        returned = CALLS[name].call(**public_calls.arguments(to_array, to_place, rows=0)[name], backend=backend)
        arrays = {"": returned} if hasattr(returned, "dtype") or returned is None else vars(returned)
        packed = vars(arrays.pop("rows")) if name == "route_tokens" else {}
        for field, array in {**arrays, **packed}.items():
            if field == "offsets":
                assert np.array_equal(getattr(array, "host", array), np.zeros(5))
            elif hasattr(array, "dtype"):
                assert array.shape[0] == 0, field
    launched = [kernel for kernel, _ in fake.launched]
    assert launched == (["choose_experts", "gather_tokens"] if name == "route_tokens" else [])


def test_a_result_and_a_residual_share_no_plan(fake: FakeGpu) -> None:
    """An epilogue that follows from an array."""
    fake.runs = False
    arguments = public_calls.arguments(DeviceArray, on_device)["gemm_w4a8"]
    y = DeviceArray(np.zeros((public_calls.M, public_calls.N), np.float16))
    plans = [launch_plans("gemm_w4a8", {**arguments, name: y}) for name in ("out", "residual", "out", "residual")]
    assert plans[:2] == plans[2:] and not {*plans[0]} & {*plans[1]}


@pytest.mark.parametrize(("name", "option"), ON_HOST)
def test_an_option_reaches_the_kernel_on_the_host(monkeypatch: pytest.MonkeyPatch, name: str, option: str) -> None:

    def note(spec: Any, source: Any, inputs: Any, *, out: Any = (), **launch: Any) -> None:
        raise AskedError(spec.name, launch)

    for module in ("spec_call", "gemm.api", "gemm.grouped_api", "attention.api", "attention.append_api"):
        monkeypatch.setattr(f"ptxlab.lowbit.kernels.{module}.run_spec", note)
    arguments = {**public_calls.arguments(np.asarray, lambda operand: operand)[name], **WITH.get(option, {})}
    arguments = {key: argument for key, argument in arguments.items() if key in CALLS[name].parameters}
    calls = []
    setting = None if option == "backend" else other_value(name, option)
    for options in ({}, {option: setting}, {}):
        with pytest.raises(AskedError) as error:
            CALLS[name].call(**{**arguments, "backend": "emulator", **options})
        calls.append(error.value.args)
    assert calls[0] == calls[2] != calls[1]
