"""The process that decides: the controller's machine with a journal before it and a failure detector beside it.

It carries out what the machine decides and decides nothing itself. Several candidates may share a run directory; one
holds office at a time (``election``, ``terms``). May import ``control``, ``observe``, ``tuner`` and what is below;
of the collectives only the store that it hosts. Promises: nothing is said that is not in the journal.
"""
