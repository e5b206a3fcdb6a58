"""Every table. A comment above each table names its owner, the only room that writes to it.

Times are Unix seconds. Ids are text with a prefix that says what they name. Rows that others refer to are not deleted
but end: a revoked key still has a name in last month's usage.

`migrate` brings the tables of a database to what this release needs. Versions so far only added tables, columns that
may be null, and indexes. A migration therefore compares the database with the tables here, and adds what is missing.
A change of another kind is carried out in `_bring_up` before the additions.
"""

from __future__ import annotations

import logging
import time

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    inspect,
    select,
    text,
)
from sqlalchemy.schema import CreateColumn

from penstock import __version__
from penstock.core.errors import ConfigError

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# Owner: gateway/tenants. `revision` is the value of tenant_revision when the row last changed, so that other
# processes can ask for what changed since they last looked.
organizations = Table(
    "organizations",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(256), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("archived_at", Double),
    Column("revision", BigInteger, nullable=False, index=True),
)

workspaces = Table(
    "workspaces",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("organization_id", ForeignKey("organizations.id"), nullable=False, index=True),
    Column("name", String(256), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("archived_at", Double),
    Column("revision", BigInteger, nullable=False, index=True),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("workspace_id", ForeignKey("workspaces.id"), nullable=False, index=True),
    Column("name", String(256), nullable=False),
    Column("prefix", String(32), nullable=False, unique=True),  # finds the row; no secret
    Column("digest", LargeBinary(32), nullable=False),  # SHA-256 of the whole key
    Column("scopes", JSON, nullable=False),
    Column("allowed_models", JSON(none_as_null=True)),  # null allows every model
    Column("best_tier", String(16), nullable=False),
    Column("caches_responses", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(256), nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("last_used_at", Double),  # written late; not a change that bumps `revision`
    Column("revision", BigInteger, nullable=False, index=True),
)

# One row, whose update orders all changes of tenants: the transaction that holds its lock commits first.
tenant_revision = Table(
    "tenant_revision",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
)

audit_log = Table(
    "audit_log",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False, index=True),
    Column("actor", String(256), nullable=False),  # a key's id, a token's subject, or who ran a command
    Column("action", String(64), nullable=False),
    Column("target", String(64), nullable=False),
    Column("request_id", String(64)),
    Column("before", JSON(none_as_null=True)),
    Column("after", JSON(none_as_null=True)),
    Index("ix_audit_log_target_id", "target", "id"),
)

# Owner: gateway/ledger. One row per request that was admitted, written once.
usage = Table(
    "usage",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("started_at", Double, nullable=False),
    Column("day", Integer, nullable=False),  # days since the epoch, in UTC; what indexes know of time
    Column("organization_id", String(64), nullable=False),
    Column("workspace_id", String(64), nullable=False),
    # No foreign key: tokens and open servers have no row in `keys`.
    Column("key_id", String(256), nullable=False),
    Column("model", String(256), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("tier", String(16), nullable=False),
    Column("user", String(256)),
    Column("status", String(16), nullable=False),
    Column("error_code", String(64)),
    Column("is_cached", Boolean, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("cache_read_tokens", BigInteger, nullable=False),
    Column("cache_write_5m_tokens", BigInteger, nullable=False),
    Column("cache_write_1h_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("cost_picodollars", BigInteger, nullable=False),
    Column("duration_s", Double, nullable=False),
    Column("first_token_s", Double),
    Index("ix_usage_workspace_id_day", "workspace_id", "day"),
    Index("ix_usage_day", "day"),
)

# Owner: gateway/ledger. Sums of `usage`, kept up to date with every row, so that budgets need not read all rows.
usage_spend = Table(
    "usage_spend",
    metadata,
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("workspace_id", String(64), primary_key=True),
    Column("key_id", String(256), primary_key=True),
    Column("model", String(256), primary_key=True),
    Column("cost_picodollars", BigInteger, nullable=False),
)

# Owner: gateway/reuse. While `answer` is null the request runs, in a process that renews `lease_until`.
idempotent_answers = Table(
    "idempotent_answers",
    metadata,
    Column("workspace_id", String(64), primary_key=True),
    Column("idempotency_key", String(256), primary_key=True),
    Column("fingerprint", LargeBinary(32), nullable=False),
    Column("owner", String(64), nullable=False),  # which attempt runs it
    Column("answer", LargeBinary),
    Column("lease_until", Double, nullable=False),
    Column("expires_at", Double, nullable=False, index=True),
)

# Owner: gateway/files. The bytes are a blob with the row's id; a row is written after them.
files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("workspace_id", String(64), nullable=False),
    Column("filename", String(512), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, index=True),  # null: never
    Column("details", JSON(none_as_null=True)),  # of an upload in parts: what its file will be
    Index("ix_files_workspace_id_created_at", "workspace_id", "created_at"),
)

# Owner: gateway/batches. Counts change in the transaction that writes the results they count.
batches = Table(
    "batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("workspace_id", String(64), nullable=False),
    Column("kind", String(16), nullable=False),  # whose API made it: openai or anthropic
    Column("endpoint", String(64), nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("principal", JSON, nullable=False),  # who made it, and on whose account its lines run
    Column("details", JSON, nullable=False),  # what its API shows and the runner does not need
    Column("times", JSON, nullable=False),  # when it entered each status
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("num_lines", Integer, nullable=False),
    Column("num_succeeded", Integer, nullable=False),
    Column("num_errored", Integer, nullable=False),
    Column("num_canceled", Integer, nullable=False),
    Column("num_expired", Integer, nullable=False),
    Column("ending", String(16)),  # why it stops early: canceled or expired
    Index("ix_batches_workspace_id_created_at", "workspace_id", "created_at"),
)

# The results of running batches: one row per finished line, until the batch's output is written as files.
batch_results = Table(
    "batch_results",
    metadata,
    Column("batch_id", ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("line_number", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", String(512), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("status_code", Integer, nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("body", LargeBinary, nullable=False),
)

# Which process may run batches. Only its holder writes results.
leases = Table(
    "leases",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("holder", String(64), nullable=False),
    Column("expires_at", Double, nullable=False),
)

# Owner: serve/database_registry. The machines that run engines of a shared fleet, and their replicas.
fleet_hosts = Table(
    "fleet_hosts",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("record", LargeBinary, nullable=False),
    Column("expires_at", Double, nullable=False),
)

# Owner: serve/database_registry. The leaders of shared fleets, and the owner of the releases in this database. The
# epoch rises whenever the holder changes.
fleet_leases = Table(
    "fleet_leases",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("holder", String(256), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
)

# Owner: serve/database_registry. Decisions of the leader of a shared fleet.
fleet_documents = Table(
    "fleet_documents",
    metadata,
    Column("name", String(256), primary_key=True),
    Column("document", LargeBinary, nullable=False),
)

# Owner: gateway/responses. One that runs in the background is not final and may be replaced.
responses = Table(
    "responses",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("workspace_id", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False, index=True),
    Column("is_final", Boolean, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("input_items", LargeBinary, nullable=False),
    Column("previous_id", String(64)),  # no foreign key: what it continues may be deleted
    Column("lease_until", Double),  # of one that is not final: renewed by the gateway that makes it
    Column("num_event_bytes", BigInteger),  # of its rows in response_events; null: its events are not kept
    Index("ix_responses_workspace_id_created_at", "workspace_id", "created_at"),
)

# Owner: gateway/responses. The stream events of responses in the background, compressed, several in a row.
response_events = Table(
    "response_events",
    metadata,
    Column("response_id", ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True),
    Column("first", Integer, primary_key=True, autoincrement=False),  # the number of the first event
    Column("events", LargeBinary, nullable=False),
)

# Owner: gateway/responses. Conversations, their items and stored chat completions, in the order of their creation.
stored_objects = Table(
    "stored_objects",
    metadata,
    Column("position", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("workspace_id", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("parent_id", String(64), nullable=False),  # empty for what belongs to nothing else
    Column("id", String(128), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False, index=True),
    Column("model", String(256)),
    Column("metadata", JSON, nullable=False),
    Column("body", LargeBinary, nullable=False),  # as its API shows it
    Column("input", LargeBinary, nullable=False),  # what the client sent for it
    Index(
        "ix_stored_objects_workspace_id_kind_parent_id_id",
        "workspace_id",
        "kind",
        "parent_id",
        "id",
        unique=True,
    ),
    Index(
        "ix_stored_objects_workspace_id_kind_parent_id_position",
        "workspace_id",
        "kind",
        "parent_id",
        "position",
    ),
)


def _staged_records(name: str) -> Table:
    return Table(
        name,
        metadata,
        Column("id", String(64), primary_key=True),
        Column("model", String(256), nullable=False),
        Column("stage", String(32), nullable=False),
        Column("created_at", Double, nullable=False, index=True),
        Column("updated_at", Double, nullable=False),
        Column("body", LargeBinary, nullable=False),
    )


# Owner: serve/database_registry. `body` is all that is known of a release or an experiment, as JSON; the other
# columns are for people.
releases = _staged_records("releases")
experiments = _staged_records("experiments")

# Owner: gateway/store/versions. Documents that all gateways follow: the settings and the adapters. Rows are never
# changed; the highest version of a kind is the current one.
document_versions = Table(
    "document_versions",
    metadata,
    Column("kind", String(32), primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("created_at", Double, nullable=False),
    Column("actor", String(256), nullable=False),
    Column("note", String(512), nullable=False),
    Column("body", LargeBinary),  # null: from here on the database says nothing about this kind
)

# Owner: gateway/history. Counts of each gateway process in each interval; old rows are deleted.
history_samples = Table(
    "history_samples",
    metadata,
    Column("process", String(64), primary_key=True),
    Column("span", String(16), primary_key=True),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("server", String(64), nullable=False),  # processes of one server see the same engines
    Column("body", LargeBinary, nullable=False),
    Index("ix_history_samples_span_at", "span", "at"),
)


def create_tables(connection: Connection) -> None:
    """Create every table in a new database. A default organisation with a default workspace is there from the start,
    so that the first key needs neither to be made."""
    metadata.create_all(connection)
    default = {"id": "default", "name": "Default", "created_at": time.time(), "revision": 1}
    connection.execute(organizations.insert().values(default))
    connection.execute(workspaces.insert().values({**default, "organization_id": "default"}))
    connection.execute(tenant_revision.insert().values(id=1, revision=1))


logger = logging.getLogger(__name__)

# The versions that the tables had, oldest first. Names sort in this order. Databases from before the first name, of
# earlier development versions, are refused.
VERSIONS = (
    "0006_releases",
    "0007_responses_by_workspace",
    "0008_stored_objects",
    "0009_fleet_hosts",
    "0010_document_versions",
    "0011_fleet_leases",
    "0012_experiments",
    "0013_history_samples",
    "0014_object_order",
)
_LOCK_NUMBER = 0x70656E73746F636B  # "penstock": any number that all our processes agree on

# One row. Alembic's table, which earlier releases wrote, has this name.
version_table = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))


def migrate(connection: Connection) -> None:
    """Create the tables of a new database, or migrate the tables of an older one. The transaction locks out
    other migrations, so that several starting gateways take turns."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK_NUMBER})
    has_versions = inspect(connection).has_table(version_table.name)
    current = connection.scalar(select(version_table.c.version_num)) if has_versions else None
    if current == VERSIONS[-1]:
        return
    if current is None:
        create_tables(connection)
        version_table.create(connection, checkfirst=True)
        connection.execute(version_table.insert().values(version_num=VERSIONS[-1]))
        return
    refuse_unknown(current)
    _bring_up(connection)
    connection.execute(version_table.update().values(version_num=VERSIONS[-1]))
    logger.info("the tables of the database were migrated from %s to %s", current, VERSIONS[-1])


def refuse_unknown(current: str) -> None:
    """Raise ConfigError for tables of a version that this release does not know."""
    if current in VERSIONS:
        return
    age = (
        "a newer Penstock than this one"
        if current > VERSIONS[-1]
        else "an unreleased version before Penstock"
    )
    raise ConfigError(
        f"The database was written by {age} ({__version__}): its tables are at '{current}', which this release does "
        "not know.",
        hint="Upgrade Penstock, or choose another database.",
    )


def _bring_up(connection: Connection) -> None:
    existing = inspect(connection)
    quoted = connection.dialect.identifier_preparer.format_table
    for table in metadata.sorted_tables:
        if not existing.has_table(table.name):
            table.create(connection)
            continue
        columns = {column["name"] for column in existing.get_columns(table.name)}
        for column in table.columns:
            if column.name not in columns:
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {quoted(table)} ADD COLUMN {definition}"))
        indexes = {index["name"] for index in existing.get_indexes(table.name)}
        for index in table.indexes:
            if index.name not in indexes:
                index.create(connection)
