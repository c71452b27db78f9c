"""The coordinator process: it runs the protocol machine, writes its journal and watches the groups.

It carries out what the machine decides and decides nothing itself. Several candidates may share a run directory; one of
them is active at a time (``election``, ``terms``). May import ``control_plane``, ``metrics``, ``planning`` and lower
layers. Promises: it sends no message that does not follow from a record in the journal.
"""
