"""Closes the objects of a JSON schema: an object whose `properties` are listed gets no other properties.

JSON Schema leaves such an object open unless `additionalProperties` says otherwise. The schemas that programs write
(pydantic, zod, tool definitions) mean the listed properties and nothing else, and a model that may invent properties
writes them until its tokens run out. An object stays open where its schema has `additionalProperties` or
`unevaluatedProperties`, or lists no properties at all.

The parts of one object (`allOf`, `anyOf`, `oneOf`, a `$ref` beside `properties`) are closed together, because each
part alone would forbid the properties of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from penstock.core.errors import InvalidRequest

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of names to schemas
_LISTS = ("prefixItems",)
_SINGLE = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "contains")
_CHOICES = ("anyOf", "oneOf")
_ABOUT_PROPERTIES = frozenset(
    {"properties", "patternProperties", "required", "additionalProperties", "unevaluatedProperties"}
)
_SAYS_OTHERWISE = ("additionalProperties", "unevaluatedProperties")


class _Unknown(Exception):
    """The properties of an object cannot be listed: a part allows others, or a reference leads out of the schema."""


def closed(schema: Any) -> Any:
    """Return a copy of the schema with closed objects. Raises InvalidRequest for a schema that is nested too
    deeply."""
    try:
        return _Closer(schema).closed_root()
    except RecursionError:
        raise InvalidRequest("The JSON schema is nested too deeply.") from None


class _Names:
    """The properties that the parts of one object define, in the order of the schema."""

    def __init__(self) -> None:
        self.properties: dict[str, Any] = {}
        self.patterns: dict[str, Any] = {}
        self.required: dict[str, Any] = {}
        self.lists_properties = False

    def add(self, part: _Names) -> _Names:
        self.properties |= part.properties
        self.patterns |= part.patterns
        self.required |= part.required
        self.lists_properties |= part.lists_properties
        return self


class _Closer:
    """`_own` closes a whole object; `_open` leaves a part of an object open. Both close the objects inside."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names_of: dict[str, _Names | None] = {}  # of the targets of references; None: unknown
        self._open_names: dict[str, str] = {}  # references → definitions of their open form
        self._open_definitions: dict[str, Any] = {}

    def closed_root(self) -> Any:
        schema = self._own(self._root)
        if self._open_definitions:
            schema["$defs"] = {**schema.get("$defs", {}), **self._open_definitions}
        return schema

    def _own(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        parts = [keyword for keyword in ("$ref", "allOf", *_CHOICES) if keyword in schema]
        if len(parts) == 1 and not schema.keys() & _ABOUT_PROPERTIES:
            keyword = parts[0]
            branches = schema[keyword]
            if keyword == "$ref":
                return self._inside(schema)  # the target of the reference is closed by itself
            if isinstance(branches, list) and (keyword in _CHOICES or len(branches) == 1):
                return {**self._inside(schema), keyword: [self._own(branch) for branch in branches]}
        try:
            return self._together(schema, parts)
        except _Unknown:
            return {**self._inside(schema), **self._opened_parts(schema)}

    def _together(self, schema: dict[str, Any], parts: list[str]) -> dict[str, Any]:
        """Close an object with all its parts. Each alternative is closed with the properties that all alternatives
        share."""
        choices = [keyword for keyword in parts if keyword in _CHOICES]
        if len(choices) != 1 or not isinstance(schema[choices[0]], list):
            names = self._names(schema)
            return _with_names({**self._inside(schema), **self._opened_parts(schema)}, names)
        keyword = choices[0]
        common = self._names({key: value for key, value in schema.items() if key != keyword})
        body = {**self._inside(schema), **self._opened_parts(schema)}
        body[keyword] = [self._alternative(branch, common) for branch in schema[keyword]]
        return body

    def _alternative(self, branch: Any, common: _Names) -> Any:
        if not isinstance(branch, dict):
            return _with_names({}, common) if branch is True else branch
        try:
            names = _Names().add(common).add(self._names(branch))
        except _Unknown:
            return self._open(branch)
        return _with_names(self._open(branch), names)

    def _open(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        return {**self._inside(schema), **self._opened_parts(schema)}

    def _opened_parts(self, schema: dict[str, Any]) -> dict[str, Any]:
        opened: dict[str, Any] = {}
        for keyword in ("allOf", *_CHOICES):
            if isinstance(schema.get(keyword), list):
                opened[keyword] = [self._open(branch) for branch in schema[keyword]]
        if isinstance(schema.get("$ref"), str):
            opened["$ref"] = self._open_reference(schema["$ref"])
        return opened

    def _open_reference(self, reference: str) -> str:
        """Return a reference to the open form of its target, which becomes a separate definition."""
        if reference not in self._open_names:
            try:
                target = self._target(reference)
            except _Unknown:
                return reference
            taken = self._root.get("$defs", {}) if isinstance(self._root, dict) else {}
            if not isinstance(taken, dict):
                return reference
            name = f"open-{len(self._open_names)}"
            while name in taken:
                name += "-"
            self._open_names[reference] = name
            self._open_definitions[name] = self._open(target)
        return f"#/$defs/{self._open_names[reference]}"

    def _inside(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a copy in which the schemas of properties, items and definitions are closed."""
        copy = dict(schema)
        for keyword in _MAPS:
            if isinstance(schema.get(keyword), dict):
                copy[keyword] = {name: self._own(inner) for name, inner in schema[keyword].items()}
        for keyword in (*_LISTS, *_SINGLE):
            inner = schema.get(keyword)
            if isinstance(inner, list):
                copy[keyword] = [self._own(each) for each in inner]
            elif isinstance(inner, dict):
                copy[keyword] = self._own(inner)
        return copy

    def _names(self, schema: Any) -> _Names:
        """Return the properties of a schema. Raises _Unknown if they cannot be listed."""
        names = _Names()
        if not isinstance(schema, dict):
            return names
        if _says_otherwise(schema):
            raise _Unknown
        if isinstance(schema.get("properties"), dict):
            names.lists_properties = True
            names.properties = dict.fromkeys(schema["properties"], True)
        if isinstance(schema.get("patternProperties"), dict):
            names.patterns = dict.fromkeys(schema["patternProperties"], True)
        if isinstance(schema.get("required"), list):
            names.required = {name: True for name in schema["required"] if isinstance(name, str)}
        for part in _parts(schema):
            names.add(self._names(part))
        if isinstance(schema.get("$ref"), str):
            names.add(self._target_names(schema["$ref"]))
        return names

    def _target_names(self, reference: str) -> _Names:
        if reference not in self._names_of:
            self._names_of[reference] = _Names()  # for a target that refers to itself
            try:
                self._names_of[reference] = self._names(self._target(reference))
            except _Unknown:
                self._names_of[reference] = None
        names = self._names_of[reference]
        if names is None:
            raise _Unknown
        return names

    def _target(self, reference: str) -> Any:
        if not reference.startswith("#") or (len(reference) > 1 and reference[1] != "/"):
            raise _Unknown
        found = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise _Unknown from None
        return found


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    """Return the schemas that describe the same object. Conditional parts count, since their properties may apply."""
    for keyword in ("allOf", *_CHOICES):
        if isinstance(schema.get(keyword), list):
            yield from schema[keyword]
    yield from (schema[keyword] for keyword in ("then", "else") if keyword in schema)
    dependent = schema.get("dependentSchemas")
    if isinstance(dependent, dict):
        yield from dependent.values()


def _says_otherwise(schema: dict[str, Any]) -> bool:
    return any(keyword in schema for keyword in _SAYS_OTHERWISE)


def _with_names(body: dict[str, Any], names: _Names) -> dict[str, Any]:
    """Close `body` for all but `names`. A required property that no part describes may have any value."""
    if not names.lists_properties or not isinstance(body.get("properties", {}), dict):
        return body
    properties = names.properties | names.required | body.get("properties", {})
    closed_body = {**body, "properties": properties, "additionalProperties": False}
    if names.patterns:
        closed_body["patternProperties"] = names.patterns | body.get("patternProperties", {})
    return closed_body
