"""Makes data files from text: the command line and the bytes of Megatron-LM's preprocess_data.py."""
