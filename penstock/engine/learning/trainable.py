"""EAGLE's decoder layer in plain torch with autograd, and the model's states that the layer learns from."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.kernels.interface import AttentionBatch
from penstock.models.config import ArchitectureConfig
from penstock.models.drafters.heads import Target
from penstock.models.rope import rope_table

BLOCK_SIZE = 16


def head_config(model: ArchitectureConfig) -> ArchitectureConfig:
    """Return the sizes of a head: those of one layer of the model, or of an ordinary layer for a mixture."""
    inner = model.intermediate_size if model.experts is None else 3 * model.hidden_size
    return replace(
        model, architecture="llama", num_layers=1, intermediate_size=inner, windows=(None,),
        attention_scale=model.head_dim**-0.5, experts=None, norm_offset=0.0, local_rope=None,
    )  # fmt: skip


class TrainableHead(nn.Module):
    """EAGLE's decoder layer in plain torch. `EagleHead` computes the same from the written file."""

    rope: Tensor

    def __init__(self, config: ArchitectureConfig, num_positions: int) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config = config

        def linear(rows: int, columns: int, scale: float = 1.0) -> nn.Linear:
            made = nn.Linear(columns, rows, bias=False)
            nn.init.normal_(made.weight, std=scale / math.sqrt(columns))
            return made

        self.fc = linear(size, 2 * size, 0.1)
        with torch.no_grad():  # an untrained head passes the hidden state on
            self.fc.weight[:, size:] += torch.eye(size)
        self.q_proj, self.k_proj = linear(queries, size), linear(keys, size)
        self.v_proj, self.o_proj = linear(keys, size), linear(size, queries, 0.1)
        self.gate_proj, self.up_proj = linear(inner, size), linear(inner, size)
        self.down_proj = linear(size, inner, 0.1)
        self.norm = nn.Parameter(torch.ones(size))
        rope = rope_table(config.rope, config.head_dim, num_positions)
        self.register_buffer("rope", rope, persistent=False)

    def forward(self, embedded: Tensor, features: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute one position further ahead, for all positions of texts: [B, L, hidden] twice → [B, L, hidden].
        `past` gets the keys and values of this call; call number j reads what the calls before it have added."""
        ahead, length = len(past), features.shape[1]
        x: Tensor = self.fc(torch.cat([embedded, features], dim=-1))
        query, key, value = (each.transpose(1, 2) for each in self.attended(x, self.rope[:length]))
        past.append((key, value))
        return self.finished(x, self._attend(query, past, ahead).transpose(1, 2))

    def attended(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values with their positions' rows of `rope`: [..., rows, hidden] → three times
        [..., rows, heads, dim]."""
        config = self.config
        query, key, value = (
            product(x).view(*x.shape[:-1], -1, config.head_dim)
            for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = config.num_heads // config.num_kv_heads
        key, value = (each.repeat_interleave(repeats, dim=-2) for each in (rotated(key, rope), value))
        return rotated(query, rope), key, value

    def finished(self, x: Tensor, made: Tensor) -> Tensor:
        """Return the layer's output from its input after `fc` and what attention made of it, [..., heads, dim]."""
        config = self.config
        x = x + self.o_proj(made.flatten(-2))
        normed = functional.rms_norm(x, x.shape[-1:], self.norm, config.norm_eps)
        activated = (
            functional.silu(self.gate_proj(normed))
            if config.activation == "silu"
            else functional.gelu(self.gate_proj(normed), approximate="tanh")
        )
        added: Tensor = self.down_proj(activated * self.up_proj(normed))
        return x + added

    def _attend(self, query: Tensor, past: list[tuple[Tensor, Tensor]], ahead: int) -> Tensor:
        """Attend as a head does that drafts its token number `ahead`: to the states of the model up to the first
        draft, and to its own predictions after the first draft. Call i made the prediction at distance `ahead` -
        i."""
        scale, length = self.config.attention_scale, query.shape[2]
        first_key, first_value = past[0]
        if not ahead:
            return functional.scaled_dot_product_attention(
                query, first_key, first_value, is_causal=True, scale=scale
            )
        scores = query @ first_key.transpose(2, 3) * scale
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1 - ahead)
        scores = scores.masked_fill(hidden, float("-inf"))
        own = [
            (shifted(key, ahead - i), shifted(value, ahead - i)) for i, (key, value) in enumerate(past) if i
        ]
        diagonal = torch.stack([(query * key).sum(dim=-1) * scale for key, _ in own], dim=-1)
        shares = torch.cat([scores, diagonal], dim=-1).float().softmax(dim=-1).to(query.dtype)
        made = shares[..., :length] @ first_value
        for i, (_, value) in enumerate(own):
            made = made + shares[..., length + i, None] * value
        return made

    def published(self) -> dict[str, Tensor]:
        """Return the weights under their published names."""
        places = {"gate_proj": "mlp.", "up_proj": "mlp.", "down_proj": "mlp."}
        named: dict[str, Tensor] = {
            "fc.weight": self.fc.weight,
            "layers.0.post_attention_layernorm.weight": self.norm,
        }
        for name, module in self.named_children():
            if name != "fc":
                named[f"layers.0.{places.get(name, 'self_attn.')}{name}.weight"] = module.weight  # type: ignore[assignment]
        return named

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights under their published names, in 16 bits."""
        return {name: tensor.detach().to(torch.float16) for name, tensor in self.published().items()}


def rotated(heads: Tensor, rope: Tensor) -> Tensor:
    """Turn heads by the angles of their positions: [..., rows, heads, dim] and [..., rows, dim]."""
    cosines, sines = rope.unsqueeze(-2).to(heads.dtype).chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def shifted(tensor: Tensor, by: int) -> Tensor:
    """Move rows to later positions, along the dimension before the last one. The first rows stay."""
    return tensor if not by else torch.cat([tensor[..., :by, :], tensor[..., :-by, :]], dim=-2)


class TrainingData:
    """The training data of a head: the model's hidden states, embeddings and distributions over tokens."""

    def __init__(self, target: Target, draft_ids: Tensor | None) -> None:
        self.target = target
        self.device = target.ops.device
        self.draft_ids = None if draft_ids is None else draft_ids.to(self.device)
        rows = draft_ids if draft_ids is not None else torch.arange(target.model.config.vocab_size)
        self.output = target.head_rows(rows).values.to(self.device, torch.float32)

    @torch.no_grad()
    def states(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings and the final hidden states: int32 [B, L] → float32 [B, L, hidden] twice."""
        model, (batch, length) = self.target.model, token_ids.shape
        blocks = -(-length // BLOCK_SIZE)
        kv = self.target.ops.allocate_kv(
            model.num_layers, batch * blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim
        )

        def int32(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, torch.int32)

        positions = torch.arange(length).repeat(batch)
        first = torch.arange(batch).repeat_interleave(length) * blocks * BLOCK_SIZE
        places = AttentionBatch(
            positions=int32(positions),
            slots=int32(first + positions),
            query_starts=int32(torch.arange(batch + 1) * length),
            context_lens=int32(torch.full((batch,), length)),
            block_tables=int32(torch.arange(batch * blocks).view(batch, blocks)),
            num_requests=batch,
            max_query_len=length,
            max_context_len=length,
        )
        flat = int32(token_ids.flatten())
        shape = (batch, length, model.config.hidden_size)
        return model.embed(flat).float().view(shape), model.forward(flat, places, kv).float().view(shape)

    @torch.no_grad()
    def answers(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's distributions over the head's tokens, and its argmax over all: [S, hidden] → [S, D] and
        [S]."""
        shares, chosen = [], []
        for rows in hidden.to(self.target.ops.dtype).split(1024):
            logits = self.target.model.logits(rows)
            chosen.append(logits.argmax(dim=1))
            shares.append((logits if self.draft_ids is None else logits[:, self.draft_ids]).softmax(dim=1))
        return torch.cat(shares), torch.cat(chosen)
