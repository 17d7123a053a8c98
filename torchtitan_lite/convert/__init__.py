"""Weights in the formats of others: Hugging Face safetensors, Meta's consolidated files, and checkpoints of a run.

Each format is opened as :class:`~torchtitan_lite.convert.weights.StoredWeights`, tensors under this project's names
that are read when they are asked for, and written from it. So every format converts to every other, and nothing larger
than one output file has to fit into memory.
"""
