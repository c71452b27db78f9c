"""Simulates a job on a modelled cluster, with the protocol machine that decides in real jobs.

``cluster`` has the figures of the cluster and the policy, ``failures`` the times at which groups fail. ``job_control``
feeds events into ``protocol.machine``. ``policy_trial`` has what all policies share (time, restarts, checkpoints);
``published_policies`` and ``pieces`` run the steps of each policy. ``trials`` runs many trials and takes their means.
docs/simulator.md states the assumptions.
"""
