"""Names, publishes, finds and verifies checkpoint directories; ``convert`` turns one format into another."""
