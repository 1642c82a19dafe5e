"""Query parameters: a route takes those that the OpenAPI document gives it. Any other is refused, as an unknown field of a body is:
misspelt, it would otherwise be as good as left out. So is one that is given twice, of which only the last would count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import QueryParams
from starlette.routing import Route

from ster.server.errors import invalid
from ster.server.fields import SHOWN, shown
from ster.server.openapi import query_parameters

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

TAKEN = query_parameters()


class StrictRoute(Route):
    """A route that refuses unknown query parameters, before it looks at anything else of a request."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if scope["query_string"] and (self.path_format, method) in TAKEN:  # a method that it does not take is refused as such
            check_query(scope["query_string"], TAKEN[self.path_format, method])
        await super().handle(scope, receive, send)


def check_query(query: bytes, taken: frozenset[str]) -> None:
    """
    Raises:
        ApiError: 400, a parameter that is not of `taken`, or one that is given more than once.
    """
    given = QueryParams(query)
    unknown = [name for name in given if name not in taken]
    if unknown:
        names = ", ".join(map(shown, unknown[:SHOWN])) + (f" ... and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")
        plural = "s" if len(unknown) > 1 else ""
        raise invalid(f"Unknown query parameter{plural} {names} - see /openapi.json for accepted params.", unknown[0][:60])
    for name in given:
        if len(given.getlist(name)) > 1:
            raise invalid(f"Query parameter {shown(name)} is given more than once.", name)
