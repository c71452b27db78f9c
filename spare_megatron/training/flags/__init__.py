"""The command line: what flags there are, which are refused and why, and what their values turn into."""
