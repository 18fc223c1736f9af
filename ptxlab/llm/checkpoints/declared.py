"""What the JSON files beside a checkpoint declare of its quantisation; what `foreign` would read wrongly is refused.

The files that writers leave: config.json with a key, or a file of their own. Some folders have two. Their spellings of
a setting are made one first, so that two that contradict each other are noticed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptxlab.errors import ArgumentError, in_file
from ptxlab.io.files import read_json
from ptxlab.validate import is_integer, is_one_of

GPTQ, AWQ, PACKED, INTEGERS = "GPTQ", "AWQ", "compressed-tensors, packed", "compressed-tensors, integers"
WHOLE_ROW = -1  # as a group size

# Where a folder has it: file, key, and the method where the file does not name it
_PLACES = (
    ("config.json", "quantization_config", None),
    ("config.json", "compression_config", "compressed-tensors"),
    ("quantize_config.json", None, "gptq"),
    ("quantization_config.json", None, None),
    ("quant_config.json", None, "awq"),
)
_SPELLINGS = {"w_bit": "bits", "wbits": "bits", "q_group_size": "group_size", "method": "quant_method"}
# Settings under which a file's weights are not those of the formula: what each may be. None or nothing is fine always.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "bits": (4,),
    "pack_dtype": ("int32",),
    "data_type": ("int",),
    "act_bits": (16, 32),
    "is_marlin_format": (False,),
    "kv_cache_scheme": (),
    "transform_config": (),
    "rotation": (),
    "rotation_config": (),
    "spinquant_config": (),
}
# In which two files may not differ
_DECISIVE = ("quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "version", "packing_format")


@dataclass(frozen=True)
class Declaration:
    """Settings that decide how matrices are read; None where a folder has none.

    Attributes:
        format: the name of the `ForeignFormat` that matrices are of.
        group_size: columns per group, or `WHOLE_ROW`.
        symmetric: whether all zero points are the middle, 8.
        version: 1 or 2 of GPTQ; 1 stores zero points less 1.
        borrows: whether that 1 was taken from whole words of zero points, so that a zero of 0 borrows from the next.
        act_order: whether groups follow an order of columns that the file must have.
        ignored: names of modules that are not quantised.
    """

    format: str | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    version: int | None = None
    borrows: bool = False
    act_order: bool = False
    ignored: tuple[str, ...] = ()


def read_declarations(folder: Path) -> tuple[Declaration, ...]:
    """Read what a folder declares: one declaration, or one for each kind of matrix.

    Raises FileError for settings that no reader takes, and for files that contradict each other.
    """
    with in_file(folder):
        settings = _merged_settings(folder)
        method = _method(settings)
        for name, allowed_values in _HARMLESS.items():
            if (setting := settings.get(name)) not in (None, {}, [], *allowed_values):
                choice = " or ".join(map(str, allowed_values))
                raise ArgumentError(f"the config's {name}", f"must be {choice}" if choice else "must be unset", setting)
        declarations = _READERS[method](settings)
        return declarations if isinstance(declarations, tuple) else (declarations,)


def _merged_settings(folder: Path) -> dict[str, Any]:
    """Merge the settings of all files, in one spelling."""
    merged_settings: dict[str, Any] = {}
    origin_by_key: dict[str, str] = {}
    for file, key, method in _PLACES:
        if not (path := folder / file).is_file():
            continue
        content = read_json(path)
        file_settings = content.get(key) if key and isinstance(content, dict) else content
        if file_settings is None or (key and not isinstance(content, dict)):
            continue
        if not isinstance(file_settings, dict):
            raise ArgumentError(f"{file}: {key or 'its content'}", "must be an object", file_settings)
        settings = _one_spelling({"quant_method": method, **file_settings})
        for name in _DECISIVE:
            if settings.get(name) is not None and merged_settings.get(name, settings[name]) != settings[name]:
                rule = f"must be the same in {origin_by_key[name]} and {file}"
                raise ArgumentError(f"the config's {name}", rule, f"{merged_settings[name]} and {settings[name]}")
        settings = {name: setting for name, setting in settings.items() if setting is not None}
        origin_by_key |= dict.fromkeys(settings, file)
        merged_settings |= settings
    return merged_settings


def _one_spelling(declared: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for spelling, setting in declared.items():
        name = _SPELLINGS.get(spelling, spelling)
        setting = setting.lower() if name in ("quant_method", "version") and isinstance(setting, str) else setting
        if settings.get(name) is not None and setting is not None and settings[name] != setting:
            raise ArgumentError(
                f"the config's {name}", f"must be that of {spelling} too", f"{settings[name]}, {setting}"
            )
        settings[name] = settings.get(name) if setting is None else setting
    if any(spelling.startswith("load_in_") for spelling in declared) and settings["quant_method"] is None:
        settings["quant_method"] = "bitsandbytes"
    return settings


def _method(settings: Mapping[str, Any]) -> str | None:
    method = settings.get("quant_method")
    if not is_one_of(method, _READERS):
        rule = f"must be one of {', '.join(filter(None, _READERS))}"
        raise ArgumentError("the config's quant_method", rule, method)
    return method


def _flag(settings: Mapping[str, Any], name: str) -> bool | None:
    setting = settings.get(name)
    if setting is not None and not isinstance(setting, bool):
        raise ArgumentError(f"the config's {name}", "must be true or false", setting)
    return setting


def _group_size(settings: Mapping[str, Any]) -> int | None:
    size = settings.get("group_size")
    if size is not None and not (is_integer(size) and (size > 0 or size == WHOLE_ROW)):
        raise ArgumentError("the config's group_size", "must be a positive integer, or -1", size)
    return size


def _without_method(settings: Mapping[str, Any]) -> Declaration:
    return Declaration(group_size=_group_size(settings), version=_gptq_version(settings))


def _gptq_version(settings: Mapping[str, Any]) -> int | None:
    formats = [settings[name] for name in ("checkpoint_format", "format") if settings.get(name) is not None]
    if any(name not in ("gptq", "gptq_v2") or name != formats[0] for name in formats):
        raise ArgumentError(
            "the config's checkpoint_format", "must be gptq or gptq_v2", " and ".join(map(str, formats))
        )
    return {"gptq": 1, "gptq_v2": 2}[formats[0]] if formats else None


def _gptq(settings: Mapping[str, Any]) -> Declaration:
    """Read a config of GPTQ. Settings of single modules are refused, unless they except one."""
    for pattern in _entries(settings, "dynamic"):
        if not pattern.startswith("-:"):
            raise ArgumentError("the config's dynamic", "must only except modules (-:)", pattern)
    return Declaration(
        format=GPTQ,
        group_size=_group_size(settings),
        symmetric=_flag(settings, "sym"),
        version=_gptq_version(settings),
        borrows=_borrows(settings),
        act_order=bool(_flag(settings, "desc_act")),
        ignored=_names(settings, "modules_to_not_convert"),
    )


def _borrows(settings: Mapping[str, Any]) -> bool:
    """Tell GPTQModel and AutoRound, which subtract from words, from AutoGPTQ, which does from each zero point."""
    meta = settings.get("meta")
    quantizers = meta.get("quantizer") if isinstance(meta, dict) else None
    return "gptqmodel" in str(quantizers).lower() or settings.get("provider") == "auto-round"


def _awq(settings: Mapping[str, Any]) -> Declaration:
    for name, expected in (
        ("version", "gemm"),
        ("checkpoint_format", "gemm"),
        ("format", "gemm"),
        ("backend", "autoawq"),
    ):
        if settings.get(name) not in (None, expected):
            raise ArgumentError(f"the config's {name}", f"must be {expected}", settings[name])
    symmetric, has_zeros = _flag(settings, "sym"), _flag(settings, "zero_point")
    if symmetric is not None and symmetric == has_zeros:
        raise ArgumentError("the config's zero_point", f"must be {not symmetric} where sym is {symmetric}", has_zeros)
    return Declaration(
        format=AWQ,
        group_size=_group_size(settings),
        symmetric=symmetric if has_zeros is None else not has_zeros,
        ignored=_names(settings, "modules_to_not_convert"),
    )


_PACKINGS: dict[Any, int] = {None: 1, "auto_round:auto_gptq": 1, "auto_round": 2, "auto_round:gptqmodel": 2}


def _auto_round(settings: Mapping[str, Any]) -> Declaration:
    packing = settings.get("packing_format")
    if packing not in (*_PACKINGS, "auto_round:auto_awq"):
        choice = ", ".join(filter(None, [*_PACKINGS, "auto_round:auto_awq"]))
        raise ArgumentError("the config's packing_format", f"must be one of {choice}", packing)
    for module, changes in _entries(settings, "extra_config").items():
        if not isinstance(changes, dict) or changes.get("bits") not in (16, 32):
            raise ArgumentError("the config's extra_config", "must only except modules (bits 16)", module)
    is_awq = packing not in _PACKINGS
    return Declaration(
        format=AWQ if is_awq else GPTQ,
        group_size=_group_size(settings),
        symmetric=_flag(settings, "sym"),
        version=None if is_awq else _PACKINGS[packing],
        borrows=True,
    )


def _compressed_tensors(settings: Mapping[str, Any]) -> tuple[Declaration, ...]:
    """Read the different weights of `config_groups`. Of which a matrix is, its tensors show, without its targets."""
    sparsity = settings.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":
        raise ArgumentError("the config's sparsity_config", "must be of format dense", sparsity)
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise ArgumentError("the config's config_groups", "must be an object of objects", groups)
    group_declarations = [
        _compressed_group(f"config_groups.{name}", group, settings.get("format"))
        for name, group in groups.items()
        if group.get("weights") is not None
    ]
    if not group_declarations:
        raise ArgumentError("the config's config_groups", "must have weights", groups)
    ignored = _names(settings, "ignore")
    return tuple(replace(declaration, ignored=ignored) for declaration in dict.fromkeys(group_declarations))


def _compressed_group(path: str, group: Mapping[str, Any], written_format: Any) -> Declaration:
    weights = group["weights"]
    if not isinstance(weights, dict):
        raise ArgumentError(f"the config's {path}.weights", "must be an object", weights)

    def require(name: str, setting: Any, *allowed: Any) -> None:
        if setting not in allowed:
            raise ArgumentError(f"the config's {path}.{name}", f"must be {' or '.join(map(str, allowed))}", setting)

    formats = {"pack-quantized": PACKED, "int-quantized": INTEGERS, "naive-quantized": INTEGERS}
    written_format = group.get("format") or written_format
    require("format", written_format, *formats)
    require("weights.num_bits", weights.get("num_bits", 8), 4)
    require("weights.type", weights.get("type", "int"), "int")
    require("weights.symmetric", weights.get("symmetric", True), True, False)
    require("weights.dynamic", weights.get("dynamic", False), False)
    require("output_activations", group.get("output_activations"), None)
    input_settings = group.get("input_activations")
    if input_settings is not None:  # dynamic ones have no tensors
        if not isinstance(input_settings, dict):
            raise ArgumentError(f"the config's {path}.input_activations", "must be an object", input_settings)
        require("input_activations.dynamic", input_settings.get("dynamic", False), True)
    size = _group_size(weights)
    strategy = weights.get("strategy") or {None: "tensor", WHOLE_ROW: "channel"}.get(size, "group")
    require("weights.strategy", strategy, "group", "channel")
    if (strategy == "group") != (size is not None and size > 0):
        raise ArgumentError(f"the config's {path}.weights.group_size", f"must be one of strategy {strategy}", size)
    order = weights.get("actorder")
    require("weights.actorder", order, None, False, True, "group", "dynamic", "weight", "static")
    return Declaration(
        format=formats[written_format],
        group_size=size if strategy == "group" else WHOLE_ROW,
        symmetric=weights.get("symmetric", True),
        act_order=order in (True, "group", "dynamic"),
    )


def _entries(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return settings of single modules, by their names or patterns."""
    entries = settings.get(key) or {}
    if not isinstance(entries, dict):
        raise ArgumentError(f"the config's {key}", "must be an object", entries)
    return entries


def _names(settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = settings.get(key) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"the config's {key}", "must be a list of names", names)
    return tuple(names)


_READERS: dict[str | None, Callable[[Mapping[str, Any]], Declaration | tuple[Declaration, ...]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    None: _without_method,
}
