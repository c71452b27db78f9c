"""The page of spare-page: runs as a browser shows them while they go on, and as Prometheus collects them.

May assume: run directories that jobs write, or have written. Promises: it answers GET alone and changes nothing, so no
job can notice who looks, how often, or that the page was killed. A directory has one reader, however many look.
"""
