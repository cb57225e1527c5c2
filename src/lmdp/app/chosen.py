"""An audit of examples that somebody chose: kept beside the run's own audit, with what it used.

`lmdp audit DIR --members SPEC --nonmembers SPEC` writes audit-NAME.json and audit-NAME.html. NAME follows from the
SPECs and from the content of the examples, so that another choice never takes the place of this one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lmdp.app.runs import Members, RunFolder, write_json
from lmdp.audit.results import AuditReport
from lmdp.data import Examples
from lmdp.data.records import encoded
from lmdp.lineage import dataset_digest

LONGEST = 40
GROUPS = ("members", "nonmembers")


@dataclass(frozen=True)
class Side:
    """Where one group came from (`part` of the data that `spec` names), how many were taken, and a digest of these.

    The digest is that of a set, under the key of the run (or, of a run that kept none, of this machine): it tells
    whether two audits had the same examples, and nothing to who has not the key.
    """

    spec: str
    part: str
    taken: int
    of: int
    digest: str

    @classmethod
    def of_images(cls, spec: str, part: str, taken: Examples, whole: Examples, folder: RunFolder) -> Side:
        members = Members.read(folder)
        if members is None:
            digest = dataset_digest(taken)
        else:
            each = "".join(sorted(taken.digests(members.key)))
            digest = hashlib.blake2b(each.encode(), digest_size=16, key=members.key).hexdigest()
        return cls(spec, part, len(taken), len(whole), digest)

    def __str__(self) -> str:
        share = f"{self.taken}" if self.taken == self.of else f"{self.taken} of {self.of}"
        return f"{share} examples of {self.spec} ({self.part} part, digest {self.digest[:12] or 'unknown'})"


def keep(
    report: AuditReport,
    folder: RunFolder,
    data: str,
    specs: Sequence[str | None],
    taken: Sequence[Examples],
    given: Sequence[Examples],
    others: str,
) -> tuple[AuditReport, Path]:
    """Write the audit under a name of its own; the report, which now says what it used, and its page.

    `specs`, `taken`, `given` are of members and non-members; without a SPEC they are those of the run's own `data`, of
    which `others` is the part that non-members are from.
    """
    used = {
        name: Side.of_images(spec or data, "train" if spec else part, images, whole, folder)
        for name, part, spec, images, whole in zip(GROUPS, ("train", others), specs, taken, given)
    }
    said = f"Chosen for this audit: members, {used['members']}; non-members, {used['nonmembers']}"
    report = replace(report, notes=(*report.notes, f"{said}. The run's own audit is as it was."))
    digest = hashlib.blake2b(str(encoded(used)).encode(), digest_size=4).hexdigest()
    page = folder / f"audit-{_words([spec for spec in specs if spec])}-{digest}.html"
    write_json(page.with_suffix(".json"), {**report.to_dict(), "used": encoded(used)})
    report.to_html(page)
    return report, page


def _words(specs: list[str]) -> str:
    """The names of data, without folders, options and what is not a letter or a digit."""
    names = [Path(spec.partition("?")[0].partition(":")[2] or spec.partition("?")[0]).stem for spec in specs]
    return re.sub(r"[^A-Za-z0-9]+", "-", "-".join(names)).strip("-")[:LONGEST].strip("-").lower() or "chosen"
