"""The decisions of a job as pure functions: from a state and an event to the next state, actions and a reason."""
