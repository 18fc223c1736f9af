"""vLLM's attention over a cache in 4 or 8 bits, whose pages are ptxlab's.

A page of `int4_per_token_head` has, to the byte, as much as a page of ptxlab's `kv4`, and one of `int8_per_token_head`
as much as one of `kv8`: the tensor that vLLM allocates is the pool [pages, 2, Hkv, bytes], a page a block of 64 tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ptxlab.errors import ArgumentError
from ptxlab.llm.torch.operators import attention_workspace
from ptxlab.llm.vllm.kernels import CAPABILITIES, HIGHEST, is_served
from ptxlab.lowbit.kernels.attention.call import MOST_RATIO, MOST_TOKENS
from ptxlab.lowbit.kernels.attention.prefill import CHUNKED
from ptxlab.lowbit.layout.kv_cache import HEAD_DIMS
from ptxlab.lowbit.layout.pages import page_bytes

PAGE = 64  # tokens
CACHE_DTYPES = {"int4_per_token_head": "kv4", "int8_per_token_head": "kv8"}  # vLLM's names of ptxlab's schemes


class KV4Backend(AttentionBackend):
    """The backend CUSTOM: sizes, dtypes and features that the kernels support."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*CACHE_DTYPES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the name of vLLM's member for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Return the tokens of a page."""
        return [PAGE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the head dims that pages have."""
        return [*HEAD_DIMS]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the pool's shape, of uint8."""
        if block_size != PAGE or cache_dtype_str not in CACHE_DTYPES:
            rule = f"must be {PAGE} tokens of {', '.join(CACHE_DTYPES)}"
            raise ArgumentError("KV4Backend: block", rule, f"{block_size} of {cache_dtype_str}")
        return num_blocks, 2, num_kv_heads, page_bytes(CACHE_DTYPES[cache_dtype_str], PAGE, head_size)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return whether layers may see the last tokens alone."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return whether `VLLM_BATCH_INVARIANT=1` is kept: then all queries take the kernel for prompts."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why the kernels cannot run on the GPU, or not on such a cache, or None."""
        if not is_served(device_capability):
            return f"ptxlab's kernels need compute capability {CAPABILITIES}, not {device_capability.as_version_str()}"
        if envs.VLLM_BATCH_INVARIANT and tuple(device_capability) != HIGHEST:
            return f"VLLM_BATCH_INVARIANT=1 needs compute capability 9.0, not {device_capability.as_version_str()}"
        if envs.VLLM_BATCH_INVARIANT and CACHE_DTYPES.get(kv_cache_dtype) not in (*CHUNKED, None):
            return f"VLLM_BATCH_INVARIANT=1 needs a cache of 4 bits, not {kv_cache_dtype}"
        return None

    @staticmethod
    def get_impl_cls() -> type["KV4Impl"]:
        """Return what a layer calls."""
        return KV4Impl

    @staticmethod
    def get_builder_cls() -> type["KV4MetadataBuilder"]:
        """Return what makes the metadata of a batch."""
        return KV4MetadataBuilder


@dataclass(frozen=True)
class SequenceRows:
    """Rows of a batch that one kernel attends.

    Attributes:
        block_table: s32 [B, pages].
        lengths: s32 [B], the new tokens included.
        query_start_loc: s32 [B + 1], where each sequence's queries begin among these rows; None where all have as many.
        rows: s64 [B·T], which rows of the batch these are; None for those that follow what came before.
    """

    block_table: Tensor
    lengths: Tensor
    query_start_loc: Tensor | None = None
    rows: Tensor | None = None


@dataclass(frozen=True)
class KV4Metadata(AttentionMetadata):
    """A batch: `decodes`, sequences with the same few queries each, and behind them `prompts`, with any number.

    Attributes:
        tokens: rows of the batch, without padding.
        decode_tokens: how many of them, the first, are of `decodes`.
        decodes: None where there are none.
        prompts: by calls: one of the kernel for prompts, or those of the kernel for decodes by numbers of queries.
        is_batch_invariant: whether the kernel for prompts takes all queries, and cuts no context into parts.
    """

    tokens: int
    decode_tokens: int
    decodes: SequenceRows | None
    prompts: tuple[SequenceRows, ...]
    is_batch_invariant: bool = False


class KV4MetadataBuilder(AttentionMetadataBuilder[KV4Metadata]):
    """Makes the metadata of a batch; lengths and tables stay on the GPU, and nobody waits for it.

    Batches of decodes alone are views of vLLM's persistent tensors, which full CUDA graphs read anew in each replay.
    Kernels cut contexts into parts by the whole batch, so a token's last bits depend on what else is served. With
    `VLLM_BATCH_INVARIANT=1` the kernel for prompts takes all queries, and cuts nothing.

    That kernel reads 4 bits alone. Over a cache of 8 bits a prompt is taken apart: the kernel for decodes attends up to
    eight of its tokens at a time, as if each eight were a sequence.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.is_batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.is_chunked = CACHE_DTYPES[vllm_config.cache_config.cache_dtype] in CHUNKED
        shared_workspace(kv_cache_spec.head_size, torch.device(device))  # before a capture

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KV4Metadata:
        """Return the metadata. Raises ArgumentError for attention that is not causal."""
        batch = common_attn_metadata
        if batch.causal is not True:
            raise ArgumentError("KV4Backend: attention", "must be causal", batch.causal)
        table, lengths = batch.block_table_tensor[: batch.num_reqs], batch.seq_lens[: batch.num_reqs]
        if self.is_batch_invariant:
            every_row = SequenceRows(table, lengths, batch.query_start_loc[: batch.num_reqs + 1])
            return KV4Metadata(batch.num_actual_tokens, 0, None, (every_row,), is_batch_invariant=True)
        decodes, prompts, decode_tokens, _ = split_decodes_and_prefills(
            batch, decode_threshold=self.reorder_batch_threshold or 1, require_uniform=True
        )
        if decodes and (decode_tokens % decodes or decode_tokens // decodes > MOST_TOKENS):
            decodes, prompts, decode_tokens = 0, batch.num_reqs, 0
        prompt_rows: tuple[SequenceRows, ...] = ()
        if prompts:
            prompt_rows = (_prompts(batch, decodes, decode_tokens),) if self.is_chunked else (*_pieces(batch, decodes),)
        return KV4Metadata(
            tokens=batch.num_actual_tokens,
            decode_tokens=decode_tokens,
            decodes=SequenceRows(table[:decodes], lengths[:decodes]) if decodes else None,
            prompts=prompt_rows,
        )


def _prompts(batch: CommonAttentionMetadata, first: int, first_token: int) -> SequenceRows:
    """Return the rows from sequence `first` on, copied: kernels take arrays at multiples of 16 bytes."""
    return SequenceRows(
        batch.block_table_tensor[first : batch.num_reqs].clone(),
        batch.seq_lens[first : batch.num_reqs].clone(),
        batch.query_start_loc[first : batch.num_reqs + 1] - first_token,
    )


def _pieces(batch: CommonAttentionMetadata, first: int) -> Iterator[SequenceRows]:
    """Yield the rows from sequence `first` on in pieces: single tokens at a prompt's beginning, then eight each.

    A piece is a sequence whose length ends with its last token.
    """
    starts = batch.query_start_loc_cpu[first : batch.num_reqs + 1].numpy().astype(np.int64)
    new_tokens = np.diff(starts)
    singles = new_tokens % MOST_TOKENS
    for size, pieces, begin in (
        (1, singles, starts[:-1]),
        (MOST_TOKENS, new_tokens // MOST_TOKENS, starts[:-1] + singles),
    ):
        if not pieces.any():
            continue
        sequence = np.repeat(np.arange(len(new_tokens)), pieces)
        number = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of its sequence
        first_token = begin[sequence] + size * number
        tokens_after = starts[1:][sequence] - (first_token + size)
        row_indices = (first_token[:, None] + np.arange(size)).reshape(-1)
        sequences, shortening, rows_of_batch = (
            torch.from_numpy(numbers).to(batch.seq_lens.device)
            for numbers in (first + sequence, tokens_after, row_indices)
        )
        lengths = batch.seq_lens[sequences] - shortening.to(batch.seq_lens.dtype)
        yield SequenceRows(batch.block_table_tensor[sequences], lengths, rows=rows_of_batch)


@cache
def shared_workspace(head_dim: int, device: torch.device) -> Tensor:
    """Return the memory of attention, which all layers of a device share: they follow each other."""
    return attention_workspace(head_dim, device)


class KV4Impl(AttentionImpl[KV4Metadata]):
    """Attention of one layer, over rotated keys and over values that come rotated (`ptxlab.llm.vllm.rotation`)."""

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        unsupported = {
            "ALiBi": alibi_slopes is not None,
            "capped logits": bool(logits_soft_cap),
            "layers that share a cache": kv_sharing_target_layer_name is not None,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            f"more than {MOST_RATIO} query heads of a kv head": num_heads > MOST_RATIO * (num_kv_heads or num_heads),
        }
        for feature, is_used in unsupported.items():
            if is_used:
                raise ArgumentError("--attention-backend CUSTOM", f"does not support {feature} yet", "such a layer")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.scheme, self.window = CACHE_DTYPES[kv_cache_dtype], sliding_window

    def do_kv_cache_update(
        self, layer: Any, keys: Tensor, values: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Rotate new keys [T, Hkv, D], quantise them and values, and write both to slots; negative ones are padding."""
        tokens = slot_mapping.shape[0]
        pool = kv_cache.view(torch.uint8)  # vLLM has it in int8 for 8 bits
        torch.ops.ptxlab.append_kv4(
            keys[:tokens], values[:tokens], pool, slot_mapping, page_size=PAGE, scheme=self.scheme, rotated=True
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        kv_cache: Tensor,
        attn_metadata: KV4Metadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of queries [T, Hq, D] over the cache, which has their own keys, into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise ArgumentError("--attention-backend CUSTOM", "does not quantise its output", "a scale for it")
        if attn_metadata is None:  # a run that measures memory
            return output.fill_(0)
        first_prompt_token, tokens = attn_metadata.decode_tokens, attn_metadata.tokens
        queries = query[:tokens].contiguous()
        if decodes := attn_metadata.decodes:
            self._attend(
                _by_sequence(queries[:first_prompt_token], decodes),
                kv_cache,
                decodes,
                _by_sequence(output[:first_prompt_token], decodes),
            )
        for prompts in attn_metadata.prompts:
            if prompts.rows is None:
                invariant = attn_metadata.is_batch_invariant
                self._attend(
                    queries[first_prompt_token:],
                    kv_cache,
                    prompts,
                    output[first_prompt_token:tokens],
                    batch_invariant=invariant,
                )
                continue
            pieces = _by_sequence(queries[prompts.rows], prompts)
            attended = torch.empty_like(pieces)
            self._attend(pieces, kv_cache, prompts, attended)
            output[prompts.rows] = attended.view(-1, *output.shape[1:])
        return output

    def _attend(
        self, queries: Tensor, kv_cache: Tensor, rows: SequenceRows, output: Tensor, *, batch_invariant: bool = False
    ) -> None:
        torch.ops.ptxlab.attention_kv4_out(
            queries,
            kv_cache.view(torch.uint8),
            rows.block_table,
            rows.lengths,
            output,
            page_size=PAGE,
            scheme=self.scheme,
            rotated=True,
            scale=self.scale,
            window=self.window,
            query_start_loc=rows.query_start_loc,
            workspace=shared_workspace(self.head_size, queries.device),
            batch_invariant=batch_invariant,
        )


def _by_sequence(rows: Tensor, sequences: SequenceRows) -> Tensor:
    """View rows [B·T, Hq, D] as [B, T, Hq, D], or leave them as they are if T is 1."""
    B = sequences.lengths.shape[0]
    return rows if len(rows) == B else rows.view(B, -1, *rows.shape[1:])
