"""A modelled cluster around the real controller: what a policy is worth at a scale that nobody can rent.

``cluster`` says what is simulated, ``failures`` when groups fail, ``job_control`` drives the same
``controller.machine`` as a real run, ``policy_trial`` has what all policies share (time, restarts, checkpoints),
``published_policies`` and ``pieces`` how a step goes under each of them, ``trials`` runs many and adds them up.
docs/simulator.md says what is assumed.
"""
