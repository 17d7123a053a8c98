"""Text from a model: keys and values are kept between tokens, prompts of different length share a batch."""
