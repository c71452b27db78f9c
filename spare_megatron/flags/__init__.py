"""Megatron's command line: its tables, parsing, refusals and validation.

May import ``config`` and, where a flag asks for it, ``megatron_adapter``'s tables; neither torch nor megatron is
loaded to refuse a bad flag. Promises: a flag does what it does in Megatron, or says that it changes nothing, or is
refused.
"""
