"""`/v1/models/{id}/weights_hash`: by which artifacts know their model again. It reads all weights, so it is made when first asked for."""

from __future__ import annotations

import threading

from starlette.requests import Request
from starlette.responses import Response

from ster.server.errors import ApiError
from ster.server.form import Json
from ster.server.loaded import Loaded
from ster.server.models import Models
from ster.server.respond import reply_about

_one_at_a_time = threading.Lock()  # whoever asks meanwhile waits for the same hash


async def weights_hash(request: Request) -> Response:
    """SHA-256 over the weights, as `ster.fingerprint` makes it: half a minute for 16 GB, the first time."""
    models: Models = request.app.state.models
    try:
        name = models.named(request.path_params["id"]).name
    except ApiError as error:
        raise ApiError(404, error.message, code=error.code, param=error.param) from None

    def work(loaded: Loaded) -> Json:
        with _one_at_a_time:
            return {"id": name, "object": "model.weights_hash", "weights_hash": loaded.model.hash_weights()}

    return await reply_about(request, name, work)
