"""Blocks of attention and MLP that several layers share, as in Zamba 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.state_layers import LayerCounts, Sizes


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    parameters: int  # of one layer, if all blocks are spread evenly over the layers
    reread_parameters: int  # that a step reads again, because a block has several layers
    head_dim: int


def shared_blocks(
    reader: Sizes, counts: LayerCounts, hidden: int, heads: int, kv_heads: int
) -> SharedBlocks | None:
    """Return the sizes of the blocks, or None for a model without shared ones."""
    kind = reader.values.get("model_type")
    if kind not in ("zamba", "zamba2") or not counts.attention:
        return None
    head_dim = 2 * hidden // heads  # queries read the residual beside the embedding
    inner, rank = (
        reader.size("intermediate_size", default=4 * hidden),
        reader.size("adapter_rank", default=128) if kind == "zamba2" else 0,
    )
    attention = head_dim * (2 * hidden * (heads + 2 * kv_heads) + heads * hidden)
    block = attention + 3 * hidden * inner
    own = rank * (hidden + 2 * inner) + hidden * hidden
    if reader.values.get("use_shared_attention_adapter"):
        own += 3 * rank * 4 * hidden
    num_blocks = counts.attention
    if reader.values.get("tie_word_embeddings", True):  # else transformers shares no blocks
        num_blocks = min(num_blocks, max(1, reader.size("num_mem_blocks", default=1)))
    spread = round(num_blocks * block / counts.attention)
    return SharedBlocks(own + spread, (counts.attention - num_blocks) * block, head_dim)
