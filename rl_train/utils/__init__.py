"""Random numbers, files, hub downloads and checks for non-finite outputs."""
