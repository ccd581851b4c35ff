"""Command lines, files, objects by name, random numbers, checks for NaN, words about numbers."""
