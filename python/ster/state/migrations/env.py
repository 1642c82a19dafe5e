"""How Alembic runs the migrations: on the connection that `ster.state.database` gives, in its transaction."""

from __future__ import annotations

from alembic import context

from ster.state.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
