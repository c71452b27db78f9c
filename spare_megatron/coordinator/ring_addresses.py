"""Where the ranks of each group listen for the replica rings, and where they serve state to learners: from the groups'
Hellos.

Not in the journal: a coordinator that takes over receives them again, with the first Hello of each group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from spare_megatron.config.host_port import split_address
from spare_megatron.control_plane.addresses import same_address, unreachable
from spare_megatron.protocol.messages import Hello

Incarnation = tuple[int, int]
"""(group, incarnation)."""


class RingAddresses:
    """The addresses of all groups that have sent Hello to this coordinator."""

    def __init__(self) -> None:
        self._addresses: dict[Incarnation, tuple[str, ...]] = {}
        self._incarnations: dict[int, int] = {}
        """Group -> the newest incarnation that is known."""
        self._serving_at: dict[Incarnation, tuple[str, ...]] = {}
        self._owners: dict[str, int] = {}
        """Address -> the group that said it last. Which rank it is is looked up where one needs it: a large job has a
        million."""

    def learn(self, group: int, incarnation: int, addresses: Sequence[str], serving_at: Sequence[str]) -> None:
        """Take what a group reported, by position: where its ranks listen for the rings, and where they serve state;
        what an older incarnation said is forgotten."""
        known = self._incarnations.get(group, incarnation)
        if known > incarnation:
            return
        for address in self._addresses.pop((group, known), ()):
            if self._owners.get(address) == group:
                del self._owners[address]
        self._serving_at.pop((group, known), None)
        self._incarnations[group] = incarnation
        self._serving_at[group, incarnation] = tuple(serving_at)
        self._addresses[group, incarnation] = tuple(addresses)
        self._owners.update(dict.fromkeys(addresses, group))

    def of(self, member: Incarnation) -> tuple[str, ...] | None:
        """The addresses of a group's ranks, by position; None where it has not said them."""
        return self._addresses.get(member)

    def serving_at(self, member: Incarnation) -> tuple[str, ...] | None:
        """Where a group's ranks serve state to learners, by position; None where it has not said so."""
        return self._serving_at.get(member)

    def groups_at(self, hosts: Collection[str], present: Mapping[int, int]) -> list[int]:
        """The groups of ``present`` (group -> incarnation) that have a rank at one of the ``hosts``, which are names or
        numbers as the ranks reported them."""
        return sorted(
            group
            for group, incarnation in present.items()
            if any(split_address(one)[0] in hosts for one in self._addresses.get((group, incarnation), ()) if one)
        )

    async def refusal(self, hello: Hello, addresses: Sequence[str], is_there: Callable[[int, int], bool]) -> str:
        """Why the other groups could not reach a group that comes for the first time; empty where they can, or where it
        has been in a view. ``is_there`` says whether an incarnation is a member or waits to be one. What is found of
        other groups still holds at the return: nothing is waited for behind it."""
        if hello.fencing:
            return ""
        far = await unreachable(addresses[0] if addresses else "", f"rank 0 of group {hello.group}")
        for position, address in enumerate(addresses):
            owner = self._owners.get(address) if address else None
            if owner is not None and owner != hello.group and is_there(owner, self._incarnations[owner]):
                taken = self._addresses[owner, self._incarnations[owner]].index(address)
                taken_by = f"rank {taken} of group {owner}"
                return same_address(address, f"rank {position} of group {hello.group}", taken_by)
        return far
