"""Decisions of a job as pure functions: events in; state, actions and a reason out."""
