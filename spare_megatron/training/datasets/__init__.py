"""Stands for ``megatron.training.datasets``: scripts import its kinds of data before a flag has chosen one."""
