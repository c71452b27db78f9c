"""Durable state: how checkpoint directories are named, published, found and judged."""
