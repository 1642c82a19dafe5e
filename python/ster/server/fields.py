"""What the fields of requests have in common: strictness, null as "not sent", bounds that a setting names, lists that fail fast.

The JSON schema that `openapi.py` publishes comes from these same declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ster.server.settings import Settings

DEFAULTS = Settings()
SHOWN = 5  # problems that a message names
X_LIMIT = "x-limit"
TOKEN_ID_LIMIT = 2**31 - 1
INTEGER_LIMIT = 2**63 - 1
FLOAT32_LIMIT = 3.4028235e38  # as the documentation writes it; it rounds to the largest float32


class Strict(BaseModel):
    """An object of a request: no other fields and no conversions (true is no integer, "1" no number). null for an optional field means
    that it was not sent."""

    model_config = ConfigDict(strict=True, extra="forbid")
    refused: ClassVar[dict[str, str]] = {}
    """Fields that exist to be refused: anything but null gets this sentence."""

    @model_validator(mode="before")
    @classmethod
    def _before(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        unknown = [name for name in value if name not in cls.model_fields]
        if len(unknown) > SHOWN:  # one error, not one for each of what may be millions
            names = ", ".join(map(shown, unknown[:SHOWN]))
            context = {"names": names, "more": len(unknown) - SHOWN, "first": shown(unknown[0]).strip("'")}
            raise PydanticCustomError("unknown_fields", "Unknown fields {names} ... and {more} more", context)
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        sent = {name: each for name, each in value.items() if each is not None or name not in optional}
        return cls.prepare(sent)

    @classmethod
    def prepare(cls, sent: dict[str, Any]) -> dict[str, Any]:
        """What a model does to its fields before they are checked."""
        return sent

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Every optional field also takes null."""
        found = handler(schema)
        inner = handler.resolve_ref_schema(found)
        for name, field in inner.get("properties", {}).items():
            nullable = field.get("type") == "null" or {"type": "null"} in field.get("anyOf", ())
            if name not in inner.get("required", ()) and not nullable:
                outer = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
                inner["properties"][name] = {"anyOf": [field, {"type": "null"}], **outer}
            if name in cls.refused:
                inner["properties"][name]["description"] = cls.refused[name]
        return found


@dataclass(frozen=True)
class Limit:
    """An upper bound that a setting names: the settings are the validation context, the JSON schema has the name under `x-limit`."""

    keyword: Literal["maximum", "maxItems"]
    setting: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if self.keyword == "maxItems":  # before the items are looked at
            return core_schema.with_info_before_validator_function(self._check, handler(source))
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        found[X_LIMIT] = {self.keyword: self.setting}
        return found

    def _check(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        limit = getattr(settings_of(info), self.setting)
        if self.keyword == "maximum" and value > limit:
            raise PydanticCustomError("limit", "Input should be less than or equal to {limit}", {"limit": limit})
        if self.keyword == "maxItems" and isinstance(value, list) and len(value) > limit:
            raise PydanticCustomError("limit", "List should have at most {limit} items, not {count}", {"limit": limit, "count": len(value)})
        return value


def settings_of(info: core_schema.ValidationInfo) -> Settings:
    return info.context if isinstance(info.context, Settings) else DEFAULTS


def shown(value: object) -> str:
    """For a message: short, and without what would break it."""
    return ascii(value) if len(ascii(value)) <= 60 else ascii(value)[:57] + "..."


# Tags of the alternatives of a field. They stand in pydantic's `loc`, and `parse_body` takes them out again.
TEXT, TEXTS, IDS, ID_LISTS, FLAG, LIST, OBJECT = TAGS = ("<text>", "<texts>", "<ids>", "<id lists>", "<flag>", "<list>", "<object>")
KINDS: dict[type, str] = {str: TEXT, bool: FLAG, list: LIST, dict: OBJECT}


def by_kind(expected: str) -> Discriminator:
    """Chooses an alternative by its JSON type, so that a mistake is told as one about that alternative, and once."""
    return Discriminator(_kind, custom_error_type="kind", custom_error_message=f"Input should be {expected}")


def by_prompt() -> Discriminator:
    """A list is of what its first item is."""
    expected = "a text, a list of texts, a list of token ids, or a list of lists of token ids"
    return Discriminator(_prompt_kind, custom_error_type="kind", custom_error_message=f"Input should be {expected}")


def _kind(value: Any) -> str | None:
    return OBJECT if isinstance(value, BaseModel) else KINDS.get(type(value))


def _prompt_kind(value: Any) -> str | None:
    if type(value) is not list:
        return TEXT if type(value) is str else None
    first: dict[type, str] = {str: TEXTS, list: ID_LISTS}
    return first.get(type(value[0]), IDS) if value else TEXTS


TokenId = Annotated[int, Field(ge=0, le=TOKEN_ID_LIMIT)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1), Limit("maxItems", "max_prompt_ids")]
Layer = Annotated[int, Field(ge=0, le=TOKEN_ID_LIMIT)]
Position = Annotated[int, Field(ge=0, le=TOKEN_ID_LIMIT)]
