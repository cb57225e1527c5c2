"""Valid files made wrong: by bytes, by JSON values, by TOML lines, and inside of archives, with `random.Random`."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

Mutate = Callable[[random.Random, bytes], bytes]

NUMBERS = [0, 1, -1, 2, 3, 255, 2**31, 2**32 - 1, 2**53, 2**63, 2**64, 10**30, -(2**63), 1e308, 5e-324, -0.0]
VALUES: list[Any] = [
    *NUMBERS, None, True, False, "", "inf", "nan", "x", "é\u0000\ud800", "<script>", "../../x", "a" * 5000, [], {},
    [[]], [0, 1], [1, 0], [None], {"a": 1}, float("nan"), float("inf"), float("-inf"), [[0.1], [0.2]], [[], []],
    10**400,
]  # fmt: skip
LITERALS = [
    "0", "-1", "1e400", "nan", "inf", "true", "[]", "{}", '""', '"sgd"', '"lm-optimal"', '"\\u0000"', "1979-05-27",
    "0x7f",     "9223372036854775808", "'''", '"""', "[[", "1.0", '"public"', "1_000", "2", "{a=1}", '"\ud83d"',
    "'" + "é" * 300 + "'",
]  # fmt: skip


def by_bytes(chance: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        elif kind == 2:
            data[at:at] = chance.randbytes(chance.choice([1, 4, 64]))
        elif kind == 3:
            del data[at : at + chance.choice([1, 4, 64, 1024])]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            size = chance.choice([2, 4, 8])
            data[at : at + size] = chance.choice([0, 1, 2**15, 2**16 - 1]).to_bytes(
                size, chance.choice(["little", "big"])
            )
        elif kind == 6:
            begin = chance.randrange(len(data) + 1)
            data[at:at] = data[begin : begin + chance.choice([4, 32, 256])]
        else:
            data[at : at + 8] = b"\xff" * 8
    return bytes(data)


def some_value(chance: random.Random) -> Any:
    if chance.random() < 0.1:
        nested: Any = 1
        for _ in range(chance.choice([3, 50, 100])):
            nested = [nested] if chance.random() < 0.5 else {"a": nested}
        return nested
    return chance.choice(VALUES)


def change(chance: random.Random, content: Any) -> Any:
    """The same value with one part of it changed, removed, doubled or renamed."""
    if isinstance(content, dict) and content and chance.random() < 0.85:
        key, kind = chance.choice(list(content)), chance.randrange(8)
        if kind == 0:
            return {k: v for k, v in content.items() if k != key}
        if kind == 1:
            return {**content, str(some_value(chance))[:50]: some_value(chance)}
        if kind == 2:
            return {(k + "_" if k == key else k): v for k, v in content.items()}
        return {**content, key: change(chance, content[key])}
    if isinstance(content, list) and content and chance.random() < 0.85:
        at, kind = chance.randrange(len(content)), chance.randrange(8)
        if kind == 0:
            return content[:at] + content[at + 1 :]
        if kind == 1:
            return content[:at] + [content[at]] * chance.choice([2, 30]) + content[at:]
        return [*content[:at], change(chance, content[at]), *content[at + 1 :]]
    if isinstance(content, int | float) and abs(content) < 1e300 and chance.random() < 0.5:
        return chance.choice([-content, content + 1, content * 3, content * 0.5, *NUMBERS])
    return some_value(chance)


def by_json(chance: random.Random, raw: bytes) -> bytes:
    if chance.random() < 0.2:
        return by_bytes(chance, raw)
    if chance.random() < 0.02:
        return b"[" * 100_000
    content = json.loads(raw)
    for _ in range(chance.choice([1, 1, 2, 5])):
        content = change(chance, content)
    return _dumped(content)


def by_json_lines(chance: random.Random, raw: bytes) -> bytes:
    if chance.random() < 0.2:
        return by_bytes(chance, raw)
    lines = raw.splitlines()
    at = chance.randrange(len(lines))
    lines[at] = by_json(chance, lines[at])
    if chance.random() < 0.2:
        chance.shuffle(lines)
    return b"\n".join(lines)


def _dumped(content: Any) -> bytes:
    return json.dumps(content).encode("utf-8", "surrogatepass")


def by_toml(chance: random.Random, raw: bytes) -> bytes:
    if chance.random() < 0.2:
        return by_bytes(chance, raw)
    lines = raw.decode().splitlines()
    for _ in range(chance.choice([1, 1, 2, 4])):
        at = chance.randrange(len(lines)) if lines else 0
        kind = chance.randrange(8)
        if kind == 0:
            lines.insert(at, chance.choice(["[table]", "x.y = 1", "a = " + "[" * 2000, "# é", "=", *lines[:1]]))
        elif kind == 1 and lines:
            del lines[at]
        elif lines:
            lines[at] = lines[at].split("=")[0] + "= " + chance.choice(LITERALS)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def in_gzip(inner: Mutate) -> Mutate:
    def mutate(chance: random.Random, raw: bytes) -> bytes:
        if chance.random() < 0.3:
            return by_bytes(chance, raw)
        return gzip.compress(inner(chance, gzip.decompress(raw)), 1)

    return mutate


def in_zip(inner: Mutate) -> Mutate:
    """One member changed, with the archive whole; or renamed, doubled, compressed another way."""

    def mutate(chance: random.Random, raw: bytes) -> bytes:
        if chance.random() < 0.25:
            return by_bytes(chance, raw)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
        at = chance.randrange(len(members))
        name, data = members[at]
        members[at] = (by_name(chance, name) if chance.random() < 0.1 else name, inner(chance, data))
        out = io.BytesIO()
        method = chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
        with zipfile.ZipFile(out, "w", method) as archive:
            for name, data in members:
                archive.writestr(name or "x", data)
        return out.getvalue()

    return mutate


def by_name(chance: random.Random, name: str) -> str:
    return chance.choice([name + "x", "../" + name, name[1:], "/" + name, name.replace(".npy", "")])


def by_npy(chance: random.Random, raw: bytes) -> bytes:
    """The header of an array, with its length kept true; or any bytes."""
    if chance.random() < 0.4:
        return by_bytes(chance, raw)
    header = raw[10 : 10 + int.from_bytes(raw[8:10], "little")].decode("latin1").rstrip()
    old = chance.choice(["'<i8'", "'|u1'", "'<f8'", "False", "(", ",)", "'shape'", "'descr'", "}", "3", "0", "1", "2"])
    new = [
        "'|O'",
        "'<f4'",
        "'>f2'",
        "'<U4'",
        "'|S9'",
        "'<M8'",
        "'V8'",
        "True",
        "(-1,",
        "(9999999999,",
        "(0,",
        "()",
        "",
        "[('a','<i4')]",
    ]
    header = header.replace(old, chance.choice(new), 1) + "\n"
    body = header.encode("latin1")
    return raw[:8] + len(body).to_bytes(2, "little") + body + raw[10 + int.from_bytes(raw[8:10], "little") :]


def in_tar(chance: random.Random, raw: bytes) -> bytes:
    if chance.random() < 0.5:
        return in_gzip(by_bytes)(chance, raw)
    out, at = io.BytesIO(), chance.randrange(8)
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive, tarfile.open(fileobj=out, mode="w:gz") as made:
        for number, member in enumerate(archive.getmembers()):
            file = archive.extractfile(member)
            data = file.read() if file else b""
            if number == at % len(archive.getmembers()):
                data = by_bytes(chance, data[:200]) + data[200:]
                member.type = chance.choice([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE])
                member.name = by_name(chance, member.name) if chance.random() < 0.2 else member.name
            member.size = len(data) if member.isreg() else 0
            made.addfile(member, io.BytesIO(data))
    return out.getvalue()


def by_safetensors(chance: random.Random, raw: bytes) -> bytes:
    """The JSON header, with its length kept true; or any bytes."""
    if chance.random() < 0.4:
        return by_bytes(chance, raw)
    length = int.from_bytes(raw[:8], "little")
    header = by_json(chance, raw[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]
