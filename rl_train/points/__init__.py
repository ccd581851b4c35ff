"""Boxes and points as the answers of a language model: the records and what reads them."""
