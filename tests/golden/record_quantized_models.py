"""Make the small quantised models of `quantized_models/` with the libraries that write such files.

`python tests/golden/record_quantized_models.py WRITER FOLDER`, in an environment that has the writer, not ptxlab.
WRITER is a key of `WRITERS`; the models and `made.json` go into FOLDER. Each model has `logits.npy`: what a float32
model computes whose matrices the writer's own library has dequantised. None of the writers needs a GPU for that:
AutoGPTQ asks for one, and `_write_autogptq` names the CPU in its place.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY, GROUP = 96, 32
TOKENS = np.array([[(7 * i * i + 3 * i + 2) % VOCABULARY for i in range(24)]])
_KEPT = ("config.json", "model.safetensors", "quantize_config.json", "quantization_config.json")
Weights = dict[str, torch.Tensor]


def base(family: str = "llama", **changes: Any) -> Path:
    """Write the float model that a writer quantises; its words are w2, w3, .."""
    import tokenizers

    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    config_of, model_of = kinds[family]
    torch.manual_seed(0)
    model = model_of(config_of(**{**sizes, **changes}))
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5 + (1 if "norm" in name else 0)
    folder = Path(tempfile.mkdtemp())
    model.half().save_pretrained(folder)
    words = {"<unk>": 0, "<end>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "pad_token": "<unk>"}))
    return folder


def calibration() -> list[dict[str, torch.Tensor]]:
    """Draw what activations are measured on."""
    torch.manual_seed(1)
    ids = [torch.randint(2, VOCABULARY, (1, 64)) for _ in range(8)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]


def by_products(model: torch.nn.Module) -> Weights:
    """Multiply the identity by each quantised matrix, with scales in float32."""
    weights = {}
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            module.scales = module.scales.float()
            inputs = torch.eye(module.infeatures if hasattr(module, "infeatures") else module.in_features)
            with torch.no_grad():
                product = module(inputs)
            has_bias = module.bias is not None and module.bias.numel()
            weights[name] = (product - module.bias.float() if has_bias else product).T.contiguous()
    return weights


# --- writers: each writes a model into a folder and gives its matrices -----------------------------------------------


def _write_gptqmodel(source: Path, folder: Path, **settings: Any) -> Weights:
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"
    os.chdir(tempfile.mkdtemp())  # the library writes logs into the working directory
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear

    model = GPTQModel.load(
        str(source), QuantizeConfig(bits=4, group_size=GROUP, pack_impl="original", **settings), device="cpu"
    )
    model.quantize(calibration(), batch_size=1)
    model.save(str(folder))
    loaded = GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    weights = {}
    for name, module in loaded.model.named_modules():
        if isinstance(module, BaseQuantLinear):
            module.scales = module.scales.float()
            weights[name] = module.dequantize_weight().T.contiguous()
    return weights


def _write_autogptq(source: Path, folder: Path, **settings: Any) -> Weights:
    import auto_gptq.modeling._base as library
    from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig
    from auto_gptq.modeling import LlamaGPTQForCausalLM

    library.CUDA_0 = torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float16)
    model.seqlen = 256
    quantized = LlamaGPTQForCausalLM(model, False, BaseQuantizeConfig(bits=4, group_size=GROUP, **settings))
    quantized.quantize(calibration(), cache_examples_on_gpu=False, use_triton=False)
    quantized.save_quantized(str(folder), use_safetensors=True)
    loaded = AutoGPTQForCausalLM.from_quantized(
        str(folder),
        device="cpu",
        use_safetensors=True,
        disable_exllama=True,
        disable_exllamav2=True,
        torch_dtype=torch.float32,
    )
    return by_products(loaded.model)


def _write_autoawq(source: Path, folder: Path) -> Weights:
    from types import SimpleNamespace

    # The library asks for Intel's devices, which PyTorch 2.2 does not know.
    torch.xpu = SimpleNamespace(is_available=lambda: False, _is_in_bad_fork=lambda: True)
    from awq import AutoAWQForCausalLM
    from awq.utils.packing_utils import dequantize_gemm

    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", safetensors=True)
    texts = [" ".join(f"w{i}" for i in row["input_ids"][0][:60].tolist()) for row in calibration() * 2]
    settings = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    model.quantize(AutoTokenizer.from_pretrained(source), quant_config=settings, calib_data=texts, max_calib_seq_len=64,
                   max_calib_samples=16)  # fmt: skip
    model.save_quantized(str(folder), safetensors=True)
    tensors = load_file(folder / "model.safetensors")
    return {
        name.removesuffix(".qweight"): dequantize_gemm(
            words,
            tensors[name.replace("qweight", "qzeros")],
            tensors[name.replace("qweight", "scales")].float(),
            4,
            GROUP,
        ).T.contiguous()
        for name, words in tensors.items()
        if name.endswith("qweight")
    }


def _write_llmcompressor(
    source: Path, folder: Path, groups: dict[str, dict[str, Any]], activations: bool = False
) -> Weights:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import CompressedTensorsConfig

    int8 = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    schemes = {
        f"group_{i}": QuantizationScheme(
            targets=[target],
            weights=QuantizationArgs(
                **{"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, **settings}
            ),
            input_activations=int8 if activations else None,
        )
        for i, (target, settings) in enumerate(groups.items())
    }
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    oneshot(model=model, recipe=QuantizationModifier(config_groups=schemes, ignore=["lm_head"]))
    model.save_pretrained(folder, save_compressed=True)
    whole = CompressedTensorsConfig(run_compressed=False)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=whole)
    return {
        name: module.weight.detach().float()
        for name, module in loaded.named_modules()
        if isinstance(module, torch.nn.Linear) and "proj" in name
    }


def _write_autoround(source: Path, folder: Path, format: str, sym: bool) -> Weights:
    from auto_round import AutoRound
    from transformers import AutoRoundConfig

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    work = Path(tempfile.mkdtemp())
    rounding = AutoRound(model, AutoTokenizer.from_pretrained(source), scheme="W4A16", group_size=GROUP, sym=sym,
                         iters=0, device_map="cpu", disable_opt_rtn=True)  # fmt: skip
    rounding.quantize_and_save(str(work), format=format)
    shutil.copytree(next(path.parent for path in work.rglob("config.json")), folder, dirs_exist_ok=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", quantization_config=AutoRoundConfig()
    )
    return by_products(loaded)


Writer = Callable[..., Weights]
_ROWS = {"strategy": "channel", "group_size": None}
_OLD_SIZES = {"intermediate_size": 128, "num_key_value_heads": 2}  # AutoAWQ scales 64 rows at a time
# By library: its packages, its function, and by model the base and the arguments.
WRITERS: dict[str, tuple[tuple[str, ...], Writer, dict[str, tuple[dict[str, Any], dict[str, Any]]]]] = {
    "gptqmodel": (("gptqmodel",), _write_gptqmodel, {
        "gptqmodel_v1": ({}, {"sym": True, "desc_act": False, "format": "gptq"}),
        "gptqmodel_v1_order": ({}, {"sym": False, "desc_act": True, "format": "gptq"}),
        "gptqmodel_v2": ({}, {"sym": True, "desc_act": False, "format": "gptq_v2"}),
        "gptqmodel_v2_order": ({"family": "qwen2"}, {"sym": False, "desc_act": True, "format": "gptq_v2"}),
    }),
    "autogptq": (("auto-gptq",), _write_autogptq, {
        "autogptq": ({}, {"sym": True, "desc_act": False}),
        "autogptq_order": ({}, {"sym": False, "desc_act": True}),
    }),
    "autoawq": (("autoawq",), _write_autoawq, {"autoawq": (_OLD_SIZES, {})}),
    "llmcompressor": (("llmcompressor", "compressed-tensors"), _write_llmcompressor, {
        "llmcompressor_sym": ({}, {"groups": {"Linear": {}}}),
        "llmcompressor_asym": ({"family": "qwen2"}, {"groups": {"Linear": {"symmetric": False}}}),
        "llmcompressor_rows": ({}, {"groups": {"Linear": _ROWS}}),
        "llmcompressor_w4a8": ({}, {"groups": {"Linear": _ROWS}, "activations": True}),
        "llmcompressor_groups": ({}, {"groups": {
            "re:.*self_attn.*": {}, "re:.*(gate|up)_proj": {"group_size": 64},
            "re:.*down_proj": {"group_size": 96, "symmetric": False},
        }}),
    }),
    "autoround": (("auto-round",), _write_autoround, {
        "autoround": ({}, {"format": "auto_round", "sym": True}),
        "autoround_gptq": ({}, {"format": "auto_gptq", "sym": False}),
    }),
}  # fmt: skip


def logits(folder: Path, weights: Weights) -> np.ndarray:
    """Compute the last logits [8, V] of a float32 model with these matrices and the file's other tensors."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    kind = Qwen2Config if config["model_type"] == "qwen2" else LlamaConfig
    model = AutoModelForCausalLM.from_config(kind(**{**config, "torch_dtype": "float32"})).float().eval()
    tensors = {name: stored.float() for name, stored in load_file(folder / "model.safetensors").items()}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            module = name.removesuffix(".weight")
            parameter.copy_(weights[module] if module in weights else tensors[name])
        assert len(weights) == 7 * config["num_hidden_layers"]
        return model(torch.from_numpy(TOKENS)).logits[0, -8:].numpy()


def record(writer: str, out: Path) -> None:
    """Make the models of a writer."""
    packages, write, models = WRITERS[writer]
    made_by = {package: version(package) for package in (*packages, "torch", "transformers")}
    for name, (sizes, settings) in models.items():
        folder, work = out / name, Path(tempfile.mkdtemp()) / name
        weights = write(base(**sizes), work, **settings)
        folder.mkdir(parents=True, exist_ok=True)
        for path in work.glob("*.safetensors"):  # AutoGPTQ names it after the bits and the group
            path.rename(work / "model.safetensors")
        for path in (work / file for file in _KEPT):
            if path.exists():
                _without_machine(path, folder / path.name)
        np.save(folder / "logits.npy", logits(work, weights))
        record_of = {"writer": made_by, "arguments": {**sizes, **settings}}
        path = out / "made.json"
        records = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**records, name: record_of}, indent=1, sort_keys=True) + "\n")


def _without_machine(source: Path, target: Path) -> None:
    """Copy a file; of a JSON file, without the paths of the machine that made it."""
    if source.suffix != ".json":
        shutil.copyfile(source, target)
        return
    content = json.loads(source.read_text())
    for settings in (content, content.get("quantization_config", {})):
        settings.get("meta", {}).pop("offload_to_disk_path", None)
    content.pop("_name_or_path", None)
    target.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]).resolve())
