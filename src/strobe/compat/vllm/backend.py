"""The classes that vLLM asks for: a backend, its metadata and their builder, and the implementation that layers call.

A layer writes its new keys with `do_kv_cache_update` and then calls `forward`. Kernels read block tables and lengths as
vLLM has them, so a builder has nothing to compute, and a CUDA graph replays with whatever is in them.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MultipleOf,
)

from strobe import paged
from strobe.compat.vllm import NAME
from strobe.cuda.parts.plan import MAX_DIM
from strobe.paged.attention import attention_paged
from strobe.problem import Unsupported
from strobe.variants.mask import Mask, causal
from strobe.variants.ready_made import window
from strobe.variants.score import Score, alibi

_DECODER = "decoder"
_SIXTEEN_BITS = ("auto", "float16", "bfloat16")  # dtypes of caches
_PREFERRED_PAGE = 64  # smaller ones are read more slowly


class Backend(AttentionBackend):
    """The backend's record of what it can do. vLLM refuses a model that needs more, and says why."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(_SIXTEEN_BITS)

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, _PREFERRED_PAGE)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a cache for versions that ask. Later ones have (blocks, heads, block, 2 · dim)."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MAX_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == _DECODER

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Older GPUs have no kernels."""
        return capability.major >= 8


@dataclasses.dataclass
class Metadata(AttentionMetadata):
    """A step: requests with packed queries. The names are vLLM's, whose runner sets some of them."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor  # (requests + 1,), int32
    max_seq_len: int
    seq_lens: torch.Tensor  # (requests,), int32: keys in use, new ones included
    block_table: torch.Tensor  # (requests, width), int32
    slot_mapping: torch.Tensor  # (tokens,), int64; negative for padding
    causal: bool = True


class Builder(AttentionMetadataBuilder[Metadata]):
    # Graphs of decodes, guessed tokens included. The kernel's grid depends on no length, but no engine has replayed a step
    # with pieces of prompts yet.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise Unsupported(f"causal is {common.causal!r}; the backend {NAME} has causal layers only")
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )

    def update_block_table(self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Metadata:
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Nothing in it is derived from what changes."""


class Impl(AttentionImpl[Metadata]):
    """Attention of one layer."""

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
        attn_type: str = _DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != _DECODER:
            raise Unsupported(f"attn_type is {attn_type!r}; the backend {NAME} has {_DECODER!r} only")
        if kv_cache_dtype not in _SIXTEEN_BITS:
            raise Unsupported(
                f"kv_cache_dtype is {kv_cache_dtype!r}; allowed are {', '.join(map(repr, _SIXTEEN_BITS))}"
            )
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ValueError(f"sinks must have shape ({num_heads},), one for each head; got {tuple(sinks.shape)}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attn_type = attn_type
        self.invariant = bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))  # vLLM's switch for all its kernels
        self.sinks = sinks
        self.softcap = logits_soft_cap or None  # 0: none
        self.mask: Mask = causal if sliding_window is None else causal & window(sliding_window - 1, None)
        # On the device on which vLLM makes its layers.
        self.score: Score | None = (
            None if alibi_slopes is None else alibi(torch.tensor(alibi_slopes, dtype=torch.float32))
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,  # (tokens, heads, dim)
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`key` and `value` are in the cache already. Tokens behind `num_actual_tokens` are padding."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported(f"the backend {NAME} does not quantise its output")
        if attn_metadata is None:  # vLLM measures how much memory a step takes
            return output.fill_(0)
        m, k, v = attn_metadata, *pools(kv_cache, self.head_size)
        n = m.num_actual_tokens
        attention_paged(
            query[:n], k, v, m.block_table, m.seq_lens, m.query_start_loc, max_q=m.max_query_len, mask=self.mask,
            scale=self.scale, softcap=self.softcap, score=self.score, sinks=self.sinks,
            invariant=self.invariant,
            out=output[:n].view(n, self.num_heads, self.head_size),
        )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Keys and values of padding have no slots."""
        n = slot_mapping.shape[0]
        paged.append(key[:n], value[:n], *pools(kv_cache, self.head_size), slot_mapping)


def pools(kv_cache: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (blocks, block, heads_k, dim) of a cache (blocks, heads_k, block, 2 · dim), or of one with keys and values along
    an axis: (blocks, 2, block, heads_k, dim) or (2, blocks, …)."""
    if kv_cache.dim() == 4 and kv_cache.shape[3] == 2 * dim:
        together = kv_cache.transpose(1, 2)
        return together[..., :dim], together[..., dim:]
    if kv_cache.dim() == 5 and 2 in kv_cache.shape[:2]:
        k, v = kv_cache.unbind(1 if kv_cache.shape[1] == 2 else 0)
        return k, v
    raise Unsupported(
        f"the cache has shape {tuple(kv_cache.shape)}; known are (blocks, heads, block, {2 * dim}) and 5 axes"
    )
