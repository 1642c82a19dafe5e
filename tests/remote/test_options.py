"""What `ster.connect` does not take, said before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

import ster
from ster.errors import InputError, SterError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "host:8000"}, "an endpoint must be the address of a server"),
        ({"endpoint": "ftp://host"}, "an endpoint must be"),
        ({"endpoint": "http://host/v1?x=1"}, "an endpoint must be"),
        ({"endpoint": ""}, "an endpoint must be"),
        ({"endpoint": "http://user:secret@host"}, "^an endpoint must have no user and no password in it$"),
        ({"concurrency": 0}, "concurrency must be between 1 and 1024, found 0"),
        ({"timeout": 0}, "timeout must be"),
        ({"retry_seconds": float("nan")}, "retry_seconds must be"),
        ({"api_key": "a b"}, "an API key must be"),
        ({"chat_template": "on"}, 'unknown chat template mode "on"'),
        ({"wire_dtype": "int8"}, 'unknown wire dtype "int8"'),
        ({"tokenizer": "nowhere"}, "failed to read nowhere/tokenizer.json"),
    ],
)
def test_options_are_refused_before_anything_is_sent(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SterError, match=message):
        ster.connect(**{"endpoint": "http://127.0.0.1:1", **options})


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from ster.remote import extra

    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "httpx" else name)
    with pytest.raises(InputError, match="needs the extra `remote`, of which httpx cannot be imported") as refused:
        extra.check_extra()
    assert refused.value.hint and "pip install '.[remote]'" in refused.value.hint
