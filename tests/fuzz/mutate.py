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


def by_bytes(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 64]))
        elif kind == 3:
            del data[at : at + rng.choice([1, 4, 64, 1024])]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            size = rng.choice([2, 4, 8])
            data[at : at + size] = rng.choice([0, 1, 2**15, 2**16 - 1]).to_bytes(size, rng.choice(["little", "big"]))
        elif kind == 6:
            begin = rng.randrange(len(data) + 1)
            data[at:at] = data[begin : begin + rng.choice([4, 32, 256])]
        else:
            data[at : at + 8] = b"\xff" * 8
    return bytes(data)


def any_value(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        nested: Any = 1
        for _ in range(rng.choice([3, 50, 100])):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    return rng.choice(VALUES)


def change(rng: random.Random, content: Any) -> Any:
    """The same value with one part of it changed, removed, doubled or renamed."""
    if isinstance(content, dict) and content and rng.random() < 0.85:
        key, kind = rng.choice(list(content)), rng.randrange(8)
        if kind == 0:
            return {k: v for k, v in content.items() if k != key}
        if kind == 1:
            return {**content, str(any_value(rng))[:50]: any_value(rng)}
        if kind == 2:
            return {(k + "_" if k == key else k): v for k, v in content.items()}
        return {**content, key: change(rng, content[key])}
    if isinstance(content, list) and content and rng.random() < 0.85:
        at, kind = rng.randrange(len(content)), rng.randrange(8)
        if kind == 0:
            return content[:at] + content[at + 1 :]
        if kind == 1:
            return content[:at] + [content[at]] * rng.choice([2, 30]) + content[at:]
        return [*content[:at], change(rng, content[at]), *content[at + 1 :]]
    if isinstance(content, int | float) and abs(content) < 1e300 and rng.random() < 0.5:
        return rng.choice([-content, content + 1, content * 3, content * 0.5, *NUMBERS])
    return any_value(rng)


def by_json(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.2:
        return by_bytes(rng, raw)
    if rng.random() < 0.02:
        return b"[" * 100_000
    content = json.loads(raw)
    for _ in range(rng.choice([1, 1, 2, 5])):
        content = change(rng, content)
    return _dumped(content)


def by_json_lines(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.2:
        return by_bytes(rng, raw)
    lines = raw.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = by_json(rng, lines[at])
    if rng.random() < 0.2:
        rng.shuffle(lines)
    return b"\n".join(lines)


def _dumped(content: Any) -> bytes:
    return json.dumps(content).encode("utf-8", "surrogatepass")


def by_toml(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.2:
        return by_bytes(rng, raw)
    lines = raw.decode().splitlines()
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(lines)) if lines else 0
        kind = rng.randrange(8)
        if kind == 0:
            lines.insert(at, rng.choice(["[table]", "x.y = 1", "a = " + "[" * 2000, "# é", "=", *lines[:1]]))
        elif kind == 1 and lines:
            del lines[at]
        elif lines:
            lines[at] = lines[at].split("=")[0] + "= " + rng.choice(LITERALS)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def in_gzip(inner: Mutate) -> Mutate:
    def mutate(rng: random.Random, raw: bytes) -> bytes:
        if rng.random() < 0.3:
            return by_bytes(rng, raw)
        return gzip.compress(inner(rng, gzip.decompress(raw)), 1)

    return mutate


def in_zip(inner: Mutate) -> Mutate:
    """One member changed, with the archive whole; or renamed, doubled, compressed another way."""

    def mutate(rng: random.Random, raw: bytes) -> bytes:
        if rng.random() < 0.25:
            return by_bytes(rng, raw)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
        at = rng.randrange(len(members))
        name, data = members[at]
        members[at] = (by_name(rng, name) if rng.random() < 0.1 else name, inner(rng, data))
        out = io.BytesIO()
        method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
        with zipfile.ZipFile(out, "w", method) as archive:
            for name, data in members:
                archive.writestr(name or "x", data)
        return out.getvalue()

    return mutate


def by_name(rng: random.Random, name: str) -> str:
    return rng.choice([name + "x", "../" + name, name[1:], "/" + name, name.replace(".npy", "")])


def by_npy(rng: random.Random, raw: bytes) -> bytes:
    """The header of an array, with its length kept true; or any bytes."""
    if rng.random() < 0.4:
        return by_bytes(rng, raw)
    header = raw[10 : 10 + int.from_bytes(raw[8:10], "little")].decode("latin1").rstrip()
    old = rng.choice(["'<i8'", "'|u1'", "'<f8'", "False", "(", ",)", "'shape'", "'descr'", "}", "3", "0", "1", "2"])
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
    header = header.replace(old, rng.choice(new), 1) + "\n"
    body = header.encode("latin1")
    return raw[:8] + len(body).to_bytes(2, "little") + body + raw[10 + int.from_bytes(raw[8:10], "little") :]


def in_tar(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.5:
        return in_gzip(by_bytes)(rng, raw)
    out, at = io.BytesIO(), rng.randrange(8)
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive, tarfile.open(fileobj=out, mode="w:gz") as other:
        for number, member in enumerate(archive.getmembers()):
            file = archive.extractfile(member)
            data = file.read() if file else b""
            if number == at % len(archive.getmembers()):
                data = by_bytes(rng, data[:200]) + data[200:]
                member.type = rng.choice([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE])
                member.name = by_name(rng, member.name) if rng.random() < 0.2 else member.name
            member.size = len(data) if member.isreg() else 0
            other.addfile(member, io.BytesIO(data))
    return out.getvalue()


def by_safetensors(rng: random.Random, raw: bytes) -> bytes:
    """The JSON header, with its length kept true; or any bytes."""
    if rng.random() < 0.4:
        return by_bytes(rng, raw)
    length = int.from_bytes(raw[:8], "little")
    header = by_json(rng, raw[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]
