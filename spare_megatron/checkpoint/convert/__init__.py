"""Converts checkpoints between the formats of Hugging Face, megatron-core (torch_dist) and Megatron (mp_rank files).

Every format has a :class:`~.model.TensorSource`, which reads logical tensors (with megatron-core's names, not split
over ranks), and a writer, which asks a source for one tensor after the other. So a conversion never has more than one
layer's tensors in memory, whatever the size of the model. It needs torch, but no GPU and no transformers.
"""
