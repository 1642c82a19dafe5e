"""Query parameters: a route takes those of the OpenAPI document, and refuses any other by name."""

import re

import pytest
from serving import Client, error_of

from ster.server.app import ROUTES
from ster.server.openapi import openapi, query_parameters
from ster.server.query import TAKEN
from ster.server.settings import Settings

OPERATIONS = sorted(TAKEN)


def unknown(*names: str) -> str:
    plural = "s" if len(names) > 1 else ""
    return f"Unknown query parameter{plural} {', '.join(map(repr, names))} - see /openapi.json for accepted params."


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_route_refuses_what_the_document_does_not_give_it(toy: Client, path: str, method: str) -> None:
    url = re.sub("{[a-z]+}", "toy", path)
    body = {"json": {}} if method == "POST" else {}
    refused = toy.request(method, f"{url}?nonsense=1", **body)
    assert error_of(refused) == (400, "invalid_request", "nonsense")
    assert refused.json()["error"]["message"] == unknown("nonsense")
    for name in TAKEN[path, method]:
        assert "Unknown query parameter" not in toy.request(method, url, params={name: "1"}, **body).text
    if method == "GET":
        assert toy.head(f"{url}?nonsense=1").status_code == 400


def test_every_route_is_in_the_document() -> None:
    routes = {(route.path_format, method) for route in ROUTES for method in (route.methods or ()) if method != "HEAD"}
    assert routes == set(TAKEN) == set(query_parameters())
    document = openapi(Settings(), ["toy"])["paths"]
    for (path, method), names in TAKEN.items():
        listed = document[path][method.lower()].get("parameters", []) + document[path].get("parameters", [])
        assert names == {each["name"] for each in listed if each["in"] == "query"}
    assert TAKEN["/v1/jobs", "GET"] == {"limit", "after"} and TAKEN["/v1/jobs", "POST"] == frozenset()
    assert TAKEN["/v1/harvest/{id}", "GET"] == {"wait"} and TAKEN["/v1/harvest/{id}", "DELETE"] == frozenset()


def test_what_is_misspelt_is_named(toy: Client) -> None:
    assert toy.get("/v1/jobs?limt=5").json()["error"]["message"] == unknown("limt")
    assert toy.get("/v1/harvest?limit=5&wiat=3").json()["error"]["message"] == unknown("wiat")
    assert toy.get("/health?Wait&x=%27").json()["error"]["message"] == unknown("Wait", "x")
    many = toy.get("/health", params={f"x{number}": 1 for number in range(7)}).json()["error"]
    assert many["message"].startswith("Unknown query parameters 'x0', 'x1', 'x2', 'x3', 'x4' ... and 2 more - see ")
    long = toy.get("/health?" + "é" * 500).json()["error"]
    assert len(long["message"]) < 200 and long["message"].isascii() and long["param"] == "é" * 60


def test_what_is_given_twice_is_refused(toy: Client) -> None:
    for query in ("limit=5&limit=5", "limit=5&limit=x", "limit=5&lim%69t=6", "limit&limit=5"):
        refused = toy.get(f"/v1/jobs?{query}")
        assert error_of(refused) == (400, "invalid_request", "limit")
        assert refused.json()["error"]["message"] == "Query parameter 'limit' is given more than once."
    assert toy.get("/v1/jobs?limit=5&nonsense=1&nonsense=2").json()["error"]["message"] == unknown("nonsense")


def test_what_is_refused_anyway_is_refused_as_that(toy: Client) -> None:
    assert error_of(toy.get("/nope?x=1"))[0] == 404
    assert error_of(toy.delete("/v1/models?x=1"))[0] == 405
    assert error_of(toy.post("/v1/completions?stream=true", content=b"{"))[2] == "stream"
    assert toy.get("/health?").status_code == toy.get("/health?&").status_code == 200
