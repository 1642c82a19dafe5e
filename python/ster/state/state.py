"""The state of a server, open: its folder, its database, and this process among those that use them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ster.state.database import Database
from ster.state.place import find_place
from ster.state.presence import Presence


@dataclass(frozen=True)
class State:
    folder: Path
    database: Database
    presence: Presence

    def close(self) -> None:
        self.presence.stop()
        self.database.close()


def open_state(folder: str | os.PathLike[str] | None = None, url: str | None = None) -> State:
    """Open what `ster.state.place.find_place` finds; this process counts as a server until `close`.

    Raises:
        FileError, InputError: see `find_place` and `Database`.
    """
    place = find_place(folder, url)
    database = Database(place.url)
    presence = Presence(database)
    presence.start()
    return State(place.folder, database, presence)
