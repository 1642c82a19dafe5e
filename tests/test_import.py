import subprocess
import sys

import ster


def loaded(program: str) -> set[str]:
    code = f"import sys\n{program}\nprint(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stderr.split())


def test_importing_ster_loads_nothing_heavy() -> None:
    heavy = {"numpy", "tokenizers", "jinja2", "rich", "orjson", "typer", "safetensors", "ster._native"}
    assert not heavy & loaded("import ster")


def test_help_needs_neither_the_engine_nor_numpy() -> None:
    heavy = {"numpy", "tokenizers", "jinja2", "rich", "orjson", "safetensors", "ster._native", "starlette", "uvicorn"}
    assert not heavy & loaded("from ster.cli import main\nmain(['extract', '--help'])")


def test_every_public_name_is_there() -> None:
    for name in ster.__all__:
        assert getattr(ster, name) is not None
        assert name in dir(ster)
    assert not hasattr(ster, "nonsense")
