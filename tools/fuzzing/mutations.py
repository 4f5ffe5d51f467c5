"""Changes of a valid file: by its structure, and by its bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Mutation = Callable[[random.Random, bytes], bytes]

_NUMBERS = (
    0,
    -1,
    1,
    2,
    7,
    10**9,
    2**31,
    2**63,
    2**64,
    10**30,
    -(2**63),
    0.5,
    1e308,
    -0.0,
    1e-320,
    float("nan"),
    float("inf"),
)
_TEXTS = (
    "",
    "x",
    "../../etc/passwd",
    "/dev/zero",
    "a/b",
    ".",
    "\0",
    "\x1b[2J\u202e\u2028\n\r",
    "\ud800",
    "F32",
    "None",
    "x" * 20_000,
)
_OTHERS = (None, True, False, [], {}, [[]], [None], {"": {}}, [1] * 5000, {str(n): n for n in range(2000)})


def _value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(_NUMBERS)
    return rng.choice(_TEXTS) if kind < 0.7 else rng.choice(_OTHERS)


def change_json(rng: random.Random, content: bytes) -> bytes:
    """Change one to three places of a JSON document."""
    document = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        document = _changed(rng, document)
    text = json.dumps(document)
    if rng.random() < 0.1 and isinstance(document, dict) and document:  # a key twice
        name = rng.choice(list(document))
        text = f"{{{json.dumps(name)}: {json.dumps(_value(rng))}, {text[1:]}"
    return text.encode("utf-8", "surrogatepass")


def _changed(rng: random.Random, node: Any) -> Any:
    if isinstance(node, dict) and node and rng.random() < 0.9:
        node, name = dict(node), rng.choice(list(node))
        way = rng.random()
        if way < 0.12:
            del node[name]
        elif way < 0.2:
            node[rng.choice(_TEXTS)] = _value(rng)
        elif way < 0.25:
            node[rng.choice(_TEXTS)] = node.pop(name)
        else:
            node[name] = _changed(rng, node[name])
        return node
    if isinstance(node, list) and node and rng.random() < 0.8:
        node, place = list(node), rng.randrange(len(node))
        way = rng.random()
        if way < 0.2:
            del node[place]
        elif way < 0.4:
            node.insert(place, node[place] if rng.random() < 0.5 else _value(rng))
        else:
            node[place] = _changed(rng, node[place])
        return node
    if isinstance(node, int) and not isinstance(node, bool) and rng.random() < 0.4:
        return node + rng.choice((-1, 1, -node, node, 8, 10**6))
    return _value(rng)


def nest(rng: random.Random, content: bytes) -> bytes:
    """Nest a JSON value in so many brackets that recursive parsers give up, or insert a number of many digits."""
    deep = rng.choice((b"[" * 50_000, b'{"a":' * 50_000, b"9" * 5000, b"1e99999", b"[" * 3000 + b"]" * 3000))
    places = [place for place, byte in enumerate(content) if byte in b":[,"]
    place = rng.choice(places) + 1 if places else 0
    return content[:place] + deep + content[place:]


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip, cut, insert and repeat bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        way = rng.randrange(5)
        if way == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif way == 1:
            del data[place:]
        elif way == 2:
            data[place:place] = rng.choice(
                (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[2J", rng.randbytes(8), b"]}", b'"')
            )
        elif way == 3:
            data[place:place] = data[place : place + rng.randrange(64)]
        else:
            del data[place : place + rng.randrange(64)]
    return bytes(data)


def change_lines(rng: random.Random, content: bytes) -> bytes:
    """Change the values of a TOML file, double its lines, put others in."""
    values = [
        "0",
        "-1",
        "1e400",
        "nan",
        '""',
        '"\\u0000\\u001b[2J"',
        "true",
        "[]",
        "{}",
        "[[1]]",
        "1979-05-27",
        "9" * 5000,
    ]
    values += [
        "9223372036854775808",
        "[" * 5000,
        "{a=" * 3000,
        "'''\n\n'''",
        '"../x"',
        "'0.0.0.0'",
        "0x7fffffffffffffff",
        "2",
        "1000000007",
        "1e300",
    ]
    keys = [
        "run.seed",
        "base",
        "model.path",
        "parallel.tp_size",
        "[run]",
        "[[data]]",
        "x.y.z",
        '"\\u202e"',
        "algorithm.loss",
    ]
    lines = content.decode().splitlines()
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(lines))
        key, equals, _ = lines[place].partition("=")
        way = rng.random()
        if way < 0.6 and equals:
            lines[place] = f"{key}= {rng.choice(values)}"
        elif way < 0.8:
            lines.insert(place, f"{rng.choice(keys)} = {rng.choice(values)}")
        elif way < 0.9:
            lines.insert(rng.randrange(len(lines)), lines[place])
        else:
            del lines[place]
    return "\n".join(lines).encode()


def change_header(rng: random.Random, content: bytes) -> bytes:
    """Change the JSON header of a safetensors file, or its length."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if rng.random() < 0.15:
        wrong = rng.choice((0, 1, length - 1, length + 1, 100_000_001, 2**63, 2**64 - 1))
        return wrong.to_bytes(8, "little") + header + data
    if rng.random() < 0.2:
        changed = json.loads(header)
        name = rng.choice(list(changed))
        shape = rng.choice(([1] * 100_000, [2**62, 4], [0] * 70, [2**31] * 3, [-1], [True], "12", [1.0]))
        changed[name] = {**changed[name], "shape": shape}
        header = json.dumps(changed).encode()
    else:
        header = rng.choice((change_json, change_json, nest))(rng, header)
    return len(header).to_bytes(8, "little") + header + data


def change_a_line(change: Mutation) -> Mutation:
    """Return a mutation of one line of a JSON-lines file."""

    def changed(rng: random.Random, content: bytes) -> bytes:
        lines = content.splitlines()
        place = rng.randrange(len(lines))
        lines[place] = change(rng, lines[place])
        return b"\n".join(lines) + b"\n"

    return changed


OF_JSON = (change_json, change_json, change_json, nest, change_bytes)
