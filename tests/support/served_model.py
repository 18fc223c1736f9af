"""`ServedModel`: a small model in vLLM's classes on the CPU, its cache in pages, steps of made-up batches."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache, get_kv_cache_spec

from ptxlab.lowbit.layout import PackedWeight

PAGE, PAGES = 64, 3  # tokens of a page, pages of a sequence
Rows = list[tuple[int, int, list[int]]]  # sequence, tokens that it has already, tokens to come


def load_model(config: VllmConfig) -> Any:
    """Make the model of a configuration and load it as vLLM's worker does."""
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        return loader.load_model(vllm_config=config, model_config=config.model_config)


def packed_weight(layer: Any) -> PackedWeight:
    """Return the packed weight that a linear layer has."""
    method = layer.quant_method
    weight: PackedWeight = method.matrix.weight({name: getattr(layer, name).numpy() for name in method.names})
    return weight


class ServedModel:
    """A model as vLLM's worker loads it, and its cache.

    Attributes:
        config: vLLM's.
        model: vLLM's.
        table: s32 [sequences, pages], each page once, the first one unused.
    """

    def __init__(self, config: VllmConfig, sequences: int = 3) -> None:
        self.config = config
        self.model = load_model(config)
        with set_current_vllm_config(config):
            current_platform.update_block_size_for_backend(config)
        self.table = torch.arange(1, 1 + sequences * PAGES, dtype=torch.int32).reshape(sequences, PAGES)
        self.specs = get_kv_cache_spec(config)
        blocks, dtype = int(self.table.max()) + 1, config.cache_config.cache_dtype
        for name, spec in self.specs.items():
            layer = config.compilation_config.static_forward_context[name]
            backend = layer.get_attn_backend()
            shape = backend.get_kv_cache_shape(blocks, PAGE, spec.num_kv_heads, spec.head_size, dtype)
            memory = torch.zeros(blocks * spec.page_size_bytes, dtype=torch.int8)
            layer.kv_cache = _reshape_attention_kv_cache(memory, spec, shape, tuple(range(len(shape))), blocks, None)
            self.builder = backend.get_builder_cls()(spec, [*self.specs], config, torch.device("cpu"))

    def batch(self, rows: Rows, padding: int = 0) -> CommonAttentionMetadata:
        """Describe a batch as vLLM's runner does; `padding` sequences of no tokens follow it."""
        new = [len(tokens) for *_, tokens in rows] + [0] * padding
        starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
        lengths = torch.tensor([done + len(tokens) for _, done, tokens in rows] + [0] * padding, dtype=torch.int32)
        places = [(s, done + i) for s, done, tokens in rows for i in range(len(tokens))]
        slots = torch.tensor([int(self.table[s, at // PAGE]) * PAGE + at % PAGE for s, at in places])
        table = torch.cat([self.table[[s for s, *_ in rows]], torch.zeros(padding, PAGES, dtype=torch.int32)])
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(lengths),
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=slots,
        )

    def logits(self, rows: Rows) -> Tensor:
        """Compute the logits f32 [tokens of the batch, vocabulary] of a step."""
        tokens = torch.tensor([token for *_, new in rows for token in new])
        positions = torch.tensor([done + offset for _, done, new in rows for offset in range(len(new))])
        batch = self.batch(rows)
        metadata = dict.fromkeys(self.specs, self.builder.build(0, batch))
        slots = dict.fromkeys(self.specs, batch.slot_mapping)
        of_step = {"num_tokens": len(tokens), "slot_mapping": slots}
        forward = set_forward_context(metadata, self.config, **of_step)
        with torch.inference_mode(), set_current_vllm_config(self.config), forward:
            return self.model.compute_logits(self.model(tokens, positions)).float()
