"""The result of loading a model. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.messages import ModelCard
from penstock.core.plan import StateSlots, WindowLayout
from penstock.engine.drafters.interface import Drafter
from penstock.engine.loop import Executor

if TYPE_CHECKING:
    from penstock.engine.adapters import AdapterQueue
    from penstock.engine.grammar import GrammarQueue
    from penstock.engine.images import ImageQueue
    from penstock.engine.transfer.sharing import SharedKV
    from penstock.kernels.interface import KVStore

Progress = Callable[[str, float], None]  # the stage, and its finished share


@dataclass(frozen=True, slots=True)
class Loaded:
    """An executor, and the facts that determine all other sizes."""

    executor: Executor
    card: ModelCard
    num_kv_blocks: int
    num_host_blocks: int = 0
    block_copy_s: float | None = None
    tile_tokens: int = 1
    halves_blocks: bool = False
    default_steps_in_flight: int = 1
    grammars: GrammarQueue | None = None
    adapters: AdapterQueue[Any] | None = None
    images: ImageQueue | None = None
    image_cache_tokens: int = 0
    shared_kv: SharedKV | None = None
    forced_drafters: tuple[Drafter, ...] = ()  # of tokens that grammars force
    drafter: Drafter | None = None  # a draft model or a head
    states: StateSlots | None = None  # of a model whose layers have a fixed state
    kv: KVStore | None = None  # for tiers below host memory
    kv_facts: tuple[object, ...] = ()  # what the bytes of a block depend on
    windows: WindowLayout | None = None  # of a model whose layers have windows
    masks_late: bool = False  # the executor samples a step once the step before it is committed, for grammars
    starts_late: bool = False  # the executor finds where a chunk starts that follows drafts in flight
    # Reads the free bytes of the GPU, and all of its bytes.
    gpu_memory: Callable[[], tuple[int, int]] | None = None
    max_num_seqs: int | None = None  # requests that can run at once, if fewer than the setting allows
