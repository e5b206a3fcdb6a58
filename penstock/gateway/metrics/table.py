"""Every metric of a gateway process in one table: name, kind, help text and labels. Collectors fill in the values.

Names are written without their prefix. Every metric appears as `penstock_NAME`; those with `vllm` set appear under
the `vllm:` name too, which dashboards know. `vllm:` names have no label for the tier: vLLM knows none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

PREFIX = "penstock_"
VLLM_PREFIX = "vllm:"


# Merges the values of several gateway processes into the value of their server. "sum": each process counts its own
# part. "max": all processes repeat the figures of the same engines. "min": the lowest value counts for all.
# "harmonic" is 1 / Σ 1/value: a price for which each process knows only its own part of the goods.
Join: TypeAlias = Literal["sum", "max", "min", "harmonic"]


class Declared(NamedTuple):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    join: Join = "sum"
    vllm: bool = False
    attribute: str = ""  # of the object that has the value, where its name differs from the metric's

    def of(self, source: object) -> Any:
        """Return the value that `source` has for this metric."""
        return getattr(source, self.attribute or self.name)

    @property
    def prefixes(self) -> tuple[str, ...]:
        return (PREFIX, VLLM_PREFIX) if self.vllm else (PREFIX,)

    def family(self, prefix: str = PREFIX) -> Metric:
        family: Metric = _FAMILIES[self.kind](prefix + self.name, self.help, labels=self.labels)
        return family


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
Rows: TypeAlias = tuple[tuple[str, str] | tuple[str, str, str], ...]  # name, help text, attribute


def _each(
    kind: Literal["counter", "gauge", "histogram"],
    rows: Rows,
    *labels: str,
    join: Join = "sum",
    vllm: bool = False,
) -> list[Declared]:
    return [Declared(row[0], kind, row[1], labels, join, vllm, *row[2:]) for row in rows]


_MODEL = "model_name"
TIER = "tier"
_POOL = (_MODEL, "role")
_REPLICA = (_MODEL, "replica", "revision", "region")

# fmt: off
_ENGINES = [
    *_each("gauge", (
        ("num_requests_running", "Requests in the running batch.", "num_running"),
        ("num_requests_waiting", "Requests waiting to be scheduled.", "num_waiting"),
        ("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all of them."),
    ), _MODEL, join="max", vllm=True),
    *_each("counter", (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
        ("num_preemptions", "Running requests sent back to the queue."),
        ("num_swapped", "Preempted requests whose KV may go to host memory."),
        ("nan_logits", "Requests ended because the model produced no numbers.", "num_nan_logits"),
        ("out_of_memory", "Requests ended because a step had no memory for them.", "num_out_of_memory"),
        ("spec_decode_num_drafts", "Drafts that were verified, one per request and step.", "num_drafts"),
        ("spec_decode_num_draft_tokens", "Tokens of these drafts.", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "num_accepted_tokens"),
    ), _MODEL, join="max", vllm=True),
    Declared("spec_decode_num_accepted_tokens_per_pos", "counter",
             "Accepted tokens by their position in a draft; the first is 0.", (_MODEL, "position"), "max", True),
    *_each("counter", (
        ("drafter_draft_tokens", "Verified tokens of a drafter by their position in a draft."),
        ("drafter_accepted_tokens", "Accepted tokens of a drafter by their position in a draft."),
    ), _MODEL, "drafter", "position", join="max"),
    *_each("gauge", (
        ("num_waiting_tokens", "Prompt tokens of requests that wait to be scheduled."),
        ("kv_fragmentation", "Share of running requests' KV slots that hold nothing."),
        ("kv_pinned_blocks", "KV blocks held for cache breakpoints.", "num_pinned_blocks"),
        ("kv_host_blocks", "Slots for KV blocks in host memory.", "num_host_blocks"),
        ("kv_host_blocks_used", "Slots in host memory that hold a block.", "num_host_blocks_used"),
        ("image_cache_tokens", "Image tokens whose encoded form is kept."),
        ("expert_imbalance", "Tokens for the busiest rank's experts, relative to the mean of the ranks."),
        ("expert_imbalance_placed", "The same for the same tokens, after experts were moved."),
    ), _MODEL, join="max"),
    *_each("counter", (
        ("cache_read_tokens", "Prompt tokens read from prefixes kept at breakpoints."),
        ("cache_write_tokens", "Prompt tokens newly kept at breakpoints."),
        ("kv_pins_demoted", "Pins given up before their time, to make room.", "num_pins_demoted"),
        ("kv_blocks_to_host", "KV blocks copied to host memory.", "num_blocks_to_host"),
        ("kv_blocks_from_host", "KV blocks copied back from host memory.", "num_blocks_from_host"),
        ("kv_blocks_to_disk", "KV blocks written to disk.", "num_blocks_to_disk"),
        ("kv_blocks_from_disk", "KV blocks read back from disk.", "num_blocks_from_disk"),
        ("kv_fetches", "Requests whose KV was to come from another replica."),
        ("kv_fetches_failed", "Requests whose KV did not all come from another replica."),
        ("kv_fetched_tokens", "Tokens whose KV came from another replica."),
        ("kv_read_bytes", "Bytes of KV read from what other replicas had cached."),
        ("kv_read_seconds", "Time that reading them took.", "kv_read_s"),
        ("kv_kept_blocks_lost", "Kept KV blocks dropped before their time.", "num_kept_blocks_lost"),
        ("images", "Images of requests that began to run.", "num_images"),
        ("images_encoded", "Images that the vision tower has encoded.", "num_images_encoded"),
        ("image_encoder_seconds", "Time for which the vision tower occupied the device.", "image_encoder_s"),
        ("image_cache_queries", "Images whose encoded form a prompt needed."),
        ("image_cache_hits", "Images whose encoded form was there already."),
        ("experts_moved", "Experts that were moved between ranks, or copied.", "num_experts_moved"),
    ), _MODEL, join="max"),
]
_REQUESTS = [
    *_each("counter", (
        ("prompt_tokens", "Prompt tokens of requests whose answer has begun."),
        ("generation_tokens", "Tokens generated."),
    ), _MODEL, vllm=True),
    Declared("request_success", "counter", "Finished requests by reason.", (_MODEL, "finished_reason"), vllm=True),
    *_each("histogram", (
        ("time_to_first_token_seconds", "From arrival to the first token.", "first_token_s"),
        ("inter_token_latency_seconds",
         "Between tokens of one answer; tokens that come together share the time since the last ones.",
         "inter_token_s"),
        ("e2e_request_latency_seconds", "From arrival to the last token.", "end_to_end_s"),
        ("request_queue_time_seconds", "From arrival to the first computation.", "queue_s"),
        ("request_prefill_time_seconds", "From first computation to first token.", "prefill_s"),
        ("request_decode_time_seconds", "From the first token to the last.", "decode_s"),
    ), _MODEL, TIER, vllm=True),
    *_each("histogram", (
        ("request_prompt_tokens", "Prompt tokens per request."),
        ("request_generation_tokens", "Tokens generated per request."),
    ), _MODEL, vllm=True),
    Declared("iteration_tokens_total", "histogram", "Tokens computed per engine step.", (_MODEL,), "max", True,
             "step_tokens"),
]
_WAY_IN = [
    Declared("auto_requests", "counter", "Requests for auto, by the model asked first.", (_MODEL,)),
    Declared("auto_escalations", "counter", "Unsure answers asked for again, of this model.", (_MODEL,)),
    Declared("split_requests", "counter", "Requests for a name with several models.", ("name", "model")),
    Declared(
        "fallbacks", "counter", "Requests that another model answered.", (_MODEL, "answered_by", "reason")
    ),
    *_each("counter", (
        ("response_cache_hits", "Requests answered from the response cache."),
        ("response_cache_similar", "Requests answered with the answer to a similar one."),
        ("response_cache_misses", "Requests that the response cache could not answer."),
        ("idempotent_replays", "Requests that got an earlier one's answer."),
        ("idempotency_conflicts", "Idempotency keys that came with another request."),
        ("embedding_cache_hits", "Texts whose vector was known."),
        ("embedding_cache_misses", "Texts that had to be embedded."),
    )),
    Declared("shared_cache_requests", "counter", "Entries asked of, or written to, the caches in Redis.",
             ("kind", "outcome")),
    Declared("response_cache_bytes", "gauge", "Bytes of answers in the response cache."),
    Declared("semantic_cache_bytes", "gauge", "Bytes of answers and vectors in the cache of similar requests."),
    Declared("embedding_cache_bytes", "gauge", "Memory in use."),
    Declared("guard_checks", "counter", "Prompts and answers that a policy looked at.", ("policy", "direction")),
    Declared("guard_findings", "counter", "What rules found, by the action taken.",
             ("policy", "rule", "direction", "action")),
    Declared("guard_failures", "counter", "Guards that broke or took too long, by what the policy made of it.",
             ("policy", "rule", "outcome")),
    Declared("objective", "gauge",
             "The scheduling objective of the last minute, by term and in total; of several gateways the largest.",
             (_MODEL, "tier", "term"), join="max"),
    Declared("objective_requests", "counter", "Requests that count in the objective.", (_MODEL, "tier")),
    Declared("objective_cost", "counter",
             "Sum over requests of times as shares of their targets, and of drops; without weights.",
             (_MODEL, "tier", "term")),
    Declared("settings_reloads", "counter", "Times that new settings were read.", ("result",)),
    *_each("gauge", (
        ("settings_applied_timestamp_seconds", "When the settings in use were read."),
        ("settings_version", "Version of the database's settings that is in use; 0: the file's."),
        ("settings_checked_timestamp_seconds", "When the database was last asked for new settings."),
    ), join="min"),
    Declared("settings_latest_version", "gauge", "Newest version known; above the one in use where it was refused.",
             join="max"),
    Declared("settings_stale", "gauge", "Gateway processes that refused the newest version and use an older one."),
]
_FLEET = [
    Declared("replicas", "gauge", "Replicas of a pool by state.", (*_POOL, "state"), join="max"),
    Declared("autoscaler_decisions", "counter", "Decisions to change a pool.", (*_POOL, "direction"), join="max"),
    *_each("gauge", (
        ("replicas_wanted", "Replicas of a pool that serve or are being started.", "num_wanted"),
        ("pool_queued_prefill_tokens", "Prompt tokens that wait, also in held requests.", "queued_prefill_tokens"),
        ("pool_drain_seconds", "How long the ready replicas take for the queued prefill tokens.", "drain_s"),
        ("pool_load", "The largest of the autoscaler's signals, as a share of its target.", "load"),
        ("held_requests", "Requests that wait for a first replica."),
    ), *_POOL, join="max"),
    *_each("gauge", (
        ("replica_ready", "1 while a replica takes new requests, else 0."),
        ("replica_requests_running", "Requests in a replica's running batch."),
        ("replica_requests_waiting", "Requests that wait in a replica's queue."),
        ("replica_kv_cache_usage_perc", "Share of a replica's KV blocks in use."),
        ("replica_gpu_memory_bytes", "Memory of the GPU of a replica's first rank."),
        ("replica_gpu_memory_used_bytes", "Of that, memory that is taken, by other processes too."),
    ), *_REPLICA, join="max"),
    *_each("counter", (
        ("replica_prefix_cache_queries", "Prompt tokens that a replica looked up."),
        ("replica_prefix_cache_hits", "Prompt tokens that a replica had cached."),
        ("replica_drafts", "Drafts that a replica verified."),
        ("replica_draft_tokens", "Tokens of these drafts."),
        ("replica_accepted_tokens", "Drafted tokens that a replica accepted."),
    ), *_REPLICA, join="max"),
    *_each("counter", (
        ("replica_requests", "Requests sent to a replica, retries included."),
        ("replica_failures", "Requests that a replica lost or could not take."),
        ("replica_kv_event_resyncs", "How often KV events were missing."),
    ), *_REPLICA),
    Declared("routing_decisions", "counter", "Requests by what decided where they went.", ("reason",)),
    Declared("failed_attempts", "counter", "Attempts that a replica failed, by what followed.", ("verdict",)),
    *_each("counter", (
        ("replica_ejections", "Times that a replica was left out for being slow."),
        ("routed_prompt_tokens", "Prompt tokens of requests that were routed."),
        ("matched_prompt_tokens", "Of those, thought to be cached there."),
    )),
    Declared("external_up", "gauge", "Whether a server answers.", ("server",), join="max"),
    Declared("external_load", "gauge", "Requests at a server, as it tells.", ("server", "state"), join="max"),
    Declared("external_circuit_open", "gauge", "Whether requests avoid a server that failed.", ("server",)),
    Declared("external_requests_running", "gauge", "Requests sent from here and not answered.", ("server",)),
    Declared("external_attempts", "counter", "Requests to a server, by how they ended.", ("server", "outcome")),
    Declared("external_retries", "counter", "Requests sent to another server."),
    Declared("external_continued", "counter", "Answers that another server went on with."),
    Declared("external_waiting", "gauge", "Requests that wait for an external server to have room."),
]
_CALLERS = [
    Declared("limits_admitted", "counter", "Requests that all limits allowed."),
    Declared("limits_refused", "counter", "Requests refused, by the limit to blame.", ("scope", "limit")),
    Declared("limits_subjects", "gauge", "Keys, workspaces and models whose use this process remembers."),
    Declared("limits_redis_up", "gauge", "Whether shared limits are decided in Redis; 0 is not.", join="min"),
    Declared("limits_settlements_pending", "gauge", "Ended requests that were not reported to Redis yet."),
    *_each("counter", (
        ("limits_redis_errors", "Calls to Redis that failed."),
        ("limits_local_decisions", "Decisions made locally while Redis was away."),
        ("limits_closed_refusals", "Requests refused because Redis was away."),
        ("limits_settlements_lost", "Settlements given up after a long outage."),
    )),
    Declared("authentication_refusals", "counter", "Callers who were not let in.", ("code",)),
    Declared("key_check_failures", "counter", "Times that the database did not say whether keys changed."),
    Declared("remembered_keys", "gauge", "Keys, known or unknown, held in memory."),
    Declared("batch_lines", "counter", "Lines of batches that were run, by outcome.", ("outcome",)),
    Declared("batch_line_retries", "counter", "Lines that had to wait for limits or an engine and be tried again."),
    Declared("batches_running", "gauge", "Batches in hand."),
    Declared("usage_rows", "counter", "Requests in the usage ledger.", (_MODEL, "status")),
    Declared("usage_cost_dollars", "counter", "What they cost at the configured prices.", (_MODEL,)),
    *_each("counter", (
        ("usage_journal_failures", "Lines that the usage journal did not take."),
        ("usage_flush_failures", "Times that the database did not take usage rows."),
        ("usage_recovered_rows", "Rows recovered from journals of stopped processes."),
        ("usage_refused_rows", "Rows dropped because the database will never take them."),
        ("usage_lost_rows", "Rows lost: no disk, no database, no memory."),
    )),
    Declared("usage_journal_bytes", "gauge",
             "Bytes of usage rows that are in the journal, written to the database or not."),
    Declared("usage_unwritten_rows", "gauge", "Settled requests that the database does not have yet."),
    Declared("usage_lag_seconds", "gauge", "How long the oldest of them has waited at most.", join="max"),
    Declared("tokens_per_hour", "gauge", "Tokens of finished requests in the last hour; input without cached tokens.",
             (_MODEL, "kind")),
    Declared("accelerator_dollars_per_million_tokens", "gauge",
             "The accelerators' hour divided by the tokens that this server made of it.", (_MODEL,), "harmonic"),
    Declared("accelerator_dollars_per_hour", "gauge", "What the accelerators of a model cost.", (_MODEL,), "max"),
]
_CONNECTIONS = [
    Declared("http_requests", "counter", "HTTP requests by route and by the status of their answer.",
             ("path", "status")),
    Declared("http_refusals", "counter", "Requests that were refused, by the status and the reason of the refusal.",
             ("status", "reason")),
    Declared("connections_open", "gauge", "Connections that are open."),
    Declared("websockets_open", "gauge", "WebSockets that are open."),
    *_each("counter", (
        ("connections_refused", "Connections refused because too many were open."),
        ("connections_displaced", "Idle connections that made room for new ones."),
        ("connections_timed_out", "Connections whose request did not arrive in time."),
        ("connections_malformed", "Connections closed for what they sent."),
        ("connections_stalled", "Connections dropped because their client stopped reading."),
        ("websockets_accepted", "WebSockets that were accepted."),
        ("websockets_refused", "WebSockets refused because too many were open."),
        ("websockets_requests", "Requests that came over WebSockets."),
        ("websockets_too_slow", "WebSockets closed because their reader fell behind."),
    )),
]
# fmt: on
ENGINE_METRICS = tuple(_ENGINES)  # what engines report of each model
MODEL_METRICS = tuple(_REQUESTS)  # what a gateway counts for each model
POOL_METRICS = tuple(row for row in _FLEET if row.labels == _POOL)
REPLICA_METRICS = tuple(row.name for row in _FLEET if row.labels == _REPLICA)
METRICS = {row.name: row for row in (*_ENGINES, *_REQUESTS, *_WAY_IN, *_FLEET, *_CALLERS, *_CONNECTIONS)}


# A value by the name of a metric; or, for a metric with labels, values by labels in the order of the table.
Figures: TypeAlias = Mapping[str, float | Mapping[Any, float]]


class Counted(Protocol):
    """A part of the gateway that has values for the page of metrics."""

    def figures(self) -> Figures: ...


def figures_of(counts: object, prefix: str) -> Figures:
    """Return the attributes of an object as figures. `num_` in front of their names gives way to the prefix."""
    return {f"{prefix}_{name.removeprefix('num_')}": value for name, value in vars(counts).items()}


def metric(name: str, value: float | Mapping[Any, float]) -> Metric:
    family = METRICS[name].family()
    for labels, each in value.items() if isinstance(value, Mapping) else [((), value)]:
        add(family, (labels,) if isinstance(labels, str) else labels, each)
    return family


def add(family: Metric, labels: Sequence[str], value: float) -> None:
    family.add_metric(labels, value)  # type: ignore[attr-defined]
