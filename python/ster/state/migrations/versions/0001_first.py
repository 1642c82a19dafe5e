"""Keys, Holds, Jobs and harvests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "harvests",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("owner", sa.String(length=40), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("server_id", sa.String(length=40), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("hold_id", sa.String(length=40), nullable=True),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("prompts", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("tokens_done", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_harvests")),
    )
    op.create_index("ix_harvests_owner_created_at", "harvests", ["owner", "created_at"], unique=False)
    op.create_index("ix_harvests_owner_started_at", "harvests", ["owner", "started_at"], unique=False)
    op.create_index("ix_harvests_state_created_at", "harvests", ["state", "created_at"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("owner", sa.String(length=40), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("server_id", sa.String(length=40), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("hold_id", sa.String(length=40), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index("ix_jobs_owner_created_at", "jobs", ["owner", "created_at"], unique=False)
    op.create_index("ix_jobs_owner_started_at", "jobs", ["owner", "started_at"], unique=False)
    op.create_index("ix_jobs_owner_state", "jobs", ["owner", "state", "size", "ended_at"], unique=False)
    op.create_index("ix_jobs_state_created_at", "jobs", ["state", "created_at"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("shown", sa.String(length=20), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("monthly_tokens", sa.BigInteger(), nullable=True),
        sa.Column("daily_tokens", sa.BigInteger(), nullable=True),
        sa.Column("monthly_input_tokens", sa.BigInteger(), nullable=True),
        sa.Column("monthly_output_tokens", sa.BigInteger(), nullable=True),
        sa.Column("monthly_activations", sa.BigInteger(), nullable=True),
        sa.Column("monthly_harvest_tokens", sa.BigInteger(), nullable=True),
        sa.Column("concurrency", sa.BigInteger(), nullable=True),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("hash"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "servers",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("beat_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_servers")),
    )
    op.create_table(
        "holds",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("server_id", sa.String(length=40), nullable=True),
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("freed_at", sa.Double(), nullable=True),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("activations", sa.BigInteger(), nullable=False),
        sa.Column("harvest_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_holds_key_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_holds")),
    )
    op.create_index(op.f("ix_holds_key_id"), "holds", ["key_id"], unique=False)
    op.create_index(op.f("ix_holds_server_id"), "holds", ["server_id"], unique=False)
    op.create_table(
        "spent",
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("period", sa.String(length=10), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("activations", sa.BigInteger(), nullable=False),
        sa.Column("harvest_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_spent_key_id")),
        sa.PrimaryKeyConstraint("key_id", "period", name=op.f("pk_spent")),
    )
    op.create_table(
        "starts",
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("minute", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name=op.f("fk_starts_key_id")),
        sa.PrimaryKeyConstraint("key_id", "minute", name=op.f("pk_starts")),
    )
