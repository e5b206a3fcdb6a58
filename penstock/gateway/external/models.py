"""Models that external servers serve, as the catalogue knows them: by name, without a tokenizer or a template."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.server import ServerLoad
from penstock.core.cluster_view import ReplicaView
from penstock.core.errors import InvalidRequest
from penstock.dispatch.health import Circuit
from penstock.gateway.checks import check_request
from penstock.gateway.metrics.table import metric, metric_by
from penstock.gateway.prompts import GenerationRequest
from penstock.router import ReplicaState

UNKNOWN_VOCAB_SIZE = 1 << 31  # more than any vocabulary has


@dataclass(frozen=True, slots=True)
class ExternalModel:
    name: str
    max_model_len: int | None  # None where no server tells

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_model_len

    @property
    def fingerprint(self) -> bytes:
        """The identity of the model, which is its name only, because servers do not report a change of weights."""
        return hashlib.blake2b(f"external\0{self.name}".encode(), digest_size=32).digest()

    def check(self, request: GenerationRequest) -> None:
        """Everything that can be checked cheaply and without the server's tokenizer. Raises InvalidRequest."""
        check_request(request, UNKNOWN_VOCAB_SIZE)
        if request.sampling.prompt_logprobs is not None or request.sampling.max_tokens == 0:
            raise InvalidRequest(
                f"The model {self.name!r} runs on another server, which is not asked to score prompts.",
                param="max_tokens" if request.sampling.prompt_logprobs is None else "prompt_logprobs",
                hint="Leave out prompt_logprobs, echo with logprobs, and max_tokens of 0.",
            )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Refuse a prompt of token ids under a guard: guards read text, and only the external server has the
        tokenizer."""
        raise InvalidRequest(
            f"A safety policy must read the prompt, and {self.name!r} has no tokenizer here.",
            param="prompt",
            hint="Send the prompt as text.",
        )

    def refuse(self) -> InvalidRequest:
        """The error for operations that need more than the model's name."""
        return InvalidRequest(
            f"The model {self.name!r} runs on another server, which is only asked for answers.", param="model"
        )


class ExternalModels(Collector):
    """The models of all external servers. Also a collector of metrics about the servers and the requests to them."""

    def __init__(self, pool: ExternalPool) -> None:
        self.pool = pool

    @property
    def is_ready(self) -> bool:
        return self.pool.is_ready

    def find(self, name: str) -> ExternalModel | None:
        models = self.pool.models
        return ExternalModel(name, models[name]) if name in models else None

    def first(self) -> ExternalModel | None:
        return next(iter(self.all()), None)

    def all(self) -> list[ExternalModel]:
        return [ExternalModel(name, length) for name, length in self.pool.models.items()]

    def replica_views(self) -> list[ReplicaView]:
        """The servers in the form in which replicas are shown. The load counts all clients of a server that reports
        it."""
        views = []
        for server in self.pool.views():
            load = server.load or ServerLoad(server.num_running, 0)
            views.append(
                ReplicaView(
                    id=server.name,
                    model=", ".join(server.models),
                    revision="",
                    state=server.state if server.circuit is Circuit.CLOSED else ReplicaState.UNHEALTHY,
                    role="external",
                    region=server.region,
                    num_running=load.num_running,
                    num_waiting=load.num_waiting,
                    kv_usage=load.kv_usage or 0.0,
                )
            )
        return views

    def collect(self) -> Iterator[Metric]:
        views = {view.name: view for view in self.pool.views()}
        yield metric_by(
            "external_up", {name: view.state is ReplicaState.READY for name, view in views.items()}
        )
        yield metric_by(
            "external_circuit_open",
            {name: view.circuit is not Circuit.CLOSED for name, view in views.items()},
        )
        yield metric_by("external_requests_running", {name: view.num_running for name, view in views.items()})
        loads = {name: view.load for name, view in views.items() if view.load is not None}
        running = {(name, "running"): load.num_running for name, load in loads.items()}
        waiting = {(name, "waiting"): load.num_waiting for name, load in loads.items()}
        yield metric_by("external_load", running | waiting)
        attempts = {
            (name, outcome): count for name, view in views.items() for outcome, count in view.outcomes.items()
        }
        yield metric_by("external_attempts", attempts)
        yield metric("external_retries", self.pool.num_retries)
