"""A TOML-driven trainer for Llama 3 with packed sequences that never leak between documents."""

__version__ = "0.1.0"
