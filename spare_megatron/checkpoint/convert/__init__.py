"""Checkpoints from one format to another: Hugging Face's, megatron-core's torch_dist, Megatron's mp_rank files.

Every format is a :class:`~.model.Source` of logical tensors (megatron-core's names, whole, unsplit) and a writer that
asks a source for one tensor after the other. So a conversion holds one layer's tensors at most, whatever the model's
size. Needs torch, and neither CUDA nor megatron-core nor transformers.
"""
