"""The tables. Times are seconds since 1970, tokens are counts; a limit that is null does not hold.

A change here takes a migration beside it (`ster.state.migrations`); a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, Integer, LargeBinary, MetaData, String, Table, Text

metadata = MetaData(
    naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(table_name)s_%(column_0_name)s", "fk": "fk_%(table_name)s_%(column_0_name)s"}
)

LIMITS = (
    "monthly_tokens",
    "daily_tokens",
    "monthly_input_tokens",
    "monthly_output_tokens",
    "monthly_activations",
    "monthly_harvest_tokens",
    "concurrency",
    "requests_per_minute",
)

# hash: SHA-256 of the key, which is random enough to need no salt; shown: its beginning. Rows are never deleted.
keys = Table(
    "keys",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("shown", String(20), nullable=False),
    Column("state", String(10), nullable=False),  # active, paused, revoked
    Column("created_at", Double, nullable=False),
    *(Column(name, BigInteger) for name in LIMITS),
)

# Processes that serve: what one that is dead has held, run or claimed is anybody's to free. host: where `pid` is its
# own, see `ster.state.presence.place`.
servers = Table(
    "servers",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("beat_at", Double, nullable=False),
)

# month, day: `2026-11` and `2026-11-30` in UTC, of when it was taken: what it turns into is spent there. server_id is null where the
# Hold is a Job's or a harvest's, which outlive servers. freed_at: its server was taken for dead: it no longer counts, and what it turns
# into, should the server come back, is at most what the budget has left.
holds = Table(
    "holds",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("key_id", String(40), ForeignKey("keys.id"), nullable=False, index=True),
    Column("server_id", String(40), index=True),
    Column("month", String(7), nullable=False),
    Column("day", String(10), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("freed_at", Double),
    Column("input_tokens", BigInteger, nullable=False, default=0),
    Column("output_tokens", BigInteger, nullable=False, default=0),
    Column("activations", BigInteger, nullable=False, default=0),
    Column("harvest_tokens", BigInteger, nullable=False, default=0),
)

# period: a month or a day, as in `holds`.
spent = Table(
    "spent",
    metadata,
    Column("key_id", String(40), ForeignKey("keys.id"), primary_key=True),
    Column("period", String(10), primary_key=True),
    Column("requests", BigInteger, nullable=False, default=0),
    Column("input_tokens", BigInteger, nullable=False, default=0),
    Column("output_tokens", BigInteger, nullable=False, default=0),
    Column("activations", BigInteger, nullable=False, default=0),
    Column("harvest_tokens", BigInteger, nullable=False, default=0),
)

# minute: since 1970.
starts = Table(
    "starts",
    metadata,
    Column("key_id", String(40), ForeignKey("keys.id"), primary_key=True),
    Column("minute", BigInteger, primary_key=True),
    Column("count", BigInteger, nullable=False),
)

# owner: a key's id, or what stands for callers without one. state: queued, running, done, failed, cancelled. hold_id: of `holds`, while it
# is not final. size: bytes of the request and of the result, as far as that is known. seed: the request's, or drawn when it came. request:
# the body as it was sent. error: the JSON of the refusal. The result is a file in the state's folder.
jobs = Table(
    "jobs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("owner", String(40), nullable=False),
    Column("model", Text, nullable=False),
    Column("state", String(10), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("server_id", String(40)),
    Column("attempts", Integer, nullable=False, default=0),
    Column("hold_id", String(40)),
    Column("size", BigInteger, nullable=False, default=0),
    Column("seed", BigInteger, nullable=False, default=0),
    Column("error", Text),
    Column("request", LargeBinary, nullable=False),
    Index("ix_jobs_owner_created_at", "owner", "created_at"),
    Index("ix_jobs_owner_started_at", "owner", "started_at"),
    Index("ix_jobs_owner_state", "owner", "state", "size", "ended_at"),  # all that a submission asks about the others
    Index("ix_jobs_state_created_at", "state", "created_at"),
)

# As `jobs`. tokens, tokens_done: of all prompts, and of those that were read. bytes: that it takes on disk, about. run_id: of its manifest,
# once it has begun. The files are in the state's folder.
harvests = Table(
    "harvests",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("owner", String(40), nullable=False),
    Column("model", Text, nullable=False),
    Column("state", String(10), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("server_id", String(40)),
    Column("attempts", Integer, nullable=False, default=0),
    Column("hold_id", String(40)),
    Column("request", LargeBinary, nullable=False),
    Column("prompts", Integer, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("tokens_done", BigInteger, nullable=False, default=0),
    Column("bytes", BigInteger, nullable=False),
    Column("run_id", String(40)),
    Column("error", Text),
    Index("ix_harvests_owner_created_at", "owner", "created_at"),
    Index("ix_harvests_owner_started_at", "owner", "started_at"),
    Index("ix_harvests_state_created_at", "state", "created_at"),
)
