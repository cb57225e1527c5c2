"""Parameters that are used more than once: by a module that is called several times, or by several modules.

A use waits until all of its kind have arrived, as many as the forward pass has counted; then their positions are joined
as if they were positions of one example. Where no rule can do so, or where waiting takes more memory than the gradients
themselves, the gradients of each use are formed when it arrives, and added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from lmdp.gradients import embedding, linear, tied
from lmdp.gradients.contract import Owner, Piece, Sizes, Use
from lmdp.gradients.rows import Rows, Stored, added

Join = Callable[[Sequence[Use]], Piece]


@dataclass(frozen=True, eq=False)
class Target:
    """Parameters whose gradients are held together: those of one module, or one that several modules share.

    names  of every module that uses them: relative to the module → in the model
    join   from all uses to a piece, if a rule can
    """

    names: Mapping[Owner, dict[str, str]]
    join: Join | None

    @property
    def owner(self) -> Owner:
        return next(iter(self.names))

    def part_of(self, use: Use, owner: Owner) -> Use:
        """Of these parameters alone."""
        mine = self.names[owner]
        return use if len(mine) == len(use.trainable) else replace(use, trainable=frozenset(mine))

    def can_wait(self, use: Use, owner: Owner, expected: int) -> bool:
        """Whether a use is kept as it is until as many have arrived: if all of them are less than the gradients."""
        if self.join is None:
            return False
        sizes = self._sizes(use, owner)
        if sizes is None:
            return True
        joint = replace(sizes, positions=expected * sizes.positions, factors=expected * sizes.factors)
        return joint.factors < joint.weights or (self.join is not tied.join and use.prefers_gram(joint))

    def _sizes(self, use: Use, owner: Owner) -> Sizes | None:
        if self.join is tied.join or "weight" not in use.trainable:
            return None
        return None if owner.rule.sizes is None else owner.rule.sizes(use)

    @property
    def planned(self) -> tuple[str | None, str]:
        """How the gradients of all uses are held, if that is not left to the rule, and why."""
        if self.join is None:
            return "formed", "used more than once: the gradients of all uses are added"
        if self.join is tied.join:
            return "gram", "an embedding and a linear layer share it: the positions of all uses are joined"
        return None, "used more than once: the positions of all uses are joined"


def targets_of(names: Mapping[Owner, dict[str, str]]) -> dict[Owner, tuple[Target, ...]]:
    """Of every module: a target of its own, and one for each parameter that it shares with others."""
    users = Counter(name for of_owner in names.values() for name in of_owner.values())
    shared: dict[str, dict[Owner, dict[str, str]]] = {}
    for owner, of_owner in names.items():
        for relative, name in of_owner.items():
            if users[name] > 1:
                shared.setdefault(name, {})[owner] = {relative: name}
    ties = {name: Target(of_name, _join_of(of_name)) for name, of_name in shared.items()}
    targets: dict[Owner, tuple[Target, ...]] = {}
    for owner, of_owner in names.items():
        rest = {relative: name for relative, name in of_owner.items() if name not in ties}
        alone = (Target({owner: rest}, owner.rule.join),) if rest else ()
        targets[owner] = (*alone, *(ties[name] for name in of_owner.values() if name in ties))
    return targets


def _join_of(names: Mapping[Owner, dict[str, str]]) -> Join | None:
    rules = {owner.rule.name for owner in names}
    if len({relative for each in names.values() for relative in each}) > 1:
        return None
    if rules == {linear.RULE.name, embedding.RULE.name}:
        return tied.join
    return next(iter(names)).rule.join if len(rules) == 1 else None


@dataclass
class Waiting:
    """What has arrived of a target: uses as they are, with the versions of what they keep, or gradients, added."""

    uses: list[tuple[Owner, Use, list[int]]] = field(default_factory=list)
    rows: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    def keep(self, owner: Owner, use: Use) -> None:
        """Only what a rule needs, and copied where others could write to it."""
        given = use.input.clone() if use.is_data else use.input
        use = replace(use, input=given, is_data=False, args=(), kwargs={}, outputs=(), output_grads=())
        self.uses.append((owner, use, versions(given, use.output_grad)))

    def add(self, piece: Piece, names: Mapping[str, str]) -> None:
        """Gradients of the parameters among these names."""
        rows = {names[name]: value for name, value in piece.per_example().items() if name in names}
        self.rows = added([self.rows, rows]) if self.rows else {name: value.clone() for name, value in rows.items()}

    def changed(self) -> Owner | None:
        """The module of a use that was written to since it arrived."""
        uses = ((owner, before != versions(use.input, use.output_grad)) for owner, use, before in self.uses)
        return next((owner for owner, differs in uses if differs), None)

    def piece(self, target: Target) -> tuple[Piece, dict[str, str]]:
        """Of all that has arrived, and the names of its parameters."""
        if target.join is not None and not self.rows:
            return target.join([use for _, use, _ in self.uses]), target.names[target.owner]
        for owner, use, _ in self.uses:
            self.add(owner.rule.piece(use), target.names[owner])
        return Stored({name: Rows.of(rows) for name, rows in self.rows.items()}), {name: name for name in self.rows}


def versions(*tensors: Tensor) -> list[int]:
    """How often each was written to, as torch counts."""
    return [tensor._version for tensor in tensors]
