"""Fresh random JSON schemas and regexes whose texts are short, whatever model writes them."""

from __future__ import annotations

import json
import random
import re
import string
from typing import Any

Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Of what llguidance supports; a part may stand in `$defs` and be referred to."""
    definitions = {name: _part(rng, 0, ()) for name in ("one", "two")}
    schema = _part(rng, depth, tuple(definitions))
    return schema if "$ref" not in str(schema) else {**schema, "$defs": definitions}


def in_ascii(schema: Schema) -> Schema:
    """For a vocabulary that has nothing else."""
    changed: Schema = json.loads(re.sub(r"\\u[0-9a-f]{4}", "z", json.dumps(schema)))
    return changed


def _part(rng: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    if names and rng.random() < 0.15 and depth < 2:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    if depth == 0:
        return rng.choice((_text, _whole, _fixed, _listed))(rng)
    inner = [_part(rng, depth - 1, names) for _ in range(rng.randint(1, 3))]
    match rng.choice(("object", "object", "array", "anyOf")):
        case "object":
            keys = rng.sample(["a", "b c", 'd"', "name", "ключ", "x\\y"], len(inner))
            required = [key for key in keys if rng.random() < 0.6]
            properties = dict(zip(keys, inner, strict=True))
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            least = rng.randint(0, 2)
            return {"type": "array", "items": inner[0], "minItems": least, "maxItems": least + rng.randint(0, 2)}
        case _:
            return {"anyOf": inner}


def _text(rng: random.Random) -> Schema:
    least = rng.randint(0, 3)
    return rng.choice((
        {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)},
        {"type": "string", "pattern": f"^{random_regex(rng, 1)}$"},
        {"type": "string", "format": rng.choice(("date", "ipv4", "uuid"))},
    ))  # fmt: skip


def _whole(rng: random.Random) -> Schema:
    least = rng.randint(-1000, 1000)
    found: Schema = {"type": "integer", "minimum": least, "maximum": least + rng.randint(30, 5000)}
    return rng.choice((found, {**found, "multipleOf": rng.randint(1, 30)}))


def _fixed(rng: random.Random) -> Schema:
    return {"const": rng.choice((None, True, 17, -2.5, "a\nb", [1, {"k": "é"}], {}))}


def _listed(rng: random.Random) -> Schema:
    return {"enum": rng.sample(["red", "green blue", 3, None, False, [1, 2], {"a": "b"}, "日本"], rng.randint(1, 5))}


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """In the syntax that Python and Rust share."""
    if depth == 0:
        literal = "".join(rng.choices(string.ascii_letters + " _", k=rng.randint(1, 3)))
        return rng.choice((literal, "[a-f]", "[^a-y0-9]", "[0-9]", r"\.", r"\{", "(?:x|yz)"))
    parts = [random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.4:
        return f"(?:{'|'.join(parts)})"
    least = rng.randint(0, 2)
    times = rng.choice(("", "", "?", f"{{{least + 1}}}", f"{{{least},{least + 2}}}"))
    return f"(?:{''.join(parts)}){times}"
