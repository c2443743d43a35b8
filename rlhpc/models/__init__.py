"""Shapes, layouts and weight files of Hugging Face models, without torch."""
