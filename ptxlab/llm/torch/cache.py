"""`KV4Cache`: a cache of `transformers` in 4 or 8 bits, and attention over it as an `attn_implementation`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.pages import PAGE
from ptxlab.llm.torch.operators import attention_workspace
from ptxlab.lowbit.layout import KVCache
from ptxlab.validate import is_integer

IMPLEMENTATION = "ptxlab_kv4"


class TokenPlaces(NamedTuple):
    """Positions, slots and visible tokens of a forward pass's rows, B·T tokens.

    Attributes:
        positions, slots: s64 [B·T]; the slot of padding is -1.
        block_table: s32 [B·T, pages]; rows of a sequence share its pages.
        lengths: s32 [B·T]: a token sees those up to itself, padding none.
    """

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    lengths: Tensor


class KV4Cache(Cache):
    """Keys and values of a batch in pages of 64 tokens, for models of `quantize_model`: `generate(past_key_values=..)`.

    Memory is taken at once and keeps its place, so that compiled steps and CUDA graphs go on using it. `reset` begins
    anew; what several beams share is copied (`reorder_cache`).

    Attributes:
        batch, context: sequences, and tokens of each at most.
        scheme: `kv4` or `kv8`.
        rotated: whether keys are stored rotated, as in the runners: 4 bits hold them better (`ptxlab.KVCache`).
        pools: u8 [pages, 2, Hkv, bytes] of each layer.
        block_table: s32 [B, pages of a sequence], of all layers.
        workspace: of attention on a GPU, for one stream at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int = 1,
        context: int = 2048,
        *,
        scheme: str = "kv4",
        rotated: bool = True,
    ) -> None:
        """Allocate the cache on the model's device, for its layers and heads.

        Raises ArgumentError for sizes that no cache has.
        """
        super().__init__(layers=[])
        for name, number in (("batch", batch), ("context", context)):
            if not is_integer(number) or number < 1:
                raise ArgumentError(f"KV4Cache: {name}", "must be an integer, 1 or more", repr(number))
        config, example = model.config, torch.empty(0, device=model.device)
        heads, dim = config.num_key_value_heads, getattr(config, "head_dim", None)
        self.head_dim = dim or config.hidden_size // config.num_attention_heads
        template_cache = KVCache.empty(
            batch,
            ceil_div(context, PAGE),
            heads,
            self.head_dim,
            page_size=PAGE,
            scheme=scheme,
            rotated=rotated,
            like=example,
        )
        self.batch, self.context, self.scheme, self.rotated = int(batch), int(context), scheme, rotated
        self.pools: list[Tensor] = [torch.zeros_like(template_cache.pool) for _ in range(config.num_hidden_layers)]
        self.block_table: Tensor = template_cache.block_table
        self.workspace = attention_workspace(self.head_dim, example.device)
        self._seen, self._is_used = torch.zeros((), dtype=torch.int64, device=example.device), False
        self._rows: tuple[Any, Any, TokenPlaces] | None = None
        if example.is_cuda:  # so that graphs take these where they are
            for tensor in (*self.pools, self.block_table, self.workspace, self._seen):
                torch._dynamo.mark_static_address(tensor)

    def rows(self, positions: Tensor, real: Tensor | None, batch: int) -> TokenPlaces:
        """Return the places of tokens at positions s64 [B or 1, T]; `real` bool [B, T] is False for padding.

        Every layer of a forward pass calls it with the same tensors; the places of the first call are kept.
        """
        traced = torch.compiler.is_compiling()
        if not traced and self._rows is not None and self._rows[0] is positions and self._rows[1] is real:
            return self._rows[2]
        if batch != self.batch:
            raise ArgumentError("KV4Cache: batch", f"must be that of the tokens, {batch}", self.batch)
        T, is_in_context = positions.shape[1], positions < self.context
        if traced or positions.is_cuda:
            torch._assert_async(is_in_context.all(), "KV4Cache: more tokens than its context")
        elif not is_in_context.all():
            rule = f"no more than the context of {self.context} tokens"
            raise ArgumentError("KV4Cache", rule, f"position {int(positions.max())}")
        # Kernels take no part of an array.
        all_positions = positions.expand(batch, T).clone(memory_format=torch.contiguous_format)
        slots = all_positions + self.block_table[:, :1].long() * PAGE  # pages of a sequence follow each other
        lengths = all_positions + 1
        if real is not None:
            slots, lengths = torch.where(real, slots, -1), torch.where(real, lengths, 0)
        table = self.block_table if T == 1 else self.block_table.repeat_interleave(T, 0)
        places = TokenPlaces(all_positions.reshape(-1), slots.reshape(-1), table, lengths.reshape(-1).int())
        if not traced:
            self._rows = positions, real, places
        return places

    def advance(self, tokens: int) -> None:
        """Add `tokens` to the one length that all sequences have, padding included."""
        self._seen.add_(tokens)
        self._is_used = True

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the length of every sequence, padding included."""
        return self._seen if self._is_used else 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the size and offset of a mask over the whole cache; attention does without that mask."""
        return self.context, 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        """Return the most tokens that a sequence can have."""
        return self.context

    get_max_cache_shape = get_max_length  # its name before

    def reset(self) -> None:
        """Forget all tokens."""
        self._seen.zero_()
        self._is_used, self._rows = False, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Copy sequence beam_idx[b] to sequence b, for every b."""
        for pool in self.pools:
            pool.copy_(pool.unflatten(0, (self.batch, -1))[beam_idx.to(pool.device)].flatten(0, 1))

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(
            "KV4Cache", "tokens are appended by the layers of quantize_model, and none taken away", "another"
        )

    update = crop = batch_repeat_interleave = batch_select_indices = _refuse

    def __len__(self) -> int:
        return len(self.pools)

    is_compileable = is_initialized = True
    is_croppable = False

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return self.batch

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops tokens; a window is the kernel's affair."""
        return [False] * len(self)

    is_linear = is_sliding  # every layer has keys, so `generate` makes the mask of a step outside of what is compiled


class Past(NamedTuple):
    """Stand-in for keys and values in the attention interface: a layer's pool, and the rows."""

    cache: KV4Cache
    pool: Tensor
    rows: TokenPlaces


def attend_kv4(
    module: nn.Module,
    query: Tensor,
    key: Past,
    value: Past,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention [B, T, Hq, D] of rotated queries [B, Hq, T, D] over the tokens in the cache."""
    if not isinstance(key, Past):
        raise ArgumentError(
            f"attn_implementation={IMPLEMENTATION}", "for models of quantize_model", type(module).__name__
        )
    B, Hq, T, D = query.shape
    out = torch.ops.ptxlab.attention_kv4(
        query.transpose(1, 2).reshape(B * T, Hq, D),
        key.pool,
        key.rows.block_table,
        key.rows.lengths,
        page_size=PAGE,
        scheme=key.cache.scheme,
        rotated=key.cache.rotated,
        scale=scaling,
        window=sliding_window,
        workspace=key.cache.workspace,
    )
    return out.view(B, T, Hq, D), None


def real_tokens(*args: Any, q_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return the mask bool [B, T] of a pass's own tokens, False for padding; attention needs no other mask."""
    if attention_mask is None:
        return None
    # With strides of its own: those of a part are the whole mask's, which grows, and CUDA graphs are recorded for each.
    return attention_mask[:, -q_length:].bool().clone(memory_format=torch.contiguous_format)


AttentionInterface.register(IMPLEMENTATION, attend_kv4)
AttentionMaskInterface.register(IMPLEMENTATION, real_tokens)
